"""`make lines`: the lines of each package, its core and its rooms apart; it fails on what has outgrown its budget.

A room is optional: it is found by its name, and the core is meant to work without it. Who adds an ability names the one
that goes: a budget is raised by nothing else, and lowered whenever lines have gone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# By package: its rooms, each with the files and folders it has.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "store": {
        "export": ("export", "commands/export.py"),
        "report": ("report", "commands/report.py"),
        "prompts": ("prompt_file.py",),
    },
    "ingest": {
        "importers": ("importers", "commands/import_cache.py"),
        "ray": ("on_ray.py",),
        "peek": ("peek.py", "commands/peek.py"),
        "prompts": ("prompts.py", "commands/prompts.py"),
    },
    "loader": {
        "peek": ("peek.py", "commands/peek.py"),
        "prometheus": ("service/metrics.py",),
    },
    "train": {
        "images": ("images.py",),
        "export": ("commands/export_model.py", "export.py", "lora_file.py"),
        "report": ("commands/report.py", "report.py"),
        "optimizers": ("optimizers.py",),
        "low bits": ("lowbit.py",),
        "compile": ("compile.py",),
        "memory": ("memory.py",),
    },
    "bucketline": {"pages": ("pages",)},
    "bench": {},
    "tests": {},
}


PRODUCT = tuple(package for package in ROOMS if package != "tests")
TRAINER = "train without rooms"


class Budget(NamedTuple):
    """The most lines that something may have now, and the number that it is to come down to."""

    most: int
    mark: int | None = None


BUDGETS = {
    "store": Budget(18_350),
    "ingest": Budget(16_320),
    "loader": Budget(9_780),
    "train": Budget(6_990),
    TRAINER: Budget(4_340, mark=2_600),
    "bucketline": Budget(6_935),
    "bench": Budget(6_830),
    "product": Budget(65_100, mark=64_000),
    "tests": Budget(64_850, mark=50_000),
}


class Lines(NamedTuple):
    """The lines of Python of a package, and of each of its rooms."""

    package: str
    total: int
    rooms: dict[str, int]

    @property
    def core(self) -> int:
        return self.total - sum(self.rooms.values())


def lines_in(path: Path) -> int:
    """Return the lines of a Python file, or of all below a folder; links, as those in `bucketline/`, are not followed."""
    files = [path] if path.is_file() else path.rglob("*.py")
    if not (found := sum(file.read_bytes().count(b"\n") for file in files)):
        raise ValueError(f"{path} has no line of Python; correct ROOMS in tests/lines.py")
    return found


def count() -> list[Lines]:
    return [
        Lines(
            package,
            lines_in(ROOT / package),
            {room: sum(lines_in(ROOT / package / name) for name in names) for room, names in rooms.items()},
        )
        for package, rooms in ROOMS.items()
    ]


def budgeted(found: list[Lines]) -> dict[str, int]:
    totals = {one.package: one.total for one in found}
    cores = {one.package: one.core for one in found}
    return {**totals, TRAINER: cores["train"], "product": sum(totals[package] for package in PRODUCT)}


def main() -> int:
    found = count()
    print(f"{'lines':<11}{'all':>7}{'core':>7}  rooms")
    for one in found:
        rooms = ", ".join(f"{room} {lines}" for room, lines in one.rooms.items())
        print(f"{one.package:<11}{one.total:>7}{one.core:>7}  {rooms}".rstrip())
    lines, exceeded = budgeted(found), 0
    print(f"\n{'budgets':<20}{'lines':>7}{'most':>7}{'mark':>7}")
    for name, (most, mark) in BUDGETS.items():
        is_over = lines[name] > most
        exceeded += is_over
        said = f"  {lines[name] - most} too many: name the ability that goes, or what was written twice" if is_over else ""
        print(f"{name:<20}{lines[name]:>7}{most:>7}{mark or '':>7}{said}".rstrip())
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
