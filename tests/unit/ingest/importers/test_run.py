"""The run of an import: what is new, hostile or interrupted; into a store on a disk and at a URL, by a hub's model."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from bucketline.errors import ModelError
from bucketline.ingest.importers import run
from bucketline.ingest.importers.rows import row_of
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.store import Store, transfer
from bucketline.store.change import commit as commit_module
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull
from bucketline.store.verify.verify import verify_folder
from bucketline.train.config import TrainConfig
from bucketline.train.run import train
from tests import object_storage
from tests.commands import Ran, call
from tests.family_models import write_pipeline
from tests.kit import everything, rewrite_manifest
from tests.unit.ingest.importers.known import Known, assert_as_packed, read_store, run_import
from tests.unit.ingest.importers.writers import FORMS, WRITERS, kohya, kohya_latent, simpletuner
from tests.unit.train.tiny_run import ALONE

if TYPE_CHECKING:
    from bucketline.ingest.importers.cache import CacheEntry

RAN = "a pickle was run"


class Hostile:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.fixture
def own(sdxl: Known) -> Known:
    return sdxl


@pytest.fixture
def source(own: Known, tmp_path: Path) -> Path:
    return kohya(tmp_path / "cache", own)


def test_only_what_is_new_or_changed_is_imported(own: Known, source: Path, tmp_path: Path) -> None:
    store, first, second = tmp_path / "s.store", own.samples[0], own.samples[1]
    (source / "dogs").rename(tmp_path / "dogs")
    assert run_import("kohya", source, store, own).json["imported"] == 3
    (tmp_path / "dogs").rename(source / "dogs")
    for path in source.rglob("cats/*"):
        os.utime(path, ns=(1, 1))
    changed = run_import("kohya", source, store, own).done()
    assert (changed.json["imported"], changed.json["unchanged"]) == (6, 0)
    kohya_latent(source, first, "sdxl", first.latent * np.float32(1.5))
    again = run_import("kohya", source, store, own).json
    assert (again["imported"], again["unchanged"]) == (1, 5)
    stored = {sample.id: sample for sample in read_store(store)}
    np.testing.assert_allclose(stored[first.id].latent, first.latent * np.float32(1.5), rtol=2**-10)
    np.testing.assert_allclose(stored[second.id].latent, second.latent, rtol=2**-10, atol=1e-6)


def test_a_pickle_is_never_run(own: Known, source: Path, tmp_path: Path) -> None:
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


def test_latents_of_the_wrong_scale_are_refused_with_both_numbers_and_nothing_is_written(own: Known, tmp_path: Path) -> None:
    for factor, spread in ((2.5, "2.49"), (0.4, "0.398")):
        scaled = replace(own, samples=tuple(replace(one, latent=np.float32(factor) * one.latent) for one in own.samples))
        source = kohya(tmp_path / f"cache {factor}", scaled)
        ran = run_import("kohya", source, tmp_path / "s.store", own)
        ran.fails(f"spread is {spread} times the VAE's, expected 0.5 to 2", "--trust-scale")
        assert not (tmp_path / "s.store").exists()
    trusted = run_import("kohya", tmp_path / "cache 0.4", tmp_path / "s.store", own, "--trust-scale").done()
    assert trusted.json["imported"] == 6


def test_the_user_has_to_name_the_vae_that_the_latents_may_be_of(own: Known, source: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.store"
    run_import("kohya", source, store, None).fails("name the model that did by --model", code=2)
    run_import("kohya", source, store, None, "--vae", "flux").fails("it has 4 channels, the VAE of --vae flux has 16")
    assert not store.exists()


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


def test_a_model_whose_text_encoder_sees_images_takes_no_captions_of_a_cache(source: Path, tmp_path: Path) -> None:
    model = write_pipeline(tmp_path / "model", "qwenimage_edit_plus")
    asked = ("ingest", "import", "kohya", source, tmp_path / "s.store", "--model", model)
    call(*asked).fails("its text encoder sees images, which a cache does not have; add --text none")


def test_with_a_published_vae_captions_are_stored_without_embeddings(sd: Known, tmp_path: Path) -> None:
    source, random = tmp_path / "cache", np.random.default_rng(0)
    for sample in sd.samples:
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
    rules: Any = Store.open(tmp_path / "s.store").manifest.rules["import"]
    rewrite_manifest(tmp_path / "s.store", rules={"import": {name: rule for name, rule in rules.items() if name != "root"}})
    run_import("kohya", source, tmp_path / "s.store", own).fails("does not record its rules.import.root")


def test_an_interrupted_import_keeps_what_it_has_and_the_next_run_continues(
    own: Known, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = max(source.rglob("*_sdxl.npz")).name.partition("_")[0]

    def interrupted(entry: CacheEntry, *args: Any) -> Any:
        if last in entry.id:  # whichever thread reads it: the rows before it are added first
            raise KeyboardInterrupt
        return row_of(entry, *args)

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
        store=(tmp_path / "s.store",),
        model=own.model,
        output_dir=tmp_path / "run",
        batch_size=BatchSize(batch_size=2),
        max_steps=1,
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


def dated(folder: Path, seconds: int) -> None:
    for path in folder.rglob("*"):
        os.utime(path, ns=(seconds * 10**9, seconds * 10**9))


def test_a_moved_folder_is_unchanged_and_what_was_cached_again_is_replaced(own: Known, source: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.store"
    dated(source, 1)
    assert run_import("kohya", source, store, own).json["replaced"] == 0
    assert run_import("kohya", shutil.copytree(source, tmp_path / "moved"), store, own).done().json["unchanged"] == 6
    dated(source, 2)
    again = run_import("kohya", source, store, own).done()
    assert (again.json["imported"], again.json["replaced"]) == (6, 6)
    shown = run_import("kohya", source, store, own)
    assert (shown.json["unchanged"], shown.json["replaced"]) == (6, 0)


@pytest.mark.parametrize("kind", ["simpletuner", "onetrainer", "diffusion-pipe"])
def test_a_folder_added_to_a_data_set_changes_no_ids(kind: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    own, store, source = known(WRITERS[kind][1]), tmp_path / "s.store", tmp_path / "cache"
    cats = replace(own, samples=tuple(one for one in own.samples if one.id.startswith("cats/")))
    options: tuple[Any, ...] = ("--text", "none", "--captions", tmp_path / "captions")
    (tmp_path / "captions").mkdir()
    WRITERS[kind][0](source, cats)
    dated(source, 1)
    run_import(kind, source, store, own, *options).done()
    before = {one.id for one in read_store(store)}
    assert before == {one.id.removeprefix("cats/") for one in cats.samples}
    shutil.rmtree(source)
    WRITERS[kind][0](source, own)
    dated(source, 1)
    grown = run_import(kind, source, store, own, *options).done()
    assert grown.json["not_in_source"] == 0
    dogs = {one.id for one in read_store(store)} - before
    assert len(dogs) == 3
    assert all(name.partition("dogs/")[1] for name in dogs)
    again = run_import(kind, source, store, own, *options)
    assert (again.json["imported"], again.json["unchanged"]) == (0, 6)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "bucketline"))
    return object_storage.in_memory()


def to_url(source: Path, place: ObjectFolder, own: Known, *more: object) -> Ran:
    return call("ingest", "import", "kohya", source, place.url, "--model", own.model, "--json", *more)


def test_an_import_into_a_url_is_the_same_as_on_a_disk(own: Known, source: Path, place: ObjectFolder, tmp_path: Path) -> None:
    min(source.rglob("*_sdxl.npz")).write_bytes(b"damaged")
    dry = to_url(source, place, own, "--dry-run")
    assert (dry.code, dry.json["imported"], dry.json["rejected"]) == (0, 5, 1), dry.err
    assert newest_generation_or_none(place) is None
    done = to_url(source, place, own).done()
    here = run_import("kohya", source, tmp_path / "here.store", own)
    same = ("found", "imported", "unchanged", "rejected", "generation", "buckets")
    assert {name: done.json[name] for name in same} == {name: here.json[name] for name in same}
    pull(place, tmp_path / "pulled.store")
    pulled, local = Store.open(tmp_path / "pulled.store"), Store.open(tmp_path / "here.store")
    assert everything(pulled) == everything(local)
    assert place.read("rejects.jsonl") == (tmp_path / "here.store" / "rejects.jsonl").read_bytes()
    assert to_url(source, place, own, "--dry-run").json["disk_bytes"] == done.json["disk_bytes"]
    again = to_url(source, place, own).json
    assert (again["imported"], again["unchanged"], again["rejected"], again["generation"]) == (0, 5, 1, 1)
    (work,) = (tmp_path / "bucketline-pack").iterdir()
    assert not list((work / "shards").iterdir())  # what was committed has left
    assert not verify_folder(place, lambda _: None, 1).corrupt


def newest_generation_or_none(place: ObjectFolder) -> int | None:
    return None if place.size("manifest.json") is None else newest_generation(place).generation


def test_an_interrupted_import_sends_nothing_again_and_the_next_adds_what_is_new(
    own: Known, source: Path, place: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = (source / "cats").rename(tmp_path / "cats")
    with monkeypatch.context() as patched:  # it ends after its shards were sent, before the commit
        patched.setattr(commit_module, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            to_url(source, place, own)
    assert newest_generation_or_none(place) is None
    with monkeypatch.context() as patched:
        patched.setattr(transfer.Uploader, "_parts", lambda *_: 1 / 0)
        again = to_url(source, place, own).done().json
    assert (again["imported"], again["unchanged"]) == (0, 3)
    later.rename(source / "cats")
    done = to_url(source, place, own, "--work", tmp_path / "another machine").json
    assert (done["imported"], done["unchanged"], done["generation"]) == (3, 3, 2)
    assert newest_generation(place).samples == 6
    call("ingest", "import", "kohya", source, tmp_path / "s.store", "--work", tmp_path / "w", "--vae", "sdxl").fails(code=2)
