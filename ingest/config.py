"""Options of `ingest pack` and `ingest scan`, and those of them that a store keeps."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from bucketline.command_line import refuse_below
from bucketline.dtype_names import dtype_name
from bucketline.errors import FingerprintError, UsageError
from bucketline.files.paths import redacted
from bucketline.ingest.images.crop import (
    DEFAULT_MAX_CROP,
    RESAMPLING,
    Crop,
    Framing,
    crop_limit,
    parse_background,
    refuse_other_form,
    upscale_limit,
)
from bucketline.ingest.rules import PRUNE, Check, HeldOut, Phases, prune_limit, reject_limit
from bucketline.ingest.sources.captions.files import CaptionRules
from bucketline.ingest.sources.source import CaptionPer, SourceOptions, caption_rest, note_references
from bucketline.option_value import ONE_OR_MORE, ByteSize, Duration, FieldForm, OptionValue, in_units
from bucketline.options import ALONE, ONLY_IN_FILE, Arg, Hidden, Positional, Repeated
from bucketline.store.commands.look import USUAL_SHARD, ChangingArguments, StorageArguments, StorePlace
from bucketline.store.remote.urls import working_folder
from bucketline.typed_json import as_toml, differences, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.images.crop import Grid
    from bucketline.ingest.sources.source import Listing, Source
    from bucketline.store.format.manifest import Manifest
    from bucketline.typed_json import Json


Dtype = Literal["F16", "BF16", "F32"]
EncodeDtype = Literal["F16", "BF16", "F32", "int8", "nf4"]
TextDtype = Literal["I8", "F8_E4M3", "F16", "BF16", "F32"]
LatentsOption = Literal["mode", "sample", "moments"]
PackText = Literal["plain"]


def framing_of(config: PackConfig | ScanConfig, grid: Grid) -> Framing:
    """Return the framing rules that the options set."""
    return Framing(
        grid=grid,
        crop=config.crop,
        max_upscale=upscale_limit(config.max_upscale),
        max_crop=crop_limit(config.max_crop),
        min_size_px=config.min_size_px,
        background=parse_background(config.background),
        jpeg_draft=config.jpeg_draft,
    )


@dataclass(frozen=True, kw_only=True)
class RayEngine(OptionValue):
    """A Ray cluster."""

    FORMS = ("ray[:ADDRESS]",)
    EXPECTED = "ray, ray:ADDRESS or ray:auto"

    address: Annotated[str | None, FieldForm(r"\S+", str)] = None  # None: Ray is started on this machine


@dataclass(frozen=True, kw_only=True)
class WantedWorkers(OptionValue):
    """The workers of a Ray cluster.

    >>> WantedWorkers.parse("8@0.5gpu", "--workers")
    WantedWorkers(most=8, gpus=0.5, cpus=None)
    """

    FORMS = ("auto", "MOST[@GPUS[,CPUS]]", "MOST@CPUS[,GPUS]", "@GPUS[,CPUS]", "@CPUS[,GPUS]")
    METAVAR = "N[@Ggpu,Ccpu]"
    EXPECTED = "a number and what each takes, such as 4 or 8@1gpu,4cpu"
    LIMITS: ClassVar = {"most": ONE_OR_MORE}

    most: int | None = None  # None: as many as there is room for
    gpus: Annotated[float | None, in_units({"gpu": 1}, kind=float)] = None  # of each; None: by what the cluster has
    cpus: Annotated[float | None, in_units({"cpu": 1}, kind=float)] = None


AS_THERE_IS_ROOM = WantedWorkers()


@dataclass(frozen=True, kw_only=True)
class SourceArguments(StorageArguments, SourceOptions):
    """How a source is read, and what its captions become."""

    SECTION = "source: how a source and its captions are read"
    FILE = "a data set file"

    captions_from: Annotated[Repeated[tuple[str, ...]], Arg(metavar="NAME|.EXT")] = ()
    """Source of the captions: a column of tables and datasets (or a field of JSON files), or the extension of the files next
    to the images. Repeatable. Default: text, caption, captions, prompt or prompts; .txt, .caption or .json."""
    caption_template: Annotated[Repeated[tuple[str, ...]], Arg(metavar="TEXT")] = ()
    """Store captions in this form, as in `a photo of {caption}, film`; repeatable, each stores a caption. One without {caption}
    is a trigger word: it comes before every caption, with a comma, and is the only one of an image without captions."""
    shuffle_tags: Annotated[str | None, Arg(metavar="N[:KEEP[:SEED]]")] = None
    """Store comma-separated tags in N orders, the first KEEP tags in place; the loader draws one at each step. The orders are
    drawn by sample id and SEED. Default: as they are."""
    caption_per: CaptionPer = "line"
    """line: each line of a text file, or of a cell of a CSV, is a caption, of which training draws one at each step. file: all
    lines are one caption, joined by spaces."""
    follow_links: bool = False
    """Read image, caption and table files through symlinks that lead out of the source. Linked folders are never searched."""
    caption: Annotated[str | None, Arg(metavar="TEXT")] = field(default=None, metadata=ONLY_IN_FILE)
    """Caption of images that have none. Default: the empty caption."""
    dataset_splits: Annotated[Repeated[tuple[str, ...]], Arg(metavar='["NAME[=train|val]", …]')] = field(
        default=(), metadata=ONLY_IN_FILE
    )
    """Splits of the source to pack. Default: all but test. `test=train` packs test as training data."""

    @property
    def caption_rules(self) -> CaptionRules:
        return CaptionRules.parse(self.caption_template, self.shuffle_tags, self.caption_per)

    def listing_of(self, source: Source) -> Listing:
        listing = source.listing()
        note_references(listing)
        caption_rest(listing, self.caption)
        return self.caption_rules.applied(listing)


@dataclass(frozen=True, kw_only=True)
class RulesOptions:
    """Rules of a store, kept in its manifest: `ingest pack` stores by them, `ingest scan` counts by them."""

    SECTION = "rules: what is stored of an image, kept in the manifest"

    grid: Annotated[str | None, Arg(metavar="GRID", words=("sd15", "sdxl", "square:512", "area:1024:64"))] = None
    """sd15, sdxl, square:N, area:N[:STEP], tokens:N[:PX], or sizes HxW,HxW,…; default: the model's own grid."""
    crop: Crop = Crop.CENTER
    """Crop position: the centre, or a random place derived from the sample id and therefore the same in every run."""
    max_crop: Annotated[float, Arg(metavar="SHARE")] = DEFAULT_MAX_CROP
    """Reject images whose crop would lose a larger share of their area; 1 sets no limit."""
    val_fraction: Annotated[str, Arg(metavar="SHARE[:folder]")] = "0.0"
    """Fraction of the samples to hold out, at least one, chosen by a stable hash; 1 holds out all. 0.02:folder hashes the
    image's folder instead of its id, so that crops of one image stay in one split."""
    min_size_px: int = 64
    """Reject images whose shorter side has fewer pixels."""
    dtype: Dtype = "F16"
    """Data type of stored latents and, without --text-dtype, of tokens."""
    text_dtype: TextDtype | None = None
    """Data type of stored tokens: fp16, bf16, fp32, or quantised to about half of 16 bits: int8, with a scale for every 32
    values, or fp8 (E4M3), with a scale per token; delivered as fp16. Default: that of --dtype."""
    latents: LatentsOption = "mode"
    """Stored form of the VAE's distribution: its mode, one sample (seeded by the sample id), or mean and log-variance."""
    flip: bool = False
    """Also store the latent of each horizontally flipped image."""
    text: PackText | None = None
    """plain: store the last hidden state of the model's only text encoder, also if its pipeline is not known and may encode
    captions in another way. Default: as the pipeline that model_index.json names."""
    max_tokens: Annotated[int | None, Arg(metavar="INT")] = None
    """Token limit per caption for the T5 of SD3, Flux and PixArt, or an encoder of no known family; default: its own limit."""
    max_upscale: Annotated[float | None, Arg(metavar="FLOAT")] = field(default=None, metadata=ONLY_IN_FILE)
    """Enlarge images at most by this factor to fill a bucket, and reject those that need more. Default: no limit."""
    background: str = field(default="#ffffff", metadata=ONLY_IN_FILE)
    """Background colour of transparent images: white, black, grey or #RRGGBB."""
    jpeg_draft: bool = field(default=False, metadata=ONLY_IN_FILE)
    """Decode JPEGs at least four times their bucket's size at 1/2, 1/4 or 1/8 scale: 2 to 4 times as fast, but not exact."""
    max_captions: int = field(default=8, metadata=ONLY_IN_FILE)
    """Maximum number of captions per sample; samples with more are counted and listed."""

    @property
    def held_out(self) -> HeldOut:
        return HeldOut.parse(self.val_fraction, "--val-fraction")


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How images are encoded. Stored bytes depend on the data type only."""

    SECTION = "encoding: encoders, devices, shards"

    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model; default: that which diffusers infers."""
    encode_dtype: EncodeDtype = "F32"
    """Data type in which the encoders compute; bf16 is faster on a GPU, where fp32 is TF32 in the VAE's convolutions. A VAE
    that overflows in fp16 gets fp32. int8 and nf4 quantise the text encoders' linear layers to 8 or 4 bits (extra
    `quantised`); what else they have computes in bf16, the VAE in fp32."""
    batch_size: int = 8
    """Images encoded at once, all of one bucket; and captions. More need more memory."""
    device: Annotated[str, Arg(metavar="DEVICE", words=("auto", "cpu", "cuda"))] = "auto"
    """Device of the encoders: auto (CUDA if available), cpu, cuda or cuda:N."""
    phases: Phases = field(default=Phases.AUTO, metadata=ONLY_IN_FILE)
    """one: VAE and text encoders are in memory together. two: first encode all captions and keep them in the store's folder,
    then free the text encoders and load the VAE. auto: two if the weights take more than half of the free memory, and more than
    1 GiB. Stored bytes are the same."""
    shard_size: ByteSize = field(default=USUAL_SHARD, metadata=ONLY_IN_FILE)
    """Seal a shard at this size and begin the next."""
    decode_threads: Annotated[int | None, Arg(metavar="INT")] = field(default=None, metadata=ONLY_IN_FILE)
    """Decoder threads; default: one per core, divided among the processes on this machine."""


