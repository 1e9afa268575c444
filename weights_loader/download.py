"""Download a model from the hub into the Hugging Face cache: resumable and hash-checked.

Only the files that nanokv reads are fetched. Names, cache layout, tokens and environment variables
(HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS) are
huggingface_hub's. The transfer is not, because its snapshot_download lacks two things. It deletes a
partial file when it fails; here each file is fetched to blobs/<etag>.part with Range requests, so
that the next run continues. And it trusts the server; here a header is checked before it becomes a
path, a body ends at the announced size, the free disk space is checked before the first shard, and
the bytes must have the hash that the hub names (sha256, or git's sha1 for small files). For the
same reasons files are fetched over plain HTTP, not xet.

Small files are hashed again at every resolve, 20 ms for Qwen3's. Weights are hashed again by
`check_hashes`, for `nanokv verify`.
"""

import difflib
import errno
import hashlib
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from . import names
from .installed import PACKAGES
from .names import INDEX, SINGLE, missing_weights, read_weight_map
from .pooling import MODULES, POOLING
from .strict import LIMITS, CheckpointError, UnknownModel, quote, read_object

# Folder of further chat templates. Their names are known; a list would cost a request.
TEMPLATES = "additional_chat_templates"
SMALL = (  # optional files
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    f"{TEMPLATES}/tool_use.jinja",
    f"{TEMPLATES}/rag.jinja",
)
FAMILY = tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B"))
SHORT = {  # short name → repository
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
} | {name.split("/")[1].lower(): name for name in FAMILY}
LOG = logging.getLogger("weights_loader")
WORTH_SAYING = 50_000_000  # bytes; a download of at least this size is announced
KEPT = 1 << 16  # bytes; received data is written in pieces of this size, so a cut loses at most one
RETRIES = 5  # attempts in a row without a new byte
SEARCHED = 1000  # entries of a folder that are searched for a similar name
OFFLINE_HINT = "nanokv chat -m tiny works offline"
MIRROR_HINT = "unset HF_ENDPOINT to ask huggingface.co itself"
COMMIT = re.compile("[0-9a-f]{40}")
ETAG = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # git's sha1 of the file, or its sha256


class Remote(NamedTuple):
    """The hub's metadata of one file, checked."""

    commit: str
    etag: str
    size: int | None  # None: unknown, and the file has a limit in LIMITS


def snapshot(repo: str, revision: str | None, known: tuple[str, ...]) -> Path:
    """The folder with config.json, tokenizer files and weights of `repo` at `revision`.

    A revision is a branch, a tag or a commit. If the hub cannot be reached, a complete cache is
    used; otherwise CheckpointError.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

    revision = _check_revision(revision or "main")
    try:
        folder, missing = _cached(repo, revision)
    except HFValidationError:
        raise _unknown(repo, known) from None
    at_rest = constants.HF_HUB_OFFLINE or COMMIT.fullmatch(revision) or "/" not in repo
    if folder and not missing and at_rest:
        return _intact(folder)
    check_name(repo, known)  # every model today has an owner, so a typo costs no request
    try:
        folder = _fetch(repo, revision)
    except CheckpointError:
        raise
    except Exception as error:  # the client's errors have a dozen bases
        folder, missing = _cached(repo, revision)  # again: the commit may be known only now
        if not folder or missing or isinstance(error, RevisionNotFoundError):
            raise _explain(error, repo, revision, missing, known) from error
    return _intact(folder)


def gguf_file(repo: str, name: str, revision: str | None, known: tuple[str, ...]) -> Path:
    """The path of one GGUF file of a repository in the cache, after a download if necessary."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

    revision = _check_revision(revision or "main")
    try:
        cached = try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(cached, str) and constants.HF_HUB_OFFLINE:
            return Path(cached)
        return _file(repo, name, revision)
    except CheckpointError:
        raise
    except HFValidationError:
        raise _unknown(repo, known) from None
    except Exception as error:
        cached = try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(cached, str) and not isinstance(error, RevisionNotFoundError):
            return Path(cached)
        raise _explain(error, repo, revision, [name], known) from error


