"""The Ray cluster of a run: connect to it, or start it on this machine, and divide it among workers."""

from __future__ import annotations

import logging
import math
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.ingest.config import PackConfig

OBJECT_STORE_BYTES = 256 << 20  # of Ray on this machine: listings of the slices that are being packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The number of workers and what each takes of the cluster."""

    least: int
    most: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus} each"


@contextmanager
def cluster(config: PackConfig) -> Iterator[Workers]:
    """Connect to the cluster of `--engine ray:ADDRESS`, or start Ray on this machine, and shut it down after the block."""
    options = {"log_to_driver": True, "logging_level": logging.ERROR, "namespace": "bucketline"}
    if not (address := config.engine and config.engine.address):
        wanted, cores = config.workers, len(os.sched_getaffinity(0))
        cpus = max(cores, math.ceil((wanted.most or 0) * (wanted.cpus or 1)))
        ray.init(address="local", include_dashboard=False, num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES, **options)
    else:
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ValueError, TimeoutError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"--engine {config.engine}: no Ray cluster can be used there ({reason:.300}); start one with "
                "`ray start --head`, or --engine ray to start Ray on this machine"
            ) from error
    try:
        yield workers_of(config, ray.cluster_resources())
    finally:
        ray.shutdown()


def workers_of(config: PackConfig, resources: Mapping[str, float]) -> Workers:
    """Return the workers that the options request, in a cluster of these resources."""
    total_cpus, total_gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    wanted = config.workers
    gpus, cpus, most = wanted.gpus, wanted.cpus, wanted.most
    if gpus is None:
        gpus = 1.0 if total_gpus >= 1 and config.device != "cpu" else 0.0
    if cpus is None:
        cpus = float(max(1, int(total_cpus * gpus // total_gpus))) if gpus and total_gpus else 1.0
    if most is None:
        room = [total // each for total, each in ((total_cpus, cpus), (total_gpus, gpus)) if each]
        most = max(1, int(min(room, default=1)))
    return Workers(least=wanted.least or wanted.most or 1, most=most, cpus=cpus, gpus=gpus)
