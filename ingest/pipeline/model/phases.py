"""The order of a pack's encoders: with two phases, all captions come first, and VAE and text encoders never share memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.command_line import human_bytes
from bucketline.errors import ModelError
from bucketline.ingest.encoders.part_weights import WEIGHT_BYTES, part_weights
from bucketline.ingest.rules import Phases
from bucketline.weight_files import DIFFUSERS, TRANSFORMERS

if TYPE_CHECKING:
    import torch

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder

SMALL_BYTES = 1 << 30  # of all weights: nobody gains by freeing some of them
SHARE = 0.5  # of the free memory that weights may take; the rest is for what encoding a batch takes, and for images
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "text_conditioner")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The order of a run's encoders, and why."""

    are_two: bool
    reason: str

    def __str__(self) -> str:
        order = "two phases, all captions before the images" if self.are_two else "one phase"
        return f"{order}: {self.reason}"


def weight_bytes(config: PackConfig, model: ModelFolder) -> tuple[int, int] | None:
    """Return the memory that a model's text encoders and its VAE take, by the headers of their files.

    None if these do not tell, or there is no text.
    """
    names = [name for name in TEXT_ENCODERS if model.has(name)]
    try:
        text = [part_weights(model, name, TRANSFORMERS + DIFFUSERS)[0] for name in names]
        vae = part_weights(model, "vae", DIFFUSERS)[0]
    except ModelError:  # loading says what is wrong
        return None
    if not (vae and text and all(text)):
        return None
    return int(sum(text) * WEIGHT_BYTES[config.encode_dtype]), int(vae * WEIGHT_BYTES[config.vae_dtype])


def may_be_two(config: PackConfig, model: ModelFolder) -> bool:
    """Return whether a run may have two phases: the option says so, or its encoders are not small. Imports no torch."""
    if config.phases is not Phases.AUTO:
        return config.phases is Phases.TWO and any(model.has(name) for name in TEXT_ENCODERS)
    sizes = weight_bytes(config, model)
    return sizes is not None and sum(sizes) > SMALL_BYTES


def plan_phases(config: PackConfig, model: ModelFolder, device: torch.device, processes: int) -> PhasePlan:
    """Return the order that `phases` names; for `auto`, by the weights' sizes and the free memory, shared by `processes`."""
    if not may_be_two(config, model):
        return PhasePlan(are_two=False, reason="phases is one, or the encoders are small")
    sizes = weight_bytes(config, model) if config.phases is Phases.AUTO else None
    if sizes is None:
        return PhasePlan(are_two=True, reason="phases is two")
    free = free_bytes(device) // (processes if device.type == "cpu" else 1)
    text, vae, are_two = *map(human_bytes, sizes), sum(sizes) > SHARE * free
    than = "more" if are_two else "not more"
    reason = f"the text encoders take {text} and the VAE {vae}, {than} than half of the {human_bytes(free)} that are free"
    return PhasePlan(are_two=are_two, reason=reason)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; for the CPU, of this machine or of the control group with a limit of its own."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
