"""The page of ten runs: its table counts what its blocks have, and none needs more options than before."""

from __future__ import annotations

import re

from tests.commands import ROOT


def test_the_table_counts_the_options_of_each_run() -> None:
    page = (ROOT / "docs" / "ten-runs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\(#.*?\) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    found = []
    for section in page.split("\n## ")[1:]:
        blocks = (re.search(rf"```{language}\n(.*?)```", section, re.DOTALL) for language in ("text", "sh"))
        before, now = (len(re.findall(r"(?<= )--[a-z]", block[1])) for block in blocks if block)
        found.append((section.partition("\n")[0].lower(), before, now))
    assert found == [(name.lower(), int(before), int(now)) for name, before, now in rows]
    assert len(found) == 10
    assert all(now <= before for name, before, now in found if name != "export to a pipeline")
