"""The commands in the README and the help texts, and the demo's comparison of text dtypes, do what they say."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from bucketline.ingest import cli as ingest_cli
from bucketline.ingest.commands.peek import Peek as IngestPeek
from bucketline.ingest.commands.prompts import Prompts
from bucketline.loader.commands.peek import Peek as LoaderPeek
from bucketline.loader.commands.plan import PlanCommand
from bucketline.store import Store
from bucketline.store import cli as store_cli
from bucketline.train import main as trainer
from bucketline.train.config import TrainConfig
from tests.commands import BIN, ROOT, Ran, call, called, spawn
from tests.models import png, write_model
from tests.unit.train.tiny_run import write_unet

EXAMPLES = {
    **{f"ingest {name}": ingest_cli.COMMANDS[name] for name in ("pack", "import", "scan")},
    "ingest prompts": Prompts,
    "ingest peek": IngestPeek,
    **{f"store {name}": command for name, command in store_cli.COMMANDS.items()},
    "loader plan": PlanCommand,
    "loader peek": LoaderPeek,
}


def example_of(command: type) -> list[str]:
    found = re.search(r"^\s*Example: (.+)$", command.__doc__ or "", re.MULTILINE)
    assert found is not None, f"{command.__name__} has no example"
    return shlex.split(found[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for n in range(12):
        place = folder / "photos" / ("coffee" if n % 2 else f"other{n}")
        place.mkdir(parents=True, exist_ok=True)
        (place / ("whole.png" if n == 1 else f"{n}.png")).write_bytes(png(96 + n, 128, seed=n))
        (place / f"{n}.txt").write_text("a cup of coffee\n", encoding="utf-8")
    model = write_model(folder / "stable-diffusion-v1-5", vae_levels=4)
    write_unet(model, sample_size=16, in_channels=4, out_channels=4, cross_attention_dim=8)
    shutil.copytree(model, folder / "sd15")
    return folder


def run_in(folder: Path, arguments: list[str]) -> Ran:
    command, *rest = arguments
    if command != "bucketline":
        with contextlib.chdir(folder):
            return call(command, *rest)
    return spawn(["bash", "-c", f"cd {shlex.quote(str(folder))} && exec {shlex.join([str(BIN / command), *rest])}"])


@pytest.fixture(scope="module")
def packed(folder: Path) -> Ran:
    return run_in(folder, example_of(ingest_cli.COMMANDS["pack"]))


def test_the_example_of_pack_packs(packed: Ran, folder: Path) -> None:
    assert packed.code == 0, packed.err
    assert "12 images found = 12 packed + 0 unchanged + 0 rejected" in packed.out
    assert Store.open(folder / "photos.store").manifest.samples == 12


def test_the_example_of_import_takes_the_latents_next_to_the_images(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "photos", tmp_path / "photos")
    # without the weights of the VAE, which is not the published one: latents are held against the constants
    shutil.copytree(
        folder / "stable-diffusion-v1-5",
        tmp_path / "stable-diffusion-v1-5",
        ignore=lambda at, names: [name for name in names if str(at).endswith("/vae") and name.endswith(".safetensors")],
    )
    random = np.random.default_rng(0)
    for image in (tmp_path / "photos").rglob("*.png"):
        latent = (5.5 * random.standard_normal((4, 12, 16))).astype("f4")
        np.savez(image.with_name(f"{image.stem}_0128x0096_sd.npz"), latents=latent, original_size=[128, 96])
    done = run_in(tmp_path, example_of(ingest_cli.COMMANDS["import"])).done()
    assert "12 samples found = 12 imported + 0 unchanged + 0 rejected" in done.out
    assert Store.open(tmp_path / "imported.store").manifest.samples == 12


ON_A_STORE = ("ingest prompts", "ingest peek", "ingest scan", "loader peek", "loader plan")


@pytest.mark.parametrize("name", [*ON_A_STORE, *(f"store {name}" for name in ("info", "ls", "verify", "get", "export"))])
def test_the_example_of_a_command_on_a_store_runs(name: str, packed: Ran, folder: Path) -> None:
    assert packed.code == 0
    (folder / "prompts.txt").write_text("a red cat\nthe house\n", encoding="utf-8")
    done = run_in(folder, example_of(EXAMPLES[name])).done()
    assert done.out


def test_the_examples_that_change_a_store_run_one_after_the_other(packed: Ran, folder: Path, tmp_path: Path) -> None:
    assert packed.code == 0
    shutil.copytree(folder / "photos.store", tmp_path / "photos.store")
    shutil.copytree(folder / "photos", tmp_path / "photos" / "more")
    shutil.copytree(folder / "stable-diffusion-v1-5", tmp_path / "stable-diffusion-v1-5")
    pack = example_of(ingest_cli.COMMANDS["pack"])
    run_in(tmp_path, ["more.store" if word == "photos.store" else word for word in pack]).done()
    for name in ("store drop", "store merge", "store compact"):
        done = run_in(tmp_path, example_of(EXAMPLES[name])).done()
        assert done.out
    assert Store.open(tmp_path / "photos.store").manifest.samples == 10
    assert Store.open(tmp_path / "all.store").manifest.samples == 22


@pytest.mark.slow
def test_the_example_of_the_trainer_trains(packed: Ran, folder: Path, quick_runs: None) -> None:
    assert packed.code == 0
    arguments = example_of(TrainConfig)
    assert arguments[:2] == ["bucketline", "train"]
    arguments[arguments.index("--max-steps") + 1] = "1"
    with contextlib.chdir(folder):
        called(trainer.main, *arguments[2:], "--num-images", "1").done()
    assert (folder / arguments[arguments.index("--output-dir") + 1] / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_script_of_the_example_runs_trains(packed: Ran, folder: Path) -> None:
    assert packed.code == 0
    script = ROOT / "examples" / "runs" / "sd-lora.sh"
    needed = ("--store", "photos.store", "--model", "sd15", "--output-dir", "runs/lora", "--max-steps", "1")
    with_ours = f'cd {shlex.quote(str(folder))} && PATH={shlex.quote(str(BIN))}:$PATH exec "$0" "$@"'
    spawn(["bash", "-c", with_ours, script, *needed, "--batch-size", "2", "--num-images", "0"]).done()
    assert (folder / "runs" / "lora" / "checkpoints" / "step-00000001" / "lora_ema").is_dir()


@pytest.mark.slow
def test_the_commands_of_the_readmes_quick_start_run(folder: Path, tmp_path: Path) -> None:
    for name in ("photos", "sd15"):
        shutil.copytree(folder / name, tmp_path / name)
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Why")[0]
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", "")
    lines = [line for line in blocks.splitlines() if re.match(r"(ingest|store|loader|bucketline) ", line)]
    again = re.findall(r"`((?:ingest pack|bucketline train --resume)[^`]*)`", text)
    for line in (*lines, *again):
        short = line.replace("--max-steps 1000", "--max-steps 2 --num-images 1").replace("--max-steps 2000", "--max-steps 3")
        run_in(tmp_path, shlex.split(short)).done()
    assert len(lines) >= 2
    assert len(again) >= 2
    (named,) = re.findall(r"`(runs/mine/\S+_lora.safetensors)`", text)
    assert (tmp_path / named.replace("step-00001000", "step-00000003")).is_file()


@pytest.mark.slow
def test_the_tutorials_commands_print_what_it_says() -> None:
    spawn([sys.executable, ROOT / "demo" / "tutorial.py", "--steps", 40]).done()


def run_page(page: str, number: int = 0) -> dict[str, object]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(blocks[number], page, "exec"), names)
    return names


def test_the_pages_own_writer_runs_as_it_stands_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run_page("docs/your-own-store.md")
    store = Store.open(tmp_path / "mine.store")
    assert (store.manifest.samples, store.sample("cats/a.png")[1].captions) == (1, ("a cat",))


def test_the_page_adds_a_column_to_its_writers_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("docs/your-own-store.md")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/your-own-store.md").read_text(encoding="utf-8"), re.DOTALL)
    (number,) = (n for n, block in enumerate(blocks) if "add_column" in block)
    run_page("docs/your-own-store.md", number)
    run_page("docs/your-own-store.md", number)
    assert capsys.readouterr().out == "1 rows, generation 2\n0 rows, generation 2\n"
    assert Store.open(tmp_path / "mine.store").bucket("train/512x768").read(np.array([0]), "mask", verify=True).all()


def test_the_loader_pages_reading_without_torch_runs_as_it_stands(
    packed: Ran, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packed.code == 0
    monkeypatch.chdir(folder)
    names = run_page("docs/loader.md", -1)
    assert np.isfinite(np.asarray(names["out"], dtype="f4")).all()
    assert "a cup of coffee" in capsys.readouterr().out


@pytest.mark.slow
def test_quantised_text_costs_little_on_real_captions_and_less_in_training(tmp_path: Path) -> None:
    script, out = ROOT / "demo" / "text_dtype.py", tmp_path / "out"
    done = spawn([sys.executable, script, out, "--steps", "4", "--batch-size", "2"]).done()
    relative = {
        name: float(percent)
        for name, percent in re.findall(r"^(F16|BF16|I8|F8_E4M3) +[0-9.]+ +([0-9.]+)%", done.out, re.MULTILINE)
    }
    assert 0 < relative["F16"] < relative["BF16"] < relative["I8"] < 1 < relative["F8_E4M3"] < 4
    f16, i8 = (int(number.replace(",", "")) for number in re.findall(r"(?:F16|I8) ([0-9,]+) bytes", done.out))
    assert i8 < 0.55 * f16
    both = re.search(r"^all: ([0-9.]+) and ([0-9.]+); validation: ([0-9.]+) and ([0-9.]+)", done.out, re.MULTILINE)
    assert both is not None
    first, second, val_first, val_second = map(float, both.groups())
    assert second == pytest.approx(first, rel=0.01)
    assert val_second == pytest.approx(val_first, rel=0.01)
