"""Names from other libraries and their equivalents here, for errors about unknown names.

The names are those of transformers, llama-cpp-python, ollama and vLLM. They appear only in hints
and are never translated, because an argument that is ignored or means something else would change
the answer. docs/coming-from.md has the table for readers. This module does not import torch.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from nanokv.errors import UnknownArgument, UnknownName

ASK = "nanokv.Session(model, tokenizer).ask(text)"
LENGTH = "max_new_tokens=N"
PENALTY = "repetition_penalty=X"
DTYPE = 'dtype="bfloat16"'
CACHE = 'cache=nanokv.make_cache("dict", model.config)'
DEVICE = 'device="cuda"'
FEWER_BITS = 'nanokv.optimize(model, weights="int8"), or "int4"'
ARGUMENTS = {
    "max_tokens": LENGTH,
    "n_predict": LENGTH,
    "num_predict": LENGTH,
    "max_completion_tokens": LENGTH,
    "max_length": f"{LENGTH} counts the answer alone",
    "min_new_tokens": "eos_token_ids=[] never ends",
    "do_sample": "temperature=0 takes the likeliest token, temperature=1 draws",
    "temp": "temperature=X",
    "greedy": "temperature=0",
    "repeat_penalty": PENALTY,
    "penalty": PENALTY,
    "typical_p": "top_p=X or min_p=X",
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "random_seed": "seed=N",
    "num_beams": "nanokv.beam_search(model, ids, beams=N)",
    "num_return_sequences": "nanokv.generate_padded",
    "eos_token_id": "eos_token_ids=[…]",
    "stop_token_ids": "eos_token_ids=[…]",
    "ignore_eos": "eos_token_ids=[]",
    "stop_strings": 'stop=["…"] of a Session',
    "stop": "nanokv.Session takes stop=[…]: ids alone have no text",
    "input_ids": "the ids come second, without a name",
    "prompt": "the ids come second: tokenizer.encode(text)",
    "attention_mask": "nanokv.generate_padded takes prompts of different lengths",
    "use_cache": "leave it out: nanokv.generate always has a cache",
    "past_key_values": CACHE,
    "cache_implementation": 'cache=nanokv.make_cache("static", model.config)',
    "streamer": "nanokv.generate gives a token at a time; session.stream(text) gives text",
    "stream": "session.stream",
    "assistant_model": "nanokv.speculate(model, ids, draft)",
    "draft_model": "nanokv.speculate(model, ids, draft)",
    "generation_config": "each setting is an argument: temperature, top_k, top_p, max_new_tokens",
    "torch_dtype": DTYPE,
    "device_map": DEVICE,
    "n_gpu_layers": DEVICE,
    "num_gpu": DEVICE,
    "n_ctx": "context=N of a Session",
    "num_ctx": "context=N of a Session",
    "max_model_len": "context=N of a Session",
    "n_threads": "torch.set_num_threads(N)",
    "num_thread": "torch.set_num_threads(N)",
    "load_in_8bit": FEWER_BITS,
    "load_in_4bit": FEWER_BITS,
    "quantization_config": FEWER_BITS,
    "quantization": FEWER_BITS,
    "quantize": 'weights="int8", or "int4"',
    "bits": 'weights="int8", or "int4"',
    "trust_remote_code": "leave it out: code of a checkpoint is never run",
    "model_path": "the path comes first",
    "local_files_only": "HF_HUB_OFFLINE=1 in the environment",
    "token": "HF_TOKEN in the environment",
    "cache_dir": "HF_HOME in the environment",
    "attn_implementation": "nanokv.optimize(model) has the fast kernels",
    "system_prompt": 'system="…"',
    "cache_type_k": 'cache="quantized:bits=8"',
    "kv_cache_dtype": 'cache="quantized"',
    "tools": "tokenizer.render(messages, tools=[…]), or nanokv serve",
}
LOAD = 'model, tokenizer = nanokv.load("tiny"), or a folder, a GGUF file, a name on the hub'
FROM_NAME = 'nanokv.Session.from_pretrained("tiny").ask(text)'
MODULE = {  # nanokv.NAME
    "Llama": f"{LOAD}; or {FROM_NAME}",
    "LLM": f"{LOAD}; or {FROM_NAME}",
    "pipeline": FROM_NAME,
    "AutoModelForCausalLM": LOAD,
    "AutoModel": LOAD,
    "AutoTokenizer": LOAD,
    "AutoConfig": "nanokv.Config.from_folder",
    "Qwen3ForCausalLM": LOAD,
    "LlamaForCausalLM": LOAD,
    "from_pretrained": LOAD,
    "load_model": LOAD,
    "DynamicCache": 'nanokv.make_cache("dict", model.config)',
    "StaticCache": 'nanokv.make_cache("static", …)',
    "QuantizedCache": 'nanokv.make_cache("quantized:bits=4", …)',
    "Model": LOAD,
    "SamplingParams": "arguments of nanokv.generate: temperature=1, top_k=20",
    "TextStreamer": "session.stream(text)",
    "quantize": FEWER_BITS,
    "stream": "session.stream(text)",
    "complete": FROM_NAME,
    "create_chat_completion": FROM_NAME,
}
MODEL = {
    "generate": "nanokv.generate(model, ids)",
    "save_pretrained": "model.save(folder, tokenizer)",
    "from_pretrained": LOAD,
    "push_to_hub": "model.save(folder, tokenizer) writes a folder that the hub takes",
    "create_chat_completion": ASK,
    "create_completion": "nanokv.generate(model, tokenizer.encode(text))",
    "chat": ASK,
    "tokenize": "tokenizer.encode(text)",
    "detokenize": "tokenizer.decode(ids)",
    "tokenizer": LOAD,
    "prefill": "nanokv.prefill(model, ids, cache)",
    "decode": "nanokv.decode(model, token, cache, start_pos)",
    "get_memory_footprint": "model.nbytes",
    "num_parameters": "sum(p.numel() for p in model.parameters())",
    "quantize": FEWER_BITS,
    "beam_search": "nanokv.beam_search(model, ids)",
}
ENCODE = "tokenizer.encode(text) gives a list of ids"
RENDER = 'tokenizer.render([{"role": "user", "content": text}])'
TOKENIZER = {
    "apply_chat_template": f"{RENDER}, then tokenizer.encode of that",
    "tokenize": f"{ENCODE}, tokenizer.pieces(ids) the text of each",
    "batch_encode_plus": ENCODE,
    "encode_plus": ENCODE,
    "batch_decode": "[tokenizer.decode(ids) for ids in rows]",
    "convert_ids_to_tokens": "tokenizer.pieces(ids)",
    "convert_tokens_to_ids": "tokenizer.special_tokens[token]",
    "save_pretrained": "model.save(folder, tokenizer)",
    "from_pretrained": "nanokv.Tokenizer.from_folder(folder), or nanokv.load",
    "detokenize": "tokenizer.decode(ids)",
    "get_vocab": "tokenizer.backend.get_vocab()",
    "all_special_ids": "tokenizer.control_ids",
    "pad_token_id": "nanokv.generate_padded needs none",
}
SESSION = {
    "chat": "session.ask(text)",
    "generate": "session.ask(text)",
    "send": "session.ask(text)",
    "create_chat_completion": "session.ask(text)",
    "history": "session.messages",
    "reset": "session.clear()",
}

P = ParamSpec("P")
R = TypeVar("R")


def hinted(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: an unknown keyword argument raises UnknownArgument with a hint."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= known:
            name = function.__qualname__.removesuffix(".__init__")
            refuse(f"{name}()", kwargs.keys() - known, known)
        return function(*args, **kwargs)

    return call


def refuse(where: str, unknown: Iterable[str], known: Iterable[str]) -> NoReturn:
    """Raise UnknownArgument for the alphabetically first of the unknown names."""
    import difflib

    name = min(unknown)
    names = [one for one in known if one != "self"]
    near = difflib.get_close_matches(name, names, n=1)
    if name in ARGUMENTS:
        hint = ARGUMENTS[name]
    elif near:
        hint = f"did you mean {near[0]}=?"
    else:
        hint = f"there are {', '.join(names)}"
    raise UnknownArgument(f"{where} has no argument {name!r}", hint)


def unknown_name(what: object, name: str, table: Mapping[str, str]) -> AttributeError:
    """The error for a missing attribute: UnknownName with a hint from `table`, or Python's own."""
    owner = f"{type(what).__name__!r} object"
    if inspect.ismodule(what):
        owner = f"module {what.__name__!r}"
    message = f"{owner} has no attribute {name!r}"
    error = AttributeError(message)
    if name in table:
        error = UnknownName(message, table[name])
    # Python needs both to suggest a similar name.
    error.name = name
    error.obj = what
    return error


class Elsewhere:
    """A class attribute that does not exist here, such as `Qwen3.from_pretrained`.

    Reading it raises UnknownName with a hint.
    """

    def __init__(self, hint: str) -> None:
        self.hint = hint

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise UnknownName(
            f"type object {owner.__name__!r} has no attribute {self.name!r}", self.hint
        )
