"""What becomes of pairs that change, that are damaged or that a model does not take; and what masks become."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bucketline.ingest.encoders.vae import LatentColumns
from bucketline.ingest.images.crop import Framing, RejectedError, bucket_placement, parse_grid
from bucketline.ingest.parallel.items import pack_items, unpack_items
from bucketline.ingest.partners.masks import area_means, read_mask
from bucketline.ingest.sources.dataset_file import open_source
from bucketline.ingest.sources.source import SourceOptions
from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from tests.commands import ROOT, call
from tests.kit import by_id
from tests.models import colour_image, encoded, write_files
from tests.unit.ingest.partners.kit import GRID, OWN_SIZE, SIZE, Expected, check, data_file, mask, packed, picture

NAMES = ("a", "b", "c", "d")


def write_pairs(root: Path) -> dict[str, Expected]:
    """Write targets, an aligned reference each, one of its own size for two of them, and masks."""
    files: dict[str, str | bytes] = {}
    samples: dict[str, Expected] = {}
    for n, name in enumerate(NAMES):
        references = [picture(10 + n), *([picture(20 + n, OWN_SIZE)] if n < 2 else [])]
        files |= {f"after/{name}.png": picture(n), f"after/{name}.txt": "a cat", f"masks/{name}.png": mask(30 + n)}
        files |= {f"{folder}/{name}.png": data for folder, data in zip(("before", "style"), references, strict=False)}
        samples[f"{name}.png"] = Expected(target=picture(n), references=references, mask=mask(30 + n))
    write_files(root, files)
    return samples


def pairs_file(root: Path, **more: object) -> Path:
    fields = {"references": ["before", "style"], "references_optional": True, "mask": "masks", **more}
    return data_file(root / "data.toml", "after", **fields)


@pytest.fixture
def pairs(tmp_path: Path, edit_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, and the store `s` next to them that they were packed into; packed once a session, and copied."""
    once = tmp_path_factory.getbasetemp() / "pairs once"
    if not once.exists():
        once.mkdir()
        samples = write_pairs(once / "data")
        packed(pairs_file(once / "data"), once / "s", edit_model).done()
        check(once / "s", edit_model, samples)
    shutil.copytree(once, tmp_path / "all")
    return tmp_path / "all" / "data"


def again(pairs: Path, model: Path, *more: object) -> dict[str, Any]:
    """Compare and then pack again; what the comparison foretells must come true."""
    file, store = pairs / "data.toml", pairs.parent / "s"
    told = packed(file, store, model, "--dry-run", *more).done().json
    done: dict[str, Any] = packed(file, store, model, *more).done().json
    assert told["unchanged"] == done["unchanged"]
    assert told["new"] + told["changed"] + told["moved"] + told["recaptioned"] == done["packed"]
    assert (told["recaptioned"], told["rejected"]) == (done["latents_kept"], done["rejected"])
    return done


def test_batches_of_several_sizes_hold_the_buckets_of_all_of_them(pairs: Path) -> None:
    buckets = {bucket.name: bucket.num_rows for bucket in Store.open(pairs.parent / "s").buckets()}
    assert buckets == {"train/32x48x32x48x48x32": 2, "train/32x48x32x48x0x0": 2}


def test_a_sample_is_packed_again_once_a_partner_is_edited_appears_or_vanishes(pairs: Path, edit_model: Path) -> None:
    samples = write_pairs(pairs / "unused")
    assert again(pairs, edit_model)["unchanged"] == 4
    edits: tuple[tuple[str, bytes | None, str, dict[str, Any]], ...] = (
        ("style/a.png", picture(77, OWN_SIZE), "a.png", {"references": [picture(10), picture(77, OWN_SIZE)]}),
        ("masks/b.png", mask(78), "b.png", {"mask": mask(78)}),
        ("style/c.png", picture(79, OWN_SIZE), "c.png", {"references": [picture(12), picture(79, OWN_SIZE)]}),
        ("style/a.png", None, "a.png", {"references": [picture(10)]}),
        ("before/d.png", None, "d.png", {"references": []}),
    )
    for place, data, name, changed in edits:
        if data is None:
            (pairs / place).unlink()
        else:
            (pairs / place).write_bytes(data)
        done = again(pairs, edit_model)
        assert (done["packed"], done["unchanged"], done["latents_kept"]) == (1, 3, 0), place
        own = samples[name]
        fields = {"target": own.target, "references": own.references, "mask": own.mask, **changed}
        samples[name] = Expected(**fields)
        check(pairs.parent / "s", edit_model, samples)


