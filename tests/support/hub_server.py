"""A local HTTP server that speaks enough of the Hugging Face hub's protocol for the real client to download from it.

Serves FOLDER/<org>/<name>/<files>; a subfolder FOLDER/<org>/<name>/@<revision>/ holds another revision's files.
Alone: `python tests/support/hub_server.py FOLDER --port 8000`, then HF_ENDPOINT=http://127.0.0.1:8000 in another shell.
In tests: `with HubServer(folder) as hub:`; hub.requests lists what came, and the attributes below make it misbehave.
It has no uploads, no redirects to a CDN and no xet; git-sized files get a git-style etag, larger ones their sha256.
"""

import argparse
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")


class HubServer(ThreadingHTTPServer):
    """`with HubServer(folder) as hub:` serves in a thread on a free port of 127.0.0.1 (hub.url)."""

    daemon_threads = True

    def __init__(self, folder, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = Path(folder)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        # {"method", "path", "range", "authorization", "status", "sent"}
        self.requests: list[dict] = []
        self.token: str | None = None  # demanded of every request
        self.gated: set[str] = set()  # repositories that answer 403 GatedRepo (401 without a token)
        # File name: connection is cut after so many bytes, once for each entry.
        self.cut: dict[str, list[int]] = {}
        self.corrupt: set[str] = set()  # file names whose bytes arrive flipped
        self.broken = 0  # HTTP status for everything, 0 = healthy
        self.ignore_range = False  # answer 200 and the whole file to a Range request
        # File name: headers in place of the true ones; None leaves one out.
        self.lies: dict[str, dict] = {}
        self.redirect: dict[str, str] = {}  # file name: where a GET is sent
        # File names whose body goes on, chunked, until the client leaves or 32 MB.
        self.endless: set[str] = set()

    def __enter__(self):
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()

    def gets(self, name: str = "") -> list[dict]:
        """The GET requests for files whose path ends in `name`."""
        return [r for r in self.requests if r["method"] == "GET" and r["path"].endswith(name)]

    def commit(self, repo: str, revision: str) -> str | None:
        """40 hex digits for a branch that exists, or for a commit of one that does."""
        root = self.folder / repo
        branches = ["main"] + sorted(p.name[1:] for p in root.glob("@*"))
        commits = {name: hashlib.sha1(f"{repo}@{name}".encode()).hexdigest() for name in branches}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, repo: str, commit: str) -> dict[str, Path]:
        root = self.folder / repo
        branch = next((p for p in root.glob("@*") if self.commit(repo, p.name[1:]) == commit), root)
        nested = [*branch.glob("additional_chat_templates/*"), *branch.glob("1_Pooling/*")]
        found = [*branch.iterdir(), *nested]
        return {str(p.relative_to(branch)): p for p in sorted(found) if p.is_file()}


class Handler(BaseHTTPRequestHandler):
    """One request: refuse it, describe a repository, or send a file or a part of one."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def log_message(self, *arguments):
        pass

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        self.record = {
            "method": self.command,
            "path": path,
            "range": self.headers.get("Range"),
            "authorization": self.headers.get("Authorization"),
            "status": 0,
            "sent": 0,
        }
        # A registry that the client reads once a day for its user agent.
        if path == "/api/agent-harnesses":
            return self.fail(404)
        self.server.requests.append(self.record)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?", path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if self.server.broken:
            return self.fail(self.server.broken)
        if not api and not resolve:
            return self.fail(404)
        repo, revision = (api[1], api[3] or "main") if api else (resolve[1], resolve[2])
        authorized = (
            self.server.token is None
            or self.record["authorization"] == f"Bearer {self.server.token}"
        )
        if repo in self.server.gated:
            return self.fail(
                403 if self.record["authorization"] else 401,
                "GatedRepo",
                "Access to it is restricted.",
            )
        if not authorized and self.record["authorization"]:
            return self.fail(401, message="Invalid credentials in Authorization header")
        if not (self.server.folder / repo).is_dir() or ".." in repo:
            return self.fail(404 if authorized else 401, "RepoNotFound", "Repository not found")
        if not authorized:
            return self.fail(401, "GatedRepo", "Please log in.")
        commit = self.server.commit(repo, revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = self.server.files(repo, commit)
        if api:
            return self.describe(repo, commit, files, api[2])
        if resolve[3] not in files:
            return self.fail(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        self.send_file(files[resolve[3]], commit)

    def describe(self, repo, commit, files, what):
        entries = [
            {"type": "file", "path": n, "size": p.stat().st_size, "oid": etag(p)}
            for n, p in files.items()
        ]
        siblings = [
            {"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]} for e in entries
        ]
        info = {
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "private": False,
            "tags": [],
            "downloads": 0,
            "siblings": siblings,
        }
        body = json.dumps(entries if what == "tree" else info).encode()
        self.reply(
            200, {"Content-Type": "application/json", "Content-Length": str(len(body))}, body
        )

    def send_file(self, path, commit):
        data = path.read_bytes()
        tag = etag(path)
        if path.name in self.server.corrupt:
            data = bytes(255 - byte for byte in data)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path.suffix in LFS_SUFFIXES:
            headers |= {"X-Linked-Etag": f'"{tag}"', "X-Linked-Size": str(len(data))}
        asked = re.fullmatch(r"bytes=(\d+)-", self.record["range"] or "")
        if asked and not self.server.ignore_range:
            start = int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data = data[start:]
        headers["Content-Length"] = str(len(data))
        headers |= self.server.lies.get(path.name, {})
        if self.command == "GET" and path.name in self.server.redirect:
            return self.reply(
                302, {"Location": self.server.redirect[path.name], "Content-Length": "0"}, b""
            )
        if self.command == "GET" and path.name in self.server.endless:
            return self.send_for_ever(headers)
        cuts = self.server.cut.get(path.name) if self.command == "GET" else None
        self.reply(
            206 if "Content-Range" in headers else 200,
            headers,
            data[: cuts.pop(0)] if cuts else data,
        )

    def send_for_ever(self, headers):
        """Chunked, so that no length was promised that could be exceeded."""
        self.reply(200, headers | {"Content-Length": None, "Transfer-Encoding": "chunked"}, b"")
        try:
            for _ in range(512):
                self.wfile.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
                self.record["sent"] += 65536
        except ConnectionError:
            pass
        self.close_connection = True

    def fail(self, status, code=None, message=None, headers=None):
        headers = dict(headers or {}) | {"Content-Length": "0"}
        if code:
            headers["X-Error-Code"] = code
        if message:
            headers["X-Error-Message"] = message
        self.reply(status, headers, b"")

    def reply(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.record["status"] = status
        if self.command == "GET":
            self.record["sent"] = len(body)
            try:
                self.wfile.write(body)
                self.wfile.flush()
            except ConnectionError:  # the client left; the record says how far we meant to go
                self.close_connection = True
        if self.command == "GET" and len(body) < int(headers["Content-Length"] or 0):
            # Fewer bytes than promised, then the end: a cut connection.
            self.close_connection = True


def etag(path: Path) -> str:
    """sha256 for what the hub keeps in LFS, git's blob id for the rest."""
    data = path.read_bytes()
    if path.suffix in LFS_SUFFIXES:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def main():
    parser = argparse.ArgumentParser(
        description="serve FOLDER/<org>/<name>/* as a Hugging Face hub on 127.0.0.1"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token", help="demand this token")
    arguments = parser.parse_args()
    server = HubServer(arguments.folder, arguments.port)
    server.token = arguments.token
    print(f"HF_ENDPOINT={server.url}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
