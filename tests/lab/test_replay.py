"""`nanokv replay`: the figures that are published for Mooncake's traces, and every policy against one that scans.

The slow twin below keeps a list and looks at every page for each decision; the bound is compared with all choices that
could have been made.
"""

import gzip
import itertools
import json
import os
import random
from pathlib import Path

import pytest
import torch

from nanokv.cache import PrefixPool, make_cache
from nanokv.config import Config
from nanokv.engine import Engine
from nanokv.errors import NanoKVError
from nanokv.lab.replay import INDEXES, POLICIES, Prices, Replay, Setup, read, replay
from nanokv.lab.replay.traces import Blocks, BlockTrace, Tokens, TokenTrace
from small_model import small

REAL = [name for name in POLICIES if name != "belady"]


@pytest.fixture(scope="session")
def traces() -> Path:
    """Folder with Mooncake's traces: $NANOKV_TRACES, else ../shared/traces."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "traces"
    folder = Path(os.environ.get("NANOKV_TRACES") or beside)
    if not folder.is_dir():
        pytest.skip(f"Mooncake's traces are not in {folder} (set NANOKV_TRACES)")
    return folder


# --- published figures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("conversation", [4.4, 21.1, 35.5, 36.6]),
        pytest.param("synthetic", [8.2, 42.3, 64.0, 64.0], marks=pytest.mark.slow),
    ],
)
def test_mooncakes_traces_give_the_published_hit_rates(traces, name, rates):
    one = Replay(read(traces / f"mooncake-{name}.jsonl.gz"))
    found = [one(Setup(512, pages)).rate for pages in (1_000, 10_000, 50_000, None)]
    assert [round(100 * rate, 1) for rate in found] == rates


# --- small traces, by a slow twin -----------------------------------------------------------------------------------


def conversations(seed: int, requests: int = 40, vocabulary: int = 2) -> TokenTrace:
    """Prompts of few distinct tokens, so that many begin alike; some go on where an earlier one ended."""
    draw = random.Random(seed)
    rows: list[Tokens] = []
    for _ in range(requests):
        tokens = draw.choices(range(vocabulary), k=draw.randint(1, 14))
        if rows and draw.random() < 0.5:
            before = draw.choice(rows)
            tokens = (before.prompt + before.output + tokens)[:20]
        output = draw.choices(range(vocabulary), k=draw.randint(0, 3))
        rows.append(Tokens(tokens, output, draw.choice(["", "", "a"])))
    return TokenTrace(rows)


def prefixes(request: Tokens, page: int) -> list[tuple]:
    """The full pages of a request, each as the salt and all tokens up to its end."""
    tokens = request.prompt + request.output
    return [(request.salt, *tokens[:end]) for end in range(page, len(tokens) + 1, page)]


class Twin:
    """Held pages as a list of dicts. `hits` are the pages found per request."""

    def __init__(self, trace: TokenTrace, page: int, capacity: int, index: str, policy: str):
        self.rows, self.page, self.capacity = trace.rows, page, capacity
        self.index, self.policy = index, policy
        self.held: dict[tuple, dict] = {}
        self.age = 0.0
        # Of equal ranks the page goes that came first into the trace.
        self.number: dict[tuple, int] = {}
        for row, request in zip(self.rows, trace.requests(page), strict=True):
            self.number |= zip(prefixes(row, page), request.keys, strict=True)
        self.hits = [self.step(now) for now in range(len(self.rows))]

    def step(self, now: int) -> int:
        row = self.rows[now]
        wanted = prefixes(row, self.page)
        sought = wanted[: (len(row.prompt) - 1) // self.page]
        hits = len(list(itertools.takewhile(self.held.__contains__, sought)))
        wanted = wanted[: self.capacity]
        pinned = wanted if self.index == "flat" else wanted[:hits]
        taken = min(-(-(len(row.prompt) + len(row.output)) // self.page), self.capacity)
        while sum(prefix not in pinned for prefix in self.held) + taken > self.capacity:
            self.evict(pinned)
        if self.index == "hash":
            intact = len(list(itertools.takewhile(self.held.__contains__, wanted)))
            for prefix in wanted[intact:]:
                self.held.pop(prefix, None)
        for place, prefix in enumerate(wanted):
            page = self.held.setdefault(prefix, {"added": now, "uses": 0, "place": place})
            page |= {"used": now, "uses": page["uses"] + 1, "span": len(wanted), "age": self.age}
        return hits

    def evict(self, pinned: list) -> None:
        free = [prefix for prefix in self.held if prefix not in pinned]
        if self.index == "radix":
            parents = {prefix[: -self.page] for prefix in self.held}
            free = [prefix for prefix in free if prefix not in parents]
        gone = min(free, key=self.rank)
        if self.policy == "size":
            self.age = max(self.age, self.rank(gone)[0])
        del self.held[gone]

    def rank(self, prefix: tuple) -> tuple:
        page = self.held[prefix]
        place = page["place"] if self.index == "flat" else -page["place"]
        ranks = {
            "lru": (page["used"],),
            "fifo": (page["added"],),
            "lfu": (page["uses"], page["used"]),
            "size": (page["age"] + page["uses"] / page["span"],),
        }
        return *ranks[self.policy], place, self.number[prefix]


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("policy", REAL)
def test_every_policy_evicts_what_a_scan_of_all_pages_would(index, policy):
    for seed, capacity, page in itertools.product(range(3), (5, 13), (1, 2)):
        trace = conversations(seed)
        found = replay(trace, Setup(page, capacity, index, policy)).hit_pages
        twin = sum(Twin(trace, page, capacity, index, policy).hits)
        assert found == twin, (seed, capacity, page)


def best(trace: TokenTrace, capacity: int) -> int:
    """The most hits of any eviction, by trying all: states are sets of held pages of one token."""
    states = {frozenset(): 0}
    for row in trace.rows:
        wanted = prefixes(row, 1)
        sought = wanted[: len(row.prompt) - 1]
        after: dict[frozenset, int] = {}
        for held, hits in states.items():
            hits += len(list(itertools.takewhile(held.__contains__, sought)))
            others = sorted(held - set(wanted))
            room = capacity - min(len(row.prompt) + len(row.output), capacity)
            for kept in itertools.combinations(others, min(room, len(others))):
                state = frozenset(kept).union(wanted[:capacity])
                after[state] = max(after.get(state, 0), hits)
        states = after
    return max(states.values())


def test_beladys_bound_is_the_best_of_all_evictions():
    for seed in range(20):
        draw = random.Random(seed)
        rows = [Tokens(draw.choices(range(3), k=draw.randint(1, 4)), [], "") for _ in range(12)]
        found = replay(TokenTrace(rows), Setup(1, 5, "radix", "belady")).hit_pages
        assert found == best(TokenTrace(rows), 5), seed


@pytest.mark.parametrize("index", INDEXES)
def test_no_policy_is_better_than_beladys_bound(index):
    beaten = 0
    for seed in range(20):
        one = Replay(conversations(seed, 60, 3))
        for capacity in (6, 12, 24):
            bound = one(Setup(2, capacity, index, "belady")).hit_pages
            rates = [one(Setup(2, capacity, index, policy)).hit_pages for policy in REAL]
            assert max(rates) <= bound
            beaten += max(rates) < bound
    assert beaten > 10, "a bound that all reach proves nothing"


def test_a_radix_tree_finds_what_hashed_pages_find():
    """Under LRU a page is used whenever one behind it is, so the table evicts leaves first as well."""
    for seed, page, capacity in itertools.product(range(8), (1, 3), (6, 11, None)):
        one = Replay(conversations(seed, 80))
        found = [one(Setup(page, capacity, index)).hit_tokens for index in ("hash", "radix")]
        assert found[0] == found[1] > 0
    one = Replay(conversations(3, 80))
    assert one(Setup(1, 11, "hash", "fifo")) != one(Setup(1, 11, "radix", "fifo"))


# --- the pool of the library ----------------------------------------------------------------------------------------


CONFIG = Config(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


def served(pool: PrefixPool, row: Tokens) -> int:
    """Tokens that the pool had of a request, which is then computed (with keys of zeros) and leaves."""
    cache = make_cache("prefix", CONFIG, pool=pool, salt=row.salt)
    hits = cache.reuse(row.prompt)
    tokens = row.prompt + row.output
    new = torch.zeros(1, 1, len(tokens) - hits, 8)  # (B,Hk,T,D)
    cache[0].append(new, new)
    cache.remember(tokens)
    cache.free()
    return hits


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("page", [1, 4])
def test_an_index_finds_what_that_of_the_prefix_pool_finds(page, index):
    some = 0
    for seed, capacity in itertools.product(range(3), (24, 60)):
        trace = conversations(seed, 60)
        pool = PrefixPool(CONFIG, capacity, page, index)
        hits = sum(served(pool, row) for row in trace.rows)
        assert replay(trace, Setup(page, capacity, index)).hit_tokens == hits
        some += hits < replay(trace, Setup(page, None)).hit_tokens
    assert some or page > 1, "nothing was ever evicted"


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_an_engine_reuses_what_the_replay_of_its_requests_computes(index):
    """Prompts that begin alike, in a pool that is too small; the trace has the tokens that were drawn."""
    model, _ = small(num_hidden_layers=1)
    for page, pages in ((1, 40), (4, 9)):
        engine = Engine(model, pages, page, prefix=index)
        rows, evicted = [], 0
        for row in conversations(page, 25).rows:
            request = engine.submit(row.prompt, 3, salt=row.salt, eos_token_ids=())
            engine.run()
            rows.append(Tokens(row.prompt, request.tokens[:-1], row.salt))
        trace = TokenTrace(rows)
        found = replay(trace, Setup(page, pages, index)).hit_tokens
        assert engine.metrics.reused_tokens == found > 0
        evicted += found < replay(trace, Setup(page, None)).hit_tokens
        assert evicted or page > 1, "nothing was ever evicted"


# --- page sizes, snapshots, order, prices ---------------------------------------------------------------------------


def two(first: list[int], second: list[int]) -> TokenTrace:
    return TokenTrace([Tokens(first, [], ""), Tokens(second, [], "")])


def test_only_full_pages_are_reused_and_never_the_last_token():
    ids = list(range(10))
    for page, tokens in ((1, 9), (2, 8), (4, 8), (9, 9), (10, 0)):
        assert replay(two(ids, ids), Setup(page)).hit_tokens == tokens
    assert replay(two(ids, [*ids[:5], 99, 99]), Setup(2)).hit_tokens == 4
    other_salt = TokenTrace([Tokens(ids, [], ""), Tokens(ids, [], "a")])
    assert replay(other_salt, Setup(1)).hit_tokens == 0
    answered = TokenTrace([Tokens(ids, [10, 11], ""), Tokens([*ids, 10, 11, 12], [], "")])
    assert replay(answered, Setup(4)).hit_tokens == 12


def test_a_recurrent_model_reuses_up_to_the_last_snapshot():
    ids = list(range(100))
    for snapshot, tokens in ((0, 96), (8, 96), (16, 96), (32, 96), (33, 66), (64, 64), (128, 0)):
        assert replay(two(ids, ids), Setup(8, snapshot=snapshot)).hit_tokens == tokens
    # 1,584 tokens' bytes per 512 tokens: of 1,000 pages 244 stay.
    assert Setup(512, 1_000, snapshot=512, weight=1_584).capacity == 244
    assert Setup(512, 1_000, snapshot=512).capacity == 1_000


def test_pages_of_several_blocks_are_named_by_their_last_block():
    trace = BlockTrace([Blocks([0, 1, 2], 1500), Blocks([0, 1, 3, 4], 2000), Blocks([0, 5], 600)])
    assert [request.keys for request in trace.requests(1024)] == [[1, 2], [1, 4], [5]]
    result = replay(trace, Setup(512))
    assert (result.pages, result.hit_pages, result.hit_tokens) == (9, 3, 3 * 512)
    assert replay(trace, Setup(1024)).hit_pages == 1
    with pytest.raises(NanoKVError, match="pages of 100 tokens, but an id") as refused:
        trace.requests(100)
    assert "--page 512" in refused.value.hint


def test_the_longest_cached_prefix_first_keeps_what_will_be_used():
    """Two talks by turns in a memory for one: in order of arrival nothing is found, sorted all but the first."""
    one, other = [0] * 8 + [7], [1] * 8 + [7]
    trace = TokenTrace([Tokens(one if n % 2 else other, [], "") for n in range(8)])
    assert replay(trace, Setup(4, 3)).hit_tokens == 0
    assert replay(trace, Setup(4, 3, window=8)).hit_tokens == 6 * 8
    assert replay(trace, Setup(4, 3, window=2)).hit_tokens < 6 * 8
    assert {replay(trace, Setup(4, 3, window=n)).tokens for n in (1, 2, 8, 99)} == {8 * 9}
    with pytest.raises(NanoKVError, match="Belady's bound with 2 waiting"):
        replay(trace, Setup(4, 3, policy="belady", window=2))


def test_prices_by_hand():
    result = replay(two(list(range(10)), list(range(10))), Setup(5))
    assert (result.tokens, result.hit_tokens, result.hit_requests) == (20, 5, 1)
    assert Prices(2, 0.2, 2.5).with_cache(result) * 1e6 == pytest.approx(5 * 0.2 + 15 * 2.5)
    assert Prices(2, 0.2, 2.5).without(result) * 1e6 == pytest.approx(40)


# --- files ----------------------------------------------------------------------------------------------------------


MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list, not an object"),
        ("{}", "exactly one of hash_ids, tokens and messages"),
        ('{"tokens": [1], "hash_ids": [1]}', "exactly one of"),
        ('{"tokens": [1, 2]}', "another form than the lines before"),
        (
            '{"input_length": 600, "hash_ids": [0]}',
            "1 hash_ids for 600 tokens: blocks of 512 are 2",
        ),
        ('{"input_length": 0, "hash_ids": []}', "input_length is 0"),
        ('{"hash_ids": [0, 1]}', "input_length is missing"),
        ('{"input_length": 600, "hash_ids": [0, -1]}', r"hash_ids\[1\] is -1"),
        ('{"input_length": 600, "hash_ids": [0, true]}', r"hash_ids\[1\] is True"),
        ('{"input_length": 600, "hash_ids": "0"}', "hash_ids is '0': a list"),
        ('{"input_length": 600, "hash_ids": [1, 0]}', "block 1 follows no block here and block 0"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "messages need a tokenizer"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, line, told):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{MOONCAKE}\n\n{line}\n")
    with pytest.raises(NanoKVError, match=rf"trace.jsonl, line 3: .*{told}") as refused:
        read(path)
    assert (
        refused.value.hint
        or told in ("not JSON", "input_length is 0")
        or "expected" in str(refused.value)
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"tokens": []}', "a prompt of 0 tokens"),
        ('{"tokens": [1], "salt": 3}', "salt is 3"),
        ('{"tokens": [1], "output": [1.5]}', r"output\[0\] is 1.5"),
    ],
)
def test_a_bad_line_of_tokens_is_refused(tmp_path, line, told):
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"tokens": [1]}}\n{line}\n')
    with pytest.raises(NanoKVError, match=rf"line 2: {told}"):
        read(path)


def test_a_file_that_is_empty_or_cut_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(NanoKVError, match="has no requests"):
        read(path)
    packed = gzip.compress(MOONCAKE.encode() * 100)
    path.write_bytes(packed[:-9])
    with pytest.raises(NanoKVError, match="is damaged"):
        read(path)
    path.write_bytes(gzip.compress(f"{MOONCAKE}\n{MOONCAKE}\n".encode()))
    assert replay(read(path), Setup(512)).rate == 0.5


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def talk(tmp_path):
    path = tmp_path / "talk.jsonl"
    said = [{"role": "user", "content": "Hello, my name is Zorbla. " * 3}]
    more = [*said, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye."}]
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in (said, more)))
    return path


def test_the_command_prints_a_table_of_80_columns_and_json(cli, talk):
    words = ("replay", talk, "-m", "tiny", "--index", ",".join(INDEXES), "--policy")
    code, out, err = cli(*words, ",".join(POLICIES), "--page", "1,4", "--tokens", "16,all")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) == 4 + 3 * 2 * 2 and "Claude Sonnet 5" in out
    code, out, err = cli(*words, "lru,belady", "--json", "--price", "1")
    found = json.loads(out)
    assert (code, err, found["unit"], found["requests"]) == (0, "", "tokens", 2)
    assert len(found["runs"]) == 3 * 4 * 2 and found["runs"][0]["hit_tokens"] % 16 == 0
    assert found["runs"][0]["hit_tokens"] > 0
    assert found["runs"][0]["cost_without"] == pytest.approx(found["runs"][0]["tokens"] / 1e6)


@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        (["--policy", "lrv"], "'lrv' is not one of", "did you mean lru?"),
        (["--page", "0"], "0 is not a whole number", ""),
        (["--page", "all"], "--page all", "--page 16"),
        (["--tokens", "8"], "without room for one page of 16 tokens", "--tokens 16"),
        (
            ["--tokens", "32", "--snapshot", "10", "--weight", "11"],
            "one page of 16 tokens and its part of a snapshot of 11 tokens every 10",
            "--tokens 48",
        ),
        (["--pages", "1"], "--pages", ""),
        (["--weight", "8"], "--weight is the size of a snapshot", "--snapshot N"),
        (
            ["--waiting", "4", "--policy", "belady"],
            "Belady's bound with 4 waiting",
            "another policy",
        ),
        (["--block", "7"], "", ""),
    ],
)
def test_a_flag_that_means_nothing_is_refused(cli, tmp_path, words, told, hint):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n')
    code, out, err = cli("replay", path, *words)
    if not told:
        assert code == 0  # has no effect on tokens
        return
    assert (code, out) == (2, "") and told in err and hint in err
    assert "Traceback" not in err


def test_memories_of_as_many_pages_are_one_row(cli, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n')
    code, out, _ = cli("replay", path, "--tokens", "31,16,32,all,all", "--json")
    runs = json.loads(out)["runs"]
    assert code == 0
    assert [run["setup"]["pages"] for run in runs if run["setup"]["policy"] == "lru"] == [
        1,
        2,
        None,
    ]


def test_a_bad_trace_is_one_line_and_a_hint(cli, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1]}\n{"tokens": 1}\n')
    code, out, err = cli("replay", path)
    assert (code, out) == (2, "") and "line 2: tokens is 1: a list" in err
    assert len(err.splitlines()) <= 2
    code, _, err = cli("replay", tmp_path / "none.jsonl")
    assert code == 2 and "none.jsonl" in err
