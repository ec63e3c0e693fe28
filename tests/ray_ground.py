"""Ray for tests: on 127.0.0.1, without dashboard and statistics, in a folder of its own, and ended with all its processes.

`python -m tests.ray_ground CPUS…` starts a cluster with a head that has no CPU, and a node for each number of CPUs. It prints
the address, then obeys a line at a time: `lose N` ends a node at once, `add CPUS` starts one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.commands import ROOT, Ran
from tests.whole_tree import children_of, descendants_of, title_of

OBJECT_STORE_BYTES = 80 << 20
LONGEST_S = 240.0


class RayGround:
    """A folder for Ray's sessions and the environment of commands that use Ray. Its path is short: it has sockets."""

    def __enter__(self) -> RayGround:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self.environment = {
            **kept,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # for this ground; otherwise Ray keeps one in the home
        }
        self._running: list[subprocess.Popen[str]] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._running:
            process.terminate()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, arguments: Sequence[object], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.whole_tree", *map(str, arguments)],
            cwd=ROOT,
            env=self.environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def ended(self, process: subprocess.Popen[str]) -> Ran:
        out, err = process.communicate(timeout=LONGEST_S)
        self._running.remove(process)
        return Ran(code=process.returncode, out=out, err=err)

    def ingest(self, *arguments: object) -> subprocess.Popen[str]:
        return self.start([sys.executable, "-m", "bucketline.ingest", *arguments])

    def run(self, *arguments: object) -> Ran:
        return self.ended(self.ingest(*arguments))


def command_of(process: subprocess.Popen[str]) -> int | None:
    """Return the process id of a started command itself; None if it has ended."""
    return next(iter(children_of(process.pid)), None)


def packing_workers(process: subprocess.Popen[str]) -> list[int]:
    """Return the workers of a pack among the descendants of a cluster's process."""
    return [pid for pid in descendants_of(process.pid) if "pack_rank" in title_of(pid)]


def kill(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


class Cluster:
    """A cluster of several nodes, in a process of its own."""

    def __init__(self, ground: RayGround, *cpus: int) -> None:
        """Start a head without CPUs and a node with so many CPUs each."""
        self.process = ground.start([sys.executable, "-m", "tests.ray_ground", *cpus], stdin=subprocess.PIPE)
        self.address = self._answer()

    def lose(self, number: int) -> None:
        self._tell(f"lose {number}")

    def add(self, cpus: int) -> None:
        self._tell(f"add {cpus}")

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return str(json.loads(line))


def _lead(cpus: list[int]) -> None:
    from ray.cluster_utils import Cluster as RayCluster

    kind: Any = RayCluster
    common = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = kind(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    nodes = [cluster.add_node(num_cpus=own, **common) for own in cpus]
    out: IO[str] = sys.stdout
    print(json.dumps(cluster.address), file=out, flush=True)
    for line in sys.stdin:
        verb, number = line.split()
        if verb == "lose":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=int(number), **common))
        print(json.dumps(verb), file=out, flush=True)


if __name__ == "__main__":
    _lead(list(map(int, sys.argv[1:])))
