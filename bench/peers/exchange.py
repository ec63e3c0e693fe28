"""Import caches that peers' own packages write; every value is equal to the bit.

`python -m bucketline.bench.peers.exchange`
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.apart import apart
from bucketline.bench.peers.environments import Failure, environment
from bucketline.bench.peers.formats.cache_files import save_samples, write_mds, write_simpletuner
from bucketline.command_line import counted, guarded, parse_command
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bucketline.bench.peers.environments import Environment

SIZES = (((48, 72), (32, 48)), ((90, 60), (48, 32)))  # height and width of originals and buckets; the crop is the whole
SCALE, TOKENS = 0.18215, (77, 32)  # of Stable Diffusion's VAE, and of made-up text encoders
FOLLOWED = {  # formats whose writers are in no package that can be installed: what the tests' writers follow
    "kohya": "sd-scripts 0.10.1",
    "musubi": "musubi-tuner 0.3.4",
    "onetrainer": "OneTrainer, mgds of August 2026",
    "ai-toolkit": "ai-toolkit of August 2026",
    "diffusion-pipe": "diffusion-pipe of August 2026",
}


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A package that writes caches, and how its caches are imported."""

    package: str
    environment: str
    write: Callable[[str, str], None]
    options: tuple[str, ...]
    unscaled: Callable[[NDArray[np.float32]], NDArray[Any]]  # what the VAE made, of the values that the cache stores
    sizes: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = SIZES
    channels: int = 16
    tokens: tuple[int, int] = (12, 24)
    dtype: str = "<f4"


WRITERS = {
    "simpletuner": Writer(
        package="simpletuner",
        environment="cache_writers",
        write=write_simpletuner,
        options=("--vae", "flux"),
        unscaled=lambda latent: latent.astype("f8") / 0.3611 + 0.1159,
    ),
    "mds": Writer(
        package="mosaicml-streaming",
        environment="streaming",
        write=write_mds,
        options=("--vae", "sd"),
        unscaled=lambda latent: latent.astype("f8") / SCALE,
        sizes=(((512, 512), (512, 512)),),
        channels=4,
        tokens=TOKENS,
        dtype="<f2",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Write caches with each peer that is a package, import them, and compare.

    It exits with 1 if a value differs.
    The packages run in virtual environments of their own with pinned versions, made on the first run. The other formats have
    writers in the tests, which follow the versions that the table says.

    Example: python -m bucketline.bench.peers.exchange
    """

    samples: int = 20
    """Samples, half of them in each of two buckets."""
    environments: Path = Path("build/peers")
    """Make the packages' virtual environments in this folder and keep them."""

    def run(self) -> int:
        rows: list[tuple[str, str, str]] = []
        for kind, package in WRITERS.items():
            try:
                made = environment(package.environment, self.environments.absolute())
                if isinstance(made, Failure):
                    raise BucketlineError(f"the environment {made.name} cannot be made: {made.reason}")
                with tempfile.TemporaryDirectory(prefix="exchange-") as folder:
                    number = _imported(kind, Path(folder), made, self.samples)
                version = f"package {package.package} {made.versions[package.package]}"
                rows.append((kind, version, f"{counted(number, 'value')} equal to the bit"))
            except BucketlineError as error:
                rows.append((kind, "", f"FAILED: {error}"))
        failed = any(what.startswith("FAILED") for _, _, what in rows)
        not_run = "not run here: tests/unit/ingest/importers"
        rows += [(kind, f"writer that follows {version}", not_run) for kind, version in FOLLOWED.items()]
        width = max(len(kind) for kind, _, _ in rows), max(len(version) for _, version, _ in rows)
        for kind, version, what in rows:
            print(f"{kind:{width[0]}}  {version:{width[1]}}  {what}")
        return 1 if failed else 0


def sample(number: int, form: Writer) -> dict[str, Any]:
    """Return a sample's values: its latent `[C, h, w]` as the trainer stores it, embeddings, and sizes, height first."""
    random, (original, bucket) = np.random.default_rng(number), form.sizes[number % len(form.sizes)]
    return {
        "id": np.array(f"{'cats' if number % 3 else 'dogs'}/{number}.png"),
        "caption": np.array(f"sample {number}, ein Hündchen"),
        "latent": random.standard_normal((form.channels, bucket[0] // 8, bucket[1] // 8)).astype(form.dtype),
        "tokens": random.standard_normal(form.tokens).astype(form.dtype),
        "pooled": random.standard_normal(8).astype(form.dtype),
        "original": np.array(original),
        "bucket": np.array(bucket),
    }


def _imported(kind: str, folder: Path, made: Environment, count: int) -> int:
    """Let a package write, import that, and compare; return the number of values."""
    writer = WRITERS[kind]
    samples = [sample(number, writer) for number in range(count)]
    cache = folder / "cache"
    if kind != "mds":  # whose writer makes it
        cache.mkdir()
    apart(writer.write, save_samples(folder / "arrays.npz", samples), cache, **made.options())
    return compare(kind, cache, samples)


def compare(kind: str, cache: Path, samples: Sequence[dict[str, Any]]) -> int:
    """Import a cache, and compare what is stored with the samples; return the number of values."""
    from bucketline.ingest.cli import main as ingest_main
    from bucketline.store import Store

    store, writer, number = cache.parent / "i.store", WRITERS[kind], 0
    if code := ingest_main(["import", kind, str(cache), str(store), "--dtype", "F32", *writer.options]):
        raise BucketlineError(f"ingest import ended with {code}")
    opened = Store.open(store)
    if opened.manifest.samples != len(samples):
        raise BucketlineError(f"{opened.manifest.samples} of {len(samples)} samples were imported")
    for wanted in samples:
        _, record = opened.sample(str(wanted["id"]))
        latent = writer.unscaled(wanted["latent"]).astype("<f4")
        stored = opened.bucket(record.bucket).read(np.array([record.row]), "latent")[0].reshape(latent.shape)
        found = {"latent": stored, "caption": record.captions[0], "original": np.array(record.original_size)}
        number += _compare({**wanted, "latent": latent}, found, f"{kind}, sample {record.id}")
    return number


def _compare(all_values: dict[str, Any], some: dict[str, Any], item: str) -> int:
    """Compare values by name with those that there should be; return their number."""
    for name, value in some.items():
        if not np.array_equal(np.asarray(all_values.get(name)), np.asarray(value)):
            raise BucketlineError(f"{item}: {name} is {value!r:.80}, but {all_values.get(name)!r:.80} on the other side")
    return len(some)


def main() -> int:
    """Write, import and compare."""
    return guarded(lambda: parse_command(Exchange, sys.argv[1:], "python -m bucketline.bench.peers.exchange").run())


if __name__ == "__main__":
    sys.exit(main())
