"""Whole pipelines of the real classes, a few thousand weights each, as diffusers saves them: for each family of encoders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucketline.families.modular import ModularAsPipeline
from tests import language_models
from tests.language_models import WORDS

CLIP_LENGTH = 77
PIPELINES = {
    "sd": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "sd3 without T5": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "flux_kontext": "FluxKontextPipeline",
    "pixart_alpha": "PixArtAlphaPipeline",
    "pixart_sigma": "PixArtSigmaPipeline",
}
RECENT_PIPELINES = {
    "qwenimage": "QwenImagePipeline",
    "qwenimage_edit": "QwenImageEditPipeline",
    "qwenimage_edit_plus": "QwenImageEditPlusPipeline",
    "qwenimage21": "QwenImage21Pipeline",
    "flux2": "Flux2Pipeline",
    "flux2 klein": "Flux2KleinPipeline",
    "z_image": "ZImagePipeline",
    "krea2": "Krea2Pipeline",
    "prx": "PRXPipeline",
    "prx dc": "PRXPipeline",
    "chroma": "ChromaPipeline",
    "sana": "SanaPipeline",
    "lumina2": "Lumina2Pipeline",
    "hidream_image": "HiDreamImagePipeline",
    "ernie_image": "ErnieImagePipeline",
    "ideogram4": "Ideogram4Pipeline",
    "auraflow": "AuraFlowPipeline",
    "anima": "AnimaModularPipeline",
}
T5_WIDTH = 24


_UNGUIDED = {"guidance_scale": 1.0}


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a tiny pipeline is held against its family: its class, the size of its images, and how it is called."""

    pipeline: str
    call: dict[str, Any] = field(default_factory=lambda: _UNGUIDED)  # one caption a row: without guidance
    size: tuple[int, int] = (16, 24)  # px, height first
    num_tokens: int | None = None  # that the pipeline pads captions to, where its model's tokens have the image's behind them


FORMS: dict[str, Form] = {
    **{name: Form(pipeline=pipeline) for name, pipeline in PIPELINES.items() if name != "flux_kontext"},
    "flux": Form(pipeline="FluxPipeline", call={"guidance_scale": 3.5}),
    **{
        name: Form(pipeline=PIPELINES[name], call={**_UNGUIDED, "clean_caption": False, "use_resolution_binning": False})
        for name in ("pixart_alpha", "pixart_sigma")
    },
    **{name: Form(pipeline="PRXPipeline", call={**_UNGUIDED, "use_resolution_binning": False}) for name in ("prx", "prx dc")},
    "chroma": Form(pipeline="ChromaPipeline"),
    "sana": Form(pipeline="SanaPipeline", call={**_UNGUIDED, "use_resolution_binning": False}, size=(32, 64)),
    "lumina2": Form(pipeline="Lumina2Pipeline", size=(16, 32)),
    "hidream_image": Form(pipeline="HiDreamImagePipeline", size=(8, 32)),
    "ernie_image": Form(pipeline="ErnieImagePipeline"),
    # its scheduler divides by 0 for one step
    "qwenimage": Form(pipeline="QwenImagePipeline", call={"true_cfg_scale": 1.0, "num_inference_steps": 2}),
    "qwenimage21": Form(pipeline="QwenImage21Pipeline", call={"true_cfg_scale": 1.0, "use_kv_cache": False}, size=(64, 96)),
    "flux2": Form(pipeline="Flux2Pipeline", call={"guidance_scale": 4.0}),
    "flux2 klein": Form(pipeline="Flux2KleinPipeline"),
    "z_image": Form(pipeline="ZImagePipeline", call={"guidance_scale": 0.0}),
    "krea2": Form(pipeline="Krea2Pipeline", call={"guidance_scale": 0.0}),
    "auraflow": Form(pipeline="AuraFlowPipeline"),
    "anima": Form(pipeline="AnimaModularPipeline"),
    "ideogram4": Form(pipeline="Ideogram4Pipeline", call={**_UNGUIDED, "guidance_schedule": None}, num_tokens=2048),
}
"""The pipelines of the families that have a file, by a name of `write_pipeline`."""
PAIR_FORMS: dict[str, Form] = {
    "flux_kontext": Form(pipeline="FluxKontextPipeline", call={"guidance_scale": 3.5}),
    "qwenimage_edit": Form(pipeline="QwenImageEditPipeline", call=FORMS["qwenimage"].call, size=(32, 64)),
    "qwenimage_edit_plus": Form(pipeline="QwenImageEditPlusPipeline", call=FORMS["qwenimage"].call, size=(32, 64)),
}
"""The same of the families whose pipeline is for references."""


