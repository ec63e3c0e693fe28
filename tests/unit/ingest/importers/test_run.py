"""The run of an import: what changed, what is hostile, what is interrupted, and several ranks."""

from __future__ import annotations

import os
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.text.registry import load_caption_encoder
from bucketline.ingest.importers import captions, run
from bucketline.ingest.importers.rows import row_of
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.train.config import TrainConfig
from bucketline.train.run import train
from tests.commands import call
from tests.unit.ingest.importers.known import assert_as_packed, read_store, run_import
from tests.unit.ingest.importers.writers import FORMS, kohya, kohya_latent, simpletuner
from tests.unit.train.tiny_run import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Embedding
    from bucketline.ingest.importers.cache import CacheEntry
    from tests.unit.ingest.importers.known import Known

RAN = "a pickle was run"


class Hostile:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.fixture
def own(known: Callable[[str], Known]) -> Known:
    return known("sdxl")


@pytest.fixture
def source(own: Known, tmp_path: Path) -> Path:
    return kohya(tmp_path / "cache", own)


def test_only_what_is_new_or_changed_is_imported(own: Known, source: Path, tmp_path: Path) -> None:
    store, first, second = tmp_path / "s.store", own.samples[0], own.samples[1]
    shutil.rmtree(source / "dogs")
    assert run_import("kohya", source, store, own).json["imported"] == 3
    shutil.rmtree(source)
    kohya(source, own)
    for path in source.rglob("cats/*"):
        os.utime(path, ns=(1, 1))
    changed = run_import("kohya", source, store, own).done()
    assert (changed.json["imported"], changed.json["unchanged"]) == (6, 0)
    path = kohya_latent(source, first, "sdxl", first.latent * np.float32(1.5))
    assert path.exists()
    again = run_import("kohya", source, store, own).json
    assert (again["imported"], again["unchanged"]) == (1, 5)
    stored = {sample.id: sample for sample in read_store(store)}
    np.testing.assert_allclose(stored[first.id].latent, first.latent * np.float32(1.5), rtol=2**-10)
    np.testing.assert_allclose(stored[second.id].latent, second.latent, rtol=2**-10, atol=1e-6)


def test_a_pickle_is_never_run(own: Known, source: Path, known: Callable[[str], Known], tmp_path: Path) -> None:
    sample = own.samples[0]
    width, height = sample.original_wh
    hostile = np.empty(1, dtype=object)
    hostile[0] = Hostile(tmp_path / RAN)
    np.savez(source / f"{sample.stem}_{width:04d}x{height:04d}_sdxl.npz", latents=hostile, original_size=[width, height])
    summary = run_import("kohya", source, tmp_path / "s.store", own).json
    assert (summary["imported"], summary["rejected"]) == (5, 1)
    assert "allow_pickle=False" in summary["rejects"][0]["detail"]
    tuned = simpletuner(tmp_path / "tuned", own)
    latents = sorted((tuned / "cache" / "vae").rglob("*.pt"))
    latents[0].write_bytes(pickle.dumps(Hostile(tmp_path / RAN)))
    torch.save({"latents": Hostile(tmp_path / RAN)}, latents[1])
    summary = run_import("simpletuner", tuned, tmp_path / "t.store", own).json
    assert (summary["imported"], summary["rejected"]) == (4, 2)
    assert not (tmp_path / RAN).exists()


def test_a_link_that_leads_out_of_the_source_is_not_followed(own: Known, source: Path, tmp_path: Path) -> None:
    path = min(source.rglob("*_sdxl.npz"))
    path.rename(tmp_path / "elsewhere.npz")
    path.symlink_to(tmp_path / "elsewhere.npz")
    summary = run_import("kohya", source, tmp_path / "s.store", own).json
    assert (summary["imported"], summary["rejected_by_reason"]) == (5, {"unreadable file": 1})
    (reject,) = summary["rejects"]
    assert reject["detail"].startswith(str(path.relative_to(source)))
    assert "a link that leads out of the source, which an import never follows; put the file itself there" in reject["detail"]


def test_a_sample_of_another_model_and_one_that_is_not_finite_are_rejected(own: Known, source: Path, tmp_path: Path) -> None:
    first, second, third, fourth = own.samples[:4]
    kohya_latent(source, first, "sdxl", np.zeros((16, 16, 24), dtype="f4"))
    kohya_latent(source, second, "sdxl", np.full_like(second.latent, np.nan))
    kohya_latent(source, third, "sdxl", np.full_like(third.latent, 1e6))
    kohya_latent(source, fourth, "sdxl", fourth.latent * np.float32(10))
    summary = run_import("kohya", source, tmp_path / "s.store", own, "--trust-scale").json
    assert (summary["imported"], summary["rejected"]) == (3, 3), summary["rejects"]
    assert summary["rejected_by_reason"] == {"latent not finite in the stored dtype": 2, "latent of another VAE": 1}
    assert [reject["id"] for reject in summary["rejects"]] == sorted([first.id, second.id, third.id])


