"""The model card, stored next to the weights: the training data, the configuration and how to load the model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from bucketline.loader.history import StoreId
from bucketline.train.outputs.checkpoint import folder_of_step
from bucketline.train.outputs.export import weights_folder
from bucketline.train.outputs.run_dir import config_as_json, versions
from bucketline.train.outputs.weights import average_folder
from bucketline.train.parallel import plain_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bucketline.loader import WeightedStore
    from bucketline.train.outputs.weights import Weights
    from bucketline.train.step import Training
    from bucketline.train.validation import ValidationResult


def model_card(
    training: Training,
    weights: Weights,
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
    return f"""---
library_name: diffusers
---

# {config.output_dir.name}

`{plain_class(model).__name__}`, {steps_done} optimizer steps from `{config.model.name}`, trained with Bucketline.
{score}
## Load it

From {where}

```python
{weights.example(model, folder)}
```

## Data

{_table(stores)}
The digest is the manifest's, which holds the digest of every file of the store.

## Encoders

{_table(encoders)}
## Configuration

{_table(options)}
## Versions

{_table([{"package": name, "version": version} for name, version in versions().items()])}"""


def _table(rows: Iterable[Mapping[str, object]]) -> str:
    """Return rows with the same keys as a Markdown table."""
    lines: list[str] = []
    for row in rows:
        if not lines:
            lines = ["| " + " | ".join(row) + " |", "|" + "---|" * len(row)]
        cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        lines.append("| " + " | ".join(cell.replace("|", r"\\|").replace("\n", " ") for cell in cells) + " |")
    return "".join(line + "\n" for line in lines)
