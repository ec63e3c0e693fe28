"""Put the text encoders' outputs that trainers store one by one into the layout that `ingest pack` stores for a family.

Letters: T tokens, D width.
"""

from __future__ import annotations

import torch

from bucketline.ingest.importers.cache import Text, damaged
from bucketline.store.format.columns import POOLED


def text_of(caption: str, tokens: torch.Tensor, pooled: torch.Tensor | None = None, *, is_older: bool = False) -> Text:
    """Return a caption's embedding: its tokens [T, D], without a batch dimension of 1, and what is pooled of it.

    Raises:
        RejectedError: if the tokens are anything else.
    """
    fixed = {} if pooled is None else {POOLED: pooled.float().reshape(-1)}
    return Text(caption=caption, tokens=_flat(tokens.float(), "text encoder"), fixed=fixed, is_older=is_older)


def sdxl_tokens(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return SDXL's tokens: both CLIPs' [T, D] and [T, D'] next to each other.

    Raises:
        RejectedError: if they do not go together.
    """
    first, second = _flat(first, "first CLIP"), _flat(second, "second CLIP")
    if first.shape[0] != second.shape[0]:
        raise damaged(f"its CLIPs have {first.shape[0]} and {second.shape[0]} tokens, expected as many")
    return torch.cat([first, second], dim=1)


def sd3_tokens(clips: torch.Tensor, t5: torch.Tensor) -> torch.Tensor:
    """Return SD3's tokens: both CLIPs' padded to the T5's width [T, D], then the T5's [T', D].

    Raises:
        RejectedError: if they do not go together.
    """
    clips, t5 = _flat(clips, "CLIPs"), _flat(t5, "T5")
    if clips.shape[1] > t5.shape[1]:
        raise damaged(f"its CLIPs' tokens have the width {clips.shape[1]}, the T5's {t5.shape[1]}")
    padded = torch.nn.functional.pad(clips, (0, t5.shape[1] - clips.shape[1]))
    return torch.cat([padded, t5], dim=0)


def _flat(tokens: torch.Tensor, what: str) -> torch.Tensor:
    if tokens.ndim == 3 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 2:
        raise damaged(f"the tokens of its {what} are {list(tokens.shape)}, expected [T, D]")
    return tokens
