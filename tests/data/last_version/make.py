"""Make the stores, checkpoints and loader states of version 0.1.0 that `tests/e2e/test_last_version.py` continues from.

It runs in a checkout of that version (commit a95814d), with its `make env`; see README.md next to this file:

    python make.py OUT        writes OUT/last_version.tar.xz and OUT/expected.json

It uses only names that version 0.1.0 has. The test imports the functions `…_as_json` from it, so that both versions describe
what they read in the same way.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import uuid
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketline.loader import Batch
    from bucketline.store import Store

MADE_AT = 1_700_000_000  # mtime of the first image, in seconds since 1970
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "of", "on", "cup", "cat", "coffee", "woman", "rocket")
PHOTOGRAPHS = {  # file in scikit-image, caption
    "coffee": ("coffee.png", "a cup of coffee"),
    "cat": ("chelsea.png", "a cat"),
    "astronaut": ("astronaut.png", "a woman\nthe woman"),
    "rocket": ("rocket.jpg", "the rocket"),
    "eye": ("retina.jpg", "an eye"),
    "stars": ("hubble_deep_field.jpg", ""),
    "tissue": ("ihc.png", "tissue\nthe tissue"),
    "motorcycle": ("motorcycle_left.png", "a motorcycle on the street"),
}
CROPS_PX = ((260, 360), (290, 210), (200, 280))  # height and width, of each photograph
FIRST_IMAGES, SECOND_IMAGES = 18, 21  # of `photos`, at the first and the second pack
FIRST_MORE, ALL_MORE = 6, 14  # of `more`
SMALL = ("--model", "model", "--grid", "24x32,32x24", "--min-size-px", "24", "--batch-size", "2")
PACK = (*SMALL, "--val-fraction", "0.25", "--flip")
STEPS, SAVED_AT, KILLED_AT = 8, 4, 5  # of `run`; its windows have 3 steps, so that one is open at the checkpoint
LORA_STEPS, LORA_SAVED_AT = 6, 3
TRAIN = {
    "run": "--store photos.store --model model --batch-size 2 --accum 2 --seed 5 --log-every 3 --checkpoint-every 4 "
    "--validate-every 4 --val-timesteps 2 --learning-rate 1e-3 --warmup-steps 3 --caption-dropout 0.2 --flip 0.5 "
    "--min-snr-gamma 5 --verify",
    "lora": "--store photos.store:2 --store more.store --model model --batch-size 2 --seed 6 --log-every 2 "
    "--val-timesteps 2 --learning-rate 1e-3 --warmup-steps 2 --lora-rank 2 --lora-alpha 4",
}
UNET: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [4, 8],
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "attention_head_dim": 4,
    "cross_attention_dim": 8,
}
LOADERS: dict[str, dict[str, Any]] = {
    "within a step, dropout and flips": {
        "stores": [["photos.store", None, 1]],
        "config": {"batch_size": 2, "accumulation": 2, "seed": 3, "caption_dropout": 0.3, "flip": 0.5},
        "before": 3,
        "after": 19,
    },
    "second of two ranks, blocks, a budget": {
        "stores": [["photos.store", None, 1]],
        "config": {"batch_tokens": 600, "seed": 4, "shuffle": "blocks", "shuffle_window": 16, "pad_multiple": 4},
        "rank": 1,
        "world_size": 2,
        "before": 3,
        "after": 9,
    },
    "two stores, one of them twice": {
        "stores": [["photos.store", None, 2], ["more.store", None, 1]],
        "config": {"batch_size": 3, "seed": 9},
        "before": 5,
        "after": 12,
    },
    "the first generation": {
        "stores": [["photos.store", 1, 1]],
        "config": {"batch_size": 4, "seed": 1, "remainder": "partial", "shuffle": "none", "epochs": 2},
        "before": 2,
        "after": 5,
    },
    "moments, bfloat16": {
        "stores": [["moments.store", None, 1]],
        "config": {"batch_size": 2, "seed": 2},
        "before": 1,
        "after": 3,
    },
}
COMPARED = ("step", "loss", "grad_norm", "lr", "samples", "buckets", "val_loss", "val_zero_loss", "val_loss_per_timestep")


def short_digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def batch_as_json(batch: Batch) -> list[Any]:
    """Return a batch's place in the order, its ids, and a digest of each tensor's bytes."""
    import torch

    parts = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in batch.by_name().items()}
    tensors = {name: short_digest(part.tobytes()) for name, part in parts.items()}
    ids = [bytes(one.tolist()).hex()[:8] for one in batch.ids]
    return [batch.step, batch.micro_step, batch.epoch, batch.bucket, ids, short_digest(json.dumps(tensors).encode())]


def samples_as_json(store: Store) -> dict[str, dict[str, str]]:
    """Return for every live sample, by bucket and id in the store's order, a digest of its record, columns and captions."""
    import numpy as np

    found: dict[str, dict[str, str]] = {}
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        columns = {column.name: bucket.read(rows, column.name, verify=True) for column in bucket.columns}
        for n, sample_id in enumerate(bucket.sample_ids(rows)):
            shard, record = store.sample(sample_id)
            ordinal = list(store.shards).index(shard)
            # a sample's row and its captions' rows depend on the shard it is in, and the checksum on the latter
            fields = {**asdict(record), "content": record.content.hex(), "row": None, "caption_rows": None}
            captions = [store.read_caption(ordinal, row) for row in record.caption_rows]
            parts = [json.dumps(fields, sort_keys=True).encode()]
            parts += [own[n].tobytes() for name, own in columns.items() if name not in ("checksum", "captions")]
            parts += [caption[name].tobytes() for caption in captions for name in sorted(caption)]
            found.setdefault(bucket.name, {})[sample_id] = short_digest(b"".join(map(_with_length, parts)))
    return found


