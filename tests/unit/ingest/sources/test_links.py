"""Links in a stranger's folder: what leads out of it is not read, unless the user says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.store import Store
from tests.commands import call
from tests.kit import by_id, tree
from tests.models import SMALL, png

SECRET = "root:Zq81secret"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "shadow").write_text(SECRET, encoding="ascii")
    folder = tmp_path / "photos"
    (folder / "in").mkdir(parents=True)
    for n, name in enumerate(("a.png", "in/b.png")):
        (folder / name).write_bytes(png(20, 30, n))
    return folder


def test_linked_folders_are_counted_and_said(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.png").write_bytes(png(20, 30, 2))
    for name in ("in/l1", "l2", "l3", "l4", ".hidden"):
        (photos / name).symlink_to(tmp_path / "elsewhere")
    said = "4 linked folders are skipped (in/l1, l2, l3 and 1 more): links to folders are never followed"
    for more in ((), ("--follow-links",)):
        ran = call("ingest", "scan", photos, *more)
        assert f"  note: {said}" in ran.out
        assert ran.out.startswith("2 images")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a").symlink_to(tmp_path / "elsewhere")
    assert "; 1 linked folder is skipped (a): links to folders" in call("ingest", "scan", tmp_path / "links").err


def pack(photos: Path, store: Path, model: Path, *more: object) -> dict[str, bytes]:
    ran = call("ingest", "pack", photos, store, "--model", model, *SMALL, *more).done()
    return tree(store) | {"printed": (ran.out + ran.err).encode()}


def captions(store: Path) -> dict[str, tuple[str, ...]]:
    return {sample_id: held.record.captions for sample_id, held in by_id(Store.open(store)).items()}


def test_a_link_out_of_the_source_that_keeps_pruning_back_is_named(photos: Path, model: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "s", model)
    (photos / "a.png").unlink()
    (tmp_path / "far.png").write_bytes(png(20, 30, 7))
    (photos / "link.png").symlink_to(tmp_path / "far.png")
    printed = pack(photos, tmp_path / "s", model, "--prune")["printed"].decode()
    assert (
        "  not pruned: 1 image could not be read, and others may be out of reach as well: link.png (a link that leads out of "
        "the source; it is not followed without --follow-links); add --follow-links, or remove the link, and prune again\n"
    ) in printed
    assert captions(tmp_path / "s").keys() == {"a.png", "in/b.png"}
    printed = pack(photos, tmp_path / "s", model, "--prune", "--follow-links")["printed"].decode()
    assert "dropped, because no longer in the source: 1 sample" in printed
    assert captions(tmp_path / "s").keys() == {"in/b.png", "link.png"}


def test_a_pack_that_keeps_what_is_gone_says_how_to_drop_it(photos: Path, model: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "s", model)
    (photos / "a.png").rename(photos / "renamed.png")
    said = "1 sample is kept whose image is no longer in the source, deleted or renamed: a.png; add --prune to drop "
    for more in ((), ("--dry-run",)):
        ran = call("ingest", "pack", photos, tmp_path / "s", "--model", model, *more).done()
        assert f"  {said}" in ran.out
    assert captions(tmp_path / "s").keys() == {"a.png", "renamed.png", "in/b.png"}
    ran = call("ingest", "pack", photos, tmp_path / "s", "--model", model, "--prune").done()
    assert said not in ran.out
    assert captions(tmp_path / "s").keys() == {"renamed.png", "in/b.png"}


@pytest.mark.parametrize("name", ["a.txt", "a.caption", "a.json"])
def test_a_caption_that_leads_out_of_the_source_is_not_read(name: str, photos: Path, model: Path, tmp_path: Path) -> None:
    (photos / name).symlink_to("../shadow")
    files = pack(photos, tmp_path / "s", model)
    assert not [path for path, data in files.items() if SECRET.encode() in data]
    assert files["rejects.jsonl"].count(b"\n") == 1
    assert f"{name}: a link that leads out of the source".encode() in files["rejects.jsonl"]


def test_a_table_that_is_a_link_out_of_the_source_is_refused(photos: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"file_name": "a.png", "text": "a cat"}\n', encoding="ascii")
    (photos / "metadata.jsonl").symlink_to("../rows.jsonl")
    ran = call("ingest", "pack", photos, tmp_path / "s", "--model", model, *SMALL)
    assert (ran.code, ran.err) == (
        1,
        "error: metadata.jsonl: a link that leads out of the source; it is not followed without --follow-links\n",
    )
    pack(photos, tmp_path / "s", model, "--follow-links")
    assert Store.open(tmp_path / "s").sample("a.png")[1].captions == ("a cat",)


@pytest.mark.parametrize("command", ["pack", "scan", "scan --full"])
def test_an_image_that_is_a_link_out_of_the_source_is_a_reject(command: str, photos: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "private.png").write_bytes(png(24, 36, 5))
    (photos / "c.png").symlink_to("../private.png")
    (photos / "d.png").symlink_to("../shadow")
    if command == "pack":
        files = pack(photos, tmp_path / "s", model)
        assert not [path for path, data in files.items() if SECRET.encode() in data]
        rejects = files["rejects.jsonl"].decode("ascii")
    else:
        rejects = call("ingest", *command.split(), photos, "--grid", "16x24", "--min-size-px", 8, "--json").out
        assert SECRET not in rejects
    assert rejects.count("a link that leads out of the source; it is not followed without --follow-links") == 2


def test_links_that_stay_inside_are_followed_and_others_if_the_user_says_so(photos: Path, model: Path, tmp_path: Path) -> None:
    (photos / "shared.caption").write_text("a cat", encoding="ascii")
    (photos / "a.txt").symlink_to("shared.caption")
    (photos / "in" / "c.png").symlink_to("../a.png")
    (photos / "in" / "b.txt").symlink_to(tmp_path / "outside.txt")
    (tmp_path / "outside.txt").write_text("a dog", encoding="ascii")
    (photos / "d.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "outside.png").write_bytes(png(24, 36, 5))
    (tmp_path / "way").symlink_to("photos")
    pack(tmp_path / "way", tmp_path / "s", model)
    assert captions(tmp_path / "s") == {"a.png": ("a cat",), "in/c.png": ()}
    pack(tmp_path / "way", tmp_path / "all", model, "--follow-links")
    assert captions(tmp_path / "all") == {"a.png": ("a cat",), "in/b.png": ("a dog",), "in/c.png": (), "d.png": ()}
