"""The names in `kohya_lora.safetensors`: of every family that ComfyUI loads, those that it looks up.

Source: github.com/Comfy-Org/ComfyUI, `model_lora_keys_unet` of comfy/lora.py at 17358c8f, with what it calls in comfy/utils.py
at 09708eae, and the modules of comfy/ldm for the models whose own names it takes.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict

from bucketline.families.registry import family_of_pipeline
from bucketline.train.lora import Layers, layers_by_word
from bucketline.train.weight_layout import layout_of
from tests.family_models import FORMS, tiny_model
from tests.unit.train.outputs.test_lora_file import changes_of
from tests.unit.train.tiny_run import facts

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
ENDS = ("lora_down.weight", "lora_up.weight", "alpha")
LEFT_OUT = {"chroma": "distilled_guidance_layer"}  # of `all`: not in the map by any name of diffusers


def adapted(form: str, word: Layers | None, *, dora: bool = False) -> tuple[Any, Any]:
    """Make a form's family and its model, with adapters that change what it computes."""
    kind = family_of_pipeline(FORMS[form].pipeline)
    assert kind is not None
    torch.manual_seed(3)
    model = tiny_model(form)
    targets = [*kind(dict(model.config), facts()).lora_targets] if word is None else layers_by_word(model, word)
    targets = [one for one in targets if LEFT_OUT.get(kind.name, "-") not in one]
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=6.0, target_modules=targets, use_dora=dora), model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.rand(parameter.shape))
    return kind, model


def written(kind: Any, model: Any, folder: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the file for other tools."""
    from safetensors.torch import load_file

    weights = layout_of(kind, adapters=True)
    weights.write(folder, weights.config(model), weights.tensors(model))
    return load_file(folder / "kohya_lora.safetensors")


@pytest.mark.parametrize("word", [None, Layers.ALL])
@pytest.mark.parametrize("form", FORMS)
def test_comfyui_looks_up_every_name_that_is_written(form: str, word: Layers | None, tmp_path: Any) -> None:
    kind, model = adapted(form, word)
    if kind.name in NOT_LOADED:
        return
    names = {name.rpartition(".lora_")[0] or name.removesuffix(".alpha") for name in written(kind, model, tmp_path / "lora")}
    assert names
    assert [name for name in names if not re.fullmatch(LOOKED_UP[kind.name], name)] == []


@pytest.mark.parametrize("form", ["lumina2", "ideogram4"])
@pytest.mark.parametrize("dora", [False, True])
def test_one_matrix_for_queries_keys_and_values_computes_what_the_three_adapters_do(
    form: str, tmp_path: Any, *, dora: bool
) -> None:
    kind, model = adapted(form, Layers.ATTENTION, dora=dora)
    found = written(kind, model, tmp_path / "lora")
    modules = dict(model.named_modules())
    assert len(get_peft_model_state_dict(model)) > len(found) // 2
    fused = [name.removesuffix(".alpha") for name in found if name.endswith(".qkv.alpha")]
    assert fused
    for name in fused:
        layer = name.removeprefix("diffusion_model.").replace(".attention.qkv", ".attn" if form == "lumina2" else ".attention")
        three = [modules[f"{layer}.{one}"] for one in ("to_q", "to_k", "to_v")]
        up, down, alpha = (found[f"{name}.{end}"] for end in ("lora_up.weight", "lora_down.weight", "alpha"))
        change = float(alpha) / len(down) * (up @ down)
        torch.testing.assert_close(change, torch.cat([changes_of(model)[f"{layer}.{one}"] for one in ("to_q", "to_k", "to_v")]))
        if dora:
            before = torch.cat([one.base_layer.weight for one in three])
            whole = (before + change) * (found[f"{name}.dora_scale"] / (before + change).norm(dim=1, keepdim=True))
            for one in three:
                one.merge()
            torch.testing.assert_close(whole, torch.cat([one.base_layer.weight for one in three]), rtol=1e-4, atol=1e-5)
