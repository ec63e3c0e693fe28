"""Open the report pages of a finished demo in a headless Chromium, check them, and write the screenshots of the documents.

    make demo && python -m tests.e2e.screenshots build/demo [RUN …]

With runs, these are compared on the page of `train report`; without, it has the demo's own.

Each page is tried as `tests/browser.py` says. docs/images/pages.json records which style and script were tried; a test
in the ordinary suite fails if they have changed since.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bucketline.store import LatentColumn, Store, StoreWriter
from bucketline.store.read.samples import Selection, live_samples
from tests.browser import RECORD, Browser, check_page, digest_of_page_code, find_browser
from tests.commands import BIN, spawn
from tests.kit import TEXT, embedding
from tests.unit.store.report.conftest import CONSTANT, DUPLICATES, cropped

WRONG_FACTOR = 0.18215  # Stable Diffusion's; the demo's VAE has 0.45108


def write_faulty_store(good: Store, path: Path, bucket: str) -> Store:
    """Copy a store as one that was imported, with a wrong scaling factor.

    One bucket has constant latents, near-duplicates and a crop of 60 %.
    """
    vae: Any = good.encoders["vae"]
    random = np.random.default_rng(0)
    with StoreWriter(
        path,
        encoders={"vae": vae | {"scaling_factor": WRONG_FACTOR, "dtype": None}, "text_encoder": {"width": 5}},
        rules=good.manifest.rules,
        columns=[LatentColumn(channels=vae["latent_channels"], dtype="F16")],
        text=TEXT,
        empty_caption={"tokens": embedding("")},
        max_captions=3,
    ) as writer:
        model = good.bucket(bucket).read(np.array([CONSTANT]), "latent")[0]
        for listed in live_samples(good, Selection()):
            record = replace(listed.record, captions=listed.record.captions[:3])
            latent = good.bucket(record.bucket).read(np.array([listed.row]), "latent")[0]
            if record.bucket == bucket:
                record = cropped(record, 0.6)
                if listed.row < CONSTANT:
                    latent = np.zeros_like(latent)
                elif listed.row < CONSTANT + DUPLICATES:
                    latent = (model + 0.05 * random.normal(size=model.shape)).astype(np.float16)
            writer.add_record(record, {"latent": latent}, {text: {"tokens": embedding(text)} for text in record.captions})
    return Store.open(path)


WIDTH_PX = 1000  # of a screenshot in the documents
COLOURS = 256  # of its palette


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A part of a page to be photographed."""

    name: str
    page: str
    dark: bool
    of: str | None = None  # selector; None: the top of the page
    height_px: int = 900
    search: str = ""


SHOTS = (
    Shot(name="store-report-light", page="report", dark=False),
    Shot(name="store-report-dark", page="report", dark=True, of="#samples", height_px=780),
    Shot(name="store-report-crops", page="report", dark=False, of="#crops", height_px=760),
    Shot(name="store-report-faults", page="faults", dark=False, height_px=640),
    Shot(name="loader-peek", page="step", dark=True, height_px=680),
    Shot(name="train-report", page="runs", dark=False, height_px=900),
    Shot(name="train-report-images", page="runs", dark=True, of="#images", height_px=900),
)


def make_pages(demo: Path, runs: Sequence[Path], folder: Path) -> dict[str, Path]:
    """Write the pages of a finished demo, from `folder`, so that they have no other paths than these short ones."""
    for path in (*(demo / name for name in ("photos.store", "photos", "model")), *runs):
        (folder / path.name).symlink_to(path)
    os.chdir(folder)
    store = Path("photos.store")
    commands: dict[str, list[object]] = {
        "report": ["store", "report", store, "--source", "photos"],
        "step": ["loader", "peek", store, "--step", 7, "--batch-size", 16],
        "runs": ["bucketline", "train", "report", *(path.name for path in runs)],
        "faults": ["store", "report", Path("faulty.store")],
    }
    write_faulty_store(Store.open(store), Path("faulty.store"), "train/96x160")
    pages = {}
    for name, (command, *arguments) in commands.items():
        pages[name] = Path(f"{name}.html")
        ran = spawn([BIN / str(command), *arguments, "-o", pages[name]]).done()
        print(ran.out, end="")
    return pages


def photograph(browser: Browser, shot: Shot, page: Path) -> bytes:
    browser.open(page, dark=shot.dark, width=1200, height=shot.height_px)
    data = browser.photograph(of=shot.of, most_px=shot.height_px)
    with Image.open(io.BytesIO(data)) as image:
        small = image.convert("RGB").resize((WIDTH_PX, round(image.height * WIDTH_PX / image.width)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.quantize(COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def main(demo: Path, *runs: Path) -> int:
    demo, runs = demo.resolve(), tuple(run.resolve() for run in runs or (demo / "run",))
    program = find_browser()
    if program is None:
        print("error: no Chromium or Chrome is on PATH; install one, such as `apt install chromium`", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        pages = make_pages(demo, runs, Path(folder))
        checked = {name: check_page(browser, page) for name, page in pages.items()}
        for name, checks in checked.items():
            print(f"{name}: {', '.join(checks)}")
        RECORD.parent.mkdir(exist_ok=True)
        for shot in SHOTS:
            path = RECORD.parent / f"{shot.name}.png"
            path.write_bytes(photograph(browser, shot, pages[shot.page]))
            print(f"{path.name}: {path.stat().st_size // 1024} KiB")
        record = {"page_code": digest_of_page_code(), "checked": checked}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
