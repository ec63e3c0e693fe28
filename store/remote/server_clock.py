"""The time by the clock that dates a store's objects: ages are differences of two times of one clock."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.store.remote.objects import DeniedError

if TYPE_CHECKING:
    from bucketline.store.remote.objects import ObjectFolder


def server_time(folder: ObjectFolder) -> float:
    """Return the server's Unix time: the date of an object that is written for this, and removed.

    The client hands on no `Date` of an answer, and a folder on a disk has none: a file server's clock may be wrong as well.

    Raises:
        StoreError: if the folder cannot be written.
    """
    name = f"probe-{secrets.token_hex(8)}"
    try:
        folder.write(name, b"1")
        found = folder.look_up(name)
    finally:
        with suppress(DeniedError):  # a bucket that nothing may be removed from keeps an object of a byte
            folder.remove([name])
    if found is None:
        raise StoreError(
            f"{folder.place(name)} was written and is not there, so the age of other objects is unknown; rerun the command"
        )
    return found.modified_s
