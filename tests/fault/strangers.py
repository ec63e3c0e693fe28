"""Checkpoints that lie, with right digests, and a stranger at the service's socket."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import BucketlineError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress
from bucketline.loader.service.sockets import Security, connected
from bucketline.loader.service.wire import MAX_MESSAGE_BYTES, receive
from tests.fault.apart import HANG_S, Apart, How
from tests.fault.ground import COMMAND_S, Ground, one_batch
from tests.fault.record import Kind, Outcome, Record
from tests.kit import flip_bit, make_store, samples_of
from tests.serving import serving, serving_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fault.record import Asked

LONG = 1 << 40
TOKEN, MOST_KEPT = b"a token of the tests", 300


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
    weights = next(path.relative_to(newest) for path in newest.glob("unet/*.safetensors"))
    moments = next(path.relative_to(newest) for path in newest.glob("optimizer/*"))
    buffer = io.BytesIO()
    torch.save({"state": Canary(canary)}, buffer)
    state = json.loads((newest / "state.json").read_bytes())
    lies: dict[str, tuple[object, bytes]] = {
        "a pickle": (moments, pickle.dumps(Canary(canary))),
        "a torch pickle": (moments, buffer.getvalue()),
        "nothing": (moments, b""),
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
    document[name] = file_digest(checkpoint / name)
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


def floods(asked: Asked) -> Iterator[Record]:
    """Strangers come to a port without end: no token, half a message, garbage, drips; clients come and go meanwhile."""
    draw = random.Random(asked.seed)
    record = Record(fault="a flood of strangers at a service's port, and clients that come meanwhile", kind=Kind.OTHER)
    store = make_store(asked.folder / "s", samples_of({"train/64x64": 20}))
    token = asked.folder / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    config = LoaderConfig(batch_size=2, epochs=1)
    with Loader(store, config) as loader:
        expected = [batch.ids.tolist() for batch in loader]
    with serving_here(asked.folder, store.path, security=Security(token=TOKEN)) as found:
        address = ServiceAddress(found.tcp, token=token, deadline_s=HANG_S)
        with Loader(None, config, service=address) as early:
            batches, is_over = iter(early), threading.Event()
            first = next(batches)
            seeds = [draw.random() for _ in range(3)]
            flood = [threading.Thread(target=_flood, args=(found.port, random.Random(seed), is_over)) for seed in seeds]
            for thread in flood:
                thread.start()
            try:
                for _ in range(asked.of(5, 100)):
                    begun = time.monotonic()
                    try:
                        with Loader(None, config, service=address) as late:
                            is_right = [batch.ids.tolist() for batch in late] == expected
                    except BucketlineError as error:
                        record.add(Outcome.DEFECT, f"refused: {error}")
                        continue
                    took = time.monotonic() - begun
                    outcome = Outcome.HANG if took > HANG_S else Outcome.COMPLETED if is_right else Outcome.WRONG
                    record.add(outcome, f"{took:.1f} s")
                is_right = [batch.ids.tolist() for batch in (first, *batches)] == expected
                record.add(Outcome.COMPLETED if is_right else Outcome.WRONG, "the client that was there before")
            finally:
                is_over.set()
                for thread in flood:
                    thread.join()
    yield record


def _flood(port: int, draw: random.Random, is_over: threading.Event) -> None:
    """Connect again and again; keep most of the connections, which say nothing, half of something, or garbage in drips."""
    kept: list[socket.socket] = []
    while not is_over.wait(0.001):
        with suppress(OSError):
            kept.append(socket.create_connection(("127.0.0.1", port), timeout=HANG_S))
            if draw.random() < 0.7:
                kept[-1].sendall(_said_by_a_stranger(draw))
            draw.choice(kept).sendall(draw.randbytes(1))
        if len(kept) > MOST_KEPT:
            kept.pop(draw.randrange(len(kept))).close()
    for sock in kept:
        sock.close()


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
