"""Each reason by which a run is refused: what it says, and that nothing is written."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from bucketline.errors import BucketlineError, LockedError, ModelError, StateError, TrainError, UsageError
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.store.change.compact import collect
from bucketline.store.format.block import Column
from bucketline.store.format.schema import TextEntry, column_entries
from bucketline.store.format.text import TextSpec
from bucketline.store.write.publish import lock_store
from bucketline.train.config import Objective, WeightDtype
from bucketline.train.log import lock_folder
from bucketline.train.run import train
from tests.kit import TEXT, flip_bit, rewrite_manifest, tree
from tests.unit.train.tiny_run import ALONE, TEXT_ENCODER, VAE, add_to_store, config, make_training_store, samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.train.config import TrainConfig


@pytest.fixture(scope="module")
def begun(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, a model, another store, a run of two steps, and one of two stores."""
    folder = shutil.copytree(ready, tmp_path_factory.mktemp("begun"), dirs_exist_ok=True)
    make_training_store(folder / "other.store", {"train/128x128": 5, "val/128x128": 2})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gc.unfreeze", lambda: None)
        train(in_folder(folder, {**AGAIN, "resume": False, "max_steps": 2, "save_every": "1"}), ALONE)
        train(in_folder(folder, {**BOTH, "resume": False, "max_steps": 1}), ALONE)
    return folder


def in_folder(folder: Path, options: dict[str, Any]) -> TrainConfig:
    """Return options whose places are in a folder."""
    given: dict[str, Any] = {"output_dir": "new", "max_steps": 4, **options}
    given |= {name: folder / given[name] for name in ("output_dir", "model") if name in given}
    if "store" in given:
        given["store"] = tuple(folder / one for one in given["store"])
    return config(folder, **given)


