"""Files of adapters: the names that other tools read, and starting from files that other tools wrote."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from bucketline.bench.fixtures.trained_model import MODELS
from bucketline.errors import BucketlineError, ModelError, UsageError
from bucketline.families.dit import Dit
from bucketline.families.registry import family_of_pipeline
from bucketline.model_file import LORA_FILE, PEFT_FILE
from bucketline.train.checkpoint import KOHYA_FILE, layout_of
from bucketline.train.log import read_metrics
from bucketline.train.lora import Layers, layers_by_word
from bucketline.train.lora_file import start_from
from bucketline.train.run import train
from tests.family_models import FORMS, PAIR_FORMS, tiny_model
from tests.unit.train.tiny_run import ALONE, config, facts, losses

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.families.family import Family


ATTENTION = ("to_q", "to_k", "to_v", "to_out_0")
# Names that ComfyUI looks up (`model_lora_keys_unet` of its lora.py) and kohya's scripts write, written out here.
IN_A_UNET = [
    f"lora_unet_{block}_transformer_blocks_0_{attention}_{layer}"
    for block, attention, layer in product(
        ("down_blocks_1_attentions_0", "mid_block_attentions_0", "up_blocks_0_attentions_0", "up_blocks_0_attentions_1"),
        ("attn1", "attn2"),
        ATTENTION,
    )
]
IN_SD3 = [
    f"transformer.transformer_blocks.0.attn.{one}"
    for one in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
]
IN_FLUX = [
    *IN_SD3,
    "transformer.transformer_blocks.0.attn.to_add_out",
    *(f"transformer.single_transformer_blocks.0.attn.{one}" for one in ("to_q", "to_k", "to_v")),
]
PUBLISHED = {"sd": IN_A_UNET, "sdxl": IN_A_UNET, "sd3": IN_SD3, "flux": IN_FLUX}


# Names in `kohya_lora.safetensors`: of every family that ComfyUI loads, those that it looks up.
# Source: github.com/Comfy-Org/ComfyUI, `model_lora_keys_unet` of comfy/lora.py at 17358c8f, with what it calls in
# comfy/utils.py at 09708eae, and the modules of comfy/ldm for the models whose own names it takes.
N = r"\d+"
TO = r"to_[qkv]|to_out\.0"
BOTH = rf"{TO}|add_[qkv]_proj|to_add_out"
NET = r"net\.0\.proj|net\.2"
TWO_STREAMS = (
    rf"transformer_blocks\.{N}\.(attn2?\.({BOTH})|ff(_context)?\.({NET}|linear_in|linear_out)|norm1(_context)?\.linear)"
)
FLUX = (
    rf"transformer\.({TWO_STREAMS}|single_transformer_blocks\.{N}\."
    r"(attn\.(to_[qkv]|to_qkv_mlp_proj|to_out)|proj_mlp|proj_out|norm\.linear))"
)
UNET = (
    rf"lora_unet_(down_blocks_{N}|mid_block|up_blocks_{N})_(attentions_{N}_(proj_in|proj_out|transformer_blocks_{N}_"
    rf"(attn[12]_(to_[qkv]|to_out_0)|ff_net_0_proj|ff_net_2))|resnets_{N}_(conv1|conv2|conv_shortcut|time_emb_proj)"
    r"|(down|up)samplers_0_conv)"
)
ORIGINAL = rf"diffusion_model\.((noise_refiner|context_refiner|layers)\.{N}\.(%s|feed_forward\.w[123]|adaLN_modulation\.1))"
LOOKED_UP = {
    "sd": UNET,
    "sdxl": UNET,
    "sd3": rf"transformer\.{TWO_STREAMS}",
    "flux": FLUX,
    "flux2": FLUX,  # model_base.Flux2, Chroma are of the class Flux
    "flux2_klein": FLUX,
    "chroma": FLUX,
    **dict.fromkeys(("pixart_alpha", "pixart_sigma"), rf"transformer\.transformer_blocks\.{N}\.(attn[12]\.({TO})|ff\.({NET}))"),
    "anima": (  # of the class MiniTrainDIT
        rf"diffusion_model\.(blocks\.{N}\.((self|cross)_attn\.([qkv]|output)_proj|mlp\.layer[12]"
        r"|adaln_modulation_(self_attn|cross_attn|mlp)\.[12])|final_layer\.(linear|adaln_modulation\.[12])"
        rf"|x_embedder\.proj\.1|t_embedder\.{N}\.linear_[12])"
    ),
    "auraflow": (
        rf"transformer\.(joint|single)_transformer_blocks\.{N}\.(attn\.({BOTH})"
        r"|ff(_context)?\.(linear_[12]|out_projection)|norm1(_context)?\.linear)"
    ),
    "hidream_image": (
        rf"transformer\.((double|single)_stream_blocks\.{N}\.block\.(attn1\.(to_[qkv]|to_out)(_t)?|adaLN_modulation\.1"
        rf"|ff_[it]\.((experts\.{N}|shared_experts)\.)?w[123])|caption_projection\.{N}\.linear)"
    ),
    "qwenimage": rf"transformer\.transformer_blocks\.{N}\.(attn\.({BOTH})|(img|txt)_mlp\.({NET})|(img|txt)_mod\.1)",
    "qwenimage21": rf"transformer\.transformer_blocks\.{N}\.(attn\.({TO})|img_mlp\.(gate_layer|proj|out))",
    "krea2": (
        rf"transformer\.((transformer_blocks|text_fusion\.(layerwise|refiner)_blocks)\.{N}\.(attn\.({TO}|to_gate)"
        r"|ff\.(gate|up|down))|img_in|time_embed\.linear_[12]|time_mod_proj|txt_in\.linear_[12]|text_fusion\.projector"
        r"|final_layer\.linear)"
    ),
    "z_image": (  # of the class Lumina2
        rf"transformer\.(noise_refiner|context_refiner|layers)\.{N}\.(attention\.({TO})|feed_forward\.w[123]|adaLN_modulation\.0)"
    ),
    "lumina2": ORIGINAL % r"attention\.(qkv|out)",  # the branch of Z-Image cuts three equal parts, and Lumina's are not
    "ideogram4": rf"diffusion_model\.layers\.{N}\.(attention\.(qkv|o)|feed_forward\.w[123]|adaln_modulation)",
    "ernie_image": rf"transformer\.layers\.{N}\.(self_attention\.({TO})|mlp\.(gate_proj|up_proj|linear_fc2))",
}
"""By family, the names of layers that the map has, also for checkpoints of other sizes."""
NOT_LOADED = {"sana", "prx"}  # there is no such model in ComfyUI
LEFT_OUT = {"chroma": "distilled_guidance_layer"}  # of `all`: not in the map by any name of diffusers


def adapted(form: str, *, rank: int = 2, alpha: float = 2.0, word: Layers = Layers.ATTENTION, seed: int = 0) -> Any:
    """Make a form's model with adapters that change what it computes."""
    torch.manual_seed(5)
    model = tiny_model(form)
    layers = layers_by_word(model, word)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers), model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A" in name or ".lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif ".lora_" in name:
                parameter.add_(torch.rand(parameter.shape, generator=generator))
    return model


