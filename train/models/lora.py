"""Low-rank adapters (LoRA) with peft: freeze the model and train small matrices next to some layers.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bucketline.train.config import Precision
from bucketline.train.models.lora_layers import adapted_layers

if TYPE_CHECKING:
    from torch import nn

    from bucketline.train.config import TrainConfig
    from bucketline.train.models import ModelFamily


def add_adapters(model: nn.Module, family: ModelFamily, config: TrainConfig) -> None:
    """Freeze the model and add adapters, initialized from `--seed`; only these are trained, in 32 bits.

    Raises:
        ModelError: if the model has no layers with the requested names.
    """
    from peft import LoraConfig, inject_adapter_in_model

    assert config.lora_rank is not None
    targets = adapted_layers(model, family, config.lora_targets)
    model.requires_grad_(requires_grad=False)
    if config.precision is Precision.BF16:  # read in it, but for modules that diffusers keeps in 32 bits
        torch.nn.Module.to(model, dtype=torch.bfloat16)
    wanted = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_rank if config.lora_alpha is None else config.lora_alpha,
        target_modules=targets,
        init_lora_weights="gaussian",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        inject_adapter_in_model(wanted, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
