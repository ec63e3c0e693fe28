"""The loader as torch's `DataLoader` wants it, for frameworks that take nothing else.

batches = DataLoader(BatchDataset(loader), batch_size=None)

Where a framework takes any iterable, give it the loader itself: then its state is counted and saved without this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from bucketline.errors import UsageError
from bucketline.loader.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.loader.loader import Loader

_REMEDY = "make the DataLoader with num_workers=0: the loader fills ahead by a thread of its own, and copies no batch"


class BatchDataset(IterableDataset[Batch]):
    """A loader's batches, ready-made: for `DataLoader(…, batch_size=None)`, without workers.

    `DataLoader` itself has no state: save `state_dict` of this (or of the loader), which counts what was consumed.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        """Go on where the loader's state stands.

        Raises:
            UsageError: in a worker process, of which each would read all batches anew.
        """
        if (worker := get_worker_info()) is not None:
            raise UsageError(f"a DataLoader with {worker.num_workers} workers cannot read a Bucketline loader; {_REMEDY}")
        return iter(self.loader)

    def __len__(self) -> int:
        """Give what the loader gives.

        Raises:
            TypeError: where it has no end.
        """
        return len(self.loader)

    def state_dict(self) -> dict[str, object]:
        """Give the loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved state, at the next iteration.

        Raises:
            StateError: where it belongs to another plan.
        """
        self.loader.load_state_dict(state)

    def __getstate__(self) -> NoReturn:
        """Refuse to be sent to another process.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"a Bucketline loader cannot be sent to a worker process; {_REMEDY}")