def write_pipeline(folder: Path, family: str, **more: Any) -> Path:
    """Write the family's whole pipeline at random, through its own `save_pretrained`; `more` goes to its constructor."""
    import diffusers
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(sum(map(ord, family)))
    parts: dict[str, Any]
    if family in RECENT_PIPELINES:
        parts = {**_RECENT_PARTS[family](), "transformer": tiny_model(family)}
        kind = RECENT_PIPELINES[family]
        if "Modular" in kind:
            modular = getattr(diffusers, kind)()
            modular.update_components(**parts, **more)
            modular.save_pretrained(str(folder), overwrite_modular_index=True)
            return folder
        getattr(diffusers, kind)(**parts, **more).save_pretrained(folder)
        if family.startswith("prx"):
            language_models.publish_t5gemma(folder)
        return folder
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    parts = {"vae": tiny_vae(), "scheduler": diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)}
    parts |= {_part(family): tiny_model(family)}
    if family.startswith(("sd3", "flux")):  # whose pipelines add it to what they decode
        parts |= {"vae": tiny_vae(scaling_factor=1.5305, shift_factor=0.0609)}
    if family in ("sd", "sdxl"):
        parts |= {"text_encoder": _tiny_clip(8, projected=False), "tokenizer": clip}
    if family == "sd":
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if family == "sdxl":
        parts |= {"text_encoder_2": _tiny_clip(12, projected=True), "tokenizer_2": clip, "add_watermarker": False}
    if family.startswith("sd3"):
        parts |= {"text_encoder": _tiny_clip(8, projected=True), "text_encoder_2": _tiny_clip(12, projected=True)}
        parts |= {"tokenizer": clip, "tokenizer_2": clip, "tokenizer_3": None, "text_encoder_3": None}
        parts |= {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)}
    if family == "sd3":
        parts |= {"text_encoder_3": _tiny_t5(), "tokenizer_3": t5}
    if family.startswith("flux"):
        parts |= {"text_encoder": _tiny_clip(8, projected=False), "tokenizer": clip}
        parts |= {"text_encoder_2": _tiny_t5(), "tokenizer_2": t5}
        parts |= {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)}
    if family.startswith("pixart"):
        parts |= {"text_encoder": _tiny_t5(), "tokenizer": t5}
    getattr(diffusers, PIPELINES[family])(**parts, **more).save_pretrained(folder)
    return folder


def open_pipeline(folder: Path, family: str) -> Any:
    """Open a pipeline that `write_pipeline` wrote; a processor of images needs torchvision, and is made again instead."""
    import diffusers

    if "Modular" in (name := (FORMS | PAIR_FORMS)[family].pipeline):
        modular = getattr(diffusers, name).from_pretrained(str(folder), local_files_only=True)
        modular.load_components()
        return ModularAsPipeline(modular)
    made: dict[str, Any] = {"processor": language_models.qwen3_vl_processor()} if family == "qwenimage21" else {}
    if family.startswith("qwenimage_edit"):
        made = {"processor": language_models.qwen_edit_processor()}
    if family == "sd3 without T5":
        made = {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **made)
    if family == "hidream_image":
        pipeline.default_sample_size = 8  # draws images of this many latents squared, whatever their shape
    if family == "chroma":
        encode = pipeline._get_t5_prompt_embeds

        def with_a_mask(*args: Any, **kwargs: Any) -> Any:
            embeddings, mask = encode(*args, **kwargs)
            return embeddings, mask.bool()  # of floats, attention adds it instead of masking

        pipeline._get_t5_prompt_embeds = with_a_mask
    return pipeline


def write_dit(folder: Path, names: dict[int, str]) -> Path:
    """Write a class-conditional DiT of three classes, their names in its index as the published ones have them."""
    import diffusers

    pipeline: Any = diffusers.DiTPipeline
    pipeline(transformer=tiny_model("dit"), vae=tiny_vae(), scheduler=diffusers.DDIMScheduler()).save_pretrained(folder)
    index = folder / "model_index.json"  # diffusers reads the names, and does not write them
    index.write_text(json.dumps({**json.loads(index.read_text(encoding="utf-8")), "id2label": names}), encoding="utf-8")
    return folder


