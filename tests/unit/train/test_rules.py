"""Each rule by which a run is refused: what breaks it, what it says, and that nothing is written."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from bucketline.errors import BucketlineError, ModelError, StateError, TrainError, UsageError
from bucketline.files.run_marker import is_run
from bucketline.loader.commands.batch_options import BatchSize
from bucketline.store.format.block import Column
from bucketline.store.format.schema import TextEntry, column_entries
from bucketline.store.format.text_block import TextSpec
from bucketline.train.checkpoint import RunState, Start
from bucketline.train.config import Objective, WeightDtype
from bucketline.train.rules import FOLDER_RULES, RULES, Facts, refuse
from bucketline.train.run import train
from tests.kit import TEXT, flip_bit, rewrite_manifest, tree
from tests.unit.train.tiny_run import ALONE, ROWS, TEXT_ENCODER, VAE, config, make_training_store, samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.train.config import TrainConfig
    from tests.unit.train.packed_families import Packed

PHOTOS = "photos"


@pytest.fixture(scope="module")
def begun(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, a model, another store, photographs, and a run of two steps."""
    folder = shutil.copytree(ready, tmp_path_factory.mktemp("begun"), dirs_exist_ok=True)
    make_training_store(folder / "other.store", {"train/128x128": 5, "val/128x128": 2})
    for sample in samples(ROWS):
        (folder / PHOTOS / sample.id).parent.mkdir(parents=True, exist_ok=True)
        (folder / PHOTOS / sample.id).touch()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gc.unfreeze", lambda: None)
        train(config(folder, max_steps=2, accumulation=1, batch="49152px", save_every="1"), ALONE)
    return folder


def with_encoders(folder: Path, **vae: Any) -> None:
    rewrite_manifest(folder / "tiny.store", encoders={"vae": {**VAE, **vae}, "text_encoder": dict(TEXT_ENCODER)})


def without_channels(folder: Path) -> None:
    rewrite_manifest(folder / "tiny.store", encoders={"vae": {"scaling_factor": 0.5}, "text_encoder": dict(TEXT_ENCODER)})


def with_two_columns(folder: Path) -> None:
    spec = TextSpec(tokens=(*TEXT.tokens, Column(name="others", dtype="F16", shape=(3,))))
    entry = TextEntry(header_bytes=spec.header_bytes, tokens=column_entries(spec.tokens), fixed={})
    rewrite_manifest(folder / "tiny.store", text=entry)


def with_a_text_encoder(folder: Path) -> None:
    (folder / "model" / "text_encoder").mkdir()
    (folder / "model" / "text_encoder" / "config.json").write_text('{"hidden_size": 5}', encoding="ascii")
    text = {**TEXT_ENCODER, "config_hash": "0" * 32}
    rewrite_manifest(folder / "tiny.store", encoders={"vae": dict(VAE), "text_encoder": text})


