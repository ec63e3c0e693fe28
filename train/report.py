"""The page of `train report` and the loss curve: what training runs have left in their folders."""

from __future__ import annotations

import io
import json
import logging
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from PIL import Image

from bucketline.command_line import counted, human_number
from bucketline.errors import UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.paths import CONFIG, IMAGES, IMAGES_FOLDER, METRICS, STATUS
from bucketline.pages.page import COLOURS, Card, Finding, Line, document, jpeg, lines, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


# ------------------------------------------------------------------------------------------------------------------ loss curve
# The loss curve of a run as an image file.

CURVES: dict[str, dict[str, Any]] = {
    "loss": {"color": "tab:blue", "linewidth": 1, "label": "training loss, mean per window"},
    "val_loss": {"color": "tab:orange", "marker": "o", "label": "validation: squared error, averaged weights"},
    "val_zero_loss": {"color": "grey", "linestyle": "--", "label": "validation: squared error of predicting zero"},
}


def draw_loss_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the training loss per window, the validation loss, and the loss of predicting zero, as a PNG.

    It is drawn by Agg, whatever the window system and the user's configuration are.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, style in CURVES.items():
        if points := points_of(lines, name):
            axes.plot(*zip(*points, strict=True), **({"marker": "o"} if len(points) == 1 else {}) | style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=130, format="png", bbox_inches="tight")
    write_durably(path, png.getvalue())


def points_of(lines: Iterable[Mapping[str, Any]], field: str) -> list[tuple[float, float]]:
    """Return a value by the steps done, of the lines of metrics that have it as a finite number."""
    # A window's line has its last step, counted from 0; a validation's has the steps done.
    found = ((line["step"] + (0 if "val_loss" in line else 1), line.get(field)) for line in lines)
    return [(step, value) for step, value in found if is_number(value)]


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


# ---------------------------------------------------------------------------------------------------------------------- report

log = logging.getLogger(__name__)
_T = TypeVar("_T")

