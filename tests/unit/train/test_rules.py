"""Each reason by which a run is refused: what it says, and that nothing is written."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file

from bucketline.errors import BucketlineError, LockedError, ModelError, StateError, TrainError, UsageError
from bucketline.loader import WeightedStore
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.store import Store
from bucketline.store.change.compact import collect
from bucketline.store.format.block import Column
from bucketline.store.format.schema import TextEntry, column_entries
from bucketline.store.format.text import TextSpec
from bucketline.store.write.publish import lock_store
from bucketline.torch_setup import set_up_torch
from bucketline.train import images
from bucketline.train.checkpoint import RunState, Start
from bucketline.train.config import Ema, LrSchedule, Objective, Precision, WeightDtype
from bucketline.train.images import draw_images
from bucketline.train.log import lock_folder, read_metrics
from bucketline.train.lowbit import recomputed
from bucketline.train.parallel import tensors_of, whole
from bucketline.train.run import resolve, set_up_device, start_processes, train
from bucketline.train.step import Training
from tests.kit import TEXT, flip_bit, rewrite_manifest, tree, untouched
from tests.unit.train.forked import fork_ranks
from tests.unit.train.test_parallel import sharded
from tests.unit.train.tiny_run import (
    ALONE,
    TEXT_ENCODER,
    VAE,
    add_to_store,
    built,
    config,
    facts,
    load,
    losses,
    make_training,
    make_training_store,
    samples,
    train_in_two_parts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks


@pytest.fixture(scope="module")
def begun(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, a model, another store, a run of two steps, and one of two stores."""
    folder = shutil.copytree(ready, tmp_path_factory.mktemp("begun"), dirs_exist_ok=True)
    make_training_store(folder / "other.store", {"train/128x128": 5, "val/128x128": 2})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gc.unfreeze", lambda: None)
        train(in_folder(folder, {**AGAIN, "resume": False, "max_steps": 2, "save_every": 1}), ALONE)
        train(in_folder(folder, {**BOTH, "resume": False, "max_steps": 1}), ALONE)
    return folder


def in_folder(folder: Path, options: dict[str, Any]) -> TrainConfig:
    given: dict[str, Any] = {"output_dir": "new", "max_steps": 4, **options}
    given |= {name: folder / given[name] for name in ("output_dir", "model") if name in given}
    if "store" in given:
        given["store"] = tuple(folder / one for one in given["store"])
    return config(folder, **given)


