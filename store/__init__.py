"""The cache store: blocks of rows keyed by bucket, sealed in immutable LMDB files. No torch."""

from bucketline.store.format.block import BlockSpec, Column
from bucketline.store.format.manifest import Manifest, read_manifest
from bucketline.store.format.sample_record import SampleRecord
from bucketline.store.read.preadv import FileGather
from bucketline.store.read.store import Bucket, OpenShards, Store

__all__ = ["BlockSpec", "Bucket", "Column", "FileGather", "Manifest", "OpenShards", "SampleRecord", "Store", "read_manifest"]