MUCH_WAITED = 0.05  # share of the time that steps waited for data
SLOW_STEPS = 3.0  # the 99th percentile over the median
WORSE = 1.05  # the last validation over the best one
VALIDATIONS = 6  # that the chart by timestep shows of a run
MAX_FRAMES, FRAME_PX = 12, 1000  # contact sheets of a run that a page shows, and the longest side of one
MAX_IMAGES, IMAGE_PX = 16, 2048  # newest images of a run that a page shows at their own size, and their longest side
TABLES = ("buckets", "val_loss_per_timestep")  # of a line of metrics
SPEED = {
    "samples_per_s": "Samples/s",
    "data_wait_fraction": "Share of the time waiting for data",
    "step_s_p50": "Seconds of a step, median of each window",
    "step_s_p99": "Seconds of a step, 99th percentile",
    "peak_memory_mib": "Peak memory, MiB",
    "tflops_per_s_per_device": "TFLOP/s of a device",
    "mfu": "MFU",
    "recompiles": "Recompilations",
}  # titles of charts by the field of the metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A run, as its folder describes it."""

    name: str  # of the folder
    path: Path
    document: Mapping[str, Any]  # config.json
    status: Mapping[str, Any]  # status.json
    lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl; each has a number as its step

    @property
    def config(self) -> Mapping[str, Any]:
        return self.document.get("config", {})  # type: ignore[no-any-return]

    @property
    def rest(self) -> Mapping[str, Any]:
        """The rest of config.json: stores, versions, the commit."""
        return {name: value for name, value in self.document.items() if name != "config"}

    def values(self, field: str) -> list[float]:
        return [value for _, value in points_of(self.lines, field)]

    @property
    def buckets(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for line in self.lines:
            total.update(line.get("buckets", {}))
        return total


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Return runs in the given order, each once; those of equal folder names are named by their paths."""
    folders = {path.resolve(): path for path in paths}
    names = Counter(path.name for path in folders)
    runs = []
    for resolved, path in folders.items():
        if not (path / CONFIG).is_file() or not (path / METRICS).is_file():
            raise UsageError(f"{path} is not the folder of a run: it needs {CONFIG} and {METRICS}; give a run's --output-dir")
        found: list[dict[str, Any]] = [_parsed(line, {}) for line in (path / METRICS).read_bytes().splitlines()]
        runs.append(
            ReportedRun(
                name=resolved.name if names[resolved.name] == 1 else str(path),
                path=path,
                document=_read(path / CONFIG, {}),
                status=_read(path / STATUS, {}),
                lines=[_numbers(line) for line in found if is_number(line.get("step"))],
            )
        )
    return runs


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a line of metrics, and its tables of numbers; a damaged line may have anything else."""
    found: dict[str, Any] = {}
    for name, value in line.items():
        numbers = [*value.values()] if isinstance(value, dict) else [value]
        if isinstance(value, dict) is (name in TABLES) and all(isinstance(one, int | float) for one in numbers):
            found[name] = value
    return found


def _read(path: Path, otherwise: _T) -> _T:
    """Return the value of a JSON file if it is of the type of `otherwise`, else this."""
    return _parsed(path.read_bytes(), otherwise) if path.is_file() else otherwise


def _parsed(data: bytes, otherwise: _T) -> _T:
    try:
        found = json.loads(data)
    except ValueError:  # such as the last line of a run that was killed
        return otherwise
    return found if isinstance(found, type(otherwise)) else otherwise


def page_of(runs: Sequence[ReportedRun]) -> tuple[bytes, list[Finding]]:
    is_one = len(runs) == 1
    findings = [finding for run in runs for finding in _findings(run, "" if is_one else f"{run.name}: ")]
    summaries = [_summary(run) for run in runs]
    drawn = [(run, frames_of(run)) for run in runs]
    steps = sorted({step for _, frames in drawn for step in frames})
    data = document(
        "train/runs.html",
        title=runs[0].name if is_one else f"{len(runs)} runs",
        subtitle=f"Training: {summaries[0]['state']}" if is_one else f"Training runs {', '.join(run.name for run in runs)}",
        made_by="bucketline train report",
        findings=findings,
        tiles=[(value, what) for what, value in summaries[0].items() if value and what != "state"] if is_one else [],
        runs=runs,
        summaries=summaries,
        overview=[(run.name, *summary.values()) for run, summary in zip(runs, summaries, strict=True)],
        reasons=[(run.name, run.status["reason"]) for run in runs if run.status.get("reason")],
        losses={
            **_charts(runs, {"loss": "Training, mean of each window"}),
            "Validation": lines(
                [
                    *(_line(f"{run.name}: averaged weights", run, "val_loss", n) for n, run in enumerate(runs)),
                    _line("zero baseline (predicting zero)", runs[0], "val_zero_loss", COLOURS - 1, is_dashed=True),
                ],
                "validation loss",
                "optimizer steps",
            ),
            **_charts(runs, {"grad_norm": "Norm of the gradient", "lr": "Learning rate"}),
        },
        by_timestep={f"Validations of {run.name}": _by_timestep(run) for run in runs},
        speed=_charts(runs, SPEED),
        steps=steps,
        images=[(run, frames, _places(frames, steps), _texts_of(run)) for run, frames in drawn],
        own_sizes=[(run, newest_images(run)) for run in runs],
        differences=run_differences(runs),
        flat=flat,
    )
    return data, findings


def _findings(run: ReportedRun, of: str) -> Iterator[Finding]:
    if run.status.get("state") == "failed":
        yield Finding(level="error", title=f"{of}the run failed", detail=str(run.status.get("reason") or ""), anchor="runs")
    if skipped := int(sum(run.values("skipped_steps"))):
        detail = "Their gradients were not finite; the weights were not changed by them."
        yield Finding(level="warning", title=f"{of}{counted(skipped, 'step')} skipped", detail=detail, anchor="loss")
    waits = run.values("data_wait_fraction")
    if waits and (share := statistics.fmean(waits)) > MUCH_WAITED:
        detail = "See `loader plan`, `threads` of a run file, and where the store is."
        title = f"{of}{percent(share)} of the time was spent waiting for data"
        yield Finding(level="warning", title=title, detail=detail, anchor="speed")
    middle, slow = run.values("step_s_p50"), run.values("step_s_p99")
    if middle and slow and (times := max(slow[1:] or slow) / statistics.median(middle)) > SLOW_STEPS:
        yield Finding(level="warning", title=f"{of}some steps took {times:.1f} times as long as most", anchor="speed")
    validations, zero = points_of(run.lines, "val_loss"), run.values("val_zero_loss")
    if not validations:
        yield Finding(level="warning", title=f"{of}no validation", detail="Pack with --val-fraction to have one.")
        return
    (best_at, best), last = min(validations, key=lambda point: point[1]), validations[-1][1]
    if last > WORSE * best:
        detail = f"It was {best:.4f} after {best_at:.0f} steps and is {last:.4f} at the end."
        yield Finding(level="warning", title=f"{of}the validation loss has risen", detail=detail, anchor="loss")
    elif zero and last >= zero[-1]:
        detail = f"The validation loss is {last:.4f}, the zero baseline (predicting zero) {zero[-1]:.4f}."
        yield Finding(level="error", title=f"{of}nothing was learned", detail=detail, anchor="loss")
    else:
        detail = f"It is {last:.4f} at the end; the lowest was {best:.4f}."
        yield Finding(level="good", title=f"{of}the validation loss has not risen", detail=detail, anchor="loss")


def _summary(run: ReportedRun) -> dict[str, str]:
    named = ("loss", "val_loss", "val_zero_loss", "samples_per_s", "data_wait_fraction", "peak_memory_mib")
    training, validation, zero, rates, waits, memory = map(run.values, named)
    return {
        "state": str(run.status.get("state") or "unknown"),
        "steps": f"{run.status.get('step', '')}",
        "training loss": human_number(training[-1]) if training else "",
        "validation loss": human_number(validation[-1]) if validation else "",
        "of the zero baseline": percent(validation[-1] / zero[-1]) if validation and zero and zero[-1] else "",
        "samples/s": human_number(statistics.median(rates)) if rates else "",
        "data wait": percent(statistics.fmean(waits)) if waits else "",
        "peak memory, MiB": f"{max(memory):,.0f}" if memory else "",
    }


# ------------------------------------------------------------------ charts


def _line(name: str, run: ReportedRun, field: str, colour: int, *, is_dashed: bool = False) -> Line:
    points = points_of(run.lines, field)
    return Line(name=name, xs=[x for x, _ in points], ys=[y for _, y in points], colour=colour, is_dashed=is_dashed)


def _charts(runs: Sequence[ReportedRun], fields: Mapping[str, str]) -> dict[str, str]:
    drawn = {title: [_line(run.name, run, field, n) for n, run in enumerate(runs)] for field, title in fields.items()}
    return {title: lines(found, title, "optimizer steps") for title, found in drawn.items() if any(line.xs for line in found)}


def _by_timestep(run: ReportedRun) -> str:
    found = []
    for colour, line in enumerate(spread([line for line in run.lines if line.get("val_loss_per_timestep")], VALIDATIONS)):
        losses = sorted((int(step), loss) for step, loss in line["val_loss_per_timestep"].items() if is_number(loss))
        xs, ys = [step for step, _ in losses], [loss for _, loss in losses]
        found.append(Line(name=f"step {line['step']}", xs=xs, ys=ys, colour=colour))
    return lines(found, "loss by timestep", "timestep")


def spread(values: Sequence[_T], most: int) -> list[_T]:
    """Return at most so many of the values, in equal distances, the first and the last included.

    >>> spread([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    if len(values) <= most:
        return list(values)
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]


# ------------------------------------------------------------------ images


def frames_of(run: ReportedRun) -> dict[int, bytes]:
    """Return the contact sheets of a run by step, as JPEGs, at most MAX_FRAMES of them, the first and the last included.

    One that cannot be read is left out, with a warning.
    """
    sheets = (run.path / IMAGES_FOLDER).glob("step-*.png")
    found = {int(path.stem.removeprefix("step-")): path for path in sheets if path.is_file()}
    if (last := run.path / IMAGES).is_file():
        done = run.status.get("step")
        found[int(done) if isinstance(done, int) else 1 + max(found, default=0)] = last
    frames = {step: _shown(found[step], FRAME_PX) for step in spread(sorted(found), MAX_FRAMES)}
    return {step: frame[0] for step, frame in frames.items() if frame is not None}


def newest_images(run: ReportedRun) -> list[Card]:
    """Return the newest images of a run at their own size with what they are of, at most MAX_IMAGES.

    One that cannot be read is left out, with a warning.
    """
    folders = [path for path in (run.path / IMAGES_FOLDER).glob("step-*") if path.is_dir()]
    entries = _entries_of(run)
    cards = []
    for number, path in enumerate(sorted(max(folders).glob("*.png"))[:MAX_IMAGES] if folders else ()):
        entry = entries[number] if number < len(entries) else {}
        if (shown := _shown(path, IMAGE_PX)) is not None:
            image, width_px, height_px = shown
            noted = [name for name in ("negative_prompt", "seed", "guidance") if entry.get(name) not in (None, "")]
            notes = [f"{name.replace('_', ' ')} {entry[name]}" for name in noted]
            title = f"{entry.get('id', '')} {height_px}x{width_px}".strip()
            cards.append(Card(title=title, images=(image,), notes=notes, captions=[str(entry.get("caption", ""))]))
    return cards


def _shown(path: Path, longest: int) -> tuple[bytes, int, int] | None:
    """Return an image as a JPEG of a longest side, and the width and the height of its file in px."""
    try:
        with Image.open(path) as image:
            return jpeg(image.convert("RGB"), longest), *image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        log.warning("%s is not shown, it cannot be read as an image: %s", path, error)
        return None


def _places(frames: Iterable[int], steps: Sequence[int]) -> dict[int | None, str]:
    """Return the places of the slider at which a run's sheet of each step is the newest one; None: before the first."""
    newest = [max((step for step in frames if step <= chosen), default=None) for chosen in steps]
    return {step: " ".join(str(at) for at, own in enumerate(newest) if own == step) for step in (None, *frames)}


def _entries_of(run: ReportedRun) -> list[dict[str, Any]]:
    """Return the captions, or the prompts with seed, size and guidance, of a run's newest sheet, as the run wrote them."""
    along = sorted((run.path / IMAGES_FOLDER).glob("step-*.json"), reverse=True)
    newest = next((path for path in ((run.path / IMAGES).with_suffix(".json"), *along) if path.is_file()), None)
    return [] if newest is None else _read(newest, [])


def _texts_of(run: ReportedRun) -> tuple[Sequence[str], Sequence[tuple[object, ...]]] | None:
    """Return the head and rows of a table with the texts of a run's newest sheet, in the order of its images."""
    entries = _entries_of(run)
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    rows = [(n, *("" if entry.get(name) is None else entry[name] for name in names)) for n, entry in enumerate(entries, 1)]
    return (["", *(name.replace("_", " ") for name in names)], rows) if entries else None


# ------------------------------------------------------------------ configurations


def run_differences(runs: Sequence[ReportedRun]) -> list[tuple[str, ...]]:
    """Return the settings in which runs differ: name and the value of each run. Stores, versions and the commit count too."""
    every = [flat(run.document) for run in runs]
    found = {name: [own.get(name, "") for own in every] for name in dict.fromkeys(name for own in every for name in own)}
    return [(name, *values) for name, values in found.items() if len(set(values)) > 1]


def flat(value: object, prefix: str = "") -> dict[str, str]:
    """Return a document as one value per dotted name.

    >>> flat({"config": {"seed": 1, "store": ["a"]}, "stores": [{"rows": 3}]})
    {'config.seed': '1', 'config.store': '["a"]', 'stores.0.rows': '3'}
    """
    if isinstance(value, list) and value and all(isinstance(own, dict) for own in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
    found: dict[str, str] = {}
    for key, own in value.items():
        found |= flat(own, f"{prefix}.{key}" if prefix else str(key))
    return found