def with_manifest(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite_manifest(folder / "tiny.store", **changes)


def with_two_columns(folder: Path) -> None:
    spec = TextSpec(tokens=(*TEXT.tokens, Column(name="others", dtype="F16", shape=(3,))))
    entry = TextEntry(header_bytes=spec.header_bytes, tokens=column_entries(spec.tokens), fixed={})
    rewrite_manifest(folder / "tiny.store", text=entry)


def with_a_text_encoder(folder: Path) -> None:
    (folder / "model" / "text_encoder").mkdir()
    (folder / "model" / "text_encoder" / "config.json").write_text('{"hidden_size": 5}', encoding="ascii")
    text = {**TEXT_ENCODER, "config_hash": "0" * 32}
    rewrite_manifest(folder / "tiny.store", encoders={"vae": dict(VAE), "text_encoder": text})


def with_files(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            (folder / "new" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "new" / name).write_bytes(b"theirs")

    return write


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")


def without_digests(folder: Path) -> None:
    for path in (folder / "run" / "checkpoints").glob("*/digests.json"):
        path.unlink()


def without_its_generation(folder: Path) -> None:
    add_to_store(folder / "tiny.store", samples({"train/128x128": 20}, "later/"))
    with lock_store(folder / "tiny.store"):
        collect(folder / "tiny.store", older_than_s=0.0)


class Case(NamedTuple):
    """What is said of options and of a folder that was changed; of a new run unless it is resumed."""

    message: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    change: Callable[[Path], object] = lambda _: None
    error: type[BucketlineError] = UsageError


AGAIN: dict[str, Any] = {"resume": True, "output_dir": "run", "accumulation": 1, "batch": "49152px"}
BOTH: dict[str, Any] = {"resume": True, "output_dir": "both", "store": ("tiny.store:1", "other.store:3")}
STEP = r"\S+/run/checkpoints/step-00000002"
WITHOUT_CHANNELS = {"vae": {"scaling_factor": 0.5}, "text_encoder": dict(TEXT_ENCODER)}
WITH_A_MEAN = {"vae": {**VAE, "latents_mean": [0.0, 1.0]}, "text_encoder": dict(TEXT_ENCODER)}
ANOTHER_VAE = {"vae": {**VAE, "weights_hash": "0" * 32}, "text_encoder": dict(TEXT_ENCODER)}
CASES = (
    # the folder
    Case("new has no checkpoint to resume; give the --output-dir of a run", {"resume": True}),
    Case("tiny.store overlap; choose a separate folder", {"output_dir": "tiny.store/shards/.."}),
    Case("overlap", {"output_dir": "link/run"}, lambda folder: (folder / "link").symlink_to(folder / "tiny.store")),
    Case("overlap", {"output_dir": "."}),
    Case(r"other\.store overlap", {"output_dir": "other.store/run", "store": ("tiny.store", "other.store:2")}),
    Case("config.json cannot be made: File exists", {"output_dir": "model/unet/config.json"}),
    Case("'a.jpg'.* not a run of this trainer", change=with_files("a.jpg", "a.log")),
    Case("'config.json'.* not a run of this trainer", change=with_files("config.json")),
    Case("already has a run; continue it with --resume, or choose another", {"output_dir": "run"}),
    Case("already has a run", {"output_dir": "run"}, without_checkpoints),
    Case("run has no checkpoint to resume", AGAIN, without_checkpoints),
    Case("has no complete checkpoint to resume; start over", AGAIN, without_digests, TrainError),
    # a resume
    Case(f"--max-steps is 1, and {STEP} is already at step 2; use that many or more", {**AGAIN, "max_steps": 1}),
    Case(f"--seed is 9, and {STEP} was trained with 0; use --seed 0, or start a new run", {**AGAIN, "seed": 9}),
    Case(f"--optimizer is muon, and {STEP} was trained with adamw", {**AGAIN, "optimizer": "muon"}),
    Case("--lora-rank is 2, .* was trained with None; leave out --lora-rank", {**AGAIN, "lora_rank": 2}),
    Case("global_batch was .* and is .* now; .*--new-plan", {**AGAIN, "batch": "32768px"}, error=StateError),
    Case("global_batch was .* and is .* now", {**AGAIN, "accumulation": 2}, error=StateError),
    Case("store_id was .*--new-plan", {**AGAIN, "store": ("other.store",)}, error=BucketlineError),
    Case("repeats was 1 .* is 2 now", {**AGAIN, "store": ("tiny.store:2",)}, error=StateError),
    Case("stores.count was 1 .* is 2 now", {**AGAIN, "store": ("tiny.store", "other.store")}, error=StateError),
    Case("repeats was 3 .* is 1 now", {**BOTH, "store": ("tiny.store", "other.store")}, error=StateError),
    Case("store_id was", {**BOTH, "store": ("other.store:3", "tiny.store:1")}, error=StateError),
    Case("no generation 1 any more.* --resume --new-plan", AGAIN, without_its_generation, StateError),
    # stores and model
    Case(r"no number encoders\.vae\.latent_channels", {}, with_manifest(encoders=WITHOUT_CHANNELS), ModelError),
    Case(r"shift_factor 0\.25, expected none", {}, with_manifest(encoders=WITH_A_MEAN), ModelError),
    Case(r"text\.tokens others, tokens, expected one column", {}, with_two_columns, ModelError),
    Case(r"flip is 0\.5, .* has no latent_flipped", {"flip": 0.5}),
    Case("is min-snr:5, .* is flow; use cosmap", {"objective": Objective.FLOW, "loss_weight": "min-snr:5"}),
    Case("is cosmap, .* is epsilon; use min-snr", {"loss_weight": "cosmap"}),
    Case("is 0.1, and the objective is a flow", {"objective": Objective.FLOW, "noise_offset": 0.1}),
    Case(r"--shift is 2\.0, .* or use --objective flow", {"shift": 2.0}),
    Case("no.store is not a store", {"store": ("no.store",)}, error=BucketlineError),
    Case("are the same store", {"store": ("tiny.store", "tiny.store")}, error=BucketlineError),
    Case("a.store@0.5:3, expected its repeats once, and its weight once", {"store": ("a.store@0.5:3",)}),
    Case("has neither unet/config.json nor transformer/config.json", {"model": "other.store"}, error=ModelError),
    Case("is not the text encoder .* has 0{32}; ", {}, with_a_text_encoder, ModelError),
    Case("model/vae is not the VAE .*: its weights_hash", {}, with_manifest(encoders=ANOTHER_VAE), ModelError),
    Case("--optimizer is adamw, which cannot round .* choose adamw-8bit", {"weights": WeightDtype.BF16}),
    Case("no step", {"epochs": 1e-6, "max_steps": None}, error=BucketlineError),
    Case(r"no service can be reached at .*none\.sock", {"service": "/none.sock"}, error=BucketlineError),
    Case("--track-with is aim, expected one of .*aim.*, whose package is installed", {"track_with": ("aim",)}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message[:40])
def test_a_run_is_refused_and_nothing_is_written(case: Case, begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    case.change(folder)
    asked, before = in_folder(folder, case.options), tree(folder)
    with pytest.raises(case.error, match=case.message):
        train(asked, ALONE)
    changed = {name for name, data in tree(folder).items() if before.get(name) != data}
    assert {name.removeprefix("new/") for name in changed if not name.endswith(".lock")} <= {"", "status.json"}


def test_a_resume_that_breaks_no_rule_continues(begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    same = in_folder(folder, AGAIN)
    assert train(dataclasses.replace(same, max_steps=3), ALONE).steps_done == 3
    without_its_generation(folder)
    new = dataclasses.replace(same, batch=BatchSize(batch_size=2), new_plan=True, seed=9)
    assert train(new, ALONE).steps_done == 4


def test_a_damaged_checkpoint_refuses_nothing_that_the_one_before_it_allows(begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    weights = folder / "run" / "checkpoints" / "step-00000002" / "unet" / "diffusion_pytorch_model.safetensors"
    flip_bit(weights, weights.stat().st_size - 1)
    assert train(in_folder(folder, {**AGAIN, "max_steps": 1}), ALONE).steps_done == 1


def test_a_folder_that_has_only_logs_is_taken_and_freed_at_the_end_and_no_other_run_writes_to_it(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    asked.output_dir.mkdir()
    for name in ("train.log", "slurm-17.out", ".gitignore"):
        (asked.output_dir / name).touch()
    for again in (asked, dataclasses.replace(asked, max_steps=2, resume=True)):
        release = lock_folder(asked.output_dir)
        before = tree(asked.output_dir)
        with pytest.raises(LockedError, match=r"is being written by another process .* or choose another"):
            train(again, ALONE)
        assert tree(asked.output_dir) == before
        release()
        assert train(again, ALONE).steps_done == again.max_steps
