"""A training run from start to end: the training loop, its checkpoints, metrics and images."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bucketline.command_line import counted
from bucketline.files.atomic_write import write_durably
from bucketline.files.run_marker import IMAGES, IMAGES_FOLDER, LOSS_CURVE
from bucketline.loader.mixture import StoreId
from bucketline.loader.recorded_run import PLANS, append_plan
from bucketline.train import checkpoint, data
from bucketline.train.checkpoint import Start, folder_of_step
from bucketline.train.compile import mark
from bucketline.train.metrics_file import cut_back
from bucketline.train.outputs import run_dir
from bucketline.train.outputs.metrics import WindowRecorder
from bucketline.train.outputs.progress import ProgressLine, RunLog
from bucketline.train.outputs.saved_tensors import expect_finite_weights
from bucketline.train.outputs.saver import Output, Saver
from bucketline.train.parallel import StopRequest, TrainRanks, expect_equal, from_rank_zero
from bucketline.train.refusals import refuse_stores
from bucketline.train.run_file import config_as_json
from bucketline.train.setup import (
    build,
    count_work,
    refuse_model,
    resolved,
    scale_of,
    start_processes,
    tell_assumptions,
    with_length,
)
from bucketline.train.step import train_step
from bucketline.train.validation import validate
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from accelerate import Accelerator

    from bucketline.train.config import TrainConfig
    from bucketline.train.images.prompts import StoredPrompt
    from bucketline.train.outputs.hub import HubUploads
    from bucketline.train.parallel import Agreed
    from bucketline.train.validation import ValidationResult
    from bucketline.typed_json import Json

COLLECT_EVERY_STEPS = 5000
MOST_NAMED = 16  # samples of a step that was skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The result of a run."""

    steps_done: int
    steps_before: int = 0  # of them, before a resume
    stopped_by: str | None
    validation: ValidationResult | None
    checkpoint: Path
    images: tuple[Path, ...]

    def __str__(self) -> str:
        done = counted(self.steps_done, "step")
        if self.stopped_by:
            lines = [f"stopped by {self.stopped_by} after {done}; continue with --resume {self.checkpoint.parent.parent}"]
        elif self.steps_before == self.steps_done:
            lines = [f"already at step {self.steps_done}: nothing to train; a larger --max-steps trains on"]
        else:
            lines = [f"trained {done}"]
        if self.validation is not None:
            loss, zero_loss = self.validation.loss, self.validation.zero_loss
            share = f"{loss / zero_loss:.3f} of what predicting zero scores ({zero_loss:.4f})"
            lines.append(f"validation loss  {loss:.4f}, {share}")
        lines.append(f"checkpoint       {self.checkpoint}")
        lines += [f"image            {path}" for path in self.images]
        return "\n".join(lines)


def train(config: TrainConfig, ranks: TrainRanks) -> TrainSummary:
    """Train from step 0 or a checkpoint until its last step or a signal.

    Raises:
        BucketlineError: if the run cannot start or continue; `status.json` in the run's folder records the failure too.
    """
    accelerator = start_processes(config)
    data.wait_for_rows(config, ranks)
    with (
        contextlib.closing(StopRequest(ranks)) as stop,
        ProgressLine(talks=ranks.is_main) as progress,
        contextlib.closing(run_dir.RunLock(config)) as lock,
    ):
        start = from_rank_zero(ranks, lock.find_start)
        data.expect_service(config, ranks, start)
        if start.state is None:
            from_rank_zero(ranks, lambda: refuse_model(config))
        former = from_rank_zero(ranks, lambda: lock.take(start))
        trainer: Trainer | None = None
        recorded = run_dir.failures_recorded(config, ranks, start, former, lambda: trainer.steps_done if trainer else None)
        with contextlib.ExitStack() as at_end, recorded:
            trainer = at_end.enter_context(contextlib.closing(Trainer(config, ranks, accelerator, start, progress)))
            summary, uploads = trainer.run(stop), trainer.uploads
        if dist.is_initialized():
            dist.destroy_process_group()
            # gloo's threads release their last tensors, for which they need the GIL; an interpreter that ends meanwhile
            # aborts the process (pytorch/pytorch#179291)
            time.sleep(0.2)
        if uploads is not None:  # after everything else: the run is complete without them
            uploads.finish(lambda: stop.is_asked)
    return summary


