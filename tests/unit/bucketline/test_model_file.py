"""Models in one file: which files are accepted, where the configuration comes from, and misfits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bucketline.errors import ModelError, UsageError
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.model_file import DIFFUSERS, TRANSFORMERS, open_model_file, variant_of, weights_hash
from bucketline.store import Store
from bucketline.train.model import open_model_config
from tests.commands import call
from tests.family_models import write_pipeline
from tests.models import SMALL, png, write_images
from tests.single_files import write_single_file

SD15 = "stable-diffusion-v1-5/stable-diffusion-v1-5"


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sd")
    folder = write_pipeline(root / "folder", "sd")
    return write_single_file(root / "sd.safetensors", folder, "sd"), folder


def configuration(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.mark.parametrize("name", ["sd.ckpt", "sd.pt", "pytorch_model.bin"])
def test_a_pickled_checkpoint_is_refused_in_one_line_that_names_the_conversion(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80")
    for opened in (open_model, lambda model: open_model_config(Path(model))):
        with pytest.raises(ModelError, match=r"pickled checkpoint, .*torch\.load\(…, weights_only=True\).*save_file$"):
            opened(str(tmp_path / name))


def test_a_file_that_is_not_there_or_not_safetensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.safetensors is not there"):
        open_model(str(tmp_path / "gone.safetensors"))
    (tmp_path / "torn.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(ModelError, match=r"torn\.safetensors cannot be read as safetensors"):
        open_model(str(tmp_path / "torn.safetensors"))


def test_a_file_without_a_model_is_not_taken_for_stable_diffusion(tmp_path: Path) -> None:
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(1, 2)}, tmp_path / "lora.safetensors")
    with pytest.raises(ModelError, match="holds no model whose layout diffusers knows"):
        open_model(str(tmp_path / "lora.safetensors"))


def test_the_inferred_configuration_comes_from_the_hub_or_its_cache(
    sd: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = sd
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=rf"its configuration, {SD15}, is not a folder, .*--model-config"):
        open_model(str(file))
    cached = tmp_path / f"models--{SD15.replace('/', '--')}"
    configuration(folder, cached / "snapshots" / "0123abcd")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd", encoding="ascii")
    assert open_model(str(file)).path == cached / "snapshots" / "0123abcd"
    assert open_model_config(file).folder == cached / "snapshots" / "0123abcd"
    assert open_model(str(file), SD15).path == cached / "snapshots" / "0123abcd", "and by name, where no network is"


@pytest.mark.slow
def test_animas_file_is_its_transformer_and_the_conditioner_inside(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "folder", "anima")
    file = write_single_file(tmp_path / "anima.safetensors", folder, "anima")
    opened = open_model(str(file), str(folder))
    for part in ("transformer", "text_conditioner"):
        loaded, own = opened.from_file(part), load_file(folder / part / "diffusion_pytorch_model.safetensors")
        assert loaded is not None
        assert loaded.state_dict().keys() == own.keys()
        assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.state_dict().items())
    write_images(tmp_path / "images", 1)
    asked = (tmp_path / "images", "--grid", "16x24", "--min-size-px", 8, "--model")
    call("ingest", "pack", asked[0], tmp_path / "file.store", *asked[1:], file, "--model-config", folder).done()
    call("ingest", "pack", asked[0], tmp_path / "folder.store", *asked[1:], folder).done()
    one, other = (Store.open(tmp_path / f"{name}.store").manifest.encoders for name in ("file", "folder"))
    assert one == other


def test_a_configuration_is_for_a_single_file_alone(sd: tuple[Path, Path], tmp_path: Path) -> None:
    file, folder = sd
    with pytest.raises(UsageError, match=r"--model-config is x, and --model .* is not a \.safetensors file"):
        open_model(str(folder), "x")
    with pytest.raises(UsageError, match=r"--model-config is x, and --model .* is not a \.safetensors file"):
        open_model_config(folder, "x")
    with pytest.raises(ModelError, match=r"has no model_index\.json"):
        open_model_file(file, str(tmp_path))


def test_a_part_has_the_folders_digest(sd: tuple[Path, Path]) -> None:
    file, folder = sd
    from_file, from_folder = (open_model(str(name), config) for name, config in ((file, str(folder)), (folder, None)))
    vae: Any = from_file.from_file("vae")
    assert from_folder.from_file("vae") is None
    assert weights_hash(vae) == weights_hash(type(vae).from_pretrained(folder / "vae"))


def test_weights_that_do_not_fit_the_configuration_are_named(sd: tuple[Path, Path], tmp_path: Path) -> None:
    file, folder = sd
    tensors = load_file(file)
    bias = "first_stage_model.encoder.conv_in.bias"
    vae = f"{bias.rpartition('.')[0].removesuffix('.conv_in')}.down.0.block.0"
    less = {name: tensor for name, tensor in tensors.items() if name != bias}
    more = {**tensors, f"{vae}.conv3.bias": torch.zeros(4)}
    other = {**tensors, bias: torch.zeros(5)}
    for changed, message in (
        (less, "its vae lacks 1 of the weights .* such as encoder.conv_in.bias"),
        (more, "its vae has besides 1 of the weights .* such as encoder.down_blocks.0.resnets.0.conv3.bias"),
        (other, "its vae has in another shape 1 of the weights .* such as encoder.conv_in.bias"),
    ):
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(ModelError, match=f"{message}; name the folder of the configuration .* by --model-config"):
            open_model_file(tmp_path / "changed.safetensors", str(folder)).load("vae")
    text = "cond_stage_model.transformer.text_model.final_layer_norm.bias"
    save_file({name: tensor for name, tensor in tensors.items() if name != text}, tmp_path / "changed.safetensors")
    with pytest.raises(ModelError, match=r"its text_encoder lacks 1 weights, such as .*final_layer_norm\.bias"):
        open_model_file(tmp_path / "changed.safetensors", str(folder)).load("text_encoder")


def test_a_part_that_the_file_lacks_comes_from_the_folder_or_is_missed(sd: tuple[Path, Path], tmp_path: Path) -> None:
    file, folder = sd
    unet = {name: tensor for name, tensor in load_file(file).items() if name.startswith("model.")}
    save_file(unet, tmp_path / "unet.safetensors")
    assert open_model(str(tmp_path / "unet.safetensors"), str(folder)).from_file("vae") is None
    bare = configuration(folder, tmp_path / "bare")
    with pytest.raises(ModelError, match=r"has no vae, and .* no weights; name a folder that has them by --model-config"):
        open_model(str(tmp_path / "unet.safetensors"), str(bare)).from_file("vae")


def test_a_t5_that_neither_file_nor_folder_has_is_left_out(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "folder", "sd3")
    file = write_single_file(tmp_path / "sd3.safetensors", folder, "sd3")
    save_file({k: v for k, v in load_file(file).items() if "t5xxl" not in k}, tmp_path / "clips.safetensors")
    bare = configuration(folder, tmp_path / "bare")
    has = {
        (name, config.name): open_model(str(tmp_path / name), str(config)).has("text_encoder_3")
        for name in ("sd3.safetensors", "clips.safetensors")
        for config in (folder, bare)
    }
    assert has == {
        ("sd3.safetensors", "folder"): True,
        ("sd3.safetensors", "bare"): True,
        ("clips.safetensors", "folder"): True,
        ("clips.safetensors", "bare"): False,
    }


def test_packing_with_one_file_continues_a_store_of_its_folder(sd: tuple[Path, Path], tmp_path: Path) -> None:
    file, folder = sd
    bare = configuration(folder, tmp_path / "bare")
    write_images(tmp_path / "images", 4)
    asked = (tmp_path / "images", tmp_path / "s", "--grid", "16x16,16x24", "--min-size-px", 8, "--json")
    call("ingest", "pack", *asked, "--model", folder).done()
    (tmp_path / "images" / "new.png").write_bytes(png(24, 24))
    ran = call("ingest", "pack", *asked, "--model", file, "--model-config", bare)
    assert (ran.code, ran.json["packed"], ran.json["unchanged"]) == (0, 1, 4), ran.err
    scanned = call("ingest", "scan", asked[0], *asked[2:], "--model", file, "--model-config", bare).done()
    assert scanned.json["found"] == 5
    output = tmp_path / "a.png"
    call("ingest", "peek", tmp_path / "s", "a/000.png", "--model", file, "--model-config", bare, "-o", output).done()
    assert output.exists()


# Weights that a folder holds only as a variant (`*.fp16.safetensors`) are loaded, for packing and for training.


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "model")


def as_variant(folder: Path, variant: str, *, in_parts: bool = False) -> None:
    """Write a model's VAE and text encoder again, only as a variant, by the libraries themselves."""
    import diffusers
    import transformers

    kinds: dict[str, Any] = {"vae": diffusers.AutoencoderKL, "text_encoder": transformers.BertModel}
    for part, kind in kinds.items():
        loaded = kind.from_pretrained(folder / part)
        for path in (folder / part).glob("*.safetensors"):
            path.unlink()
        more = {"max_shard_size": "1KB"} if in_parts else {}
        loaded.save_pretrained(folder / part, variant=variant, **more)
        assert not (folder / part / "model.safetensors").exists()


