"""Write a store from Ray Data: `dataset.map_batches(encode).write_datasink(StoreSink("photos.store", …))`.

Ray runs a task again if its worker was lost, so tasks only make shards, each in a folder of its own. They count once the driver
has published them, when all tasks have ended. If the store is in object storage, tasks send their shards as they are sealed.
"""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from bucketline.errors import UsageError
from bucketline.extensions import extra_named
from bucketline.store import StoreWriter
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.working import AttemptStore, PartStore, take_attempt, target_at
from bucketline.store.transfer import PendingNotes
from bucketline.store.write.publish import begin_attempts, new_manifest, remove_attempts
from bucketline.store.write.store_writer import PartWriter

with extra_named("ray"):
    from ray.data import Datasink
    from ray.data.block import BlockAccessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.store.sync.working import SentShard
    from bucketline.store.write.row_form import Arrays

__all__ = ["StoreSink", "batch_of", "sample"]

ROWS_PER_TASK = 4096
_RUN = "ray-"  # begins the names of shards, and of runs in a bucket
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """The outcome of a task; nothing of it counts before the driver has taken its shards."""

    name: str
    sealed: list[str]  # names of its shards
    sent: list[SentShard]  # the same, if the store is in object storage


class StoreSink(Datasink):  # type: ignore[misc]  # Ray has no types here
    """Writes rows of `sample` to a store, which is published when all of them are written.

    The store is in a folder that all nodes share, or at a URL, to which each task sends its shards as they are sealed. A row
    replaces the published one of the same id. If the job fails, or the driver is killed, the store is as it was before; run the
    job again. While the job runs, the store's folder is locked; a URL may be written by others, as `ingest pack` says.
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
        self._path, folder = self._target.path, self._target.folder
        self._objects = folder if isinstance(folder, ObjectFolder) else None
        self._rows_per_task = rows_per_task
        self._writer: StoreWriter | None = StoreWriter.to(self._target, **contents)
        self._form, self._shard_bytes = self._writer._form, self._writer._shard_bytes
        self._empty = new_manifest(self._writer._schema)
        self._run = secrets.token_hex(4)
        self._held: ExitStack | None = None  # during the job

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None, "_held": None}  # the locks stay with the driver

    @property
    def min_rows_per_write(self) -> int | None:
        """Number of rows that Ray gives a task at least."""
        return self._rows_per_task

    def on_write_start(self, schema: object = None) -> None:  # noqa: ARG002 - Ray's own signature
        """Lock the store, and create it if there is none. Ray calls this on the driver.

        Raises:
            LockedError, FingerprintError, StoreError: as `StoreWriter.__enter__`; or if the URL cannot be read or written.
        """
        if self._held is not None:
            return
        assert self._writer is not None
        with ExitStack() as held:
            held.enter_context(self._target.held())
            held.enter_context(self._writer)
            if self._objects is not None:
                held.enter_context(PendingNotes(self._objects, f"{_RUN}{self._run}-"))
            else:
                begin_attempts(self._path, self._run)
                held.callback(remove_attempts, self._path)
            self._held = held.pop_all()

    def write(self, blocks: Iterable[Any], ctx: Any) -> _Written:  # noqa: ANN401 - Ray's own types
        """Write the rows of a task to shards of its own, and return their names. Ray calls this in a task.

        Raises:
            UsageError, StoreError: as `StoreWriter.add`; or if a shard cannot be sent.
        """
        name = f"t{ctx.task_idx:06d}-{secrets.token_hex(4)}"  # never that of another attempt
        own: AttemptStore | PartStore = AttemptStore(self._path, self._empty, self._run)
        if self._objects is not None:
            own = PartStore(self._objects, self._path.with_name(f"{self._path.name}.workers"), self._empty)
        try:
            folder, sender = own.begin(name if self._objects is None else f"{_RUN}{self._run}-{name}")
            with sender or nullcontext():
                num_put = 0
                with self._part(folder, name) as writer:
                    for arguments in _arguments(blocks):
                        writer.add(*arguments)
                        if sender is not None:
                            for shard in writer.sealed[num_put:]:
                                sender.put(shard)
                                sender.wait_for_room(lambda: None)
                            num_put = len(writer.sealed)
                if sender is not None:
                    for shard in writer.sealed[num_put:]:
                        sender.put(shard)
                    sender.finish(lambda: None)
            return _Written(name=name, sealed=writer.sealed, sent=own.finish(folder, writer.sealed))
        finally:
            own.close()

    def on_write_complete(self, write_result: Any) -> None:  # noqa: ANN401 - Ray's own type
        """Publish what the tasks have written. Ray calls this on the driver, with one result of each task.

        Raises:
            StoreError: if the store cannot be written.
        """
        self.on_write_start()  # without any task, Ray has not called it
        assert self._writer is not None
        assert self._held is not None
        with self._held:
            self._held = None
            for task in write_result.write_returns:
                take_attempt(self._path, self._run, task.name, task.sealed, task.sent)
            self._writer.publish([name for task in write_result.write_returns for name in task.sealed])

    def on_write_failed(self, error: Exception) -> None:
        """Leave the store as it was before, and release its lock. Ray calls this on the driver."""
        if (held := self._held) is not None:
            self._held = None
            held.__exit__(type(error), error, None)

    def _part(self, folder: Path, task: str) -> PartWriter:
        return PartWriter(folder, self._form, f"{_RUN}{self._run}-{task}-{{:04d}}", self._shard_bytes)


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
