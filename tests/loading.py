"""The rows of a store as training gets them: planned, copied into buffers, and delivered by loaders of this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketline.loader import Batch, Loader, LoaderConfig, Remainder
from bucketline.loader.collate.buffers import choose_captions
from bucketline.store import RaggedGroup, Store
from bucketline.store.format.block import CAPTIONS, stored_name
from bucketline.torch_dtypes import as_stored
from tests.kit import SEEN, Form, Sample, entry_of, row_entry

Rows = dict[str, "NDArray[Any]"]  # a batch's tensors, by field name, `[rows, …]` each


def loaders_of(store: Store, **options: Any) -> list[Loader]:
    """Return a loader for each split; unless `options` differ, an epoch of it has every row once, and in order."""
    splits = dict.fromkeys(bucket.name.partition("/")[0] for bucket in store.buckets() if bucket.num_rows)
    asked = {"batch_size": 8, "rewind": True, "window": 0, "remainder": "partial", **options}
    return [Loader(store, LoaderConfig(split=split, **asked)) for split in splits]


def rows_of(loaders: Sequence[Loader], max_batches: int | None = None) -> dict[str, Rows]:
    """Return one pass of some loaders, by bucket, without the rows that only complete a batch."""
    parts: dict[str, list[Rows]] = {}
    for loader in loaders:
        for batch in islice(loader, max_batches):
            real = batch.weight.numpy() > 0
            parts.setdefault(batch.bucket, []).append({name: as_stored(own)[real] for name, own in batch.by_name().items()})
    return {bucket: {name: np.concatenate([part[name] for part in own]) for name in own[0]} for bucket, own in parts.items()}


def check_batch(store: Store, rows: NDArray[np.int64], batch: Batch) -> None:
    bucket = store.bucket(batch.bucket)
    for name, column in (("latents", "latent"), ("original_size", "original_size"), ("crop", "crop"), ("ids", "id")):
        assert batch.by_name()[name].numpy().tobytes() == bucket.read(rows, column, verify=True).tobytes(), name
    stored = bucket.read(rows, CAPTIONS)
    chosen = choose_captions((stored >= 0).sum(axis=1), batch.keys.numpy())
    for n, (shard, row) in enumerate(zip(bucket.locate(rows).shard.tolist(), stored, strict=True)):
        expected = store.read_caption(shard, int(row[chosen[n]]) if chosen[n] >= 0 else 0)[store.text.tokens[0].name]
        length = len(expected)
        assert batch.token_mask[n].tolist() == [k < length for k in range(batch.tokens.shape[1])]
        assert batch.tokens[n, :length].numpy().tobytes() == expected.tobytes()
        assert not batch.tokens[n, length:].any()


def expect_loaded(stores: Any, form: Form, samples: Iterable[Sample], **options: Any) -> int:
    expected, num_rows = {sample.id: sample for sample in samples if sample.bucket.startswith("train/")}, 0
    if not expected:
        return 0
    settings: dict[str, Any] = {
        "batch_size": 2,
        "epochs": 1,
        "remainder": Remainder.PARTIAL,
        "ragged": tuple(form.groups.keys() - SEEN.keys()),
    }
    config = LoaderConfig(**{**settings, "columns": form.roles, **options})
    with Loader(stores, config) as loader:
        for batch in loader:
            arrays = batch.numpy()
            for n, name in enumerate(loader.names(batch)):
                num_rows += int(batch.weight[n])
                texts = ("",) if config.caption_dropout == 1.0 or not expected[name].captions else expected[name].captions
                _expect_row(arrays, n, form, expected[name], texts)
    return num_rows


def _expect_row(arrays: Mapping[str, NDArray[Any]], n: int, form: Form, sample: Sample, texts: Sequence[str]) -> None:
    stored = form.stored(sample)
    for role in form.roles:
        if role.startswith("reference/") and not stored[role]:
            assert f"columns.{role}" not in arrays
            continue
        found = arrays["latents" if role == "target" else f"columns.{role}"][n]
        assert found.tobytes() == stored[stored_name(role)]
        assert bool(arrays.get(f"present.{role}", [True] * (n + 1))[n]) == (role in sample.columns)
    assert any(_has_caption(arrays, n, form, sample, text) for text in texts[:3]), sample
    for name in set(form.groups_of("rows")) - SEEN.keys():
        entry = row_entry(name, form.groups[name], sample.id)
        assert not form.groups[name].optional or arrays[f"ragged.{name}.present"][n] == (entry is not None)
        assert _is_entry(arrays, n, name, form.groups[name], entry)


def conditioning(form: Form, sample: Sample, text: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the tokens that a sample has with a caption, `[T, D]`, and which of them are of its images, `[T]`."""
    own = form.embed(text)["tokens"]
    if not form.groups.keys() >= SEEN.keys():
        return own, np.zeros(len(own), dtype=bool)
    images, empty = (row_entry(name, form.groups[name], sample.id) for name in SEEN)
    assert images is not None
    assert empty is not None
    own = own if text else empty["tokens"]
    return np.concatenate([images["tokens"], own]), np.concatenate([images["is_image"] != 0, np.zeros(len(own), dtype=bool)])


def _has_caption(arrays: Mapping[str, NDArray[Any]], n: int, form: Form, sample: Sample, text: str) -> bool:
    """Return whether a row has a caption's tokens, and its entry of each group: all of the same caption."""
    if form.text:
        (own, is_image), tokens = conditioning(form, sample, text), arrays["tokens"][n]
        if arrays["token_mask"][n].tolist() != [k < len(own) for k in range(len(tokens))]:
            return False
        if "image_tokens" in arrays and np.flatnonzero(arrays["image_tokens"][n]).tolist() != np.flatnonzero(is_image).tolist():
            return False
        if tokens[: len(own)].tobytes() != own.tobytes() or tokens[len(own) :].any():
            return False
    groups = {name: form.groups[name] for name in form.groups_of("captions")}
    return all(_is_entry(arrays, n, name, group, entry_of(name, group, text)) for name, group in groups.items())


def _is_entry(
    arrays: Mapping[str, NDArray[Any]], n: int, name: str, group: RaggedGroup, entry: Mapping[str, NDArray[Any]] | None
) -> bool:
    length = 0 if entry is None else len(entry[group.columns[0].name])
    mask = arrays[f"ragged.{name}.mask"][n]
    if arrays[f"ragged.{name}.lengths"][n] != length or mask.sum() != length or not mask[:length].all():
        return False
    for column in group.columns:
        found = arrays[f"ragged.{name}.columns.{column.name}"][n]
        if found.shape != (len(mask), *column.shape) or any(found[length:].tobytes()):
            return False
        if entry is not None and found[:length].tobytes() != entry[column.name].tobytes():
            return False
    for column in group.fixed:
        found = arrays[f"ragged.{name}.fixed.{column.name}"][n]
        if found.tobytes() != (bytes(column.row_bytes) if entry is None else entry[column.name].tobytes()):
            return False
    return True
