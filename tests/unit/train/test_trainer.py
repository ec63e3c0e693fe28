"""A whole run, in this process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import DistError

from bucketline.errors import StateError, TrainError, UsageError
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.store.format.mixture_file import MixedStore, write_mixture
from bucketline.train import step as step_module
from bucketline.train import trainer as run_module
from bucketline.train.checkpoint import read_state
from bucketline.train.main import main
from bucketline.train.metrics_file import read_metrics
from bucketline.train.outputs import progress, run_dir, weights
from bucketline.train.parallel import TrainRanks
from bucketline.train.report import loss_curve
from bucketline.train.report.loss_curve import draw_loss_curve
from bucketline.train.trainer import rare_collection, train
from tests.kit import flip_bit, tree
from tests.unit.train.outputs.test_checkpoint import MOMENTS
from tests.unit.train.tiny_run import ALONE, add_to_store, as_arguments, config, losses, make_training_store, samples


def status(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output / "status.json").read_bytes())
    return found


def test_a_run_writes_windows_validations_status_and_a_checkpoint(folder: Path) -> None:
    asked = config(folder, validate_every=4)
    summary = train(asked, ALONE)
    lines = read_metrics(asked.output_dir)
    windows = [line for line in lines if "loss" in line]
    assert [(line["step"], line["samples"]) for line in windows] == [(2, 12), (5, 12), (6, 4)]
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 4, 7]
    for line in windows:
        assert isinstance(line["buckets"], dict)
        assert set(line["buckets"]) <= {"train/128x128", "train/192x128"}
        assert {"loss", "samples_per_s", "data_wait_fraction", "lr", "grad_norm"} <= set(line)
    assert status(asked.output_dir) == {"state": "done", "step": 7, "reason": None}
    assert summary.checkpoint == asked.output_dir / "checkpoints" / "step-00000007"


def test_a_run_ends_with_a_loss_curve_and_a_grid_of_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_curve, "draw_loss_curve", draw_loss_curve)
    asked = config(folder, num_images=3)
    summary = train(asked, ALONE)
    assert [path.name for path in summary.images] == ["loss.png", "images.png"]
    assert all(path.stat().st_size > 5000 for path in summary.images)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in summary.images)


def test_the_loss_curve_grows_during_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(lines: list[dict[str, Any]], path: Path) -> None:
        drawn.append(len(lines))
        draw_loss_curve(lines, path)
        assert path.read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(loss_curve, "draw_loss_curve", draw)
    monkeypatch.setattr(progress, "CURVE_EVERY_S", 1e6)
    train(config(folder, max_steps=3), ALONE)
    assert len(drawn) == 1, "a short run draws it at its end"
    monkeypatch.setattr(progress, "CURVE_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "CURVE_SHARE", 1e9)
    train(config(folder, resume=True), ALONE)
    assert len(drawn) > 3
    assert drawn[1:] == sorted(drawn[1:])
    assert not list(config(folder).output_dir.glob("*.tmp"))


def test_a_run_warns_once_of_buckets_too_small_for_their_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(folder, batch="14", accumulation=1, max_steps=1), ALONE)
    said = "warning: train/192x128 (7 images) fills a batch of 14 once in 2 passes (with copies); use a smaller batch"
    assert capsys.readouterr().err.count(said) == 1
    train(config(folder, max_steps=1, output_dir=folder / "ordinary"), ALONE)
    assert "fills a batch" not in capsys.readouterr().err


def test_the_model_and_its_average_open_in_diffusers(folder: Path) -> None:
    from diffusers import UNet2DConditionModel

    summary = train(config(folder, max_steps=2), ALONE)
    for name in ("unet", "unet_ema"):
        assert UNet2DConditionModel.from_pretrained(summary.checkpoint / name).config.in_channels == 2


def test_no_text_encoder_is_ever_loaded_from_start_to_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text encoder of transformers is built by this one constructor."""
    import transformers

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a text encoder was built")

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", refuse)
    assert len(train(config(folder, num_images=2), ALONE).images) == 2


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param((4,), id="within a window", marks=pytest.mark.slow),
        pytest.param((3, 5), id="twice, at its edge and within"),
    ],
)
def test_a_run_stopped_and_resumed_equals_the_whole_run_to_the_last_bit(folder: Path, stops: tuple[int, ...]) -> None:
    whole = config(folder, output_dir=folder / "whole", max_steps=8, validate_every=4)
    train(whole, ALONE)
    parts = replace(whole, output_dir=folder / "parts")
    for number, max_steps in enumerate((*stops, 8)):
        train(replace(parts, max_steps=max_steps, resume=number > 0), ALONE)
    assert losses(whole.output_dir) == losses(parts.output_dir)
    first, second = (tree(asked.output_dir / "checkpoints" / "step-00000008") for asked in (whole, parts))
    for name in ("unet", "unet_ema"):
        file = f"{name}/diffusion_pytorch_model.safetensors"
        assert first[file] == second[file]


