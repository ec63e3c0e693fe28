"""References against diffusers' own pipelines, called row by row with images: sizes, the model's call, a step, drawing."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor

from bucketline.families.family import Family, Padding, StandIn, StoreFacts
from bucketline.families.references import References
from bucketline.families.registry import FAMILIES, family_of_pipeline
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import Embedding
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.loader.batch import RecordedScale, as_fields
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from bucketline.train.checkpoint import layout_of
from bucketline.train.images import DrawingBatch, draw_latents
from bucketline.train.lora import Layers, add_adapters
from bucketline.train.model import checked, open_model_config
from bucketline.train.noise import squared_error
from tests.commands import call
from tests.family_models import FORMS, PAIR_FORMS, open_pipeline, tiny_model, write_pipeline
from tests.unit.families.oracle import Recorded, batch_of, differences, one_step, timesteps_of
from tests.unit.families.test_families import STEPS, Made, training_of
from tests.unit.train.tiny_run import config

CPU = torch.device("cpu")
AREA_PX = 96**2  # of references here, in place of 1024²
SIZES = ((64, 96), (96, 64), (96, 96))  # px of each reference, height first
CAPTIONS = ("a red cat", "a blue dog of the house and a green cat")
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # how many references, and what the transformer has otherwise
    "flux_kontext": ((0, 1), {}),
    "flux2": ((0, 1, 2, 3), {}),
    "flux2 klein": ((0, 1, 2, 3), {}),
    "qwenimage_edit": ((1,), {}),
    "qwenimage_edit_plus": ((0, 1, 2, 3), {}),
    "qwenimage_edit_plus 2511": ((0, 1, 2, 3), {"zero_cond_t": True}),
    "qwenimage21": ((0, 1, 2, 3), {}),
    "qwenimage21 not causal": ((1, 2), {"causal_condition": False}),
}
QUICK = {("flux_kontext", 1), ("flux2", 2), ("qwenimage_edit", 1), ("qwenimage_edit_plus 2511", 3), ("qwenimage21", 2)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the pipeline did of one row: its first step, its text, and the latents of its references."""

    recorded: Recorded
    text: Embedding
    is_image: Tensor | None  # [T] bool, of tokens
    references: list[Tensor]  # [C, h, w] each, as the VAE's mode


