"""Write a tiny, randomly initialised model folder in diffusers' layout: real classes, no hub.

python make_model.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

MARKS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,'-:()"


def tokenizer(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    found = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    found.normalizer = normalizers.Lowercase()
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=77, **MARKS)


def write(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        sample_size=256,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=1,
        scaling_factor=0.18215,
    ).save_pretrained(out / "vae")
    words = [*MARKS.values(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer(vocabulary).save_pretrained(out / "tokenizer")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=80, **sizes)
    BertModel(text).save_pretrained(out / "text_encoder")
    UNet2DConditionModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
    ).save_pretrained(out / "unet")
    DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012).save_pretrained(out / "scheduler")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
