"""Whole runs, in this process: one run that is looked at from all sides, and runs that end and go on like it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
import torch
import transformers
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch.distributed import DistError

from bucketline.errors import BucketlineError, StateError, TrainError, UsageError
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.store import Store
from bucketline.store.format.mixture_file import MixedStore, write_mixture
from bucketline.train import images, log, loss_curve
from bucketline.train import run as run_module
from bucketline.train import step as step_module
from bucketline.train.checkpoint import read_state
from bucketline.train.config import Compile, Precision, TrainConfig
from bucketline.train.log import read_metrics
from bucketline.train.loss_curve import draw_loss_curve
from bucketline.train.main import main
from bucketline.train.models import weights
from bucketline.train.parallel import TrainRanks
from bucketline.train.run import TrainSummary, rare_collection, train
from tests.kit import flip_bit, tree
from tests.unit.train.outputs.test_checkpoint import MOMENTS
from tests.unit.train.tiny_run import ALONE, add_to_store, as_arguments, config, losses, make_training_store, samples

if TYPE_CHECKING:
    from collections.abc import Callable

UNET = "unet/diffusion_pytorch_model.safetensors"
STEPS = 8


def asked_of(folder: Path, name: str = "run", **changes: Any) -> TrainConfig:
    """Return the options of the whole run, and of those that end as it did."""
    return config(folder, output_dir=folder / name, **{"max_steps": STEPS, "validate_every": 4, "save_every": "2", **changes})


def status(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output / "status.json").read_bytes())
    return found


def checkpoints(asked: TrainConfig) -> list[str]:
    return sorted(path.name.removeprefix("step-000000") for path in (asked.output_dir / "checkpoints").iterdir())


class Whole(NamedTuple):
    """A run that nothing has interrupted, and what it said and made."""

    folder: Path
    asked: TrainConfig
    summary: TrainSummary
    err: str
    curves: list[int]  # lines of each curve
    vaes: list[weakref.ref[Any]]


@pytest.fixture(scope="module")
def whole(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = shutil.copytree(ready, tmp_path_factory.mktemp("whole"), dirs_exist_ok=True)
    add_to_store(folder / "tiny.store", samples({"train/96x64": 1}))  # too few for a batch
    curves: list[int] = []
    vaes: list[weakref.ref[Any]] = []
    load_vae = images.drawing_vae

    def draw(lines: list[dict[str, Any]], path: Path) -> None:
        curves.append(len(lines))
        draw_loss_curve(lines, path)

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
        patched.setattr(loss_curve, "draw_loss_curve", draw)
        patched.setattr(log, "CURVE_EVERY_S", 0.0)
        patched.setattr(log, "CURVE_SHARE", 1e9)
        patched.setattr(images, "drawing_vae", load)
        patched.setattr(transformers.PreTrainedModel, "__init__", refuse)
        patched.setattr(gc, "unfreeze", lambda: None)
        asked = asked_of(folder, "whole", num_images=2, images_every=4)
        summary = train(asked, ALONE)
    gc.collect()
    return Whole(folder, asked, summary, (folder / "err").read_text(), curves, vaes)


def test_a_run_writes_windows_validations_status_checkpoints_a_curve_and_images(whole: Whole) -> None:
    output = whole.asked.output_dir
    lines = read_metrics(output)
    windows = [line for line in lines if "loss" in line]
    assert [(line["step"], line["samples"]) for line in windows] == [(2, 12), (5, 12), (7, 8)]
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 4, 8]
    for line in windows:
        assert {*cast("dict[str, int]", line["buckets"])} <= {"train/128x128", "train/192x128", "train/96x64"}
        assert {"loss", "samples_per_s", "data_wait_fraction", "lr", "grad_norm"} <= set(line)
    assert status(output) == {"state": "done", "step": STEPS, "reason": None}
    assert checkpoints(whole.asked) == ["06", "08"]
    assert whole.summary.checkpoint == output / "checkpoints" / "step-00000008"
    assert whole.err.count("warning: train/96x64 (1 image) fills a batch of ") == 1
    assert whole.curves == sorted(whole.curves)
    assert len(whole.curves) > 3
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
    for part in (manifest.digest, manifest.store_id, "| vae | latent_channels 2", "| learning_rate | 0.001 |", "| torch |"):
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
    assert checkpoints(asked) == ["02", "04.damaged", "05"]


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
    """A file of the run cannot be written."""
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
    """A disk is full."""

    def save(tensors: object, path: Path, **options: object) -> None:
        if "step-00000004" in str(path):
            raise OSError(28, "No space left on device")
        save_file(tensors, path, **options)  # type: ignore[arg-type]

    patched.setattr(weights, "save_file", save)
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
        pytest.param(stopped(4), {}, marks=pytest.mark.slow, id="stopped within a window"),
        pytest.param(stopped(3, 5), {}, id="stopped twice, at the edge of a window and within"),
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
    assert said.startswith(("already at step 8: nothing to train", "trained 8 steps\n"))
    assert losses(asked.output_dir) == losses(whole.asked.output_dir)
    first, second = (tree(one.output_dir / "checkpoints" / "step-00000008") for one in (asked, whole.asked))
    for name in (UNET, UNET.replace("unet", "unet_ema", 1)):
        assert first[name] == second[name]
    assert status(asked.output_dir)["state"] == "done"


# ---------------------------------------------------------------- one short run, and what is asked of it then


@pytest.fixture(scope="module")
def of_two_steps(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two stores, and a run of two steps on both, and one on the first."""
    folder = shutil.copytree(ready, tmp_path_factory.mktemp("two"), dirs_exist_ok=True)
    make_training_store(folder / "other.store", {"train/128x128": 5, "val/128x128": 2})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loss_curve, "draw_loss_curve", lambda _, path: path.write_bytes(b"\x89PNG"))
        patched.setattr(gc, "unfreeze", lambda: None)
        train(config(folder, max_steps=2, output_dir=folder / "one"), ALONE)
        train(config(folder, max_steps=2, output_dir=folder / "both", store=stores_of(folder)), ALONE)
    return folder


