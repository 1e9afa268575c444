"""Requests of OpenAI's Responses API (/v1/responses), as the messages and tools of a chat.

The server keeps no responses: the client sends all items of the conversation each time, or refers
to recent ones by their ids (items.py). `previous_response_id` is refused.
Tools and items that only OpenAI's own services can handle, such as web searches, are left out of
the prompt, and the log names them. Agents offer those beside their functions without being asked.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, PlainValidator, Tag, create_model

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.fields import (
    Between,
    Expected,
    Fields,
    Nothing,
    Object,
    Text,
    YesNo,
    invalid,
    read,
    say,
)
from nanokv.apps.serve.api.items import MOST_BYTES, MOST_ITEMS, reference
from nanokv.apps.serve.api.known import HARMLESS, NOT_DONE, refused
from nanokv.apps.serve.api.messages import RefusalPart, Tools, joined, kind_of_content
from nanokv.apps.serve.api.protocol import Asked, common, note_unknown, with_end
from nanokv.apps.serve.api.requests import (
    EFFORTS,
    MOST_LIKELY,
    MOST_TOOLS,
    Common,
    Effort,
    FunctionName,
    Tokens,
)
from nanokv.apps.serve.api.tools import (
    OtherTool,
    Wish,
    kind_of_tool,
    note,
    sent_functions,
    tools_of,
)
from nanokv.text.call_forms import as_object

STATELESS = "this server keeps no responses: send the items of the conversation in input"
SENT = ("name", "description", "parameters", "strict")  # fields of a function for the template
LOGPROBS = "message.output_text.logprobs"  # the value of `include` that asks for them

# --- content --------------------------------------------------------------------------------------


Kind = Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]


class TextPart(Fields):
    """Text of a message, of a call's output, or of thoughts."""

    type: Kind
    text: str


def kind_of_part(part: Any) -> str:
    """The discriminator's tag of a part. Images, files and audio have no model: refused."""
    if not isinstance(part, dict):
        return "<other>"
    if part.get("type") == "refusal":
        return "<refusal>"
    if part.get("type") in get_args(Kind):
        return "<text>"
    return "<other>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(kind_of_part, "unsupported", "only parts of text are read"),
]
Content = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    Discriminator(kind_of_content, "expected", "a text or a list of parts"),
    AfterValidator(joined),
]


# --- items ----------------------------------------------------------------------------------------


class MessageItem(Fields):
    """A message. `developer` is OpenAI's new name for `system`."""

    type: Literal["message"] = "message"
    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        Expected("system, developer, user or assistant"),
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Content


class CallItem(Fields):
    """A call that the model made. Arguments that are not a JSON object stay text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(as_object)]


class OutputItem(Fields):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Fields):
    """Thoughts of the model, as it wrote them or summarized. Encrypted thoughts are not read."""

    type: Literal["reasoning"]
    summary: Annotated[list[TextPart], AfterValidator(joined)] = Field(default_factory=list)
    content: Annotated[list[TextPart], AfterValidator(joined)] | None = None


def unkept(id: Any) -> Any:
    """No id is valid: `items` has put the kept items in place of their references."""
    raise invalid(
        f"no item {say(id)} is kept: it is unknown or forgotten, because only the newest "
        f"{MOST_ITEMS:,} items of answers of a key stay, at most {MOST_BYTES // 10**6} MB. Send the "
        "items of the conversation in input, as most clients do with store: false"
    )


class ReferenceItem(Fields):
    """An item of an earlier response that is not kept."""

    id: Annotated[Any, PlainValidator(unkept)]
    type: Literal["item_reference"] | None = None


class OtherItem(Fields):
    """An item of a service that this server lacks."""

    type: str


MODELS = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}


def kind_of_item(item: Any) -> str:
    """The discriminator's tag of an item. A message or a reference may leave out its type."""
    if not isinstance(item, dict):
        return "<message>"
    if reference(item):
        return "<item_reference>"
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind in MODELS:
        return f"<{kind}>"
    return "<other>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")]
    | Annotated[OtherItem, Tag("<other>")],
    Discriminator(kind_of_item),
]
Input = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[Item], Field(fail_fast=True), Tag("<list>")],
    Discriminator(kind_of_content, "expected", "a text or a list of items"),
]


# --- other fields ---------------------------------------------------------------------------------


class FunctionTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text = None
    parameters: Object = None


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(kind_of_tool),
]


class Choice(Fields):
    """A `tool_choice` that names a function, a kind of tool, or the tools that are allowed."""

    type: str
    name: Text = None
    mode: Annotated[Literal["auto", "required"], Expected("auto or required")] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)


class Format(Fields):
    """What the text of the answer is: any text, any JSON object, or JSON that a schema describes."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"], Expected("text, json_object or json_schema")
    ] = "text"
    schema_: Object = Field(None, alias="schema")


class TextConfig(Fields):
    """Settings of the answer's text. `verbosity` is no setting of open models: it is ignored."""

    format: Format | None = None
    verbosity: Any = None


class Reasoning(Fields):
    """How long the model thinks. A template that does not know efforts ignores the field."""

    effort: Annotated[Effort | None, Expected(EFFORTS)] = None
    summary: Any = None


_Base: Any = create_model("_Base", __base__=Common, **refused(NOT_DONE), **HARMLESS)


