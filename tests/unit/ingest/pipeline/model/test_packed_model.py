"""A run that encodes nothing loads no encoders, and the store's note about its model never vouches for another one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.ingest.config import PackConfig
from bucketline.ingest.encoders.model_folder import ModelFolder, open_model
from bucketline.ingest.pipeline.model import lazy_encoders, load_encoders, packed_model
from bucketline.ingest.pipeline.model.packed_model import PACKED_MODEL, ModelState, model_state, record_packed_model
from bucketline.store import Store
from bucketline.store.format.manifest import read_manifest
from bucketline.store.verify.verify import verify
from tests.commands import Ran, call, spawn
from tests.models import SMALL, png, write_images, write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FILES = ("model_index.json", "vae/config.json", "vae/weights", "tokenizer/vocab.json", "tokenizer/deep/er")
HEAVY = {"torch", "diffusers", "transformers", "huggingface_hub", "matplotlib", "rich", "PIL.ImageDraw"}


@pytest.fixture(autouse=True, scope="module")
def _settled() -> Iterator[None]:
    """Take files that were just written for old ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_model, "SETTLED_NS", -(1 << 40))
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some files of a model."""
    for name in FILES:
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="ascii")
    (tmp_path / "elsewhere").write_text("linked", encoding="ascii")
    (tmp_path / "model" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "model"


def config(folder: Path, **options: Any) -> PackConfig:
    return PackConfig(source="images", place=folder.parent / "s", model=str(folder), **options)


def state(folder: Path, **options: Any) -> ModelState:
    found = model_state(config(folder, **options), ModelFolder(name="m", path=folder))
    assert found is not None
    return found


def test_each_option_and_library_that_the_encoders_depend_on_makes_another_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [state(folder)]
    assert state(folder, max_crop=0.5, batch_size=3, flip=True, prune=True) == states[0]
    for option, value in {
        "dtype": "F32", "encode_dtype": "BF16", "latents": "moments", "max_tokens": 7, "device": "cpu",
    }.items():  # fmt: skip
        states.append(state(folder, **{option: value}))
    for library in ("torch", "diffusers", "transformers", "tokenizers", "safetensors", "accelerate"):
        with monkeypatch.context() as patch:
            own = packed_model._version
            patch.setattr(packed_model, "_version", lambda name, of=library, own=own: "0" if name == of else own(name))
            states.append(state(folder))
    monkeypatch.setattr(packed_model, "__version__", "0.0.1")
    states.append(state(folder))
    assert len({one.digest for one in states}) == len(states)


def _swapped(folder: Path) -> None:
    """Other bytes in the same file, of the same size, and the mtime put back."""
    path = folder / "vae/weights"
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def _replaced(folder: Path) -> None:
    """Another file under the name, with size and mtime of the first."""
    path = folder / "vae/weights"
    before = path.stat()
    path.with_name("new").write_bytes(path.read_bytes()[::-1])
    os.utime(path.with_name("new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    path.with_name("new").replace(path)


def _copied(folder: Path) -> None:
    """The same files in the same place, as a backup restores them."""
    shutil.copytree(folder, folder.with_name("copy"), symlinks=True)
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def _relinked(folder: Path) -> None:
    (folder.parent / "other").write_text("linked", encoding="ascii")
    (folder / "link").unlink()
    (folder / "link").symlink_to(folder.parent / "other")


CHANGES: dict[str, Callable[[Path], object]] = {
    "swapped": _swapped,
    "replaced": _replaced,
    "copied": _copied,
    "linked elsewhere": _relinked,
    "the target of a link": lambda folder: (folder.parent / "elsewhere").write_text("Linked", encoding="ascii"),
    "longer": lambda folder: (folder / "vae/weights").write_text("longer", encoding="ascii"),
    "touched": lambda folder: os.utime(folder / "vae/weights"),
    "removed": lambda folder: (folder / "tokenizer/deep/er").unlink(),
    "added": lambda folder: (folder / "tokenizer/tokenizer.json").touch(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_models_files_makes_another_state(folder: Path, change: str) -> None:
    before = state(folder)
    assert state(folder) == before
    CHANGES[change](folder)
    assert state(folder).digest != before.digest


def test_a_model_whose_files_cannot_be_told_has_no_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "dangling").symlink_to(folder / "nowhere")
    assert model_state(config(folder), ModelFolder(name="m", path=folder)) is None
    (folder / "dangling").unlink()
    (folder / "cycle").symlink_to(folder)
    assert model_state(config(folder), ModelFolder(name="m", path=folder)) is None
    (folder / "cycle").unlink()
    monkeypatch.setattr(packed_model, "MAX_FILES", len(FILES))
    assert model_state(config(folder), ModelFolder(name="m", path=folder)) is None


def test_only_an_intact_record_of_this_provenance_and_state_counts(folder: Path, store: Store, tmp_path: Path) -> None:
    manifest, own, path = store.manifest, state(folder), tmp_path / PACKED_MODEL

    def is_known(manifest: Any = manifest, state: ModelState | None = own) -> bool:
        return packed_model.packed_model(tmp_path, manifest, state) is not None

    assert not is_known()
    record_packed_model(tmp_path, manifest, own, on_shared_cores=True)
    assert is_known()
    assert not is_known(state=state(folder, dtype="F32"))
    assert not is_known(state=None)
    assert not is_known(manifest=None)
    assert not is_known(manifest=dataclasses.replace(manifest, encoders={**manifest.encoders, "vae": {"class": "?"}}))
    assert is_known(manifest=dataclasses.replace(manifest, generation=99)), "published since"
    data = path.read_bytes()
    assert str(folder) not in data.decode("ascii"), "a store that is passed on does not tell where its author's files are"
    document = json.loads(data)
    for wrong in (
        b"", data[:-3], b"[]", b"[" * 9999, data + bytes(1 << 16),
        *(json.dumps({**document, **more}).encode() for more in ({"form": 2}, {"model": None}, {"more": 1})),
    ):  # fmt: skip
        path.write_bytes(wrong)
        assert not is_known(), wrong[:80]
    path.unlink()
    os.mkfifo(path)
    assert not is_known()


def test_a_file_that_was_changed_just_now_is_not_recorded_since_it_could_change_within_a_tick(
    folder: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_model, "SETTLED_NS", 1 << 50)
    record_packed_model(tmp_path, store.manifest, state(folder), on_shared_cores=True)
    assert not (tmp_path / PACKED_MODEL).exists()


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, "--json", *more)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with `photos` and the store `s` of them."""
    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "photos", 6)
    assert pack(folder / "photos", folder / "s", model).code == 0
    return folder


