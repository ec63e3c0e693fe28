"""A training run from start to end: what it is made of, the loop, and what is due between two steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from torch.distributed.fsdp import FSDPModule

from bucketline.command_line import counted, human_number
from bucketline.errors import BucketlineError, PlanError, StateError, TrainError, UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.paths import IMAGES, IMAGES_FOLDER, LOSS_CURVE, METRICS, RUN_FILE, is_run
from bucketline.loader.iteration import parse_state
from bucketline.loader.ranks import DISK_TIME, OtherRankFailedError
from bucketline.loader.seen import PLANS, append_plan, read_plans
from bucketline.option_value import OnResume, as_option, options_on_resume
from bucketline.torch_setup import avoid_cudnn_attention
from bucketline.train import checkpoint
from bucketline.train.checkpoint import Output, RunState, Saver, Start, expect_finite_weights, folder_of_step, way_on
from bucketline.train.config import LrSchedule, Precision, TrainConfig
from bucketline.train.data import (
    open_loader,
    open_stores,
    open_val_loader,
    refuse_former_run,
    refuse_ignored,
    refuse_place,
    refuse_run,
)
from bucketline.train.log import (
    TRACKED,
    NotFiniteError,
    ProgressLine,
    RunLog,
    RunStatus,
    WindowRecorder,
    against_zero,
    chosen_options,
    cut_back,
    expect_trackers,
    lock_folder,
    mark,
    read_metrics,
    read_status,
    write_config,
    write_status,
)
from bucketline.train.model import weight_files
from bucketline.train.optim import find_optimizer, refuse_combinations, traits_of
from bucketline.train.parallel import StopRequest, TrainRanks, from_rank_zero
from bucketline.train.run_file import config_as_json, models_of, values_of_file
from bucketline.train.step import mean_weight, train_step, validate
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from bucketline.loader import Loader
    from bucketline.train.checkpoint import WeightLayout
    from bucketline.train.export import HubUpload
    from bucketline.train.images import StoredPrompt
    from bucketline.train.step import Training, ValidationResult
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

COLLECT_EVERY_STEPS = 5000
MANY_EPOCHS = 100  # of which the mean number of steps is told: a bucket's last rows may wait for the next epoch
OUTPUTS = ("num_images", "image_prompts", "export_every", "push_to_hub")  # options that have a finished run write something
FRESH = Start(checkpoint=None, state=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The result of a run."""

    steps_done: int
    steps_before: int = 0  # of them, before a resume
    stopped_by: str | None = None
    validation: ValidationResult | None = None
    checkpoint: Path
    images: tuple[Path, ...] = ()

    def __str__(self) -> str:
        run, done = self.checkpoint.parent.parent, self.steps_done
        trained = counted(done - self.steps_before, "step") + (f", to step {done}" if self.steps_before else "")
        if self.stopped_by:
            lines = [f"stopped by {self.stopped_by} after {trained}", f"continue with: bucketline train --resume {run}"]
        elif self.steps_before == done:
            lines = [f"{run} has finished: step {done} of {done}; raise --max-steps (or --epochs) to train on"]
        else:
            lines = [f"trained {trained}"]
        if self.validation is not None:
            lines.append(f"validation       {against_zero(self.validation.loss, self.validation.zero_loss)}")
            lines.append(f"zero baseline    {self.validation.zero_loss:.4f}, the loss of predicting zero")
        lines.append(f"checkpoint       {self.checkpoint}")
        lines += [f"image            {path}" for path in self.images]
        return "\n".join(lines)


def train(config: TrainConfig, ranks: TrainRanks) -> TrainSummary:
    """Train from step 0 or a checkpoint until its last step or a signal."""
    config = config.with_absolute_paths()
    accelerator = start_processes(config)
    with (
        contextlib.closing(StopRequest(ranks)) as stop,
        ProgressLine(talks=ranks.is_main) as progress,
        contextlib.ExitStack() as at_end,
    ):
        start = from_rank_zero(ranks, lambda: take_folder(config, at_end))
        if start.checkpoint is not None and from_rank_zero(ranks, lambda: has_finished(config, start)):
            end_processes()
            done = start.steps_done
            return TrainSummary(steps_done=done, steps_before=done, checkpoint=start.checkpoint)
        with contextlib.closing(Run(config, ranks, accelerator, start, progress)) as run:
            summary = run.train(stop)
        end_processes()
        if run.upload is not None:  # after everything else: the run is complete without them
            run.upload.finish(lambda: stop.is_asked)
    return summary