def config_file(repo: str, revision: str | None, known: tuple[str, ...]) -> Path:
    """The path of config.json alone. A cached one costs no request."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    revision = _check_revision(revision or "main")
    try:
        cached = try_to_load_from_cache(repo, "config.json", revision=revision)
        if isinstance(cached, str):
            path = Path(cached)
        elif "/" in repo:
            path = _file(repo, "config.json", revision)
        else:
            raise _unknown(repo, known)
        return _intact(path.parent) / path.name
    except CheckpointError:
        raise
    except HFValidationError:
        raise _unknown(repo, known) from None
    except Exception as error:
        raise _explain(error, repo, revision, ["config.json"], known) from error


def _cached(repo: str, revision: str) -> tuple[Path | None, list[str]]:
    """(snapshot folder or None, names of missing files), without a request."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(config, str):
        return None, ["config.json", "the weights"]
    folder = Path(config).parent
    return folder, missing_weights(folder)


def _fetch(repo: str, revision: str) -> Path:
    """Fetch config.json first, the weights last.

    All other files are taken from the commit of config.json.
    """
    folder = _file(repo, "config.json", revision).parent
    commit = folder.name
    if not _cached(repo, commit)[1]:  # weights come last, so with them the folder is complete
        return folder
    _announce(repo, folder)
    for name in SMALL:
        _optional(repo, name, commit)
    if _optional(repo, MODULES, commit):  # of an embedding model
        _optional(repo, POOLING, commit)
    if _optional(repo, SINGLE, commit):
        return folder
    index = _optional(repo, INDEX, commit)
    if index is None:
        raise CheckpointError(
            f"{repo} has neither {SINGLE} nor {INDEX}",
            hint="nanokv reads safetensors only (a pickle, .bin, can run any program); "
            "take a repository that has them",
        )
    shards = sorted(set(read_weight_map(index).values()))
    _check_disk(repo, [shard for shard in shards if not (folder / shard).is_file()], commit)
    for shard in shards:
        _file(repo, shard, commit)
    return folder


def _announce(repo: str, folder: Path) -> None:
    """Log the number of parameters and their memory.

    Raises CheckpointError, before the weights are fetched, if the family is not supported.
    """
    config = read_object(folder / "config.json")
    shapes = names.expected(config)
    if config.get("tie_word_embeddings"):
        del shapes[names.HEAD]
    count = sum(map(math.prod, shapes.values()))
    megabytes = 2 * count / 1e6
    LOG.info(
        "%s: %s parameters, %s MB in memory as bfloat16", repo, f"{count:,}", f"{megabytes:,.0f}"
    )


def _limit(name: str) -> int | None:
    """The largest size of this file that is accepted; None if there is no limit."""
    if name.startswith(TEMPLATES):
        return LIMITS["chat_template.jinja"]
    return LIMITS.get(Path(name).name)


def _optional(repo: str, name: str, commit: str) -> Path | None:
    """The file, or None if the repository does not have it. The cache records its absence."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repo, name, revision=commit)
    if cached is not None and not isinstance(cached, str):  # known to be absent
        return None
    try:
        return _file(repo, name, commit)
    except _no_such_file():
        # The client's marker for an absent file: the next run makes no request.
        marker = _storage(repo) / ".no_exist" / commit / name
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        return None


def _no_such_file() -> type[Exception]:
    """The client's error for a missing file of a repository. Before 1.0 it had another name."""
    from huggingface_hub import errors

    return getattr(errors, "RemoteEntryNotFoundError", errors.EntryNotFoundError)


def _file(repo: str, name: str, revision: str) -> Path:
    """The path of one file in the cache, after a download if necessary.

    A file that is cached for this commit costs no request.
    """
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repo, name, revision=revision)
    if isinstance(cached, str) and Path(cached).parent.name == revision:
        return Path(cached)
    remote = _metadata(repo, name, revision)
    blob = _storage(repo) / "blobs" / remote.etag
    if not blob.exists():
        _fetch_blob(repo, name, remote, blob)
    return _link(repo, name, revision, remote.commit, blob)


