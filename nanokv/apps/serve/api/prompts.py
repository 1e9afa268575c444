"""The served model, and how a checked request becomes token ids through template and tokenizer.

`Served` is one model under its names, with the defaults for fields that a request omits. All of
this runs in a thread beside the event loop, because a template or a long text can take a second.
"""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from nanokv.apps.serve.api import grammar
from nanokv.apps.serve.api.answer import AnswerText, NoThoughts, Splitter
from nanokv.apps.serve.api.calls import CLOSE, OPEN, NoCalls, ToolCalls
from nanokv.apps.serve.api.errors import ApiError, named
from nanokv.apps.serve.api.logprobs import Echo
from nanokv.apps.serve.api.protocol import Asked
from nanokv.apps.serve.api.schemas import repeats_allowed
from nanokv.checkpoint import Model
from nanokv.config import Config
from nanokv.decoding.draw import SamplingParams
from nanokv.decoding.generation import prompt_ids
from nanokv.decoding.ranges import chosen_seed
from nanokv.text.call_forms import fitted
from nanokv.text.template import ChatTemplate, LeftOut
from nanokv.text.thinking import ThinkSplitter, opens_thinking
from nanokv.text.tokenizer import Tokenizer
from weights_loader.strict import quote

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)
ANY = "*"  # the alias with which the model answers to every name
TEXT_TOKENS = 16  # OpenAI's default max_tokens of a completion
# Most prompt tokens of a request with log-probabilities, up to 1 kB of memory each.
ECHOED = 100_000
# Where the tokens of a text are only counted, it may have so many tokens and bytes per token of the
# context. More take too much memory in the tokenizer: up to 400 bytes each token, 16 each byte.
COUNTED = 4
COUNTED_BYTES = 16
# Fields of a message, item or part that list others.
PARTS = ("content", "output", "summary", "tool_calls")


class Holder(Protocol):
    """Anything with the model: the engine, or what `nanokv batch` has loaded."""

    @property
    def model(self) -> Model: ...
    @property
    def config(self) -> Config: ...


@dataclass(frozen=True)
class Served:
    """One model, the names under which it is served, and the settings of the command line."""

    engine: Holder
    tokenizer: Tokenizer
    names: tuple[str, ...]
    context: int  # most tokens of a prompt and its answer together
    sampling: SamplingParams
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    template: dict = field(default_factory=dict)
    allow_special: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    pooling: str | None = None  # of embeddings; None: the server makes none
    answers: bool = True  # False for a model of embeddings only

    @cached_property
    def vocabulary(self) -> "LLTokenizer":
        """The tokenizer's tokens for grammars, built at first use."""
        config = self.engine.model.generation_config
        return grammar.vocabulary(
            self.tokenizer, self.engine.config.vocab_size, config.eos_token_ids
        )

    @property
    def listed(self) -> tuple[str, ...]:
        """The names without "*", which stands for any name."""
        return tuple(name for name in self.names if name != ANY)

    def name(self, asked: str | None) -> str:
        """The model's name in the answer; ApiError (404) for an unknown name."""
        if asked is None:
            return self.listed[0]
        if asked in self.names or ANY in self.names:
            return asked
        known = ", ".join(self.listed)
        raise ApiError(
            404,
            f"no model {quote(asked)}: this server has {known}",
            "model",
            "model_not_found",
            hint="nanokv serve --alias NAME gives the model another name, --alias '*' any name",
        )

    def stop_ids(self, ids: Sequence[int]) -> Sequence[int]:
        """Check `stop_token_ids` of a request against the vocabulary."""
        size = self.engine.config.vocab_size
        if wrong := [id for id in ids if not 0 <= id < size]:
            raise ApiError(
                400,
                f"stop_token_ids holds {wrong[0]}: ids from 0 to {size - 1:,} were expected",
                "stop_token_ids",
            )
        return ids

    def room(self, prompt: int, param: str) -> int:
        """The most tokens that may follow a prompt. The last is never fed, so it needs no place."""
        if prompt > self.context:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context} tokens. "
                f"However, your {param} resulted in {prompt} tokens.",
                param,
                "context_length_exceeded",
            )
        return self.context - prompt + 1

    def check_parts(self, messages: Any, param: str, most: int) -> None:
        """ApiError if a chat has more than `most` messages, parts of their content and calls.

        Each takes a token: the end of a message, the line break between two parts. Checking and
        rendering 100,000 of them takes seconds, counting them takes none.
        """
        count = parts_in(messages)
        if count > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context} tokens. However, your "
                f"{param} has {count:,} messages, parts and calls, and at most {most:,} are read.",
                param,
                "context_length_exceeded",
            )

    def check_text(self, text: str, param: str) -> None:
        """ApiError if a prompt cannot fit into the context, before it is tokenized.

        Tokens take up to 400 bytes each in the tokenizer: 1.3 GB for 4 MB of digits.
        """
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > self.context:
            raise self._too_long(param, bytes_of(text), fewest)

    def check_counted(self, text: str, param: str) -> None:
        """ApiError if a text is too long to count its tokens, before it is tokenized."""
        fewest = self.tokenizer.fewest_tokens(text)
        size = bytes_of(text)
        tokens = COUNTED * self.context
        most = COUNTED_BYTES * self.context
        if fewest > tokens or size > most:
            counted = f" At most {tokens:,} tokens or {most:,} bytes are counted."
            raise self._too_long(param, size, fewest, counted)

    def _too_long(self, param: str, size: int, fewest: int, more: str = "") -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self.context} tokens. However, your "
            f"{param} has {size:,} bytes, which are at least {fewest:,} tokens.{more}",
            param,
            "context_length_exceeded",
        )


