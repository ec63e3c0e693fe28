"""Whole runs, in this process: one run that is looked at from all sides, and runs that end and are continued like it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
import torch
import transformers
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file

from bucketline.errors import LockedError, NoLocksError, TrainError, UsageError
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.loader.plan.plan import make_plan
from bucketline.loader.seen import read_run
from bucketline.store import Store
from bucketline.store.format.manifest import MixedStore, write_mixture
from bucketline.train import checkpoint, images, log, memory
from bucketline.train import run as run_module
from bucketline.train import step as step_module
from bucketline.train.checkpoint import read_state
from bucketline.train.config import Compile, LrSchedule, Precision, TrainConfig
from bucketline.train.log import read_metrics
from bucketline.train.main import main
from bucketline.train.run import TrainSummary, rare_collection, train
from bucketline.train.step import train_step
from tests.kit import flip_bit, tree
from tests.unit.train.outputs.test_checkpoint import MOMENTS
from tests.unit.train.tiny_run import ALONE, add_to_store, as_arguments, config, losses, make_training_store, samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


UNET = "unet/diffusion_pytorch_model.safetensors"
STEPS = 8


def asked_of(folder: Path, name: str = "run", **changes: Any) -> TrainConfig:
    return config(folder, output_dir=folder / name, **{"max_steps": STEPS, "validate_every": 4, "save_every": 2, **changes})


def status(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output / "status.json").read_bytes())
    return found


def checkpoints(asked: TrainConfig) -> list[str]:
    return sorted(path.name.removeprefix("step-000000") for path in (asked.output_dir / "checkpoints").glob("*"))


class Whole(NamedTuple):
    """A run that nothing has interrupted, and what it said and made."""

    folder: Path
    asked: TrainConfig
    summary: TrainSummary
    err: str
    vaes: list[weakref.ref[Any]]


@pytest.fixture(scope="module")
def whole(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = shutil.copytree(ready, tmp_path_factory.mktemp("whole"), dirs_exist_ok=True)
    add_to_store(folder / "tiny.store", samples({"train/96x64": 1}))  # too few for a batch
    vaes: list[weakref.ref[Any]] = []
    load_vae = images.drawing_vae

    def load(*args: Any) -> Any:
        vae = load_vae(*args)
        vaes.append(weakref.ref(vae))
        return vae

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a text encoder was built")

    with (
        (folder / "err").open("w+") as said,
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stderr(said),
    ):
        patched.setattr(images, "drawing_vae", load)
        patched.setattr(transformers.PreTrainedModel, "__init__", refuse)
        patched.setattr(gc, "unfreeze", lambda: None)
        asked = asked_of(folder, "whole", num_images=2, images_every=4)
        summary = train(asked, ALONE)
    gc.collect()
    return Whole(folder, asked, summary, (folder / "err").read_text(), vaes)


def test_a_run_writes_windows_validations_status_checkpoints_a_curve_and_images(whole: Whole) -> None:
    output = whole.asked.output_dir
    lines = read_metrics(output)
    windows = [line for line in lines if "loss" in line]
    assert [(line["step"], line["samples"]) for line in windows] == [(step, 4) for step in range(STEPS)]
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 4, 8]
    for line in windows:
        assert {*cast("dict[str, int]", line["buckets"])} <= {"train/128x128", "train/192x128", "train/96x64"}
        assert {"loss", "samples_per_s", "data_wait_fraction", "lr", "grad_norm"} <= set(line)
    assert status(output) == {"state": "done", "step": STEPS, "reason": None}
    assert checkpoints(whole.asked) == ["06", "08"]
    assert whole.summary.checkpoint == output / "checkpoints" / "step-00000008"
    assert whole.err.count("warning: train/96x64 has 1 image, and batches take ") == 1
    assert "training: 8 steps, 1.52 epochs of 21 samples in 3 buckets\nvalidation: 8 of 29 samples, held out by " in whole.err
    assert not [*output.glob("*.tmp")]
    assert [path.name for path in whole.summary.images] == ["loss.png", "images.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in whole.summary.images)
    drawn = sorted(path.name for path in (output / "images").iterdir())
    assert drawn == ["step-00000004", "step-00000004.json", "step-00000004.png", "step-00000008"]
    assert [vae() for vae in whole.vaes] == [None] * 3, "tried after the first step, and gone after each"


def test_the_card_names_data_and_configuration_and_its_example_loads_the_model(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("unet", "unet_ema"):
        assert UNet2DConditionModel.from_pretrained(whole.summary.checkpoint / name).config.in_channels == 2
    card = (whole.asked.output_dir / "README.md").read_text(encoding="utf-8")
    manifest = Store.open(whole.folder / "tiny.store").manifest
    for part in (manifest.digest, manifest.store_id, '"latent_channels": 2', '"learning_rate": 0.001', '"torch": "'):
        assert part in card
    assert (whole.summary.checkpoint / "README.md").read_text(encoding="utf-8") == card
    monkeypatch.chdir(whole.summary.checkpoint)
    found: dict[str, Any] = {}
    exec(card.partition("```python\n")[2].partition("```")[0], found)
    assert found["model"].config.in_channels == 2


# ---------------------------------------------------------------- ended somehow, and resumed


def stopped(*ends: int) -> Callable[[TrainConfig, pytest.MonkeyPatch], None]:
    def run(asked: TrainConfig, _: pytest.MonkeyPatch) -> None:
        for number, max_steps in enumerate(ends):
            train(replace(asked, max_steps=max_steps, resume=number > 0), ALONE)

    return run


def left_behind(asked: TrainConfig, _: pytest.MonkeyPatch) -> None:
    """Lines behind the checkpoint, as a crash leaves them."""
    train(replace(asked, max_steps=4), ALONE)
    with (asked.output_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 9.0}\n{"step": 8, "lo')


def damaged(asked: TrainConfig, _: pytest.MonkeyPatch) -> None:
    """The newest checkpoint is damaged: it is set aside, and pushes out no good one."""
    train(replace(asked, max_steps=4), ALONE)
    flip_bit(asked.output_dir / "checkpoints" / "step-00000004" / UNET, 80_000)
    train(replace(asked, max_steps=5, resume=True, save_every=None), ALONE)
    (aside,) = (name for name in checkpoints(asked) if "damaged" in name)
    assert checkpoints(asked) == ["02", aside, "05"]


def crashed(asked: TrainConfig, patched: pytest.MonkeyPatch) -> None:
    """At steps, the first one while a checkpoint is written."""
    real, crashes = step_module.train_step, [7, 5, 2]

    def step_or_crash(*args: object) -> object:
        if args[2] == crashes[-1]:
            raise SystemError("the machine is gone")
        return real(*args)  # type: ignore[arg-type]

    patched.setattr(run_module, "train_step", step_or_crash)
    for resume in (False, True, True):
        with pytest.raises(SystemError, match="the machine is gone"):
            train(replace(asked, resume=resume), ALONE)
        crashes.pop()
        crashes = crashes or [-1]


def blocked(asked: TrainConfig, patched: pytest.MonkeyPatch) -> None:
    real, in_the_way = log.write_config, asked.output_dir / "README.md"

    def block(*given: object) -> None:
        real(*given)  # type: ignore[arg-type]
        in_the_way.mkdir()

    patched.setattr(run_module, "write_config", block)
    with pytest.raises(TrainError, match=r"README.md.* cannot be read or written: Is a directory; .* continue with --resume"):
        train(asked, ALONE)
    assert status(asked.output_dir) | {"reason": None} == {"state": "failed", "step": STEPS, "reason": None}
    in_the_way.rmdir()


def full(asked: TrainConfig, patched: pytest.MonkeyPatch) -> None:
    def save(tensors: object, path: Path, **options: object) -> None:
        if "step-00000004" in str(path):
            raise OSError(28, "No space left on device")
        save_file(tensors, path, **options)  # type: ignore[arg-type]

    patched.setattr(checkpoint, "save_file", save)
    with pytest.raises(TrainError, match=r"step-00000004 cannot be written: .*No space left.*continue with --resume"):
        train(asked, ALONE)
    assert status(asked.output_dir)["state"] == "failed"
    assert checkpoints(asked) == ["02"]


def signalled(asked: TrainConfig, patched: pytest.MonkeyPatch) -> None:
    real = step_module.train_step

    def step_and_signal(*args: object) -> object:
        if args[2] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)  # type: ignore[arg-type]

    patched.setattr(run_module, "train_step", step_and_signal)
    with pytest.raises(SystemExit) as end:
        main(as_arguments(asked))
    assert end.value.code == 128 + signal.SIGTERM, "what a shell's && takes for the end of training"
    assert status(asked.output_dir) == {"state": "stopped", "step": 4, "reason": "SIGTERM"}


def grown(asked: TrainConfig, _: pytest.MonkeyPatch) -> None:
    """Another generation of the store: a resume stays on the one that the run was planned on."""
    train(replace(asked, max_steps=3), ALONE)
    add_to_store(Path(asked.store[0]), samples({"train/128x128": 20}, "later/"))


@pytest.mark.parametrize(
    ("ending", "changes"),
    [
        pytest.param(stopped(3, 5), {}, id="stopped twice"),
        pytest.param(stopped(8), {}, id="at its last step"),
        *((one, {}) for one in (left_behind, damaged, blocked, full, signalled, grown)),
        pytest.param(crashed, {}, marks=pytest.mark.slow),
        pytest.param(stopped(4), {"service": "auto"}, id="read by a service"),
        pytest.param(stopped(4), {"threads": 2, "prefetch_bytes": 1 << 20, "verify": True}, id="read by threads"),
        pytest.param(stopped(4), {"compile": Compile.ON}, id="warmed up"),  # compiled to nothing
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_a_run_that_ends_and_goes_on_equals_the_whole_one_to_the_last_bit(
    whole: Whole, tmp_path: Path, ending: Callable[[TrainConfig, pytest.MonkeyPatch], None], changes: dict[str, Any]
) -> None:
    shutil.copytree(whole.folder / "tiny.store", tmp_path / "tiny.store")
    shutil.copytree(whole.folder / "model", tmp_path / "model")
    asked = asked_of(tmp_path, **changes)
    torch.compiler.set_stance("force_eager")
    try:
        with pytest.MonkeyPatch.context() as patched:
            ending(asked, patched)
        said = str(train(replace(asked, resume=True), ALONE))
    finally:
        torch.compiler.set_stance("default")
    assert re.match(r"trained \d steps?, to step 8\n|\S+/run has finished: step 8 of 8; raise --max-steps", said)
    assert losses(asked.output_dir) == losses(whole.asked.output_dir)
    first, second = (tree(one.output_dir / "checkpoints" / "step-00000008") for one in (asked, whole.asked))
    for name in (UNET, UNET.replace("unet", "unet_ema", 1)):
        assert first[name] == second[name]
    assert status(asked.output_dir)["state"] == "done"


# ---------------------------------------------------------------- how a run ends, and what it says then


@pytest.mark.parametrize(("save_every", "made"), [(3, [3, 6, 7]), (None, [7])])
def test_a_checkpoint_is_made_every_so_many_steps_and_at_the_end(folder: Path, save_every: int | None, made: list[int]) -> None:
    asked = config(folder, keep=9, save_every=save_every)
    train(asked, ALONE)
    assert [int(name) for name in checkpoints(asked)] == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1e30, "log_every": 5, "max_steps": 20}, r"step \d .*bucket train/\d+x128.* nan"),
        ({"learning_rate": 1e30, "log_every": 50, "max_steps": 20}, r"step \d .*bucket train/\d+x128.* nan"),
        ({"learning_rate": 1e39, "clip_norm": None, "max_steps": 3}, r"after step \d the weights' norm is"),
    ],
)
def test_a_run_whose_numbers_are_not_finite_is_told_to_resume_if_it_can(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    asked = config(folder, **changes)
    with pytest.raises(TrainError, match=f"{message}.*; there is no checkpoint yet: .*, with a lower --learning-rate") as ended:
        train(asked, ALONE)
    assert "--resume" not in str(ended.value)
    assert (status(asked.output_dir)["state"], checkpoints(asked)) == ("failed", [])
    has_steps = any("loss" in line for line in read_metrics(asked.output_dir))
    assert ("start over in another --output-dir" in str(ended.value)) is has_steps is (asked.log_every < 50)
    with pytest.raises(UsageError, match="already has a run") if has_steps else contextlib.nullcontext():
        train(replace(asked, learning_rate=1e-3, max_steps=1), ALONE)
    first = config(folder, output_dir=folder / "first", max_steps=2)
    train(first, ALONE)
    with pytest.raises(TrainError, match=f"{message}.*: continue with --resume, with a lower --learning-rate"):
        train(replace(asked, output_dir=first.output_dir, resume=True), ALONE)
    assert checkpoints(first) == ["02"]


@pytest.mark.parametrize(("module", "at"), [(memory, "build_training"), (run_module, "train_step")])
def test_the_folder_of_a_run_that_made_no_step_is_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, at: str
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    asked = config(folder, max_steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(module, at, fail)
        with pytest.raises(MemoryError):
            train(replace(asked, seed=3), ALONE)
    assert (asked.output_dir / "metrics.jsonl").exists() is (at == "train_step")
    assert status(asked.output_dir) == {"state": "failed", "step": 0, "reason": "MemoryError()"}
    (asked.output_dir / "prompts").mkdir(exist_ok=True)
    train(asked, ALONE)
    plain = replace(asked, output_dir=folder / "plain")
    train(plain, ALONE)
    assert losses(asked.output_dir) == losses(plain.output_dir)


def test_a_run_holds_its_folder_while_it_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, held = config(folder, max_steps=1), []

    def step(*args: object) -> object:
        with pytest.raises(LockedError, match=f"is being trained by process {os.getpid()} on .*; wait, stop it, or choose"):
            train(replace(asked, resume=True), ALONE)
        held.append(args)
        return step_module.train_step(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", step)
    train(asked, ALONE)
    assert held


def test_a_file_system_without_locks_is_told_and_no_reason_to_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise NoLocksError("this file system has no advisory locks")

    monkeypatch.setattr(log, "FileLock", refuse)
    train(config(folder, max_steps=1), ALONE)
    assert "this file system has no advisory locks; nothing keeps another run from writing" in caplog.text


# ---------------------------------------------------------------- other stores


def test_several_stores_are_a_data_set_or_named_each_and_recorded_with_generation_and_repeats(folder: Path) -> None:
    make_training_store(folder / "other.store", {"train/128x128": 5, "val/128x128": 2})
    stores = tuple(Path(f"{folder}/{name}.store:{repeats}") for name, repeats in (("tiny", 1), ("other", 3)))
    both = config(folder, output_dir=folder / "both", store=stores, max_steps=2)
    manifests = [Store.open(folder / f"{name}.store").manifest for name in ("tiny", "other")]
    wanted = [(one.store_id, one.generation, repeats) for one, repeats in zip(manifests, (1, 3), strict=True)]
    state: Any = read_state(train(both, ALONE).checkpoint)
    written = json.loads((both.output_dir / "config.json").read_text(encoding="utf-8"))
    for found in (state.loader["stores"], written["stores"]):
        assert [(one["store_id"], one["generation"], one["repeats"]) for one in found] == wanted
    (folder / "data").mkdir()
    for name in ("tiny.store", "other.store"):
        (folder / name).rename(folder / "data" / name)
    write_mixture(folder / "data", (MixedStore(name="tiny.store", repeats=1), MixedStore(name="other.store", repeats=3)))
    asked = config(folder, store=(folder / "data",), max_steps=2)
    train(asked, ALONE)
    assert losses(asked.output_dir) == losses(both.output_dir)


def test_a_resume_may_divide_a_global_batch_otherwise_and_a_new_plan_takes_the_newest_generation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = config(folder, max_steps=2)
    train(one, ALONE)
    one = replace(one, max_steps=4, resume=True)
    other = replace(one, output_dir=folder / "other", batch_size=BatchSize(batch_size=4), accumulation=1)
    shutil.copytree(one.output_dir, other.output_dir)
    for asked in (one, other):
        train(asked, ALONE)
    for first, second in zip(*(read_metrics(asked.output_dir) for asked in (one, other)), strict=True):
        for name in {"loss", "val_loss"} & {*first}:
            assert first[name] == pytest.approx(second[name], rel=1e-5)
    add_to_store(folder / "tiny.store", samples({"train/128x128": 20}, "later/"))
    before = tree(one.output_dir)
    assert "/run has finished: step 4 of 4; raise --max-steps" in str(train(one, ALONE))
    assert tree(one.output_dir) == before, "nothing is drawn or written again"
    capsys.readouterr()
    drawn = train(replace(one, num_images=1), ALONE)
    assert "resumed" in capsys.readouterr().err, "an output that is new to it is made, on the generation of its plan"
    assert one.output_dir / "images.png" in drawn.images
    new = replace(one, new_plan=True, batch_size=BatchSize(batch_size=3), accumulation=1, max_steps=5)
    with pytest.raises(UsageError, match="--new-plan requires --resume"):
        replace(new, resume=False)
    summary = train(new, ALONE)
    assert "--new-plan: training continues from step 4 in a new order" in capsys.readouterr().err
    state: Any = read_state(summary.checkpoint)
    assert ([one["generation"] for one in state.loader["stores"]], state.loader["step"]) == ([2], 5)
    moments = load_file(summary.checkpoint / MOMENTS)
    assert {int(tensor) for name, tensor in moments.items() if name.endswith(".step")} == {5}


def test_a_budget_of_pixels_gives_smaller_buckets_more_samples_and_bf16_trains_without_held_out_samples(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_training_store(folder / "all.store", {"train/128x128": 29, "train/192x128": 9})
    asked = config(
        folder, store=(folder / "all.store",), batch_size=f"{2 * 128 * 192}px", max_steps=4, precision=Precision.BF16
    )
    summary = train(asked, ALONE)
    assert summary.validation is None
    assert "no validation: the store holds out none of 38 samples; pack one" in capsys.readouterr().err
    per_step = {"train/128x128": 3 * asked.accumulation, "train/192x128": 2 * asked.accumulation}
    for line in read_metrics(asked.output_dir):
        assert 0 < cast("float", line["loss"]) < 2
        buckets = cast("dict[str, int]", line["buckets"])
        assert line["samples"] == sum(per_step[name] * count for name, count in buckets.items())


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_collection_is_on_after_the_loop_if_it_was_before(is_on: bool) -> None:  # noqa: FBT001 - a parameter
    (gc.enable if is_on else gc.disable)()
    try:
        with rare_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is is_on
    finally:
        gc.enable()


# The trainer follows stores that grow: losses are those of any run with the same schedule.


MORE = {3: {"train/128x128": 6, "val/128x128": 1}, 8: {"train/128x192": 5, "train/192x128": 2}}  # by the step it is added at


def grows_while_it_is_trained_on(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish a generation at each step of `MORE`."""

    def step(*args: object) -> object:
        done = args[2]
        assert isinstance(done, int)
        if done in MORE:
            add_to_store(store, samples(MORE[done], f"{done}/"))
        return train_step(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", step)


def schedule(asked: TrainConfig) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.step, one.state.generations) for one in read_run(asked.output_dir).lines]