def start_processes(config: TrainConfig) -> Accelerator:
    """Join the process group that torchrun started, on GPUs if available."""
    expect_trackers(config.track_with)
    avoid_cudnn_attention()
    on_gpu = torch.cuda.is_available()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")  # it warns that all cores are used, which is intended
        return Accelerator(
            cpu=not on_gpu,
            mixed_precision="no",  # the step has its own autocast
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=10) if on_gpu else DISK_TIME)],
            log_with=list(config.track_with) or None,
            project_config=ProjectConfiguration(logging_dir=str(config.output_dir / TRACKED)),
        )


def end_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads release their last tensors, for which they need the GIL; an interpreter that ends meanwhile aborts the
        # process (pytorch/pytorch#179291)
        time.sleep(0.2)


def take_folder(config: TrainConfig, at_end: contextlib.ExitStack) -> Start:
    """Lock the run's folder until the end, made if it is new; return the start: step 0, or the newest complete checkpoint."""
    output = config.output_dir
    if config.resume and not is_run(output):
        raise UsageError(f"there is no run in {output} to resume; give the --output-dir of a run, or leave out --resume")
    if not config.resume:
        refuse_place(config)
    is_new = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        at_end.callback(lock_folder(output, is_new=is_new))
    except OSError as error:
        raise UsageError(f"--output-dir {output} cannot be made: {error.strerror}; choose another one") from error
    if not config.resume:
        refuse_former_run(output)
        return FRESH
    if not checkpoint.checkpoint_folders(output):
        raise UsageError(f"{output} cannot be resumed: {way_on(output)}")
    folder = checkpoint.last_whole(output)
    return Start(checkpoint=folder, state=checkpoint.read_state(folder))


def has_finished(config: TrainConfig, start: Start) -> bool:
    """Return whether a resumed run has ended: it has no step left, and no output that is new to it."""
    if start.state is None or config.new_plan or read_status(config.output_dir) != RunStatus.DONE:
        return False
    before, present, given = start.state.config, config_as_json(config), config.output_dir / RUN_FILE
    steps = before["max_steps"]
    is_same = config.max_steps == steps or (config.epochs or 0) == values_of_file(TrainConfig, str(given)).get("epochs")
    names = {*OUTPUTS, *options_on_resume(TrainConfig, OnResume.FIXED)} - {"optimizer"}  # which the run has chosen
    return is_same and steps == start.steps_done and all(before.get(name) == present[name] for name in names)


@contextlib.contextmanager
def failures_recorded(run: Run) -> Iterator[None]:
    """Record a failure of the body in `status.json` once the run has begun, except what only follows from another rank's."""
    try:
        yield
    except OtherRankFailedError:
        raise
    except BaseException as error:
        explained = _explained(run, error)
        if run.has_begun:
            reason = str(explained or error) if explained or isinstance(error, BucketlineError) else repr(error)
            with contextlib.suppress(OSError):  # on a failing disk, report the first failure
                write_status(run.given.output_dir, RunStatus.FAILED, run.steps_done, reason)
        if explained is not None:
            raise explained from error
        raise


def _explained(run: Run, error: BaseException) -> TrainError | None:
    """Return how to continue after an error of a disk, of numbers, or of another rank; None after any other."""
    output = run.given.output_dir
    if isinstance(error, OSError):
        what = f"{error.filename or output} cannot be read or written: {error.strerror or error}"
        return TrainError(f"{what}; {way_on(output, first='fix that, then ')}")
    if isinstance(error, NotFiniteError):
        return TrainError(f"{error}; {way_on(output)}, with a lower --learning-rate")
    is_gloos = isinstance(error, RuntimeError) and "gloo" in str(error)  # which has no class of its own
    if run.ranks.world_size > 1 and (is_gloos or isinstance(error, dist.DistError)):
        return TrainError(
            f"rank {run.ranks.rank} lost another rank: {str(error).splitlines()[0]}; the cause is that rank's own message, "
            f"also in status.json in {output}"
        )
    return None