def _link(repo: str, name: str, revision: str, commit: str, blob: Path) -> Path:
    """Link snapshots/<commit>/<name> to the blob and write refs/<revision>, in the client's layout.

    hf_hub_download is not used: it would ask the server again, and trust another etag.
    """
    pointer = _storage(repo) / "snapshots" / commit / name
    ref = _storage(repo) / "refs" / revision
    if not pointer.exists():
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.unlink(missing_ok=True)  # a link to a deleted blob
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except FileExistsError:  # another process was faster
            pass
        except OSError:  # Windows without the permission to create symlinks
            os.link(blob, pointer)
    if revision != commit and not (ref.is_file() and ref.read_text() == commit):
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        temporary.write_text(commit)
        os.replace(temporary, ref)
    return pointer


def _fetch_blob(repo: str, name: str, remote: Remote, blob: Path) -> None:
    """Fetch into blob.part, continuing an earlier run; check the hash; move it into place."""
    from huggingface_hub.utils import WeakFileLock

    part = blob.with_name(f"{blob.name}.part")
    # The lock file that the client uses too.
    lock = _storage(repo).parent / ".locks" / _storage(repo).name / f"{blob.name}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    # A second process waits here and then finds the blob.
    with WeakFileLock(lock), open(part, "ab") as file:
        if blob.exists():
            part.unlink()
            return
        most = remote.size
        if most is None:
            most = _limit(name)
        else:
            _prepare(repo, name, most, file)
        assert most is not None  # _metadata refuses a file that has neither size nor limit
        _receive(repo, name, remote, Bounded(file, most, f"{repo}/{name}"))
        file.flush()
        wrong = _wrong_hash(part, remote.etag)
        if wrong:
            size = part.stat().st_size
            part.unlink()  # resuming would keep the damage
            raise CheckpointError(
                f"{repo}/{name}: {size:,} bytes arrived with {wrong}",
                hint="the download was damaged on the way and is deleted: run it again",
            )
        os.replace(part, blob)


def _prepare(repo: str, name: str, size: int, file: BinaryIO) -> None:
    """Check the free disk space for the rest of a file, and announce a large download."""
    if file.tell() > size:
        file.truncate(0)
    rest = size - file.tell()
    _check_free(repo, [(name, rest)])
    if size >= WORTH_SAYING:
        LOG.info("%s/%s: %s MB go into %s", repo, name, f"{rest / 1e6:,.0f}", _storage(repo))


