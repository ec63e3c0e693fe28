"""Write the material of docs/tutorial.md: an album of twenty photographs, and a small model to train a LoRA for.

    python demo/album.py OUT

OUT/photos has the demo's photographs, each with a caption next to it. OUT/small is a whole PixArt pipeline of 4.9 million
parameters, trained for a minute on close-ups of six of the photographs. OUT/small.toml has the options that a LoRA of so small
a model needs. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from catalogue import PHOTOGRAPHS
from photographs import images
from subjects import CAPTIONS

BIN = Path(sys.executable).parent
STEPS = 500  # of the small model's training
CLOSE_UPS = 5  # of each of the six photographs that it is trained on
TRAINING = """
[optimizer]
learning_rate = 2e-3
lr_schedule = "cosine"
warmup_steps = 20
ema = 0.99

[watching]
num_images = 0

[batches]
batch_size = 6
"""
OPTIONS = """# What a LoRA of the small model needs: every layer, and larger steps than a large model bears.

[method]
lora_rank = 64
lora_targets = "all"

[optimizer]
learning_rate = 3e-3
lr_schedule = "cosine"
warmup_steps = 20
ema = 0.98

[watching]
log_every = 100
num_images = 8
image_steps = 20
image_guidance = 1.0
"""


def write_photos(folder: Path) -> int:
    """Write each whole photograph as a JPEG with its first caption; return their number."""
    folder.mkdir(parents=True)
    for photograph in PHOTOGRAPHS:
        for image in images(photograph):
            if image.stem.startswith("whole"):
                path = folder / f"{photograph.name}{image.stem.removeprefix('whole')}.jpg"
                image.image.save(path, quality=92)
                path.with_suffix(".txt").write_text(f"{image.captions[0]}\n", encoding="utf-8")
    return len(list(folder.glob("*.jpg")))


def write_close_ups(folder: Path) -> None:
    """Write some crops of each photograph that the small model is trained on, with their captions."""
    folder.mkdir()
    for photograph in PHOTOGRAPHS:
        if photograph.name in CAPTIONS:
            crops = [image for image in images(photograph) if not image.stem.startswith("whole")]
            for image in crops[:CLOSE_UPS]:
                path = folder / f"{photograph.name}_{image.stem}.jpg"
                image.image.convert("RGB").save(path, quality=92)
                path.with_suffix(".txt").write_text(f"{image.captions[0]}\n", encoding="utf-8")


def write_small(out: Path, steps: int) -> None:
    """Train a small PixArt on close-ups, and write it as a whole pipeline."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_close_ups(folder / "crops")
        (folder / "training.toml").write_text(TRAINING, encoding="ascii")
        run([sys.executable, here / "model.py", folder / "parts"])
        run([sys.executable, here / "subjects.py", "model", folder / "parts", folder / "start"])
        run([BIN / "ingest", "pack", folder / "crops", folder / "crops.store", "--model", folder / "start"])
        asked = ["--store", folder / "crops.store", "--model", folder / "start", "--output-dir", folder / "run"]
        run([BIN / "bucketline", "train", folder / "training.toml", *asked, "--max-steps", steps])
        run([BIN / "bucketline", "export-model", folder / "run", out, "--pipeline"])


def run(command: list[object]) -> None:
    """Run a command; what it prints goes to stderr."""
    # Threads that spin while they wait cost most of the speed when other processes want the same cores.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr, env=environment)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write photos/ and small/ in")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of the small model [{STEPS}]")
    asked = parser.parse_args()
    out: Path = asked.out
    for path in (out / "photos", out / "small", out / "small.toml"):
        if path.exists():
            parser.error(f"{path} exists: name another folder, or remove it")
    num_photos = write_photos(out / "photos")
    write_small(out / "small", asked.steps)
    (out / "small.toml").write_text(OPTIONS, encoding="ascii")
    print(f"{num_photos} photographs in {out / 'photos'}, and a model in {out / 'small'}")


if __name__ == "__main__":
    main()