def _with_length(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part


def weights_as_json(checkpoint: Path) -> dict[str, str]:
    """Return a digest of the tensors of each file of weights in a checkpoint; the order of a file's metadata is random."""
    from safetensors.numpy import load_file

    found: dict[str, str] = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        tensors = sorted(load_file(path).items())
        parts = (f"{name} {one.dtype} {one.shape}".encode() + one.tobytes() for name, one in tensors)
        found[path.parent.name] = short_digest(b"".join(map(_with_length, parts)))
    return found


def metrics_as_json(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics without what was measured with a clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="ascii").splitlines()]
    return [{name: line[name] for name in COMPARED if name in line} for line in lines]


def make_repeatable(seed: int) -> None:
    """Draw the ids of stores and shards from a seed, and compute in one thread."""
    import secrets

    import torch

    drawn = random.Random(seed)
    uuid.uuid4 = lambda: uuid.UUID(int=drawn.getrandbits(128), version=4)
    secrets.token_hex = lambda nbytes=None: drawn.randbytes(nbytes or 4).hex()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)


def command(name: str, *arguments: object) -> None:
    """Run a console command in this process; a failure ends it."""
    code = importlib.import_module(f"bucketline.{name}.cli").main([str(argument) for argument in arguments])
    if code:
        raise SystemExit(f"{name} {arguments} exited with {code}")


def train(output: str, max_steps: int, *options: str, like: str) -> None:
    """Run the trainer's command line in this process."""
    argv = sys.argv
    sys.argv = ["train/main.py", *TRAIN[like].split(), "--num-pictures", "0", "--output-dir", output, *options]
    sys.argv += ["--max-steps", str(max_steps)]
    try:
        importlib.import_module("bucketline.train.main").main()
    finally:
        sys.argv = argv


def write_model(folder: Path) -> None:
    """Write a model folder with weights: a VAE that halves once, a BERT of one layer, a UNet of two levels."""
    import torch
    import transformers
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel

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
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="ascii")
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 12}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="ascii")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=12,
    )
    transformers.BertModel(config).save_pretrained(folder / "text_encoder")
    UNet2DConditionModel(**UNET).save_pretrained(folder / "unet")
    DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").save_pretrained(folder / "scheduler")


