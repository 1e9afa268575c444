"""/save and /load: a conversation as a file, and on request its KV cache in a file beside it.

The text always loads. The cache loads only if these weights, in this dtype, made it for the tokens
that the conversation's file lists. Otherwise it is refused with both fingerprints, and the next
turn prefills everything.
"""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from nanokv.apps.cli.chat import transcript
from nanokv.apps.cli.common.terminal import bytes_text, sanitize_line
from nanokv.errors import CacheError, DeviceMemoryError, SessionError

if TYPE_CHECKING:
    from nanokv.apps.cli.chat.contract import Chat
    from nanokv.ranks.generation import Leading


def cache_path(path: Path) -> Path:
    """The file beside a saved conversation that holds its cache."""
    return Path(f"{path}.kv")


def cache_paths(path: Path, ranks: int) -> list[Path]:
    """The cache files of all ranks."""
    if ranks == 1:
        return [cache_path(path)]
    from nanokv.ranks.generation import part_path

    return [part_path(cache_path(path), rank) for rank in range(ranks)]


def save(chat: "Chat", path: Path, kv: Path | None) -> str:
    """Write the conversation to `path`, and the cache to `kv` unless that is None.

    Returns a message for the user. On an error old files stay.
    """
    session = chat.session
    mark = chat.loaded.fingerprints()[0]
    ranks = chat.loaded.ranks.size
    extra: dict = {}
    if kv:
        extra["kv"] = kv.name
    if kv and ranks > 1:
        extra["ranks"] = ranks
    head = transcript.header(chat.loaded.name, mark, **extra)
    history = {"history": session.messages, "system": session.system, "settings": session.params}
    size = bytes_text(transcript.write_whole(path, [head, history]))
    text = f"saved {transcript.turns_text(session.messages)}"
    text += f" to {sanitize_line(str(path))} ({size})"
    if not kv:
        return text
    from safetensors import SafetensorError

    try:
        if ranks == 1:
            session.cache.save(kv, tokens=session.cached_ids, model_fingerprint=mark)
        else:
            leading = cast("Leading", session.make_generation)
            leading.save(session.cache, kv, session.cached_ids, mark)
    except (OSError, SafetensorError, CacheError) as error:
        need = bytes_text(session.cache.nbytes)
        raise SessionError(f"{text}; its cache not saved: {error} (needs {need})") from error
    size = bytes_text(kv.stat().st_size)
    tokens = f"{session.cache.length:,} tokens"
    text += f", cache of {tokens} to {sanitize_line(kv.name)} ({size})"
    if ranks > 1:
        plural = "s" if ranks > 2 else ""
        text += f", and beside it the parts of {ranks - 1} more rank{plural}"
    return text


def load(chat: "Chat", path: Path) -> str:
    """Load a saved conversation; returns a message for the user. A broken file has no effect."""
    head, messages, _, notices = transcript.read(path)
    session = chat.session
    before = session.messages, session.system
    try:
        session.system = head.get("system")
        session.replace(messages)
    except Exception:
        session.messages, session.system = before
        raise
    session.params |= {k: v for k, v in (head.get("settings") or {}).items() if k in session.params}
    parts = [*notices, f"loaded {transcript.turns_text(messages)}"]
    if head.get("kv"):
        parts.append(_load_cache(chat, path.with_name(head["kv"]), head))
    return " · ".join(parts)


def _load_cache(chat: "Chat", path: Path, head: dict) -> str:
    session = chat.session
    known = chat.loaded.fingerprints()
    ranks = chat.loaded.ranks
    saved = head.get("fingerprint", "?")
    of = head.get("ranks") or 1
    if of != ranks.size:
        return f"cache refused: it was saved by {ranks_text(of)}, this is {ranks_text(ranks.size)}"
    if saved not in known:
        model = sanitize_line(str(saved))
        return f"cache refused: it was saved by model {model}, this is {known[0]}"
    try:
        cache = type(session.cache).load(
            path,
            session.model.config,
            model_fingerprint=saved,
            device=session.model.embed_tokens.weight.device,
            rank=(ranks.rank, ranks.size),
        )
        dtypes = {t.dtype for t in cache[0].state().values() if t.is_floating_point()}
        # Fused layers have a dtype; plain ones have that of the embedding.
        layer = session.model.layers[0]  # type: ignore[attr-defined]  # not in the protocol
        mine = getattr(layer, "dtype", session.model.embed_tokens.weight.dtype)
        if cache.made.name != "quantized" and dtypes - {mine}:
            return f"cache refused: it holds {dtypes.pop()}, the model computes in {mine}"
        if ranks.size > 1:
            cast("Leading", session.make_generation).load(cache, path)
        session.adopt_cache(cache, cache.tokens)
    except (CacheError, DeviceMemoryError, SessionError, OSError) as error:
        return f"cache refused: {sanitize_line(str(error))}"
    return f"cache of {cache.length:,} tokens ({bytes_text(cache.nbytes)})"


def ranks_text(count: int) -> str:
    """one process, 2 ranks."""
    if count == 1:
        return "one process"
    return f"{count:,} ranks"
