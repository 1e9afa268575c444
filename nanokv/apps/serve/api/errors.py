"""Errors in OpenAI's form: a status and {"error": {"message", "type", "param", "code"}}.

The same object is the body of a response or, once status 200 has been sent, an event of the stream.
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
    """An error that is reported to the client. `param` names the request field that caused it."""

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
        self.status = status
        self.param = param
        self.code = code
        self.hint = hint
        self.headers = headers or {}

    @property
    def body(self) -> dict:
        """{"error": …}, with a "hint" beside it where a fix is known."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        body: dict[str, Any] = {"error": error}
        if self.hint:
            body["hint"] = self.hint
        return body

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status < 500:
            return "invalid_request_error"
        return "server_error"


class ClientGone(Exception):
    """The client has disconnected, so no response is sent."""


def refused(error: NanoKVError, param: str) -> ApiError:
    """An error of the tokenizer, the template or the engine, attributed to a request field."""
    code = completion.error(error)["error"]["code"]
    return ApiError(400, str(error), param, code, error.hint)


def named(param: str, function: Callable, *args: Any) -> Any:
    """Call function(*args); a NanoKVError becomes an ApiError about the field `param`."""
    try:
        return function(*args)
    except NanoKVError as error:
        raise refused(error, param) from error


def internal() -> ApiError:
    """A bug in the server. Details go to the log only: they may quote another client's request."""
    return ApiError(
        500, "the server failed at this request; its log says why", code="internal_error"
    )


def where(error: BaseException) -> str:
    """The error's type and the line that raised it, without the message: it may quote a client."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    logger.debug("%s", "".join(traceback.format_exception(error)))
    return f"{type(error).__name__}{place}"