def parts_in(messages: Any) -> int:
    """The messages or items of a list, the parts of their content, and their calls."""
    if not isinstance(messages, list):
        return 0
    objects = [one for one in messages if isinstance(one, dict)]
    inner = sum(parts_in(one[name]) for one in objects for name in PARTS if name in one)
    return len(messages) + inner


def bytes_of(text: str) -> int:
    """The bytes of a text in UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class Job:
    """One answer for the engine: token ids, the text to be built, and Engine.submit's arguments."""

    ids: list[int]
    text: AnswerText
    settings: dict
    wanted: int | None  # tokens that the request asks for; the context may leave room for fewer
    echo: Echo | None = None
    first: bool = True  # the first of the answers to its prompt


@dataclass(frozen=True)
class Prepared:
    """A request, ready for the engine."""

    asked: Asked
    model: str
    jobs: list[Job]  # prompt by prompt, `n` answers to each
    seed: int | None  # the request with this seed repeats all its answers; None: greedy


def prepare(served: Served, asked: Asked, salt: str) -> Prepared:
    """Prepare a request of either kind. Answer i uses seed + i, so answer 0 is that with n = 1."""
    model = served.name(asked.model)
    if not served.answers:
        raise ApiError(
            400,
            f"{model} is a model of embeddings, which writes no answers",
            "model",
            "unsupported",
            hint="POST /v1/embeddings",
        )
    sampling = vars(served.sampling) | asked.sampling
    seed = chosen_seed(sampling["seed"])
    if seed is None:
        seed = sampling["seed"] = secrets.randbits(32)
    settings = sampling | {"seed": seed, "top_logprobs": asked.logprobs or 0}
    settings |= {"salt": salt, "client": salt}  # keys share no pages, and take turns
    prompts = [prompt(served, asked, number) for number in range(len(asked.sources))]
    if asked.echo and asked.logprobs is not None:
        check_echoed(sum(map(len, prompts)))
    jobs: list[Job] = []
    for ids in prompts:
        jobs += prompt_jobs(served, asked, ids, settings)
    repeatable = sampling["seed"] if sampling["temperature"] else None
    return Prepared(asked, model, jobs, repeatable)


def check_echoed(total: int) -> None:
    """Raise ApiError if log-probabilities are asked for more than ECHOED prompt tokens."""
    if total > ECHOED:
        raise ApiError(
            400,
            f"the prompts have {total:,} tokens, at most {ECHOED:,} get log-probabilities",
            "logprobs",
        )


def prompt_jobs(served: Served, asked: Asked, ids: list[int], settings: dict) -> list[Job]:
    """The `n` answers to one prompt, which share its echo and its compiled grammar."""
    echo = None
    if asked.echo:
        echo = Echo(served.tokenizer, ids, asked.logprobs)
    rules = None
    if asked.constrained:
        rules = grammar_of(served, asked, ids)
    jobs = []
    for i in range(asked.n):
        own: dict[str, Any] = {"seed": (settings["seed"] + i) % 2**64, "constrain": None}
        if rules is not None:
            own["constrain"] = grammar.Constraint(rules)
        jobs.append(job(served, asked, ids, settings | own, echo, i == 0))
    return jobs


def prompt(served: Served, asked: Asked, number: int) -> list[int]:
    """The ids of one prompt; ApiError if they leave no room for an answer."""
    if not asked.chat:
        return source_ids(served, asked.sources[number], asked.param, asked.special)
    text = named(asked.param, chat_text, served, asked)
    return source_ids(served, text, asked.param, False)


def source_ids(served: Served, source: Any, param: str, special: bool) -> list[int]:
    """The ids of a text, or checked ids; ApiError if there are none or they exceed the context."""
    if isinstance(source, str):
        served.check_text(source, param)
    ids = named(param, text_ids, served, source, special)
    ids = named(param, prompt_ids, ids, served.engine.config.vocab_size)
    served.room(len(ids), param)
    return ids


