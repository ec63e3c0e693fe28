"""A server on this machine that answers the requests by which huggingface_hub uploads a folder, and keeps what it is given."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

from tests.serving import web_server

TOKEN = "hf_of_a_test"


class Hub:
    """The repositories: their files, the messages of their commits, and whether they are private."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.is_private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.answers_commits = threading.Event()
        self.answers_commits.set()
        self.url = ""

    def answer(self, path: str, data: bytes) -> tuple[int, object]:
        found: tuple[int, object] = (404, {"error": f"no {path} here"})
        match path.partition("?")[0].strip("/").split("/"):
            case ["objects", oid]:
                assert hashlib.sha256(data).hexdigest() == oid
                self.objects[oid] = data
                found = 200, {}
            case ["api", "repos", "create"]:
                found = self._create(json.loads(data))
            case ["api", "validate-yaml"]:
                found = 200, {"errors": [], "warnings": []}
            case [_, _, "info", "lfs", "objects", "batch"]:
                asked = json.loads(data)["objects"]
                upload = [{**one, "actions": {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}} for one in asked]
                found = 200, {"transfer": "basic", "objects": upload}
            case ["api", "models", _, _, "preupload", "main"]:
                names = [one["path"] for one in json.loads(data)["files"]]
                modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
                files = [{"path": name, "uploadMode": modes[name], "shouldIgnore": False, "oid": None} for name in names]
                found = 200, {"files": files}
            case ["api", "models", user, name, "commit", "main"]:
                found = self._commit(f"{user}/{name}", data)
        return found

    def _create(self, asked: dict[str, str]) -> tuple[int, object]:
        repo = f"{asked.get('organization', 'me')}/{asked['name']}"
        if repo in self.files:
            return 409, {"error": "it exists", "url": f"{self.url}/{repo}"}
        self.files[repo], self.commits[repo] = {}, []
        self.is_private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return 200, {"url": f"{self.url}/{repo}", "name": repo}

    def _commit(self, repo: str, data: bytes) -> tuple[int, object]:
        assert self.answers_commits.wait(60.0)
        for entry in map(json.loads, data.splitlines()):
            value = entry["value"]
            if entry["key"] == "header":
                self.commits[repo].append(value["summary"])
            elif entry["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.objects[value["oid"]]
            elif entry["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{len(self.commits[repo])}", "commitOid": "0" * 40}


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _read(self) -> bytes:
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        def _chunks(self) -> bytes:
            found = []
            while length := int(self.rfile.readline(), 16):
                found.append(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(found)

        def _answer(self) -> None:
            data = self._chunks() if self.headers.get("transfer-encoding") == "chunked" else self._read()
            is_known = self.path.startswith("/objects/") or self.headers.get("authorization") == f"Bearer {TOKEN}"
            status, document = hub.answer(self.path, data) if is_known else (401, {"error": "Invalid username or password."})
            text = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815 - the names of the base class

        def log_message(self, *_: object) -> None:
            pass

    with web_server(Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            hub.answers_commits.set()
