"""A name that holds escapes, marks of direction or line breaks reaches the terminal spelt out, whichever command prints it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import FingerprintError, StoreError
from bucketline.store import Store
from tests.commands import Ran, call
from tests.models import SMALL, png

EVIL = "a\x1b[2J\x1b]0;t\x07\u202egnp\u2066\r\nerror: forged\x9b1m"
ALLOWED = "\n\t"


def assert_tame(ran: Ran, *, names_it: bool = True) -> None:
    """Check that nothing printed acts on a terminal, and that no name made a line of its own."""
    for text in (ran.out, ran.err):
        assert not [c for c in text if not c.isprintable() and c not in ALLOWED], ascii(text)
        assert not [line for line in text.splitlines() if line.lstrip().startswith("error: forged")], text
    assert "forged" in ran.out + ran.err or not names_it, "the name is not printed at all"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, rejects, captions, links and a table, all of hostile names."""
    folder = tmp_path_factory.mktemp("photos") / "images"
    folder.mkdir()
    for n in range(2):
        (folder / f"{EVIL}{n}.png").write_bytes(png(20, 30, n))
    (folder / f"{EVIL}0.txt").write_text("\n".join(f"{EVIL} {n}" for n in range(12)), encoding="utf-8")
    (folder / f"{EVIL}broken.png").write_bytes(png(20, 30)[:40])
    (folder / f"{EVIL}.txt").write_text("an orphan", encoding="utf-8")
    (folder / f"{EVIL}long.png").write_bytes(png(20, 30, 7))
    (folder / f"{EVIL}long.txt").write_text("a cat of the house " * 30, encoding="utf-8")
    (folder / f"{EVIL}link.png").symlink_to("/nowhere" + EVIL.replace("/", ""))
    (folder / f"{EVIL}captioned.png").write_bytes(png(20, 30, 9))
    (folder / f"{EVIL}captioned.txt").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.fixture(scope="module")
def packed(photos: Path, model: Path) -> tuple[Path, Ran]:
    """A store of them, in a folder that is called so too, and the run that packed it."""
    place = photos.parent / f"{EVIL}.store"
    return place, call("ingest", "pack", photos, place, "--model", model, *SMALL)


@pytest.mark.parametrize("more", [(), ("--full",), ("--caption-template", "x")])
def test_a_scan_spells_names_out(more: tuple[object, ...], photos: Path, model: Path) -> None:
    assert_tame(call("ingest", "scan", photos, *SMALL, "--model", model, *more))


def test_packing_spells_names_out(photos: Path, packed: tuple[Path, Ran], model: Path, tmp_path: Path) -> None:
    place, ran = packed
    assert ran.code == 0, ran.err
    assert_tame(ran)
    asked = ("--model", model, *SMALL)
    assert_tame(call("ingest", "pack", photos, place, *asked, "--dry-run"), names_it=False)
    fewer, store = tmp_path / "images", tmp_path / f"{EVIL}.store"
    shutil.copytree(photos, fewer, symlinks=True)
    shutil.copytree(place, store)
    for path in fewer.glob("*0.*"):
        path.unlink()
    assert_tame(call("ingest", "pack", fewer, store, *asked))
    assert_tame(call("ingest", "pack", fewer, store, *asked, "--prune", "--dry-run"), names_it=False)
    assert_tame(call("ingest", "pack", fewer, store, *asked, "--prune=0"))
    assert_tame(call("ingest", "pack", fewer, store, *asked, "--prune", "--max-rejects", 0))


