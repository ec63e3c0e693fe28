"""A second pack finds the model of the first: its place is noted next to the store, on this machine only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from bucketline.ingest import pack as pack_module
from bucketline.ingest.packing.packed_model import PACKED_MODEL, PackedModel, packed_model
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.commands import BIN, Ran, call, forked_ranks
from tests.fault.apart import How, apart
from tests.fault.same_store import compare
from tests.kit import untouched
from tests.models import SMALL, png, write_images, write_model


def pack(source: Path, store: Path | str, *more: object) -> Ran:
    return call("ingest", "pack", source, store, *SMALL, *more)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "photos", 4)
    shutil.copytree(model, folder / "sd")
    pack(folder / "photos", folder / "s", "--model", folder / "sd").done()
    return folder


@pytest.fixture
def again(packed: Path, tmp_path: Path) -> Path:
    """A copy of `packed` to change, whose store has noted the copy's model."""
    folder = shutil.copytree(packed, tmp_path / "again")
    note(folder / "s", folder / "sd")
    return folder


def note(store: Path, model: Path | str) -> None:
    (store / PACKED_MODEL).write_text(json.dumps({"model": str(model), "model_config": None}), encoding="ascii")


def test_a_second_pack_needs_no_model_and_says_which_one_it_takes(again: Path) -> None:
    (again / "photos" / "new.png").write_bytes(png(20, 30, 99))
    ran = pack(again / "photos", again / "s").done()
    assert ran.out.splitlines()[0] == f"model: {again / 'sd'} (of the last pack into {again / 's'})"
    assert "1 packed + 4 unchanged" in ran.out
    told = pack(again / "photos", again / "t", "--model", again / "sd").done()
    assert "model: " not in told.out
    assert compare(again / "s", again / "t").faults == []
    assert pack(again / "photos", again / "s", "--json").json["unchanged"] == 5


def test_prompts_and_peek_take_it_too_or_ask_for_it(again: Path) -> None:
    (again / "p.txt").write_text("a cat\n", encoding="ascii")
    for asked in (("prompts", again / "p.txt", again / "s"), ("peek", again / "s", "a/000.png", "-o", again / "a.png")):
        said = f"model: {again / 'sd'} (of the last pack into {again / 's'})\n"
        assert call("ingest", *asked).done().out.startswith(said)
        (again / "s" / PACKED_MODEL).rename(again / "note")
        call("ingest", *asked).fails(f"add --model MODEL with the model that {again / 's'} was packed with", code=2)
        note(again / "s", again / "gone")
        call("ingest", *asked).fails(f"{again / 'gone'}, with which {again / 's'} was last packed, is no longer there")
        (again / "note").rename(again / "s" / PACKED_MODEL)


