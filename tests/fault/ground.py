"""What trials stand on: a model, commands in forked processes, and a look at what else was written."""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import numpy as np

from bucketline.errors import BucketlineError
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.commands import call
from tests.fault.apart import Apart, Ended
from tests.fault.record import Asked, Outcome, Wrong, expect
from tests.models import SMALL, write_model

T = TypeVar("T")

COMMAND_S = 60.0  # of a whole command, which loads a model; a single answer has 10 s
FOR_PACKS = (
    "bucketline.ingest.pack",
    "bucketline.ingest.cli",
    "bucketline.ingest.parallel.ranks",
    "diffusers.models.autoencoders.autoencoder_kl",
    "transformers.models.bert",
    "rich.progress",
)
FOR_STORES = ("bucketline.store.cli", "bucketline.store.export.exporter", "bucketline.loader", "webdataset")


def import_for_packs(*more: str) -> None:
    """Import once what every forked pack needs, and more; with one thread, since threads are not forked."""
    import torch

    torch.set_num_threads(1)
    for module in (*FOR_PACKS, *more):
        importlib.import_module(module)


def limit_memory(num_bytes: int) -> None:
    """Let this process and those that it starts take so much more memory than it has now."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    taken = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + num_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class Ground:
    """A folder with a model, and random numbers; a quick run tries `most` of a list."""

    def __init__(self, asked: Asked, most: int | None = None) -> None:
        """Write the model, and import once what every forked command needs."""
        import_for_packs(*FOR_STORES)
        self.folder, self.draw, self.number = asked.folder, asked.draw, 0
        self.most = most if asked.is_quick else None
        (asked.folder / "work").mkdir()
        write_model(asked.folder / "model")

    def fresh(self) -> Path:
        self.number += 1
        path = self.folder / "work" / str(self.number)
        path.mkdir()
        return path

    def some(self, cases: Sequence[T]) -> list[T]:
        """Return all of a list, or some of it, drawn."""
        return list(cases) if self.most is None else self.draw.sample(list(cases), min(self.most, len(cases)))

    def pack_command(self, source: object, store: Path, *more: object) -> tuple[object, ...]:
        return ("pack", source, store, "--model", self.folder / "model", *SMALL, "--json", *more)

    def packing(self, source: object, store: Path, *more: object) -> Apart:
        return commanding("ingest", *self.pack_command(source, store, *more))

    def packed(self, source: object, store: Path, *more: object) -> Ended:
        return self.packing(source, store, *more).ended(COMMAND_S)


def commanding(command: str, *arguments: object) -> Apart:
    """Begin a console command in a forked process; it gives its exit code and what it said."""
    return Apart(lambda: asdict(call(command, *arguments)))


def commanded(command: str, *arguments: object) -> Ended:
    return commanding(command, *arguments).ended(COMMAND_S)


def fair(ended: Ended, *codes: int) -> Outcome:
    """Judge a command: done, or an error of ours in one line, with exit code 1 or one of `codes`; raise `Wrong` otherwise."""
    gave = ended.done()
    expect("Traceback" not in gave["err"], gave["err"][-400:])
    if gave["code"] == 0:
        return Outcome.COMPLETED
    expect(gave["code"] in (1, *codes), f"exit code {gave['code']}: {gave['err'][-300:]}")
    expect("error: " in gave["err"] or '"packed"' in gave["out"], f"no error in words: {gave['err'][-300:]}")
    return Outcome.CLEAN_ERROR


def done(ended: Ended) -> str:
    """Return what a command wrote; raise `Wrong` if it failed."""
    expect(fair(ended) is Outcome.COMPLETED, f"refused: {ended.gave['err'][-300:]}", Outcome.DEFECT)
    return str(ended.gave["out"])


def listed(folder: Path, *but: Path) -> dict[str, tuple[int, ...]]:
    """Return every path below a folder, but for some, with its mode, size and time: what a command must leave as it is."""
    found: dict[str, tuple[int, ...]] = {}
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(base, name) not in but]
        for name in (*folders, *files):
            status = os.lstat(f"{base}/{name}")
            found[f"{base}/{name}"] = (status.st_mode, *((status.st_size, status.st_mtime_ns) if name in files else ()))
    return found


def expect_same(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> None:
    """Raise `Wrong` if something is there that was not, or is other than it was, or is gone."""
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    expect(not changed, changed[:3], Outcome.OUTSIDE)


def is_sound(store: Path) -> str | None:
    """Describe what is wrong with a store; None where nothing is, or there is none yet."""
    if not (store / "manifest.json").exists():
        return None
    try:
        corrupt = verify(Store.open(store), lambda _: None, 1).corrupt
    except BucketlineError as error:
        return f"faults: it does not open: {error}"
    return f"{len(corrupt)} faults: {corrupt[0]}" if corrupt else None


def expect_sound(store: Path) -> None:
    if wrong := is_sound(store):
        raise Wrong(wrong, Outcome.WRONG)


def ids_of(store: Path) -> list[str]:
    """Return the ids of all live samples, sorted, each as often as it is there."""
    opened = Store.open(store)
    return sorted(name for bucket in opened.buckets() for name in bucket.sample_ids(np.arange(bucket.num_rows)))


def expect_ids(store: Path, ids: Sequence[str]) -> None:
    """Raise `Wrong` unless a store is sound and has these ids, each once."""
    expect_sound(store)
    found = ids_of(store)
    expect(found == sorted(ids), f"{len(found)} of {len(ids)} samples are there; missing: {sorted({*ids} - {*found})[:3]}")


def one_batch(store: Path, service: Path | None = None) -> int:
    from bucketline.loader import Loader, LoaderConfig

    with Loader(store, LoaderConfig(batch_size=1), service=service) as loader:
        return next(loader.forever()).step
