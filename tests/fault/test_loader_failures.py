"""Every kind of failure once: an error or a clean end within 2 s, no batch skipped, nothing left behind."""

from __future__ import annotations

import sys

from tests.commands import spawn
from tests.fault.loader_failures import FAILURES


def test_every_kind_of_failure_reaches_the_caller_at_once_and_leaves_nothing() -> None:
    kinds = sum(len(services) for _, services in FAILURES.values())
    ran = spawn([sys.executable, "-m", "tests.fault.loader_failures", "--failures", kinds, "--seed", 1])
    assert ran.code == 0, ran.out + ran.err
    assert f"{kinds} of {kinds} ended as they should within 2 s, 0 did not" in ran.out
    assert all(name in ran.out for name in FAILURES)
