"""Caches of kohya's scripts, written here as its `strategy_*.py` write them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.ingest.importers.known import assert_as_packed, run_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.ingest.importers.known import Known, Sample

MULTI = ("sd3", "flux")  # models whose keys have the latent's size


def write_latent(folder: Path, sample: Sample, model: str, latent: Any, **more: Any) -> Path:
    """Write `NAME_WWWWxHHHH_MODEL.npz`: width and height of the original."""
    width, height = sample.original_wh
    suffix = f"_{latent.shape[-2]}x{latent.shape[-1]}" if model in MULTI else ""
    path = folder / f"{sample.stem}_{width:04d}x{height:04d}_{model}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "latents": latent,
        "original_size": np.array([width, height]),
        "crop_ltrb": np.array([7, 7, 7, 7]),  # computed by the trainer, not what it cropped
        **more,
    }
    np.savez(path, **{key + suffix: value for key, value in values.items()})
    return path


def write_text(folder: Path, sample: Sample, family: str) -> None:
    """Write the text encoders' outputs one by one, as the model's strategy does."""
    tokens, pooled, off = sample.tokens, sample.pooled, np.array(False)
    if family == "sdxl":  # the first CLIP of the tests' models is 8 wide
        np.savez(folder / f"{sample.stem}_te_outputs.npz", hidden_state1=tokens[:, :8], hidden_state2=tokens[:, 8:], pool2=pooled)
    elif family == "sd3":
        masks = {f"{name}_attn_mask": np.ones(3, dtype=np.int64) for name in ("clip_l", "clip_g", "t5")}
        np.savez(
            folder / f"{sample.stem}_sd3_te.npz",
            lg_out=tokens[:77],
            lg_pooled=pooled,
            t5_out=tokens[77:],
            apply_lg_attn_mask=off,
            apply_t5_attn_mask=off,
            **masks,
        )
    elif family == "flux":
        ids, mask = np.zeros((len(tokens), 3)), np.ones(len(tokens))
        np.savez(
            folder / f"{sample.stem}_flux_te.npz",
            l_pooled=pooled,
            t5_out=tokens,
            txt_ids=ids,
            t5_attn_mask=mask,
            apply_t5_attn_mask=off,
        )


def write_cache(folder: Path, known: Known, model: str | None = None) -> Path:
    """Write a folder of images, captions and their caches."""
    shutil.copytree(known.images, folder)
    model = model or known.family
    for sample in known.samples:
        latent = known.fed(sample.latent) if model == "flux" else sample.latent
        write_latent(folder, sample, model, latent)
        write_text(folder, sample, model)
    return folder


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_latents_and_embeddings_are_those_that_pack_makes(known: Callable[[str], Known], family: str, tmp_path: Path) -> None:
    own = known(family)
    source = write_cache(tmp_path / "cache", own)
    ran = run_import("auto", source, tmp_path / "s.store", own)
    assert ran.code == 0, ran.err
    assert (ran.json["found"], ran.json["imported"], ran.json["rejected"]) == (6, 6, 0)
    assert ran.json["text"] == ("encode" if family == "sd" else "source")
    assert_as_packed(tmp_path / "s.store", own, has_text=True)
