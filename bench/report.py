"""The published report of a benchmark run: results as JSON, a page of tables that lists losses as plainly as wins, and plots.

`python -m bucketline.bench.report RESULTS.json FOLDER` rebuilds it from saved results.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path  # noqa: TC003 - a command's annotations are read
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bucketline.bench.cases.peers import COLD, CPU, FIRST, FROM_SERVER, HOT, LIMITS, NET, ONE_THREAD, REMOTE, WALL
from bucketline.bench.peers.registry import ENTRIES, OURS
from bucketline.command_line import guarded, parse_command
from bucketline.errors import BucketlineError
from bucketline.options import Positional  # noqa: TC001 - a command's annotations are read

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bucketline.typed_json import Json

    Document = Mapping[str, Any]


RESULTS, PAGE = "results.json", "RESULTS.md"
MORE_IS_BETTER = frozenset({"GB/s", "images/s", "samples/s"})
COMPARED = (
    *(f"{HOT}, {figure}" for figure in (WALL, CPU, NET)),
    *(f"{COLD}, {figure}" for figure in (WALL, CPU, FIRST)),
    "peers, disk",
)


class Loss(NamedTuple):
    """A missed target, or a peer that is ahead of us."""

    case: str
    subject: str
    text: str


def publish(document: Document, folder: Path) -> list[Path]:
    """Write results, page and plots to a folder; return the written files."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / RESULTS
    results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    images = draw(document["results"], folder)
    page = folder / PAGE
    page.write_text(markdown(document, [path.name for path in images if path.suffix == ".png"]), encoding="utf-8")
    return [results, page, *images]


def with_run(document: Document, name: str, found: Document, *, arguments: str, date: str) -> dict[str, Any]:
    """Return a document with the results of one more run of a case, in the place of those that it has of it.

    The other results stay. The header's `runs` has each run's date, and what differs from the document's header: its commit.
    """
    header, about, results = document["header"], found["header"], document["results"]
    replaced = {one["case"] for one in found["results"]}
    at = next((n for n, one in enumerate(results) if one["case"] in replaced), len(results))
    run = {key: value for key, value in about.items() if not isinstance(value, dict) and header.get(key) != value}
    nested = {key: value for key, value in about.items() if isinstance(value, dict)}
    if " " in name:  # another part of a case, which has been run before
        nested = {key: _merged(header.get(key, {}), value) for key, value in nested.items()}
    runs = {**header.get("runs", {}), name: {"date": date, **run}}
    configuration = {**header.get("configuration", {}), name: arguments}
    return {
        "header": {**header, **nested, "configuration": configuration, "runs": runs},
        "results": [*results[:at], *found["results"], *(one for one in results[at:] if one["case"] not in replaced)],
    }


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: {**old.get(key, {}), **value} if isinstance(value, dict) else value for key, value in new.items()}
    return {**old, **own}


def losses(results: Sequence[Mapping[str, Any]]) -> list[Loss]:
    """Return every missed target, and every peer that is ahead of us in a comparison."""
    found = [
        Loss(one["case"], one["subject"], f"{_number(one['limit_ratio'])} of its limit, target {one['mark']}")
        for one in results
        if one["is_met"] is False
    ]
    remote = dict.fromkeys(one["case"] for one in results if one["case"].startswith(REMOTE))
    for case in (*COMPARED, *(name for name in remote if not name.endswith(", cache"))):
        rows = {one["subject"]: one for one in results if one["case"] == case}
        ours = rows.get(ONE_THREAD) or rows.get(OURS) or rows.get(FROM_SERVER)
        if ours is None:
            continue
        for name, one in rows.items():
            if name.startswith(("bucketline", *LIMITS)) or not _is_ahead(one, ours):
                continue
            text = f"{name} has {_number(one['median'])}, we {_number(ours['median'])} {ours['unit']}"
            found.append(Loss(case, ours["subject"], text))
    return found