def with_manifest(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite_manifest(folder / "tiny.store", **changes)


def with_two_columns(folder: Path) -> None:
    spec = TextSpec(tokens=(*TEXT.tokens, Column(name="others", dtype="F16", shape=(3,))))
    entry = TextEntry(header_bytes=spec.header_bytes, tokens=column_entries(spec.tokens), fixed={})
    rewrite_manifest(folder / "tiny.store", text=entry)


def with_a_text_encoder(folder: Path) -> None:
    (folder / "model" / "text_encoder").mkdir()
    (folder / "model" / "text_encoder" / "config.json").write_text('{"hidden_size": 5}', encoding="ascii")
    text = {**TEXT_ENCODER, "config_hash": "0" * 32}
    rewrite_manifest(folder / "tiny.store", encoders={"vae": dict(VAE), "text_encoder": text})


def with_files(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            (folder / "new" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "new" / name).write_bytes(b"theirs")

    return write


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")


def without_digests(folder: Path) -> None:
    for path in (folder / "run" / "checkpoints").glob("*/digests.json"):
        path.unlink()


def without_its_generation(folder: Path) -> None:
    add_to_store(folder / "tiny.store", samples({"train/128x128": 20}, "later/"))
    with lock_store(folder / "tiny.store"):
        collect(folder / "tiny.store", older_than_s=0.0)


class Case(NamedTuple):
    """What is said of options and of a folder that was changed; of a new run unless it is resumed."""

    message: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    change: Callable[[Path], object] = lambda _: None
    error: type[BucketlineError] = UsageError


AGAIN: dict[str, Any] = {"resume": True, "output_dir": "run", "accumulation": 1, "batch_size": "49152px"}
BOTH: dict[str, Any] = {"resume": True, "output_dir": "both", "store": ("tiny.store:1", "other.store:3")}
STEP = r"\S+/run/checkpoints/step-00000002"
WITHOUT_CHANNELS = {"vae": {"scaling_factor": 0.5}, "text_encoder": dict(TEXT_ENCODER)}
WITH_A_MEAN = {"vae": {**VAE, "latents_mean": [0.0, 1.0]}, "text_encoder": dict(TEXT_ENCODER)}
ANOTHER_VAE = {"vae": {**VAE, "weights_hash": "0" * 32}, "text_encoder": dict(TEXT_ENCODER)}
CASES = (
    # the folder
    Case("there is no run in .*/new to resume; give the --output-dir of a run", {"resume": True}),
    Case("tiny.store overlap; choose a separate folder", {"output_dir": "tiny.store/shards/.."}),
    Case("overlap", {"output_dir": "link/run"}, lambda folder: (folder / "link").symlink_to(folder / "tiny.store")),
    Case("overlap", {"output_dir": "."}),
    Case(r"other\.store overlap", {"output_dir": "other.store/run", "store": ("tiny.store", "other.store:2")}),
    Case("config.json cannot be made: File exists", {"output_dir": "model/unet/config.json"}),
    Case("'a.jpg'.* not a run of this trainer", change=with_files("a.jpg", "a.log")),
    Case("'config.json'.* not a run of this trainer", change=with_files("config.json")),
    Case("already has a run; continue it with --resume, or choose another", {"output_dir": "run"}),
    Case("already has a run", {"output_dir": "run"}, without_checkpoints),
    Case("run cannot be resumed: there is no checkpoint yet: start over in another", AGAIN, without_checkpoints),
    Case("has no complete checkpoint to resume; start over", AGAIN, without_digests, TrainError),
    # a resume
    Case(f"--max-steps is 1, and {STEP} is already at step 2; give more", {**AGAIN, "max_steps": 1}),
    Case(f"--seed is 9, and {STEP} was trained with 0; use --seed 0, or start a new run", {**AGAIN, "seed": 9}),
    Case(f"--optimizer is muon, and {STEP} was trained with adamw", {**AGAIN, "optimizer": "muon"}),
    Case("--lora-rank is 2, .* was trained with None; leave out --lora-rank", {**AGAIN, "lora_rank": 2}),
    Case("global_batch was .* and is .* now; .*--new-plan", {**AGAIN, "batch_size": "32768px"}, error=StateError),
    Case("global_batch was .* and is .* now", {**AGAIN, "accumulation": 2}, error=StateError),
    Case("store_id was .*--new-plan", {**AGAIN, "store": ("other.store",)}, error=BucketlineError),
    Case("repeats was 1 .* is 2 now", {**AGAIN, "store": ("tiny.store:2",)}, error=StateError),
    Case("stores.count was 1 .* is 2 now", {**AGAIN, "store": ("tiny.store", "other.store")}, error=StateError),
    Case("repeats was 3 .* is 1 now", {**BOTH, "store": ("tiny.store", "other.store")}, error=StateError),
    Case("store_id was", {**BOTH, "store": ("other.store:3", "tiny.store:1")}, error=StateError),
    Case("no generation 1 any more.* --resume --new-plan", AGAIN, without_its_generation, StateError),
    # stores and model
    Case(r"no number encoders\.vae\.latent_channels", {}, with_manifest(encoders=WITHOUT_CHANNELS), ModelError),
    Case(r"shift_factor 0\.25, expected none", {}, with_manifest(encoders=WITH_A_MEAN), ModelError),
    Case(r"text\.tokens others, tokens, expected one column", {}, with_two_columns, ModelError),
    Case(r"flip is 0\.5, .* has no latent_flipped", {"flip": 0.5}),
    Case("is min-snr:5, .* is flow; use cosmap", {"objective": Objective.FLOW, "loss_weight": "min-snr:5"}),
    Case("is cosmap, .* is epsilon; use min-snr", {"loss_weight": "cosmap"}),
    Case("is 0.1, and the objective is a flow", {"objective": Objective.FLOW, "noise_offset": 0.1}),
    Case(r"--shift is 2\.0, .* or use --objective flow", {"shift": 2.0}),
    Case("no.store is not a store", {"store": ("no.store",)}, error=BucketlineError),
    Case("are the same store", {"store": ("tiny.store", "tiny.store")}, error=BucketlineError),
    Case("a.store@0.5:3, expected its repeats once, and its weight once", {"store": ("a.store@0.5:3",)}),
    Case("has neither unet/config.json nor transformer/config.json", {"model": "other.store"}, error=ModelError),
    Case("is not the text encoder .* has 0{32}; ", {}, with_a_text_encoder, ModelError),
    Case("model/vae is not the VAE .*: its weights_hash", {}, with_manifest(encoders=ANOTHER_VAE), ModelError),
    Case("--optimizer is adamw, which cannot round .* choose adamw-8bit", {"weights": WeightDtype.BF16}),
    Case("no step", {"epochs": 1e-6, "max_steps": None}, error=BucketlineError),
    Case(r"no service can be reached at .*none\.sock", {"service": "/none.sock"}, error=BucketlineError),
    Case("--track-with is aim, expected one of .*aim.*, whose package is installed", {"track_with": ("aim",)}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message[:40])
def test_a_run_is_refused_and_nothing_is_written(case: Case, begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    case.change(folder)
    asked, before = in_folder(folder, case.options), tree(folder)
    with pytest.raises(case.error, match=case.message):
        train(asked, ALONE)
    changed = {name for name, data in tree(folder).items() if before.get(name) != data}
    assert {name.removeprefix("new/") for name in changed if not name.endswith(".lock")} <= {"", "status.json"}


def test_a_resume_that_breaks_no_rule_continues(begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    same = in_folder(folder, AGAIN)
    assert train(dataclasses.replace(same, max_steps=3), ALONE).steps_done == 3
    without_its_generation(folder)
    new = dataclasses.replace(same, batch_size=BatchSize(batch_size=2), new_plan=True, seed=9)
    assert train(new, ALONE).steps_done == 4


def test_a_damaged_checkpoint_refuses_nothing_that_the_one_before_it_allows(begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    weights = folder / "run" / "checkpoints" / "step-00000002" / "unet" / "diffusion_pytorch_model.safetensors"
    flip_bit(weights, weights.stat().st_size - 1)
    assert train(in_folder(folder, {**AGAIN, "max_steps": 1}), ALONE).steps_done == 1


def test_a_folder_that_has_only_logs_is_taken_and_freed_at_the_end_and_no_other_run_writes_to_it(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    asked.output_dir.mkdir()
    for name in ("train.log", "slurm-17.out", ".gitignore"):
        (asked.output_dir / name).touch()
    for again in (asked, dataclasses.replace(asked, max_steps=2, resume=True)):
        release = lock_folder(asked.output_dir)
        with (
            untouched(asked.output_dir),
            pytest.raises(LockedError, match=r"is being trained by process \d+ on .* or choose another"),
        ):
            train(again, ALONE)
        release()
        assert train(again, ALONE).steps_done == again.max_steps


# What a run decides before its first step: the precision, the dtype of the weights, what it tells of that.


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def start(precision: str | None) -> Start:
    if precision is None:
        return Start(checkpoint=None, state=None)
    fields: dict[str, Any] = dict.fromkeys(RunState.__dataclass_fields__)
    return Start(checkpoint=None, state=RunState(**{**fields, "steps_done": 0, "config": {"precision": precision}}))


@pytest.mark.parametrize(
    ("device", "has_bf16", "before", "meant"),
    [
        (CPU, True, None, Precision.FP32),
        (CUDA, True, None, Precision.BF16),
        (CUDA, False, None, Precision.FP32),
        (CUDA, True, "fp32", Precision.FP32),
        (CPU, True, "bf16", Precision.BF16),
    ],
)
def test_auto_is_the_resumed_runs_or_bf16_where_a_gpu_has_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    has_bf16: object,
    before: str | None,
    meant: Precision,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: has_bf16 or including_emulation)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert resolve(config(tmp_path), start(before), cast("Any", None), device).precision is meant


@pytest.mark.parametrize(
    ("device", "precision", "is_tf32"),
    [(CPU, Precision.FP32, False), (CPU, Precision.BF16, False), (CUDA, Precision.FP32, True), (CUDA, Precision.BF16, False)],
)
def test_a_gpu_searches_for_its_fastest_convolutions_and_uses_tf32_for_fp32_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: torch.device,
    precision: Precision,
    is_tf32: object,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with caplog.at_level(logging.WARNING):
        set_up_device(config(tmp_path, precision=precision), device)
    assert torch.backends.cudnn.benchmark is (device == CUDA)
    assert (asked, "TF32" in caplog.text) == (["high"] if is_tf32 else [], is_tf32)


def test_a_resume_keeps_the_precision_of_its_run_without_a_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = config(folder, output_dir=folder / "whole", max_steps=4, precision=Precision.BF16)
    train(whole, ALONE)
    parts = dataclasses.replace(whole, output_dir=folder / "parts", max_steps=2)
    train(parts, ALONE)
    capsys.readouterr()
    train(dataclasses.replace(parts, max_steps=4, resume=True, precision=Precision.AUTO), ALONE)
    assert "warning" not in capsys.readouterr().err
    assert losses(whole.output_dir) == losses(parts.output_dir)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"precision": Precision.BF16, "lora_rank": 2}, torch.bfloat16),
        ({"precision": Precision.BF16}, torch.float32),
        ({"precision": Precision.FP32, "lora_rank": 2}, torch.float32),
    ],
)
def test_only_the_frozen_base_of_adapters_is_read_in_16_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], wanted: torch.dtype
) -> None:
    """No rank holds a base in 32 bits, not even for a moment; what is read has the bits of a cast."""
    _, random = load(folder / "model", facts(), 0)
    random.save_pretrained(folder / "model" / "unet")  # type: ignore[operator]
    asked: list[object] = []
    plain = UNet2DConditionModel.from_pretrained

    def noting(*given: Any, torch_dtype: torch.dtype, **named: Any) -> Any:
        asked.append(torch_dtype)
        return plain(*given, torch_dtype=torch_dtype, **named)

    monkeypatch.setattr(UNet2DConditionModel, "from_pretrained", noting)
    run = built(config(folder, **changes))
    assert asked == [wanted]
    assert torch.equal(run.training.model.state_dict()["conv_in.bias"], random.state_dict()["conv_in.bias"].to(wanted))
    assert {parameter.dtype for parameter in run.training.model.parameters() if parameter.requires_grad} == {torch.float32}


