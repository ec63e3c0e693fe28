"""Type checkers on `examples/`, from an editable install and from a wheel: `make test-types`.

Each install is an environment of its own in `build/types`, which sees the libraries of the running one and a copy of the
examples, but not this checkout. A type that a checker does not know would be Any, and a loop over it would pass unchecked:
so what it says of a batch and its fields is compared. pyright is npm's, put into `build/types`; without npm only mypy runs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
PYRIGHT = "1.1.414"
PROBE = """\
from bucketline.loader import BatchDataset, Loader, LoaderConfig, WeightedStore
from bucketline.store import Store, write_store

loader = Loader(WeightedStore("a.store", 0.5), LoaderConfig(batch_size=4, window=4096, remainder="partial"))
for batch in loader:
    reveal_type(batch)
    reveal_type(batch.epoch)
    reveal_type(batch.latents)
for one in BatchDataset(loader):
    reveal_type(one)
reveal_type(Store.open("a.store").manifest.samples)
reveal_type(write_store("a.store", ["a"], print).num_written)
"""
EXPECTED = ["Batch", "int", "Tensor", "Batch", "int", "int"]
_REVEALED = re.compile(r'(?:Revealed type is|Type of ".*" is) "([^"]*)"')


def run(arguments: list[object], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(one) for one in arguments], cwd=cwd, capture_output=True, text=True, check=False)


def environment(folder: Path, installed: list[str]) -> Path:
    """Return the Python of a new environment that has bucketline, and sees the libraries of the running one."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], TOP).check_returncode()
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", *installed]
    done = run(pip, folder)
    if done.returncode:
        raise SystemExit(f"pip failed: {done.stderr}")
    return python


def revealed(output: str) -> list[str]:
    return [re.sub(r"\[.*|\s*\|.*|^.*\.", "", found) for found in _REVEALED.findall(output)]


def check(name: str, command: list[object], folder: Path) -> list[str]:
    wrong = []
    done = run([*command, *sorted(folder.glob("*.py"))], folder)
    if done.returncode:
        wrong.append(f"{name} on the examples: {done.stdout[-3000:]}{done.stderr[-1000:]}")
    probed = run([*command, folder / "probe" / "probe.py"], folder)
    if (found := revealed(probed.stdout)) != EXPECTED:
        wrong.append(f"{name} on the probe: {found}, expected {EXPECTED}: {probed.stdout[-3000:]}{probed.stderr[-1000:]}")
    print(
        f"{name}: {'wrong' if wrong else 'right'}; {(done.stdout.strip().splitlines() or [''])[-1]}; types {', '.join(found)}"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TOP / "build" / "types", help="a folder, made again")
    parser.add_argument("--mypy-only", action="store_true", help="leave out pyright, which npm downloads")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    folder = out / "examples"
    shutil.copytree(TOP / "examples", folder, ignore=shutil.ignore_patterns("runs", "ray_data.py", "lightning_loop.py", "__*"))
    (folder / "probe").mkdir()
    (folder / "probe" / "probe.py").write_text(PROBE, encoding="utf-8")
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-accelerate.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
    )
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, TOP], out)
    (wheel,) = out.glob("*.whl")
    pyright: list[object] = []
    if not arguments.mypy_only and shutil.which("npm"):
        run(["npm", "install", "--prefix", out, f"pyright@{PYRIGHT}"], out).check_returncode()
        pyright = ["node", out / "node_modules" / "pyright" / "index.js"]
    wrong = []
    for install, installed in (("editable install", ["-e", str(TOP)]), ("wheel", [str(wheel)])):
        python = environment(out / install.replace(" ", "-"), installed)
        wrong += check(f"mypy, {install}", [sys.executable, "-m", "mypy", "--python-executable", python], folder)
        if pyright:
            wrong += check(f"pyright, {install}", [*pyright, "--pythonpath", python], folder)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
