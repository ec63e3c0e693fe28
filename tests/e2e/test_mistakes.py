"""Mistakes with the API and on the command line are refused by name, with what would be right, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import bucketline.loader
import bucketline.store
from bucketline import cli, errors
from bucketline.ingest.packing.packed_model import PACKED_MODEL
from bucketline.store import Column, LatentColumn, RaggedGroup, RowColumn, Store, StoreWriter
from bucketline.store.format.block import file_digest
from tests.commands import call, called
from tests.models import png, write_model
from tests.unit.train.tiny_run import write_unet

DATA = Path(__file__).parent.parent / "data"
pytestmark = pytest.mark.slow
TRAIN = "bucketline train --store photos.store --model sd15 --output-dir new --max-steps 10"


def listed(name: str) -> list[list[str]]:
    return [one for group in tomllib.loads((DATA / name).read_text(encoding="utf-8")).values() for one in group]


def files_in(folder: Path) -> dict[str, object]:
    return {str(path): file_digest(path) if path.is_file() else "" for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the code of a mistake uses, over stores of images, of sounds and of nothing."""
    folder = tmp_path_factory.mktemp("mistakes")
    latent, tokens = np.ones((2, 8, 8), dtype="f2"), {"tokens": np.ones((3, 5), dtype="f2")}
    images: dict[str, Any] = {
        "columns": [LatentColumn(channels=2)],
        "encoders": {"vae": {"scaling_factor": 0.5}},
        "text": [Column(name="tokens", dtype="F16", shape=(5,))],
        "empty_caption": {"tokens": np.zeros((1, 5), dtype="f2")},
        "max_captions": 2,
    }
    with StoreWriter(folder / "photos.store", **images) as writer:
        for n in range(10):
            writer.add(f"{n}.png", "val" if n == 9 else "train", {"target": latent}, {"a cat": tokens})
    with StoreWriter(folder / "other.store", **{**images, "encoders": {"vae": {"scaling_factor": 0.25}}}) as writer:
        writer.add("a.png", "train", {"target": latent})
    mels = [
        RowColumn(role="features/mels", dtype="F32", shape=(4, "length")),
        RowColumn(role="mask", dtype="BOOL", shape=("length",), optional=True),
    ]
    beats = {"beats": RaggedGroup(columns=[Column(name="at_s", dtype="F32", shape=())])}
    with StoreWriter(folder / "sounds.store", columns=mels, ragged=beats) as writer:
        for n in range(8):
            row = {"features/mels": np.zeros((4, 6), dtype="f4")}
            writer.add(f"{n}.wav", "train", row, ragged={"beats": np.zeros(n, dtype="f4")})
    with StoreWriter(folder / "empty.store", **images):
        pass
    (folder / "photos").mkdir()
    (folder / "photos" / "a.png").write_bytes(b"an image")
    (folder / "notes.txt").write_text("notes", encoding="utf-8")

    def write(*args: Any, **given: Any) -> None:
        with StoreWriter(*args, **given):
            pass

    photos, sounds = str(folder / "photos.store"), str(folder / "sounds.store")
    store, config = Store.open(folder / "photos.store"), bucketline.loader.LoaderConfig(batch_size=4)
    both: tuple[Any, ...] = (bucketline.store, bucketline.loader)
    public = {name: getattr(module, name) for module in both for name in module.__all__}
    return {"np": np, "torch": torch, "Path": Path, "DataLoader": DataLoader, **public, **locals()}


@pytest.mark.parametrize("mistake", listed("mistakes.toml"), ids=lambda one: one[0].strip())
def test_a_mistake_with_the_api_is_refused_by_what_was_given(
    mistake: list[str], names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, kind, *named = mistake
    new = tmp_path / "new.store"

    def add(*args: Any) -> None:
        with StoreWriter(new, **names["images"]) as writer:
            writer.add(*args)

    monkeypatch.chdir(names["folder"])
    given = {**names, "new": str(new), "add": add}
    with pytest.raises(getattr(errors, kind)) as raised:
        exec(code, given)
    for one in given.values():
        if isinstance(one, bucketline.loader.Loader):
            one.close()
    assert [one for one in named if one not in str(raised.value)] == [], str(raised.value)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photographs, models, stores that are whole and broken, a run, and files of other kinds."""
    from bucketline.train.main import main as train

    folder = tmp_path_factory.mktemp("work")
    (folder / "photos").mkdir()
    for n in range(12):
        (folder / "photos" / f"{n}.png").write_bytes(png(96 + n, 128, seed=n))
        (folder / "photos" / f"{n}.txt").write_text("a cup of coffee\n", encoding="utf-8")
    model = write_model(folder / "sd15", vae_levels=4)
    write_unet(model, sample_size=16, in_channels=4, out_channels=4, cross_attention_dim=8)
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.copytree(model, folder / f"no-{part}", ignore=shutil.ignore_patterns(part))
    weights = shutil.copytree(model, folder / "cut-vae") / "vae" / "diffusion_pytorch_model.safetensors"
    os.truncate(weights, 1000)
    (folder / "empty").mkdir()
    (folder / "link.store").symlink_to("photos.store")
    (folder / "dangling.html").symlink_to("nothing")
    (folder / "mine.html").write_text("mine", encoding="utf-8")
    (folder / "notes.txt").write_text("notes\n", encoding="utf-8")
    with contextlib.chdir(folder):
        call("ingest", "pack", "photos", "photos.store", "--model", "sd15", "--val-fraction", "0.2").done()
        options = "--store photos.store --model sd15 --output-dir runs/a --batch-size 2 --max-steps 2 --num-images 0 --seed 1"
        trained = called(train, *options.split())
        assert not trained.code, trained.err  # it returns nothing after a run
    shutil.copytree(folder / "photos.store", folder / "pulled.store", ignore=shutil.ignore_patterns(PACKED_MODEL))
    note = shutil.copytree(folder / "photos.store", folder / "relocated.store") / PACKED_MODEL
    note.write_text(note.read_text(encoding="utf-8").replace("sd15", "sd14"), encoding="utf-8")
    return folder


@pytest.mark.parametrize("wrong", listed("wrong_commands.toml"), ids=lambda one: one[0])
def test_a_wrong_command_line_is_refused_by_what_was_typed_and_leaves_nothing(
    wrong: list[str], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, code, *named = wrong
    words = shlex.split(re.sub("^TRAIN", TRAIN, line))
    before = files_in(work)
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", words)
    ran = call(*words) if words[0] != "bucketline" else called(lambda _: cli.main())
    assert ran.code == int(code), ran
    assert "Traceback" not in ran.err
    assert [one for one in named if one not in ran.err] == [], ran.err
    assert files_in(work) == before
