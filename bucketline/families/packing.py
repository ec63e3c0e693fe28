"""Latents packed into tokens of 2 by 2 positions, and the tokens' position ids.

Letters: B samples, C latent channels, h and w latent height and width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


PATCH = 2
NUM_TRAIN_TIMESTEPS = 1000.0  # of every published flow; models that take the noise as a share multiply by it themselves


def pack(latents: Tensor, patch: int = PATCH) -> Tensor:
    """Pack 2 by 2 positions into tokens: [B, C, h, w] to [B, h·w/4, 4C]. Source: `FluxPipeline._pack_latents`."""
    count, channels, height, width = latents.shape
    tiles = latents.reshape(count, channels, height // patch, patch, width // patch, patch)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(count, height * width // patch**2, channels * patch**2)


def unpack(tokens: Tensor, height: int, width: int, patch: int = PATCH) -> Tensor:
    """Undo `pack`: [B, h·w/4, 4C] to [B, C, h, w]."""
    tiles = tokens.reshape(len(tokens), height // patch, width // patch, tokens.shape[2] // patch**2, patch, patch)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), tokens.shape[2] // patch**2, height, width)


def channels_last(tokens: Tensor, patch: int = PATCH) -> Tensor:
    """Order a token's numbers by place in the patch, then channel: [..., 4C], as `pack` makes them by channel, then place."""
    return tokens.reshape(*tokens.shape[:-1], -1, patch**2).transpose(-1, -2).flatten(-2)


def channels_first(tokens: Tensor, patch: int = PATCH) -> Tensor:
    """Undo `channels_last`."""
    return tokens.reshape(*tokens.shape[:-1], patch**2, -1).transpose(-1, -2).flatten(-2)


def padded_left(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding of tokens, [B, T, D], and of their mask, [B, T], before them."""
    import torch

    length = mask.shape[1]
    moved = (torch.arange(length, device=mask.device) + mask.sum(dim=1, keepdim=True)) % length
    return tokens.take_along_dim(moved[:, :, None], dim=1), mask.gather(1, moved)


def image_ids(latents: Tensor, num_text: int = 0) -> Tensor:
    """Return each token's position id, [N, 3]: zeros of text tokens, then 0, row, column of those of packed latents.

    Source: `FluxPipeline._prepare_latent_image_ids`.
    """
    import torch

    height, width = (side // PATCH for side in latents.shape[2:])
    places = torch.cartesian_prod(*(torch.arange(size, device=latents.device) for size in (1, height, width)))
    return torch.cat([places.new_zeros(num_text, 3), places]).to(latents.dtype)


def join_layers(tokens: Tensor, layers: Tensor) -> Tensor:
    """Put the layers of another encoder behind tokens: [B, T, D] and [L, B, T, E] to [B, T, D + L · E]."""
    import torch

    return torch.cat([tokens, layers.permute(1, 2, 0, 3).flatten(2)], dim=2)


def split_layers(joined: Tensor, width: int, layer_width: int) -> tuple[Tensor, Tensor]:
    """Undo `join_layers`, of tokens and layers of these widths."""
    layers = joined[..., width:]
    return joined[..., :width], layers.reshape(*layers.shape[:2], -1, layer_width).permute(2, 0, 1, 3)


def grid_ids(like: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """Return the position ids of a grid of image, row, column and token, [B, N, 4], of int64. Source: `Flux2Pipeline`."""
    import torch

    axes = [torch.arange(size, device=like.device) for size in sizes]
    return torch.cartesian_prod(*axes).expand(len(like), -1, -1)


# ------------------------------------------------------------------------------------------------------------- image positions
# The place of an image behind its own caption, for a model that takes padding for places of the caption.
#
# Letters: B samples, T tokens of text, S of text and image, F angles of the first axis and D of all.


@dataclass(frozen=True, slots=True)
class OfEachRow:
    """Turns of queries and keys for each row, [B, S, D], in place of those that all rows share, [S, D]."""

    turns: Tensor

    def unsqueeze(self, _axis: int) -> Tensor:
        """Return them for queries and keys, [B, S, heads, D]; the model does this with those of all rows."""
        return self.turns.unsqueeze(2)


def place_behind_captions(blocks: Iterable[Any], num_first: int) -> None:
    """Have blocks of a Qwen-Image 2.1 place each image behind its own caption; `num_first`: F."""
    for block in blocks:
        block.attn.set_processor(BehindCaptions(block.attn.processor, num_first))


class BehindCaptions:
    """Qwen-Image 2.1's attention, but with each image at the place after its own caption, as if the batch had no other.

    The model places all images after the longest caption's padding, at a distance that a single prompt's never has. Of an
    image's positions only the first axis follows the text; captions begin at 0 in every row.
    """

    def __init__(self, attend: Any, num_first: int) -> None:  # noqa: ANN401 - diffusers has no types
        """`attend`: diffusers' processor. `num_first`: F."""
        self._attend, self._num_first = attend, num_first

    def __call__(
        self,
        attn: Any,  # noqa: ANN401 - as above
        hidden_states: Tensor,
        *,
        rotary_emb: Tensor,  # [S, D] complex
        segments: list[tuple[int, int, bool]] | None = None,  # of text: begin, end; None where keys of text are cached
        key_valid: Tensor | None = None,  # [B, S], False for padding
        **more: Any,  # noqa: ANN401 - as above
    ) -> Tensor:
        """Attend as the processor does."""
        turns: Tensor | OfEachRow = rotary_emb
        if segments and key_valid is not None:
            num_text, num_first = segments[-1][1], self._num_first
            own = rotary_emb.repeat(len(key_valid), 1, 1)
            own[:, num_text:, :num_first] = rotary_emb[key_valid[:, :num_text].sum(dim=1), None, :num_first]
            turns = OfEachRow(own)
        given = {"rotary_emb": turns, "segments": segments, "key_valid": key_valid, **more}
        found: Tensor = self._attend(attn, hidden_states, **given)
        return found


# ------------------------------------------------------------------------------------------------------------------- schedules
# Noise by timestep: scheduler configurations that were published with several families, and what pipelines make of them.


class NoiseLevels(Protocol):
    """A flow's noise by size: of shares of all timesteps, above 0 to 1, for latents of a height and width."""

    def __call__(self, shares: Tensor, height: int, width: int) -> Tensor: ...


SCALED_LINEAR: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}
"""Source: the scheduler configuration published with Stable Diffusion 1.5, and that of SDXL."""


