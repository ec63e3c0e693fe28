"""Loaders of packages, each with its format: a peer's environment has one of them, so each imports its own when it is used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.peers.formats.importable import make_torchvision_importable
from bucketline.bench.peers.registry import Importing, Opened, Remote
from bucketline.bench.peers.samples import PeerBatch, pack, sample, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bucketline.bench.peers.registry import Way
    from bucketline.bench.peers.samples import SetShape

TORCH_SAMPLES = "bucketline.bench.peers.formats.torch_samples"
S3_CLIENT = {  # environment variables of S3 clients that read from a server on this machine, which checks no signature
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}


class _Made:
    """Makes samples; LitData's `optimize` calls it in its own processes."""

    def __init__(self, shape: SetShape) -> None:
        self._shape = shape

    def __call__(self, number: int) -> dict[str, Any]:
        from bucketline.bench.peers.formats.torch_samples import as_torch

        return as_torch(sample(self._shape, number))


class LitData(Importing):
    """One folder of chunks per bucket; `CombinedStreamingDataset` returns batches of one bucket each."""

    needs = ("litdata.streaming.downloader", TORCH_SAMPLES)

    def write(self, shape: SetShape, folder: Path) -> None:
        from litdata import optimize

        for bucket in range(len(shape.buckets)):
            numbers, output = list(shape.numbers(bucket)), str(folder / str(bucket))
            optimize(fn=_Made(shape), inputs=numbers, output_dir=output, chunk_bytes="64MB", num_workers=1)

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        """Open its chunks. By S3, each bucket's data set has a cache of its own, with its share of the bytes.

        Its options of obstore, which it prefers for chunks, are constants that refuse a server without TLS.
        """
        from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
        from litdata.streaming import downloader

        from bucketline.bench.peers.formats.torch_samples import Stack, opened

        options: dict[str, Any] = {"shuffle": True, "drop_last": False}
        if isinstance(place, Remote):
            os.environ.update(S3_CLIENT)
            downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
            options["storage_options"] = {"endpoint_url": place.endpoint}
            options["max_cache_size"] = place.cache_bytes // len(shape.buckets)
        buckets = []
        for at in range(len(shape.buckets)):
            if isinstance(place, Remote):
                buckets.append(StreamingDataset(f"{place.s3}/{at}", cache_dir=f"{place.cache}/{at}", **options))
            else:
                buckets.append(StreamingDataset(str(place / str(at)), **options))
        loader = StreamingDataLoader(
            CombinedStreamingDataset(buckets, iterate_over_all=True, batching_method="per_stream"),
            batch_size=shape.batch_size,
            num_workers=way.workers,
            collate_fn=Stack(shape),
            persistent_workers=way.workers > 0,
        )
        return opened(loader)


class Mds(Importing):
    """MosaicML Streaming: one folder of MDS shards per bucket, a stream each, with declared dtypes and fixed shapes."""

    needs = ("streaming.base.util", TORCH_SAMPLES)

    def __init__(self) -> None:
        """Import the modules."""
        make_torchvision_importable()
        super().__init__()

    def write(self, shape: SetShape, folder: Path) -> None:
        from streaming import MDSWriter

        for bucket, (height, width, _) in enumerate(shape.buckets):
            columns = {
                "number": "int",
                "latent": f"ndarray:float16:{shape.channels},{height},{width}",
                "tokens": "ndarray:float16",
                "original_size": "ndarray:int32:2",
                "crop": "ndarray:int32:2",
            }
            with MDSWriter(out=str(folder / str(bucket)), columns=columns) as out:
                for number in shape.numbers(bucket):
                    out.write(sample(shape, number)._asdict())

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        """Open its shards; by S3, with the limit of its cache."""
        from streaming import Stream, StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        from bucketline.bench.peers.formats.torch_samples import StackArrays, opened

        buckets = range(len(shape.buckets))
        if isinstance(place, Remote):
            os.environ.update(S3_CLIENT, S3_ENDPOINT_URL=place.endpoint)
            streams = [Stream(remote=f"{place.s3}/{at}", local=f"{place.cache}/{at}") for at in buckets]
        else:
            streams = [Stream(local=str(place / str(at))) for at in buckets]
        clean_stale_shared_memory()  # as its documentation requires if an earlier process was killed
        dataset = StreamingDataset(
            streams=streams,
            batch_size=shape.batch_size,
            shuffle=True,
            batching_method="per_stream",
            cache_limit=place.cache_bytes if isinstance(place, Remote) else None,
        )
        loader = StreamingDataLoader(
            dataset,
            batch_size=shape.batch_size,
            num_workers=way.workers,
            collate_fn=StackArrays(shape),
            persistent_workers=way.workers > 0,
        )
        return opened(loader)


