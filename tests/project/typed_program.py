"""A user's program, for type checkers alone: what they see of the public names, and which mistakes they find.

test_types.py gives it to mypy and to pyright, strictly. Nothing runs it. `assert_type` is an error if a checker sees
another type, and a line that ends in "# a mistake" has to be an error.
"""

from collections.abc import Callable, Iterator
from typing import Any, assert_type

import torch

import nanokv
from nanokv.attention import Causal
from nanokv.cache import CACHES, BatchCache, DictCache, KVCache, LayerCache, PagePool, make_cache
from nanokv.decoding.generation import Generation, Tokens
from nanokv.decoding.speculative import PromptLookup, Speculation

model, tokenizer = nanokv.load("tiny")
assert_type(model, nanokv.Qwen3)
assert_type(tokenizer, nanokv.Tokenizer)
assert_type(model.device, torch.device)
assert_type(model.config, nanokv.Config)
assert_type(nanokv.__version__, str)

# Text and ids.
ids = tokenizer.encode("hi")
assert_type(ids, list[int])
assert_type(tokenizer.decode(ids), str)
assert_type(tokenizer.render([{"role": "user", "content": "hi"}]), str)
assert_type(tokenizer.eos_token_id, int | None)

# Every cache is a KVCache.
for name in CACHES:
    assert_type(nanokv.make_cache(name, model.config), KVCache)
assert_type(CACHES, dict[str, Callable[..., KVCache]])
assert_type(make_cache("quantized", model.config, bits=4), KVCache)
assert_type(nanokv.NoCache(model.config.num_hidden_layers).fork(), nanokv.NoCache)
cache = make_cache("dict", model.config)
assert_type(cache.length, int)
assert_type(cache.nbytes, int)
assert_type(cache[0], LayerCache)
assert_type(cache.mask(1), torch.Tensor | None)
assert_type(cache.fork(), KVCache)
assert_type(DictCache().state(), dict[str, torch.Tensor])
assert_type(BatchCache([cache], model.config).rows, list[Any])
assert_type(PagePool(model.config, 8, 16).nbytes, int)

# The model.
batch = torch.tensor([ids])
assert_type(model(batch, cache, 0, Causal()), torch.Tensor)
assert_type(model.forward(batch, cache, torch.tensor([0]), Causal()), torch.Tensor)
assert_type(nanokv.prefill(model, [ids], cache), torch.Tensor)
assert_type(nanokv.decode(model, [[1]], cache, start_pos=cache.length), torch.Tensor)
assert_type(nanokv.score(model, batch), torch.Tensor)
assert_type(nanokv.optimize(model), nanokv.Qwen3)

# Answers.
tokens = nanokv.generate(model, ids, cache, seed=1)
assert_type(tokens, Tokens[Generation])
assert_type(list(tokens), list[int])
assert_type(tokens.report.finish_reason, str | None)
assert_type(nanokv.speculate(model, ids, PromptLookup(4)), Tokens[Speculation])
assert_type(nanokv.generate_padded(model, [ids, ids]), list[list[int]])
assert_type(nanokv.generate_ragged(model, [ids, ids]), list[list[int]])
assert_type(nanokv.beam_search(model, ids)[0].ids, list[int])
session = nanokv.Session.from_pretrained("tiny")
assert_type(session, nanokv.Session)
assert_type(session.ask("hi"), str)
assert_type(session.stream("hi"), Iterator[str])
assert_type(session.messages, list[dict[str, Any]])
request = nanokv.Engine(model).submit(ids)
assert_type(request.tokens, list[int])

nanokv.generate(model, 5)  # a mistake
nanokv.lod("tiny")  # a mistake
nanokv.prefill(model, ids, "dict")  # a mistake
model.forward(batch, cache, "0", Causal())  # a mistake
tokenizer.encod("hi")  # a mistake
session.aks("hi")  # a mistake
print(cache.lenght)  # a mistake
