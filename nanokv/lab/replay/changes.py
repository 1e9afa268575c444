"""What one change of a conversation costs: the tokens that a server had computed, and those of the
next request after the change.

A talk is recorded: messages, tools, and the thoughts and calls of the answers. The server has
computed every request of the talk and its answer. Then the last message comes, and something before
it has changed: the tools, a clock, a turn. What is computed again begins at the first token that
differs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanokv.errors import NanoKVError
from nanokv.lab.replay.indexes import INDEXES
from nanokv.lab.replay.policies import POLICIES
from nanokv.lab.replay.traces import Tokens, TokenTrace
from nanokv.text.template import REASONING, LeftOut
from weights_loader.strict import read_object

if TYPE_CHECKING:
    from nanokv.text.tokenizer import Tokenizer

Message = dict[str, Any]
RECORDED = Path(__file__).parent / "recorded"  # talks of our own making: NAME.json
ROLE = 'an answer has "role": "assistant"'
REMOVED = "(removed)"  # in place of an edited turn
MORE_TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time of day.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True)
class Talk:
    """A conversation that ends with the message that the server has not seen yet."""

    messages: tuple[Message, ...]
    tools: tuple[dict, ...] = ()
    summary: str = ""  # of all but the last answer and what follows it; "" if there is none

    @property
    def last_answer(self) -> int:
        """The index of the last message of the assistant."""
        return max(i for i, one in enumerate(self.messages) if one["role"] == "assistant")


def bundled() -> dict[str, Path]:
    """The talks in RECORDED by name."""
    return {path.stem: path for path in sorted(RECORDED.glob("*.json"))}


def talk_file(name: str) -> Path:
    """The file of a bundled talk, or else the path `name`. NanoKVError if there is none."""
    path = bundled().get(name) or Path(name)
    if not path.exists():
        raise NanoKVError(f"{path} does not exist", f"bundled talks: {', '.join(bundled())}")
    return path


def read_talk(path: Path) -> Talk:
    """The talk in a JSON file: {"messages": […], "tools": […], "summary": "…"}, as a request of
    OpenAI's API. NanoKVError if it has no answer, or ends with one."""
    fields = read_object(path, NanoKVError)
    messages: Any = fields.get("messages")
    tools: Any = fields.get("tools") or []
    summary: Any = fields.get("summary", "")
    lists = isinstance(messages, list) and isinstance(tools, list) and isinstance(summary, str)
    if not lists or not all(isinstance(one, dict) and "role" in one for one in messages):
        form = '{"messages": [{"role": …, "content": …}], "tools": [], "summary": ""}'
        raise NanoKVError(f"{path} is not a talk", form)
    for number, one in enumerate(messages, 1):
        content = one.get("content")
        if content is not None and not isinstance(content, str):
            raise NanoKVError(
                f"{path}, message {number} ({one['role']}): content is {repr(content)[:60]}",
                "a text was expected",
            )
    roles = [one["role"] for one in messages]
    if "assistant" not in roles:
        raise NanoKVError(f"{path}: none of its messages is an answer", ROLE)
    if roles[-1] == "assistant":
        raise NanoKVError(
            f"{path}: the last of {len(roles):,} messages is an answer",
            "a talk ends with a message that is not answered yet",
        )
    return Talk(tuple(messages), tuple(tools), summary)


# --- changes --------------------------------------------------------------------------------------


def as_recorded(talk: Talk) -> Talk:
    """No change; the answers have their thoughts."""
    return talk


def unthinking(talk: Talk) -> Talk:
    """The same talk by a model that did not think."""
    messages = [
        {key: value for key, value in one.items() if key not in REASONING} for one in talk.messages
    ]
    return replace(talk, messages=tuple(messages))


def edited(talk: Talk, place: int, content: str) -> Talk:
    """The talk with another content of one message."""
    message = talk.messages[place] | {"content": content}
    messages = (*talk.messages[:place], message, *talk.messages[place + 1 :])
    return replace(talk, messages=messages)


def clock_first(talk: Talk, time: str) -> Talk:
    """The time of day is the first line of the system prompt."""
    line = f"It is {time}."
    first = talk.messages[0]
    if first["role"] == "system":
        return edited(talk, 0, f"{line}\n{first['content']}")
    return replace(talk, messages=({"role": "system", "content": line}, *talk.messages))


def clock_each(talk: Talk) -> Talk:
    """Each message of the user and of a tool begins with the time at which it was sent."""
    for place, message in enumerate(talk.messages):
        if message["role"] in ("user", "tool"):
            talk = edited(talk, place, f"It is 10:{place % 60:02}.\n{message['content']}")
    return talk


def one_more_tool(talk: Talk) -> Talk:
    """A tool more, at the end of the list."""
    return replace(talk, tools=(*talk.tools, MORE_TOOL))


def tools_reordered(talk: Talk) -> Talk:
    """The tools in the opposite order."""
    return replace(talk, tools=talk.tools[::-1])