def changes_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: module.get_delta_weight("default") for name, module in model.named_modules() if hasattr(module, "lora_A")}


def written(model: Any, family: type[Family], folder: Path) -> Path:
    weights = layout_of(family(dict(model.config), facts()), adapters=True)
    weights.write(folder, weights.config(model), weights.tensors(model))
    return folder


def pipeline_of(family: str) -> str | None:
    kind = family_of(family)
    return kind.pipelines[0] if kind.has_lora_loader else None


def family_of(form: str) -> type[Family]:
    family = Dit if form == "dit" else family_of_pipeline((FORMS | PAIR_FORMS)[form].pipeline)
    assert family is not None
    return family


def assert_same_changes(found: Any, wanted: Any) -> None:
    first, second = changes_of(found), changes_of(wanted)
    assert first.keys() == second.keys()
    for name, change in first.items():
        torch.testing.assert_close(change, second[name])


@pytest.mark.parametrize("family", PUBLISHED)
def test_kohyas_file_has_the_published_names_of_every_layer_and_its_alpha(family: str, tmp_path: Path) -> None:
    found = load_file(written(adapted(family, alpha=6.0), family_of(family), tmp_path / "lora") / KOHYA_FILE)
    assert set(found) == {
        f"{name}.{end}" for name in PUBLISHED[family] for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    assert {float(tensor) for name, tensor in found.items() if name.endswith(".alpha")} == {6.0}
    assert {tensor.shape[0] for name, tensor in found.items() if name.endswith(".lora_down.weight")} == {2}


def test_adapters_that_no_pipeline_takes_have_pefts_names_and_with_alpha_those_that_comfyui_knows(tmp_path: Path) -> None:
    folder = written(adapted("pixart_sigma", alpha=6.0), family_of("pixart_sigma"), tmp_path / "lora")
    layers = [f"transformer_blocks.0.{one}.{to}" for one in ("attn1", "attn2") for to in ("to_q", "to_k", "to_v", "to_out.0")]
    ends = ("lora_A.weight", "lora_B.weight")
    assert set(load_file(folder / PEFT_FILE)) == {f"base_model.model.{layer}.{end}" for layer in layers for end in ends}
    found = load_file(folder / KOHYA_FILE)
    with_alpha = ("lora_down.weight", "lora_up.weight", "alpha")
    assert set(found) == {f"transformer.{layer}.{end}" for layer in layers for end in with_alpha}
    assert {float(tensor) for name, tensor in found.items() if name.endswith(".alpha")} == {6.0}


@pytest.mark.parametrize(
    ("family", "file", "word"),
    [
        *((family, file, Layers.ATTENTION) for family in PUBLISHED for file in (LORA_FILE, KOHYA_FILE)),
        ("dit", PEFT_FILE, Layers.ALL),
        ("pixart_sigma", KOHYA_FILE, Layers.ATTENTION),
        ("sd", KOHYA_FILE, Layers.ALL),  # with convolutions
    ],
)
def test_adapters_start_as_strong_as_in_the_file_whatever_the_two_alphas(
    family: str, file: str, word: Layers, tmp_path: Path
) -> None:
    source = adapted(family, alpha=6.0, word=word)
    path = written(source, family_of(family), tmp_path / "lora") / file
    model = adapted(family, alpha=1.0, word=word, seed=1)
    start_from(path, model, pipeline_of(family))
    assert_same_changes(model, source)


def test_a_file_without_alpha_has_an_alpha_of_its_rank(tmp_path: Path) -> None:
    source = adapted("sd", alpha=2.0)
    path = written(source, family_of("sd"), tmp_path / "lora") / LORA_FILE
    save_file(load_file(path), path)  # without metadata
    model = adapted("sd", alpha=8.0, seed=1)
    start_from(path, model, pipeline_of("sd"))
    assert_same_changes(model, source)


def test_the_same_adapters_make_the_same_bytes_each_time(tmp_path: Path) -> None:
    """Safetensors writes several entries of metadata in an order of chance."""
    source = adapted("sd")
    files = [written(source, family_of("sd"), tmp_path / str(number)) / LORA_FILE for number in range(8)]
    assert len({file.read_bytes() for file in files}) == 1


def test_layers_that_the_file_lacks_start_at_zero(tmp_path: Path) -> None:
    path = written(adapted("sd"), family_of("sd"), tmp_path / "lora") / KOHYA_FILE
    torch.manual_seed(5)
    model = tiny_model("sd")
    wanted = LoraConfig(
        r=2, lora_alpha=2, target_modules=layers_by_word(model, Layers.ATTENTION_MLP), init_lora_weights="gaussian"
    )
    inject_adapter_in_model(wanted, model)
    start_from(path, model, None)
    changed = {name for name, change in changes_of(model).items() if change.abs().max() > 0}
    assert len(changed) == len(IN_A_UNET)
    assert all(".attn" in name for name in changed)


KOHYAS_NAMES = {  # names of original checkpoints, as kohya writes them, and the model's layer
    "sdxl": {
        "input_blocks_3_1_transformer_blocks_0_attn1_to_q": "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
        "middle_block_1_transformer_blocks_0_attn2_to_out_0": "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0",
        "output_blocks_1_1_transformer_blocks_0_attn2_to_v": "up_blocks.0.attentions.1.transformer_blocks.0.attn2.to_v",
    },
    "flux": {"double_blocks_0_img_attn_proj": "transformer_blocks.0.attn.to_out.0"},
}


@pytest.mark.parametrize("family", KOHYAS_NAMES)
def test_names_of_original_checkpoints_are_read_as_diffusers_reads_them(family: str, tmp_path: Path) -> None:
    source = adapted(family, alpha=6.0)
    modules = dict(source.named_modules())
    tensors = {}
    for name, layer in KOHYAS_NAMES[family].items():
        tensors[f"lora_unet_{name}.lora_down.weight"] = modules[layer].lora_A["default"].weight.detach().contiguous()
        tensors[f"lora_unet_{name}.lora_up.weight"] = modules[layer].lora_B["default"].weight.detach().contiguous()
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(6.0)
    save_file(tensors, tmp_path / "kohya.safetensors")
    model = adapted(family, alpha=2.0, seed=1)
    start_from(tmp_path / "kohya.safetensors", model, pipeline_of(family))
    found, wanted = changes_of(model), changes_of(source)
    for layer in KOHYAS_NAMES[family].values():
        torch.testing.assert_close(found[layer], wanted[layer])


def test_names_of_diffusers_before_peft_are_read(tmp_path: Path) -> None:
    source = adapted("sd")
    tensors = {}
    for layer, module in source.named_modules():
        if hasattr(module, "lora_A"):
            block, _, attention = layer.rpartition(".attn")
            number, _, projection = attention.removesuffix(".0").partition(".")
            for end, pair in (("down", module.lora_A), ("up", module.lora_B)):
                tensors[f"unet.{block}.attn{number}.processor.{projection}_lora.{end}.weight"] = pair["default"].weight.detach()
    assert "unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out_lora.up.weight" in tensors
    save_file(tensors, tmp_path / "old.safetensors")
    model = adapted("sd", seed=1)
    start_from(tmp_path / "old.safetensors", model, pipeline_of("sd"))
    assert_same_changes(model, source)


NOT_LORA = {
    "DoRA": ("dora_scale",),
    "DoRA of peft": ("lora_magnitude_vector",),
    "LoHa": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "LoKr": ("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
    "IA3": ("on_input", "weight"),
    "a core of Tucker": ("lora_mid.weight",),
    "a bias": ("lora_B.bias",),
    "whole weights": ("diff", "diff_b"),
    "a norm": ("w_norm",),
}
"""Ends of names of what is not plain LoRA, as LyCORIS and peft write them."""


def changed_file(folder: Path, kind: str) -> Path:
    rank, word = (4 if kind == "rank" else 2), (Layers.ATTENTION_MLP if kind == "layers" else Layers.ATTENTION)
    path = written(adapted("sd", rank=rank, word=word), family_of("sd"), folder / "lora") / KOHYA_FILE
    tensors = load_file(path)
    one = IN_A_UNET[0]
    if kind == "model":
        tensors[f"{one}.lora_down.weight"] = torch.zeros(2, 5)
    if kind == "half":
        del tensors[f"{one}.lora_up.weight"]
    if kind == "name":
        tensors |= {"lora_unet_cake.lora_down.weight": torch.zeros(2, 5), "lora_unet_cake.lora_up.weight": torch.zeros(5, 2)}
    if kind in NOT_LORA:
        tensors |= {f"{one}.{end}": torch.ones(2) for end in NOT_LORA[kind]}
    if kind in ("nan", "inf"):
        tensors[f"{one}.lora_up.weight"][0, 0] = float(kind)
    if kind == "none":
        tensors = {"lora_te_text_model.alpha": torch.ones(1)}
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps({"unet.use_rslora": True})} if kind == "rslora" else None)
    if kind == "bytes":
        path.write_bytes(b"PK")
    return path


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("rank", UsageError, r"has rank 4, and --lora-rank is 2; use --lora-rank 4"),
        ("layers", UsageError, r"ff\.net\.\S+ and \d+ other layers .* leaves out; use --lora-targets attention\+mlp"),
        (
            "model",
            ModelError,
            r"has tensors of \(2, 5\) and \(8, 2\), expected \(2, 8\) and \(8, 2\); it belongs to another model",
        ),
        ("half", ModelError, "has only one of its two tensors"),
        ("name", ModelError, r"has '\S+cake\.lora_\w+\.weight', expected LoRA adapters of the model's layers"),
        ("nan", ModelError, r"\S+lora_up\.weight has values that are not finite"),
        ("inf", ModelError, r"\S+lora_up\.weight has values that are not finite"),
        ("rslora", ModelError, "of rsLoRA or DoRA"),
        ("none", ModelError, "has no adapters, expected LoRA adapters"),
        ("bytes", ModelError, r"--lora-from \S+ cannot be read as a \.safetensors file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_what_to_do(
    kind: str, error: type[BucketlineError], message: str, tmp_path: Path
) -> None:
    path, model = changed_file(tmp_path, kind), adapted("sd")
    for pipeline in (None, pipeline_of("sd")):
        with pytest.raises(error, match=message):
            start_from(path, model, pipeline)


