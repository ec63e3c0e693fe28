"""Exports: a run's weights as a folder that diffusers, peft and a hub take; uploads and model cards.

exports/step-00000120/
    README.md         the model card
    unet/             the weights as diffusers loads them; or transformer/; of adapters, their files without a folder
    scheduler/        of a whole model: the configuration of its schedule, as in a checkpoint

A whole pipeline has model_index.json, and copies of the other parts of the model that the run began from, as well.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
from safetensors import SafetensorError
from safetensors.torch import load_file

from bucketline.errors import ModelError, StateError, TrainError, UsageError
from bucketline.families.family import MODULAR
from bucketline.files.atomic_write import failed_write, move_durably, refuse_existing, staged_folder
from bucketline.files.paths import CHECKPOINTS
from bucketline.loader.mixture import StoreId
from bucketline.model_file import (
    DIFFUSERS,
    PICKLED,
    SUFFIX,
    TRANSFORMERS,
    converter,
    file_tensors,
    index_path,
    read_model_json,
    safetensors_of,
    single_file,
    variant_of,
)
from bucketline.torch_dtypes import dtype_named
from bucketline.train import checkpoint
from bucketline.train.checkpoint import (
    ADAPTERS,
    AVERAGE_SUFFIX,
    CARD,
    MODEL_FILE,
    Adapters,
    average_folder,
    folder_of_step,
    save_tensors,
    weights_folder,
)
from bucketline.train.log import against_zero, versions
from bucketline.train.lora_file import read_tensors
from bucketline.train.model import open_model_config
from bucketline.train.noise import FLOW_CLASS
from bucketline.train.noise import SCHEDULER_CONFIG as SCHEDULER
from bucketline.train.parallel import plain_class
from bucketline.train.run_file import config_as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from bucketline.families.family import Family
    from bucketline.loader import WeightedStore
    from bucketline.train.checkpoint import WeightLayout
    from bucketline.train.step import Training, ValidationResult


# ------------------------------------------------------------------------------------------------------------------------- hub
# For a hub: the model card next to the weights, and the upload of the last export to huggingface.co.

_LOADING, _DATA = "## Load it\n", "## Data, configuration and versions\n"
_CACHED = "models--"  # how huggingface_hub's cache begins the name of a model's folder, with -- for each /
_OURS = "bucketline"  # a tag
_LICENSE = ("license", "license_name", "license_link")
_POLL_S = 0.2


def model_card(
    training: Training,
    weights: WeightLayout,
    stores: Sequence[WeightedStore],
    steps_done: int,
    validation: ValidationResult | None,
    *,
    of_export: bool = False,
) -> str:
    """Return the card of a checkpoint or an export, in Markdown."""
    config, kind = training.config, plain_class(training.bare_model).__name__
    encoders = stores[0].store.manifest.encoders
    made_of = {
        "stores": [
            {
                **asdict(StoreId.of(weighted)),
                "path": str(weighted.store.place).rpartition("/")[2],
                "rows": sum(bucket.num_rows for bucket in weighted.store.buckets()),
            }
            for weighted in stores
        ],
        "encoders": {
            name: {key: value for key, value in entry.items() if isinstance(value, str | int | float)}
            for name, entry in encoders.items()
            if isinstance(entry, dict)
        },
        "configuration": config_as_json(config),
        "versions": versions(),
    }
    has_average = training.average.is_kept
    if of_export:
        folder, kept = weights_folder(weights.folder), "moving average of the weights" if has_average else "last weights"
        where = f"this folder. It has the {kept}, in {config.export_dtype}."
    else:
        folder = average_folder(weights) if has_average else weights.folder
        where = f"the folder of a checkpoint (`checkpoints/{folder_of_step(steps_done)}` in the run's folder)."
        if has_average:
            where += f" This is the moving average; `{weights.folder}` has the last weights."
    score = "" if validation is None else f"Validation {against_zero(validation.loss, validation.zero_loss)}.\n"
    return f"""{card_fields(config.model, training.family, adapters=isinstance(weights, Adapters))}
