"""Single-file checkpoints in the original key layout, written from tiny pipelines by names that stand here once more.

The original repositories' names (LDM, OpenCLIP, SD3) are written out by hand, so that the tests do not follow the product's way
of finding them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Renames = tuple[tuple[str, str], ...]

UNET: Renames = (
    (r"time_embedding\.linear_1", "time_embed.0"),
    (r"time_embedding\.linear_2", "time_embed.2"),
    (r"add_embedding\.linear_1", "label_emb.0.0"),
    (r"add_embedding\.linear_2", "label_emb.0.2"),
    (r"conv_norm_out", "out.0"),
    (r"conv_out", "out.2"),
    (r"conv_in", "input_blocks.0.0"),
    (r"mid_block\.resnets\.0", "middle_block.0"),
    (r"mid_block\.attentions\.0", "middle_block.1"),
    (r"mid_block\.resnets\.1", "middle_block.2"),
    # two blocks of one layer: conv_in, resnet, downsampler, resnet; then two resnets, two resnets
    (r"down_blocks\.0\.resnets\.0", "input_blocks.1.0"),
    (r"down_blocks\.0\.downsamplers\.0\.conv", "input_blocks.2.0.op"),
    (r"down_blocks\.1\.resnets\.0", "input_blocks.3.0"),
    (r"down_blocks\.1\.attentions\.0", "input_blocks.3.1"),
    (r"up_blocks\.0\.resnets\.([01])", r"output_blocks.\1.0"),
    (r"up_blocks\.0\.attentions\.([01])", r"output_blocks.\1.1"),
    (r"up_blocks\.0\.upsamplers\.0\.conv", "output_blocks.1.2.conv"),
    (r"up_blocks\.1\.resnets\.0", "output_blocks.2.0"),
    (r"up_blocks\.1\.resnets\.1", "output_blocks.3.0"),
    (r"\.norm1\.(weight|bias)$", r".in_layers.0.\1"),
    (r"\.conv1\.", ".in_layers.2."),
    (r"\.norm2\.(weight|bias)$", r".out_layers.0.\1"),
    (r"\.conv2\.", ".out_layers.3."),
    (r"\.time_emb_proj\.", ".emb_layers.1."),
    (r"\.conv_shortcut\.", ".skip_connection."),
)
VAE: Renames = (
    (r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2"),
    (r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample"),
    (r"up_blocks\.0\.resnets\.(\d)", r"up.1.block.\1"),  # numbered from the other end
    (r"up_blocks\.0\.upsamplers\.0", "up.1.upsample"),
    (r"up_blocks\.1\.resnets\.(\d)", r"up.0.block.\1"),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0\.group_norm", "mid.attn_1.norm"),
    (r"mid_block\.attentions\.0\.to_([qkv])", r"mid.attn_1.\1"),
    (r"mid_block\.attentions\.0\.to_out\.0", "mid.attn_1.proj_out"),
    (r"conv_norm_out", "norm_out"),
    (r"conv_shortcut", "nin_shortcut"),
)
OPEN_CLIP: Renames = (
    (r"^embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^embeddings\.token_embedding", "token_embedding"),
    (r"^final_layer_norm", "ln_final"),
    (r"^encoder\.layers\.", "transformer.resblocks."),
    (r"layer_norm([12])", r"ln_\1"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"self_attn\.in_proj\.", "attn.in_proj_"),
    (r"self_attn", "attn"),
)
SD3: Renames = (
    (r"^pos_embed\.pos_embed", "pos_embed"),
    (r"^pos_embed\.proj", "x_embedder.proj"),
    (r"time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
    (r"time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"),
    (r"^transformer_blocks\.", "joint_blocks."),
    (r"\.attn\.qkv", ".x_block.attn.qkv"),
    (r"\.attn\.context_qkv", ".context_block.attn.qkv"),
    (r"\.attn\.to_out\.0", ".x_block.attn.proj"),
    (r"\.attn\.to_add_out", ".context_block.attn.proj"),
    (r"\.norm1\.linear", ".x_block.adaLN_modulation.1"),
    (r"\.norm1_context\.linear", ".context_block.adaLN_modulation.1"),
    (r"\.ff\.net\.0\.proj", ".x_block.mlp.fc1"),
    (r"\.ff\.net\.2", ".x_block.mlp.fc2"),
    (r"\.ff_context\.net\.0\.proj", ".context_block.mlp.fc1"),
    (r"\.ff_context\.net\.2", ".context_block.mlp.fc2"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
)

COSMOS: Renames = (
    (r"^transformer_blocks", "blocks"),
    (r"^time_embed\.t_embedder", "t_embedder.1"),
    (r"^time_embed\.norm", "t_embedding_norm"),
    (r"^patch_embed\.proj", "x_embedder.proj.1"),
    (r"norm1\.linear", "adaln_modulation_self_attn"),
    (r"norm2\.linear", "adaln_modulation_cross_attn"),
    (r"norm3\.linear", "adaln_modulation_mlp"),
    (r"^norm_out\.linear", "final_layer.adaln_modulation"),
    (r"(adaln_modulation\w*)_([12])\.", r"\1.\2."),
    (r"attn1", "self_attn"),
    (r"attn2", "cross_attn"),
    (r"to_([qkv])\.", r"\1_proj."),
    (r"norm_([qk])\.", r"\1_norm."),
    (r"to_out\.0", "output_proj"),
    (r"ff\.net\.0\.proj", "mlp.layer1"),
    (r"ff\.net\.2", "mlp.layer2"),
    (r"^proj_out", "final_layer.linear"),
)


def renamed(tensors: Mapping[str, Tensor], renames: Renames, prefix: str) -> dict[str, Tensor]:
    """Rename tensors; norms inside attention blocks keep their names."""
    found = {}
    for before, tensor in tensors.items():
        name = before
        for pattern, new in renames:
            if "transformer_blocks" in name and pattern.startswith(r"\.norm") and renames is UNET:
                continue
            name = re.sub(pattern, new, name)
        found[prefix + name] = tensor.contiguous()
    return found


def joined(tensors: Mapping[str, Tensor], parts: tuple[str, str, str], name: str) -> dict[str, Tensor]:
    found = dict(tensors)
    for key in tensors:
        if f".{parts[0]}." in key:
            own = [found.pop(key.replace(f".{parts[0]}.", f".{part}.")) for part in parts]
            found[key.replace(f".{parts[0]}.", f".{name}.")] = torch.cat(own)
    return found


def swapped(tensor: Tensor) -> Tensor:
    """Swap the halves: the original layouts have the shift first, diffusers the scale."""
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def _vae(vae: Any, prefix: str) -> dict[str, Tensor]:
    found = renamed(vae.state_dict(), VAE, prefix)
    is_conv = re.compile(r"mid\.attn_1\.(q|k|v|proj_out)\.weight$")  # in LDM a convolution of one pixel
    return {name: tensor[:, :, None, None] if is_conv.search(name) else tensor for name, tensor in found.items()}


def _clip(encoder: Any) -> dict[str, Tensor]:
    return {name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}


def _open_clip(encoder: Any, prefix: str) -> dict[str, Tensor]:
    tensors = joined(_clip(encoder), ("q_proj", "k_proj", "v_proj"), "in_proj")
    projection = tensors.pop("text_projection.weight")
    return {**renamed(tensors, OPEN_CLIP, prefix), f"{prefix}text_projection": projection.T.contiguous()}


def _sd3(transformer: Any, prefix: str) -> dict[str, Tensor]:
    tensors = joined(transformer.state_dict(), ("to_q", "to_k", "to_v"), "qkv")
    tensors = joined(tensors, ("add_q_proj", "add_k_proj", "add_v_proj"), "context_qkv")
    last = transformer.config.num_layers - 1
    halves = (f"transformer_blocks.{last}.norm1_context.", "norm_out.")
    tensors = {name: swapped(tensor) if name.startswith(halves) else tensor for name, tensor in tensors.items()}
    return renamed(tensors, SD3, prefix)


def original_layout(folder: Path, family: str) -> dict[str, Tensor]:
    import diffusers
    import transformers

    if family == "anima":  # whose VAE and text encoder are files of their own
        kinds = {"transformer": "CosmosTransformer3DModel", "text_conditioner": "AnimaTextConditioner"}
        model, inside = (getattr(diffusers, kind).from_pretrained(folder / name).state_dict() for name, kind in kinds.items())
        return {**renamed(model, COSMOS, "net."), **renamed(inside, (), "net.llm_adapter.")}

    def part(name: str) -> Any:
        library, kind = parts[name]
        return getattr({"diffusers": diffusers, "transformers": transformers}[library], kind).from_pretrained(folder / name)

    parts = diffusers.DiffusionPipeline.load_config(folder)
    if family == "sd3":
        clips = {"l": "text_encoder", "g": "text_encoder_2"}
        texts = {
            f"text_encoders.clip_{letter}.transformer.{'' if key.startswith('text_projection') else 'text_model.'}{key}": tensor
            for letter, name in clips.items()
            for key, tensor in _clip(part(name)).items()
        }
        if parts["text_encoder_3"][0]:
            t5 = part("text_encoder_3").state_dict()
            texts |= {f"text_encoders.t5xxl.transformer.{name}": tensor.clone() for name, tensor in t5.items()}
        return {**_sd3(part("transformer"), "model.diffusion_model."), **_vae(part("vae"), "first_stage_model."), **texts}
    if family == "sdxl":
        first = {f"conditioner.embedders.0.transformer.text_model.{k}": v for k, v in _clip(part("text_encoder")).items()}
        texts = {**first, **_open_clip(part("text_encoder_2"), "conditioner.embedders.1.model.")}
    else:
        texts = {f"cond_stage_model.transformer.text_model.{k}": v for k, v in _clip(part("text_encoder")).items()}
    unet = renamed(part("unet").state_dict(), UNET, "model.diffusion_model.")
    return {**unet, **_vae(part("vae"), "first_stage_model."), **texts}


def write_single_file(path: Path, folder: Path, family: str) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in original_layout(folder, family).items()}, path)
    return path
