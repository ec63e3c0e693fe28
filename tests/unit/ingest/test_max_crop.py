"""`--max-crop`: a new store rejects what its crops would ruin; an existing store keeps the limit that it was made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.store import Store
from tests.commands import call
from tests.models import SMALL, png

DETAIL = "10x500 px, in its bucket of 16x24 the crop would lose 97 % of the area, more than --max-crop {}"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """One image of a bucket's shape, one that loses 40 % to its bucket, one that loses 97 %."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, size in {"fits.png": (20, 30), "wide.png": (20, 50), "strip.png": (10, 500)}.items():
        (folder / name).write_bytes(png(*size))
    return folder


def pack(photos: Path, store: Path, model: Path, *more: object) -> dict[str, Any]:
    ran = call("ingest", "pack", photos, store, "--model", model, *SMALL, *more, "--json").done()
    return ran.json


def ids(store: Path) -> list[str]:
    return sorted(name for bucket in Store.open(store).buckets() for name in bucket.sample_ids(np.arange(bucket.num_rows)))


@pytest.mark.parametrize(
    ("more", "limit", "taken"),
    [
        ((), "75 %", ["fits.png", "wide.png"]),
        (("--max-crop", "0.39"), "39 %", ["fits.png"]),
        (("--max-crop", "0.4"), "40 %", ["fits.png", "wide.png"]),
    ],
)
def test_what_loses_too_much_is_listed_with_its_numbers(
    more: tuple[str, ...], limit: str, taken: list[str], photos: Path, tmp_path: Path, model: Path
) -> None:
    scanned = call("ingest", "scan", photos, *SMALL, *more, "--json").json
    packed = pack(photos, tmp_path / "s", model, *more)
    assert scanned["rejected_by_reason"] == packed["rejected_by_reason"] == {"too much cropped away": 3 - len(taken)}
    rejects = [json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_bytes().splitlines()]
    assert rejects == scanned["rejects"]
    assert rejects[0] == {"id": "strip.png", "reason": "too much cropped away", "detail": DETAIL.format(limit)}
    assert ids(tmp_path / "s") == taken


@pytest.mark.parametrize("limit", ["1", "0.5"])
def test_a_store_keeps_the_limit_it_was_made_with(limit: str, photos: Path, tmp_path: Path, model: Path) -> None:
    first = pack(photos, tmp_path / "s", model, "--max-crop", limit)
    (photos / "strip2.png").write_bytes(png(11, 500))
    (photos / "strip.png").touch()
    (photos / "wide2.png").write_bytes(png(20, 90))  # loses 67 %, which the default allows
    again = pack(photos, tmp_path / "s", model)
    is_any = limit == "1"
    assert (first["packed"], first["rejected"]) == ((3, 0) if is_any else (2, 1))
    assert (again["dropped"], again["rejected"]) == ((0, 0) if is_any else (0, 3))
    assert Store.open(tmp_path / "s").manifest.rules["max_crop"] == float(limit)
    assert pack(photos, tmp_path / "s", model, "--max-crop", limit)["packed"] == 0


def test_a_changed_image_that_loses_too_much_drops_its_row(photos: Path, tmp_path: Path, model: Path) -> None:
    pack(photos, tmp_path / "s", model)
    (photos / "wide.png").write_bytes(png(10, 400))
    assert pack(photos, tmp_path / "s", model)["dropped_ids"] == ["wide.png"]


def test_stores_with_and_without_a_limit_are_read_together(photos: Path, tmp_path: Path, model: Path) -> None:
    for name, limit in (("a", "1"), ("b", "0.75")):
        pack(photos, tmp_path / name, model, "--max-crop", limit)
    stores = [WeightedStore(store=Store.open(tmp_path / name)) for name in "ab"]
    with Loader(stores, LoaderConfig(batch_size=1)) as loader:
        assert [batch.epoch for batch, _ in zip(loader.forever(), range(6), strict=False)] == [0] * 5 + [1]
