"""The exception hierarchy: one class per kind of failure, so that callers can catch what they can handle.

A message has the item, what was found, what was expected and what to do next.
"""

from __future__ import annotations


class BucketlineError(Exception):
    """Base class of all Bucketline errors. A command prints the message and exits with 1.

    Each argument is a line of the message. A line break within one came with a name, and a command prints it escaped.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class UsageError(BucketlineError):
    """The request is invalid (overlapping paths, a size of 0). A command exits with 2."""


class MissingExtraError(UsageError, ImportError):
    """A library from one of Bucketline's extras is not installed; the message names the extra."""


class SourceError(BucketlineError):
    """The source cannot be read as a set of samples."""


class ModelError(BucketlineError):
    """A model folder lacks a component, or a component does not match the store."""


class StoreError(BucketlineError):
    """A store cannot be opened, read or written."""


class CorruptError(StoreError):
    """Bytes in a store differ from what was written: a wrong digest, checksum, range or header."""


class FingerprintError(StoreError):
    """A store was made with different encoders, grid or split than the current run."""


class LockedError(StoreError):
    """Another process is writing to the store, or to the folder of a run."""


class NoLocksError(StoreError):
    """A file system has no advisory locks."""


class RankError(BucketlineError):
    """Another process of the same run has failed or disappeared."""


class PlanError(BucketlineError):
    """A plan has no steps, or a batch is impossible."""


class StateError(BucketlineError):
    """A saved loader or trainer state does not belong to this run."""


class DeliveryError(BucketlineError):
    """No more batches: a prefetch thread or the service has stopped or cannot be reached."""


class TrainError(BucketlineError):
    """Training cannot start or continue."""


class AccountError(BucketlineError):
    """The number of images found differs from the sum of packed, unchanged and rejected."""


class StoppedError(Exception):
    """A thread ends because another one has failed, or its caller has stopped; no user sees it."""