@pytest.mark.parametrize("check_by", ["size-time", "content"])
def test_a_new_caption_or_time_keeps_the_latents_of_all_partners(
    pairs: Path, edit_model: Path, monkeypatch: pytest.MonkeyPatch, check_by: str
) -> None:
    before = by_id(Store.open(pairs.parent / "s"))
    os.utime(pairs / "before" / "a.png", (1, 1))
    (pairs / "after" / "b.txt").write_text("a dog", encoding="ascii")
    monkeypatch.setattr(LatentColumns, "encode", lambda *_: pytest.fail("an image was encoded"))
    monkeypatch.setattr(LatentColumns, "encode_references", lambda *_: pytest.fail("a reference was encoded"))
    done = again(pairs, edit_model, "--check", check_by)
    assert done["latents_kept"] == (2 if check_by == "size-time" else 1)
    after = by_id(Store.open(pairs.parent / "s"))
    assert after["b.png"].record.captions == ("a dog",)
    assert {name: held.columns for name, held in before.items()} == {name: held.columns for name, held in after.items()}


def test_references_that_take_each_other_s_place_are_packed_again_with_equal_sizes_and_times(
    tmp_path: Path, edit_model: Path
) -> None:
    root, store = tmp_path / "data", tmp_path / "s"
    one, other = (encoded(Image.fromarray(colour_image(*SIZE, seed)), "BMP") for seed in (2, 3))
    write_files(root, {"after/a.png": picture(1), "before/a.bmp": one, "style/a.bmp": other})
    for folder in ("before", "style"):
        os.utime(root / folder / "a.bmp", (1, 1))
    for folders, references in ((["before", "style"], [one, other]), (["style", "before"], [other, one])):
        assert packed(data_file(root / "data.toml", "after", references=folders), store, edit_model).done().json["packed"] == 1
        check(store, edit_model, {"a.png": Expected(target=picture(1), references=references)})


def test_a_sample_whose_partner_is_missing_or_bad_is_rejected_with_both_names(tmp_path: Path, edit_model: Path) -> None:
    root = tmp_path / "data"
    write_pairs(root)
    (root / "before" / "a.png").unlink()
    write_files(root, {"before/b.jpg": picture(1), "masks/c.png": b"no image"})
    file = data_file(root / "data.toml", "after", references="before", mask="masks")
    found = {
        "a.png": "it has no reference in BEFORE, such as a.png; add one, or set references_optional = true",
        "b.png": "BEFORE/b.jpg and BEFORE/b.png are both its reference; keep one",
        "c.png": "its mask MASKS/c.png: not an image: it begins with 'no image'",
    }
    report = call("ingest", "scan", file, "--model", edit_model, "--json").done().json
    places = {str(root / name.lower()): name for name in ("BEFORE", "MASKS")}

    def shortened(detail: str) -> str:
        for place, name in places.items():
            detail = detail.replace(place, name)
        return detail

    assert {one["id"]: shortened(one["detail"]) for one in report["rejects"]} == found
    done = packed(file, tmp_path / "s", edit_model).json
    assert (done["packed"], done["rejected_by_reason"]) == (1, {"missing or unusable reference or mask": 3})
    rejects = map(json.loads, (tmp_path / "s" / "rejects.jsonl").read_text(encoding="ascii").splitlines())
    assert {one["id"]: shortened(one["detail"]) for one in rejects} == found


def test_more_references_than_the_store_or_the_model_takes_are_rejected(tmp_path: Path, edit_model: Path) -> None:
    root, store = tmp_path / "data", tmp_path / "s"
    write_files(root / "data", {f"{name}.png": picture(n) for n, name in enumerate(("a", "a_0", "b", "b_0", "c"))})
    file = data_file(root / "data.toml", "data", references="same:{stem}_{n}", references_optional=True)
    assert packed(file, store, edit_model).done().json["packed"] == 3
    write_files(root / "data", {"c_0.png": picture(7), "c_1.png": picture(8)})
    done = packed(file, store, edit_model).json
    assert (done["unchanged"], done["rejected"], done["dropped_ids"]) == (2, 1, ["c.png"])
    detail = json.loads((store / "rejects.jsonl").read_text(encoding="ascii"))["detail"]
    assert "2 references" in detail
    assert "1 at most" in detail
    write_files(root / "data", {f"b_{n}.png": picture(n) for n in range(1, 12)})
    rejects = call("ingest", "scan", file, "--model", edit_model, "--json").done().json["rejects"]
    assert [one["id"] for one in rejects] == ["b.png"]
    assert "has 12 references" in rejects[0]["detail"]
    assert "takes 0 to 8" in rejects[0]["detail"]


