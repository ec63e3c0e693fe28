"""The page of `train report`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from bucketline.command_line import counted, human_number
from bucketline.pages.charts import COLOURS, Line, lines
from bucketline.pages.image_files import data_url
from bucketline.pages.page import Bar, Finding, Section, columns, document, escaped, parts, percent
from bucketline.train.report.read_run import by_timestep, flat, frames_of, run_differences, spread, texts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bucketline.train.report.read_run import Frame, ReportedRun, Series

MUCH_WAITED = 0.05  # share of the time that steps waited for data
SLOW_STEPS = 3.0  # the 99th percentile over the median
WORSE = 1.05  # the last validation over the best one
VALIDATIONS = 6  # that the chart by timestep shows of a run
_MAX_BARS = 40
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


def page_of(runs: Sequence[ReportedRun]) -> tuple[bytes, list[Finding]]:
    """Return the page about runs, and its findings."""
    findings = [finding for run in runs for finding in _findings(run, _of(run, runs))]
    is_one = len(runs) == 1
    names = ", ".join(run.name for run in runs)
    speed = columns(_chart(runs, title, field) for field, title in SPEED.items())
    note = "High timesteps have much noise."
    data = document(
        title=runs[0].name if is_one else f"{len(runs)} runs",
        subtitle=f"Training: {_summary(runs[0])['state']}" if is_one else f"Training runs {names}",
        made_by="bucketline train report",
        findings=findings,
        tiles=[(value, what) for what, value in _summary(runs[0]).items() if value and what != "state"] if is_one else [],
        sections=[
            Section(anchor="runs", title="Runs", body=_overview(runs)),
            Section(anchor="loss", title="Loss", body=_losses(runs)),
            Section(anchor="timesteps", title="Validation by timestep", note=note, body=_by_timestep(runs)),
            Section(anchor="speed", title="Throughput", body=speed),
            Section(anchor="steps-by-bucket", title="Buckets", body=columns(map(_buckets, runs))),
            _images(runs),
            Section(anchor="configuration", title="Configuration", body=_configuration(runs)),
        ],
    )
    return data, findings


def _of(run: ReportedRun, runs: Sequence[ReportedRun]) -> str:
    return "" if len(runs) == 1 else f"{run.name}: "


def _findings(run: ReportedRun, of: str) -> Iterator[Finding]:
    """Yield what is wrong in a run."""
    if run.status.get("state") == "failed":
        yield Finding(level="error", title=f"{of}the run failed", detail=str(run.status.get("reason") or ""), anchor="runs")
    if skipped := int(sum(run.series("skipped_steps").values)):
        detail = "Their gradients were not finite; the weights were not changed by them."
        yield Finding(level="warning", title=f"{of}{counted(skipped, 'step')} skipped", detail=detail, anchor="loss")
    waits = run.series("data_wait_fraction").values
    if waits and (share := statistics.fmean(waits)) > MUCH_WAITED:
        detail = "See `loader plan`, --threads, and where the store is."
        title = f"{of}{percent(share)} of the time was spent waiting for data"
        yield Finding(level="warning", title=title, detail=detail, anchor="speed")
    middle, slow = run.series("step_s_p50").values, run.series("step_s_p99").values
    if middle and slow and (times := max(slow[1:] or slow) / statistics.median(middle)) > SLOW_STEPS:
        title = f"{of}some steps took {times:.1f} times as long as most"
        yield Finding(level="warning", title=title, detail="", anchor="speed")
    validations = run.series("val_loss")
    losses, zero = validations.values, run.series("val_zero_loss").values
    if not losses:
        yield Finding(level="warning", title=f"{of}no validation", detail="Pack with --val-fraction to have one.")
    elif losses[-1] > WORSE * min(losses):
        best = validations.steps[losses.index(min(losses))]
        detail = f"It was {min(losses):.4f} after {best:.0f} steps and is {losses[-1]:.4f} at the end."
        yield Finding(level="warning", title=f"{of}the validation loss has risen", detail=detail, anchor="loss")
    elif zero and losses[-1] >= zero[-1]:
        detail = f"{losses[-1]:.4f}; predicting zero scores {zero[-1]:.4f}."
        yield Finding(level="error", title=f"{of}nothing was learned", detail=detail, anchor="loss")
    else:
        last, best_loss = f"{losses[-1]:.4f}", f"{min(losses):.4f}"
        detail = f"{last}." if last == best_loss else f"{last}, the best was {best_loss}."
        yield Finding(level="good", title=f"{of}the validation loss is at its best", detail=detail, anchor="loss")


def _summary(run: ReportedRun) -> dict[str, str]:
    """Return a run in a few numbers, as text."""
    named = ("loss", "val_loss", "val_zero_loss", "samples_per_s", "data_wait_fraction", "peak_memory_mib")
    training, validation, zero, rates, waits, memory = (run.series(name).values for name in named)
    return {
        "state": str(run.status.get("state") or "unknown"),
        "steps": f"{run.status.get('step', '')}",
        "training loss": human_number(training[-1]) if training else "",
        "validation loss": human_number(validation[-1]) if validation else "",
        "of predicting zero": percent(validation[-1] / zero[-1]) if validation and zero and zero[-1] else "",
        "samples/s": human_number(statistics.median(rates)) if rates else "",
        "data wait": percent(statistics.fmean(waits)) if waits else "",
        "peak memory, MiB": f"{max(memory):,.0f}" if memory else "",
    }


def _overview(runs: Sequence[ReportedRun]) -> str:
    rows = [_summary(run) for run in runs]
    body = parts.table(("run", *rows[0]), ((run.name, *row.values()) for run, row in zip(runs, rows, strict=True)), texts=2)
    reasons = [(run.name, run.status["reason"]) for run in runs if run.status.get("reason")]
    return body + (parts.table(("run", "why it ended"), reasons, texts=2) if reasons else "")


def _line(name: str, series: Series, colour: int, *, is_dashed: bool = False) -> Line:
    return Line(name=name, xs=series.steps, ys=series.values, colour=colour, is_dashed=is_dashed)


def _chart(runs: Sequence[ReportedRun], title: str, field: str) -> str:
    """Return a chart of a value of the windows; nothing if no run has it."""
    drawn = [_line(run.name, run.series(field), n) for n, run in enumerate(runs)]
    return f"<h3>{escaped(title)}</h3>{lines(drawn, title, 'optimizer steps')}" if any(line.xs for line in drawn) else ""


def _losses(runs: Sequence[ReportedRun]) -> str:
    validation = [_line(f"{_of(run, runs)}averaged weights", run.series("val_loss"), n) for n, run in enumerate(runs)]
    validation.append(_line("predicting zero", runs[0].series("val_zero_loss"), COLOURS - 1, is_dashed=True))
    return columns(
        (
            _chart(runs, "Training, mean of each window", "loss"),
            f"<h3>Validation</h3>{lines(validation, 'validation loss', 'optimizer steps')}",
            _chart(runs, "Norm of the gradient", "grad_norm"),
            _chart(runs, "Learning rate", "lr"),
        )
    )


def _by_timestep(runs: Sequence[ReportedRun]) -> str:
    charts: dict[str, list[Line]] = {}
    if len(runs) > 1:
        last = [_line(run.name, by_timestep(run.validations[-1]), n) for n, run in enumerate(runs) if run.validations]
        charts["Last validation of each run"] = last
    for run in runs:
        found = spread(run.validations, VALIDATIONS)
        drawn = [_line(f"step {line['step']}", by_timestep(line), n) for n, line in enumerate(found)]
        charts[f"Validations of {run.name}"] = drawn
    pieces = (f"<h3>{escaped(name)}</h3>{lines(drawn, 'loss by timestep', 'timestep')}" for name, drawn in charts.items())
    return columns(pieces)


def _buckets(run: ReportedRun) -> str:
    found = sorted(run.buckets.items(), key=lambda one: (-one[1], one[0]))[:_MAX_BARS]
    total = max(1, run.buckets.total())
    chart = parts.bars([Bar(label=name, value=count, note=f"{count:,}  ({percent(count / total)})") for name, count in found])
    return f"<h3>{escaped(run.name)} <small>optimizer steps</small></h3>{chart}"


def _images(runs: Sequence[ReportedRun]) -> Section:
    """Return the grids of all runs under one slider over the steps; a run shows its newest grid up to the chosen step."""
    drawn = [(run, frames_of(run)) for run in runs]
    steps = sorted({frame.step for _, frames in drawn for frame in frames})
    if not steps:
        return Section(anchor="images", title="Images", body='<p class="dim">The runs have drawn no images.</p>')
    pieces = []
    for run, frames in drawn:
        heading = f"<h3>{escaped(run.name)}</h3>" if len(runs) > 1 else ""
        pieces.append(f"<div>{heading}{''.join(_frames(run.name, frames, steps))}{_texts(run)}</div>")
    last = len(steps) - 1
    slider = (
        '<div class="controls"><label for="grid-slider">step</label><input type="range" id="grid-slider" data-slider="grids" '
        f'data-labels="{" ".join(map(str, steps))}" min="0" max="{last}" value="{last}"><b id="grids-label"></b></div>'
    )
    note = (
        "By the averaged weights: prompts of the store, or stored captions below the real images. "
        "<code>--images-every</code> draws them along a run."
    )
    body = f'{slider}<div class="frames columns" id="grids">{"".join(pieces)}</div>'
    return Section(anchor="images", title="Images", note=note, body=body)


def _texts(run: ReportedRun) -> str:
    """Return the texts of a run's newest grid in full: the grid itself cuts them."""
    found = texts_of(run)
    if not any("seed" in one for one in found):
        rows = [(one.get("id", ""), one.get("caption", "")) for one in found]
        return parts.table(("sample", "caption"), rows, texts=2) if rows else ""
    prompts = [
        (
            *(one.get(name, "") for name in ("caption", "negative_prompt", "seed")),
            f"{one.get('height_px')}x{one.get('width_px')}",
            "as the run" if one.get("guidance") is None else one["guidance"],
        )
        for one in found
    ]
    return parts.table(("prompt", "negative prompt", "seed", "size, px", "guidance"), prompts, texts=2)


