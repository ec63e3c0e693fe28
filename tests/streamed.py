"""A web server over the whole disk, in this process: sources that can only be streamed."""

from __future__ import annotations

import functools
import http.server
import threading
from urllib.parse import quote


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@functools.cache
def _address() -> str:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory="/"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def streamed(path: object) -> str:
    """Return the URL of a file, or of a pattern of files in braces."""
    return _address() + quote(str(path), safe="/{},.")
