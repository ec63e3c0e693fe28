"""The place of a run: never among what others made, whose next pack would take the run's images for samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import UsageError
from bucketline.files.run_marker import is_run
from bucketline.train.trainer import train
from tests.kit import tree
from tests.unit.train.tiny_run import ALONE, ROWS, config, make_training_store, samples

if TYPE_CHECKING:
    from collections.abc import Callable


def linked(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "tiny.store")
    return folder / "link" / "run"


def under_another_name(folder: Path) -> Path:
    """As under a bind mount: only the inode gives it away."""
    (folder / "mount").symlink_to(folder / "tiny.store")
    return folder / "mount"


PLACES: dict[str, Callable[[Path], Path]] = {
    "the store": lambda folder: folder / "tiny.store",
    "the store, by two dots": lambda folder: folder / "tiny.store" / "shards" / "..",
    "in the store": lambda folder: folder / "tiny.store" / "runs" / "a",
    "in the store, by a link": linked,
    "around the store": lambda folder: folder,
}


@pytest.mark.parametrize("case", PLACES)
def test_a_run_that_would_lie_with_its_store_is_refused_and_leaves_everything_as_it_was(case: str, folder: Path) -> None:
    output = PLACES[case](folder)
    before = tree(folder)
    with pytest.raises(UsageError, match=r"--output-dir .* store .*choose a separate folder"):
        train(config(folder, output_dir=output, max_steps=1), ALONE)
    assert tree(folder) == before


def test_a_store_that_has_two_names_is_found_by_its_inode(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = under_another_name(folder)
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)
    with pytest.raises(UsageError, match=r"--output-dir .* is the store"):
        train(config(folder, output_dir=output, max_steps=1), ALONE)


def test_every_store_is_looked_at(folder: Path) -> None:
    other = make_training_store(folder / "other.store", {"train/128x128": 5, "val/128x128": 2}).path
    stores = (folder / "tiny.store", Path(f"{other}:2"))
    with pytest.raises(UsageError, match=r"is inside the store .*other\.store"):
        train(config(folder, store=stores, output_dir=other / "run", max_steps=1), ALONE)


@pytest.mark.parametrize("names", [("a.jpg", "a.txt"), ("deep/down/a.png",), ("data-00000-of-00001.arrow",), ("config.json",)])
def test_a_folder_with_what_no_run_made_is_refused_and_left_as_it_was(folder: Path, names: tuple[str, ...]) -> None:
    asked = config(folder, max_steps=1)
    for name in names:
        (asked.output_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (asked.output_dir / name).write_bytes(b"theirs")
    before = tree(asked.output_dir)
    with pytest.raises(UsageError, match=r"is not empty .* and not a run of this trainer"):
        train(asked, ALONE)
    assert tree(asked.output_dir) == before


@pytest.mark.parametrize("where", [".", "runs/a"])
def test_the_folder_that_the_samples_came_from_is_known_by_their_ids(folder: Path, where: str) -> None:
    photos = folder / "photos"
    for sample in samples(ROWS):
        (photos / sample.id).parent.mkdir(parents=True, exist_ok=True)
        (photos / sample.id).touch()
    before = tree(photos)
    with pytest.raises(UsageError, match=r"photos, where the store's samples came from"):
        train(config(folder, output_dir=photos / where, max_steps=1), ALONE)
    assert tree(photos) == before


def test_a_new_folder_and_one_that_holds_only_its_log_are_taken(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    asked.output_dir.mkdir()
    for name in ("train.log", "slurm-17.out", ".gitignore"):
        (asked.output_dir / name).touch()
    train(asked, ALONE)
    assert is_run(asked.output_dir)
