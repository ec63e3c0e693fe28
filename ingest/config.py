"""What `ingest pack` and `ingest scan` are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bucketline.errors import UsageError
from bucketline.ingest.again import Check, RejectLimit
from bucketline.ingest.framing import Crop, parse_background, upscale_limit
from bucketline.ingest.split import SplitBy


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Encode images and their captions, and pack them into a store.

    SOURCE is a folder, a table of file_name and text (.jsonl, .csv, .parquet), WebDataset tars (photos/{000..012}.tar, a
    glob, any URL that webdataset opens), or a dataset that Hugging Face's datasets saved on disk. In a folder, captions
    come from NAME.txt beside each image (one caption a line) or from metadata.jsonl, .csv or .parquet, which win where
    both are there. Running the same command again packs what is new or changed and leaves the rest.

    Example: ingest pack photos photos.store --model stable-diffusion-v1-5 --val-fraction 0.02
    Several processes: torchrun --nproc_per_node 2 -m bucketline.ingest pack photos photos.store --model FOLDER
    """

    source: tyro.conf.Positional[str]
    """Where the images are; a folder is searched with all its folders, and links to folders are not followed."""
    store: tyro.conf.Positional[Path]
    """The store's folder; it must lie outside the source. Made where there is none."""
    model: str
    """A folder in diffusers' layout (vae/, text_encoder/, tokenizer/), or a model's name on a hub."""
    grid: str | None = None
    """sd15, sdxl, square:N, area:N[:STEP], tokens:N[:PX], or sizes HxW,HxW,…; the model's own where none is given."""
    crop: Crop = Crop.CENTER
    """Where an image is cropped: in the middle, or at a place drawn from its id, the same at every run."""
    max_upscale: float | None = None
    """How far an image may be enlarged to fill a bucket (1.5: by half); one that fits none is rejected. Any if not given."""
    background: str = "white"
    """What shows through where an image is transparent: white, black, grey or #RRGGBB."""
    jpeg_draft: bool = False
    """Decode JPEGs of four times their bucket's size or more at 1/2, 1/4 or 1/8: two to four times as fast, and not exact."""
    val_fraction: float = 0.0
    """Share of the samples to hold out, by a hash that never moves."""
    split_by: SplitBy = SplitBy.ID
    """What is hashed: the sample's id, or the folder that the image lies in, so that its crops stay together."""
    min_size_px: int = 64
    """Images whose shorter side has fewer pixels are rejected."""
    max_captions: int = 8
    """Captions kept per sample; what is beyond is counted and named."""
    dtype: Literal["F16", "BF16", "F32"] = "F16"
    """What latents and tokens are stored as."""
    encode_dtype: Literal["F16", "BF16", "F32"] = "F32"
    """What the encoders compute in; BF16 is faster on a GPU. A VAE that says it must have F32 gets it."""
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
    """Threads that decode; one per core, shared out among the machine's processes, where none is given."""
    check: Check = Check.SIZE_TIME
    """What tells that an image is unchanged: its size and time, or its content (every file is read, few are encoded)."""
    prune: bool = False
    """Drop the samples whose images are no longer in the source."""
    max_rejects: Annotated[str | None, tyro.conf.arg(metavar="N|FRACTION")] = None
    """Exit with 1 where more images are rejected: a count such as 10, or a fraction such as 0.01. Nothing is pruned then."""
    json: bool = False
    """Print the summary as one JSON object."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.val_fraction < 1.0:
            raise UsageError(f"--val-fraction is {self.val_fraction}, expected 0 or more and less than 1")
        limits = {"min_size_px": 1, "max_captions": 1, "batch_size": 1, "shard_size_mib": 1}
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, expected {least} or more")
        upscale_limit(self.max_upscale)
        parse_background(self.background)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"--max-tokens is {self.max_tokens}, expected 1 or more")
        if self.max_captions > 1 << 12:
            raise UsageError(f"--max-captions is {self.max_captions}, expected 4096 or fewer")
        RejectLimit.parse(self.max_rejects)


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """Look at a source without encoding it: what `ingest pack` would find, reject and store.

    Sizes come from the files' headers; --full decodes every picture to be sure. With --model, its config.json gives the
    grid and the latents' shape, and its tokenizer the captions' lengths (not of SDXL, SD3, Flux and PixArt); no weight is
    read. Nothing is written.

    Example: ingest scan photos --grid area:512:64
    """

    source: tyro.conf.Positional[str]
    """Where the images are: what `ingest pack` takes."""
    model: str | None = None
    """A folder in diffusers' layout (vae/, text_encoder/, tokenizer/), or a model's name on a hub."""
    grid: str | None = None
    """Bucket sizes, as for `ingest pack`; the model's own size, or area:512:64, where none is given."""
    val_fraction: float = 0.0
    """Share of the samples to hold out, as for `ingest pack`."""
    split_by: SplitBy = SplitBy.ID
    """What is hashed: the sample's id, or the folder that the image lies in."""
    max_upscale: float | None = None
    """How far an image may be enlarged to fill a bucket, as for `ingest pack`."""
    min_size_px: int = 64
    """Images whose shorter side has fewer pixels are rejected."""
    max_captions: int = 8
    """Captions kept per sample."""
    dtype: Literal["F16", "BF16", "F32"] = "F16"
    """What latents and tokens would be stored as."""
    full: bool = False
    """Decode every picture, so that damage behind the header is seen too."""
    decode_threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Threads that read; one per core, four at most, where none is given."""
    json: bool = False
    """Print the report as one JSON object, with every reject."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.val_fraction < 1.0:
            raise UsageError(f"--val-fraction is {self.val_fraction}, expected 0 or more and less than 1")
        for name in ("min_size_px", "max_captions"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, expected 1 or more")
        upscale_limit(self.max_upscale)
