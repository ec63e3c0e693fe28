"""A command of `store`, and a section of `store report`: how many samples have captions of how many words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import print_json
from bucketline.options import Positional  # noqa: TC001 - commands read their annotations at run time
from bucketline.store.commands.look import ReadingArguments, StorePlace
from bucketline.store.read.samples import Selection, live_samples

if TYPE_CHECKING:
    from bucketline.pages.page import Section
    from bucketline.store import Store
    from bucketline.store.report.report import ReportOptions


def samples_by_words(store: Store) -> list[tuple[int, int]]:
    """Return numbers of words in ascending order, each with the samples whose first caption has so many."""
    captions = (listed.record.captions for listed in live_samples(store, Selection()))
    return sorted(Counter(len(texts[0].split()) if texts else 0 for texts in captions).items())


def caption_lengths(store: Store, options: ReportOptions) -> Section:  # noqa: ARG001 - the options of `store report`
    """Return the section. `parts` has tables, bars and sheets, which escape their texts."""
    from bucketline.pages.page import Section, parts

    table = parts.table(("words", "samples"), samples_by_words(store), texts=0)
    return Section(anchor="caption-lengths", title="Caption lengths", body=table)


@dataclass(frozen=True, kw_only=True)
class CaptionLengths(ReadingArguments):
    """Count samples by the words of their first caption.

    Example: store caption-lengths photos.store --json
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        """Print the counts and return the exit code."""
        counts = samples_by_words(self.open_store(self.store))
        if self.json:
            print_json({str(words): count for words, count in counts})
        else:
            print(*(f"{words:6} words  {count:9} samples" for words, count in counts), sep="\n")
        return 0
