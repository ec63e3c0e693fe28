"""The trainer in several processes: the same losses on any number, signals, a rank that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from bucketline.loader.commands.batch_options import BatchSize
from bucketline.store import Store
from bucketline.train.config import Base, MemoryLimit, Precision, Sharding, WeightDtype
from bucketline.train.log import read_metrics
from bucketline.train.run import train
from tests.commands import ROOT, kept_port
from tests.forked_ranks import ForkedRanks
from tests.kit import flip_bit
from tests.leftovers import wait_until
from tests.serving import serving
from tests.unit.train.pair_runs import write_pairs
from tests.unit.train.tiny_run import (
    ALONE,
    PROMPTS,
    add_to_store,
    as_arguments,
    config,
    losses,
    make_training_store,
    samples,
    write_prompts,
    write_unet,
    write_vae,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.train.config import TrainConfig

    Run = Callable[[int, TrainConfig], str]

pytestmark = pytest.mark.slow

MAIN = ROOT / "train" / "main.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
FSDP = Sharding.FSDP


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_training_store(tmp_path / "tiny.store")
    write_vae(write_unet(tmp_path / "model"))
    return tmp_path


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with ForkedRanks() as started:
        yield started


@pytest.fixture
def run(ranks: ForkedRanks) -> Run:
    def to_the_end(processes: int, asked: TrainConfig) -> str:
        if processes == 1:
            return str(train(asked, ALONE))
        done = ranks.run(processes, as_arguments(asked)).done()
        return done.out

    return to_the_end


def status(asked: TrainConfig) -> dict[str, object]:
    found: dict[str, object] = json.loads((asked.output_dir / "status.json").read_bytes())
    return found


def assert_equal_within_floating_point(first: Path, second: Path, rel: float = 1e-5) -> None:
    lines = list(zip(read_metrics(first), read_metrics(second), strict=True))
    assert lines
    for one, two in lines:
        for name in ("step", "samples", "buckets"):
            assert one.get(name) == two.get(name)
        for name in ("lr", "loss", "grad_norm", "val_loss", "val_zero_loss"):
            assert (name in one) == (name in two)
            if name in one:
                assert one[name] == pytest.approx(two[name], rel=rel), (name, one["step"])


# Options of a run, and what two ranks have in addition. In shards, they are resumed half-way.
OPTIMIZER: dict[str, Any] = {"learning_rate": None, "warmup_steps": 2}
TRIED = {"memory": MemoryLimit(num_bytes=64 << 30)}  # they try a step first
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"max_steps": 8, "validate_every": 4}, {}),
    "adapters": ({"lora_rank": 2, "lora_alpha": 4.0, "lora_targets": "attention+mlp"}, {}),
    "a quantised base in host memory": ({"lora_rank": 2, "base": Base.FP8, "recompute": 1.0, "offload_blocks": 6}, {}),
    "choices": (
        {
            "store": ("tiny.store", "other.store@0.25"),
            "max_steps": 6,
            "lr_schedule": "wsd:3",
            "ema": "0.9999:cpu:2",
            "loss_weight": "min-snr:5",
            "timesteps": "mode",
            "timestep_range": "0.1:0.9",
        },
        {},
    ),
    "muon": ({"optimizer": "muon", **OPTIMIZER}, {"sharding": FSDP, **TRIED}),
    "prodigy": ({"optimizer": "prodigy", **OPTIMIZER}, TRIED),
    "adamw-8bit": ({"optimizer": "adamw-8bit", **OPTIMIZER}, TRIED),
    "bf16": ({"optimizer": "adamw-8bit", "weights": WeightDtype.BF16, "precision": Precision.BF16}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_rank_with_the_same_global_batch(folder: Path, run: Run, case: str) -> None:
    asked, of_two = CASES[case]
    add_to_store(folder / "other.store", samples({"train/128x128": 6, "train/192x128": 4}, prefix="other "))
    stores = tuple(f"{folder}/{name}" for name in asked.get("store", ("tiny.store",)))
    one = config(folder, **{"max_steps": 4, **asked, "store": stores, "output_dir": folder / "one"})
    run(1, one)
    two = replace(one, output_dir=folder / "two", accumulation=1, **of_two)
    if "sharding" in of_two:
        run(2, replace(two, max_steps=2))
        two = replace(two, resume=True)
    trained = "trained 2 steps, to step 4" if "sharding" in of_two else f"trained {one.max_steps} steps"
    assert run(2, two).count(trained) == 1
    # Of weights in bf16, gradients are added up in another order, and rounded.
    assert_equal_within_floating_point(one.output_dir, two.output_dir, rel=0.01 if case == "bf16" else 1e-5)


@pytest.mark.parametrize(
    ("more", "of_two"),
    [
        ({"mask_loss": "batch:0.1"}, {}),
        ({"mask_loss": "batch"}, {"sharding": FSDP}),
        ({"mask_loss": "sample", "lora_rank": 2}, {}),
    ],
)
def test_two_ranks_learn_pairs_under_masks_as_one_does(
    tmp_path: Path, run: Run, more: dict[str, Any], of_two: dict[str, Any]
) -> None:
    pairs = write_pairs(tmp_path, "flux2 klein")
    one = pairs.config(tmp_path / "one", caption_dropout=0.3, validate_every=3, **more)
    run(1, one)
    run(2, replace(one, output_dir=tmp_path / "two", accumulation=1, **of_two))
    assert_equal_within_floating_point(one.output_dir, tmp_path / "two")


def test_two_ranks_with_half_the_model_each_go_on_with_one_that_has_the_whole(folder: Path, run: Run) -> None:
    from diffusers import UNet2DConditionModel

    drawn = {"num_images": 1, "images_every": 4, "image_prompts": (write_prompts(folder / "tiny.store", *PROMPTS),)}
    whole = config(folder, output_dir=folder / "whole", accumulation=2, max_steps=8, **drawn)
    run(1, whole)
    parts = replace(
        whole, output_dir=folder / "parts", batch_size=BatchSize(batch_size=1), accumulation=2, max_steps=4, sharding=FSDP
    )
    run(2, replace(parts, export_every=3, export_dtype="fp32"))
    saved = parts.output_dir / "checkpoints" / "step-00000004"
    export = parts.output_dir / "exports" / "step-00000004" / "unet" / "diffusion_pytorch_model.safetensors"
    assert export.read_bytes() == (saved / "unet_ema" / export.name).read_bytes()
    assert export.parents[2].joinpath("step-00000003").is_dir()
    assert UNet2DConditionModel.from_pretrained(saved / "unet_ema").config.in_channels == 2
    with (
        Image.open(whole.output_dir / "images" / "step-00000004.png") as one,
        Image.open(parts.output_dir / "images.png") as two,
    ):
        assert np.abs(np.asarray(one, "i2") - np.asarray(two, "i2")).max() <= 2
    run(1, replace(parts, batch_size=BatchSize(batch_size=2), max_steps=8, resume=True))
    assert_equal_within_floating_point(whole.output_dir, parts.output_dir)


def test_a_resume_of_two_ranks_with_half_the_model_each_equals_the_whole_run_to_the_last_bit(folder: Path, run: Run) -> None:
    whole = config(folder, output_dir=folder / "whole", accumulation=1, max_steps=6, sharding="fsdp")
    run(2, whole)
    parts = replace(whole, output_dir=folder / "parts", max_steps=4)
    run(2, parts)
    run(2, replace(parts, max_steps=6, resume=True))
    assert losses(whole.output_dir) == losses(parts.output_dir)


def test_four_ranks_that_share_a_model_go_on_as_two_and_equal_one_rank(folder: Path, run: Run) -> None:
    one = config(folder, output_dir=folder / "one", batch_size="8", accumulation=1, max_steps=6, validate_every=2)
    run(1, one)
    four = replace(one, output_dir=folder / "four", batch_size=BatchSize(batch_size=1), accumulation=2, max_steps=4)
    run(4, replace(four, sharding=FSDP))
    run(2, replace(four, sharding=FSDP, batch_size=BatchSize(batch_size=2), max_steps=6, resume=True))
    assert_equal_within_floating_point(one.output_dir, four.output_dir)


def test_two_ranks_over_tcp_learn_to_the_bit_what_two_on_the_disk_do_though_their_server_is_killed(
    folder: Path, run: Run, ranks: ForkedRanks
) -> None:
    asked = config(folder, output_dir=folder / "disk", accumulation=1, max_steps=60, log_every=1, prefetch_bytes=1)
    run(2, asked)
    (folder / "token").write_bytes(b"the token of this test")
    (folder / "token").chmod(0o600)
    with kept_port() as port:
        options = ("--at", f"tcp://{port}", "--token-file", str(folder / "token"))
        own: dict[str, Any] = {"service": f"tcp://127.0.0.1:{port}", "service_token": folder / "token"}
        far = replace(asked, output_dir=folder / "far", **own)
        metrics = far.output_dir / "metrics.jsonl"
        with serving(folder / "s", folder / "tiny.store", options=options) as server:
            running = ranks.start(2, as_arguments(far))
            assert wait_until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 5, 240)
            server.kill()
            server.wait()
            left = 60 - len(metrics.read_bytes().splitlines())
        with serving(folder / "s", folder / "tiny.store", options=options):
            done = running.wait()
    assert (done.code, left > 0) == (0, True), done.err
    assert losses(far.output_dir) == losses(asked.output_dir)


def test_two_ranks_with_half_the_model_each_skip_the_same_steps_and_end_together(folder: Path, ranks: ForkedRanks) -> None:
    asked = config(folder, accumulation=1, max_steps=40, log_every=5, learning_rate=1e30, sharding="fsdp")
    done = ranks.run(2, as_arguments(asked))
    assert done.code == 1
    assert "5 in a row" in str(status(asked)["reason"])
    assert "there is no checkpoint yet" in done.err


def test_a_world_size_that_does_not_divide_the_global_batch_is_refused_naming_both(
    folder: Path, run: Run, ranks: ForkedRanks
) -> None:
    asked = config(folder, batch_size="3", accumulation=1, max_steps=2)
    run(1, asked)
    two = replace(asked, batch_size=BatchSize(batch_size=1), max_steps=4, resume=True)
    done = ranks.run(2, as_arguments(two)).fails("global_batch was 3 when its state was saved and is 2 now", "--new-plan")
    assert "Traceback" not in done.err
    assert status(asked) == {"state": "done", "step": 2, "reason": None}, "a refused resume leaves the record of the run"


def wait_for_a_window(asked: TrainConfig, is_running: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 300
    metrics = asked.output_dir / "metrics.jsonl"
    while not (metrics.exists() and any("loss" in line for line in read_metrics(asked.output_dir))):
        assert is_running()
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_terminated_run_stops_every_rank_at_one_step_and_goes_on_exactly(folder: Path, run: Run) -> None:
    """The one run here that torchrun itself starts, and passes the signal on in."""
    asked = config(folder, accumulation=1, max_steps=100_000, log_every=1)
    launcher = subprocess.Popen(
        [*TORCHRUN, "--nproc_per_node", "2", str(MAIN), *as_arguments(asked)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_a_window(asked, lambda: launcher.poll() is None)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=240) == 1, "torchrun's own code, as docs/operations.md says"
    found = status(asked)
    assert (found["state"], found["reason"]) == ("stopped", "SIGTERM")
    assert isinstance(found["step"], int)
    end = found["step"] + 3
    run(2, replace(asked, max_steps=end, resume=True))
    whole = replace(asked, output_dir=folder / "whole", max_steps=end)
    run(2, whole)
    assert losses(asked.output_dir) == losses(whole.output_dir)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_run_as_failed(folder: Path, ranks: ForkedRanks, rank: int) -> None:
    asked = config(folder, accumulation=1, max_steps=100_000, log_every=2)
    running = ranks.start(2, as_arguments(asked))
    wait_for_a_window(asked, lambda: all(Path(f"/proc/{pid}").exists() for pid in running.pids))
    os.kill(running.pids[rank], signal.SIGKILL)
    assert running.wait().code != 0
    found = status(asked)
    assert found["state"] == "failed"
    assert "lost another rank" in str(found["reason"])


def test_a_rank_that_fails_ends_the_others_and_its_own_message_comes_first(folder: Path, ranks: ForkedRanks) -> None:
    """One row is damaged; only the rank that reads it sees that."""
    store = Store.open(folder / "tiny.store")
    bucket = store.buckets("train")[0]
    at = int(bucket.locate(np.array([3])).offsets(bucket.spec, "latent")[0])
    (shard,) = (folder / "tiny.store" / "shards").glob("*.lmdb")
    flip_bit(shard, 8 * at)
    asked = config(folder, accumulation=1, max_steps=100, verify=True)
    done = ranks.run(2, as_arguments(asked))
    assert done.code == 1
    found = status(asked)
    assert found["state"] == "failed"
    assert "train/128x128/3.png" in str(found["reason"])
    assert "train/128x128/3.png" in done.err.partition("lost another rank")[0]
