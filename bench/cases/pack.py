"""Packing a folder compared with its single stages; a second run over unchanged images; memory by number of images."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.apart import apart, private_kib
from bucketline.bench.fixtures.trained_model import ModelShape, Pieces, kept_photographs, kept_random_model
from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, compare, not_measured, summarise
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.bench.harness import Figures
    from bucketline.bench.pack_stages import Stages

MARK, MEMORY_MARK = Mark(bound=0.9), Mark(bound=1.1, is_at_most=True)
DECODE, ENCODE, WRITE, WHOLE = "decode only", "encode only", "write only", "whole pack"
SHARED, SLOWER, ALL_THREE = "limit on shared cores", "the slower stage, limit with a GPU", "limit of all three"
START, ONE, AGAIN = "python -c pass", "again over 1 image", "again"
WALK = """
import os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        os.stat(os.path.join(folder, name))
"""
TINY = ModelShape(vae_widths=(4, 4), text_width=32, text_layers=1)
MARKED_FROM = 600  # images of the small source: 20 MiB of rows, more than one commit holds (COMMIT_BYTES)
ROWS = ("--grid", "64x64", "--latents", "moments", "--dtype", "F32")  # 32 KiB each with a VAE that halves once
MIB = 1 << 20
LOOK_EVERY_S = 0.005  # sampling interval of a process's memory


@dataclass(frozen=True, kw_only=True)
class Pack(Case):
    """Measure packing a folder of real photographs against its single stages, in images/s.

    `decode only` reads and decodes every file. `encode only` passes the same batches of pixels and captions from memory to the
    encoders. `write only` writes encoded rows to a shard and seals it. Decoding and torch each have as many threads as this
    process has cores, in a single stage and in the complete pack. So a single stage has the entire machine, and stages with D
    and E images/s reach 1/(1/D + 1/E) together on the same cores: the limit on a CPU. If the encoders run on a GPU, the two
    can run in parallel, and the limit is the slower one, min(D, E). `limit of all three` also counts the writing.

    `whole pack` goes from the listing to the published store, in this process. It excludes Python's start and the time of
    loading the model, which is measured just before and subtracted. The model has real classes, random weights, and a size at
    which encoding costs about as much as decoding. Limits are computed from the stages of the same round.

    Example: python -m bucketline.bench pack --images 1000 --json
    """

    images: int = 240
    """Images of the source."""
    sides_px: tuple[int, int] = (384, 1024)
    """Minimum and maximum side in px."""
    grid: str = "area:160:32"
    """Bucket grid."""
    batch_size: int = 8
    """Images encoded together."""
    vae_widths: tuple[int, ...] = (8, 8, 16, 16)
    """Channels of the VAE's levels; they set the cost of encoding."""

    def measure(self, folder: Path) -> list[Result]:
        import torch

        from bucketline.bench.pack_stages import Stages

        source = kept_photographs(folder, Pieces(count=self.images, sides_px=self.sides_px))
        model = kept_random_model(folder, ModelShape(vae_widths=self.vae_widths))
        with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
            stages = Stages(source, model, Path(stores), grid=self.grid, batch_size=self.batch_size)
            return self._measured(stages, has_gpu=torch.cuda.is_available())

    def _measured(self, stages: Stages, *, has_gpu: bool) -> list[Result]:
        alone = [
            Subject(name=DECODE, measure=stages.decode_only),
            Subject(name=ENCODE, measure=stages.encode_only),
            Subject(name=WRITE, measure=stages.write_only),
        ]
        limit, other = (SLOWER, SHARED) if has_gpu else (SHARED, SLOWER)
        whole = Subject(name=WHOLE, measure=stages.whole, limit=limit, beside=(other, ALL_THREE), mark=MARK)
        figures: Figures = alternate([*alone, whole], self.repeats)
        rounds = list(zip(figures[DECODE], figures[ENCODE], figures[WRITE], strict=True))
        figures[SHARED] = [together(d, e) for d, e, _ in rounds]
        figures[SLOWER] = [min(d, e) for d, e, _ in rounds]
        figures[ALL_THREE] = [together(d, e, w) for d, e, w in rounds]
        limits = [Subject(name=name, measure=not_measured) for name in (SHARED, SLOWER, ALL_THREE)]
        return summarise("pack", "images/s", [*alone, *limits, whole], figures)


