"""The metadata of the package: one version, extras that are what each folder imports, groups that are not published."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata

import pytest

import bucketline
from bucketline.extensions import EXTRAS
from tests.commands import ROOT, spawn
from tests.packaging.minimums import minimums

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
    """Return the import names of a list of requirements."""
    names = [re.split(r"[>=\[; ]", requirement)[0] for requirement in requirements]
    return {IMPORT_NAMES.get(name, name) for name in names}


def imported(folder: str) -> set[str]:
    """Return the libraries that a folder's code imports, but for the standard library's and our own."""
    if folder == "bucketline":  # these are imported only by folders whose extra has torch, or diffusers as well
        with_torch = (
            "torch_setup.py",
            "torch_setup.py",
            "model_file.py",
            "model_file.py",
            "quantised_linear.py",
            "torch_dtypes.py",
        )
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


def test_the_description_of_the_package_has_no_link_into_the_checkout() -> None:
    description = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    assert "pip install 'bucketline[all]'" in description
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert not [link for link in links if not link.startswith("https://")]
    assert PROJECT["authors"]
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]


def test_another_system_is_refused_in_words() -> None:
    done = spawn([sys.executable, "-c", "import sys; sys.platform = 'darwin'; import bucketline.store"])
    assert done.code == 1
    assert "ImportError: bucketline runs on Linux only, and this is darwin" in done.err


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
