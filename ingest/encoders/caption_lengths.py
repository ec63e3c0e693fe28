"""How many tokens captions take, by a model's tokenizer and configurations alone: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder

MAX_TOKENS = 512  # where neither tokenizer nor encoder name a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionLengths:
    """What a text encoder would make of captions."""

    width: int  # of a token
    max_tokens: int
    is_padded: bool  # every caption takes all tokens
    tokenizer: Any

    def count(self, captions: Sequence[str]) -> list[int]:
        """Give each caption's number of tokens, uncut, its special tokens included."""
        return [len(ids) for ids in self.tokenizer(list(captions))["input_ids"]] if captions else []

    def stored(self, num_tokens: int) -> int:
        """Give how many tokens of a caption are stored."""
        return self.max_tokens if self.is_padded else min(num_tokens, self.max_tokens)


def open_caption_lengths(model: ModelFolder) -> CaptionLengths:
    """Load `tokenizer/`, and read `text_encoder/config.json`.

    Raises:
        ModelError: where one is missing or cannot be loaded.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    part, config = model.part("tokenizer"), model.config("text_encoder")
    if config is None:
        raise ModelError(f"{model.name} lacks text_encoder/config.json; expected a model folder in diffusers' layout")
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**part)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{model.name}: tokenizer/ cannot be loaded: {error}") from error
    limits = (tokenizer.model_max_length, config.get("max_position_embeddings") or MAX_TOKENS)
    return CaptionLengths(
        width=int(config.get("hidden_size") or config.get("d_model") or 0),
        max_tokens=min(MAX_TOKENS, *(int(limit) for limit in limits if limit < 1 << 30)),
        is_padded=str((config.get("architectures") or [""])[0]).startswith("CLIPText"),
        tokenizer=tokenizer,
    )
