"""A command of `store`: how many samples have captions of how many words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import tyro  # noqa: TC002 - read when the command is parsed

from bucketline.command_line import print_json
from bucketline.store.commands.place import ReadingArguments, StorePlace
from bucketline.store.read.iter_samples import Selection, live_samples


@dataclass(frozen=True, kw_only=True)
class CaptionLengths(ReadingArguments):
    """Count samples by the words of their first caption.

    Example: store caption-lengths photos.store --json
    """

    store: tyro.conf.Positional[StorePlace]
    """Path or URL of the store."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        """Print the counts and return the exit code."""
        counts: Counter[int] = Counter()
        for listed in live_samples(self.open_store(self.store), Selection()):
            counts[len(listed.record.captions[0].split()) if listed.record.captions else 0] += 1
        if self.json:
            print_json({str(words): count for words, count in sorted(counts.items())})
        else:
            print(*(f"{words:6} words  {count:9} samples" for words, count in sorted(counts.items())), sep="\n")
        return 0
