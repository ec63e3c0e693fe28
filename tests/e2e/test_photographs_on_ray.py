"""The demo's photographs, packed by two Ray workers: rows, captions and rejects are those of one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bucketline.store import Store
from tests.commands import call
from tests.fault.same_store import compare
from tests.kit import everything
from tests.ray_ground import RayGround

pytestmark = pytest.mark.slow  # two hundred real photographs, packed twice with the demo's encoders
TIMES = ("seconds", "stage_seconds", "slowest_stage", "disk_bytes", "payload_bytes", "generation")


def records_of(store: Path) -> dict[str, Any]:
    """Return every sample's record, with its captions, by id."""
    return {held.record.id: held.record for rows in everything(Store.open(store)).values() for held in rows}


def test_two_ray_workers_pack_what_one_process_packs(tmp_path: Path, photographs: Path, demo_model: Path) -> None:
    source = tmp_path / "photos"
    shutil.copytree(photographs, source)
    for number in range(3):
        (source / f"broken-{number}.jpg").write_bytes(b"no image")
    options = ["--model", demo_model, "--val-fraction", "0.2:folder", "--json"]
    with RayGround() as ground:
        workers = ground.run("pack", source, tmp_path / "workers", *options, "--engine", "ray", "--workers", 2)
    one = call("ingest", "pack", source, tmp_path / "one", *options)
    assert (workers.code, one.code) == (0, 0), workers.err
    assert workers.json["found"] == workers.json["packed"] + 3 > 200
    summaries = [{name: value for name, value in ran.json.items() if name not in TIMES} for ran in (workers, one)]
    assert summaries[0] == summaries[1]
    compared = compare(tmp_path / "workers", tmp_path / "one")
    assert (compared.samples, compared.faults) == (workers.json["packed"], [])
    assert records_of(tmp_path / "workers") == records_of(tmp_path / "one")
    for file in ("rejects.jsonl", "without_caption.jsonl", "long_captions.jsonl"):
        assert (tmp_path / "workers" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()
