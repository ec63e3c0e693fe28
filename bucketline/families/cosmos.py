"""diffusers' Cosmos transformer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


ORIGINAL_NAMES = {
    "transformer_blocks.": "blocks.",
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    ".to_q": ".q_proj",
    ".to_k": ".k_proj",
    ".to_v": ".v_proj",
    ".to_out.0": ".output_proj",
    ".ff.net.0.proj": ".mlp.layer1",
    ".ff.net.2": ".mlp.layer2",
    ".norm1.linear_": ".adaln_modulation_self_attn.",
    ".norm2.linear_": ".adaln_modulation_cross_attn.",
    ".norm3.linear_": ".adaln_modulation_mlp.",
    "norm_out.linear_": "final_layer.adaln_modulation.",
    "proj_out": "final_layer.linear",
    "time_embed.t_embedder": "t_embedder.1",
    "patch_embed.proj": "x_embedder.proj.1",
}
"""Of layers, as in the published checkpoint. Source: diffusers' converter of such adapters."""


def do_without_torchvision() -> None:
    """Provide the one function that the transformer takes of torchvision, if that is not installed.

    It brings the mask of borders to the size of the latents by the nearest values.
    """
    from diffusers.models.transformers import transformer_cosmos
    from torch.nn.functional import interpolate

    def resize(mask: Tensor, size: list[int], interpolation: str) -> Tensor:
        return interpolate(mask, size, mode=interpolation)

    found = SimpleNamespace(functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    vars(transformer_cosmos).setdefault("transforms", found)
