"""Exports along a run, and their upload by huggingface_hub's own client to a server on this machine."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from huggingface_hub import constants
from safetensors.torch import load_file

from bucketline.errors import UsageError
from bucketline.train.commands.export_model import ExportModel
from bucketline.train.config import Objective
from bucketline.train.noise import load_schedule
from bucketline.train.outputs.hub import HubUploads
from bucketline.train.run import train
from tests.hub_server import TOKEN, Hub, running_hub
from tests.unit.train.tiny_run import ALONE, SCHEDULER, config

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's of httpx
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub whose token this process has."""
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server knows the older way to upload large files
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_exports_are_the_averages_of_their_steps_in_the_dtype_and_all_stay(folder: Path) -> None:
    asked = config(folder, export_every=3, save_every="3", keep=9, max_steps=7)
    train(asked, ALONE)
    assert steps_of(asked.output_dir / "exports") == [3, 6, 7]
    for step in (3, 6, 7):
        export = asked.output_dir / "exports" / f"step-{step:08d}"
        saved = load_file(asked.output_dir / "checkpoints" / export.name / "unet_ema" / FILE)
        found = load_file(export / "unet" / FILE)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name].bfloat16()) for name in saved)
        opened: Any = UNet2DConditionModel
        assert opened.from_pretrained(export, subfolder="unet").config.in_channels == 2
        card = (export / "README.md").read_text(encoding="utf-8")
        assert "moving average of the weights, in bf16" in card
        assert 'subfolder="unet"' in card


