"""The page of `train report`."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted, human_number
from bucketline.pages.charts import COLOURS, Bar, Line, bars, lines
from bucketline.pages.page import Finding, Section, document, percent, shown, table
from bucketline.pages.png import data_url
from bucketline.train.report.read_run import differences, frames_of, texts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bucketline.train.report.read_run import Frame, Run, Series

MUCH_WAITED = 0.05  # share of the time that steps waited for data
SLOW_STEPS = 3.0  # the 99th percentile over the median
WORSE = 1.05  # the last validation over the best one
VALIDATIONS = 6  # that the chart by timestep shows of a run


def page_of(runs: Sequence[Run], *, with_images: bool = True) -> tuple[bytes, list[Finding]]:
    """Return the page about runs, and its findings."""
    findings = [finding for run in runs for finding in _findings(run, runs)]
    parts = [
        _overview(runs),
        Section(anchor="loss", title="Loss", body=_losses(runs)),
        _by_timestep(runs),
        _speed(runs),
        _buckets(runs),
        *([_images(runs)] if with_images else []),
        _configuration(runs),
    ]
    one = runs[0]
    tiles = []
    if len(runs) == 1:
        tiles = [(value, what) for what, value in _summary(one).items() if value]
    names = ", ".join(run.name for run in runs)
    data = document(
        title=one.name if len(runs) == 1 else f"{len(runs)} runs",
        subtitle=f"Training {'run' if len(runs) == 1 else 'runs'} {names}",
        made_by="bucketline train report",
        findings=findings,
        tiles=tiles,
        sections=parts,
    )
    return data, findings


def _of(run: Run, runs: Sequence[Run]) -> str:
    return "" if len(runs) == 1 else f"{run.name}: "


def _findings(run: Run, runs: Sequence[Run]) -> Iterator[Finding]:
    """Yield what is wrong in a run."""
    of = _of(run, runs)
    if run.status.get("state") == "failed":
        yield Finding(level="error", title=f"{of}the run failed", detail=str(run.status.get("reason") or ""), anchor="runs")
    skipped = sum(line["skipped_steps"] for line in run.windows if isinstance(line.get("skipped_steps"), int))
    if skipped:
        detail = "Their gradients were not finite; the weights were not changed by them."
        yield Finding(level="warning", title=f"{of}{counted(skipped, 'step')} skipped", detail=detail, anchor="loss")
    waits = run.series("data_wait_fraction").values
    if waits and (share := statistics.fmean(waits)) > MUCH_WAITED:
        detail = "See `loader plan`, --threads, and where the store is."
        title = f"{of}{percent(share)} of the time was spent waiting for data"
        yield Finding(level="warning", title=title, detail=detail, anchor="speed")
    middle, slow = run.series("step_s_p50").values, run.series("step_s_p99").values
    if middle and slow and max(slow[1:] or slow) > SLOW_STEPS * statistics.median(middle):
        title = f"{of}some steps took {max(slow[1:] or slow) / statistics.median(middle):.1f} times as long as most"
        yield Finding(level="warning", title=title, detail="", anchor="speed")
    yield from _of_validation(run, of)


def _of_validation(run: Run, of: str) -> Iterator[Finding]:
    losses, zero = run.validation("val_loss").values, run.validation("val_zero_loss").values
    if not losses:
        yield Finding(level="warning", title=f"{of}no validation", detail="Pack with --val-fraction to have one.")
        return
    if losses[-1] > WORSE * min(losses):
        best = run.validation("val_loss").steps[losses.index(min(losses))]
        detail = f"It was {min(losses):.4f} after {best:.0f} steps and is {losses[-1]:.4f} at the end."
        yield Finding(level="warning", title=f"{of}the validation loss has risen", detail=detail, anchor="loss")
    elif zero and losses[-1] >= zero[-1]:
        detail = f"{losses[-1]:.4f}; predicting zero scores {zero[-1]:.4f}."
        yield Finding(level="error", title=f"{of}nothing was learned", detail=detail, anchor="loss")
    else:
        detail = f"{losses[-1]:.4f}, the best was {min(losses):.4f}."
        yield Finding(level="good", title=f"{of}the validation loss is at its best", detail=detail, anchor="loss")


def _last(series: Series) -> float | None:
    return series.values[-1] if series.values else None


def _summary(run: Run) -> dict[str, str]:
    """Return a run in a few numbers, as text."""
    zero, loss = _last(run.validation("val_zero_loss")), _last(run.validation("val_loss"))
    rates, waits = run.series("samples_per_s").values, run.series("data_wait_fraction").values
    memory = run.series("peak_memory_mib").values
    return {
        "state": str(run.status.get("state") or "unknown"),
        "steps": f"{run.status.get('step', '')}",
        "training loss": _number(_last(run.series("loss"))),
        "validation loss": _number(loss),
        "of predicting zero": percent(loss / zero) if loss is not None and zero else "",
        "samples/s": _number(statistics.median(rates)) if rates else "",
        "data wait": percent(statistics.fmean(waits)) if waits else "",
        "peak memory, MiB": f"{max(memory):,.0f}" if memory else "",
    }


def _number(value: float | None) -> str:
    return "" if value is None else human_number(value)


def _overview(runs: Sequence[Run]) -> Section:
    rows = [_summary(run) for run in runs]
    body = table(("run", *rows[0]), ((run.name, *row.values()) for run, row in zip(runs, rows, strict=True)), texts=2)
    reasons = [(run.name, run.status.get("reason")) for run in runs if run.status.get("reason")]
    if reasons:
        body += table(("run", "why it ended"), reasons, texts=2)
    return Section(anchor="runs", title="Runs", body=body)


def _chart(runs: Sequence[Run], title: str, field: str, *, from_zero: bool = True) -> str:
    """Return a chart of a value of the windows; nothing if no run has it."""
    series = [(run, run.series(field)) for run in runs]
    if not any(own.steps for _, own in series):
        return ""
    drawn = [Line(name=run.name, xs=own.steps, ys=own.values, colour=n) for n, (run, own) in enumerate(series)]
    return f"<div><h3>{shown(title)}</h3>{lines(drawn, title, 'optimizer steps', from_zero=from_zero)}</div>"


def _losses(runs: Sequence[Run]) -> str:
    own = [run.validation("val_loss") for run in runs]
    validation = [
        Line(name=f"{_of(run, runs)}averaged weights", xs=series.steps, ys=series.values, colour=n)
        for n, (run, series) in enumerate(zip(runs, own, strict=True))
    ]
    zero = runs[0].validation("val_zero_loss")
    validation.append(Line(name="predicting zero", xs=zero.steps, ys=zero.values, colour=COLOURS - 1, is_dashed=True))
    return (
        f'<div class="columns">{_chart(runs, "Training, mean of each window", "loss")}'
        f"<div><h3>Validation</h3>{lines(validation, 'validation loss', 'optimizer steps')}</div>"
        f"{_chart(runs, 'Norm of the gradient', 'grad_norm')}{_chart(runs, 'Learning rate', 'lr')}</div>"
    )


def _by_timestep(runs: Sequence[Run]) -> Section:
    parts = []
    if len(runs) > 1:
        last = [
            Line(name=run.name, xs=(own := run.by_timestep(run.validations[-1])).steps, ys=own.values, colour=n)
            for n, run in enumerate(runs)
            if run.validations
        ]
        parts.append(f"<div><h3>Last validation of each run</h3>{lines(last, 'loss by timestep', 'timestep')}</div>")
    for run in runs:
        found = list(run.validations)
        if len(found) > VALIDATIONS:
            found = [found[round(n * (len(found) - 1) / (VALIDATIONS - 1))] for n in range(VALIDATIONS)]
        drawn = [
            Line(name=f"step {line['step']}", xs=(own := run.by_timestep(line)).steps, ys=own.values, colour=n)
            for n, line in enumerate(found)
        ]
        title = shown(f"Validations of {run.name}")
        parts.append(f"<div><h3>{title}</h3>{lines(drawn, 'loss by timestep', 'timestep')}</div>")
    body = f'<div class="columns">{"".join(parts)}</div>'
    return Section(anchor="timesteps", title="Validation by timestep", note="High timesteps have much noise.", body=body)


def _speed(runs: Sequence[Run]) -> Section:
    charts = (
        _chart(runs, "Samples/s", "samples_per_s"),
        _chart(runs, "Share of the time waiting for data", "data_wait_fraction"),
        _chart(runs, "Seconds of a step, median of each window", "step_s_p50"),
        _chart(runs, "Seconds of a step, 99th percentile", "step_s_p99"),
        _chart(runs, "Peak memory, MiB", "peak_memory_mib"),
        _chart(runs, "TFLOP/s of a device", "tflops_per_s_per_device"),
        _chart(runs, "MFU", "mfu"),
        _chart(runs, "Recompilations", "recompiles"),
    )
    return Section(anchor="speed", title="Throughput", body=f'<div class="columns">{"".join(charts)}</div>')


def _buckets(runs: Sequence[Run]) -> Section:
    parts = []
    for run in runs:
        found = sorted(run.buckets.items(), key=lambda one: (-one[1], one[0]))[:40]
        total = max(1, sum(run.buckets.values()))
        chart = bars([Bar(label=name, value=count, note=f"{count:,}  ({percent(count / total)})") for name, count in found])
        parts.append(f"<div><h3>{shown(run.name)} <small>optimizer steps</small></h3>{chart}</div>")
    return Section(anchor="steps-by-bucket", title="Buckets", body=f'<div class="columns">{"".join(parts)}</div>')


def _images(runs: Sequence[Run]) -> Section:
    """Return the grids of all runs under one slider over the steps; a run shows its newest grid up to the chosen step."""
    drawn = {run.name: frames_of(run) for run in runs}
    steps = sorted({frame.step for frames in drawn.values() for frame in frames})
    if not steps:
        return Section(anchor="images", title="Images", body='<p class="dim">The runs have drawn no images.</p>')
    parts = []
    for name, frames in drawn.items():
        heading = f"<h3>{shown(name)}</h3>" if len(runs) > 1 else ""
        texts = _texts(next(run for run in runs if run.name == name))
        parts.append(f"<div>{heading}{''.join(_frames(name, frames, steps))}{texts}</div>")
    last = len(steps) - 1
    slider = (
        '<div class="controls"><label for="grid-slider">step</label><input type="range" id="grid-slider" data-slider="grids" '
        f'data-labels="{" ".join(map(str, steps))}" min="0" max="{last}" value="{last}"><b id="grids-label"></b></div>'
    )
    note = (
        "By the averaged weights: prompts of the store, or stored captions below the real images. "
        "<code>--images-every</code> draws them along a run."
    )
    body = f'{slider}<div class="frames columns" id="grids">{"".join(parts)}</div>'
    return Section(anchor="images", title="Images", note=note, body=body)


def _texts(run: Run) -> str:
    """Return the texts of a run's newest grid in full: the grid itself cuts them."""
    found = texts_of(run)
    if any("seed" in one for one in found):
        head = ("prompt", "negative prompt", "seed", "size, px", "guidance")
        rows = [
            (
                *(one.get(name, "") for name in ("caption", "negative_prompt", "seed")),
                f"{one.get('height_px')}x{one.get('width_px')}",
                "as the run" if one.get("guidance") is None else one["guidance"],
            )
            for one in found
        ]
        return table(head, rows, texts=2)
    rows = [(one.get("id", ""), one.get("caption", "")) for one in found]
    return table(("sample", "caption"), rows, texts=2) if rows else ""