@pytest.mark.parametrize(
    ("pipeline", "fields", "expected"),
    [
        (None, {"references": "before"}, "takes none"),
        ("Flux2KleinPipeline", {"references": "masks/none"}, "masks/none"),
        ("Flux2KleinPipeline", {"references": "same:{stem}_{n}"}, "not one image has a reference"),
        ("Flux2KleinPipeline", {"references": ["before", "same:{stem}"]}, "expected folders"),
        ("Flux2KleinPipeline", {"references": "after"}, "folder of images"),
        ("Flux2KleinPipeline", {"references": "before", "references_area": 8}, "references_area is 8"),
        ("Flux2KleinPipeline", {"references": ["before", "style", "masks"] * 3}, "takes 8 at most"),
        ("QwenImageEditPipeline", {}, "needs 1"),
        ("Flux2KleinPipeline", {"mask": "column:mask"}, "no mask in the column mask"),
    ],
)
def test_what_no_pack_could_store_is_refused_before_anything_is_read(
    pipeline: str | None, fields: dict[str, Any], expected: str, tmp_path: Path, model: Path
) -> None:
    write_pairs(tmp_path / "data")
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    if pipeline is not None:
        (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}), encoding="ascii")
    file = data_file(tmp_path / "data" / "data.toml", "after", **fields)
    ran = call("ingest", "scan", file, "--model", folder)
    assert ran.code
    assert expected in ran.out + ran.err


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"references": [], "mask": "masks"}, "would lose them"),
        ({"references": ["before", "style"], "references_optional": True}, "no mask"),
        ({"references": ["before", "style"], "references_optional": True, "mask": "whole"}, 'mask = "whole"'),
        (
            {"references": ["before", "style"], "references_optional": True, "mask": "masks", "references_area": 512},
            "references_area = 512",
        ),
    ],
)
def test_a_store_takes_only_the_partners_that_it_has(
    fields: dict[str, Any], expected: str, pairs: Path, edit_model: Path
) -> None:
    ran = packed(data_file(pairs / "data.toml", "after", **fields), pairs.parent / "s", edit_model)
    assert ran.code
    assert expected in ran.err


def test_pairs_in_object_storage_are_those_on_a_disk(tmp_path: Path, edit_model: Path) -> None:
    samples = write_pairs(tmp_path / "data")
    key = uuid.uuid4().hex
    places = {name: ObjectFolder.open(f"memory://{key}/{name}") for name in ("after", "before", "masks")}
    for name, objects in places.items():
        for path in sorted((tmp_path / "data" / name).iterdir()):
            objects.write(path.name, path.read_bytes())
    after, before, masks = (objects.url for objects in places.values())
    references = [before, str(tmp_path / "data" / "style")]
    file = data_file(tmp_path / "data.toml", after, references=references, references_optional=True, mask=masks)
    assert packed(file, tmp_path / "s", edit_model).done().json["packed"] == 4
    check(tmp_path / "s", edit_model, samples)
    assert packed(file, tmp_path / "s", edit_model).done().json["unchanged"] == 4
    places["masks"].write("a.png", mask(99))
    assert packed(file, tmp_path / "s", edit_model).done().json["packed"] == 1


@pytest.mark.parametrize("page", ["docs/edit-pairs-and-masks.md", "README.md"])
def test_the_data_set_file_of_the_page_packs(page: str, tmp_path: Path, edit_model: Path) -> None:
    samples = write_pairs(tmp_path / "data")
    text = (ROOT / page).read_text(encoding="utf-8")
    write_files(tmp_path / "data", {"data.toml": text.partition("```toml")[2].partition("```")[0]})
    packed(tmp_path / "data" / "data.toml", tmp_path / "s", edit_model, "--grid", GRID, "--min-size-px", 8).done()
    check(tmp_path / "s", edit_model, samples)


