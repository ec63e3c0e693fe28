"""Mistakes that users of the API and of the commands make, and the answers: `python -m tests.mistakes [--write]`.

Each is a few lines of code over small stores. The answer is the exception's message; it says what was given (`item`, `found`),
what was `expected`, and the `remedy`: phrases of these are listed with the mistake, and a test looks for each. `--write` makes
`docs/mistakes.md`, and of the wrong command lines in `tests/wrong_commands.py` `docs/wrong-commands.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import bucketline.loader
import bucketline.store
from bucketline.store import Column, RaggedGroup, RowColumn, Store, StoreWriter
from tests.commands import ROOT
from tests.wrong_commands import COMMANDS_PAGE, line_answers, lines_page

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = Path(__file__).parent / "data" / "mistakes.toml"
PAGE = ROOT / "docs" / "mistakes.md"
CHANNELS, WIDTH = 2, 5


_CHANGING = (  # what differs from run to run
    (re.compile(r"new\d+\.store"), "new.store"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "…"),
    (re.compile(r"\b0x[0-9a-f]+"), "0x…"),
    (re.compile(r"(g\d{6}-)[0-9a-f]{8}"), r"\1…"),
    (re.compile(r'\{"pid": .*?\}'), "{…}"),
    (re.compile(r"/\S*/tmp\w+"), "/…"),
)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake. The names in its code are those of `Ground`; `new` is a path where there is nothing."""

    group: str
    code: str
    error: str  # the type of the exception
    item: str  # phrases of the answer: what it is about,
    found: str  # what was given,
    expected: str  # what is taken,
    remedy: str  # and what to do