def tiny_vae(**changes: Any) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(**{**_VAE, **changes})


def tiny_dc() -> Any:
    return _tiny(
        "AutoencoderDC",
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_out_channels=(4, 4),
        decoder_block_out_channels=(4, 4),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        scaling_factor=0.41,
    )


def tiny_qwen_vae() -> Any:
    return _tiny("AutoencoderKLQwenImage", temperal_downsample=[True], dim_mult=[1, 1], **_QWEN_VAE)


def tiny_qwen21_vae() -> Any:
    """Make an AutoencoderKLQwenImage21 that divides sizes by 16, as its pipeline expects, and takes four channels."""
    sizes: dict[str, Any] = {"temperal_downsample": [False, True, True, True], "dim_mult": [1] * 5, "decoder_base_dim": 4}
    return _tiny("AutoencoderKLQwenImage21", **sizes, **_QWEN_VAE)


def tiny_flux2_vae() -> Any:
    """Make an AutoencoderKLFlux2 that halves once; its packed latents have a mean and a variance per channel."""
    import torch

    vae = _tiny("AutoencoderKLFlux2", **_VAE)
    vae.bn.running_mean.copy_(torch.randn(16))
    vae.bn.running_var.copy_(torch.rand(16) + 0.5)
    return vae


def _tiny(kind: str, **sizes: Any) -> Any:
    import diffusers

    return getattr(diffusers, kind)(**sizes)