class ResponsesRequest(_Base):
    """The body of /v1/responses. The sampling settings of a chat completion are valid too."""

    input: Input = ""
    instructions: Text = None
    max_output_tokens: Tokens = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | Choice | None,
        Expected('none, auto, required or {"type": "function", "name": …}'),
    ] = None
    parallel_tool_calls: YesNo = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int | None, Between(0, MOST_LIKELY["messages"])] = None
    # A conversation that is too long is refused in either case.
    truncation: Annotated[Literal["auto", "disabled"] | None, Expected("auto or disabled")] = None
    n: Annotated[Any, Nothing(1)] = None
    previous_response_id: Annotated[Any, Nothing(hint=STATELESS)] = None
    conversation: Annotated[Any, Nothing(hint=STATELESS)] = None
    background: Annotated[Any, Nothing(False)] = None
    prompt: Annotated[Any, Nothing(hint="send the text of the prompt in input")] = None


REPEATED: dict[
    str, Any
] = {  # fields of the request that the response repeats → the value of an absent one
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


# --- to a chat ------------------------------------------------------------------------------------


def responses(fields: dict) -> Asked:
    """A request to /v1/responses."""
    request = read(ResponsesRequest, fields)
    note_unknown(fields, ResponsesRequest)
    settings = common(request)
    if request.max_output_tokens is not None:
        settings["max_new_tokens"] = request.max_output_tokens
    likely = request.top_logprobs or 0
    wanted = likely or LOGPROBS in (request.include or [])
    repeated = {name: fields.get(name, absent) for name, absent in REPEATED.items()}
    repeated["store"] = fields.get("store") is not False
    return with_end(
        Asked(
            [list(messages(request))],
            "input",
            logprobs=likely if wanted else None,
            schema=schema(request.text.format),
            schema_field="text.format",
            template=thinking(request.reasoning),
            tools=tools(request, fields),
            repeated=repeated,
            **settings,
        )
    )


def thinking(reasoning: Reasoning | None) -> dict:
    """Template variables for the effort; {} leaves the template its default."""
    if reasoning is None or reasoning.effort is None:
        return {}
    on = reasoning.effort != "none"
    variables: dict[str, Any] = {"enable_thinking": on, "thinking": on}
    if on:
        variables["reasoning_effort"] = reasoning.effort
    return variables


def schema(wanted: Format | None) -> dict | None:
    """The JSON schema of the answer; None allows any text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.schema_ is None:
        raise ApiError(400, "text.format.schema is missing", "text.format.schema")
    return wanted.schema_


def messages(request: ResponsesRequest) -> Iterator[dict]:
    """The messages of the chat: instructions, then the items of the input.

    A client may probe the server with an empty input: that is an empty message of the user.
    """
    items = request.input
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    found = list(chat(items))
    system = [request.instructions] if request.instructions else []
    while found and found[0]["role"] == "system":
        system.append(found.pop(0)["content"])
    if system:
        yield {"role": "system", "content": "\n\n".join(system)}
    yield from found or [{"role": "user", "content": ""}]


def chat(items: Iterable[Any]) -> Iterator[dict]:
    """Items as messages: thoughts, text and calls of one turn become one message."""
    turn: dict = {}  # the assistant's turn that the items before belong to
    left_out = []
    for item in items:
        if isinstance(item, OtherItem):
            left_out.append(item.type)
            continue
        begins = isinstance(item, ReasoningItem) or is_answer(item)
        same = is_turn(item) and not (begins and (turn.get("tool_calls") or turn.get("content")))
        if turn and not same:
            yield turn
            turn = {}
        if is_turn(item):
            add(turn, item)
        elif isinstance(item, OutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
        else:
            yield {"role": item.role, "content": item.content}
    if turn:
        yield turn
    note("items", left_out)


def is_answer(item: Any) -> bool:
    """Whether this is a message of the assistant."""
    return isinstance(item, MessageItem) and item.role == "assistant"


def is_turn(item: Any) -> bool:
    """Whether the item belongs to a turn of the assistant."""
    return isinstance(item, ReasoningItem | CallItem) or is_answer(item)


def add(turn: dict, item: Any) -> None:
    """Put one more item into the assistant's turn. A turn can have tens of thousands of calls."""
    if not turn:
        turn |= {"role": "assistant", "content": ""}
    if isinstance(item, ReasoningItem):
        thoughts: list[Any] = [turn.get("reasoning_content"), item.content or item.summary]
        if any(thoughts):
            turn["reasoning_content"] = "\n".join(thought for thought in thoughts if thought)
    elif isinstance(item, MessageItem):
        turn["content"] = item.content
    else:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"type": "function", "function": function, "id": item.call_id}
        turn.setdefault("tool_calls", []).append(call)


# --- tools ----------------------------------------------------------------------------------------


def tools(request: ResponsesRequest, fields: dict) -> Tools:
    """The functions in the format of a chat completion; other tools are left out."""
    functions = sent_functions(
        request.tools, fields.get("tools"), lambda tool: {name: tool.get(name) for name in SENT}
    )
    return tools_of(functions, wish(request.tool_choice), request.parallel_tool_calls is not False)


def wish(choice: str | Choice | None) -> Wish:
    """`tool_choice`. A choice of a tool that only OpenAI's services run is left out."""
    if isinstance(choice, str):
        return Wish(choice)
    if choice is None:
        return Wish()
    if choice.type == "function":
        return Wish(function=choice.name or "")
    if choice.type == "allowed_tools":
        functions = [tool for tool in choice.tools if tool.get("type") == "function"]
        return Wish(choice.mode, allowed=tuple(str(tool.get("name")) for tool in functions))
    note("tool_choice", [choice.type])
    return Wish()
