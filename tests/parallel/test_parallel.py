"""Several ranks over the loopback, against one process: the same logits, tokens and shares of bytes; and no hang.

The oracle is the plain model in this process, which other tests compare with transformers. The ranks of a size are
started once, and read their parts from folders on the disk.
"""

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import parallel_work
from nanokv import costs
from nanokv.cache import KVCache, make_cache
from nanokv.config import Config
from nanokv.costs.memory import FAMILY
from nanokv.errors import CacheError, ParallelError
from nanokv.inference import decode, prefill, score
from nanokv.loading import random_model
from nanokv.parallel.group import Alone
from nanokv.parallel.reading import fingerprint
from nanokv.parallel.shards import Shard
from nanokv.parallel.sizes import check_sizes
from nanokv.parallel.watch import Watch
from oracle import SHAPES, pair, random_ids
from ranks import RankError, Ranks
from weights_loader.shards import read_entries

pytestmark = pytest.mark.slow
SPLITS = [(name, n) for name in SHAPES for n in ((2, 3) if name == "G3-yarn" else (2, 4))]
PROMPTS = [ids.tolist() for ids in (*random_ids(1, 3, 9), random_ids(2, 1, 4)[0])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of every shape; weights in the names of the files' format, of a vocabulary that nothing divides."""
    root = tmp_path_factory.mktemp("parallel")
    models = {name: pair(**shape)[1] for name, shape in SHAPES.items()}
    for name, model in models.items():
        model.save(root / name)
    return {name: (root / name, model) for name, model in models.items()}


@pytest.fixture(scope="module")
def ranks_of():
    """Ranks of a size, kept until all tests are done."""
    kept = {}
    yield lambda size: kept[size] if size in kept else kept.setdefault(size, Ranks(size))
    for ranks in kept.values():
        ranks.close()


def distance(a, b) -> float:
    return (torch.as_tensor(a) - b).abs().max().item()


@pytest.mark.parametrize(("name", "size"), SPLITS)
def test_logits_are_those_of_one_process_and_bytes_its_share(name, size, folders, ranks_of):
    folder, model = folders[name]
    if name == "G3-yarn" and size == 3:  # its 2 KV heads neither divide 3 nor are divided by it
        with pytest.raises(RankError, match="num_key_value_heads 2 neither divides 3"):
            ranks_of(3).call("paths", folder=str(folder), ids=[[1]])
        return
    ids = random_ids(0, 2, 11)
    cache = make_cache("dict", model.config, 2)
    right = {"score": score(model, ids), "prefill": prefill(model, ids[:, :-1], cache)}
    right["decode"] = decode(model, ids[:, -1:], cache, cache.length)
    found = ranks_of(size).call("paths", folder=str(folder), ids=ids.tolist())
    for rank in found:
        assert {path: rank[path] == found[0][path] for path in right} == dict.fromkeys(
            right, True
        ), "to the last bit"
        assert max(distance(rank[path], right[path]) for path in right) <= 1e-5
        copies = max(1, size // model.config.num_key_value_heads)  # of each KV head
        assert rank["cache_bytes"] * size == cache.nbytes * copies


def test_a_sum_that_is_left_out_is_seen(folders, ranks_of):
    folder, model = folders["G2-tied"]
    wrong = ranks_of(2).call("whole", folder=str(folder), prompt=PROMPTS[0])
    assert distance(wrong[0], score(model, [PROMPTS[0]])) > 0.1


@pytest.mark.parametrize(
    ("name", "size"), [("G2-tied", 2), ("moe-every-2nd", 4), ("llama-G4-rope-bias", 2)]
)
def test_every_way_to_answer_gives_the_tokens_of_one_process(name, size, folders, ranks_of):
    folder, model = folders[name]
    parallel_work.model_of.cache_clear()
    right = answers_of_one(model)
    found = ranks_of(size).call("answers", folder=str(folder), prompts=PROMPTS)
    assert found == [right] * size
    assert right["preemptions"] > 0


def answers_of_one(model):
    """`answers` of a group of one, on the model of this process."""

    class One(Alone):
        pass

    original, parallel_work.model_of = parallel_work.model_of, lambda group, folder: model
    try:
        return json.loads(json.dumps(parallel_work.answers(One(), "", PROMPTS)))
    finally:
        parallel_work.model_of = original


@pytest.mark.parametrize("size", [2, 4])
def test_the_others_follow_rank_0(size, folders, ranks_of):
    """Also where a stop string ends an answer, which only rank 0 knows: they hear of it with its next word."""
    folder, model = folders["G2-tied"]
    original, parallel_work.model_of = parallel_work.model_of, lambda group, folder: model
    try:
        right = json.loads(json.dumps(parallel_work.led(Alone(), "", PROMPTS)))
    finally:
        parallel_work.model_of = original
    found = ranks_of(size).call("led", folder=str(folder), prompts=PROMPTS)
    assert found == [right] + [right[-1:]] * (size - 1)


@pytest.mark.parametrize("size", [2, 4])
def test_a_cache_that_every_rank_saves_goes_on_to_the_last_bit(size, folders, ranks_of, tmp_path):
    """A file for each rank; whose it is stands in it, and no other rank, nor one process, takes it."""
    folder, model = folders["G2-tied"]
    path = tmp_path / "talk.kv"
    first, *others = ranks_of(size).call(
        "kept", folder=str(folder), prompts=PROMPTS, path=str(path)
    )
    third, other, again, lost, _ = first[2:]
    assert third == again and third != other and len(set(third[1])) > 1
    assert lost.startswith(f"rank 1 of {size}: ") and "No such file" in lost
    for checksums in others:
        assert checksums[2] == checksums[4] != checksums[3] and len(checksums) == 6
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "talk.kv",
        *(f"talk.kv.rank{rank}" for rank in range(2, size)),
    ]
    with pytest.raises(CacheError, match=f"was saved by rank 0 of {size}, this is one process"):
        KVCache.load(path, model.config)
    with pytest.raises(CacheError, match=f"was saved by rank 0 of {size}, this is rank 1 of 2"):
        KVCache.load(path, model.config, rank=(1, 2))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_a_rank_takes_the_memory_of_its_share(tmp_path):
    """Shapes of Qwen3-0.6B in bf16 over 2 ranks, each above an idle rank: weights and cache, and 5 % at most."""
    config = FAMILY["Qwen/Qwen3-0.6B"]
    for name, shape in (
        ("small", replace(config, num_hidden_layers=1, vocab_size=512)),
        ("whole", config),
    ):
        random_model(shape, torch.bfloat16).save(tmp_path / name)
    with Ranks(2) as ranks:
        found = ranks.call(
            "memory_of", small=str(tmp_path / "small"), folder=str(tmp_path / "whole")
        )
    whole = sum(file.stat().st_size for file in (tmp_path / "whole").glob("*.safetensors"))
    for rank in found:
        share = rank["weights"] + rank["cache"]
        assert 0.5 <= rank["weights"] / whole < 0.501
        assert rank["cache"] == costs.kv_bytes(config, 65, 1, 2) / 2
        assert share <= rank["pss"] <= 1.05 * share, found


def test_a_rank_that_decides_otherwise_is_told_at_which_step(folders, ranks_of):
    folder, _ = folders["G2-tied"]
    fresh = Ranks(2)
    try:
        with pytest.raises(
            RankError,
            match="drifted apart: in step 70 rank 1 has other tokens or lengths than rank 0",
        ):
            fresh.call("drift", folder=str(folder), at=70)
    finally:
        fresh.close()


def test_the_watch_compares_every_64_forwards_and_says_nothing_where_all_are_alike():
    class Two(Alone):
        def gather(self, x):
            seen.append(len(x))
            return torch.stack((x, x))

    seen, watch = [], Watch(Two())
    for step in range(200):
        watch(None, (torch.tensor([[step]]), None, step, None))
    assert seen == [64, 64, 64]


def test_what_rank_0_says_arrives(ranks_of):
    assert ranks_of(4).call("words") == [[["short", 0], 5000, {"rank": 0}]] * 4


def test_ranks_that_see_different_things_all_say_so(ranks_of):
    ranks_of(4).call("alike", same=True)
    with pytest.raises(RankError) as error:
        ranks_of(4).call("alike", same=False)
    said = "the config of rank 1, 2, 3 differs from that of rank 0"
    assert error.value.args[0] == [["error", "ParallelError", said]] * 4


def test_another_file_on_one_rank_is_refused_before_its_weights_are_read(
    folders, ranks_of, tmp_path
):
    """A fine-tuned checkpoint has the config and the headers of its base."""
    folder, _ = folders["G2-tied"]
    same, other = (shutil.copytree(folder, tmp_path / name) for name in ("same", "other"))
    path = other / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # one bit of a value
    path.write_bytes(data)
    ranks = ranks_of(2)
    for rank, place in enumerate((same, other)):
        line = (
            json.dumps(["paths", {"folder": str(place), "ids": [[1, 2, 3, 4, 5, 6]]}]).encode()
            + b"\n"
        )
        ranks.processes[rank].stdin.write(line)
        ranks.processes[rank].stdin.flush()
    answers = [ranks.answer(rank) for rank in range(2)]
    assert all("of rank 1 differs from that of rank 0" in answer[2] for answer in answers), answers


@pytest.mark.parametrize(
    ("victim", "after"),
    [
        (0, 0.3),
        (2, 0.0),
        pytest.param(0, 0.0, marks=pytest.mark.night),
        pytest.param(2, 0.6, marks=pytest.mark.night),
    ],
)
def test_a_killed_rank_is_an_error_on_every_other_one_within_seconds(victim, after):
    with Ranks(4) as ranks:
        ranks.call("words")  # all have imported torch
        ranks.send("die", rank=victim, after=after)
        began, said = time.monotonic(), [ranks.answer(rank) for rank in range(4)]
        assert ranks.processes[victim].wait(5) == -signal.SIGKILL and said[victim] is None
        others = [answer for rank, answer in enumerate(said) if rank != victim]
        assert all(
            answer[1] == "ParallelError" and "a rank of 4 has ended" in answer[2]
            for answer in others
        ), others
        # Each one that gives up tells its neighbours, a second later at most.
        assert time.monotonic() - began < 10


def test_a_rank_that_is_stuck_is_waited_for_as_long_as_was_said():
    with Ranks(2, timeout=2.0) as ranks:
        ranks.call("words")
        ranks.processes[1].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        ranks.send("die", rank=5, after=0.0)
        answer = ranks.answer(0)
        ranks.processes[1].kill()
        assert answer[1] == "ParallelError" and "did not answer within 2 s" in answer[2], answer
        assert time.monotonic() - began < 6


def test_a_hole_in_the_middle_of_one_tensor_changes_the_fingerprint(folders, tmp_path):
    """Of a copy that was broken off: the file has its size, the header and both ends."""
    folder, _ = folders["G2-tied"]
    entry = max(read_entries(folder).values(), key=lambda entry: entry.nbytes)
    holed = shutil.copytree(folder, tmp_path / "holed")
    assert fingerprint(holed) == fingerprint(folder)
    with open(holed / entry.path.name, "r+b") as file:
        file.seek(entry.start + entry.nbytes // 3)
        file.write(bytes(entry.nbytes // 6))
    assert fingerprint(holed) != fingerprint(folder)


# --- arithmetic: no process -----------------------------------------------------------------------------------------


QWEN3_32B = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            4,
            "num_attention_heads 6 is no multiple of 4",
        ),
        ({"intermediate_size": 100}, 8, "intermediate_size 100 is no multiple of 8"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96},
            6,
            "heads 4 neither",
        ),
        (
            {"vocab_size": 5},
            4,
            "vocab_size 5 leaves a rank of 4 without a word",
        ),  # 2, 2, 1 and none
    ],
)
def test_sizes_that_do_not_divide_are_named_with_what_would_do(changes, ranks, said):
    with pytest.raises(ParallelError, match=said) as error:
        check_sizes(Config(**QWEN3_32B | changes), ranks)
    assert error.value.hint.startswith("--tensor-parallel 1 or 2")


