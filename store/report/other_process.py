"""Functions of other folders, called in a process of their own: the store imports no torch, and decodes no stranger's file.

`python -P -m bucketline.store.report.other_process MODULE:NAME` calls one with the JSON on the first line of stdin and the
bytes that follow, and prints what it returns as JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

from bucketline.command_line import guarded
from bucketline.errors import StoreError


def call_elsewhere(function: str, job: dict[str, Any], data: bytes = b"") -> Any:  # noqa: ANN401 - what the function returns
    """Return the result of a function, `MODULE:NAME`, which takes the job and a stream of the data."""
    command = [sys.executable, "-P", "-m", __name__, function]  # -P: ignore the current folder
    done = subprocess.run(command, input=json.dumps(job).encode("ascii") + b"\n" + data, capture_output=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        raise StoreError(lines[-1].removeprefix("error: ") if lines else "it ended without a message")
    return json.loads(done.stdout)


def _main() -> int:
    module, _, name = sys.argv[1].partition(":")
    job = json.loads(sys.stdin.buffer.readline())
    print(json.dumps(getattr(importlib.import_module(module), name)(job, sys.stdin.buffer)))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(_main, "ingest"))
