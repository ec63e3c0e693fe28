"""Caption length limits of a family and the number of stored tokens, from its tokenizers and its pipeline."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError, UsageError
from bucketline.families.family import Padding
from bucketline.ingest.encoders.text_model import cut_of, token_counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.families.family import Family, Part
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import Cut


MOST_TOKENS = 4096  # upper bound of --max-tokens; far beyond what any family was trained on


class PromptLengths:
    """Caption length limits of a family."""

    def __init__(self, family: type[Family], pipeline: Any, tokenizers: Mapping[str, Any], asked: int | None) -> None:  # noqa: ANN401 - diffusers has no types
        """Take the limits of a pipeline and of its tokenizers by encoder name; `asked` applies only to the open part."""
        self._family, self._pipeline, self._tokenizers = family, pipeline, tokenizers
        self.open_length = self._settled(asked)  # None for a family without an open part

    def _settled(self, asked: int | None) -> int | None:
        """Return the number of tokens of the open part: as requested, else the pipeline's default."""
        if not any(part.is_open for part in self._family.parts):
            if asked is not None:
                raise UsageError(
                    f"--max-tokens {asked}: the tokenizer determines the length of {self._family.name} captions; leave the "
                    "option out"
                )
            return None
        most = min(part.most_tokens or MOST_TOKENS for part in self._family.parts if part.is_open and part.has_positions)
        if asked is not None and asked > most:
            raise UsageError(f"--max-tokens is {asked}, expected {most} or fewer")
        # of its call: `encode_prompt` by itself may have another default
        return asked or int(inspect.signature(self._pipeline.__call__).parameters["max_sequence_length"].default)

    def limit(self, part: Part) -> int:
        """Return the maximum number of tokens that a part sees."""
        if part.is_open:
            assert self.open_length is not None, part
            found = self.open_length
        else:  # SD3 and Flux truncate every CLIP at the first tokenizer's length
            shared = getattr(self._pipeline, "tokenizer_max_length", None)
            found = int(shared or self._tokenizers[part.encoder].model_max_length)
        return min(found, part.most_tokens or found)

    @property
    def positions(self) -> int:
        """Maximum number of stored tokens per caption; the exact number if padding is stored."""
        return sum(self.limit(part) for part in self._family.parts if part.has_positions)

    def measure(self, captions: Sequence[str]) -> list[tuple[int, tuple[Cut, ...]]]:
        """Return for each caption the number of stored tokens, and what each part cuts."""
        cleaned = self._family.cleaned(self._pipeline, list(captions))
        templates = [self._family.num_dropped(self._pipeline, caption) for caption in captions]
        kept = [self.positions] * len(cleaned)
        cuts: list[list[Cut]] = [[] for _ in cleaned]
        for part in self._family.parts:
            if part.encoder in self._tokenizers:
                tokenizer, limit = self._tokenizers[part.encoder], self.limit(part)
                lengths = token_counts(tokenizer, cleaned)
                for caption, length, dropped, own in zip(cleaned, lengths, templates, cuts, strict=True):
                    if length - dropped > limit and part.is_cut:
                        own.append(cut_of(part.encoder, tokenizer, caption, length, limit + dropped))
                if self._family.padding is Padding.VALID:
                    pairs = zip(lengths, templates, strict=True)
                    kept = [min(length - dropped + part.num_padding, limit) for length, dropped in pairs]
        return [(own, tuple(found)) for own, found in zip(kept, cuts, strict=True)]

    def refusal(self, caption: str) -> str | None:
        """Return why the pipeline, or its model, does not take a caption; None if they do."""
        shown = f"the caption {caption[:80]!r}"
        for token in self._family.refused_tokens:
            if token in caption:
                return f"{shown} has {token}, which stands for an image to {self._kind}; remove it from the caption"
        for part in self._family.parts:
            if not part.is_cut:
                (cleaned,) = self._family.cleaned(self._pipeline, [caption])
                (length,) = token_counts(self._tokenizers[part.encoder], [cleaned])
                found, limit = length - self._family.num_dropped(self._pipeline, cleaned), self.limit(part)
                if found > limit:
                    return f"{shown} has {found} tokens, and {self._kind} takes up to {limit}, uncut; shorten it"
        return None

    @property
    def _kind(self) -> str:
        return self._family.pipelines[0]


def make_pipeline(family: type[Family], model: ModelFolder, parts: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any pipeline
    """Create the family's pipeline from these parts only, by diffusers name; to measure lengths, tokenizers are enough."""
    try:
        return family.pipeline({**family.pipeline_parts(parts), **family.extras(model)})
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{model.name}: cannot make a {family.pipelines[0]} from its text parts: {error}") from error
