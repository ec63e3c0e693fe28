"""A whole pipeline as a folder: the trained UNet or transformer among the other parts of the model that the run began from.

OUTPUT/
    README.md                           the model card
    model_index.json                    the model's, with the classes of the trained part and of the scheduler
    unet/                               the trained weights; or transformer/
    scheduler/                          the model's own, with the objective and the shift of the run
    vae/, text_encoder/, tokenizer/ …   the model's, copied
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from bucketline.errors import ModelError, StateError
from bucketline.files.copy_bytes import copy_some
from bucketline.model_file import index_path
from bucketline.train.lora import PEFT_PREFIX
from bucketline.train.lora_file import PREFIX, read_adapters
from bucketline.train.noise import FLOW_CLASS
from bucketline.train.noise import SCHEDULER_CONFIG as SCHEDULER
from bucketline.weight_files import DIFFUSERS, LORA_FILE, PEFT_FILE, TRANSFORMERS, safetensors_of, variant_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

log = logging.getLogger(__name__)

_COPY_BYTES = 64 << 20  # per system call
_SCHEDULER_PART = "scheduler"
_BASES = DIFFUSERS + TRANSFORMERS
_ADVICE = "name the folder of the whole model by --like, or leave out --pipeline to export only the trained weights"
_FLOW_SOLVER = "DPMSolverMultistepScheduler"  # for pipelines of diffusion models: they scale inputs, which FLOW_CLASS cannot
_OF_A_FLOW = (
    *("shift", "use_dynamic_shifting", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"),
    "time_shift_type",
)
_NO_WEIGHTS = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json", "scheduler_config.json")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|ckpt|pth?|msgpack|h5|ot|onnx|onnx_data)(\.index.*\.json)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParts:
    """The parts of a model that a run does not train."""

    model: Path  # its folder
    index: dict[str, Any]  # model_index.json, without optional parts that the folder lacks
    files: dict[str, Path]  # by the name that each gets below the output
    rewritten: dict[str, str]  # likewise, the text of indexes of weights whose files get other names


def fused(folder: Path, model: nn.Module) -> nn.Module:
    """Return a model with the adapters of a checkpoint's folder added to its weights, and without them as modules."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    try:
        file = folder / LORA_FILE
        tensors, fields = read_adapters(file if file.exists() else folder / PEFT_FILE)
        adapted: Any = get_peft_model(model, LoraConfig(**fields))
        given = {PEFT_PREFIX + PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
        if unknown := set_peft_model_state_dict(adapted, given).unexpected_keys:
            raise ValueError(f"the model has no layer for {unknown[0]}")
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        what = f"{folder} has no adapters of this model: {error!s:.300}"
        raise StateError(f"{what}; name the model that they were trained on") from error
    found: nn.Module = adapted.merge_and_unload()
    return found


def other_parts(model: Path, trained: str) -> PipelineParts:
    """Return the parts of a model's folder next to the `trained` one, `unet` or `transformer`.

    Of several sets of weights in a part, the set that is read, and without the name of a variant such as `fp16`: diffusers
    opens a folder of plain names without an argument.
    """
    path = index_path(model)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise TypeError(f"it is a JSON {type(index).__name__}, expected an object with a name for each part")
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{model} is not a whole pipeline, since its {path.name} cannot be read ({error}); {_ADVICE}"
        ) from error
    named = [name for name, value in index.items() if name != trained and _is_part(value)]
    if wrong := [name for name in named if not name.isidentifier()]:  # diffusers passes parts by these names
        raise ModelError(
            f"{path} names a part {wrong[0]!r:.100}, expected the name of a folder next to it, such as vae; {_ADVICE}"
        )
    files: dict[str, Path] = {}
    rewritten: dict[str, str] = {}
    missing = [name for name in named if _lacks_weights(model / name)]
    optional = _optional_parts(str(index.get("_class_name")))
    if needed := [f"{name}/" for name in missing if name not in optional]:
        raise ModelError(f"{model} lacks {', '.join(needed)}, which its {path.name} names, or their weights; {_ADVICE}")
    for name in missing:
        log.warning("%s has no %s/, which its pipeline can do without: the export has none either", model, name)
        index[name] = [None, None]
    for name in named:
        if name not in (*missing, _SCHEDULER_PART):
            _add_files(model / name, name, files, rewritten)
    files |= {path.name: path for path in sorted(model.glob("LICENSE*")) if path.is_file()}
    return PipelineParts(model=model, index=index, files=files, rewritten=rewritten)


def _is_part(value: object) -> bool:
    """Return whether an index's value is a part's library and class: of a part that is absent both are null.

    In a modular index, where it is from follows.
    """
    return isinstance(value, list) and len(value) in (2, 3) and all(isinstance(one, str) for one in value[:2])


