"""The core works without its optional rooms: none of its files imports one when it is loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.lines import ROOMS, ROOT

PLACES = {
    f"{package}/{place.removesuffix('.py')}": f"{package}: {room}"
    for package, rooms in ROOMS.items()
    for room, places in rooms.items()
    for place in places
}


def room_of(name: str) -> str | None:
    return next((room for place, room in PLACES.items() if name == place or name.startswith(f"{place}/")), None)


def loaded(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the modules, as paths, that are imported when a file is: not in functions, nor under TYPE_CHECKING."""
    for node in body:
        match node:
            case ast.ImportFrom(module=str(module)):
                path = module.removeprefix("bucketline.").replace(".", "/")
                yield from (path, *(f"{path}/{alias.name}" for alias in node.names))
            case ast.Import():
                yield from (alias.name.removeprefix("bucketline.").replace(".", "/") for alias in node.names)
            case ast.If() if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from loaded([*node.body, *node.orelse])
            case ast.Try():
                handled = [one for part in node.handlers for one in part.body]
                yield from loaded([*node.body, *handled, *node.orelse, *node.finalbody])
            case ast.ClassDef() | ast.With():
                yield from loaded(node.body)


def rooms_loaded_by(path: Path) -> set[str]:
    modules = loaded(ast.parse(path.read_text(encoding="utf-8")).body)
    return {room for module in modules if (room := room_of(module)) is not None}


def test_no_file_of_the_core_imports_a_room_when_it_is_loaded() -> None:
    found = {}
    for package in ROOMS.keys() - {"bench", "tests"}:
        files = sorted((ROOT / package).rglob("*.py"))
        assert files, f"no file in {package}/"
        for path in files:
            name = path.relative_to(ROOT).as_posix()
            if room_of(name.removesuffix(".py")) is None and (rooms := rooms_loaded_by(path)):
                found[name] = rooms
    assert not found


def test_an_import_in_a_function_or_for_types_is_none_when_the_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "if TYPE_CHECKING:\n    from bucketline.store.report import page\n"
        "def f():\n    import bucketline.store.export.exporter\n"
        "class C:\n    from bucketline.ingest import on_ray\n"
    )
    assert rooms_loaded_by(tmp_path / "a.py") == {"ingest: ray"}
