"""Checkpoints that lie, with right digests, and a stranger at the service's socket."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import BucketlineError
from bucketline.loader.service.sockets import connected
from bucketline.loader.service.wire import MAX_MESSAGE_BYTES, receive
from tests.fault.apart import HANG_S, Apart, How
from tests.fault.ground import COMMAND_S, Ground, one_batch
from tests.fault.record import Kind, Outcome, Record
from tests.kit import flip_bit, make_store, samples_of
from tests.serving import serving

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fault.record import Asked

LONG = 1 << 40


class Canary:
    """The function that a pickle of this calls when it is loaded: it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def hostile_checkpoints(asked: Asked) -> Iterator[Record]:
    """Try them all."""
    ground = Ground.prepare(asked)
    yield checkpoints(ground)
    yield flips(ground, asked.of(40, 300))


def checkpoints(ground: Ground) -> Record:
    """Checkpoints with right digests whose files lie: pickles that run, states that are none, weights of terabytes."""
    from tests.fault import killed_trainers

    record = Record(fault="checkpoints that lie, with right digests", kind=Kind.HOSTILE)
    killed_trainers.prepare(ground.folder)
    whole, canary = ground.folder / "trained", ground.folder / "canary"
    if (
        ended := Apart(lambda: killed_trainers.train_in(ground.folder, whole, resume=False)).ended(COMMAND_S)
    ).how is not How.DONE:
        record.add(Outcome.DEFECT, ended.said)
        return record
    newest = max((whole / "checkpoints").iterdir())
    weights = next(path.relative_to(newest) for path in newest.rglob("*.safetensors"))
    buffer = io.BytesIO()
    torch.save({"state": Canary(canary)}, buffer)
    state = json.loads((newest / "state.json").read_bytes())
    lies: dict[str, tuple[object, bytes]] = {
        "a pickle": ("optimizer.pt", pickle.dumps(Canary(canary))),
        "a torch pickle": ("optimizer.pt", buffer.getvalue()),
        "nothing": ("optimizer.pt", b""),
        "a header of terabytes": (weights, struct.pack("<Q", LONG) + b"{}"),
        "no weights": (weights, b""),
        "no state": ("state.json", b"[]"),
        "a deep state": ("state.json", b"[" * 100_000),
        "another step": ("state.json", json.dumps({**state, "steps_done": 1 << 62}).encode()),
        "a loader's state of another kind": ("state.json", json.dumps({**state, "loader": {"step": "x"}}).encode()),
        "stores elsewhere": ("state.json", json.dumps({**state, "stores": []}).encode()),
    }
    for what, (name, data) in ground.some(list(lies.items())):
        run = ground.fresh() / "run"
        shutil.copytree(whole, run)
        _replace(run / "checkpoints" / newest.name, str(name), data)
        ended = Apart(_resuming(ground.folder, run)).ended(COMMAND_S)
        outcome = ended.outcome
        if canary.exists():
            canary.rmdir()
            outcome = Outcome.OUTSIDE
        record.add(outcome, f"{what}: {ended.said}")
    return record


def flips(ground: Ground, count: int) -> Record:
    """One bit of a checkpoint's files flipped: it is torn, by name; of what lists the digests, or as sound as before."""
    from bucketline.train.checkpoint import DIGESTS, damage

    record = Record(fault="a bit flipped in a checkpoint", kind=Kind.FLIP)
    newest = max((ground.folder / "trained" / "checkpoints").iterdir())
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    for number in range(count):
        path = files[number % len(files)]
        bit = ground.draw.randrange(8 * path.stat().st_size)
        flip_bit(path, bit)
        try:
            wrong = damage(newest)
            unseen = Outcome.COMPLETED if path.name == DIGESTS else Outcome.WRONG
            record.add(unseen if wrong is None else Outcome.CLEAN_ERROR, f"bit {bit} of {path.name}")
        except Exception as error:  # noqa: BLE001 - it is what is counted here
            record.add(Outcome.DEFECT, f"bit {bit} of {path.name}: {error!r}")
        flip_bit(path, bit)
    return record


def _replace(checkpoint: Path, name: str, data: bytes) -> None:
    """Put other bytes in a checkpoint, and let its list of digests agree."""
    from bucketline.store.format.hashing import file_digest

    (checkpoint / name).write_bytes(data)
    document = json.loads((checkpoint / "digests.json").read_bytes())
    num_bytes, digest = file_digest(checkpoint / name)
    document["files"][name] = {"num_bytes": num_bytes, "digest": digest}
    (checkpoint / "digests.json").write_text(json.dumps(document), encoding="ascii")


def _resuming(folder: Path, run: Path) -> Callable[[], object]:
    from tests.fault.killed_trainers import train_in

    return lambda: train_in(folder, run, resume=True)


def strangers(ground: Ground, trials: int) -> Record:
    """A stranger says anything at the service's socket, and goes: the service answers, and serves the others."""
    record = Record(fault="a stranger at the service's socket", kind=Kind.OTHER)
    folder = ground.fresh()
    store = make_store(folder / "s", samples_of({"train/64x64": 20}))
    with serving(folder / "sock", store.path) as process:
        for number in range(trials):
            with suppress(OSError), connected(folder / "sock") as sock:
                sock.settimeout(HANG_S)
                sock.sendall(_said_by_a_stranger(ground.draw))
                if number % 3:
                    sock.shutdown(socket.SHUT_WR)
                    with suppress(BucketlineError):
                        receive(sock, HANG_S)
            if process.poll() is not None:
                record.add(Outcome.CRASH, f"the service ended with {process.returncode}")
                return record
            record.add(Outcome.CLEAN_ERROR)
        ended = Apart(lambda: one_batch(store.path, folder / "sock")).ended(HANG_S)
        record.add(ended.outcome, ended.said)
    return record


def _said_by_a_stranger(draw: random.Random) -> bytes:
    body = draw.choice(
        [
            draw.randbytes(draw.randrange(300)),
            b"[" * draw.randrange(100_000),
            b"{}",
            json.dumps({"protocol": draw.randrange(3), "stores": [draw.randrange(9)] * draw.randrange(9)}).encode(),
            pickle.dumps({"a": 1}),
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"protocol": ' + b"9" * 5000 + b"}",
        ]
    )
    length = draw.choice([len(body), len(body), draw.randrange(1 << 32), MAX_MESSAGE_BYTES, 0, MAX_MESSAGE_BYTES + 1])
    return draw.choice([b"", struct.pack(">I", length)]) + body
