"""The page: a table of what happened, and each loop's file. Pure."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.peers.loops.run import BATCH_SIZE, EPOCHS, NUM_ROWS, SHAPES

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER = Path(__file__).parent
_MESSAGE_CHARACTERS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A loop on the page."""

    name: str
    file: str  # in this folder, without its suffix
    environment: str | None  # of the peers' environments; None: this project's own
    pages: tuple[str, ...]  # of its documentation, which the loop follows


LOOPS = (
    Shown(name="Bucketline", file="bucketline", environment=None, pages=("your-own-loop.md",)),
    Shown(
        name="LitData",
        file="litdata",
        environment="litdata",
        pages=(
            "https://lightning.ai/docs/litdata/features/mulit-gpu-multi-node",
            "https://github.com/Lightning-AI/litData#pause-resume",
        ),
    ),
    Shown(
        name="MosaicML Streaming",
        file="streaming",
        environment="streaming",
        pages=(
            "https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/fast_resumption.html",
            "https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/elastic_determinism.html",
        ),
    ),
    Shown(
        name="WebDataset",
        file="webdataset",
        environment="webdataset",
        pages=(
            "https://webdataset.github.io/webdataset/multinode/",
            "https://github.com/webdataset/webdataset/blob/main/docs/FAQ.md",
        ),
    ),
)
_HEAD = """# The same loop with other loaders

One training loop, written for four loaders as their documentation recommends, on the same {rows} rows of {shapes} shapes, in
batches of {batch} rows of one shape, for {epochs} epochs, with one validation loader, without worker processes.
`python -m bucketline.bench.peers.loops --write` runs each loop in an environment of its own and makes this page: all cells are
what it saw. "Exact": the rows of each batch are those of a run that was not stopped, to the last epoch. "Lost" and "again" are
rows, counted against that run.

With `remainder="carry"`, the default, rows that fill no batch open Bucketline's next epoch, and the last one delivers what is
left over in short batches; `"partial"` delivers each row once in each epoch, in short batches.

What the figures depend on: each loop counts its epochs by itself, and the state that Streaming saves after an epoch's
last batch still belongs to that epoch, so that a loop that counts on loses what remains of it. On two ranks,
WebDataset's loop draws shards with replacement (`resampled`), as its documentation advises where ranks must have equal
numbers of batches; on one it draws the streams with Python's generator, which the loop does not seed. LitData's errors
come from the state of several streams, read without worker processes; one stream resumes exactly.

"""


def source(shown: Shown) -> str:
    """Return a loop's file."""
    return (_FOLDER / f"{shown.file}.py").read_text(encoding="utf-8")


def num_lines(text: str) -> int:
    r"""Return the number of lines that are code: not blank, no comment, no docstring.

    >>> num_lines('"A module."\n\nx = 1  # one\n# two\n')
    1
    """
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for one in tokens if one.type not in nothing for line in range(one.start[0], one.end[0] + 1)}
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return len(code - docstrings)


def num_lines_of(text: str, function: str) -> int:
    """Return the same of one function."""
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function)
    return num_lines(ast.get_source_segment(text, found) or "")


def table(found: Mapping[str, Mapping[str, str]], versions: Mapping[str, str]) -> str:
    """Return the table: a row for each question, a column for each loop's file that was run."""
    shown = [one for one in LOOPS if one.file in found]
    lines = [["", *(f"{one.name} {versions[one.file]}".strip() for one in shown)], ["---"] * (len(shown) + 1)]
    texts = [source(one) for one in shown]
    parts = [f"{num_lines(text)}; {num_lines_of(text, 'write')} write, {num_lines_of(text, 'train')} train" for text in texts]
    lines.append(["lines of code", *parts])
    questions = found[shown[0].file]
    lines += [[question, *(_cell(found[one.file][question]) for one in shown)] for question in questions]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    short = text if len(text) <= _MESSAGE_CHARACTERS else text[:_MESSAGE_CHARACTERS].rstrip() + " …"
    kind, colon, message = short.partition("error: ")
    return (f"{kind}{colon}`{message.replace('`', '')}`" if colon else short).replace("|", "\\|")


def page(found: Mapping[str, Mapping[str, str]], versions: Mapping[str, str]) -> str:
    """Return the page."""
    parts = [_HEAD.format(rows=NUM_ROWS, shapes=len(SHAPES), batch=BATCH_SIZE, epochs=EPOCHS), table(found, versions)]
    for one in LOOPS:
        pages = ", ".join(f"[{at + 1}]({link})" for at, link in enumerate(one.pages))
        parts.append(
            f"\n## {one.name}\n\n`bench/peers/loops/{one.file}.py`; documentation: {pages}.\n\n```python\n{source(one)}```\n"
        )
    return "".join(parts)
