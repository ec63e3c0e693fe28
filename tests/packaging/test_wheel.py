"""The wheel: every file of the package's folders that git tracks is in it, and nothing else; its types are seen."""

from __future__ import annotations

import ast
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

import bucketline
from bucketline.errors import MissingExtraError, UsageError
from bucketline.extensions import EXTRAS, extra_named
from tests.commands import ROOT, spawn
from tests.kit import make_store, samples_of
from tests.packaging.minimums import minimums
from tests.unit.train.tiny_run import make_training_store

LINKS = sorted(path.name for path in (ROOT / "bucketline").iterdir() if path.is_symlink())


def tracked() -> list[PurePosixPath]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    return [PurePosixPath(name) for name in listed.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of the tracked files, built in a folder of its own: setuptools would take what an earlier build left."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (tree / name).symlink_to((ROOT / name).readlink())
        else:
            (tree / name).write_bytes((ROOT / name).read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    spawn([sys.executable, "-m", "pip", "wheel", *options, tree]).done()
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_the_wheel_has_every_tracked_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    assert {"store", "ingest", "loader", "train"} <= set(LINKS)
    expected = {
        str(PurePosixPath("bucketline", name) if name.parts[0] in LINKS else name)
        for name in tracked()
        if name.parts[0] in {*LINKS, "bucketline"} and not (ROOT / name).is_symlink()
    }
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert any(name.endswith("FORMAT.md") for name in found)


def test_the_wheels_metadata_has_author_system_and_licence_and_only_what_users_install(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    said = email.message_from_string(wheel.read(name).decode("utf-8"))
    assert said["Author"]
    assert said["License-Expression"] == "Apache-2.0"
    assert "Operating System :: POSIX :: Linux" in said.get_all("Classifier", [])
    assert set(said.get_all("Provides-Extra", [])) == {*EXTRAS, "all"}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    assert {"demo", "dev", "docs", "torture"} <= set(groups)
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


# The message of a command whose extra is not installed: one line with the extra's name, and exit code 2.


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
    asked = ["--store", tmp_path / "a.store", "--model", tmp_path / "model", "--output-dir", tmp_path / "run"]
    code, lines = without(["accelerate"], "bucketline.train.main", [*asked, "--max-steps", "1", "--batch-size", "1"])
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


# The metadata of the package: one version, extras that are what each folder imports, groups that are not published.


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
IMPORT_NAMES = {
    "docstring-parser": "docstring_parser",
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
    "pillow": "PIL",
    "pillow-heif": "pillow_heif",
    "pillow-jxl-plugin": "pillow_jxl",
}
FOLDERS = {
    "store": "",
    "ingest": "ingest",
    "loader": "loader",
    "train": "train",
    "bucketline": "",
    "bucketline/pages": "report",
}
BY_DIFFUSERS = {"ingest": {"accelerate"}}  # diffusers needs it to find weights that a single file lacks
# in ingest/, and Ray in bucketline/ too
OF_OTHERS = dict.fromkeys(("torchao", "prodigyopt"), "optimizers")
OF_OTHERS |= {"pyarrow": "tables", "datasets": "datasets", "pillow_heif": "heif", "pillow_jxl": "heif", "ray": "ray"}


def named(requirements: list[str]) -> set[str]:
    names = [re.split(r"[>=\[; ]", requirement)[0] for requirement in requirements]
    return {IMPORT_NAMES.get(name, name) for name in names}


def imported(folder: str) -> set[str]:
    if folder == "bucketline":  # these are imported only by folders whose extra has torch, or diffusers as well
        with_torch = ("torch_setup.py", "model_file.py", "quantised_linear.py", "torch_dtypes.py")
        paths = {path for path in (ROOT / folder).glob("*.py") if path.name not in with_torch}
    else:
        paths = {*(ROOT / folder).rglob("*.py")}
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"bucketline", "typing_extensions"}  # the latter for type checkers only


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_extra_is_what_its_folder_imports_beyond_the_base(folder: str) -> None:
    libraries = imported(folder) - named(PROJECT["dependencies"])
    elsewhere = {library for library in libraries & set(OF_OTHERS) if library in EXTRAS[OF_OTHERS[library]]}
    assert (libraries - elsewhere) | BY_DIFFUSERS.get(folder, set()) == set(EXTRAS.get(FOLDERS[folder], ()))


def test_every_folder_of_the_base_is_imported_by_someone() -> None:
    used = set().union(*(imported(folder) for folder in FOLDERS))
    assert named(PROJECT["dependencies"]) <= used


def test_the_extras_that_errors_name_are_those_of_the_package() -> None:
    published = {name: set(named(lines)) for name, lines in PROJECT["optional-dependencies"].items() if name != "all"}
    assert published == {name: set(libraries) for name, libraries in EXTRAS.items()}


def test_all_has_every_extra_but_what_is_under_another_kind_of_licence_or_a_matter_of_taste() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    inside = set(everything.partition("[")[2].rstrip("]").split(","))
    assert set(EXTRAS) - inside == {"heif", "ray"}


def test_every_requirement_has_one_lower_bound() -> None:
    assert {"lmdb", "cyclopts", "torch", "huggingface-hub", "safetensors"} <= set(minimums())


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT
    assert metadata.version("bucketline") == bucketline.__version__


def test_another_system_is_refused_in_words() -> None:
    spawn([sys.executable, "-c", "import sys; sys.platform = 'darwin'; import bucketline.store"]).fails(
        "ImportError: bucketline runs on Linux only, and this is darwin"
    )


def test_the_lock_has_a_hash_for_everything_and_names_neither_torch_nor_an_index() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=[a-z])", text) if re.match(r"[a-z0-9-]+==", entry)]
    assert len(entries) > 100
    assert not [entry for entry in entries if "--hash=sha256:" not in entry]
    names = {entry.partition("==")[0] for entry in entries}
    assert "torch" not in names
    assert not [name for name in names if name.startswith("nvidia-")]
    assert "://" not in text
    direct = {name for name in minimums() if name != "torch"}
    assert direct <= names


@pytest.mark.slow
def test_a_batch_has_its_type_through_both_installs(tmp_path: Path) -> None:
    ran = spawn([sys.executable, ROOT / "tests/packaging/typed_examples.py", "--mypy-only", "--out", tmp_path / "types"]).done()
    assert [line.partition(";")[0] for line in ran.out.splitlines()] == ["mypy, editable install: right", "mypy, wheel: right"]
