"""Import caches that peers' own packages wrote: latents, embeddings, captions and sizes have to be equal, bit by bit."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.peers import mds_exchange
from bucketline.bench.peers.environments import Environment, Failure, environment
from bucketline.command_line import counted, guarded
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from bucketline.ingest.importers.cache import Cached, CacheEntry

CHANNELS, TOKENS, POOLED = 16, (12, 24), (8,)
SIZES = (((48, 72), (32, 48)), ((90, 60), (48, 32)))  # height and width of originals and buckets; the crop is the whole
FOLLOWED = {  # formats whose writers are in no package that can be installed: what the tests' writers follow
    "kohya": "sd-scripts 0.10.1",
    "musubi": "musubi-tuner 0.3.4",
    "onetrainer": "OneTrainer, mgds of August 2026",
    "ai-toolkit": "ai-toolkit of August 2026",
    "diffusion-pipe": "diffusion-pipe of August 2026",
    "nemo": "NeMo Automodel 0.5.0",
}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A package that writes caches, and how its caches are imported."""

    package: str
    module: str  # of `formats`, which writes by it
    options: tuple[str, ...]
    unscaled: Callable[[NDArray[np.float32]], NDArray[Any]]  # what the VAE made, of the values that the cache stores


PEERS = {
    "fastvideo": Peer(
        package="fastvideo",
        module="fastvideo_files",
        options=("--vae", "wan", "--trust-scale"),  # random values do not have the spread of Wan's latents
        unscaled=lambda latent: latent,
    ),
    "simpletuner": Peer(
        package="simpletuner",
        module="simpletuner_files",
        options=("--vae", "flux"),
        unscaled=lambda latent: latent.astype("f8") / 0.3611 + 0.1159,
    ),
}


@dataclass(frozen=True, kw_only=True)
class ImportExchange:
    """Write caches with each peer that is a package, import them, and compare; exit with 1 if a value differs.

    The packages run in virtual environments of their own with pinned versions, made on the first run. The other formats have
    writers in the tests, which follow the versions that the table says.

    Example: python -m bucketline.bench.peers.import_exchange
    """

    samples: int = 20
    """Samples, half of them in each of two buckets."""
    environments: Path = Path("build/peers")
    """Make the packages' virtual environments in this folder and keep them."""

    def run(self) -> int:
        rows: list[tuple[str, str, str]] = []
        ways: dict[str, Callable[[Path], tuple[str, int]]] = {
            kind: lambda folder, kind=kind: self._exchanged(kind, folder)  # type: ignore[misc]
            for kind in PEERS
        }
        ways["mds"] = self._mds
        failed = 0
        for kind, way in ways.items():
            try:
                with tempfile.TemporaryDirectory(prefix="import-") as folder:
                    version, number = way(Path(folder))
                rows.append((kind, f"package {version}", f"{counted(number, 'value')} equal to the bit"))
            except BucketlineError as error:
                failed += 1
                rows.append((kind, "", f"FAILED: {error}"))
        rows += [
            (kind, f"writer that follows {version}", "not run here: tests/unit/ingest/importers")
            for kind, version in FOLLOWED.items()
        ]
        width = max(len(kind) for kind, _, _ in rows), max(len(version) for _, version, _ in rows)
        for kind, version, what in rows:
            print(f"{kind:{width[0]}}  {version:{width[1]}}  {what}")
        return 1 if failed else 0

    def _exchanged(self, kind: str, folder: Path) -> tuple[str, int]:
        peer = PEERS[kind]
        made = self._environment("cache_writers")
        samples = {str(n): sample(n) for n in range(self.samples)}
        np.savez(folder / "arrays.npz", **{f"{n}/{name}": value for n, own in samples.items() for name, value in own.items()})
        cache = folder / "cache"
        cache.mkdir()
        _in(made, peer.module, folder / "arrays.npz", cache)
        return f"{peer.package} {made.versions[peer.package]}", compare(kind, cache, samples)

    def _mds(self, folder: Path) -> tuple[str, int]:
        made = self._environment("streaming")
        return f"mosaicml-streaming {made.versions['mosaicml-streaming']}", mds_exchange.check_import(
            folder, made, self.samples
        )

    def _environment(self, name: str) -> Environment:
        made = environment(name, self.environments.absolute())
        if isinstance(made, Failure):
            raise BucketlineError(f"the environment {made.name} cannot be made: {made.reason}")
        return made