def _receive(repo: str, name: str, remote: Remote, file: "Bounded") -> None:
    """Append the rest of the body to the file. Errors name the number of bytes that arrived."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HTTPError

    try:
        _transfer(hf_hub_url(repo, name, revision=remote.commit), name, remote.size, file)
    except CheckpointError:  # the body is longer than announced, so none of it can be trusted
        Path(file.name).unlink()
        raise
    except (HTTPError, OSError) as error:
        if getattr(error, "response", None) is not None:
            raise
        size = remote.size or 0
        reached = f"download of {repo}/{name} stopped at {file.tell():,} of {size:,} bytes"
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            folder = Path(file.name).parent
            free = shutil.disk_usage(folder).free
            raise CheckpointError(
                f"{reached}: no space left in {folder}, which has {free:,} bytes free",
                hint="make room, or set HF_HOME to a folder on a larger disk; "
                "it continues from there",
            ) from error
        raise CheckpointError(
            f"{reached}: {_reason(error)}",
            hint=f"run it again: it continues from there; {OFFLINE_HINT}",
        ) from error


def _transfer(url: str, name: str, size: int | None, file: "Bounded") -> None:
    """Append the body to the file; if a connection breaks, continue where it broke.

    Raises the client's error, or OSError, after RETRIES attempts in a row without a new byte.
    """
    from huggingface_hub.errors import HTTPError

    failures = 0
    with _progress(name, size, file.tell()) as progress:
        while file.tell() != size:
            start = file.tell()
            try:
                _append(url, file, progress)
                if size is None:
                    return
                if file.tell() < size:
                    raise OSError("the body ended early")
            except (HTTPError, OSError) as error:
                failures = failures + 1 if file.tell() <= start else 0
                if failures == RETRIES or not _is_broken_connection(error):
                    raise
                reached = f"{file.tell():,}"
                LOG.warning("%s: %s; continuing at %s bytes", name, _reason(error), reached)
                time.sleep(1)


def _is_broken_connection(error: Exception) -> bool:
    """Whether there was no answer with an error status and no error of this system (full disk)."""
    answered = getattr(error, "response", None) is not None
    return not answered and getattr(error, "errno", None) is None


def _append(url: str, file: "Bounded", progress: Any) -> None:
    """One request for the rest of the body."""
    start = file.tell()
    with _body(url, start) as (status, pieces):
        if start and status == 200:  # the server ignores Range and sends the whole file
            file.seek(0)
            file.truncate()
            progress.update(-start)
        for piece in pieces:
            file.write(piece)
            progress.update(len(piece))


@contextmanager
def _body(url: str, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
    """(HTTP status, pieces of at most KEPT bytes) of a GET from byte `start` on."""
    from huggingface_hub import constants, utils

    headers = utils.build_hf_headers() | {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    options: dict[str, Any] = {
        "headers": headers,
        "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT,
        "retry_on_exceptions": (),  # _transfer continues
        "retry_on_status_codes": (408, 429),
    }
    stream = getattr(utils, "http_stream_backoff", None)
    if stream is not None:
        with stream("GET", url, **options) as response:
            utils.hf_raise_for_status(response)
            yield response.status_code, response.iter_bytes(KEPT)
    else:  # a client before 1.0: an answer of the requests package
        answer: Any = utils.http_backoff("GET", url, stream=True, **options)
        with answer:
            utils.hf_raise_for_status(answer)
            yield answer.status_code, answer.iter_content(KEPT)


def _progress(name: str, size: int | None, start: int) -> Any:
    """The client's progress bar, which HF_HUB_DISABLE_PROGRESS_BARS hides."""
    from huggingface_hub.utils import tqdm

    forced = os.environ.get("TQDM_POSITION") == "-1"  # without a terminal too
    return tqdm(
        desc=name,
        total=size,
        initial=start,
        unit="B",
        unit_scale=True,
        disable=False if forced else None,
        name="huggingface_hub.http_get",  # as the client names the bar of a file
    )


class Bounded:
    """A file with a limit of bytes: a server that never stops sending would fill the disk."""

    def __init__(self, file: BinaryIO, limit: int, what: str):
        self.file = file
        self.limit = limit
        self.what = what

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        if self.file.tell() + len(data) > self.limit:
            raise CheckpointError(
                f"{self.what}: more bytes arrive than the {self.limit:,} that were announced "
                "or are allowed",
                hint="the server or a proxy sends something else; the received part is deleted",
            )
        return self.file.write(data)


# --- hashes ---------------------------------------------------------------------------------------


def check_hashes(folder: Path, names: list[str] | None = None) -> list[str]:
    """Hash files of a snapshot folder (default: all) and return the names of the checked files.

    A damaged file is removed from the cache, so that the next run fetches it, and raises
    CheckpointError. Only links to a blob that is named after its hash can be checked; for any other
    file the expected hash is unknown.
    """
    if names is None:
        names = sorted(path.name for path in folder.iterdir())
    checked = []
    for name in names:
        pointer = folder / name
        if not pointer.is_symlink() or not pointer.is_file():
            continue
        blob = Path(os.path.realpath(pointer))
        if blob.parent.name != "blobs" or not ETAG.fullmatch(blob.name):
            continue
        wrong = _wrong_hash(blob, blob.name)
        if wrong:
            size = blob.stat().st_size
            blob.unlink()
            pointer.unlink()
            raise CheckpointError(
                f"{pointer}: its {size:,} bytes have {wrong}; it is removed from the cache",
                hint="run it again online to fetch it",
            )
        checked.append(name)
    return checked


def _intact(folder: Path) -> Path:
    """The folder, after hashing its small files: a damaged tokenizer gives no other error."""
    check_hashes(folder, ["config.json", *SMALL, INDEX])
    return folder


