"""`make lines`: the lines of each package, its core and its rooms apart.

A room is optional: it is found by its name, and the core is meant to work without it. Neither may grow without a
line in the changelog.
"""

from __future__ import annotations

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
        "ray": ("on_ray",),
        "peek": ("sheet", "peek.py", "commands/peek.py", "commands/previews.py"),
        "prompts": ("prompts.py", "commands/prompts.py"),
    },
    "loader": {
        "peek": ("peek.py", "commands/peek.py"),
        "report": ("plan_section.py",),
        "prometheus": ("service/metrics.py",),
    },
    "train": {
        "images": ("images",),
        "export": (
            "commands/export_model.py",
            "outputs/export.py",
            "outputs/hub.py",
            "outputs/lora_file.py",
            "outputs/model_card.py",
            "outputs/pipeline_folder.py",
            "outputs/single_file.py",
        ),
        "report": ("commands/report.py", "report"),
        "optimizers": ("optimizers",),
        "low bits": ("lowbit",),
        "memory": ("commands/memory.py", "memory"),
    },
    "bucketline": {"pages": ("pages",)},
    "bench": {},
    "tests": {},
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
    """Return the lines of a Python file, or of all below a folder; links, as those in `bucketline/`, are not followed.

    Raises:
        ValueError: if there is no line.
    """
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


def main() -> None:
    """Print one line for each package."""
    print(f"{'lines':<11}{'all':>7}{'core':>7}  rooms")
    for found in count():
        rooms = ", ".join(f"{room} {lines}" for room, lines in found.rooms.items())
        print(f"{found.package:<11}{found.total:>7}{found.core:>7}  {rooms}".rstrip())


if __name__ == "__main__":
    main()
