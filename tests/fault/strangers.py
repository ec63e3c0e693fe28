"""Strangers at a service: they come to its socket or its port without end, and say anything; clients come and go meanwhile."""

from __future__ import annotations

import json
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from bucketline.errors import BucketlineError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress
from bucketline.loader.service.sockets import Security, connected
from bucketline.loader.service.wire import MAX_MESSAGE_BYTES, receive
from tests.fault.apart import HANG_S
from tests.fault.record import Asked, Kind, Outcome, Record, Wrong, expect
from tests.kit import make_store, samples_of
from tests.serving import serving_here

TOKEN, MOST_KEPT = b"a token of the tests", 300
CONFIG = LoaderConfig(batch_size=2, epochs=1)


def floods(asked: Asked) -> Iterator[Record]:
    """Flood a socket, then a port that asks for a token: no token, half a message, garbage, drips."""
    draw = random.Random(asked.seed)
    store = make_store(asked.folder / "s", samples_of({"train/64x64": 20}))
    token = asked.folder / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    with Loader(store, CONFIG) as loader:
        expected = [batch.ids.tolist() for batch in loader]
    for at, trials in (("socket", asked.of(5, 50)), ("port", asked.of(5, 100))):
        folder = asked.folder / at
        folder.mkdir()
        record = Record(f"a flood of strangers at a service's {at}, and clients that come meanwhile", Kind.OTHER)
        with serving_here(folder, store.path, security=Security(token=TOKEN)) as found:
            if at == "socket":
                address, connect = ServiceAddress(found.socket, deadline_s=HANG_S), partial(connected, found.socket)
            else:
                address = ServiceAddress(found.tcp, token=token, deadline_s=HANG_S)
                connect = partial(socket.create_connection, ("127.0.0.1", found.port), timeout=HANG_S)
            record.trial("among them", _among_strangers, record, address, connect, draw, expected, trials)
        yield record


def _among_strangers(
    record: Record,
    address: ServiceAddress,
    connect: Callable[[], socket.socket],
    draw: random.Random,
    expected: list[list[int]],
    trials: int,
) -> Outcome:
    """Be a client that was there before, and let others come."""
    with Loader(None, CONFIG, service=address) as early:
        batches, is_over = iter(early), threading.Event()
        first = next(batches)
        flood = [threading.Thread(target=_flood, args=(connect, random.Random(draw.random()), is_over)) for _ in range(3)]
        for thread in flood:
            thread.start()
        try:
            for number in range(trials):
                record.trial(f"client {number}", _client, address, expected)
            expect([batch.ids.tolist() for batch in (first, *batches)] == expected, "differs: what the first client was given")
        finally:
            is_over.set()
            for thread in flood:
                thread.join()
    return Outcome.COMPLETED


def _client(address: ServiceAddress, expected: list[list[int]]) -> Outcome:
    begun = time.monotonic()
    try:
        with Loader(None, CONFIG, service=address) as late:
            expect([batch.ids.tolist() for batch in late] == expected, "differs: what a client was given")
    except BucketlineError as error:
        raise Wrong(f"refused: {error}") from error
    took = time.monotonic() - begun
    expect(took <= HANG_S, f"took {took:.1f} s")
    return Outcome.COMPLETED


def _flood(connect: Callable[[], socket.socket], draw: random.Random, is_over: threading.Event) -> None:
    """Connect again and again; keep most of the connections, which say nothing, half of something, or garbage in drips."""
    kept: list[socket.socket] = []
    while not is_over.wait(0.001):
        with suppress(OSError, BucketlineError):
            kept.append(connect())
            kept[-1].settimeout(HANG_S)
            if draw.random() < 0.7:
                kept[-1].sendall(_said_by_a_stranger(draw))
            if draw.random() < 0.2:
                kept[-1].shutdown(socket.SHUT_WR)
                receive(kept[-1], HANG_S)  # the service answers, or ends the connection
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
