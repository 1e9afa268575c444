"""Hub id → a complete folder in the Hugging Face cache: only the files that nanokv reads, resumable, hash-checked.

Names, cache layout, tokens and environment (HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_HUB_DISABLE_PROGRESS_BARS) are huggingface_hub's. One thing is done here: its 2.4 deletes a partial file when the
process ends and checks only the size, so each file is first fetched as blobs/<etag>.part with Range requests, its
sha256 compared, and then handed over. Plain HTTP, not xet, for that reason.
"""

import difflib
import hashlib
import os
import re
import shutil
from pathlib import Path

from .names import INDEX, SINGLE, read_weight_map
from .strict import CheckpointError, quote

SMALL = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # optional
FAMILY = tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B"))
KEPT = 1 << 16  # bytes: what arrives is written in pieces of this size, and a cut costs at most one
OFFLINE_HINT = "nanokv chat -m tiny works offline"


def snapshot(repo: str, revision: str | None, known: tuple[str, ...]) -> Path:
    """The folder with config.json, tokenizer files and weights of `repo` at `revision` (branch, tag or commit).

    A full cache is used as it is when the hub cannot be reached. Raises CheckpointError for everything else.
    """
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, RevisionNotFoundError
    from huggingface_hub.utils import validate_repo_id

    revision = revision or "main"
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise _unknown(repo, known) from None
    folder, missing = _cached(repo, revision)
    if folder and not missing and (is_offline_mode() or re.fullmatch("[0-9a-f]{40}", revision)):
        return folder
    if "/" not in repo:  # every model of today has an owner: a typo costs no request
        if folder and not missing:
            return folder
        raise _unknown(repo, known)
    try:
        return _fetch(repo, revision)
    except CheckpointError:
        raise
    except (HTTPError, HfHubHTTPError, OSError, ValueError) as error:
        folder, missing = _cached(repo, revision)  # again: the commit may just have been learned
        if folder and not missing and not isinstance(error, RevisionNotFoundError):
            return folder
        raise _explain(error, repo, revision, missing, known) from error


def config_file(repo: str, revision: str | None, known: tuple[str, ...]) -> Path:
    """config.json alone, enough for arithmetic; one that is in the cache costs no request."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    revision = revision or "main"
    try:
        cached = try_to_load_from_cache(repo, "config.json", revision=revision)
        if not isinstance(cached, str) and "/" not in repo:
            raise _unknown(repo, known)
        return Path(cached) if isinstance(cached, str) else _file(repo, "config.json", revision)
    except HFValidationError:
        raise _unknown(repo, known) from None
    except (HTTPError, HfHubHTTPError, OSError) as error:
        raise _explain(error, repo, revision, ["config.json"], known) from error


def _cached(repo: str, revision: str) -> tuple[Path | None, list[str]]:
    """(snapshot folder if there is one, names of the files that it lacks), without a request."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(config, str):
        return None, ["config.json", "the weights"]
    folder = Path(config).parent
    if (folder / SINGLE).is_file():
        return folder, []
    if not (folder / INDEX).is_file():
        return folder, [SINGLE]
    shards = sorted(set(read_weight_map(folder / INDEX).values()))
    return folder, [shard for shard in shards if not (folder / shard).is_file()]


def _fetch(repo: str, revision: str) -> Path:
    """Config first: it names the commit that all the other files are then taken from. Weights last."""
    folder = _file(repo, "config.json", revision).parent
    commit = folder.name
    if not _cached(repo, commit)[1]:  # weights come last: with them, all of it is there
        return folder
    for name in SMALL:
        _optional(repo, name, commit)
    if _optional(repo, SINGLE, commit):
        return folder
    index = _optional(repo, INDEX, commit)
    if index is None:
        raise CheckpointError(
            f"{repo} has neither {SINGLE} nor {INDEX}",
            hint="nanokv reads safetensors only (a pickle, .bin, can run any program); take a repository that has them",
        )
    shards = sorted(set(read_weight_map(index).values()))
    _check_disk(repo, [shard for shard in shards if not (folder / shard).is_file()], commit)
    for shard in shards:
        _file(repo, shard, commit)
    return folder


def _optional(repo: str, name: str, commit: str) -> Path | None:
    """The file, or None if the repository has none by that name (the cache remembers that)."""
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if try_to_load_from_cache(repo, name, revision=commit) is _CACHED_NO_EXIST:
        return None
    try:
        return _file(repo, name, commit)
    except RemoteEntryNotFoundError:
        return None


