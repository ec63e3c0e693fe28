"""Run the same loop over several loaders; print what happened, and make the page that shows it."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bucketline.bench.apart import apart
from bucketline.bench.peers.environments import Failure, environment, own_environment
from bucketline.bench.peers.loops.facts import facts
from bucketline.bench.peers.loops.page import LOOPS, Shown, page, table
from bucketline.bench.peers.loops.scenarios import tried
from bucketline.command_line import guarded, parse_command
from bucketline.errors import BucketlineError, UsageError


@dataclass(frozen=True, kw_only=True)
class Loops:
    """Run the same loop over several loaders, and print what each did at a break, an epoch's end and a resume.

    Each peer runs in a virtual environment of its own with pinned versions, made on the first run.

    Example: python -m bucketline.bench.peers.loops --only bucketline litdata
    """

    only: tuple[str, ...] = tuple(one.file for one in LOOPS)
    """Run these loops."""
    write: bool = False
    """Make docs/other-loaders.md; it needs all loops."""
    environments: Path = Path("build/peers")
    """Make the packages' virtual environments in this folder and keep them."""
    page: Path = Path("docs/other-loaders.md")
    """The page."""

    def run(self) -> int:
        """Run the loops and print the table."""
        names = [one.file for one in LOOPS]
        if unknown := [name for name in self.only if name not in names]:
            raise UsageError(f"--only has {unknown[0]!r}, expected some of {', '.join(names)}")
        if self.write and set(self.only) != set(names):
            raise UsageError(f"--write with --only {' '.join(self.only)}: the page needs all loops; leave out --only")
        found, versions = {}, {}
        chosen = [one for one in LOOPS if one.file in self.only]
        with ThreadPoolExecutor() as at_once:
            for one, (own, version) in zip(chosen, at_once.map(self._seen, chosen), strict=True):
                found[one.file], versions[one.file] = own, version
        print(table(found, versions), end="")
        if self.write:
            self.page.write_text(page(found, versions), encoding="utf-8")
        return 0

    def _seen(self, one: Shown) -> tuple[dict[str, str], str]:
        made = environment(one.environment, self.environments.absolute()) if one.environment else own_environment()
        if isinstance(made, Failure):
            raise BucketlineError(f"the environment {made.name} cannot be made: {made.reason}")
        print(f"running the loop of {one.name}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="loops-") as folder:
            seen = apart(tried, one.file, folder, **made.options())
        version = [version for package, version in made.versions.items() if one.file in package]
        return facts(seen), "".join(version)


def main() -> int:
    """Run the command line."""
    return guarded(lambda: parse_command(Loops, sys.argv[1:], "python -m bucketline.bench.peers.loops").run())


if __name__ == "__main__":
    sys.exit(main())
