"""The installed package, tried from outside the checkout: every command's help, then pack, verify, plan, load and train.

    python tests/packaging/smoke.py FOLDER           makes FOLDER; needs bucketline[all,heif,tensorboard]
    python tests/packaging/smoke.py FOLDER --bare    without extras: each command must name the one that it lacks

`make test-wheel` and `make test-minimums` run it with a virtual environment of their own, so it imports no other file of
the tests, and uses nothing that differs between the oldest and the newest libraries that the package allows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

BIN = Path(sys.executable).parent
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "green", "blue", "cat", "dog")
HELPS = (
    *("ingest", *(f"ingest {name}" for name in ("pack", "scan", "prompts", "peek"))),
    *("store", *(f"store {name}" for name in ["info", "report", "ls", "verify", "get", "export", "drop", "compact", "merge"])),
    *("loader", "loader plan", "loader peek", "loader serve"),
    *("bucketline", "bucketline ingest pack", *(f"bucketline train{name}" for name in ("", " report", " presets"))),
)
UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "cross_attention_dim": 8,
}
SCHEDULER = {
    "_class_name": "DDPMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}


def run(*arguments: object) -> str:
    """Run a command, and return its stdout."""
    command = [str(argument) for argument in arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def write_model(folder: Path) -> None:
    """Write a model folder of a few kilobytes: a VAE, a text encoder with its tokenizer, a UNet to be trained from nothing."""
    import torch
    import transformers
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=2,
        latent_channels=4,
        sample_size=16,
        layers_per_block=1,
    ).save_pretrained(folder / "vae")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=12,
    )
    transformers.BertModel(config).save_pretrained(folder / "text_encoder")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="ascii")
    files = {
        "tokenizer/tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "model_max_length": 12},
        "unet/config.json": UNET,
        "scheduler/scheduler_config.json": SCHEDULER,
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="ascii")


def write_images(folder: Path) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    folder.mkdir()
    for n in range(12):
        height_px, width_px = ((48, 64), (64, 48))[n % 2]
        values = np.add.outer(np.arange(height_px) * (n + 1), np.arange(width_px) * 3) % 256
        pixels = np.repeat(values.astype(np.uint8)[:, :, None], 3, axis=2)
        Image.fromarray(pixels).save(folder / f"{n:02d}.png")
        (folder / f"{n:02d}.txt").write_text(f"a {WORDS[6 + n % 5]}\n", encoding="ascii")
    names = [f"{n:02d}.png" for n in range(4)]
    pq.write_table(pa.table({"file_name": names, "text": ["a cat"] * 4}), folder / "some.parquet")


def scan_others(folder: Path) -> str:
    """Write a HEIC and a JPEG XL image, and decode both; return what the scan says of them."""
    import numpy as np
    import pillow_heif
    import pillow_jxl  # noqa: F401 - registers itself
    from PIL import Image

    pillow_heif.register_heif_opener()
    folder.mkdir()
    image = Image.fromarray(np.full((48, 64, 3), 128, dtype=np.uint8))
    image.save(folder / "a.heic", "HEIF")
    image.save(folder / "b.jxl", "JXL")
    said = run(BIN / "ingest", "scan", folder, "--full", "--grid", "32x48", "--min-size-px", "8").splitlines()[0]
    if not said.startswith("2 images") or "; 0 would be rejected" not in said:
        raise SystemExit(f"HEIC and JPEG XL: {said}; expected 2 images, 0 rejected")
    return said


def scan_sources(photos: Path, folder: Path) -> None:
    """Scan the first four images as a saved dataset and as a tar."""
    import tarfile

    import datasets

    names = [f"{n:02d}" for n in range(4)]
    rows = {"image": [str(photos / f"{name}.png") for name in names], "text": ["a cat"] * 4}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(str(folder / "dataset"))
    with tarfile.open(folder / "photos.tar", "w") as tar:
        for name in (f"{name}.{end}" for name in names for end in ("png", "txt")):
            tar.add(photos / name, arcname=name)
    for source in (folder / "dataset", folder / "photos.tar"):
        said = run(BIN / "ingest", "scan", source, "--grid", "32x48,48x32", "--min-size-px", "8").splitlines()[0]
        if not said.startswith("4 images") or "; 0 would be rejected" not in said:
            raise SystemExit(f"{source.name}: {said}; expected 4 images, 0 rejected")


def load(store: Path) -> int:
    import torch

    from bucketline.loader import Loader, LoaderConfig

    config = LoaderConfig(batch_size=2, accumulation=1, seed=0, epochs=1, verify=True)
    with Loader(str(store), config, rank=0, world_size=1, device=torch.device("cpu")) as loader:
        return sum(len(batch.latents) for batch in loader)


def write_rows(store: Path) -> None:
    """Write a store of two rows with the base package, for a trainer that looks at its store before it needs an extra."""
    import numpy as np

    from bucketline.store import LatentColumn, StoreWriter

    columns = [LatentColumn(channels=4, downscale=8, dtype="F16")]
    with StoreWriter(store, encoders={"vae": {"latent_channels": 4}}, columns=columns) as writer:
        for n in range(2):
            writer.add(f"{n}.png", "train", {"latent": np.full((4, 4, 6), n, dtype=np.float16)})


def refuse_without_extras(folder: Path) -> None:
    """Expect each command that needs an extra to say so in one line, and to exit with 2."""
    photos = folder / "photos"
    photos.mkdir()
    (photos / "a.png").write_bytes(b"no image")
    write_rows(folder / "rows.store")
    train = ("train", "--store", folder / "rows.store", "--model", folder, "--output-dir", folder / "run")
    asked: dict[str, tuple[object, ...]] = {
        "ingest[ingest]": (BIN / "ingest", "scan", photos),
        "ingest pack[ingest]": (BIN / "ingest", "pack", photos, folder / "a.store", "--model", folder),
        "loader serve[loader]": (BIN / "loader", "serve", folder / "a.store", "--at", folder / "socket"),
        "store report[report]": (BIN / "store", "report", folder / "rows.store", "-o", folder / "report.html"),
        "train[train]": (BIN / "bucketline", *train, "--max-steps", "1", "--batch-size", "1"),
    }
    for name, command in asked.items():
        extra = name.partition("[")[2].rstrip("]")
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        lines = done.stderr.splitlines()
        if done.returncode != 2 or len(lines) != 1 or f"pip install 'bucketline[{extra}]'" not in lines[0]:
            raise SystemExit(f"{name}: exit code {done.returncode}, expected 2 and one line that names {extra}:\n{done.stderr}")
    print(f"without extras: {len(asked)} commands name theirs", flush=True)


def main() -> None:
    import bucketline

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    place = Path(bucketline.__file__).resolve()
    if not place.is_relative_to(Path(sys.prefix).resolve()):
        raise SystemExit(f"{place} is imported, which is not the installed package: run this from another folder")
    if metadata.version("bucketline") != bucketline.__version__:
        raise SystemExit(f"the metadata says {metadata.version('bucketline')}, the package {bucketline.__version__}")
    for name in HELPS:
        command, *rest = name.split()
        run(BIN / command, *rest, "--help")
    run(sys.executable, "-m", "bucketline.train", "--help")
    print(f"help: {len(HELPS) + 1} commands", flush=True)
    run(BIN / "bucketline", "train", "presets", "sd-lora")  # a file of the package

    if "--bare" in sys.argv[2:]:
        refuse_without_extras(folder)
        return
    photos, model, store = folder / "photos", folder / "model", folder / "photos.store"
    write_model(model)
    write_images(photos)
    sizes = ("--grid", "32x48,48x32", "--min-size-px", "8")
    print(run(BIN / "ingest", "scan", photos, "--model", model, *sizes).splitlines()[0], flush=True)
    print(run(BIN / "ingest", "pack", photos, store, "--model", model, *sizes).splitlines()[0], flush=True)
    print(f"HEIC and JPEG XL: {scan_others(folder / 'others')}", flush=True)
    scan_sources(photos, folder)
    run(BIN / "ingest", "pack", photos / "some.parquet", folder / "some.store", "--model", model, *sizes)
    run(BIN / "store", "verify", store)
    print(run(BIN / "loader", "plan", store, "--batch-size", "2").splitlines()[0], flush=True)
    run(BIN / "store", "report", store, "--source", photos, "-o", folder / "report.html")
    print(f"report: {(folder / 'report.html').stat().st_size} bytes", flush=True)
    run(BIN / "store", "export", store, "--format", "webdataset", folder / "tars")
    run(BIN / "ingest", "peek", store, "00.png", "--model", model, "-o", folder / "00.png")
    print(f"loaded: {load(store)} rows", flush=True)
    begin = ("--store", store, "--model", model, "--batch-size", "2", "--max-steps", "2", "--num-images", "1")
    run(BIN / "bucketline", "train", *begin, "--output-dir", folder / "run", "--track-with", "tensorboard")
    run(BIN / "bucketline", "train", "report", folder / "run", "-o", folder / "run.html")
    print(f"trained: {(folder / 'run' / 'metrics.jsonl').stat().st_size} bytes of metrics", flush=True)
    print(f"smoke test passed: Python {sys.version.split()[0]}", flush=True)


if __name__ == "__main__":
    main()
