"""The engine's state at one moment in numbers: requests, pages, counts; no text and no token ids.

    taken = snapshot(engine, tabs, left)    in the engine's thread, between steps: O(pages in use)
    view(taken, salt, tab)                  the part that one client may see; pure, in any thread

A client sees state, tokens and pages of requests with another key, but not which pages they share.
"""

import hashlib
import secrets
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile

from nanokv.cache.prefix import PrefixPool
from nanokv.engine import Engine, Request
from nanokv.engine.turns import Client

CELLS = 512  # of the picture of the pool; in a larger pool a cell covers several pages
MOST_WAITING = 64  # waiting requests that are listed; the others are only counted
# Owners of a cell that are not requests.
FREE = -1
KEPT = -2
SHARED = -3  # by several requests of the client's key
SECRET = secrets.token_bytes(16)  # hides a request's number, which would show how many came before
# Fields that a client sees of a request with another key.
OTHERS_FIELDS = ("id", "state", "tokens", "held", "pages", "preemptions")


@dataclass(frozen=True)
class Departed:
    """A request that has left the engine: its counts, and names of its pages in the index."""

    tab: str
    salt: str
    counts: dict
    keys: tuple[Hashable, ...]


def departed(engine: Engine, request: Request, tab: str, held: int) -> Departed:
    """Describe a request that has left the engine. `held`: the tokens that it had in the cache.

    Call it in the engine's thread. It looks for the request's full pages again.
    """
    keys = tuple(engine.pool.index.names(request.known[:-1], request.salt))
    fed = held
    if request.tokens:
        fed = len(request.prompt)
    counts = {"id": opaque(request), "reason": request.finish_reason} | lengths(request, fed)
    return Departed(tab, request.salt, counts, keys)


def snapshot(engine: Engine, tabs: Mapping[int, str], left: Iterable[Departed] = ()) -> dict:
    """The whole state. `tabs`: request number → the tab that sent it."""
    pool = engine.pool
    scheduler = engine.scheduler
    counts = engine.metrics
    listed = [*scheduler.running, *islice(scheduler.waiting, MOST_WAITING)]
    kept = [page for page in pool.index.pages() if pool.is_idle(page)]
    return {
        "pool": {
            "pages": len(pool.references),
            "free": len(pool.free),
            "kept": len(kept),
            "page_size": pool.page_size,
            "bytes_per_page": pool.bytes_per_page,
            "cell": pages_per_cell(pool),
            "states": states_kept(pool),
        },
        "engine": {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "step_tokens": scheduler.step_tokens,
            "steps": counts.steps,
            "prefill_tokens": counts.prefill_tokens,
            "decode_tokens": counts.decode_tokens,
            "reused_tokens": counts.reused_tokens,
            "preemptions": counts.preemptions,
            "finished": counts.finished,
        },
        "clients": dict(scheduler.turns.clients),
        "requests": [described(request, tabs.get(request.number, "")) for request in listed],
        "ended": [
            (one.tab, one.salt, one.counts | {"kept": still_kept(pool, one)}) for one in left
        ],
        "cells": cells(pool, [request.cache.tables[0] for request in scheduler.running], kept),
    }


def view(taken: dict, salt: str, tab: str) -> dict:
    """The state as a client with this key and tab sees it: `whose` is "tab", "key" or "other"."""
    requests = [visible(request, salt, tab) for request in taken["requests"]]
    mine = [
        counts
        for theirs, their_salt, counts in taken["ended"]
        if tab and (theirs, their_salt) == (tab, salt)
    ]
    owners = [visible_owner(owner, requests) for owner in taken["cells"]]
    served = taken["clients"].get(salt, Client())
    shown = {name: value for name, value in taken.items() if name != "clients"}
    return shown | {
        "key": {"prompt_tokens": served.prompt_tokens, "generated_tokens": served.new_tokens},
        "requests": requests,
        "ended": mine[-1:],
        "cells": runs(owners),
    }


# --- requests -------------------------------------------------------------------------------------