def test_other_ranks_are_sent_the_partners_of_their_items(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    options = SourceOptions(references=(str(tmp_path / "before"),), mask="alpha")
    items = open_source(str(tmp_path / "after"), options).listing().items
    assert all(item.partners for item in items)
    assert unpack_items(pack_items(items)) == items


# ----------------------------------------------------------------------------------------------------------------------- masks

GREY = colour_image(*SIZE, 5)[..., 0]
PLACED = bucket_placement(*SIZE, parse_grid("32x48", step_px=16, align_px=2))
FRAMING = Framing(grid=parse_grid("32x48", step_px=16, align_px=2))


def _of(image: Image.Image, **options: Any) -> bytes:
    return encoded(image, "PNG", **options)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: _of(Image.fromarray(GREY)), 0),
        (lambda: _of(Image.fromarray(GREY).convert("RGB")), 0),
        (lambda: _of(Image.fromarray(GREY).convert("P")), 0),
        (lambda: encoded(Image.fromarray(GREY), "JPEG", quality=100), 1),
        (lambda: _of(Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(GREY[::-1].copy())))), 0),
        (lambda: _of(Image.fromarray(GREY.astype("u2") * 257)), 0),
        (lambda: encoded(Image.fromarray(GREY.T.copy()), "TIFF", exif=_turned()), 0),
    ],
    ids=["grey", "RGB", "palette", "JPEG", "alpha", "16 bits", "turned"],
)
def test_a_mask_is_the_mean_of_its_area_whatever_its_pixels_are(make: Callable[[], bytes], most: int) -> None:
    found = read_mask(make(), FRAMING, PLACED, 2)
    own = GREY.astype(np.float64).reshape(16, 4, 24, 4).mean(axis=(1, 3))
    assert np.abs(found.astype(int) - np.rint(own)).max() <= most


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 5  # the transpose
    return exif


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (_of(Image.fromarray(GREY[:-1])), "63x96 px, its image 64x96"),
        (_of(Image.fromarray(colour_image(*SIZE, 3))), "it has colours (mode RGB)"),
        (b"", "0 bytes"),
    ],
)
def test_a_mask_that_is_not_of_its_image_is_refused(data: bytes, expected: str) -> None:
    with pytest.raises(RejectedError) as error:
        read_mask(data, FRAMING, PLACED, 2)
    assert expected in str(error.value)


def test_means_of_parts_of_pixels_are_those_of_many_times_as_many_pixels() -> None:
    values = np.random.default_rng(0).integers(0, 256, (37, 3))
    found = area_means(values, 2.5, 33.0, 7)
    fine = np.repeat(values, 140, axis=0)[350:4620].reshape(7, 610, 3)
    np.testing.assert_allclose(found, fine.mean(axis=1), rtol=1e-12)


def test_an_alpha_channel_is_a_mask_and_hides_no_colour(tmp_path: Path, edit_model: Path) -> None:
    colours, alpha = Image.fromarray(colour_image(*SIZE, 1)), Image.fromarray(GREY)
    seen = Image.merge("RGBA", (*colours.split(), alpha))
    nothing = Image.merge("RGBA", (*colours.split(), Image.new("L", colours.size)))
    ones = Image.merge("RGBA", (*colours.split(), Image.new("L", colours.size, 1)))
    write_files(tmp_path / "data", {"a.png": _of(seen), "b.png": _of(colours), "c.png": _of(nothing), "d.png": _of(ones)})
    file = data_file(tmp_path / "data.toml", "data", mask="alpha")
    done = packed(file, tmp_path / "s", edit_model).done().json
    white = _of(Image.new("L", colours.size, 255))
    masks = {"a.png": _of(alpha), "b.png": white, "c.png": _of(Image.new("L", colours.size))}
    masks["d.png"] = _of(Image.new("L", colours.size, 1))
    check(tmp_path / "s", edit_model, {name: Expected(target=_of(colours), mask=own) for name, own in masks.items()})
    assert any("2 images with a mask that is zero everywhere" in note and "c.png, d.png" in note for note in done["notes"])
    assert packed(file, tmp_path / "s", edit_model).done().json["unchanged"] == 4
    whole = data_file(tmp_path / "data.toml", "data", mask="whole")
    for unchanged in (0, 4):
        assert packed(whole, tmp_path / "whole", edit_model).done().json["unchanged"] == unchanged
    assert all(set(row.columns["mask"]) == {255} for row in by_id(Store.open(tmp_path / "whole")).values())