@pytest.mark.slow
def test_a_followed_run_that_is_stopped_and_resumed_has_the_losses_of_one_that_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(folder, folder.with_name("copied"))
    found = []
    for place, stops in ((folder, [16]), (copied, [7, 13, 16])):
        asked = replace(config(place, max_steps=16, log_every=1, validate_every=5, save_every=100), follow=True)
        with monkeypatch.context() as patch:
            grows_while_it_is_trained_on(place / "tiny.store", patch)
            for n, steps in enumerate(stops):
                train(replace(asked, max_steps=steps, resume=n > 0), ALONE)
        found.append((schedule(asked), [line for line in losses(asked.output_dir) if line[1] != "null"]))
    assert found[0] == found[1]
    (start, first), (second_at, second), (third_at, third) = found[0][0]
    assert (start, first, second, third) == (0, (1,), (2,), (3,))
    assert 3 < second_at < third_at < 16
    assert f"step {second_at}: now on generation 2, 26 samples per epoch" in capsys.readouterr().err


# The length of a run in epochs: as many steps as the plan has in them, recorded for a resume.


def in_epochs(folder: Path, epochs: float, **changes: Any) -> TrainConfig:
    return config(folder, max_steps=None, epochs=epochs, accumulation=1, lr_schedule="cosine", **changes)