class WebDataset(Importing):
    """Tar files of complete batches of one bucket each: workers divide up entire tar files, so they deliver only full batches.

    Each bucket is batched in a pipeline, and the pipelines are mixed at random.
    """

    needs: tuple[str, ...] = ("webdataset", TORCH_SAMPLES)
    shards = 2  # per bucket, at least: one for each worker process
    shard_batches = 8  # maximum per shard
    shuffle_buffer = 256  # samples

    def _rows_of_shard(self, shape: SetShape, rows_of_bucket: int) -> int:
        return shape.batch_size * min(self.shard_batches, max(1, rows_of_bucket // shape.batch_size // self.shards))

    def write(self, shape: SetShape, folder: Path) -> None:
        import webdataset

        for bucket, (_, _, rows) in enumerate(shape.buckets):
            pattern, most = str(folder / f"{bucket}-%06d.tar"), self._rows_of_shard(shape, rows)
            with webdataset.ShardWriter(pattern, maxcount=most, maxsize=1 << 40, verbose=0) as sink:
                for number in shape.numbers(bucket):
                    own = sample(shape, number)
                    about = {"number": number, "original_size": own.original_size.tolist(), "crop": own.crop.tolist()}
                    arrays = {"latent.npy": own.latent, "tokens.npy": own.tokens}
                    sink.write({"__key__": f"{number:08d}", **arrays, "about.json": about})

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        """Open its tar files. From a server by `curl`, as it does; its cleaning of the cache waits for half a minute."""
        import webdataset
        from webdataset.cache import url_to_cache_name

        from bucketline.bench.peers.formats.torch_samples import StackArrays, opened

        stack, cache = StackArrays(shape), {}
        if isinstance(place, Remote):
            cache = {"cache_dir": place.cache, "cache_size": place.cache_bytes, "url_to_name": url_to_cache_name}

        def collated(samples: Sequence[Any]) -> dict[str, Any]:
            return stack([{**about, "latent": latent, "tokens": tokens} for about, latent, tokens in samples])

        pipelines = []
        for bucket, (_, _, rows) in enumerate(shape.buckets):
            root = place.http if isinstance(place, Remote) else place
            urls = [f"{root}/{bucket}-{n:06d}.tar" for n in range(-(-rows // self._rows_of_shard(shape, rows)))]
            pipeline = (
                webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False, **cache)
                .shuffle(self.shuffle_buffer)
                .decode()
                .to_tuple("about.json", "latent.npy", "tokens.npy")
                .batched(shape.batch_size, collation_fn=collated)
            )
            pipelines.append(pipeline)
        mixed = webdataset.RandomMix(pipelines, [rows for _, _, rows in shape.buckets], longest=True)
        loader = webdataset.WebLoader(
            mixed, batch_size=None, num_workers=way.workers, persistent_workers=way.workers > 0, shuffle=False
        )
        return opened(loader)


class _Unpack:
    """Unpacks a record into arrays of one shape, with padded tokens, so that Grain's own batching can stack them."""

    def __init__(self, shape: SetShape) -> None:
        self._shape = shape

    def __call__(self, record: bytes) -> dict[str, Any]:
        own = unpack(record, self._shape)
        length, most = len(own.tokens), self._shape.max_tokens
        tokens = np.zeros((most, self._shape.token_width), dtype=np.float16)
        tokens[:length] = own.tokens
        return {**own._asdict(), "tokens": tokens, "mask": np.arange(most) < length}


class ArrayRecord(Importing):
    """Grain over one file per bucket, with records in groups of one, as random access requires.

    Each bucket is shuffled, unpacked and batched; then the buckets' batches are shuffled.
    """

    needs = ("grain", "array_record.python.array_record_module")

    def write(self, shape: SetShape, folder: Path) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        for bucket in range(len(shape.buckets)):
            writer = ArrayRecordWriter(str(folder / f"{bucket}.arrayrecord"), "group_size:1")
            for number in shape.numbers(bucket):
                writer.write(pack(sample(shape, number)))
            writer.close()

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        import grain

        assert isinstance(place, Path)
        buckets = [
            grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(place / f"{bucket}.arrayrecord")))
            .shuffle(seed=bucket)
            .map(_Unpack(shape))
            .batch(shape.batch_size)
            for bucket in range(len(shape.buckets))
        ]
        batches = grain.MapDataset.concatenate(buckets).shuffle(seed=0)
        options = grain.ReadOptions(num_threads=way.threads) if way.threads else grain.ReadOptions()
        dataset = batches.to_iter_dataset(options)
        if way.workers:
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=way.workers))

        def begin() -> Iterator[PeerBatch]:
            return (PeerBatch(**{name: np.asarray(batch[name]) for name in PeerBatch._fields}) for batch in dataset)

        return Opened(begin=begin)


