"""The model of a run: found, read, checked against the stores, on its devices, with its optimizer and average."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from torch.nn.parallel import DistributedDataParallel

from bucketline.errors import ModelError
from bucketline.families.family import Family, StoreFacts
from bucketline.families.registry import (
    FAMILIES,
    class_name,
    crossed,
    family_named,
    family_of_model,
    family_of_pipeline,
    nearest,
    takes_images,
)
from bucketline.families.vaes import PACKED_VAES, vae_class
from bucketline.loader.batch import LatentScale
from bucketline.loader.ranks import fail_together
from bucketline.model_file import (
    DIFFUSERS,
    ModelFile,
    cast,
    config_hash,
    index_path,
    open_model_file,
    read_model_json,
    refuse_config_without_file,
    safetensors_of,
    single_file,
    variant_of,
    weights_hash,
)
from bucketline.store.format.block import LATENT
from bucketline.train.checkpoint import average_folder, layout_of, load_optimizer, load_weights
from bucketline.train.config import Base, Compile, EmaPlace, Precision, TrainConfig, WeightDtype
from bucketline.train.lora import add_adapters
from bucketline.train.noise import Prep, load_schedule
from bucketline.train.optim import Average, make_optimizer
from bucketline.train.parallel import (
    TrainRanks,
    fill_from_rank_zero,
    from_rank_zero,
    layout_on,
    shard,
    tables_of,
    tensors_of,
)
from bucketline.train.step import Training, mean_weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import nn

    from bucketline.loader import Loader
    from bucketline.store import Bucket, Store
    from bucketline.train.checkpoint import Start, WeightLayout
    from bucketline.train.noise import Schedule
    from bucketline.typed_json import Json


# ------------------------------------------------------------------------------------------------------------------------ load
# Load a model: find its family, check it and its encoders against the store, read its weights or initialize them at random.

WEIGHT_SUFFIXES = (".safetensors", ".bin")
VAE_FOLDER = "vae"
DENOISER_FOLDERS = ("unet", "transformer")  # folders of a model
UNREADABLE = (OSError, ValueError, RuntimeError, AttributeError, NotImplementedError)  # diffusers' errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a model's configurations say of it."""

    folder: Path  # in diffusers' layout
    file: ModelFile | None  # the single file that has the weights instead of the folder
    index: dict[str, Any]  # model_index.json; empty if there is none that can be read
    part: Path  # folder of the transformer or UNet
    config: dict[str, Json]  # of that, with the name of its present class
    family: type[Family]


def store_channels(store: Store) -> int:
    """Return the number of channels of a store's latents; if it has moments, of a latent drawn from them."""
    vae = store.manifest.encoders.get("vae")
    channels = vae.get("latent_channels") if isinstance(vae, dict) else None
    if not isinstance(channels, int):
        raise ModelError(
            f"{store.place}: its manifest has no number encoders.vae.latent_channels, so it is not known which model its "
            "latents fit; pack or import the source again with the model's VAE"
        )
    return channels


