"""A check of the trial before the first step: with a little less memory than a run takes, it turns something on."""

from __future__ import annotations

import dataclasses

import torch

from bucketline.train import checkpoint
from bucketline.train.config import Compile, MemoryLimit
from bucketline.train.run import train
from tests.gpu.material import ON_GPU, run_folder, tell
from tests.unit.train.tiny_run import ALONE, config, write_unet


def trial() -> None:
    """A run that is capped below its own peak chooses to recompute, and has the losses that it recorded."""
    folder = run_folder("trial")
    write_unet(folder / "model", block_out_channels=[128, 256])
    asked = config(folder, output_dir=folder / "free", memory="off", max_steps=2, compile=Compile.OFF)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    train(asked, ALONE)
    peak = torch.cuda.max_memory_reserved() if ON_GPU else 64 << 30
    if ON_GPU:
        torch.cuda.empty_cache()
    train(dataclasses.replace(asked, output_dir=folder / "capped", memory=MemoryLimit(num_bytes=int(0.95 * peak))), ALONE)
    chosen = checkpoint.read_state(checkpoint.last_whole(folder / "capped")).config
    tell("trial: a run with less memory", ok=not ON_GPU or bool(chosen["recompute"]), peak=peak, recompute=chosen["recompute"])