def _wrong_hash(path: Path, etag: str) -> str:
    """Both hashes in words if the bytes do not have the etag's hash, else "".

    The etag is a sha256, or git's sha1 of a blob.
    """
    kind = "sha256" if len(etag) == 64 else "git's sha1"
    with open(path, "rb") as file:
        if kind == "sha256":
            digest = hashlib.file_digest(file, "sha256")
        else:
            size = os.fstat(file.fileno()).st_size
            start = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            digest = hashlib.file_digest(file, start.copy)
    found = digest.hexdigest()
    if found == etag:
        return ""
    return f"{kind} {found[:12]}, the hub says {etag[:12]}"


def _check_disk(repo: str, names: list[str], commit: str) -> None:
    """CheckpointError, before the first shard is fetched, unless all of them fit on the disk."""
    _check_free(repo, [(name, _metadata(repo, name, commit).size or 0) for name in names])


def _check_free(repo: str, needed: list[tuple[str, int]]) -> None:
    """CheckpointError unless the disk has room for files of these names and sizes."""
    folder = _storage(repo)
    while not folder.exists():
        folder = folder.parent
    total = sum(size for _, size in needed)
    free = shutil.disk_usage(folder).free
    if total > free:
        first, _ = needed[0]
        more = " ..." if len(needed) > 1 else ""
        raise CheckpointError(
            f"{repo}: {len(needed)} files ({first}{more}) need {total:,} bytes, "
            f"{folder} has {free:,} free",
            hint="make room, or set HF_HOME to a folder on a larger disk",
        )


def _metadata(repo: str, name: str, revision: str) -> Remote:
    """The hub's headers for a file, checked before they become part of a path or a size."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    meta = get_hf_file_metadata(hf_hub_url(repo, name, revision=revision))
    what = f"{repo}/{name}: the server's"
    commit = meta.commit_hash or ""
    if not COMMIT.fullmatch(commit):
        raise CheckpointError(
            f"{what} commit is {quote(meta.commit_hash)}, not 40 hex digits", MIRROR_HINT
        )
    if COMMIT.fullmatch(revision) and commit != revision:
        raise CheckpointError(f"{what} commit is {commit}, {revision} was asked for", MIRROR_HINT)
    etag = meta.etag or ""
    if not ETAG.fullmatch(etag):
        raise CheckpointError(
            f"{what} etag is {quote(meta.etag)}, not a sha256 or git's sha1", MIRROR_HINT
        )
    limit = _limit(name)
    size = meta.size or 0
    if size < 0 or (meta.size is None and limit is None):
        raise CheckpointError(
            f"{what} size is {meta.size}, so the end of the file is unknown", MIRROR_HINT
        )
    if limit is not None and size > limit:
        raise CheckpointError(
            f"{what} size is {size:,} bytes; at most {limit:,} are read of such a file"
        )
    return Remote(commit, etag, meta.size)


def _check_revision(revision: str) -> str:
    """CheckpointError unless the name is safe as a path below refs/."""
    if not re.fullmatch(r"[^\s/\\:\0]+(/[^\s/\\:\0]+)*", revision) or ".." in revision.split("/"):
        raise CheckpointError(
            f"revision {quote(revision)} is not the name of a branch, a tag or a commit"
        )
    return revision


def _storage(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _explain(
    error: Exception, repo: str, revision: str, missing: list[str], known: tuple[str, ...]
) -> CheckpointError:
    """An exception of the hub's client as one line and a hint."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    answer = _explain_answer(error, repo, revision, known)
    if answer is not None:
        return answer
    if isinstance(error, OSError) and error.filename:
        return CheckpointError(
            f"{repo}: {error.filename}: {error.strerror}", "set HF_HOME to a writable folder"
        )
    lacks = f"the cache lacks {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
    if isinstance(error, OfflineModeIsEnabled):
        return CheckpointError(
            f"{repo}: offline (--offline or HF_HUB_OFFLINE) and {lacks} (revision {revision})",
            f"go online to download; {OFFLINE_HINT}",
        )
    return CheckpointError(
        f"{repo}: {constants.ENDPOINT} failed ({_reason(error)}) and {lacks}",
        f"check the network and run it again; {OFFLINE_HINT}",
    )


