"""The peers that rank 0 lets in, and the messages between ranks."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
from contextlib import ExitStack, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import RankError
from bucketline.ingest.parallel import connections, handshake
from bucketline.ingest.parallel import ranks as module
from bucketline.ingest.parallel.messages import Alive, LastWord, ListingPart, Stop, Value, from_bytes, message_bytes
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.signals import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.typed_json import Json

SECRET = "ab" * 32
SAID: Json = {"a": ["\udcff", 1 << 70]}


def as_it_is(value: Json) -> Json:
    return value


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def greeting(rank: int, secret: str = SECRET) -> bytes:
    return json.dumps({"secret": secret, "rank": rank, "process": f"pid {rank}"}).encode() + b"\n"


def test_strangers_are_sent_away_and_hold_up_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST_STRANGERS", 8)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as held:
        where = server.getsockname()

        def came(said: bytes) -> socket.socket:
            peer = held.enter_context(socket.create_connection(where))
            peer.sendall(said)
            return peer

        strangers = [came(b"") for _ in range(20)]  # that say nothing, more of them than are heard
        strangers += [
            came(said)
            for said in (
                b"GET / HTTP/1.1\r\n\r\n",
                pickle.dumps({"rank": 1}) + b"\n",
                b"\xff\xff\xff\x7f" + bytes(100) + b"\n",
                b"[" * 4000 + b"\n",
                b"x" * 5000,
                greeting(1, "cd" * 32),
                greeting(3),  # there is no such rank
                json.dumps({"secret": SECRET, "rank": "1", "process": "p"}).encode() + b"\n",
                greeting(1)[:-10],  # and no more of it
            )
        ]
        ranks = {rank: came(greeting(rank) + b"what comes next") for rank in (2, 1)}
        twice = came(greeting(1))
        found = handshake.Reception(server, SECRET, {1, 2}).wait(30.0)
        assert {rank: process for rank, (_, process) in found.items()} == {1: "pid 1", 2: "pid 2"}
        for rank, (peer, _) in found.items():
            assert peer.getpeername() == ranks[rank].getsockname()
            peer.settimeout(10.0)
            assert peer.recv(100) == b"what comes next"
            peer.close()
        server.close()
        for stranger in (*strangers, twice):
            stranger.settimeout(10.0)
            with suppress(ConnectionResetError):  # sent away before it had been heard to its end
                assert stranger.recv(1) == b""


def test_a_rank_that_does_not_come_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        peer.sendall(greeting(1))
        with pytest.raises(TimeoutError, match="rank 2 did not connect within 0 s"):
            handshake.Reception(server, SECRET, {1, 2}).wait(0.2)
        assert peer.recv(1) == b""


def test_who_says_nothing_is_sent_away_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GREETING_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as stranger:
        done: list[object] = []
        waiting = threading.Thread(target=lambda: done.append(handshake.Reception(server, SECRET, {1}).wait(60.0)))
        waiting.start()
        stranger.settimeout(30.0)
        assert stranger.recv(1) == b""
        with socket.create_connection(server.getsockname()) as rank:
            rank.sendall(greeting(1))
            waiting.join(30.0)
            assert done
            found: Any = done[0]
            found[1][0].close()


def in_ranks(monkeypatch: pytest.MonkeyPatch, *works: Callable[[PackRanks], object], local: int | None = None) -> list[object]:
    """Run a function a rank, each in a thread; give what each gave or raised."""
    monkeypatch.setattr(module, "FIRST_ENDS_S", 0.5)  # rank 0 parts when its process ends, and here it does not
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    gave: list[object] = [None] * len(works)

    def be(rank: int) -> None:
        try:
            with PackRanks(rank=rank, world_size=len(works), local_world_size=local, interrupts=Interrupts()) as ranks:
                gave[rank] = works[rank](ranks)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            gave[rank] = error

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return gave


def test_ranks_of_one_machine_listen_on_its_loopback_alone() -> None:
    with connections._listening("any.name", is_one_machine=True) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with connections._listening("localhost", is_one_machine=False) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    own = next((address for address in _addresses() if not address.startswith("127.")), None)
    if own is not None:  # a machine of a network listens at the address that the others were told
        with connections._listening(own, is_one_machine=False) as server:
            assert server.getsockname()[0] == own
    with connections._listening("192.0.2.1", is_one_machine=False) as server:  # an address that this machine is behind
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def _addresses() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


@pytest.mark.parametrize("local", [2, 1])
def test_values_and_parts_go_from_rank_0_to_all_and_values_come_back(local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(ranks: PackRanks) -> object:
        said = ranks.from_first(lambda: SAID, as_it_is, as_it_is)
        own = ranks.deal(lambda: [[b"0"], [b"P1", b"", bytes(1 << 20)]])
        ranks.check()
        return said, own, ranks.gather(ranks.rank, lambda value: value, lambda value: 10 * int(str(value)))

    gave = in_ranks(monkeypatch, work, work, local=local)
    assert gave == [(SAID, [b"0"], [0, 10]), (SAID, [b"P1", b"", bytes(1 << 20)], None)]


def test_a_rank_that_is_silent_is_named_and_in_the_end_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("RANK_ALIVE_EVERY_S", 0.01), ("SILENT_S", 0.05), ("GIVEN_UP_S", 0.2)):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(module, "LAST_WORDS_S", 0.1)
    over = threading.Event()

    def first(ranks: PackRanks) -> object:
        try:
            return ranks.gather(0, lambda value: value, lambda value: int(str(value)))
        finally:
            over.set()

    gave = in_ranks(monkeypatch, first, lambda _: over.wait(60.0))
    assert isinstance(gave[0], RankError)
    assert f"rank 1 (pid {os.getpid()} on {socket.gethostname()}) does not answer; the other ranks have stopped" in str(gave[0])
    assert capfd.readouterr().err.count("warning: rank 1 (pid") == 1


def test_a_rank_at_work_is_waited_for_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("RANK_ALIVE_EVERY_S", 0.01), ("RANK_LOOK_EVERY_S", 0.0), ("SILENT_S", 30.0), ("GIVEN_UP_S", 30.0)):
        monkeypatch.setattr(module, name, seconds)
    heard: list[int] = []
    waiting = threading.Event()
    receive = module.PackRanks._receive

    def noting(self: PackRanks, link: Any) -> Any:
        message = receive(self, link)
        heard.extend([self.rank] if isinstance(message, Alive) else [])
        return message

    monkeypatch.setattr(module.PackRanks, "_receive", noting)

    def first(ranks: PackRanks) -> object:
        waiting.set()
        return ranks.gather(0, lambda value: value, lambda value: int(str(value)))

    def at_work(ranks: PackRanks) -> object:
        assert waiting.wait(30.0)
        while heard.count(0) < 3 or heard.count(1) < 3:  # each hears of the other, whoever waits
            ranks.check()
        return ranks.gather(1, lambda value: value, lambda value: int(str(value)))

    assert in_ranks(monkeypatch, first, at_work) == [[0, 1], None]
    assert "silent" not in capfd.readouterr().err


def test_a_dead_rank_is_noticed_at_work_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective would notice it when the work is done."""
    monkeypatch.setattr(module, "LAST_WORDS_S", 0.1)
    ended_at: list[float] = []

    def first(ranks: PackRanks) -> None:
        while not ended_at or monotonic() < ended_at[0] + 5.0:
            ranks.check()

    def dead(ranks: PackRanks) -> None:
        ended_at.append(monotonic())
        ranks._part()

    gave = in_ranks(monkeypatch, first, dead)
    assert isinstance(gave[0], RankError)
    assert "ended without a message" in str(gave[0])


