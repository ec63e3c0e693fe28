"""The options of `ingest pack`, `scan`, `peek` and `import` that were called otherwise in earlier versions."""

from __future__ import annotations

_TEMPLATE = "a --caption-template without {caption} is the trigger word"
_HELD_OUT = "--val-fraction 0.02:folder hashes the folder"
_FROM = "--captions-from takes a column's name or an extension with its dot"

FORMER_OPTIONS = {
    "--trigger-word": _TEMPLATE,
    "--keep-tokens": "--shuffle-tags N:KEEP keeps the first KEEP tags in place",
    "--shuffle-seed": "--shuffle-tags N:KEEP:SEED has the seed",
    "--split-by": _HELD_OUT,
    "--caption-column": _FROM,
    "--caption-extension": _FROM,
    "--default-caption": f"it is `caption` under [source] of a data set file; for images that have none at all, {_TEMPLATE}",
    "--split": "it is `dataset_splits` under [source] of a data set file",
    "--max-prune": "it is --prune=N or --prune=FRACTION",
    "--ray-address": "it is --engine ray:ADDRESS",
    "--gpus-per-worker": "--workers 2:8@1gpu has it",
    "--cpus-per-worker": "--workers 2:8@8cpu has it",
}
"""The answer to each of them."""
FORMER_OPTIONS_OF_IMPORT = {"--split-by": _HELD_OUT}