# {config.output_dir.name}

`{kind}`, {steps_done} optimizer steps from `{config.model.name}`, trained with Bucketline.
{score}
{_LOADING}
From {where}

```python
{_example(weights, kind, folder)}
```

{_DATA}
The digest of a store is its manifest's, which holds the digest of every file.

```json
{json.dumps(made_of, indent=1, ensure_ascii=False)}
```
"""


def _example(weights: WeightLayout, kind: str, folder: str) -> str:
    """Return Python lines that load the weights in a `folder`, of a model's class `kind`."""
    if not isinstance(weights, Adapters):
        return f'from diffusers import {kind}\n\nmodel = {kind}.from_pretrained(".", subfolder="{folder}")'
    if weights.pipeline:
        return f'{_opened(weights.pipeline, "the model that was trained from")}\npipeline.load_lora_weights("{folder}")'
    return f"""from diffusers import {kind}
from peft import PeftModel

model = {kind}.from_pretrained("the model that was trained from", subfolder="{weights.part}")
model = PeftModel.from_pretrained(model, "{folder}")"""


def _opened(pipeline: str, place: str, dtype: torch.dtype = torch.float32) -> str:
    """Return Python lines that open a pipeline of diffusers, of weights in a dtype; a modular one loads its parts by itself."""
    is_modular, is_other = pipeline.endswith(MODULAR), dtype is not torch.float32
    before = "import torch\n" if is_other else ""
    more = f", torch_dtype={dtype}" if is_other and not is_modular else ""
    then = f"\npipeline.load_components({f'dtype={dtype}' if is_other else ''})" if is_modular else ""
    return f'{before}from diffusers import {pipeline}\n\npipeline = {pipeline}.from_pretrained("{place}"{more}){then}'


def pipeline_card(card: str, model: Path, family: type[Family], *, dtype: str, kept: str) -> str:
    """Return the card of a whole pipeline, from the card of the checkpoint that has its trained weights.

    `model`: which the run began from. `kept`: which of the run's weights it has.
    """
    pipeline = family.pipelines[0] if family.pipelines[0].endswith(MODULAR) else "DiffusionPipeline"
    head = ModelCard(card, ignore_metadata_errors=True).text.partition(_LOADING)[0].strip()
    return f"""{card_fields(model, family, adapters=False)}
{head}

{_LOADING}
From this folder, a whole pipeline. Its {family.folder} has the {kept}, in {dtype}.

```python
{_opened(pipeline, ".", dtype_named(dtype))}
```

{_DATA}{card.partition(_DATA)[2]}"""


def card_fields(model: Path, family: Family | type[Family], *, adapters: bool) -> str:
    """Return the fields of a card that hubs index, as YAML between its fences.

    `model`: which the run began from. huggingface_hub's cache has its name on a hub, or if it is a run's, that run's card; its
    own card has the licence. Data sets are left out: a store does not know their names on a hub.
    """
    cached = (part.removeprefix(_CACHED) for part in model.absolute().parts if part.startswith(_CACHED))
    on_hub = next((name.replace("--", "/") for name in cached), None)
    folder = model if on_hub is None or model.is_dir() else model.parent  # a loose file has no card
    try:
        found = dict(vars(ModelCard((folder / CARD).read_text(encoding="utf-8")).data))
    except Exception:  # noqa: BLE001 - a card that cannot be read, or whose fields are not YAML, has none for ours
        found = {}
    base = found.get("base_model") if _OURS in (found.get("tags") or ()) else on_hub
    fields: dict[str, Any] = {name: found[name] for name in _LICENSE if found.get(name)}
    if base is not None:
        fields |= {"base_model": base, "base_model_relation": "adapter" if adapters else "finetune"}
    if family.parts:  # of classes there is no such task
        fields |= {"pipeline_tag": "text-to-image"}
    tags = ["diffusers-training", family.name.replace("_", "-"), *(["lora"] if adapters else []), _OURS]
    library = "diffusers" if family.has_lora_loader or not adapters else "peft"
    return f"---\n{ModelCardData(library_name=library, tags=tags, **fields).to_yaml()}\n---\n"


