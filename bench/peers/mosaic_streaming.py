"""MosaicML Streaming: MDS shards, a stream a bucket, `batching_method="per_stream"`."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bucketline.bench.peers.samples import sample
from bucketline.bench.peers.torch_batches import opened, stack_arrays

if TYPE_CHECKING:
    from bucketline.bench.peers.peer import Opened, Way
    from bucketline.bench.peers.samples import SetShape


def _make_importable() -> None:
    """Let `streaming` import torchvision, which it does although nothing here uses it.

    torchvision's own operators are linked to CUDA's libraries in the builds of most registries. Beside a CPU build of torch
    they cannot be loaded, and its import then fails where it describes some of them; so those are declared.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _DECLARED:
        return
    folder = Path(spec.origin).parent
    try:
        for library in folder.glob("_C*.so"):
            ctypes.CDLL(str(library))
    except OSError:
        described = (folder / "_meta_registrations.py").read_text(encoding="utf-8")
        own = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in sorted(set(re.findall(r"torchvision::(\w+)", described))):
            own.define(f"{name}(Tensor first) -> Tensor")  # type: ignore[no-untyped-call]
        _DECLARED.append(own)


_DECLARED: list[torch.library.Library] = []  # an operator is known for as long as its library is kept


_make_importable()

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


class Mds:
    """A folder of MDS shards a bucket, their arrays' dtypes and fixed shapes declared."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for bucket, (height, width, _) in enumerate(shape.buckets):
            columns = {
                "number": "int",
                "latent": f"ndarray:float16:{shape.channels},{height},{width}",
                "tokens": "ndarray:float16",
                "original_size": "ndarray:int32:2",
                "crop": "ndarray:int32:2",
            }
            with MDSWriter(out=str(folder / str(bucket)), columns=columns) as out:
                for number in shape.numbers(bucket):
                    out.write(sample(shape, number)._asdict())

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        clean_stale_shared_memory()  # as its documents ask for, where a process before this one was ended
        dataset = StreamingDataset(
            streams=[Stream(local=str(folder / str(bucket))) for bucket in range(len(shape.buckets))],
            batch_size=shape.batch_size,
            shuffle=True,
            batching_method="per_stream",
        )
        loader = StreamingDataLoader(
            dataset,
            batch_size=shape.batch_size,
            num_workers=way.workers,
            collate_fn=stack_arrays(shape),
            persistent_workers=way.workers > 0,
        )
        return opened(lambda: loader)
