"""Write a store from Ray Data: `dataset.map_batches(encode).write_datasink(StoreSink("photos.store", …))`.

Ray runs a task again if its worker was lost, so tasks only make shards, each in a folder of its own. They count once the driver
has published them, when all tasks have ended.
"""

from __future__ import annotations

import secrets
import sys
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from bucketline.errors import UsageError
from bucketline.extras import extra_named
from bucketline.store import StoreWriter
from bucketline.store.write.attempts import attempt_path, begin_attempt, begin_attempts, remove_attempts, take_shards
from bucketline.store.write.part_writer import PartWriter

with extra_named("ray"):
    from ray.data import Datasink
    from ray.data.block import BlockAccessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bucketline.store.write.arrays import Arrays

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
    """Writes rows of `sample` to a store in a folder that all nodes share; published when all of them are written.

    While the job runs, the store is locked. A row replaces the published one of the same id. If the job fails, or the driver is
    killed, the store is as it was before; run the job again.
    """

    def __init__(self, path: Path | str, *, rows_per_task: int | None = ROWS_PER_TASK, **contents: Any) -> None:  # noqa: ANN401
        """Take the keyword arguments of `StoreWriter`, which describe the store's contents: `columns`, `text` and so on.

        `rows_per_task`: Ray gives a task at least so many rows, if there are; each task makes shards of its own. None leaves
        their number to Ray.

        Raises:
            UsageError: as `StoreWriter`.
        """
        self._path, self._rows_per_task = Path(path).absolute(), rows_per_task
        self._writer: StoreWriter | None = StoreWriter(self._path, **contents)
        self._form, self._shard_bytes = self._writer._form, self._writer._shard_bytes
        self._run = secrets.token_hex(4)
        self._is_open = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None, "_is_open": False}  # the lock stays with the driver

    @property
    def min_rows_per_write(self) -> int | None:
        """Number of rows that Ray gives a task at least."""
        return self._rows_per_task

    def on_write_start(self, schema: object = None) -> None:  # noqa: ARG002 - Ray's own signature
        """Lock the store, and create it if there is none. Ray calls this on the driver.

        Raises:
            LockedError, FingerprintError, StoreError: as `StoreWriter.__enter__`.
        """
        if not self._is_open:
            assert self._writer is not None
            self._writer.__enter__()
            self._is_open = True
            begin_attempts(self._path, self._run)

    def write(self, blocks: Iterable[Any], ctx: Any) -> tuple[str, list[str]]:  # noqa: ANN401 - Ray's own types
        """Write the rows of a task to shards of its own; return its name and theirs. Ray calls this in a task.

        Raises:
            UsageError, StoreError: as `StoreWriter.add`.
        """
        name = f"t{ctx.task_idx:06d}-{secrets.token_hex(4)}"  # never that of another attempt
        folder = begin_attempt(self._path, self._run, name)
        with PartWriter(folder, self._form, f"ray-{self._run}-{name}-{{:04d}}", self._shard_bytes) as writer:
            for block in blocks:
                for row in BlockAccessor.for_block(block).iter_rows(public_row_format=True):
                    writer.add(*_unpacked(row))
        return name, writer.sealed

    def on_write_complete(self, write_result: Any) -> None:  # noqa: ANN401 - Ray's own type
        """Publish what the tasks have written. Ray calls this on the driver, with one result of each task.

        Raises:
            StoreError: if the store cannot be written.
        """
        assert self._writer is not None
        self.on_write_start()  # without any task, Ray has not called it
        sealed: list[str] = []
        for name, own in write_result.write_returns:
            take_shards(self._path, attempt_path(self._path, self._run, name), own)
            sealed += own
        remove_attempts(self._path)
        self._writer.publish(sealed)
        self._close(None)

    def on_write_failed(self, error: Exception) -> None:
        """Leave the store as it was before, and release its lock. Ray calls this on the driver."""
        if self._is_open:
            remove_attempts(self._path)
            self._close(error)

    def _close(self, error: Exception | None) -> None:
        assert self._writer is not None
        self._is_open = False
        self._writer.__exit__(None if error is None else type(error), error, None)


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
    """Return the arguments of `StoreWriter.add` that a row holds."""
    if missing := [name for name in _FIELDS if name not in row]:
        raise UsageError(f"a row has no {missing[0]!r}, only {sorted(row)}; make rows with bucketline.ray.sample")
    packed = [row[name] for name in _FIELDS[2:]]
    if not all(isinstance(value, bytes) for value in packed):
        raise UsageError(f"the row {row['id']!r:.200} has arrays; make rows with bucketline.ray.sample, which packs them")
    return row["id"], row["split"], *(msgpack.unpackb(value, object_hook=_array) for value in packed)
