"""Print the oldest versions that the package allows, as pip's constraints: `lmdb>=1.6` becomes `lmdb==1.6`.

    python tests/packaging/minimums.py > constraints.txt

`make test-minimums` installs these. torch is left out: its version is in `constraints.txt` at the top of the repository.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def minimums() -> dict[str, str]:
    """Return the lower bound of every requirement of the package and its extras, by distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found: dict[str, str] = {}
    for requirement in (line for group in groups for line in group if not line.startswith("bucketline[")):
        match = re.fullmatch(r"([a-z0-9-]+)(?:\[[a-z,-]+\])?>=([0-9.]+)", requirement)
        if match is None:
            raise SystemExit(f"pyproject.toml requires {requirement!r}, expected one lower bound, such as lmdb>=1.6")
        name, version = match.groups()
        if found.setdefault(name, version) != version:
            raise SystemExit(f"pyproject.toml requires {name}>={found[name]} and {name}>={version}; make them the same")
    return found


if __name__ == "__main__":
    for name, version in minimums().items():
        if name != "torch":
            print(f"{name}=={version}")
