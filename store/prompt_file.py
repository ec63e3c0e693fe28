"""A file of prompts beside a store: texts, seeds and sizes, and embeddings of the texts as the store has those of captions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, FingerprintError
from bucketline.store.format.block import DIGEST_BYTES, caption_digest
from bucketline.store.format.text import DIGEST, Entry, TextBlock, as_arrays, delivered, encode_text_block, read_text_block
from bucketline.store.shard.sidecar import Sidecar, encode_sidecar
from bucketline.typed_json import MAX_INT, decode, encode, first_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text import Caption, TextSpec

PROMPTS_FORMAT = "bucketline.prompts/1"
MAX_PROMPTS = 256
_MAX_SIDE_PX = 1 << 16
_LIST, _TEXT = "prompts", "text"  # tensors: the prompts as JSON, and a text block
_ENCODER = "text_encoder"  # metadata: the provenance of the embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """An image to draw."""

    prompt: str
    negative_prompt: str  # the text of the pass without guidance; "": the empty caption
    seed: int  # of the noise
    height_px: int
    width_px: int
    guidance: float | None  # None: the trainer's

    def __post_init__(self) -> None:
        for text in (self.prompt, self.negative_prompt):
            text.encode()  # which raises an error for half a surrogate pair
        if not 0 <= self.seed < MAX_INT:
            raise ValueError(f"the seed is {self.seed}, expected 0 to {MAX_INT - 1}")
        if not (0 < self.height_px <= _MAX_SIDE_PX and 0 < self.width_px <= _MAX_SIDE_PX):
            raise ValueError(f"the size is {self.height_px}x{self.width_px} px, expected 1 to {_MAX_SIDE_PX} px a side")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise ValueError(f"the guidance is {self.guidance}, expected a number")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of a file, and the embeddings of their texts."""

    prompts: tuple[Prompt, ...]
    spec: TextSpec
    text: TextBlock
    rows: Mapping[bytes, int]  # of the text block, by a text's digest

    def embedding(self, text: str) -> dict[str, NDArray[Any]]:
        """Return the embedding of a prompt or a negative prompt as readers get a caption's: tokens `[T, D]`, fixed columns."""
        spec = self.spec
        parts = dict(self.text.parts(self.rows[caption_digest(text)]))
        tokens = {column.name: bytes(parts[column.name]) for column in spec.tokens}
        entry = Entry(
            digest=bytes(parts[DIGEST]),
            num_tokens=len(tokens[spec.tokens[0].name]) // spec.tokens[0].row_bytes,
            tokens=tokens,
            fixed={column.name: bytes(parts[column.name]) for column in spec.fixed},
        )
        return as_arrays(spec.delivered, delivered(spec, entry))


def encode_prompts(manifest: Manifest, prompts: Sequence[Prompt], captions: Sequence[Caption]) -> bytes:
    """Return the bytes of a file of prompts for a store; `captions` are the embeddings of all of their texts, each once."""
    listed = json.dumps([encode(prompt) for prompt in prompts], ensure_ascii=False, separators=(",", ":"))
    block = encode_text_block(manifest.text.spec(), captions, first_row=0)
    tensors = [(name, "U8", np.frombuffer(data, "u1")) for name, data in ((_LIST, listed.encode()), (_TEXT, block))]
    return encode_sidecar(tensors, {"format": PROMPTS_FORMAT, _ENCODER: manifest.encoders.get(_ENCODER)})


def decode_prompts(manifest: Manifest, data: bytes, where: str) -> PromptSet:
    """Return the prompts in the bytes of a file of a store's prompts, after comparing all checksums."""
    file = Sidecar(where, data, PROMPTS_FORMAT)
    if difference := first_difference(manifest.encoders.get(_ENCODER), file.about(_ENCODER), f"encoders.{_ENCODER}"):
        field, stored, found = difference
        raise FingerprintError(
            f"{where} was encoded with {field} = {found!s:.200}, the store has {stored!s:.200}; rerun `ingest prompts`"
        )
    try:
        listed = json.loads(_bytes(file, _LIST).decode())
        if not isinstance(listed, list) or not 0 < len(listed) <= MAX_PROMPTS:
            raise ValueError(f"expected a list of 1 to {MAX_PROMPTS} prompts")
        prompts = tuple(decode(Prompt, one, f"prompt {n}") for n, one in enumerate(listed, 1))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: its prompts cannot be read: {error}") from error
    spec = manifest.text.spec()
    block = read_text_block(spec, _bytes(file, _TEXT), where)
    if bad := block.bad():
        raise CorruptError(f"{where}: text {bad[0]} does not match its checksum")
    digests = bytes(block.columns[DIGEST])
    rows = {digests[DIGEST_BYTES * n : DIGEST_BYTES * (n + 1)]: n for n in range(len(block))}
    for n, prompt in enumerate(prompts, 1):
        if not {caption_digest(prompt.prompt), caption_digest(prompt.negative_prompt)} <= rows.keys():
            raise CorruptError(f"{where}: it lacks the embedding of prompt {n} or of its negative prompt")
    return PromptSet(prompts=prompts, spec=spec, text=block, rows=rows)


def _bytes(file: Sidecar, name: str) -> bytes:
    return file.column(name).tobytes()
