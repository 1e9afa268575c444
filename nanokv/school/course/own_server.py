"""An HTTP server for a learner's engine, on this machine only.

    server = Server(engine, stream, ask, text)     # stream: the learner's function
    server.address                                 # http://127.0.0.1:PORT/

    GET /            a page to ask questions and to see what each step does
    GET /ask?q=…     the answer, piece by piece
    GET /steps       the timeline so far, as text

Each request for an answer advances its own stream, and thereby the engine; a lock allows one step
at a time. The server ends with the process, or with `close`.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from nanokv.errors import NanoKVError

if TYPE_CHECKING:
    from nanokv.school.course.own_engine import Engine

HOST = "127.0.0.1"


class Server:
    """`stream(engine, request)` → tokens as they come; `ask(question)` → ids of a prompt;
    `text(tokens)` → their text. `most`: the most answer tokens.
    """

    def __init__(
        self, engine: "Engine", stream: Callable, ask: Callable, text: Callable, most: int = 64
    ):
        self.engine = engine
        self.stream = stream
        self.ask = ask
        self.text = text
        self.most = most
        self.turn = Lock()
        handler = type("Bound", (Handler,), {"server_of": self})
        self.http = ThreadingHTTPServer((HOST, 0), handler)
        self.http.daemon_threads = True
        self.address = f"http://{HOST}:{self.http.server_port}/"
        Thread(target=self.http.serve_forever, daemon=True).start()

    def pieces(self, question: str) -> Iterator[str]:
        """Yield the answer as it comes, in complete characters; or the reason for refusing it."""
        try:
            with self.turn:
                request = self.engine.submit(self.ask(question), self.most)
        except NanoKVError as error:
            yield str(error)
            return
        tokens = iter(self.stream(self.engine, request))
        so_far: list[int] = []
        sent = ""
        while True:
            with self.turn:
                token = next(tokens, None)
            if token is None:
                return
            so_far.append(token)
            text = self.text(so_far)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(sent) :]
                sent = text

    def timeline(self) -> str:
        """The engine's timeline: what each step did with each request."""
        with self.turn:
            return self.engine.timeline()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class Handler(BaseHTTPRequestHandler):
    """One HTTP request. HTTP/1.0: the end of the connection ends the answer."""

    server_of: Server

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.path == "/":
            page = files("nanokv.school.course") / "assets" / "own_page.html"
            self._answer("text/html", [page.read_text(encoding="utf-8")])
        elif asked.path == "/steps":
            self._answer("text/plain", [self.server_of.timeline()])
        elif asked.path == "/ask":
            question = parse_qs(asked.query).get("q", [""])[0]
            self._answer("text/plain", self.server_of.pieces(question))
        else:
            self.send_error(404)

    def _answer(self, kind: str, pieces) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        with suppress(ConnectionError):  # the client has disconnected
            for piece in pieces:
                self.wfile.write(piece.encode())
                self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Log nothing: a notebook would show it, as output on stderr."""