@pytest.mark.parametrize("kind", NOT_LORA)
def test_what_is_not_plain_lora_is_refused_and_not_read_in_part(kind: str, tmp_path: Path) -> None:
    path, model = changed_file(tmp_path, kind), adapted("sd")
    before = changes_of(model)
    with pytest.raises(ModelError, match=rf"has '\S+\.{NOT_LORA[kind][0]}', expected only plain LoRA"):
        start_from(path, model, pipeline_of("sd"))
    assert all(torch.equal(change, before[name]) for name, change in changes_of(model).items())


@pytest.mark.parametrize("form", [name for name in FORMS | PAIR_FORMS if family_of(name).has_lora_loader])
def test_no_familys_converter_leaves_out_a_tensor_in_silence(form: str, tmp_path: Path) -> None:
    """Next to adapters of all layers there is one of a layer that the model lacks."""
    model, family = adapted(form, word=Layers.ALL), family_of(form)
    written(model, family, tmp_path / "lora")
    start_from(tmp_path / "lora" / LORA_FILE, adapted(form, word=Layers.ALL, seed=1), family.pipelines[0])
    for file in (LORA_FILE, KOHYA_FILE):
        tensors = load_file(tmp_path / "lora" / file)
        some = next(name for name in tensors if name.endswith(("lora_A.weight", "lora_down.weight")))
        pair = some, some.replace("lora_A", "lora_B").replace("lora_down", "lora_up")
        layer = some.rpartition(".lora_")[0]
        other = layer.replace(".0.", ".9.", 1) if ".0." in layer else layer.replace("_0_", "_9_")
        assert other != layer
        path = tmp_path / f"with-{file}"
        save_file({**tensors, **{one.replace(layer, other): tensors[one] + 1 for one in pair}}, path)
        with pytest.raises(ModelError, match=r"has '\S+', expected LoRA adapters|leaves out '\S+'"):
            start_from(path, adapted(form, word=Layers.ALL, seed=1), family.pipelines[0])


