"""`python -m tests.golden OUT`: write the golden results of this checkout; `--against FILE`: and compare them with others.

What a change must leave equal is compared to the last bit, on one machine: run it in both checkouts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.golden.differences import differences
from tests.golden.pinned import CLOSELY, FILE, pinned

PARTS = ("meant", "planned", "packed", "trained")


def results(work: Path, parts: tuple[str, ...], forms: tuple[str, ...] = (), *, only_whole: bool = False) -> dict[str, Any]:
    """Return the golden results of some parts; of the runs, those of some forms, `only_whole` ones."""
    from tests.golden.forking import import_once

    import_once()
    found: dict[str, Any] = {}
    if "meant" in parts:
        from tests.golden.meant import meant

        found["meant"] = meant(work / "meant")
    if "planned" in parts:
        from tests.golden.planned import planned

        found["planned"] = planned(work / "planned")
    if "packed" in parts:
        from tests.golden.packed import packed

        found["packed"] = packed(work / "packed")
    if "trained" in parts:
        from tests.golden.trained import EVERY_FORM, trained

        found["trained"] = {}
        for form in forms or EVERY_FORM:
            begun = time.monotonic()
            found["trained"] |= trained(work / "trained", [form], only_whole=only_whole)
            print(f"{form}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="an earlier OUT; exit 1 if something differs, and say what")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts")
    parser.add_argument("--forms", nargs="+", default=(), help="families of `trained`; default: all")
    parser.add_argument("--pinned", action="store_true", help="only what holds on any machine, against the pinned file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="golden-") as work:
        found = results(Path(work), tuple(asked.only), tuple(asked.forms), only_whole=asked.pinned)
    if asked.pinned:
        found = pinned(found)
    against = FILE if asked.pinned and asked.against is None and FILE.exists() else asked.against
    earlier = json.loads(against.read_bytes()) if against else None  # before it is replaced
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if earlier is None:
        return 0
    compared = {part: earlier[part] for part in found if part in earlier}
    if asked.forms and "trained" in compared:
        compared["trained"] = {form: compared["trained"][form] for form in asked.forms}
    own = {part: found[part] for part in compared}
    lines = [*differences(compared, own, rel=CLOSELY if asked.pinned else 0.0)]
    print("\n".join(lines) or f"equal: {', '.join(compared)}")
    return 1 if lines else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