def test_a_resume_at_the_last_step_leaves_the_same_metrics(folder: Path) -> None:
    asked = config(folder, validate_every=7)
    train(asked, ALONE)
    before = losses(asked.output_dir)
    said = str(train(replace(asked, resume=True), ALONE))
    assert losses(asked.output_dir) == before
    assert said.startswith("already at step 7: nothing to train; a larger --max-steps trains on\n")
    assert str(train(replace(asked, resume=True, max_steps=8), ALONE)).startswith("trained 8 steps\n")


def test_a_damaged_checkpoint_never_pushes_out_the_good_one_before_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(folder, save_every="1", accumulation=1, max_steps=2)
    train(asked, ALONE)
    checkpoints = asked.output_dir / "checkpoints"
    flip_bit(checkpoints / "step-00000002" / "unet" / "diffusion_pytorch_model.safetensors", 80_000)
    train(replace(asked, resume=True, save_every=None, max_steps=3), ALONE)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000001", "step-00000002.damaged", "step-00000003"]
    said = capsys.readouterr().err
    assert "step-00000002 is incomplete or damaged" in said
    assert "step-00000002 is now step-00000002.damaged" in said
    train(replace(asked, resume=True, save_every=None, max_steps=4), ALONE)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002.damaged", "step-00000003", "step-00000004"]


