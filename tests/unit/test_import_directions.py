"""The directions of imports that the design promises, read off every file's syntax tree."""

from __future__ import annotations

import ast
import functools
import sys
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.commands import ROOT, spawn

if TYPE_CHECKING:
    from pathlib import Path

ROOMS = ("bucketline", "store", "ingest", "loader", "train", "bench")
ENTRY_POINTS = ("cli.py", "main.py", "__main__.py", "command_line.py")
REACHED_BY = "store/remote/urls.py"  # the object store's client takes its endpoint from the environment: it is part of a place
CONSOLE = ("cli.py", "config.py", "command_line.py", "progress.py", "main.py", "log.py", "run_file.py")
CONSOLE_FOLDER = "commands"  # one command a file


def files(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found, f"no file in {room}/"
    return found


class Found(NamedTuple):
    """Imports and names of a file, off its syntax tree."""

    imported: list[str]  # every module, inside functions and under TYPE_CHECKING too
    environment: list[int]  # the lines that read it
    torchruns: list[int]  # the lines with names that torchrun sets


@functools.cache
def found_in(path: Path) -> Found:
    found = Found([], [], [])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                found.imported.extend(alias.name for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, f"{path} imports relatively, which `torchrun train/main.py` cannot"
                found.imported.append(str(node.module))
                found.imported.extend(f"{node.module}.{alias.name}" for alias in node.names)
            case ast.Attribute(attr="environ" | "environb" | "getenv" | "getenvb"):
                found.environment.append(node.lineno)
            case ast.Constant(value="RANK" | "WORLD_SIZE" | "LOCAL_RANK"):
                found.torchruns.append(node.lineno)
    return found


def imported(path: Path) -> list[str]:
    return found_in(path).imported


def offenders(room: str, *forbidden: str, but: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {module}"
        for path in files(room)
        if path.name not in but
        for module in imported(path)
        if any(module == name or module.startswith(f"{name}.") for name in forbidden)
    ]


def test_the_store_knows_bytes_and_nothing_above_it() -> None:
    assert not offenders("store", "PIL", "torch", "diffusers", "transformers", "accelerate")
    assert not offenders("store", "bucketline.ingest", "bucketline.loader", "bucketline.train", "bucketline.bench")


def test_the_store_needs_only_the_libraries_that_the_design_names() -> None:
    allowed = {"numpy", "lmdb", "msgpack", "obstore", "safetensors", "xxhash", "bucketline", "cyclopts", "rich"}
    found = {module.partition(".")[0] for path in files("store") for module in imported(path)}
    assert not found - allowed - set(sys.stdlib_module_names)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in (*([] if parts[0] == "bucketline" else ["bucketline"]), *parts) if part != "__init__")


def test_neither_files_nor_folders_import_each_other_in_a_circle() -> None:
    """Seen from each folder: what its files and subfolders import of each other, under TYPE_CHECKING too."""
    modules = {module_of(path): path for room in ROOMS for path in files(room)}
    imports = [(module, other) for module, path in modules.items() for other in imported(path)]
    for folder in {module.rpartition(".")[0] for module in modules if "." in module}:
        inside = f"{folder}."
        parts: dict[str, set[str]] = {
            module.removeprefix(inside).partition(".")[0]: set() for module in modules if module.startswith(inside)
        }
        for module, other in imports:
            if module.startswith(inside) and other.startswith(inside):
                part, needed = (name.removeprefix(inside).partition(".")[0] for name in (module, other))
                parts[part] |= {needed} & (parts.keys() - {part})
        try:
            TopologicalSorter(parts).prepare()
        except CycleError as error:
            pytest.fail(f"{folder}: {' imports '.join(reversed(error.args[1]))}")


def test_ingest_and_loader_meet_in_the_store_alone() -> None:
    assert not offenders("ingest", "bucketline.loader", "bucketline.train")
    assert not offenders("loader", "bucketline.ingest", "bucketline.train")


def test_diffusers_and_transformers_are_imported_by_the_encoders_and_the_trainer_alone() -> None:
    """Both use `model_file.py`, and the families, which ask their pipelines."""
    may = ("ingest/encoders/", "bucketline/model_file.py", "bucketline/families/")
    for room in ("bucketline", "store", "loader", "ingest"):
        assert not [line for line in offenders(room, "diffusers", "transformers") if not line.startswith(may)]


def test_accelerate_is_imported_by_the_trainer_alone() -> None:
    for room in ("bucketline", "store", "ingest", "loader"):
        assert not offenders(room, "accelerate")


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "bench"])
def test_nobody_imports_benchmarks_or_tests(room: str) -> None:
    assert not offenders(room, "bucketline.bench", "bench", "tests")


@pytest.mark.parametrize("room", ["store", "ingest", "loader", "train"])
def test_command_lines_stay_in_the_files_that_are_for_them(room: str) -> None:
    found = offenders(room, "cyclopts", "rich", but=CONSOLE)
    assert not [line for line in found if not line.startswith(f"{room}/{CONSOLE_FOLDER}/")]


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "bench"])
def test_only_entry_points_read_the_environment(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files(room)
        if path.name not in ENTRY_POINTS and path.parent.name != CONSOLE_FOLDER and path != ROOT / REACHED_BY
        for line in found_in(path).environment
    ]
    assert not found


@pytest.mark.parametrize("room", ["bucketline", "store", "ingest", "loader", "train"])
def test_the_names_that_torchrun_sets_appear_in_entry_points_alone(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files(room)
        if path.name not in ENTRY_POINTS
        for line in found_in(path).torchruns
    ]
    assert not found


def test_no_file_of_the_trainer_has_the_name_of_a_standard_module() -> None:
    """`torchrun train/main.py` puts `train/` first on the path."""
    names = {path.stem for path in (ROOT / "train").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not names & set(sys.stdlib_module_names)
    assert not names & {"torch", "numpy", "diffusers", "transformers", "accelerate", "safetensors", "matplotlib", "PIL"}


def test_the_trainers_entry_point_defines_nothing_but_main() -> None:
    body = ast.parse((ROOT / "train" / "main.py").read_text(encoding="utf-8")).body
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)]
    assert defined == ["main"]


@pytest.mark.parametrize(
    "module", ["bucketline.store", "bucketline.loader", "bucketline.loader.plan.plan", "bucketline.ingest"]
)
def test_a_package_is_imported_without_paying_for_torch(module: str) -> None:
    heavy = "{'torch', 'diffusers', 'transformers', 'PIL', 'cyclopts', 'rich'}"
    ran = spawn([sys.executable, "-c", f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"])
    assert ran.out == "[]\n", ran.err


def test_a_store_on_a_disk_is_opened_and_written_without_the_clients_of_object_storage() -> None:
    clients = {"obstore", "ssl"}
    run = f"import sys; from bucketline.store import Store, StoreWriter; print(sorted({clients} & set(sys.modules)))"
    assert spawn([sys.executable, "-c", run]).out == "[]\n"


@pytest.mark.parametrize("room", ["store", "loader"])
def test_every_public_name_can_be_imported(room: str) -> None:
    import importlib

    package = importlib.import_module(f"bucketline.{room}")
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = package.nothing_of_the_kind