def pack(folder: Path, place: Path) -> Any:
    write_images(place / "photos", 4)
    return call("ingest", "pack", place / "photos", place / "s", "--model", folder, *SMALL, "--json")


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("variant", ["fp16", "bf16", "non_ema"])
def test_a_folder_of_a_variant_alone_is_packed_with(variant: str, own: Path, tmp_path: Path, *, in_parts: bool) -> None:
    as_variant(own, variant, in_parts=in_parts)
    ran = pack(own, tmp_path).done()
    assert ran.json["packed"] == 4


def test_the_trainer_loads_a_variant_and_names_what_it_looked_for(tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    from bucketline.families.family import StoreFacts
    from tests.kit import TOKEN_WIDTH
    from tests.unit.train.tiny_run import UNET, load

    facts = StoreFacts(latent_channels=2, text={"tokens": TOKEN_WIDTH}, num_classes=None, shows_padding=True, latent_sizes=())
    kind: Any = UNet2DConditionModel
    saved = kind.from_config(UNET)
    saved.save_pretrained(tmp_path / "unet", variant="fp16")
    _, loaded = load(tmp_path, facts, 0)
    expected = saved.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    weights = tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    weights.rename(weights.with_name("weights.safetensors"))
    with pytest.raises(
        ModelError, match=r"unet/ has no weights: looked for diffusion_pytorch_model\.safetensors.*weights\.saf"
    ):
        load(tmp_path, facts, 0)


def test_the_trainer_compares_a_vae_of_a_variant_alone_with_the_stores(own: Path, tmp_path: Path) -> None:
    from bucketline.store import Store
    from bucketline.train.model import open_model_config, read_vae
    from tests.unit.train.tiny_run import write_unet

    as_variant(own, "fp16")
    assert pack(own, tmp_path).code == 0
    write_unet(own)
    _, other = read_vae(open_model_config(own), Store.open(tmp_path / "s").manifest.encoders)
    assert other is None


@pytest.mark.parametrize(
    ("names", "bases", "expected"),
    [
        (["model.safetensors", "model.fp16.safetensors"], TRANSFORMERS, None),
        (["pytorch_model.bin"], TRANSFORMERS, None),
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], TRANSFORMERS, None),
        (["model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"], TRANSFORMERS, "fp16"),
        (["diffusion_pytorch_model-00001-of-00002.fp16.safetensors"], DIFFUSERS, "fp16"),
        (["diffusion_pytorch_model.bf16.bin", "diffusion_pytorch_model.fp16.safetensors"], DIFFUSERS, "fp16"),
        (["diffusion_pytorch_model.non_ema.bin"], DIFFUSERS, "non_ema"),
    ],
)
def test_plain_weights_come_first_then_the_most_precise_variant(
    names: list[str], bases: tuple[str, ...], expected: str | None
) -> None:
    assert variant_of("part/", names, bases) == expected


@pytest.mark.parametrize("names", [[], ["config.json"], ["model.safetensors"], ["diffusion_pytorch_model.fp16.msgpack"]])
def test_what_holds_no_weights_is_refused(names: list[str]) -> None:
    with pytest.raises(ModelError, match=r"part/ has no weights: looked for diffusion_pytorch_model\.safetensors"):
        variant_of("part/", names, DIFFUSERS)


def test_several_variants_of_which_none_is_known_are_named() -> None:
    names = ["diffusion_pytorch_model.ema.bin", "diffusion_pytorch_model.non_ema.bin"]
    with pytest.raises(ModelError, match=r"in the variants ema, non_ema and none without"):
        variant_of("part/", names, DIFFUSERS)
