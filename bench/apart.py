"""Run a function in a fresh process, in this environment or another one. Imports nothing that a peer's environment lacks.

`python -m bucketline.bench.apart MODULE:FUNCTION JSON` calls it with the arguments in JSON, and prints what it returns as JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def apart(
    function: Callable[..., object],
    *arguments: object,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
) -> Any:  # noqa: ANN401 - what the function returns, as JSON has it
    """Return what a module's function returns in a fresh process."""
    from bucketline.errors import BucketlineError

    name = f"{function.__module__}:{function.__qualname__}"
    command = [python, "-P", "-m", "bucketline.bench.apart", name, json.dumps(arguments, default=_plain)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env, cwd=cwd) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            process.kill()
            raise BucketlineError(f"{function.__name__} took more than {timeout_s} s") from late
    if process.returncode:
        last = ([line for line in err.splitlines() if line.strip()] or [f"it ended with {process.returncode}"])[-1]
        raise BucketlineError(f"{function.__name__} failed: {last.strip()[:300]}")
    return json.loads(out.splitlines()[-1])  # before it, what a package's own processes print


def _plain(value: Any) -> Any:  # noqa: ANN401 - of any type that JSON lacks
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def main() -> int:
    """Call the function and print its result; what it prints itself goes to stderr."""
    warnings.simplefilter("ignore")  # a peer's warnings do not matter here, only what it delivers
    logging.disable(logging.WARNING)
    module, _, name = sys.argv[1].partition(":")
    with redirect_stdout(sys.stderr):
        found = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    print(json.dumps(found, default=_plain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