_VAE: dict[str, Any] = {
    "block_out_channels": (4, 4),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 2,
    "latent_channels": 4,
    "sample_size": 16,
}
_QWEN_VAE: dict[str, Any] = {
    "base_dim": 4,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [-0.7571, -0.7089, -0.9113, 0.1075],
    "latents_std": [2.8184, 1.4541, 2.3275, 2.6558],
}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 4}
_UNET: dict[str, Any] = {
    "block_out_channels": (4, 8),
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 2,
    "cross_attention_dim": 8,
    "sample_size": 64,
}
_TEXT_AND_SIZES: dict[str, Any] = {
    "cross_attention_dim": 8 + 12,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 12 + 6 * 4,
}
_PIXART: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 4,  # the sizes take a third of the width each
    "num_layers": 1,
    "norm_num_groups": 1,
    "caption_channels": T5_WIDTH,
    "cross_attention_dim": 12,
}
_SD3: dict[str, Any] = {
    **_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "sample_size": 8,
    "pos_embed_max_size": 8,
    "joint_attention_dim": T5_WIDTH,
    "caption_projection_dim": 8,
    "pooled_projection_dim": 8 + 12,
}
_FLUX: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "joint_attention_dim": T5_WIDTH,
    "pooled_projection_dim": 8,
    "axes_dims_rope": (2, 2, 4),
    "guidance_embeds": True,
}
_ROPED: dict[str, Any] = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "axes_dims_rope": (2, 2, 4)}
_QWEN: dict[str, Any] = {**_ROPED, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 16}
_QWEN21: dict[str, Any] = {**_ROPED, "in_channels": 4, "out_channels": 4, "context_in_dim": 16}
_FLUX2: dict[str, Any] = {
    **_ROPED,
    "axes_dims_rope": (2, 2, 2, 2),
    "num_single_layers": 1,
    "in_channels": 16,
    "joint_attention_dim": 3 * 16,
    "timestep_guidance_channels": 8,
}
_Z_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 16,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 16,
    "axes_dims": [4, 2, 2],
    "axes_lens": [1024, 32, 32],
}
_KREA2: dict[str, Any] = {
    **_ROPED,
    "in_channels": 16,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "timestep_embed_dim": 8,
    "text_hidden_dim": 16,
    "num_text_layers": 2,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 16,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
}
_PRX: dict[str, Any] = {
    "in_channels": 4,
    "context_in_dim": 16,
    "hidden_size": 16,
    "num_heads": 2,
    "depth": 1,
    "axes_dim": [4, 4],
}
_CHROMA: dict[str, Any] = {
    **_ROPED,
    "num_single_layers": 1,
    "in_channels": 16,
    "joint_attention_dim": T5_WIDTH,
    "approximator_num_channels": 8,
    "approximator_hidden_dim": 8,
    "approximator_layers": 1,
}
_SANA: dict[str, Any] = {
    **_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 16,
}
_LUMINA2: dict[str, Any] = {
    "in_channels": 4,
    "hidden_size": 16,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 8,
    "axes_dim_rope": (4, 2, 2),
    "cap_feat_dim": 16,
}
_HIDREAM: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "caption_channels": [T5_WIDTH, 16],
    "text_emb_dim": 8 + 12,
    "axes_dims_rope": (4, 2, 2),
    "max_resolution": (16, 16),
    "llama_layers": [0, 1],
}
_ERNIE: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_layers": 1,
    "ffn_hidden_size": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_in_dim": 16,
    "rope_axes_dim": (4, 2, 2),
}
_IDEOGRAM4: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "adaln_dim": 8,
    "llm_features_dim": 13 * 16,
    "mrope_section": (2, 1, 1),
}
_AURAFLOW: dict[str, Any] = {
    **_HEADS,
    "num_mmdit_layers": 1,
    "num_single_dit_layers": 1,
    "joint_attention_dim": T5_WIDTH,
    "caption_projection_dim": 8,
    "pos_embed_max_size": 64,
}
_ANIMA: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,  # whose thirds are for frames, heights and widths
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "mlp_ratio": 1.0,
    "text_embed_dim": T5_WIDTH,
    "adaln_lora_dim": 8,
    "extra_pos_embed_type": None,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd": ("UNet2DConditionModel", _UNET),
    "sdxl": ("UNet2DConditionModel", {**_UNET, **_TEXT_AND_SIZES}),
    "dit": (
        "DiTTransformer2DModel",
        {**_HEADS, "num_layers": 1, "num_embeds_ada_norm": 3, "norm_num_groups": 1, "out_channels": 8, "sample_size": 8},
    ),
    "pixart_alpha": ("PixArtTransformer2DModel", _PIXART),  # of the sample size 128, so it is told the image's size
    "pixart_sigma": ("PixArtTransformer2DModel", {**_PIXART, "sample_size": 8}),
    "sd3": ("SD3Transformer2DModel", _SD3),
    "flux": ("FluxTransformer2DModel", _FLUX),
    "flux_kontext": ("FluxTransformer2DModel", _FLUX),
    **dict.fromkeys(("qwenimage", "qwenimage_edit", "qwenimage_edit_plus"), ("QwenImageTransformer2DModel", _QWEN)),
    "qwenimage21": ("QwenImage21Transformer2DModel", _QWEN21),
    "flux2": ("Flux2Transformer2DModel", _FLUX2),
    "flux2 klein": ("Flux2Transformer2DModel", {**_FLUX2, "guidance_embeds": False}),
    "z_image": ("ZImageTransformer2DModel", _Z_IMAGE),
    "krea2": ("Krea2Transformer2DModel", _KREA2),
    "prx": ("PRXTransformer2DModel", _PRX),
    "prx dc": ("PRXTransformer2DModel", {**_PRX, "patch_size": 1}),
    "chroma": ("ChromaTransformer2DModel", _CHROMA),
    "sana": ("SanaTransformer2DModel", _SANA),
    "lumina2": ("Lumina2Transformer2DModel", _LUMINA2),
    "hidream_image": ("HiDreamImageTransformer2DModel", _HIDREAM),
    "ernie_image": ("ErnieImageTransformer2DModel", _ERNIE),
    "ideogram4": ("Ideogram4Transformer2DModel", _IDEOGRAM4),
    "auraflow": ("AuraFlowTransformer2DModel", _AURAFLOW),
    "anima": ("CosmosTransformer3DModel", _ANIMA),
}


def _flow(**config: Any) -> Any:
    return _tiny("FlowMatchEulerDiscreteScheduler", **config)


def _qwenimage() -> dict[str, Any]:
    text = {"text_encoder": language_models.qwen25_vl(), "tokenizer": language_models.qwen_tokenizer()}
    flow = _flow(use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)
    return {**text, "vae": tiny_qwen_vae(), "scheduler": flow}