@pytest.mark.slow
def test_a_run_begins_where_the_files_run_ended_and_resumes_to_the_bit_without_it(folder: Path) -> None:
    first = config(folder, output_dir=folder / "first", max_steps=3, lora_rank=2, lora_alpha=4.0, ema="off", learning_rate=0.1)
    summary = train(first, ALONE)
    file = summary.checkpoint / "lora" / KOHYA_FILE
    whole = dataclasses.replace(first, output_dir=folder / "whole", lora_from=file, lora_alpha=None, max_steps=4, log_every=1)
    train(whole, ALONE)
    assert summary.validation is not None
    begun = next(line["val_loss"] for line in read_metrics(whole.output_dir) if "val_loss" in line)
    assert begun == pytest.approx(summary.validation.loss, rel=1e-5)
    parts = dataclasses.replace(whole, output_dir=folder / "parts", max_steps=2)
    train(parts, ALONE)
    file.unlink()
    train(dataclasses.replace(parts, max_steps=4, resume=True), ALONE)
    assert losses(whole.output_dir) == losses(parts.output_dir)


def test_a_file_to_start_from_needs_a_rank(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--lora-from is \S+, but --lora-rank is not given; add one, such as 16"):
        config(folder, lora_from=folder / "lora.safetensors")


@pytest.mark.parametrize("word", [None, Layers.ALL])
@pytest.mark.parametrize("form", [form for form in FORMS | PAIR_FORMS if family_of(form).name not in NOT_LOADED])
def test_comfyui_looks_up_every_name_that_is_written(form: str, word: Layers | None, tmp_path: Path) -> None:
    kind = family_of(form)
    torch.manual_seed(3)
    model = tiny_model(form)
    targets = [*kind(dict(model.config), facts()).lora_targets] if word is None else layers_by_word(model, word)
    targets = [one for one in targets if LEFT_OUT.get(kind.name, "-") not in one]
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=6.0, target_modules=targets), model)
    found = load_file(written(model, kind, tmp_path / "lora") / KOHYA_FILE)
    names = {name.rpartition(".lora_")[0] or name.removesuffix(".alpha") for name in found}
    assert names
    looked_up = LOOKED_UP[kind.name.removesuffix("_kontext").partition("_edit")[0]]  # those have the model of one without
    assert [name for name in names if not re.fullmatch(looked_up, name)] == []


