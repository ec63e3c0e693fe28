"""Memory of packing with a large text encoder: by compute dtype, in one phase and in two."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.bench.workers.pack import Packing

MIB = 1 << 20
WAYS = (("F32", "one"), ("F32", "two"), ("BF16", "two"), ("int8", "two"), ("nf4", "two"))
VAE_WIDTHS = (128, 256, 512, 512)


@dataclass(frozen=True, kw_only=True)
class TextEncoders(Case):
    """Measure the peak memory of `ingest pack`, each in a process of its own, with a random BERT saved in BF16.

    `private` (RssAnon, sampled every 5 ms) is the memory that must be there. `resident` is the kernel's peak (VmHWM), with the
    pages of weights that are mapped from their files, which are evicted when memory is short.

    Example: python -m bucketline.bench.ingest.text_encoders --layers 24
    """

    repeats: int = 1
    """Repeats per subject, in alternation."""
    width: int = 1024
    """Width of the text encoder."""
    layers: int = 24
    """Layers of the text encoder: 24 of width 1,024 have 302 million weights."""
    images: int = 12
    """Images to pack."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.photographs import Pieces, kept_photographs
        from bucketline.bench.fixtures.random_model import ModelShape, kept_model

        shape = ModelShape(vae_widths=VAE_WIDTHS, text_width=self.width, text_layers=self.layers, text_dtype="bfloat16")
        runs = _Runs(kept_model(folder, shape), kept_photographs(folder, Pieces(count=self.images, sides_px=(64, 64))), folder)
        subjects = [
            Subject(name=f"most {kind} memory: --encode-dtype {dtype} --phases {phases}", measure=runs.mib(kind, dtype, phases))
            for dtype, phases in WAYS
            for kind in ("private", "resident")
        ]
        return summarise("text_encoders", "MiB", subjects, alternate(subjects, self.repeats, warm_up=False))


class _Runs:
    """Packs into a new store once per round and way. One process reports both kinds of memory."""

    def __init__(self, model: Path, source: Path, folder: Path) -> None:
        self._model, self._source, self._store = model, source, folder / "text-encoders.store"
        self._done: dict[tuple[int, str, str], Packing] = {}

    def mib(self, kind: str, dtype: str, phases: str) -> Callable[[int], float]:
        """Return a measure in MiB: `private` or `resident`."""

        def measure(number: int) -> float:
            if (number, dtype, phases) not in self._done:
                self._done[number, dtype, phases] = self._pack(dtype, phases)
            packing = self._done[number, dtype, phases]
            return (packing.private_bytes if kind == "private" else packing.resident_bytes) / MIB

        return measure

    def _pack(self, dtype: str, phases: str) -> Packing:
        from bucketline.bench.workers.pack import pack_apart

        options = ["--model", str(self._model), "--grid", "64x64", "--encode-dtype", dtype, "--phases", phases]
        shutil.rmtree(self._store, ignore_errors=True)
        try:
            return pack_apart([str(self._source), str(self._store), *options], expected={})
        finally:
            shutil.rmtree(self._store, ignore_errors=True)


def main() -> int:
    """Make the model and the source, measure and print."""
    return run_case(TextEncoders)


if __name__ == "__main__":
    sys.exit(main())
