"""How many tokens captions take, by a model's tokenizer and configurations alone: no weight is read.

Known of models of one CLIP or other text encoder, and of models of classes. How the families of several text encoders, and
those whose T5 takes a length of the pipeline's choosing, put captions together is their pipelines' alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bucketline.errors import ModelError
from bucketline.ingest.encoders import sd
from bucketline.ingest.encoders.class_labels import CLASS_LABELS, ClassLabels
from bucketline.ingest.encoders.families import family_of
from bucketline.ingest.encoders.prompt_family import Family
from bucketline.ingest.encoders.text import MAX_TOKENS, TRANSFORMERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder


class Lengths(Protocol):
    """What a store would hold of captions."""

    @property
    def max_tokens(self) -> int: ...

    def count(self, captions: Sequence[str]) -> list[int]:
        """Give each caption's number of tokens, uncut, its special tokens included."""
        ...

    def stored_bytes(self, num_tokens: int, dtype: str) -> int:
        """Give what a caption of so many tokens takes in a store of this dtype."""
        ...

    def refusal(self, caption: str) -> str | None:
        """Say why a caption cannot be used at all; None where it can."""
        ...


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

    def stored_bytes(self, num_tokens: int, dtype: str) -> int:
        """Give what a caption of so many tokens takes in a store of this dtype."""
        num_stored = self.max_tokens if self.is_padded else min(num_tokens, self.max_tokens)
        return num_stored * self.width * (4 if dtype == "F32" else 2)

    def refusal(self, caption: str) -> str | None:  # noqa: ARG002 - any text can be encoded
        """Give None: any text can be used."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLengths:
    """What a model of classes would make of captions: one number each."""

    labels: ClassLabels
    max_tokens: int = 1

    def count(self, captions: Sequence[str]) -> list[int]:
        """Give 1 for each caption."""
        return [1] * len(captions)

    def stored_bytes(self, num_tokens: int, dtype: str) -> int:  # noqa: ARG002 - the same in any store
        """Give what a class takes: a number of 64 bits a token."""
        return 8 * num_tokens

    def refusal(self, caption: str) -> str | None:
        """Say why a caption names no class of the model; None where it names one."""
        return self.labels.encode([caption])[0].refusal


def open_caption_lengths(model: ModelFolder) -> tuple[str, Lengths | None]:
    """Give the name of the model's family and its captions' lengths; None for a family of which they are not known.

    Raises:
        ModelError: where a part is missing or cannot be loaded, or the model has several text encoders and no known family.
    """
    kind = family_of(model)
    if isinstance(kind, Family):
        return kind.name, _of_one_encoder(model) if kind is sd.FAMILY else None
    if kind is ClassLabels:
        return CLASS_LABELS, ClassLengths(labels=ClassLabels(model))
    return TRANSFORMERS, _of_one_encoder(model)


def _of_one_encoder(model: ModelFolder) -> CaptionLengths:
    """Load `tokenizer/`, and read `text_encoder/config.json`."""
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
