"""What is served, and how a checked request becomes token ids: the chat template, the tokenizer, and what fits.

`Served` is one model under its names, with what applies where a request says nothing. All of this runs in a thread
beside the event loop: a template and a long text can take a second.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanokv.decoding.draw import SamplingParams
from nanokv.decoding.generation import prompt_ids
from nanokv.engine import Engine
from nanokv.errors import NanoKVError
from nanokv.serve.answer import AnswerText, NoThoughts
from nanokv.serve.errors import ApiError, refused
from nanokv.serve.protocol import Asked, unsigned
from nanokv.text.thinking import ThinkSplitter, opens_thinking
from nanokv.text.tokenizer import Tokenizer
from weights_loader.strict import quote

TEXT_TOKENS = 16  # of a completion whose request does not say how many: OpenAI's number


@dataclass(frozen=True)
class Served:
    """One model, the names that it answers to, and the settings of the command line."""

    engine: Engine
    tokenizer: Tokenizer
    names: tuple[str, ...]
    context: int  # tokens that prompt and answer may have together
    sampling: SamplingParams
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    template: dict = field(default_factory=dict)
    allow_special: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def name(self, asked: str | None) -> str:
        """The model of a request."""
        if asked is None or asked in self.names:
            return asked or self.names[0]
        known = ", ".join(self.names)
        raise ApiError(404, f"no model {quote(asked)}: this server has {known}", "model", "model_not_found")

    def room(self, prompt: int, param: str) -> int:
        """Tokens that may follow a prompt: the last one is never fed, so it needs no place."""
        if prompt > self.context:
            what = "messages" if param == "messages" else "prompt"
            raise ApiError(400, f"This model's maximum context length is {self.context} tokens. However, your {what} "
                           f"resulted in {prompt} tokens.", param, "context_length_exceeded")  # fmt: skip
        return self.context - prompt + 1


@dataclass(frozen=True)
class Prepared:
    """What the engine is asked: token ids, the text to come, and arguments of Engine.submit."""

    asked: Asked
    model: str
    ids: list[int]
    text: AnswerText
    settings: dict
    wanted: int | None  # tokens that were asked for; the context may leave fewer


def prepare(served: Served, asked: Asked, salt: str) -> Prepared:
    """Of either kind of request."""
    model = served.name(asked.model)
    chat = asked.param == "messages"
    try:
        ids = chat_ids(served, asked.source, asked.template) if chat else text_ids(served, asked.source, asked.special)
        ids = prompt_ids(ids, served.engine.config.vocab_size)
    except NanoKVError as error:
        raise refused(error, asked.param) from error
    room = served.room(len(ids), asked.param)
    wanted = asked.max_new_tokens or served.max_new_tokens or (None if chat else TEXT_TOKENS)
    eos = () if asked.ignore_eos else tuple(served.engine.model.generation_config.eos_token_ids)
    splitter = ThinkSplitter(opens_thinking(served.tokenizer, ids)) if chat else NoThoughts()
    stop = served.stop if asked.stop is None else asked.stop
    settings = vars(served.sampling) | unsigned(asked.sampling)
    settings |= {"max_new_tokens": min(wanted or room, room), "eos_token_ids": eos, "salt": salt}
    return Prepared(asked, model, ids, AnswerText(served.tokenizer, stop, splitter, eos), settings, wanted)


def chat_ids(served: Served, messages: list[dict], template: dict) -> list[int]:
    """Through the checkpoint's template. Control tokens in a message would end it and begin another's."""
    if not served.allow_special:
        for number, message in enumerate(messages):
            for name, text in message.items():
                refuse_control(served.tokenizer, text, f"messages[{number}].{name}")
    rendered = served.tokenizer.render(messages, add_generation_prompt=True, **served.template | template)
    return served.tokenizer.encode(rendered)


def refuse_control(tokenizer: Tokenizer, text: str, param: str) -> None:
    """Control tokens that are spelled out; <think> is an ordinary token and may be talked about."""
    for token in tokenizer.special_tokens_in(text):
        if tokenizer.special_tokens[token] in tokenizer.control_ids:
            raise ApiError(400, f"{param} contains {token}, a control token", param,
                           hint="nanokv serve --allow-special lets it through")  # fmt: skip


def text_ids(served: Served, prompt: Any, add_special_tokens: bool = True) -> list[int]:
    """Whoever writes a raw prompt writes all of it: control tokens are meant."""
    return served.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