class HfDatasets(Importing):
    """`save_to_disk` and `load_from_disk` of one Arrow data set per bucket, in torch format, through torch's `DataLoader`.

    Half-precision columns come through `with_format`, the others as stored.
    """

    needs = ("datasets", TORCH_SAMPLES)

    def write(self, shape: SetShape, folder: Path) -> None:
        import datasets
        from datasets import Array2D, Array3D, Features, List, Value

        for bucket, (height, width, _) in enumerate(shape.buckets):
            features = Features(
                {
                    "number": Value("int64"),
                    "latent": Array3D((shape.channels, height, width), "float16"),
                    "tokens": Array2D((None, shape.token_width), "float16"),
                    "original_size": List(Value("int32"), length=2),
                    "crop": List(Value("int32"), length=2),
                }
            )
            made = datasets.Dataset.from_generator(
                _samples,
                features=features,
                gen_kwargs={"shape": shape, "bucket": bucket},
                cache_dir=str(folder / f"{bucket}-cache"),
                writer_batch_size=shape.batch_size,
            )
            made.save_to_disk(str(folder / str(bucket)))
            del made
            shutil.rmtree(folder / f"{bucket}-cache")

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        from bucketline.bench.peers.formats.torch_samples import through_torch

        assert isinstance(place, Path)
        return through_torch(_Buckets(shape, place), shape, way)  # type: ignore[arg-type] # indexed by number, as one is


class _Buckets:
    """The buckets' data sets by sample number. A batch is fetched at once, as torch's `DataLoader` does with `datasets`."""

    def __init__(self, shape: SetShape, folder: Path) -> None:
        import torch
        from datasets import load_from_disk

        self._shape = shape
        form: dict[str, Any] = {"columns": ["latent", "tokens"], "output_all_columns": True, "dtype": torch.float16}
        self._buckets = [load_from_disk(str(folder / str(at))).with_format("torch", **form) for at in range(len(shape.buckets))]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        import torch

        bucket, _, _ = self._shape.bucket_of(numbers[0])
        first = self._shape.numbers(bucket)[0]
        samples: list[dict[str, Any]] = self._buckets[bucket].__getitems__([number - first for number in numbers])
        for own in samples:
            own.update({name: torch.tensor(own[name], dtype=torch.int32) for name in ("original_size", "crop")})
        return samples

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]


class Lance(Importing):
    """One data set per bucket, whose rows `take` reads by number: latents of a batch are one array of lists of one length."""

    needs = ("lance", TORCH_SAMPLES)

    def write(self, shape: SetShape, folder: Path) -> None:
        import lance
        import pyarrow as pa

        for bucket, (height, width, _) in enumerate(shape.buckets):
            size, sizes = shape.channels * height * width, pa.list_(pa.int32(), 2)
            types = {"latent": pa.list_(pa.float16(), size), "tokens": pa.binary(), "original_size": sizes, "crop": sizes}
            schema = pa.schema({"number": pa.int64(), **types})
            rows = _record_batches(shape, bucket, schema)
            lance.write_dataset(pa.RecordBatchReader.from_batches(schema, rows), str(folder / str(bucket)))

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        """Open its data sets, which read in threads of their own; by S3, nothing is kept on the disk."""
        import lance

        from bucketline.bench.peers.formats.torch_samples import BucketBatches

        del way
        root, options = str(place), dict[str, Any]()
        if isinstance(place, Remote):
            client = {name.lower(): value for name, value in S3_CLIENT.items() if "KEY" in name or name == "AWS_REGION"}
            root, options = place.s3, {"storage_options": {**client, "aws_endpoint": place.endpoint, "allow_http": "true"}}
        buckets, order = [lance.dataset(f"{root}/{at}", **options) for at in range(len(shape.buckets))], BucketBatches(shape)

        def taken(numbers: list[int]) -> PeerBatch:
            bucket, height, width = shape.bucket_of(numbers[0])
            table, rows = buckets[bucket].take([number - shape.numbers(bucket)[0] for number in numbers]), len(numbers)
            columns = {name: table[name].combine_chunks() for name in table.column_names}
            tokens, mask = np.zeros((rows, shape.max_tokens, shape.token_width), "f2"), np.zeros((rows, shape.max_tokens), "?")
            for row, own in enumerate(columns["tokens"]):
                caption = np.frombuffer(own.as_buffer(), "f2").reshape(-1, shape.token_width)
                tokens[row, : len(caption)], mask[row, : len(caption)] = caption, True
            latent = columns["latent"].flatten().to_numpy().reshape(rows, shape.channels, height, width)
            sizes = {name: columns[name].flatten().to_numpy().reshape(rows, 2) for name in ("original_size", "crop")}
            return PeerBatch(number=columns["number"].to_numpy(), latent=latent, tokens=tokens, mask=mask, **sizes)

        return Opened(begin=lambda: map(taken, order))


