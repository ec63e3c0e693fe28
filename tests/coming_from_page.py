"""docs/coming-from.md, made of `bucketline/coming_from.toml`.

python -m tests.coming_from_page --write
"""

from __future__ import annotations

import sys

from bucketline.coming_from import OWNERS, words
from tests.commands import ROOT

PAGE = ROOT / "docs" / "coming-from.md"
HEAD = """# Coming from other programs

What diffusers' scripts, kohya's sd-scripts, OneTrainer, ai-toolkit, SimpleTuner, img2dataset and torchrun call their options,
and what they are here. A command line with one of theirs is answered with ours. Defaults that differ from diffusers' scripts
are in [training](diffusers-scripts.md). `python -m tests.coming_from_page --write` makes this page of
`bucketline/coming_from.toml`.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for program, kinds in words().items():
        parts.append(f"\n## `{OWNERS[program]}`\n\n| here | there |\n|---|---|\n")
        for kind, table in kinds.items():
            where = {"run_file": " (run file)", "data_set_file": " (data set file)"}.get(kind, "")
            for ours, others in table.items():
                here = ours if kind == "answers" else f"`{ours}`{where}"
                parts.append(f"| {here} | {', '.join(f'`--{one}`' for one in others)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
