"""Access checks on Host, Origin and API key before the body is read; and normalized paths.

DNS rebinding: a web page whose host name suddenly resolves to 127.0.0.1 can reach this server, but
its requests carry the page's Host, so only known hosts are served. A page of another site is
refused by its Origin, unless --allow-origin names it. The digest of a key is compared with that of every known
key, in constant time. Requests share prefixes only if they have the same key: the hashes of their
pages begin with the key's salt (nanokv/cache/prefix.py).
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from collections.abc import Iterable
from time import perf_counter
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanokv.apps.serve.api.anthropic_form import anthropic_error
from nanokv.apps.serve.api.errors import ApiError, internal, where
from weights_loader.strict import quote

logger = logging.getLogger(__name__)
OPEN = ("/", "/health")  # need no key; the page asks the user for one
HEADER_BYTES = 16_384
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANTHROPIC = "/v1/messages"  # errors below this address have Anthropic's form


class Keys:
    """API keys as digests, each with a salt for its prefixes. Without keys all share prefixes."""

    def __init__(self, keys: Iterable[str] = ()):
        secret = secrets.token_bytes(32)  # so that a salt reveals nothing about its key
        known = [key.encode() for key in keys]
        self.salts = [
            (_digest(key), hmac.new(secret, key, hashlib.sha256).hexdigest()) for key in known
        ]
        # Salt → number of the key, from 1 in the order of `keys`, for /metrics.
        self.numbers = {salt: str(i) for i, (_, salt) in enumerate(self.salts, start=1)}

    def salt(self, headers: Headers) -> str:
        """The salt of the request's key; ApiError (401) for a missing or unknown key.

        The key is a bearer token, or Anthropic's header x-api-key.
        """
        if not self.salts:
            return ""
        authorization = headers.get("authorization", "")
        if not authorization and "x-api-key" in headers:
            authorization = f"Bearer {headers['x-api-key']}"
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        found = [salt for digest, salt in self.salts if hmac.compare_digest(digest, given)]
        if not found or scheme.lower() != "bearer":
            message = "no API key: send Authorization: Bearer KEY"
            if authorization:
                message = "a wrong API key"
            raise ApiError(
                401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        return found[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Hosts:
    """Names under which the server is known.

    A server that listens beyond loopback accepts any IP address: a rebound name is not an address.
    """

    def __init__(self, host: str, allowed: Iterable[str] = (), origins: Iterable[str] = ()):
        self.names = {name.lower() for name in (*LOOPBACK, host, *allowed)}
        self.origins = frozenset(origins)  # of other sites whose pages may ask
        self.any_address = not is_loopback(host)

    def check(self, headers: Headers) -> None:
        """Raise ApiError for an unknown Host or for a page of another site."""
        (host, *more) = headers.getlist("host") or [""]
        name = host_name(host)
        if more or not (name in self.names or (self.any_address and is_address(name))):
            raise ApiError(
                403,
                f"unknown host {quote(host)}",
                code="unknown_host",
                hint="nanokv serve --allow-host NAME serves it",
            )
        for origin in headers.getlist("origin"):
            if origin not in (f"http://{host}", f"https://{host}", *self.origins):
                raise ApiError(
                    403,
                    f"a page of {quote(origin)} may not use this server",
                    code="unknown_origin",
                    hint="nanokv serve --allow-origin ORIGIN lets its pages ask",
                )

    def cors(self, headers: Headers) -> dict[str, str]:
        """The headers with which a browser shows an answer to a page of an allowed origin."""
        origins = headers.getlist("origin")
        if len(origins) != 1 or origins[0] not in self.origins:
            return {}
        return {
            "access-control-allow-origin": origins[0],
            "access-control-expose-headers": "retry-after",
            "vary": "origin",
        }


def host_name(host: str) -> str:
    """A Host header without port and brackets, in lower case; "" if it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises ValueError for a malformed port
    except ValueError:
        return ""
    if parts.netloc != host or "@" in host:
        return ""
    return parts.hostname or ""


