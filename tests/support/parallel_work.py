"""What ranks are asked to do in tests: each function runs on every rank of a group, and returns something for JSON."""

import functools
import gc
import os
import time
from pathlib import Path

import torch

from nanokv.cache import make_cache, saving
from nanokv.cache.saving import fingerprint
from nanokv.errors import ParallelError
from nanokv.inference import decode, prefill, prefill_chunks, score
from nanokv.parallel.reading import read_shard
from weights_loader.strict import read_object

CPU = torch.device("cpu")
KEPT = []  # errors


@functools.cache
def model_of(group, folder: str, dtype: str = "float32"):
    """This rank's part of the checkpoint in a folder."""
    fields = read_object(Path(folder) / "config.json")
    return read_shard(group, Path(folder), fields, getattr(torch, dtype), torch.device("cpu"))


def paths(group, folder: str, ids: list) -> dict:
    """Logits of score, of a prefill in two chunks, and of a decode; bytes of weights and cache."""
    model, tokens = model_of(group, folder), torch.tensor(ids)
    cache = make_cache("dict", model.config, len(ids))
    out = {"score": score(model, tokens).tolist()}
    prefill(model, tokens[:, :4], cache)
    out["prefill"] = prefill(model, tokens[:, 4:-1], cache, 4).tolist()
    out["decode"] = decode(model, tokens[:, -1:], cache, cache.length).tolist()
    own = sum(weight.nbytes for weight in model.parameters())
    return out | {"cache_bytes": cache.nbytes, "weight_bytes": own, "length": cache.length}


def die(group, rank: int, after: float) -> str:
    """Sum for ever; one rank kills itself after so many seconds. The others keep their error, as a notebook does, and
    collect no garbage: their connections must end without that."""
    gc.disable()
    until, x = time.monotonic() + after, torch.ones(1000)
    try:
        while True:
            if group.rank == rank and time.monotonic() >= until:
                os.kill(os.getpid(), 9)
            group.sum(x.fill_(1.0))
    except ParallelError as error:
        KEPT.append(error)
        raise


def matrix(group, model: str, situation: str, spec: str) -> list:
    """The logits of one combination of test_matrix.py."""
    import matrix as combined

    return combined.run(split_plain(group, model.partition(" ")[2]), situation, spec).tolist()


@functools.cache
def split_plain(group, family: str):
    """This rank's part of a model of test_matrix.py, which every rank makes whole."""
    import matrix as combined
    from nanokv.parallel.shards import split

    return split(combined.plain(family), group)