class Trainer:
    """A training run: built from its configuration and start, then `run` loops, pauses between steps and finishes."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: TrainRanks,
        accelerator: Accelerator,
        start: Start,
        progress: ProgressLine | None = None,
    ) -> None:
        """Open the stores, load the model and the start's checkpoint, and check them against each other.

        Nothing is written but the prompts that it encodes.

        Raises:
            BucketlineError: if a part is missing or two parts do not match; the message names them.
        """
        self.ranks, self._accelerator, self._device = ranks, accelerator, accelerator.device
        self._progress = progress or ProgressLine(talks=False)
        self._given, config = config, resolved(config, start, self._device)
        self.loader = data.open_loader(config, ranks, data.open_stores(config, ranks, start), self._device)
        expect_equal("the plan's digest", self.loader.plan.digest)
        window = data.continue_at(start, self.loader, config, ranks)
        config = with_length(config, start, self.loader)
        if self._given.epochs is not None:
            self._progress.say(f"{counted(config.num_steps, 'step')}: --epochs is {self._given.epochs:g}")
        self._progress.expect(config.num_steps)
        given: dict[str, bytes] = {}
        if config.image_prompts:  # before the model takes its memory
            from bucketline.train.images.prompts import encode_given

            given = from_rank_zero(ranks, lambda: encode_given(config, self.loader.shares[0].store))
        from bucketline.train.memory import built_to_fit

        self.training, self._weights = built_to_fit(
            config, ranks, start, self.loader, lambda one: build(one, ranks, start, self.loader), self._progress.say
        )
        self.config = config = self.training.config
        self._prompts: tuple[StoredPrompt, ...] = ()
        if config.num_images:
            from bucketline.train.images.prompts import load_prompts

            self._prompts = load_prompts(given, self.loader.shares[0].store, self.training.family)
        tell_assumptions(start, self._given, self.training, self.loader, self._progress.say)
        self._follower = data.Follower(config, ranks, self.loader)
        self.loader.start()  # to read ahead while the rest compiles
        self.scale = scale_of(config, ranks, self._device)
        count_work(self.training, ranks, self.loader, self._progress.say, self.scale)
        self.steps_done = self._steps_before = start.steps_done
        self._validations: dict[int, ValidationResult | None] = {}  # by steps done; None: before a resume
        self._to_save: set[Output] = set()
        self.uploads: HubUploads | None = None
        if config.push_to_hub and ranks.is_main:
            from bucketline.train.outputs.hub import HubUploads

            self.uploads = HubUploads(config.push_to_hub.repository, self._progress.say)
        self.saver = Saver(self.training, ranks, self._weights, start.checkpoint, self.uploads)
        self._recorder = WindowRecorder(
            log_every=config.log_every,
            scale=self.scale,
            gather=accelerator.gather,
            begun=window,
            samples_of=self._samples_of if ranks.is_main else None,
        )
        self._log: RunLog | None = None  # on rank 0, once the run begins

    def run(self, stop: StopRequest) -> TrainSummary:
        """Train until the last step or a signal, then write the results."""
        with contextlib.closing(self.saver):  # what a failure's message says depends on whether the last checkpoint exists
            self._validations = from_rank_zero(self.ranks, self._open_log)
            if not self.loader.rows.buckets("val"):
                self._progress.say(
                    f"{self.loader.rows.where} has no held-out samples: no validation (pack with --val-fraction to have one)"
                )
            self._validate_if_due()
            with rare_collection():
                stopped_by = self._loop(stop)
            return self._finish(stopped_by)

    def _open_log(self) -> dict[int, ValidationResult | None]:
        """Truncate the metrics to the start, and open them; return the validations that remain."""
        run_dir.write_config(self.config, self._given, self.loader.shares, self.ranks.world_size)
        validated = cut_back(self.config, self.steps_done, self._recorder.state())
        self._record_plan()
        self._log = RunLog(self.config, self._accelerator, self._progress)
        return dict.fromkeys(validated)

    def _record_plan(self) -> None:
        if self.ranks.is_main:
            append_plan(self.config.output_dir / PLANS, self.loader, self.steps_done)

    def _loop(self, stop: StopRequest) -> str | None:
        """Train until the last step or a signal, whose name is returned."""
        batches, waited = self.loader.forever(), 0.0
        self._progress.begin(self.steps_done)
        self.saver.restart_clock()
        began = mark(self._device)
        while self.steps_done < self.config.num_steps:
            outcome = train_step(self.training, batches, self.steps_done)
            ended = mark(self._device)
            self.steps_done += 1
            waited_before, waited = waited, self.loader.stats().waited_s
            took = (began, ended)
            self._write(self._recorder.add(self.steps_done - 1, outcome, took=took, wait_s=waited - waited_before))
            self._progress.step(self.steps_done)
            self.saver.poll()
            agreed = stop.agreed(is_overdue=self.saver.is_overdue(), has_newer=self._follower.has_newer())
            if agreed.stopped_by is not None:
                return agreed.stopped_by
            # A step begins where the last one ended, so that what the loop itself costs counts, unless there was a pause.
            began = mark(self._device) if self._pause(agreed) else ended
        return None

    def _pause(self, agreed: Agreed) -> bool:
        """Run the tasks that are due between two steps; return whether there was one."""
        config, done = self.config, self.steps_done
        is_pause = self._take_up(is_agreed=agreed.takes_up) | self._validate_if_due() | _due(COLLECT_EVERY_STEPS, done)
        if agreed.saves or _due(self.saver.every_steps, done):
            self._to_save.add(Output.CHECKPOINT)
        if _due(config.export_every, done):
            self._to_save.add(Output.EXPORT)
        if self._to_save:
            is_pause = True
            self._save()
        is_due, is_first = _due(config.images_every, done), done == self._steps_before + 1
        if config.num_images and done < config.num_steps and (is_due or is_first):
            is_pause = True
            sheet = config.output_dir / IMAGES_FOLDER / f"{folder_of_step(done)}.png"
            self._draw(sheet if is_due else None)  # with all that a step leaves in memory: the first one tells what lacks
        if is_pause:
            gc.collect()
        return is_pause

    def _take_up(self, *, is_agreed: bool) -> bool:
        """Take up the generations that are due at this step, before its checkpoint, which then has them; return whether any."""
        is_over = self.steps_done == self.config.num_steps
        if is_over or (generations := self._follower.due(is_agreed=is_agreed)) is None:
            return False
        self._write(self._recorder.flush())
        self._recorder.state()  # what it says of earlier steps is of the present plan
        self.loader.take_up(generations)
        expect_equal("the plan's digest", self.loader.plan.digest)
        self._record_plan()
        refuse_stores(self.loader.shares)
        self.training = replace(self.training, mean_weight=data.mean_weight(self.config, self.loader.shares))
        count_work(self.training, self.ranks, self.loader, self._progress.say, self.scale)
        rows = sum(bucket.num_rows for bucket in self.loader.plan.buckets)
        named = ", ".join(map(str, generations))
        self._progress.say(f"from step {self.steps_done} on generation {named}: {counted(rows, 'row')} per pass")
        return True  # and `_pause` collects: stores and their buckets know each other

    def _validate_if_due(self) -> bool:
        is_scheduled = self.steps_done == 0 or _due(self.config.validate_every, self.steps_done)
        is_due = is_scheduled and self.steps_done not in self._validations and bool(self.loader.rows.buckets("val"))
        if is_due:
            self._validate()
        return is_due

    def _validate(self) -> None:
        with data.open_val_loader(self.config, self.ranks, self.loader.shares, self._device) as batches:
            result = validate(self.training, batches, lambda sums: self._accelerator.reduce(sums, "sum"))
        self._write(self._recorder.flush())  # earlier windows come first in the file
        if self.steps_done not in self._validations:  # after a resume, the file may have it already
            self._write(result.line(self.steps_done))
        self._validations[self.steps_done] = result

    def _save(self, *, is_last: bool = False) -> None:
        """Begin to write what is to be saved; called on every rank.

        After a skipped step, that is postponed to the next step that is not skipped, except at the end of the run.
        """
        self._write(self._recorder.flush())
        window = self._recorder.state()
        expect_finite_weights(self.training.bare_model, self.steps_done)
        # Skipped steps may mean bad weights; keep the earlier checkpoints instead of replacing them.
        if self._recorder.skipped and not is_last:
            return
        state = checkpoint.RunState(
            version=checkpoint.VERSION,
            steps_done=self.steps_done,
            world_size=self.ranks.world_size,
            stores=tuple(map(StoreId.of, self.loader.shares)),
            plan_digest=self.loader.plan.digest,
            loader={name: encode(value) for name, value in self.loader.state_dict().items()},
            window=window,
            config=config_as_json(self.config),
        )
        cards = {output: self._card(of_export=output is Output.EXPORT) for output in self._to_save}
        self.saver.save(cards, state)
        self._to_save.clear()

    def _card(self, *, of_export: bool = False) -> str:
        from bucketline.train.outputs.model_card import model_card

        validation = self._validations.get(self.steps_done)
        return model_card(self.training, self._weights, self.loader.shares, self.steps_done, validation, of_export=of_export)

    def _samples_of(self, step: int, ranks: Sequence[int]) -> str:
        """Name the samples that some ranks read at a step of the present plan."""
        per_step = self.config.accumulation
        parts = [(step, rank * per_step + micro_step) for rank in ranks for micro_step in range(per_step)]
        drawn = self.loader.plan.draw(parts, self.ranks.world_size * per_step)
        rows = np.concatenate([one.rows for one in drawn])
        names = self.loader.rows.bucket(drawn[0].bucket).sample_ids(rows[:MOST_NAMED])
        more = f" and {len(rows) - len(names)} more" if len(rows) > len(names) else ""
        return f"{', '.join(names)}{more}"

    def _write(self, line: dict[str, Json] | None) -> None:
        if line is not None and self._log is not None:
            self._log.write(line, self.steps_done)

    def _draw(self, sheet: Path | None) -> bool:
        """Draw images on rank 0 (a sharded model needs every rank), without a `sheet` only try; return whether any are new."""
        if self.config.num_images == 0:
            return False
        from bucketline.train.images.drawing import draw_images

        of, done = (self.training, self.loader.shares, self._prompts), self.steps_done
        draw = functools.partial(draw_images, *of, sheet, steps_done=done, keeps=self.ranks.is_main)
        return draw() if isinstance(self.training.model, FSDPModule) else from_rank_zero(self.ranks, draw)

    def _finish(self, stopped_by: str | None) -> TrainSummary:
        """Write the last validation, checkpoint, export, curve, images, card and status."""
        output = self.config.output_dir
        if stopped_by is None and self.loader.rows.buckets("val") and self._validations.get(self.steps_done) is None:
            self._validate()
        self._to_save.add(Output.CHECKPOINT)
        if self.steps_done == self.config.num_steps and (self.config.export_every or self.config.push_to_hub):
            self._to_save.add(Output.EXPORT)
        self._save(is_last=True)
        self.saver.finish()
        self._write(self._recorder.partial())
        if self._log is not None:
            self._log.draw_curve()
        images = [output / LOSS_CURVE]
        if stopped_by is None and self._draw(output / IMAGES):
            images.append(output / IMAGES)
        if self.ranks.is_main:
            write_durably(output / checkpoint.CARD, self._card().encode())
            state = run_dir.RunStatus.STOPPED if stopped_by else run_dir.RunStatus.DONE
            run_dir.write_status(output, state, self.steps_done, stopped_by)
        return TrainSummary(
            steps_done=self.steps_done,
            steps_before=self._steps_before,
            stopped_by=stopped_by,
            validation=self._validations.get(self.steps_done),
            checkpoint=self.saver.saved[Output.CHECKPOINT],
            images=tuple(images),
        )

    def close(self) -> None:
        """Release files and threads; a checkpoint in progress is complete when this returns."""
        self.loader.close()
        self.saver.close()
        if self._log is not None:
            self._log.close()


@contextlib.contextmanager
def rare_collection() -> Iterator[None]:
    """Disable automatic garbage collection so that it never pauses the loop; freeze the objects that already exist."""
    was_on = gc.isenabled()  # a program that calls `train` may have it off
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _due(every: int | None, steps_done: int) -> bool:
    return every is not None and steps_done % every == 0
