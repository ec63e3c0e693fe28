"""A look before packing, by scan or dry run: it foretells what packing does, writes nothing, loads no encoder."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bucketline.ingest.encoders import text_model, vae
from bucketline.ingest.pipeline import image_reader
from bucketline.store import Store
from tests.commands import ROOT, Ran, call, spawn
from tests.family_models import tiny_dc
from tests.kit import untouched
from tests.models import SMALL, colour_image, encoded, png, write_files, write_model
from tests.profiles import icon


def scan(source: object, *more: object) -> Ran:
    return call("ingest", "scan", source, *SMALL, *more, "--json")


def add_broken_ones(source: Path) -> None:
    frames = [Image.fromarray(colour_image(20, 20, n)) for n in range(3)]
    turned = Image.Exif()
    turned[0x0112] = 6
    files: dict[str, str | bytes] = {
        "empty.png": b"",
        "text.jpg": b"no image",
        "moving.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "tiny.png": png(7, 30),
        "float.tiff": encoded(Image.fromarray(colour_image(30, 30)).convert("F"), "TIFF"),
        "bad caption.png": png(20, 30),
        "bad caption.txt": b"\xff\xfe",
        "lost.txt": "a caption without an image",
        "a/000.txt": "\n".join(f"cat {n}" for n in range(10)),
        "b/001.txt": "red " * 40,
        "turned.jpg": encoded(Image.fromarray(colour_image(24, 40)), "JPEG", exif=turned),
    }
    write_files(source, files)
    (source / "folder.png").mkdir()
    (source / "dangling.png").symlink_to(source / "nowhere")


@pytest.mark.parametrize("kind", ["headers", "full"])
def test_what_a_scan_foretells_is_what_packing_does(kind: str, source: Path, tmp_path: Path, model: Path) -> None:
    add_broken_ones(source)
    if kind == "full":
        (source / "cut.png").write_bytes(png(30, 30)[:200])
    before = sorted(tmp_path.rglob("*"))
    more = ("--model", model, "--val-fraction", "0.3", *(["--full"] if kind == "full" else []))
    foretold = scan(source, *more).done()
    assert sorted(tmp_path.rglob("*")) == before
    packed = call("ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL, "--val-fraction", "0.3", "--json").json
    report = foretold.json
    same = ("found", "rejected", "rejected_by_reason", "without_caption", "enlarged", "crop_loss", "captions_beyond")
    assert {name: report[name] for name in same} == {name: packed[name] for name in same}
    assert report["captions_without_image"] == packed["captions_without_image"] == ["lost.txt"]
    assert report["rejected"] == (8 if kind == "full" else 7)
    store = Store.open(tmp_path / "s")
    assert report["buckets"] == {b.name: b.num_rows for b in store.buckets()}
    rejects = [json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_text(encoding="ascii").splitlines()]
    assert rejects == report["rejects"]
    assert {reject["id"]: reject["reason"] for reject in rejects if reject["id"] != "cut.png"} == {
        "bad caption.png": "unreadable caption",
        "dangling.png": "unreadable file",
        "empty.png": "empty file",
        "float.tiff": "unsupported pixel format",
        "moving.gif": "animated or several images",
        "text.jpg": "not an image",
        "tiny.png": "too small",
    }


def test_damage_behind_a_header_is_seen_by_a_full_scan_alone(source: Path) -> None:
    (source / "cut.png").write_bytes(png(30, 30)[:200])
    report = scan(source).json
    assert (report["rejected"], report["is_full"]) == (0, False)
    assert scan(source, "--full").json["rejected_by_reason"] == {"damaged image": 1}


def test_a_scan_of_tars_and_of_a_folder_say_the_same(source: Path, tmp_path: Path) -> None:
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "t.tar"), encoder=False) as writer:
        for path in sorted(source.rglob("*.png")):
            text = path.with_suffix(".txt")
            captions = {"txt": text.read_bytes()} if text.exists() else {}
            writer.write({"__key__": path.relative_to(source).with_suffix("").as_posix(), "png": path.read_bytes(), **captions})
    same = ("found", "buckets", "without_caption", "captions", "smallest", "median", "largest", "source_bytes")
    reports = [scan(text).json for text in (source, tmp_path / "t.tar")]
    assert [{name: report[name] for name in same} for report in reports] == [{name: reports[0][name] for name in same}] * 2


def test_a_scan_without_a_model_needs_neither_torch_nor_transformers(source: Path) -> None:
    script = (
        "import sys; from bucketline.ingest.cli import main; "
        f"code = main(['scan', {str(source)!r}, '--grid', '64x64', '--min-size-px', '8']); "
        "assert not {'torch', 'transformers', 'diffusers'} & set(sys.modules); sys.exit(code)"
    )
    ran = spawn([sys.executable, "-c", script], PYTHONPATH=str(ROOT)).done()
    assert "14 images" in ran.out
    assert "train/64x64" in ran.out


def test_a_small_album_is_advised_a_grid_of_fewer_buckets_once(tmp_path: Path) -> None:
    sizes = [(64, 64)] * 6 + [(64, 72)] * 2 + [(60, 120)] * 4 + [(64, 70)]
    write_files(tmp_path, {f"{n}.png": png(*size, n) for n, size in enumerate(sizes)})
    ran = call("ingest", "scan", tmp_path, "--grid", "64x64,64x72,48x96,56x80", "--min-size-px", 8).done()
    said = "3 of 13 images are in buckets of fewer than 4, and repeat within batches of 4. Now: 3 buckets, "
    assert f"{said}crop loss 0.2 %; with --grid 48x96,64x64: 2 buckets, crop loss 2.4 %\n" in ran.out
    again = call("ingest", "scan", tmp_path, "--grid", "48x96,64x64", "--min-size-px", 8).done()
    assert "2 buckets:" in again.out
    assert "crop loss: 2.4 % of the area on average, at most 11.1 % (train/64x64)" in again.out
    assert "repeat" not in again.out


def test_a_source_of_rejects_alone_ends_with_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    call("ingest", "scan", tmp_path).fails("not one of 1 image could be packed")


def test_images_of_every_suffix_are_counted_and_packed_or_refused_in_words(tmp_path: Path) -> None:
    square = Image.fromarray(colour_image(32, 32))
    bitmap = bytearray(encoded(square.convert("RGBA"), "DIB"))
    struct.pack_into("<i", bitmap, 8, 64)  # a cursor's height counts its mask too
    files = {
        "a.apng": encoded(square, "PNG"),
        "moving.apng": encoded(square, "PNG", save_all=True, append_images=[square.rotate(90)]),
        "a.ico": icon(encoded(square, "PNG"), side=32),
        "a.cur": icon(bytes(bitmap) + bytes(32 * 4), side=32, cursor=True),
        "a.j2k": encoded(square, "JPEG2000", no_jp2=True),
        "a.heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(60),
        "a.heif": b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(60),
        "a.jxl": b"\xff\x0a" + bytes(60),
        "a.qoi": encoded(square, "QOI"),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    damaged = "it is damaged or of a kind that {} cannot read; convert it to PNG, JPEG or WebP"
    for more in ([], ["--full"]):
        report = scan(tmp_path, *more).json
        assert report["found"] == len(files)
        rejects = {reject["id"]: (reject["reason"], reject["detail"]) for reject in report["rejects"]}
        assert rejects.pop("a.jxl")[0] == "damaged image"
        assert rejects == {
            "a.heic": ("not an image", f"a HEIC image; {damaged.format('pillow_heif')}"),
            "a.heif": ("not an image", f"a HEIC image; {damaged.format('pillow_heif')}"),
            "moving.apng": ("animated or several images", "2 images in one PNG file"),
        }


@pytest.mark.parametrize("config", ["{}", '{"_class_name": "VQModel", "block_out_channels": [4], "latent_channels": 4}'])
def test_a_scan_refuses_a_vae_that_packing_would_refuse(config: str, source: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "vae" / "config.json").write_text(config, encoding="utf-8")
    ran = scan(source, "--model", folder)
    assert ran.code == 1
    assert any(found in ran.err for found in ("vae/config.json is not that of an AutoencoderKL", "vae/ is a VQModel, expected"))


def test_a_scan_refuses_latents_that_the_models_vae_has_not(source: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tiny_dc().save_pretrained(folder / "vae")
    assert scan(source, "--model", folder).code == 0
    scan(source, "--model", folder, "--latents", "moments").fails("AutoencoderDC has no distribution", code=2)


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, *more)


def foretold(source: Path, store: Path, model: Path, *more: object) -> dict[str, Any]:
    """Return the report of a dry run, which loads no encoder and leaves everything as it was."""
    with untouched(source.parent):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(vae, "load_vae", lambda *_: pytest.fail("a VAE was loaded"))
            patched.setattr(text_model, "load_text_part", lambda *_: pytest.fail("a tokenizer was loaded"))
            ran = pack(source, store, model, *more, "--dry-run", "--json")
        assert ran.code == 0, ran.err
        assert ran.out.count("\n") == 1
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_a_dry_run_makes_no_store(source: Path, tmp_path: Path, model: Path) -> None:
    report = foretold(source, tmp_path / "s", model)
    assert (report["found"], report["new"], report["unchanged"], report["rejected"]) == (14, 14, 0, 0)
    assert not (tmp_path / "s").exists()
    packed = pack(source, tmp_path / "s", model, "--json").json
    assert packed["packed"] == 14
    assert report["buckets"] == {bucket.name: bucket.num_rows for bucket in Store.open(tmp_path / "s").buckets()}


def test_every_kind_of_change_is_counted_as_the_pack_then_does_it(packed: Path, tmp_path: Path, model: Path) -> None:
    images = sorted(packed.rglob("*.png"))
    images[0].unlink()
    images[1].write_bytes(b"no image")
    images[2].write_bytes(png(20, 30, 70))  # changed
    os.utime(images[3], ns=(1, 1))  # touched
    images[4].with_suffix(".txt").write_text("another\n", encoding="ascii")
    (packed / "new.png").write_bytes(png(30, 20, 71))
    (packed / "bad.png").write_bytes(b"")
    report = foretold(packed, tmp_path / "s", model, "--prune")
    names = ("found", "new", "changed", "moved", "recaptioned", "unchanged", "rejected", "dropped", "pruned")
    assert [report[name] for name in names] == [15, 1, 1, 0, 2, 9, 2, 1, 1]
    assert report["buckets"] == {"train/16x24": 1, "train/24x16": 1}
    done = pack(packed, tmp_path / "s", model, "--prune", "--json").json
    same = ("found", "unchanged", "rejected", "rejected_by_reason", "dropped_ids", "pruned_ids")
    assert {name: done[name] for name in same} == {name: report[name] for name in same}
    assert done["packed"] == report["new"] + report["changed"] + report["recaptioned"]
    assert done["latents_kept"] == report["recaptioned"]
    assert foretold(packed, tmp_path / "s", model)["unchanged"] == 13


def test_other_captions_and_a_pruning_beyond_the_limit_are_foretold(packed: Path, tmp_path: Path, model: Path) -> None:
    report = foretold(packed, tmp_path / "s", model, "--caption-template", "ohwx", "--recaption")
    assert (report["recaptioned"], report["buckets"]) == (14, {})
    for path in sorted(packed.rglob("*.png"))[1:]:
        path.rename(tmp_path / f"{path.parent.name}-{path.name}")
    report = foretold(packed, tmp_path / "s", model, "--prune")
    assert (report["pruned"], report["not_pruned_beyond_limit"], report["not_in_source"]) == (0, 13, 13)
    ran = pack(packed, tmp_path / "s", model, "--prune", "--dry-run")
    assert "not pruned: 13 of 14 samples would be dropped, --prune allows" in ran.out
    assert "only file headers were read" in ran.out


def test_each_source_of_a_data_set_file_is_foretold(tmp_path: Path, model: Path) -> None:
    write_files(tmp_path / "in", {"a.png": png(20, 30), "metadata.jsonl": '{"file_name": "a.png", "text": "a"}\n'})
    data = write_files(tmp_path, {"data.toml": '[[source]]\npath = "in"\n'}) / "data.toml"
    assert call("ingest", "pack", data, tmp_path / "d", "--model", model, *SMALL).code == 0
    with untouched(tmp_path):
        ran = call("ingest", "pack", data, tmp_path / "d", "--model", model, *SMALL, "--dry-run").done()
        assert f"in x 1: {tmp_path / 'in'}\ndry run, nothing is written: 1 image found = 1 unchanged\n" in ran.out
        ran = call("ingest", "pack", data, tmp_path / "d", "--model", model, *SMALL, "--dry-run", "--json")
        assert json.loads(ran.out)["sources"]["in"]["unchanged"] == 1


def test_an_image_that_moves_to_the_other_split_is_to_be_encoded_again(
    one_packed: tuple[Path, Path], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_reader, "split_of", lambda *_: "val")  # as for a saved dataset whose image is now in validation
    report = foretold(*one_packed, model)
    assert (report["moved"], report["new"], report["buckets"]) == (1, 0, {"val/16x24": 1})


@pytest.fixture(scope="module")
def one_packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("packed")
    write_files(folder / "in", {"a.png": png(20, 30)})
    assert pack(folder / "in", folder / "s", model).code == 0
    return folder / "in", folder / "s"
