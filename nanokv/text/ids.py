"""Convert token ids from a list, a numpy array or a tensor to lists of checked ints.

`inference.token_ids` makes the (B,T) tensor of a forward pass from them. No torch, no tokenizer.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from nanokv.errors import TokenIdsError


class Array(Protocol):
    """A tensor or a numpy array."""

    def tolist(self) -> Any: ...


Ids = Iterable[int] | Array  # one sequence: a list, or an array (T,) or (1,T)
Rows = Iterable[Iterable[int]] | Iterable[int] | Array  # a batch (B,T); (T,) is a batch of one

ENCODE = "tokenizer.encode(text) gives the ids of a text"
INTEGERS = 'an integer dtype: ids.long(), or ids.astype("int64") in numpy'


def id_list(ids: Ids, vocab_size: int) -> list[int]:
    """One sequence as a list of ints.

    TokenIdsError names the first value that is not an id (0 … vocab_size − 1) and its position.
    """
    found = _nested(ids)
    if len(found) == 1 and isinstance(found[0], list):  # (1,T)
        found = found[0]
    if found and isinstance(found[0], list):
        shape = len(found), len(found[0])
        raise TokenIdsError(
            f"one sequence was expected, got a batch {shape}", "generate_padded takes many prompts"
        )
    return _inside(_ints(found), vocab_size)


def id_rows(ids: Rows, vocab_size: int) -> list[list[int]]:
    """A batch as B lists of T ints, B and T at least 1. One sequence is a batch of one.

    TokenIdsError as in `id_list`, and for rows of different lengths.
    """
    try:
        found = _nested(ids)
        if not found or not isinstance(found[0], list):  # one sequence
            found = [found]
        rows = [_ints(row) for row in found]
    except TokenIdsError as error:
        raise _not_rows(str(error), error.hint) from None
    widths = sorted({len(row) for row in rows})
    if len(widths) > 1:
        raise _not_rows(
            f"got rows of {widths[0]} to {widths[-1]} ids",
            "generate_padded takes prompts of any lengths",
        )
    if widths == [0]:
        raise _not_rows(f"got ({len(rows)},0)", ENCODE)
    return [_inside(row, vocab_size) for row in rows]


def common_prefix(cached: Sequence[int], new: Sequence[int]) -> int:
    """Number of leading ids that both sequences share. O(n) integer comparisons, no model work."""
    for n, (a, b) in enumerate(zip(cached, new, strict=False)):
        if a != b:
            return n
    return min(len(cached), len(new))


def _not_rows(why: str, hint: str) -> TokenIdsError:
    return TokenIdsError(
        f"token ids must be a (B,T) integer list, array or tensor with B and T ≥ 1: {why}", hint
    )


def _nested(ids: Any) -> list:
    """A list of ints, or of lists of ints, from arrays, ranges, tuples or lists of tensors.

    TokenIdsError for text, floats, mixed or deeper nesting.
    """
    if isinstance(ids, str | bytes):
        raise TokenIdsError(f"token ids were expected, got the text {ids[:40]!r}", ENCODE)
    if hasattr(ids, "tolist"):
        dtype = str(getattr(ids, "dtype", "int"))
        ids = ids.tolist()
        if "int" not in dtype and ids != []:
            raise TokenIdsError(f"token ids are whole numbers, these are {dtype}", INTEGERS)
    if not isinstance(ids, Iterable):
        raise TokenIdsError(
            f"token ids were expected, got {type(ids).__name__} {str(ids)[:60]}", ENCODE
        )
    if type(ids) is list and set(map(type, ids)) <= {int}:
        return list(ids)
    found = [_plain(part) for part in ids]
    kinds = set(map(type, found))
    if list in kinds and len(kinds) > 1:
        raise TokenIdsError("ids and lists of ids are mixed", "(T,) or (B,T)")
    if kinds == {list} and any(list in map(type, part) for part in found):
        raise TokenIdsError("these token ids have more than two dimensions", "(T,) or (B,T)")
    return found


def _plain(part: Any) -> Any:
    """numpy.int64(5) → 5; a row in any form → a list; any other value unchanged."""
    if type(part) is int:
        return part
    if hasattr(part, "tolist"):
        part = part.tolist()
    if type(part) is list and set(map(type, part)) <= {int}:  # the usual case: 10 times faster
        return list(part)
    if isinstance(part, str | bytes) or not isinstance(part, Iterable):
        return part
    return [_plain(id) for id in part]


def _ints(ids: list) -> list[int]:
    if set(map(type, ids)) <= {int}:
        return ids
    position, id = next((n, id) for n, id in enumerate(ids) if type(id) is not int)
    hint = ENCODE if isinstance(id, str) else INTEGERS
    raise TokenIdsError(
        f"id {id!r} at position {position} is of type {type(id).__name__}, not int", hint
    )


def _inside(ids: list[int], vocab_size: int) -> list[int]:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        position, id = next((n, id) for n, id in enumerate(ids) if not 0 <= id < vocab_size)
        raise TokenIdsError(
            f"id {id} at position {position} is outside the vocabulary 0 … {vocab_size - 1}"
        )
    return ids
