"""Checks of whole runs: resumed, by the command line, and under DDP and FSDP2."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bucketline.train.checkpoint import WholeModel, copied
from bucketline.train.compile import warm_up
from bucketline.train.config import Compile, EmaPlace
from bucketline.train.log import graphs_compiled
from bucketline.train.optim import Average
from bucketline.train.parallel import fill_from_rank_zero, shard, tensors_of
from bucketline.train.run import train
from bucketline.train.step import train_step
from tests.gpu.material import DEVICE, ON_GPU, run_folder, tell, tiny_batch, tiny_training
from tests.unit.train.tiny_run import ALONE, config, losses

if TYPE_CHECKING:
    from bucketline.train.step import Training


def resume() -> None:
    """A run that was broken off equals one that was not; on CUDA the fused step needs the strides of its state (finding 1)."""
    folder = run_folder("resume")
    asked = config(folder, output_dir=folder / "whole", max_steps=6, accumulation=1, log_every=1, compile=Compile.OFF)
    parts = dataclasses.replace(asked, output_dir=folder / "parts", max_steps=3)
    train(asked, ALONE)
    train(parts, ALONE)
    train(dataclasses.replace(parts, max_steps=6, resume=True), ALONE)
    pairs = [
        (float(json.loads(str(one[1]))), float(json.loads(str(other[1]))))
        for one, other in zip(losses(asked.output_dir), losses(parts.output_dir), strict=True)
        if one[1] != "null"
    ]
    off = max(abs(a - b) / a for a, b in pairs)
    tell("resume: the same losses", ok=off < 1e-4 and len(pairs) == 6, largest=off)


def ema() -> None:
    """The average in host memory is the device's, and the weights are the same bits after it was applied (finding 12)."""
    training = tiny_training("sd", bf16=True)
    averages = {place: Average(training.model, 0.9, place=place) for place in EmaPlace}
    for step in range(4):
        train_step(training, iter([tiny_batch("sd", 8, 8, step=step)]), step)
        for average in averages.values():
            average.update(step)
    before = {name: tensor.clone() for name, tensor in tensors_of(training.model).items()}
    found = {}
    for place, average in averages.items():
        with average.applied():
            found[place] = {name: tensor.clone() for name, tensor in tensors_of(training.model).items()}
    stays = all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(training.model).items())
    off = max(float((found[EmaPlace.DEVICE][name] - found[EmaPlace.CPU][name]).abs().max()) for name in before)
    moved = any(not torch.equal(found[EmaPlace.CPU][name], before[name]) for name in before)
    tell("ema: on the device as in host memory", ok=stays and moved and off < 1e-6, off=off)


def cli(preset: str = "") -> None:
    """The command as people give it: torchrun, a process group of one rank, compiled, validation, images."""
    folder = run_folder("cli")
    few = folder / "few.toml"
    few.write_text("val_timesteps = 2\nimage_steps = 4\n", encoding="utf-8")
    options = (
        f"--store {folder}/tiny.store --model {folder}/model --output-dir {folder}/run --batch-size 4 --max-steps 60 "
        "--log-every 5 --save-every 20 --validate-every 30 --learning-rate 1e-3"
    )
    if preset:
        options += f" {preset} --lora-targets all"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    done = subprocess.run([*launcher, "train/main.py", *options.split()], capture_output=True, text=True, check=False)
    metrics = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    windows = [line for line in lines if "loss" in line]
    good = bool(windows) and all(line["recompiles"] == 0 for line in windows) and (folder / "run" / "images.png").exists()
    last = windows[-1] if windows else done.stderr[-600:]
    tell("cli: a whole run", preset=preset, ok=done.returncode == 0 and good, code=done.returncode, last=last)


def _sharded(training: Training) -> Training:
    weights = tensors_of(training.model)
    torch.nn.Module.to(training.model, "meta")
    shard(training.model, DEVICE, torch.bfloat16)
    training.model.to_empty(device=DEVICE)
    fill_from_rank_zero(tensors_of(training.model), weights)
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3, fused=True)
    return dataclasses.replace(training, optimizer=optimizer, average=Average(training.model, 0.99))


def shared(*names: str) -> None:
    """DDP and FSDP2 over a process group of one rank: only several GPUs show the rest, but what they call is called."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    dist.init_process_group("nccl" if ON_GPU else "gloo", rank=0, world_size=1)
    for name in names or ("sd", "flux"):
        batches = [tiny_batch(name, *size) for size in ((8, 8), (8, 12))]
        for kind in ("ddp", "fsdp"):
            torch._dynamo.reset()
            plain = tiny_training(name, bf16=True)
            layout = torch.contiguous_format if kind == "fsdp" else None
            own = tiny_training(name, compiled=Compile.ON, bf16=True, checkpointing=True, layout=layout)
            if kind == "fsdp":
                own = _sharded(own)
            else:
                wrapped = torch.nn.parallel.DistributedDataParallel(
                    own.model, gradient_as_bucket_view=True, broadcast_buffers=False, device_ids=[0] if ON_GPU else None
                )
                own = dataclasses.replace(own, model=wrapped)
            warm_up(own, batches, validated=batches)
            warm, off, problem = graphs_compiled(), [], None
            try:
                for step in range(6):
                    batch = dataclasses.replace(batches[step % 2], step=step)
                    wanted, found = (train_step(training, iter([batch]), step) for training in (plain, own))
                    off.append(abs(float(found.loss) - float(wanted.loss)) / float(wanted.loss))
                saved = copied(WholeModel(folder="unet"), own.bare_model, own.average, own.optimizer)["optimizer"]
                problem = None if saved else "a checkpoint has nothing of the optimizer"
                train_step(own, iter([dataclasses.replace(batches[0], step=6)]), 6)
            except RuntimeError as error:
                problem = f"{error!s:.200}"
            good = problem is None and max(off) < 3e-2 and graphs_compiled() == warm
            tell(
                "shared: as one process by itself",
                ok=good,
                family=name,
                kind=kind,
                off=off,
                new=graphs_compiled() - warm,
                problem=problem,
            )
    dist.destroy_process_group()