def answers(group, folder: str, prompts: list) -> dict:
    """Tokens of the loop, sampled and greedy, with a draft, an early exit, beams, batches and the engine."""
    from nanokv.decoding.batching import generate_padded, generate_ragged
    from nanokv.decoding.beam import beam_search
    from nanokv.decoding.generation import generate
    from nanokv.decoding.speculative import DraftModel, EarlyExit, PromptLookup, speculate
    from nanokv.engine import Engine

    model, ids = model_of(group, folder), prompts[0]
    common = {"max_new_tokens": 12, "eos_token_ids": []}
    sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.1}
    drafts = {"ngram": PromptLookup(), "early": EarlyExit(model, 2), "draft": DraftModel(model)}
    # Too few pages for all: some are preempted.
    engine = Engine(model, pages=9, page_size=4, step_tokens=8)
    requests = [
        engine.submit(prompt, **common, **(sampled if i % 2 else {}))
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    return {
        "greedy": list(generate(model, ids, **common)),
        "sampled": list(generate(model, ids, **common, **sampled)),
        "beams": [list(beam.ids) for beam in beam_search(model, ids, 3, **common)],
        "padded": generate_padded(model, prompts, **common),
        "ragged": generate_ragged(model, prompts, **common),
        "engine": [request.tokens for request in requests],
        "preemptions": engine.metrics.preemptions,
    } | {name: list(speculate(model, ids, draft, **common)) for name, draft in drafts.items()}


def led(group, folder: str, prompts: list) -> list:
    """Rank 0 leads an engine and a conversation of three answers; the others follow → the tokens,
    or what was followed.
    """
    from nanokv.decoding.draw import SamplingParams
    from nanokv.decoding.generation import Generation
    from nanokv.ranks.engine import FollowingEngine, LeadingEngine
    from nanokv.ranks.generation import Following, Leading

    model, said = model_of(group, folder), []
    if group.rank == 0:
        engine = LeadingEngine(group, model, pages=9, page_size=4, step_tokens=8)
        stopped = lambda request, step: len(request.tokens) == 3 and engine.cancel(request, "stop")  # noqa: E731
        requests = [
            engine.submit(
                prompt,
                max_new_tokens=12,
                eos_token_ids=[],
                temperature=1.0,
                seed=i,
                on_token=stopped if i == 1 else None,
            )
            for i, prompt in enumerate(prompts)
        ]
        engine.run()
        said += [request.tokens for request in requests]
        make, cache = Leading(group, Generation), make_cache("sliding", model.config, window=64)
        for turn, prompt in enumerate(prompts):
            made = make(model, torch.tensor([prompt]), cache, SamplingParams(1.0, seed=turn), 8)
            for step in made:
                said.append(step.token)
                if turn == 1 and len(made.tokens) == 3:
                    made.finish("stop_string")  # the others hear of it when rank 0 goes on
        group.hear(["end"])
        return [*said, cache.length]
    engine, make = (
        None,
        Following(group, model, make_cache("sliding", model.config, window=64), Generation),
    )
    for kind, values in heard(group, make):
        if kind == "engine":
            engine = FollowingEngine(model, *values[0])
        elif kind == "step":
            engine.follow(*values)
        elif kind == "answer":
            make.answer(values[0])
    return [make.cache.length]


def heard(group, make):
    """(kind, values) of what rank 0 says, until it says that it is over."""
    while True:
        kind, *values = make.unheard or group.hear()
        make.unheard = None
        if kind == "end":
            return
        yield kind, values


def kept(group, folder: str, prompts: list, path: str) -> list:
    """A conversation of three answers, saved after the second, and the third once more from the files → what each rank
    held after each answer, by its checksum; rank 0's tokens too. Then the file of rank 1 is lost."""
    from nanokv.cache import KVCache
    from nanokv.decoding.draw import SamplingParams
    from nanokv.decoding.generation import Generation
    from nanokv.errors import CacheError
    from nanokv.ranks.generation import Following, Leading, part_path

    model, said = model_of(group, folder), []
    cache = make_cache("growing", model.config)
    if group.rank:
        make = Following(group, model, cache, Generation)
        for kind, values in heard(group, make):
            getattr(make, kind)(*values)
            said += [checksum(make.cache)] if kind == "answer" else []
        return said
    make, ids = Leading(group, Generation), []

    def answer(cache, prompt, seed):
        made = make(model, torch.tensor([prompt]), cache, SamplingParams(1.0, seed=seed), 8)
        tokens = list(made)
        said.append([checksum(cache), [step.token for step in tokens]])
        return (ids + prompt + made.tokens)[: cache.length]

    for seed, prompt in enumerate(prompts[:2]):
        ids = answer(cache, prompt, seed)
    mark = fingerprint(model)
    make.save(cache, path, ids, mark)
    answer(cache, prompts[2], 5)
    cache.truncate(0)
    answer(cache, prompts[2] * 9, 7)  # another conversation
    cache = KVCache.load(path, model.config, mark, rank=(0, group.size))
    make.load(cache, path)
    answer(cache, prompts[2], 5)
    part_path(path, 1).unlink()
    try:
        make.load(KVCache.load(path, model.config, mark, rank=(0, group.size)), path)
    except CacheError as error:
        said.append(str(error))
    answer(cache, prompts[0], 6)  # the ranks go on with what they have
    group.hear(["end"])
    return said


def checksum(cache) -> str:
    """Of all keys and values."""
    return saving.digest({}, saving.contents(cache)[1])


def drift(group, folder: str, at: int) -> int:
    """One rank feeds another token in one step."""
    model = model_of(group, folder)
    cache = make_cache("dict", model.config)
    prefill(model, [[1, 2, 3]], cache)
    for step in range(2, 200):
        decode(model, [[5 if step == at and group.rank == 1 else 4]], cache, cache.length)
    return cache.length


def whole(group, folder: str, prompt: list) -> list:
    """What a rank computes when the all_reduce of one block is left out: for a test that must be able to fail."""
    model = model_of(group, folder)
    hooks = model.layers[1].mlp._forward_hooks
    kept = dict(hooks)
    hooks.clear()
    try:
        return score(model, [prompt]).tolist()
    finally:
        hooks.update(kept)


def words(group) -> list:
    """What rank 0 says, short, long and patient."""
    return [
        group.broadcast(["short", group.rank]),
        len(group.broadcast("x" * 5000)),
        group.hear({"rank": group.rank}),
    ]


def alike(group, same: bool) -> None:
    group.check_alike("the config", "same" if same else f"config of {group.rank}", "compare them")


def memory_of(group, small: str, folder: str) -> dict:
    """Bytes of one rank's weights and cache, and by how much its memory (PSS, Linux) lies above that of an idle rank:
    one that has joined, has all the code and libraries, and has answered with a small model."""

    def answered(model):
        cache = make_cache("dict", model.config)
        prefill_chunks(model, torch.arange(64)[None], cache, chunk=16)
        decode(model, [[1]], cache, cache.length)
        return cache

    answered(
        read_shard(
            group, Path(small), read_object(Path(small) / "config.json"), torch.bfloat16, CPU
        )
    )
    gc.collect()
    idle = private_bytes()
    model = read_shard(
        group, Path(folder), read_object(Path(folder) / "config.json"), torch.bfloat16, CPU
    )
    cache = answered(model)
    own = {id(weight): weight.nbytes for weight in model.parameters()}
    return {
        "weights": sum(own.values()),
        "cache": cache.nbytes,
        "idle": idle,
        "pss": private_bytes() - idle,
    }


def private_bytes() -> int:
    """PSS: a page that n processes map counts as an n-th."""
    fields = Path("/proc/self/smaps_rollup").read_text().split("\n")
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("Pss:"))
