"""The output of `make lines`."""

from __future__ import annotations

import pytest

from tests import lines
from tests.commands import ROOT


def test_core_and_rooms_of_each_package_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines.main()
    printed = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:]}
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
