"""The engine at one moment as numbers: requests, pages, counts. No text and no token id is among them.

    taken = snapshot(engine, tabs, left)        in the engine's thread, between two steps: O(pages in use)
    view(taken, salt, tab)                      what one client may see of it; pure, in any thread

Of another key's requests a client sees state, tokens and pages, and nothing that says what they share.
"""

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile

from nanokv.cache.prefix import PrefixPool
from nanokv.engine import Engine, Request

CELLS = 512  # of the picture of the pool; a larger pool has several pages in a cell
MOST_WAITING = 64  # requests of the queue that are listed; the others are counted
# Owners of a cell that are no request; SHARED: several of the client's own key.
FREE, KEPT, SHARED = -1, -2, -3
SECRET = secrets.token_bytes(16)  # the number of a request would tell how many came before it
# Of a request with another key.
OTHERS_FIELDS = ("id", "state", "tokens", "held", "pages", "preemptions")


@dataclass(frozen=True)
class Departed:
    """A request that has left the engine: its counts, and the hashes under which its full pages may still be found."""

    tab: str
    salt: str
    counts: dict
    keys: tuple[bytes, ...]


def departed(engine: Engine, request: Request, tab: str, held: int) -> Departed:
    """In the engine's thread, when the request is out; `held` tokens were in the cache. Hashes its tokens once more."""
    keys = tuple(key for key, _ in engine.pool.chain(request.known[:-1], request.salt))
    fed = len(request.prompt) if request.tokens else held
    counts = {"id": opaque(request), "reason": request.finish_reason} | lengths(request, fed)
    return Departed(tab, request.salt, counts, keys)


def snapshot(engine: Engine, tabs: Mapping[int, str], left: Iterable[Departed] = ()) -> dict:
    """All of it. `tabs`: request number → the tab that it came from."""
    pool, scheduler, counts = engine.pool, engine.scheduler, engine.metrics
    listed = [*scheduler.running, *islice(scheduler.waiting, MOST_WAITING)]
    kept = [entry.page for entry in pool.index.values() if pool.references[entry.page] == 1]
    return {
        "pool": {
            "pages": len(pool.references),
            "free": len(pool.free),
            "kept": len(kept),
            "page_size": pool.page_size,
            "bytes_per_page": pool.bytes_per_page,
            "cell": pages_per_cell(pool),
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
        "requests": [described(request, tabs.get(request.number, "")) for request in listed],
        "ended": [
            (one.tab, one.salt, one.counts | {"kept": still_kept(pool, one)}) for one in left
        ],
        "cells": cells(pool, [request.cache.tables[0] for request in scheduler.running], kept),
    }


def view(taken: dict, salt: str, tab: str) -> dict:
    """For a client with this key and this tab: `whose` is "tab", "key" or "other"."""
    requests = [visible(request, salt, tab) for request in taken["requests"]]
    mine = [
        counts
        for theirs, their_salt, counts in taken["ended"]
        if tab and (theirs, their_salt) == (tab, salt)
    ]
    owners = [visible_owner(owner, requests) for owner in taken["cells"]]
    return taken | {"requests": requests, "ended": mine[-1:], "cells": runs(owners)}


# --- requests -------------------------------------------------------------------------------------


def opaque(request: Request) -> str:
    """A name that says nothing."""
    return hashlib.blake2b(str(request.number).encode(), key=SECRET, digest_size=6).hexdigest()


def lengths(request: Request, held: int) -> dict:
    """Tokens: of the prompt those that were reused and those computed by now; those of the answer."""
    prompt = len(request.prompt)
    return {
        "prompt": prompt,
        "reused": request.reused_tokens,
        "prefilled": max(0, min(held, prompt) - request.reused_tokens),
        "generated": len(request.tokens),
    }


def described(request: Request, tab: str) -> dict:
    """Of a request that waits or runs. "tokens" are all that it knows, "held" those in the cache."""
    decodes = request.tokens and request.pending == 1
    state = "queued" if request.cache is None else "decode" if decodes else "prefill"
    return {
        "salt": request.salt,
        "tab": tab,
        "id": opaque(request),
        "state": state,
        "tokens": len(request.prompt) + len(request.tokens),
        "held": request.fed,
        "pages": len(request.cache.tables[0]) if request.cache is not None else 0,
        "preemptions": request.preemptions,
    } | lengths(request, request.fed)


def visible(request: dict, salt: str, tab: str) -> dict:
    """Without key and tab; of another key's request only OTHERS_FIELDS."""
    if request["salt"] != salt:
        return {"whose": "other"} | {name: request[name] for name in OTHERS_FIELDS}
    whose = "tab" if tab and request["tab"] == tab else "key"
    return {"whose": whose} | {
        name: value for name, value in request.items() if name not in ("salt", "tab")
    }


def still_kept(pool: PrefixPool, one: Departed) -> int:
    """Tokens from its beginning that the next request would find."""
    return pool.page_size * sum(1 for _ in takewhile(pool.index.__contains__, one.keys))


# --- the pool -------------------------------------------------------------------------------------


def pages_per_cell(pool: PrefixPool) -> int:
    """1 up to CELLS pages."""
    return -(-len(pool.references) // CELLS)


def cells(pool: PrefixPool, tables: list[list[int]], kept: list[int]) -> list[tuple[int, bool]]:
    """Of each cell (its owner, whether more requests hold it): the request with most pages in it, by its place in
    `tables`; KEPT where the index alone holds some; FREE."""
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
    """Is a cell held by more than one request?"""
    return sum(owner >= 0 for owner in counts) > 1


def visible_owner(cell: tuple[int, bool], requests: list[dict]) -> int:
    """That another key's requests share pages is not told."""
    owner, more = cell
    return SHARED if more and owner >= 0 and requests[owner]["whose"] != "other" else owner


def runs(values: list[int]) -> list[list[int]]:
    """[7, 7, −1] → [[7, 2], [−1, 1]]."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found
