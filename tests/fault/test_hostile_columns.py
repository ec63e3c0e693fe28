"""Files of a store of free columns that lie, with right checksums and digests: `verify` or the opening names what is wrong."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest

from bucketline.errors import BucketlineError, CorruptError
from bucketline.store import Store
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.format.text_block import TEXT_GROUP, caption_checksum
from bucketline.store.shard.sidecar import encode_paged
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import changing
from tests.every_reader import everything
from tests.fault.damage import BUCKET, paged, replace_file, sound_store, with_row, write_document
from tests.kit import COLUMNS, IMAGE_COLUMNS

Document = dict[str, Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_store(tmp_path_factory.mktemp("hostile") / "s", COLUMNS)


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "s"))


def bucket(document: Document) -> Document:
    found: Document = next(entry for entry in document["buckets"] if entry["name"] == BUCKET)
    return found


def column(document: Document, name: str) -> Document:
    found: Document = bucket(document)["columns"][name]
    return found


MANIFESTS: dict[str, tuple[Callable[[Document], object], str]] = {
    "axes in another order": (lambda d: bucket(d)["axes"].reverse(), "its metadata is .*'axes': 'width_px,height_px'"),
    "an axis of another name": (lambda d: bucket(d)["axes"][0].update(name="frames"), "'axes': 'frames,width_px'"),
    "an axis that is a path": (lambda d: bucket(d)["axes"][0].update(name="../x"), "has axes of the names"),
    "an axis more": (lambda d: bucket(d)["axes"].append({"name": "frames", "size": 1}), "is not the name of a bucket"),
    "no axes": (lambda d: bucket(d).update(axes=[]), "is not the name of a bucket"),
    "a presence of two bytes": (lambda d: column(d, "present/mask").update(dtype="U16"), "'present/mask' in another form"),
    "a presence of two values": (lambda d: column(d, "present/mask").update(shape=[2]), "'present/mask' in another form"),
    "a presence with a role": (
        lambda d: d["columns"].update({"present/mask": d["columns"]["mask"]}),
        "'present/mask' has the role 'mask'",
    ),
    "optional in words": (lambda d: d["columns"]["mask"].update(optional="no"), "optional is 'no', expected bool"),
    "another's role": (lambda d: d["columns"]["mask"].update(role="target"), "'mask' has the role 'target'"),
    "no roles": (lambda d: d.update(columns={}), "has the column 'audio', which has no role"),
    "a mirror image of other values": (
        lambda d: column(d, "control/depth/flipped").update(dtype="F16"),
        "'control/depth/flipped' in another form than 'control/depth'",
    ),
    "a mirror image of another size": (
        lambda d: column(d, "latent_flipped").update(shape=[2, 4, 16]),
        "'latent_flipped' in another form than 'latent'",
    ),
    "a target of other values": (lambda d: column(d, "audio").update(dtype="I32"), "its header is not that of a block"),
    "a scale less": (lambda d: d["text"]["tokens"]["tokens_scale"].update(shape=[1]), "tokens_scale takes tokens of I8"),
    "scales of other values": (lambda d: d["text"]["tokens"]["tokens_scale"].update(dtype="F32"), "tokens_scale takes tokens"),
    "an error of no captions": (lambda d: d["text_error"].update(captions=0), "the tokens of 0 captions"),
    "another version": (lambda d: d.update(format_version=2), "format version 2, expected 1"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_lies_is_named(case: str, store: Path) -> None:
    change, words = MANIFESTS[case]
    document = json.loads((store / MANIFEST).read_bytes())
    change(document)
    write_document(store, document)
    expect_named(store, words)


NOT_OF_ONE = "does not have the checksums of the 1 lines"
LINES: dict[str, tuple[Callable[[Any], Any], dict[str, object], str]] = {
    "none": (lambda _: None, {}, "lacks the tensor 'line_checksum'"),
    "one more": (lambda own: np.concatenate([own, own]), {}, NOT_OF_ONE),
    "one less": (lambda own: own[:-1], {}, NOT_OF_ONE),
    "another": (lambda own: own ^ 1, {}, "bytes 0 to 8388608 do not match the checksum of their line"),
    "of other lines": (lambda own: own, {"line_bytes": 4096}, NOT_OF_ONE),
    "of no lines": (lambda own: own, {"line_bytes": 0}, NOT_OF_ONE),
    "of words": (lambda own: own, {"line_bytes": "x"}, NOT_OF_ONE),
}


@pytest.mark.parametrize("case", LINES)
def test_line_checksums_that_lie_are_named(case: str, store: Path) -> None:
    change, metadata, words = LINES[case]
    tensors, own = paged(store, "extents")
    changed = [(name, dtype, change(values) if name == "line_checksum" else values) for name, dtype, values in tensors]
    given = [(name, dtype, values) for name, dtype, values in changed if values is not None]
    replace_file(store, "extents", encode_paged(given, {**own, **metadata}))
    expect_named(store, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"present/mask": b"\2"}, "present/mask is 2, expected 0 or 1"),
        ({"present/mask": b"\0", "mask": b"\7" * 4096}, "present/mask is 0, and its mask is not all zeros"),
        (
            {"present/control/depth": b"\1", "present/control/depth/flipped": b"\0", "control/depth/flipped": bytes(128)},
            "present/control/depth is 1, and its present/control/depth/flipped 0",
        ),
    ],
)
def test_a_row_that_lies_about_what_it_has_is_named_with_its_sample(changes: dict[str, bytes], words: str, store: Path) -> None:
    (name,) = Store.open(store).bucket(BUCKET).sample_ids(np.array([0]))
    replace_file(store, "lmdb", with_row(store, changes))
    expect_named(store, words)
    assert name in {fault.sample for fault in verify(Store.open(store), lambda _: None, 1).corrupt}


def scale(value: float) -> bytes:
    return np.array([value], dtype="<f2").tobytes()


STRANGE = "the caption's quantised tokens, or their scales, are beyond what can be stored"


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", b"\x80"), *(("tokens_scale", scale(one)) for one in (np.nan, np.inf, -1, 516))]
)
def test_a_quantised_caption_that_lies_is_named_with_its_samples(name: str, value: bytes, store: Path) -> None:
    rewrite_caption(store, 1, name, value)
    expect_named(store, STRANGE)


def rewrite_caption(store: Path, row: int, name: str, value: bytes) -> None:
    """Put other bytes at the beginning of a caption's column, its checksum made right."""
    opened = Store.open(store)
    shard, data = opened.shards[0], bytearray(opened.shards[0].paths.lmdb.read_bytes())
    before = opened.caption(0, row)
    place = shard.block_ranges(TEXT_GROUP, np.array([row]))
    block = slice(int(place.offset[0]), int(place.offset[0]) + int(place.length[0]))
    body, after = bytes(data[block]), copy.deepcopy(before)
    columns = after.tokens if name in after.tokens else after.fixed
    columns[name] = value + columns[name][len(value) :]
    old, new = ({**caption.tokens, **caption.fixed}[name] for caption in (before, after))
    sums = [caption_checksum(opened.text, caption).to_bytes(8, "little") for caption in (before, after)]
    assert body.count(old) == body.count(sums[0]) == 1
    data[block] = body.replace(old, new).replace(sums[0], sums[1])
    replace_file(store, "lmdb", bytes(data))


