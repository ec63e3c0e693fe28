"""Map a missing library to the extra that installs it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Import names of the libraries of each extra in pyproject.toml; tests/packaging/test_metadata.py compares the two.
EXTRAS = {
    "loader": ("torch", "prometheus_client"),
    "ingest": ("torch", "diffusers", "accelerate", "transformers", "huggingface_hub", "PIL", "safetensors", "webdataset"),
    "train": ("torch", "diffusers", "accelerate", "peft", "safetensors", "huggingface_hub", "matplotlib", "PIL"),
    "optimizers": ("torchao", "prodigyopt"),
    "tables": ("pyarrow",),
    "datasets": ("datasets",),
    "report": ("jinja2", "PIL"),
    "tensorboard": ("tensorboard",),
    "quantised": ("torchao",),
    "ray": ("ray",),
    "heif": ("pillow_heif", "pillow_jxl"),
}


@contextmanager
def extra_named(command: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra: the command's own, or else the smallest that has the library."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        having = [extra for extra, libraries in EXTRAS.items() if library in libraries]
        if not having:
            raise
        extra = command if command in having else min(having, key=lambda one: len(EXTRAS[one]))
        raise MissingExtraError(
            f"{command} needs {library}, which is not installed. Install the extra {extra}: pip install 'bucketline[{extra}]'"
        ) from error
