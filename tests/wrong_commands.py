"""Command lines that are wrong in the ways that users' are, run over a small data set: answers, CPU seconds and what is left.

`python -m tests.mistakes --write` makes `docs/wrong-commands.md` of `tests/data/wrong_commands.toml`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.ingest.packing.packed_model import PACKED_MODEL
from bucketline.store.format.hashing import file_digest
from tests.commands import BIN, ROOT, called
from tests.models import png, write_model
from tests.unit.train.tiny_run import write_unet

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES = Path(__file__).parent / "data" / "wrong_commands.toml"
COMMANDS_PAGE = ROOT / "docs" / "wrong-commands.md"
MOST_CPU_S = 1.0  # twice and more of what a line takes on an idle machine: caches of a busy one are cold
_LONGEST_S = 120
_CHANGING = (  # what differs from run to run
    (re.compile(r"\b[0-9a-f]{32}\b"), "…"),
    (re.compile(r"\bport \d{5}\b"), "port …"),
)


@dataclass(frozen=True, kw_only=True)
class WrongLine:
    """A wrong command line. `without`: a package that is not installed there."""

    group: str
    line: str
    without: str = ""


@dataclass(frozen=True, kw_only=True)
class LineAnswer:
    """The outcome of a command line."""

    wrong: WrongLine
    code: int
    message: str  # what it printed, with short paths
    cpu_s: float
    left: tuple[str, ...]  # files that it has made, changed or removed


def wrong_lines() -> list[WrongLine]:
    """Return all wrong command lines."""
    return [WrongLine(**entry) for entry in tomllib.loads(LINES.read_text(encoding="utf-8"))["command"]]


def prepare(folder: Path) -> None:
    """Make what the lines name: photographs, a model, one without a VAE, a store, a run, and files of other kinds."""
    from bucketline.ingest.cli import main as ingest
    from bucketline.train.main import main as train

    for n in range(12):
        place = folder / "photos" / f"{n}.png"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(png(96 + n, 128, seed=n))
        place.with_suffix(".txt").write_text("a cup of coffee\n", encoding="utf-8")
    model = write_model(folder / "sd15", vae_levels=4)
    write_unet(model, sample_size=16, in_channels=4, out_channels=4, cross_attention_dim=8)
    shutil.copytree(model, folder / "no-vae", ignore=shutil.ignore_patterns("vae"))
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("notes\n", encoding="utf-8")
    (folder / "table").mkdir()
    (folder / "table" / "captions.parquet").write_bytes(b"PAR1")
    with contextlib.chdir(folder):
        called(ingest, "pack", "photos", "photos.store", "--model", "sd15", "--val-fraction", "0.2").done()
        options = "--store photos.store --model sd15 --output-dir runs/a --batch 2 --max-steps 2 --num-images 0 --seed 1"
        trained = called(train, *options.split())
        assert not trained.code, trained.err  # it returns nothing after a run
    shutil.copytree(folder / "photos.store", folder / "pulled.store", ignore=shutil.ignore_patterns(PACKED_MODEL))
    note = shutil.copytree(folder / "photos.store", folder / "relocated.store") / PACKED_MODEL
    note.write_text(note.read_text(encoding="utf-8").replace("sd15", "sd14"), encoding="utf-8")
    shutil.copytree(folder / "photos.store", folder / "broken.store")
    next((folder / "broken.store" / "shards").glob("*.lmdb")).unlink()


def line_answers() -> Iterator[LineAnswer]:
    """Run every wrong command line in a process of its own, and yield the answers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "work"
        folder.mkdir()
        prepare(folder)
        for wrong in wrong_lines():
            yield answer_to(wrong, folder)


def answer_to(wrong: WrongLine, folder: Path) -> LineAnswer:
    """Run a command line in a folder, without stdin and network, and return what it came to."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    if wrong.without:
        absent = folder.parent / "lacking" / wrong.without / f"{wrong.without}.py"  # found before the package itself
        absent.parent.mkdir(parents=True, exist_ok=True)
        absent.write_text(f"raise ModuleNotFoundError(name={wrong.without!r})\n", encoding="utf-8")
    before = _files(folder.parent)
    environment = {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "PYTHONPATH": str(folder.parent / "lacking" / wrong.without) if wrong.without else "",
        "PYTHONDONTWRITEBYTECODE": "1" if wrong.without else "",
    }
    output = folder.parent / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            shlex.split(wrong.line),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        watch = signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.alarm(_LONGEST_S)
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, watch)
        process.returncode = os.waitstatus_to_exitcode(status)
    message = (
        output.read_text(encoding="utf-8").strip().replace(f"{folder}/", "").replace(str(folder), ".").replace(str(home), "~")
    )
    output.unlink()
    for pattern, instead in _CHANGING:
        message = pattern.sub(instead, message)
    after = _files(folder.parent)
    changed = sorted(one for one in before.keys() | after.keys() if before.get(one) != after.get(one))
    return LineAnswer(
        wrong=wrong,
        code=process.returncode,
        message=message,
        cpu_s=used.ru_utime + used.ru_stime,
        left=tuple(changed),
    )


def _files(folder: Path) -> dict[str, object]:
    """Return what is in a folder: of files the digest, of folders that they are."""
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else file_digest(path) if path.is_file() else "other"
        for path in folder.rglob("*")
    }


_LINES_HEAD = """{} command lines as users type them wrongly, each with the answer, the CPU seconds of its process, and what it
left behind. `python -m tests.mistakes --write` makes this page by running them next to a small store (`photos.store`, of
`photos`), a model (`sd15`), one without a VAE (`no-vae`), a run (`runs/a`), and stores that do not know
their model (`pulled.store`), whose model is gone (`relocated.store`), or that lost a shard (`broken.store`). A
test runs them again and holds the answers, what is left, and a limit of {:g} CPU second. An answer goes to stderr; its exit
code is 2 if the request makes no sense, and 1 if it met a failure. The seconds were measured on 2 cores that others used too.

In all: the median is {:.2f} CPU seconds, the most {:.2f}; {} left anything behind.
"""


def lines_page(every: list[LineAnswer]) -> str:
    """Return the page that lists wrong command lines with their answers."""
    seconds = sorted(answer.cpu_s for answer in every)
    none = sum(bool(answer.left) for answer in every) or "none"
    head = _LINES_HEAD.format(len(every), MOST_CPU_S, seconds[len(seconds) // 2], seconds[-1], none)
    parts = ["# Wrong command lines and answers", "", head.rstrip()]
    group = ""
    for answer in every:
        if answer.wrong.group != group:
            group = answer.wrong.group
            parts += ["", f"## {group}"]
        lacking = f"    # without {answer.wrong.without}" if answer.wrong.without else ""
        parts += ["", f"    $ {answer.wrong.line}{lacking}", *(f"    {line}".rstrip() for line in answer.message.splitlines())]
        left = f"left {', '.join(answer.left)}" if answer.left else "nothing left"
        parts += ["", f"exit code {answer.code}, {answer.cpu_s:.2f} CPU s, {left}"]
    return "\n".join(parts) + "\n"


def without_seconds(page: str) -> str:
    """Return the page without what was measured."""
    return re.sub(r"\d+\.\d+ CPU s|median is .*? CPU seconds, the most \d+\.\d+", "…", page)