def together(*rates: float) -> float:
    """Return the combined rate of stages that share the same cores, from their single rates.

    >>> together(300.0, 600.0)
    200.0
    """
    return 1 / sum(1 / rate for rate in rates)


@dataclass(frozen=True, kw_only=True)
class PackAgain(Case):
    """Measure a repeated `ingest pack` over an unchanged source, in seconds from the start of its process to its end.

    The limit is a Python process that walks the source's folder and reads the metadata of each file, images and captions.
    The same command over one unchanged image is what a run costs before it compares anything. `--check content` also reads and
    hashes every file. CPU seconds are those of all threads, user and system, which a busy machine changes less.

    Example: python -m bucketline.bench pack --again --images 20000
    """

    repeats: int = 3
    """Repeats per subject, in alternation. All are counted: making the stores already warms the caches."""
    images: int = 500
    """Images of the source, 64 px each, in folders of a thousand."""

    def measure(self, folder: Path) -> list[Result]:
        model = kept_random_model(folder, TINY)
        one, many = (kept_photographs(folder, Pieces(count=count, sides_px=(64, 64))) for count in (1, self.images))
        options = ["--model", str(model), "--grid", "64x64"]
        name = f"{self.images:,} images"
        walk, again = f"walk and stat of {name}", f"{AGAIN} over {name}"
        with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
            for source, count in ((one, 1), (many, self.images)):
                for packed in (count, 0):  # the first run does not record a model that was made just before it
                    command = [str(source), str(Path(stores) / source.name), *options]
                    pack_apart(command, expected={"packed": packed, "unchanged": count - packed, "rejected": 0})

            def unchanged(source: Path, count: int, *more: str) -> Callable[[int], dict[str, float]]:
                command = [str(source), str(Path(stores) / source.name), *options, *more]

                def measure(_: int) -> dict[str, float]:
                    packing = pack_apart(command, expected={"packed": 0, "unchanged": count, "rejected": 0})
                    return {"": packing.seconds, "CPU": packing.cpu_seconds}

                return measure

            subjects = [
                Subject(name=START, measure=_python("pass")),
                Subject(name=walk, measure=_python(WALK, str(many))),
                Subject(name=ONE, measure=unchanged(one, 1), limit=START),
                Subject(name=again, measure=unchanged(many, self.images), limit=walk, beside=(ONE,)),
            ]
            by_content = unchanged(many, self.images, "--check", "content")
            subjects.append(Subject(name=f"{again}, --check content", measure=by_content, limit=walk, beside=(ONE,)))
            return compare("pack, again", {"": "s", "CPU": "CPU-s"}, subjects, self.repeats, warm_up=False)


def _python(code: str, *arguments: str) -> Callable[[int], dict[str, float]]:
    def measure(_: int) -> dict[str, float]:
        begin, cpu_begin = time.perf_counter(), cpu_seconds_of_children()
        subprocess.run([sys.executable, "-P", "-c", code, *arguments], check=True, stdin=subprocess.DEVNULL)
        return {"": time.perf_counter() - begin, "CPU": cpu_seconds_of_children() - cpu_begin}

    return measure