def _qwenimage_edit() -> dict[str, Any]:
    text = {"text_encoder": language_models.qwen25_vl(edits=True), "tokenizer": language_models.qwen_tokenizer(edits=True)}
    return {**_qwenimage(), **text, "processor": language_models.qwen_edit_processor()}


def _qwenimage21() -> dict[str, Any]:
    text = {"text_encoder": language_models.qwen3_vl(), "processor": language_models.qwen3_vl_processor()}
    return {**text, "vae": tiny_qwen21_vae(), "scheduler": _flow(use_dynamic_shifting=True)}


def _flux2() -> dict[str, Any]:
    # the published one has a processor of images, which needs torchvision, around the same tokenizer
    text = {"text_encoder": language_models.mistral3(31), "tokenizer": language_models.mistral_tokenizer()}
    return {**text, "vae": tiny_flux2_vae(), "scheduler": _flow(use_dynamic_shifting=True, shift=3.0)}


def _flux2_klein() -> dict[str, Any]:
    text = {"text_encoder": language_models.qwen3(28), "tokenizer": language_models.qwen_tokenizer()}
    return {**_flux2(), **text}


def _z_image() -> dict[str, Any]:
    text = {"text_encoder": language_models.qwen3(), "tokenizer": language_models.qwen_tokenizer()}
    return {**text, "vae": tiny_vae(scaling_factor=0.3611, shift_factor=0.1159), "scheduler": _flow(shift=3.0)}


def _krea2() -> dict[str, Any]:
    text = {"text_encoder": language_models.qwen3_vl("Qwen3VLModel"), "tokenizer": language_models.qwen_tokenizer()}
    flow = _flow(use_dynamic_shifting=True, max_image_seq_len=6400)
    return {**text, "vae": tiny_qwen_vae(), "scheduler": flow, "text_encoder_select_layers": (1, 2)}


def _prx() -> dict[str, Any]:
    text = {"text_encoder": language_models.t5gemma(), "tokenizer": language_models.gemma_tokenizer(256)}
    return {**text, "vae": tiny_vae(scaling_factor=0.3611, shift_factor=0.1159), "scheduler": _flow(shift=3.0)}


def _prx_dc() -> dict[str, Any]:
    return {**_prx(), "vae": tiny_dc()}


def _chroma() -> dict[str, Any]:
    text = {"text_encoder": _tiny_t5(), "tokenizer": t5_tokenizer()}
    return {**text, "vae": tiny_vae(scaling_factor=0.3611, shift_factor=0.1159), "scheduler": _flow()}


