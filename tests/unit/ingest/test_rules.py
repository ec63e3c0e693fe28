"""Running again, and from other kinds of source: what is unchanged stays, what is out of reach is kept, what is gone may go."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import webdataset
from PIL import Image

from bucketline.errors import UsageError
from bucketline.ingest.images import decode as decode_module
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.pipeline import image_reader
from bucketline.ingest.rules import PRUNE, Limit, prune_limit, reject_limit
from bucketline.ingest.sources import source as local_files
from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.store import Store
from bucketline.store.change.commit import drop
from tests.commands import Ran, call
from tests.kit import by_id, untouched
from tests.models import SMALL, colour_image, encoded, pack, png, write_files, write_images
from tests.unit.ingest.sources.kit import write_members


def counts(report: dict[str, Any]) -> tuple[int, int, int]:
    return report["packed"], report["unchanged"], report["rejected"]


def rows_of(store: Path) -> dict[str, tuple[str, tuple[str, ...], bytes]]:
    found = by_id(Store.open(store))
    return {name: (held.record.bucket, held.record.captions, held.columns["latent"]) for name, held in found.items()}


def write_tars(source: Path, folder: Path) -> str:
    folder.mkdir()
    for name in "ab":
        with webdataset.TarWriter(str(folder / f"{name}.tar"), encoder=False) as writer:
            for path in sorted((source / name).glob("*.png")):
                text = path.with_suffix(".txt")
                captions = {"txt": text.read_bytes()} if text.exists() else {}
                writer.write({"__key__": path.stem, "png": path.read_bytes(), **captions})
    return str(folder / "{a,b}.tar")


def test_tars_that_webdataset_wrote_pack_to_the_same_latents_as_the_files_in_a_folder(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_tars(source, tmp_path / "tars")
    assert counts(pack(source, tmp_path / "s", model, "--val-fraction", "0.2").json) == (14, 0, 0)
    ran = pack(text, tmp_path / "t", model, "--val-fraction", "0.2")
    assert counts(ran.json) == (14, 0, 0), ran.err
    assert rows_of(tmp_path / "s") == rows_of(tmp_path / "t")  # a.tar holds the folder a/
    monkeypatch.setattr(image_reader, "decode_placed", lambda *_: pytest.fail("an unchanged image was decoded"))
    with untouched(tmp_path / "t"):
        assert counts(pack(text, tmp_path / "t", model, "--val-fraction", "0.2").json) == (0, 14, 0)


def test_a_fraction_of_a_few_images_holds_out_one_which_stays_held_out(tmp_path: Path, model: Path) -> None:
    def held_out(images: int, *more: object, store: str = "s") -> list[str]:
        write_files(tmp_path / "in", {f"{n}.png": png(20, 30, n) for n in range(images)})
        ran = pack(tmp_path / "in", tmp_path / store, model, *more)
        found = [name for name, row in rows_of(tmp_path / store).items() if row[0].startswith("val/")]
        assert (ran.json["held_out"], ran.json["samples"], ran.json["moved"]) == (len(found), images, 0), ran.err
        return found

    small = ("--val-fraction", "0.0001")
    assert held_out(1, *small) == []
    (first,) = held_out(4, *small, store="t")  # whichever has the smallest hash of four, of six, and of those that are added
    (other,) = held_out(6, *small)
    assert {first, other} <= {f"{n}.png" for n in range(6)} - {"0.png"}
    assert held_out(12) == [other]
    scanned = call("ingest", "scan", tmp_path / "in", *SMALL, "--grid", "16x24,24x16", *small).done()
    assert "held out for validation: 1 of 12 samples\n" in scanned.out
    assert "held out for validation: 1 of 12 samples\n" in call("ingest", "pack", tmp_path / "in", tmp_path / "s").out
    apart = call("ingest", "scan", tmp_path / "in", *SMALL, "--grid", "16x24,24x16", "--val-fraction", "0.0001:folder").done()
    assert "held out for validation: 0 of 12 samples: :folder holds out whole folders, and this is one" in apart.out
    for name in ("01.png", "02.png"):  # the first has the smaller hash, and may have been trained on
        write_files(tmp_path / "few", {name: png(20, 30, 1)})
        assert pack(tmp_path / "few", tmp_path / "u", model, *small).json["moved"] == 0
    assert [row[0].split("/")[0] for _, row in sorted(rows_of(tmp_path / "u").items())] == ["train", "val"]
    for split, moved, kept in (("val", 0, 4), ("train", 3, 1)):  # a source's own splits count, also later; one stays held out
        rows = [f"{n}.png,{split if n < 4 else 'train'},a" for n in range(12)]
        write_files(tmp_path / "in", {"metadata.csv": "\n".join(["file_name,split,text", *rows])})
        found = pack(tmp_path / "in", tmp_path / "w", model, *small).json
        assert (found["moved"], found["held_out"]) == (moved, kept)
    (tmp_path / "in" / "metadata.csv").unlink()
    drop(tmp_path / "s", [other])
    said = call("ingest", "pack", tmp_path / "in", tmp_path / "s").done().out
    assert "  1 image moved to the other split (training or validation)\n" in said


def test_a_table_and_a_saved_dataset_pack_to_the_same_latents_too(source: Path, tmp_path: Path, model: Path) -> None:
    import datasets

    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.png"))
    texts = [[line for line in _text(source / name).split("\n") if line] for name in names]
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in zip(names, texts, strict=True)]
    (source / "all.jsonl").write_text("\n".join(lines), encoding="utf-8")
    datasets.disable_progress_bars()
    columns = {"image": [{"bytes": (source / name).read_bytes(), "path": name} for name in names], "text": texts}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.List(datasets.Value("string"))})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "d")
    assert counts(pack(source, tmp_path / "folder", model).json) == (14, 0, 0)
    expected = rows_of(tmp_path / "folder")
    for kind, text in (("table", source / "all.jsonl"), ("dataset", tmp_path / "d")):
        assert counts(pack(text, tmp_path / f"{kind}.store", model).json) == (14, 0, 0)
        ids = {name if kind == "table" else Path(name).name: name for name in expected}  # datasets keeps a path's last part
        assert rows_of(tmp_path / f"{kind}.store") == {sample_id: expected[name] for sample_id, name in ids.items()}
        assert counts(pack(text, tmp_path / f"{kind}.store", model).json) == (0, 14, 0)


def _text(image: Path) -> str:
    path = image.with_suffix(".txt")
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.parametrize("kind", ["table", "tar", "dataset"])
def test_a_store_among_the_files_of_any_local_source_is_refused(kind: str, tmp_path: Path, model: Path) -> None:
    inside = tmp_path / "in"
    write_files(inside, {"a.png": png(20, 30), "t.csv": "file_name\na.png\n", "dataset_dict.json": '{"splits": []}'})
    write_members(inside / "t.tar", [("a.png", png(20, 30))])
    source = {"table": inside / "t.csv", "tar": inside / "t.tar", "dataset": inside}[kind]
    store = tmp_path if kind == "tar" else inside / "s"
    with untouched(tmp_path):
        pack(source, store, model).fails("choose a store outside", code=2)


def test_a_content_check_packs_what_differs_and_nothing_that_was_touched(source: Path, tmp_path: Path, model: Path) -> None:
    flat = source / "flat.bmp"
    flat.write_bytes(encoded(Image.fromarray(colour_image(20, 30)), "BMP"))
    assert pack(source, tmp_path / "s", model).code == 0
    os.utime(source / "a" / "000.png", ns=(1, 1))
    status = flat.stat()
    flat.write_bytes(flat.read_bytes()[:-1] + b"?")
    os.utime(flat, ns=(status.st_atime_ns, status.st_mtime_ns))
    (source / "b" / "003.txt").write_text("another caption\n", encoding="ascii")
    assert counts(pack(source, tmp_path / "s", model, "--check", "content").json) == (2, 13, 0)
    assert counts(pack(source, tmp_path / "s", model, "--check", "content").json) == (0, 15, 0)
    assert counts(pack(source, tmp_path / "s", model).json) == (1, 14, 0)  # the touched one, by its time


def test_prune_drops_what_the_source_no_longer_has_and_nothing_else(packed: Path, tmp_path: Path, model: Path) -> None:
    (packed / "a" / "000.png").unlink()
    (packed / "b" / "001.png").write_bytes(b"broken now")
    (packed / "new.png").write_bytes(png(20, 30, 77))
    report = pack(packed, tmp_path / "s", model).json
    assert (report["pruned"], report["not_in_source_ids"]) == (0, ["a/000.png"])
    report = pack(packed, tmp_path / "s", model, "--prune").json
    assert (report["pruned"], report["pruned_ids"], report["not_in_source"]) == (1, ["a/000.png"], 0)
    assert counts(report) == (0, 13, 1)
    left = rows_of(tmp_path / "s")
    assert sorted(left) == sorted(
        path.relative_to(packed).as_posix() for path in packed.rglob("*.png") if path.name != "001.png"
    )
    assert call("store", "verify", tmp_path / "s").code == 0
    with untouched(tmp_path / "s"):
        assert pack(packed, tmp_path / "s", model, "--prune").json["pruned"] == 0


@pytest.mark.parametrize(("limit", "code"), [("2", 1), ("3", 0), ("0.1", 1), ("0.2", 0), ("0", 1)])
def test_too_many_rejects_fail_after_all_else_is_packed(
    limit: str, code: int, source: Path, tmp_path: Path, model: Path
) -> None:
    assert pack(source / "a", tmp_path / "s", model).code == 0
    (source / "a" / "000.png").unlink()
    for name in ("x.png", "y.png"):
        (source / "a" / name).write_bytes(b"no image")
    (source / "a" / "z.png").write_bytes(b"")
    for n in range(9):
        (source / "a" / f"new{n}.png").write_bytes(png(20, 30, n))
    ran = pack(source / "a", tmp_path / "s", model, "--max-rejects", limit, "--prune")
    assert ran.code == code
    report = ran.json
    assert counts(report) == (9, 6, 3)
    assert report["too_many_rejects"] == bool(code)
    assert len(rows_of(tmp_path / "s")) == 15 + code  # nothing is pruned where too much is wrong
    assert report["pruned"] == 1 - code
    if code:
        assert "3 of 18 images were rejected (2 not an image, 1 empty file)" in ran.err
        assert f"--max-rejects allows {limit}; the other images are packed" in ran.err


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "2.0", "", "1e3", "0.1.2", "nan", "50%"])
def test_a_limit_that_is_neither_a_count_nor_a_fraction_is_refused(text: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a count such as 10 or a fraction such as 0\.01"):
        Limit.parse("--max-rejects", text)
    ran = pack(source, tmp_path / "s", tmp_path, f"--max-rejects={text}")
    assert ran.code == 2
    assert not (tmp_path / "s").exists()


def test_a_limit_counts_or_divides() -> None:
    assert reject_limit(None).allows(10**9, of=10**9)
    for text, number, of, is_allowed in (
        ("0", 0, 5, True),
        ("0", 1, 5, False),
        ("0.5", 2, 4, True),
        (".5", 3, 4, False),
        ("1.0", 4, 4, True),
        ("1", 2, 4, False),
    ):
        assert reject_limit(text).allows(number, of=of) is is_allowed
    assert [prune_limit(PRUNE).allows(number, of=of) for number, of in ((10, 10), (10, 99), (11, 109), (11, 110))] == [
        *(True, True, False, True)
    ]


def test_more_than_a_share_of_a_store_is_pruned_only_if_told(tmp_path: Path, model: Path) -> None:
    """A disk that is not mounted, and whose mount point is gone with it, looks like deleted images."""
    source = tmp_path / "photos"
    for folder in ("here", "disk"):
        write_images(source / folder, 12, captions=False)
    assert pack(source, tmp_path / "s", model).code == 0
    before = rows_of(tmp_path / "s")
    (source / "disk").rename(tmp_path / "away")
    (source / "new.png").write_bytes(png(20, 30, 77))
    ran = call("ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL, "--prune")
    assert ran.code == 1
    why = "12 of 24 samples would be dropped, --prune allows 0.1 or 10, whichever is more"
    assert f"  not pruned: {why}\n" in ran.out
    assert f"error: nothing was pruned: {why}. If a disk or a folder of the source is missing, bring it back; " in ran.err
    assert "repeat this with --prune=12\n" in ran.err
    assert sorted(rows_of(tmp_path / "s")) == sorted([*before, "new.png"])
    refused = pack(source, tmp_path / "s", model, "--prune=0.4")
    assert (refused.code, refused.json["not_pruned_beyond_limit"], refused.json["pruned"]) == (1, 12, 0)
    (tmp_path / "away").rename(source / "disk")
    assert counts(pack(source, tmp_path / "s", model, "--prune").json) == (0, 25, 0)
    (source / "disk").rename(tmp_path / "away")
    assert pack(source, tmp_path / "s", model, "--prune=12").json["pruned"] == 12
    assert sorted(rows_of(tmp_path / "s")) == sorted(["new.png", *(name for name in before if name.startswith("here/"))])


def test_a_limit_of_pruning_that_is_none_is_refused(source: Path, tmp_path: Path, model: Path) -> None:
    ran = pack(source, tmp_path / "s", model, "--prune=few").fails("--prune is 'few'", code=2)
    assert ran.out == ""


def test_the_workers_of_a_cluster_are_a_value(source: Path, tmp_path: Path, model: Path) -> None:
    """Whatever its help begins with: `--workers 8@1gpu` was taken for a flag and an argument."""
    for asked in (["--workers", "8@1gpu"], ["--workers=@1gpu"]):
        assert (
            f"--workers {asked[-1].rpartition('=')[2]}: it is for --engine ray"
            in pack(source, tmp_path / "s", model, *asked).err
        )


def test_a_damaged_tar_stops_a_run_before_anything_is_written(tmp_path: Path, model: Path, source: Path) -> None:
    pattern = write_tars(source, tmp_path / "tars")
    path = tmp_path / "tars" / "b.tar"
    path.write_bytes(path.read_bytes()[:4000])
    pack(pattern, tmp_path / "s", model).fails("b.tar, near byte")
    assert not (tmp_path / "s").exists()


def told(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, *more)


def put_out_of_reach(path: Path) -> None:
    """Leave the name and take the file: what is below an unmounted disk is listed where its links are, and cannot be opened."""
    path.unlink()
    path.symlink_to(path.parent / "gone" / path.name)


@pytest.mark.parametrize("limit", [("--max-rejects", "0"), ("--max-rejects", "0", "--prune"), ("--prune",), ()])
def test_images_that_cannot_be_read_lose_no_sample(limit: tuple[str, ...], packed: Path, tmp_path: Path, model: Path) -> None:
    for path in sorted(packed.rglob("*.png")):
        put_out_of_reach(path)
    ran = pack(packed, tmp_path / "s", model, *limit)
    assert ran.code == 1
    assert len(rows_of(tmp_path / "s")) == 14
    report = ran.json
    assert report["found"] == report["rejected"] == report["kept_unreadable"] == 14
    assert report["rejected_by_reason"] == {"unreadable file": 14}
    assert (report["dropped"], report["pruned"], report["not_in_source"]) == (0, 0, 0)
    assert len(report["kept_unreadable_ids"]) == 10
    said = told(packed, tmp_path / "s", model, *limit)
    assert "cannot be read now, but kept in the store: 14 samples\n    a/000.png\n" in said.out


def test_what_is_unreadable_stays_what_is_damaged_goes_and_both_are_named(packed: Path, tmp_path: Path, model: Path) -> None:
    put_out_of_reach(packed / "a" / "000.png")
    (packed / "b" / "001.png").write_bytes(b"broken")
    report = pack(packed, tmp_path / "s", model).json
    assert report["found"] == report["packed"] + report["unchanged"] + report["rejected"] == 14
    assert (report["dropped"], report["dropped_ids"]) == (1, ["b/001.png"])
    assert (report["kept_unreadable"], report["kept_unreadable_ids"]) == (1, ["a/000.png"])
    assert len(rows_of(tmp_path / "s")) == 13
    said = told(packed, tmp_path / "t", model).out
    assert "kept in the store" not in said  # a store that never had it keeps nothing of it


def test_beyond_the_limit_of_rejects_nothing_is_dropped(packed: Path, tmp_path: Path, model: Path) -> None:
    for number in (0, 2, 4):
        (packed / "a" / f"00{number}.png").write_bytes(b"broken")
    ran = pack(packed, tmp_path / "s", model, "--max-rejects", "2")
    assert (ran.code, ran.json["dropped"], ran.json["kept_beyond_limit"]) == (1, 0, 3)
    assert "--max-rejects allows 2; the other images are packed, and no sample was dropped" in ran.err
    assert len(rows_of(tmp_path / "s")) == 14
    ran = told(packed, tmp_path / "s", model, "--max-rejects", "3").done()
    assert "dropped, because rejected now: 3 samples\n    a/000.png\n" in ran.out
    assert len(rows_of(tmp_path / "s")) == 11


def test_captions_that_cannot_be_read_keep_the_sample(packed: Path, tmp_path: Path, model: Path) -> None:
    put_out_of_reach(packed / "b" / "001.txt")
    (packed / "b" / "003.txt").write_bytes(b"\xff\xff")
    report = pack(packed, tmp_path / "s", model).json
    assert report["rejected_by_reason"] == {"unreadable caption": 2}
    assert (report["kept_unreadable_ids"], report["dropped_ids"]) == (["b/001.png"], ["b/003.png"])


def test_an_empty_mount_point_loses_no_sample(packed: Path, tmp_path: Path, model: Path) -> None:
    for path in (packed / "b").iterdir():
        path.unlink()
    report = pack(packed, tmp_path / "s", model, "--prune").json  # the disk at b/ is unmounted
    assert (report["pruned"], report["not_in_source"]) == (0, 7)
    said = told(packed, tmp_path / "s", model, "--prune")
    assert f"not pruned: {packed / 'b'} is empty, like the mount point of an unmounted disk; remove the folder if" in said.out
    assert len(rows_of(tmp_path / "s")) == 14
    for path in (packed / "a").iterdir():
        path.unlink()
    ran = pack(packed, tmp_path / "s", model, "--prune")
    assert (ran.code, len(rows_of(tmp_path / "s"))) == (1, 14)
    assert "has no images" in ran.err
    (packed / "b").rmdir()
    (packed / "a" / "new.png").write_bytes(png(20, 30))
    assert pack(packed, tmp_path / "s", model, "--prune").json["pruned"] == 0  # no folder is in doubt, but that is all of it
    assert pack(packed, tmp_path / "s", model, "--prune=1.0").json["pruned"] == 14


def test_a_file_that_shrinks_while_read_is_unreadable_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(bytes(100))
    monkeypatch.setattr(local_files, "refuse_too_large", lambda *_: os.truncate(tmp_path / "a.png", 50))
    with pytest.raises(RejectedError, match="unreadable file: it has 50 of 100 bytes") as caught:
        local_files.read_file(tmp_path / "a.png")
    assert caught.value.is_passing


def test_an_image_for_which_there_is_no_memory_at_the_moment_keeps_its_sample(
    packed: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packed / "a" / "000.png").write_bytes((packed / "a" / "002.png").read_bytes())

    def short(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decode_module, "_decode", short)
    report = pack(packed, tmp_path / "s", model).json
    assert (report["rejected_by_reason"], report["dropped"], report["kept_unreadable"]) == ({"too large": 1}, 0, 1)
    assert len(rows_of(tmp_path / "s")) == 14


DETAIL = "10x500 px, in its bucket of 16x24 the crop would lose 97 % of the area, more than --max-crop {}"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """One image of a bucket's shape, one that loses 40 % to its bucket, one that loses 97 %."""
    return write_files(tmp_path / "photos", {"fits.png": png(20, 30), "wide.png": png(20, 50), "strip.png": png(10, 500)})


