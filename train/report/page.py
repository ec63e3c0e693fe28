"""The page of `train report`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from bucketline.command_line import counted, human_number
from bucketline.pages.charts import COLOURS, Line, lines
from bucketline.pages.page import Card, Finding, document, percent
from bucketline.train.report.read_run import by_timestep, flat, frames_of, newest_images, run_differences, spread, texts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from bucketline.train.report.read_run import ReportedRun, Series

MUCH_WAITED = 0.05  # share of the time that steps waited for data
SLOW_STEPS = 3.0  # the 99th percentile over the median
WORSE = 1.05  # the last validation over the best one
VALIDATIONS = 6  # that the chart by timestep shows of a run
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
    summaries = [_summary(run) for run in runs]
    drawn = [(run, frames_of(run)) for run in runs]
    steps = sorted({step for _, frames in drawn for step in frames})
    data = document(
        "train/report/runs.html",
        title=runs[0].name if is_one else f"{len(runs)} runs",
        subtitle=f"Training: {summaries[0]['state']}" if is_one else f"Training runs {names}",
        made_by="bucketline train report",
        findings=findings,
        tiles=[(value, what) for what, value in summaries[0].items() if value and what != "state"] if is_one else [],
        runs=runs,
        summaries=summaries,
        overview=[(run.name, *summary.values()) for run, summary in zip(runs, summaries, strict=True)],
        reasons=[(run.name, run.status["reason"]) for run in runs if run.status.get("reason")],
        losses=_losses(runs),
        by_timestep=_by_timestep(runs),
        speed=_charts(runs, SPEED),
        steps=steps,
        images=[(run, frames, _places(frames, steps), _texts(run)) for run, frames in drawn],
        own_sizes=[(run, [_card(*one) for one in newest_images(run)]) for run in runs],
        differences=[(name, *values) for name, values in run_differences(runs)] if not is_one else [],
        flat=flat,
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
        detail = "See `loader plan`, `threads` of a run file, and where the store is."
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


def _line(name: str, series: Series, colour: int, *, is_dashed: bool = False) -> Line:
    return Line(name=name, xs=series.steps, ys=series.values, colour=colour, is_dashed=is_dashed)


def _charts(runs: Sequence[ReportedRun], fields: Mapping[str, str]) -> dict[str, str]:
    """Return a chart of each value of the windows by its title, but for those that no run has."""
    drawn = {title: [_line(run.name, run.series(field), n) for n, run in enumerate(runs)] for field, title in fields.items()}
    return {title: lines(found, title, "optimizer steps") for title, found in drawn.items() if any(line.xs for line in found)}


def _losses(runs: Sequence[ReportedRun]) -> dict[str, str]:
    validation = [_line(f"{_of(run, runs)}averaged weights", run.series("val_loss"), n) for n, run in enumerate(runs)]
    validation.append(_line("predicting zero", runs[0].series("val_zero_loss"), COLOURS - 1, is_dashed=True))
    return {
        **_charts(runs, {"loss": "Training, mean of each window"}),
        "Validation": lines(validation, "validation loss", "optimizer steps"),
        **_charts(runs, {"grad_norm": "Norm of the gradient", "lr": "Learning rate"}),
    }


def _by_timestep(runs: Sequence[ReportedRun]) -> dict[str, str]:
    found: dict[str, list[Line]] = {}
    if len(runs) > 1:
        last = [_line(run.name, by_timestep(run.validations[-1]), n) for n, run in enumerate(runs) if run.validations]
        found["Last validation of each run"] = last
    for run in runs:
        validations = enumerate(spread(run.validations, VALIDATIONS))
        found[f"Validations of {run.name}"] = [_line(f"step {line['step']}", by_timestep(line), n) for n, line in validations]
    return {name: lines(drawn, "loss by timestep", "timestep") for name, drawn in found.items()}


def _places(frames: Iterable[int], steps: Sequence[int]) -> dict[int | None, str]:
    """Return the places of the slider at which a run's sheet of each step is the newest one; None: before the first."""
    newest = [max((step for step in frames if step <= chosen), default=None) for chosen in steps]
    return {step: " ".join(str(at) for at, own in enumerate(newest) if own == step) for step in (None, *frames)}


def _card(image: bytes, width_px: int, height_px: int, entry: Mapping[str, object]) -> Card:
    named = (("negative prompt", "negative_prompt"), ("seed", "seed"), ("guidance", "guidance"))
    notes = [f"{what} {entry[field]}" for what, field in named if entry.get(field) not in (None, "")]
    title = f"{entry.get('id', '')} {height_px}x{width_px}".strip()
    return Card(title=title, images=(image,), notes=notes, captions=[str(entry.get("caption", ""))])


def _texts(run: ReportedRun) -> tuple[Sequence[str], Sequence[tuple[object, ...]]] | None:
    """Return the head and rows of a table with the texts of a run's newest sheet, in the order of its images."""
    found = texts_of(run)
    if not any("seed" in one for one in found):
        captions = [(n, one.get("id", ""), one.get("caption", "")) for n, one in enumerate(found, 1)]
        return (("", "sample", "caption"), captions) if found else None
    prompts = [
        (
            n,
            *(one.get(name, "") for name in ("caption", "negative_prompt", "seed")),
            f"{one.get('height_px')}x{one.get('width_px')}",
            "as the run" if one.get("guidance") is None else one["guidance"],
        )
        for n, one in enumerate(found, 1)
    ]
    return ("", "prompt", "negative prompt", "seed", "size, px", "guidance"), prompts