FILE_TABLES: dict[str, type] = {"rules": RulesOptions, "encoding": EncodeOptions}
"""The tables of a data set file that have options for all of its sources."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Packing on a Ray cluster."""

    SECTION = "ray: packing on a Ray cluster"

    engine: RayEngine | None = None
    """Pack with workers of a Ray cluster, each of which is a rank: of the cluster at ADDRESS, of the one that `ray:auto` finds,
    or of one started on this machine for this run. Default: in this process, or in the ranks that torchrun started."""
    workers: WantedWorkers = AS_THERE_IS_ROOM
    """Of --engine ray: 8@1gpu are 8 workers, with 1 GPU each; @1gpu,8cpu says only what each takes. auto: as many as the
    cluster has room for, at least 1; a GPU each if it has any, unless --device is cpu; its CPUs for each of its GPUs, or 1.
    A worker decodes with as many threads as it has CPUs."""


@dataclass(frozen=True, kw_only=True)
class WithdrawnOptions:
    """What becomes of ids that `store drop` withdrew."""

    SECTION = "withdrawn: samples that `store drop` took"

    take_back: Annotated[Repeated[tuple[str, ...]], Arg(metavar="ID")] = ()
    """Pack an image again that `store drop` withdrew. Repeatable. Default: withdrawn images are left out."""
    take_back_from: Annotated[Path | None, Arg(metavar="FILE")] = None
    """Read more such ids from this file, one per line."""

    @cached_property
    def taken_back(self) -> tuple[str, ...]:
        from bucketline.store.change.commit import read_ids

        return (*self.take_back, *(read_ids(self.take_back_from) if self.take_back_from else ()))