def turn_edited(talk: Talk) -> Talk:
    """REMOVED stands for the text of a message in the middle, for example a tool's old result."""
    told = [i for i, one in enumerate(talk.messages) if one["role"] in ("user", "tool")]
    return edited(talk, told[(len(told) - 1) // 2], REMOVED)


def compacted(talk: Talk) -> Talk:
    """A summary stands for all but the system prompt, the last answer and what follows it."""
    system = [one for one in talk.messages[:1] if one["role"] == "system"]
    summary = {"role": "user", "content": f"Summary of the conversation so far: {talk.summary}"}
    return replace(talk, messages=(*system, summary, *talk.messages[talk.last_answer :]))


class Change(NamedTuple):
    """`before` makes the talk that the server has computed, `after` the one that comes next."""

    before: Callable[[Talk], Talk]
    after: Callable[[Talk], Talk]
    needs: str = ""  # a key of LACKS: without it there is nothing to change


LACKS = {  # what a change needs → the reason if a talk does not have it
    "thoughts": "no thoughts",
    "a tool": "no tools",
    "two tools": "at most one tool",
    "summary": "no summary",
}
CHANGES = {
    "messages appended": Change(unthinking, unthinking),
    "thinking dropped": Change(as_recorded, as_recorded, "thoughts"),
    "clock, in the first line": Change(
        partial(clock_first, time="10:41"), partial(clock_first, time="10:42")
    ),
    "clock, in each message": Change(clock_each, clock_each),
    "one more tool": Change(as_recorded, one_more_tool, "a tool"),
    "tools in another order": Change(as_recorded, tools_reordered, "two tools"),
    "a turn edited in the middle": Change(as_recorded, turn_edited),
    "compaction": Change(as_recorded, compacted, "summary"),
}


def changes_of(talk: Talk) -> dict[str, Change]:
    """The changes that this talk can have. Only "thinking dropped" keeps the thoughts."""
    missing = left_out(talk)
    return {name: change for name, change in CHANGES.items() if name not in missing}


def left_out(talk: Talk) -> dict[str, str]:
    """The changes that this talk cannot have, with the reason."""
    has = {
        "": True,
        "thoughts": any(name in one for one in talk.messages for name in REASONING),
        "a tool": bool(talk.tools),
        "two tools": len(talk.tools) > 1,
        "summary": bool(talk.summary),
    }
    return {n: LACKS[change.needs] for n, change in CHANGES.items() if not has[change.needs]}


# --- tokens ---------------------------------------------------------------------------------------


class Requests(NamedTuple):
    """Ids: of every earlier request with its answer, as far as they were computed, and of the next
    prompt."""

    held: list[list[int]]
    prompt: list[int]


class Writer:
    """Talks as token ids, by the chat template and the tokenizer of a model."""

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer

    def requests(self, change: Change, talk: Talk) -> Requests:
        """The requests before and after a change."""
        if change.needs != "thoughts":
            talk = unthinking(talk)
        before, after = change.before(talk), change.after(talk)
        answers = [i for i, one in enumerate(before.messages) if one["role"] == "assistant"]
        held = [self.held(replace(before, messages=before.messages[: i + 1])) for i in answers]
        return Requests(held, self.tokenizer.encode(self.rendered(after)))

    def held(self, talk: Talk) -> list[int]:
        """Ids whose keys a server has after the last message, an answer that it has drawn.

        The thoughts are part of what was drawn, also where the template shows none. The end token
        is drawn, but never fed.
        """
        prompt = self.rendered(replace(talk, messages=talk.messages[:-1]))
        whole = self.rendered(talk, ask=False)
        if not whole.startswith(prompt):
            raise NanoKVError(
                "the chat template of this model shows an answer in another form than the one "
                "that it asks for: what was drawn is not known",
                "-m NAME of another model",
            )
        answer = whole[len(prompt) :]
        said = talk.messages[-1]
        thoughts = next((said[name] for name in REASONING if said.get(name)), "")
        if thoughts and thoughts not in answer:
            answer = f"<think>\n{thoughts}\n</think>\n\n{answer}"
        ids = self.tokenizer.encode(prompt + answer)
        ends = [i for i, token in enumerate(ids) if token in self.tokenizer.control_ids]
        return ids[: max(ends, default=len(ids) - 1)]

    def rendered(self, talk: Talk, ask: bool = True) -> str:
        """The text of a talk; if the template has no place for tools or calls, they are written
        into the messages as JSON."""
        messages = list(talk.messages)
        try:
            return self.tokenizer.render(messages, list(talk.tools) or None, ask)
        except LeftOut:
            return self.tokenizer.render(spelled_out(talk), None, ask)


def spelled_out(talk: Talk) -> list[Message]:
    """Messages with the tools in the system prompt, and with the calls in the answers, as JSON."""
    tools = [json.dumps(tool) for tool in talk.tools]
    first = {"role": "system", "content": ""}
    if talk.messages[0]["role"] == "system":
        first = talk.messages[0]
    messages = []
    for message in talk.messages[first is talk.messages[0] :]:
        calls = [json.dumps(function_of(call)) for call in message.get("tool_calls") or ()]
        text = "\n".join([*filter(None, [message.get("content")]), *calls])
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        messages.append(kept | {"content": text})
    return [first | {"content": "\n".join([first["content"], *tools])}, *messages]


def function_of(call: Any) -> Any:
    """The name and arguments of a call, without its id."""
    if isinstance(call, dict):
        return call.get("function", call)
    return call


def reused(requests: Requests, page: int, index: str) -> int:
    """How many tokens of the prompt an unlimited memory has, in pages of `page` tokens."""
    rows = [Tokens(ids, [], "") for ids in (*requests.held, requests.prompt)]
    held = INDEXES[index](POLICIES["lru"](), None)
    found = 0
    for now, request in enumerate(TokenTrace(rows).requests(page)):
        found = held.match(request.keys[: request.sought])
        held.store(request, found, now)
    return found * page
