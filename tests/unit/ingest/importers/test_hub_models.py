"""The checks and the record of a hub model's VAE do not depend on the part of it that was downloaded before."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import ModelError
from bucketline.ingest.encoders.model_folder import ModelFolder
from bucketline.store import Store
from tests.commands import BIN, spawn
from tests.models import write_model
from tests.unit.ingest.encoders.test_model_folder import away, hub_of

WEIGHTS = "vae/diffusion_pytorch_model.fp16.safetensors"


def test_weights_that_a_hub_has_are_there_before_they_are_downloaded(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}", encoding="ascii")
    names = ("vae/config.json", WEIGHTS)
    assert ModelFolder(name="owner/model", path=tmp_path, hub_files=names).has_weights("vae")
    assert not ModelFolder(name="owner/model", path=tmp_path, hub_files=names[:1]).has_weights("vae")
    assert not ModelFolder(name=str(tmp_path), path=tmp_path).has_weights("vae")
    unreached = ModelFolder(name="owner/model", path=tmp_path, is_unreached=True)
    with pytest.raises(ModelError, match=r"owner/model: the weights of vae/ are not in the hub's cache, and the hub could not"):
        unreached.has_weights("vae")
    (tmp_path / WEIGHTS).touch()
    assert unreached.has_weights("vae")


@pytest.mark.slow
def test_an_import_records_the_same_vae_whatever_the_hubs_cache_has(tmp_path: Path) -> None:
    folder, cache = write_model(tmp_path / "model"), tmp_path / "cache"
    cache.mkdir()
    latents = np.random.default_rng(0).normal(size=(4, 8, 12)).astype("f4")
    np.savez(cache / "a_0024x0016_sd.npz", latents=latents, original_size=np.array([24, 16]))
    asked = ("--model", "owner/model", "--text", "none", "--trust-scale")
    shutil.rmtree(folder / "text_encoder")
    recorded = []
    with hub_of(folder) as (url, fetched):
        for name in ("empty", "downloaded"):
            spawn([BIN / "ingest", "import", "kohya", cache, tmp_path / name, *asked], **away(tmp_path, url)).done()
            recorded.append(Store.open(tmp_path / name).manifest.encoders["vae"])
    assert "vae/diffusion_pytorch_model.safetensors" in fetched
    assert recorded[0] == recorded[1]
    assert isinstance(recorded[0], dict)
    assert recorded[0]["weights_hash"] is not None
    for weights in (tmp_path / "hub").rglob("diffusion_pytorch_model.safetensors"):
        weights.unlink()
    spawn([BIN / "ingest", "import", "kohya", cache, tmp_path / "none", *asked], **away(tmp_path)).fails(
        "the weights of vae/ are not in the hub's cache"
    )
    assert not (tmp_path / "none").exists()