@dataclass(frozen=True, kw_only=True)
class PackConfig(RulesOptions, SourceArguments, EncodeOptions, RayOptions, WithdrawnOptions, ChangingArguments):
    """Encode images and captions, and pack them into a store.

    SOURCE is a folder, a table of file_name and text (.jsonl, .csv, .parquet), WebDataset tars (photos/{000..012}.tar, a
    glob, any URL that webdataset opens), or a dataset saved on disk by Hugging Face datasets.
    A folder, a table or tars may be in object storage: s3://bucket/photos. What is called test there is left out, and
    validation is held out.

    In a folder, captions come from NAME.txt, .caption or .json next to each image (one caption per line), or from
    metadata.jsonl, .csv or .parquet, which take precedence. Running the same command again packs only new and changed
    images.

    SOURCE may also be a data set file (.toml): one [source] with its path, or several [[source]], each with path, repeats,
    caption and split; and [rules] and [encoding], which have the options of these sections. Of several, STORE is a folder
    with a store per source, which the loader and the trainer read as one.

    STORE may be a URL: shards are made in a folder on a disk (--work), sent, and committed together at the end. An interrupted
    run is continued from there; several machines may pack into one URL.

    A store keeps the rules of its first pack, and where its model is: later packs reuse what their options leave out.

    Example: ingest pack photos photos.store --model stable-diffusion-v1-5 --val-fraction 0.02

    Several processes: torchrun --nproc_per_node 2 -m bucketline.ingest pack photos photos.store --model FOLDER

    On a Ray cluster: ingest pack photos photos.store --model FOLDER --engine ray:auto
    """

    SECTION = "changes: packing again, and what the run prints"
    FIRST = (
        "model",
        "grid",
        "val_fraction",
        "flip",
        "dtype",
        "encode_dtype",
        "batch_size",
        "device",
        "prune",
        "max_rejects",
        "dry_run",
    )

    source: Annotated[Positional[str], Arg(metavar="SOURCE")]
    """Images to pack. A folder is searched recursively; links to folders are not followed."""
    place: Positional[StorePlace]
    """Folder of the store, outside the source; created if missing. Or its URL, such as s3://bucket/photos.store."""
    model: Annotated[str, Arg(metavar="MODEL")] = ""
    """Folder in diffusers layout, one .safetensors checkpoint, or a hub model's name, needed for a new store. The folder has
    vae/, text_encoder/ and tokenizer/. Default: the model of the last pack into STORE on this machine."""
    check: Check = Check.SIZE_TIME
    """How to detect unchanged images: by file size and mtime, or by content (reads every file, encodes only changed ones)."""
    prune: Annotated[str | None, Arg(metavar="N|FRACTION")] = field(default=None, metadata={ALONE: PRUNE})
    """Drop samples whose images are no longer in the source. Nothing is pruned if any image could not be read; nor, with exit
    code 1, if these are more of the store's samples than the count or fraction: without one, 0.1, or 10 if that is more."""
    recaption: bool = False
    """Change the caption options of an existing store: encode only text, and keep the stored latents."""
    max_rejects: Annotated[str | None, Arg(metavar="N|FRACTION")] = None
    """Exit with 1 if more images are rejected, as a count (10) or a fraction (0.01). In that case no sample is dropped."""
    publish_every: Duration | None = None
    """During packing, publish what is packed so far after each such time, such as 10m, so that readers see it. Default:
    publish once, at the end."""
    work: Annotated[Path | None, Arg(metavar="FOLDER")] = None
    """Of a store's URL: folder in which shards are made before they are sent, for all processes. Default: next to the cache."""
    dry_run: bool = False
    """Compare source and store, and print what would be packed, moved, kept and dropped. Writes nothing, loads no encoder."""
    json: bool = False
    """Print the summary as one JSON object."""
    left_out: Hidden[frozenset[str]] = frozenset()
    """Fields that are taken from the store, if there is one, since the command line left them out: its rules, and its model."""

    def __post_init__(self) -> None:
        ChangingArguments.__post_init__(self)
        _check_shared(self)
        refuse_below(1, batch_size=self.batch_size)
        parse_background(self.background)
        if self.max_captions > 1 << 12:
            raise UsageError(f"--max-captions is {self.max_captions}, expected 4096 or fewer")
        reject_limit(self.max_rejects)
        if self.prune is not None:
            prune_limit(self.prune)
        self._check_engine()
        if self.publish_every is not None and self.recaption:
            raise UsageError(
                f"--publish-every {self.publish_every}: --recaption replaces all captions in one generation; leave one out"
            )
        if self.publish_every is not None and not self.publish_every.seconds:
            raise UsageError(f"--publish-every is {self.publish_every}, expected more than 0")
        if self.work is not None and isinstance(self.place, Path):
            raise UsageError(f"--work {self.work}: it is for a store in object storage; leave it out")

    def _check_engine(self) -> None:
        if self.engine is None:
            if self.workers != AS_THERE_IS_ROOM:
                raise UsageError(f"--workers {self.workers}: it is for --engine ray; give that as well, or leave it out")
            return
        if self.device.startswith("cuda:"):
            raise UsageError(f"--device {self.device}: Ray gives each worker GPUs of its own; say cuda, with --workers @1gpu")

    @property
    def vae_dtype(self) -> str:
        """The data type in which the VAE computes, which is never quantised."""
        return "F32" if self.encode_dtype in ("int8", "nf4") else self.encode_dtype

    @property
    def store(self) -> Path:
        """Folder of the store, or the one in which a store in object storage is packed into."""
        return working_folder(self.place, self.work)


