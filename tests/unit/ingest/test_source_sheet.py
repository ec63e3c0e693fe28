"""`ingest peek SOURCE`: some images of a source as packing would crop them, with the captions that it would store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import call
from tests.kit import make_store, samples_of
from tests.models import png, write_images
from tests.pages import parsed

GRID = ("--grid", "16x24,24x16", "--min-size-px", 8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sheet") / "photos"
    write_images(folder, 9)
    (folder / "broken.png").write_bytes(png(30, 30)[:60])
    (folder / "tiny.png").write_bytes(png(4, 4))
    return folder


def test_a_source_is_shown_by_bucket_with_the_captions_as_stored(photos: Path, tmp_path: Path) -> None:
    page = tmp_path / "sheet.html"
    ran = call("ingest", "peek", photos, "-o", page, *GRID, "--caption-template", "sks", "--json").done()
    assert ran.json == {"page": str(page), "found": 11, "shown": 11, "rejected": 2}
    found = parsed(page)
    assert found.tags.count("img") == 9
    assert found.tags.count("figure") == 11
    for text in ("16x24", "24x16", "rejected", "tiny.png", "too small", "broken.png", "sks, the cat", "sks, a "):
        assert text in found.text
    assert found.text.index("24x16") < found.text.index("tiny.png")


def test_the_same_images_are_drawn_again(photos: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        call("ingest", "peek", photos, "-o", tmp_path / f"{name}.html", *GRID, "--samples", 4).done()
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert parsed(tmp_path / "a.html").tags.count("figure") == 4


def test_what_does_not_fit_together_is_refused(photos: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "s", samples_of({"train/64x64": 2}))
    for arguments, message in (
        ((tmp_path / "s", "-o", tmp_path / "a.html"), "is a store: give a sample's ID and --model"),
        ((tmp_path / "s", "train/64x64/0.png", "-o", tmp_path / "a.png"), "set --model, whose VAE decodes the latent"),
        ((photos, "-o", tmp_path / "a.html", "--model", "sd"), "it decodes one sample of a store"),
        ((photos, "-o", photos / "a.html"), "is inside the source"),
        ((photos, "-o", tmp_path / "a.png"), "name a file that ends in .html"),
        ((photos, "-o", tmp_path / "a.html", "--samples", 0), "--samples is 0, expected 1 or more"),
    ):
        ran = call("ingest", "peek", *arguments)
        assert ran.code == 2
        assert message in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]
