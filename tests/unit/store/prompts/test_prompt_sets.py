"""Prompts travel with their store, and change nothing of it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.merge import merge
from bucketline.store.folder import DeniedError, MissingObjectError
from bucketline.store.prompts import prompt_sets
from bucketline.store.prompts.prompt_file import Prompt, encode_prompts
from bucketline.store.prompts.prompt_sets import copy_sets, describe_sets, read_set, set_names, write_set
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.pull import pull
from bucketline.store.sync.push import push
from bucketline.store.verify.verify import verify, verify_folder
from tests.commands import call
from tests.kit import add_samples, caption_of, flip_bit, samples_of, store_writer, tree
from tests.object_storage import in_memory

if TYPE_CHECKING:
    from pathlib import Path


def prompts_of(store: Store, *texts: str) -> bytes:
    prompts = [
        Prompt(prompt=text, negative_prompt="", seed=n, height_px=64, width_px=64, guidance=None)
        for n, text in enumerate(texts)
    ]
    return encode_prompts(store.manifest, prompts, [caption_of(text) for text in (*texts, "")])


@pytest.fixture
def own(store: Store, tmp_path: Path) -> Store:
    """A copy of the store, with a set of two prompts and one of one."""
    path = shutil.copytree(store.path, tmp_path / "own.store")
    write_set(path, "default", prompts_of(store, "a red barn", "snow"))
    write_set(path, "more", prompts_of(store, "boats"))
    return Store.open(path)


def texts(place: Path | ObjectFolder, store: Store, name: str = "default") -> list[str]:
    found = read_set(place, store.manifest, name)
    return [] if found is None else [one.prompt for one in found.prompts]


def test_a_set_is_replaced_whole_and_belongs_to_no_generation(store: Store, own: Store) -> None:
    before = tree(own.path)
    assert {name for name in before if name not in tree(store.path)} == {
        "prompts/",
        "prompts/default.safetensors",
        "prompts/more.safetensors",
    }
    assert own.generations == store.generations
    plans = [Loader(one, LoaderConfig(batch_size=2)).plan.digest for one in (store, own)]
    assert plans[0] == plans[1]
    write_set(own.path, "default", prompts_of(store, "a house"))
    assert texts(own.path, own) == ["a house"]
    assert {name for name, data in tree(own.path).items() if before[name] != data} == {"prompts/default.safetensors"}
    assert read_set(own.path, own.manifest, "none") is None
    for name in ("", "../x", "a.b", "x" * 65):
        with pytest.raises(UsageError, match="is not the name of a set"):
            read_set(own.path, own.manifest, name)


def test_a_set_that_is_too_long_to_be_read_is_not_written(own: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (own.path / "prompts" / "default.safetensors").read_bytes()
    monkeypatch.setattr(prompt_sets, "MAX_BYTES", len(data) - 1)
    with pytest.raises(UsageError, match=rf"the set 'new' has {len(data)} bytes, at most {len(data) - 1} are read"):
        write_set(own.path, "new", data)
    assert set_names(own.path) == ["default", "more"]
    with pytest.raises(CorruptError, match=rf"has {len(data)} bytes, at most {len(data) - 1} are accepted"):
        read_set(own.path, own.manifest, "default")


def test_nothing_is_written_through_a_linked_folder(store: Store, own: Store, tmp_path: Path) -> None:
    shutil.rmtree(own.path / "prompts")
    (tmp_path / "elsewhere").mkdir()
    (own.path / "prompts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link"):
        write_set(own.path, "default", prompts_of(store, "a"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_info_counts_prompts_and_verify_finds_a_damaged_set(own: Store) -> None:
    shown = call("store", "info", own.path)
    assert "prompts default: 2 prompts, " in shown.out
    assert "prompts more: 1 prompt, " in shown.out
    found = call("store", "info", own.path, "--json").json["prompts"]
    assert [(one["name"], one["prompts"], one["problem"]) for one in found] == [("default", 2, None), ("more", 1, None)]
    sound = verify(own, lambda _: None)
    assert (sound.corrupt, sound.strays) == ((), ())
    flip_bit(own.path / "prompts" / "more.safetensors", 8 * 700)
    (own.path / "prompts" / "a b.safetensors").write_bytes(b"")
    damaged = verify(own, lambda _: None)
    assert len(damaged.corrupt) == 1
    assert "more.safetensors: " in damaged.corrupt[0].error
    assert "rerun `ingest prompts --name more`" in damaged.corrupt[0].error
    assert [stray.path for stray in damaged.strays] == ["prompts/a b.safetensors"]
    assert "does not match its checksum" in call("store", "info", own.path).out


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_prompts_are_pushed_and_pulled_even_if_nothing_else_is_new(own: Store, tmp_path: Path, kind: str) -> None:
    folder = in_memory() if kind == "memory" else ObjectFolder.open(f"file://{tmp_path}/bucket/a.store")
    push(own.path, folder)
    assert set_names(folder) == ["default", "more"]
    pull(folder, tmp_path / "copy.store")
    assert texts(tmp_path / "copy.store", Store.open(tmp_path / "copy.store")) == ["a red barn", "snow"]
    assert verify(Store.open(tmp_path / "copy.store"), lambda _: None).corrupt == ()
    write_set(own.path, "default", prompts_of(own, "new"))
    assert not push(own.path, folder).is_committed
    assert texts(folder, own) == ["new"]
    assert copy_sets(own.path, folder, own.manifest) == 0
    pull(folder, tmp_path / "copy.store")
    assert texts(tmp_path / "copy.store", own) == ["new"]
    assert [one.prompts for one in describe_sets(folder, own.manifest)] == [1, 1]


@pytest.mark.parametrize("error", [DeniedError, MissingObjectError])
@pytest.mark.parametrize("is_web_server", [False, True])
def test_where_nothing_can_be_listed_the_default_set_is_found(
    own: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[StoreError], *, is_web_server: bool
) -> None:
    """Without the right to list a bucket, what is missing is denied; of a web server it is missing, and nothing is listed."""
    folder = in_memory()
    push(own.path, folder)
    listed = folder.names
    read = ObjectFolder.read

    def reading(self: ObjectFolder, name: str, most_bytes: int = 1 << 30) -> bytes:
        if name not in {entry.name for entry in listed()}:
            raise error(f"{name} is not there, or denied")
        return read(self, name, most_bytes)

    def entries(*_: object) -> None:
        raise DeniedError("listing is denied")

    monkeypatch.setattr(ObjectFolder, "read", reading)
    monkeypatch.setattr(folder, "names", entries)
    if is_web_server:
        monkeypatch.setattr(ObjectFolder, "is_read_only", True)
    assert set_names(folder) == ["default"]
    assert texts(folder, own) == ["a red barn", "snow"]
    assert texts(folder, own, "none") == []
    assert copy_sets(folder, tmp_path, own.manifest) > 0
    monkeypatch.undo()
    folder.remove(["prompts/default.safetensors"])
    monkeypatch.setattr(ObjectFolder, "read", reading)
    monkeypatch.setattr(folder, "names", entries)
    assert set_names(folder) == []


def test_a_url_that_has_a_damaged_set_is_told_by_verify_and_not_pulled(own: Store, tmp_path: Path) -> None:
    folder = in_memory()
    push(own.path, folder)
    assert verify_folder(folder, lambda _: None).corrupt == ()
    data = bytearray(folder.read("prompts/default.safetensors"))
    data[-1] ^= 1
    folder.write("prompts/default.safetensors", bytes(data))
    assert "rerun `ingest prompts --name default`" in verify_folder(folder, lambda _: None).corrupt[0].error
    with pytest.raises(CorruptError, match=r"prompts/default\.safetensors"):
        pull(folder, tmp_path / "copy.store")
    assert not (tmp_path / "copy.store").exists()
    flip_bit(own.path / "prompts" / "default.safetensors", 8 * 900)
    with pytest.raises(CorruptError, match=r"prompts/default\.safetensors"):
        push(own.path, folder)


def test_drop_and_compact_leave_prompts_and_a_merge_has_those_of_all(store: Store, own: Store, tmp_path: Path) -> None:
    before = {name: data for name, data in tree(own.path).items() if name.startswith("prompts/")}
    drop(own.path, own.buckets()[0].sample_ids(np.array([0])))
    compact(own.path, shard_bytes=1 << 24)
    assert {name: data for name, data in tree(own.path).items() if name.startswith("prompts/")} == before
    with store_writer(tmp_path / "other.store") as writer:
        add_samples(writer, samples_of({"train/64x64": 2}, "other "))
    write_set(tmp_path / "other.store", "default", prompts_of(store, "another"))
    write_set(tmp_path / "other.store", "same", prompts_of(store, "boats"))
    merge(tmp_path / "all.store", [own.path, tmp_path / "other.store"])
    merged = Store.open(tmp_path / "all.store")
    assert {name: texts(merged.path, merged, name) for name in set_names(merged.path)} == {
        "default": ["a red barn", "snow"],
        "default-2": ["another"],
        "more": ["boats"],
    }
    assert verify(merged, lambda _: None).corrupt == ()
    flip_bit(own.path / "prompts" / "more.safetensors", 8 * 700)
    with pytest.raises(CorruptError):
        merge(tmp_path / "more.store", [own.path])
    assert not (tmp_path / "more.store").exists()
