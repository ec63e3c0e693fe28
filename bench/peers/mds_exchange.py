"""Exchange MDS files with the mosaicml-streaming package: it reads those of `store export`, and `ingest import` its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.peers.environments import Environment, Failure, environment
from bucketline.command_line import counted, guarded
from bucketline.errors import BucketlineError
from bucketline.store import Column, LatentColumn, Store, StoreWriter

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUCKETS = ((512, 512), (384, 640))  # height and width in px
SPREAD = 1 / 0.18215  # of the latents of Stable Diffusion's VAE
TOKENS = (77, 32)
ENCODERS = {
    "vae": {"class": "AutoencoderKL", "latents": "mode", "scaling_factor": 0.18215, "shift_factor": 0.0, "latent_channels": 4},
    "text_encoder": {"family": "sd", "width": TOKENS[1], "max_tokens": TOKENS[0], "padding": "max_length"},
}
_READER = "bucketline.bench.peers.formats.mds_files"


@dataclass(frozen=True, kw_only=True)
class MdsExchange:
    """Check both directions on random samples, bit by bit; exit with 1 if a value differs.

    The package runs in a virtual environment of its own with pinned versions, made on the first run.

    Example: python -m bucketline.bench.peers.mds_exchange
    """

    samples: int = 60
    """Samples, half of them in each of two buckets."""
    environments: Path = Path("build/peers")
    """Make the package's virtual environment in this folder and keep it."""

    def run(self) -> int:
        made = environment("streaming", self.environments.absolute())
        if isinstance(made, Failure):
            raise BucketlineError(f"the environment {made.name} cannot be made: {made.reason}")
        with tempfile.TemporaryDirectory(prefix="mds-") as name:
            folder = Path(name)
            exported = check_export(folder, made, self.samples)
            imported = check_import(folder, made, self.samples)
        versions = ", ".join(f"{package} {version}" for package, version in made.versions.items())
        what = f"{counted(exported, 'value')} of an export read, {counted(imported, 'value')} of its own imported"
        print(f"{versions}: {what}, all equal")
        return 0


def check_export(folder: Path, made: Environment, samples: int) -> int:
    """Export a store as MDS, read it with the package, and compare; return the number of values.

    Raises:
        BucketlineError: if one differs.
    """
    from bucketline.store.cli import main as store_main

    expected = _write_store(folder / "s.store", samples)
    code = store_main(
        ["export", str(folder / "s.store"), str(folder / "exported"), "--format", "mds", "--shard-size", "200KiB"]
    )
    if code:
        raise BucketlineError(f"store export ended with {code}")
    found = _read(made, folder / "exported", folder / "read.npz")
    if len(found) != samples:
        raise BucketlineError(f"the package found {len(found)} samples in an export of {samples}")
    number = 0
    for values in found.values():
        wanted = expected[str(values["key"])]
        _compare(wanted, values, f"sample {values['key']} of an export")
        number += len(wanted)
    return number


def check_import(folder: Path, made: Environment, samples: int) -> int:
    """Write MDS with the package, import it, and compare; return the number of values.

    Raises:
        BucketlineError: if one differs.
    """
    from bucketline.ingest.cli import main as ingest_main

    expected = {str(n): _sample(n, (512, 512)) for n in range(samples)}
    arrays: dict[str, Any] = {
        f"{n}/{column}": np.frombuffer(value, dtype="u1") if isinstance(value, bytes) else np.array(value)
        for n, values in expected.items()
        for column, value in values.items()
    }
    np.savez(folder / "written.npz", **arrays)
    _in(made, "write", folder / "written.npz", folder / "written")
    code = ingest_main(["import", "mds", str(folder / "written"), str(folder / "i.store"), "--vae", "sd"])
    if code:
        raise BucketlineError(f"ingest import ended with {code}")
    store = Store.open(folder / "i.store")
    texts = _imported_texts(folder / "written")
    bucket = store.bucket("train/512x512")
    if bucket.num_rows != samples:
        raise BucketlineError(f"{bucket.num_rows} of {samples} samples of the package were imported")
    rows = np.arange(samples)
    number = 0
    for sample_id, latent in zip(bucket.sample_ids(rows), bucket.read(rows, "latent"), strict=True):
        own = next(values for values in expected.values() if values["key"] == sample_id)
        fed = np.frombuffer(own["latents_512"], dtype="<f2").reshape(4, 64, 64).astype("f4")
        wanted = (fed.astype("f8") / 0.18215).astype("<f2")
        _, record = store.sample(sample_id)
        height, width = record.original_size
        told = {"caption": record.captions[0], "latent": latent.tobytes(), "caption_latents": texts[sample_id]}
        told |= {"original_height": height, "original_width": width}
        expects = {name: own[name] for name in told if name != "latent"} | {"latent": wanted.tobytes()}
        _compare(expects, told, f"sample {sample_id} of the package")
        number += len(told)
    return number