def test_every_value_of_every_weight_lies_on_as_many_ranks_as_it_should():
    """The parts of 8 ranks, put together, are the whole: nothing twice but norms, and KV heads where ranks outnumber
    them."""
    for heads, copies in ((8, 1), (4, 2)):
        config = Config(**QWEN3_32B | {"num_key_value_heads": heads, "vocab_size": 151_937})
        shards = [Shard(config, rank, 8) for rank in range(8)]
        rows = {"q_proj": 8192, "k_proj": heads * 128, "gate_proj": 25600}
        for leaf, count in rows.items():
            parts = [
                shard.part(f"layers.0.self_attn.{leaf}.weight", (count, 5120)) for shard in shards
            ]
            held = [row for part in parts for row in range(part.first, part.end)]
            assert sorted(held) == sorted(list(range(count)) * (copies if leaf == "k_proj" else 1))
        for leaf in ("embed_tokens", "lm_head"):
            words = [shard.part(f"{leaf}.weight", (151_937, 5120)) for shard in shards]
            assert [row for part in words for row in range(part.first, part.end)] == list(
                range(151_937)
            )
        assert shards[3].part("layers.0.self_attn.o_proj.weight", (5120, 8192)).dim == 1
        assert shards[3].part("layers.0.self_attn.o_proj.bias", (5120,)).size == 5120
        assert shards[3].local.num_key_value_heads == max(1, heads // 8)
