"""An adapter to torch's `DataLoader`, for frameworks that accept nothing else.

batches = DataLoader(BatchDataset(loader), batch_size=None)

If a framework accepts any iterable, pass the loader itself: its state is then counted and saved without this adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from bucketline.errors import UsageError
from bucketline.loader.batch import Batch
from bucketline.loader.loader import Loader
from bucketline.option_value import expect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def _refuse_collation(batches: list[Batch], **_: object) -> NoReturn:
    raise UsageError(
        f"a DataLoader with a batch_size would make a batch of {len(batches)} batches, expected batch_size=None; "
        "write DataLoader(BatchDataset(loader), batch_size=None), and set the size in LoaderConfig"
    )


default_collate_fn_map[Batch] = _refuse_collation  # what torch consults for types that it does not know


class BatchDataset(IterableDataset[Batch]):
    """A loader's complete batches, for `DataLoader(…, batch_size=None)` without workers.

    One `for` over the `DataLoader` is one epoch of the loader. `DataLoader` has no state: save `state_dict` of this dataset (or
    of the loader), which counts what was consumed. There is no `set_epoch`: the loader counts its epochs, and Accelerate would
    set those that it has counted itself, also after a resume.
    """

    def __init__(self, loader: Loader) -> None:
        """Wrap a loader.

        Raises:
            UsageError: if it is not one.
        """
        expect("loader", loader, Loader, "a Loader: BatchDataset(Loader(stores, config))")
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over one epoch; see `Loader`.

        Raises:
            UsageError: if called in a worker process, because each worker would read all batches again.
        """
        if (worker := get_worker_info()) is not None:
            raise UsageError(
                f"a DataLoader with {worker.num_workers} workers cannot read a Bucketline loader; create the DataLoader with "
                "num_workers=0: the loader has its own prefetch thread, and copies no batch"
            )
        return iter(self.loader)

    def __len__(self) -> int:
        """Return the length of the loader's epoch."""
        return len(self.loader)

    def state_dict(self) -> dict[str, object]:
        """Return the loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a saved state; see `Loader.load_state_dict`.

        Raises:
            StateError: if it belongs to another plan.
        """
        self.loader.load_state_dict(state)
