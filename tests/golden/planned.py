"""The rows of each batch: of seeds, world sizes, windows, remainders and batches; of mixtures, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bucketline.loader import Loader
from tests.golden.digests import of_bytes

ROWS = {"train/64x64": 53, "train/64x128": 31, "train/128x64": 2, "val/64x64": 7, "val/128x64": 3}
MORE_ROWS = {"train/64x64": 11, "train/128x64": 19}
EPOCHS = 3
ORDERS: tuple[dict[str, Any], ...] = (
    {"batch_size": 3},
    {"batch_size": 3, "seed": 7},
    {"batch_size": 2, "accumulation": 2},
    {"batch_size": 4, "remainder": "drop", "seed": 1},
    {"batch_size": 4, "remainder": "partial", "seed": 1},
    {"batch_size": 4, "remainder": "partial", "epochs": EPOCHS, "seed": 3},
    {"batch_size": 3, "window": 0},
    {"batch_size": 3, "window": 16},
    {"batch_size": 4, "window": 16, "lanes": 2, "seed": 5},
    {"batch_size": 4, "window": 24, "lanes": 4, "remainder": "partial"},
    {"batch_pixels": 5 * 64 * 64, "seed": 9},
    {"batch_pixels": 9 * 64 * 64, "batch_multiple": 2},
    {"batch_tokens": 4 * 8 * 8, "window": 16, "seed": 2},
    {"batch_size": 2, "split": "val", "remainder": "partial", "rewind": True},
    {"batch_size": 3, "caption_dropout": 0.4, "seed": 11},
)
WORLDS = (1, 2, 4)
MIXTURES: dict[str, dict[str, float]] = {
    "two": {"a.store": 1, "b.store": 1},
    "repeats": {"a.store": 2, "b.store": 3},
    "a part": {"a.store": 0.5, "b.store": 1},
    "a part more": {"a.store": 1.25, "b.store": 0.7},
}


def planned(work: Path) -> dict[str, Any]:
    """Return the order of the rows, by the options of the loader and the number of ranks."""
    from bucketline.loader import WeightedStore

    work.mkdir(parents=True)
    _write(work / "a.store", ROWS, "a")
    _write(work / "b.store", MORE_ROWS, "b")
    found: dict[str, Any] = {}
    for order in ORDERS:
        for world in WORLDS:
            found[f"{_shown(order)} on {world}"] = _orders(work / "a.store", order, world)
    for name, stores in MIXTURES.items():
        weighted = [WeightedStore(work / store, repeats) for store, repeats in stores.items()]
        for order in ({"batch_size": 3}, {"batch_size": 3, "window": 16, "seed": 4}):
            found[f"{name}: {_shown(order)} on 2"] = _orders(weighted, order, 2)
    for order in ORDERS[:2] + ORDERS[6:8]:
        for first, second in ((1, 1), (2, 4), (4, 2), (1, 2)):
            found[f"{_shown(order)}, {first} then {second}"] = _resumed(work / "a.store", order, first, second)
    return found


def _shown(order: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in order.items())


def _orders(stores: Any, order: dict[str, Any], world: int) -> Any:
    from bucketline.errors import BucketlineError
    from bucketline.loader import Loader, LoaderConfig

    ranks: list[Any] = []
    for rank in range(world):
        try:
            with Loader(stores, LoaderConfig(**order), rank=rank, world_size=world) as loader:
                ranks.append([_epoch(loader) for _ in range(EPOCHS)])
        except BucketlineError as error:
            return f"refused: {type(error).__name__}"
    return ranks


def _epoch(loader: Loader) -> Any:
    batches = [_batch(loader, batch) for batch in loader]
    return {"batches": len(batches), "first": batches[:2], "all": of_bytes(*(line.encode() for line in batches))}


def _batch(loader: Loader, batch: Any) -> str:
    names = " ".join(name.rpartition("/")[2] for name in loader.names(batch))
    drawn = of_bytes(*(array.tobytes() for array in (batch.keys.numpy(), batch.weight.numpy(), batch.token_mask.numpy())))
    return f"{batch.epoch}.{batch.step}.{batch.micro_step} {batch.bucket}: {names} ({drawn[:8]})"


def _resumed(store: Path, order: dict[str, Any], first: int, second: int) -> Any:
    """Return what is left after twelve rows of each rank's share of the first batches, on another number of ranks."""
    from bucketline.loader import Loader, LoaderConfig

    size = 12
    with Loader(store, LoaderConfig(**{**order, "batch_size": size // first}), world_size=first) as loader:
        taken = loader.forever()
        for _ in range(3):
            next(taken)
        state = loader.state_dict()
    with Loader(store, LoaderConfig(**{**order, "batch_size": size // second}), rank=second - 1, world_size=second) as loader:
        loader.load_state_dict(state)
        taken = loader.forever()
        return [_batch(loader, next(taken)) for _ in range(8)]


def _write(path: Path, rows: dict[str, int], prefix: str) -> None:
    from bucketline.store import Column, LatentColumn, StoreWriter

    width = 4
    columns, text = (LatentColumn(channels=2, dtype="F16"),), (Column(name="tokens", dtype="F16", shape=(width,)),)
    encoders = {"vae": {"scaling_factor": 0.5}, "text_encoder": {"width": width}}
    empty = {"tokens": np.zeros((1, width), "<f2")}
    random = np.random.default_rng(0)
    with StoreWriter(
        path, columns=columns, text=text, empty_caption=empty, encoders=encoders, shard_bytes=1, shard_names=f"{prefix}{{}}"
    ) as writer:
        number = 0
        for bucket, count in rows.items():
            split, _, size = bucket.partition("/")
            height, width_px = (int(side) for side in size.split("x"))
            for n in range(count):
                latent = random.normal(size=(2, height // 8, width_px // 8)).astype("<f2")
                captions = {
                    f"{prefix} {n} {k}": {"tokens": random.normal(size=(k + 1, width)).astype("<f2")} for k in range(n % 3)
                }
                writer.add(f"{prefix}/{bucket.replace('/', '-')}-{n}", split, {"target": latent}, captions)
                number += 1
                if number % 13 == 0:
                    writer.commit()
