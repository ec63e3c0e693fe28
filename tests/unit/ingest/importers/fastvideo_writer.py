"""Write FastVideo's Parquet files from the facts of their schema: nothing here comes from the importer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.unit.ingest.importers.known import Known

TENSORS = ("vae_latent", "text_embedding", "clip_feature", "first_frame_latent", "pil_image")
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        *(
            field
            for name in TENSORS
            for field in (
                (f"{name}_bytes", pa.binary()),
                (f"{name}_shape", pa.list_(pa.int64())),
                (f"{name}_dtype", pa.string()),
            )
        ),
        *((name, pa.string()) for name in ("file_name", "caption", "media_type")),
        *((name, pa.int64()) for name in ("width", "height", "num_frames")),
        *((name, pa.float64()) for name in ("duration_sec", "fps")),
    ]
)


def row(sample_id: str, caption: str, tensors: Mapping[str, NDArray[Any]], **more: Any) -> dict[str, Any]:
    """Return a row; tensors that it lacks are empty, as the trainer writes them."""
    found: dict[str, Any] = {"id": sample_id, "file_name": f"{sample_id}.mp4", "caption": caption, "media_type": "video"}
    for name in TENSORS:
        value = tensors.get(name)
        found[f"{name}_bytes"] = b"" if value is None else value.tobytes()
        found[f"{name}_shape"] = [] if value is None else list(value.shape)
        found[f"{name}_dtype"] = "" if value is None else str(value.dtype)
    latent = tensors["vae_latent"]  # width and height are exchanged, and the frames are the latent's, in one version
    return {**found, "width": 8 * latent.shape[-2], "height": 8 * latent.shape[-1], "num_frames": latent.shape[1], **more}


def table(path: Path, rows: Sequence[Mapping[str, Any]], rows_in_group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = pa.Table.from_pylist([{"duration_sec": 1.0, "fps": 16.0, **one} for one in rows], schema=SCHEMA)
    pq.write_table(whole, path, row_group_size=rows_in_group)
    return path


def fastvideo(folder: Path, known: Known) -> Path:
    """Write the images as media of one frame, unscaled, five in one file and the last in another."""
    rows = []
    for sample in known.samples:
        padded = np.concatenate([sample.tokens, np.zeros((3, sample.tokens.shape[1]), dtype="f4")])
        tensors = {"vae_latent": sample.latent[:, None], "text_embedding": padded}
        rows.append(row(sample.id, sample.caption, tensors, media_type="image"))
    chunks = folder / "combined_parquet_dataset" / "worker_0"
    table(chunks / "data_chunk_0.parquet", rows[:5])
    table(chunks / "data_chunk_1.parquet", rows[5:])
    return folder
