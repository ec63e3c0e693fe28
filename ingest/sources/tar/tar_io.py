"""Read the stream that webdataset opens for a URL; a failing command raises an error instead of truncating the tar."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import Any

from bucketline.errors import SourceError
from bucketline.files.redact import redacted, redacted_within


class TarStream:
    """The bytes of a URL. For most URL schemes, webdataset starts a command (curl, gsutil)."""

    def __init__(self, url: str) -> None:
        """Open a URL."""
        from webdataset.gopen import gopen, gopen_schemes

        self._url, self._num_bytes, self._is_at_end = url, 0, False
        shown = redacted(url)
        try:
            self._stream: Any = gopen(url)
        except FileNotFoundError as error:
            raise SourceError(
                f"{shown} cannot be opened: {error.filename} is not installed; install it, or copy the tar and name its path"
            ) from error
        except Exception as error:
            if (scheme := url.partition(":")[0]) not in gopen_schemes:
                known = ", ".join(f"{name}:" for name in sorted({*gopen_schemes, "file"} - {"__default__"}))
                raise SourceError(
                    f"{shown}: webdataset opens nothing that begins with {scheme}:; expected a path, or one of {known}"
                ) from error
            raise SourceError(
                f"{shown} cannot be opened: {redacted_within(str(error), url)}; "
                "check the URL, or copy the tar and name its path"
            ) from error

    def read(self, num_bytes: int = -1, /) -> bytes:
        """Return at most `num_bytes` bytes, none at the end."""
        if self._is_at_end:
            return b""
        try:
            data: bytes = self._stream.read(num_bytes)
            self._num_bytes += len(data)
            if not data and num_bytes:
                self._is_at_end = True
                self._stream.close()  # waits for the command, and raises if it failed
        except OSError as error:
            raise SourceError(f"{redacted(self._url)}: {self._what_happened(error)}") from error
        return data

    def abandon(self) -> None:
        """Close the stream early; ignore the errors of its command, such as a broken pipe."""
        with suppress(OSError):
            self._stream.close()

    def _what_happened(self, error: OSError) -> str:
        status, process = getattr(self._stream, "status", None), getattr(self._stream, "proc", None)
        if not status or process is None:
            why = redacted_within(error.strerror or str(error), self._url)
            return f"cannot be read at byte {self._num_bytes}: {why}; try again, or name a copy"
        command = process.args if isinstance(process.args, str) else shlex.join(process.args)
        named = f"the command `{redacted_within(command, self._url)}`"
        how = f"exit code {status}" if status > 0 else f"signal {-status}"
        return f"{named} ended with {how}; run it in a shell to see why"
