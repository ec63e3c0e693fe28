"""The table of docs/families.md: each family's file, what a sample takes, and the checks against its pipeline that passed.

python -m tests.families_page            print it, and fail if a check failed
python -m tests.families_page --write    also put it into the page
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch

from bucketline.families.family import Family, Padding, StoreFacts
from bucketline.families.registry import FAMILIES, family_of_pipeline
from bucketline.train.noise import FlowSchedule, load_schedule
from tests.commands import ROOT, spawn
from tests.family_models import FORMS

PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- python -m tests.families_page --write -->", "<!-- end -->"
SIDE_PX = 1024
NUM_TOKENS = 100
ITEM_BYTES = 2  # F16
CPU, MIDDLE = torch.device("cpu"), torch.tensor([499])

# What the transformer's class does not say by its defaults. Sources: the configurations published with SD 1.5, SDXL, PixArt,
# DiT-XL/2, FLUX.2 klein 4B, Lumina-Image 2.0 and HiDream-I1 (a T5's width, and 32 layers of a Llama's); a VAE halves three
# times but where it is said.
TOKEN_WIDTHS = {
    "sd": 768,
    "sdxl": 2048,
    "pixart_alpha": 4096,
    "pixart_sigma": 4096,
    "flux2_klein": 3 * 2560,
    "lumina2": 2304,
    "hidream_image": 4096 + 32 * 4096,
}
POOLED_WIDTHS = {"sdxl": 1280}
CHANNELS = {"pixart_alpha": 4, "pixart_sigma": 4, "class_labels": 4, "hidream_image": 16}
PX_PER_LATENT = {"sana": 32, "qwenimage21": 16}


def made_of(family: type[Family]) -> Family:
    """Return a family's model by the defaults of its class."""
    import diffusers

    parameters = inspect.signature(getattr(diffusers, family.model_class).__init__).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    px = PX_PER_LATENT.get(family.name, 8)
    return family(defaults, StoreFacts(latent_channels=0, text={}, px_per_latent=px))


def noise_of(family: type[Family]) -> str:
    """Return the noise of the middle timestep at two sizes; nothing if it is not a flow's."""
    made = made_of(family)
    schedule = load_schedule(
        Path("no model"), CPU, patch_size=made.patch_size, published=family.scheduler, levels=made.noise_levels({})
    )
    if not isinstance(schedule, FlowSchedule):
        return ""
    sides = (side // made.store.px_per_latent for side in (SIDE_PX // 2, SIDE_PX))
    return ", ".join(f"{float(schedule.at(MIDDLE, side, side).noise):.2f}" for side in sides)


def sizes_of(family: type[Family]) -> tuple[int, int, int]:
    """Return the bytes of a sample's latent, of its caption's tokens, and of what else a caption has, in F16."""
    made = made_of(family)
    channels = CHANNELS.get(family.name) or made.number("in_channels") // family.packing**2
    side = SIDE_PX // made.store.px_per_latent
    latent = channels * side * side * ITEM_BYTES
    if not family.parts:
        return latent, 0, 8  # a class, I64
    width = TOKEN_WIDTHS.get(family.name) or getattr(made, "token_width", 0) or made.number(str(made.token_field))
    tokens = NUM_TOKENS if family.padding is Padding.VALID else family.usual_tokens
    pooled = POOLED_WIDTHS.get(family.name, made.pooled_width)
    assert width > 0, family.name
    return latent, tokens * width * ITEM_BYTES, pooled * ITEM_BYTES


def passed_checks() -> dict[str, list[bool]]:
    """Return whether each check of a form of a family passed, by the family's name."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        spawn([sys.executable, "-m", "pytest", "-q", ROOT / "tests" / "unit" / "families", "--junitxml", found])
        cases = list(ET.parse(found).iter("testcase"))
    checks: dict[str, list[bool]] = defaultdict(list)
    for case in cases:
        inside = str(case.get("name")).partition("[")[2].rstrip("]")
        form = max((name for name in FORMS if inside == name or inside.startswith(f"{name}-")), key=len, default=None)
        if form is not None:
            family: Any = family_of_pipeline(FORMS[form].pipeline)
            checks[family.name].append(not len(case))
    return checks


def table(checks: dict[str, list[bool]]) -> list[str]:
    """Return the lines of the table."""
    columns = ("family", "pipeline", "file", "lines", "latent, KiB", "caption, KiB", "tokens stored", "noise, 512 and 1024 px")
    lines = [f"| {' | '.join(columns)} | checks passed |", "|---" * (len(columns) + 1) + "|"]
    for family in sorted(FAMILIES, key=lambda one: one.name):
        stem = family.__module__.rpartition(".")[2]
        num_lines = len((ROOT / "bucketline" / "families" / f"{stem}.py").read_text(encoding="utf-8").splitlines())
        latent, tokens, pooled = sizes_of(family)
        stored = "its own" if family.padding is Padding.VALID else f"all {family.usual_tokens}"
        own = checks.get(family.name, [])
        lines.append(
            f"| {family.name} | {family.pipelines[0]} | {stem}.py | {num_lines} | {latent / 1024:,.0f} | "
            f"{(tokens + pooled) / 1024:,.1f} | {stored if family.parts else 'a class'} | {noise_of(family)} | "
            f"{f'{sum(own)} of {len(own)}' if own else 'tests of training'} |"
        )
    return lines


def main() -> None:
    """Print the table; write it into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/families.md")
    asked = parser.parse_args()
    checks = passed_checks()
    lines = table(checks)
    print("\n".join(lines))
    if asked.write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, *lines, END]) + rest.partition(END)[2], encoding="utf-8")
    assert all(all(one) for one in checks.values()), "a check failed"


if __name__ == "__main__":
    main()
