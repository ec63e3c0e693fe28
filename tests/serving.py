"""A service in a process of its own, as the command `loader serve` starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def serving(socket: Path, *stores: Path, options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Serve stores at a socket; the process listens when this begins, and is gone when it ends."""
    command = [sys.executable, "-m", "bucketline.loader.cli", "serve", *map(str, stores), "--socket", str(socket), *options]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("serving "), said + process.stderr.read()
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
