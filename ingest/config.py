"""What `ingest pack` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bucketline.errors import UsageError
from bucketline.ingest.split import SplitBy


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Encode a folder of images and their captions, and pack them into a store.

    Captions come from NAME.txt beside each image (one caption a line) or from metadata.jsonl (file_name, text), which wins
    where both are there. Running the same command again packs what is new or changed and leaves the rest.

    Example: ingest pack photos photos.store --model stable-diffusion-v1-5 --val-fraction 0.02
    Several processes: torchrun --nproc_per_node 2 -m bucketline.ingest pack photos photos.store --model FOLDER
    """

    source: tyro.conf.Positional[Path]
    """The folder of images, searched with all its folders; links to folders are not followed."""
    store: tyro.conf.Positional[Path]
    """The store's folder; it must lie outside the source. Made where there is none."""
    model: str
    """A folder in diffusers' layout (vae/, text_encoder/, tokenizer/), or a model's name on a hub."""
    grid: str | None = None
    """Bucket sizes: square:N, area:N[:STEP], or a list HxW,HxW,…; the model's own size where none is given."""
    val_fraction: float = 0.0
    """Share of the samples to hold out, by a hash that never moves."""
    split_by: SplitBy = SplitBy.ID
    """What is hashed: the sample's id, or the folder that the image lies in, so that its crops stay together."""
    min_side_px: int = 64
    """Images with a shorter side are rejected."""
    max_captions: int = 8
    """Captions kept per sample; what is beyond is counted and named."""
    dtype: Literal["F16", "BF16", "F32"] = "F16"
    """What latents and tokens are stored as."""
    encode_dtype: Literal["F16", "BF16", "F32"] | None = None
    """What the encoders compute in: F32 on a CPU and BF16 on a GPU where none is given; a VAE that must have F32 gets it."""
    latents: Literal["mode", "sample", "moments"] = "mode"
    """What of the VAE's distribution is stored: its mode, one sample (drawn by the id), or mean and log-variance."""
    flip: bool = False
    """Store the latent of each picture's mirror image as well."""
    max_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens kept of a caption by SD3's, Flux's and PixArt's T5, or an encoder of no family; its own limit otherwise."""
    batch_size: int = 8
    """Pictures of one bucket that are encoded together."""
    shard_size_mib: int = 2048
    """Size at which a shard is sealed and the next one begun."""
    device: str = "auto"
    """Where the encoders run: auto (CUDA where there is one), cpu, cuda or cuda:N."""
    decode_threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Threads that decode; one per core, four at most, where none is given."""
    json: bool = False
    """Print the summary as one JSON object."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.val_fraction < 1.0:
            raise UsageError(f"--val-fraction is {self.val_fraction}, expected 0 or more and less than 1")
        limits = {"min_side_px": 1, "max_captions": 1, "batch_size": 1, "shard_size_mib": 1}
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, expected {least} or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"--max-tokens is {self.max_tokens}, expected 1 or more")
        if self.max_captions > 1 << 12:
            raise UsageError(f"--max-captions is {self.max_captions}, expected 4096 or fewer")
