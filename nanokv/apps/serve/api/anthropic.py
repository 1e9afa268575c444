"""Requests of Anthropic's Messages API (/v1/messages), as the messages and tools of a chat.

Blocks of one turn become one message; the results of calls become messages of their own. Thoughts
are read whether or not they are signed. Tools that run at Anthropic, such as web searches, are left
out of the prompt, and the log names them. `cache_control` is accepted: prefixes are reused without
being marked. An answer that begins with a given text (a last message of the assistant) is refused.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.fields import (
    Expected,
    Fields,
    NotDone,
    Nothing,
    Object,
    Text,
    YesNo,
    read,
)
from nanokv.apps.serve.api.known import HARMLESS, NOT_DONE, refused
from nanokv.apps.serve.api.messages import Tools, kind_of_content
from nanokv.apps.serve.api.protocol import Asked, common, note_unknown, with_end
from nanokv.apps.serve.api.requests import (
    LONGEST_STOP,
    MOST_STOPS,
    MOST_TOOLS,
    Common,
    FunctionName,
    Stop,
)
from nanokv.apps.serve.api.tools import check_chosen, names_of, note, without_null

# --- blocks ---------------------------------------------------------------------------------------


class TextBlock(Fields):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Fields):
    """Thoughts of the model. Their signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class ToolUse(Fields):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], Expected("an object")]


class Unreadable(Fields):
    """An image or a document."""

    type: Annotated[Literal["text"], NotDone("only blocks of text are read")]


class OtherBlock(Fields):
    """A block of a service that this server lacks, or encrypted thoughts."""

    type: str


def kind_of_result(block: Any) -> str:
    """The discriminator's tag of a block of a result."""
    if isinstance(block, dict) and block.get("type") not in ("text", "image", "document"):
        return "<other>"
    if isinstance(block, dict) and block.get("type") != "text":
        return "<unreadable>"
    return "<text>"


def joined(content: str | list) -> str:
    """Join the texts with line breaks; other blocks are left out."""
    if isinstance(content, str):
        return content
    note("blocks", [block.type for block in content if isinstance(block, OtherBlock)])
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[Unreadable, Tag("<unreadable>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(kind_of_result),
]
Texts = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[ResultBlock], Tag("<list>")],
    Discriminator(kind_of_content, "expected", "a text or a list of blocks"),
    AfterValidator(joined),
]


class ToolResult(Fields):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""


MODELS = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUse,
    "tool_result": ToolResult,
    "image": Unreadable,
    "document": Unreadable,
}


def kind_of_block(block: Any) -> str:
    """The discriminator's tag of a block."""
    if not isinstance(block, dict):
        return "<text>"
    kind = block.get("type")
    if kind in ("image", "document"):
        return "<unreadable>"
    if isinstance(kind, str) and kind in MODELS:
        return f"<{kind}>"
    return "<other>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUse, Tag("<tool_use>")]
    | Annotated[ToolResult, Tag("<tool_result>")]
    | Annotated[Unreadable, Tag("<unreadable>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(kind_of_block),
]


class Turn(Fields):
    """A message. One of the role `system` inside a conversation is read as the user's."""

    role: Annotated[Literal["user", "assistant", "system"], Expected("user or assistant")]
    content: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[list[Block], Field(fail_fast=True), Tag("<list>")],
        Discriminator(kind_of_content, "expected", "a text or a list of blocks"),
    ]

    @property
    def by_assistant(self) -> bool:
        """Whether the model said this."""
        return self.role == "assistant"

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)


# --- other fields ---------------------------------------------------------------------------------


class Tool(Fields):
    """A function that the model may call."""

    name: FunctionName
    type: Literal["custom"] | None = None
    description: Text = None
    input_schema: Object = None


class OtherTool(Fields):
    """A tool that has no schema here, as `web_search_20250305`."""

    type: str


def kind_of_tool(tool: Any) -> str:
    """The discriminator's tag of a tool."""
    if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
        return "<other>"
    return "<custom>"


