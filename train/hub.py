"""For a hub: the model card next to the weights, and the upload of the last export to huggingface.co."""

from __future__ import annotations

import json
import logging
from concurrent.futures import wait
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from bucketline.families.family import MODULAR
from bucketline.loader.mixture import StoreId
from bucketline.torch_dtypes import dtype_named
from bucketline.train.checkpoint import CARD, folder_of_step
from bucketline.train.log import versions
from bucketline.train.parallel import plain_class
from bucketline.train.run_file import config_as_json
from bucketline.train.weight_layout import Adapters, average_folder, weights_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from bucketline.families.family import Family
    from bucketline.loader import WeightedStore
    from bucketline.train.step import Training
    from bucketline.train.validation import ValidationResult
    from bucketline.train.weight_layout import WeightLayout

log = logging.getLogger(__name__)

_LOADING, _DATA = "## Load it\n", "## Data, configuration and versions\n"
_CACHED = "models--"  # how huggingface_hub's cache begins the name of a model's folder, with -- for each /
_OURS = "bucketline"  # a tag
_LICENSE = ("license", "license_name", "license_link")
_POLL_S = 0.2


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
    config, kind = training.config, plain_class(training.bare_model).__name__
    encoders = shares[0].store.manifest.encoders
    made_of = {
        "stores": [
            {
                **asdict(StoreId.of(one)),
                "path": str(one.store.place).rpartition("/")[2],
                "rows": sum(bucket.num_rows for bucket in one.store.buckets()),
            }
            for one in shares
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
    score = "" if validation is None else f"Validation loss {validation.loss:.4f} ({validation.zero_loss:.4f} predicts zero).\n"
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
        """Upload a folder's files to the root of the repository."""
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
