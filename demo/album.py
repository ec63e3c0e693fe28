"""Write the material of docs/tutorial.md: an album of twenty photographs, and a small model to train a LoRA for.

    python demo/album.py OUT

OUT/photos has the demo's photographs, each with a caption next to it. OUT/small-sd is a whole Stable Diffusion pipeline of
6 million parameters, trained for a minute or two on crops of such photographs: it knows their colours. OUT/small-sd.toml
has the options that a LoRA of so small a model needs. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from catalogue import PHOTOGRAPHS
from photographs import images

BIN = Path(sys.executable).parent
STEPS = 300  # of the small model's training
OPTIONS = """# What a LoRA of small-sd needs: every layer, and larger steps than a large model bears.

[method]
lora_rank = 32
lora_targets = "all"

[optimizer]
learning_rate = 1e-3
lr_schedule = "cosine"
warmup_steps = 20
ema = 0.95

[watching]
log_every = 50
num_images = 8
image_guidance = 1.5
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


def write_small_sd(out: Path, steps: int) -> None:
    """Train the demo's model on the demo's crops, as a v-prediction model, and write it as a whole pipeline."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, here / "photographs.py", folder / "crops"])
        run([sys.executable, here / "model.py", folder / "start"])
        scheduler = folder / "start" / "scheduler" / "scheduler_config.json"
        changed = {**json.loads(scheduler.read_bytes()), "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
        scheduler.write_text(json.dumps(changed), encoding="ascii")
        run([BIN / "ingest", "pack", folder / "crops", folder / "crops.store", "--model", folder / "start", "--batch-size", 32])
        asked = ["--max-steps", steps, "--ema", "0.98", "--num-images", 0, "--output-dir", folder / "run"]
        data = ["--store", folder / "crops.store", "--model", folder / "start"]
        run([BIN / "bucketline", "train", here / "train.toml", *data, *asked])
        run([BIN / "bucketline", "export-model", folder / "run", out, "--pipeline"])


def run(command: list[object]) -> None:
    """Run a command; what it prints goes to stderr."""
    # Threads that spin while they wait cost most of the speed when other processes want the same cores.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr, env=environment)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write photos/ and small-sd/ in")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of small-sd [{STEPS}]")
    asked = parser.parse_args()
    out: Path = asked.out
    for path in (out / "photos", out / "small-sd", out / "small-sd.toml"):
        if path.exists():
            parser.error(f"{path} exists: name another folder, or remove it")
    num_photos = write_photos(out / "photos")
    write_small_sd(out / "small-sd", asked.steps)
    (out / "small-sd.toml").write_text(OPTIONS, encoding="ascii")
    print(f"{num_photos} photographs in {out / 'photos'}, and a model in {out / 'small-sd'}")


if __name__ == "__main__":
    main()
