"""`bucketline train report`: one page about runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from bucketline.command_line import human_bytes, parse_options, print_json, printable

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """Write one HTML page about a run, or about several next to each other.

    It has the training and validation loss, validation by timestep, throughput, data wait, step times, memory, learning rate,
    buckets, the images along the run with a slider, the configuration, and what differs between the runs. The page
    says at its top what is wrong, and needs no network. A run may still be in progress.

    Example: bucketline train report runs/a runs/b -o runs.html
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN …]")]
    """Folders of runs: their --output-dir."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="HTML")] = Path("runs.html")
    """HTML file to write; a page of an earlier run is replaced."""
    json: bool = False
    """Print the findings as one JSON object."""


def main(args: Sequence[str], prog: str) -> int:
    """Parse the command line, write the page and print what is wrong."""
    asked = parse_options(TrainReport, args, prog)
    from bucketline.errors import UsageError
    from bucketline.files.atomic_write import write_or_explain
    from bucketline.pages.page import refuse_page
    from bucketline.train.report.page import page_of
    from bucketline.train.report.read_run import read_runs

    if not asked.runs:
        raise UsageError("no run is given; name the folder of one or more")
    refuse_page(asked.output)
    data, findings = page_of(read_runs(asked.runs))
    write_or_explain(asked.output, data)
    if asked.json:
        print_json({"page": str(asked.output), "findings": [asdict(one) for one in findings]})
        return 0
    print(f"{asked.output}: {human_bytes(len(data))}")
    for finding in findings:
        if finding.level != "good":
            print(printable(f"  {finding.level}: {finding.title}. {finding.detail}".rstrip()))
    return 0
