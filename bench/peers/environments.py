"""A virtual environment with pinned versions for each peer, created once; failures are reported by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bucketline
import bucketline.bench

REQUIREMENTS = Path(__file__).parent / "requirements"
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
_MADE = "made.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment of a peer's processes."""

    name: str
    python: Path
    ours: Path | None  # folder with this project's files that they import; None: the project is installed there
    versions: dict[str, str]  # of the packages in its requirements

    def variables(self) -> dict[str, str]:
        """Return the environment variables of its processes: one torch thread, as torchrun sets it for several ranks."""
        own = {**os.environ, "OMP_NUM_THREADS": "1"}
        return own if self.ours is None else {**own, "PYTHONPATH": str(self.ours)}

    def options(self) -> dict[str, Any]:
        """Return the options by which `apart` runs a function in this environment."""
        return {"python": str(self.python), "env": self.variables()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An environment or a peer that could not be used, and the reason."""

    name: str
    reason: str


def own_environment() -> Environment:
    return Environment(name="", python=Path(sys.executable), ours=None, versions={})


def environment(name: str, folder: Path) -> Environment | Failure:
    """Return a peer's environment in `folder`; create it if it is missing or has other requirements."""
    own, file = folder / name, REQUIREMENTS / f"{name}.txt"
    if not file.exists():
        return Failure(name=name, reason=f"there is no {file.name}; expected one of {', '.join(NAMES)}")
    wanted = file.read_text(encoding="utf-8")
    if not (own / _MADE).exists() or json.loads((own / _MADE).read_text(encoding="utf-8"))["requirements"] != wanted:
        print(f"making the environment {name} in {own}", file=sys.stderr)
        if failure := _make(name, own, file):
            shutil.rmtree(own, ignore_errors=True)
            return failure
        _write(own / _MADE, {"requirements": wanted, "versions": _versions(own, wanted)})
    made = json.loads((own / _MADE).read_text(encoding="utf-8"))
    return Environment(name=name, python=own / "bin" / "python", ours=_linked(own / "ours"), versions=made["versions"])


def _make(name: str, own: Path, file: Path) -> Failure | None:
    shutil.rmtree(own, ignore_errors=True)
    own.parent.mkdir(parents=True, exist_ok=True)
    pins = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith(("torch==", "torchvision=="))]
    pip = [sys.executable, "-P", "-m", "pip", "--python", str(own / "bin" / "python"), "install", "--quiet"]
    commands = [[sys.executable, "-P", "-m", "venv", "--without-pip", str(own)], [*pip, "-r", str(file)]]
    if pins:  # first and separately: a range would let pip choose a newer build with gigabytes of CUDA packages
        commands.insert(1, [*pip, *pins])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = [line for line in done.stderr.strip().splitlines() if line.startswith("ERROR")] or ["no message"]
            return Failure(name=name, reason=f"{command[3]} ended with {done.returncode}: {lines[-1]}")
    return None


def _versions(own: Path, wanted: str) -> dict[str, str]:
    code = "import importlib.metadata, sys\nfor n in sys.argv[1:]: print(n, importlib.metadata.version(n))"
    names = [line.partition("==")[0] for line in wanted.splitlines() if "==" in line and line[0] != "#"]
    done = subprocess.run([str(own / "bin" / "python"), "-P", "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def _linked(ours: Path) -> Path:
    """Make the folder of links to the files that peers' processes import; they see nothing else of this environment."""
    package = ours / "bucketline"
    package.mkdir(parents=True, exist_ok=True)
    sources = {"__init__.py": Path(bucketline.__file__), "bench": Path(bucketline.bench.__path__[0])}
    for name, source in sources.items():
        link = package / name
        if not link.is_symlink() or link.readlink() != source:
            link.unlink(missing_ok=True)
            link.symlink_to(source)
    return ours


def _write(path: Path, document: object) -> None:
    making = path.with_suffix(".making")
    making.write_text(json.dumps(document), encoding="utf-8")
    making.replace(path)