def resolve(config: TrainConfig, start: Start, loader: Loader, device: torch.device) -> TrainConfig:
    """Return the configuration with what its options leave open: learning rate, precision, length, the schedule's end."""
    recorded = {} if start.state is None else start.state.config
    if start.state is not None:
        from bucketline.train.memory import with_recorded

        config = with_recorded(config, recorded)
    if config.learning_rate is None:
        config = replace(config, learning_rate=traits_of(config).learning_rate)
    if config.precision is Precision.AUTO:
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        usual = Precision.BF16 if has_bf16 else Precision.FP32
        config = replace(config, precision=Precision(str(recorded.get("precision") or usual)))
    length = "--max-steps" if config.epochs is None else f"--epochs is {config.epochs:g}: the number of steps"
    if config.epochs is not None:
        plans = read_plans(config.output_dir / PLANS) if start.state is not None else []
        if config.new_plan or len({line.state.plan for line in plans}) > 1:  # lines may also be of one on other ranks
            raise UsageError(f"--epochs is {config.epochs:g}, and the run has had several plans; give --max-steps")
        whole, part = divmod(config.epochs, 1)
        first, after = (loader.plan.steps_before(int(whole) + n) for n in range(2))
        if (steps := first + round(part * (after - first))) == 0:
            raise PlanError(loader.plan.without_step())
        config = replace(config, max_steps=steps, epochs=None)
    if start.steps_done > config.num_steps:
        raise UsageError(
            f"{length} is {config.num_steps}, and {start.checkpoint} is already at step {start.steps_done}; give more"
        )
    if (schedule := config.lr_schedule).end is None and schedule.name != "constant":
        before = LrSchedule.parse(str(recorded.get("lr_schedule", "constant")), "the resumed run's --lr-schedule")
        config = replace(config, lr_schedule=replace(schedule, end=before.end or config.max_steps))
    return config


