"""Capabilities that each loader's documented interface has. Rows are questions, and answers have reasons.

The answers apply to the versions in `requirements`. What the gate checks (bytes, one shape, once per pass) is repeated in each
run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Can(StrEnum):
    """An answer."""

    YES = "yes"
    PARTLY = "partly"
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One loader's answer to one question."""

    question: str
    loader: str
    can: Can
    why: str


ONE_SHAPE = "batches of one bucket each"
SAME_BUCKET = "the same bucket on all ranks at each step"
EVERY_ONCE = "every sample once per pass, on any number of ranks"
SHUFFLED = "any sample may follow any other"
RESUME = "resumes mid-epoch with the very next batch"
ELASTIC = "resumes with another world size"
VERIFIED = "bytes verified against a checksum when read"
SHARED = "one reader for all ranks of a machine"
QUESTIONS = (ONE_SHAPE, SAME_BUCKET, EVERY_ONCE, SHUFFLED, RESUME, ELASTIC, VERIFIED, SHARED)

_ANSWERS: dict[str, tuple[tuple[Can, str], ...]] = {
    "bucketline": (
        (Can.YES, "the plan draws one bucket per step"),
        (Can.YES, "all ranks compute the same plan; nothing is sent"),
        (Can.YES, "a remainder is carried into the next pass"),
        (Can.YES, "a keyed permutation of each bucket's rows"),
        (Can.YES, "the state is a step number"),
        (Can.YES, "with the same global batch"),
        (Can.YES, "LoaderConfig(verify=True), by row; it is off by default, and in these timings"),
        (Can.YES, "loader serve; Loader(service=...)"),
    ),
    "torch DataLoader over files or LMDB": (
        (Can.YES, "with a custom batch sampler, as here"),
        (Can.NO, "DistributedSampler splits indices and knows no buckets; the batch sampler would have to be written for it"),
        (Can.NO, "DistributedSampler repeats samples to even out ranks, or drops them with drop_last"),
        (Can.YES, "RandomSampler; here by the batch sampler"),
        (Can.NO, "DataLoader has no state; torchdata's StatefulDataLoader, a separate package, has one"),
        (Can.NO, "there is no state"),
        (Can.PARTLY, "an .npz member's CRC-32 is checked; a .safetensors file and an LMDB value have none"),
        (Can.NO, "each rank has its own workers; only the page cache is shared"),
    ),
    "LitData": (
        (Can.YES, 'CombinedStreamingDataset(batching_method="per_stream"), a data set per bucket'),
        (Can.NO, "each rank and worker draws its data set independently of the others"),
        (Can.PARTLY, "drop_last evens out ranks by dropping; without it they may end at different steps"),
        (Can.NO, "chunks are shuffled, and samples within a chunk"),
        (Can.PARTLY, "StreamingDataLoader.state_dict: one data set resumes exactly, several without workers end in an error"),
        (Can.NO, "CombinedStreamingDataset, which batches of one bucket need, refuses it; only a StreamingDataset can"),
        (Can.NO, "no digest of a chunk is kept"),
        (Can.NO, "each rank's workers read"),
    ),
    "MosaicML Streaming": (
        (Can.YES, 'a stream per bucket, batching_method="per_stream"'),
        (Can.YES, "per_stream makes the global batch from one stream"),
        (Can.NO, "samples are repeated so that every rank has the same number"),
        (Can.PARTLY, "py1e shuffles within a range of shards; naive over all"),
        (Can.YES, "StreamingDataLoader.state_dict counts samples, in global batches"),
        (Can.YES, "with the same num_canonical_nodes"),
        (Can.PARTLY, "validate_hash checks a shard as it is downloaded or unpacked, not as it is read"),
        (Can.PARTLY, "ranks of a node share the cache folder and the state in shared memory; each reads"),
    ),
    "WebDataset": (
        (Can.PARTLY, "a pipeline per bucket, mixed at random, as here"),
        (Can.NO, "each rank mixes independently"),
        (Can.NO, "whole tar files go to ranks and workers; the documentation advises resampling and epochs of fixed length"),
        (Can.NO, "tar files are shuffled, and samples within a buffer"),
        (Can.NO, "there is no state; a pass starts over"),
        (Can.NO, "there is no state"),
        (Can.NO, "only tar's headers have a checksum"),
        (Can.NO, "each rank's workers read"),
    ),
    "ArrayRecord with Grain": (
        (Can.YES, "a MapDataset per bucket, batched before they are concatenated and shuffled, as here"),
        (Can.PARTLY, "if batches of the global size are made first and each rank slices them, by hand"),
        (Can.PARTLY, "a slice per rank; remainders are dropped or end some ranks earlier"),
        (Can.YES, "MapDataset.shuffle is a global permutation"),
        (Can.YES, "DatasetIterator.get_state and set_state"),
        (Can.PARTLY, "ElasticIterator batches and shards one data set of samples, not batches of several buckets"),
        (Can.YES, "Riegeli chunks, of which ArrayRecord files are made, carry hashes of their data"),
        (Can.NO, "each rank's process reads"),
    ),
    "Hugging Face datasets": (
        (Can.YES, "a data set per bucket and a custom batch sampler, as here"),
        (Can.NO, "split_dataset_by_node gives each rank its rows and knows no buckets"),
        (Can.PARTLY, "split_dataset_by_node loses none, and some ranks may have one sample more"),
        (Can.YES, "map-style: any sampler. IterableDataset: shards, and samples within a buffer"),
        (Can.PARTLY, "IterableDataset.state_dict, which skips what its shuffle buffer held; map-style has none"),
        (Can.NO, "a state belongs to one rank's shards"),
        (Can.NO, "Arrow files have no checksum that is verified"),
        (Can.NO, "ranks share the page cache through the map; each reads"),
    ),
}  # fmt: skip

CAPABILITIES = tuple(
    Capability(question=question, loader=loader, can=can, why=why)
    for loader, answers in _ANSWERS.items()
    for question, (can, why) in zip(QUESTIONS, answers, strict=True)
)


def as_json() -> list[dict[str, Any]]:
    """Return all answers, one JSON object each."""
    return [{"question": one.question, "loader": one.loader, "can": str(one.can), "why": one.why} for one in CAPABILITIES]
