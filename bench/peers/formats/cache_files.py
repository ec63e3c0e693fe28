"""Write and read caches by peers' own packages, in their environments. Samples come and go in npz files, `NUMBER/NAME` each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bucketline.bench.peers.formats.importable import left_out, make_torchvision_importable, without_init

_OURS = "photos"  # name of SimpleTuner's data set
_FAMILY = "flux"


def save_samples(path: Path, samples: list[dict[str, Any]]) -> Path:
    """Save samples for a package's process."""
    np.savez(path, **{f"{n}/{name}": value for n, own in enumerate(samples) for name, value in own.items()})
    return path


def _samples(path: str | Path) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    with np.load(path) as arrays:
        for file in arrays.files:
            number, _, name = file.partition("/")
            found.setdefault(int(number), {})[name] = arrays[file]
    return [found[number] for number in sorted(found)]


def write_simpletuner(arrays: str, place: str) -> None:
    """Write by SimpleTuner's VAE cache, text cache and metadata, with caption files where the images would be."""
    make_torchvision_importable()
    inits = (
        "",
        ".helpers",
        ".helpers.models",
        ".simpletuner_sdk",
        ".simpletuner_sdk.server",
        ".simpletuner_sdk.server.services",
    )
    without_init(*(f"simpletuner{name}" for name in inits))
    left_out("simpletuner.helpers.audio", "load_audio", "generate_zero_audio")
    import torch
    from simpletuner.helpers.caching.text_embeds import TextEmbeddingCache
    from simpletuner.helpers.caching.vae import VAECache
    from simpletuner.helpers.data_backend.local import LocalDataBackend
    from simpletuner.helpers.metadata.backends.discovery import DiscoveryMetadataBackend
    from simpletuner.helpers.models.common import TextEmbedCacheKey

    folder = Path(place)
    backend = LocalDataBackend(None, _OURS, compress_cache=True)
    metadata = DiscoveryMetadataBackend(
        id=_OURS,
        instance_data_dir=str(folder),
        cache_file=str(folder / "aspect_ratio_bucket_indices"),
        metadata_file=str(folder / "aspect_ratio_bucket_metadata"),
        cache_file_suffix=_OURS,
        data_backend=backend,
        accelerator=None,
        batch_size=1,
        resolution=1.0,
        resolution_type="area",
    )
    model = SimpleNamespace(
        get_transforms=lambda **_: None,
        text_embed_cache_key=lambda: TextEmbedCacheKey.CAPTION,
        pack_text_embeddings_for_cache=lambda embeddings: embeddings,
    )
    vae = VAECache(
        id=_OURS,
        model=model,
        vae=None,
        accelerator=None,
        metadata_backend=metadata,
        instance_data_dir=str(folder),
        image_data_backend=backend,
        cache_dir=str(folder / "cache" / "vae"),
    )
    texts = TextEmbeddingCache(
        id=_OURS,
        data_backend=backend,
        text_encoders=None,
        tokenizers=None,
        accelerator=None,
        cache_dir=str(folder / "cache" / "text"),
        model_type=_FAMILY,
        model=model,
    )
    buckets: dict[str, list[str]] = {}
    for own in _samples(arrays):
        image, caption = folder / str(own["id"]), str(own["caption"])
        image.parent.mkdir(exist_ok=True)
        image.with_suffix(".txt").write_text(caption, encoding="utf-8")
        file, _ = vae.generate_vae_cache_filename(str(image))
        vae._write_latents_in_batch([(file, str(image), torch.from_numpy(own["latent"]))])
        embeddings = {
            "prompt_embeds": torch.from_numpy(own["tokens"])[None],
            "pooled_prompt_embeds": torch.from_numpy(own["pooled"])[None],
        }
        texts.process_write_batch(
            [(embeddings, texts.hash_prompt_with_path({"prompt": caption, "key": caption, "metadata": {}}))]
        )
        (height, width), (high, wide) = own["original"].tolist(), own["bucket"].tolist()
        ratio = round(wide / high, 2)
        about: dict[str, object] = {"original_size": (width, height), "crop_coordinates": (0, 0), "luminance": 0.0}
        about |= {"intermediary_size": (wide, high), "target_size": (wide, high), "aspect_ratio": ratio}
        metadata.set_metadata_by_filepath(str(image), about, update_json=False)
        buckets.setdefault(str(ratio), []).append(str(image))
    metadata.aspect_ratio_bucket_indices = buckets
    metadata.save_image_metadata()
    metadata.save_cache()
    texts.process_write_batches = False
    texts.batch_write_thread.join()


def write_mds(arrays: str, place: str) -> None:
    """Write MDS shards in the columns of mosaicml/diffusion."""
    make_torchvision_importable()
    from streaming import MDSWriter

    texts, numbers = {"caption": "str", "key": "str"}, {"original_height": "int", "original_width": "int"}
    columns = {"latents_512": "bytes", "caption_latents": "bytes", **texts, **numbers}
    with MDSWriter(out=place, columns=columns, size_limit=1 << 17) as out:
        for own in _samples(arrays):
            arrays_of = {"latents_512": own["latent"].tobytes(), "caption_latents": own["tokens"].tobytes()}
            height, width = own["original"].tolist()
            sizes = {"original_height": height, "original_width": width}
            out.write({**arrays_of, **sizes, "caption": str(own["caption"]), "key": str(own["id"])})