def test_what_a_crash_left_behind_the_checkpoint_is_cut_away(folder: Path) -> None:
    whole = config(folder, output_dir=folder / "whole", max_steps=8)
    train(whole, ALONE)
    asked = config(folder, max_steps=4)
    train(asked, ALONE)
    with (asked.output_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 9.0}\n{"step": 8, "lo')
    train(replace(asked, resume=True, max_steps=8), ALONE)
    assert losses(asked.output_dir) == losses(whole.output_dir)


@pytest.mark.slow
def test_a_run_interrupted_at_random_steps_with_a_checkpoint_being_written_equals_the_whole_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends as by a crash, at once after a step; what is left is the last checkpoint that was whole by then."""
    steps = 9
    whole = config(folder, output_dir=folder / "whole", max_steps=steps, save_every="2", log_every=2, accumulation=1)
    train(whole, ALONE)
    asked = replace(whole, output_dir=folder / "parts")
    real, random = step_module.train_step, Random(11)
    crashes = [random.randrange(6, steps), random.randrange(4, 6), 2]  # the first one while step 2's checkpoint is written

    def step_or_crash(*args: object) -> object:
        if crashes and args[2] == crashes[-1]:
            raise SystemError("the machine is gone")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", step_or_crash)
    for resume in (False, True, True):
        with pytest.raises(SystemError, match="the machine is gone"):
            train(replace(asked, resume=resume), ALONE)
        crashes.pop()
    train(replace(asked, resume=True), ALONE)
    assert losses(whole.output_dir) == losses(asked.output_dir)
    first, second = (tree(run.output_dir / "checkpoints" / f"step-{steps:08d}") for run in (whole, asked))
    assert first["unet/diffusion_pytorch_model.safetensors"] == second["unet/diffusion_pytorch_model.safetensors"]


def test_a_file_of_the_run_that_cannot_be_written_is_named_and_the_run_goes_on_once_it_can(folder: Path) -> None:
    asked = config(folder, max_steps=2, accumulation=1)
    in_the_way = asked.output_dir / "README.md"
    real = run_dir.write_config

    def then_blocked(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        in_the_way.mkdir()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_dir, "write_config", then_blocked)
        with pytest.raises(
            TrainError, match=r"README.md.* cannot be read or written: Is a directory; .* continue with --resume"
        ):
            train(asked, ALONE)
    status = json.loads((asked.output_dir / "status.json").read_bytes())
    assert (status["state"], status["step"]) == ("failed", 2)
    in_the_way.rmdir()
    train(replace(asked, resume=True), ALONE)
    assert json.loads((asked.output_dir / "status.json").read_bytes())["state"] == "done"


def test_a_full_disk_ends_the_run_with_a_clear_error_and_the_checkpoints_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = config(folder, output_dir=folder / "whole", max_steps=6, save_every="2", accumulation=1)
    train(whole, ALONE)
    asked = replace(whole, output_dir=folder / "full")
    real = save_file

    def full(tensors: object, path: Path, **options: object) -> None:
        if "step-00000004" in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(weights, "save_file", full)
        with pytest.raises(TrainError, match=r"step-00000004 cannot be written: .*No space left.*continue with --resume"):
            train(asked, ALONE)
    assert status(asked.output_dir)["state"] == "failed"
    assert [path.name for path in (asked.output_dir / "checkpoints").iterdir()] == ["step-00000002"]
    train(replace(asked, resume=True), ALONE)
    assert losses(asked.output_dir) == losses(whole.output_dir)


def test_a_signal_ends_the_run_at_a_checkpoint_from_which_it_goes_on_exactly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = config(folder, output_dir=folder / "whole")
    train(whole, ALONE)
    asked = config(folder)
    steps = []
    real = step_module.train_step

    def step_and_signal(*args: object) -> object:
        steps.append(args)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", step_and_signal)
    with pytest.raises(SystemExit) as end:
        main(as_arguments(asked))
    assert end.value.code == 128 + signal.SIGTERM, "what a shell's && takes for the end of training"
    assert "stopped by SIGTERM after 4 steps" in capsys.readouterr().out
    assert status(asked.output_dir) == {"state": "stopped", "step": 4, "reason": "SIGTERM"}
    train(replace(asked, resume=True), ALONE)
    assert losses(asked.output_dir) == losses(whole.output_dir)


def test_a_loss_that_is_no_number_stops_the_run_with_step_and_bucket_named(folder: Path) -> None:
    asked = config(folder, save_every="1", max_steps=1)
    train(asked, ALONE)
    with pytest.raises(TrainError, match=r"step 2 .*bucket train/\d+x128.* nan"):
        train(replace(asked, resume=True, max_steps=20, learning_rate=1e30, log_every=5, save_every=None), ALONE)
    assert status(asked.output_dir)["state"] == "failed"
    assert [path.name for path in (asked.output_dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_weights_that_are_no_numbers_never_get_into_a_checkpoint(folder: Path) -> None:
    asked = config(folder, max_steps=1, learning_rate=1e39, clip_norm=None)
    with pytest.raises(TrainError, match="after step 0 the weights' norm is"):
        train(asked, ALONE)
    assert not (asked.output_dir / "checkpoints").exists()


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_was(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    train(asked, ALONE)
    before = tree(asked.output_dir)
    with pytest.raises(UsageError, match="already has a run"):
        train(asked, ALONE)
    assert tree(asked.output_dir) == before


def test_a_resume_without_a_checkpoint_is_refused_and_makes_nothing(folder: Path) -> None:
    asked = config(folder, resume=True)
    with pytest.raises(UsageError, match=r"there is no run in .*run; give the --output-dir of one, or leave out --resume"):
        train(asked, ALONE)
    assert not asked.output_dir.exists()


def test_a_resume_behind_the_checkpoint_is_refused(folder: Path) -> None:
    asked = config(folder, max_steps=3)
    train(asked, ALONE)
    with pytest.raises(UsageError, match=r"--max-steps is 2.* already at step 3"):
        train(replace(asked, max_steps=2, resume=True), ALONE)


def test_a_resume_with_another_global_batch_is_refused_naming_both(folder: Path) -> None:
    asked = config(folder, max_steps=2)
    train(asked, ALONE)
    before = tree(asked.output_dir)
    with pytest.raises(UsageError, match=r"--batch 3 --accumulation 2 on 1 rank is 6 rows a step, .* with --batch 2 .* 4 rows"):
        train(replace(asked, batch=BatchSize(batch_size=3), max_steps=4, resume=True), ALONE)
    with pytest.raises(UsageError, match="--optimizer is muon"):
        train(replace(asked, optimizer="muon", max_steps=4, resume=True), ALONE)
    assert tree(asked.output_dir) == before, "a refused resume leaves the record of the run"


@pytest.mark.parametrize("former", [b'{"state": "done"}', b'{"state": "failed"}', b""])
def test_a_refused_resume_puts_the_former_status_back_and_a_crash_is_recorded(tmp_path: Path, former: bytes) -> None:
    asked, path = config(tmp_path, resume=True), tmp_path / "run" / "status.json"
    path.parent.mkdir()
    start = cast("Any", SimpleNamespace(checkpoint=Path("step-00000002"), steps_done=2))
    ranks = TrainRanks(rank=0, world_size=2)
    for error, is_put_back in (
        (UsageError("no"), True),
        (KeyboardInterrupt(), True),
        (DistError("the other rank has gone"), True),
        (MemoryError(), False),
    ):
        path.unlink(missing_ok=True)
        if former:
            path.write_bytes(former)
        with contextlib.closing(run_dir.RunLock(asked)) as lock:
            taken = lock.take(start)
        assert status(path.parent)["state"] == "running"
        with (
            pytest.raises((type(error), TrainError)),
            run_dir.failures_recorded(asked, ranks, start, taken, lambda: None),
        ):
            raise error
        if is_put_back:
            assert (path.read_bytes() if path.exists() else b"") == former
        else:
            assert status(path.parent) == {"state": "failed", "step": 2, "reason": "MemoryError: "}


def test_a_resume_with_other_shares_of_the_same_global_batch_goes_on(folder: Path) -> None:
    whole = config(folder, output_dir=folder / "whole")
    train(whole, ALONE)
    asked = config(folder, max_steps=3)
    train(asked, ALONE)
    train(replace(asked, batch=BatchSize(batch_size=4), accumulation=1, max_steps=7, resume=True), ALONE)
    for first, second in zip(read_metrics(whole.output_dir), read_metrics(asked.output_dir), strict=True):
        for name in ("loss", "val_loss"):
            if name in first:
                assert first[name] == pytest.approx(second[name], rel=1e-5)


def test_a_resume_stays_on_the_generation_that_the_run_was_planned_on(folder: Path) -> None:
    from bucketline.store import Store

    whole = config(folder, output_dir=folder / "whole")
    train(whole, ALONE)
    asked = config(folder, max_steps=3)
    train(asked, ALONE)
    (path,) = asked.store
    store = Store.open(path)
    add_to_store(Path(path), samples({"train/128x128": 20}, "later/"))
    summary = train(replace(asked, max_steps=7, resume=True), ALONE)
    assert [one.generation for one in read_state(summary.checkpoint).stores] == [store.manifest.generation]
    assert losses(asked.output_dir) == losses(whole.output_dir)


def test_a_resume_on_another_store_is_refused(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    train(asked, ALONE)
    make_training_store(folder / "other.store")
    with pytest.raises(StateError, match="name the --store of the run"):
        train(replace(asked, store=(folder / "other.store",), max_steps=2, resume=True), ALONE)


def test_a_folder_packed_from_a_data_set_file_is_trained_on_as_its_stores_with_their_repeats(folder: Path) -> None:
    made = make_training_store(folder / "data" / "other.store", {"train/128x128": 5, "val/128x128": 2})
    (folder / "tiny.store").rename(folder / "data" / "tiny.store")
    write_mixture(folder / "data", (MixedStore(name="tiny.store", repeats=1), MixedStore(name="other.store", repeats=3)))
    one_by_one = (folder / "data" / "tiny.store", Path(f"{made.path}:3"))
    by_name = config(folder, store=one_by_one, output_dir=folder / "by name", max_steps=2)
    train(by_name, ALONE)
    asked = config(folder, store=(folder / "data",), max_steps=2)
    summary = train(asked, ALONE)
    assert [one.repeats for one in read_state(summary.checkpoint).stores] == [1, 3]
    assert losses(asked.output_dir) == losses(by_name.output_dir)
    write_mixture(folder / "data", (MixedStore(name="tiny.store", repeats=1), MixedStore(name="other.store", repeats=2)))
    with pytest.raises(StateError, match=r"3 times a pass; .* 2 times a pass; .* or continue with --new-plan"):
        train(replace(asked, max_steps=3, resume=True), ALONE)


def test_several_stores_are_trained_on_and_resumed_each_at_its_generation(folder: Path) -> None:
    from bucketline.store import Store

    other = make_training_store(folder / "other.store", {"train/128x128": 5, "val/128x128": 2})
    stores = (folder / "tiny.store", Path(f"{other.path}:3"))
    whole = config(folder, store=stores, output_dir=folder / "whole")
    train(whole, ALONE)
    asked = config(folder, store=stores, max_steps=3)
    summary = train(asked, ALONE)
    one, two = read_state(summary.checkpoint).stores
    tiny = Store.open(folder / "tiny.store").manifest
    assert (one.store_id, one.generation, one.repeats) == (tiny.store_id, tiny.generation, 1)
    assert (two.store_id, two.generation, two.repeats) == (other.manifest.store_id, other.manifest.generation, 3)
    for store, message in (
        ((folder / "tiny.store", other.path), "3 times a pass; .* 1 times a pass; name the --store of the run"),
        (stores[::-1], "name the --store of the run"),
        (stores[:1], "was trained on 2 stores .* 1 are given"),
    ):
        with pytest.raises(StateError, match=message):
            train(replace(asked, store=store, max_steps=7, resume=True), ALONE)
    train(replace(asked, max_steps=7, resume=True), ALONE)
    assert losses(asked.output_dir) == losses(whole.output_dir)
    written = json.loads((asked.output_dir / "config.json").read_text(encoding="utf-8"))
    assert [(store["store_id"], store["repeats"]) for store in written["stores"]] == [(one.store_id, 1), (two.store_id, 3)]
    assert written["config"]["store"] == [str(path) for path in stores]


def test_a_new_plan_takes_the_newest_generation_and_keeps_weights_and_optimizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bucketline.store import Store

    asked = config(folder, max_steps=3)
    before = train(asked, ALONE)
    (path,) = asked.store
    store = Store.open(path)
    add_to_store(Path(path), samples({"train/128x128": 20}, "later/"))
    with pytest.raises(UsageError, match="--new-plan requires --resume"):
        replace(asked, new_plan=True)
    again = replace(asked, max_steps=5, resume=True, new_plan=True, batch=BatchSize(batch_size=3), accumulation=1)
    summary = train(again, ALONE)
    assert f"--new-plan: {before.checkpoint} was planned on {path} generation 1" in capsys.readouterr().err
    state = read_state(summary.checkpoint)
    assert [one.generation for one in state.stores] == [store.manifest.generation + 1]
    assert state.loader["step"] == 5
    moments = load_file(summary.checkpoint / MOMENTS)
    assert {int(tensor) for name, tensor in moments.items() if name.endswith(".step")} == {5}
    train(replace(again, max_steps=6, new_plan=False), ALONE)


@pytest.mark.parametrize(
    "changes", [{"service": "auto"}, {"threads": 2, "prefetch_bytes": 1 << 20, "verify": True}], ids=["service", "threads"]
)
def test_losses_are_the_same_whoever_reads(folder: Path, changes: dict[str, Any]) -> None:
    plain, other = config(folder, output_dir=folder / "plain", max_steps=4), config(folder, max_steps=4, **changes)
    train(plain, ALONE)
    train(other, ALONE)
    assert losses(other.output_dir) == losses(plain.output_dir)


def test_a_budget_of_pixels_gives_smaller_buckets_more_samples_and_windows_count_them(folder: Path) -> None:
    asked = config(folder, batch=f"{2 * 128 * 192}px", max_steps=4)
    train(asked, ALONE)
    per_step = {"train/128x128": 3 * asked.accumulation, "train/192x128": 2 * asked.accumulation}
    for line in read_metrics(asked.output_dir):
        if "loss" in line:
            assert isinstance(line["buckets"], dict)
            assert line["samples"] == sum(per_step[name] * int(str(count)) for name, count in line["buckets"].items())


def test_images_are_drawn_at_intervals_and_the_vae_is_gone_after_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bucketline.train.images import drawing

    vaes = []
    real = drawing.drawing_vae

    def load(*args: Any) -> Any:
        vae = real(*args)
        vaes.append(weakref.ref(vae))
        return vae

    monkeypatch.setattr(drawing, "drawing_vae", load)
    asked = config(folder, num_images=2, images_every=2, max_steps=4)
    train(asked, ALONE)
    gc.collect()
    names = sorted(path.name for path in (asked.output_dir / "images").iterdir())
    assert names == ["step-00000002", "step-00000002.json", "step-00000002.png", "step-00000004"]
    assert (asked.output_dir / "images.png").exists()
    assert [vae() for vae in vaes] == [None] * 3  # it was tried after the first step


def test_the_model_card_names_data_encoders_and_configuration_and_its_example_loads_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bucketline.store import Store

    asked = config(folder, max_steps=1)
    summary = train(asked, ALONE)
    card = (asked.output_dir / "README.md").read_text(encoding="utf-8")
    manifest = Store.open(folder / "tiny.store").manifest
    for part in (manifest.digest, manifest.store_id, "| vae | latent_channels 2", "| learning_rate | 0.001 |", "| torch |"):
        assert part in card
    assert (summary.checkpoint / "README.md").read_text(encoding="utf-8") == card
    monkeypatch.chdir(summary.checkpoint)
    found: dict[str, Any] = {}
    exec(card.partition("```python\n")[2].partition("```")[0], found)
    assert found["model"].config.in_channels == 2


def test_without_held_out_samples_there_is_no_validation_and_a_word_about_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_training_store(folder / "all.store", {"train/128x128": 29})
    asked = config(folder, store=(folder / "all.store",), max_steps=2)
    summary = train(asked, ALONE)
    assert summary.validation is None
    assert "has no held-out samples" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_warming_up_before_the_first_step_leaves_a_run_as_it_would_have_been(folder: Path) -> None:
    """With torch.compile told to compile nothing, so that no compiler is needed."""
    from bucketline.train.config import Compile

    plain, warmed = (config(folder, output_dir=folder / name, compile=name, max_steps=3) for name in (Compile.OFF, Compile.ON))
    train(plain, ALONE)
    torch.compiler.set_stance("force_eager")
    try:
        train(warmed, ALONE)
    finally:
        torch.compiler.set_stance("default")
    assert losses(warmed.output_dir) == losses(plain.output_dir)
    assert [line["recompiles"] for line in read_metrics(warmed.output_dir) if "loss" in line] == [0]


def test_bf16_trains(folder: Path) -> None:
    from bucketline.train.config import Precision

    summary = train(config(folder, precision=Precision.BF16, max_steps=3), ALONE)
    assert summary.validation is not None
    assert 0 < summary.validation.loss < 2


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_collection_is_on_after_the_loop_if_it_was_before(is_on: bool) -> None:  # noqa: FBT001 - a parameter
    (gc.enable if is_on else gc.disable)()
    try:
        with rare_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