def among(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            (folder / "new" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "new" / name).write_bytes(b"theirs")

    return write


def linked(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "tiny.store")


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")


def nothing(_: Path) -> None:
    """Change nothing."""


class Case(NamedTuple):
    """What breaks a rule, in a folder and by options, and what is said; of a new run unless it is resumed."""

    rule: str
    message: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    change: Callable[[Path], None] = nothing
    error: type[BucketlineError] = UsageError


AGAIN: dict[str, Any] = {"resume": True, "output_dir": "run", "accumulation": 1, "batch": "49152px"}
STEP = r"\S+/run/checkpoints/step-00000002"
CASES = (
    Case("no run", r"there is no run in \S+; give the --output-dir of one, or leave out --resume", {"resume": True}),
    Case("near a store", "--output-dir .* is the store .*choose a separate folder", {"output_dir": "tiny.store"}),
    Case("near a store", "is the store", {"output_dir": "tiny.store/shards/.."}),
    Case("near a store", "is inside the store", {"output_dir": "tiny.store/runs/a"}),
    Case("near a store", "is inside the store", {"output_dir": "link/run"}, linked),
    Case("near a store", "contains the store", {"output_dir": "."}),
    Case(
        "near a store",
        r"is inside the store .*other\.store",
        {"output_dir": "other.store/run", "store": ("tiny.store", "other.store:2")},
    ),
    Case("a file", "is a file; choose a path that does not exist", {"output_dir": "model/unet/config.json"}),
    *(
        Case("other files", "is not empty .* and not a run of this trainer", change=among(*names))
        for names in (("a.jpg", "a.log"), ("deep/down/a.png",), ("data-00000-of-00001.arrow",), ("config.json",))
    ),
    Case("taken", "already has a run; continue it with --resume, or choose another", {"output_dir": "run"}),
    Case(
        "taken, without a checkpoint",
        "it ended before its first checkpoint: remove the folder",
        {"output_dir": "run"},
        without_checkpoints,
    ),
    Case("steps", f"--max-steps is 1, and {STEP} is already at step 2; use that many or more", {**AGAIN, "max_steps": 1}),
    Case(
        "option",
        f"--seed is 9, and {STEP} was trained with 0; use --seed 0, or start a new run in another --output-dir",
        {**AGAIN, "seed": 9},
    ),
    Case(
        "option",
        rf"--optimizer is muon, and {STEP} was trained with adamw; .* its weights, with --model {STEP}",
        {**AGAIN, "optimizer": "muon"},
    ),
    Case("option", "--lora-rank is 2, .* was trained with None; leave out --lora-rank", {**AGAIN, "lora_rank": 2}),
    Case(
        "batch",
        "--batch 32768px --accumulation 1 on 1 rank is 2 rows a step of train/128x128, and .* with --batch 49152px "
        "--accumulation 1 on 1 rank, 3 rows a step; give the same number, or continue with --new-plan",
        {**AGAIN, "batch": "32768px"},
    ),
    Case("batch", "--batch 2 --accumulation 1 on 1 rank is 2 rows a step of train/128x128", {**AGAIN, "batch": "2"}),
    Case("store", "name the --store of the run", {**AGAIN, "store": ("other.store",)}, error=StateError),
    Case("store", "1 times a pass; .* 2 times a pass", {**AGAIN, "store": ("tiny.store:2",)}, error=StateError),
    Case("", "was trained on 1 stores .* 2 are given", {**AGAIN, "store": ("tiny.store", "other.store")}, error=StateError),
    Case("among images", "photos, where the store's samples came from", {"output_dir": PHOTOS}),
    Case("among images", "photos, where the store's samples came from", {"output_dir": f"{PHOTOS}/runs/a"}),
    Case("ignored", r"has no number encoders\.vae\.latent_channels", change=without_channels, error=ModelError),
    Case(
        "ignored",
        r"encoders\.vae\.shift_factor 0\.25, expected none in addition to latents_mean",
        change=lambda folder: with_encoders(folder, latents_mean=[0.0, 1.0]),
        error=ModelError,
    ),
    Case("ignored", r"text\.tokens others, tokens, expected one column", change=with_two_columns, error=ModelError),
    Case("flip", r"flip is 0\.5, .* has no latent_flipped", {"flip": 0.5}),
    Case("adapters", "it does not begin with a header", {"lora_rank": 2, "lora_from": Path(__file__)}, error=ModelError),
    Case("adapters", "No such file", {"lora_rank": 2, "lora_from": Path("none.safetensors")}, error=ModelError),
    Case("preset", "the preset sdxl-lora is for .* sdxl, and .* of sd; use the preset sd-lora,", {"files": ("sdxl-lora",)}),
    Case("preset", "the preset dit is for .* of sd; use the preset sd,", {"files": ("dit",)}),
    Case(
        "loss weight",
        "--loss-weight is min-snr:5, and the objective is flow; use cosmap, sigma-sqrt or sigma-squared",
        {"objective": Objective.FLOW, "loss_weight": "min-snr:5"},
    ),
    Case("loss weight", "--loss-weight is cosmap, and the objective is epsilon; use min-snr", {"loss_weight": "cosmap"}),
    Case("noise offset", "is 0.1, and the objective is a flow", {"objective": Objective.FLOW, "noise_offset": 0.1}),
    # what is refused by those who read it, as early
    Case("", r"--shift is 2\.0, .* or use --objective flow", {"shift": 2.0}),
    Case("", "no.store is not a store", {"store": ("no.store",)}, error=BucketlineError),
    Case("", "are the same store", {"store": ("tiny.store", "tiny.store")}, error=BucketlineError),
    Case("", "a.store@0.5:3: the weight comes last: .*a.store:3@0.5", {"store": ("a.store@0.5:3",)}),
    Case("", "has neither unet/config.json nor transformer/config.json", {"model": "other.store"}, error=ModelError),
    Case("", r"model/text_encoder is not the text encoder .* has 0{32}; ", change=with_a_text_encoder, error=ModelError),
    Case("", "--optimizer is adamw, which cannot round .* choose adamw-8bit", {"weights": WeightDtype.BF16}),
    Case("", "--epochs is 0.01|no step", {"epochs": 1e-6, "max_steps": None}, error=BucketlineError),
)


def in_folder(folder: Path, options: dict[str, Any]) -> TrainConfig:
    """Return options whose places are in a folder."""
    given: dict[str, Any] = {"output_dir": "new", "max_steps": 4, **options}
    given["output_dir"] = folder / given["output_dir"]
    if "model" in given:
        given["model"] = folder / given["model"]
    if "store" in given:
        given["store"] = tuple(folder / one for one in given["store"])
    return config(folder, **given)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message[:40])
