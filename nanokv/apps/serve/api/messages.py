"""The messages of a chat, and the tools that the model may call.

There is one model per role. It checks the message, describes it in /openapi.json, and yields what
the chat template reads. An error names the message, as in `messages[2].content`. Images and audio
are refused.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from nanokv.apps.serve.api.fields import Expected, Fields, NotDone, Nothing, Text
from nanokv.text.call_forms import as_object

# --- content --------------------------------------------------------------------------------------


class TextPart(Fields):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(Fields):
    """A refusal by the assistant, in place of a text."""

    type: Literal["refusal"]
    refusal: str


def kind_of_part(part: Any) -> str:
    """The discriminator's tag of a part; tags without a model are refused."""
    if not isinstance(part, dict):
        return "<other>"
    return f"<{part.get('type')}>"


def kind_of_content(content: Any) -> str:
    """The discriminator's tag of a whole content."""
    return f"<{type(content).__name__}>"


def joined(content: str | list) -> str:
    """Join the parts with line breaks, as llama.cpp and vLLM do. Each has a text or a refusal."""
    if isinstance(content, str):
        return content
    return "\n".join(
        part.refusal if isinstance(part, RefusalPart) else part.text for part in content
    )


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(kind_of_part, "unsupported", "only parts of type text are read"),
]
Content = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    Discriminator(kind_of_content, "expected", "a text or a list of parts"),
    AfterValidator(joined),
]


# --- calls ----------------------------------------------------------------------------------------


class ToolCallFunction(Fields):
    """A called function. OpenAI sends the arguments as JSON text, Ollama as an object.

    Templates get the object. Text that is not a JSON object is passed on as the model wrote it.
    """

    name: str
    arguments: Annotated[
        str | dict[str, Any], Expected("a text or an object"), AfterValidator(as_object)
    ]


class ToolCall(Fields):
    """A call that the assistant made."""

    type: Annotated[Literal["function"], NotDone("only functions can be called")] = "function"
    function: ToolCallFunction
    id: str


# --- messages -------------------------------------------------------------------------------------

Unfinished = Annotated[
    Any,
    Nothing(False, hint="/v1/completions continues a text; a chat starts a new message"),
    Field(exclude=True),
]


class Message(Fields):
    """Fields of every message. Other fields are ignored: no template reads them."""

    name: Text = None
    prefix: Unfinished = None
    partial: Unfinished = None
    function_call: Annotated[Any, Nothing({}, hint="use tool_calls"), Field(exclude=True)] = None


class UserMessage(Message):
    """A question or instructions. `developer` is OpenAI's new name for `system`."""

    role: Annotated[
        Literal["system", "developer", "user"],
        Expected("system, developer, user, assistant or tool"),
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Content


class AssistantMessage(Message):
    """The assistant's answer, thoughts and calls. Thoughts are read under three names."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(fail_fast=True)] | None,
        AfterValidator(lambda calls: calls or None),
    ] = None
    # REASONING in template.py lists these three names; a template gets one field.
    reasoning_content: Text = None
    thinking: Text = None
    reasoning: Text = None
    audio: Annotated[Any, Nothing(), Field(exclude=True)] = None


class ToolMessage(Message):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


def kind_of_message(message: Any) -> str:
    """The discriminator's tag. UserMessage reports unknown roles; `function` is not supported."""
    if not isinstance(message, dict):
        return "<user>"
    role = message.get("role")
    if role in ("assistant", "tool", "function"):
        return f"<{role}>"
    return "<user>"


AnyMessage = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(kind_of_message, "unsupported", "use tools and the role tool"),
]
Messages = Annotated[list[AnyMessage], Field(min_length=1, fail_fast=True)]


def for_template(found: list[AnyMessage]) -> list[dict]:
    """The messages for a chat template; null fields are dropped."""
    return [message.model_dump(exclude_none=True) for message in found]


# --- tools ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tools:
    """The functions that the model may call.

    choice: "none", "auto", "required", or the name of the one function that must be called.
    """

    functions: tuple[dict, ...] = ()
    choice: str = "none"
    forced: bool = False  # a call is required: `choice` is "required" or a name
    parallel: bool = True  # several calls in one answer
    allowed: frozenset[str] | None = None  # the functions that may be called; None: all

    @property
    def offered(self) -> list[dict] | None:
        """The functions in a template's format; None if nothing may be called."""
        if self.choice == "none":
            return None
        return [{"type": "function", "function": one} for one in self.functions]

    @property
    def many(self) -> bool:
        """Whether one answer may hold several calls."""
        return self.parallel and (not self.forced or self.choice == "required")

    @property
    def callable(self) -> list[dict]:
        """The functions that may be called."""
        if not self.offered:
            return []
        if self.allowed is not None:
            return [one for one in self.functions if one["name"] in self.allowed]
        if not self.forced or self.choice == "required":
            return list(self.functions)
        return [one for one in self.functions if one["name"] == self.choice]
