"""The two forms of store that a test does the same things to: images' latents, and columns of any kind.

Samples are those of `tests.building`; in the second, the columns other than the target follow from a sample's content.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - the dataclass is documented by it
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from bucketline.store import PartWriter, Store, StoreWriter
from bucketline.store.format.columns import PRESENT_PREFIX, TARGET
from bucketline.store.format.text_block import quantised_spec
from bucketline.store.format.text_codec import dequantise, quantise
from bucketline.store.write.row_form import sizes_of
from tests.building import MAX_CAPTIONS, RULES, SHARD_BYTES, Sample, embedding, store_writer
from tests.free_columns import ENCODERS, IMAGE_COLUMNS, values
from tests.quantised import tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tests.reading import Held

TOKEN_WIDTH = 40  # not a multiple of 32, which a scale is for
AXES = ("height_px", "width_px")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of store, and how a sample of it is written and compared."""

    writer: Callable[..., StoreWriter]  # of a path, and options of `StoreWriter`
    roles: tuple[str, ...]  # of all columns that a loader can request
    given: Callable[[Sample], dict[str, NDArray[Any]]]  # a sample's arrays by role, without those that it lacks
    stored: Callable[[Sample], dict[str, bytes]]  # the columns that must come back, by name
    embed: Callable[[str], Mapping[str, NDArray[Any]]]  # a caption, as it is given to a writer
    tokens: Callable[[str], bytes]  # the same, as readers get it

    def add(self, writer: PartWriter, samples: Iterable[Sample], *, commit_every: int = 7) -> None:
        """Add samples and commit now and then; a commit makes a block, so that a bucket has several."""
        for n, sample in enumerate(samples, 1):
            captions = {text: self.embed(text) for text in sample.captions}
            writer.add_record(sample.record, self.given(sample), captions)
            if n % commit_every == 0:
                writer.commit()

    def part(self, path: Path, name: str) -> PartWriter:
        """Return a writer of shards, `NAME-0` and so on, that publishes nothing and takes no lock of the store."""
        return PartWriter(path, self.writer(path)._form, f"{name}-{{}}", SHARD_BYTES)

    def make_store(self, path: Path, *shards: Sequence[Sample]) -> Store:
        """Make a store of the given shards, `g0`, `g1` and so on, each published as a generation of its own."""
        with self.writer(path, shard_names="g{}") as writer:
            for samples in shards:
                self.add(writer, samples)
                writer.publish()
        return Store(path, writer.manifest)

    def is_sample(self, held: Held, sample: Sample) -> bool:
        """Return whether what a store holds is what was put in, to the last bit."""
        return (
            held.record == sample.record
            and {name: held.columns[name] for name in self.stored(sample)} == self.stored(sample)
            and held.captions == tuple(self.tokens(text) for text in sample.captions or ("",))
        )


def _columns_writer(path: Path, **more: Any) -> StoreWriter:
    return StoreWriter(
        path,
        encoders=ENCODERS,
        rules=RULES,
        columns=IMAGE_COLUMNS,
        text=quantised_spec("I8", TOKEN_WIDTH),
        empty_caption=_tokens_of(""),
        max_captions=MAX_CAPTIONS,
        **{"shard_bytes": SHARD_BYTES, **more},
    )


@cache
def _tokens_of(text: str) -> dict[str, NDArray[np.float32]]:
    return {"tokens": tokens_of(text, TOKEN_WIDTH)}


@cache
def _delivered(text: str) -> bytes:
    return dequantise(quantise(_tokens_of(text)["tokens"], "I8")).tobytes()


def _given(sample: Sample) -> dict[str, NDArray[Any]]:
    """Return a sample's arrays; of the optional columns some samples lack one, some both."""
    name, sizes = sample.record.content.hex(), sizes_of(sample.bucket, AXES)
    lacks = {"control/depth": sample.record.content[0] % 3 == 0, "mask": sample.record.content[1] % 2 == 0}
    drawn = {c.role: values(name, c.in_sizes(sample.bucket, sizes)) for c in IMAGE_COLUMNS if c.role != TARGET}
    return {TARGET: sample.latent} | {
        role: value for role, value in drawn.items() if not lacks.get(role.removesuffix("/flipped"), False)
    }


def _stored(sample: Sample) -> dict[str, bytes]:
    given, sizes = _given(sample), sizes_of(sample.bucket, AXES)
    found = {}
    for column in IMAGE_COLUMNS:
        own = column.in_sizes(sample.bucket, sizes)
        found[column.name] = given[column.role].tobytes() if column.role in given else bytes(own.row_bytes)
        if column.optional:
            found[PRESENT_PREFIX + column.name] = bytes([column.role in given])
    return found


IMAGES = Form(
    writer=store_writer,
    roles=(TARGET,),
    given=lambda sample: {TARGET: sample.latent},
    stored=lambda sample: {"latent": sample.latent.tobytes()},
    embed=lambda text: {"tokens": embedding(text)},
    tokens=lambda text: embedding(text).tobytes(),
)
COLUMNS = Form(
    writer=_columns_writer,
    roles=tuple(column.role for column in IMAGE_COLUMNS if not column.role.endswith("/flipped")),
    given=_given,
    stored=_stored,
    embed=_tokens_of,
    tokens=_delivered,
)
FORMS = {"images": IMAGES, "columns": COLUMNS}