@dataclass(frozen=True, kw_only=True)
class ScanConfig(RulesOptions, SourceArguments):
    """Count, bucket and reject images without packing. A dry run of `ingest pack`: writes nothing.

    Image sizes are read from the file headers; --full decodes every image. With --model, the model's config.json files
    determine the grid; no weights are read. Without --model, the grid is area:512:64. Nothing is encoded, so a caption that the
    model does not take is seen only by a pack. -o writes a contact sheet: the images of each bucket that lose most to
    their crop, with their captions as they would be stored.

    Example: ingest scan photos --grid area:512:64 -o sheet.html
    """

    SECTION = "scan: how closely to look, and where to write it"
    check: ClassVar = Check.SIZE_TIME  # there is no store to compare with
    FIRST = ("model", "grid", "crop", "val_fraction", "max_crop", "min_size_px", "full", "output", "json")

    source: Annotated[Positional[str], Arg(metavar="SOURCE")]
    """Images to look at, as for `ingest pack`."""
    model: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder in diffusers layout (vae/, text_encoder/, tokenizer/), one .safetensors checkpoint, or a hub model's name."""
    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model; default: that which diffusers infers."""
    dtype: Hidden[Dtype] = "F16"  # this and the following: only how a pack stores an image and its captions
    text_dtype: Hidden[TextDtype | None] = None
    flip: Hidden[bool] = False
    max_tokens: Hidden[int | None] = None
    full: bool = False
    """Decode every image to find damage after the header, too."""
    decode_threads: Annotated[int | None, Arg(metavar="INT")] = field(default=None, metadata=ONLY_IN_FILE)
    """Reader threads; default: one per core, at most four."""
    output: Annotated[Path | None, Arg(aliases=("-o",), metavar="HTML")] = None
    """HTML file to write: a contact sheet of each bucket's 24 worst crops and the rejects."""
    json: bool = False
    """Print the report as one JSON object, including every reject."""

    def __post_init__(self) -> None:
        _check_shared(self)
        if self.model_config is not None and self.model is None:
            raise UsageError(f"--model-config {self.model_config} requires a .safetensors --model; add it")


