"""The text of /cache and /tokens: the cache's contents, a row per layer, and its bytes by formula.

Every cell covers the same number of tokens. It shows the letter of their most frequent role:
s(ystem), u(ser), a(ssistant), or · for tokens that the cache dropped. Colour only repeats the
letter. A row ends with the bytes of its tokens. The last line has the formula's value and the
measured `nbytes` side by side, so a difference is visible. /tokens prints one line per message: its
tokens as text, each with its id in small digits.
"""

from collections import Counter
from itertools import groupby
from operator import itemgetter

from nanokv.apps.cli.common import layout
from nanokv.apps.cli.common.terminal import bytes_text, sanitize_line

COLOURS = {"s": "magenta", "u": "cyan", "a": "green"}
SMALL = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
NAMES = {"s": "system", "u": "user", "a": "assistant", "·": "dropped"}


def cells(roles, width):
    """(letters, tokens per cell): at most `width` cells; the last one may hold fewer tokens."""
    per = max(1, -(-len(roles) // max(width, 1)))
    groups = [[letter for letter, _ in roles[i : i + per]] for i in range(0, len(roles), per)]
    return "".join(Counter(group).most_common(1)[0][0] for group in groups), per


def draw(session, style, width=80) -> str:
    """The text of /cache; lines are at most `width` cells wide."""
    config, cache = session.model.config, session.cache
    length = cache.length
    if not length:
        kept = (
            f" ({bytes_text(cache.nbytes)} of memory kept for the next tokens)"
            if cache.nbytes
            else ""
        )
        return layout.paragraph(f"cache empty: 0 tokens{kept or ', 0 B'}", width)
    held = cache[0].sizes.held  # a sliding cache holds fewer tokens than it has seen
    roles = held_roles(session.roles()[:length], held, cache.made.options.get("sinks", 0))
    label = len(f"layer {len(cache) - 1:>2} ")
    letters, per = cells(roles, max(width - label - 12, 10))
    painted = "".join(
        getattr(style, COLOURS[letter])(letter) if letter in COLOURS else letter
        for letter in letters
    )
    counts = Counter(letter for letter, _ in roles)
    parts = [
        f"{length:,} of {session.context:,} tokens",
        f"1 cell = {per:,} token{'s' * (per > 1)}",
    ]
    parts += [
        f"{letter} {name} {counts[letter]:,}" for letter, name in NAMES.items() if counts[letter]
    ]
    lines = [layout.joined(parts, width)]
    for i, layer in enumerate(cache):
        lines.append(
            f"layer {i:>2} ".ljust(label) + painted + "  " + bytes_text(layer.sizes.used_nbytes)
        )
    lines.append(layout.joined(formula(config, cache, held).split(" · "), width))
    notes = filter(None, (balance(session), session.why))
    lines += [layout.paragraph(text, width) for text in notes]
    return "\n".join(lines)


def held_roles(roles, held, sinks):
    """The roles of all tokens seen; a dot for the dropped ones between sinks and window."""
    gone = len(roles) - held
    return [*roles[:sinks], *[("·", 0)] * gone, *roles[sinks + gone :]] if gone else roles


def formula(config, cache, length) -> str:
    """`2 × L × Hk × D × bytes × tokens`, with this model's numbers, and the measured total."""
    L, Hk, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    element = element_size(cache)
    computed = 2 * L * Hk * D * element * length
    total = f"= {computed:,} B · measured {cache.nbytes:,} B"
    if cache.nbytes != computed:
        total += f" ({cache.made.name} cache: {cache.nbytes / computed:.2f} × the formula)"
    return f"2 (K, V) × {L} layers × {Hk} KV heads × {D} × {element} B × {length:,} tokens {total}"


def element_size(cache) -> int:
    """Bytes per stored number, from the first layer's tensors; 4 if it does not show them."""
    tensors = cache[0].state().values() if hasattr(cache[0], "state") else ()
    return next((t.element_size() for t in tensors if t.is_floating_point()), 4)


def balance(session) -> str:
    """Why the cache holds one token less than the status line counts; "" if it does not."""
    turn = session.last
    if not turn or not turn.out or session.cache.length != turn.new + turn.reused + turn.out - 1:
        return ""
    return (
        f"{turn.new:,} new + {turn.reused:,} reused + {turn.out:,} out − 1 = "
        f"{session.cache.length:,}: the last token of an answer is chosen, but not fed; its key and "
        "value come with the next message"
    )


def tokens_text(session, style, width=None, limit=400) -> str:
    """The last prompt and its answer, a line per message; at most the last `limit` tokens."""
    ids, roles = session.cached_ids, session.roles()
    if not ids:
        return "no prompt yet"
    last = unfed(session)
    ids, roles = ids + last, roles + roles[-1:] * len(last)
    left = max(0, len(ids) - limit)
    lines = [f"… {left:,} earlier tokens"] if left else []
    tokens = zip(roles[left:], ids[left:], session.tokenizer.pieces(ids[left:]), strict=True)
    for (letter, _), group in groupby(tokens, key=itemgetter(0)):
        parts = [token_text(id, piece, style) for _, id, piece in group]
        mark = getattr(style, COLOURS[letter])(letter)
        lines.append(mark + layout.joined(parts, width, "  ", between=" ").removeprefix(" "))
    note = " · the last one was not fed, so the cache lacks it" if last else ""
    return "\n".join([*lines, layout.joined(f"{len(ids):,} tokens{note}".split(" · "), width)])


def unfed(session) -> list[int]:
    """The last token of the last answer, if the cache holds all tokens before it; otherwise []."""
    start, held = len(session.prompt_ids), session.cached_ids
    sampled = session.last.ids if session.last else []
    return sampled[-1:] if len(held) >= start and held[start:] == sampled[:-1] else []


def token_text(id: int, piece: str, style) -> str:
    """␣name₂₆₃: spaces made visible, the id in small, dim digits."""
    return sanitize_line(piece).replace(" ", "␣") + style.dim(str(id).translate(SMALL))