class Run:
    """A training run: all that it is made of, in the order of a start; then `train`."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: TrainRanks,
        accelerator: Accelerator | None = None,
        start: Start = FRESH,
        progress: ProgressLine | None = None,
    ) -> None:
        """Open the stores, refuse what does not suit, load the model and the start's checkpoint, and compile.

        A new run's folder gets its status before the model is loaded, and then only encoded prompts; a resumed one is left
        as it is until it trains.
        """
        self.given, self.ranks, self.start = config, ranks, start  # `given`: before it is resolved
        self._accelerator = accelerator or start_processes(config)
        self._progress = progress or ProgressLine(talks=False)
        self.device = self._accelerator.device
        self.steps_done, self.has_begun = start.steps_done, False
        self.upload: HubUpload | None = None
        self._log: RunLog | None = None  # on rank 0, once training begins
        self._validations: dict[int, ValidationResult | None] = {}  # by steps done; None: before a resume
        self._to_save: set[Output] = set()
        with contextlib.ExitStack() as at_end:
            stores = open_stores(config, ranks, start)
            from_rank_zero(ranks, lambda: refuse_run(config, start, [weighted.store for weighted in stores]))
            self.loader = at_end.enter_context(contextlib.closing(open_loader(config, ranks, stores, self.device)))
            self._continue_loader()
            config = resolve(config, start, self.loader, self.device)
            set_up_device(config, self.device)
            refuse_combinations(config, ranks.world_size)
            find_optimizer(config)  # a missing library is told before anything is made
            with failures_recorded(self):
                if start.checkpoint is None:
                    self._begin()
                self.loader.start()  # to read ahead while the model loads and compiles
                self.training, self._weights, self._prompts = self._build(config)
                self.config = self.training.config
                self._tell_start()
                from bucketline.train.compile import compile_and_count, step_work_of
                from bucketline.train.memory import expect_disk

                from_rank_zero(ranks, lambda: expect_disk(self.training, self._weights))
                self.work = step_work_of(self.config, ranks, self.device)
                compile_and_count(self.training, ranks, self.loader, self._progress.say, self.work)
                if self.config.push_to_hub and ranks.is_main:
                    from bucketline.train.export import HubUpload

                    self.upload = HubUpload(self.config.push_to_hub, self._progress.say)
                self.saver = Saver(self.training, ranks, self._weights, start.checkpoint, self._write_export)
                at_end.enter_context(contextlib.closing(self.saver))
            self._recorder = WindowRecorder(log_every=self.config.log_every, work=self.work, gather=self._accelerator.gather)
            self._at_end = at_end.pop_all()

    def _continue_loader(self) -> None:
        """Continue the loader where a resumed run has stopped."""
        if (state := self.start.state) is None:
            return
        if self.given.new_plan:  # keep weights and optimizer, use the current stores
            self.loader.start_anew(state.loader)  # at the same step, so that no random draw is repeated
            return
        try:
            self.loader.load_state_dict(state.loader)
        except StateError as error:
            raise StateError(f"{error}; or continue by another plan, with --resume --new-plan") from error

    def _begin(self) -> None:
        """Record that the run is in progress: a new one before its first file, a resumed one once nothing is refused."""
        self.has_begun = True
        output, done = self.given.output_dir, self.steps_done
        from_rank_zero(self.ranks, lambda: write_status(output, RunStatus.RUNNING, done, begins=True))

    def _build(self, config: TrainConfig) -> tuple[Training, WeightLayout, tuple[StoredPrompt, ...]]:
        """Build the model with its optimizer and average, as memory allows; load the prompts of its images."""
        from bucketline.train.memory import built_to_fit

        store, given = self.loader.stores[0].store, dict[str, bytes]()
        if config.image_prompts:  # before the model takes its memory
            from bucketline.train.images import encode_given

            given = from_rank_zero(self.ranks, lambda: encode_given(config, store))
        training, weights = built_to_fit(config, self.ranks, self.start, self.loader, self._progress.say)
        if not config.num_images:
            return training, weights, ()
        from bucketline.train.images import load_prompts

        return training, weights, load_prompts(given, store, training.family)

    def close(self) -> None:
        """Release files and threads; a checkpoint in progress is complete when this returns."""
        self._at_end.close()

    # ------------------------------------------------------------------ the loop

    def train(self, stop: StopRequest) -> TrainSummary:
        """Train until the last step or a signal, then write the results."""
        # The saver is closed first: what a failure's message says depends on whether the last checkpoint exists.
        with failures_recorded(self), contextlib.closing(self.saver):
            if not self.has_begun:
                self._begin()
            self._validations = from_rank_zero(self.ranks, self._open_log)
            self._validate_if_due()
            with rare_collection():
                stopped_by = self._loop(stop)
            return self._finish(stopped_by)

    def _open_log(self) -> dict[int, ValidationResult | None]:
        """Truncate the metrics to the start, and open them; return the validations that remain."""
        output = self.config.output_dir
        if self.start.checkpoint is None:
            (output / METRICS).unlink(missing_ok=True)  # an earlier validation was of other weights
        else:
            checkpoint.set_aside(self.start.checkpoint)
        write_config(self.config, self.given, self.loader.stores, self.ranks.world_size)
        validated = cut_back(self.config, self.steps_done)
        self._record_plan()
        self._log = self._at_end.enter_context(contextlib.closing(RunLog(self.config, self._accelerator, self._progress)))
        return dict.fromkeys(validated)

    def _loop(self, stop: StopRequest) -> str | None:
        """Train until the last step or a signal, whose name is returned."""
        batches, waited = self.loader.forever(), 0.0
        self._progress.begin(self.steps_done, self.config.num_steps)
        began = mark(self.device)
        while self.steps_done < self.config.num_steps:
            outcome = train_step(self.training, batches, self.steps_done)
            ended = mark(self.device)
            self.steps_done += 1
            waited_before, waited = waited, self.loader.stats().waited_s
            wait_s = waited - waited_before
            self._write(self._recorder.add(self.steps_done - 1, outcome, took=(began, ended), wait_s=wait_s))
            self._progress.step(self.steps_done)
            self.saver.poll()
            if (stopped_by := stop.agreed()) is not None:
                return stopped_by
            # A step begins where the last one ended, so that what the loop itself costs counts, unless there was a pause.
            began = mark(self.device) if self._pause() else ended
        return None

    def _pause(self) -> bool:
        """Run the tasks that are due between two steps; return whether there was one."""
        config, done = self.config, self.steps_done
        is_pause = self._renew() | self._validate_if_due() | _due(COLLECT_EVERY_STEPS, done)  # `or` would leave out the others
        if _due(config.save_every, done):
            self._to_save.add(Output.CHECKPOINT)
        if _due(config.export_every, done):
            self._to_save.add(Output.EXPORT)
        if self._to_save:
            is_pause = True
            self._save()
        is_due, is_first = _due(config.images_every, done), done == self.start.steps_done + 1
        if config.num_images and done < config.num_steps and (is_due or is_first):
            is_pause = True
            sheet = config.output_dir / IMAGES_FOLDER / f"{folder_of_step(done)}.png"
            self._draw(sheet if is_due else None)  # with all that a step leaves in memory: the first one tells what lacks
        if is_pause:
            gc.collect()
        return is_pause

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
        images = [output / LOSS_CURVE]
        if stopped_by is None and self._draw(output / IMAGES):
            images.append(output / IMAGES)
        if self.ranks.is_main:
            from bucketline.train.report import draw_loss_curve

            draw_loss_curve(read_metrics(output), output / LOSS_CURVE)
            write_durably(output / checkpoint.CARD, self._card().encode())
            write_status(output, RunStatus.STOPPED if stopped_by else RunStatus.DONE, self.steps_done, stopped_by)
        return TrainSummary(
            steps_done=self.steps_done,
            steps_before=self.start.steps_done,
            stopped_by=stopped_by,
            validation=self._validations.get(self.steps_done),
            checkpoint=self.saver.saved[Output.CHECKPOINT],
            images=tuple(images),
        )

    # ------------------------------------------------------------------ what is due between two steps

    def _write(self, lines: Iterable[dict[str, Json]]) -> None:
        if self._log is not None:
            for line in lines:
                self._log.write(line, self.steps_done)

    def _record_plan(self) -> None:
        if self.ranks.is_main:
            append_plan(self.config.output_dir / PLANS, self.loader, self.steps_done)

    def _renew(self) -> bool:
        """At an epoch's end, read the newest generation, before this step's checkpoint; return True if it is another one."""
        if not (self.loader.follows and self.loader.is_between_epochs) or self.steps_done == self.config.num_steps:
            return False
        if not self.loader.renew():
            return False
        self._record_plan()
        refuse_ignored([weighted.store for weighted in self.loader.stores])
        self.training = replace(self.training, mean_weight=mean_weight(self.config, self.loader.stores))
        from bucketline.train.compile import compile_and_count

        compile_and_count(self.training, self.ranks, self.loader, self._progress.say, self.work)
        rows = sum(bucket.num_rows for bucket in self.loader.plan.buckets)
        named = ", ".join(str(weighted.store.manifest.generation) for weighted in self.loader.stores)
        self._progress.say(f"step {self.steps_done}: now on generation {named}, {counted(rows, 'sample')} per epoch")
        return True  # and `_pause` collects: stores and their buckets know each other

    def _validate_if_due(self) -> bool:
        is_scheduled = self.steps_done == 0 or _due(self.config.validate_every, self.steps_done)
        is_due = is_scheduled and self.steps_done not in self._validations and bool(self.loader.rows.buckets("val"))
        if is_due:
            self._validate()
        return is_due

    def _validate(self) -> None:
        with open_val_loader(self.config, self.ranks, self.loader.stores, self.device) as batches:
            result = validate(self.training, batches, lambda sums: self._accelerator.reduce(sums, "sum"))
        self._write(self._recorder.flush())  # earlier windows come first in the file
        if self.steps_done not in self._validations:  # after a resume, the file may have it already
            self._write([result.line(self.steps_done)])
        self._validations[self.steps_done] = result

    def _save(self, *, is_last: bool = False) -> None:
        """Begin to write what is to be saved, on every rank; not after a skipped step, except at the end."""
        self._write(self._recorder.end())  # so that a resumed run has whole windows
        expect_finite_weights(self.training.bare_model, self.steps_done)
        # Skipped steps may mean bad weights; keep the earlier checkpoints instead of replacing them.
        if self._recorder.skipped and not is_last:
            return
        state = RunState(
            version=checkpoint.VERSION,
            steps_done=self.steps_done,
            loader={name: encode(value) for name, value in self.loader.state_dict().items()},
            config=config_as_json(self.config),
        )
        cards = {output: self._card(of_export=output is Output.EXPORT) for output in self._to_save}
        self.saver.save(cards, state)
        self._to_save.clear()

    def _card(self, *, of_export: bool = False) -> str:
        from bucketline.train.export import model_card

        validation = self._validations.get(self.steps_done)
        return model_card(self.training, self._weights, self.loader.stores, self.steps_done, validation, of_export=of_export)

    def _write_export(self, folder: Path, config: str, tensors: dict[str, Any], card: str) -> None:
        """Write an export, in the saver's thread; upload that of the last step."""
        from bucketline.train.export import write_export

        write_export(folder, self._weights, config, tensors, dtype=self.config.export_dtype, card=card)
        if self.upload is not None and folder.name == folder_of_step(self.config.num_steps):
            self.upload.push(folder, counted(self.config.num_steps, "step"))

    def _draw(self, sheet: Path | None) -> bool:
        """Draw images on rank 0 (a sharded model needs every rank), without a `sheet` only try; return whether any are new."""
        if self.config.num_images == 0:
            return False
        from bucketline.train.images import draw_images

        of, done = (self.training, self.loader.stores, self._prompts), self.steps_done
        draw = functools.partial(draw_images, *of, sheet, steps_done=done, keeps=self.ranks.is_main)
        return draw() if isinstance(self.training.model, FSDPModule) else from_rank_zero(self.ranks, draw)

    # ------------------------------------------------------------------ what is told

    def _tell_start(self) -> None:
        """Print what a new run does, or where one is resumed; warn of a start at random, a new plan, and of changes."""
        config, start, say = self.config, self.start, self._progress.say
        if start.state is not None:
            epoch = parse_state(start.state.loader).epoch + 1
            kept = counted(len(checkpoint.checkpoint_folders(config.output_dir)), "checkpoint")
            say(f"resumed {config.output_dir} at step {start.steps_done} of {config.num_steps}, epoch {epoch}; {kept}")
        if start.state is None or config.new_plan:
            self._tell_data()
        if start.state is None:
            chosen = [(name, value) for name, value in chosen_options(config, self.given).items() if value]
            if config.objective is None:
                chosen.append(("objective", f"{self.training.prep.schedule.objective} (from the model's scheduler)"))
            named = [f"{name.replace('_', ' ')} {value}" for name, value in chosen if name != "max_steps"]
            say(f"defaults: {', '.join(named) or 'none'}")
            if config.model.is_dir() and not weight_files(config.model / self.training.family.folder):
                said = "%s has a configuration but no weights: the model starts at random; adapters fit only this random base"
                log.warning(said, config.model)
            return
        if config.new_plan:
            log.warning("--new-plan: training continues from step %d in a new order, on the present stores", start.steps_done)
        present = config_as_json(config)
        told = {*options_on_resume(TrainConfig, OnResume.WARN)}
        told -= set() if self.training.family.is_told_guidance else {"guidance"}
        for name, value in start.state.config.items():
            if name in told and present[name] != value:
                log.warning("%s was %s before and is now %s", as_option(name), value, present[name])

    def _tell_data(self) -> None:
        """Print the length and the samples of a run; warn of small buckets, and of a caption dropout without use."""
        config, family, say = self.config, self.training.family, self._progress.say
        stores, plan = [weighted.store for weighted in self.loader.stores], self.loader.plan
        if {one.model for one in models_of(one.place for one in stores).values()} == {str(config.model)}:
            say(f"model: {config.model}, with which {'the stores were' if len(stores) > 1 else 'the store was'} packed")
        per_epoch = plan.steps_before(MANY_EPOCHS) / MANY_EPOCHS or 1
        size = f"{counted(sum(one.num_rows for one in plan.buckets), 'sample')} in {counted(len(plan.buckets), 'bucket')}"
        epochs = human_number(self.given.epochs or config.num_steps / per_epoch)
        say(f"training: {counted(config.num_steps, 'step')}, {epochs} {'epoch' if epochs == '1' else 'epochs'} of {size}")
        trained, held = (sum(one.num_rows for own in stores for one in own.buckets(split)) for split in ("train", "val"))
        rules = {str(found) for one in stores if (found := one.manifest.rules.get("val_fraction"))}
        rule = f" (--val-fraction {', '.join(sorted(rules))})" if rules else ""
        say(
            f"validation: {held} of {counted(held + trained, 'sample')}, held out by the store{rule}"
            if held
            else f"no validation: the store holds out none of {trained} samples{rule}; pack one with a larger --val-fraction"
        )
        if (small := self.loader.plan.small_buckets(can_drop=False)) is not None:
            log.warning("%s", small)
        if config.caption_dropout and not family.is_guidable:
            said = "--caption-dropout is %g, and %s guides by a second model, which is not trained: it has little use here"
            log.warning(said, config.caption_dropout, family.pipelines[0])


def set_up_device(config: TrainConfig, device: torch.device) -> None:
    """On a GPU, let fp32 use TF32, and cuDNN search for its fastest convolutions."""
    if config.precision is Precision.FP8:
        from bucketline.train.lowbit import expect_float8

        expect_float8(config, device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # convolutions of each size are timed once, in the warm-up
    if config.precision is Precision.FP32 and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        log.warning("--precision is fp32: products are computed in TF32, at half the speed of bf16 at best")


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