def test_errors_spell_names_out(photos: Path, packed: tuple[Path, Ran], model: Path, tmp_path: Path) -> None:
    place, _ = packed
    gone = tmp_path / EVIL
    for command in (
        ("ingest", "scan", gone),
        ("ingest", "pack", gone, tmp_path / "s", "--model", model),
        ("ingest", "pack", photos, tmp_path / "s", "--model", gone),
        ("ingest", "pack", photos, place, "--model", model, *SMALL, "--flip"),  # an error of several lines
        ("ingest", "import", "kohya", gone, tmp_path / "s", "--vae", "sd"),
        ("store", "info", gone),
        ("store", "get", place, EVIL, "-o", tmp_path / "x.safetensors"),
        ("store", "drop", place, EVIL),
        ("loader", "plan", gone, "--batch-size", 1),
        ("loader", "seen", place, "--run", gone, "--all"),
    ):
        ran = call(*command)
        assert ran.code, command
        assert_tame(ran)


def test_a_store_spells_names_out(packed: tuple[Path, Ran], photos: Path, tmp_path: Path) -> None:
    place, own = tmp_path / f"{EVIL}.store", f"{EVIL}0.png"
    shutil.copytree(packed[0], place)
    (place / "shards" / EVIL).touch()
    for command in (
        ("store", "ls", place),
        ("store", "get", place, own, "-o", tmp_path / f"{EVIL}.safetensors"),
        ("store", "verify", place),
        ("store", "drop", place, own, "--dry-run"),
        ("store", "compact", place, "--dry-run"),
        ("store", "repair", place),
        ("store", "restore", place),
        ("store", "export", place, tmp_path / f"{EVIL}out", "--format", "safetensors"),
        ("store", "merge", tmp_path / f"{EVIL}merged", place),
        ("store", "report", place, "-o", tmp_path / f"{EVIL}.html", "--source", photos),
        ("loader", "plan", place, place, "--batch-size", 1, "--list"),
        ("loader", "peek", place, "--batch-size", 1, "--step", 0, "-o", tmp_path / f"{EVIL}rows.html"),
        ("ingest", "scan", photos, "-o", tmp_path / f"{EVIL}sheet.html"),
    ):
        assert_tame(call(*map(str, command)), names_it=command[1] not in ("restore", "compact", "drop"))


def test_damage_spells_names_out(packed: tuple[Path, Ran], tmp_path: Path) -> None:
    place = tmp_path / f"{EVIL}.store"
    shutil.copytree(packed[0], place)
    store = Store.open(place)
    (bucket,) = store.buckets()
    offset = int(bucket.locate(np.array([0])).offsets(bucket.spec, "latent")[0])
    with store.shards[0].paths.lmdb.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 8)
    assert_tame(call("store", "verify", place))
    assert_tame(call("store", "repair", place))


def test_an_import_spells_names_out(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    values = np.random.default_rng(0).normal(size=(4, 8, 12)).astype("f4")
    np.savez(cache / f"{EVIL}_0096x0064_sd.npz", latents=values, original_size=np.array([96, 64]))
    (cache / f"{EVIL}b_0096x0064_sd.npz").write_bytes(b"PK")
    asked = ("--vae", "sd", "--trust-scale")
    assert_tame(call("ingest", "import", "kohya", cache, tmp_path / f"{EVIL}.store", *asked))


def test_prompts_spell_names_out(packed: tuple[Path, Ran], model: Path, tmp_path: Path) -> None:
    (tmp_path / f"{EVIL}.txt").write_text("a cat of the house " * 30, encoding="utf-8")
    assert_tame(call("ingest", "prompts", tmp_path / f"{EVIL}.txt", packed[0], "--model", model))
    (tmp_path / f"{EVIL}.jsonl").write_text(json.dumps({"prompt": EVIL, "height": "x"}), encoding="utf-8")
    assert_tame(call("ingest", "prompts", tmp_path / f"{EVIL}.jsonl", packed[0], "--model", model))


def test_a_name_that_is_not_utf8_is_spelt_out(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / os.fsdecode(b"forged\xff\xfe.png")).write_bytes(png(20, 30)[:30])
    assert_tame(call("ingest", "scan", folder, *SMALL, "--model", model))


def test_an_error_has_its_own_lines_and_no_others() -> None:
    assert str(FingerprintError("first", "  second")) == "first\n  second"
    assert str(StoreError("one")) == "one"