AnyTool = Annotated[
    Annotated[Tool, Tag("<custom>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(kind_of_tool),
]


class Choice(Fields):
    """Which tools may or must be called."""

    type: Annotated[Literal["auto", "any", "tool", "none"], Expected("auto, any, tool or none")]
    name: Text = None
    disable_parallel_tool_use: YesNo = None


class Thinking(Fields):
    """Whether the model thinks. A budget of tokens is no setting of open models: it is ignored."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "between_tools"],
        Expected("enabled, adaptive or disabled"),
    ]


class Format(Fields):
    """JSON that a schema describes."""

    type: Annotated[Literal["json_schema"], Expected("json_schema")]
    schema_: Annotated[dict[str, Any], Expected("an object")] = Field(alias="schema")


class OutputConfig(Fields):
    """How much effort the model makes, and the form of its answer."""

    effort: Text = None
    format: Format | None = None


class Prompt(Fields):
    """The fields that make the prompt; /v1/messages/count_tokens reads no others."""

    model: Text = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None


_Base: Any = create_model("_Base", __base__=Common, **refused(NOT_DONE), **HARMLESS)


class MessagesRequest(Prompt, _Base):
    """The body of /v1/messages. The sampling settings of a chat completion are valid too."""

    stop_sequences: Annotated[
        Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None,
        Expected(f"a list of at most {MOST_STOPS} texts of 1 to {LONGEST_STOP:,} characters"),
    ] = None
    n: Annotated[Any, Nothing(1)] = None


# --- to a chat ------------------------------------------------------------------------------------


def messages(fields: dict) -> Asked:
    """A request to /v1/messages."""
    request = read(MessagesRequest, fields)
    note_unknown(fields, MessagesRequest)
    settings = common(request)
    if request.stop_sequences is not None:
        settings["stop"] = list(request.stop_sequences)
    return with_end(prompt(request, settings))


def count_tokens(fields: dict) -> Asked:
    """A request to /v1/messages/count_tokens."""
    request = read(Prompt, fields)
    return prompt(request, {"model": request.model})


def prompt(request: Any, settings: dict) -> Asked:
    """The fields that make the prompt, and the form of the answer."""
    if request.messages[-1].by_assistant:
        words = "the last message is the assistant's: this server begins a new message"
        raise ApiError(
            400, words, "messages", "unsupported", hint="/v1/completions continues a text"
        )
    output = request.output_config or OutputConfig()
    wanted = output.format
    schema_field = "output_config.format"
    if wanted is None:
        wanted = request.output_format
        schema_field = "output_format"
    return Asked(
        [list(chat(request))],
        "messages",
        schema=wanted.schema_ if wanted else None,
        schema_field=schema_field,
        template=thinking(request.thinking, output.effort),
        tools=tools(request),
        **settings,
    )


def thinking(wanted: Thinking | None, effort: str | None) -> dict:
    """Template variables; {} leaves the template its default. Unknown to it, they do nothing."""
    variables: dict[str, Any] = {}
    if wanted is not None:
        on = wanted.type != "disabled"
        variables = {"enable_thinking": on, "thinking": on}
    if effort is not None:
        variables["reasoning_effort"] = effort
    return variables


def chat(request: Any) -> Iterator[dict]:
    """The messages of the chat: the system prompt, then the turns."""
    if request.system:
        yield {"role": "system", "content": request.system}
    for by_assistant, turns in groupby(request.messages, lambda turn: turn.by_assistant):
        blocks = [block for turn in turns for block in turn.blocks]
        if by_assistant:
            yield answer(blocks)
        else:
            yield from question(blocks)


def answer(blocks: list) -> dict:
    """A turn of the assistant as one message."""
    found: dict[str, Any] = {"role": "assistant", "content": joined(blocks)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    if calls:
        found["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": call.input},
                "id": call.id,
            }
            for call in calls
        ]
    return found


def question(blocks: Iterable[Any]) -> Iterator[dict]:
    """A turn of the user: a message for each result of a call, and one for the texts between."""
    texts: list[TextBlock | OtherBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock | OtherBlock):
            texts.append(block)
        if isinstance(block, ToolResult):
            if texts:
                yield {"role": "user", "content": joined(texts)}
            texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
    if texts:
        yield {"role": "user", "content": joined(texts)}


def tools(request: Any) -> Tools:
    """The tools in the format of a chat completion; those without a schema here are left out."""
    functions = []
    for tool in request.tools or []:
        if isinstance(tool, Tool):
            given = {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            }
            functions.append(without_null(given))
    note("tools", [tool.type for tool in request.tools or [] if isinstance(tool, OtherTool)])
    names = names_of(functions)
    choice = request.tool_choice or Choice(type="auto")
    many = not choice.disable_parallel_tool_use
    return Tools(tuple(functions), chosen(choice, names), choice.type in ("any", "tool"), many)


def chosen(choice: Choice, names: list[str]) -> str:
    """none, auto, required, or the name of the function that must be called."""
    if choice.type == "tool":
        check_chosen(choice.name, names)
        return choice.name or ""
    if choice.type == "any":
        if not names:
            raise ApiError(400, "tool_choice is any, and no tool has a schema", "tool_choice")
        return "required"
    if choice.type == "none" or not names:
        return "none"
    return "auto"
