"""The text of /cache and /tokens: the cache's contents, a row per layer, and its bytes by formula.

Every cell covers the same number of tokens. It shows the letter of their most frequent role:
s(ystem), u(ser), a(ssistant), or · for tokens that the cache dropped. A recurrent layer shows ~ for
tokens that it has added to its state, and ◆ where it keeps a snapshot. Colour only repeats the
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
    from nanokv.cache.base import KVCache, LayerCache
    from nanokv.chat.history import Role
    from nanokv.chat.session import Session
    from nanokv.config import Config
COLOURS = {"s": "magenta", "u": "cyan", "a": "green"}
SMALL = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
NAMES = {"s": "system", "u": "user", "a": "assistant", "·": "dropped"}
IN_STATE, SNAPSHOT = "~", "◆"


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
    sizes = cache.sizes
    roles = session.roles()[:length]
    sinks = cache.made.options.get("sinks", 0)
    label = len(f"layer {len(cache) - 1:>2} ")
    room = max(width - label - 12, 10)
    shown = held_roles(roles, sizes.held, sinks)
    _, per = cells(shown, room)
    counts = Counter(letter for letter, _ in shown)
    parts = [
        f"{length:,} of {session.context:,} tokens",
        f"1 cell = {per:,} token{'s' * (per > 1)}",
    ]
    for letter, name in NAMES.items():
        if counts[letter]:
            parts.append(f"{letter} {name} {counts[letter]:,}")
    if config.states:
        parts.append(f"{IN_STATE} in a state")
        kept = ", ".join(f"{n:,}" for n in sizes.snapshots)
        parts.append(f"{SNAPSHOT} snapshots at {kept}" if kept else "no snapshot")
    lines = [layout.joined(parts, width)]
    for i, layer in enumerate(cache):
        head = f"layer {i:>2} ".ljust(label)
        letters = row(layer, roles, sinks, room)
        painted = "".join(paint(letter, style) for letter in letters)
        lines.append(f"{head}{painted}  {bytes_text(layer.sizes.used_nbytes)}")
    lines.append(layout.joined(formula(config, cache, sizes.held).split(" · "), width))
    for note in (balance(session), session.why):
        if note:
            lines.append(layout.paragraph(note, width))
    return "\n".join(lines)


def row(layer: "LayerCache", roles: "list[Role]", sinks: int, width: int) -> str:
    """The cells of one layer: what it keeps of each token."""
    sizes = layer.sizes
    if sizes.held:
        return cells(held_roles(roles, sizes.held, sinks), width)[0]
    _, per = cells(roles, width)
    kept = {(n - 1) // per for n in sizes.snapshots}
    count = -(-len(roles) // per)
    return "".join(SNAPSHOT if cell in kept else IN_STATE for cell in range(count))


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
    """`2 × L × Hk × D × bytes × tokens`, with this model's numbers, and the measured total.

    Only the layers that keep all positions are in the product.
    """
    from nanokv.costs import full_layers

    L = full_layers(config)
    Hk = config.num_key_value_heads
    D = config.head_dim
    element = element_size(config, cache)
    computed = 2 * L * Hk * D * element * length
    total = f"= {computed:,} B"
    fixed = sum(layer.nbytes for layer, whole in kinds(config, cache) if not whole)
    if fixed:
        total += f" · windows and states {fixed:,} B"
    total += f" · measured {cache.nbytes:,} B"
    if cache.nbytes != computed + fixed:
        times = (cache.nbytes - fixed) / computed
        total += f" ({cache.made.name} cache: {times:.2f} × the formula)"
    return f"2 (K, V) × {L} layers × {Hk} KV heads × {D} × {element} B × {length:,} tokens {total}"


def kinds(config: "Config", cache: "KVCache") -> "list[tuple[LayerCache, bool]]":
    """Each layer, and whether the model's layer sees all positions: no window, no state."""
    windows = config.windows[:: config.kv_sharing_factor]
    return [(layer, window is None) for layer, window in zip(cache, windows, strict=False)]


def element_size(config: "Config", cache: "KVCache") -> int:
    """Bytes per stored number, from the tensors of a layer; 4 if they do not show it."""
    layer = next((layer for layer, whole in kinds(config, cache) if whole), cache[0])
    if not hasattr(layer, "state"):
        return 4
    return next((t.element_size() for t in layer.state().values() if t.is_floating_point()), 4)


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
