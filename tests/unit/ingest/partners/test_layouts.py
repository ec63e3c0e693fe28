"""Data laid out for other trainers packs as it is: rows have their own target, references and mask, others are no samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bucketline.errors import SourceError
from bucketline.ingest.sources.object_place import list_place
from bucketline.ingest.sources.source import SourceOptions
from tests.commands import call
from tests.models import colour_image, encoded, write_files
from tests.unit.ingest.partners.kit import OWN_SIZE, Expected, check, data_file, mask, packed, picture
from tests.unit.ingest.sources.kit import write_members

NAMES = ("a", "b", "c")
Layout = tuple[dict[str, Any], dict[str, Expected]]  # the fields of the source, and its samples


def captioned(folder: str) -> dict[str, str | bytes]:
    return {f"{folder}/{name}.png": picture(n) for n, name in enumerate(NAMES)} | {
        f"{folder}/{name}.txt": "a cat" for name in NAMES
    }


def expected(
    folder: str, references: Callable[[int], list[bytes]] = lambda _: [], masked: int | None = None
) -> dict[str, Expected]:
    return {
        f"{folder}{name}.png": Expected(
            target=picture(n),
            references=references(n),
            mask=None if masked is None else mask(masked + n),
            captions=("a cat",),
        )
        for n, name in enumerate(NAMES)
    }


def musubi_folders(root: Path) -> Layout:
    """One control image under the target's name, several numbered; a target may be called as another with a number."""
    files = captioned("image_dir")
    files |= {f"image_dir/a_1.{kind}": data for kind, data in (("png", picture(3)), ("txt", "a cat"))}
    files |= {"control/a.webp": encoded(Image.fromarray(colour_image(*OWN_SIZE, 10)), "WEBP", lossless=True)}
    files |= {f"control/b_{n}.png": picture(20 + n) for n in (0, 1)} | {"control/b_0010.png": picture(30, OWN_SIZE)}
    files |= {"control/a_1_0.png": picture(40), "control/c_0001.png": picture(50), "control/nobody.png": picture(60)}
    write_files(root, files)
    own = {
        "a": [(root / "control/a.webp").read_bytes()],
        "b": [picture(20), picture(21), picture(30, OWN_SIZE)],
        "c": [picture(50)],
    }
    found = expected("", lambda n: own[NAMES[n]])
    found["a_1.png"] = Expected(target=picture(3), references=[picture(40)], captions=("a cat",))
    return {"path": "image_dir", "references": "control"}, found


