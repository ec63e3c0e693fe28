"""`ingest pack`, and the lines that several commands of `ingest` print."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.command_line import (
    counted,
    human_bytes,
    one_line,
    print_json,
    print_json_line,
    printable,
    say,
    torchrun_ranks,
)
from bucketline.errors import SourceError, UsageError
from bucketline.files.paths import is_folder_of_images, redacted
from bucketline.ingest.config import FILE_TABLES, STORED_OPTIONS, PackConfig
from bucketline.ingest.images.crop import crop_loss_line
from bucketline.ingest.rules import HeldOut, SplitBy
from bucketline.ingest.summary import WITHOUT_CAPTION, plus_withdrawn, print_withdrawn, took
from bucketline.store.commands.look import shown
from bucketline.store.format.manifest import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.ingest.dataset import DryRun
    from bucketline.ingest.packed_index import SampleChanges
    from bucketline.ingest.packing.finish import PackResult
    from bucketline.ingest.sources.dataset_file import DatasetEntry


# -------------------------------------------------------------------------------------------------------------------- printing


def print_entry(entry: DatasetEntry | None) -> None:
    """Print the line that comes before a source's own, if it is one of a data set file."""
    if entry is not None:
        print(f"{one_line(str(entry.name))} x {entry.repeats}: {one_line(str(redacted(entry.path)))}")


def print_captions_and_notes(captions_from: Mapping[str, int], notes: Sequence[str]) -> None:
    """Print where captions came from, and notes about the source."""
    if captions_from:
        say(f"  captions from {'; '.join(f'{one_line(place)} ({count})' for place, count in captions_from.items())}")
    for note in notes:
        say(f"  note: {one_line(note)}")


def print_held_out(number: int, num_samples: int, rule: HeldOut) -> None:
    """Print how many samples are held out; if none is though a fraction is set, also why."""
    if not number and not rule.fraction:
        return
    is_by_folder = rule.by is SplitBy.FOLDER
    why = ": :folder holds out whole folders, and this is one" if is_by_folder else ": add images, and pack again"
    print(f"  held out for validation: {number} of {counted(num_samples, 'sample')}{'' if number else why}")


def print_warnings(captions_without_image: list[str], passed_over: list[str]) -> None:
    """Print the first ten captions without an image and the first ten skipped images."""
    for what, names in (("caption without an image", captions_without_image), ("image skipped", passed_over)):
        for name in names[:10]:
            say(f"  warning: {what}: {one_line(name)}")
        if (more := len(names) - 10) > 0:
            print(f"  warning: and {more} more: {what}")


# ------------------------------------------------------------------------------------------------------------------------ pack


