"""Several processes that pack one source: who takes which image, and how they agree."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from bucketline.errors import BucketlineError, StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")

_WAIT = timedelta(days=7)  # ranks wait for the slowest one's slice


def rank_of(sample_id: str, world_size: int) -> int:
    """Give the rank that packs a sample: by a hash of its id, so that it does not depend on the others."""
    digest = hashlib.blake2b(sample_id.encode("utf-8", "surrogateescape"), digest_size=8, person=b"bucketline.rank").digest()
    return int.from_bytes(digest, "little") % world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes of this run; with one, nothing is sent anywhere."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Ranks:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.init_process_group("gloo", timeout=_WAIT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def from_first(self, make: Callable[[], T]) -> T:
        """Let rank 0 make a value and give it to all; its error ends everybody.

        Raises:
            BucketlineError: what `make` raised, on rank 0.
            SystemExit: on the others, which leave it to rank 0 to say what was wrong.
        """
        outcome: list[T | BucketlineError | None] = [None]
        if self.is_first:
            try:
                outcome[0] = make()
            except BucketlineError as error:
                outcome[0] = error
        if self.world_size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(outcome, src=0)
        value = outcome[0]
        if isinstance(value, BucketlineError):
            if self.is_first:
                raise value
            raise SystemExit(2 if isinstance(value, UsageError) else 1)
        return cast("T", value)

    def gather(self, value: T) -> list[T]:
        """Collect every rank's value, in order of the ranks, on every rank.

        Raises:
            StoreError: where a rank gave none.
        """
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        if missing := [rank for rank, found in enumerate(values) if found is None]:
            raise StoreError(f"rank {missing[0]} reported nothing")
        return [found for found in values if found is not None]