def test_an_export_without_a_checkpoint_or_an_average_has_the_last_weights(folder: Path) -> None:
    asked = config(folder, export_every=3, max_steps=6, export_dtype="fp32", ema="off")
    train(asked, ALONE)
    assert steps_of(asked.output_dir / "checkpoints") == [6]
    assert steps_of(asked.output_dir / "exports") == [3, 6]
    found = load_file(asked.output_dir / "exports" / "step-00000006" / "unet" / FILE)
    saved = load_file(asked.output_dir / "checkpoints" / "step-00000006" / "unet" / FILE)
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_checkpoint_is_exported_as_a_folder_later(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = config(folder, max_steps=2, output_dir=folder / "whole", export_every=2)
    adapters = replace(whole, output_dir=folder / "adapters", lora_rank=2)
    for asked, inner in ((whole, "unet"), (adapters, ".")):
        train(asked, ALONE)
        output = folder / f"{asked.output_dir.name} in bf16"
        assert ExportModel(folder=asked.output_dir, output=output, dtype="bf16", json=True).run() == 0
        along = asked.output_dir / "exports" / "step-00000002"
        names = {path.relative_to(along) for path in along.rglob("*") if path.name != "README.md"}
        assert {path.relative_to(output) for path in output.rglob("*")} == names
        for path in (along / inner).glob("*.safetensors"):
            own, found = load_file(path), load_file(output / inner / path.name)
            assert own.keys() == found.keys()
            assert all(torch.equal(own[name], found[name]) for name in own)
        num_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
        assert json.loads(capsys.readouterr().out) == {"output": str(output), "num_bytes": num_bytes}
    with pytest.raises(UsageError, match=r"--like is .*, and it is for one file"):
        ExportModel(folder=whole.output_dir, output=folder / "new", like=Path("a.safetensors")).run()
    with pytest.raises(UsageError, match="exists; name a folder that does not"):
        ExportModel(folder=whole.output_dir, output=folder / "whole").run()


def test_a_finished_run_is_on_the_hub_and_a_resumed_one_adds_a_commit(folder: Path, hub: Hub) -> None:
    asked = config(folder, max_steps=4, lora_rank=2, push_to_hub="me/photos", export_every=2)
    train(asked, ALONE)
    assert hub.is_private == {"me/photos": True}
    assert hub.commits == {"me/photos": ["4 steps"]}
    export = asked.output_dir / "exports" / "step-00000004"
    names = {path.name for path in export.iterdir()}
    assert names == {"README.md", "pytorch_lora_weights.safetensors", "kohya_lora.safetensors"}
    assert hub.files["me/photos"] == {name: (export / name).read_bytes() for name in names}
    train(replace(asked, max_steps=6, resume=True), ALONE)
    assert hub.commits["me/photos"] == ["4 steps", "6 steps"]


def test_training_goes_on_from_a_checkpoint_or_an_export_with_the_objective_of_its_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = config(folder, objective=Objective.V_PREDICTION, max_steps=1, export_every=1, ema="off")
    saved = train(asked, ALONE).checkpoint
    export, exported = asked.output_dir / "exports" / saved.name, folder / "exported"
    ExportModel(folder=asked.output_dir, output=exported, last=True).run()
    capsys.readouterr()
    for start in (saved, export, exported):
        scheduler: Any = DDPMScheduler
        assert scheduler.from_pretrained(start, subfolder="scheduler").config.prediction_type == "v_prediction"
        assert load_schedule(start, torch.device("cpu")).objective is Objective.V_PREDICTION
        schedule = json.loads((start / "scheduler" / "scheduler_config.json").read_bytes())
        assert schedule == {**SCHEDULER, "prediction_type": "v_prediction"}
    train(replace(asked, model=saved, objective=None, output_dir=folder / "onward"), ALONE)
    assert "has no scheduler/" not in capsys.readouterr().err
    assert "scheduler/scheduler_config.json" in json.loads((saved / "digests.json").read_bytes())


def test_others_may_read_the_files_of_a_run_that_the_umask_lets_them_read(folder: Path) -> None:
    (probe := folder / "probe").touch()
    asked = config(folder, lora_rank=2, max_steps=1, export_every=1)
    train(asked, ALONE)
    assert ExportModel(folder=asked.output_dir, output=folder / "exported").run() == 0
    files = [path for place in (asked.output_dir, folder / "exported") for path in place.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) == 9
    assert {path.stat().st_mode for path in files} == {probe.stat().st_mode}


def test_a_hub_that_refuses_costs_warnings_and_no_run(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    asked = config(folder, max_steps=2, push_to_hub="me/photos")
    assert train(asked, ALONE).steps_done == 2
    assert json.loads((asked.output_dir / "status.json").read_bytes())["state"] == "done"
    _, *said = warnings_in(caplog)  # the first is of the model without weights
    export = asked.output_dir / "exports" / "step-00000002"
    assert len(said) == 2
    assert said[0].startswith("--push-to-hub me/photos: the repository cannot be made or reached: HfHubHTTPError: Client error")
    assert said[1] == f"{export} is not uploaded: hf upload me/photos {export} does it"
    assert not hub.files


def test_without_a_token_nothing_is_tried_and_one_line_says_how_to_have_one(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # a request would fail, and be reported
    (tmp_path / "README.md").write_text("# a card", encoding="utf-8")
    said: list[str] = []
    uploads = HubUploads("me/photos", said.append)
    uploads.push(tmp_path, "1 step")
    uploads.finish(lambda: False)
    (first, last) = warnings_in(caplog)
    assert "there is no token" in first
    assert "`hf auth login` or HF_TOKEN" in first
    assert last == f"{tmp_path} is not uploaded: hf upload me/photos {tmp_path} does it"
    assert not said


def test_a_signal_ends_the_wait_for_an_upload(tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.answers_commits.clear()
    (tmp_path / "README.md").write_text("# a card", encoding="utf-8")
    uploads = HubUploads("me/slow", lambda _: None)
    uploads.push(tmp_path, "1 step")
    stopping = threading.Event()
    asked_for = threading.Timer(0.3, stopping.set)
    asked_for.start()
    uploads.finish(stopping.is_set)
    assert "is not uploaded" in caplog.text
    hub.answers_commits.set()
    wait([upload for _, upload in uploads._uploads], 30)
    assert hub.commits["me/slow"] == ["1 step"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_to_hub": "https://me:secret@host/a"}, "--push-to-hub is 'https://host/a', expected the name of a repository"),
        ({"push_to_hub": "a/b/c"}, "--push-to-hub is 'a/b/c', expected the name of a repository"),
        ({"export_every": 0}, "--export-every is 0"),
    ],
)
def test_options_of_exports_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(tmp_path, **options)
