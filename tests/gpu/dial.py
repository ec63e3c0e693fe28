"""Check of the memory count: what it says that a step takes, against the peak of the device's allocator."""

from __future__ import annotations

import gc
import time
from itertools import product
from typing import Any

import torch

from bucketline.train.memory.activations import BatchSizes
from bucketline.train.memory.published import PUBLISHED_MODELS
from bucketline.train.memory.table import CountedModel, run_of
from tests.gpu.material import DEVICE, ON_GPU, tell
from tests.step_memory import NARROW, measured_steps

FEW_LAYERS: dict[str, dict[str, Any]] = {
    "sdxl": {**PUBLISHED_MODELS["SDXL"], "layers_per_block": 1, "transformer_layers_per_block": [1, 2, 3]},
    "flux": {**PUBLISHED_MODELS["FLUX.1-dev"], "num_layers": 2, "num_single_layers": 4},
}
"""Models of the published widths with few layers."""
WITHIN = 0.15
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": 0.5},
    {"recompute": 1.0},
    {"ema": "off", "optimizer": "adamw-8bit"},
    {"lora_rank": 16},
    {"lora_rank": 16, "recompute": 1.0},
)


def dial(*names: str) -> None:
    """The counted memory of a step is within 15 % of the allocator's peak; what compiling makes of it is reported.

    `names`: of these models, or of published ones, which are taken whole.
    """
    for name in names or tuple(FEW_LAYERS):
        config: Any = PUBLISHED_MODELS.get(name) or (FEW_LAYERS if ON_GPU else NARROW)[name]
        counting = CountedModel(config)
        sizes = BatchSizes(images=4, height=128, width=128) if ON_GPU else BatchSizes(images=1, height=16, width=16)
        for compiled, options in product((False, True) if ON_GPU else (False,), CHOICES):
            begin = time.perf_counter()
            asked = run_of(options)
            memory, step = counting.held(asked), counting.step(asked, sizes)
            counted = {
                "held": memory.total - memory.gradients,
                "gradients": memory.gradients,
                "kept": step.kept,
                "step": step.most,
                "peak": counting.need(asked, sizes),
            }
            seconds = round(time.perf_counter() - begin, 2)
            found: dict[str, int] = {}
            try:
                found = measured_steps(config, options, sizes, DEVICE, compiled=compiled)
            except torch.OutOfMemoryError as error:
                gc.collect()
                figures = {"model": name, "options": options, "compiled": compiled, "counted": counted}
                tell("dial: does not fit", **figures, problem=f"{error!s:.200}")
                continue
            ratio = counted["peak"] / found["peak"]
            tell(
                "dial: the count and the peak",
                ok=None if compiled else abs(ratio - 1) < WITHIN,
                model=name,
                options=options,
                images=sizes.images,
                compiled=compiled,
                counted_to_peak=round(ratio, 3),
                counted_mb={one: value // 10**6 for one, value in counted.items()},
                measured_mb={one: value // 10**6 for one, value in found.items()},
                counting_s=seconds,
            )