def musubi_jsonl(root: Path) -> Layout:
    write_files(root, {f"images/{name}.png": picture(n) for n, name in enumerate(NAMES)})
    write_files(root, {f"controls/{name}{k}.png": picture(10 * n + k + 5) for n, name in enumerate(NAMES) for k in (0, 1)})
    rows: list[dict[str, str]] = [
        {"image_path": f"{root}/images/{name}.png", "caption": "a cat", "control_path_0": f"controls/{name}0.png"}
        for name in NAMES
    ]
    for name, row in zip(NAMES, rows, strict=True):
        row["control_path_1"] = f"{root}/controls/{name}1.png"
    (root / "meta.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return {"path": "meta.jsonl"}, expected("images/", lambda n: [picture(10 * n + 5), picture(10 * n + 6)])


def ai_toolkit(root: Path) -> Layout:
    """`control_path_1` to 3, each a folder, and `mask_path`; `_controls/` has what it makes itself."""
    files = captioned("data") | {f"data/_controls/{name}.depth.jpg": b"of another" for name in NAMES}
    files |= {f"control_{k}/{name}.png": picture(10 * k + n, OWN_SIZE) for k in (1, 2, 3) for n, name in enumerate(NAMES)}
    files |= {f"masks/{name}.png": mask(90 + n) for n, name in enumerate(NAMES)}
    write_files(root, files)
    fields = {"path": "data", "references": ["control_1", "control_2", "control_3"], "mask": "masks"}
    return fields, expected("", lambda n: [picture(10 * k + n, OWN_SIZE) for k in (1, 2, 3)], 90)


def diffusion_pipe(root: Path) -> Layout:
    """`control_path` and `mask_path`, here inside of `path`."""
    files = captioned("data") | {f"data/control/{name}.png": picture(10 + n) for n, name in enumerate(NAMES)}
    write_files(root, files | {f"data/mask/{name}.png": mask(90 + n) for n, name in enumerate(NAMES)})
    return {"path": "data", "references": "data/control", "mask": "data/mask"}, expected("", lambda n: [picture(10 + n)], 90)


def kohya_masks(root: Path) -> Layout:
    """`conditioning_data_dir`: grey saved as RGB, of which kohya reads the red channel."""
    files = captioned("train")
    for n, name in enumerate(NAMES):
        grey = Image.fromarray(colour_image(64, 96, 90 + n)[..., 0])
        files[f"conditioning/{name}.png"] = encoded(grey.convert("RGB"), "PNG")
    write_files(root, files)
    return {"path": "train", "mask": "conditioning"}, expected("", masked=90)


def onetrainer(root: Path) -> Layout:
    files = captioned("train")
    files |= {f"train/{name}-masklabel.png": mask(90 + n) for n, name in enumerate(NAMES)}
    write_files(root, files | {f"train/{name}-condlabel.png": picture(70 + n) for n, name in enumerate(NAMES)})
    return {"path": "train", "mask": "-masklabel"}, expected("", masked=90)


def diffsynth(root: Path) -> Layout:
    """`edit_image` is a path or a list of them, next to `image` and `prompt`."""
    write_files(root, {f"images/{name}.png": picture(n) for n, name in enumerate(NAMES)})
    write_files(
        root,
        {f"edit/{name}{k}.png": picture(10 * n + k + 5, OWN_SIZE) for n, name in enumerate(NAMES) for k in range(2 - (n == 2))},
    )
    edits: list[Any] = [[f"edit/{name}0.png", f"edit/{name}1.png"] for name in NAMES[:-1]] + ["edit/c0.png"]
    rows = [
        {"image": f"images/{name}.png", "prompt": "a cat", "edit_image": own} for name, own in zip(NAMES, edits, strict=True)
    ]
    (root / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return {"path": "."}, expected("images/", lambda n: [picture(10 * n + k + 5, OWN_SIZE) for k in range(2 - (n == 2))])


def same_folder(root: Path) -> Layout:
    files = captioned("data")
    write_files(
        root, files | {f"data/{name}_{k}.png": picture(10 * n + k + 5) for n, name in enumerate(NAMES) for k in range(n + 1)}
    )
    return {"path": "data", "references": "same:{stem}_{n}"}, expected(
        "", lambda n: [picture(10 * n + k + 5) for k in range(n + 1)]
    )


def tar(root: Path) -> Layout:
    members: list[tuple[str, bytes]] = []
    for n, name in enumerate(NAMES):
        members += [(f"{name}.mask.png", mask(90 + n)), (f"{name}.png", picture(n)), (f"{name}.txt", b"a cat")]
        members += [(f"{name}.ref1.png", picture(20 + n)), (f"{name}.ref0.png", picture(10 + n, OWN_SIZE))]
    write_members(root / "pairs.tar", members)
    fields = {"path": "pairs.tar", "mask": "column:mask"}
    return fields, expected("pairs/", lambda n: [picture(10 + n, OWN_SIZE), picture(20 + n)], 90)


def _cells(make: Callable[[int], bytes]) -> list[dict[str, object]]:
    return [{"bytes": make(n), "path": f"{n}.png"} for n in range(len(NAMES))]


def parquet(root: Path) -> Layout:
    """A table of the hub with `cond_image` next to `image`, as diffusers' scripts read it, and lists of images."""
    images = [{"bytes": picture(n), "path": f"{name}.png"} for n, name in enumerate(NAMES)]
    cells = [[one] for one in _cells(lambda n: picture(10 + n, OWN_SIZE))]
    columns = {"image": images, "cond_image": cells, "text": ["a cat"] * 3, "masks": _cells(lambda n: mask(90 + n))}
    pq.write_table(pa.table(columns), root / "pairs.parquet", row_group_size=2)
    return {"path": "pairs.parquet", "mask": "column:masks"}, expected("", lambda n: [picture(10 + n, OWN_SIZE)], 90)


def instruct_pix2pix(root: Path) -> Layout:
    """`original_image`, `edited_image` and `edit_prompt` of a saved data set."""
    columns = {
        "original_image": _cells(lambda n: picture(10 + n)),
        "edited_image": [{"bytes": picture(n), "path": f"{name}.png"} for n, name in enumerate(NAMES)],
        "edit_prompt": ["a cat"] * 3,
    }
    kinds = {"original_image": datasets.Image(), "edited_image": datasets.Image(), "edit_prompt": datasets.Value("string")}
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(str(root / "saved"))
    return {"path": "saved", "captions_from": "edit_prompt"}, expected("", lambda n: [picture(10 + n)])


LAYOUTS = (
    *(musubi_folders, musubi_jsonl, ai_toolkit, diffusion_pipe, kohya_masks, onetrainer, diffsynth, same_folder),
    *(tar, parquet, instruct_pix2pix),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.__name__)
def test_a_layout_packs_as_it_is_and_every_row_has_its_own_partners(
    layout: Callable[[Path], Layout], tmp_path: Path, edit_model: Path
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    fields, samples = layout(root)
    file = data_file(root / "data.toml", fields.pop("path"), **fields)
    report = packed(file, tmp_path / "store", edit_model).done().json
    assert (report["found"], report["packed"]) == (len(samples), len(samples)), report["notes"]
    check(tmp_path / "store", edit_model, samples)
    assert packed(file, tmp_path / "store", edit_model).done().json["unchanged"] == len(samples)
    assert call("store", "verify", tmp_path / "store").code == 0


def test_what_belongs_to_others_is_left_out_and_counted_by_name(tmp_path: Path, edit_model: Path) -> None:
    expected_notes: Mapping[Callable[[Path], Layout], tuple[str, ...]] = {
        musubi_folders: ("1 image without an image of the source", "nobody.png"),
        onetrainer: ("NAME-masklabel (3 images)", "NAME-condlabel (3 images)"),
        ai_toolkit: ("_controls/ (3 images)",),
        same_folder: ("{stem}_{n} (6 images)",),
        diffsynth: ("columns of tables (5 images)",),
    }
    for layout, texts in expected_notes.items():
        root = tmp_path / layout.__name__
        root.mkdir()
        fields, _ = layout(root)
        file = data_file(root / "data.toml", fields.pop("path"), **fields)
        notes = " | ".join(call("ingest", "scan", file, "--model", edit_model, "--json").done().json["notes"])
        assert all(text in notes for text in texts), (layout.__name__, notes)


def test_mirrored_rows_have_mirrored_references_and_masks(tmp_path: Path, edit_model: Path) -> None:
    fields, samples = diffusion_pipe(tmp_path)
    file = data_file(tmp_path / "data.toml", fields.pop("path"), **fields)
    packed(file, tmp_path / "store", edit_model, "--flip", "--latents", "mode").done()
    check(tmp_path / "store", edit_model, samples, flip=True)


def test_references_in_tars_are_never_lost_in_silence(tmp_path: Path, edit_model: Path) -> None:
    """Not by another Unicode normal form, without an image of their key, or in a tar that has none."""
    (tmp_path / "data").mkdir()
    members = [("caf\u00e9.png", picture(1)), ("cafe\u0301.ref0.png", picture(2)), ("lost.ref0.png", picture(3))]
    write_members(tmp_path / "data/0.tar", members)
    write_members(tmp_path / "data/1.tar", [("a.png", picture(4))])
    file = data_file(tmp_path / "data.toml", "data/{0..1}.tar")
    done = packed(file, tmp_path / "s", edit_model).json
    assert (done["packed"], done["rejected"]) == (1, 1)
    assert done["passed_over"] == ["0/lost.ref0.png (a reference or mask, and no other image has its key)"]
    assert "no reference" in json.loads((tmp_path / "s/rejects.jsonl").read_text(encoding="ascii"))["detail"]
    check(tmp_path / "s", edit_model, {"0/caf\u00e9.png": Expected(target=picture(1), references=[picture(2)])})


def test_columns_of_references_without_images_are_named(tmp_path: Path, edit_model: Path) -> None:
    columns = {"image": [{"bytes": picture(1), "path": "a.png"}], "cond_image": ["a.png"], "text": ["a cat"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    report = call("ingest", "scan", tmp_path / "a.parquet", "--model", edit_model, "--json").done().json
    assert any("no references: cond_image has no images inside" in note for note in report["notes"])


def test_a_place_without_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="controls"):
        list_place(str(tmp_path / "controls"), SourceOptions())


def test_a_linked_folder_in_a_place_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, {"controls/a.png": picture(1), "elsewhere/b.png": picture(2)})
    (tmp_path / "controls" / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="sub is a link to a folder"):
        list_place(str(tmp_path / "controls"), SourceOptions())