class Acting:
    """The function that a pickle of this calls when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def test_a_pickle_from_another_rank_is_not_loaded_and_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    over = threading.Event()

    def first(ranks: PackRanks) -> object:
        try:
            return ranks.gather(SAID, as_it_is, as_it_is)
        finally:
            over.set()

    def evil(ranks: PackRanks) -> object:
        assert ranks._links is not None
        ranks._links[0].connection.send(Acting(tmp_path / "acted"))
        return over.wait(60.0)

    gave = in_ranks(monkeypatch, first, evil)
    assert isinstance(gave[0], RankError)
    assert not (tmp_path / "acted").exists()


def test_a_message_that_is_too_long_is_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_RANK_MESSAGE_BYTES", 1000)

    def long(ranks: PackRanks) -> object:
        assert ranks._links is not None
        ranks._links[0].connection.send_bytes(bytes(2000))
        return None

    gave = in_ranks(monkeypatch, lambda ranks: ranks.gather(SAID, as_it_is, as_it_is), long)
    assert isinstance(gave[0], RankError)


@pytest.mark.parametrize(
    "message",
    [
        Value({"a": [None, "\udc80", 0.1]}),
        ListingPart(b"\x00P{"),
        Alive(),
        Stop(exit_code=143),
        LastWord(cause=None, exit_code=1, num_encoded=3),
        LastWord(cause="x", exit_code=1, num_encoded=0),
    ],
)
def test_a_message_comes_as_it_was_sent(message: Any) -> None:
    assert from_bytes(message_bytes(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\x80\x04N.",
        b'{"stop": {}}',
        b'{"stop": {"exit_code": "1"}}',
        b'{"other": {}}',
        b'{"value": 1}',
        b'{"stop": {"exit_code": -1}}',
        b'{"alive": {}, "stop": {"exit_code": 1}}',
        b'{"last word": {"cause": 1}}',
        b"[" * 100000,
    ],
)
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises((ValueError, LookupError, TypeError, RecursionError)):
        from_bytes(data)
