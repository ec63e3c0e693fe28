"""A run that encodes nothing loads no weights, and encoders other than the store's never write a row."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.errors import UsageError
from bucketline.ingest.encoders.model_folder import ModelFolder
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.pipeline import model as phases
from bucketline.ingest.pipeline import model as pipeline_model
from bucketline.ingest.pipeline import slice_packer
from bucketline.ingest.pipeline.captions import FreshCaptions
from bucketline.ingest.pipeline.model import chosen_device
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.commands import Ran, call, forked_ranks, spawn
from tests.family_models import write_pipeline
from tests.fault.apart import How, apart
from tests.kit import Held, by_id, edit_json, untouched
from tests.models import SMALL, in_file, pack, png, write_images, write_model

HEAVY = {"torch", "diffusers", "transformers", "huggingface_hub", "matplotlib", "rich", "PIL.ImageDraw"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "photos", 6)
    assert pack(folder / "photos", folder / "s", model).code == 0
    return folder


@pytest.fixture
def again(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "again")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names, own = [], pipeline_model.load_text_encoder

    def noted(config: Any, model: ModelFolder, device: Any) -> Any:
        names.append(model.name)
        return own(config, model, device)

    monkeypatch.setattr(pipeline_model, "load_text_encoder", noted)
    return names


def test_a_run_again_loads_neither_the_encoders_nor_the_libraries(packed: Path, model: Path) -> None:
    asked = ["pack", packed / "photos", packed / "s", "--model", model, *SMALL, "--json"]
    code = (
        f"import sys\nfrom bucketline.ingest.cli import main\nmain({[*map(str, asked)]})\nprint(*sys.modules, file=sys.stderr)"
    )
    ran = spawn([sys.executable, "-P", "-c", code])
    assert (ran.code, ran.json["unchanged"], ran.json["packed"]) == (0, 6, 0)
    assert not HEAVY & {*ran.err.split()}


def test_the_encoders_are_loaded_when_an_image_or_caption_is_to_be_encoded(again: Path, model: Path, loads: list[str]) -> None:
    assert pack(again / "photos", again / "s", model).json["unchanged"] == 6
    (again / "photos" / "a" / "bad.png").write_bytes(b"no image")
    assert pack(again / "photos", again / "s", model).json["rejected"] == 1
    assert loads == []
    (again / "photos" / "a" / "bad.png").write_bytes(png(30, 40))
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert pack(again / "photos", again / "s", model).json["packed"] == 1
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    (again / "photos" / "a" / "bad.txt").write_text("a cat", encoding="ascii")
    assert pack(again / "photos", again / "s", model).json["latents_kept"] == 1
    assert len(loads) == 2
    assert verify(Store.open(again / "s"), lambda _: None).strays == ()
    changed = pack(again / "photos", again / "s", model, "--recaption", "--caption-template", "red")
    assert (changed.json["packed"], len(loads)) == (7, 3)
    assert "--dtype" not in changed.err
    refused = pack(again / "photos", again / "s", model, "--dtype", "F32")
    assert "--dtype fp16, this run has --dtype fp32" in refused.err
    assert len(loads) == 3, "options are compared without weights"


def test_a_run_that_encodes_nothing_says_what_it_did_not_compare(again: Path, model: Path) -> None:
    ran = pack(again / "photos", again / "s", model)
    assert (ran.code, ran.json["unchanged"]) == (0, 6)
    note = "there was nothing to encode, so no weights were loaded; not compared with the store: the encoders' weights, "
    assert [one for one in ran.json["notes"] if note in one]
    (again / "photos" / "new.png").write_bytes(png(30, 40))
    assert not [one for one in pack(again / "photos", again / "s", model).json["notes"] if note in one]


def test_a_model_of_other_weights_is_refused_before_a_row_is_written(again: Path, tmp_path: Path) -> None:
    other, store = write_model(tmp_path / "other", seed=1), again / "s"
    assert pack(again / "photos", store, other).json["unchanged"] == 6, "nothing is encoded, nothing is loaded"
    with untouched(store):
        (again / "photos" / "new.png").write_bytes(png(30, 40))
        refused = pack(again / "photos", store, other).fails("was made with other options than this run has", "weights_hash")
        assert refused.out == ""


@pytest.mark.parametrize(("part", "field"), [("vae", "scaling_factor"), ("text_encoder", "layer_norm_eps")])
def test_another_configuration_is_refused_though_nothing_is_encoded(
    part: str, field: str, again: Path, tmp_path: Path, loads: list[str]
) -> None:
    other = write_model(tmp_path / "other")
    edit_json(other / part / "config.json", **{field: 0.5})
    for more in ((), ("--dry-run",)):
        refused = pack(again / "photos", again / "s", other, *more).fails(f"encoders.{part}.config_hash")
        assert refused.out == ""
    assert loads == []


def test_encoders_are_loaded_once_for_all_sources_of_a_file(
    packed: Path, model: Path, tmp_path: Path, loads: list[str]
) -> None:
    write_images(tmp_path / "more", 2)
    file = tmp_path / "data.toml"
    file.write_text(f'[[source]]\npath = "{packed / "photos"}"\n[[source]]\npath = "{tmp_path / "more"}"\n', encoding="ascii")
    assert pack(file, tmp_path / "data", model).code == 0
    assert len(loads) == 1
    ran = pack(file, tmp_path / "data", model)
    assert [source["unchanged"] for source in ran.json["sources"].values()] == [6, 2]
    assert len(loads) == 1
    write_images(tmp_path / "more", 3)
    ran = pack(file, tmp_path / "data", model)
    assert [source["packed"] for source in ran.json["sources"].values()] == [0, 3]
    assert len(loads) == 2


# The device that a rank encodes on.


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_more_ranks_than_gpus_share_them(two_gpus: None) -> None:
    assert [chosen_device("auto", rank).index for rank in range(4)] == [0, 1, 0, 1]


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(two_gpus: None) -> None:
    assert chosen_device("cuda:1", 0).index == 1
    with pytest.raises(UsageError, match="this machine has 2 CUDA devices, expected cuda:0 to cuda:1"):
        chosen_device("cuda:7", 0)


# Two phases: all captions first, then the images, with the bytes of one phase and never both encoders in memory.


KEPT = "pending/captions"
NUM_IMAGES = 14


def arguments(source: Path, store: Path, model: Path, *more: object) -> tuple[object, ...]:
    return ("pack", source, store, "--model", model, *SMALL, "--batch-size", 3, "--json", *more)


def pack_in_phases(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", *arguments(source, store, model, *more)).done()


def contents(path: Path) -> dict[str, Held]:
    store = Store.open(path)
    assert not verify(store, lambda _: None, 1).corrupt
    found = by_id(store)
    assert len(found) == NUM_IMAGES
    return found


def killed(
    source: Path, store: Path, model: Path, monkeypatch: pytest.MonkeyPatch, kind: type, method: str, call_no: int
) -> None:
    """Pack in a process that is killed at one call of a method."""
    own, calls = getattr(kind, method), itertools.count(1)

    def counted(*given: Any) -> Any:
        if next(calls) == call_no:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*given)

    def work() -> int:
        torch.set_num_threads(1)  # the parent's are not there
        return call("ingest", *arguments(in_file(source.with_suffix(".toml"), source, phases="two"), store, model)).code

    with monkeypatch.context() as patched:
        patched.setattr(kind, method, counted)
        assert apart(work, 120).how is How.DIED


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each caption that is encoded but the empty one, and have few encoded together."""
    texts: list[str] = []
    own = FreshCaptions.of

    def noted(self: FreshCaptions, given: Sequence[str]) -> Any:
        texts.extend(text for text in given if text)
        return own(self, given)

    monkeypatch.setattr(FreshCaptions, "of", noted)
    monkeypatch.setattr(slice_packer, "CAPTIONS_TOGETHER", 2)
    return texts