@dataclass(frozen=True, kw_only=True)
class Pack(PackConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = PackConfig.__doc__

    def run(self) -> int:
        from bucketline.ingest.packing.packed_model import naming_packed_model, with_packed_model
        from bucketline.ingest.parallel.signals import exit_code_of

        if self.engine is not None:
            _prepare_environment(self)
        try:
            own = with_packed_model(self)
        except UsageError:
            _refuse_swapped(self.source, self.place)
            raise
        if own.model != self.model and not torchrun_ranks()["rank"]:
            told = f"model: {printable(own.model)} (of the last pack into {shown(self.place)})"
            print(told, file=sys.stderr if self.json else sys.stdout, flush=True)
        try:
            with naming_packed_model(own):
                return own._run()
        except SourceError:
            _refuse_swapped(self.source, self.place)
            raise
        except KeyboardInterrupt as stop:
            print(f"interrupted: {_what_is_kept(stop)}", file=sys.stderr)
            return exit_code_of(stop)

    def _run(self) -> int:
        from bucketline.ingest.sources.dataset_file import is_dataset_file

        if is_dataset_file(self.source):
            return self._dry_run() if self.dry_run else self._run_each()
        own = self._as_stored()
        return own._dry_run() if self.dry_run else own._pack()

    def _pack(self) -> int:
        from bucketline.ingest.pack import pack_images

        summary = pack_images(self, **torchrun_ranks())
        if summary is None:
            return 0
        if self.json:
            print_json(asdict(summary))
        else:
            _print_summary(summary, self)
        if summary.too_many_rejects or summary.not_pruned_beyond_limit:
            _print_beyond_limits(summary, self)
            return 1
        return 0 if summary.packed + summary.unchanged + summary.withdrawn else 1

    @classmethod
    def complete(cls, options: Pack, given: frozenset[str]) -> Pack:
        """Return the options of a command line that gave these fields."""
        from bucketline.ingest.sources.dataset_file import with_dataset_file

        options, given = with_dataset_file(options, options.source, given, FILE_TABLES)
        return replace(options, left_out=frozenset((*STORED_OPTIONS, "model")) - given)

    def _as_stored(self) -> Pack:
        """Return the options with the store's for those that were left out, and say which."""
        from bucketline.ingest.packing.run import with_stored_rules

        own = with_stored_rules(self)
        assert isinstance(own, Pack)
        if not torchrun_ranks()["rank"]:
            self._say_rules(self, own)
        return own

    def _say_rules(self, asked: PackConfig, own: PackConfig, name: str = "") -> None:
        """Print the rules that are taken from the store, of one of several sources with its name."""
        from bucketline.ingest.packing.run import changed_rules

        rules = ", ".join(changed_rules(asked, own))
        if rules and not self.json:
            say(f"{name}from the store: {printable(rules)}")

    def _dry_run(self) -> int:
        if torchrun_ranks()["rank"]:
            return 0  # one process says it for all
        os.environ["HF_HUB_OFFLINE"] = "1"  # a download would write to the hub's cache; read when huggingface_hub is imported
        from bucketline.ingest.dataset import dry_run_each

        file, reports = dry_run_each(self)
        if self.json:
            sources = {entry.name: asdict(report) for entry, report in reports if entry is not None}
            print_json_line(asdict(reports[0][1]) if file is None else {"sources": sources, "notes": file.notes})
            return 0
        for entry, report in reports:
            print_entry(entry)
            _print_dry_run(report, self)
        print_captions_and_notes({}, [] if file is None else file.notes)
        return 0

    def _run_each(self) -> int:
        from bucketline.ingest.dataset import pack_dataset

        def on_result(entry: DatasetEntry, own: PackConfig, summary: PackResult) -> None:
            if not self.json:
                print_entry(entry)
                _print_summary(summary, own)
            _print_beyond_limits(summary, own)

        def on_start(entry: DatasetEntry, asked: PackConfig, own: PackConfig) -> None:
            self._say_rules(asked, own, f"{one_line(str(entry.name))}: ")

        result = pack_dataset(self, on_start, on_result, **torchrun_ranks())
        if result is None:
            return 0
        if self.json:
            print_json(asdict(result))
        else:
            print_captions_and_notes({}, result.notes)
            if result.why_not_readable is None:
                what = ", ".join(f"{one_line(name)} x {repeats}" for name, repeats in result.repeats.items())
                print(f"{shown(self.store)}: the loader and the trainer read it as one store ({what})")
        if result.why_not_readable is not None:
            print(
                f"error: {shown(self.store)} cannot be read as one store: {printable(result.why_not_readable)}", file=sys.stderr
            )
        return 0 if result.is_good else 1


def _prepare_environment(config: PackConfig) -> None:
    """Set what Ray reads when it is imported: no statistics for others, and if it is started here, for this machine only."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not (config.engine and config.engine.address):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray then listens on 127.0.0.1, and nowhere else


_FEW_IDS = 3
_STAGES = {"encode": "encoding", "decode": "decoding", "write": "disk"}


def _what_is_kept(stop: KeyboardInterrupt) -> str:
    from bucketline.ingest.parallel.signals import Stopped

    if isinstance(stop, Stopped) and stop.num_encoded:
        return f"all encoded images are committed ({counted(stop.num_encoded, 'image')}); rerun the command to continue"
    return "nothing had been encoded yet; rerun the command"


def _refuse_swapped(source: str, place: Path | str) -> None:
    """Check whether the store's place has the images that a source lacks: the two were swapped then."""
    is_store, is_there = (Path(source) / MANIFEST).is_file(), Path(source).exists()
    if isinstance(place, Path) and (is_store or not is_there) and is_folder_of_images(place):
        given, what = redacted(source), "is a store" if is_store else "does not exist"
        raise UsageError(
            f"{given} {what}, and {place} is a folder of images: the images come first, `ingest pack {place} {given}`"
        )


def _print_summary(summary: PackResult, config: PackConfig) -> None:
    print(
        f"{counted(summary.found, 'image')} found = {summary.packed} packed + {summary.unchanged} unchanged "
        f"+ {summary.rejected} rejected{plus_withdrawn(summary.withdrawn)}, "
        f"{took(summary.packed, summary.seconds, 'image')}"
    )
    if summary.packed and (total := sum(summary.stage_seconds.values())):
        shares = (f"{100 * summary.stage_seconds[stage] / total:.0f} % {what}" for stage, what in _STAGES.items())
        print(f"  time: {', '.join(shares)}; bottleneck: {_STAGES[summary.slowest_stage]}")
    for reason, count in summary.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    if summary.rejected:
        print(f"  each with its reason in {shown(config.store / 'rejects.jsonl')}")
    print_withdrawn(summary.withdrawn)
    listed = shown(config.store / WITHOUT_CAPTION)
    beyond = f" with more than {config.max_captions} captions (the others are not used in training)"
    counts = (
        (summary.latents_kept, "image", " with a new caption or file time (only text is encoded)"),
        (summary.moved, "image", " moved to the other split (training or validation)"),
        (summary.without_caption, "image", f" without a caption, packed with the empty one; listed in {listed}"),
        (
            summary.enlarged,
            "image",
            " enlarged to fill its bucket" if summary.enlarged == 1 else " enlarged to fill their bucket",
        ),
        (len(summary.captions_beyond), "image", beyond),
        (summary.generations_meanwhile, "generation", " published during packing"),
    )
    if summary.recaptioned:
        print(f"  caption rules changed: {printable(summary.recaptioned)}; only text is encoded")
    for count, noun, what in counts:
        if count:
            print(f"  {counted(count, noun)}{what}")
    for encoder, number in summary.captions_cut.items():
        print(f"  {counted(number, 'caption')} of the store cut by {encoder}")
    if summary.captions_cut:
        print(f"  what was cut: `store report {shown(config.place)}`, or `cuts` in `store ls {shown(config.place)} --json`")
    print_captions_and_notes(summary.captions_from, summary.notes)
    if summary.crop_loss:
        print(f"  {crop_loss_line(summary.crop_loss)}")
    print_held_out(summary.held_out, summary.samples, config.held_out)
    for sample_id in summary.captions_beyond[:10]:
        say(f"  more captions than kept: {one_line(sample_id)}")
    print_warnings(summary.captions_without_image, summary.passed_over)
    _print_sample_changes(summary, config)
    _print_ids(("kept with captions of the old rules", summary.captions_as_before, []))
    if summary.text_error is not None:
        print(f"  error of the quantised text: {summary.text_error}")
    print(
        f"{shown(config.place)}: generation {summary.generation}, {human_bytes(summary.disk_bytes)} on disk, "
        f"payload {human_bytes(summary.payload_bytes)}"
    )
    if not summary.packed + summary.unchanged + summary.withdrawn:
        print(f"error: not one of {counted(summary.found, 'image')} could be packed", file=sys.stderr)


def _print_dry_run(report: DryRun, config: PackConfig) -> None:
    counts = (
        (report.new, "new"),
        (report.changed, "changed"),
        (report.moved, "moved to the other split"),
        (report.recaptioned, "with a new caption or file time"),
        (report.unchanged, "unchanged"),
        (report.rejected, "rejected"),
    )
    parts = " + ".join(f"{number} {what}" for number, what in counts if number) + plus_withdrawn(report.withdrawn)
    print(f"dry run, nothing is written: {counted(report.found, 'image')} found = {parts.removeprefix(' + ') or 0}")
    for bucket, count in report.buckets.items():
        print(f"  to encode, in {bucket}: {counted(count, 'image')}")
    if report.recaptioned:
        print(f"  to encode, only the text: {counted(report.recaptioned, 'image')}")
    for reason, count in report.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    print_withdrawn(report.withdrawn)
    if report.too_many_rejects:
        print("  more rejects than --max-rejects allows: no sample would be dropped, exit code 1")
    _print_sample_changes(report, config)
    if report.pending_shards:
        shards = counted(report.pending_shards, "shard")
        print(f"  an interrupted run left {shards}, which a pack takes over first; here their images count as new")
    print_captions_and_notes({}, report.notes)
    print("only file headers were read: damage after them is not seen")
    print(f"not compared: {report.not_compared}")


def _print_beyond_limits(summary: PackResult, config: PackConfig) -> None:
    if summary.too_many_rejects:
        by_reason = ", ".join(f"{count} {reason}" for reason, count in summary.rejected_by_reason.items())
        print(
            f"error: {summary.rejected} of {counted(summary.found, 'image')} were rejected ({by_reason}), "
            f"--max-rejects allows {config.max_rejects}; the other images are packed, and no sample was dropped; "
            f"each reject's reason is in {shown(config.store / 'rejects.jsonl')}",
            file=sys.stderr,
        )
    if summary.not_pruned_beyond_limit:
        print(
            f"error: nothing was pruned: {printable(str(summary.not_pruned))}. If a disk or a folder of the source is "
            "missing, bring it back; "
            f"if these images were deleted, repeat this with --prune={summary.not_pruned_beyond_limit}",
            file=sys.stderr,
        )


def _print_sample_changes(summary: SampleChanges, config: PackConfig) -> None:
    would = "would be " if config.dry_run else ""
    if summary.not_pruned:
        say(f"  not pruned: {printable(summary.not_pruned)}")
    _print_ids(
        (f"{would}dropped, because rejected now", summary.dropped, summary.dropped_ids),
        (f"{would}dropped, because no longer in the source", summary.pruned, summary.pruned_ids),
        ("cannot be read now, but kept in the store", summary.kept_unreadable, summary.kept_unreadable_ids),
        ("rejected now, but kept because there are too many rejects", summary.kept_beyond_limit, []),
    )
    _print_gone(summary.not_in_source, summary.not_in_source_ids, is_pruning=config.prune is not None)


def _print_gone(count: int, first: list[str], *, is_pruning: bool) -> None:
    """Print how many rows are kept whose images are gone, and how to drop them."""
    if count:
        verb, whose = ("is", "image is") if count == 1 else ("are", "images are")
        named = f": {', '.join(map(one_line, first[:_FEW_IDS]))}{' …' * (count > _FEW_IDS)}" if first else ""
        drop = "" if is_pruning else f"; add --prune to drop {'it' if count == 1 else 'them'}"
        print(
            f"  {counted(count, 'sample')} {verb} kept whose {whose} no longer in the source, deleted or renamed{named}{drop}"
        )


def _print_ids(*counts: tuple[str, int, list[str]]) -> None:
    for what, count, named in counts:
        if count:
            print(f"  {what}: {counted(count, 'sample')}")
        for sample_id in named:
            print(f"    {one_line(sample_id)}")
