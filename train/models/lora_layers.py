"""The layers of a model that get an adapter: by a word, or by the ends of their names."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from bucketline.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

    from bucketline.train.models import ModelFamily


class Layers(StrEnum):
    """Layers by a word, each with those of the words before it."""

    ATTENTION = "attention"
    ATTENTION_MLP = "attention+mlp"
    ALL = "all"


ATTENTION = re.compile(r"\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)$")
MLP = re.compile(r"\.(ff|ff_context)\.net\.|\.proj_mlp$|(^|\.)single_transformer_blocks\.\d+\.proj_out$")
ATTENTION_MLP = re.compile(f"{ATTENTION.pattern}|{MLP.pattern}")
ANY = re.compile("")
ADAPTER = ".lora_"  # in the names of peft's modules
IN_A_BLOCK = re.compile(r"(^|\.)(\d+|mid_block)\.")


def adapted_layers(model: nn.Module, family: ModelFamily, given: str | None) -> list[str]:
    """Return the layers that `--lora-targets` names, as names or ends of names; None: the family's own choice.

    Raises:
        ModelError: if the model has no such layers.
    """
    if given in list(Layers):
        return layers_by_word(model, Layers(given))
    targets = given.split(",") if given else list(family.lora_targets)
    names = {name for name, _ in model.named_modules()}
    missing = [target for target in targets if not any(name == target or name.endswith(f".{target}") for name in names)]
    if given and missing:
        raise ModelError(
            f"--lora-targets has {missing[0]!r:.80}, expected {', '.join(Layers)}, or the ends of names of layers of the "
            f"{family.model_class}, such as {','.join(family.lora_targets)}"
        )
    return targets


def layers_by_word(model: nn.Module, word: Layers) -> list[str]:
    """Return the names of a model's layers that a word means, also if they have adapters already.

    Embeddings before the blocks and the projection after them never get an adapter.
    """
    pattern = {Layers.ATTENTION: ATTENTION, Layers.ATTENTION_MLP: ATTENTION_MLP, Layers.ALL: ANY}[word]
    found = ((bare_name(name), module) for name, module in model.named_modules() if ADAPTER not in name)
    return [
        name
        for name, module in found
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and IN_A_BLOCK.search(name) and pattern.search(name)
    ]


def bare_name(layer: str) -> str:
    """Return the name of a layer without what peft adds to one with an adapter.

    >>> bare_name("mid_block.attn1.to_q.base_layer")
    'mid_block.attn1.to_q'
    """
    return layer.removesuffix(".base_layer")
