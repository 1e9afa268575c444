"""Prefix reuse of a request trace, computed without a model: which pages of a prompt a server would
still have had.

    traces       files of requests → requests as lists of pages
    indexes      what holds the pages: a table of pages, a pool of nanokv's kind, a radix tree
    policies     which page goes first when memory is full
    order        which of the waiting requests is next
    simulation   one run of a trace over an index
    prices       what the prompts cost with and without reuse
    changes      a conversation that goes on after a change: the tokens that are had and computed
    served       the same through an engine, with its times

    trace = read("trace.jsonl.gz")
    replay(trace, Setup(page=512, pages=10_000)).rate      0.211: the share of pages that was reused
"""

from nanokv.lab.replay.indexes import INDEXES
from nanokv.lab.replay.policies import POLICIES
from nanokv.lab.replay.prices import Prices
from nanokv.lab.replay.simulation import Replay, Result, Setup, replay
from nanokv.lab.replay.traces import BlockTrace, TokenTrace, read

__all__ = [
    "INDEXES",
    "POLICIES",
    "BlockTrace",
    "Prices",
    "Replay",
    "Result",
    "Setup",
    "TokenTrace",
    "read",
    "replay",
]
