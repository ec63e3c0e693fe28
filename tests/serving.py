"""A service in a process of its own, as the command `loader serve` starts it, or in a thread of the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.loader.service.server import Service


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A service in a thread of this process."""

    socket: Path
    service: Service


@contextmanager
def serving_here(folder: Path, *stores: Path | str) -> Iterator[Served]:
    """Serve stores at a socket in a folder, in a thread; nothing of it is left when this ends."""
    from bucketline.loader.service.server import Service
    from bucketline.loader.service.unix_socket import accept_all, listen

    service, (read, write) = Service(stores), os.pipe()
    with listen(folder / "service.sock") as sock:
        thread = threading.Thread(target=accept_all, args=(sock, service.take_in, read, lambda: 1.0), daemon=True)
        thread.start()
        try:
            yield Served(socket=folder / "service.sock", service=service)
        finally:
            os.write(write, b"s")
            thread.join()
            service.stop()
            os.close(read)
            os.close(write)