def test_captions_are_encoded_in_full_batches_so_that_they_have_the_bits_of_pack(
    own: Known, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def noted(*given: Any) -> CaptionEncoder:
        encoder = load_caption_encoder(*given)
        encode = encoder.encode

        def counted(texts: Sequence[str]) -> list[Embedding]:
            sizes.append(len(texts))
            return encode(texts)

        monkeypatch.setattr(encoder, "encode", counted)
        return encoder

    monkeypatch.setattr(captions, "load_caption_encoder", noted)
    run_import("kohya", source, tmp_path / "s.store", own, "--text", "encode", "--batch-size", 4).done()
    assert set(sizes) == {4}
    assert_as_packed(tmp_path / "s.store", own, FORMS["kohya"])


def test_with_a_published_vae_captions_are_stored_without_embeddings(known: Callable[[str], Known], tmp_path: Path) -> None:
    own, source = known("sd"), tmp_path / "cache"
    random = np.random.default_rng(0)
    for sample in own.samples:
        kohya_latent(source, sample, "sd", (5.5 * random.standard_normal((4, 8, 8))).astype("f4"))
        (source / f"{sample.stem}.txt").write_text(sample.caption, encoding="utf-8")
    ran = run_import("kohya", source, tmp_path / "s.store", None, "--vae", "sd").done()
    assert (ran.json["text"], ran.json["without_caption"]) == ("none", 0)
    shown = call("store", "ls", tmp_path / "s.store", "--json").out
    assert "a red cat" in shown
    run_import("kohya", source, tmp_path / "s.store", None, "--vae", "sd", "--text", "encode").fails("needs --model", code=2)


def test_packing_and_importing_into_one_store_is_refused_both_ways(own: Known, source: Path, tmp_path: Path) -> None:
    assert run_import("kohya", source, tmp_path / "s.store", own).code == 0
    call("ingest", "pack", own.images, tmp_path / "s.store", "--model", own.model, "--grid", "32x48").fails(
        "was imported from a cache of kohya"
    )
    run_import("kohya", source, own.images.parent / "packed.store", own).fails(
        "was packed, not imported; import into a new store"
    )
    run_import("kohya", source, tmp_path / "s.store", own, "--crop", "center").fails(
        "rules.import.crop = unknown, this run has center"
    )


def test_an_interrupted_import_keeps_what_it_has_and_the_next_run_continues(
    own: Known, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = max(source.rglob("*_sdxl.npz")).name.partition("_")[0]

    def interrupted(source: Path, entry: CacheEntry, *args: Any) -> Any:
        if last in entry.id:  # whichever thread reads it: the rows before it are added first
            raise KeyboardInterrupt
        return row_of(source, entry, *args)

    with monkeypatch.context() as patched:
        patched.setattr(run, "row_of", interrupted)
        patched.setattr(run, "TOGETHER", 1)
        stopped = run_import("kohya", source, tmp_path / "s.store", own, "--batch-size", 1)
    assert stopped.code == 130
    assert "interrupted: what was imported is committed" in stopped.err
    again = run_import("kohya", source, tmp_path / "s.store", own).done()
    assert again.json["unchanged"] > 0
    assert again.json["imported"] + again.json["unchanged"] == 6
    assert_as_packed(tmp_path / "s.store", own, FORMS["kohya"])


def test_ranks_are_refused(own: Known, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_import("kohya", source, tmp_path / "s.store", own).fails("run it without torchrun", code=2)


@pytest.mark.slow
def test_a_model_that_is_told_crops_is_not_trained_on_unknown_ones(own: Known, source: Path, tmp_path: Path) -> None:
    assert run_import("kohya", source, tmp_path / "s.store", own).code == 0
    config = TrainConfig(
        store=(tmp_path / "s.store",), model=own.model, output_dir=tmp_path / "run", batch=BatchSize(batch_size=2), max_steps=1
    )
    with pytest.raises(ModelError, match=r"rules\.import\.crop"):
        train(config, ALONE)


def test_captions_beyond_the_most_that_a_row_has_do_not_make_it_look_changed(own: Known, source: Path, tmp_path: Path) -> None:
    for path in source.rglob("*.txt"):
        path.with_suffix(".json").write_text(
            '{"text": ["a red cat", "a blue dog", "a red cat", "the house"]}', encoding="utf-8"
        )
        path.unlink()
    options = ("--text", "encode", "--max-captions", 2)
    assert run_import("kohya", source, tmp_path / "s.store", own, *options).json["imported"] == 6
    assert {sample.record.captions for sample in read_store(tmp_path / "s.store")} == {("a red cat", "a blue dog")}
    assert run_import("kohya", source, tmp_path / "s.store", own, *options).json["unchanged"] == 6