def _frames(name: str, frames: Sequence[Frame], steps: Sequence[int]) -> Iterator[str]:
    """Yield a run's grids, each with the places of the slider at which it is the newest one."""
    newest = [max((frame.step for frame in frames if frame.step <= step), default=None) for step in steps]
    if early := [at for at, own in enumerate(newest) if own is None]:
        yield f'<p class="by-choice dim" data-frames="{" ".join(map(str, early))}">no images yet</p>'
    for frame in frames:
        places = " ".join(str(at) for at, own in enumerate(newest) if own == frame.step)
        alt = shown(f"images of {name} after {counted(frame.step, 'step')}")
        yield f'<div class="by-choice" data-frames="{places}"><img src="{data_url(frame.image)}" alt="{alt}"></div>'


def _configuration(runs: Sequence[Run]) -> Section:
    body = ""
    if len(runs) > 1:
        rows = [(name, *values) for name, values in differences(runs)]
        body += "<h3>In which the runs differ</h3>"
        body += table(("setting", *(run.name for run in runs)), rows, texts=1 + len(runs)) if rows else "<p>Nothing.</p>"
    for run in runs:
        parts = {name: value for name, value in run.document.items() if name != "config"}
        options = table(("option", "value"), ((name, _text(value)) for name, value in run.config.items()), texts=2)
        rest = table(("", ""), ((name, _text(value)) for name, value in _rows(parts)), texts=2)
        title = f"All settings of {run.name}" if len(runs) > 1 else "All settings"
        is_open = " open" if len(runs) == 1 else ""
        columns = f'<div class="columns"><div>{options}</div><div>{rest}</div></div>'
        body += f"<details{is_open}><summary>{shown(title)}</summary>{columns}</details>"
    return Section(anchor="configuration", title="Configuration", body=body)


def _rows(parts: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in parts.items():
        if isinstance(value, dict):
            for key, own in value.items():
                if isinstance(own, dict):
                    yield from ((f"{name}: {key}: {inner}", last) for inner, last in own.items())
                else:
                    yield f"{name}: {key}", own
        elif isinstance(value, list):
            for n, own in enumerate(value):
                yield from _rows({f"{name} {n}": own}) if isinstance(own, dict) else [(f"{name} {n}", own)]
        else:
            yield name, value


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
