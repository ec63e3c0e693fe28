"""Exchange caches with peers' own packages: what they write is imported, what is exported they read, equal to the bit.

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
from bucketline.bench.peers.formats.cache_files import (
    read_mds,
    read_samples,
    save_samples,
    write_mds,
    write_simpletuner,
)
from bucketline.command_line import counted, guarded, parse_command
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bucketline.bench.peers.environments import Environment
    from bucketline.ingest.importers.cache import Cached, CacheEntry

SIZES = (((48, 72), (32, 48)), ((90, 60), (48, 32)))  # height and width of originals and buckets; the crop is the whole
SCALE, TOKENS = 0.18215, (77, 32)  # of Stable Diffusion's VAE, and of made-up text encoders
EXPORTED = "mds, exported"
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
    """Write caches with each peer that is a package, import them, and compare; let one read an export.

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
        for kind in (*WRITERS, EXPORTED):
            package = WRITERS[kind.partition(",")[0]]
            try:
                made = environment(package.environment, self.environments.absolute())
                if isinstance(made, Failure):
                    raise BucketlineError(f"the environment {made.name} cannot be made: {made.reason}")
                with tempfile.TemporaryDirectory(prefix="exchange-") as folder:
                    number = (_exported if kind == EXPORTED else _imported)(kind, Path(folder), made, self.samples)
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
    """Import a cache, and compare what is read and what is stored with the samples; return the number of values."""
    from bucketline.ingest.cli import main as ingest_main
    from bucketline.ingest.importers.cache import IMPORTERS, ListRequest
    from bucketline.ingest.importers.reading import listed
    from bucketline.ingest.importers.rows import read_entry
    from bucketline.store import Store

    store, writer = cache.parent / "i.store", WRITERS[kind]
    if code := ingest_main(["import", kind, str(cache), str(store), "--dtype", "F32", *writer.options]):
        raise BucketlineError(f"ingest import ended with {code}")
    opened, importer, number = Store.open(store), IMPORTERS[kind], 0
    listing = listed(importer, ListRequest(source=cache))
    entries = {entry.id: entry for entry in listing.entries}
    if opened.manifest.samples != len(samples):
        raise BucketlineError(f"{opened.manifest.samples} of {len(samples)} samples were imported")
    for wanted in samples:
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
        stored = writer.unscaled(wanted["latent"]).astype("<f4").reshape(found["stored"].shape)
        number += _compare({**wanted, "stored": stored}, found, f"{kind}, sample {entry.id}")
    return number


def _values(entry: CacheEntry, cached: Cached) -> dict[str, Any]:
    if not cached.texts:
        raise BucketlineError(f"sample {entry.id}: its embedding was not found")
    latent = cached.latent if cached.latent.ndim == 3 else cached.latent[:, 0]
    fixed = {name: value.numpy() for name, value in cached.texts[0].fixed.items()}
    return {"latent": latent.numpy(), "tokens": cached.texts[0].tokens.numpy(), **fixed}


def _exported(_: str, folder: Path, made: Environment, count: int) -> int:
    """Export a store as MDS, let the package read it, and compare; return the number of values."""
    from bucketline.store.cli import main as store_main

    expected = _write_store(folder / "s.store", count)
    output, arrays = folder / "exported", folder / "read.npz"
    if code := store_main(["export", str(folder / "s.store"), str(output), "--format", "mds", "--shard-size", "200KiB"]):
        raise BucketlineError(f"store export ended with {code}")
    apart(read_mds, output, arrays, **made.options())
    found = read_samples(arrays)
    if len(found) != count:
        raise BucketlineError(f"the package found {len(found)} samples in an export of {count}")
    number = 0
    for values in found:
        wanted = expected[values["key"]]
        number += _compare(values, wanted, f"sample {values['key']} of an export")
    return number


def _write_store(path: Path, count: int) -> dict[str, dict[str, Any]]:
    """Write a store of two buckets; return what its export should have, by key."""
    from bucketline.store import Column, LatentColumn, StoreWriter

    vae = {"class": "AutoencoderKL", "latents": "mode", "scaling_factor": SCALE, "shift_factor": 0.0, "latent_channels": 4}
    text = {"family": "sd", "width": TOKENS[1], "max_tokens": TOKENS[0], "padding": "max_length"}
    expected: dict[str, dict[str, Any]] = {}
    with StoreWriter(
        path,
        columns=[LatentColumn(channels=4, dtype="F32")],
        encoders={"vae": vae, "text_encoder": text},
        text=[Column(name="tokens", dtype="F16", shape=TOKENS[1:])],
        empty_caption={"tokens": np.zeros(TOKENS, dtype="<f2")},
    ) as writer:
        for number in range(count):
            height, width = ((512, 512), (384, 640))[number % 2]
            own = sample(number, WRITERS["mds"])
            fed = np.resize(own["latent"], (4, height // 8, width // 8))
            key, caption = str(own["id"]), str(own["caption"])
            latent = (fed.astype("f8") / SCALE).astype("<f4")
            writer.add(key, f"train/{height}x{width}", {"target": latent}, {caption: {"tokens": own["tokens"]}})
            name = f"latents_{height}" if height == width else f"latents_{height}x{width}"
            expected[key] = {name: fed.tobytes(), "caption_latents": own["tokens"].tobytes()}
            expected[key] |= {"caption": caption, "key": key, "original_height": height, "original_width": width}
    return expected


def _compare(all_values: dict[str, Any], some: dict[str, Any], item: str) -> int:
    """Compare values by name with those that there should be; return their number."""
    for name, value in some.items():
        if not np.array_equal(np.asarray(all_values.get(name)), np.asarray(value)):
            raise BucketlineError(f"{item}: {name} is {value!r:.80}, but {all_values.get(name)!r:.80} on the other side")
    return len(some)


def main() -> int:
    """Write, import, export and compare."""
    return guarded(lambda: parse_command(Exchange, sys.argv[1:], "python -m bucketline.bench.peers.exchange").run())


if __name__ == "__main__":
    sys.exit(main())