def is_address(host: str) -> bool:
    """Whether this is an IP address rather than a name."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether this address is reachable from this machine only."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


class Guard:
    """The ASGI layer in front of the application.

    It sets two entries of the scope: `salt`, of the request's key, and `note`, which the
    application fills for the log.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts, keys: Keys):
        self.app = app
        self.hosts = hosts
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = origin_form(scope)
        path = re.sub("/+", "/", scope["path"])
        scope = dict(scope) | {"path": path.rstrip("/") or "/", "note": [], "salt": ""}
        began = perf_counter()
        status = 0
        headers = Headers(scope=scope)
        cors = self.hosts.cors(headers)

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if message["type"] == "http.response.start":
                message = with_headers(message, cors)
            await send(message)

        try:
            check_length(scope)
            check_framing(headers)
            self.hosts.check(headers)
            await self._answer(scope, headers, bool(cors))(scope, receive, watched)
        except ApiError as error:
            await respond(error, scope["path"])(scope, receive, watched)
        except Exception as error:
            logger.error("a request failed: %s", where(error))
            if not status:
                await respond(internal(), scope["path"])(scope, receive, watched)
        note = " · ".join(["", *scope["note"]])
        seconds = perf_counter() - began
        logger.info(
            "%s %s %d%s · %.3f s",
            scope["method"],
            quote(scope["path"])[1:-1],
            status,
            note,
            seconds,
        )

    def _answer(self, scope: Scope, headers: Headers, allowed: bool) -> ASGIApp:
        """The application or, to a page of an allowed origin, the answer to its preflight.

        A browser sends no key with a preflight.
        """
        asks = "access-control-request-method" in headers
        if allowed and asks and scope["method"] == "OPTIONS":
            return preflight(headers)
        if scope["path"] not in OPEN:
            scope["salt"] = self.keys.salt(headers)
        return self.app


def preflight(headers: Headers) -> Response:
    """The answer to a browser that asks for a page of an allowed origin (Fetch, 4.8)."""
    permitted = {
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": headers.get("access-control-request-headers", ""),
        "access-control-max-age": "600",
    }
    return Response(status_code=204, headers=permitted)


def with_headers(message: Message, more: dict[str, str]) -> Message:
    """The start of a response with these headers added."""
    added = [(name.encode(), value.encode("latin-1")) for name, value in more.items()]
    return {**message, "headers": [*message.get("headers", []), *added]}


def origin_form(scope: Scope) -> Scope:
    """A request whose target is a whole URL, as one for its path and host (RFC 9112, 3.2.2).

    The host of the target replaces the Host header, which must be ignored.
    """
    target = scope["raw_path"]
    found = re.match(rb"https?://([^/?#]*)", target, re.IGNORECASE)
    if found is None:
        return scope
    raw_path = target[found.end() :] or b"/"
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return dict(scope) | {
        "raw_path": raw_path,
        "path": unquote(raw_path.decode("ascii")),
        "headers": [(b"host", found[1]), *others],
    }


def check_length(scope: Scope) -> None:
    """Limit path and headers together; the parser limits them only while they are incomplete."""
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    size += len(scope["raw_path"]) + len(scope["query_string"])
    if size > HEADER_BYTES:
        raise ApiError(
            431, f"address and headers have {size:,} bytes, at most {HEADER_BYTES:,} are read"
        )


def check_framing(headers: Headers) -> None:
    """Refuse a body with two lengths: a proxy may have used the other one (RFC 9112, 6.3)."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise ApiError(
            400,
            "Content-Length and Transfer-Encoding were both given: "
            "one of them says where a body ends",
            code="invalid_http",
            headers={"connection": "close"},
        )


def respond(error: ApiError, path: str = "") -> JSONResponse:
    """The HTTP response to an error, in the form of the API that the path belongs to."""
    body = error.body
    if path.startswith(ANTHROPIC):
        body = anthropic_error(error)
    return JSONResponse(body, error.status, error.headers)