LINEAR: Mapping[str, Any] = {**SCALED_LINEAR, "beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
"""Source: the scheduler configuration published with DiT-XL/2, and that of PixArt."""


def shifted(shares: Tensor, factor: float) -> Tensor:
    """Return noise whose odds are `factor` times as high."""
    return factor * shares / (1 + (factor - 1) * shares)


def by_size_and_steps(_family: object, _index: Mapping[str, Any], /, num_steps: int = 50) -> NoiseLevels:
    """Return the levels of Flux.2's pipeline, by as many steps as it draws in by default.

    Source: `compute_empirical_mu` of diffusers' pipeline.
    """

    def levels(shares: Tensor, height: int, width: int) -> Tensor:
        num_tokens = height * width // 4
        most, fewest = 0.00016927 * num_tokens + 0.45666666, 8.73809524e-05 * num_tokens + 1.89833333  # in 200 steps, in 10
        return shifted(shares, math.exp(most if num_tokens > 4300 else most + (200 - num_steps) / 190 * (fewest - most)))

    return levels


def alike_if_distilled(_family: object, index: Mapping[str, Any], /) -> NoiseLevels | None:
    """Return the levels of Krea 2's pipeline for a distilled model, of which all sizes are shifted alike."""
    return (lambda shares, _height, _width: shifted(shares, math.exp(1.15))) if index.get("is_distilled") else None


def by_pixels(family: Any, _index: Mapping[str, Any], /) -> NoiseLevels:  # noqa: ANN401 - a Family: its file imports this
    """Return the levels of Ideogram 4's pipeline: logit-normal, with a mean that rises with an image's pixels.

    Source: `_logit_normal_sigmas` and `_resolution_aware_mu` of diffusers' pipeline, with limits at a log SNR of 15 and -18.
    """
    import torch

    def levels(shares: Tensor, height: int, width: int) -> Tensor:
        mean = 0.5 * math.log(height * width * family.store.px_per_latent**2 / 512**2)
        found: Tensor = torch.special.ndtri(shares)
        return (mean + 1.5 * found).sigmoid().clamp(1 / (1 + math.exp(7.5)), 1 / (1 + math.exp(-9.0)))

    return levels


def flow(shift: float, **more: float | str) -> dict[str, Any]:
    """Return the configuration of a flow whose noise has odds `shift` times as high, with `more` fields of diffusers'."""
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": shift, **more}