def stores_of(folder: Path, *repeats: int) -> tuple[Path, ...]:
    times = repeats or (1, 3)
    return tuple(Path(f"{folder / name}.store:{n}") for name, n in zip(("tiny", "other"), times, strict=False))


@pytest.mark.parametrize(
    ("run", "changes", "error", "message"),
    [
        ("one", {"resume": False}, UsageError, "already has a run"),
        ("none", {}, UsageError, r"there is no run in .*none; give the --output-dir of one, or leave out --resume"),
        ("one", {"max_steps": 1}, UsageError, r"--max-steps is 1.* already at step 2"),
        (
            "one",
            {"batch": BatchSize(batch_size=3)},
            UsageError,
            r"--batch 3 --accumulation 2 on 1 rank is 6 .* with --batch 2 ",
        ),
        ("one", {"optimizer": "muon"}, UsageError, "--optimizer is muon"),
        ("one", {"store": (1,)}, StateError, "name the --store of the run"),
        (
            "both",
            {"store": (0, 1), "repeats": (1, 1)},
            StateError,
            "3 times a pass; .* 1 times a pass; name the --store of the run",
        ),
        ("both", {"store": (1, 0)}, StateError, "name the --store of the run"),
        ("both", {"store": (0,)}, StateError, "was trained on 2 stores .* 1 are given"),
        ("one", {"learning_rate": 1e30, "log_every": 5, "max_steps": 20}, TrainError, r"step 3 .*bucket train/\d+x128.* nan"),
        (
            "new",
            {"learning_rate": 1e39, "clip_norm": None, "max_steps": 1, "resume": False},
            TrainError,
            "after step 0 the weights' norm is",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_and_leaves_the_checkpoints(
    of_two_steps: Path, tmp_path: Path, run: str, changes: dict[str, Any], error: type[BucketlineError], message: str
) -> None:
    if (of_two_steps / run).exists():
        shutil.copytree(of_two_steps / run, tmp_path / run)
    before, changes = tree(tmp_path), dict(changes)
    stores = stores_of(of_two_steps, *changes.pop("repeats", ()))
    given = tuple(stores[n] for n in changes.pop("store", (0, 1) if run == "both" else (0,)))
    asked = config(of_two_steps, output_dir=tmp_path / run, store=given, **{"max_steps": 4, "resume": True, **changes})
    with pytest.raises(error, match=message):
        train(asked, ALONE)
    if error is TrainError:
        assert status(asked.output_dir)["state"] == "failed"
        assert {name for name in tree(tmp_path) if "checkpoints" in name} == {name for name in before if "checkpoints" in name}
    else:
        assert tree(tmp_path) == before


def test_several_stores_are_a_data_set_or_named_each_and_recorded_with_generation_and_repeats(
    of_two_steps: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(of_two_steps, tmp_path / "f")
    both = folder / "both"
    shares = [Store.open(folder / f"{name}.store").manifest for name in ("tiny", "other")]
    wanted = [(one.store_id, one.generation, repeats) for one, repeats in zip(shares, (1, 3), strict=True)]
    found = read_state(both / "checkpoints" / "step-00000002").stores
    assert [(one.store_id, one.generation, one.repeats) for one in found] == wanted
    written = json.loads((both / "config.json").read_text(encoding="utf-8"))
    assert [(one["store_id"], one["generation"], one["repeats"]) for one in written["stores"]] == wanted
    (folder / "data").mkdir()
    for name in ("tiny.store", "other.store"):
        (folder / name).rename(folder / "data" / name)
    asked = config(folder, store=(folder / "data",), max_steps=2)
    for repeats in (3, 2):
        write_mixture(
            folder / "data", (MixedStore(name="tiny.store", repeats=1), MixedStore(name="other.store", repeats=repeats))
        )
        if repeats == 3:
            train(asked, ALONE)
            assert losses(asked.output_dir) == losses(both)
    with pytest.raises(StateError, match=r"3 times a pass; .* 2 times a pass; .* or continue with --new-plan"):
        train(replace(asked, max_steps=3, resume=True), ALONE)


def test_a_new_plan_takes_the_newest_generation_and_keeps_weights_and_optimizer(
    of_two_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(of_two_steps, tmp_path / "f")
    asked = config(folder, output_dir=folder / "one", max_steps=4, resume=True)
    add_to_store(folder / "tiny.store", samples({"train/128x128": 20}, "later/"))
    with pytest.raises(UsageError, match="--new-plan requires --resume"):
        replace(asked, new_plan=True, resume=False)
    summary = train(replace(asked, new_plan=True, batch=BatchSize(batch_size=3), accumulation=1), ALONE)
    assert " was planned on " in capsys.readouterr().err
    state = read_state(summary.checkpoint)
    assert ([one.generation for one in state.stores], state.loader["step"]) == ([2], 4)
    moments = load_file(summary.checkpoint / MOMENTS)
    assert {int(tensor) for name, tensor in moments.items() if name.endswith(".step")} == {4}


def test_a_resume_with_other_shares_of_the_same_global_batch_goes_on(of_two_steps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(of_two_steps, tmp_path / "f")
    one = config(folder, output_dir=folder / "one", max_steps=4, resume=True)
    other = replace(one, output_dir=folder / "other", batch=BatchSize(batch_size=4), accumulation=1)
    shutil.copytree(folder / "one", folder / "other")
    for asked in (one, other):
        train(asked, ALONE)
    for first, second in zip(*(read_metrics(asked.output_dir) for asked in (one, other)), strict=True):
        for name in {"loss", "val_loss"} & {*first}:
            assert first[name] == pytest.approx(second[name], rel=1e-5)


# ---------------------------------------------------------------- by itself


@pytest.mark.parametrize("former", [b'{"state": "done"}', b'{"state": "failed"}', b""])
def test_a_refused_resume_puts_the_former_status_back_and_a_crash_is_recorded(tmp_path: Path, former: bytes) -> None:
    asked, path = config(tmp_path, resume=True), tmp_path / "run" / "status.json"
    path.parent.mkdir()
    start = cast("Any", SimpleNamespace(checkpoint=Path("step-00000002"), steps_done=2))
    ranks = TrainRanks(rank=0, world_size=2)
    for error in (UsageError("no"), KeyboardInterrupt(), DistError("the other rank has gone"), MemoryError()):
        path.unlink(missing_ok=True)
        if former:
            path.write_bytes(former)
        with contextlib.closing(log.RunLock(asked.output_dir)) as lock:
            taken = run_module.take_folder(asked, lock, start)
        assert status(path.parent)["state"] == "running"
        raised = pytest.raises((type(error), TrainError))
        run = cast("Any", SimpleNamespace(config=asked, ranks=ranks, start=start, is_built=False, steps_done=2))
        with raised, run_module.failures_recorded(run, taken):
            raise error
        if isinstance(error, MemoryError):
            assert status(path.parent) == {"state": "failed", "step": 2, "reason": "MemoryError: "}
        else:
            assert (path.read_bytes() if path.exists() else b"") == former


def test_a_budget_of_pixels_gives_smaller_buckets_more_samples_and_bf16_trains_without_held_out_samples(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_training_store(folder / "all.store", {"train/128x128": 29, "train/192x128": 9})
    asked = config(folder, store=(folder / "all.store",), batch=f"{2 * 128 * 192}px", max_steps=4, precision=Precision.BF16)
    summary = train(asked, ALONE)
    assert summary.validation is None
    assert "has no held-out samples" in capsys.readouterr().err
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
