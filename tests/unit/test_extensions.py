"""Parts of other packages are found by their entry points, and what is wrong with one is said by its package's name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bucketline import extensions
from bucketline.errors import UsageError
from bucketline.extensions import Extensions

PARTS: Extensions[int] = Extensions(
    "a number called", "bucketline.numbers", {"zero": "sys:maxunicode"}, lambda found: isinstance(found, int)
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """Install a package of one module, whose entry point has a name and is the module's PART."""
    monkeypatch.syspath_prepend(tmp_path)
    extensions._declared.cache_clear()
    made = list[str]()

    def install(package: str, name: str, source: str) -> None:
        module = f"part_of_{package}"
        made.append(module)
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[bucketline.numbers]\n{name} = {module}:PART\n", encoding="utf-8")

    yield install
    extensions._declared.cache_clear()
    for module in made:
        sys.modules.pop(module, None)


def test_ours_come_first_and_others_by_name(install: Callable[[str, str, str], None]) -> None:
    install("later", "two", "PART = 2")
    install("sooner", "one", "PART = 1")
    assert list(PARTS) == ["zero", "one", "two"]
    assert len(PARTS) == 3
    assert (PARTS["zero"], PARTS["one"], PARTS["two"]) == (sys.maxunicode, 1, 2)


def test_what_nobody_has_is_not_there(install: Callable[[str, str, str], None]) -> None:
    install("some", "one", "PART = 1")
    assert "three" not in PARTS
    with pytest.raises(KeyError):
        PARTS["three"]


@pytest.mark.parametrize("name", ["zero", "one"])
def test_a_name_that_two_packages_have_is_refused_with_both(install: Callable[[str, str, str], None], name: str) -> None:
    install("first", name, "PART = 1")
    if name == "one":
        install("second", name, "PART = 2")
    with pytest.raises(UsageError, match=r" and .* all have a number called .*, expected one; uninstall") as raised:
        PARTS[name]
    assert {word for word in ("bucketline", "first 1.0", "second 1.0") if word in str(raised.value)} == (
        {"bucketline", "first 1.0"} if name == "zero" else {"first 1.0", "second 1.0"}
    )


def test_a_package_that_cannot_be_imported_is_named_with_its_error(install: Callable[[str, str, str], None]) -> None:
    install("broken", "one", "import nothing_of_that_name\nPART = 1")
    with pytest.raises(UsageError, match=r"of broken 1\.0 cannot be imported \(ModuleNotFoundError: No module named"):
        PARTS["one"]


def test_a_part_of_another_kind_is_refused(install: Callable[[str, str, str], None]) -> None:
    install("other", "one", "PART = 'one'")
    with pytest.raises(UsageError, match=r"of other 1\.0 is a str, which cannot be one"):
        PARTS["one"]
