"""Packed captions of families whose text sees the references: a batch has what their pipelines give the model, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from tests import language_models
from tests.commands import call
from tests.family_models import tiny_qwen21_vae, tiny_qwen_vae
from tests.kit import by_id
from tests.models import colour_image, encoded

SIZES = ((96, 160), (128, 64), (100, 132))  # of references, none of a target's size
AREA = {"qwenimage_edit": 64, "qwenimage_edit_plus": 64, "qwenimage21": 96}  # a side of what the VAE gets, in px
COUNTS = {"qwenimage_edit": (1, 1, 1), "qwenimage_edit_plus": (0, 1, 2, 3), "qwenimage21": (0, 1, 2, 3)}
PIPELINES = {
    "qwenimage_edit": "QwenImageEditPipeline",
    "qwenimage_edit_plus": "QwenImageEditPlusPipeline",
    "qwenimage21": "QwenImage21Pipeline",
}


def text_parts(family: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    if family == "qwenimage21":
        return language_models.qwen3_vl().eval(), language_models.qwen3_vl_processor()
    return language_models.qwen25_vl(edits=True).eval(), language_models.qwen_edit_processor()


def write_model(folder: Path, family: str) -> Path:
    text, processor = text_parts(family)
    text.save_pretrained(folder / "text_encoder")
    processor.save_pretrained(folder / "processor")
    vae = tiny_qwen21_vae() if family == "qwenimage21" else tiny_qwen_vae()
    vae.save_pretrained(folder / "vae")
    index = {"_class_name": PIPELINES[family], "text_encoder": ["transformers", type(text).__name__]}
    index |= {"processor": ["transformers", "X"], "vae": ["diffusers", type(vae).__name__]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def write_pairs(root: Path, counts: tuple[int, ...]) -> Path:
    """Write targets with so many references each; the first has no caption."""
    for n, count in enumerate(counts):
        own = {f"images/{n}.png": (64, 96)} | {f"references{k}/{n}.png": SIZES[k] for k in range(count)}
        for seed, (name, size) in enumerate(own.items(), 10 * n):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(encoded(Image.fromarray(colour_image(*size, seed)), "PNG"))
        if n:
            (root / "images" / f"{n}.txt").write_text(f"a red cat of {'the house ' * n}", encoding="utf-8")
    return root


def pack(root: Path, store: Path, model: Path, num_folders: int, area: int) -> Any:
    folders = [f"references{k}" for k in range(num_folders)]
    lines = ["[source]", 'path = "images"', f"references = {json.dumps(folders)}", f"references_area = {area}"]
    lines += ["references_optional = true", "[rules]", 'grid = "64x96"', "min_size_px = 8", "val_fraction = 0"]
    lines += ["[encoding]", 'phases = "two"']  # it is one: captions are encoded with the images
    (root / "data.toml").write_text("\n".join(lines), encoding="utf-8")
    return call("ingest", "pack", root / "data.toml", store, "--model", model, "--text-dtype", "fp32", "--json")


def whole(root: Path, family: str, name: str, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a caption as the pipeline gives it to its model, [L, D], and which positions are of images."""
    import diffusers
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    text, processor = text_parts(family)
    more = {} if family == "qwenimage21" else {"tokenizer": processor.tokenizer}
    kind: Any = getattr(diffusers, PIPELINES[family])
    pipeline = kind(scheduler=None, vae=None, transformer=None, text_encoder=text, processor=processor, **more)
    area = 384**2 if family == "qwenimage_edit_plus" else AREA[family] ** 2
    images = []
    for path in sorted(root.glob(f"references*/{name}")):
        image = Image.open(path)
        width, height = calculate_dimensions(area, image.width / image.height)
        images.append(pipeline.image_processor.resize(image, height, width))
    calls: list[Any] = []
    own = type(processor).__call__

    def noted(self: Any, **given: Any) -> Any:
        calls.append(own(self, **given))
        return calls[-1]

    type(processor).__call__ = noted  # a class of this processor only
    with torch.inference_mode():
        tokens, _, *_ = pipeline.encode_prompt(caption, image=images or None, device=torch.device("cpu"))
    ids = calls[-1]["input_ids"][0][-tokens.shape[1] :]
    return tokens[0], ids == processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")


@pytest.fixture(scope="module", params=list(COUNTS))
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Store]:
    family, root = request.param, tmp_path_factory.mktemp(request.param)
    model = write_model(root / "model", family)
    write_pairs(root, COUNTS[family])
    ran = pack(root, root / "s", model, max(COUNTS[family]), AREA[family]).done()
    assert (ran.json["packed"], ran.json["rejected"]) == (len(COUNTS[family]), 0)
    return family, root, Store.open(root / "s")


@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_a_batch_has_what_the_pipeline_gives_its_model_row_by_row(dropout: float, packed: tuple[str, Path, Store]) -> None:
    family, root, store = packed
    seen = set()
    with Loader(store, LoaderConfig(batch_size=1, epochs=1, caption_dropout=dropout)) as loader:
        for batch in loader.forever():
            (name,) = loader.names(batch)
            captions = store.sample(name)[1].captions
            caption = captions[0] if captions and not dropout else ""
            tokens, is_image = whole(root, family, name, caption)
            assert batch.image_tokens is not None
            own = batch.token_mask[0]
            assert torch.equal(batch.image_tokens[0][own], is_image)
            exact = torch.equal if not dropout else close
            assert exact(batch.tokens[0][own], tokens), name
            seen.add(name)
    assert len(seen) == len(COUNTS[family])


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare a dropped caption: its images' states are those of the sample's first caption, to rounding."""
    return torch.allclose(one, other, rtol=0, atol=5e-5)


def test_a_reference_that_cannot_be_seen_rejects_its_own_sample_only(tmp_path: Path) -> None:
    """Both samples have no caption, so they share the empty one; the text encoder makes the smaller reference larger."""
    model = write_model(tmp_path / "model", "qwenimage21")
    path = model / "processor" / "processor_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["image_processor"]["size"]["shortest_edge"] = 7000
    path.write_text(json.dumps(config), encoding="utf-8")
    for name, size in (("a", SIZES[2]), ("b", (64, 96))):
        for folder, own in (("images", (64, 96)), ("references0", size)):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.png").write_bytes(encoded(Image.fromarray(colour_image(*own, 1)), "PNG"))
    ran = pack(tmp_path, tmp_path / "s", model, 1, AREA["qwenimage21"]).done()
    assert (ran.json["packed"], ran.json["rejected"]) == (1, 1)
    assert ran.json["rejected_by_reason"] == {"missing or unusable reference or mask": 1}
    assert list(by_id(Store.open(tmp_path / "s"))) == ["a.png"]