@dataclass(frozen=True, kw_only=True)
class PackMemory(Case):
    """Measure the peak memory of `ingest pack` over few and over many images of 64 px, in separate processes.

    `resident` is the kernel's peak (VmHWM). It includes touched pages of mapped files, such as a shard while it is sealed;
    these belong to the page cache and are evicted when memory is short. It grows to a shard's size. `private` (RssAnon, sampled
    every 5 ms) excludes them. It must not grow, and has the target, provided that the small source already fills the buffers
    of a commit. A listing of ids and captions does grow. `listing` measures its bytes per image in a process that does nothing
    else, so that the rest of the growth can be separated from it.

    Example: python -m bucketline.bench pack --memory --images 1000 20000
    """

    repeats: int = 2
    """Repeats per subject, in alternation. All are counted, since a fresh process has nothing to warm up."""
    images: tuple[int, int] = (600, 3_000)
    """Images of the small and the large source."""
    shard_size: str = "2GiB"
    """Size at which a shard is sealed and the next one started."""

    def measure(self, folder: Path) -> list[Result]:
        options = ["--model", str(kept_random_model(folder, TINY)), *ROWS]
        store = folder / "memory.store"

        def packed(source: Path, count: int) -> Callable[[int], dict[str, float]]:
            def measure(_: int) -> dict[str, float]:
                shutil.rmtree(store, ignore_errors=True)
                file = folder / "memory.toml"
                shown = f'[source]\npath = "{source.absolute()}"\n[encoding]\nshard_size = "{self.shard_size}"\n'
                file.write_text(shown, encoding="utf-8")
                try:
                    packing = pack_apart([str(file), str(store), *options], expected={"packed": count})
                finally:
                    shutil.rmtree(store, ignore_errors=True)
                return {"private": packing.private_bytes / MIB, "resident": packing.resident_bytes / MIB}

            return measure

        small, large = (
            Subject(
                name=f"{count:,} images",
                measure=packed(kept_photographs(folder, Pieces(count=count, sides_px=(64, 64))), count),
            )
            for count in self.images
        )
        marks = {"private": MEMORY_MARK} if self.images[0] >= MARKED_FROM else {}
        pair = [small, replace(large, limit=small.name, marks=marks)]
        source = kept_photographs(folder, Pieces(count=self.images[1], sides_px=(64, 64)))
        per_image = [apart(listing_bytes, source) / self.images[1] for _ in range(self.repeats)]
        return [
            *compare("pack, memory", {"private": "MiB", "resident": "MiB"}, pair, self.repeats, warm_up=False),
            Result.of("pack, memory, listing", large.name, "B/image", per_image),
        ]


def listing_bytes(source: str) -> int:
    """Return the private bytes that a listing adds to this process."""
    from bucketline.ingest.sources.dataset_file import open_source

    opened = open_source(source)
    before = private_kib()
    listing = opened.listing()
    grown = private_kib() - before
    assert listing.items
    return grown << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Summary, time and peak memory of one process."""

    summary: dict[str, Any]
    seconds: float  # from its start to its end
    cpu_seconds: float  # of all its threads, in user and system mode
    resident_bytes: int  # peak (VmHWM), with pages of mapped files, which belong to the page cache
    private_bytes: int  # sampled peak (RssAnon), without them


def pack_apart(command: Sequence[str], *, expected: dict[str, int]) -> Packing:
    """Run `python -m bucketline.ingest pack` with these arguments. `expected`: values that the summary must contain."""
    whole = [sys.executable, "-P", "-m", "bucketline.ingest", "pack", *command, "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begin, cpu_begin = time.perf_counter(), cpu_seconds_of_children()
        with subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=out, stderr=err) as process:
            resident, private = _watch(process)
        seconds, cpu_seconds = time.perf_counter() - begin, cpu_seconds_of_children() - cpu_begin
        out.seek(0)
        err.seek(0)
        if process.returncode:
            reason = (err.read().strip().splitlines() or ["it said nothing"])[-1]
            raise BucketlineError(f"`ingest pack {' '.join(command)}` ended with {process.returncode}: {reason}")
        summary = json.loads(out.read())
    found = {name: summary[name] for name in expected}
    if found != expected:
        raise BucketlineError(f"`ingest pack {' '.join(command)}` says {found}, expected {expected}")
    return Packing(summary=summary, seconds=seconds, cpu_seconds=cpu_seconds, resident_bytes=resident, private_bytes=private)


def cpu_seconds_of_children() -> float:
    """Return the CPU time, user and system, of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Sample a process's memory until it ends; return its peak resident and private bytes."""
    status, resident, private = Path(f"/proc/{process.pid}/status"), 0, 0
    while process.poll() is None:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        found = dict(line.split(":", 1) for line in lines if line.startswith(("VmHWM", "RssAnon")))
        if found:  # none once it has ended
            resident = max(resident, int(found["VmHWM"].split()[0]) << 10)
            private = max(private, int(found["RssAnon"].split()[0]) << 10)
        time.sleep(LOOK_EVERY_S)
    return resident, private