def steps_of(asked: TrainConfig, epochs: int) -> int:
    return make_plan(Store.open(asked.store[0]), asked.for_loader(epochs=None)).steps_before(epochs)


def test_a_run_in_epochs_is_that_of_its_steps_and_a_resume_needs_no_length_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = in_epochs(folder, 1, output_dir=folder / "epoch")
    steps = steps_of(asked, 1)
    assert train(asked, ALONE).steps_done == steps == 9  # 6 batches of 13 rows, 3 of 7
    assert f"training: {steps} steps, 1 epoch of 20 samples in 2 buckets\n" in capsys.readouterr().err
    assert "has finished: step 9 of 9" in str(train(replace(asked, resume=True), ALONE))
    recorded = json.loads((asked.output_dir / "config.json").read_text(encoding="utf-8"))["config"]
    assert (recorded["max_steps"], recorded["epochs"], recorded["lr_schedule"]) == (steps, None, f"cosine@{steps}")
    plain = replace(asked, epochs=None, max_steps=steps, output_dir=folder / "steps")
    train(plain, ALONE)
    assert losses(plain.output_dir) == losses(asked.output_dir)
    longer = replace(asked, epochs=1.5, resume=True, lr_schedule=LrSchedule.parse("cosine@99", "it"))
    assert train(longer, ALONE).steps_done == steps + round((steps_of(asked, 2) - steps) / 2)
    with pytest.raises(UsageError, match=r"--epochs is 1: .* is 9, and .*step-000000\d\d is already at step 15; give more"):
        train(replace(longer, epochs=1), ALONE)


def test_epochs_of_several_plans_are_refused(folder: Path) -> None:
    asked = in_epochs(folder, 0.2)
    train(asked, ALONE)
    add_to_store(folder / "tiny.store", samples({"train/128x128": 2}, "more/"))
    with pytest.raises(UsageError, match="--epochs is 2, and the run has had several plans; give --max-steps"):
        train(replace(asked, epochs=2, resume=True, new_plan=True), ALONE)
