"""The client's cost of batches over a network, compared with receiving as many bytes and nothing else."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLAIN, CLIENT = "recv_into", "RemoteLoader"
# Sends the bytes of a file again and again to each client, in a process of its own.
SENDING = """
import socket, sys
data = open(sys.argv[1], "rb").read()
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    try:
        while True:
            client.sendall(data)
    except OSError:
        client.close()
"""


@dataclass(frozen=True, kw_only=True)
class NetworkDelivery(Case):
    """Measure a client's CPU time and rate over the loopback link, against `recv_into` of as many bytes into as many buffers.

    The server is a `loader serve --listen` process, the plain sender another process. Both share the machine with the client,
    so rates are of all of them; CPU time is the client's.

    Example: python -m bucketline.bench stream --service --repeats 3
    """

    num_shards: int = 16
    """Shards of the store."""
    rows_per_shard: int = 128
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    batches: int = 256
    """Batches per repeat."""
    prefetch_mib: int = 64
    """MiB of batches received ahead."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.loader import LoaderConfig, RemoteLoader

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        path = kept_store(folder, shape)
        config = LoaderConfig(batch_size=self.batch_size, prefetch_bytes=self.prefetch_mib << 20)
        with ExitStack() as using:
            temporary = Path(using.enter_context(tempfile.TemporaryDirectory(prefix="bl-")))
            said = using.enter_context(started(path, temporary / "s", "--listen", "0"))
            address = f"127.0.0.1:{said.split()[-1]}"
            with RemoteLoader(address, config) as loader:
                batches = loader.forever()
                num_bytes = sum(tensor.nbytes for tensor in next(batches).tensors())
                for _ in range(self.num_shards * self.rows_per_shard // self.batch_size):  # the server's pages
                    next(batches)
                del batches
            (temporary / "data").write_bytes(bytes(num_bytes))
            command = [sys.executable, "-P", "-S", "-c", SENDING, str(temporary / "data")]
            sender = using.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            using.callback(sender.kill)
            assert sender.stdout is not None
            port = int(sender.stdout.readline())
            num_buffers = self.prefetch_mib * 1024 * 1024 // num_bytes + 2
            plain, client = Measured(self._plain(port, num_bytes, num_buffers)), Measured(self._client(address, config))
            subjects = [
                Subject(name=PLAIN, measure=plain.cpu_per_gb),
                Subject(name=CLIENT, measure=client.cpu_per_gb, limit=PLAIN, mark=Mark(bound=1.5, is_at_most=True)),
            ]
            figures = summarise("stream, service, CPU", "CPU-s/GB", subjects, alternate(subjects, self.repeats))
            rates = [
                Subject(name=PLAIN, measure=lambda _: 0.0),
                Subject(name=CLIENT, measure=lambda _: 0.0, limit=PLAIN),
            ]
            values = {PLAIN: plain.rates[-self.repeats :], CLIENT: client.rates[-self.repeats :]}
            return figures + summarise("stream, service", "GB/s", rates, values)

    def _plain(self, port: int, num_bytes: int, num_buffers: int) -> Callable[[], int]:
        import numpy as np

        buffers = [np.zeros(num_bytes, dtype=np.uint8) for _ in range(num_buffers)]

        def run() -> int:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                for number in range(self.batches):
                    into = buffers[number % num_buffers].data
                    if sock.recv_into(into, 0, socket.MSG_WAITALL) != num_bytes:
                        raise OSError("the sender has ended")
            return self.batches * num_bytes

        return run

    def _client(self, address: str, config: object) -> Callable[[], int]:
        from bucketline.loader import LoaderConfig, RemoteLoader

        assert isinstance(config, LoaderConfig)
        loader = RemoteLoader(address, config)

        def run() -> int:
            batches = loader.forever()
            total = sum(sum(t.nbytes for t in next(batches).tensors()) for _ in range(self.batches))
            loader.close()
            return total

        return run


class Measured:
    """Runs something, and keeps its rates."""

    def __init__(self, run: Callable[[], int]) -> None:
        self._run = run
        self.rates: list[float] = []  # GB/s

    def cpu_per_gb(self, _: int) -> float:
        """Return the CPU time of all threads of this process for a GB."""
        begun, cpu = time.perf_counter(), time.process_time()
        num_bytes = self._run()
        spent = time.process_time() - cpu
        self.rates.append(num_bytes / (time.perf_counter() - begun) / 1e9)
        return spent / (num_bytes / 1e9)


@contextmanager
def started(store: Path, socket: Path, *options: str) -> Iterator[str]:
    """Run `loader serve`; yield the last line that it prints at its start."""
    command = [sys.executable, "-P", "-m", "bucketline.loader.cli", "serve", str(store), "--socket", str(socket)]
    with subprocess.Popen(
        [*command, "--every", "1e6", *options], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as service:
        try:
            assert service.stderr is not None
            said = service.stderr.readline()
            assert said.startswith("serving "), said
            yield service.stderr.readline() if options else said
        finally:
            service.terminate()


def main() -> int:
    """Make the store, measure and print."""
    return run_case(NetworkDelivery)


if __name__ == "__main__":
    sys.exit(main())
