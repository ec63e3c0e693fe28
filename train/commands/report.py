"""`bucketline train report`: one page about runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bucketline.options import Arg, Positional


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """Write one HTML page about a run, or about several next to each other.

    It has the training and validation loss, validation by timestep, throughput, data wait, step times, memory, learning rate,
    buckets, the images along the run with a slider, the configuration, and what differs between the runs. The page
    says at its top what is wrong, and needs no network. A run may still be in progress.

    Example: bucketline train report runs/a runs/b -o runs.html
    """

    runs: Annotated[Positional[tuple[Path, ...]], Arg(metavar="RUN [RUN …]")]
    """Folders of runs: their --output-dir."""
    output: Annotated[Path, Arg(aliases=("-o",), metavar="HTML")] = Path("runs.html")
    """HTML file to write; a page of an earlier run is replaced."""
    json: bool = False
    """Print the findings as one JSON object."""

    def run(self) -> int:
        from bucketline.command_line import print_json
        from bucketline.errors import UsageError
        from bucketline.files.atomic_write import write_or_explain
        from bucketline.pages.page import page_report, print_page, refuse_page
        from bucketline.train.report import page_of, read_runs

        if not self.runs:
            raise UsageError("no run is given; name the folder of one or more")
        refuse_page(self.output)
        data, findings = page_of(read_runs(self.runs))
        write_or_explain(self.output, data)
        report = page_report(self.output, findings)
        if self.json:
            print_json(report)
        else:
            print_page(report)
        return 0