def test_a_run_computes_no_attention_by_cudnn(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    start_processes(config(tmp_path))
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_a_run_tells_once_what_it_chooses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(folder, max_steps=1, lora_rank=2, learning_rate=None)
    train(asked, ALONE)
    said = " ".join(capsys.readouterr().err.split())
    assert "defaults: precision fp32, optimizer adamw, learning rate 0.0001, ema 0.9999:device, objective epsilon (from" in said
    train(dataclasses.replace(asked, max_steps=2, resume=True), ALONE)
    said = capsys.readouterr().err
    assert re.match(r"resumed \S+/run at step 1 of 2, epoch 1; 1 checkpoint\n", said)
    assert "defaults" not in said
    assert "validation:" not in said


# Choices of a run: each resumed to the bit, and what it leaves.


CHOICES: dict[str, dict[str, Any]] = {
    "no average, a cosine, a flow's weights": {
        "ema": "off",
        "lr_schedule": "cosine:0.1@5",
        "objective": Objective.FLOW,
        "loss_weight": "cosmap",
        "timesteps": "logit-normal",
    },
    "an average on the cpu, wsd, min-SNR and timesteps by mode": {
        "ema": "0.9999:cpu:2",
        "lr_schedule": "wsd:3:0.1@5",
        "loss_weight": "min-snr:5",
        "timesteps": "mode",
        "timestep_range": "0:0.9",
    },
    "an average every few steps, a cosine": {"ema": "0.9999:2", "lr_schedule": "cosine@6"},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_in_two_parts_equals_one_to_the_bit(folder: Path, choice: str) -> None:
    whole = config(folder, output_dir=folder / "whole", max_steps=6, accumulation=1, **CHOICES[choice])
    parts = train_in_two_parts(whole, 3)
    last = "checkpoints/step-00000006"
    for file in (whole.output_dir / last).glob("*/*.safetensors"):
        other = load_file(parts / last / file.parent.name / file.name)
        assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(file).items())


def test_a_resume_keeps_the_horizon_of_the_run_that_it_continues(folder: Path) -> None:
    first = config(folder, max_steps=4, log_every=1, warmup_steps=1, lr_schedule="linear")
    train(first, ALONE)
    longer = dataclasses.replace(first, max_steps=6, resume=True)
    with pytest.raises(UsageError, match=r"rate is 0 from step 4 on: .* linear@6, or a floor above 0"):
        train(longer, ALONE)
    train(dataclasses.replace(longer, lr_schedule=LrSchedule.parse("linear:0.5", "it")), ALONE)
    rates = [float(str(line["lr"])) for line in read_metrics(folder / "run") if "lr" in line]
    assert rates == pytest.approx([1e-3, 1e-3, 2e-3 / 3, 1e-3 / 3, 5e-4, 5e-4])


def folders_of(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.iterdir() if path.is_dir())


def test_without_an_average_no_folder_of_one_is_written_and_a_resume_may_begin_one(folder: Path) -> None:
    plain = config(folder, max_steps=2, ema=Ema())
    summary = train(plain, ALONE)
    assert folders_of(summary.checkpoint) == ["optimizer", "scheduler", "unet"]
    assert "unet_ema" not in (summary.checkpoint / "README.md").read_text(encoding="utf-8")
    summary = train(dataclasses.replace(plain, max_steps=3, resume=True, ema=Ema(decay=0.9999)), ALONE)
    assert folders_of(summary.checkpoint) == ["optimizer", "scheduler", "unet", "unet_ema"]
    summary = train(dataclasses.replace(plain, max_steps=4, resume=True), ALONE)
    assert folders_of(summary.checkpoint) == ["optimizer", "scheduler", "unet"]


@pytest.mark.parametrize("own", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "x:1"}])
def test_torchs_allocators_are_set_up_unless_the_user_has(own: dict[str, str]) -> None:
    for version, more in (("2.11.0", ""), ("2.13.0+cu130", ",pinned_max_round_threshold_mb:1")):
        environment = dict(own)
        set_up_torch(environment, version)
        assert environment == (own or {"PYTORCH_ALLOC_CONF": f"expandable_segments:True{more}"})


