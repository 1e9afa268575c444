"""What goes wrong, as OpenAI's object: a status and {"error": {"message", "type", "param", "code"}}.

The same object stands in the body of a response and, once the status 200 has gone out, in the stream.
"""

import logging
import traceback
from collections.abc import Callable
from typing import Any

from nanokv.decoding import completion
from nanokv.errors import NanoKVError
from weights_loader.strict import bounded

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A refusal or a failure that the client is told. `param` names the field of the request that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        hint: str = "",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(bounded(message))
        self.status, self.param, self.code, self.hint, self.headers = (
            status,
            param,
            code,
            hint,
            headers or {},
        )

    @property
    def body(self) -> dict:
        """{"error": …}, and beside it what mends it, where that is known."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error} | ({"hint": self.hint} if self.hint else {})


class ClientGone(Exception):
    """Nobody is there any more to be told anything."""


def refused(error: NanoKVError, param: str) -> ApiError:
    """What the tokenizer, the template or the engine says about a field of the request."""
    code = completion.error(error)["error"]["code"]
    return ApiError(400, str(error), param, code, error.hint)


def named(param: str, function: Callable, *args: Any) -> Any:
    """function(*args); what it refuses is the fault of that field."""
    try:
        return function(*args)
    except NanoKVError as error:
        raise refused(error, param) from error


def internal() -> ApiError:
    """Our bug. What it was stands in the log and not in the answer: it may quote another client's request."""
    return ApiError(
        500, "the server failed at this request; its log says why", code="internal_error"
    )


def where(error: BaseException) -> str:
    """The error's type and the line that raised it; its text may quote what a client has sent."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    logger.debug("%s", "".join(traceback.format_exception(error)))
    return f"{type(error).__name__}{place}"
