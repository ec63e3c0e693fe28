"""A training run from start to end: the training loop, its checkpoints, metrics and images."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bucketline.command_line import counted
from bucketline.files.run_marker import IMAGES, IMAGES_FOLDER
from bucketline.loader.mixture import join
from bucketline.train.compile import graphs_compiled, mark, peak_memory_bytes
from bucketline.train.config import Compile
from bucketline.train.data import expect_service, open_loader, open_stores, open_val_loader
from bucketline.train.evaluation.drawing import draw_samples
from bucketline.train.evaluation.image_grid import LOSS_CURVE, draw_grid, draw_loss_curve
from bucketline.train.evaluation.prompts import load_prompts
from bucketline.train.evaluation.validation import ValidationResult, validate
from bucketline.train.follow import Follower, wait_for_rows
from bucketline.train.noising import Prep, TimestepDensity
from bucketline.train.optimizers.stepping import StepInBackward
from bucketline.train.outputs import checkpoint
from bucketline.train.outputs.checkpoint import Start, describe, expect_finite_weights
from bucketline.train.outputs.hub import HubUploads
from bucketline.train.outputs.metrics import (
    MetricsFile,
    WindowRecorder,
    begin_tracking,
    cut_back,
    read_metrics,
    track,
)
from bucketline.train.outputs.model_card import model_card, write_card
from bucketline.train.outputs.progress import ProgressLine
from bucketline.train.outputs.run_dir import (
    RunStatus,
    config_as_json,
    find_start,
    record_failure,
    take,
    update_status,
    write_config,
    write_status,
)
from bucketline.train.outputs.saver import Output, Saver
from bucketline.train.outputs.weights import weights_of
from bucketline.train.parallel import OtherRankFailedError, StopRequest, TrainRanks, expect_equal, from_rank_zero
from bucketline.train.setup import (
    count_work,
    latent_scale,
    load_model,
    prepare,
    refuse_unread_columns,
    resolved,
    start_processes,
    warn_of_assumptions,
)
from bucketline.train.step import Training, train_step
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from accelerate import Accelerator

    from bucketline.train.config import TrainConfig
    from bucketline.train.outputs.metrics import WindowState
    from bucketline.typed_json import Json

log = logging.getLogger("bucketline.train")

STATUS_EVERY_S = 5.0
CURVE_EVERY_S = 10.0  # at least, between two drawings of the loss curve
CURVE_SHARE = 0.005  # at most, of the run's time; a drawing takes about 0.2 s
COLLECT_EVERY_STEPS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The result of a run."""

    steps_done: int
    stopped_by: str | None
    validation: ValidationResult | None
    checkpoint: Path
    images: tuple[Path, ...]

    def __str__(self) -> str:
        """Return the lines for stdout."""
        if self.stopped_by:
            lines = [f"stopped by {self.stopped_by} after {counted(self.steps_done, 'step')}; continue with --resume"]
        else:
            lines = [f"trained {counted(self.steps_done, 'step')}"]
        if self.validation is not None:
            share = self.validation.loss / self.validation.zero_loss
            lines.append(
                f"validation loss  {self.validation.loss:.4f}, {share:.3f} of what predicting zero scores "
                f"({self.validation.zero_loss:.4f})"
            )
        lines.append(f"checkpoint       {self.checkpoint}")
        lines += [f"image            {path}" for path in self.images]
        return "\n".join(lines)


def train(config: TrainConfig, ranks: TrainRanks) -> TrainSummary:
    """Train from step 0 or a checkpoint until `max_steps` or a signal.

    Raises:
        BucketlineError: if the run cannot start or continue; `status.json` in the run's folder records the failure too.
    """
    accelerator = start_processes(config)
    wait_for_rows(config, ranks)
    stop = StopRequest(ranks)
    progress = ProgressLine(max_steps=config.max_steps, talks=ranks.is_main)
    log.addHandler(progress)
    try:
        start = from_rank_zero(ranks, lambda: find_start(config))
        expect_service(config, ranks, start)
        from_rank_zero(ranks, lambda: take(config, start))
        return _train_from(start, config, ranks, accelerator, progress, stop)
    finally:
        progress.close()
        log.removeHandler(progress)
        stop.close()