def test_it_is_noted_as_an_absolute_path_wherever_named(again: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(again)
    pack(again / "photos", "other.store", "--model", "sd").done()
    assert packed_model(again / "other.store") == PackedModel(model=str(again / "sd"), model_config=None)
    monkeypatch.chdir(tmp_path)
    pack(again / "photos", again / "other.store").done()


def test_a_dry_run_takes_it_too_and_writes_nothing(again: Path) -> None:
    (again / "photos" / "new.png").write_bytes(png(20, 30, 99))
    with untouched(again):
        ran = pack(again / "photos", again / "s", "--dry-run").done()
        assert ran.out.splitlines()[0].startswith(f"model: {again / 'sd'} (")
        assert "1 new" in ran.out


def test_an_interrupted_first_pack_is_continued_without_it(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(pack_module, "finish", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert apart(lambda: pack(again / "photos", again / "new.store", "--model", again / "sd").code).how is How.DIED
    pack(again / "photos", again / "new.store").done()
    assert compare(again / "new.store", again / "s").faults == []


def test_a_model_that_is_gone_is_refused_and_told_again_it_is_noted(again: Path) -> None:
    (again / "sd").rename(again / "moved")
    with untouched(again):
        for more in ((), ("--dry-run",)):
            ran = pack(again / "photos", again / "s", *more).fails()
            (line,) = ran.err.splitlines()
            assert line == (
                f"error: {again / 'sd'}, with which {again / 's'} was last packed, is no longer there or cannot be reached; "
                "add --model MODEL with the place where it is"
            )
            assert ran.out == ""
    pack(again / "photos", again / "s", "--model", again / "moved").done()
    pack(again / "photos", again / "s").done()


def test_another_model_in_its_place_is_refused(again: Path, tmp_path: Path) -> None:
    shutil.rmtree(again / "sd")
    write_model(again / "sd", seed=1)
    (again / "photos" / "new.png").write_bytes(png(20, 30, 99))
    pack(again / "photos", again / "s").fails("  encoders.", ".weights_hash = ", "Name the store's model in place of")
    shutil.rmtree(again / "sd" / "vae")
    (line,) = pack(again / "photos", again / "s").fails().err.splitlines()
    assert "lacks the part vae/" in line
    assert line.endswith(f"is the model of the last pack into {again / 's'}, --model MODEL names another")


def test_a_model_that_was_not_compared_does_not_take_its_place(again: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    pack(again / "photos", again / "s", "--model", other).done()
    assert packed_model(again / "s") == PackedModel(model=str(again / "sd"), model_config=None)
    (again / "photos" / "new.png").write_bytes(png(20, 30, 99))
    pack(again / "photos", again / "s", "--model", other).fails("weights_hash")
    pack(again / "photos", again / "s").done()


@pytest.mark.parametrize("content", [None, '{"form": 1}', "[", '{"model": 3, "model_config": null}', "[" * 9999])
def test_without_a_note_that_is_whole_the_store_does_not_know_its_model(again: Path, content: str | None) -> None:
    (again / "s" / PACKED_MODEL).unlink()
    if content is not None:
        (again / "s" / PACKED_MODEL).write_text(content, encoding="ascii")
    pack(again / "photos", again / "s").fails(
        f"{again / 's'} needs --model MODEL, since it does not know where its model is on this machine", code=2
    )
    pack(again / "photos", again / "s", "--model", again / "sd").done()
    assert packed_model(again / "s") == PackedModel(model=str(again / "sd"), model_config=None)


def test_a_new_store_and_one_at_a_url_need_it(again: Path) -> None:
    with untouched(again):
        pack(again / "photos", again / "new.store").fails("new.store needs --model MODEL, since it is a new store", code=2)
        pack(again / "photos", f"file://{again}/s").fails(
            f"file://{again}/s needs --model MODEL, since a store at a URL does not know where its model is on this machine",
            code=2,
        )
        pack(again / "photos", again / "new.store", "--model", "").fails("--model, an empty text, is not a folder")


def test_a_refusal_costs_under_a_cpu_second(again: Path) -> None:
    (again / "sd").rename(again / "moved")
    before = os.times()
    done = subprocess.run([BIN / "ingest", "pack", again / "photos", again / "s"], check=False, capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 1, done.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1


def test_verify_knows_the_note_and_neither_push_nor_collection_touches_it(again: Path) -> None:
    own = (again / "s" / PACKED_MODEL).read_bytes()
    assert verify(Store.open(again / "s"), lambda _: None).strays == ()
    call("store", "push", again / "s", f"file://{again}/bucket/s").done()
    assert not list((again / "bucket").rglob(f"{PACKED_MODEL}*"))
    call("store", "compact", again / "s", "--gc", "--older-than", "0s").done()
    assert (again / "s" / PACKED_MODEL).read_bytes() == own
    call("store", "pull", f"file://{again}/bucket/s", again / "pulled").done()
    pack(again / "photos", again / "pulled").fails("does not know where its model is on this machine", code=2)


def test_the_stores_of_a_data_set_file_have_one_model(again: Path) -> None:
    write_images(again / "more", 2)
    file, data = again / "data.toml", again / "data"
    file.write_text('[[source]]\npath = "photos"\n', encoding="ascii")
    pack(file, data).fails("data needs --model MODEL, since it is a new store", code=2)
    pack(file, data, "--model", again / "sd").done()
    file.write_text('[[source]]\npath = "photos"\n[[source]]\npath = "more"\n', encoding="ascii")
    (data / "of-another-file.store").mkdir()
    note(data / "of-another-file.store", "elsewhere/model")
    for more in (("--dry-run",), ()):
        assert pack(file, data, *more).done().out.startswith(f"model: {again / 'sd'} (of the last pack into {data})\n")
    assert packed_model(data / "more.store") == packed_model(data / "photos.store")
    note(data / "more.store", "elsewhere/model")
    pack(file, data).fails(
        f"data needs --model MODEL, since its stores were last packed with several: photos.store with {again / 'sd'}, "
        "more.store with elsewhere/model",
        code=2,
    )


def test_ranks_take_it_and_one_of_them_says_so(again: Path) -> None:
    (again / "photos" / "new.png").write_bytes(png(20, 30, 99))
    ran = forked_ranks(2, "ingest", "pack", again / "photos", again / "s", *SMALL).done()
    assert ran.out.count("model: ") == ran.out.count(f"model: {again / 'sd'} (of the last pack into {again / 's'})\n") == 1
    assert "1 packed + 4 unchanged" in ran.out


def test_a_model_that_may_not_be_looked_at_is_as_one_that_is_gone(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `Path.exists` in a folder of another user, which raises."""
    monkeypatch.setattr("pathlib.Path.exists", _denied)
    note(again / "s", "/root/of/another/model")
    pack(again / "photos", again / "s").fails("is no longer there or cannot be reached")
    pack(again / "photos", again / "s", "--model", again / "sd").done()
    assert packed_model(again / "s") == PackedModel(model=str(again / "sd"), model_config=None)


def _denied(path: Path) -> bool:
    if path.is_relative_to("/root/of/another"):
        raise PermissionError(13, "Permission denied")
    return os.path.exists(path)  # noqa: PTH110


def test_a_note_that_cannot_be_written_is_told_and_loses_no_pack(again: Path) -> None:
    (again / "s" / PACKED_MODEL).unlink()
    (again / "s" / PACKED_MODEL).mkdir()
    (again / "photos" / "new.png").write_bytes(png(20, 30, 99))
    ran = pack(again / "photos", again / "s", "--model", again / "sd").done()
    assert "the model's place was not noted for the next pack" in ran.out
    assert "5 samples" in call("store", "info", again / "s").done().out


def test_a_store_without_its_manifest_is_not_called_a_new_one(again: Path) -> None:
    (again / "s" / "manifest.json").unlink()
    assert "new store" not in pack(again / "photos", again / "s").out + pack(again / "photos", again / "s").err


def test_what_is_no_absolute_path_and_no_hub_name_is_no_note(again: Path) -> None:
    for name in ("", "sd", "a/b/c"):
        note(again / "s", name)
        assert packed_model(again / "s") is None


def test_source_and_store_swapped_are_told_apart_without_a_model(again: Path) -> None:
    pack(again / "s", again / "photos").fails("the images come first", code=2)


def test_json_says_on_stderr_which_model_it_takes(again: Path) -> None:
    assert f"model: {again / 'sd'} (of the last pack into " in pack(again / "photos", again / "s", "--json").err
