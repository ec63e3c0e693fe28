"""Layers that get an adapter by a word."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel

from bucketline.bench.fixtures.trained_model import MODELS
from bucketline.train.lora import Layers, layers_by_word
from tests.family_models import tiny_model

ATTENTION = {"to_q", "to_k", "to_v", "to_out.0"}
ADDED = {"add_q_proj", "add_k_proj", "add_v_proj"}
FEED_FORWARD = {"net.0.proj", "net.2"}
AROUND = {"proj_in", "proj_out", "conv1", "conv2", "conv_shortcut", "time_emb_proj", "conv"}
EXPECTED = {  # the ends of names, as in diffusers' models
    "sd": (ATTENTION, FEED_FORWARD, AROUND),
    "sdxl": (ATTENTION, FEED_FORWARD, AROUND),
    "pixart_sigma": (ATTENTION, FEED_FORWARD, set()),
    "dit": (ATTENTION, FEED_FORWARD, {"linear", "linear_1", "linear_2"}),
    "sd3": (ATTENTION | ADDED, FEED_FORWARD, {"linear"}),
    "flux": (ATTENTION | ADDED | {"to_add_out"}, FEED_FORWARD | {"proj_mlp", "proj_out"}, {"linear"}),
}


def ends(names: Iterable[str]) -> set[str]:
    known = ("to_out.0", *FEED_FORWARD)
    return {next((end for end in known if name.endswith(end)), name.rpartition(".")[2]) for name in names}


@pytest.mark.parametrize("family", EXPECTED)
def test_a_word_means_the_layers_of_the_blocks_and_those_of_the_words_before_it(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family)
    attention, mlp, others = EXPECTED[family]
    by_word = {word: layers_by_word(model, word) for word in Layers}
    assert ends(by_word[Layers.ATTENTION]) == attention
    assert ends(by_word[Layers.ATTENTION_MLP]) == attention | mlp
    assert ends(by_word[Layers.ALL]) == attention | mlp | others
    outside = {"conv_in", "conv_out", "proj_out", "x_embedder", "context_embedder", "pos_embed.proj", "norm_out.linear"}
    assert not outside & set(by_word[Layers.ALL])
    assert not [name for name in by_word[Layers.ALL] if name.startswith(("time_", "add_embedding", "caption_", "adaln_"))]


def test_the_published_models_have_as_many_adapters_as_other_trainers_say() -> None:
    """SDXL has 70 transformer blocks, of 8 attention projections and 2 feed-forward layers; Flux has 19 and 38 blocks."""
    with torch.device("meta"):
        sdxl = UNet2DConditionModel.from_config(MODELS["sdxl"].config)
        flux: Any = FluxTransformer2DModel
        found = [[len(layers_by_word(model, word)) for word in Layers] for model in (sdxl, flux())]
    assert found[0][:2] == [70 * 8, 70 * 10]
    assert found[1] == [19 * 8 + 38 * 3, 19 * 12 + 38 * 5, 494]
