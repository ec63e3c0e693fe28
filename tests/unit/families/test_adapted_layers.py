"""`--lora-targets attention` and `attention+mlp` against the classes of a model's modules, whatever their layers are called."""

from __future__ import annotations

import re

import pytest
import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention

from bucketline.train.models.lora import Layers, layers_by_word
from tests.family_models import FORMS, tiny_model

FEED_FORWARD = re.compile(r"FeedForward|MLP|Mlp|SwiGLU|GLUMB|MOE")
# feed-forward layers of a block that has no module for them
BARE = re.compile(r"single_transformer_blocks\.\d+\.proj_(mlp|out)|blocks\.\d+\.(gate|up|down)_proj")
IN_A_BLOCK = re.compile(r"\.\d+\.")


def layers_in(model: torch.nn.Module, *, attends: bool) -> set[str]:
    """Return the linear layers, and convolutions over all channels, of the attention modules, or else of feed-forward ones."""
    found = set()
    for name, module in model.named_modules():
        is_attention = isinstance(module, Attention | AttentionModuleMixin) or "Attention" in type(module).__name__
        if is_attention if attends else FEED_FORWARD.search(type(module).__name__):
            for own, layer in module.named_modules(prefix=name):
                if isinstance(layer, torch.nn.Linear) or (isinstance(layer, torch.nn.Conv2d) and layer.groups == 1):
                    found.add(own)
    return {name for name in found if IN_A_BLOCK.search(name)}  # PRX has a network for the timestep, too


@pytest.mark.parametrize("name", FORMS)
def test_the_words_for_layers_mean_all_of_their_modules_and_no_others(name: str) -> None:
    model = tiny_model(name)
    attention, feed_forward = (layers_in(model, attends=attends) for attends in (True, False))
    feed_forward |= {own for own, _ in model.named_modules() if BARE.fullmatch(own)}
    assert attention
    assert feed_forward
    assert set(layers_by_word(model, Layers.ATTENTION)) == attention
    assert set(layers_by_word(model, Layers.ATTENTION_MLP)) == attention | feed_forward
    assert set(layers_by_word(model, Layers.ALL)) >= attention | feed_forward