def _train_from(
    start: Start, config: TrainConfig, ranks: TrainRanks, accelerator: Accelerator, progress: ProgressLine, stop: StopRequest
) -> TrainSummary:
    """Build the trainer and run it; record a failure in the run's folder."""
    trainer: Trainer | None = None
    try:
        trainer = Trainer(config, ranks, accelerator, start, progress.say)
        summary = trainer.run(progress, stop)
    except OtherRankFailedError:
        raise
    except BaseException as error:
        if trainer is not None:
            trainer.saver.close()  # the message depends on whether it exists
        explained = record_failure(error, config, ranks, start.steps_done if trainer is None else trainer.steps_done)
        if explained is not None:
            raise explained from error
        raise
    finally:
        if trainer is not None:
            trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads release their last tensors, for which they need the GIL; an interpreter that ends meanwhile
        # aborts the process (pytorch/pytorch#179291)
        time.sleep(0.2)
    if trainer.uploads is not None:  # after everything else: the run is complete without them
        trainer.uploads.finish(lambda: stop.is_asked)
    return summary


class Trainer:
    """A training run: built from its configuration and start, then `run` loops, pauses between steps and finishes."""

    _progress: ProgressLine

    def __init__(
        self,
        config: TrainConfig,
        ranks: TrainRanks,
        accelerator: Accelerator,
        start: Start,
        say: Callable[[str], None] = log.info,
    ) -> None:
        """Open the stores, load the model and the start's checkpoint, and check them against each other; write nothing.

        `say` is told what takes long.

        Raises:
            BucketlineError: if a part is missing or two parts do not match; the message names them.
        """
        device = accelerator.device
        config = resolved(config, start, device)
        self.config, self.ranks, self._accelerator, self._start = config, ranks, accelerator, start
        self.shares = open_stores(config, ranks, start)
        for share in self.shares:
            refuse_unread_columns(share.store)
        self.rows, store = join(self.shares), self.shares[0].store  # all stores have the encoders of the first
        family, model, self.schedule = load_model(config, ranks, store, self.rows, device, resumes=start.checkpoint is not None)
        self._prompts = load_prompts(config, self.shares, family)
        self.loader = open_loader(config, ranks, self.shares, device)
        expect_equal("the plan's digest", self.loader.plan.digest)
        if start.state is not None:
            # A new plan continues at the same step, so that no random draw is repeated.
            resume = self.loader.start_anew if start.takes_new_plan else self.loader.load_state_dict
            resume(start.state.loader)
        warn_of_assumptions(config, start, self.shares, family)
        if (small := self.loader.plan.small_buckets(can_drop=False)) is not None:
            log.warning("%s", small)
        self._follower = Follower(config, ranks, self.loader)
        self._weights = weights_of(family, adapters=config.lora_rank is not None)
        compiled = config.compile is Compile.ON or (config.compile is Compile.AUTO and device.type == "cuda")
        self._compiled = compiled
        model, average, optimizer = prepare(config, ranks, accelerator, model, self._weights, start, compiled=compiled)
        self.training = Training(
            config=config,
            family=family,
            model=model,
            optimizer=optimizer,
            average=average,
            prep=Prep(
                scale=latent_scale(store, device),
                schedule=self.schedule.noise,
                objective=self.schedule.objective,
                density=TimestepDensity.of(config),
                min_snr_gamma=config.min_snr_gamma,
                flow_weighting=config.flow_weighting,
                compiled=compiled,
            ),
            autocast=torch.autocast(device.type, torch.bfloat16, enabled=config.autocasts),
            in_backward=StepInBackward(optimizer) if config.optimizer_in_backward else None,
        )
        self.scale = count_work(self.training, ranks, self.loader, self.rows, say, compiled=compiled)
        self.steps_done = start.steps_done
        self._has_val = bool(self.rows.buckets("val"))
        self._validation: ValidationResult | None = None
        self._validated_at: int | None = None
        self._to_save: set[Output] = set()
        self._status_written = time.monotonic()
        self._curve_due = time.monotonic() + CURVE_EVERY_S
        self.uploads = HubUploads(config.push_to_hub, say) if config.push_to_hub is not None and ranks.is_main else None
        self.saver = Saver(self.training, ranks, self._weights, start.checkpoint, self.uploads)
        self._graphs_before = graphs_compiled()
        self._recorder = WindowRecorder(log_every=config.log_every, scale=self.scale, gather=accelerator.gather)
        self._metrics: MetricsFile | None = None

    def run(self, progress: ProgressLine, stop: StopRequest) -> TrainSummary:
        """Train until the last step or a signal, then write the results."""
        self._progress = progress
        self._take_up(is_agreed=False)
        self._continue_metrics()
        if self._validation_due():
            self._validate()
        batches, waited = iter(self.loader), 0.0
        progress.begin(self.steps_done)
        self.saver.restart_clock()
        stopped_by = None
        with rare_collection():
            began = mark(self._accelerator.device)
            while self.steps_done < self.config.max_steps and stopped_by is None:
                outcome = train_step(self.training, batches, self.steps_done)
                ended = mark(self._accelerator.device)
                self.steps_done += 1
                waited_before, waited = waited, self.loader.stats().waited_s
                took = (began, ended)
                self._write(self._recorder.add(self.steps_done - 1, outcome, took=took, wait_s=waited - waited_before))
                progress.step(self.steps_done)
                self.saver.poll()
                agreed = stop.agreed(is_overdue=self.saver.is_overdue(), has_newer=self._follower.has_newer())
                stopped_by = agreed.stopped_by
                # A step begins where the last one ended, so that what the loop itself costs counts, unless there was a pause.
                has_paused = stopped_by is None and self._pause(takes_up=agreed.takes_up, saves=agreed.saves)
                began = mark(self._accelerator.device) if has_paused else ended
        return self._finish(stopped_by)

    def _continue_metrics(self) -> None:
        """Truncate the metrics to the start and continue its open window; find the last validation that remains."""
        # A new plan has other buckets, so the open window cannot be continued: its short line stays as it is.
        state = self._start.state
        window = state.window if state and not self._start.takes_new_plan else None
        if window is not None:
            self._recorder.restore(window)

        def open_metrics() -> int | None:
            write_config(self.config, self.shares, self.ranks.world_size)
            begin_tracking(self._accelerator, self.config.output_dir.name, config_as_json(self.config))
            cut_back(
                self.config.output_dir,
                steps_done=self.steps_done,
                open_window=window.first_step if window else None,
                validate_every=self.config.validate_every,
            )
            self._metrics = MetricsFile(self.config.output_dir)
            steps = [line["step"] for line in read_metrics(self.config.output_dir) if "val_loss" in line]
            return max((step for step in steps if isinstance(step, int)), default=None)

        self._validated_at = from_rank_zero(self.ranks, open_metrics)
        if not self._has_val:
            self._progress.say(
                f"{self.rows.where} has no held-out samples: no validation (pack with --val-fraction to have one)"
            )

    def _take_up(self, *, is_agreed: bool) -> bool:
        """Take up the generations that are due at this step, before its checkpoint, which then has them; return whether any."""
        if self.steps_done == self.config.max_steps:
            return False
        generations = self._follower.due(self.steps_done, is_agreed=is_agreed)
        if generations is None:
            return False
        self.loader.take_up(generations)
        expect_equal("the plan's digest", self.loader.plan.digest)
        self.shares, self.rows = self.loader.shares, join(self.loader.shares)
        for share in self.shares:
            refuse_unread_columns(share.store)
        self._has_val = bool(self.rows.buckets("val"))
        say = self._progress.say
        found = count_work(self.training, self.ranks, self.loader, self.rows, say, compiled=self._compiled)
        before = self.scale  # a window may have steps of both generations
        samples, flops = {**before.samples, **found.samples}, {**before.flops, **found.flops}
        self.scale = replace(found, samples=samples, flops=flops)
        self._recorder.scale = self.scale
        rows = sum(bucket.num_rows for bucket in self.loader.plan.buckets)
        named = ", ".join(map(str, generations))
        say(f"from step {self.steps_done} on generation {named}: {counted(rows, 'row')} per pass")
        gc.collect()  # stores and their buckets know each other
        return True

    def _pause(self, *, takes_up: bool, saves: bool) -> bool:
        """Run the tasks due between two steps: newer generations, validation, checkpoint, images, garbage collection.

        Return whether there was one.
        """
        has_taken_up = self._take_up(is_agreed=takes_up)
        if is_validating := self._validation_due():
            self._validate()
        if saves or _due(self.config.checkpoint_every, self.steps_done):
            self._to_save.add(Output.CHECKPOINT)
        if _due(self.config.export_every, self.steps_done):
            self._to_save.add(Output.EXPORT)
        if is_saving := bool(self._to_save):
            self._save()
        if is_drawing := _due(self.config.images_every, self.steps_done) and self.steps_done < self.config.max_steps:
            self._draw(self.config.output_dir / IMAGES_FOLDER / f"step-{self.steps_done:08d}.png")
        if is_pause := is_validating or is_saving or is_drawing or _due(COLLECT_EVERY_STEPS, self.steps_done):
            gc.collect()
        return is_pause or has_taken_up

    def close(self) -> None:
        """Release files and threads; a checkpoint in progress is complete when this returns."""
        self.loader.close()
        self.saver.close()
        for tracker in self._accelerator.trackers:
            tracker.finish()
        if self._metrics is not None:
            self._metrics.close()

    def _finish(self, stopped_by: str | None) -> TrainSummary:
        if stopped_by is None and self._has_val and (self._validation is None or self._validated_at != self.steps_done):
            self._validate()
        self._to_save.add(Output.CHECKPOINT)
        if self.steps_done == self.config.max_steps and (self.config.export_every or self.config.push_to_hub):
            self._to_save.add(Output.EXPORT)
        self._save(is_last=True)
        self.saver.finish()
        self._write(self._recorder.partial())
        if self.ranks.is_main:
            self._draw_curve()
        images = self._last_images() if stopped_by is None else ()
        if self.ranks.is_main:
            write_card(self.config.output_dir, self._card())
            state = RunStatus.DONE if stopped_by is None else RunStatus.STOPPED
            write_status(self.config.output_dir, state, self.steps_done, stopped_by)
        return TrainSummary(
            steps_done=self.steps_done,
            stopped_by=stopped_by,
            validation=self._last_validation(),
            checkpoint=self.saver.saved[Output.CHECKPOINT],
            images=images,
        )

    def _validation_due(self) -> bool:
        scheduled = self.steps_done == 0 or _due(self.config.validate_every, self.steps_done)
        return self._has_val and scheduled and self._validated_at != self.steps_done

    def _validate(self) -> None:
        with open_val_loader(self.config, self.ranks, self.shares, self._accelerator.device) as batches:
            self._validation = validate(self.training, batches, lambda sums: self._accelerator.reduce(sums, "sum"))
        self._write(self._recorder.flush())  # earlier windows come first in the file
        if self._validated_at != self.steps_done:  # after a resume, the file may have it already
            self._write(self._validation.line(self.steps_done))
        self._validated_at = self.steps_done

    def _save(self, *, is_last: bool = False) -> None:
        """Begin to write what is to be saved; called on every rank.

        After a skipped step, that is postponed to the next step that is not skipped, except at the end of the run.
        """
        self._write(self._recorder.flush())
        window = self._recorder.state()
        expect_finite_weights(self.training.bare_model, self.steps_done)
        # Skipped steps may mean bad weights; keep the earlier checkpoints instead of replacing them.
        if is_last or not self._recorder.skips_now:
            cards = {output: self._card(of_export=output is Output.EXPORT) for output in self._to_save}
            self.saver.save(cards, self._state(window), self._sync_metrics)
            self._to_save.clear()

    def _sync_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.sync()

    def _card(self, *, of_export: bool = False) -> str:
        validation = self._last_validation()
        return model_card(self.training, self._weights, self.shares, self.steps_done, validation, of_export=of_export)

    def _last_validation(self) -> ValidationResult | None:
        """Return the validation of the current weights; None if the last validation is of an earlier step."""
        return self._validation if self._validated_at == self.steps_done else None

    def _state(self, window: WindowState | None) -> checkpoint.RunState:
        return checkpoint.RunState(
            version=checkpoint.VERSION,
            steps_done=self.steps_done,
            world_size=self.ranks.world_size,
            stores=tuple(map(describe, self.shares)),
            plan_digest=self.loader.plan.digest,
            loader={name: encode(value) for name, value in self.loader.state_dict().items()},
            window=window,
            config=config_as_json(self.config),
        )

    def _write(self, line: dict[str, Json] | None) -> None:
        if line is None or self._metrics is None:
            return
        if "loss" in line:
            line["peak_memory_mib"] = peak_memory_bytes(self._accelerator.device) >> 20
            line["recompiles"] = graphs_compiled() - self._graphs_before
        self._metrics.write(line)
        track(self._accelerator, line)
        self._progress.window(line)
        if time.monotonic() - self._status_written > STATUS_EVERY_S:
            update_status(self.config.output_dir, RunStatus.RUNNING, self.steps_done)
            self._status_written = time.monotonic()
        if time.monotonic() >= self._curve_due:
            self._draw_curve()

    def _draw_curve(self) -> None:
        """Redraw the loss curve, and decide when the next time is: the longer it takes, the later."""
        began = time.monotonic()
        draw_loss_curve(read_metrics(self.config.output_dir), self.config.output_dir / LOSS_CURVE)
        ended = time.monotonic()
        self._curve_due = ended + max(CURVE_EVERY_S, (ended - began) / CURVE_SHARE)

    def _last_images(self) -> tuple[Path, ...]:
        output = self.config.output_dir
        drawn = self._draw(output / IMAGES)
        return (output / LOSS_CURVE, output / IMAGES) if drawn else (output / LOSS_CURVE,)

    def _draw(self, path: Path) -> bool:
        """Draw an image grid on rank 0 (a sharded model needs every rank); return whether it was written."""
        if isinstance(self.training.model, FSDPModule):
            return self._drawn(path)
        return from_rank_zero(self.ranks, lambda: self._drawn(path))

    def _drawn(self, path: Path) -> bool:
        split = "val" if self._has_val else "train"
        samples = draw_samples(self.training, self.schedule, self.shares, split, self._prompts, keeps=self.ranks.is_main)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # free the VAE's memory for the next step
        if not samples:
            return False
        kind = "held-out samples, never trained on" if split == "val" else "training samples"
        kind = "prompts" if self._prompts else kind
        path.parent.mkdir(exist_ok=True)
        draw_grid(samples, path, title=f"After {counted(self.steps_done, 'step')}: {kind}")
        return True


@contextlib.contextmanager
def rare_collection() -> Iterator[None]:
    """Disable automatic garbage collection so that it never pauses the loop; freeze the objects that already exist."""
    was_on = gc.isenabled()
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
