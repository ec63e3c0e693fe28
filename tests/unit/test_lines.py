"""The output of `make lines`."""

from __future__ import annotations

import pytest

from tests import lines
from tests.commands import ROOT


def test_core_and_rooms_of_each_package_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines.main()
    packages = capsys.readouterr().out.partition("\n\n")[0]
    printed = {line.split()[0]: line.split() for line in packages.splitlines()[1:]}
    assert list(printed) == list(lines.ROOMS)
    for package, rooms in lines.ROOMS.items():
        total, core = map(int, printed[package][1:3])
        files = [path for path in (ROOT / package).rglob("*.py") if not path.is_symlink()]
        assert total == sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        assert (core < total) == bool(rooms)


def test_no_line_is_counted_in_two_rooms() -> None:
    for package, rooms in lines.ROOMS.items():
        places = [ROOT / package / name for names in rooms.values() for name in names]
        assert not [(one, other) for one in places for other in places if one in other.parents or places.count(one) > 1]


def test_a_room_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lines.ROOMS, "store", {"export": ("moved_away",)})
    with pytest.raises(ValueError, match=r"store/moved_away has no line of Python; correct ROOMS in tests/lines\.py"):
        lines.count()


def test_what_has_outgrown_its_budget_is_named_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lines.budgeted(lines.count())
    assert found.keys() == lines.BUDGETS.keys()
    assert found["product"] == sum(found[package] for package in lines.PRODUCT)
    monkeypatch.setattr(lines, "BUDGETS", {name: lines.Budget(count) for name, count in found.items()})
    assert lines.main() == 0
    assert "too many" not in capsys.readouterr().out
    monkeypatch.setitem(lines.BUDGETS, lines.TRAINER, lines.Budget(found[lines.TRAINER] - 3))
    assert lines.main() == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "too many" in line)
    assert line.startswith(lines.TRAINER)
    assert "  3 too many" in line
