"""Checks of the optimizers: each run that was broken off equals one that was not, on the device."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from bucketline.train.config import Compile, Precision, WeightDtype
from bucketline.train.optim import NAMED
from bucketline.train.run import train
from tests.gpu.material import run_folder, tell
from tests.unit.train.tiny_run import ALONE, config, losses, write_unet

BF16 = {"weights": WeightDtype.BF16, "precision": Precision.BF16}


def optimizers(*names: str) -> None:
    """Every optimizer, with what it can be combined with: bf16 weights."""
    for name in (*NAMED, "torch.optim:NAdam"):
        if names and name not in names:
            continue
        cases: list[dict[str, Any]] = [{}]
        if name == "adamw-8bit":
            cases.append(BF16)
        for case in cases:
            folder = run_folder("optimizers")
            write_unet(folder / "model", block_out_channels=[8, 32])  # moments of 8 bits are for weights of 4096 values
            more = {"max_steps": 6, "accumulation": 1, "log_every": 1, "learning_rate": None, "compile": Compile.OFF}
            asked = config(folder, output_dir=folder / "whole", optimizer=name, **more, **case)
            parts = dataclasses.replace(asked, output_dir=folder / "parts", max_steps=3)
            began = time.monotonic()
            train(asked, ALONE)
            took = time.monotonic() - began
            train(parts, ALONE)
            train(dataclasses.replace(parts, max_steps=6, resume=True), ALONE)
            both = (losses(one.output_dir) for one in (asked, parts))
            found = [[float(json.loads(str(line[1]))) for line in lines if line[1] != "null"] for lines in both]
            off = max(abs(one - other) / one for one, other in zip(*found, strict=True))
            figures = {"optimizer": name, "largest": off, "took_s": took, **case}
            tell("optimizers: the same losses", ok=off < 1e-3 and len(found[0]) == 6, **figures)
