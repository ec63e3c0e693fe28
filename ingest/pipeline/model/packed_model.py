"""`STORE/packed_model.json`: which files a store's model was loaded from, so that a run that encodes nothing loads no model.

The file is a hint. While the model's files, the libraries and the options are those that it records, a run takes the encoders'
provenance from the store's manifest instead of computing it from the weights. A run that has something to encode loads the
encoders all the same, and compares them with the manifest before it writes a row.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from bucketline import __version__
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.regular_file import read_regular
from bucketline.fingerprint import json_hash
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store.format.manifest import Manifest

PACKED_MODEL = "packed_model.json"
SETTLED_NS = 2_000_000_000  # a file changed more recently could change again without a new ctime: file systems count in ticks
MAX_FILES = 10_000  # of a model
_FORM = 1
_MAX_BYTES = 1 << 16
_LIBRARIES = ("torch", "diffusers", "transformers", "tokenizers", "safetensors", "accelerate", "sentencepiece", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """The content of the file. It has digests only, because a store that is passed on should not tell its author's paths."""

    form: int
    model: str  # digest of the model's files, the libraries' versions and the encoders' options
    provenance: str  # digest of the manifest's encoders and text columns
    on_shared_cores: bool  # the encoders ran on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The state of the files, libraries and options that a run's encoders depend on, as far as file metadata tells."""

    digest: str
    is_settled: bool  # no file was changed within SETTLED_NS


def model_state(config: PackConfig, model: ModelFolder) -> ModelState | None:
    """Return the state of a model's files and of all that affects how they are loaded; None if it cannot be told.

    Of every file below the model's folder, links followed, it has size, mtime, ctime and inode. A file that is replaced or
    overwritten with its size and mtime restored has another ctime, and a copy has another inode.
    """
    now = time.time_ns()
    try:
        files = _files(model)
    except OSError:
        return None
    if files is None:
        return None
    options = [
        config.dtype,
        config.text_dtype,
        config.encode_dtype,
        config.latents,
        config.max_tokens,
        config.device,
        config.text,
    ]
    places = [os.path.realpath(path) for path in (model.path, *([model.file.path] if model.file else []))]
    libraries = [__version__, *map(_version, _LIBRARIES)]
    newest = max((changed_ns for _, _, changed_ns, _ in files.values()), default=now)
    return ModelState(digest=json_hash([places, files, libraries, options]), is_settled=now - newest > SETTLED_NS)


def _files(model: ModelFolder) -> dict[str, tuple[int, int, int, int]] | None:
    """Return size, mtime, ctime (ns) and inode by path; None if there are too many files, as in a cycle of links."""
    found = {} if model.file is None else {"": _metadata(model.file.path)}
    for folder, _, names in os.walk(model.path, onerror=_raise, followlinks=True):
        found |= {path: _metadata(path) for path in (os.path.join(folder, name) for name in names)}  # noqa: PTH118 - as walk
        if len(found) > MAX_FILES:
            return None
    return found


def _metadata(path: str | Path) -> tuple[int, int, int, int]:
    status = os.stat(path)  # noqa: PTH116 - either type
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _raise(error: OSError) -> None:
    raise error


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def packed_model(store: Path, manifest: Manifest | None, state: ModelState | None) -> PackedModel | None:
    """Return the store's record if it is of this manifest's provenance and of this model state; else None."""
    if manifest is None or state is None:
        return None
    try:
        found = decode(PackedModel, json.loads(read_regular(store / PACKED_MODEL, _MAX_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    expected = _record(manifest, state, on_shared_cores=found.on_shared_cores)
    return found if found == expected else None


def record_packed_model(store: Path, manifest: Manifest, state: ModelState, *, on_shared_cores: bool) -> None:
    """Write the record of a model that was loaded while its files were in this state.

    Raises:
        StoreError: if it cannot be written.
    """
    if state.is_settled:
        record = _record(manifest, state, on_shared_cores=on_shared_cores)
        write_or_explain(store / PACKED_MODEL, json.dumps(encode(record)).encode("ascii") + b"\n")


def _record(manifest: Manifest, state: ModelState, *, on_shared_cores: bool) -> PackedModel:
    provenance = json_hash([manifest.encoders, encode(manifest.text)])
    return PackedModel(form=_FORM, model=state.digest, provenance=provenance, on_shared_cores=on_shared_cores)
