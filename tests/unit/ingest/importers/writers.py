"""Writers of other trainers' caches, each from the facts of its format: nothing here comes from the importers."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.unit.ingest.importers.known import Form, Known, Sample

WITH_SIZES = ("sd3", "flux")  # kohya's models whose keys have the latent's size


def tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values))


# kohya


def kohya_latent(folder: Path, sample: Sample, model: str, latent: Any, **more: Any) -> Path:
    """Write `NAME_WWWWxHHHH_MODEL.npz`: width and height of the original."""
    width, height = sample.original_wh
    suffix = f"_{latent.shape[-2]}x{latent.shape[-1]}" if model in WITH_SIZES else ""
    path = folder / f"{sample.stem}_{width:04d}x{height:04d}_{model}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    computed = np.array([7, 7, 7, 7])  # by the trainer, from the original's size; not what it cropped
    values = {"latents": latent, "original_size": np.array([width, height]), "crop_ltrb": computed, **more}
    np.savez(path, **{key + suffix: value for key, value in values.items()})
    return path


def kohya(folder: Path, known: Known, model: str | None = None) -> Path:
    shutil.copytree(known.images, folder)
    model = model or known.family
    for sample in known.samples:
        kohya_latent(folder, sample, model, known.fed(sample.latent) if model == "flux" else sample.latent)
        np.savez(folder / f"{sample.stem}_te_outputs.npz", hidden_state1=sample.tokens)  # of which caption, nothing says
    return folder


# musubi-tuner


def musubi(folder: Path, known: Known, arch: str = "fk") -> Path:
    """Write a cache of an architecture: `fk` and `wan` scaled, the latter with frames; `zi` unscaled."""
    folder.mkdir(parents=True)
    for sample in known.samples:
        stem = sample.stem.rpartition("/")[2]  # the name only, as the trainer has it
        width, height = sample.original_wh
        latent = known.cached(sample.latent, scaled=arch in ("fk", "wan"))
        metadata = {"architecture": arch, "width": str(width), "height": str(height), "format_version": "1.0.1"}
        _, h, w = latent.shape
        frames = latent[:, None] if arch == "wan" else latent
        dtype = str(latent.dtype).removeprefix("torch.")
        latents = {f"latents_1x{h}x{w}_{dtype}": frames.contiguous(), f"latents_control_{h}x{w}_{dtype}": latent.clone()}
        save_file(latents, folder / f"{stem}_{width:04d}x{height:04d}_{arch}.safetensors", metadata)
        text = {"architecture": arch, "caption1": sample.caption, "format_version": "1.0.1"}
        save_file({"t5_vec_float32": tensor(sample.tokens)}, folder / f"{stem}_{arch}_te.safetensors", text)
    return folder


# SimpleTuner


def simpletuner(folder: Path, known: Known, *, hashed: bool = True, packed: bool = False, model: str | None = None) -> Path:
    """Write images, the JSON files of their sizes, latents and embeddings; `packed` gzips them."""
    shutil.copytree(known.images, folder)
    model = model or known.family
    metadata, buckets = {}, dict[str, list[str]]()
    for sample in known.samples:
        path = f"/data/of/another/machine/{sample.id}"
        stem = sample.stem.rpartition("/")[2]
        name = hashlib.sha256(stem.encode()).hexdigest() if hashed else stem
        where = folder / "cache" / "vae" / sample.id.rpartition("/")[0] / f"{name}.pt"
        simpletuner_file(where, known.cached(sample.latent), packed=packed)
        record, (height, width) = sample.record, sample.bucket_hw
        metadata[path] = {
            "original_size": list(sample.original_wh),
            "target_size": [width, height],
            "intermediary_size": [record.resized[1], record.resized[0]],
            "crop_coordinates": [record.crop[0], record.crop[1]],
            "aspect_ratio": round(width / height, 2),
        }
        buckets.setdefault(str(round(width / height, 2)), []).append(path)
        embeds = {"prompt_embeds": tensor(sample.tokens)[None]}
        text = hashlib.md5(sample.caption.encode()).hexdigest()
        simpletuner_file(folder / "cache" / "text" / f"{text}-{model}.pt", embeds, packed=packed)
    named = {"config": {"vae_cache_clear_each_epoch": False}, "aspect_ratio_bucket_indices": buckets}
    (folder / "aspect_ratio_bucket_indices_my-data.json").write_text(json.dumps(named), encoding="utf-8")
    (folder / "aspect_ratio_bucket_metadata_my-data.json").write_text(json.dumps(metadata), encoding="utf-8")
    return folder


def simpletuner_file(path: Path, value: Any, *, packed: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue()) if packed else buffer.getvalue())


# OneTrainer


def onetrainer(folder: Path, known: Known) -> Path:
    """Write one group of images, and one of text, which has neither captions nor paths."""
    images = folder / "image" / hashlib.sha256(b"image").hexdigest() / "variation-0"
    texts = folder / "text" / hashlib.sha256(b"text").hexdigest() / "variation-0"
    for group in (images, texts):
        group.mkdir(parents=True)
    aggregate = []
    for number, sample in enumerate(known.samples):
        record = sample.record
        split = {
            "latent_image": known.cached(sample.latent, scaled=False),
            "original_resolution": record.original_size,
            "crop_offset": record.crop[:2],
        }
        torch.save(split, images / f"{number}.pt")
        aggregate.append({"crop_resolution": sample.bucket_hw, "image_path": f"/home/me/photos/{sample.id}"})
        torch.save({"tokens": torch.arange(77), "text_encoder_hidden_state": tensor(sample.tokens)}, texts / f"{number}.pt")
    torch.save(aggregate, images / "aggregate.pt")
    torch.save([{} for _ in known.samples], texts / "aggregate.pt")
    return folder


# ai-toolkit


def ai_toolkit(folder: Path, known: Known, space: str | None = None) -> Path:
    """Write images with `_latent_cache` and `_t_e_cache` next to them."""
    shutil.copytree(known.images, folder)
    for sample in known.samples:
        ai_toolkit_file(folder, known, sample, space or {"sd": "sd1", "flux": "flux1"}.get(known.family, known.family))
    return folder


def ai_toolkit_file(folder: Path, known: Known, sample: Sample, space: str, **changes: Any) -> Path:
    record, image = sample.record, folder / sample.id
    info = {
        "filename": image.name,
        "scale_to_width": record.resized[1],
        "scale_to_height": record.resized[0],
        "crop_x": record.crop[1],
        "crop_y": record.crop[0],
        "crop_width": record.crop[3],
        "crop_height": record.crop[2],
        "latent_space_version": space,
        "latent_version": 1,
        **changes,
    }
    path = image.parent / "_latent_cache" / f"{image.stem}_{_hashed(info)}.safetensors"
    path.parent.mkdir(exist_ok=True)
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in info.items()}
    latent = known.cached(sample.latent)
    save_file({"latent": latent.flip(2) if changes.get("flip_x") else latent}, path, metadata)
    text = image.parent / "_t_e_cache" / f"{image.stem}_{_hashed({'caption': sample.caption})}.safetensors"
    text.parent.mkdir(exist_ok=True)
    save_file({"text_embed": tensor(sample.tokens)[None]}, text, {"version": "1"})
    return path


def _hashed(info: dict[str, Any]) -> str:
    digest = hashlib.md5(json.dumps(info, sort_keys=True).encode()).digest()
    return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")


# diffusion-pipe


def diffusion_pipe(folder: Path, known: Known, model: str = "flux") -> Path:
    """Write `cache/MODEL/cache_ARxWxHxFRAMES/latents` for each size."""
    by_size: dict[tuple[int, int], list[Sample]] = {}
    for sample in known.samples:
        by_size.setdefault(sample.bucket_hw, []).append(sample)
    for (height, width), samples in by_size.items():
        values = [
            {
                "latents": known.cached(sample.latent),
                "mask": None,
                "image_spec": [None, f"/data/{sample.id}"],
                "caption": [sample.caption],
            }
            for sample in samples
        ]
        name = f"cache_{width / height:.3f}x{width}x{height}x1"
        diffusion_pipe_values(folder / "cache" / model / name / "latents", values)
    return folder


def diffusion_pipe_values(folder: Path, values: list[Any]) -> None:
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "metadata.db") as database:
        database.execute("CREATE TABLE fingerprint(value)")
        database.execute("CREATE TABLE items(shard, shard_index)")
        database.execute("CREATE TABLE shard_0(offset, size)")
        with (folder / "shard_0.bin").open("wb") as shard:
            for number, value in enumerate(values):
                buffer = io.BytesIO()
                torch.save(value, buffer)
                database.execute("INSERT INTO shard_0 VALUES (?, ?)", (shard.tell(), len(buffer.getvalue())))
                database.execute("INSERT INTO items VALUES (0, ?)", (number,))
                shard.write(buffer.getvalue())
    database.close()


# MDS


def mds(folder: Path, known: Known) -> Path:
    """Write one shard with the columns of mosaicml/diffusion, for images of 256 x 256 px: too small for `latents_512`."""
    rows = [
        {
            "latents_256": known.fed(sample.latent).astype("<f2").tobytes(),
            "latents_512": b"",
            "caption": sample.caption.encode(),
            "caption_latents": sample.tokens.astype("<f2").tobytes(),
            "original_height": struct.pack("<q", sample.record.original_size[0]),
            "original_width": struct.pack("<q", sample.record.original_size[1]),
            "key": sample.id.encode(),
        }
        for sample in known.samples
    ]
    mds_shard(folder, rows, {"caption": "str", "key": "str", "original_height": "int", "original_width": "int"})
    return folder


def mds_shard(folder: Path, rows: list[dict[str, bytes]], kinds: dict[str, str]) -> None:
    """Write an index and a shard as the format's description says."""
    folder.mkdir(parents=True)
    names = sorted(rows[0])
    encodings = [kinds.get(name, "bytes") for name in names]
    sizes = [8 if encoding == "int" else None for encoding in encodings]
    config = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26}
    config |= {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    described = json.dumps(config, sort_keys=True).encode()
    samples = []
    for row in rows:
        lengths = b"".join(struct.pack("<I", len(row[name])) for name, size in zip(names, sizes, strict=True) if size is None)
        samples.append(lengths + b"".join(row[name] for name in names))
    begin = 4 + 4 * (len(rows) + 1) + len(described)
    offsets = [begin]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    whole = struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + described + b"".join(samples)
    (folder / "shard.00000.mds").write_bytes(whole)
    raw = {"basename": "shard.00000.mds", "bytes": len(whole), "hashes": {}}
    index = {"version": 2, "shards": [{**config, "samples": len(rows), "raw_data": raw, "zip_data": None}]}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


WRITERS: dict[str, tuple[Callable[[Path, Known], Path], str]] = {  # and the family of its known images
    "kohya": (kohya, "sdxl"),
    "musubi": (musubi, "flux"),
    "simpletuner": (simpletuner, "sdxl"),
    "onetrainer": (onetrainer, "sd"),
    "ai-toolkit": (ai_toolkit, "sdxl"),
    "diffusion-pipe": (diffusion_pipe, "flux"),
    "mds": (mds, "sd at 256 px"),
}
FORMS = {  # what each writer makes of the known images
    "kohya": Form(scaled=False),
    "musubi": Form(),
    "simpletuner": Form(has_crop=True),
    "onetrainer": Form(scaled=False, has_crop=True),
    "ai-toolkit": Form(has_size=False, has_crop=True),
    "diffusion-pipe": Form(has_size=False, has_resized=False),
    "mds": Form(dtype=torch.float16),
}
LATENTS = {  # where each kind has its latents
    "kohya": "**/*_sdxl.npz",
    "musubi": "*_fk.safetensors",
    "simpletuner": "cache/vae/**/*.pt",
    "onetrainer": "image/*/*/[0-9].pt",
    "ai-toolkit": "**/_latent_cache/*.safetensors",
    "diffusion-pipe": "**/shard_0.bin",
    "mds": "*.mds",
}