@pytest.mark.parametrize("form", ["lumina2", "ideogram4"])
def test_one_matrix_for_queries_keys_and_values_computes_what_the_three_adapters_do(form: str, tmp_path: Path) -> None:
    model = adapted(form, alpha=6.0)
    found = load_file(written(model, family_of(form), tmp_path / "lora") / KOHYA_FILE)
    assert len(get_peft_model_state_dict(model)) > len(found) // 2
    fused = [name.removesuffix(".alpha") for name in found if name.endswith(".qkv.alpha")]
    assert fused
    for name in fused:
        layer = name.removeprefix("diffusion_model.").replace(".attention.qkv", ".attn" if form == "lumina2" else ".attention")
        up, down, alpha = (found[f"{name}.{end}"] for end in ("lora_up.weight", "lora_down.weight", "alpha"))
        change = float(alpha) / len(down) * (up @ down)
        torch.testing.assert_close(change, torch.cat([changes_of(model)[f"{layer}.{one}"] for one in ("to_q", "to_k", "to_v")]))


# Layers that get an adapter by a word.


ATTENTION_LAYERS = {"to_q", "to_k", "to_v", "to_out.0"}
ADDED = {"add_q_proj", "add_k_proj", "add_v_proj"}
FEED_FORWARD = {"net.0.proj", "net.2"}
AROUND = {"proj_in", "proj_out", "conv1", "conv2", "conv_shortcut", "time_emb_proj", "conv"}
EXPECTED = {  # the ends of names, as in diffusers' models
    "sd": (ATTENTION_LAYERS, FEED_FORWARD, AROUND),
    "sdxl": (ATTENTION_LAYERS, FEED_FORWARD, AROUND),
    "pixart_sigma": (ATTENTION_LAYERS, FEED_FORWARD, set()),
    "dit": (ATTENTION_LAYERS, FEED_FORWARD, {"linear", "linear_1", "linear_2"}),
    "sd3": (ATTENTION_LAYERS | ADDED, FEED_FORWARD, {"linear"}),
    "flux": (ATTENTION_LAYERS | ADDED | {"to_add_out"}, FEED_FORWARD | {"proj_mlp", "proj_out"}, {"linear"}),
}


