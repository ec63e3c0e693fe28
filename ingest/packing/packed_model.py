"""The model that a store was last packed with on this machine, and its place.

A manifest has the encoders' fingerprints, and is the same on every machine. The place of their model is noted in a file next to
it, which no push takes along.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bucketline.command_line import printable
from bucketline.errors import ModelError, UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.paths import can_be_reached, read_regular, redacted
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.sources.dataset_file import is_dataset_file, read_dataset_file
from bucketline.store.commands.look import shown
from bucketline.store.format.manifest import MANIFEST, generations
from bucketline.typed_json import TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder

PACKED_MODEL = "packed_model.json"  # next to the manifest
MODEL = "model"
"""The field of the options that the command line may leave out, if a store has noted its model."""
_MAX_NOTE_BYTES = 1 << 16
_C = TypeVar("_C", bound="PackConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """A model as the options named it: each an absolute path, or a name on a hub."""

    model: str
    model_config: str | None

    @property
    def is_gone(self) -> bool:
        """True if it was in a folder or file that is no longer there, or cannot be reached."""
        return self.model.startswith("/") and not can_be_reached(self.model)


def packed_model(store: Path) -> PackedModel | None:
    """Return the model that a store in a folder was last packed with; None if it is not noted."""
    try:
        found = decode(PackedModel, json.loads(read_regular(store / PACKED_MODEL, _MAX_NOTE_BYTES)))
    except (OSError, ValueError, RecursionError, TypedJsonError):
        return None
    return found if found.model.startswith("/") or found.model.count("/") == 1 else None


def note_model(config: PackConfig, *, is_compared: bool) -> list[str]:
    """Note a run's model next to the store, if it is in a folder; return why it could not, in a line, or nothing.

    `is_compared`: the encoders' weights are known to be the store's; without it, a model that is there is not replaced.
    """
    if not isinstance(config.place, Path):
        return []
    of_file = None if config.model_config is None else _resolved(config.model_config)
    own, before = PackedModel(model=_resolved(config.model), model_config=of_file), packed_model(config.store)
    if own != before and (is_compared or before is None or before.is_gone):
        path = config.store / PACKED_MODEL
        try:
            write_durably(path, json.dumps(encode(own), indent=1, sort_keys=True).encode() + b"\n", syncs=False)
        except OSError as error:
            return [f"the model's place was not noted for the next pack, since {path} cannot be written: {error.strerror}"]
    return []


def with_packed_model(config: _C) -> _C:
    """Return the options with the model of the last pack into the store, if `--model` was left out; of several, theirs."""
    if MODEL not in config.left_out:
        return config
    needs = f"{redacted(str(config.place))} needs --model MODEL"
    if not isinstance(config.place, Path):
        raise UsageError(f"{needs}, since a store at a URL does not know where its model is on this machine")
    stores = [config.place]
    if is_dataset_file(config.source):
        entries = read_dataset_file(Path(config.source), config.alone()).sources
        stores = [config.place / entry.store_name for entry in entries]
    found = {store: noted for store in stores if (noted := packed_model(store)) is not None}
    if not found:
        if not any(can_be_reached(store / MANIFEST) or generations(store) for store in stores):
            raise UsageError(f"{needs}, since it is a new store (`ingest pack --help` explains it)")
        raise UsageError(
            f"{needs}, since it does not know where its model is on this machine: it was pulled or copied here; give it once"
        )
    (first, own), *others = found.items()
    if other := next((store for store, noted in others if noted != own), None):
        raise UsageError(
            f"{needs}, since its stores were last packed with several: {first.name} with {own.model}, {other.name} with "
            f"{found[other].model}"
        )
    _refuse_gone(own, first)
    return replace(config, model=own.model, model_config=config.model_config or own.model_config)


def known_model(place: Path | str, model: str | None, model_config: str | None, *, is_quiet: bool) -> ModelFolder:
    """Return `--model`, or the model that a store was last packed with on this machine, which is printed unless `is_quiet`.

    Raises:
        UsageError: if `--model` is left out and the store does not know its model.
        ModelError: if that model is gone, or cannot be used.
    """
    if model is not None:
        return open_model(model, model_config)
    noted = packed_model(place) if isinstance(place, Path) else None
    if noted is None:
        why = "is at a URL" if isinstance(place, str) else "was not packed on this machine"
        raise UsageError(f"add --model MODEL with the model that {shown(place)} was packed with: the store {why}")
    _refuse_gone(noted, place)
    if not is_quiet:
        print(f"model: {printable(noted.model)} (of the last pack into {shown(place)})")
    return open_model(noted.model, model_config or noted.model_config)


def _refuse_gone(noted: PackedModel, place: Path | str) -> None:
    if noted.is_gone:
        raise ModelError(
            f"{noted.model}, with which {place} was last packed, is no longer there or cannot be reached; add --model MODEL "
            "with the place where it is"
        )


@contextmanager
def naming_packed_model(config: PackConfig) -> Iterator[None]:
    """Add to a ModelError that the model is the one of the last pack, and how to name another, if the options left it out."""
    try:
        yield
    except ModelError as error:
        if MODEL not in config.left_out:
            raise
        raise ModelError(
            f"{error}; {redacted(config.model)} is the model of the last pack into {config.place}, --model MODEL names another"
        ) from error


def _resolved(name: str) -> str:
    return str(Path(name).absolute()) if can_be_reached(name) else name
