"""Options of `ingest import`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bucketline.command_line import refuse_below
from bucketline.errors import SourceError, UsageError
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.config import Dtype, EncodeDtype, TextDtype, WithdrawnOptions
from bucketline.ingest.encoders.model_folder import local_model
from bucketline.ingest.importers.cache import IMPORTERS, OUR_KINDS
from bucketline.ingest.rules import HeldOut, reject_limit
from bucketline.option_value import ByteSize  # noqa: TC001 - commands read their annotations at run time
from bucketline.options import Arg, Positional
from bucketline.store.commands.look import USUAL_SHARD, ChangingArguments, StorePlace
from bucketline.store.remote.urls import working_folder

VaeName = Literal["sd", "sdxl", "sd3", "flux", "wan", "qwen-image", "hunyuan-video"]
TextOption = Literal["encode", "plain", "none"]
CropOption = Literal["source", "center", "unknown"]


@dataclass(frozen=True, kw_only=True)
class ImportConfig(WithdrawnOptions, ChangingArguments):
    """Import another trainer's latent cache, without images.

    KIND is the trainer or format that wrote SOURCE: kohya (sd-scripts), musubi (musubi-tuner), simpletuner, onetrainer,
    ai-toolkit, diffusion-pipe, or mds (mosaicml/diffusion, micro_diffusion). Latents are stored as the VAE made them:
    what the cache scaled is undone by the VAE's constants, and their spread is compared with the VAE's. Captions are encoded by
    --model. Files are never unpickled. Running the same command again imports only what is new or changed. A cache does not say
    which VAE made it: --model or --vae names it, and the manifest says so.

    Example: ingest import kohya photos imported.store --model stable-diffusion-v1-5
    """

    SECTION = "import: everything else about the cache and the store"
    FIRST = ("model", "vae", "captions", "text", "crop", "val_fraction", "dtype", "dry_run", "max_rejects", "json")

    kind: Annotated[Positional[str], Arg(metavar="KIND", words=OUR_KINDS)]
    """kohya, musubi, simpletuner, onetrainer, ai-toolkit, diffusion-pipe, mds, or one of a package that you installed."""
    source: Annotated[Positional[Path], Arg(metavar="SOURCE")]
    """Folder of the cache; of kohya and ai-toolkit, that of the images."""
    place: Positional[StorePlace]
    """Folder of the store, outside the source; created if missing. Or its URL, such as s3://bucket/photos.store."""
    model: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Model whose VAE made the latents: a folder in diffusers layout, one .safetensors checkpoint, or a hub model's name."""
    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    vae: VaeName | None = None
    """Published VAE that made the latents, if its model is not at hand. Text is imported only with --model."""
    variant: Annotated[str | None, Arg(metavar="NAME")] = None
    """Architecture to import, if the cache has several or does not say: as its file names call it (sdxl, flux, fk …)."""
    captions: Annotated[Path | None, Arg(metavar="FOLDER")] = None
    """Folder of caption files (NAME.txt, .caption, .json) by the samples' names, for caches without captions."""
    trigger: Annotated[str | None, Arg(metavar="WORD")] = None
    """Word or prompt that the trainer put into the captions of files: ai-toolkit's trigger_word, SimpleTuner's instance_prompt,
    sd-scripts' caption_prefix or class_tokens. It replaces [trigger] in ai-toolkit's, and else goes before the caption."""
    text: TextOption | None = None
    """encode the captions by --model's encoders, or none. plain: encode as `ingest pack --text plain`, if the pipeline is not
    known. Default: encode if there are captions and --model has text encoders, else none."""
    crop: CropOption | None = None
    """Crop of the images: as the cache records it (source), at the centre because you know that it was (center), or unknown.
    Default: source if the cache records it, else unknown."""
    trust_scale: bool = False
    """Import latents whose spread differs from the VAE's by a factor of two or more."""
    val_fraction: Annotated[str, Arg(metavar="SHARE[:folder]")] = "0.0"
    """Fraction of the samples to hold out, chosen by a stable hash; 1 holds out all. 0.02:folder hashes their folders."""
    max_captions: int = 8
    """Maximum number of captions per sample."""
    dtype: Dtype = "F16"
    """Data type of stored latents and, without --text-dtype, of tokens."""
    text_dtype: TextDtype | None = None
    """Data type of stored tokens, as for `ingest pack`. Default: that of --dtype."""
    encode_dtype: EncodeDtype = "F32"
    """Data type in which text encoders compute, as for `ingest pack`."""
    max_tokens: Annotated[int | None, Arg(metavar="INT")] = None
    """Token limit per caption, as for `ingest pack`: 256 for a cache of Flux schnell."""
    batch_size: int = 8
    """Captions encoded together."""
    shard_size: ByteSize = USUAL_SHARD
    """Seal a shard at this size and begin the next."""
    device: Annotated[str, Arg(metavar="DEVICE", words=("auto", "cpu", "cuda"))] = "auto"
    """Device of the text encoders: auto (CUDA if available), cpu, cuda or cuda:N."""
    threads: Annotated[int | None, Arg(metavar="INT")] = None
    """Reader threads; default: one per core, at most four."""
    max_rejects: Annotated[str | None, Arg(metavar="N|FRACTION")] = None
    """Exit with 1 if more samples are rejected, as a count (10) or a fraction (0.01); the others are imported all the same."""
    work: Annotated[Path | None, Arg(metavar="FOLDER")] = None
    """Of a store's URL: folder in which shards are made before they are sent. Default: next to the cache."""
    dry_run: bool = False
    """Read and check everything, and print what would be imported and rejected. Writes nothing."""
    json: bool = False
    """Print the summary as one JSON object."""

    def __post_init__(self) -> None:
        ChangingArguments.__post_init__(self)
        if self.work is not None and isinstance(self.place, Path):
            raise UsageError(f"--work {self.work}: it is for a store in object storage; leave it out")
        if self.trigger is not None and not self.trigger.strip():
            raise UsageError("--trigger is empty; name the word that the trainer put into captions, or leave it out")
        _ = self.held_out
        refuse_below(1, **{name: getattr(self, name) for name in ("max_captions", "max_tokens", "batch_size", "threads")})
        reject_limit(self.max_rejects)
        if self.text in ("encode", "plain") and self.model is None:
            raise UsageError(f"--text {self.text} needs --model, whose encoders make the empty caption; add it")

    @property
    def held_out(self) -> HeldOut:
        return HeldOut.parse(self.val_fraction, "--val-fraction")

    @property
    def store(self) -> Path:
        """Folder of the store, or the one in which a store in object storage is imported into."""
        return working_folder(self.place, self.work)


def expect_inputs(config: ImportConfig) -> None:
    """Refuse inputs that are not there or overlap, before anything heavy is imported."""
    if config.kind not in tuple(IMPORTERS):
        raise UsageError(f"KIND is {config.kind!r:.80}, expected {', '.join(IMPORTERS)}, or one of a package that you install")
    if not config.source.is_dir():
        raise SourceError(f"{config.source} is not a folder; expected the folder of a cache")
    for path in (config.source, config.captions):
        if path is not None:
            refuse_overlap(path, config.store)
    if config.model is not None:
        local_model(config.model, config.model_config)
