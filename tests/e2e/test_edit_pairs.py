"""`examples/runs/edit-pairs`, in two steps and of emoji that the test draws: it ends in a sheet of before, drawn and true."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bucketline.ingest.rules import SplitBy, held_out
from bucketline.store import Store
from tests.commands import BIN, ROOT

EMOJI = [f"{code:x}" for code in range(0x1F400, 0x1F43E)]  # animals
HELD_OUT = [name for name in EMOJI if held_out(f"{name}/{name}.png", 0.05, SplitBy.FOLDER)]
FLAT = '<svg width="32" height="32" viewBox="0 0 32 32" fill="none"><path d="M4 4h24v{0}H4Z" fill="#{1}"/></svg>'
GRADIENT = '<svg viewBox="0 0 32 32"><path d="M0 0h9v9Z" fill="url(#a)"/></svg>'  # not drawn, so no pair
SIDE, GAP, HEAD = 64, 4, 76


def write_archives(folder: Path) -> None:
    """Write the two packages as npm has them: a bar of some height and colour, and a ball of that colour."""
    folder.mkdir()
    for kind, ending in (("flat", "svg"), ("3d", "webp")):
        with tarfile.open(folder / f"lobehub-fluent-emoji-{kind}-1.1.0.tgz", "w:gz") as archive:
            for n, name in enumerate([*EMOJI, "1f600"]):
                colour = f"{(n * 40503) % 0xFFFFFF:06x}"
                if kind == "flat":
                    data = (GRADIENT if name == "1f600" else FLAT.format(6 + n % 18, colour)).encode()
                else:
                    image, file = Image.new("RGBA", (256, 256)), io.BytesIO()
                    ImageDraw.Draw(image).ellipse((20, 20, 235, 235), fill=f"#{colour}")
                    image.save(file, "WEBP", lossless=True)
                    data = file.getvalue()
                entry = tarfile.TarInfo(f"package/assets/{name}.{ending}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.mark.slow
def test_edit_pairs_are_packed_trained_on_and_drawn_beside_what_they_are_made_from(tmp_path: Path) -> None:
    write_archives(tmp_path / "emoji")
    given = {"EMOJI": str(tmp_path / "emoji"), "BIN": os.path.relpath(BIN, ROOT), "STEPS": "2"}
    out = tmp_path / "out"
    script = ROOT / "examples" / "runs" / "edit-pairs"
    ran = subprocess.run([script, out], env=os.environ | given, capture_output=True, text=True, check=False)
    assert f"of {len(HELD_OUT)} drawn images are nearest to their own true one" in ran.stdout, ran.stderr
    store = Store.open(out / "pairs.store")
    rows = {bucket.name: bucket.num_rows for bucket in store.buckets()}
    assert rows == {"train/64x64x64x64": len(EMOJI) - len(HELD_OUT), "val/64x64x64x64": len(HELD_OUT)}
    assert store.sample("1f400/1f400.png")[1].captions == ("Make it 3D: rat",)

    sheet = pixels(out / "run" / "pairs.png")
    names = [path.stem for path in (out / "3d").glob("*/*.png") if path.stem in HELD_OUT]
    flat, real = ({name: pixels(out / kind / name / f"{name}.png") for name in names} for kind in ("flat", "3d"))
    half = -(-len(HELD_OUT) // 2)
    for n in range(len(HELD_OUT)):
        left, top = HEAD + n % half * (SIDE + GAP), GAP + n // half * 3 * (SIDE + GAP)
        before, drawn, true = (sheet[top + row * (SIDE + GAP) :, left:][:SIDE, :SIDE] for row in range(3))
        (name,) = [name for name, image in flat.items() if np.array_equal(image, before)]
        assert np.array_equal(true, real[name])
        assert not np.array_equal(drawn, true)
        assert drawn.std() > 0
