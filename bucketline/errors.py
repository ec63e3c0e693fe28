"""The error tree: one class per kind of failure, so that callers can catch what they can act on.

A message gives the item, what was found, what was expected and what to do next.
"""

from __future__ import annotations


class BucketlineError(Exception):
    """Base of all of Bucketline's errors; a command prints its message and exits with 1."""


class UsageError(BucketlineError):
    """The request makes no sense as asked (paths that overlap, a size of 0); a command exits with 2."""


class SourceError(BucketlineError):
    """The source cannot be read as a set of samples."""


class ModelError(BucketlineError):
    """A model folder lacks a part, or a part does not fit the store."""


class StoreError(BucketlineError):
    """A store cannot be opened, read or written."""


class CorruptError(StoreError):
    """Bytes of a store are not what was written: a digest, a checksum, a range or a header is wrong."""


class FingerprintError(StoreError):
    """A store was made with other encoders, another grid or another split than the run at hand."""


class LockedError(StoreError):
    """Another process writes to the store."""


class RankError(BucketlineError):
    """Another process of the same run has failed, or is gone."""


class PlanError(BucketlineError):
    """A plan has no step, or a batch is not possible."""


class StateError(BucketlineError):
    """A saved loader or trainer state does not belong to this run."""


class DeliveryError(BucketlineError):
    """Batches cannot be delivered any more: a thread that fills them, or the service, has ended or cannot be reached."""


class TrainError(BucketlineError):
    """Training cannot start, or cannot go on."""


class AccountError(BucketlineError):
    """The images found are not the sum of those packed, unchanged and rejected."""