def test_the_installed_torch_knows_what_it_is_told() -> None:
    """Its parser takes any setting without a GPU, and refuses what it does not know with one; so look for the names."""
    environment: dict[str, str] = {}
    set_up_torch(environment, torch.__version__)
    library = (Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes()
    for setting in environment["PYTORCH_ALLOC_CONF"].split(","):
        assert setting.partition(":")[0].encode() in library


def test_recomputing_saves_no_generators_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be read from the device for each block and step."""
    run = built(config(folder, recompute=1.0))
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in run.training.model.modules()]
    assert {function for function in functions if function} == {recomputed}

    def refused() -> torch.Tensor:
        raise AssertionError("a state was read")

    monkeypatch.setattr(torch, "get_rng_state", refused)
    block, inputs = torch.nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    result = recomputed(block, inputs)
    result.sum().backward()
    assert torch.equal(result, block(inputs))


# A device without room for images: said after the first step, and a run whose model is not sharded is done without them.


def no_room(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")


@pytest.mark.parametrize("what", ["_decode", pytest.param("draw_latents", marks=pytest.mark.slow)])
def test_a_run_without_room_for_images_is_done_without_them(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = config(folder, output_dir=folder / "plain", num_images=2, max_steps=4)
    train(plain, ALONE)
    monkeypatch.setattr(images, what, no_room)
    asked = config(folder, num_images=2, max_steps=4)
    summary = train(asked, ALONE)
    assert [path.name for path in summary.images] == ["loss.png"]
    assert json.loads((asked.output_dir / "status.json").read_bytes())["state"] == "done"
    assert capsys.readouterr().err.count("no images: out of memory while drawing (CUDA out of memory)") == 1
    assert losses(asked.output_dir) == losses(plain.output_dir)


def test_after_the_first_step_of_a_run_images_are_tried_in_two_steps_of_the_sampler(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    real = images.draw_latents

    def noting(training: Training, *args: object) -> object:
        tried.append(training.config.image_steps)
        return real(training, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(images, "draw_latents", noting)
    asked = config(folder, num_images=1, image_steps=3, max_steps=3)
    summary = train(asked, ALONE)
    assert tried == [2, 3]
    assert [path.name for path in summary.images] == ["loss.png", "images.png"]
    assert [path.name for path in (asked.output_dir / "images").iterdir()] == ["step-00000003"]


def test_images_that_do_not_fit_whole_are_decoded_in_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AutoencoderKL.decode

    def only_tiles(vae: AutoencoderKL, *args: object, **options: object) -> object:
        if not vae.use_tiling:
            no_room()
        return real(vae, *args, **options)

    monkeypatch.setattr(AutoencoderKL, "decode", only_tiles)
    summary = train(config(folder, num_images=2, max_steps=1), ALONE)
    assert [path.name for path in summary.images] == ["loss.png", "images.png"]


def test_a_sharded_model_is_drawn_with_by_all_ranks_and_one_that_lacks_memory_ends_the_others(folder: Path) -> None:
    asked = config(folder, num_images=2, image_guidance=1.0)

    def training_of(ranks: TrainRanks) -> Training:
        training = make_training(folder, loaded=sharded(folder / "model", ranks), is_bf16=True)
        for parameter in training.model.parameters():
            parameter.data.mul_(1.5)
        return dataclasses.replace(training, config=asked)

    def body(ranks: TrainRanks) -> None:
        signal.alarm(100)
        training = training_of(ranks)
        before = {name: whole(tensor).clone() for name, tensor in tensors_of(training.model).items()}
        shares = [WeightedStore(store=Store.open(path)) for path in asked.store]

        def drawn() -> bool:
            sheet = folder / "images.png"
            return draw_images(training, shares, (), sheet, steps_done=2, keeps=ranks.is_main)

        assert drawn() is ranks.is_main
        assert all(torch.equal(whole(tensor), before[name]) for name, tensor in tensors_of(training.model).items())
        if ranks.is_main:
            with pytest.raises(RuntimeError, match="gloo"):
                drawn()
            return
        with (
            mock.patch.object(images, "draw_latents", no_room),
            pytest.raises(TrainError, match="with --num-images 0") as told,
        ):
            drawn()
        assert "there is no checkpoint yet" in str(told.value)

    fork_ranks(folder, body)
