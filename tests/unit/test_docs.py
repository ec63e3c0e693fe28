"""Documents name what is there: files, links, commands, options and public names, and every command is documented."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

import pytest

from bucketline import errors
from bucketline.options import options_of
from tests.commands import ROOT
from tests.every_command import COMMANDS_OF

if TYPE_CHECKING:
    from pathlib import Path

GENERATED = ("RESULTS.md", "faults.md")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "store/FORMAT.md", "bucketline/README.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in GENERATED),
]
OTHERS = {"--help", "--long", "--rank", "--against", "--only"}  # of all commands, of tests here, of diffusers
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)?")


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    return [" ".join(one.split()) for one in (*lines, *re.findall(r"`([^`]+)`", without_code(page)))]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", without_code(page))
    for path, _, anchor in (link.partition("#") for link in links):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.name)
def test_a_program_on_a_page_is_the_file_that_tests_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path, code in re.findall(r"^<!-- (\S+\.py) -->\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert (ROOT / path).read_text(encoding="utf-8") == code, f"copy {path} into {page.name}"


def test_the_index_and_the_site_list_every_page() -> None:
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    listed = set(re.findall(r"\]\(([^)#]+\.md)\)", (docs / "index.md").read_text(encoding="utf-8")))
    assert listed == pages - {"index.md"}
    assert set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))) == pages


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "coming-from"], ids=lambda one: one.name)
def test_commands_and_options_of_a_page_are_there(page: Path) -> None:
    everywhere = {word for command in COMMANDS_OF.values() for one in options_of(command) for word in one.names} | OTHERS
    for line in code_of(page):
        found = re.match(r"(?:bucketline )?((?:ingest|store|loader) [a-z]+|bucketline (?:train|export-model))\b(?!/)", line)
        if found and not re.match(r"bucketline train (?:memory|presets|report)", line):
            assert found[1] in {*COMMANDS_OF, "store version"}, line
            known = {word for one in options_of(COMMANDS_OF[found[1]]) for word in one.names} | OTHERS
        elif line.startswith("--") and "_" not in line:
            known = everywhere
        else:
            continue
        asked = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", f" {line.partition(' -- ')[0]}"))
        assert asked <= known, (line, asked - known)


def test_every_command_is_documented() -> None:
    text = " ".join(" ".join(code_of(page)) for page in PAGES)
    assert [name for name in COMMANDS_OF if name not in text] == []


def test_files_and_names_of_the_walks_through_the_code_are_there() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for section in re.split(r"^(?=## )", page, flags=re.MULTILINE):
        named = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", section)]
        files = [one for one in named if one.endswith(".py")]
        source = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        for one in set(named) - set(files):
            if NAME.fullmatch(one) and not one.endswith((".json", ".lmdb")) and not (ROOT / one).is_dir():
                last = one.rpartition(".")[2]
                is_there = re.search(rf"^\s*((async )?def|class) {last}\b|^\s*{last}\b.*[:=]", source, re.MULTILINE)
                assert is_there or one in source, f"{one} is in none of {files}"


def test_the_api_page_lists_every_public_name_and_every_error() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    places = [place.rpartition(".") for place in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    listed = {id(getattr(importlib.import_module(module), name)) for module, _, name in places}
    modules = [importlib.import_module(f"bucketline.{name}") for name in ("loader", "store", "ray")]
    assert listed == {id(getattr(module, name)) for module in modules for name in module.__all__}
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", page.partition("## Errors")[2], re.MULTILINE)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.BucketlineError)]
    assert rows == [(kind.__name__, ", ".join(f"`{base.__name__}`" for base in kind.__bases__)) for kind in kinds]