def _frames(name: str, frames: Sequence[Frame], steps: Sequence[int]) -> Iterator[str]:
    """Yield a run's grids, each with the places of the slider at which it is the newest one."""
    newest = [max((frame.step for frame in frames if frame.step <= step), default=None) for step in steps]
    if early := [at for at, own in enumerate(newest) if own is None]:
        yield f'<p class="by-choice dim" data-frames="{" ".join(map(str, early))}">no images yet</p>'
    for frame in frames:
        places = " ".join(str(at) for at, own in enumerate(newest) if own == frame.step)
        alt = escaped(f"images of {name} after {counted(frame.step, 'step')}")
        yield f'<div class="by-choice" data-frames="{places}"><img src="{data_url(frame.image)}" alt="{alt}"></div>'


def _configuration(runs: Sequence[ReportedRun]) -> str:
    body = ""
    if len(runs) > 1:
        rows = [(name, *values) for name, values in run_differences(runs)]
        body += "<h3>In which the runs differ</h3>"
        body += parts.table(("setting", *(run.name for run in runs)), rows, texts=1 + len(runs)) if rows else "<p>Nothing.</p>"
    for run in runs:
        options = parts.table(("option", "value"), flat(run.config).items(), texts=2)
        rest = {name: value for name, value in run.document.items() if name != "config"}
        title, is_open = (f"All settings of {run.name}", "") if len(runs) > 1 else ("All settings", " open")
        pieces = columns((options, parts.table(("", ""), flat(rest).items(), texts=2)))
        body += f"<details{is_open}><summary>{escaped(title)}</summary>{pieces}</details>"
    return body
