"""Write a store from Ray Data: `dataset.map_batches(encode).write_datasink(StoreSink("photos.store", …))`.

Each task commits its own shards. Ray runs a task again if its worker was lost: its rows then replace those of the same ids.
"""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from bucketline.errors import UsageError
from bucketline.extensions import extra_named
from bucketline.store import StoreWriter
from bucketline.store.parallel import PartCommitter
from bucketline.store.sync.working import WorkingStore, own_working_store, target_at
from bucketline.store.write.publish import new_manifest
from bucketline.store.write.store_writer import PartWriter

with extra_named("ray"):
    from ray.data import Datasink
    from ray.data.block import BlockAccessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.store.write.publish import StoreTarget
    from bucketline.store.write.row_form import Arrays

__all__ = ["StoreSink", "batch_of", "sample"]

ROWS_PER_TASK = 4096
_FIELDS = ("id", "split", "columns", "texts", "ragged")
_NO_ARRAYS: Mapping[str, Any] = MappingProxyType({})


def sample(
    id: str,  # noqa: A002 - the row's name for it
    split: str,
    columns: Arrays,
    texts: Mapping[str, Arrays] = _NO_ARRAYS,
    ragged: Mapping[str, Any] = _NO_ARRAYS,
) -> dict[str, str | bytes]:
    """Return a row for `StoreSink`, with the arguments of `StoreWriter.add`; arrays become bytes, and keep their dtypes.

    `columns` has an array per column, by role. `texts` maps each caption to its embedding, and `ragged` has the row's entry of
    each ragged group. Arrays are of numpy or torch.

    >>> sorted(sample("a.png", "train", {"target": np.zeros((4, 8, 8), dtype="f2")}))
    ['columns', 'id', 'ragged', 'split', 'texts']
    """
    packed = {"columns": dict(columns), "texts": {text: dict(own) for text, own in texts.items()}, "ragged": dict(ragged)}
    return {"id": id, "split": split, **{name: msgpack.packb(value, default=_packed) for name, value in packed.items()}}


def batch_of(samples: Iterable[Mapping[str, str | bytes]]) -> dict[str, list[str | bytes]]:
    """Return rows of `sample` as the batch that a function of `map_batches` returns."""
    rows = list(samples)
    return {name: [row[name] for row in rows] for name in _FIELDS}


class StoreSink(Datasink):  # type: ignore[misc]  # Ray has no types here
    """Writes rows of `sample` to a store.

    The store is in a folder that all nodes share, or at a URL. Each task commits what it has written, as `ingest pack`'s ranks
    do, so others may write meanwhile. A row replaces an older one of the same id. If the job fails or is killed, what finished
    tasks have written stays; run the job again.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        rows_per_task: int | None = ROWS_PER_TASK,
        remote: RemoteOptions | None = None,
        work: Path | str | None = None,
        **contents: Any,  # noqa: ANN401
    ) -> None:
        """Take the keyword arguments of `StoreWriter`, which describe the store's contents: `columns`, `text` and so on.

        `rows_per_task`: Ray gives a task at least so many rows, if there are; each task makes shards of its own. None leaves
        their number to Ray. `remote`: how to reach a URL. `work`: a folder for what the driver and the tasks need on their
        machines' disks while they write to a URL; it need not be shared, and is next to the cache by default.

        Raises:
            UsageError: as `StoreWriter`; or if the URL cannot be a store's.
        """
        self._target = target_at(path, remote, work)
        writer = StoreWriter.to(self._target, **contents)
        self._form, self._shard_bytes, self._schema = writer._form, writer._shard_bytes, writer._schema
        self._writer: StoreWriter | None = writer
        self._empty = new_manifest(self._schema)
        self._rows_per_task = rows_per_task

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}  # the driver's

    @property
    def min_rows_per_write(self) -> int | None:
        """Number of rows that Ray gives a task at least."""
        return self._rows_per_task

    def on_write_start(self, schema: object = None) -> None:  # noqa: ARG002 - Ray's own signature
        """Create the store if there is none, and adopt what a killed writer left. Ray calls this on the driver.

        Raises:
            LockedError, FingerprintError, StoreError: as `StoreWriter.__enter__`; or if the URL cannot be read or written.
        """
        assert self._writer is not None
        with self._target.held(), self._writer:
            pass

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:  # noqa: ANN401 - Ray's own types
        """Write and commit the rows of a task, and return their number. Ray calls this in a task.

        Raises:
            UsageError, StoreError: as `StoreWriter.add`; or if a shard cannot be sent or committed.
        """
        number = 0
        with ExitStack() as held:
            target: StoreTarget = self._target
            if isinstance(target, WorkingStore):  # each task has a folder of its own on its machine's disk
                parent = target.path.with_name(f"{target.path.name}.workers")
                target = held.enter_context(own_working_store(target.folder, parent))
            names = f"ray-{secrets.token_hex(4)}-t{ctx.task_idx:06d}-{{:04d}}"  # never those of another attempt
            part = PartWriter(target.path, self._form, names, self._shard_bytes)
            writer = held.enter_context(PartCommitter(part, target, target.newest() or self._empty))
            for arguments in _arguments(blocks):
                writer.add(*arguments)
                number += 1
            writer.commit()
        return number

    def on_write_complete(self, write_result: Any) -> None:  # noqa: ANN401, ARG002 - Ray's own signature
        """Create the store if there was no task. Ray calls this on the driver.

        Raises:
            StoreError: if the store cannot be written.
        """
        if self._target.newest() is None:
            self.on_write_start()


def _arguments(blocks: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    for block in blocks:
        for row in BlockAccessor.for_block(block).iter_rows(public_row_format=True):
            yield _unpacked(row)


def _packed(value: Any) -> Any:  # noqa: ANN401 - what msgpack cannot pack
    """Return an array as a mapping that msgpack can pack."""
    if hasattr(value, "detach"):  # a torch tensor, so that torch is there
        torch = sys.modules["torch"]
        value = value.detach().cpu().contiguous()
        with suppress(TypeError):
            value = value.numpy()
        if isinstance(value, torch.Tensor):  # of a dtype that numpy lacks: its bits
            value = value.view(getattr(torch, f"uint{8 * value.element_size()}")).numpy()
    if not isinstance(value, np.ndarray | np.generic | list | tuple):
        raise UsageError(f"a row has a value of type {type(value).__name__}, expected an array of numpy or torch")
    array = np.ascontiguousarray(value)
    if array.dtype.kind not in "biufc":  # of ml_dtypes
        array = array.view(f"u{array.dtype.itemsize}")
    return {"": [array.dtype.str, list(np.shape(value)), array.tobytes()]}


def _array(value: dict[str, Any]) -> Any:  # noqa: ANN401 - what msgpack unpacks
    """Return the array that `_packed` has packed; other mappings stay."""
    if value.keys() != {""}:
        return value
    dtype, shape, data = value[""]
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _unpacked(row: Mapping[str, Any]) -> tuple[Any, ...]:
    if missing := [name for name in _FIELDS if name not in row]:
        raise UsageError(f"a row has no {missing[0]!r}, only {sorted(row)}; make rows with bucketline.ray.sample")
    packed = [row[name] for name in _FIELDS[2:]]
    if not all(isinstance(value, bytes) for value in packed):
        raise UsageError(f"the row {row['id']!r:.200} has arrays; make rows with bucketline.ray.sample, which packs them")
    return row["id"], row["split"], *(msgpack.unpackb(value, object_hook=_array) for value in packed)
