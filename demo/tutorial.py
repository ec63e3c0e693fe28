"""Run the commands of docs/tutorial.md in an empty home, and put what they print, and pictures of what they make, on the page.

    python demo/tutorial.py            compares: exits with 1 if an output has changed, numbers aside
    python demo/tutorial.py --steps N  compares after N steps of each training, in a tenth of the time
    python demo/tutorial.py --write    writes outputs, measurements and pictures into docs/; needs Chromium or Chrome

A block of `sh` or `python` with a block of `text` below it is run, and that is what it prints. A comment `from PATH [SELECTOR]`
above an image names what it shows: a PNG of the home, or a part of an HTML page. Below the comment `measured` is a table of the
time and the memory that each command took.
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tests.browser import Browser, find_browser  # noqa: E402
from tests.e2e.screenshots import Shot, photograph  # noqa: E402

PAGE = ROOT / "docs" / "tutorial.md"
BIN = Path(sys.executable).parent
HOME = "/home/you"  # as the home of the run is called on the page
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```\n\n```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"^<!-- from (\S+)(?: (\S+))? -->\n!\[[^\]]*\]\((\S+)\)$", re.MULTILINE)
MEASURED = re.compile(r"(?<=^<!-- measured -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
# Lines that depend on the machine's speed.
PROGRESS = re.compile(r"^(pack: |  time: |step \d|  warning: some steps took ).*\n", re.MULTILINE)
WIDTH_PX, COLOURS = 900, 256  # of a PNG, and of its palette


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command that has run."""

    name: str
    printed: str
    seconds: float
    peak_bytes: int


def run(kind: str, text: str, home: Path) -> Ran:
    """Run a block in the home as a new user's shell would, and measure it."""
    program = ["bash", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
    settings = {
        "LANG": "C.UTF-8",
        "COLUMNS": "80",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    start = time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            program,
            cwd=home,
            env={"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(home), **settings},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if kind == "sh" else subprocess.DEVNULL,  # libraries of Python warn at length
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        printed = out.read().decode().replace(str(home), HOME)
    if process.returncode != 0:
        raise SystemExit(f"this block of {PAGE.name} ended with {process.returncode}:\n{text}\n{printed}")
    words = text.split()
    name = "Python" if kind == "python" else " ".join(words[: 3 if words[0] == "bucketline" else 2])
    return Ran(name=name, printed=printed, seconds=time.monotonic() - start, peak_bytes=used.ru_maxrss * 1024)


def table(ran: list[Ran]) -> str:
    """Return the machine, and each command's time and memory."""
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="ascii"), re.MULTILINE)
    cpu = found[1] if found else platform.machine()
    lines = [f"On {os.cpu_count()} cores ({cpu}), without a GPU:", "", "| command | seconds | memory |", "|---|---:|---:|"]
    lines += [f"| `{one.name}` | {one.seconds:.0f} | {one.peak_bytes / 2**20:,.0f} MiB |" for one in ran if one.seconds >= 1]
    return "\n".join([*lines, ""])


def draw(text: str, home: Path) -> None:
    """Write the page's pictures."""
    with ExitStack() as stack:
        browser: Browser | None = None
        for source, selector, name in PICTURE.findall(text):
            path, to = home / source, PAGE.parent / name
            if path.suffix == ".png":
                with Image.open(path) as image:
                    small = ImageOps.contain(image.convert("RGB"), (WIDTH_PX, image.height))
                    small.quantize(COLOURS).save(to, optimize=True)
            else:
                program = find_browser()
                if program is None:
                    raise SystemExit("no Chromium or Chrome is on PATH; install one, such as `apt install chromium`")
                browser = browser or stack.enter_context(Browser(program))
                to.write_bytes(photograph(browser, Shot(name=name, page=source, dark=False, of=selector or None), path))
            print(f"{name}: {to.stat().st_size // 1024} KiB", file=sys.stderr)


def stable(text: str) -> list[str]:
    """Return a page's lines without what differs from run to run."""
    without = MEASURED.sub("", PROGRESS.sub("", text))
    return [re.sub(r"\d[\d.,:]*", "0", line) for line in without.splitlines()]


def shortened(block: str, steps: int, fewer: int) -> str:
    """Return a block of commands with another number of training steps, also in the names of checkpoints."""
    return block.replace(f"--max-steps {steps}", f"--max-steps {fewer}").replace(f"step-{steps:08}", f"step-{fewer:08}")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write outputs, measurements and pictures")
    parser.add_argument("--steps", type=int, help="train so many steps instead of the page's, to compare only")
    parser.add_argument("--home", type=Path, help="a folder that demo/album.py wrote, to run in; default: a new one")
    asked = parser.parse_args()
    if asked.write and asked.steps:
        parser.error("the page shows whole trainings: leave out --steps to write it")
    text, ran = PAGE.read_text(encoding="utf-8"), list[Ran]()
    steps = int(re.findall(r"--max-steps (\d+)", text)[0])
    with tempfile.TemporaryDirectory() as name:
        home: Path = (asked.home or Path(name)).resolve()
        if asked.home is None:
            fewer = ["--steps", str(asked.steps)] if asked.steps else []
            subprocess.run([sys.executable, ROOT / "demo" / "album.py", home, *fewer], check=True)

        def filled(found: re.Match[str]) -> str:
            kind, block, before = found.groups()
            done = run(kind, shortened(block, steps, asked.steps or steps), home)
            print(f"{done.seconds:6.1f} s  {done.name}", file=sys.stderr)
            ran.append(done)
            return found[0].removesuffix(f"{before}```\n") + f"{done.printed.rstrip()}\n```\n"

        new = BLOCK.sub(filled, text)
        if asked.write:
            PAGE.write_text(MEASURED.sub(lambda _: table(ran), new), encoding="utf-8")
            draw(new, home)
    differing = list(difflib.unified_diff(stable(text), stable(new), "the page", "now", lineterm="", n=1))
    print("\n".join(differing) or f"{len(ran)} commands print what the page says")
    return 0 if asked.write or not differing else 1


if __name__ == "__main__":
    sys.exit(main())