def left_pending(store: Path) -> None:
    """Have the first shard be what a killed writer left in a store that was just made."""
    shutil.copy(store / "generations" / "0.json", store / MANIFEST)
    (store / "shards" / "g0.lmdb").rename(store / "pending" / "g0.lmdb")
    for path in [*(store / "generations").glob("[1-9].json"), *(store / "shards").iterdir()]:
        path.unlink()


def test_a_pending_shard_with_an_impossible_error_of_its_text_is_not_adopted(store: Path) -> None:
    left_pending(store)
    with lmdb.open(str(store / "pending" / "g0.lmdb"), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        meta = msgpack.unpackb(txn.get(b"meta"))
        txn.put(b"meta", msgpack.packb({**meta, "text_error": {**meta["text_error"], "cosine_min": 7.0}}))
    words = r"g0\.lmdb, left by an interrupted run, cannot be sealed: shard g0: the value of b'meta' is damaged"
    with pytest.raises(CorruptError, match=words), changing(store):
        pass
    assert (store / "pending" / "g0.lmdb").exists()


def test_a_pending_shard_with_a_scale_that_is_nan_is_found_once_it_is_adopted(store: Path) -> None:
    rewrite_caption(store, 1, "tokens_scale", scale(np.nan))
    left_pending(store)
    with changing(store) as manifest:
        assert [shard.name for shard in manifest.shards] == ["g0"]
    expect_named(store, STRANGE)


def expect_named(store: Path, words: str) -> None:
    """Opening or `verify` says so; and what plain readers and loaders make of it is an answer, or an error of ours."""
    with suppress(BucketlineError):
        everything(Store.open(store))
    try:
        said = [fault.error for fault in verify(Store.open(store), lambda _: None, 1).corrupt]
    except BucketlineError as error:
        said = [str(error)]
    assert any(re.search(words, line) for line in said), said


def test_the_store_is_sound_before_anything_lies(sound: Path) -> None:
    store = Store.open(sound)
    assert not verify(store, lambda _: None, 1).corrupt
    assert store.manifest.columns.keys() == {column.name for column in IMAGE_COLUMNS}
    assert store.text.is_quantised
