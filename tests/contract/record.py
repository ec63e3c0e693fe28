"""Write `tests/data/stores/expected.json` again, after a change that users are meant to see.

python -m tests.contract.record
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.contract.kit import EXPECTED, READINGS, VERSIONS, unpacked


def record() -> dict[str, Any]:
    """Return every reading of every store, by store and reading."""
    found: dict[str, Any] = {}
    for name in VERSIONS:
        found[name] = {}
        for reading, read in READINGS.items():
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                store = unpacked(name, Path(folder)).relative_to(folder)
                found[name][reading] = json.loads(json.dumps(read(store, Path(folder))))
    return found


def main() -> None:
    lines = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in readings.items())
        + "\n}"
        for name, readings in record().items()
    ]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


if __name__ == "__main__":
    main()