def _imported_texts(folder: Path) -> dict[str, bytes]:
    """Return the embeddings that the importer reads, by key; without its encoders, `ingest import` stores none."""
    from bucketline.ingest.importers.cache import ListRequest
    from bucketline.ingest.importers.changes import read_entry
    from bucketline.ingest.importers.registry import IMPORTERS

    listing = IMPORTERS["mds"].listed(ListRequest(source=folder))
    read = {entry.id: read_entry(IMPORTERS["mds"], folder, entry, listing.variant) for entry in listing.entries}
    return {key: cached.texts[0].tokens.numpy().astype("<f2", casting="same_kind").tobytes() for key, cached in read.items()}


def _sample(number: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return a sample in the columns of mosaicml/diffusion."""
    height, width = size
    random = np.random.default_rng(number)
    latent: NDArray[np.float16] = random.standard_normal((4, height // 8, width // 8)).astype("<f2")
    tokens: NDArray[np.float16] = random.standard_normal(TOKENS).astype("<f2")
    name = f"latents_{height}" if height == width else f"latents_{height}x{width}"
    return {
        name: latent.tobytes(),
        "caption": f"sample {number}, ein Hündchen",
        "caption_latents": tokens.tobytes(),
        "original_height": height,
        "original_width": width,
        "key": f"folder/{number}.png",
    }


def _write_store(path: Path, samples: int) -> dict[str, dict[str, Any]]:
    """Write a store; return what its export should have, by key."""
    expected, empty = {}, np.zeros(TOKENS, dtype="<f2")
    writer = StoreWriter(
        path,
        columns=[LatentColumn(channels=4, dtype="F32")],
        encoders=ENCODERS,
        text=[Column(name="tokens", dtype="F16", shape=TOKENS[1:])],
        empty_caption={"tokens": empty},
    )
    with writer:
        for number in range(samples):
            height, width = BUCKETS[number % 2]
            own = _sample(number, (height, width))
            name = next(column for column in own if column.startswith("latents_"))
            fed = np.frombuffer(own[name], dtype="<f2").reshape(4, height // 8, width // 8)
            latent = (fed.astype("f8") * SPREAD).astype("<f4")
            tokens = np.frombuffer(own["caption_latents"], dtype="<f2").reshape(TOKENS)
            writer.add(own["key"], f"train/{height}x{width}", {"target": latent}, {own["caption"]: {"tokens": tokens}})
            expected[own["key"]] = own
    return expected


def _read(made: Environment, folder: Path, arrays: Path) -> dict[str, dict[str, Any]]:
    _in(made, "read", folder, arrays)
    found: dict[str, dict[str, Any]] = {}
    with np.load(arrays) as values:
        for name in values.files:
            number, _, column = name.partition("/")
            value = values[name]
            found.setdefault(number, {})[column] = value.tobytes() if value.ndim else value.item()
    return found


def _in(made: Environment, *arguments: object) -> None:
    command = [str(made.python), "-P", "-m", _READER, *map(str, arguments)]
    done = subprocess.run(command, env=made.variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BucketlineError(
            f"the package ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )


def _compare(wanted: dict[str, Any], found: dict[str, Any], item: str) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise BucketlineError(f"{item}: {name} is {found.get(name)!r:.80}, expected {value!r:.80}")


def main() -> int:
    """Check both directions."""
    import tyro

    return guarded(lambda: tyro.cli(MdsExchange).run())


if __name__ == "__main__":
    sys.exit(main())
