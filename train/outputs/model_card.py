"""The model card, stored next to the weights: fields for hubs, the training data, the configuration, how to load the model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, ModelCardData

from bucketline.families.family import MODULAR
from bucketline.loader.mixture import StoreId
from bucketline.torch_dtypes import dtype_named
from bucketline.train.checkpoint import CARD, folder_of_step
from bucketline.train.log import versions
from bucketline.train.parallel import plain_class
from bucketline.train.run_file import config_as_json
from bucketline.train.weight_layout import Adapters, average_folder, weights_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from bucketline.families.family import Family
    from bucketline.loader import WeightedStore
    from bucketline.train.step import Training
    from bucketline.train.validation import ValidationResult
    from bucketline.train.weight_layout import WeightLayout


_LOADING, _DATA = "## Load it\n", "## Data\n"
_CACHED = "models--"  # how huggingface_hub's cache begins the name of a model's folder, with -- for each /
_OURS = "bucketline"  # a tag
_LICENSE = ("license", "license_name", "license_link")


def model_card(
    training: Training,
    weights: WeightLayout,
    shares: Sequence[WeightedStore],
    steps_done: int,
    validation: ValidationResult | None,
    *,
    of_export: bool = False,
) -> str:
    """Return the card of a checkpoint or an export, in Markdown."""
    config, model, manifest = training.config, training.bare_model, shares[0].store.manifest
    stores = [
        {
            **asdict(StoreId.of(one)),
            "path": str(one.store.place).rpartition("/")[2],
            "rows": sum(bucket.num_rows for bucket in one.store.buckets()),
        }
        for one in shares
    ]
    described = {
        name: ", ".join(f"{key} {value}" for key, value in entry.items() if isinstance(value, str | int | float))
        for name, entry in manifest.encoders.items()
        if isinstance(entry, dict)
    }
    encoders = [{"encoder": name, "described by": text} for name, text in described.items()]
    options = [{"option": name, "value": value} for name, value in config_as_json(config).items()]
    has_average = training.average.is_kept
    if of_export:
        folder, kept = weights_folder(weights.folder), "moving average of the weights" if has_average else "last weights"
        where = f"this folder. It has the {kept}, in {config.export_dtype}."
    else:
        folder = average_folder(weights) if has_average else weights.folder
        where = f"the folder of a checkpoint (`checkpoints/{folder_of_step(steps_done)}` in the run's folder)."
        if has_average:
            where += f" This is the moving average; `{weights.folder}` has the last weights."
    score = "" if validation is None else f"Validation loss {validation.loss:.4f} ({validation.zero_loss:.4f} predicts zero).\n"
    fields = card_fields(config.model, training.family, adapters=isinstance(weights, Adapters))
    return f"""{fields}
# {config.output_dir.name}

`{plain_class(model).__name__}`, {steps_done} optimizer steps from `{config.model.name}`, trained with Bucketline.
{score}
{_LOADING}
From {where}

```python
{_example(weights, plain_class(model).__name__, folder)}
```

{_DATA}
{_table(stores)}
The digest is the manifest's, which holds the digest of every file of the store.

## Encoders

{_table(encoders)}
## Configuration

{_table(options)}
## Versions

{_table([{"package": name, "version": version} for name, version in versions().items()])}"""


def _example(weights: WeightLayout, kind: str, folder: str) -> str:
    """Return Python lines that load the weights in a `folder`, of a model's class `kind`."""
    if not isinstance(weights, Adapters):
        return f"""from diffusers import {kind}

model = {kind}.from_pretrained(".", subfolder="{folder}")"""
    if weights.pipeline:
        opened = _opened(weights.pipeline, "the model that was trained from")
        return f'{opened}\npipeline.load_lora_weights("{folder}")'
    return f"""from diffusers import {kind}
from peft import PeftModel

model = {kind}.from_pretrained("the model that was trained from", subfolder="{weights.part}")
model = PeftModel.from_pretrained(model, "{folder}")"""


