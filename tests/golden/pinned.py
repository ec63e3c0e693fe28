"""The part of the golden results that holds on any machine: what no float kernel decides exactly, losses closely.

`python -m tests.golden tests/golden/pinned.json --pinned` writes them again, after a change that is meant to change them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.golden.digests import of_bytes

FILE = Path(__file__).with_name("pinned.json")
CLOSELY = 1e-5  # of a number: another machine's kernels add up in another order
OF_LINES = ("loss", "grad_norm", "lr", "val_loss")
OF_ENCODED_IMAGES = ("source_bytes",)  # of a record: other versions of Pillow write other files


def pinned(found: dict[str, Any]) -> dict[str, Any]:
    views = {"meant": _meant, "planned": _planned, "packed": _packed, "trained": _trained}
    return {part: views[part](own) for part, own in found.items()}


def _meant(found: dict[str, Any]) -> dict[str, Any]:
    return {line: own if isinstance(own, str) else _digest(own) for line, own in found.items() if line != "defaults"}


def _planned(found: dict[str, Any]) -> dict[str, Any]:
    return {name: _digest(own) for name, own in found.items()}


def _packed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: own if isinstance(own, str) else _of_pack(own) for name, own in found.items()}


def _of_pack(found: dict[str, Any]) -> dict[str, Any]:
    """Return counts as they are, and digests of the records and of the order of batches."""
    pinned: dict[str, Any] = {}
    for name, own in found.items():
        if name in ("pack", "second pack"):
            pinned[name] = own
        elif "records" in own:
            records = [json.loads(record) for record in own["records"]]
            pinned[name] = _digest([{k: v for k, v in one.items() if k not in OF_ENCODED_IMAGES} for one in records])
        elif name == "exports":
            pinned[name] = {kind: one["files"] for kind, one in own.items()}
        else:
            batches = own if isinstance(own, list) else [own]
            pinned[name] = [_digest(one["order"]) for one in batches]
    return pinned


def _trained(found: dict[str, Any]) -> dict[str, Any]:
    return {
        form: {kind: one if isinstance(one, str) else _of_run(one["lines"]) for kind, one in own.items()}
        for form, own in found.items()
    }


def _of_run(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {name: [float(f"{line[name]:.9g}") for line in lines if name in line] for name in OF_LINES}


def _digest(value: object) -> str:
    return of_bytes(json.dumps(value, sort_keys=True).encode())[:16]
