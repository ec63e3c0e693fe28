"""Low-rank adapters (LoRA) with peft: freeze the model and train small matrices next to some layers.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from bucketline.errors import UsageError
from bucketline.model_file import cast
from bucketline.train.config import Precision

if TYPE_CHECKING:
    from torch import nn

    from bucketline.families.family import Family
    from bucketline.train.config import TrainConfig

Layers = StrEnum("Layers", {"ATTENTION": "attention", "ATTENTION_MLP": "attention+mlp", "ALL": "all"})
"""Layers by a word, each with those of the words before it."""
ATTENTION = r"\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)$|\.(attn\d?|(self_)?attention)\."
"""Layers of attention in diffusers' models: by their own names, or by the module that they are in."""
MLP = (
    r"\.(ff|ff_context|ff_i|ff_t|feed_forward|(img_|txt_)?mlp)\."
    r"|\.(proj_mlp|(gate|up|down)_proj)$|(^|\.)single_transformer_blocks\.\d+\.proj_out$"
)
"""Likewise, of feed-forward networks; a block of one stream may have them in the same module as its attention."""
NAMES = {Layers.ATTENTION: ATTENTION, Layers.ATTENTION_MLP: f"{ATTENTION}|{MLP}", Layers.ALL: ""}
ADAPTER = ".lora_"  # in the names of peft's modules
PEFT_PREFIX = "base_model.model."  # of the names in peft's files
PEFT_CONFIG = "adapter_config.json"  # next to them
LORA_METADATA = "lora_adapter_metadata"  # in files of diffusers and ours: peft's configuration
IN_A_BLOCK = re.compile(r"(^|\.)(\d+|mid_block)\.")


def add_adapters(model: nn.Module, family: Family, config: TrainConfig) -> None:
    """Freeze the model and add adapters, initialized from `--seed`; only these are trained, in 32 bits."""
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig, inject_adapter_in_model

    assert config.lora_rank is not None
    targets = adapted_layers(model, family, config.lora_targets)
    model.requires_grad_(requires_grad=False)
    if config.precision is Precision.BF16:
        cast(model, torch.bfloat16)
    wanted = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_rank if config.lora_alpha is None else config.lora_alpha,
        target_modules=targets,
        init_lora_weights="gaussian",
    )
    with torch.random.fork_rng(devices=[]), next(model.parameters()).device:
        torch.manual_seed(config.seed)
        inject_adapter_in_model(wanted, model)
    cast_training_params(model, dtype=torch.float32)


def adapted_layers(model: nn.Module, family: Family, given: str | None) -> list[str]:
    """Return the layers that `--lora-targets` names, as names or ends of names; None: the family's own choice."""
    if given in list(Layers):
        return layers_by_word(model, Layers(given))
    targets = given.split(",") if given else list(family.lora_targets)
    names = {name for name, _ in model.named_modules()}
    missing = [target for target in targets if not any(name == target or name.endswith(f".{target}") for name in names)]
    if given and missing:
        raise UsageError(
            f"--lora-targets has {missing[0]!r:.80}, expected {', '.join(Layers)}, or the ends of names of layers of the "
            f"{family.model_class}, such as {','.join(family.lora_targets)}"
        )
    return targets


def layers_by_word(model: nn.Module, word: Layers) -> list[str]:
    """Return the layers that a word means, without embeddings, the last projection, and convolutions of single channels."""
    pattern = re.compile(NAMES[word])
    return [
        name
        for name, module in plain_layers(model).items()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
        and getattr(module, "groups", 1) == 1
        and IN_A_BLOCK.search(name)
        and pattern.search(name)
    ]


def plain_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's modules by their names without what peft adds to one with an adapter, of which only the layer counts."""
    return {name.removesuffix(".base_layer"): layer for name, layer in model.named_modules() if ADAPTER not in name}