def _file(repo: str, name: str, revision: str) -> Path:
    """One file into the cache; a file that is there for this commit costs no request."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, name, revision=revision)
    if isinstance(cached, str) and Path(cached).parent.name == revision:
        return Path(cached)
    meta = _metadata(repo, name, revision)
    if meta.commit_hash and meta.etag and re.fullmatch("[0-9A-Za-z_-]+", meta.etag):
        blob = _storage(repo) / "blobs" / meta.etag
        if not blob.exists():
            _fetch_blob(repo, name, revision, meta, blob)
    return Path(hf_hub_download(repo, name, revision=revision))  # finds the blob, links it, remembers the branch


def _fetch_blob(repo: str, name: str, revision: str, meta, blob: Path):
    """Fetch into blob.part, going on where an earlier run stopped; check the hash; move into place."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    part = blob.with_name(f"{blob.name}.part")
    lock = _storage(repo).parent / ".locks" / _storage(repo).name / f"{blob.name}.lock"  # the client's own lock
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock), open(part, "ab") as file:  # a second process waits, then finds the blob
        if blob.exists():
            return part.unlink()
        if meta.size is not None:
            if file.tell() > meta.size:
                file.truncate(0)
            _check_free(repo, [(name, meta.size - file.tell())])
        url = hf_hub_url(repo, name, revision=meta.commit_hash)
        constants.DOWNLOAD_CHUNK_SIZE = KEPT  # its own 10 MB are lost whole when a connection breaks
        try:
            http_get(url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=meta.size,
                     displayed_filename=name)  # fmt: skip
        except (HTTPError, OSError) as error:
            if getattr(error, "response", None) is not None:
                raise
            raise CheckpointError(
                f"download of {repo}/{name} stopped at {file.tell():,} of {meta.size or 0:,} bytes: {_reason(error)}",
                hint=f"run it again: it goes on from there; {OFFLINE_HINT}",
            ) from error
        file.flush()
        _check_hash(part, meta.etag, f"{repo}/{name}")
        os.replace(part, blob)


def _check_hash(part: Path, etag: str, what: str):
    """The etag of a large (LFS) file is its sha256. A mismatch deletes the file: resuming would keep the damage."""
    if not re.fullmatch("[0-9a-f]{64}", etag):
        return
    with open(part, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != etag:
        size = part.stat().st_size
        part.unlink()
        raise CheckpointError(f"{what}: {size:,} bytes arrived with sha256 {digest[:12]}, the hub says {etag[:12]}",
                              hint="the download was damaged on the way and is deleted: run it again")  # fmt: skip


def _check_disk(repo: str, names: list[str], commit: str):
    """All the shards must fit before the first one is fetched."""
    _check_free(repo, [(name, _metadata(repo, name, commit).size or 0) for name in names])


def _check_free(repo: str, needed: list[tuple[str, int]]):
    folder = _storage(repo)
    while not folder.exists():
        folder = folder.parent
    total, free = sum(size for _, size in needed), shutil.disk_usage(folder).free
    if total > free:
        raise CheckpointError(
            f"{repo}: {len(needed)} files ({needed[0][0]}{' ...' if len(needed) > 1 else ''}) need {total:,} bytes, "
            f"{folder} has {free:,} free",
            hint="make room, or set HF_HOME to a folder on a larger disk",
        )


def _metadata(repo: str, name: str, revision: str):
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    return get_hf_file_metadata(hf_hub_url(repo, name, revision=revision))


def _storage(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _explain(error: Exception, repo: str, revision: str, missing: list[str], known) -> CheckpointError:
    """What the hub's client raised → one line and a hint."""
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as hub

    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "the token in HF_TOKEN has no access" if get_token() else "set HF_TOKEN"
    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, hub.GatedRepoError):
        return CheckpointError(f"{repo} is gated (HTTP {status})", f"accept its licence at {page}; {login}")
    if isinstance(error, hub.RevisionNotFoundError):
        return CheckpointError(f"{repo} has no revision {quote(revision)}", f"branches and tags: {page}/tree/main")
    if isinstance(error, hub.RemoteEntryNotFoundError):
        name = str(error.response.request.url).split("/resolve/")[-1].partition("/")[2]
        return CheckpointError(f"{repo} has no {name} at revision {revision}", "is it a transformers model of today?")
    if isinstance(error, hub.RepositoryNotFoundError) or status == 404:
        return CheckpointError(f"no model {quote(repo)} at {constants.ENDPOINT} (HTTP {status})",
                               f"{_nearest(repo, known)}; if it is private: {login}")  # fmt: skip
    if status in (401, 403):
        return CheckpointError(f"{repo}: the hub refused access (HTTP {status})", f"{login}; licence page: {page}")
    if isinstance(error, OSError) and error.filename:
        return CheckpointError(f"{repo}: {error.filename}: {error.strerror}", "set HF_HOME to a writable folder")
    lacks = f"the cache lacks {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
    if isinstance(error, hub.OfflineModeIsEnabled):
        return CheckpointError(f"{repo}: offline (--offline or HF_HUB_OFFLINE) and {lacks} (revision {revision})",
                               f"go online to download; {OFFLINE_HINT}")  # fmt: skip
    return CheckpointError(f"{repo}: {constants.ENDPOINT} failed ({_reason(error)}) and {lacks}",
                           f"check the network and run it again; {OFFLINE_HINT}")  # fmt: skip


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"HTTP {status}" if status else f"{type(error).__name__}: {first}".rstrip(": ")


def _unknown(source: str, known: tuple[str, ...]) -> CheckpointError:
    return CheckpointError(f"no model {quote(source)}: not built in, not a folder, not cached",
                           _nearest(source, known))  # fmt: skip


def _nearest(source: str, known: tuple[str, ...]) -> str:
    """A hint with the known name that is closest in letters and digits: qwen3-06b → Qwen/Qwen3-0.6B."""
    names = {re.sub("[^a-z0-9]", "", name.split("/")[-1].lower()): name for name in known + FAMILY}
    wanted = re.sub("[^a-z0-9]", "", source.split("/")[-1].lower())
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    return f"did you mean {names[close[0]]}?" if close else f"known: {', '.join(known)}, {FAMILY[0]}, ..."
