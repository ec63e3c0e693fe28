"""Files of pairs come, go and change at random between packs; rows are held against what is on the disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bucketline.store import Store
from tests.kit import faults, ids_of
from tests.unit.ingest.partners.kit import OWN_SIZE, SIZE, Expected, check, data_file, mask, packed, picture

NAMES = tuple("abcdef")
FOLDERS = ("after", "before", "style", "masks")
ROUNDS = 5


def change(root: Path, drawn: random.Random) -> None:
    """Write, replace or remove some files; a new one always has other bytes, and often the size of the one before."""
    for _ in range(drawn.randint(1, 6)):
        folder, name, seed = drawn.choice(FOLDERS), drawn.choice(NAMES), drawn.randrange(1 << 16)
        path = root / folder / f"{name}.png"
        if drawn.random() < 0.3:
            path.unlink(missing_ok=True)
        else:
            is_own = folder in ("before", "style") and drawn.random() < 0.4
            path.write_bytes(mask(seed) if folder == "masks" else picture(seed, OWN_SIZE if is_own else SIZE))
        caption = root / "after" / f"{name}.txt"
        if drawn.random() < 0.3:
            caption.write_text(drawn.choice(("a cat", "a dog", "the house")), encoding="ascii")


def on_disk(root: Path) -> dict[str, Expected]:
    """Return the samples that the folders have: a target needs its mask, and has the references that there are."""
    found: dict[str, Expected] = {}
    for name in NAMES:
        target, own_mask = (root / folder / f"{name}.png" for folder in ("after", "masks"))
        if target.exists() and own_mask.exists():
            places = [root / folder / f"{name}.png" for folder in ("before", "style")]
            caption = root / "after" / f"{name}.txt"
            found[f"{name}.png"] = Expected(
                target=target.read_bytes(),
                references=[place.read_bytes() for place in places if place.exists()],
                mask=own_mask.read_bytes(),
                captions=[caption.read_text(encoding="ascii")] if caption.exists() else (),
            )
    return found


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 40))])
def test_rows_are_the_files_on_the_disk_after_any_changes(seed: int, tmp_path: Path, edit_model: Path) -> None:
    drawn = random.Random(seed)
    root, store = tmp_path / "data", tmp_path / "s"
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
        for n, name in enumerate(NAMES[:3]):
            make = mask if folder == "masks" else picture
            (root / folder / f"{name}.png").write_bytes(make(100 * FOLDERS.index(folder) + n))
    fields = {"references": ["before", "style"], "references_optional": True, "mask": "masks"}
    file = data_file(root / "data.toml", "after", **fields)
    options = [*(["--flip"] if drawn.random() < 0.5 else []), "--check", drawn.choice(("size-time", "content")), "--prune=1.0"]
    for _ in range(ROUNDS):
        expected = on_disk(root)
        done = packed(file, store, edit_model, *options).json
        assert done["packed"] + done["unchanged"] + done["rejected"] == done["found"]
        check(store, edit_model, expected, flip="--flip" in options)
        assert not faults(store)
        if not packed(file, store, edit_model, *options, "--dry-run").json["unchanged"] == len(expected) == len(ids_of(store)):
            pytest.fail(f"{Store.open(store).manifest.samples} samples, expected {len(expected)}")
        change(root, drawn)
        while not on_disk(root) or not any(one.references for one in on_disk(root).values()):
            change(root, drawn)