def mistakes() -> list[Mistake]:
    """Return all mistakes."""
    return [Mistake(**entry) for entry in tomllib.loads(DATA.read_text(encoding="utf-8"))["mistake"]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a mistake."""

    mistake: Mistake
    kind: str  # of the exception; empty if there was none
    message: str

    @property
    def missing(self) -> list[str]:
        """The parts that the answer lacks."""
        own = self.mistake
        parts = {"item": own.item, "found": own.found, "expected": own.expected, "remedy": own.remedy}
        lacking = [f"the {name} {part!r}" for name, part in parts.items() if not part or part not in self.message]
        return lacking if self.kind == own.error else [f"type {own.error}", *lacking]


class Ground:
    """The stores over which mistakes are made, and the names that their code uses."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_made = folder, 0
        self.names: dict[str, Any] = {
            "np": np, "torch": torch, "Path": Path, "DataLoader": DataLoader, "folder": str(folder),
            **{name: getattr(bucketline.store, name) for name in bucketline.store.__all__},
            **{name: getattr(bucketline.loader, name) for name in bucketline.loader.__all__},
        }  # fmt: skip
        latent = np.ones((CHANNELS, 8, 8), dtype="f2")
        tokens = {"tokens": np.ones((3, WIDTH), dtype="f2")}
        images: dict[str, Any] = {
            "columns": [bucketline.store.LatentColumn(channels=CHANNELS)],
            "encoders": {"vae": {"scaling_factor": 0.5}},
            "text": [Column(name="tokens", dtype="F16", shape=(WIDTH,))],
            "empty_caption": {"tokens": np.zeros((1, WIDTH), dtype="f2")},
            "max_captions": 2,
        }
        with StoreWriter(folder / "photos.store", **images) as writer:
            for n in range(10):
                writer.add(f"{n}.png", "val" if n == 9 else "train", {"target": latent}, {"a cat": tokens})
        with StoreWriter(folder / "other.store", **{**images, "encoders": {"vae": {"scaling_factor": 0.25}}}) as writer:
            writer.add("a.png", "train", {"target": latent})
        mels = [
            RowColumn(role="features/mels", dtype="F32", shape=(4, "length")),
            RowColumn(role="mask", dtype="BOOL", shape=("length",), optional=True),
        ]
        beats = {"beats": RaggedGroup(columns=[Column(name="at_s", dtype="F32", shape=())])}
        with StoreWriter(folder / "sounds.store", columns=mels, ragged=beats) as writer:
            for n in range(8):
                entry = {"beats": np.zeros(n, dtype="f4")}
                writer.add(f"{n}.wav", "train", {"features/mels": np.zeros((4, 6), dtype="f4")}, ragged=entry)
        with StoreWriter(folder / "empty.store", **images):
            pass
        (folder / "photos").mkdir()
        (folder / "photos" / "a.png").write_bytes(b"an image")
        (folder / "notes.txt").write_text("notes", encoding="utf-8")
        self.names |= {
            "photos": str(folder / "photos.store"), "sounds": str(folder / "sounds.store"), "images": images,
            "store": Store.open(folder / "photos.store"), "latent": latent, "tokens": tokens, "mels": mels, "beats": beats,
            "config": bucketline.loader.LoaderConfig(batch_size=4),
        }  # fmt: skip

    def answer(self, mistake: Mistake) -> Answer:
        """Make a mistake and return the answer."""
        self._num_made += 1
        names = {**self.names, "new": str(self._folder / f"new{self._num_made}.store")}
        kind, message = "", "no error"
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                exec(mistake.code, names)
            except Exception as error:  # noqa: BLE001 - this is what is looked at
                kind, message = type(error).__name__, str(error)
            finally:
                for made in names.values():
                    if isinstance(made, bucketline.loader.Loader):
                        made.close()
        if message.startswith("Caught "):  # by a DataLoader, which puts the worker's traceback before it
            message = message.rstrip().splitlines()[-1]
        message = message.replace(f"{self._folder}/", "")
        for pattern, instead in _CHANGING:
            message = pattern.sub(instead, message)
        return Answer(mistake=mistake, kind=kind, message=message)


def answers() -> Iterator[Answer]:
    """Make every mistake, and yield the answers."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        ground = Ground(Path(folder).resolve())
        for mistake in mistakes():
            yield ground.answer(mistake)


_HEAD = """{} mistakes that a program can make with the API, and the answers. `python -m tests.mistakes --write` makes this
page; a test looks for the four parts of each answer: the item, what was found, what is expected, and a remedy, which may be the
expected value. Paths are shortened. The errors derive from `bucketline.errors.BucketlineError`; [the API](api.md#errors) says
which to
catch."""


def page_of(every: list[Answer]) -> str:
    """Return the page that lists mistakes with their answers."""
    lines = [
        "# Mistakes and answers",
        "",
        _HEAD.format(len(every)),
    ]
    group = ""
    for answer in every:
        if answer.mistake.group != group:
            group = answer.mistake.group
            lines += ["", f"## {group}"]
        code = textwrap.indent(answer.mistake.code.strip(), "    ")  # no fence, in which ruff would format it
        lines += ["", code, "", f"> `{answer.kind}`: {_escaped(answer.message)}"]
    return "\n".join(lines) + "\n"


def _escaped(message: str) -> str:
    return re.sub(r"([\\`*_<>\[\]#|])", r"\\\1", " ".join(message.split()))


def main() -> int:
    """Print each mistake with its answer, and what an answer lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make docs/mistakes.md and docs/wrong-commands.md")
    arguments = parser.parse_args()
    every = list(answers())
    for number, answer in enumerate(every, 1):
        lacks = f"\n     LACKS {', '.join(answer.missing)}" if answer.missing else ""
        code = answer.mistake.code.strip().replace("\n", "\n     ")
        print(f"{number:3}. {code}\n     {answer.kind}: {answer.message}{lacks}")
    lines = list(line_answers())
    for line in lines:
        cost = f"{line.cpu_s:.2f} CPU s, left {line.left or 'nothing'}"
        print(f"$ {line.wrong.line}\n  {line.message}\n  exit code {line.code}, {cost}")
    num_good = sum(not answer.missing for answer in every)
    print(f"{num_good} of {len(every)} answers have all four parts")
    if arguments.write:
        PAGE.write_text(page_of(every), encoding="utf-8")
        COMMANDS_PAGE.write_text(lines_page(lines), encoding="utf-8")
    return 0 if num_good == len(every) else 1


if __name__ == "__main__":
    sys.exit(main())
