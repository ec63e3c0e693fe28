"""Model folders of real classes with random weights, as small as is asked for: an `AutoencoderKL` and a BERT."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple("abcdefghijklmnopqrstuvwxyz")  # of captions: only how many there are is of account
MAX_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """How large the parts are; a VAE of n widths takes 2^(n - 1) px to a latent's pixel."""

    vae_widths: tuple[int, ...]
    text_width: int = 64
    text_layers: int = 2

    @property
    def name(self) -> str:
        return f"vae-{'-'.join(map(str, self.vae_widths))}-text-{self.text_width}x{self.text_layers}.model"


def kept_model(folder: Path, shape: ModelShape) -> Path:
    """Give the model of that shape in `folder`, made unless it is there already. Random seed 0."""
    path, making = folder / shape.name, folder / f"{shape.name}.making"
    if not path.exists():
        shutil.rmtree(making, ignore_errors=True)
        print(f"making {path.name}", file=sys.stderr)
        making.mkdir()
        _write(making, shape)
        making.rename(path)
    return path


def _write(folder: Path, shape: ModelShape) -> None:
    import torch
    import transformers
    from diffusers import AutoencoderKL

    transformers.logging.disable_progress_bar()
    kind: Any = AutoencoderKL
    levels = len(shape.vae_widths)
    words = folder / "vocabulary.txt"
    words.write_text("\n".join((*SPECIAL, *WORDS)), encoding="ascii")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(
            block_out_channels=shape.vae_widths,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            norm_num_groups=min(8, *shape.vae_widths),
            latent_channels=4,
            layers_per_block=1,
        ).save_pretrained(folder / "vae")
        transformers.BertTokenizer(vocab=str(words), model_max_length=MAX_TOKENS).save_pretrained(folder / "tokenizer")
        config = transformers.BertConfig(
            vocab_size=len(SPECIAL) + len(WORDS),
            hidden_size=shape.text_width,
            num_hidden_layers=shape.text_layers,
            num_attention_heads=max(1, shape.text_width // 32),
            intermediate_size=4 * shape.text_width,
            max_position_embeddings=MAX_TOKENS,
        )
        transformers.BertModel(config).save_pretrained(folder / "text_encoder")
