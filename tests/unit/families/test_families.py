"""Each family against diffusers' own pipeline, with tiny random parts: the pipeline is the oracle, not our reading of it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from torch import nn

from bucketline.families import vaes
from bucketline.families.chroma import Chroma
from bucketline.families.family import Family, Padding, StoreFacts
from bucketline.families.registry import FAMILIES, family_of_pipeline
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import Embedding, TextSettings
from bucketline.ingest.encoders.text_encoders import load_caption_encoder
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.loader import Batch
from bucketline.loader.batch import LatentScale, RecordedScale
from bucketline.train.config import Precision, TrainConfig
from bucketline.train.images import DrawingBatch, draw_latents
from bucketline.train.lora import ADAPTER, Layers, add_adapters, layers_by_word
from bucketline.train.noise import NoiseSchedule, Prep, load_schedule, squared_error
from bucketline.train.optim import Average
from bucketline.train.step import Training
from tests import families_page
from tests.commands import ROOT
from tests.family_models import FORMS, PAIR_FORMS, open_pipeline, tiny_model
from tests.unit.families.forms import EVERY_FORM, TEXTS, batch_of_lengths, facts_for, predicted, write_form
from tests.unit.families.oracle import Recorded, batch_of, differences, one_step, timesteps_of
from tests.unit.train.tiny_run import config, load

CPU = torch.device("cpu")
LONG = "a red cat and a blue dog of the house " * 60  # longer than any pipeline's call takes by default
CAPTIONS = ("a red cat", LONG, "", "一只红色的猫在房子里", "🐱 a cat 🏠")
KINDS = ("short", "long", "empty", "Chinese", "emoji", "four")
STEPS = 3  # of an image


class Made(NamedTuple):
    """A family's tiny pipeline, and what packing and training make of its folder."""

    pipeline: Any
    folder: Path
    encoder: Any
    vae: VaeEncoder
    family: Family  # with the model's own configuration
    size: tuple[int, int]  # px, height first
    asked: dict[str, Any]  # of the pipeline's call
    num_tokens: int | None  # that the pipeline pads captions to

    @property
    def model(self) -> Any:
        return getattr(self.pipeline, self.family.folder)


