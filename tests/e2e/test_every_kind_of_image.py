"""A folder of real and deliberately broken images of every kind, packed in one run and held against diffusers by hand."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.ingest.images.crop import Reason
from bucketline.store import Store
from bucketline.store.report.facts import collect_facts
from tests.commands import call
from tests.kinds_of_images import BACKGROUND, ImageCase, Refused, images, refused
from tests.kit import by_id
from tests.models import in_file
from tests.photographs import encoded_by_hand

GRID = "48x64,64x48,48x48"
RULES = ("--grid", GRID, "--min-size-px", 16)
TOLERANCE = 0.005  # of the largest value of a latent; most are within a millionth
TOLERANCE_OF_ROUNDING = 0.03  # where the colour engine and its arithmetic in floats may round to levels next to each other
APART = 0.1  # what another image's latent differs by at the least, so that the tolerance means something


@dataclass(frozen=True, kw_only=True)
class Run:
    """The images that were packed, and the outcome."""

    store: Path
    report: dict[str, Any]
    taken: dict[str, ImageCase]
    rejected: dict[str, Reason]
    photos: Path
    source: Path  # a data set file of them, with their rules


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    folder = tmp_path_factory.mktemp("kinds")
    photos, store = folder / "photos", folder / "s"
    photos.mkdir()
    taken = {image.name: image for number in range(4) for image in images(number)}
    broken: dict[str, Refused] = {image.name: image for number in range(3) for image in refused(number)}
    for name, data in [(p.name, p.data) for p in taken.values()] + [(r.name, r.data) for r in broken.values()]:
        (photos / name).write_bytes(data)
    rejected = {name: image.reason for name, image in broken.items()}
    os.mkfifo(photos / "pipe.png")
    (photos / "dangling.jpg").symlink_to("nowhere")
    (photos / "odd_caption.png").write_bytes(taken["plain_PNG_0.png"].data)
    (photos / "odd_caption.txt").write_bytes("café".encode("latin-1"))
    rejected |= {"pipe.png": Reason.UNREADABLE, "dangling.jpg": Reason.UNREADABLE, "odd_caption.png": Reason.CAPTION}
    colour = "#{:02x}{:02x}{:02x}".format(*BACKGROUND)
    source = in_file(folder / "kinds.toml", photos, max_upscale=2.0, background=colour)
    ran = call("ingest", "pack", source, store, "--model", model, *RULES, "--dtype", "F32", "--json").done()
    return Run(store=store, report=ran.json, taken=taken, rejected=rejected, photos=photos, source=source)


def test_every_image_is_accounted_for_and_only_what_should_be_is_refused(run: Run) -> None:
    assert run.report["found"] == len(run.taken) + len(run.rejected) >= 300
    assert run.report["packed"] == len(run.taken)
    assert run.report["rejected"] == len(run.rejected)
    assert set(run.report["rejected_by_reason"]) == {str(reason) for reason in set(run.rejected.values())}
    assert sorted(by_id(Store.open(run.store))) == sorted(run.taken)
    assert sum(loss["images"] for loss in run.report["crop_loss"].values()) == len(run.taken)


def test_every_reject_has_its_reason_and_a_detail(run: Run) -> None:
    rejects = rejects_of(run)
    assert {name: reason for name, reason, _ in rejects} == {name: str(reason) for name, reason in run.rejected.items()}
    for name, _, detail in rejects:
        assert 7 <= len(detail) <= 300, name


def test_a_full_scan_foretells_every_reject_and_every_bucket(run: Run, model: Path) -> None:
    ran = call("ingest", "scan", run.source, "--model", model, *RULES, "--full", "--json").done()
    same = ("found", "rejected", "rejected_by_reason", "enlarged", "crop_loss", "without_caption")
    assert {name: ran.json[name] for name in same} == {name: run.report[name] for name in same}
    assert [(reject["id"], reject["reason"], reject["detail"]) for reject in ran.json["rejects"]] == rejects_of(run)
    assert ran.json["buckets"] == {bucket.name: bucket.num_rows for bucket in Store.open(run.store).buckets()}


def test_a_scan_of_headers_refuses_nothing_that_is_packed_and_gives_the_same_reasons(run: Run) -> None:
    ran = call("ingest", "scan", run.source, *RULES, "--json").done()
    foretold = {(reject["id"], reject["reason"], reject["detail"]) for reject in ran.json["rejects"]}
    assert len(foretold) > len(run.rejected) // 2
    assert foretold <= set(rejects_of(run))
    behind = {reason for _, reason, _ in set(rejects_of(run)) - foretold}
    assert behind <= {str(Reason.DAMAGED), str(Reason.TOO_LARGE)}, behind


def test_a_report_loses_as_much_to_crops_as_packing_did(run: Run) -> None:
    found = collect_facts(Store.open(run.store), 1).buckets.values()
    losses = {b.name: {"images": b.with_crop, "mean": round(b.mean_loss, 6), "max": round(b.most, 6)} for b in found}
    assert losses == run.report["crop_loss"]


def rejects_of(run: Run) -> list[tuple[str, str, str]]:
    lines = (run.store / "rejects.jsonl").read_text(encoding="ascii").splitlines()
    return [(line["id"], line["reason"], line["detail"]) for line in map(json.loads, lines)]


def test_every_latent_is_what_diffusers_gives_for_the_same_image_by_hand(run: Run, model: Path) -> None:
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    vae = kind.from_pretrained(model / "vae").eval()
    store = Store.open(run.store)
    before: dict[tuple[int, ...], NDArray[np.float32]] = {}
    strangers, compared = [], 0
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        for sample_id, stored in zip(bucket.sample_ids(rows), bucket.read(rows, "latent"), strict=True):
            expected = encoded_by_hand(run.taken[sample_id].truth, bucket.height_px, bucket.width_px, vae)
            assert stored.shape == expected.shape
            largest = np.abs(expected).max()
            tolerance = TOLERANCE_OF_ROUNDING if sample_id.startswith("wide_gamut") else TOLERANCE
            assert np.abs(stored - expected).max() < tolerance * largest, sample_id
            if expected.shape in before:
                strangers.append(np.abs(stored - before[expected.shape]).max() / largest)
            before[expected.shape] = expected
            compared += 1
    assert compared == len(run.taken)
    assert np.median(strangers) > APART