def _optional_parts(kind: str) -> tuple[str, ...]:
    import diffusers

    return tuple(getattr(getattr(diffusers, kind, None), "_optional_components", ()))


def _lacks_weights(part: Path) -> bool:
    """Return whether a part is missing, or is a model without weights."""
    if not part.is_dir():
        return True
    if not (part / "config.json").is_file() or any((part / name).is_file() for name in _NO_WEIGHTS):
        return False
    try:
        variant_of(f"{part}/", (path.name for path in part.iterdir()), _BASES)
    except ModelError:
        return True
    return False


def _add_files(part: Path, name: str, files: dict[str, Path], rewritten: dict[str, str]) -> None:
    """Add a part's files, by the names that they get."""
    paths = {path.relative_to(part).as_posix(): path for path in sorted(part.rglob("*")) if path.is_file()}
    files |= {f"{name}/{own}": path for own, path in paths.items() if not _WEIGHTS.fullmatch(own)}
    if not any(_WEIGHTS.fullmatch(own) for own in paths):
        return
    variant = variant_of(f"{part}/", paths, _BASES)
    tag = "" if variant is None else f".{variant}"
    suffix = "safetensors" if safetensors_of(paths, _BASES, variant) else "bin"
    base = "|".join(map(re.escape, _BASES))
    for own, path in paths.items():
        plain = own.replace(tag, "", 1)
        if tag in own and re.fullmatch(rf"(?:{base})(-\d{{5}}-of-\d{{5}})?\.{suffix}", plain):
            files[f"{name}/{plain}"] = path
        elif tag in own and re.fullmatch(rf"(?:{base})\.{suffix}\.index\.json", plain):
            text = path.read_text(encoding="utf-8")
            rewritten[f"{name}/{plain}"] = text.replace(tag, "") if tag else text


def scheduler_of(own: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a pipeline's scheduler: the model's `own`, with what a run has `trained`.

    A diffusion model that was trained as a flow gets a solver of flows that its pipeline can call.
    """
    is_flow = trained.get("_class_name") == FLOW_CLASS
    if not is_flow:
        return {**own, "prediction_type": trained.get("prediction_type", "epsilon")}
    if own.get("_class_name") == FLOW_CLASS:
        return {**own, **{name: trained[name] for name in _OF_A_FLOW if name in trained}}
    shift = float(trained.get("shift", 1.0))
    if own.get("use_flow_sigmas"):
        return {**own, "flow_shift": shift}
    steps = trained.get("num_train_timesteps", 1000)
    flow = {"use_flow_sigmas": True, "flow_shift": shift, "prediction_type": "flow_prediction", "num_train_timesteps": steps}
    return {"_class_name": _FLOW_SOLVER, **flow, "steps_offset": 1}  # not used by a flow; pipelines warn of another


def write_parts(folder: Path, parts: PipelineParts, trained: str, kind: str, schedule: Mapping[str, Any]) -> None:
    """Write everything but the trained weights and the card into a folder.

    `trained` and `kind`: the trained part and its class. `schedule`: the trained one, for diffusers' schedulers.
    """
    named_by, path = index_path(parts.model).name, parts.model / SCHEDULER
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
        named = parts.index[_SCHEDULER_PART][1]  # what diffusers opens, whatever the file says
        scheduler = scheduler_of({**own, "_class_name": named}, schedule)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ModelError(
            f"{path} is not the configuration of a scheduler that {named_by} names: {error!r}; {_ADVICE}"
        ) from error
    classes = {trained: kind, _SCHEDULER_PART: scheduler["_class_name"]}
    index = {**parts.index, **{name: _entry(parts.index.get(name), one) for name, one in classes.items()}}
    texts = {named_by: _as_json(index), SCHEDULER: _as_json(scheduler), **parts.rewritten}
    for name, text in texts.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    for name, source in parts.files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, place)


def _entry(own: Any, kind: str) -> list[Any]:  # noqa: ANN401 - of JSON
    """Return a part's entry in an index, of a class of diffusers in place of its `own`, from where that is from."""
    sources = own[2:] if isinstance(own, list) else []
    return ["diffusers", kind, *({**one, "type_hint": ["diffusers", kind]} for one in sources)]


def _copy(source: Path, place: Path) -> None:
    """Copy a file; the copy takes no space where the file system can share blocks, as Btrfs and XFS do.

    A hard link would change the model's file with the export's, which tools overwrite in place (`cp`, `torch.save`); a symbolic
    link would be uploaded as nothing, and break when the model moves.
    """
    with source.open("rb", buffering=0) as reading, place.open("xb", buffering=0) as writing:
        while copy_some(reading.fileno(), writing.fileno(), _COPY_BYTES):
            pass


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"