class HfParquet(WebDataset):
    """Parquet files of values as bytes, uncompressed, a row group per batch; streamed by `datasets`, which mixes a buffer.

    Opened as a map, they would be converted to the Arrow files of `HfDatasets` first.
    """

    needs = ("datasets", "pyarrow.parquet", TORCH_SAMPLES)

    def write(self, shape: SetShape, folder: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        sizes = pa.list_(pa.int32())
        names = {"latent": pa.binary(), "tokens": pa.binary(), "original_size": sizes, "crop": sizes}
        schema = pa.schema({"number": pa.int64(), **names})
        for bucket, (_, _, rows) in enumerate(shape.buckets):
            own = list(_record_batches(shape, bucket, schema))
            step = self._rows_of_shard(shape, rows) // shape.batch_size
            for at in range(0, len(own), step):
                path = folder / f"{bucket}-{at // step:06d}.parquet"
                with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
                    for group in own[at : at + step]:
                        writer.write_batch(group)

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        """Open its files, by HTTP from a server; nothing is kept on the disk."""
        import datasets
        from torch.utils.data import DataLoader

        from bucketline.bench.peers.formats.torch_samples import StackArrays, opened

        del way
        datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # else 5 s at the end of each stream
        random, buckets = np.random.default_rng(0), []
        for bucket, (_, _, rows) in enumerate(shape.buckets):
            root = place.http if isinstance(place, Remote) else place
            urls = [f"{root}/{bucket}-{n:06d}.parquet" for n in range(-(-rows // self._rows_of_shard(shape, rows)))]
            streamed = datasets.load_dataset("parquet", data_files=urls, split="train", streaming=True)
            buckets.append(streamed.shuffle(seed=bucket, buffer_size=self.shuffle_buffer))

        def collated(samples: list[dict[str, Any]]) -> dict[str, Any]:
            _, height, width = shape.bucket_of(samples[0]["number"])
            sides = {"latent": (shape.channels, height, width), "tokens": (-1, shape.token_width)}
            arrays = [{name: np.frombuffer(own[name], "f2").reshape(side) for name, side in sides.items()} for own in samples]
            return StackArrays(shape)([{**own, **array} for own, array in zip(samples, arrays, strict=True)])

        def mixed() -> Iterator[PeerBatch]:
            batches = [iter(opened(DataLoader(one, shape.batch_size, collate_fn=collated)).begin()) for one in buckets]
            order = np.repeat(np.arange(len(buckets)), [rows // shape.batch_size for _, _, rows in shape.buckets])
            for one in buckets:
                one.set_epoch(one.epoch + 1)
            for bucket in random.permutation(order):
                yield next(batches[bucket])

        return Opened(begin=mixed)


def _record_batches(shape: SetShape, bucket: int, schema: Any) -> Iterator[Any]:  # noqa: ANN401 - of an optional package
    """Iterate over a bucket's samples as Arrow's record batches of the schema, a batch of the loader each."""
    import pyarrow as pa

    for first in range(0, len(shape.numbers(bucket)), shape.batch_size):
        own = [sample(shape, number) for number in shape.numbers(bucket)[first : first + shape.batch_size]]
        arrays = []
        for field in schema:
            values = [getattr(one, field.name) for one in own]
            if field.name == "number":
                arrays.append(pa.array(values, field.type))
            elif pa.types.is_binary(field.type):
                arrays.append(pa.array([value.tobytes() for value in values], field.type))
            elif pa.types.is_fixed_size_list(field.type):
                arrays.append(pa.FixedSizeListArray.from_arrays(np.concatenate(values, axis=None), type=field.type))
            else:
                arrays.append(pa.array([value.tolist() for value in values], field.type))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _samples(shape: SetShape, bucket: int) -> Iterator[dict[str, Any]]:
    for number in shape.numbers(bucket):
        yield sample(shape, number)._asdict()
