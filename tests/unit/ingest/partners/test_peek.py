"""`ingest peek` of a pair: the target with its mask over it, and its references at the right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.peek import GAP_PX
from bucketline.store import Store
from tests.commands import call
from tests.kit import by_id
from tests.unit.ingest.partners.kit import packed
from tests.unit.ingest.partners.test_packing import pairs_file, write_pairs


def test_a_sample_is_shown_with_its_mask_and_its_references(edit_model: Path, tmp_path: Path) -> None:
    write_pairs(tmp_path / "data")
    packed(pairs_file(tmp_path / "data"), tmp_path / "s", edit_model).done()
    asked = ("ingest", "peek", tmp_path / "s", "a.png", "--model", edit_model, "-o", tmp_path / "a.png", "--json")
    ran = call(*asked).done()
    assert (ran.json["height_px"], ran.json["width_px"]) == (32, 48)
    found = np.asarray(Image.open(tmp_path / "a.png")).astype(int)
    assert found.shape == (48, 48 + 48 + 32 + 2 * GAP_PX, 3)  # height first: the second reference is the highest

    vae = VaeEncoder(open_model(str(edit_model)), torch.device("cpu"), "F16", encode_dtype="F32")
    row = by_id(Store.open(tmp_path / "s"))["a.png"].columns
    left, shown = 0, []
    for name, (height, width) in {"latent": (32, 48), "reference/0": (32, 48), "reference/1": (48, 32)}.items():
        latent = np.frombuffer(row[name], dtype="<f2").reshape(1, 4, height // 2, width // 2)
        expected = vae.decode(torch.from_numpy(latent.copy()))[0]
        shown.append((found[:height, left : left + width], expected))
        left += width + GAP_PX
    for image, expected in shown[1:]:
        assert np.array_equal(image, expected)
    image, expected = shown[0]
    counts = np.frombuffer(row["mask"], dtype="u1").reshape(16, 24).repeat(2, axis=0).repeat(2, axis=1)[..., None] / 255
    red = 0.6 * (1 - counts)
    assert np.abs(image - ((1 - red) * expected + red * np.array([230, 0, 40]))).max() <= 2
