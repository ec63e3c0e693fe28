"""Caches of FastVideo: Parquet files with a row per video or image, its tensors as bytes, shape and dtype.

Latents are the VAE's mean, unscaled; that of the first frame is scaled, and may be missing. Width, height and number of frames
are those of the latent in one version and of the video in another, or exchanged, so they are not read. Embeddings are a single
encoder's, padded with zeros in some versions. Source: `dataloader/schema.py`, `preprocess_pipeline_*.py`, `record_schema.py` of
2026.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import SourceError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder
from bucketline.ingest.importers.reading.row_groups import listed_rows, read_row
from bucketline.ingest.importers.reading.text_layouts import text_of

if TYPE_CHECKING:
    from pathlib import Path


_LATENT, _TEXT, _FIRST = "vae_latent", "text_embedding", "first_frame_latent"
_PARTS = ("bytes", "shape", "dtype")
_VALUES = [f"{name}_{part}" for name in (_LATENT, _TEXT, _FIRST) for part in _PARTS]
_LISTED = (f"{_LATENT}_shape", "id", "caption", f"{_TEXT}_shape", "clip_feature_shape", "trajectory_latents_shape")
_OTHERS = {"clip_feature_shape": "a CLIP feature", "trajectory_latents_shape": "an ODE trajectory"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def _is_here(source: Path) -> bool:
    for folder, names in cache.files_below(source):
        for name in names:
            if name.endswith(".parquet"):
                try:
                    listed_rows(source, folder + name, _LISTED[:1])
                except RejectedError:
                    continue
                return True
    return False


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    captions = CaptionFolder(request, "the column caption")
    entries: list[cache.CacheEntry] = []
    seen: Counter[str] = Counter()
    has_text = False
    for folder, names in cache.files_below(request.source):
        for path in (folder + name for name in names if name.endswith(".parquet")):
            try:
                rows = listed_rows(request.source, path, _LISTED)
            except RejectedError as error:
                entries.append(cache.CacheEntry(id=path, path=path, captions=(), problem=error.detail))
                continue
            for group, number, row in rows:
                place = f"{path}/{group}-{number}"
                sample_id = str(row.get("id") or "") or place
                seen[sample_id] += 1
                has_text |= bool(row.get(f"{_TEXT}_shape"))
                caption = str(row.get("caption") or "")
                own, problem = captions.of(sample_id, in_cache=(caption,) if caption else ())
                others = [what for name, what in _OTHERS.items() if row.get(name)]
                entries.append(
                    cache.CacheEntry(
                        id=sample_id if seen[sample_id] == 1 else f"{sample_id} ({place})",
                        path=path,
                        at=(group, number, " and ".join(others)),
                        captions=own,
                        caption_problem=problem,
                    )
                )
    if not entries:
        raise SourceError(f"{request.source} has no Parquet files of FastVideo; name the folder of its preprocessing")
    return cache.CacheListing(
        entries=entries,
        variant="",
        scaling=cache.Scaling.NONE,
        control_scaling=cache.Scaling.AS_FED,
        latents="mode",
        family="transformers" if has_text and request.captions is None else None,
        captions_from=captions.told,
    )


def _read(source: Path, entry: cache.CacheEntry, _variant: str) -> cache.Cached:
    row = read_row(source, entry.path, int(entry.at[0]), int(entry.at[1]), _VALUES)
    latent, tokens, first = (_tensor(row, name) for name in (_LATENT, _TEXT, _FIRST))
    if latent is None:
        raise cache.damaged("its vae_latent is empty")
    texts: tuple[cache.Text, ...] = ()
    if tokens is not None and entry.captions:
        text = text_of(entry.captions[0], tokens)
        texts = (replace(text, tokens=text.tokens[: _valid(text.tokens)]),)
    return cache.Cached(
        latent=cache.squeezed(latent),
        geometry=cache.Geometry(),
        texts=texts,
        columns={} if first is None else {"control/first_frame": cache.squeezed(first)},
        leaves_out=str(entry.at[2]) or None,
    )


def _tensor(row: dict[str, Any], name: str) -> torch.Tensor | None:
    """Return a row's tensor of this name; None if it is empty.

    Raises:
        RejectedError: if its bytes are not those of its shape and dtype.
    """
    data, shape, dtype = (row.get(f"{name}_{part}") for part in _PARTS)
    if not data or not shape:
        return None
    kind = _DTYPES.get(str(dtype).removeprefix("torch."))
    if kind is None:
        raise cache.damaged(f"its {name} is of the dtype {dtype!r:.40}, expected one of {', '.join(_DTYPES)}")
    if any(length is None or length < 1 for length in shape) or len(data) != math.prod(shape) * kind.itemsize:
        raise cache.damaged(f"its {name} has {len(data)} bytes, expected {dtype} of the shape {shape!s:.80}")
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def _valid(tokens: torch.Tensor) -> int:
    """Return the number of tokens before the zeros that pad them."""
    there = tokens.any(dim=1).nonzero()
    return int(there[-1]) + 1 if len(there) else 0


IMPORTER = cache.Importer(kind="fastvideo", is_here=_is_here, listed=_listed, read=_read)