def _is_ahead(one: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    if one["unit"] in MORE_IS_BETTER:
        return bool(one["median"] > ours["median"])
    return bool(one["median"] < ours["median"])


def markdown(document: Document, images: Sequence[str]) -> str:
    """Return the page: machine, plots, targets, losses, excluded peers, all figures, and each loader's capabilities."""
    header, results = document["header"], document["results"]
    peers = header.get("peers", {})
    parts = [
        "# Results\n\nMade by `python -m bucketline.bench`; README.md says how it was measured.\n",
        _header(header),
        *(f"![{name}]({name})\n" for name in images),
        "## Targets\n",
        _marks(results),
        "## Where Bucketline loses\n",
        _losses(losses(results)),
        *_left_out(peers.get("left_out", {})),
        *_tables(results),
        *_capabilities(peers.get("capabilities", [])),
    ]
    return "\n".join(parts)


def _header(header: Mapping[str, Any]) -> str:
    lines = [f"- {name}: {value}" for name, value in header.items() if not isinstance(value, dict)]
    runs = header.get("runs", {})
    for run in {json.dumps(run): run for run in runs.values()}.values():
        names = ", ".join(name for name, own in runs.items() if own == run)
        lines.append(f"- {', '.join(f'{key} {value}' for key, value in run.items())}: {names}")
    for name, versions in header.get("peers", {}).get("environments", {}).items():
        lines.append(f"- environment {name}: {', '.join(f'{one} {version}' for one, version in versions.items())}")
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Return a table; `align` has an `r` for each column of numbers."""
    rule = ["---:" if at == "r" else "---" for at in align.ljust(len(head))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def _marks(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (one["case"], one["subject"], _number(one["limit_ratio"]), one["mark"], "met" if one["is_met"] else "**missed**")
        for one in results
        if one["mark"] is not None
    ]
    return _table(("case", "subject", "of its limit", "target", ""), rows, "llr") if rows else "No result has one.\n"


def _losses(found: Sequence[Loss]) -> str:
    if not found:
        return "Nowhere in this run: every target is met, and no peer is ahead.\n"
    return "\n".join(f"- {one.case}: {one.subject}: {one.text}" for one in found) + "\n"


def _left_out(left_out: Mapping[str, str]) -> list[str]:
    if not left_out:
        return []
    return ["## Left out\n", "\n".join(f"- {name}: {reason}" for name, reason in left_out.items()) + "\n"]


def _tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = ["## All figures\n\nMedian, first to third quartile, and the median of each round's own ratio to the limit.\n"]
    for case, own in groupby(results, key=lambda one: one["case"]):
        rows = [
            (
                one["subject"],
                f"{_number(one['median'])} {one['unit']}",
                f"{_number(one['q1'])} to {_number(one['q3'])}",
                _number(one["limit_ratio"]),
                str(one["repeats"]),
            )
            for one in own
        ]
        parts.append(f"### {case}\n\n" + _table(("subject", "median", "quartiles", "of limit", "repeats"), rows, "lrlrr"))
    return parts


def _capabilities(answers: Sequence[Mapping[str, str]]) -> list[str]:
    if not answers:
        return []
    can = {(one["question"], one["loader"]): one["can"] for one in answers}
    questions, loaders = (list(dict.fromkeys(one[name] for one in answers)) for name in ("question", "loader"))
    rows = [(question, *(can[question, loader] for loader in loaders)) for question in questions]
    reasons = [f"- {one['loader']}, {one['question']}: {one['can']}: {one['why']}\n" for one in answers]
    head = "## What each can express\n\nBy its documented interface, in the versions above.\n"
    return [head, _table(("", *loaders), rows), "".join(reasons)]


def _number(value: float) -> str:
    """Format a number for readers.

    >>> _number(12.0), _number(0.12345), _number(81234.5)
    ('12', '0.1235', '81,234')
    """
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Rebuild the page and the plots of a run from its saved results.

    Example: python -m bucketline.bench.report docs/benchmarks/results.json docs/benchmarks
    """

    results: Positional[Path]
    """Output of `python -m bucketline.bench --json`, or a published results.json."""
    folder: Positional[Path]
    """Folder for results.json, RESULTS.md and the plots. Existing ones are replaced."""

    def run(self) -> int:
        for path in publish(read_document(self.results), self.folder):
            print(path)
        return 0


def read_document(path: Path) -> dict[str, Json]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BucketlineError(f"{path}: {error}; expected what `python -m bucketline.bench --json` prints") from error
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise BucketlineError(f"{path} has no list of results; expected what `python -m bucketline.bench --json` prints")
    return document


def main() -> int:
    """Parse the command line and publish."""
    return guarded(lambda: parse_command(Publish, sys.argv[1:], "python -m bucketline.bench.report").run())


if __name__ == "__main__":
    sys.exit(main())


# ----------------------------------------------------------------------------------------------------------------------- plots
# The plots of a run: one bar per subject with quartiles; colours distinguish Bucketline, the limits and the peers.

OURS_COLOR, LIMIT_COLOR, PEER_COLOR = "tab:blue", "0.6", "tab:orange"


class Plot(NamedTuple):
    """The title and the label of one case's plot."""

    title: str
    label: str
    is_logarithmic: bool = False


PLOTS = {  # by name of the file
    "peers-hot": ("peers, hot, delivered", Plot("Delivery, page cache hot: more is better", "GB/s")),
    "peers-hot-cpu": ("peers, hot, CPU", Plot("What it costs, page cache hot: less is better", "CPU-seconds per GB", True)),
    "peers-cold": ("peers, cold, delivered", Plot("Delivery from the disk: more is better", "GB/s")),
    "peers-cold-cpu": ("peers, cold, CPU", Plot("What it costs, from the disk: less is better", "CPU-seconds per GB", True)),
}


def draw(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw every plot whose case is among the results, as PNG and SVG; return the files."""
    written = []
    for name, (case, plot) in PLOTS.items():
        rows = [one for one in results if one["case"] == case]
        if rows:
            written += _save(_bars(plot, rows), folder, name)
    return written


def _bars(plot: Plot, rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    medians = [one["median"] for one in rows]
    spreads = [[one["median"] - one["q1"] for one in rows], [one["q3"] - one["median"] for one in rows]]
    axes.barh(places, medians, xerr=spreads, color=[_color(one["subject"]) for one in rows], ecolor="0.2", capsize=2)
    axes.set_yticks(places, [one["subject"] for one in rows])
    axes.invert_yaxis()
    axes.set_title(plot.title)
    axes.set_xlabel(plot.label)
    if plot.is_logarithmic:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.grid(visible=True, axis="x", alpha=0.3)
    for place, median in zip(places, medians, strict=True):
        axes.annotate(f" {median:,.0f}" if median >= 100 else f" {median:.3g}", (median, place), va="bottom", fontsize=7)
    axes.margins(x=0.1, y=0.02)
    return figure


def _color(subject: str) -> str:
    if subject.startswith(OURS):
        return OURS_COLOR
    return PEER_COLOR if subject.startswith(tuple(entry.name for entry in ENTRIES if entry.environment)) else LIMIT_COLOR


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    with mpl.rc_context({"svg.hashsalt": name}):  # equal results produce equal files
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    return [png, svg]
