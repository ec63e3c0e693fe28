"""The hot subjects of `ragged_text`: batches of captions, padded, and memcpy of as many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.bench.copying import Copies
from bucketline.bench.harness import Mark, Subject, rate
from bucketline.bench.synthetic_store import all_captions
from bucketline.loader.gather import Gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.bench.ragged_text import RaggedText
    from bucketline.store import Store

MARKED_THREADS = (1, 2)


def hot_subjects(config: RaggedText, store: Store) -> list[Subject]:
    """Prepare the subjects, limits first. Captions are drawn at random, with repeats, and located before."""
    shard, caption = all_captions(store)
    drawn = np.random.default_rng(0).integers(0, len(shard), (config.batches, config.batch_size))
    batches = [store.locate_captions(shard[at], caption[at]) for at in drawn]
    column = store.text.tokens[0]
    out = torch.empty((config.batch_size, store.max_tokens, *column.shape), dtype=torch.float16)
    mask = torch.empty((config.batch_size, store.max_tokens), dtype=torch.bool)
    gather = Gather(store)
    payload = []
    for located in batches:
        gather.tokens(located, column, out, mask)
        payload.append(int(mask.sum()) * column.row_bytes)
    written = [out.numel() * out.element_size()] * len(batches)
    copies = Copies(sum(shard.caption_bytes for shard in store.manifest.shards), out)

    def deliver(num_threads: int, num_bytes: int) -> Callable[[], int]:
        def run() -> int:
            torch.set_num_threads(num_threads)
            for located in batches:
                gather.tokens(located, column, out, mask)
            return num_bytes

        return run

    subjects = []
    for n in config.threads:
        for kind, lengths in (("payload", payload), ("written", written)):
            name = f"{kind}, {n} thread{'s' if n > 1 else ''}"
            mark = Mark(bound=0.9) if kind == "written" and n in MARKED_THREADS else None
            subjects += [
                Subject(name=f"memcpy of {name}", measure=rate(copies.memcpy(lengths, n))),
                Subject(name=f"gather, {name}", measure=rate(deliver(n, sum(lengths))), limit=f"memcpy of {name}", mark=mark),
            ]
    return subjects