@pytest.fixture
def again(packed: Path, tmp_path: Path) -> Path:
    """A copy of `packed` to change."""
    return shutil.copytree(packed, tmp_path / "again")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each time that encoders are loaded."""
    names, own = [], load_encoders.load_text_encoder

    def noted(config: Any, model: ModelFolder, device: Any) -> Any:
        names.append(model.name)
        return own(config, model, device)

    monkeypatch.setattr(load_encoders, "load_text_encoder", noted)
    return names


def test_a_run_again_loads_neither_the_encoders_nor_the_libraries(packed: Path, model: Path) -> None:
    asked = ["pack", packed / "photos", packed / "s", "--model", model, *SMALL, "--json"]
    code = (
        f"import sys\nfrom bucketline.ingest.cli import main\nmain({[*map(str, asked)]})\nprint(*sys.modules, file=sys.stderr)"
    )
    ran = spawn([sys.executable, "-P", "-c", code])
    assert (ran.code, ran.json["unchanged"], ran.json["packed"]) == (0, 6, 0)
    assert not HEAVY & {*ran.err.split()}


def test_the_encoders_are_loaded_when_an_image_or_a_caption_is_to_be_encoded(
    again: Path, model: Path, loads: list[str]
) -> None:
    assert pack(again / "photos", again / "s", model).json["unchanged"] == 6
    (again / "photos" / "a" / "bad.png").write_bytes(b"no image")
    assert pack(again / "photos", again / "s", model).json["rejected"] == 1
    assert loads == []
    (again / "photos" / "a" / "bad.png").write_bytes(png(30, 40))
    assert pack(again / "photos", again / "s", model).json["packed"] == 1
    (again / "photos" / "a" / "bad.txt").write_text("a cat", encoding="ascii")
    assert pack(again / "photos", again / "s", model).json["latents_kept"] == 1
    assert len(loads) == 2
    assert verify(Store.open(again / "s"), lambda _: None).strays == ()
    changed = pack(again / "photos", again / "s", model, "--recaption", "--trigger-word", "red")
    assert (changed.json["packed"], len(loads)) == (7, 3)
    assert "--dtype" not in changed.err
    refused = pack(again / "photos", again / "s", model, "--dtype", "F32")
    assert "--dtype F16, this run has --dtype F32" in refused.err
    assert len(loads) == 4


def test_a_model_that_is_not_the_recorded_one_is_refused_before_a_row_is_written(again: Path, tmp_path: Path) -> None:
    """As if its files had been changed without a trace: the record vouches for another model's."""
    other, store = write_model(tmp_path / "other", seed=1), again / "s"
    own = model_state(PackConfig(source=str(again / "photos"), place=store, model=str(other)), open_model(str(other)))
    assert own is not None
    record_packed_model(store, read_manifest(store), own, on_shared_cores=True)
    assert pack(again / "photos", store, other).json["unchanged"] == 6, "nothing is encoded, nothing is loaded"
    before = {path: path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file() and path.name != PACKED_MODEL}
    (again / "photos" / "new.png").write_bytes(png(30, 40))
    for _ in range(2):  # the second time without the record
        refused = pack(again / "photos", store, other)
        assert (refused.code, refused.out) == (1, "")
        assert "was made with other options than this run has" in refused.err
        assert "weights_hash" in refused.err
        assert {path: path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()} == before


def test_a_model_that_changes_while_it_is_loaded_is_not_recorded(
    packed: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(range(9))
    monkeypatch.setattr(lazy_encoders, "model_state", lambda *_: ModelState(digest=str(next(states)), is_settled=True))
    assert pack(packed / "photos", tmp_path / "s", model).code == 0
    assert not (tmp_path / "s" / PACKED_MODEL).exists()


def test_each_store_of_a_data_set_file_has_its_own_record(packed: Path, model: Path, tmp_path: Path, loads: list[str]) -> None:
    write_images(tmp_path / "more", 2)
    file = tmp_path / "data.toml"
    file.write_text(f'[[source]]\npath = "{packed / "photos"}"\n[[source]]\npath = "{tmp_path / "more"}"\n', encoding="ascii")
    assert pack(file, tmp_path / "data", model).code == 0
    assert len(loads) == 1
    ran = pack(file, tmp_path / "data", model)
    assert [source["unchanged"] for source in ran.json["sources"].values()] == [6, 2]
    assert len(loads) == 1
    (tmp_path / "data" / "photos.store" / PACKED_MODEL).unlink()
    write_images(tmp_path / "more", 3)
    ran = pack(file, tmp_path / "data", model)
    assert [source["packed"] for source in ran.json["sources"].values()] == [0, 3]
    assert len(loads) == 2
    assert (tmp_path / "data" / "photos.store" / PACKED_MODEL).exists()