def ends(names: Iterable[str]) -> set[str]:
    known = ("to_out.0", *FEED_FORWARD)
    return {next((end for end in known if name.endswith(end)), name.rpartition(".")[2]) for name in names}


@pytest.mark.parametrize("family", EXPECTED)
def test_a_word_means_the_layers_of_the_blocks_and_those_of_the_words_before_it(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family)
    attention, mlp, others = EXPECTED[family]
    by_word = {word: layers_by_word(model, word) for word in Layers}
    assert ends(by_word[Layers.ATTENTION]) == attention
    assert ends(by_word[Layers.ATTENTION_MLP]) == attention | mlp
    assert ends(by_word[Layers.ALL]) == attention | mlp | others
    outside = {"conv_in", "conv_out", "proj_out", "x_embedder", "context_embedder", "pos_embed.proj", "norm_out.linear"}
    assert not outside & set(by_word[Layers.ALL])
    assert not [name for name in by_word[Layers.ALL] if name.startswith(("time_", "add_embedding", "caption_", "adaln_"))]


def test_the_published_models_have_as_many_adapters_as_other_trainers_say() -> None:
    """SDXL has 70 transformer blocks, of 8 attention projections and 2 feed-forward layers; Flux has 19 and 38 blocks."""
    with torch.device("meta"):
        sdxl = UNet2DConditionModel.from_config(MODELS["sdxl"].config)
        flux: Any = FluxTransformer2DModel
        found = [[len(layers_by_word(model, word)) for word in Layers] for model in (sdxl, flux())]
    assert found[0][:2] == [70 * 8, 70 * 10]
    assert found[1] == [19 * 8 + 38 * 3, 19 * 12 + 38 * 5, 494]
