"""Get a store's files from object storage: each is compared with its manifest's digest before it takes its name."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import xxhash

from bucketline.errors import CorruptError, StoppedError, StoreError
from bucketline.files.atomic_write import create_aside
from bucketline.files.disk_space import remedy_for_failed_write
from bucketline.store.remote.objects import PART_BYTES, PARTS_IN_FLIGHT
from bucketline.store.remote.retries import MAX_WRONG, asked_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry
    from bucketline.store.remote.objects import ObjectFolder


class Downloader:
    """Gets files several at a time, and large ones in several parts at a time."""

    def __init__(
        self,
        folder: ObjectFolder,
        *,
        jobs: int = 4,
        on_bytes: Callable[[int], None] = lambda _: None,
        takes_any_digest: bool = False,
    ) -> None:
        """Request nothing yet; `on_bytes` takes the bytes that arrived, from several threads.

        With `takes_any_digest`, the caller looks for damage itself, and what is missing or short is believed after a few tries
        rather than after the deadline.
        """
        self._folder, self._jobs, self._on_bytes, self._takes_any_digest = folder, jobs, on_bytes, takes_any_digest
        self._stopped = threading.Event()

    def get(self, files: Iterable[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Get files of `shards/` by their names; those that are there with the right length are left as they are."""
        wanted = [(path, expected) for path, expected in files if not is_there(path, expected)]
        with ThreadPoolExecutor(max(1, min(self._jobs, len(wanted))), thread_name_prefix="bucketline-pull") as pool:
            try:
                futures = [pool.submit(self.get_one, path, expected) for path, expected in wanted]
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def get_one(self, path: Path, expected: FileEntry | DroppedEntry) -> None:
        """Get a file, replacing what is at its path; raises what `get` does."""
        for left in reversed(range(1 if self._takes_any_digest or not self._folder.is_far else MAX_WRONG)):
            if self._is_got(path, expected, is_last=not left):
                return

    def _is_got(self, path: Path, expected: FileEntry | DroppedEntry, *, is_last: bool) -> bool:
        """Get a file; return False if its bytes are wrong and this is not the last try."""
        name, state = f"shards/{path.name}", xxhash.xxh3_128()
        aside: Path | None = None
        try:
            aside, fd = create_aside(path)
            with open(fd, "wb", buffering=0) as file:  # noqa: PTH123 - opens a descriptor
                for part in self._parts(name, expected.num_bytes):
                    state.update(part)
                    view = memoryview(part).cast("B")
                    while view:
                        view = view[file.write(view) :]
                    self._on_bytes(memoryview(part).nbytes)
                if state.hexdigest() != expected.digest and not self._takes_any_digest:
                    if not is_last:
                        self._on_bytes(-expected.num_bytes)
                        return False
                    raise CorruptError(
                        f"{self._folder.place(name)} is damaged: its digest is not the manifest's; push the store again from "
                        "a copy that is whole, or `store repair` the store there"
                    )
                aside.replace(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}; {remedy_for_failed_write(path.parent)}") from error
        finally:
            if aside is not None:
                aside.unlink(missing_ok=True)
        return True

    def _parts(self, name: str, num_bytes: int) -> Iterator[bytes]:
        """Yield an object's bytes in order; several requests are under way."""
        if num_bytes <= PART_BYTES:
            yield self._part(name, 0, num_bytes)
            return
        begins = iter(range(0, num_bytes, PART_BYTES))
        with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="bucketline-part") as pool:
            coming = deque(
                pool.submit(self._part, name, begin, min(begin + PART_BYTES, num_bytes))
                for begin in itertools.islice(begins, PARTS_IN_FLIGHT)
            )
            try:
                while coming:
                    part = coming.popleft().result()
                    if (begin := next(begins, None)) is not None:
                        coming.append(pool.submit(self._part, name, begin, min(begin + PART_BYTES, num_bytes)))
                    yield part
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _part(self, name: str, begin: int, end: int) -> bytes:
        def read() -> bytes:
            if self._stopped.is_set():
                raise StoppedError
            part = self._folder.read_range(name, begin, end)
            if len(part) != end - begin:
                raise CorruptError(
                    f"{self._folder.place(name)} ends at byte {begin + len(part)}, the manifest says that it is longer; push "
                    "the store again from a copy that is whole"
                )
            return part

        if not self._folder.is_far:
            return read()
        most_wrong = MAX_WRONG if self._takes_any_digest else None
        return asked_again(read, self._folder.options.deadline_s, most_wrong=most_wrong)


def is_there(path: Path, expected: FileEntry | DroppedEntry) -> bool:
    """Return whether a file has been got: it takes its name only when it is complete."""
    try:
        return path.stat().st_size == expected.num_bytes
    except FileNotFoundError:
        return False