def opaque(request: Request) -> str:
    """A request's name that reveals nothing about its number."""
    return hashlib.blake2b(str(request.number).encode(), key=SECRET, digest_size=6).hexdigest()


def lengths(request: Request, held: int) -> dict:
    """Counts of tokens: the prompt, its reused ones, those prefilled so far, and the answer."""
    prompt = len(request.prompt)
    return {
        "prompt": prompt,
        "reused": request.reused_tokens,
        "prefilled": max(0, min(held, prompt) - request.reused_tokens),
        "generated": len(request.tokens),
    }


def described(request: Request, tab: str) -> dict:
    """A request that waits or runs. "tokens" counts all its tokens, "held" those in the cache."""
    pages = 0
    if request.cache is not None:
        pages = len(request.cache.tables[0])
    return {
        "salt": request.salt,
        "tab": tab,
        "id": opaque(request),
        "state": state(request),
        "tokens": len(request.prompt) + len(request.tokens),
        "held": request.fed,
        "pages": pages,
        "preemptions": request.preemptions,
    } | lengths(request, request.fed)


def state(request: Request) -> str:
    """A request waits without pages, prefills, or decodes one token per step."""
    if request.cache is None:
        return "queued"
    if request.tokens and request.pending == 1:
        return "decode"
    return "prefill"


def visible(request: dict, salt: str, tab: str) -> dict:
    """A request without key and tab; with another key, only OTHERS_FIELDS of it."""
    if request["salt"] != salt:
        return {"whose": "other"} | {name: request[name] for name in OTHERS_FIELDS}
    whose = "tab" if tab and request["tab"] == tab else "key"
    return {"whose": whose} | {
        name: value for name, value in request.items() if name not in ("salt", "tab")
    }


def still_kept(pool: PrefixPool, one: Departed) -> int:
    """Tokens from the request's beginning that the next request would find in the cache."""
    return pool.page_size * sum(1 for _ in takewhile(pool.index.holds, one.keys))


# --- the pool -------------------------------------------------------------------------------------


def states_kept(pool: PrefixPool) -> dict[str, int]:
    """Snapshots of recurrent layers: how many, at most, bytes, and as many tokens' keys and values.

    All are 0 for a model without recurrent layers.
    """
    kept = pool.snapshots
    tokens = 0
    if pool.bytes_per_page:
        tokens = kept.nbytes * pool.page_size // pool.bytes_per_page
    return {
        "held": len(kept),
        "most": kept.most,
        "bytes": kept.nbytes,
        "as_tokens": tokens,
        "hits": kept.hits,
    }


def pages_per_cell(pool: PrefixPool) -> int:
    """Pages per cell of the picture; 1 if the pool has at most CELLS pages."""
    return -(-len(pool.references) // CELLS)


def cells(pool: PrefixPool, tables: list[list[int]], kept: list[int]) -> list[tuple[int, bool]]:
    """Per cell: (owner, whether several requests hold pages of it).

    The owner is the one with the most pages in the cell: a request, by its index in `tables`, or
    KEPT for pages that only the index of prefixes holds. An empty cell is FREE.
    """
    size = pages_per_cell(pool)
    found: list[Counter] = [Counter() for _ in range(-(-len(pool.references) // size))]
    for owner, pages in [*enumerate(tables), (KEPT, kept)]:
        for cell, count in Counter(page // size for page in pages).items():
            found[cell][owner] = count
    return [
        (max(counts, key=counts.__getitem__), several(counts)) if counts else (FREE, False)
        for counts in found
    ]


def several(counts: Counter) -> bool:
    """Whether more than one request holds pages of a cell."""
    return sum(owner >= 0 for owner in counts) > 1


def visible_owner(cell: tuple[int, bool], requests: list[dict]) -> int:
    """The owner of a cell; SHARED only for the client's own key, which hides sharing by others."""
    owner, more = cell
    if more and owner >= 0 and requests[owner]["whose"] != "other":
        return SHARED
    return owner


def runs(values: list[int]) -> list[list[int]]:
    """Run-length encoding: [7, 7, −1] → [[7, 2], [−1, 1]]."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found