def test_a_run_is_refused_by_each_rule_and_nothing_is_written(case: Case, begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    case.change(folder)
    asked, before = in_folder(folder, case.options), tree(folder)
    with pytest.raises(case.error, match=case.message):
        train(asked, ALONE)
    after = tree(folder)
    assert after == before | {name: after[name] for name in after if name.endswith(".lock")}


def test_every_rule_has_a_case() -> None:
    of_a_second_model = {"guidance"}  # `tests/unit/families/test_outputs.py`
    assert {rule.name for rule in (*FOLDER_RULES, *RULES)} - of_a_second_model == {case.rule for case in CASES} - {""}


def test_a_resume_that_breaks_no_rule_goes_on(begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    same = in_folder(folder, {**AGAIN, "batch": BatchSize(batch_pixels=50_000)})  # as many rows in both buckets
    assert train(dataclasses.replace(same, max_steps=3), ALONE).steps_done == 3
    new = dataclasses.replace(same, batch=BatchSize(batch_size=2), new_plan=True, seed=9, files=("sdxl",))
    assert train(new, ALONE).steps_done == 4


def test_a_damaged_checkpoint_refuses_nothing_that_the_one_before_it_allows(begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "f")
    again = in_folder(folder, {**AGAIN, "max_steps": 1})
    weights = folder / "run" / "checkpoints" / "step-00000002" / "unet" / "diffusion_pytorch_model.safetensors"
    flip_bit(weights, weights.stat().st_size - 1)
    assert train(again, ALONE).steps_done == 1
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000001")
    with pytest.raises(TrainError, match="has no complete checkpoint to resume"):
        train(again, ALONE)


def test_a_new_folder_and_one_that_has_only_its_log_are_taken(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    asked.output_dir.mkdir()
    for name in ("train.log", "slurm-17.out", ".gitignore"):
        (asked.output_dir / name).touch()
    train(asked, ALONE)
    assert is_run(asked.output_dir)


def test_each_preset_is_taken_for_the_model_of_its_family(packed: Packed) -> None:
    from bucketline.loader.mixture import open_shares

    own = {"dit": "dit", "pixart_alpha": "pixart", "pixart_sigma": "pixart"}.get(packed.family, packed.family)
    asked = packed.config(packed.store.parent / "unused", files=(own,))
    refuse(RULES, Facts(config=asked, start=Start(checkpoint=None, state=None), shares=open_shares(asked.store)))


@pytest.mark.parametrize(
    ("files", "begun_by"),
    [
        ([], "--model {}"),
        (
            ["lora/pytorch_lora_weights.safetensors", "lora_ema/pytorch_lora_weights.safetensors"],
            "--lora-from {}/lora_ema/pytorch_lora_weights.safetensors",
        ),
        (["lora_ema/adapter_model.safetensors"], "--lora-from {}/lora_ema/adapter_model.safetensors"),
    ],
)
def test_another_optimizer_begins_from_the_files_that_a_checkpoint_has(tmp_path: Path, files: list[str], begun_by: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    empty: dict[str, Any] = dict.fromkeys(RunState.__dataclass_fields__)
    state = RunState(**{**empty, "config": {"optimizer": "adamw"}, "steps_done": 1})
    facts = Facts(config=config(tmp_path, optimizer="muon"), start=Start(checkpoint=tmp_path, state=state))
    with contextlib.suppress(IndexError), pytest.raises(UsageError) as refused:
        refuse(RULES, facts)
    assert f"start a new run from its weights, with {begun_by.format(tmp_path)}, in another" in str(refused.value)