@dataclass(kw_only=True)
class Pairs:
    """A family's tiny pipeline, and rows of a caption and references for it."""

    pipeline: Any
    folder: Path
    vae: VaeEncoder
    family: Family
    size: tuple[int, int]  # px of the target, height first
    asked: dict[str, Any]
    count: int  # references of a row
    empty: dict[int, Embedding] = field(default_factory=dict)

    @property
    def images(self) -> list[list[Image.Image]]:
        """The references of each row, all of other pixels."""
        draws = np.random.default_rng(5)
        return [
            [Image.fromarray(draws.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES[: self.count]]
            for _ in CAPTIONS
        ]

    @property
    def noise(self) -> Tensor:
        sides = [side // self.vae.downscale for side in self.size]
        return torch.randn(len(CAPTIONS), 4, *sides, generator=torch.Generator().manual_seed(9))

    def call(self, row: int) -> tuple[Any, dict[str, Any]]:
        """Return the pipeline that draws a row, and the arguments of its call; without images, Edit-Plus is Qwen-Image."""
        height, width = self.size
        given = {**self.asked, "height": height, "width": width, "latents": self.family.packed(self.noise[row : row + 1])}
        if self.family.name == "flux_kontext":
            given["max_area"] = height * width
        if self.family.name == "qwenimage21":
            given["output_resolution"] = 96
        pipeline, images = self.pipeline, self.images[row]
        if images:
            given["image"] = images[0] if self.family.references == References(most=1, least=1, text_sees=True) else images
        elif self.family.name == "qwenimage_edit_plus":
            parts = {name: part for name, part in pipeline.components.items() if name != "processor"}
            pipeline, encode = diffusers.QwenImagePipeline(**parts), pipeline.encode_prompt
            pipeline.encode_prompt = encode
        return pipeline, given

    def row(self, number: int, *, caption: str | None = None, learns: bool = False) -> Row:
        pipeline, given = self.call(number)
        encode, encode_image = pipeline.encode_prompt, getattr(pipeline, "_encode_vae_image", None)
        texts: list[Any] = []
        references: list[Tensor] = []

        def record_text(*args: Any, **more: Any) -> Any:
            with torch.no_grad():
                texts.append(encode(*args, **more))
            return texts[-1]

        def record_image(image: Tensor, generator: Any) -> Tensor:
            """Encode as the pipeline does, and hand on what a batch has of the same latents: they may differ in a last bit."""
            with torch.no_grad():
                wanted = encode_image(image, generator)  # type: ignore[misc]
                mode = pipeline.vae.encode(image).latent_dist.mode()
            references.append(mode[0, :, 0] if mode.ndim == 5 else mode[0])
            scaled = self.scale.on(CPU).apply(references[-1][None])
            own = self.family.packed(scaled) if self.family.packs_channels else scaled
            own = own[:, :, None] if mode.ndim == 5 else own
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)
            return own

        pipeline.encode_prompt, pipeline._encode_vae_image = record_text, record_image
        try:
            recorded = one_step(pipeline, [CAPTIONS[number] if caption is None else caption], learns=learns, **given)
        finally:
            del pipeline.encode_prompt, pipeline._encode_vae_image
        return Row(recorded=recorded, references=references, **self._text(texts[0]))

    def _text(self, answer: tuple[Any, ...]) -> dict[str, Any]:
        found = dict(zip(self.family.results, answer, strict=False))
        fixed = {"pooled": found["pooled"][0]} if "pooled" in found else {}
        is_image = answer[2][0].bool() if self.family.name == "qwenimage21" else None
        return {"text": Embedding(tokens=found["tokens"][0], fixed=fixed), "is_image": is_image}

    @property
    def scale(self) -> RecordedScale:
        return RecordedScale(encoders={"vae": self.vae.provenance, "text_encoder": {"family": self.family.name}})

    def batch(self, rows: Sequence[Row], num_tokens: int = 0) -> Batch:
        """Return rows as the loader delivers them, their captions padded to `num_tokens`, or the longest one."""
        texts = [row.text for row in rows]
        longest = max(num_tokens, *(len(text.tokens) for text in texts))
        references = {
            f"reference/{n}": torch.stack(each) for n, each in enumerate(zip(*(row.references for row in rows), strict=True))
        }
        plain = batch_of(texts, longest, self.size, self.noise[: len(rows)])
        seen = torch.zeros(len(rows), longest, dtype=torch.bool)
        for own, row in zip(seen, rows, strict=True):
            if row.is_image is not None:
                own[: len(row.is_image)] = row.is_image
        sees = self.family.references is not None and self.family.references.text_sees
        return replace(
            plain, columns={**plain.columns, **references}, recorded_scale=self.scale, image_tokens=seen if sees else None
        )


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(case: str, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    form = case.removesuffix(" 2511").removesuffix(" not causal")
    folder = write_pipeline(tmp_path_factory.mktemp("pairs") / form.replace(" ", "-"), form)
    pipeline = open_pipeline(folder, form)
    torch.manual_seed(3)
    pipeline.register_modules(transformer=tiny_model(form, **CASES[case][1]))
    kind, asked = family_of_pipeline((FORMS | PAIR_FORMS)[form].pipeline), (FORMS | PAIR_FORMS)[form]
    assert kind is not None
    vae, config = VaeEncoder(open_model(str(folder)), CPU, "F32"), dict(pipeline.transformer.config)
    height, width = (side // vae.downscale for side in asked.size)
    facts = StoreFacts(
        latent_channels=4,
        text={"tokens": 0},
        shows_padding=kind.padding is Padding.MAX_LENGTH,
        latent_sizes=(("train/pairs", height, width),),
    )
    family = kind(config, facts).with_guidance(asked.call.get("guidance_scale", 1.0))
    return Pairs(pipeline=pipeline, folder=folder, vae=vae, family=family, size=asked.size, asked=asked.call, count=0)


@pytest.fixture
def pairs(made: Pairs, count: int, monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """The pipeline with references of few pixels, `count` of them a row."""
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        plain = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, plain=plain: plain(area * AREA_PX / 1024**2, ratio)
        )
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(64, 112), (96, 96), (112, 64)])
    kind, own = type(made.family), made.family.references
    if own is not None and own.text_area_px is not None:
        monkeypatch.setattr(kind, "references", replace(own, text_area_px=own.text_area_px * AREA_PX // 1024**2))
    return replace(made, count=count)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "count" in metafunc.fixturenames:
        pairs = [
            pytest.param(case, count, marks=() if (case, count) in QUICK else pytest.mark.slow)
            for case, (counts, _) in CASES.items()
            for count in counts
        ]
        metafunc.parametrize(("case", "count"), pairs, scope="module")


def row_of(arguments: dict[str, Any], row: int, length: int, longest: int) -> dict[str, Any]:
    """Return a batch's arguments of one row, without its padding."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            own = value if name in ("img_ids", "txt_ids") and value.ndim == 2 else value[row : row + 1]
            if name == "img_mask":
                own = torch.cat([own[:, :length], own[:, longest:]], dim=1)
            elif name.startswith("encoder_hidden_states"):
                own = own[:, :length]
            found[name] = own
        else:
            found[name] = value[row : row + 1] if isinstance(value, list) else value
    return found


@torch.no_grad()
def test_the_model_is_given_what_its_pipeline_gives_it_row_by_row(pairs: Pairs) -> None:
    """Latents of target and references in their order, positions, masks, shapes, timestep, text: to the bit, by name."""
    family, rows = pairs.family, [pairs.row(number) for number in range(len(CAPTIONS))]
    lengths = [len(row.text.tokens) for row in rows]
    assert (lengths[0] != lengths[1]) is (family.padding is Padding.VALID)
    longest = max(lengths) + 3 * (family.padding is Padding.VALID)
    assert all(len(row.references) == pairs.count for row in rows)
    noisy = torch.cat([family.unpacked(row.recorded.sample, *pairs.noise.shape[2:]) for row in rows])
    timesteps = timesteps_of(pairs.pipeline, rows[0].recorded, len(rows))
    arguments = family.arguments(noisy, timesteps, pairs.batch(rows, longest))
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        assert not differences(row_of(arguments, number, length, longest), row.recorded.arguments), number
        alone = family.arguments(noisy[number : number + 1], timesteps[:1], pairs.batch([row]))
        assert not differences(alone, row.recorded.arguments), number


def assert_same_step(pairs: Pairs, rows: Sequence[Row], batch: Batch) -> None:
    """Compare a batch's predictions, loss and gradient with those of a plain loop over what the pipeline did of each row."""
    family, shape = pairs.family, pairs.noise.shape
    trained = list(pairs.pipeline.transformer.parameters())
    target = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    wanted = torch.cat([family.unpacked(row.recorded.prediction, *shape[2:]) for row in rows])
    plain = torch.stack([(one - other).square().mean() for one, other in zip(wanted, target, strict=True)]).mean()
    grads = torch.autograd.grad(plain, trained, allow_unused=True)

    own = copy.deepcopy(pairs.pipeline.transformer)
    family.prepare(own)
    noisy = torch.cat([family.unpacked(row.recorded.sample, *shape[2:]) for row in rows])
    timesteps = timesteps_of(pairs.pipeline, rows[0].recorded, len(rows))
    found = family.predict(own, noisy, timesteps, batch)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    loss = squared_error(found, target).mean()
    own_grads = torch.autograd.grad(loss, list(own.parameters()), allow_unused=True)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    both = [pair for pair in zip(own_grads, grads, strict=True) if all(one is not None for one in pair)]
    assert len(both) > len(trained) // 2
    norms = [float(torch.nn.utils.get_total_norm(each)) for each in zip(*both, strict=True)]
    assert norms[0] > 0
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for role in (role for role in batch.columns if role != "target"):  # each one counts
        other = replace(batch, columns={**batch.columns, role: -batch.columns[role]})
        changed = family.predict(own, noisy, timesteps, other)
        assert (changed - found).abs().max() > 100 * (found - wanted).abs().max(), role


def test_a_step_is_that_of_a_plain_loop_over_the_pipelines_rows(pairs: Pairs) -> None:
    pairs.pipeline.transformer.requires_grad_(requires_grad=True)
    rows = [pairs.row(number, learns=True) for number in range(len(CAPTIONS))]
    longest = max(len(row.text.tokens) for row in rows) + 3 * (pairs.family.padding is Padding.VALID)
    assert_same_step(pairs, rows, pairs.batch(rows, longest))


def test_a_packed_folder_of_pairs_is_what_the_pipeline_makes_of_its_images(pairs: Pairs, tmp_path: Path) -> None:
    """From files by `ingest pack` and the loader to a step: text and references to the bit, loss and gradient."""
    height, width = pairs.size
    for number, (caption, references) in enumerate(zip(CAPTIONS, pairs.images, strict=True)):
        for folder, image in zip(
            ("target", "0", "1", "2"), (Image.new("RGB", (2 * width, 2 * height)), *references), strict=False
        ):
            (tmp_path / folder).mkdir(exist_ok=True)
            image.save(tmp_path / folder / f"{number}.png")
        (tmp_path / "target" / f"{number}.txt").write_text(caption, encoding="utf-8")
    folders = [str(number) for number in range(pairs.count)]
    more = f"references = {folders}\nreferences_area = {math.isqrt(AREA_PX)}\n" if folders else ""
    (tmp_path / "pairs.toml").write_text(f'[source]\npath = "target"\n{more}', encoding="utf-8")
    store, options = (
        tmp_path / "s.store",
        ("--grid", f"{height}x{width}", "--min-size-px", 8, "--dtype", "fp32", "--batch-size", 1),
    )
    call("ingest", "pack", tmp_path / "pairs.toml", store, "--model", pairs.folder, *options).done()

    with Loader([Store.open(store)], LoaderConfig(batch_size=len(CAPTIONS), split="train")) as loader:
        batch = next(iter(loader))
    order = [
        [sample_digest(f"{number}.png") for number in range(len(CAPTIONS))].index(bytes(own.tolist())) for own in batch.ids
    ]
    back = torch.tensor(order).argsort()
    batch = replace(batch, **as_fields({name: tensor[back] for name, tensor in batch.by_name().items()}))
    pairs.pipeline.transformer.requires_grad_(requires_grad=True)
    rows = [pairs.row(number, learns=True) for number in range(len(CAPTIONS))]
    wanted = pairs.batch(rows, batch.tokens.shape[1])
    assert torch.equal(batch.token_mask, wanted.token_mask)
    assert torch.equal(batch.tokens, wanted.tokens), float((batch.tokens - wanted.tokens).abs().max())
    if pairs.family.name == "qwenimage21" and pairs.count:
        assert batch.image_tokens is not None
        assert wanted.image_tokens is not None
        assert torch.equal(batch.image_tokens, wanted.image_tokens)
    assert len(batch.references) == pairs.count
    for found, other in zip(batch.references, wanted.references, strict=True):
        assert torch.equal(found, other), float((found - other).abs().max())
    assert_same_step(pairs, rows, batch)


@torch.no_grad()
def test_an_image_drawn_in_training_is_the_one_that_the_pipeline_draws_from_the_images(pairs: Pairs) -> None:
    """With guidance against the empty caption of the row's own images, if its pipeline is guided so."""
    family = pairs.family
    model = copy.deepcopy(pairs.pipeline.transformer)
    family.prepare(model)
    own = StandIn(transformer=model)
    training = training_of(Made(own, pairs.folder, None, pairs.vae, family, pairs.size, pairs.asked, None))
    rows = [pairs.row(number) for number in range(len(CAPTIONS))]
    is_guided = family.is_guided(3.0)
    takes_negative = "negative_prompt" in inspect.signature(type(pairs.pipeline).__call__).parameters
    empty = [pairs.row(number, caption="") for number in range(len(CAPTIONS))] if is_guided else []
    guidance = 3.0 if is_guided or family.is_told_guidance else family.no_guidance
    asked = {family.guidance_argument: guidance, "num_inference_steps": STEPS, "output_type": "latent"}
    asked |= {"negative_prompt": ""} if is_guided and takes_negative else {}
    wanted, drawn = [], []
    for number in range(len(CAPTIONS)):
        pipeline, more = pairs.call(number)
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(training.prep.schedule.config)
        found = one_step(pipeline, [CAPTIONS[number]], decodes=True, **{**more, **asked}).stepped
        wanted.append(family.unpacked(found, *pairs.noise.shape[2:]))
    at_most = family.most_drawn or len(rows)
    for at in range(0, len(rows), at_most):
        part = slice(at, at + at_most)
        negative = pairs.batch(empty[part]) if is_guided else None
        one = DrawingBatch(batch=pairs.batch(rows[part]), negative=negative, noise=pairs.noise[part], guidance=3.0, entries=())
        drawn.append(draw_latents(training, pairs.pipeline.vae, one))
    torch.testing.assert_close(torch.cat(drawn), torch.cat(wanted), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_adapters_in_the_pipeline_predict_from_references_what_the_trainers_model_predicts(
    pairs: Pairs, tmp_path: Path
) -> None:
    row, model = pairs.row(0), copy.deepcopy(pairs.pipeline.transformer)
    for name in (None, Layers.ALL):
        adapted = copy.deepcopy(model)
        add_adapters(adapted, pairs.family, config(tmp_path, lora_rank=2, lora_alpha=6.0, lora_targets=name))
        for own in (one for path, one in adapted.named_parameters() if "lora_B" in path):
            own.normal_(generator=torch.Generator().manual_seed(own.numel()))
        layout = layout_of(pairs.family, adapters=True)
        layout.write(folder := tmp_path / f"lora-{name}", layout.config(adapted), layout.tensors(adapted))
        noisy = pairs.family.unpacked(row.recorded.sample, *pairs.noise.shape[2:])
        given = (noisy, timesteps_of(pairs.pipeline, row.recorded, 1), pairs.batch([row]))
        wanted = pairs.family.predict(adapted, *given)
        pairs.pipeline.load_lora_weights(folder)
        try:
            found = pairs.family.unpacked(pairs.row(0).recorded.prediction, *noisy.shape[2:])
        finally:
            pairs.pipeline.unload_lora_weights()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert (pairs.family.predict(model, *given) - wanted).abs().max() > 1e-3


# Sizes: what the pipelines' own preprocessing hands to the VAE and the text encoder.


class EnoughError(Exception):
    """The pipeline has preprocessed its images."""


@dataclass(kw_only=True)
class Preprocessed:
    """What a pipeline hands on of an image."""

    text: Any = None  # what the text encoder sees, if it does
    vae: Any = None  # [1, 3, H, W] from -1 to 1, if need be with opacity and a frame


def preprocessed(kind: type[Family], image: Image.Image, **asked: Any) -> Preprocessed:
    """Call a published pipeline without its parts up to where it encodes a reference."""
    found = Preprocessed()
    transformer = StandIn(config=StandIn(in_channels=64, guidance_embeds=False))
    pipeline = kind.pipeline({"transformer": transformer})

    def see(*_args: Any, image: Any = None, **_more: Any) -> Any:
        found.text = image[0] if isinstance(image, list) else image
        tokens = torch.zeros(1, 1, 8)
        return (tokens, torch.zeros(1, 8), None) if kind.name == "flux_kontext" else (tokens, None, None)[: len(kind.results)]

    def encode(image: Tensor | None = None, images: Sequence[Tensor] = (), **_more: Any) -> Tensor:
        found.vae = images[0] if image is None else image
        raise EnoughError

    pipeline.encode_prompt, pipeline._encode_vae_image = see, encode
    if hasattr(pipeline, "prepare_image_latents"):
        pipeline.vae, pipeline.prepare_image_latents = StandIn(dtype=torch.float32), encode
    pipeline.check_inputs = lambda *_args, **_more: None
    with pytest.raises(EnoughError):
        pipeline(image=image, prompt="a cat", **asked)
    return found


OF_REFERENCES = [family for family in FAMILIES if family.references is not None]
SHAPES = [
    (64, 64),
    (65, 511),
    (640, 815),
    (480, 640),
    (700, 1000),
    (1000, 700),
    (1023, 1025),
    (1080, 1920),
    (1920, 1080),
    (1500, 333),
]


@pytest.mark.parametrize("kind", OF_REFERENCES, ids=lambda kind: kind.name)
def test_a_reference_is_resized_as_its_pipeline_does_pixel_for_pixel(kind: type[Family]) -> None:
    draws = np.random.default_rng(3)
    assert kind.references is not None
    for shape in (*SHAPES, *draws.integers(64, 1800, (3, 2)).tolist()):
        small = draws.integers(0, 256, (shape[0] // 8, shape[1] // 8, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
        found, fitted = preprocessed(kind, image), kind.references.fitted(image)
        pixels = (found.vae.squeeze(2) if found.vae.ndim == 5 else found.vae)[0].permute(1, 2, 0)
        wanted = ((pixels / 2 + 0.5) * 255).round().byte().numpy()
        if wanted.shape[2] == 4:
            assert (wanted[..., 3] == 255).all()
        assert (fitted.height, fitted.width) == kind.references.size(*shape) == wanted.shape[:2], shape
        assert np.array_equal(np.asarray(fitted), wanted[..., :3]), shape
        assert (found.text is not None) is kind.references.text_sees
        if found.text is not None:
            seen = kind.references.for_text(image, fitted)
            assert np.array_equal(np.asarray(seen), np.asarray(found.text)[..., :3]), shape


@pytest.mark.parametrize("kind", OF_REFERENCES, ids=lambda kind: kind.name)
def test_an_area_of_ones_own_is_kept_and_sides_stay_what_the_model_takes(kind: type[Family]) -> None:
    assert kind.references is not None
    draws = np.random.default_rng(4)
    assert kind.references.fitted(Image.new("RGB", (300, 200)), 128**2).size == kind.references.size(200, 300, 128**2)[::-1]
    for height, width in draws.integers(150, 3000, (300, 2)).tolist():
        for side in (256, 512, 1024):
            own = kind.references.size(height, width, side * side)
            assert all(one % 16 == 0 and one > 0 for one in own)
            assert own[0] * own[1] <= 1.5 * side * side
        assert kind.references.size(height, width) == kind.references.size(height, width, 1024**2)
    with pytest.raises(ValueError, match=r"a reference of 9000 by 2 px, height first, would be resized to \d+ by 0"):
        kind.references.size(9000, 2)


# Stores whose references do not suit a model are refused before a step, with both values.


def facts(*references: tuple[int, int], **more: Any) -> StoreFacts:
    return StoreFacts(
        latent_channels=4,
        text={"tokens": 16, "pooled": 8},
        latent_sizes=(("train/128x128", 16, 16),),
        reference_sizes=(("train/128x128", references),),
        **more,
    )


def refusals(form: str, store: StoreFacts) -> list[str]:
    kind = family_of_pipeline((FORMS | PAIR_FORMS)[form].pipeline)
    assert kind is not None
    unmet = [one for one in kind({"patch_size": 1}, store).expects() if not one.is_met]
    about = ("references", "reference 0", "reference 1", "text encoder", "encodes")
    return [
        f"{one.field} is {one.found}, expected {one.wanted}, since {one.because}"
        for one in unmet
        if any(word in one.field + one.because for word in about) and "padding" not in one.field
    ]


@pytest.mark.parametrize(
    ("form", "store", "said"),
    [
        (
            "flux",
            facts((16, 16)),
            "references in train/128x128 is 1, expected 0, since a model of FluxPipeline takes no references",
        ),
        ("flux_kontext", facts(*((16, 16),) * 2), "is 2, expected 0 to 1, since a model of FluxKontextPipeline takes 0 to 1"),
        ("flux2", facts(*((16, 16),) * 9), "references in train/128x128 is 9, expected 0 to 8"),
        (
            "flux2",
            facts((16, 16), (16, 15)),
            "expected a divisor of 16 and 15, since the latents of reference 1 in train/128x128",
        ),
        ("qwenimage_edit", facts(), "is 0, expected 1, since a model of QwenImageEditPipeline takes 1"),
        (
            "qwenimage_edit_plus",
            facts((16, 16)),
            "captions only, expected one that has seen the references, since QwenImageEdit",
        ),
        (
            "flux2",
            facts((16, 16), sees_images=True),
            "seen the references, expected one that has seen captions only, since Flux2",
        ),
        ("qwenimage21", facts((16, 16), sees_images=True), ""),
        ("qwenimage21", facts(), ""),  # such as an imported cache of captions
        ("qwenimage_edit_plus", facts(sees_images=True), ""),
        ("flux_kontext", facts((16, 16)), ""),
        ("qwenimage", facts(), ""),
    ],
)
def test_references_that_do_not_suit_a_model_are_refused_with_both_values(form: str, store: StoreFacts, said: str) -> None:
    found = refusals(form, store)
    assert len(found) == bool(said), found
    assert said in "".join(found)


@pytest.mark.parametrize(("form", "other"), [("qwenimage_edit_plus", "qwenimage"), ("flux_kontext", "flux")])
def test_a_model_without_an_index_is_of_the_family_that_encoded_the_stores_captions(
    form: str, other: str, tmp_path: Path
) -> None:
    model = tiny_model(form)
    model.save_pretrained(tmp_path / "transformer")
    store = StoreFacts(latent_channels=4, text={"tokens": 16 if form.startswith("qwen") else 24, "pooled": 8}, family=form)
    found = [checked(open_model_config(tmp_path), replace(store, family=name)).name for name in (form, other, "")]
    assert found == [form, other, other]