def _opened(pipeline: str, place: str, dtype: torch.dtype | None = None) -> str:
    """Return Python lines that open a pipeline of diffusers, of weights in a dtype; a modular one loads its parts by itself."""
    before = "import torch\n" if dtype else ""
    if pipeline.endswith(MODULAR):
        more, then = "", f"\npipeline.load_components({f'dtype={dtype}' if dtype else ''})"
    else:
        more, then = f", torch_dtype={dtype}" if dtype else "", ""
    return f'{before}from diffusers import {pipeline}\n\npipeline = {pipeline}.from_pretrained("{place}"{more}){then}'


def pipeline_card(card: str, model: Path, family: type[Family], *, dtype: str, kept: str) -> str:
    """Return the card of a whole pipeline, from the card of the checkpoint that has its trained weights.

    `model`: which the run began from. `kept`: which of the run's weights it has.
    """
    kind = dtype_named(dtype)
    is_modular = family.pipelines[0].endswith(MODULAR)
    example = _opened(family.pipelines[0] if is_modular else "DiffusionPipeline", ".", None if kind is torch.float32 else kind)
    loading = f"From this folder, a whole pipeline. Its {family.folder} has the {kept}, in {dtype}."
    head = ModelCard(card, ignore_metadata_errors=True).text.partition(_LOADING)[0].strip()
    rest = card.partition(_DATA)[2]
    fields = card_fields(model, family, adapters=False)
    return f"{fields}\n{head}\n\n{_LOADING}\n{loading}\n\n```python\n{example}\n```\n\n{_DATA}{rest}"


def card_fields(model: Path, family: Family | type[Family], *, adapters: bool) -> str:
    """Return the fields of a card that hubs index, as YAML between its fences.

    `model`: which the run began from. huggingface_hub's cache has its name on a hub, or if it is a run's, that run's card; its
    own card has the licence. Data sets are left out: a store does not know their names on a hub.
    """
    found = _card_of(model)
    base = found.get("base_model") if _OURS in (found.get("tags") or ()) else _name_on_hub(model)
    fields: dict[str, Any] = {name: found[name] for name in _LICENSE if found.get(name)}
    if base is not None:
        fields |= {"base_model": base, "base_model_relation": "adapter" if adapters else "finetune"}
    if family.parts:  # of classes there is no such task
        fields |= {"pipeline_tag": "text-to-image"}
    tags = ["diffusers-training", family.name.replace("_", "-"), *(["lora"] if adapters else []), _OURS]
    library = "diffusers" if family.has_lora_loader or not adapters else "peft"
    return f"---\n{ModelCardData(library_name=library, tags=tags, **fields).to_yaml()}\n---\n"


def _card_of(model: Path) -> dict[str, Any]:
    """Return the fields of a model's own card; none if it has none, as a single file that was not taken from a hub."""
    folder = model if _name_on_hub(model) is None or model.is_dir() else model.parent
    try:
        found = dict(vars(ModelCard((folder / CARD).read_text(encoding="utf-8")).data))
    except Exception:  # noqa: BLE001 - a card that cannot be read, or whose fields are not YAML, has none for ours
        return {}
    return found


def _name_on_hub(model: Path) -> str | None:
    """Return the name of a model in huggingface_hub's cache; None for any other."""
    cached = (part.removeprefix(_CACHED) for part in model.absolute().parts if part.startswith(_CACHED))
    return next((name.replace("--", "/") for name in cached), None)


def _table(rows: Iterable[Mapping[str, object]]) -> str:
    """Return rows with the same keys as a Markdown table."""
    lines: list[str] = []
    for row in rows:
        if not lines:
            lines = ["| " + " | ".join(row) + " |", "|" + "---|" * len(row)]
        cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        lines.append("| " + " | ".join(cell.replace("|", r"\\|").replace("\n", " ") for cell in cells) + " |")
    return "".join(line + "\n" for line in lines)
