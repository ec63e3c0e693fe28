"""What webdataset opens for a URL: read to its end, and a command that fails is an error in words, never a shorter tar."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import Any

from bucketline.errors import SourceError


class TarStream:
    """The bytes of a URL. For most kinds of URL webdataset starts a command (curl, gsutil, what follows `pipe:`)."""

    def __init__(self, url: str) -> None:
        """Open a URL.

        Raises:
            SourceError: where webdataset cannot.
        """
        from webdataset.gopen import gopen, gopen_schemes

        self._url, self._num_bytes, self._is_at_end = url, 0, False
        try:
            self._stream: Any = gopen(url)
        except FileNotFoundError as error:
            raise SourceError(
                f"{url} cannot be opened: there is no {error.filename} here; install it, or copy the tar and name its path"
            ) from error
        except Exception as error:
            if (scheme := url.partition(":")[0]) not in gopen_schemes:
                known = ", ".join(f"{name}:" for name in sorted({*gopen_schemes, "file"} - {"__default__"}))
                raise SourceError(
                    f"{url}: webdataset opens nothing that begins with {scheme}:; expected a path, or one of {known}"
                ) from error
            raise SourceError(f"{url} cannot be opened: {error}; check the URL, or copy the tar and name its path") from error

    def read(self, num_bytes: int = -1, /) -> bytes:
        """Give at most that many bytes, none at the end.

        Raises:
            SourceError: where the command has failed; also at the end, after a whole tar.
        """
        if self._is_at_end:
            return b""
        try:
            data: bytes = self._stream.read(num_bytes)
            self._num_bytes += len(data)
            if not data and num_bytes:
                self._is_at_end = True
                self._stream.close()  # waits for the command, and complains of how it ended
        except OSError as error:
            raise SourceError(f"{self._url}: {self._what_happened(error)}") from error
        return data

    def abandon(self) -> None:
        """Close a stream of which no more is wanted; its command may well complain that nobody listens."""
        with suppress(OSError):
            self._stream.close()

    def _what_happened(self, error: OSError) -> str:
        status, process = getattr(self._stream, "status", None), getattr(self._stream, "proc", None)
        if not status or process is None:
            return f"cannot be read at byte {self._num_bytes}: {error.strerror or error}; try again, or name a copy"
        command = process.args if isinstance(process.args, str) else shlex.join(process.args)
        named = "the command" if self._url == f"pipe:{command}" else f"the command `{command}`"
        how = f"exit code {status}" if status > 0 else f"signal {-status}"
        return f"{named} ended with {how}; run it in a shell to see why"
