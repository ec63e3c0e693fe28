"""Write a cache by SimpleTuner's own VAE cache, text cache and metadata, in its own environment.

`python -m bucketline.bench.peers.formats.simpletuner_files ARRAYS FOLDER` writes the samples of an npz file, `NUMBER/NAME`
each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bucketline.bench.peers.formats.importable import left_out, make_torchvision_importable, without_init

OURS = "photos"  # name of the data set
FAMILY = "flux"


def write(arrays: Path, folder: Path) -> None:
    """Write all samples' latents, embeddings, sizes and crops, with caption files where their images would be."""
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

    backend = LocalDataBackend(None, OURS, compress_cache=True)
    metadata = DiscoveryMetadataBackend(
        id=OURS,
        instance_data_dir=str(folder),
        cache_file=str(folder / "aspect_ratio_bucket_indices"),
        metadata_file=str(folder / "aspect_ratio_bucket_metadata"),
        cache_file_suffix=OURS,
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
        id=OURS,
        model=model,
        vae=None,
        accelerator=None,
        metadata_backend=metadata,
        instance_data_dir=str(folder),
        image_data_backend=backend,
        cache_dir=str(folder / "cache" / "vae"),
    )
    texts = TextEmbeddingCache(
        id=OURS,
        data_backend=backend,
        text_encoders=None,
        tokenizers=None,
        accelerator=None,
        cache_dir=str(folder / "cache" / "text"),
        model_type=FAMILY,
        model=model,
    )
    buckets: dict[str, list[str]] = {}
    with np.load(arrays) as found:
        for n in sorted({name.partition("/")[0] for name in found.files}, key=int):
            image, caption = folder / str(found[f"{n}/id"]), str(found[f"{n}/caption"])
            image.parent.mkdir(exist_ok=True)
            image.with_suffix(".txt").write_text(caption, encoding="utf-8")
            file, _ = vae.generate_vae_cache_filename(str(image))
            vae._write_latents_in_batch([(file, str(image), torch.from_numpy(found[f"{n}/latent"]))])
            embeddings = {
                "prompt_embeds": torch.from_numpy(found[f"{n}/tokens"])[None],
                "pooled_prompt_embeds": torch.from_numpy(found[f"{n}/pooled"])[None],
            }
            record = {"prompt": caption, "key": caption, "metadata": {}}
            texts.process_write_batch([(embeddings, texts.hash_prompt_with_path(record))])
            (height, width), (high, wide) = found[f"{n}/original"].tolist(), found[f"{n}/bucket"].tolist()
            ratio = round(wide / high, 2)
            own: dict[str, object] = {
                "original_size": (width, height),
                "intermediary_size": (wide, high),
                "target_size": (wide, high),
            }
            own |= {"crop_coordinates": (0, 0), "aspect_ratio": ratio, "luminance": 0.0}
            metadata.set_metadata_by_filepath(str(image), own, update_json=False)
            buckets.setdefault(str(ratio), []).append(str(image))
    metadata.aspect_ratio_bucket_indices = buckets
    metadata.save_image_metadata()
    metadata.save_cache()
    texts.process_write_batches = False
    texts.batch_write_thread.join()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
