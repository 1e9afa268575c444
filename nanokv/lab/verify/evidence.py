"""A model's answers to a fixed list of questions, recorded so that two models can be compared
later.

Each model is loaded, questioned and dropped before the other is loaded. Peak memory is one model
and the evidence: every activation of three short prompts, about 10 % of the weights. The
questions come from the tokenizer and fixed seeds, so the same two checkpoints always get the same
questions. nanokv's models are questioned here, those of transformers in oracle.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.decoding.generation import generate
from nanokv.errors import TemplateError
from nanokv.inference import decode, prefill, score
from nanokv.lab.study.debug import record
from nanokv.loading import load
from nanokv.model import Transformer
from nanokv.rope import rope_angles
from nanokv.text.template import LeftOut
from nanokv.text.tokenizer import Tokenizer

PROMPT = (
    "The cache holds one key and one value for every token, layer and KV head: 12 + 34 = 46. "
    "Grüße, 世界! 🙂🧑‍🚀\n"
)
TEXTS = (
    "",
    " ",
    "\n",
    "\t\n \n",
    "Hello world",
    " Hello  world ",
    "I'll say it's we've THEY'D",
    "3.14159 1234567890 ٣ ²",
    "def f(x):\n    return x**2  # comment\r\n",
    "Grüße aus Köln",
    "世界你好，今天天气很好。",
    "こんにちは",
    "한국어 텍스트",
    "हिन्दी में",
    "שלום עולם",
    "مرحبا بالعالم",
    "e\u0301 \u00e9 \u212b \ufb01",
    "🙂🧑‍🚀👩‍👩‍👧 🇩🇪",
    "\x00\x1b[31m\x7f\u200b\ufeff",
    "a" * 200,
    "<think>\n\n</think>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end",
    "https://example.org/?q=a%20b&c=d#e",
    PROMPT,
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}},
            "required": ["a"],
        },
    },
}
USER = {"role": "user", "content": "What is my name?"}
ANSWER = {"role": "assistant", "content": "Zorbla."}
THOUGHT = {"role": "assistant", "content": "<think>\nThe user said it.\n</think>\n\nZorbla."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
CONVERSATIONS = (
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": "Be brief. 世界"}, USER], "enable_thinking": False},
    {"messages": [USER, THOUGHT, USER]},
    {"messages": [USER, THOUGHT], "add_generation_prompt": False},
    {
        "messages": [USER, ANSWER, {"role": "user", "content": "  <b>&amp;</b> \n"}],
        "enable_thinking": True,
    },
    {"messages": [USER], "tools": [TOOL]},
    {"messages": [USER, CALL, {"role": "tool", "content": "2"}, ANSWER, USER], "tools": [TOOL]},
)


@dataclass(frozen=True)
class Questions:
    """The inputs that both models get."""

    prompts: list  # of (1,T) int64
    new_tokens: int
    texts: list
    id_lists: list  # to decode
    conversations: list
    positions: torch.Tensor  # (P,) at which cos and sin are compared


@dataclass
class Evidence:
    """A model's answers. Tensors are on the CPU. `path` and `forced` are empty for transformers."""

    name: str
    config: Config
    rope: torch.Tensor  # (2,P,D) cos and sin in fp32
    records: list  # one result of nanokv.debug.record per prompt
    greedy: list  # the greedy continuation of each prompt, a list of ids
    encodings: list
    decodings: list
    templates: list | None  # None: the checkpoint has no chat template
    # per prompt: (logits, [(key, value)]) by chunked prefill and decode
    path: list = field(default_factory=list)
    # per prompt: logits (N,V) from which the greedy tokens were chosen
    forced: list = field(default_factory=list)