def sample(number: int) -> dict[str, Any]:
    """Return a sample's values: its latent `[C, h, w]` as the trainer stores it, embeddings, and sizes, height first."""
    random, (original, bucket) = np.random.default_rng(number), SIZES[number % 2]
    return {
        "id": np.array(f"{'cats' if number % 3 else 'dogs'}/{number}.png"),
        "caption": np.array(f"sample {number}, ein Hündchen"),
        "latent": random.standard_normal((CHANNELS, bucket[0] // 8, bucket[1] // 8)).astype("f4"),
        "tokens": random.standard_normal(TOKENS).astype("f4"),
        "pooled": random.standard_normal(POOLED).astype("f4"),
        "original": np.array(original),
        "bucket": np.array(bucket),
    }


def compare(kind: str, cache: Path, samples: Mapping[str, Mapping[str, Any]]) -> int:
    """Import a cache, and compare what is read and what is stored with the samples; return the number of values.

    Raises:
        BucketlineError: if a sample is missing, or one of its values differs.
    """
    from bucketline.ingest.cli import main as ingest_main
    from bucketline.ingest.importers.cache import ListRequest
    from bucketline.ingest.importers.changes import read_entry
    from bucketline.ingest.importers.registry import IMPORTERS
    from bucketline.store import Store

    store = cache.parent / "i.store"
    if code := ingest_main(["import", kind, str(cache), str(store), "--dtype", "F32", *PEERS[kind].options]):
        raise BucketlineError(f"ingest import ended with {code}")
    opened, importer, number = Store.open(store), IMPORTERS[kind], 0
    listing = importer.listed(ListRequest(source=cache))
    entries = {entry.id: entry for entry in listing.entries}
    if opened.manifest.samples != len(samples):
        raise BucketlineError(f"{opened.manifest.samples} of {len(samples)} samples were imported")
    for wanted in samples.values():
        entry = entries[str(wanted["id"])]
        cached = read_entry(importer, cache, entry, listing.variant)
        found = _values(entry, cached)
        _, record = opened.sample(entry.id)
        found["caption"] = record.captions[0]
        found["stored"] = opened.bucket(record.bucket).read(np.array([record.row]), "latent")[0].reshape(cached.latent.shape)
        if cached.geometry.original is not None:
            found["original"] = np.array(record.original_size)
        if cached.geometry.resized is not None:
            found["bucket"] = np.array(cached.geometry.resized)
        for name, value in found.items():
            if name == "stored":
                expected = PEERS[kind].unscaled(wanted["latent"]).astype("<f4").reshape(value.shape)
            else:
                expected = wanted[name]
            if not np.array_equal(np.asarray(value), expected):
                raise BucketlineError(f"{kind}, sample {entry.id}: {name} is {value!r:.80}, expected {expected!r:.80}")
            number += 1
    return number


def _values(entry: CacheEntry, cached: Cached) -> dict[str, Any]:
    if not cached.texts:
        raise BucketlineError(f"sample {entry.id}: its embedding was not found")
    latent = cached.latent if cached.latent.ndim == 3 else cached.latent[:, 0]
    fixed = {name: value.numpy() for name, value in cached.texts[0].fixed.items()}
    return {"latent": latent.numpy(), "tokens": cached.texts[0].tokens.numpy(), **fixed}


def _in(made: Environment, module: str, *arguments: object) -> None:
    command = [str(made.python), "-P", "-m", f"bucketline.bench.peers.formats.{module}", *map(str, arguments)]
    done = subprocess.run(command, env=made.variables(), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BucketlineError(f"the package ended with {done.returncode}: {said:.300}")


def main() -> int:
    """Write, import and compare."""
    import tyro

    return guarded(lambda: tyro.cli(ImportExchange).run())


if __name__ == "__main__":
    sys.exit(main())