@pytest.fixture(scope="module")
def made(form: str, written: Path) -> Made:
    model = open_model(str(written))
    encoder = load_caption_encoder(model, CPU, TextSettings(stored_dtype="F32"))
    vae = VaeEncoder(model, CPU, "F32")
    columns = {column.name: column.shape[-1] for column in (*encoder.columns.tokens, *encoder.columns.fixed)}
    height, width = (side // vae.downscale for side in FORMS[form].size)
    facts = StoreFacts(
        latent_channels=vae.latent_channels,
        text=columns,
        shows_padding=encoder.padding is Padding.MAX_LENGTH,
        latent_sizes=(("train/oracle", height, width),),
    )
    family, _ = load(written, facts, seed=0)
    return Made(
        open_pipeline(written, form), written, encoder, vae, family, FORMS[form].size, FORMS[form].call, FORMS[form].num_tokens
    )


def latents_of(made: Made, count: int) -> torch.Tensor:
    height, width = (side // made.vae.downscale for side in made.size)
    return torch.zeros(count, made.vae.latent_channels, height, width)


def recorded_and_ours(
    made: Made, captions: tuple[str, ...], *, learns: bool = False
) -> tuple[Recorded, tuple[torch.Tensor, torch.Tensor, Batch]]:
    """Run the pipeline for one step; return what it did, and its latents, noise level and captions as the trainer has them."""
    height, width = made.size
    recorded = one_step(made.pipeline, captions, height=height, width=width, learns=learns, **made.asked)
    latents = latents_of(made, len(captions))
    noisy = made.family.unpacked(recorded.sample, *latents.shape[2:])
    embeddings = made.encoder.encode(list(captions))
    seen = recorded.arguments.get("encoder_hidden_states")
    if made.num_tokens is not None:
        num_tokens = made.num_tokens
    elif isinstance(seen, torch.Tensor) and seen.ndim >= 3:
        num_tokens = seen.shape[1]
    else:
        num_tokens = max(len(one.tokens) for one in embeddings)
    batch = batch_of(embeddings, num_tokens, made.size, latents)
    made.family.guidance = made.asked.get("guidance_scale", 1.0)
    return recorded, (noisy, timesteps_of(made.pipeline, recorded, len(captions)), batch)


@pytest.mark.parametrize("captions", [*((one,) for one in CAPTIONS), CAPTIONS[:4]], ids=KINDS)
def test_the_model_is_given_what_its_pipeline_gives_it_and_its_output_is_taken_alike(
    made: Made, captions: tuple[str, ...]
) -> None:
    """Captions, packing, positions, masks, noise level and guidance to the bit; sign, scale and packing of the output."""
    if made.encoder.provenance["empty_caption"] == "zeros":
        captions = tuple(caption or "a house" for caption in captions)  # the pipeline gives zeros for no negative prompt only
    if "empty tokens" in made.family.results:
        captions = tuple(caption or "a house" for caption in captions)  # tried below, as the negative prompt
    with torch.no_grad():
        recorded, given = recorded_and_ours(made, captions)
        arguments, noisy = made.family.arguments(*given), given[0]
        output = recorded.output[0] if isinstance(recorded.output, tuple) else recorded.output.sample
        _forget_padding(made, captions, recorded.arguments)
        assert not differences(arguments, recorded.arguments)
        own = made.model(**arguments, return_dict=False)[0]
        for one, other in zip(own, output, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        wanted = made.family.unpacked(recorded.prediction, *noisy.shape[2:])
        assert torch.equal(made.family.answer(output, noisy), wanted)


@torch.no_grad()
def test_a_row_of_a_padded_batch_is_predicted_as_the_pipeline_predicts_its_caption_alone(made: Made) -> None:
    """A model may take padding for positions, and images are mostly drawn of one prompt."""
    _, model = load(made.folder, made.family.store, seed=0)
    wanted, noisy, timesteps = [], [], []
    for text in TEXTS:
        recorded, (own, timestep, _) = recorded_and_ours(made, (text,))
        noisy.append(own)
        timesteps.append(timestep)
        wanted.append(made.family.unpacked(recorded.prediction, *own.shape[2:]))
    embeddings = made.encoder.encode(list(TEXTS))
    more = 5 if made.encoder.padding is Padding.VALID else 0
    longest = max(len(one.tokens) for one in embeddings) + more
    batch = batch_of(embeddings, longest, made.size, latents_of(made, len(TEXTS)))
    found = made.family.predict(model, torch.cat(noisy), torch.cat(timesteps), batch)
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_empty_caption_is_the_pipelines_negative_prompt_where_that_has_no_template(made: Made) -> None:
    results = made.family.results
    if "empty tokens" not in results:
        assert made.family.cleaned(made.pipeline, [""]) == made.family.cleaned(made.pipeline, ["", "a"])[:1]
        return
    made_of = dict(zip(results, made.pipeline.encode_prompt(["a red cat"], do_classifier_free_guidance=True), strict=True))
    wanted = made_of["empty tokens"][0][made_of["empty mask"][0].bool()]
    for captions in ([""], ["a red cat", "", "a dog"]):
        found = made.encoder.encode(captions)[captions.index("")].tokens
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def _forget_padding(made: Made, captions: tuple[str, ...], theirs: dict[str, Any]) -> None:
    """Zero the embeddings of padding that the model masks, which are not stored; its output must not depend on them.

    What a pipeline puts after its padding comes before it.
    """
    seen, mask = theirs.get("encoder_hidden_states"), theirs.get("encoder_attention_mask")
    is_padded = made.encoder.padding is Padding.VALID and made.num_tokens is None
    if is_padded and isinstance(seen, torch.Tensor) and seen.ndim >= 3:
        if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
            order = mask.logical_not().long().argsort(dim=1, stable=True)
            theirs["encoder_attention_mask"] = mask.gather(1, order)
            seen = torch.stack([own[places] for own, places in zip(seen, order, strict=True)])
        theirs["encoder_hidden_states"] = seen = seen.clone()
        for n, one in enumerate(made.encoder.encode(list(captions))):
            seen[n, len(one.tokens) :] = 0


def test_a_training_step_is_that_of_a_plain_loop_with_the_pipelines_own_call(made: Made) -> None:
    trained = list(made.model.requires_grad_(requires_grad=True).parameters())
    recorded, (noisy, timesteps, batch) = recorded_and_ours(made, TEXTS, learns=True)
    lengths = batch.token_mask.sum(dim=1).tolist()
    assert (lengths[0] != lengths[1]) is (made.encoder.padding is Padding.VALID)  # others see all positions
    target = torch.randn(noisy.shape, generator=torch.Generator().manual_seed(3))
    plain = (made.family.unpacked(recorded.prediction, *noisy.shape[2:]) - target).square().mean()
    wanted = torch.autograd.grad(plain, trained, allow_unused=True)
    loss = squared_error(made.family.predict(made.model, noisy, timesteps, batch), target).mean()
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    pairs = [pair for pair in zip(found, wanted, strict=True) if all(isinstance(one, torch.Tensor) for one in pair)]
    assert len(pairs) > len(trained) // 2
    norms = [float(torch.nn.utils.get_total_norm(grads)) for grads in zip(*pairs, strict=True)]
    assert norms[0] > 0
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@torch.no_grad()
def test_latents_are_the_vaes_own_and_scaled_as_the_pipeline_undoes_it(made: Made) -> None:
    height, width = made.size
    pixels = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    stored, is_finite = made.vae.encode(pixels.numpy())
    assert bool(is_finite.all())
    images = pixels.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1.0
    vae = made.pipeline.vae
    has_frames = "Qwen" in type(vae).__name__
    if vae.config.get("in_channels") == 4:
        images = torch.cat([images, torch.ones_like(images[:, :1])], dim=1)  # opaque
    encoded = vae.encode(images[:, :, None] if has_frames else images)
    mode = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
    torch.testing.assert_close(stored, mode[:, :, 0] if has_frames else mode, rtol=1e-5, atol=1e-6)

    recorded = one_step(made.pipeline, ("a red cat",), decodes=True, height=height, width=width, **made.asked)
    scale = LatentScale.of(made.family.scaling(made.vae.provenance), CPU)
    of_loader = RecordedScale(encoders={"vae": made.vae.provenance, "text_encoder": {"family": made.family.name}}).on(CPU)
    assert torch.equal(of_loader.apply(stored), scale.apply(stored))
    ended = made.family.unpacked(recorded.stepped, *stored.shape[2:])
    undone = recorded.decoded[:, :, 0] if has_frames else recorded.decoded
    torch.testing.assert_close(scale.invert(ended), undone.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale.apply(scale.invert(ended)), ended, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # ERNIE-Image's pipeline hands a tensor to numpy
def test_an_image_drawn_in_training_is_the_one_that_the_pipeline_draws_from_the_text(made: Made) -> None:
    """From stored embeddings, with the same noise, steps and guidance, and the negative prompt if the pipeline takes one."""
    family, (height, width) = made.family, made.size
    training = training_of(made)
    count = family.most_drawn or 2
    captions, others = ("a red cat", "a blue dog of the house")[:count], ("the house", "a dog")[:count]
    takes_negative = "negative_prompt" in inspect.signature(type(made.pipeline).__call__).parameters
    # negative prompts that are not empty are encoded as captions are, which these pipelines put into a template
    negative = "a cat of the house" if takes_negative and "empty tokens" not in family.results else ""
    latents = latents_of(made, count)
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(9))

    def batch(texts: tuple[str, ...]) -> Batch:
        embeddings = made.encoder.encode(list(texts))
        return batch_of(embeddings, max(len(one.tokens) for one in embeddings), made.size, latents)

    is_guided = family.is_guided(3.0)
    empty = batch((negative,) * count) if is_guided else None
    one = DrawingBatch(batch=batch(captions), negative=empty, noise=noise, guidance=3.0, entries=())
    drawn = training.prep.scale.invert(draw_latents(training, made.pipeline.vae, one))
    found = (vaes.vae_decode(made.pipeline.vae, drawn) / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)

    pipeline = made.pipeline
    made.model.eval()
    if isinstance(training.prep.schedule, NoiseSchedule):
        changed = {"clip_sample": False, "set_alpha_to_one": True, "timestep_spacing": "trailing", "steps_offset": 1}
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, **changed)
    else:
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(training.prep.schedule.config)
    guidance = 3.0 if is_guided or family.is_told_guidance else family.no_guidance
    asked = {**made.asked, family.guidance_argument: guidance, "num_inference_steps": STEPS, "height": height, "width": width}
    more = {"negative_prompt": [negative] * count} if is_guided and takes_negative else {}

    def by_text(texts: tuple[str, ...]) -> torch.Tensor:
        given = {**asked, **more, "latents": family.packed(noise), "prompt": list(texts), "output_type": "np"}
        return torch.from_numpy(pipeline(**given).images)[..., :3]  # without the opacity

    expected, other = by_text(captions), by_text(others)
    assert found.shape == expected.shape == (count, height, width, 3)
    error, of_text = ((expected - one).abs().max() for one in (found, other))
    assert error < 0.01 * of_text, (float(error), float(of_text))


def training_of(made: Made) -> Training:
    schedule = load_schedule(made.folder, CPU, patch_size=made.family.patch_size)
    asked: dict[str, Any] = {
        "store": (made.folder,),
        "model": made.folder,
        "output_dir": made.folder,
        "batch_size": "1",
        "max_steps": 1,
    }
    return Training(
        config=TrainConfig(**asked, image_steps=STEPS),
        family=made.family,
        model=made.model,
        optimizer=torch.optim.SGD(made.model.parameters()),
        average=Average(made.model, 0.9),
        prep=Prep(
            scale=LatentScale.of(made.family.scaling(made.vae.provenance), CPU),
            schedule=schedule,
        ),
        autocast=torch.autocast("cpu", torch.bfloat16, enabled=False),
    )


def test_every_family_is_tried() -> None:
    tried: set[Any] = {family_of_pipeline(form.pipeline) for form in (FORMS | PAIR_FORMS).values()}
    assert {family for family in FAMILIES if family.parts} <= tried


def test_the_page_has_the_tables_of_all_families() -> None:
    page = families_page.PAGE.read_text(encoding="utf-8")
    assert "\n".join(families_page.table()) in page
    assert "\n".join(families_page.table_of_references()) in page


NAMES_OF_FILES = ("ingest/importers/", "store/", "bench/", "train/presets/")
"""The rooms where other tools' file names and published configurations stand, which are none of the families'."""


def test_no_pipeline_or_model_of_a_family_is_named_outside_its_file() -> None:
    kinds = {kind for family in FAMILIES for kind in (*family.pipelines, family.model_class)}
    pattern = re.compile(rf"[\"'](?:{'|'.join(sorted(kinds))})[\"']")
    own = {family.__module__.rpartition(".")[2] for family in FAMILIES}
    found = []
    for room in ("bucketline", "ingest", "loader", "train", "store"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if (path.parent.name == "families" and path.stem in own) or name.startswith(NAMES_OF_FILES):
                continue
            text = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            found += [f"{name}: {match}" for match in pattern.findall(text)]
    assert not found


# Chroma's mask with gradient checkpointing, which diffusers leaves out of the single blocks.


def test_gradient_checkpointing_keeps_the_mask_of_padding() -> None:
    torch.manual_seed(0)
    model = tiny_model("chroma").train()
    family = Chroma({}, StoreFacts(latent_channels=4, text={"tokens": 24}))
    noisy = torch.randn(2, 4, 8, 12)
    batch = batch_of([Embedding(tokens=torch.randn(n, 24)) for n in (4, 9)], 9, (16, 24), noisy)
    losses = []
    for step in (lambda: None, lambda: family.prepare(model), model.enable_gradient_checkpointing):
        step()
        loss = family.predict(model, noisy, torch.tensor([500.0, 300.0]), batch).square().mean()
        losses.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for other in losses[1:]:
        for one, two in zip(losses[0], other, strict=True):
            assert torch.equal(one, two)


# Padding after a caption changes no prediction, whatever its length: a batch is as long as the store's longest caption.

LENGTHS = (5, 9, 2)
MOST = 7e-7  # of a prediction's largest value


def stores_own_tokens(form: str) -> bool:
    """Return whether a form's captions are stored without padding; those of others all have the same number of tokens."""
    family = family_of_pipeline(FORMS[form].pipeline)
    return family is not None and family.padding is Padding.VALID


@torch.no_grad()
@pytest.mark.parametrize("padded", [*filter(stores_own_tokens, FORMS)])  # `form` would mark most of them as slow
def test_predictions_do_not_depend_on_padding_beyond_a_caption(padded: str, tmp_path: Path) -> None:
    folder = write_form(tmp_path, padded)
    family, model = load(folder, facts_for(folder), 0)
    wanted = [
        predicted(family, model, batch_of_lengths(family, [length], length, first=row)) for row, length in enumerate(LENGTHS)
    ]
    for longest in (max(LENGTHS), 40):
        found = predicted(family, model, batch_of_lengths(family, LENGTHS, longest))
        error = (found - torch.cat(wanted)).abs().max() / torch.cat(wanted).abs().max()
        assert float(error) <= MOST, longest


# The dtypes of a model in 16 bits: what diffusers keeps in 32 bits stays so, however the model is made.


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name.replace(".base_layer", ""): one.dtype for name, one in model.named_parameters() if ADAPTER not in name}


@pytest.mark.parametrize("each", EVERY_FORM)  # `form` would mark most of them as slow
def test_a_model_in_16_bits_has_the_dtypes_that_diffusers_gives_it(each: str, tmp_path: Path) -> None:
    """Read, for another rank to fill, at random, and with adapters."""
    folder = write_form(tmp_path, each)
    family, read = load(folder, facts_for(folder), 0, dtype=torch.bfloat16)
    part = folder / family.folder
    wanted = dtypes(getattr(diffusers, family.model_class).from_pretrained(part, torch_dtype=torch.bfloat16))
    _, on_meta = load(folder, facts_for(folder), 0, dtype=torch.bfloat16, on_meta=True)
    assert dtypes(read) == dtypes(on_meta) == wanted
    add_adapters(read, family, config(tmp_path, lora_rank=2, precision=Precision.BF16))
    assert dtypes(read) == wanted
    next(part.glob("*.safetensors")).unlink()
    _, at_random = load(folder, facts_for(folder), 0, dtype=torch.bfloat16)
    assert dtypes(at_random) == wanted


# `--lora-targets attention` and `attention+mlp` against the classes of a model's modules, whatever their layers are called.

FEED_FORWARD = re.compile(r"FeedForward|MLP|Mlp|SwiGLU|GLUMB|MOE")
# feed-forward layers of a block that has no module for them
BARE = re.compile(r"single_transformer_blocks\.\d+\.proj_(mlp|out)|blocks\.\d+\.(gate|up|down)_proj")
IN_A_BLOCK = re.compile(r"\.\d+\.")


def layers_in(model: torch.nn.Module, *, attends: bool) -> set[str]:
    """Return the linear layers, and convolutions over all channels, of the attention modules, or else of feed-forward ones."""
    found = set()
    for name, module in model.named_modules():
        is_attention = isinstance(module, Attention | AttentionModuleMixin) or "Attention" in type(module).__name__
        if is_attention if attends else FEED_FORWARD.search(type(module).__name__):
            for own, layer in module.named_modules(prefix=name):
                if isinstance(layer, torch.nn.Linear) or (isinstance(layer, torch.nn.Conv2d) and layer.groups == 1):
                    found.add(own)
    return {name for name in found if IN_A_BLOCK.search(name)}  # PRX has a network for the timestep, too


@pytest.mark.parametrize("name", FORMS)
def test_the_words_for_layers_mean_all_of_their_modules_and_no_others(name: str) -> None:
    model = tiny_model(name)
    attention, feed_forward = (layers_in(model, attends=attends) for attends in (True, False))
    feed_forward |= {own for own, _ in model.named_modules() if BARE.fullmatch(own)}
    assert attention
    assert feed_forward
    assert set(layers_by_word(model, Layers.ATTENTION)) == attention
    assert set(layers_by_word(model, Layers.ATTENTION_MLP)) == attention | feed_forward
    assert set(layers_by_word(model, Layers.ALL)) >= attention | feed_forward