@pytest.mark.parametrize(
    ("more", "limit", "taken"),
    [
        ((), "75 %", ["fits.png", "wide.png"]),
        (("--max-crop", "0.39"), "39 %", ["fits.png"]),
        (("--max-crop", "0.4"), "40 %", ["fits.png", "wide.png"]),
    ],
)
def test_what_loses_too_much_is_listed_with_its_numbers(
    more: tuple[str, ...], limit: str, taken: list[str], photos: Path, tmp_path: Path, model: Path
) -> None:
    scanned = call("ingest", "scan", photos, *SMALL, *more, "--json").json
    packed = pack(photos, tmp_path / "s", model, *more).done().json
    assert scanned["rejected_by_reason"] == packed["rejected_by_reason"] == {"too much cropped away": 3 - len(taken)}
    rejects = [json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_bytes().splitlines()]
    assert rejects == scanned["rejects"]
    assert rejects[0] == {"id": "strip.png", "reason": "too much cropped away", "detail": DETAIL.format(limit)}
    assert sorted(rows_of(tmp_path / "s")) == taken


@pytest.mark.parametrize("limit", ["1", "0.5"])
def test_a_store_keeps_the_limit_it_was_made_with(limit: str, photos: Path, tmp_path: Path, model: Path) -> None:
    first = pack(photos, tmp_path / "s", model, "--max-crop", limit).json
    (photos / "strip2.png").write_bytes(png(11, 500))
    (photos / "strip.png").touch()
    (photos / "wide2.png").write_bytes(png(20, 90))  # loses 67 %, which the default allows
    again = pack(photos, tmp_path / "s", model).done().json
    is_any = limit == "1"
    assert (first["packed"], first["rejected"]) == ((3, 0) if is_any else (2, 1))
    assert (again["dropped"], again["rejected"]) == ((0, 0) if is_any else (0, 3))
    assert Store.open(tmp_path / "s").manifest.rules["max_crop"] == float(limit)
    assert pack(photos, tmp_path / "s", model, "--max-crop", limit).json["packed"] == 0


def test_a_changed_image_that_loses_too_much_drops_its_row(photos: Path, tmp_path: Path, model: Path) -> None:
    pack(photos, tmp_path / "s", model).done()
    (photos / "wide.png").write_bytes(png(10, 400))
    assert pack(photos, tmp_path / "s", model).json["dropped_ids"] == ["wide.png"]


def test_stores_with_and_without_a_limit_are_read_together(photos: Path, tmp_path: Path, model: Path) -> None:
    for name, limit in (("a", "1"), ("b", "0.75")):
        pack(photos, tmp_path / name, model, "--max-crop", limit).done()
    stores = [WeightedStore(store=Store.open(tmp_path / name)) for name in "ab"]
    with Loader(stores, LoaderConfig(batch_size=1)) as loader:
        assert [batch.epoch for batch, _ in zip(loader.forever(), range(6), strict=False)] == [0] * 5 + [1]