@pytest.mark.parametrize("kind", ["a BERT", "flux", "pixart_alpha"])
def test_both_orders_store_the_same_bytes(kind: str, source: Path, model: Path, tmp_path: Path) -> None:
    if kind != "a BERT":
        model = write_pipeline(tmp_path / "model", kind)
    pack_in_phases(in_file(tmp_path / "d.toml", source, phases="one"), tmp_path / "one", model)
    ran = pack_in_phases(in_file(tmp_path / "d.toml", source, phases="two"), tmp_path / "two", model)
    assert "two phases, all captions before the images: phases is two" in ran.err
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not (tmp_path / "two" / KEPT).exists()


def test_the_text_encoder_is_gone_before_the_vae(
    source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: dict[str, list[weakref.ref[torch.nn.Module]]] = {"vae": [], "text": []}
    order: list[str] = []

    def noting(name: str, load: Callable[..., Any], module_of: Callable[[Any], torch.nn.Module]) -> Callable[..., Any]:
        def loaded(*given: Any) -> Any:
            assert [other for other in alive if other != name for ref in alive[other] if ref() is not None] == []
            found = load(*given)
            alive[name].append(weakref.ref(module_of(found)))
            order.append(name)
            return found

        return loaded

    for name, function, module_of in (
        ("vae", "load_vae_encoder", lambda found: found._vae),
        ("text", "load_text_encoder", lambda found: found._part.encoder),
    ):
        monkeypatch.setattr(pipeline_model, function, noting(name, getattr(pipeline_model, function), module_of))
    pack_in_phases(in_file(tmp_path / "d.toml", source, phases="two"), tmp_path / "s", model)
    assert order == ["vae", "text", "vae"]  # the first time for the store's description


@pytest.mark.parametrize("at", [(FreshCaptions, "of", 4), (VaeEncoder, "encode", 3)])
def test_captions_that_a_phase_committed_before_it_was_killed_are_not_encoded_again(
    at: tuple[type, str, int], source: Path, model: Path, tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_in_phases(source, tmp_path / "whole", model)
    num_texts = len(set(encoded))
    killed(source, tmp_path / "s", model, monkeypatch, *at)
    if at[0] is FreshCaptions:
        assert (tmp_path / "s" / KEPT).is_dir()
        stray = verify(Store.open(tmp_path / "s"), lambda _: None, 1).strays[0]
        assert "belongs to a run that is under way, or that was interrupted" in stray.what
    encoded.clear()
    assert (
        pack_in_phases(in_file(tmp_path / "d.toml", source, phases="two"), tmp_path / "s", model).json["packed"] == NUM_IMAGES
    )
    assert 0 < len(encoded) < num_texts if at[0] is FreshCaptions else encoded == []
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
    assert not (tmp_path / "s" / KEPT).exists()


def test_several_ranks_keep_captions_of_their_own(source: Path, model: Path, tmp_path: Path) -> None:
    ran = forked_ranks(
        2, "ingest", *arguments(in_file(source.with_suffix(".toml"), source, phases="two"), tmp_path / "two", model)
    ).done()
    assert ran.err.count("two phases") == 1
    pack_in_phases(source, tmp_path / "one", model)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one.keys() == two.keys()
    for sample_id, own in one.items():
        other = two[sample_id]
        assert (own.record, own.captions) == (other.record, other.captions)
        # Ranks group other images into a batch, which on some processors changes the last place of a latent.
        first, second = (np.frombuffer(held.columns["latent"], "<f2").astype("<f4") for held in (own, other))
        np.testing.assert_allclose(first, second, rtol=2**-10, atol=2**-14)


def test_images_that_are_added_later_and_rejected_ones_come_out_alike(source: Path, model: Path, tmp_path: Path) -> None:
    for order in ("one", "two"):
        pack_in_phases(in_file(tmp_path / "d.toml", source, phases=order), tmp_path / order, model)
    write_images(source, NUM_IMAGES + 4)
    (source / "a" / "broken.png").write_bytes(b"no image")
    (source / "a" / "long.png").write_bytes((source / "a" / "000.png").read_bytes())
    (source / "a" / "long.txt").write_text("the red cat of the house " * 5, encoding="utf-8")
    found = {}
    for order in ("one", "two"):
        json = pack_in_phases(in_file(tmp_path / "d.toml", source, phases=order), tmp_path / order, model).json
        names = ("packed", "latents_kept", "unchanged", "rejected", "captions_cut")
        found[order] = {name: json[name] for name in names}
    assert found["one"] == found["two"]
    assert found["two"]["packed"] == found["two"]["latents_kept"] + 5
    assert found["two"]["captions_cut"] == {"text_encoder": 1}
    assert (
        pack_in_phases(in_file(tmp_path / "d.toml", source, phases="two"), tmp_path / "two", model, "--check", "content").json[
            "packed"
        ]
        == 0
    )


@pytest.mark.parametrize(("free", "order"), [(1 << 40, "one phase"), (1 << 10, "two phases")])
def test_auto_goes_by_the_free_memory_and_says_why(
    free: int, order: str, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "SMALL_BYTES", 0)
    monkeypatch.setattr(phases, "free_bytes", lambda _: free)
    ran = pack_in_phases(source, tmp_path / "s", model)
    (said,) = ran.err.splitlines()
    assert said.startswith(f"pack: {order}")
    assert "the text encoders take" in said
    assert ("not more than half" in said) is (order == "one phase")


def test_free_memory_of_this_machine_is_known() -> None:
    assert 1 << 20 < phases.free_bytes(torch.device("cpu")) < 1 << 50
