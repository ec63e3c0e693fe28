"""`Batch.scaled`: the latents that a model is trained on, as diffusers and the trainer make them, whoever reads the store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from bucketline.errors import CorruptError, UsageError
from bucketline.families.family import Family
from bucketline.families.ideogram4 import Ideogram4
from bucketline.families.packing import pack
from bucketline.loader import Batch, LatentScale, Loader, LoaderConfig, TextForm
from bucketline.loader.batch import dequantised
from bucketline.loader.collate import buffers as dequantise_module
from bucketline.loader.plan.order import Purpose, normal
from bucketline.store import Axis, RowColumn, Store, StoreWriter
from bucketline.store.format.text import dequantise, quantise
from bucketline.train.noise import FlowSchedule, Prep
from tests.kit import POOLED_WIDTH, loud_tokens, make_store, quantised, samples_of
from tests.serving import serving, serving_here

CPU = torch.device("cpu")
ALL = LoaderConfig(batch_size=4, seed=3)
MEAN, STD = [0.5, -1.0, 2.0, 0.25], [1.5, 0.5, 3.0, 0.75]
NORM = {"mean": [n / 8 for n in range(16)], "std": [1 + n / 16 for n in range(16)], "eps": 1e-4}
VAES: dict[str, dict[str, Any]] = {
    "factor": {"scaling_factor": 0.18215},
    "shift": {"scaling_factor": 0.3611, "shift_factor": 0.1159},
    "channels": {"scaling_factor": 1.0, "latents_mean": MEAN, "latents_std": STD},
    "patches": {"scaling_factor": 1.0, "batch_norm": NORM},
}


def write(path: Path, vae: object, *axes: Axis, text: dict[str, Any] | None = None, channels: int = 4) -> Store:
    shape: tuple[int | Axis, ...] = (channels, *(axes or (Axis(name="height_px", step=8), Axis(name="width_px", step=8))))
    column = RowColumn(role="target", dtype="F16", shape=shape, encoder=None if vae is None else "vae")
    encoders = {**({} if vae is None else {"vae": vae}), **({} if text is None else {"text_encoder": text})}
    with StoreWriter(path, columns=[column], encoders=encoders) as writer:
        for number in range(8):
            latent = np.random.default_rng(number).normal(size=(channels, *((3,) if len(axes) == 3 else ()), 6, 8))
            writer.add(f"{path.name}/{number}.png", "train", {"target": latent.astype(np.float16)})
    return Store.open(path)


def first_of(loader: Loader) -> Batch:
    with loader:
        return next(iter(loader))


def by_diffusers(vae: dict[str, Any], latents: torch.Tensor) -> torch.Tensor:
    if "batch_norm" in vae:
        mean, std = (torch.tensor(NORM[name]).float() for name in ("mean", "std"))
        tokens = (pack(latents) - mean) / std
        count, _, height, width = latents.shape
        patches = tokens.reshape(count, height // 2, width // 2, -1, 2, 2)
        return patches.permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)
    if "latents_mean" in vae:
        mean, std = (
            torch.tensor(vae[name]).view(1, -1, *(1 for _ in latents.shape[2:])) for name in ("latents_mean", "latents_std")
        )
        return (latents - mean) / std
    return (latents - float(vae.get("shift_factor", 0.0))) * float(vae["scaling_factor"])


@pytest.mark.parametrize("name", VAES)
def test_latents_are_scaled_as_the_stores_vae_asks_for_and_back(tmp_path: Path, name: str) -> None:
    batch = first_of(Loader(write(tmp_path / "s", VAES[name]), ALL))
    found = batch.scaled()
    assert (found.dtype, found.device, found.shape) == (torch.float32, batch.device, batch.latents.shape)
    torch.testing.assert_close(found, by_diffusers(VAES[name], batch.latents.float()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(batch.scale.invert(found), batch.latents.float(), rtol=1e-5, atol=1e-5)
    assert batch.to("meta").scaled().device.type == "meta"


def test_videos_are_scaled_by_channel(tmp_path: Path) -> None:
    frames = Axis(name="frames", step=4, first=1)
    store = write(tmp_path / "s", VAES["channels"], frames, Axis(name="height_px", step=8), Axis(name="width_px", step=8))
    batch = first_of(Loader(store, ALL))
    assert batch.latents.shape == (4, 4, 3, 6, 8)
    torch.testing.assert_close(batch.scaled(), by_diffusers(VAES["channels"], batch.latents.float()))


def test_moments_are_drawn_by_the_keys_as_diffusers_draws_them(tmp_path: Path) -> None:
    store = write(tmp_path / "s", {**VAES["shift"], "latents": "moments"}, channels=8)
    with Loader(store, ALL) as loader:
        first, second = list(loader), list(loader)
    for batch in first:
        posterior = DiagonalGaussianDistribution(batch.latents.float())
        noise = normal(batch.keys, Purpose.POSTERIOR, (4, 6, 8))
        torch.testing.assert_close(batch.scaled(), by_diffusers(VAES["shift"], posterior.mean + posterior.std * noise))
        assert torch.equal(batch.scaled(), batch.scaled())
    drawn = [
        {row.numpy().tobytes(): own for batch in some for row, own in zip(batch.ids, batch.scaled(), strict=True)}
        for some in (first, second)
    ]
    assert drawn[0].keys() == drawn[1].keys()
    assert not any(torch.equal(own, drawn[1][row]) for row, own in drawn[0].items())
    ranks = [first_of(Loader(store, LoaderConfig(batch_size=2, seed=3), rank=rank, world_size=2)).scaled() for rank in (0, 1)]
    assert torch.equal(torch.cat(ranks), first[0].scaled())


@pytest.mark.parametrize("kind", ["mode", "sample", "moments"])
@pytest.mark.parametrize("name", VAES)
def test_the_trainers_latents_are_these_to_the_bit(tmp_path: Path, name: str, kind: str) -> None:
    store = write(tmp_path / "s", {**VAES[name], "latents": kind}, channels=8 if kind == "moments" else 4)
    batch = first_of(Loader(store, ALL))
    prep = Prep(
        scale=LatentScale.of(Family.scaling(VAES[name]), CPU),
        schedule=FlowSchedule(num_timesteps=1000, shift=1.0, patch_size=1),
    )
    noise = normal(batch.keys, Purpose.NOISE, (4, 6, 8))
    assert torch.equal(prep.for_training(batch).target, noise - batch.scaled())


def test_a_familys_own_scaling_is_that_of_the_store_whose_captions_it_encoded(tmp_path: Path) -> None:
    batch = first_of(Loader(write(tmp_path / "s", VAES["patches"], text={"family": "ideogram4"}), ALL))
    of_family = LatentScale.of(Ideogram4.scaling(VAES["patches"]), CPU)
    assert torch.equal(batch.scaled(), of_family.apply(batch.latents))
    assert not torch.equal(batch.scaled(), LatentScale.of(VAES["patches"], CPU).apply(batch.latents))


def test_a_mixture_and_a_service_scale_as_one_store_does(tmp_path: Path) -> None:
    vae = {**VAES["channels"], "latents": "moments"}
    stores = [write(tmp_path / name, vae, channels=8) for name in ("a", "b")]
    expected = first_of(Loader(stores, ALL)).scaled()
    assert torch.equal(expected, LatentScale.of(vae, CPU).apply(*_drawn(first_of(Loader(stores, ALL)))))
    with serving_here(tmp_path, *(store.path for store in stores)) as served:
        for given in (stores, None):
            assert torch.equal(first_of(Loader(given, ALL, service=f"unix:{served.socket}")).scaled(), expected)


def _drawn(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.latents, normal(batch.keys, Purpose.POSTERIOR, (4, 6, 8))


NOT_SAID: dict[str, object] = {
    "no VAE": None,
    "no factor": {"name": "mine"},
    "a word": {"scaling_factor": "0.18"},
    "no mapping": "sdxl",
    "a factor of 0": {"scaling_factor": 0.0},
    "not a number": {"scaling_factor": float("nan")},
    "a huge one": {"scaling_factor": 10**400},
    "a deviation of 0": {"scaling_factor": 1.0, "latents_mean": MEAN, "latents_std": [1.0, 0.0, 1.0, 1.0]},
    "two shifts": {"scaling_factor": 1.0, "shift_factor": 0.5, "latents_mean": MEAN},
}


@pytest.mark.parametrize("name", NOT_SAID)
def test_a_store_that_does_not_say_is_an_error_until_it_is_said(tmp_path: Path, name: str) -> None:
    batch = first_of(Loader(write(tmp_path / "mine.store", NOT_SAID[name]), ALL))
    with pytest.raises(UsageError, match=r"mine\.store does not record .* batch\.scaled\(LatentScale\(scale=0\.18215\)\)"):
        batch.scaled()
    assert torch.equal(batch.scaled(LatentScale(scale=0.5, shift=1.0)), (batch.latents.float() - 1.0) * 0.5)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_scaling_of_other_channels_is_an_error(tmp_path: Path, channels: int) -> None:
    batch = first_of(Loader(write(tmp_path / "s", VAES["channels"], channels=channels), ALL))
    with pytest.raises(UsageError, match=rf"the scaling is of 4 channels and the latents have {channels}"):
        batch.scaled()


def test_a_scaling_first_used_in_inference_is_usable_in_training(tmp_path: Path) -> None:
    batch = first_of(Loader(write(tmp_path / "s", VAES["channels"]), ALL))
    with torch.inference_mode():
        batch.scaled()
    predicted = torch.ones(4, 4, 6, 8, requires_grad=True)
    torch.autograd.backward(batch.scale.invert(predicted).sum())
    assert predicted.grad is not None


# Quantised tokens as they are stored: the same batches as the dequantised ones, at half the bytes, on every way.


BITS = {"I8": torch.int8, "F8_E4M3": torch.uint8}


@pytest.fixture(scope="module", params=[("I8", 64), ("I8", 40), ("F8_E4M3", 64)], ids=str)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    dtype, width = request.param
    return quantised(dtype, width).make_store(tmp_path_factory.mktemp("stored") / "s", samples_of({"train/64x64": 9}))


def batches(store: Store | Path, *, service: Path | None = None, **options: Any) -> list[Batch]:
    config = LoaderConfig(**{"batch_size": 4, "epochs": 2, "caption_dropout": 0.3, **options})
    with Loader(store, config, service=service) as loader:
        return list(loader.forever())


def same(one: list[Batch], two: list[Batch]) -> Iterator[bool]:
    for first, second in zip(one, two, strict=True):
        own, other = first.by_name(), second.by_name()
        yield own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize(
    "options", [{}, {"verify": True, "threads": 2}, {"plain_reads": True}, {"pad_multiple": 4}, {"pad_to": 11}], ids=str
)
def test_what_is_dequantised_on_the_device_is_what_the_loader_dequantises(store: Store, options: dict[str, Any]) -> None:
    expected = batches(store, **options)
    stored = batches(store, text="stored", **options)
    dtype, width = store.text.tokens[0].dtype, store.text.tokens[0].shape[0]
    for batch in stored:
        assert batch.tokens_scale is not None
        assert (batch.tokens.dtype, batch.tokens.shape[2]) == (BITS[dtype], width)
        assert batch.tokens_scale.shape == (*batch.tokens.shape[:2], store.text.tokens[1].shape[0])
        assert not batch.tokens[~batch.token_mask].any()
    for batch in expected:
        assert (batch.tokens.dtype, batch.tokens_scale) == (torch.float16, None)
        assert batch.dequantised() is batch
        assert batch.pooled is not None
        assert batch.pooled.shape == (len(batch.keys), POOLED_WIDTH)
        assert list(batch.text_fixed) == ["pooled"]
    assert all(same(expected, [batch.dequantised() for batch in stored]))
    assert len({batch.tokens.shape[1] for batch in expected}) == (1 if "pad_multiple" not in options else 2)


@pytest.mark.slow
def test_a_service_delivers_both_forms(store: Store, tmp_path: Path) -> None:
    with serving(tmp_path / "socket", store.path):
        for form in TextForm:
            assert all(same(batches(store, text=form), batches(store.path, text=form, service=tmp_path / "socket")))


def test_the_form_decides_nothing_else_so_a_state_of_one_resumes_the_other(store: Store) -> None:
    whole = batches(store)
    with Loader(store, LoaderConfig(batch_size=4, epochs=2, caption_dropout=0.3, text=TextForm.STORED)) as one:
        rows = iter(one)
        first = [next(rows).dequantised() for _ in range(2)]
        state = one.state_dict()
    with Loader(store, LoaderConfig(batch_size=4, epochs=2, caption_dropout=0.3)) as two:
        two.load_state_dict(state)
        assert all(same(whole, [*first, *two]))


def test_tokens_that_are_not_quantised_are_delivered_as_stored_in_both_forms(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({"train/64x64": 6}))
    assert all(same(batches(store), batches(store, text="stored")))
    with pytest.raises(UsageError, match="text is 'raw', expected dequantised or stored"):
        LoaderConfig(batch_size=1, text="raw")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", list(TextForm))
def test_a_flipped_bit_of_a_scale_is_found_by_verify(store: Store, tmp_path: Path, form: TextForm) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    dtype, width = store.text.tokens[0].dtype, store.text.tokens[0].shape[0]
    text = next(text for sample in samples_of({"train/64x64": 9}) for text in sample.captions)
    scale = quantise(loud_tokens(text, width), dtype)["tokens_scale"].tobytes()
    path = tmp_path / "s/shards/g0.lmdb"
    data = path.read_bytes()
    at = data.index(scale)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CorruptError, match="its bytes do not match their checksum"):
        batches(tmp_path / "s", text=form, verify=True, caption_dropout=0.0, epochs=8)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_numpy_and_torch_give_the_same_bits_for_every_code_and_scale(dtype: str) -> None:
    random = np.random.default_rng(0)
    magnitudes = 10.0 ** random.uniform(-9, 4.7, (300, 1))
    tokens = (random.uniform(-1, 1, (300, 256)) * magnitudes).astype("<f4")
    stored = quantise(tokens, dtype)
    found = dequantised(torch.from_numpy(stored["tokens"]), torch.from_numpy(stored["tokens_scale"]))
    assert found.numpy().tobytes() == dequantise(stored).tobytes()
    assert len(np.unique(stored["tokens"])) > 190


def test_the_expression_is_traced_as_one_graph() -> None:
    """The compiled noising step needs this: no break, for either dtype."""
    for tokens, num_scales in ((torch.ones(2, 3, 64, dtype=torch.int8), 2), (torch.ones(2, 3, 64, dtype=torch.uint8), 1)):
        scale = torch.full((2, 3, num_scales), 0.5)
        compiled = torch.compile(dequantised, backend="eager", fullgraph=True, dynamic=False)
        assert torch.equal(compiled(tokens, scale), dequantised(tokens, scale))


def test_a_batch_of_many_chunks_is_dequantised_in_its_own_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored values are in the upper half of what they become."""
    expected = batches(store)
    for items in (store.text.tokens[0].shape[0], 200, 7):
        monkeypatch.setattr(dequantise_module, "CHUNK_ITEMS", items)
        monkeypatch.setattr(dequantise_module, "_scratch", dequantise_module._Scratch())
        assert all(same(expected, batches(store)))