class HubUpload:
    """The upload of a run's last export, as a commit, by huggingface_hub's own thread; a failure never ends a run."""

    def __init__(self, repo: str, say: Callable[[str], None]) -> None:
        """Begin to make the repository, so that what prevents it is reported at the start of a run, not at its end."""
        self._repo, self._say, self._api = repo, say, HfApi()
        self._pushed: tuple[Path, Future[None]] | None = None
        if get_token() is None:
            log.warning(
                "--push-to-hub %s: there is no token, so uploads fail until `hf auth login` or HF_TOKEN gives one", repo
            )
        disable_progress_bars()  # the run has its own
        self._api.run_as_future(self._make).add_done_callback(self._report)

    def push(self, folder: Path, message: str) -> None:
        self._pushed = folder, self._api.run_as_future(self._upload, folder, message)
        self._pushed[1].add_done_callback(self._report)

    def finish(self, is_stopped: Callable[[], bool]) -> None:
        """Wait for the upload, until `is_stopped`: one that has not begun is left. Then report if it is not there."""
        if self._pushed is None:
            return
        folder, upload = self._pushed
        if not upload.done() and not is_stopped():
            self._say(f"uploading to {self._repo}; Ctrl-C leaves it, the run is complete")
        while not is_stopped() and wait([upload], _POLL_S).not_done:
            pass
        upload.cancel()
        if not upload.done() or upload.cancelled() or upload.exception() is not None:
            log.warning("%s is not uploaded: hf upload %s %s does it", folder, self._repo, folder)

    def _make(self) -> None:
        self._api.create_repo(self._repo, private=True, exist_ok=True)

    def _upload(self, folder: Path, message: str) -> None:
        self._make()
        self._api.upload_folder(repo_id=self._repo, folder_path=folder, commit_message=message)

    def _report(self, ended: Future[None]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            log.warning("--push-to-hub %s: %.300s; the run continues", self._repo, reason)


# ---------------------------------------------------------------------------------------------------------------------- export

log = logging.getLogger(__name__)

_PARTS = ("unet", "transformer", ADAPTERS)
_SCHEDULER_PART = "scheduler"
_BASES = DIFFUSERS + TRANSFORMERS
_WHOLE = "name the folder of the whole model by --like, or leave out --pipeline to export only the trained weights"
_WEIGHTS = re.compile(r".*\.(safetensors|bin|ckpt|pth?|msgpack|h5|ot|onnx|onnx_data)(\.index.*\.json)?")
_WITHOUT_WEIGHTS = {"tokenizer_config.json", "preprocessor_config.json", "processor_config.json"}
_FLOW_SOLVER = "DPMSolverMultistepScheduler"  # for pipelines of diffusion models: they scale inputs, which FLOW_CLASS cannot
_OF_A_FLOW = (
    *("shift", "use_dynamic_shifting", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"),
    "time_shift_type",
)
OLD_AVERAGE = "model_ema."  # a file's own moving average, which some tools would prefer to the trained weights


def write_export(
    folder: Path, weights: WeightLayout, config: str, tensors: dict[str, Tensor], *, dtype: str, card: str
) -> None:
    """Write an export to a temporary folder and rename it; a folder that exists is replaced."""
    with checkpoint.written_aside(folder, card) as aside:
        weights.write(aside / weights_folder(weights.folder), config, _in_dtype(tensors, dtype))


def export_model(
    run: Path, output: Path, *, like: Path | None = None, last: bool = False, dtype: str, pipeline: bool = False
) -> int:
    """Write the averaged (or the `last`) weights of a run's newest checkpoint, or of a checkpoint's folder; return their bytes.

    `output`: a `.safetensors` file in the original key layout, or a folder: an export without a card, or a whole `pipeline`.
    `like`: a model of the same architecture, which gives a file's names and the parts that were not trained; None: the one
    that the run began from.
    """
    is_file = output.suffix == SUFFIX
    if output.suffix in PICKLED or (is_file and pipeline):
        raise UsageError(f"{output}: weights are written as one file that ends in {SUFFIX}, or as a folder, as is a pipeline")
    refuse_existing(output, "file" if is_file else "folder")
    if like is not None and not (is_file or pipeline):
        raise UsageError(f"--like is {like}, and it is for one {SUFFIX} file or --pipeline; add --pipeline, or leave it out")
    weights = _saved_weights(run, last=last)
    if weights.name.startswith(ADAPTERS) and (is_file or pipeline):
        raise UsageError(
            f"{weights} has only adapters, which are one file already, in lora_ema/ (and lora/), that load_lora_weights and "
            "other tools add to a model; name a folder without --pipeline to write them with another --dtype"
        )
    try:
        if is_file:
            _write_file(weights, output, like or _start_of(weights), dtype)
        elif pipeline:
            _write_pipeline(weights, output, like or _start_of(weights), dtype)
        else:
            _write_folder(weights, output, dtype)
    except (OSError, SafetensorError) as error:
        said = failed_write(output.parent, error)
        raise TrainError(f"{output} cannot be written: {said}; make room or choose another place") from error
    return sum(path.stat().st_size for path in (output, *output.rglob("*")) if path.is_file())


def _saved_weights(run: Path, *, last: bool) -> Path:
    """Return the folder of the averaged (or the `last`) weights in a run's newest complete checkpoint, or in a checkpoint."""
    folder = checkpoint.last_whole(run) if (run / CHECKPOINTS).is_dir() else run
    if (wrong := checkpoint.damage(folder)) is not None:
        raise StateError(f"{folder} is not a whole checkpoint ({wrong}); name a run's folder or one of its checkpoints")
    part = next(name for name in _PARTS if (folder / name).is_dir())
    weights = folder / (part if last else part + AVERAGE_SUFFIX)
    if not weights.is_dir():
        raise UsageError(f"{folder} has no moving average, since the run had --ema off; write the last weights with --last")
    return weights


def _start_of(weights: Path) -> Path:
    return Path(str(checkpoint.read_state(weights.parent).config["model"]))


def _write_folder(weights: Path, output: Path, dtype: str) -> None:
    with staged_folder(output) as aside:
        inner = aside / weights_folder(weights.name)
        inner.mkdir(exist_ok=True)
        for path in weights.iterdir():
            if path.suffix == SUFFIX:
                tensors, metadata = read_tensors(path)
                save_tensors(_in_dtype(tensors, dtype), inner / path.name, metadata)
            else:
                shutil.copyfile(path, inner / path.name)
        if (scheduler := weights.parent / SCHEDULER).exists():  # of a whole model
            (aside / SCHEDULER).parent.mkdir()
            shutil.copyfile(scheduler, aside / SCHEDULER)


def _in_dtype(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    kind = dtype_named(dtype)
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


# ------------------------------------------------------------------ a whole pipeline


def _write_pipeline(weights: Path, output: Path, model: Path, dtype: str) -> None:
    if not model.is_dir():
        raise UsageError(
            f"{model} is not a folder; name a folder in diffusers' layout with the other parts by --like, or an output that "
            f"ends in {SUFFIX} to write one file"
        )
    family = open_model_config(model).family
    config = read_model_json(weights / "config.json")
    if (kind := str(config["_class_name"])) != family.model_class:
        raise ModelError(f"{model} has a {family.model_class}, expected a {kind}, as the run has trained")
    kept = "moving average of the weights" if weights.name.endswith(AVERAGE_SUFFIX) else "last weights"
    card = (weights.parent / checkpoint.CARD).read_text(encoding="utf-8")
    with staged_folder(output) as aside:
        _copy_parts(model, aside, family.folder, kind, read_model_json(weights.parent / SCHEDULER))
        save_tensors(_in_dtype(load_file(weights / MODEL_FILE), dtype), aside / family.folder / MODEL_FILE, {"format": "pt"})
        (aside / family.folder / "config.json").write_text(_as_json(config), encoding="utf-8")
        own = pipeline_card(card, _start_of(weights), family, dtype=dtype, kept=kept)
        (aside / checkpoint.CARD).write_text(own, encoding="utf-8")


def _copy_parts(model: Path, output: Path, trained: str, kind: str, schedule: Mapping[str, Any]) -> None:
    """Copy a model's folder but for the `trained` part, whose class is `kind`, and write the index and the scheduler.

    `schedule`: the trained one. A part that the pipeline's class calls optional may be missing.
    """
    import diffusers

    path = index_path(model)
    if not path.is_file():
        raise ModelError(f"{model} is not a whole pipeline: it has no {path.name}; {_WHOLE}")
    index = read_model_json(path)
    optional = getattr(getattr(diffusers, str(index.get("_class_name")), None), "_optional_components", ())
    for name in [name for name, value in index.items() if _is_part(value) and name not in (trained, _SCHEDULER_PART)]:
        if not name.isidentifier():  # diffusers passes parts by these names
            raise ModelError(
                f"{path} names a part {name!r:.100}, expected the name of a folder next to it, such as vae; {_WHOLE}"
            )
        if (model / name).is_dir():
            _copy_part(model / name, output / name)
        elif name in optional:
            log.warning("%s has no %s/, which its pipeline can do without: the export has none either", model, name)
            index[name] = [None, None]
        else:
            raise ModelError(f"{model} lacks {name}/, which its {path.name} names; {_WHOLE}")
    for licence in (path for path in model.glob("LICENSE*") if path.is_file()):
        shutil.copyfile(licence, output / licence.name)
    own, named = read_model_json(model / SCHEDULER), index.get(_SCHEDULER_PART, [])
    if not _is_part(named):
        raise ModelError(f"{path} names no scheduler; {_WHOLE}")
    scheduler = scheduler_of({**own, "_class_name": named[1]}, schedule)  # what diffusers opens, whatever the file says
    for name, one in ((trained, kind), (_SCHEDULER_PART, scheduler["_class_name"])):
        sources = index.get(name, [])[2:]  # of a modular index
        index[name] = ["diffusers", one, *({**source, "type_hint": ["diffusers", one]} for source in sources)]
    for target, document in ((output / path.name, index), (output / SCHEDULER, scheduler)):
        target.parent.mkdir(exist_ok=True)
        target.write_text(_as_json(document), encoding="utf-8")


def _is_part(value: object) -> bool:
    """Return True if an index's value is a part's library and class: of a part that is absent both are null."""
    match value:
        case [str(), str(), *_]:
            return True
    return False


def _copy_part(part: Path, output: Path) -> None:
    """Copy a part's files; of several sets of weights, the set that is read, without the name of a variant such as `fp16`.

    So diffusers opens the folder without an argument.
    """
    paths = {path.relative_to(part).as_posix(): path for path in part.rglob("*") if path.is_file()}
    files = {name: path for name, path in paths.items() if not _WEIGHTS.fullmatch(name)}
    tag = ""
    if len(files) < len(paths) or ("config.json" in files and not files.keys() & _WITHOUT_WEIGHTS):
        variant = variant_of(f"{part}/", paths, _BASES)
        tag = "" if variant is None else f".{variant}"
        suffix = "safetensors" if safetensors_of(paths, _BASES, variant) else "bin"
        read = re.compile(rf"(?:{'|'.join(_BASES)})(?:(?:-\d{{5}}-of-\d{{5}})?\.{suffix}|\.{suffix}\.index\.json)")
        plain = {name.replace(tag, "", 1): path for name, path in paths.items() if tag in name}
        files |= {name: path for name, path in plain.items() if read.fullmatch(name)}
    for name, path in files.items():
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if tag and name.endswith(".index.json"):
            target.write_text(path.read_text(encoding="utf-8").replace(tag, ""), encoding="utf-8")
        else:
            shutil.copyfile(path, target)


def scheduler_of(own: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a pipeline's scheduler: the model's `own`, with what a run has `trained`.

    A diffusion model that was trained as a flow gets a solver of flows that its pipeline can call.
    """
    if trained.get("_class_name") != FLOW_CLASS:
        return {**own, "prediction_type": trained.get("prediction_type", "epsilon")}
    if own.get("_class_name") == FLOW_CLASS:
        return {**own, **{name: trained[name] for name in _OF_A_FLOW if name in trained}}
    flow: dict[str, Any] = {"use_flow_sigmas": True, "flow_shift": float(trained.get("shift", 1.0))}
    if own.get("use_flow_sigmas"):
        return {**own, **flow}
    steps = trained.get("num_train_timesteps", 1000)
    flow |= {"_class_name": _FLOW_SOLVER, "prediction_type": "flow_prediction", "num_train_timesteps": steps}
    return {**flow, "steps_offset": 1}  # not used by a flow; pipelines warn of another


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


# ------------------------------------------------------------------ one file


def _write_file(weights: Path, output: Path, like: Path, dtype: str) -> None:
    if (template := single_file(like)) is None:
        raise UsageError(
            f"{like} is not a {SUFFIX} file; name one of the same architecture with --like, such as the "
            "checkpoint that the model was published as: its names are followed, and its VAE and text encoders are kept"
        )
    config = read_model_json(weights / "config.json")
    trained = _in_dtype(load_file(weights / MODEL_FILE), dtype)
    convert = converter(str(config["_class_name"]))
    file_tensors(template)  # its errors say what is wrong with a file
    tensors = in_original_layout(trained, load_file(template), lambda given: convert(given, config), item=str(template))
    aside = output.with_name(f"{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        save_tensors(tensors, aside, {"format": "pt"})
        move_durably(aside, output)
    finally:
        aside.unlink(missing_ok=True)


def in_original_layout(
    trained: Mapping[str, Tensor],
    template: Mapping[str, Tensor],
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    *,
    item: str,
) -> dict[str, Tensor]:
    """Return the tensors of a `template` in the original layout, with those of the trained part replaced.

    `convert` turns all tensors of such a file into the part's, by diffusers' names: it renames tensors, and splits and
    reorders their rows. It is called with numbered rows, whose places in its result say where each row comes from.
    """
    numbers: dict[str, Tensor] = {}
    names, starts, num_rows = list(template), [], 0
    for name, tensor in template.items():
        rows = tensor.shape[0] if tensor.ndim else 1
        numbers[name] = torch.arange(num_rows, num_rows + rows).reshape(tensor.shape[:1] + (1,) * (tensor.ndim - 1))
        starts.append(num_rows)
        num_rows += rows
    try:
        converted = {name: tensor.flatten() for name, tensor in convert(numbers).items()}
    except (KeyError, IndexError) as error:
        raise ModelError(f"{item} holds no such model ({error!r}); name a file of the same architecture") from error
    if different := converted.keys() ^ trained.keys():
        raise ModelError(
            f"{item} holds another model: only one of the two has {min(different)}; name a file of the same architecture"
        )
    result = {name: tensor for name, tensor in template.items() if not name.startswith(OLD_AVERAGE)}
    for name, places in converted.items():
        values = trained[name].reshape(len(places), -1)
        owners = torch.searchsorted(torch.tensor(starts), places, right=True) - 1
        for owner in owners.unique().tolist():  # type: ignore[no-untyped-call, unused-ignore]
            own, mine = names[owner], owners == owner
            if result[own] is template[own]:
                result[own] = template[own].to(values.dtype, copy=True)
            try:
                result[own].view(numbers[own].numel(), -1)[places[mine] - starts[owner]] = values[mine]
            except (RuntimeError, IndexError) as error:
                raise ModelError(
                    f"{item}: {own} has the shape {tuple(template[own].shape)}, and the trained tensors "
                    f"{tuple(trained[name].shape)} do not fit into it; name a file of the same architecture"
                ) from error
    if not all(torch.equal(tensor, trained[name]) for name, tensor in convert(result).items()):
        raise ModelError(f"{item}: diffusers does not read back what would be written; report this with its version")
    return result
