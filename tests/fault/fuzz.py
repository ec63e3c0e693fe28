"""Feeds every parser that reads a file with what a coverage-guided fuzzer (atheris) comes upon.

`python -m tests.fault.fuzz PARSER SECONDS SEED FOLDER` fuzzes one of them, from its seeds, until an input raises what is
not an error of ours, takes more than 10 s, or 2 GiB of memory, or ends the interpreter; it is left in the folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.commands import ROOT
from tests.fault.record import Asked, Kind, Outcome, Record

INSTRUMENTED = [
    *("bucketline.store", "bucketline.ingest.sources", "bucketline.ingest.importers", "bucketline.train.checkpoint"),
    *("tarfile", "json.decoder"),
]
IMPORT = "import-"  # and the kind of another trainer's cache
CORPUS = Path(__file__).parent / "corpus"  # caches of other trainers, one of each kind
IMPORTS = sorted(path.name for path in CORPUS.glob(f"{IMPORT}*"))
PARSERS = ("manifest", "sidecar", "block", "record", "checkpoint", "captions", "tar", *IMPORTS)
SECONDS, QUICK_SECONDS = 120, 3
ENDS = {77: Outcome.DEFECT, 70: Outcome.HANG, 71: Outcome.DEFECT}  # libFuzzer's exit codes: an exception, a timeout, memory
OPTIONS = ("-timeout=10", "-rss_limit_mb=2048", f"-max_len={1 << 16}", "-print_final_stats=1")


def fuzz(parser: str, seconds: str, seed: str, folder: str) -> None:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=INSTRUMENTED):
        parsers = importlib.import_module("tests.fault.parsers")
    found, work, seeds = (Path(folder, name) for name in ("corpus", "work", "seeds"))
    for path in (found, work, seeds):
        path.mkdir()
    for number, data in enumerate(parsers.inputs(parser)):
        (seeds / f"{number}").write_bytes(data)
    own = (f"-max_total_time={seconds}", f"-seed={int(seed) + 1}", f"-artifact_prefix={folder}/")
    parse = parsers.PARSERS[parser]
    atheris.Setup([sys.argv[0], *OPTIONS, *own, str(found), str(seeds)], lambda data: parse(data, work))
    atheris.Fuzz()


def fuzzed(asked: Asked) -> Iterator[Record]:
    for parser in PARSERS:
        record = Record(f"fuzzed input: {parser}", Kind.INPUT)
        if importlib.util.find_spec("atheris") is None:
            record.not_run = "the package atheris is not installed (run `make torture`, which installs it)"
            yield record
            continue
        seconds = asked.of(QUICK_SECONDS, SECONDS // 4 if parser.startswith(IMPORT) else SECONDS)
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else asked.folder) as folder:
            command = [sys.executable, "-m", "tests.fault.fuzz", parser, str(seconds), str(asked.seed), folder]
            ran = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, stdin=subprocess.DEVNULL)
            err = ran.stderr.decode("utf-8", "replace")
            if ran.returncode != 0:
                found = [path.read_bytes() for path in Path(folder).iterdir() if path.is_file()]
                raised = re.findall(r"=== Uncaught Python exception: ===\n(.*)", err)
                said = f"{raised or err[-200:]} of the input {found[0][:200] if found else b''!r}"
                record.add(ENDS.get(ran.returncode, Outcome.CRASH), said)
        if units := re.search(r"stat::number_of_executed_units:\s*(\d+)", err):
            record.add(Outcome.COMPLETED, count=int(units[1]))
        elif ran.returncode == 0:
            record.add(Outcome.DEFECT, f"the fuzzer did not say what it did: {err[-200:]}")
        yield record


if __name__ == "__main__":
    fuzz(*sys.argv[1:])