def _sana() -> dict[str, Any]:
    text = {"text_encoder": language_models.gemma2(), "tokenizer": language_models.gemma_tokenizer(8192)}
    flow = _tiny("DPMSolverMultistepScheduler", use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
    return {**text, "vae": tiny_dc(), "scheduler": flow}


def _lumina2() -> dict[str, Any]:
    text = {"text_encoder": language_models.gemma2(), "tokenizer": language_models.gemma_tokenizer(8192)}
    eighth = {  # the pipeline takes every VAE for one that divides by 8
        "block_out_channels": (4,) * 4,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    return {**text, "vae": tiny_vae(scaling_factor=0.3611, shift_factor=0.1159, **eighth), "scheduler": _flow(shift=6.0)}


def _hidream_image() -> dict[str, Any]:
    return {
        "text_encoder": _tiny_clip(8, projected=True, length=248),
        "text_encoder_2": _tiny_clip(12, projected=True, length=248),
        "text_encoder_3": _tiny_t5(),
        "text_encoder_4": language_models.llama(),
        "tokenizer": clip_tokenizer(248),
        "tokenizer_2": clip_tokenizer(248),
        "tokenizer_3": t5_tokenizer(512),
        "tokenizer_4": language_models.mistral_tokenizer(begins=True),
        "vae": tiny_vae(scaling_factor=0.3611, shift_factor=0.1159),
        "scheduler": _tiny("UniPCMultistepScheduler", use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"),
    }


def _ernie_image() -> dict[str, Any]:
    text = {
        "text_encoder": language_models.mistral3(kind="Mistral3Model"),
        "tokenizer": language_models.mistral_tokenizer(begins=True),
    }
    return {**text, "vae": tiny_flux2_vae(), "scheduler": _flow(shift=4.0), "pe": None, "pe_tokenizer": None}


def _ideogram4() -> dict[str, Any]:
    # The pipeline pads captions to 2,048 tokens and takes the states of 36 layers: one head is a third of the time of two.
    encoder = language_models.qwen3_vl("Qwen3VLModel", 36, num_heads=1)
    text = {"text_encoder": encoder, "tokenizer": language_models.qwen_tokenizer()}
    other = {"unconditional_transformer": tiny_model("ideogram4")}
    return {**text, **other, "vae": tiny_flux2_vae(), "scheduler": _flow()}


def _auraflow() -> dict[str, Any]:
    text = {"text_encoder": _tiny_t5("UMT5"), "tokenizer": t5_tokenizer()}
    return {**text, "vae": tiny_vae(scaling_factor=0.13025), "scheduler": _flow(shift=1.73)}


def _anima() -> dict[str, Any]:
    text = {"text_encoder": language_models.qwen3().model, "tokenizer": language_models.qwen_tokenizer()}
    sizes = {"source_dim": 16, "target_dim": T5_WIDTH, "model_dim": 8, "num_layers": 1, "num_attention_heads": 2}
    conditioner = _tiny("AnimaTextConditioner", target_vocab_size=64, **sizes)
    text |= {"text_conditioner": conditioner, "t5_tokenizer": t5_tokenizer(512)}
    return {**text, "vae": tiny_qwen_vae(), "scheduler": _flow(shift=3.0)}


_RECENT_PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "qwenimage": _qwenimage,
    "qwenimage_edit": _qwenimage_edit,
    "qwenimage_edit_plus": _qwenimage_edit,
    "qwenimage21": _qwenimage21,
    "flux2": _flux2,
    "flux2 klein": _flux2_klein,
    "z_image": _z_image,
    "krea2": _krea2,
    "prx": _prx,
    "prx dc": _prx_dc,
    "chroma": _chroma,
    "sana": _sana,
    "lumina2": _lumina2,
    "hidream_image": _hidream_image,
    "ernie_image": _ernie_image,
    "ideogram4": _ideogram4,
    "auraflow": _auraflow,
    "anima": _anima,
}


def tiny_model(family: str, **changes: Any) -> Any:
    """Make the family's own model, of sizes that fit the encoders next to it, from torch's generator."""
    kind, sizes = _MODELS[family.removesuffix(" without T5")]
    model = _tiny(kind, **{**sizes, **changes})
    if family in ("ernie_image", "prx", "prx dc"):  # which start at zero where others start at random, and so without attention
        for weights in model.parameters():
            if not weights.any():
                weights.data.normal_(std=0.1)
    return model


def _part(family: str) -> str:
    return "unet" if family in ("sd", "sdxl") else "transformer"


def _tiny_clip(width: int, *, projected: bool, length: int = CLIP_LENGTH) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=61,
        hidden_size=width,
        intermediate_size=16,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=length,
        bos_token_id=59,
        eos_token_id=60,
        pad_token_id=60,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def _tiny_t5(kind: str = "T5") -> Any:
    import transformers

    sizes = {"vocab_size": 64, "d_model": T5_WIDTH, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return getattr(transformers, f"{kind}EncoderModel")(getattr(transformers, f"{kind}Config")(**sizes))


def clip_tokenizer(length: int = CLIP_LENGTH) -> Any:
    """Make a CLIP tokenizer of letters, and of merges that make some of the words."""
    import transformers

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = [("c", "a"), ("ca", "t</w>"), ("r", "e"), ("re", "d</w>"), ("t", "h"), ("th", "e</w>"), ("o", "f</w>")]
    merged = ["".join(merge) for merge in merges]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), *merged, "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(
        vocab={word: n for n, word in enumerate(vocabulary)}, merges=merges, model_max_length=length
    )


def t5_tokenizer(length: int = CLIP_LENGTH) -> Any:
    """Make a T5 tokenizer: a unigram model of the words and of single letters."""
    import tokenizers
    import transformers

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0)]
    pieces += [(f"\u2581{word}", -4.0) for word in WORDS] + [(letter, -6.0) for letter in letters]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.T5TokenizerFast(tokenizer_object=backend, extra_ids=0, model_max_length=length)
