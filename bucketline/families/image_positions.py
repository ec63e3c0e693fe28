"""The place of an image behind its own caption, for a model that takes padding for places of the caption.

Letters: B samples, T tokens of text, S of text and image, F angles of the first axis and D of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


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