def _explain_answer(
    error: Exception, repo: str, revision: str, known: tuple[str, ...]
) -> CheckpointError | None:
    """The error if the hub answered and refused; None for any other failure."""
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as hub

    status = _status(error)
    login = "the token in HF_TOKEN has no access" if get_token() else "set HF_TOKEN"
    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, hub.GatedRepoError):
        return CheckpointError(
            f"{repo} is gated (HTTP {status})", f"accept its licence at {page}; {login}"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return CheckpointError(
            f"{repo} has no revision {quote(revision)}", f"branches and tags: {page}/tree/main"
        )
    if isinstance(error, _no_such_file()):
        url = str(error.response.request.url)  # type: ignore[attr-defined]  # set in all versions
        name = url.split("/resolve/")[-1].partition("/")[2]
        return CheckpointError(
            f"{repo} has no {name} at revision {revision}",
            "is it a model in the format of transformers?",
        )
    if isinstance(error, hub.RepositoryNotFoundError) or status == 404:
        return CheckpointError(
            f"no model {quote(repo)} at {constants.ENDPOINT} (HTTP {status})",
            f"{_nearest(repo, known)}; if it is private: {login}",
        )
    if status in (401, 403):
        return CheckpointError(
            f"{repo}: the hub refused access (HTTP {status})", f"{login}; licence page: {page}"
        )
    return None


def _status(error: Exception) -> int | None:
    """The HTTP status of the client's error; None if there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: Exception) -> str:
    status = _status(error)
    if status:
        return f"HTTP {status}"
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[:200]}".rstrip(": ")


def check_name(repo: str, known: tuple[str, ...]) -> None:
    """UnknownModel unless the name has the form owner/name. Makes no request."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise _unknown(repo, known) from None
    if "/" not in repo:
        raise _unknown(repo, known)


def _unknown(source: str, known: tuple[str, ...]) -> UnknownModel:
    return UnknownModel(
        f"no model {quote(source)}: not built in, not a folder, not cached", _nearest(source, known)
    )


def _beside(source: str) -> str | None:
    """A GGUF file or model folder in the same folder with a similar name: x.ggf → ./x.gguf."""
    path = Path(os.path.expanduser(source))
    try:
        with os.scandir(path.parent) as entries:
            found = [entry.name for entry in islice(entries, SEARCHED) if _is_model(entry)]
    except (OSError, ValueError):
        return None
    names = {Path(name).stem.lower(): name for name in found}
    names |= {name.lower(): name for name in found}
    close = difflib.get_close_matches(path.name.lower(), names, n=1, cutoff=0.8)
    if not close:
        return None
    place = path.parent / names[close[0]]
    if place.is_absolute():
        return str(place)
    return f"./{place}"


def _is_model(entry: os.DirEntry[str]) -> bool:
    """Whether the entry looks like a GGUF file or a model folder."""
    return entry.name.endswith(".gguf") or os.path.isfile(os.path.join(entry.path, "config.json"))


def _nearest(source: str, known: tuple[str, ...]) -> str:
    """A hint: a local model with a similar path, else the known name with the most similar letters.

    qwen3-06b → Qwen/Qwen3-0.6B.
    """
    beside = _beside(source)
    if beside:
        return f"did you mean {beside}?"
    if source.endswith(".gguf"):
        return "check the path: there is no such file"
    if source.startswith(("/", ".", "~")):
        return "check the path: there is no such folder"
    spelled = (*known, *PACKAGES, *SHORT, *FAMILY)
    names = {re.sub("[^a-z0-9]", "", name.split("/")[-1].lower()): name for name in spelled}
    wanted = re.sub("[^a-z0-9]", "", source.split("/")[-1].lower())
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    if not close:
        return f"nanokv models lists names; for example {', '.join([*known, FAMILY[0]])}"
    name = names[close[0]]
    if ":" in source:
        name = _packaged(name)
    return f"did you mean {name}?"


def _packaged(name: str) -> str:
    """The short name of the package with this model, else the name.

    For ollama's names: smollm2:135m → smollm2.
    """
    for short, package in PACKAGES.items():
        if package.repository == SHORT.get(name):
            return short
    return name