def _check_shared(options: PackConfig | ScanConfig) -> None:
    SourceOptions.__post_init__(options)
    if options.grid is not None:
        refuse_other_form(options.grid)
    _ = options.held_out
    refuse_below(1, min_size_px=options.min_size_px, max_captions=options.max_captions, max_tokens=options.max_tokens)
    upscale_limit(options.max_upscale)
    crop_limit(options.max_crop)
    options.caption_rules.refuse_too_many(options.max_captions)


# ---------------------------------------------------------------------------------------------------------------- stored rules
# The options that a store keeps: recorded as its manifest's `rules`, compared with a run's, and named as they are typed.

CAPTION_OPTIONS = ("caption_template", "shuffle_tags", "caption_per")
STORED_OPTIONS = (*(one.name for one in fields(RulesOptions)), "encode_dtype", *CAPTION_OPTIONS)
"""The fields of the options that a store keeps: `max_captions` as the manifest's own field, the others in its `rules`."""
_IN_FILE_ONLY = {one.name for one in fields(RulesOptions) if one.metadata == ONLY_IN_FILE} | {"references_area", "mask"}


def recorded_rules(config: PackConfig, grid: str | None) -> dict[str, Json]:
    """Return the rules of a run as a manifest records them; `grid` is the name of its grid."""
    rules: dict[str, Json] = {name: encode(getattr(config, name)) for name in STORED_OPTIONS if name != "max_captions"}
    return {
        **rules,
        "grid": grid,
        "crop": config.crop.value,
        "resampling": RESAMPLING,
        "background": parse_background(config.background),
        "max_crop": float(config.max_crop),
        "max_upscale": None if config.max_upscale is None else float(config.max_upscale),
        "val_fraction": str(config.held_out),
        "text_dtype": None if config.text_dtype == config.dtype else config.text_dtype,
        **config.caption_rules.as_json(),
        **{name: value for name, value in _partner_rules(config).items() if value is not None},
    }


