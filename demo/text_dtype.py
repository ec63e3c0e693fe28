"""Measure what quantised text costs: the error on real captions through a real encoder, and the loss of training on it.

    python demo/text_dtype.py OUT [--steps 200]        (replaces OUT)

Makes the demo's photographs and model in OUT, and prints the error of every stored dtype of the captions' tokens. Then packs a
store with each of F16 and I8, trains a model on both for some steps (same seed, order and noise), and prints both losses.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import numpy as np
import torch

from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import load_caption_encoder
from bucketline.store import Store
from bucketline.store.format.text import QUANTISED, dequantise, measured_error, quantise

HERE = Path(__file__).resolve().parent
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def run(program: Path | str, *arguments: object) -> None:
    """Run a script or a module's command in this process; its last lines explain a failure."""
    said, sys.argv = io.StringIO(), [str(program), *map(str, arguments)]
    code: object = None
    with redirect_stdout(said), redirect_stderr(said):
        try:
            if isinstance(program, Path):
                runpy.run_path(str(program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
        except SystemExit as end:
            code = end.code
    if code:
        raise SystemExit(f"{' '.join(sys.argv)} failed ({code}):\n{said.getvalue()[-2000:]}")


def shrink_unet(path: Path) -> None:
    """Reduce the demo's UNet to a quarter of its channels, so that two trainings take a minute."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"block_out_channels": [16, 24, 32], "norm_num_groups": 8}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def captions_of(photos: Path) -> list[str]:
    """Return the captions next to the photographs, each once."""
    return sorted({line for path in photos.rglob("*.txt") for line in path.read_text(encoding="utf-8").splitlines() if line})


def print_errors(model: Path, captions: list[str]) -> None:
    """Print the error of each stored dtype on the encoder's output in F32, over all captions."""
    encoder = load_caption_encoder(open_model(str(model)), torch.device("cpu"), TextSettings(stored_dtype="F32"))
    computed = [
        found.tokens.numpy() for first in range(0, len(captions), 32) for found in encoder.encode(captions[first : first + 32])
    ]
    width, largest = computed[0].shape[1], max(float(np.abs(own).max()) for own in computed)
    print(f"{len(captions)} captions, {sum(map(len, computed))} tokens of {width} values; the largest is {largest:.3g}")
    print("dtype     bits  relative: mean    max     cosine: mean    min        worst channel: mean    max")
    for dtype in (*DTYPES, *QUANTISED):
        if dtype in QUANTISED:
            columns = [quantise(own, dtype) for own in computed]
            bits = 8 * sum(array.nbytes for own in columns for array in own.values()) / sum(own.size for own in computed)
            delivered = [dequantise(own).astype(np.float32) for own in columns]
        else:
            bits, delivered = 16.0, [torch.from_numpy(own).to(DTYPES[dtype]).float().numpy() for own in computed]
        errors = np.array([measured_error(own, found) for own, found in zip(computed, delivered, strict=True)])
        mean, most = errors.mean(axis=0), errors.max(axis=0)
        print(
            f"{dtype:<8}  {bits:4.1f}        {mean[0]:8.3%} {most[0]:8.3%}        {mean[1]:.6f} {errors[:, 1].min():.6f}"
            f"             {mean[2]:8.2%} {most[2]:8.2%}"
        )


def trained(out: Path, dtype: str, steps: int, batch_size: int) -> dict[str, Any]:
    """Pack a store and train on it; return its text's bytes, the loss of each window of steps, and that of validation."""
    store, folder = out / f"{dtype}.store", out / f"run-{dtype}"
    common = ("--val-fraction", "0.2:folder", "--text-dtype", dtype)
    run("bucketline.ingest", "pack", out / "photos", store, "--model", out / "model", *common)
    options = (
        "--batch-size",
        batch_size,
        "--max-steps",
        steps,
        "--log-every",
        20,
        "--learning-rate",
        1e-3,
        "--warmup-steps",
        20,
    )
    run(
        *("bucketline.train", "--store", store, "--model", out / "model", "--output-dir", folder, *options),
        *("--validate-every", steps, "--caption-dropout", 0.1, "--num-images", 0, "--seed", 0, "--service", "none"),
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    manifest = Store.open(store).manifest
    return {
        "caption_bytes": sum(shard.caption_bytes for shard in manifest.shards),
        "losses": [line["loss"] for line in lines if "loss" in line],
        "val_losses": [line["val_loss"] for line in lines if "val_loss" in line],
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of both trainings (default 200)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows of a step (default 8)")
    asked = parser.parse_args()
    out: Path = asked.out
    out.mkdir(parents=True)
    run(HERE / "photographs.py", out / "photos")
    run(HERE / "model.py", out / "model")
    shrink_unet(out / "model" / "unet" / "config.json")
    print_errors(out / "model", captions_of(out / "photos"))
    if asked.steps == 0:
        return
    plain, quantised = (trained(out, dtype, asked.steps, asked.batch_size) for dtype in ("F16", "I8"))
    print(f"captions in the store: F16 {plain['caption_bytes']:,} bytes, I8 {quantised['caption_bytes']:,} bytes")
    print(f"\nmean loss of each window of 20 of {asked.steps} steps\n   F16       I8        difference")
    for one, two in zip(plain["losses"], quantised["losses"], strict=True):
        print(f"   {one:.5f}   {two:.5f}   {two / one - 1:+.3%}")
    mean = [sum(own["losses"]) / len(own["losses"]) for own in (plain, quantised)]
    print(
        f"all: {mean[0]:.5f} and {mean[1]:.5f}; validation: {plain['val_losses'][-1]:.5f} and {quantised['val_losses'][-1]:.5f}"
    )


if __name__ == "__main__":
    main()
