"""The wheel: every file of the package's folders that git tracks is in it, and nothing else."""

from __future__ import annotations

import email
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from bucketline.extensions import EXTRAS
from tests.commands import ROOT, spawn

LINKS = sorted(path.name for path in (ROOT / "bucketline").iterdir() if path.is_symlink())


def tracked() -> list[PurePosixPath]:
    """Return the files that git tracks, and those that it would take."""
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