def grammar_of(served: Served, asked: Asked, ids: list[int]) -> grammar.Compiled:
    """The grammar of the answers to this prompt.

    It is compiled without thoughts first, so that a bad schema fails before the model thinks.
    """
    param = asked.schema_field
    if asked.schema is None:
        param = "tools"
    grammar.needs_package(param)
    words = named(param, lambda: served.vocabulary)
    tools = asked.tools
    if repeats_allowed([asked.schema, tools.callable]):
        logger.info("not enforced: uniqueItems in %s", param)
    thought = grammar.thoughts(served.tokenizer, ids, opens_thinking(served.tokenizer, ids))
    for start in dict.fromkeys(("none", thought)):
        source = grammar.source(asked.schema, tools.callable, tools.many, tools.forced, start)
        rules = grammar.compiled(source, words, param)
    return rules


def job(
    served: Served, asked: Asked, ids: list[int], settings: dict, echo: Echo | None, first: bool
) -> Job:
    """One answer to one prompt."""
    room = served.room(len(ids), asked.param)
    wanted = asked.max_new_tokens
    if wanted is None:
        wanted = served.max_new_tokens
    if wanted is None and not asked.chat:
        wanted = TEXT_TOKENS
    eos: tuple[int, ...] = ()
    if not asked.ignore_eos:
        eos = tuple(served.engine.model.generation_config.eos_token_ids)
    ends = (*eos, *served.stop_ids(asked.stop_token_ids))
    splitter: Splitter = NoThoughts()
    if asked.chat:
        splitter = ThinkSplitter(opens_thinking(served.tokenizer, ids))
    names = [one["name"] for one in asked.tools.callable]
    calls = ToolCalls(names, asked.tools.parallel) if names else NoCalls()
    stop = served.stop if asked.stop is None else asked.stop
    text = AnswerText(
        served.tokenizer, stop, splitter, calls, eos, asked.stop_token_ids, asked.include_stop
    )
    settings = settings | {
        "max_new_tokens": room if wanted is None else min(wanted, room),
        "eos_token_ids": ends,
    }
    return Job(ids, text, settings, wanted, echo, first)


def chat_ids(served: Served, asked: Asked) -> list[int]:
    """The ids of a chat, for requests that only count them. They may exceed the context."""
    text = chat_text(served, asked)
    served.check_counted(text, asked.param)
    return served.tokenizer.encode(text)


def chat_text(served: Served, asked: Asked) -> str:
    """A chat through the checkpoint's template; ApiError where a control token is typed.

    A control token in a message would end that message and begin another one.
    """
    (messages,) = asked.sources
    tools = asked.tools
    if not served.allow_special:
        for text, place in texts(messages, asked.param):
            refuse_control(served.tokenizer, text, place)
        for text, place in texts(list(tools.functions), "tools"):
            refuse_control(served.tokenizer, text, place)
        for text, place in texts(asked.template, "chat_template_kwargs"):
            refuse_control(served.tokenizer, text, place)
    template = chosen_template(served, asked)
    messages = fitted(template, messages)
    variables = served.template | asked.template
    try:
        rendered = template.render_all(messages, tools.offered, **variables)
    except LeftOut as error:
        param = error.what if error.what == "tools" else asked.param
        raise ApiError(400, str(error), param, "unsupported") from None
    if tools.offered:
        check_calls(template)
    for name, other in asked.contrast.items():
        if rendered == template.render(messages, tools.offered, **variables | other):
            words = f"{name}: the chat template of this model does not look at it"
            raise ApiError(400, words, name, "unsupported")
    return rendered


def chosen_template(served: Served, asked: Asked) -> ChatTemplate:
    """The model's template of this name; without a name, the one `Tokenizer.render` would use."""
    known = served.tokenizer.chat_templates
    name = asked.chat_template
    if name is not None and name not in known:
        names = ", ".join(map(quote, known)) or "none"
        words = f"chat_template is {quote(name)}: this model has {names}"
        raise ApiError(400, words, "chat_template")
    return served.tokenizer.template(name, asked.tools.offered)


def check_calls(template: ChatTemplate) -> None:
    """Raise ApiError unless the template writes calls in the format that calls.py reads."""
    if OPEN not in template.source or "<function=" in template.source:
        words = (
            f"this model does not write calls as JSON between {OPEN} and {CLOSE}, "
            "which is what this server reads"
        )
        raise ApiError(400, words, "tools", "unsupported")


def texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield (text, path) for every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value, place
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name, place
            yield from texts(part, f"{place}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from texts(part, f"{place}[{number}]")


def refuse_control(tokenizer: Tokenizer, text: str, param: str) -> None:
    """Raise ApiError if a control token is typed out. <think> is not one, and may be mentioned."""
    for token in tokenizer.special_tokens_in(text):
        if tokenizer.special_tokens[token] in tokenizer.control_ids:
            raise ApiError(
                400,
                f"{param} contains {token}, a control token",
                param,
                hint="nanokv serve --allow-special lets it through",
            )


def text_ids(served: Served, prompt: Any, add_special_tokens: bool = True) -> list[int]:
    """The ids of a raw prompt, in which control tokens are allowed. Ids are returned unchanged."""
    if isinstance(prompt, str):
        return served.tokenizer.encode(prompt, add_special_tokens)
    return prompt