def facts_of(store: Store, buckets: Iterable[Bucket]) -> StoreFacts:
    """Return the facts of a store that a model must match, from its manifest and the training buckets."""
    manifest, buckets = store.manifest, list(buckets)
    text = entry if isinstance(entry := manifest.encoders.get("text_encoder"), dict) else {}
    num_classes = text.get("num_classes")
    columns = manifest.text.spec().delivered
    sizes = [(bucket.name, bucket.spec.column(LATENT).shape) for bucket in buckets]
    imported = manifest.rules.get("import")
    return StoreFacts(
        latent_channels=store_channels(store),
        text={column.name: column.shape[-1] for column in (*columns.tokens, *columns.fixed)},
        num_classes=num_classes if isinstance(num_classes, int) else None,
        shows_padding=text.get("padding") != "valid",
        px_per_latent=(buckets[0].height_px // sizes[0][1][1] if buckets else 0) or 8,
        latent_sizes=tuple((name, shape[1], shape[2]) for name, shape in sizes),
        reference_sizes=tuple(
            (bucket.name, tuple((height, width) for _, height, width in bucket.references.values())) for bucket in buckets
        ),
        sees_images=manifest.sees_images,
        has_crops=not isinstance(imported, dict) or imported.get("crop") != "unknown",
        family=str(text.get("family") or ""),
    )


def open_model_config(model: Path, config: str | None = None) -> ModelConfig:
    """Read the configurations of a model, given by the options --model and --model-config, and find its family."""
    file = None
    if (path := single_file(model)) is not None:
        file = open_model_file(path, config)
    else:
        refuse_config_without_file(model, config)
    folder = model if file is None else file.config
    paths = [path for name in DENOISER_FOLDERS if (path := folder / name / "config.json").exists()]
    if not paths:
        kind = "is a file" if folder.is_file() else "has neither unet/config.json nor transformer/config.json"
        raise ModelError(
            f"{folder} {kind}; --model must be a folder in diffusers' layout with one of unet/ and transformer/ (a "
            "configuration without weights starts at random), or a .safetensors file"
        )
    path = paths[0]
    own, index, name = read_model_json(path), _read_index(folder), index_path(folder).name
    kind, pipeline = str(class_name(own)), index.get("_class_name")
    if (wrong := takes_images(index)) is not None:
        raise ModelError(f"{folder}: {name} {wrong}")
    if (wrong := crossed(index, own, path.parent.name)) is not None:
        raise ModelError(f"{folder}: {name} {wrong}, or remove {name}")
    family = family_of_model(own, path.parent.name, pipeline)
    if family is None:
        classes = {one.model_class: f"{one.folder}/ {one.model_class}" for one in FAMILIES}
        raise ModelError(
            f"{path}: _class_name is {kind!r:.80}, expected one of {', '.join(sorted(classes.values()))}"
            f"{nearest(kind, classes)}; name a model of one of these"
        )
    if family.is_shared_class and pipeline not in (None, *family.pipelines):
        raise ModelError(
            f"{folder}: {name} names the pipeline {pipeline!s:.80}, and a {kind} can be trained as that of "
            f"{family.pipelines[0]} only; name such a model"
        )
    own = {**own, "_class_name": family.model_class}
    return ModelConfig(folder=folder, file=file, index=index, part=path.parent, config=own, family=family)


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads(index_path(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def schedule_of(config: TrainConfig, model: ModelConfig, family: Family, device: torch.device) -> Schedule:
    """Return the noise schedule of a model, with the run's objective and shift."""
    return load_schedule(
        model.folder,
        device,
        objective=config.objective,
        shift=config.shift,
        patch_size=family.patch_size,
        published=family.scheduler,
        levels=family.noise_levels(model.index),
    )


def load(
    model: ModelConfig, store: StoreFacts, seed: int, *, dtype: torch.dtype = torch.float32, on_meta: bool = False
) -> tuple[Family, nn.Module]:
    """Return a model's family, and the model: read, or at random from the seed if it has no weights, or empty (`on_meta`)."""
    family = checked(model, store)
    model_class = getattr(diffusers, family.model_class)
    found: nn.Module
    if on_meta:
        with torch.device("meta"):
            found = cast(model_class.from_config(model.config), dtype)
    elif model.file is not None:
        found = model.file.load(model.part.name, dtype)
    elif weights := weight_files(model.part):
        found = _from_weights(model_class, model.part, weights, dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found = cast(model_class.from_config(model.config), dtype)
    family.prepare(found)
    return family, found.requires_grad_(requires_grad=True).train()


def checked(model: ModelConfig, store: StoreFacts) -> Family:
    # Fields missing in the file get the class's defaults, so that the check sees the resolved configuration.
    parameters = inspect.signature(getattr(diffusers, model.family.model_class).__init__).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    config, kind, packed = {**defaults, **model.config}, model.family, family_named(store.family)
    if "_class_name" not in model.index and packed is not None and packed.takes(kind.model_class, config):
        kind = packed  # such as a model of references, which has the transformer of one without
    family = kind(config, store)
    path, text = model.part / "config.json", store.text
    for column in family.columns:
        if column not in text:
            raise ModelError(
                f"{path}: a {family.model_class} needs the text column {column}, and the store has {', '.join(text)}; "
                "pack the source with this model's own encoders"
            )
    for expected in family.expects():
        if not expected.is_met:
            raise ModelError(
                f"{path}: {expected.field} is {expected.found}, expected {expected.wanted}, since {expected.because}; "
                "train a model that matches, or pack the source with this model's own encoders"
            )
    if model.file is not None or weight_files(model.part):  # one that starts at random learns whatever captions the store has
        _check_captions(family, path, model.index.get("_class_name"))
    return family


def weight_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)


def _check_captions(family: Family, path: Path, pipeline: Json) -> None:
    """Check that the store's captions were encoded for the family of a model with weights, of a `pipeline` if that is named."""
    packed = family_named(family.store.family)
    is_named = family_of_pipeline(str(pipeline)) is not None
    if packed is None or packed.name == family.name or (not is_named and packed.takes(family.model_class, family.config)):
        return
    raise ModelError(
        f"{path}: the weights are of the family {family.name}, and the store's captions were encoded by {packed.pipelines[0]}, "
        f"of {packed.name}, expected {family.pipelines[0]}: pack the source with this model's own encoders, or remove the "
        "weights if the model is to learn from the start"
    )


def _from_weights(model_class: Any, folder: Path, names: list[str], dtype: torch.dtype) -> nn.Module:  # noqa: ANN401 - untyped
    variant = variant_of(f"{folder}/", (path.name for path in folder.iterdir()), DIFFUSERS)
    # diffusers prefers safetensors too, but where there are none it prints an error before it reads the .bin
    is_safe = bool(safetensors_of(names, DIFFUSERS, variant))
    advice = "expected safetensors of the config.json next to them: download the model again"
    try:
        loaded, report = model_class.from_pretrained(
            str(folder),
            torch_dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
            variant=variant,
            use_safetensors=is_safe,
        )
    except Exception as error:  # diffusers passes on the errors of all its readers; they mean the same here
        advice += "" if is_safe else ", or convert it with `save_pretrained` of diffusers where it can be read"
        raise ModelError(f"{folder}: the weights ({', '.join(names)}) cannot be loaded: {error!s:.500}; {advice}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            found = sorted(map(str, report[kind]))[:3]
            raise ModelError(f"{folder}: the weights do not match config.json: {kind} {found}; {advice}")
    model: nn.Module = loaded
    return model


def refuse_other_encoders(model: ModelConfig, encoders: Mapping[str, Json]) -> None:
    """Refuse a model whose VAE or text encoders have another configuration than the store's, or its VAE other weights."""
    text = encoders.get("text_encoder")
    text = text if isinstance(text, dict) else {}
    parts = text.get("parts") or {"text_encoder": text}  # a family of several encoders lists each
    assert isinstance(parts, dict)
    others: list[str | None] = []
    for name, stored in {VAE_FOLDER: encoders["vae"], **parts}.items():
        try:
            config = json.loads((model.folder / name / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        what, found = "text encoder", {"config_hash": config_hash(config)}
        if name == VAE_FOLDER:
            what, found = "VAE", {"class": vae_class(config), **found}
        if isinstance(stored, dict):
            others.append(_difference(model.folder / name, what, found, stored))
    if not any(others):
        with contextlib.suppress(*UNREADABLE):  # a warning follows when images are drawn
            others.append(read_vae(model, encoders)[1])
    if other := next(filter(None, others), None):
        raise ModelError(
            f"{other}; this model was trained with its own encoders: pack the source with those of this folder, or remove "
            "that part from the folder if the model is meant to learn from the store's"
        )


def read_vae(model: ModelConfig, encoders: Mapping[str, Json]) -> tuple[nn.Module, str | None]:
    """Load a VAE, of a file that lacks it from its configuration's folder; return it, and how the store's differs."""
    stored, folder, file = encoders["vae"], model.folder / VAE_FOLDER, model.file
    assert isinstance(stored, dict)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = vae_class(config)
    if kind not in PACKED_VAES:
        raise ValueError(f"its class is {kind!r:.80}, expected {' or '.join(PACKED_VAES)}")
    try:
        if file is not None and file.has(VAE_FOLDER):
            vae = file.load(VAE_FOLDER)
        else:
            variant = variant_of(f"{folder}/", (path.name for path in folder.iterdir()), DIFFUSERS)
            of_class: Any = getattr(diffusers, kind)
            vae = of_class.from_pretrained(str(folder), torch_dtype=torch.float32, local_files_only=True, variant=variant)
    except ModelError as error:
        raise ValueError(str(error)) from error
    found = {"config_hash": config_hash(config), "weights_hash": weights_hash(vae)}
    return vae.requires_grad_(requires_grad=False).eval(), _difference(folder, "VAE", found, stored)


def _difference(folder: Path, what: str, found: Mapping[str, str], stored: Mapping[str, Json]) -> str | None:
    for field, value in found.items():
        if field in stored and stored[field] != value:
            return (
                f"{folder} is not the {what} that the store was packed with: its {field} is {value}, "
                f"the store has {stored[field]}"
            )
    return None


# ----------------------------------------------------------------------------------------------------------------------- model

log = logging.getLogger(__name__)

GPU_BUCKET_MB = 100  # of gradients exchanged at a time: NVLink moves torch's default of 25 MB faster than NCCL starts a call


def build_training(config: TrainConfig, ranks: TrainRanks, start: Start, loader: Loader) -> tuple[Training, WeightLayout]:
    """Build what a step needs: the model, checked against the stores, on its devices, with the checkpoint's tensors if any."""
    device, vae = loader.device, loader.stores[0].store.manifest.encoders["vae"]
    assert isinstance(vae, dict)
    family, model, schedule = _load_model(config, ranks, start, loader)
    layout = layout_of(family, adapters=config.lora_rank is not None, scheduler=schedule.config)
    compiled = compiles(config, device)
    if config.recompute:
        from bucketline.train.lowbit import recompute

        recompute(model, config.recompute, is_compiled=compiled)
    if compiled:
        from bucketline.train.compile import compile_blocks

        compile_blocks(model, family)
    if config.offload_blocks:
        from bucketline.train.lowbit import offload_blocks

        offload_blocks(model, config.offload_blocks, device, layout_on(device))
    average = place_model(model, config, ranks, device, layout, start.checkpoint)
    optimizer = make_optimizer(config, model, compiled=compiled)
    if start.checkpoint is not None and start.state is not None:
        load_optimizer(start.checkpoint, model, optimizer)
    is_replicated = ranks.world_size > 1 and not config.is_sharded(ranks.world_size)
    training = Training(
        config=config,
        family=family,
        model=replicated(model, family, config, device) if is_replicated else model,
        optimizer=optimizer,
        average=average,
        prep=Prep(scale=LatentScale.of(family.scaling(vae), device), schedule=schedule, options=config, compiled=compiled),
        autocast=torch.autocast(device.type, torch.bfloat16, enabled=config.autocasts),
        mean_weight=mean_weight(config, loader.stores),
    )
    return training, layout


def _load_model(config: TrainConfig, ranks: TrainRanks, start: Start, loader: Loader) -> tuple[Family, nn.Module, Schedule]:
    store, device = loader.stores[0].store, loader.device  # all stores have the encoders of the first
    source = open_model_config(config.model, config.model_config)
    # Frozen weights are never updated, so they need no more precision than they are computed in.
    is_bf16 = config.weights is WeightDtype.BF16 or (config.lora_rank is not None and config.precision is Precision.BF16)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    facts = facts_of(store, loader.rows.buckets())
    with fail_together():  # rank 0 reads the weights, and the others wait for it
        on_meta = not (ranks.is_main or loads_alone(config))
        family, model = load(source, facts, config.seed, dtype=dtype, on_meta=on_meta)
    family.guidance = config.guidance
    schedule = schedule_of(config, source, family, device)
    if config.lora_rank is not None:
        add_adapters(model, family, config)
        if config.lora_from is not None and start.checkpoint is None:
            from bucketline.train.lora_file import start_from

            start_from(config.lora_from, model, family.lora_pipeline)
    if config.precision is Precision.FP8:
        from bucketline.train.lowbit import use_float8

        log.info("%d linear layers compute in 8-bit floats", use_float8(model))
    if isinstance(config.base, Base):
        from bucketline.train.lowbit import quantise_base

        quantise_base(model, config.base, device)
    return family, model, schedule


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Return whether a run's blocks are compiled on a device."""
    return config.compile is Compile.ON or (config.compile is Compile.AUTO and device.type == "cuda")


def loads_alone(config: TrainConfig) -> bool:
    """Return True if every rank reads the whole model: quantised and offloaded weights are not sent."""
    return isinstance(config.base, Base) or bool(config.offload_blocks)


def place_model(
    model: nn.Module, config: TrainConfig, ranks: TrainRanks, device: torch.device, layout: WeightLayout, folder: Path | None
) -> Average:
    """Place a model on the device, in place, and return its average; both are those of the checkpoint in `folder`, if any.

    Of several ranks, only rank 0's model has values, in host memory, unless each `loads_alone`.
    """
    memory_format = layout_on(device)
    alone = ranks.world_size == 1 or loads_alone(config)
    if alone:
        model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    else:
        whole = tensors_of(model)
        torch.nn.Module.to(model, "meta")
        if config.is_sharded(ranks.world_size):  # FSDP2 takes only contiguous parameters
            shard(model, device, torch.bfloat16 if config.autocasts else torch.float32)
        else:
            torch.nn.Module.to(model, memory_format=memory_format)  # type: ignore[call-overload]
        model.to_empty(device=device)
        fill_from_rank_zero(tensors_of(model), whole)
        for path, tables in from_rank_zero(ranks, lambda: tables_of(model)).items():
            vars(model.get_submodule(path)).update(tables)
    if folder is not None:
        load_weights(folder, layout, model, alone=alone)
    average = Average(model, config.ema.decay, place=config.ema.place or EmaPlace.DEVICE, every=config.ema.every)
    # without one in the checkpoint, it starts from the weights
    if folder is not None and average.is_kept and from_rank_zero(ranks, (folder / average_folder(layout)).is_dir):
        with average.applied():
            load_weights(folder, layout, model, averaged=True, alone=alone)
    return average


def replicated(model: nn.Module, family: Family, config: TrainConfig, device: torch.device) -> DistributedDataParallel:
    """Return a placed model whose ranks average their gradients; each has the same weights by now, which are not sent again."""
    on_gpu = device.type == "cuda"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # torch before 2.13 has no other name
        return DistributedDataParallel(
            model,
            device_ids=[device] if on_gpu else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # no family changes a buffer, and SD3's position embeddings are 226 MB
            bucket_cap_mb=GPU_BUCKET_MB if on_gpu else 25,
            init_sync=loads_alone(config),
            # else the gradients of others would not be averaged; looked for where there are some, since it takes time
            find_unused_parameters=any(
                one in name for name, own in model.named_parameters() if own.requires_grad for one in family.unused_layers
            ),
        )
