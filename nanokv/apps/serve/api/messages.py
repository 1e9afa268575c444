"""The messages of a chat, and the tools that its model may call, as chat templates take them.

One model for each role: the check, /openapi.json, and what a template gets. A refusal names the message,
`messages[2].content`. Pictures and sound are refused.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from nanokv.apps.serve.api.fields import Expected, Fields, NotDone, Nothing, Text
from nanokv.text.call_forms import as_object

# --- content --------------------------------------------------------------------------------------


class TextPart(Fields):
    """A part of a content."""

    type: Literal["text"]
    text: str


class RefusalPart(Fields):
    """What the assistant said instead of a text."""

    type: Literal["refusal"]
    refusal: str


def kind_of_part(part: Any) -> str:
    """A tag; one that no model has is refused."""
    return f"<{part.get('type')}>" if isinstance(part, dict) else "<other>"


def kind_of_content(content: Any) -> str:
    """The same of a whole content."""
    return f"<{type(content).__name__}>"


def joined(content: str | list[TextPart | RefusalPart]) -> str:
    """Text parts with a line break between them, as llama.cpp and vLLM have it."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


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
    """What was called. OpenAI sends the arguments as JSON text, Ollama sends the object, which templates get. A text
    that is not the JSON of an object stays as the model wrote it."""

    name: str
    arguments: Annotated[
        str | dict[str, Any], Expected("a text or an object"), AfterValidator(as_object)
    ]


class ToolCall(Fields):
    """A call that the assistant has made."""

    type: Annotated[Literal["function"], NotDone("functions are called here")] = "function"
    function: ToolCallFunction
    id: str


# --- messages -------------------------------------------------------------------------------------

Unfinished = Annotated[
    Any,
    Nothing(False, hint="/v1/completions goes on with a text, a chat starts a new message"),
    Field(exclude=True),
]


class Message(Fields):
    """What all of them have. Other fields are ignored: templates have no use for them."""

    name: Text = None
    prefix: Unfinished = None
    partial: Unfinished = None
    function_call: Annotated[Any, Nothing({}, hint="tool_calls is done"), Field(exclude=True)] = (
        None
    )


class UserMessage(Message):
    """What is asked, or instructions. developer is a newer name of the role system, which is the one templates know."""

    role: Annotated[
        Literal["system", "developer", "user"],
        Expected("system, developer, user, assistant or tool"),
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Content


class AssistantMessage(Message):
    """What was answered, thought and called. The thoughts are read under three names."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(fail_fast=True)] | None,
        AfterValidator(lambda calls: calls or None),
    ] = None
    reasoning_content: Text = None  # REASONING of template.py, which makes one field of them
    thinking: Text = None
    reasoning: Text = None
    audio: Annotated[Any, Nothing(), Field(exclude=True)] = None


class ToolMessage(Message):
    """What came of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


def kind_of_message(message: Any) -> str:
    """A tag. An unknown role is refused by the user's model; `function`, from before there were tools, has no model."""
    role = message.get("role") if isinstance(message, dict) else None
    return f"<{role}>" if role in ("assistant", "tool", "function") else "<user>"


AnyMessage = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(kind_of_message, "unsupported", "tools and the role tool are done"),
]
Messages = Annotated[list[AnyMessage], Field(min_length=1, fail_fast=True)]


def for_template(found: list[AnyMessage]) -> list[dict]:
    """The messages as chat templates take them: null is absent."""
    return [message.model_dump(exclude_none=True) for message in found]


# --- tools ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tools:
    """What the model may call. `choice`: none, auto, required, or the name of the one that it must call."""

    functions: tuple[dict, ...] = ()
    choice: str = "none"
    forced: bool = False  # required, or a name
    parallel: bool = True  # several calls in one answer

    @property
    def offered(self) -> list[dict] | None:
        """As templates take them; None where nothing may be called."""
        return (
            [{"type": "function", "function": one} for one in self.functions]
            if self.choice != "none"
            else None
        )

    @property
    def many(self) -> bool:
        """Whether several calls may stand in one answer."""
        return self.parallel and (not self.forced or self.choice == "required")

    @property
    def callable(self) -> list[dict]:
        """The functions that may be called."""
        named = self.forced and self.choice != "required"
        return (
            [one for one in self.functions if self.choice == one["name"] or not named]
            if self.offered
            else []
        )
