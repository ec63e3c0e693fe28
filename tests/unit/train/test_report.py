"""`bucketline train report`: what a run has measured is on its page, and what is wrong with it at the top."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from bucketline.train.report import MAX_FRAMES, frames_of, page_of, points_of, read_runs, run_differences
from bucketline.train.run import train
from tests.commands import BIN, spawn
from tests.pages import parsed
from tests.unit.train.tiny_run import ALONE, config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bucketline.train.report import ReportedRun

WINDOW: dict[str, Any] = {
    "skipped_steps": 0,
    "samples_per_s": 60.0,
    "data_wait_fraction": 0.01,
    "step_s_p50": 0.2,
    "step_s_p99": 0.3,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "buckets": {"train/128x128": 6, "train/96x160": 4},
    "peak_memory_mib": 700,
}


def write_run(path: Path, *, losses: tuple[float, ...] = (0.9, 0.4, 0.2), status: str = "done", **changes: Any) -> Path:
    """Write the folder of a run by hand: 10 steps a window, and a validation after each."""
    path.mkdir(parents=True)
    lines: list[Mapping[str, Any]] = []
    for n, loss in enumerate(losses):
        lines.append({"step": 10 * n + 9, "loss": loss, **WINDOW, **changes})
        by_timestep = {"62": 2 * loss, "937": loss / 2}
        lines.append({"step": 10 * n + 10, "val_loss": loss, "val_zero_loss": 1.0, "val_loss_per_timestep": by_timestep})
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3', encoding="utf-8")
    reason = "the disk is full" if status == "failed" else None
    (path / "status.json").write_text(json.dumps({"state": status, "step": 10 * len(losses), "reason": reason}))
    document = {"config": {"seed": 1, "learning_rate": changes.get("lr", 1e-3), "store": ["photos.store"]}, "commit": "<abc>"}
    (path / "config.json").write_text(json.dumps(document))
    return path


def grid(path: Path, shade: int) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.full((40, 1600, 3), shade, np.uint8)).save(path)


def read(path: Path) -> ReportedRun:
    (run,) = read_runs([path])
    return run


def test_a_page_has_what_a_run_has_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    for step in (10, 20):
        grid(run / "images" / f"step-{step:08d}.png", step)
    grid(run / "images.png", 200)
    ran = spawn([BIN / "bucketline", "train", "report", run, "-o", tmp_path / "r.html"]).done()
    assert "r.html: " in ran.out
    found = parsed(tmp_path / "r.html")
    sections = ["runs", "loss", "timesteps", "speed", "buckets", "images", "configuration"]
    assert [name for name in found.ids if name in sections] == sections
    for text in ("20.0 %", "train/96x160", "12  (40.0 %)", "learning_rate", "<abc>", "predicting zero", "Peak memory"):
        assert text in found.text
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert 'data-labels="10 20 30"' in page
    assert page.count("data:image/jpeg") == 3


def test_the_texts_of_a_grid_are_on_the_page_in_full(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    grid(run / "images" / "step-00000010.png", 10)
    about = {"negative_prompt": "rain", "seed": 7, "height_px": 768, "width_px": 512, "guidance": None}
    long = "a red barn & " + " ".join(["in the snow"] * 20)
    (run / "images" / "step-00000010.json").write_text(json.dumps([{"id": "default/1", "caption": long, **about}]))

    def page() -> str:
        return re.sub(r"(<[^>]*>\s*)+", "|", page_of([read(run)])[0].decode())

    assert (
        f"|id|caption|negative prompt|seed|height px|width px|guidance|1|default/1|{html.escape(long)}|rain|7|768|512|"
        in page()
    )
    grid(run / "images.png", 30)
    (run / "images.json").write_text(json.dumps([{"id": "cats/a.png", "caption": "a cat"}]))
    assert "|id|caption|1|cats/a.png|a cat|" in page()
    (run / "images.json").write_text("[{")
    assert "a cat" not in page()


def test_the_newest_images_are_on_the_page_at_their_own_sizes_with_what_they_are_of(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    sizes = {"step-00000010": [(64, 64)], "step-00000030": [(1024, 768), (64, 96), (3000, 1500)]}
    for step, each in sizes.items():
        (run / "images" / step).mkdir(parents=True)
        for number, size in enumerate(each, 1):
            Image.new("RGB", size).save(run / "images" / step / f"{number:02}.png")
    (run / "images" / "step-00000030" / "04.png").write_bytes(b"cut")
    grid(run / "images.png", 30)
    entries = [
        {"id": "default/1", "caption": "a red <barn>", "negative_prompt": "rain", "seed": 7, "guidance": 4.0},
        {"id": "default/2", "caption": "snow", "negative_prompt": "", "seed": 0, "guidance": None},
    ]
    (run / "images.json").write_text(json.dumps(entries))
    page = page_of([read(run)])[0].decode()
    figures = [one for one in re.findall(r"<figure>.*?</figure>", page, re.DOTALL) if "data:image/jpeg" in one]
    found = []
    for one in figures:
        (data,) = re.findall(r"data:image/jpeg;base64,([^\"]+)", one)
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            found.append((image.size, re.findall(r"<(?:b|span)[^>]*>([^<]*)<", one)))
    assert found == [
        ((1024, 768), ["default/1 768x1024", "negative prompt rain", "seed 7", "guidance 4.0", "a red &lt;barn&gt;"]),
        ((64, 96), ["default/2 96x64", "seed 0", "snow"]),
        ((2048, 1024), ["1500x3000", ""]),
    ]


@pytest.mark.parametrize(
    ("changes", "title", "detail"),
    [
        ({}, None, ""),
        ({"status": "failed"}, "the run failed", "the disk is full"),
        ({"skipped_steps": 2}, "6 steps skipped", "not finite"),
        ({"data_wait_fraction": 0.25}, "25.0 % of the time was spent waiting for data", "loader plan"),
        ({"step_s_p99": 1.4}, "some steps took 7.0 times as long as most", ""),
        ({"losses": (0.9, 0.2, 0.3)}, "the validation loss has risen", "It was 0.2000 after 20 steps and is 0.3000"),
        (
            {"losses": (1.2, 1.1, 1.0)},
            "nothing was learned",
            "The validation loss is 1.0000, the zero baseline (predicting zero) 1.0000",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, changes: dict[str, Any], title: str | None, detail: str) -> None:
    _, findings = page_of([read(write_run(tmp_path / "a", **changes))])
    found = {one.title: one.detail for one in findings if one.level != "good"}
    assert list(found) == ([] if title is None else [title])
    assert title is None or detail in found[title]


def test_runs_are_shown_next_to_each_other_with_what_differs(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=3e-4, losses=(0.9, 0.5))
    grid(a / "images" / "step-00000010.png", 10)
    grid(a / "images.png", 30)
    grid(b / "images.png", 90)
    runs = read_runs([a, b])
    assert run_differences(runs) == [("config.learning_rate", "0.001", "0.0003")]
    data, findings = page_of(runs)
    (tmp_path / "r.html").write_bytes(data)
    found = parsed(tmp_path / "r.html")
    assert {one.title.partition(":")[0] for one in findings} == {"a", "b"}
    page = data.decode()
    assert 'data-labels="10 20 30"' in page
    assert page.count("data:image/jpeg") == 3, "each grid once, though it is shown at several places"
    assert '<p class="by-choice dim" data-frames="0">' in page, "b has none at step 10"
    assert 'data-frames="1 2"' in page
    assert "In which the runs differ" in found.text


def test_runs_of_one_name_are_told_apart_and_a_run_given_twice_is_one(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")
    assert [run.name for run in read_runs([one, other])] == [str(one), str(other)]
    assert [run.name for run in read_runs([one, tmp_path / "y" / ".." / "x" / "run"])] == ["run"]


def test_long_runs_show_a_part_of_their_grids(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    for step in range(1, 40):
        grid(run / "images" / f"step-{step:08d}.png", step)
    frames = frames_of(read(run))
    assert len(frames) == MAX_FRAMES
    assert (min(frames), max(frames)) == (1, 39)
    with Image.open(io.BytesIO(frames[1])) as image:
        assert image.size == (1000, 25)


def test_a_sheet_that_is_damaged_is_left_out_of_the_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write_run(tmp_path / "a")
    for step in (1, 2, 3):
        grid(run / "images" / f"step-{step:08d}.png", step)
    cut = run / "images" / "step-00000002.png"
    cut.write_bytes(cut.read_bytes()[:60])
    (run / "images" / "step-00000003.png").write_bytes(b"")
    assert list(frames_of(read(run))) == [1]
    assert len(caplog.records) == 2
    page_of([read(run)])


def test_a_run_without_steps_yet_and_damaged_lines_make_a_page_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", losses=())
    (run / "status.json").write_text("{", encoding="ascii")
    strange = ['{"step": 1, "loss": null, "buckets": 3}', '{"step": "x", "loss": 1}', "[1]", '{"step": 2, "val_loss": "NaN"}']
    strange += ['{"step": 2, "val_loss": NaN, "val_loss_per_timestep": {"5": NaN}}', "", '{"buckets"']
    (run / "metrics.jsonl").write_text("\n".join(strange), encoding="ascii")
    (tmp_path / "r.html").write_bytes(page_of([read(run)])[0])
    assert "not recorded" in parsed(tmp_path / "r.html").text


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    spawn([BIN / "bucketline", "train", "report", tmp_path / "empty", "-o", tmp_path / "r.html"]).fails(
        "is not the folder of a run: it needs config.json and metrics.jsonl", code=2
    )
    assert not (tmp_path / "r.html").exists()


@pytest.mark.slow  # it trains
def test_a_real_run_is_read(folder: Path) -> None:
    asked = config(folder, num_images=2, images_every=2, max_steps=4, log_every=2, validate_every=2)
    with contextlib.redirect_stderr(io.StringIO()):
        train(asked, ALONE)
    run = read(asked.output_dir)
    assert run.status["state"] == "done"
    assert [step for step, _ in points_of(run.lines, "loss")] == [2, 4]
    assert [step for step, _ in points_of(run.lines, "val_loss")] == [0, 2, 4]
    assert len(run.lines[-1]["val_loss_per_timestep"]) == 2
    assert sum(run.buckets.values()) == 4
    assert list(frames_of(run)) == [2, 4]
    page_of([run])
