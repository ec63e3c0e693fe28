"""Options that save memory, before the dial `--memory` chooses: those that are given, and those of a run's first part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bucketline.train.config import BASE_OFF, Base, TrainConfig
from bucketline.train.values import Ema, EmaPlace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.typed_json import Json

EMA_EVERY = 10  # steps between updates of an average that was moved to the host


def decided(config: TrainConfig) -> TrainConfig:
    """Return a configuration whose open options have the values of a run that has memory enough."""
    recomputed = 1.0 if config.offload_blocks else 0.0
    return replace(
        config,
        recompute=recomputed if config.recompute is None else config.recompute,
        optimizer=config.optimizer or "adamw",
        base=None if config.base == BASE_OFF else config.base,
        offload_blocks=config.offload_blocks or 0,
        ema=config.ema if config.ema.decay is None else replace(config.ema, place=config.ema.place or EmaPlace.DEVICE),
    )


def with_recorded(config: TrainConfig, recorded: Mapping[str, Json]) -> TrainConfig:
    """Return a resumed run's configuration with what its first part chose, unless an option or another --memory is given."""
    taken: dict[str, Any] = {}
    if config.optimizer is None:  # whose state the checkpoint has
        taken["optimizer"] = recorded.get("optimizer", "adamw")
    if _is_fitted(config, recorded):
        taken |= {name: recorded.get(name) for name in ("recompute", "offload_blocks") if getattr(config, name) is None}
        if config.base is None and config.lora_rank is not None:
            taken["base"] = Base(str(found)) if (found := recorded.get("base")) else BASE_OFF
        before = Ema.parse(str(recorded.get("ema", config.ema)), "--ema")
        is_open = config.ema.decay is not None and config.ema.place is None
        if is_open and replace(config.ema, place=before.place, every=before.every) == before:
            taken["ema"] = before
    return replace(config, **taken)


def memory_to_fit(config: TrainConfig, recorded: Mapping[str, Json] | None, device: torch.device) -> int | None:
    """Return the bytes of each device into which a run is to be fitted; None: nothing is counted.

    `recorded`: the options of a resumed run's first part.
    """
    if recorded is not None and _is_fitted(config, recorded):
        return None
    if config.memory is not None:
        return config.memory.num_bytes
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def _is_fitted(config: TrainConfig, recorded: Mapping[str, Json]) -> bool:
    """Return whether a run's first part was fitted into the memory that it has now."""
    return config.memory is None or str(config.memory) == recorded.get("memory")
