"""Token ids as a caller writes them, a list, a numpy array or a tensor, become lists of ints here, each one checked.

`inference.token_ids` makes the (B,T) tensor of a forward of them. No torch, no tokenizer.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from nanokv.errors import TokenIdsError


class Array(Protocol):
    """A tensor or a numpy array."""

    def tolist(self) -> Any: ...


Ids = Iterable[int] | Array  # of one sequence: a list, (T,) or (1,T)
Rows = Iterable[Iterable[int]] | Array  # of a batch: (B,T)

ENCODE = "tokenizer.encode(text) gives the ids of a text"
INTEGERS = 'an integer dtype: ids.long(), or ids.astype("int64") in numpy'


def id_list(ids: Ids, vocab_size: int) -> list[int]:
    """One sequence as ints. TokenIdsError names what is no id from 0 to vocab_size − 1, and where it stands."""
    found = _nested(ids)
    if len(found) == 1 and isinstance(found[0], list):  # (1,T)
        found = found[0]
    if found and isinstance(found[0], list):
        shape = len(found), len(found[0])
        raise TokenIdsError(f"one sequence was expected, got a batch {shape}", "generate_padded takes many prompts")
    return _checked(found, vocab_size)


def id_rows(ids: Rows, vocab_size: int) -> list[list[int]]:
    """A batch as B lists of T ints, B and T at least 1; TokenIdsError as above."""
    try:
        found = _nested(ids)
        nested = bool(found) and isinstance(found[0], list)
        rows = [_checked(row, vocab_size) if isinstance(row, list) else [row] for row in (found if nested else [found])]
    except TokenIdsError as error:
        if "vocabulary" in str(error):
            raise
        raise _not_rows(str(error), error.hint) from None
    widths = sorted({len(row) for row in rows})
    if not nested:
        raise _not_rows(f"got {len(found)} without a batch dimension", "[ids] is one row")
    if len(widths) > 1:
        raise _not_rows(f"got rows of {widths[0]} to {widths[-1]} ids", "generate_padded takes prompts of any lengths")
    if widths == [0]:
        raise _not_rows(f"got ({len(rows)},0)", ENCODE)
    return rows


def common_prefix(cached: Sequence[int], new: Sequence[int]) -> int:
    """Number of leading ids that both lists share. O(n) integer compares, no model work."""
    for n, (a, b) in enumerate(zip(cached, new, strict=False)):
        if a != b:
            return n
    return min(len(cached), len(new))


def _not_rows(why: str, hint: str) -> TokenIdsError:
    return TokenIdsError(f"token ids must be a (B,T) integer list, array or tensor with B and T ≥ 1: {why}", hint)


def _nested(ids: Any) -> list:
    """Lists within a list, whatever the caller had: arrays, ranges, tuples, a list of tensors."""
    if isinstance(ids, str | bytes):
        raise TokenIdsError(f"token ids were expected, got the text {ids[:40]!r}", ENCODE)
    if hasattr(ids, "tolist"):
        dtype, ids = str(getattr(ids, "dtype", "int")), ids.tolist()
        if "int" not in dtype and ids != []:
            raise TokenIdsError(f"token ids are whole numbers, these are {dtype}", INTEGERS)
    if not isinstance(ids, Iterable):
        raise TokenIdsError(f"token ids were expected, got {type(ids).__name__} {str(ids)[:60]}", ENCODE)
    found = []
    for part in ids:
        if type(part) is not int and hasattr(part, "tolist"):  # numpy.int64(5), a tensor of one row
            part = part.tolist()
        found.append(list(part) if isinstance(part, Iterable) and not isinstance(part, str | bytes) else part)
    if found and isinstance(found[0], list) and found[0] and isinstance(found[0][0], list):
        raise TokenIdsError("these token ids have more than two dimensions", "(T,) or (B,T)")
    return found


def _checked(ids: list, vocab_size: int) -> list[int]:
    for position, id in enumerate(ids):
        if type(id) is not int:
            if not hasattr(id, "item") or type(id := id.item()) is not int:
                hint = ENCODE if isinstance(id, str) else INTEGERS
                raise TokenIdsError(f"id {id!r} at position {position} is of type {type(id).__name__}, not int", hint)
            ids[position] = id
        if not 0 <= id < vocab_size:
            raise TokenIdsError(f"id {id} at position {position} is outside the vocabulary 0 … {vocab_size - 1}")
    return ids
