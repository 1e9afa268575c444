"""The messages of a chat, and the tools that its model may call, as chat templates take them.

Roles and texts are checked here; a refusal names the message, `messages[2].content`. Pictures and sound are refused.
"""

from dataclasses import dataclass
from typing import Any

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.fields import kind, needed, say
from nanokv.text.template import REASONING
from weights_loader.strict import loads

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
HALF = ("prefix", "partial")  # the answer would go on with what an assistant's last message says


def messages(found: Any) -> list[dict]:
    """Roles and texts, as the chat template takes them."""
    if not isinstance(found, list):
        raise ApiError(400, f"messages is {say(found)}: a list was expected", "messages")
    if not found:
        raise ApiError(400, "messages is empty: at least one is needed", "messages")
    return [message(value, f"messages[{number}]") for number, value in enumerate(found)]


def message(value: Any, place: str) -> dict:
    """One of them, without what the template has no use for."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{place} is {say(value)}: an object with role and content was expected", place)
    role = value.get("role")
    if role == "function" or value.get("function_call"):
        raise ApiError(400, f"{place} has the form of functions before there were tools: this server does not do that",
                       place, "unsupported")  # fmt: skip
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{place}.role is {say(role)}, not one of {', '.join(ROLES)}", f"{place}.role")
    content = value.get("content")
    if content is None and role != "assistant":
        raise ApiError(400, f"{place}.content is missing", f"{place}.content")
    for field in HALF:
        if value.get(field) not in (None, False):
            raise ApiError(400, f"{place}.{field} is {say(value[field])}: this server does not go on with a message",
                           f"{place}.{field}", "unsupported")  # fmt: skip
    said: dict = {"role": ROLES[role], "content": content_text(content, f"{place}.content")}
    if (name := kind(value, "name", str, None, f"{place}.name")) is not None:
        said["name"] = name
    if role == "tool":
        return said | {"tool_call_id": text_of(value, "tool_call_id", place)}
    if role == "assistant" and (calls := kind(value, "tool_calls", list, [], f"{place}.tool_calls")):
        said["tool_calls"] = [call(one, f"{place}.tool_calls[{number}]") for number, one in enumerate(calls)]
    thoughts = [kind(value, name, str, None, f"{place}.{name}") for name in REASONING]
    thought = next((one for one in thoughts if one is not None), None)
    return said if thought is None else said | {REASONING[0]: thought}


def content_text(content: Any, place: str) -> str | None:
    """A text, or text parts, with a line break between them as llama.cpp and vLLM have it. null stays null."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} is {say(content)}: a text or a list of parts was expected", place)
    return "\n".join(part_text(part, f"{place}[{number}]") for number, part in enumerate(content))


def part_text(part: Any, place: str) -> str:
    """The text of one part; pictures and sound are refused."""
    name = part.get("type") if isinstance(part, dict) else None
    if name not in ("text", "refusal"):
        raise ApiError(400, f"{place} is {say(part)}: only parts of type text are read", place, "unsupported")
    found = part.get(name)
    if not isinstance(found, str):
        raise ApiError(400, f"{place}.{name} is {say(found)}: a text was expected", f"{place}.{name}")
    return found


# --- tools ----------------------------------------------------------------------------------------------------------


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
        return [{"type": "function", "function": one} for one in self.functions] if self.choice != "none" else None

    @property
    def many(self) -> bool:
        """Whether several calls may stand in one answer."""
        return self.parallel and (not self.forced or self.choice == "required")

    @property
    def callable(self) -> list[dict]:
        """The functions that may be called."""
        named = self.forced and self.choice != "required"
        return [one for one in self.functions if self.choice == one["name"] or not named] if self.offered else []


def call(value: Any, place: str) -> dict:
    """A call that the assistant has made, its arguments as an object: OpenAI sends JSON text, ollama the object."""
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise ApiError(400, f"{place} is {say(value)}: a call of type function was expected", place, "unsupported")
    found = needed(value, "function", dict, f"{place}.function")
    name, where = text_of(found, "name", f"{place}.function"), f"{place}.function.arguments"
    given = needed(found, "arguments", (str, dict), where)
    try:
        arguments = loads(given or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise ApiError(400, f"{where} is not JSON: {error}", where) from None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where} is {say(arguments)}: the JSON of an object was expected", where)
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made | {"id": text_of(value, "id", place)}


def text_of(fields: dict, name: str, place: str) -> str:
    """A text that must be there."""
    return needed(fields, name, str, f"{place}.{name}")
