"""The message of a command whose extra is not installed: one line with the extra's name, and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bucketline.errors import MissingExtraError, UsageError
from bucketline.extensions import extra_named
from tests.commands import spawn
from tests.kit import make_store, samples_of
from tests.unit.train.tiny_run import make_training_store

WITHOUT = "import sys\nfor name in {libraries!r}: sys.modules[name] = None\n"
RUN = "import importlib\nsys.exit(importlib.import_module({module!r}).main({arguments!r}))\n"


def without(libraries: list[str], module: str, arguments: list[object]) -> tuple[int, list[str]]:
    """Call a command's `main` where some libraries cannot be imported; give its exit code and the lines on stderr."""
    program = WITHOUT.format(libraries=libraries) + RUN.format(module=module, arguments=[str(a) for a in arguments])
    done = spawn([sys.executable, "-c", program])
    return done.code, done.err.splitlines()


@pytest.mark.parametrize("library", ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("PIL", "diffusers"))])
def test_pack_without_a_library_of_its_extra_names_the_extra(library: str, source: Path, model: Path, tmp_path: Path) -> None:
    asked = ["pack", source, tmp_path / "a.store", "--model", model, "--grid", "16x24", "--min-size-px", "8"]
    code, lines = without([library], "bucketline.ingest.cli", asked)
    expected = (
        f"error: ingest needs {library}, which is not installed. Install the extra ingest: pip install 'bucketline[ingest]'"
    )
    assert (code, lines) == (2, [expected])


def test_packing_on_ray_without_it_names_the_extra(source: Path, model: Path, tmp_path: Path) -> None:
    asked = ["pack", source, tmp_path / "a.store", "--model", model, "--engine", "ray"]
    code, lines = without(["ray"], "bucketline.ingest.cli", asked)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].endswith("needs ray, which is not installed. Install the extra ray: pip install 'bucketline[ray]'")


@pytest.mark.slow
def test_scan_serve_and_train_name_their_extras(source: Path, tmp_path: Path) -> None:
    code, lines = without(["PIL"], "bucketline.ingest.cli", ["scan", source])
    assert (code, lines) == (2, [lines[0]])
    assert lines[0].endswith("pip install 'bucketline[ingest]'")
    make_training_store(tmp_path / "a.store")
    code, lines = without(["torch"], "bucketline.loader.cli", ["serve", tmp_path / "a.store", "--at", tmp_path / "s"])
    assert (code, lines) == (2, [lines[0]])
    assert lines[0].endswith("pip install 'bucketline[loader]'")
    (tmp_path / "model" / "unet").mkdir(parents=True)
    (tmp_path / "model" / "unet" / "config.json").touch()
    asked = [
        "--store",
        tmp_path / "a.store",
        "--model",
        tmp_path / "model",
        "--output-dir",
        tmp_path / "run",
        "--max-steps",
        "1",
    ]
    code, lines = without(["accelerate"], "bucketline.train.main", [*asked, "--batch", "1"])
    assert (code, lines) == (2, [lines[0]])
    assert lines[0].endswith("pip install 'bucketline[train]'")


@pytest.mark.parametrize("library", ["PIL", "jinja2"])
def test_a_page_without_a_library_of_its_extra_names_the_extra(library: str, tmp_path: Path) -> None:
    make_store(tmp_path / "s", samples_of({"train/64x64": 2}))
    code, lines = without([library], "bucketline.store.cli", ["report", tmp_path / "s", "-o", tmp_path / "r.html"])
    expected = (
        f"error: report needs {library}, which is not installed. Install the extra report: pip install 'bucketline[report]'"
    )
    assert (code, lines) == (2, [expected])


def test_the_loader_without_torch_is_an_import_error_that_names_the_extra() -> None:
    done = spawn([sys.executable, "-c", WITHOUT.format(libraries=["torch"]) + "from bucketline.loader import Loader"])
    assert done.code == 1
    assert done.err.splitlines()[-1].endswith(
        "loader needs torch, which is not installed. Install the extra loader: pip install 'bucketline[loader]'"
    )


def test_the_error_is_both_an_import_error_and_a_usage_error() -> None:
    with pytest.raises(MissingExtraError, match=r"bucketline\[ingest\]") as caught, extra_named("ingest"):
        raise ModuleNotFoundError("no webdataset", name="webdataset.writer")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("command", ["train", "ingest"])
def test_a_library_of_several_extras_is_told_with_the_smallest_one(command: str) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'bucketline\[quantised\]'"), extra_named(command):
        raise ModuleNotFoundError("no torchao", name="torchao.float8")


def test_a_library_of_no_extra_stays_the_error_that_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="no such"), extra_named("store"):
        raise ModuleNotFoundError("no such", name="bucketline.no_such")
