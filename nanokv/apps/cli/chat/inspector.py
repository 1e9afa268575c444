"""The text of /cache and /tokens: the cache's contents, a row per layer, and its bytes by formula.

Every cell covers the same number of tokens. It shows the letter of their most frequent role:
s(ystem), u(ser), a(ssistant), or · for tokens that the cache dropped. Colour only repeats the
letter. A row ends with the bytes of its tokens. The last line has the formula's value and the
measured `nbytes` side by side, so a difference is visible. /tokens prints one line per message: its
tokens as text, each with its id in small digits.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout
from nanokv.apps.cli.common.terminal import Style, bytes_text, sanitize_line

if TYPE_CHECKING:
    from nanokv.cache.base import KVCache
    from nanokv.chat.history import Role
    from nanokv.chat.session import Session
    from nanokv.config import Config
COLOURS = {"s": "magenta", "u": "cyan", "a": "green"}
SMALL = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
NAMES = {"s": "system", "u": "user", "a": "assistant", "·": "dropped"}


def cells(roles: "Sequence[Role]", width: int) -> tuple[str, int]:
    """(letters, tokens per cell): at most `width` cells; the last one may hold fewer tokens."""
    per = max(1, -(-len(roles) // max(width, 1)))
    letters = ""
    for start in range(0, len(roles), per):
        counts = Counter(letter for letter, _ in roles[start : start + per])
        letters += counts.most_common(1)[0][0]
    return letters, per


def draw(session: "Session", style: Style, width: int = 80) -> str:
    """The text of /cache; lines are at most `width` cells wide."""
    config = session.model.config
    cache = session.cache
    length = cache.length
    if not length:
        size = ", 0 B"
        if cache.nbytes:
            size = f" ({bytes_text(cache.nbytes)} of memory kept for the next tokens)"
        return layout.paragraph(f"cache empty: 0 tokens{size}", width)
    held = cache[0].sizes.held  # a sliding cache holds fewer tokens than it has seen
    roles = held_roles(session.roles()[:length], held, cache.made.options.get("sinks", 0))
    label = len(f"layer {len(cache) - 1:>2} ")
    letters, per = cells(roles, max(width - label - 12, 10))
    painted = "".join(paint(letter, style) for letter in letters)
    counts = Counter(letter for letter, _ in roles)
    parts = [
        f"{length:,} of {session.context:,} tokens",
        f"1 cell = {per:,} token{'s' * (per > 1)}",
    ]
    for letter, name in NAMES.items():
        if counts[letter]:
            parts.append(f"{letter} {name} {counts[letter]:,}")
    lines = [layout.joined(parts, width)]
    for i, layer in enumerate(cache):
        head = f"layer {i:>2} ".ljust(label)
        lines.append(f"{head}{painted}  {bytes_text(layer.sizes.used_nbytes)}")
    lines.append(layout.joined(formula(config, cache, held).split(" · "), width))
    for note in (balance(session), session.why):
        if note:
            lines.append(layout.paragraph(note, width))
    return "\n".join(lines)


def paint(letter: str, style: Style) -> str:
    """A role's letter in its colour."""
    if letter not in COLOURS:
        return letter
    return getattr(style, COLOURS[letter])(letter)


def held_roles(roles: "list[Role]", held: int, sinks: int) -> "list[Role]":
    """The roles of all tokens seen; a dot for the dropped ones between sinks and window."""
    gone = len(roles) - held
    if not gone:
        return roles
    from nanokv.chat.history import Role

    dropped = [Role("·", 0)] * gone
    return roles[:sinks] + dropped + roles[sinks + gone :]


def formula(config: "Config", cache: "KVCache", length: int) -> str:
    """`2 × L × Hk × D × bytes × tokens`, with this model's numbers, and the measured total."""
    L = config.num_kv_layers
    Hk = config.num_key_value_heads
    D = config.head_dim
    element = element_size(cache)
    computed = 2 * L * Hk * D * element * length
    total = f"= {computed:,} B · measured {cache.nbytes:,} B"
    if cache.nbytes != computed:
        total += f" ({cache.made.name} cache: {cache.nbytes / computed:.2f} × the formula)"
    return f"2 (K, V) × {L} layers × {Hk} KV heads × {D} × {element} B × {length:,} tokens {total}"


def element_size(cache: "KVCache") -> int:
    """Bytes per stored number, from the first layer's tensors; 4 if it does not show them."""
    if not hasattr(cache[0], "state"):
        return 4
    tensors = cache[0].state().values()
    return next((t.element_size() for t in tensors if t.is_floating_point()), 4)


def balance(session: "Session") -> str:
    """Why the cache holds one token less than the status line counts; "" if it does not."""
    turn = session.last
    if not turn or not turn.out or session.cache.length != turn.new + turn.reused + turn.out - 1:
        return ""
    total = f"{turn.new:,} new + {turn.reused:,} reused + {turn.out:,} out"
    return (
        f"{total} − 1 = {session.cache.length:,}: the last token of an answer is chosen, but not "
        "fed; its key and value come with the next message"
    )


def tokens_text(
    session: "Session", style: Style, width: int | None = None, limit: int = 400
) -> str:
    """The last prompt and its answer, a line per message; at most the last `limit` tokens."""
    ids = session.cached_ids
    roles = session.roles()
    if not ids:
        return "no prompt yet"
    last = unfed(session)
    ids = ids + last
    roles = roles + roles[-1:] * len(last)
    left = max(0, len(ids) - limit)
    lines = []
    if left:
        lines.append(f"… {left:,} earlier tokens")
    tokens = zip(roles[left:], ids[left:], session.tokenizer.pieces(ids[left:]), strict=True)
    for (letter, _), group in groupby(tokens, key=itemgetter(0)):
        parts = [token_text(id, piece, style) for _, id, piece in group]
        text = layout.joined(parts, width, "  ", between=" ").removeprefix(" ")
        lines.append(paint(letter, style) + text)
    totals = [f"{len(ids):,} tokens"]
    if last:
        totals.append("the last one was not fed, so the cache lacks it")
    return "\n".join([*lines, layout.joined(totals, width)])


def unfed(session: "Session") -> list[int]:
    """The last token of the last answer, if the cache holds all tokens before it; otherwise []."""
    if not session.last:
        return []
    sampled = session.last.ids
    start = len(session.prompt_ids)
    held = session.cached_ids
    if len(held) < start or held[start:] != sampled[:-1]:
        return []
    return sampled[-1:]


def token_text(id: int, piece: str, style: Style) -> str:
    """␣name₂₆₃: spaces made visible, the id in small, dim digits."""
    return sanitize_line(piece).replace(" ", "␣") + style.dim(str(id).translate(SMALL))