def write_images(folder: Path, numbers: range, *, shifted_px: int = 0) -> None:
    """Write small crops of photographs with captions, one for each number, with fixed times."""
    from PIL import Image

    spec = importlib.util.find_spec("skimage.data")
    assert spec is not None
    assert spec.origin is not None
    for number in numbers:
        name = list(PHOTOGRAPHS)[number % len(PHOTOGRAPHS)]
        file, captions = PHOTOGRAPHS[name]
        height_px, width_px = CROPS_PX[number % len(CROPS_PX)]
        with Image.open(Path(spec.origin).parent / file) as opened:
            top, left = 20 * (number % 3) + shifted_px, 30 * (number % 2)
            image = opened.convert("RGB").crop((left, top, left + width_px, top + height_px))
        image = image.resize((width_px // 5, height_px // 5))
        path = folder / name / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=80)
        os.utime(path, (MADE_AT + 60 * number + shifted_px,) * 2)
        if captions:
            path.with_suffix(".txt").write_text(captions + "\n", encoding="ascii")
            os.utime(path.with_suffix(".txt"), (MADE_AT + 60 * number,) * 2)


def remove_image(path: Path) -> None:
    path.unlink()
    path.with_suffix(".txt").unlink(missing_ok=True)


def make_stores() -> None:
    """Make `photos.store`, of five generations, the first generation of `more.store`, and `moments.store`."""
    photos = Path("photos")
    write_images(photos, range(FIRST_IMAGES))
    command("ingest", "pack", photos, "photos.store", *PACK)
    remove_image(photos / "rocket" / "03.jpg")
    command("store", "drop", "photos.store", "rocket/03.jpg")
    command("store", "compact", "photos.store")
    write_images(photos, range(FIRST_IMAGES, SECOND_IMAGES))
    write_images(photos, range(1), shifted_px=7)  # another image under the same name
    command("ingest", "pack", photos, "photos.store", *PACK)
    remove_image(photos / "cat" / "09.jpg")
    command("store", "drop", "photos.store", "cat/09.jpg")
    write_images(Path("more"), range(100, 100 + FIRST_MORE))
    command("ingest", "pack", "more", "more.store", *PACK)
    command("ingest", "pack", "more", "moments.store", *SMALL, "--latents", "moments", "--dtype", "BF16")


def killed_pack() -> None:
    """Pack more into `more.store`, and end by SIGKILL once a shard is sealed and another one has a commit."""
    make_repeatable(2)
    rows: Any = importlib.import_module("bucketline.ingest.row_writer")
    slices: Any = importlib.import_module("bucketline.ingest.slice_packer")
    slices.ShardFill.is_full = lambda fill, _: fill.num_rows >= 4
    write, shards = rows._write, []

    def write_and_end(shard: Any, batch: Any) -> None:
        write(shard, batch)
        shard.commit()
        shards.append(shard.name)
        if len(set(shards)) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    rows._write = write_and_end
    command("ingest", "pack", "more", "more.store", *PACK)


def killed_run() -> None:
    """Train, and end by SIGKILL in a step after the checkpoint."""
    make_repeatable(3)
    runs: Any = importlib.import_module("bucketline.train.run")
    real = runs.train_step

    def step_or_end(training: Any, batches: Any, step: int) -> Any:
        if step == KILLED_AT:
            while not Path("run", "checkpoints", f"step-{SAVED_AT:08d}").exists():  # written in the background
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return real(training, batches, step)

    runs.train_step = step_or_end
    train("run", STEPS, like="run")


def expect_killed(how: str) -> None:
    """Run `killed_pack` or `killed_run` in a process of its own."""
    done = subprocess.run([sys.executable, __file__, how], check=False)
    if done.returncode != -signal.SIGKILL:
        raise SystemExit(f"{how} ended with {done.returncode}, expected to be killed")


def loader_states() -> dict[str, Any]:
    """Take a state of each loader in the middle of an epoch, and what it delivers after it."""
    from bucketline.loader import Loader, LoaderConfig

    public: Any = importlib.import_module("bucketline.loader")
    store: Any = importlib.import_module("bucketline.store").Store
    found = {}
    for name, case in LOADERS.items():
        shares = [public.StoreShare(store=store.open(path, at), repeats=n) for path, at, n in case["stores"]]
        with Loader(
            shares, LoaderConfig(**case["config"]), rank=case.get("rank", 0), world_size=case.get("world_size", 1)
        ) as loader:
            batches = loader.forever()
            for _ in range(case["before"]):
                next(batches)
            state = loader.state_dict()
            delivered = [batch_as_json(batch) for batch, _ in zip(batches, range(case["after"]), strict=False)]
        found[name] = {**case, "state": state, "batches": delivered}
    return found


def expected() -> dict[str, Any]:
    """Return what version 0.1.0 reads, delivers and trains from the files that it made."""
    store: Any = importlib.import_module("bucketline.store").Store
    generations = {f"{at}": samples_as_json(store.open("photos.store", at)) for at in (1, 5)}
    runs = {}
    for name, steps in (("run", STEPS), ("lora", LORA_STEPS)):
        train(f"whole-{name}", steps, like=name)
        whole = Path(f"whole-{name}")
        weights = weights_as_json(whole / "checkpoints" / f"step-{steps:08d}")
        runs[name] = {"metrics": metrics_as_json(whole), "weights": weights}
    return {
        "photos.store": generations,
        "more.store": {"1": samples_as_json(store.open("more.store"))},
        "moments.store": {"1": samples_as_json(store.open("moments.store"))},
        "loaders": loader_states(),
        "runs": runs,
    }


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out the loss curve, and everything that names a machine."""
    if member.name.endswith("loss.png"):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


def main(out: Path) -> None:
    """Make everything in a folder of its own, and pack it."""
    out = out.absolute()
    out.mkdir(parents=True)
    work = out / "work"
    work.mkdir()
    os.chdir(work)  # every path that is recorded is relative
    make_repeatable(1)
    write_model(Path("model"))
    make_stores()
    expect_killed("killed_run")
    train("lora", LORA_SAVED_AT, like="lora")
    found = expected()
    write_images(Path("more"), range(100 + FIRST_MORE, 100 + ALL_MORE))
    expect_killed("killed_pack")
    shutil.copytree("more.store", "adopting.store")
    command("ingest", "pack", "more", "adopting.store", *PACK)
    found["more.store"]["2"] = samples_as_json(importlib.import_module("bucketline.store").Store.open("adopting.store", 2))
    (out / "expected.json").write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")
    with tarfile.open(out / "last_version.tar.xz", "w:xz", preset=9) as tar:
        for name in ("model", "photos", "more", "photos.store", "more.store", "moments.store", "run", "lora"):
            tar.add(name, filter=without_owner)
    os.chdir(out)
    shutil.rmtree(work)


if __name__ == "__main__":
    if sys.argv[1] in ("killed_pack", "killed_run"):
        {"killed_pack": killed_pack, "killed_run": killed_run}[sys.argv[1]]()
    else:
        main(Path(sys.argv[1]))
