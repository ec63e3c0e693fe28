"""The readings of what version 0.1.0 wrote, by which that version and this one describe it; README.md has the files."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.loader import Batch
    from bucketline.store import Store

MADE_AT = 1_700_000_000  # mtime of the first image, in seconds since 1970
ALL_MORE = 14  # images of `more`
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
