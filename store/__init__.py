"""The cache store: blocks of rows keyed by bucket, sealed in immutable LMDB files. No torch."""

from bucketline.store.block import BlockSpec, Column
from bucketline.store.file_gather import FileGather
from bucketline.store.manifest import Manifest, read_manifest
from bucketline.store.reader import Bucket, OpenShards, Store
from bucketline.store.record import SampleRecord

__all__ = ["BlockSpec", "Bucket", "Column", "FileGather", "Manifest", "OpenShards", "SampleRecord", "Store", "read_manifest"]