def _partner_rules(config: PackConfig) -> dict[str, Json]:
    """Return what a store records of how partners become columns."""
    return {"references_area": config.references_area, "mask": config.partner_rules.mask_source}


def stored_options(manifest: Manifest) -> dict[str, Json]:
    return {**manifest.rules, "max_captions": manifest.max_captions}


def refuse_other_options(
    config: PackConfig, stored: Manifest, encoders: Mapping[str, Json], rules: Mapping[str, Json] | None = None
) -> None:
    """Check that a run adds to a store what the store is made of, by its encoders and `rules`; without these, by its encoders.

    `--recaption` allows other caption rules.
    """
    if isinstance(imported := stored.rules.get("import"), dict):
        raise FingerprintError(
            f"{config.store} was imported from a cache of {imported.get('kind')!s:.40}, and how its images were resized and "
            "cropped is not known; pack into a new store"
        )
    before = stored_options(stored)
    now = before if rules is None else {**rules, "max_captions": config.max_captions}
    allowed = CAPTION_OPTIONS if config.recaption else ()
    shown = {name: (shown_option(name, before.get(name)), shown_option(name, now.get(name))) for name in {**now, **before}}
    changed = {name: pair for name, pair in shown.items() if pair[0] != pair[1] and name not in allowed}
    others = [
        f"  {field} = {one!s:.200}, this run has {other!s:.200}"
        for field, one, other in differences(stored.encoders, dict(encoders), "encoders")
    ]
    steps = ["leave these options out, so that the store's are taken"] if changed else []
    steps += ["add --recaption to encode the captions again"] if {*CAPTION_OPTIONS} & {*changed} else []
    steps += [f"name the store's model in place of {redacted(config.model)}"] if others else []
    if steps:
        advice = f"{', '.join(steps)}, or pack into a new store"
        raise FingerprintError(
            f"{config.store} was made with other options than this run has:",
            *(f"  {one}, this run has {other}" for one, other in changed.values()),
            *others,
            advice[0].upper() + advice[1:],
        )


def shown_option(name: str, value: Json) -> str:
    """Return an option with its value as it is typed, or as a data set file has it.

    >>> shown_option("crop", "random"), shown_option("flip", False), shown_option("background", "#ffffff")
    ('--crop random', 'no --flip', 'background = "#ffffff"')
    """
    is_set = value is not None and value is not False and value != []
    if name in _IN_FILE_ONLY:
        return f"{name} = {as_toml(value)}" if is_set else f"no {name}"
    option = f"--{name.replace('_', '-')}"
    if value is True or not is_set:
        return option if is_set else f"no {option}"
    words = map(str, value if isinstance(value, list) else [value])
    return shlex.join(word for one in words for word in (option, dtype_name(one) if name.endswith("dtype") else one))