def ask(tokenizer: Tokenizer, vocabulary: int, context: int) -> Questions:
    """The questions for a checkpoint. Ids are below `vocabulary`; a prompt and its answer fit in
    `context`."""
    room = max(2, min(48, context // 2))
    prompts = [tokenizer.encode(PROMPT)]
    for text in _templates(tokenizer, CONVERSATIONS) or ():
        if not text.startswith("refused"):
            prompts.append(tokenizer.encode(text))
            break
    generator = torch.Generator().manual_seed(0)
    known = min(vocabulary, tokenizer.vocab_size)
    prompts.append(torch.randint(0, known, (33,), generator=generator).tolist())
    rows = [torch.tensor([ids[:room]]) % vocabulary for ids in prompts if len(ids) >= 2]  # (1,T)
    specials = list(tokenizer.special_tokens)
    texts = [*TEXTS, *specials, *(f"a{s} b" for s in specials[:8]), "".join(specials)]
    lists = [
        torch.randint(0, tokenizer.vocab_size, (20,), generator=generator).tolist()
        for _ in range(30)
    ]
    positions = sorted({p for p in (0, 1, 17, 2048, 32767, context - 1) if p < context})
    return Questions(
        rows,
        min(32, context - max(row.shape[1] for row in rows)),
        texts,
        [*lists, *([id] for id in tokenizer.special_tokens.values())],
        list(CONVERSATIONS),
        torch.tensor(positions),
    )


def answers_of_ours(
    name: str, model: Transformer, tokenizer: Tokenizer, questions: Questions
) -> Evidence:
    """The evidence of a nanokv model: a recorded pass, the cached path, greedy decoding,
    tokenizer and chat template."""
    device = model.embed_tokens.weight.device
    greedy = []
    forced = []
    for ids in (ids.to(device) for ids in questions.prompts):
        cache = make_cache("dict", model.config)  # the kind of cache that cached_path uses too
        new = list(generate(model, ids, cache, questions.new_tokens, eos_token_ids=[]))
        whole = torch.cat((ids, torch.tensor([new], device=device)), dim=1)  # (1,T+N)
        greedy.append(new)
        forced.append(score(model, whole)[0, ids.shape[1] - 1 : -1].float().cpu())  # (N,V)
    return Evidence(
        name,
        model.config,
        torch.stack(rope_angles(model.config, questions.positions, torch.float32)),  # (2,P,D)
        [record(model, ids) for ids in questions.prompts],
        greedy,
        [tokenizer.encode(text) for text in questions.texts],
        [tokenizer.decode(ids) for ids in questions.id_lists],
        _templates(tokenizer, questions.conversations),
        [cached_path(model, ids.to(device)) for ids in questions.prompts],
        forced,
    )


def load_and_answer(name: str, folder: Path, questions: Questions, dtype: torch.dtype) -> Evidence:
    """The evidence of another checkpoint, whose model is dropped afterwards."""
    model, tokenizer = load(folder, dtype=dtype, device="cpu", check_finite=True)
    return answers_of_ours(name, model, tokenizer, questions)


def cached_path(
    model: Transformer, ids: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The same tokens in two prefill chunks, then one by one → (logits (t,V) of the last t
    positions, [(key, value)] per layer)."""
    dtype = model.embed_tokens.weight.dtype
    cache = make_cache("dict", model.config, dtype=dtype, device=ids.device)
    T = ids.shape[1]
    half = T // 2
    tail = max(T - 8, half)
    rows = [prefill(model, ids[:, :half], cache, 0)]
    if half < tail:
        rows = [prefill(model, ids[:, half:tail], cache, half)]
    rows += [decode(model, ids[:, i : i + 1], cache, i) for i in range(tail, T)]
    layers: Iterable[Any] = cache  # DictCaches
    held = [(layer["key"].cpu(), layer["value"].cpu()) for layer in layers]
    return torch.cat(rows).float().cpu(), held


def _templates(tokenizer: Tokenizer, conversations: Iterable[dict]) -> list[str] | None:
    """Every conversation as text; None if the checkpoint has no chat template."""
    if tokenizer.chat_template is None:
        return None
    return [_render(tokenizer, conversation) for conversation in conversations]


def _render(tokenizer: Tokenizer, conversation: dict) -> str:
    """The conversation as text, or "refused: …" if the template refuses it (tools, an unknown
    role); the other model's template must then refuse it too. If the template leaves out a part
    of the conversation, the text is without it, as transformers renders it."""
    try:
        return tokenizer.render(**conversation)
    except LeftOut:
        return tokenizer.template(tools=conversation.get("tools")).render(**conversation)
    except TemplateError as error:
        return f"refused: {error}"
