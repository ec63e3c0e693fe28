"""The devices that tests may use: only the CPU, unless a GPU is requested."""

from __future__ import annotations

from collections.abc import Mapping

ASKED = "BUCKETLINE_TEST_GPU"


def without_gpus(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what hides GPUs from a process: losses would not be equal bit by bit, and two ranks cannot share one.

    Nothing is hidden if the environment has `BUCKETLINE_TEST_GPU=1`.
    """
    return {} if environment.get(ASKED) == "1" else {"CUDA_VISIBLE_DEVICES": ""}
