"""Prompts, encoded by `ingest` once, before training, as batches to draw without text encoders.

Letters: B prompts, C latent channels, h and w latent height and width, L tokens (padded), D token width.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bucketline.allocator import free_memory
from bucketline.errors import UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.redact import redacted
from bucketline.loader import Batch
from bucketline.loader.plan.rng import Purpose, normal
from bucketline.store.format.columns import CLASS_LABELS, LATENT
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from bucketline.families.family import Family
    from bucketline.store.format.text_block import RaggedSpec
    from bucketline.store.prompt_file import Prompt, PromptSet
    from bucketline.store.read.store import Store
    from bucketline.train.config import TrainConfig
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

PROMPTS_FOLDER = "prompts"  # in the run's
_ENCODED = ".safetensors"  # what `ingest prompts` has written
_FILES = (".txt", ".jsonl", ".json", ".ndjson", _ENCODED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrompt:
    """A prompt, its embeddings, and the size of its latent."""

    id: str  # NAME/NUMBER
    prompt: Prompt
    columns: RaggedSpec  # of the embeddings
    embedding: dict[str, Any]  # by column, as the store's readers get a caption's
    negative: dict[str, Any]
    latent: tuple[int, int, int]  # C, h, w

    @property
    def entry(self) -> dict[str, Json]:
        """Its entry in images.json: its text is the caption."""
        about = asdict(self.prompt)
        return {"id": self.id, "caption": about.pop("prompt"), **about}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingBatch:
    """Images to draw, of one size and guidance."""

    batch: Batch  # of prompts, without latents
    negative: Batch | None  # the same with negative prompts or empty captions; None without classifier-free guidance
    noise: Tensor  # [B, C, h, w] float32, by the prompts' seeds or keyed by the samples
    guidance: float
    entries: tuple[dict[str, Json], ...]  # of images.json, a row each
    real: Tensor | None = None  # [B, C, h, w] float32, unscaled; of prompts None


def encode_given(config: TrainConfig, store: Store) -> dict[str, bytes]:
    """Return the prompts of `--image-prompts`, texts and files, by name, each as `ingest prompts` writes a file.

    Each is encoded once, as the captions of `store` are, and kept in the run's folder: a resume needs neither the file nor text
    encoders. Their memory is free before the model is loaded.
    """
    folder, found = config.output_dir / PROMPTS_FOLDER, dict[str, bytes]()
    for name, path, data in _sources(config.image_prompts):
        about = data if path is None else name.encode()
        kept = folder / f"{hashlib.blake2b(about or b'', digest_size=8).hexdigest()}{'.txt' if path is None else path.suffix}"
        encoded = kept if kept.suffix == _ENCODED else kept.with_name(f"{kept.name}{_ENCODED}")
        if not (encoded.exists() and kept.exists() and data in (None, kept.read_bytes())):
            if data is None:
                raise UsageError(f"--image-prompts {name}: there is no such file")
            folder.mkdir(parents=True, exist_ok=True)
            if path is None:
                write_durably(kept, data)
            if kept != encoded:
                write_durably(encoded, _encoded(config, store, path or kept))
            write_durably(kept, data)
        found[name] = encoded.read_bytes()
    return found


def _sources(given: tuple[str, ...]) -> Iterator[tuple[str, Path | None, bytes | None]]:
    """Yield files with their bytes, None of one that has gone, and all texts as one without a path, each with its name."""
    texts = []
    for one in given:
        path, is_file = Path(one), os.path.isfile(one)  # noqa: PTH113 - a text may be too long for a path
        if is_file or path.suffix.lower() in _FILES:
            yield one, path, path.read_bytes() if is_file else None
        else:
            texts.append(" ".join(one.split()))
    if texts:
        yield "given text", None, "".join(f"{text}\n" for text in texts).encode()


def _encoded(config: TrainConfig, store: Store, file: Path) -> bytes:
    from bucketline.ingest.encoders.model_folder import open_model
    from bucketline.ingest.prompts import encoded_prompts

    model = open_model(str(config.model), config.model_config)
    data, _, cut = encoded_prompts(file, store.manifest, redacted(str(store.place)), model, "auto")
    free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for text in cut:
        log.warning("--image-prompts: %.80s is longer than the text encoder accepts (truncated)", text)
    return data


def load_prompts(given: Mapping[str, bytes], store: Store, family: Family) -> tuple[StoredPrompt, ...]:
    """Return the prompts that a run draws, each once; `given`: what `encode_given` returns."""
    from bucketline.store.prompt_file import decode_prompts

    found: dict[Prompt, StoredPrompt] = {}
    for name, data in given.items():
        for one in _prompts_of(store, name, decode_prompts(store.manifest, data, name), family):
            found.setdefault(one.prompt, one)
    return tuple(found.values())


def _prompts_of(store: Store, name: str, own: PromptSet, family: Family) -> Iterator[StoredPrompt]:
    bucket = store.buckets()[0]
    factor = bucket.height_px // bucket.spec.column(LATENT).shape[1]
    for number, prompt in enumerate(own.prompts, 1):
        height, width = prompt.height_px // factor, prompt.width_px // factor
        _refuse_size(f"--image-prompts {name}, prompt {number}", prompt, (height, width), factor, family)
        yield StoredPrompt(
            id=f"{name}/{number}",
            prompt=prompt,
            columns=own.spec.delivered,
            embedding=own.embedding(prompt.prompt),
            negative=own.embedding(prompt.negative_prompt),
            latent=(family.store.latent_channels, height, width),
        )


def _refuse_size(item: str, prompt: Prompt, latent: tuple[int, int], factor: int, family: Family) -> None:
    """Check that a model can draw a prompt's size: what it expects of a bucket's."""
    size = f"{prompt.height_px}x{prompt.width_px}"
    advice = "give the prompts other sizes"
    if (prompt.height_px % factor, prompt.width_px % factor) != (0, 0):
        raise UsageError(f"{item}: its size is {size} px, expected multiples of {factor} px; {advice}")
    drawing = type(family)(family.config, replace(family.store, latent_sizes=((size, *latent),)))
    try:
        problem = next(
            (f"{one.field} is {one.found}, expected {one.wanted}" for one in drawing.expects() if not one.is_met), None
        )
    except UsageError as error:
        problem = str(error).partition(";")[0]
    if problem is not None:
        raise UsageError(f"{item}: the model cannot draw its size, {size} px, height first: {problem}; {advice}")


def prompt_batches(
    prompts: Sequence[StoredPrompt], at_most: int, guidance: float, device: torch.device, family: Family
) -> Iterator[DrawingBatch]:
    """Yield prompts in batches of one size and guidance, `at_most` so many, on a device; each time the same.

    `guidance`: of prompts without one.
    """
    groups: dict[tuple[float, tuple[int, int, int]], list[StoredPrompt]] = {}
    for one in prompts:
        own = guidance if one.prompt.guidance is None else one.prompt.guidance
        groups.setdefault((own, one.latent), []).append(one)
    for (strength, _), group in groups.items():
        for at in range(0, len(group), at_most):
            part = tuple(group[at : at + at_most])
            yield DrawingBatch(
                batch=_batch(part, [one.embedding for one in part]).to(device),
                negative=_batch(part, [one.negative for one in part]).to(device) if family.is_guided(strength) else None,
                noise=normal(torch.tensor([one.prompt.seed for one in part], device=device), Purpose.NOISE, part[0].latent),
                guidance=strength,
                entries=tuple(one.entry for one in part),
            )


def _batch(prompts: Sequence[StoredPrompt], embeddings: Sequence[dict[str, Any]]) -> Batch:
    """Return a batch of conditions without latents: as of images of the prompts' sizes that were not cropped."""
    spec = prompts[0].columns
    own = [{c.name: _tensor(one[c.name], c.dtype) for c in (*spec.tokens, *spec.fixed)} for one in embeddings]
    column = spec.tokens[0].name
    lengths = torch.tensor([len(one[column]) for one in own])
    tokens = torch.nn.utils.rnn.pad_sequence([one[column] for one in own], batch_first=True)
    sizes = torch.tensor([[one.prompt.height_px, one.prompt.width_px] for one in prompts], dtype=torch.int32)
    count = len(prompts)
    return Batch(
        step=0,
        micro_step=0,
        epoch=0,
        bucket=f"prompts/{sizes[0, 0]}x{sizes[0, 1]}",
        columns={},
        tokens=tokens,
        token_mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        original_size=sizes,
        crop=torch.zeros_like(sizes),
        target_size=sizes,
        weight=torch.ones(count),
        keys=torch.tensor([one.prompt.seed for one in prompts]),
        ids=torch.zeros(count, 16, dtype=torch.uint8),
        flipped=torch.zeros(count, dtype=torch.bool),
        text_fixed={c.name: torch.stack([one[c.name] for one in own]) for c in spec.fixed},
        class_labels=tokens[:, 0, 0] if column == CLASS_LABELS else None,
    )


def _tensor(values: Any, dtype: str) -> Tensor:  # noqa: ANN401 - a numpy array of any dtype
    return torch.from_numpy(values.copy()).view(TORCH_DTYPES[dtype])
