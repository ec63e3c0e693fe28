"""Cost of references in a training step: stored, encoded again in each step, and none."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from bucketline.loader import Batch
    from bucketline.train.run import Run
    from bucketline.train.step import Training

PX, CHANNELS, WIDTH, NUM_TOKENS = 8, 16, 128, 32
ALIKE = "encoded in each step"
SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


@dataclass(frozen=True, kw_only=True)
class TrainReferences(Case):
    """Train adapters on edit pairs, by turns with stored references, with the VAE run over them in each step, and without.

    Model and VAE are of Flux.2's transformer class and of Flux's VAE class, small and at random. The references' pixels are on
    the device, decoded and resized: for a trainer that caches no references, reading them comes on top.

    Example: python -m bucketline.bench train --references --steps 2 --repeats 1 --json
    """

    references: int = 2
    """References of a sample."""
    side_px: int = 256
    """Sides of targets and references."""
    batch_size: int = 2
    """Images per batch."""
    steps: int = 4
    """Steps per round."""
    layers: int = 4
    """Blocks of either kind of the transformer."""
    heads: int = 8
    """Heads of its attention, of 64 channels each."""
    vae_width: int = 32
    """Channels of the VAE's first level; 128 in Flux's. The next ones have 2, 4 and 4 times as many."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.cases.train import _asked, _trainer

        stores = {"pairs": self.references, "plain": 0}
        for name, count in stores.items():
            self._write_store(folder / name, count)
        self._write_model(folder / "model")
        given = {"batch_size": str(self.batch_size), "max_steps": 1, "lora_rank": 4, "num_images": 0, "memory": "off"}
        runs = {
            name: _trainer(
                _asked(
                    folder, "", 0, store=(folder / name,), model=folder / "model", output_dir=folder / f"{name}.run", **given
                )
            )
            for name in stores
        }
        pairs, plain = ((run.training, run.loader.forever()) for run in runs.values())
        encode = self._encoder(runs["pairs"])
        subjects = [
            Subject(name=ALIKE, measure=self._rate(*pairs, encode)),
            Subject(name="stored", measure=self._rate(*pairs), limit=ALIKE, mark=Mark(bound=1.0)),
            Subject(name="no references", measure=self._rate(*plain), limit=ALIKE, beside=("stored",)),
        ]
        try:
            return summarise("train, references", "images/s", subjects, alternate(subjects, self.repeats))
        finally:
            for run in runs.values():
                run.close()

    def _rate(
        self, training: Training, batches: Iterator[Batch], encode: Callable[[Batch], Batch] = lambda batch: batch
    ) -> Callable[[int], float]:
        """Return the measure of steps, in images per second, whose batches pass through `encode` in the step."""
        import torch

        from bucketline.train.step import train_step

        def measure(_: int) -> float:
            begin = time.perf_counter()
            for step in range(self.steps):
                train_step(training, map(encode, batches), step)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return self.steps * self.batch_size / (time.perf_counter() - begin)

        return measure

    def _encoder(self, run: Run) -> Callable[[Batch], Batch]:
        """Return what replaces a batch's references by those that a VAE makes of pixels."""
        import torch
        from diffusers import AutoencoderKL

        widths = tuple(self.vae_width * times for times in (1, 2, 4, 4))
        kind: Any = AutoencoderKL
        vae = kind(
            block_out_channels=widths,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=CHANNELS,
            layers_per_block=2,
            norm_num_groups=min(32, self.vae_width),
        ).to(run.device)
        pixels = torch.rand(self.batch_size, 3, self.side_px, self.side_px, device=run.device) * 2 - 1

        @torch.no_grad()
        def encode(batch: Batch) -> Batch:
            with run.training.autocast:
                made: list[Tensor] = [vae.encode(pixels).latent_dist.mode() for _ in batch.references]
            own = {f"reference/{number}": one.to(batch.latents.dtype) for number, one in enumerate(made)}
            return replace(batch, columns={**batch.columns, **own})

        return encode

    def _write_store(self, path: Path, count: int) -> None:
        from bucketline.bench.fixtures.values import random_f16
        from bucketline.store import Column, LatentColumn, ReferenceColumn, StoreWriter

        random, side = np.random.default_rng(0), self.side_px // PX
        norm = {"mean": [0.0] * 4 * CHANNELS, "std": [1.0] * 4 * CHANNELS}
        with StoreWriter(
            path,
            encoders={
                "vae": {"latent_channels": CHANNELS, "batch_norm": norm},
                "text_encoder": {"padding": "max_length", "max_tokens": NUM_TOKENS, "family": "flux2_klein"},
            },
            columns=[LatentColumn(channels=CHANNELS), *(ReferenceColumn(n, channels=CHANNELS) for n in range(count))],
            text=[Column(name="tokens", dtype="F16", shape=(WIDTH,))],
            empty_caption={"tokens": random_f16(random, (NUM_TOKENS, WIDTH))},
        ) as writer:
            for row in range(32):
                roles = ("target", *(f"reference/{number}" for number in range(count)))
                arrays = {role: random_f16(random, (CHANNELS, side, side)) for role in roles}
                writer.add(str(row), "train", arrays, {f"edit {row}": {"tokens": random_f16(random, (NUM_TOKENS, WIDTH))}})

    def _write_model(self, folder: Path) -> None:
        transformer = {
            "_class_name": "Flux2Transformer2DModel",
            "in_channels": 4 * CHANNELS,
            "num_layers": self.layers,
            "num_single_layers": self.layers,
            "num_attention_heads": self.heads,
            "attention_head_dim": 64,
            "axes_dims_rope": [16, 16, 16, 16],
            "joint_attention_dim": WIDTH,
            "guidance_embeds": False,
        }
        index = {"_class_name": "Flux2KleinPipeline"}
        for name, content in {
            "model_index.json": index,
            "transformer/config.json": transformer,
            "scheduler/scheduler_config.json": SCHEDULER,
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
