"""A new user's afternoon: every command of the README and the guides, in the order of the pages, on real photographs.

    python -m tests.e2e.afternoon FOLDER [PAGE …]        makes FOLDER

Each command of a page is run (`MEANT` says what its placeholders stand for), or is in `NOT_RUN` with the reason. A command
that is neither is a failure, and so are an unexpected exit code, a traceback, and an option that no parser accepts.
All pages share one working folder. Commands are forked off this process, which has imported torch already.
"""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import tarfile
import time
import traceback
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.commands import BIN, ROOT, kept_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGES = (
    *("README.md", "docs/packing.md", "docs/loader.md", "docs/training.md", "docs/reports.md", "docs/operations.md"),
    *("docs/object-storage.md", "docs/ten-runs.md"),
)

SD, SDXL = "path/to/stable-diffusion-v1-5", "path/to/sdxl"  # folders of tiny models, under the names that the pages use
LONGEST_S = 300  # before a command is ended by SIGALRM
PACK = f"photos packed.store --model {SD}"
TRAIN = f"--store photos.store --model {SD} --batch 2 --max-steps 2 --num-images 0 --output-dir runs"
URL = "file://$PWD/bucket/photos.store"  # written and read as a bucket is
PLAN = "loader plan photos.store --batch 2"
FEWER = "--max-steps 2 --num-images 1"

# What the pages' placeholders stand for, as regular expressions, applied in this order. A page's own come first.
MEANT: dict[str, tuple[tuple[str, str], ...]] = {
    "README.md": ((r"^loader seen --run CHECKPOINT .*$", "loader seen --help"),),
    "docs/packing.md": (
        (r"^(store info )?--rules$", "store info photos.store --rules"),
        (r"workers=8", "workers=0"),  # a block is not a file that workers can import; examples/parallel_write.py is
        (r"ingest pack SOURCE STORE --model MODEL", f"ingest pack {PACK}"),
        (r"pack photos photos\.store", "pack photos packed.store"),
        (r"ingest pack …", f"ingest pack {PACK}"),
        (r"ingest pack --crop random", f"ingest pack photos random.store --model {SD} --crop random"),
        (r"--grid …", "--grid square:64"),
        (r"^--(workers|engine) .*$", "ingest pack --help"),
        (r"^--(name|size)$", "ingest prompts --help"),
        (r"SOURCE", "photos"),
        (r"ingest scan \.(\w+)$", r"ingest scan photos/some.\1"),  # `photos/some.jsonl` (`.csv`, `.parquet`)
        (r"'pipe:…'", "'pipe:cat tars/000.tar'"),
        (r"--output-dir runs/a --batch 4 --max-steps 1000", f"--output-dir runs/data --batch 4 {FEWER}"),
    ),
    "docs/loader.md": (
        (r"^--resume --new-plan$", "bucketline train --help"),
        (r"^store compact --gc$", "store compact photos.store --gc --dry-run"),
        (r"^--columns target,control/depth$", f"{PLAN} --columns target"),
        (
            r"--batch 16 --world-size 64@8 --window 4096",
            "--batch 2 --world-size 2@2 --window 4096",
        ),
        (r"^--bill [a-z]+=.*$", rf"{PLAN} --window 4096 --world-size 1@1 --cache-bytes 1GiB \g<0>"),
        (r"^--columns NAME,NAME$", "loader plan --help"),
        (r"^--run RUN$", "loader plan --help"),
        (r"^--(token-file|certificate|at tcp://0\.0\.0\.0:9401)$", "loader serve --help"),
        (r"^loader stats tcp://HOST:PORT$", "loader stats --help"),
        (r"^--certificate cert\.pem key\.pem$", "loader serve --help"),
        (r"^--metrics 127\.0\.0\.1:9400$", "loader serve photos.store --at unix:service.sock --metrics 127.0.0.1:0"),
        (r"^loader serve s3://bucket/photos\.store$", f"loader serve {URL} --at unix:PATH"),
        (r"^--store s3://…$", f"bucketline train {TRAIN}/url".replace("--store photos.store", f"--store {URL}")),
    ),
    "docs/object-storage.md": (
        (r"^--work FOLDER$", "ingest pack --help"),
        (r"^--cache FOLDER$", "store info --help"),
        (r"^--cache-bytes \w+$", rf"{PLAN} --window 4096 --world-size 2@2 \g<0>"),
        (r"^--(split|bucket|ids .*)$", "store pull --help"),
        (r"--model FOLDER", f"--model {SD} --val-fraction 0.02"),
        (r"val\.store", "val-again.store"),
        (r"^(store compact) URL", rf"\1 {URL}"),
        (r"--batch 32 --world-size 2@2", "--batch 2 --world-size 2@2"),
        (r"^--older-than 0s$", f"store compact {URL} --gc --older-than 0s"),
        (r"^ingest pack SOURCE URL$", f"ingest pack photos {URL} --model {SD} --val-fraction 0.02"),
        (r"^--(endpoint|store-option) .*$", r"store info --help"),
    ),
    "docs/training.md": (
        (r"^(--recompute 1 )?--(base int8|offload-blocks \d+|lora-dropout 0\.1)$", r"--lora-rank 16 \g<0>"),
        (r"MEAN,STD", "0,1"),
        (r"mode:SCALE", "mode:1.29"),
        (r"^bucketline train$", "bucketline train --help"),  # the command's name within a sentence
        (r"^bucketline train report$", "bucketline train report --help"),
        (r"--max-steps 1000$", FEWER),
        (r"step-00001000", "step-00000002"),
        (r"bucketline\.train NAME", "bucketline.train sd"),
        (r"bucketline train sd-lora …", f"bucketline train sd-lora {TRAIN}/seventh"),
        (r"loader seen --run runs/a", "loader seen --run runs/sixth"),
        (r"export-model runs/a", "export-model runs/whole"),
        (r"^bucketline export-model RUN OUTPUT$", "bucketline export-model --help"),
        (r"photos\.store --model path/to/sdxl", "sdxl.store --model path/to/sdxl"),
        (r"--validate-every 1000 --images-every 5000", "--validate-every 1 --images-every 2"),
        (r"torchrun -m bucketline.train", f"torchrun -m bucketline.train {TRAIN}/fourth"),
        (r"torchrun … train/main.py", f"torchrun --nproc_per_node 2 train/main.py {TRAIN}/fifth"),
        (r"^bucketline train memory( FOLDER…| --memory 24GiB)?$", "bucketline train memory --help"),
        (r"bucketline train …", f"bucketline train {TRAIN}/sixth"),
        (r"^ingest pack data\.toml data$", f"ingest pack data.toml data --model {SD}"),
        (r"^--resume( --new-plan)?$", rf"bucketline train {TRAIN}/sixth --max-steps 3 --resume\1"),
    ),
    "docs/reports.md": (
        (r"-o (report|sheet)\.html", r"-o again-\1.html"),
        (r"^ingest peek SOURCE$", "ingest peek --help"),
        (r"^loader plan$", "loader plan --help"),
        (r"^bucketline train report$", "bucketline train report --help"),
    ),
    "docs/ten-runs.md": (
        (r"s3://bucket/photos\.store", "file://$PWD/bucket/ten.store"),  # that of docs/object-storage.md has gone its own way
        (r" &$", ""),  # a service continues in the background anyway, and a pack of a few images ends at once
        (r"unix:/run/user/1000/photos\.sock", "unix:service.sock"),
        (r"--max-steps (2000|1000)\b", "--max-steps 2"),
        (r"fsdp:8", "fsdp:2"),
        (r"--batch 8", "--batch 2"),
        (r"--follow=10000", "--follow=1"),
    ),
    "docs/operations.md": (
        (r"^bucketline completion fish \| source$", "bucketline completion fish"),
        (r"loader seen --run runs/a", "loader seen --run runs/told"),
        (r"export-model runs/a photos-model", "export-model runs/exported again-model"),
        (r"^ingest pack$", f"ingest pack photos photos.store --model {SD} --val-fraction 0.02"),  # the same, after a repair
        (r"^--dry-run$", "store repair photos.store --dry-run"),
        (r"^--older-than 0s$", "store compact photos.store --gc --older-than 0s"),
        (r"^--(help|json)$", r"store info photos.store --\1"),
        (r"^store compact --gc$", "store compact photos.store --gc"),
        (r"store restore photos\.store 3", "store restore photos.store $GENERATION"),
        (r"photos\.store --shard NAME", "lost.store --shard NAME"),
        (r"bucketline store info …", "bucketline store info photos.store"),
    ),
    "": (
        (r"loader peek photos\.store --step 1000 --batch 16", "loader peek photos.store --step 1000 --batch 2"),
        (r"train report runs/a runs/b", "train report runs/first runs/first"),
        (r"s3://bucket/photos\.store", URL),
        (r"--nproc_per_node [48]", "--nproc_per_node 2"),
        (r"PET_NPROC_PER_NODE=8", "PET_NPROC_PER_NODE=2"),
        (r"-m bucketline\.train …", f"-m bucketline.train {TRAIN}/second"),
        (r"train/main\.py …", f"train/main.py {TRAIN}/third"),
        (r"--max-steps 20000", FEWER),
        (r"--batch 16 --world-size 8", "--batch 2 --world-size 2"),
        (r"\bFOLDER\b|(?<=--model )stable-diffusion-v1-5", SD),
        (r"(?<=--at )unix:PATH|(?<=stats )unix:PATH", "unix:service.sock"),
        (r"--shard NAME", "--shard $SHARD"),
        (r"^(ingest|store|loader) ([a-z]+)$", r"\1 \2 --help"),  # a command's name within a sentence
    ),
}
NOT_RUN = {
    r"pip install .*": "installs from an index; `make test-wheel` installs the wheel with its extras",
    r"python3 -m venv .*": "installs torch from an index",
    r"hf auth login": "needs an account",
    r"make [a-z-]+( CHECKS=\w+)?": "a target of the Makefile, which must have it; targets are run by hand and in CI",
    r"ingest import .*": "needs another trainer's cache; tests/unit/ingest/importers writes them",
    r"store drop URL --shard \$SHARD": "needs a damaged store; tests/unit/store/sync/test_changes.py has one",
    r"ingest pack s3://bucket/photos .*": "needs a bucket; tests/unit/ingest/sources/test_objects.py has one",
    r"ingest scan https://…": "needs a server; tests/unit/ingest/sources has one",
    r"python -m bucketline\.bench( \w+|[\w.]+)( --\S+( [^\s-]\S*)*)*": "minutes, or a GPU; tests/unit/bench has tiny sizes",
    r".*v1-5-pruned-emaonly.*": "needs a published model; tests/unit/train/outputs has a small one",
    r"bucketline export-model \S+ \S+\.safetensors": "likewise",
    r"python demo/text_dtype\.py OUT": "two trainings of 200 steps; tests/e2e/test_text_dtype.py runs it with fewer",
    r"python -m tests\.e2e\.screenshots .*": "needs a finished demo; tests/unit/bucketline/test_pages.py holds its record",
    r"ingest pack .* --engine ray.*": "starts Ray, or needs a cluster; tests/e2e/test_pack_on_ray.py has one",
    r"python demo/shuffle_loss\.py .*": "nine trainings of 200 steps",
    r"python -m pytest tests/fault/test_faults\.py --long .*": "minutes; without --long it is one of the slow tests",
}
EXIT_CODES = {
    r"ingest pack .* --max-rejects 0\.01": 1,  # one of the photographs is broken
}
# What must be there before a command, by a function below or by commands.
BEFORE: dict[str, Callable[[Path], None] | str] = {
    r".*--store sdxl\.store.*": f"ingest pack photos sdxl.store --model {SDXL} --val-fraction 0.3",
    r"bucketline train .*--store \S+/ten\.store.*": "store push photos.store file://$PWD/bucket/ten.store",
    r"(loader serve|bucketline train .*--store) file://.*": f"store push photos.store {URL}",
    r"bucketline train .*--store scans\.store.*": f"ingest pack scans scans.store --model {SD} --val-fraction 0.02",
    r"ingest prompts prompts\.txt .*": lambda folder: write_prompts(folder / "prompts.txt"),
    r"loader seen --run runs/told --id .*": f"bucketline train {TRAIN}/told",
    r"loader seen .* --ids withdrawn\.txt": lambda folder: write_ids(folder / "withdrawn.txt"),
    r"loader seen --run runs/told --ids held-out\.txt .*": lambda folder: write_ids(folder / "held-out.txt"),
    r"bucketline export-model runs/whole .*": f"bucketline train {TRAIN}/whole",
    r"bucketline export-model runs/exported .*": f"bucketline train {TRAIN}/exported",
    r"store repair photos\.store$": lambda folder: cut_short(folder / "photos.store"),
    r"store restore photos\.store \$.*": "store drop photos.store 1/1.jpg",
    r"store drop lost\.store.*": "store merge lost.store photos.store",
    r"store merge all\.store.*": f"ingest pack scans scans.store --model {SD} --val-fraction 0.02",
}
PROGRAMS = "ingest|store|loader|bucketline|torchrun|examples/runs/|PET_|make|pip|python|python3|hf|git|curl|uv"


@dataclass(frozen=True, kw_only=True)
class Said:
    """A command, an option or a block of Python that a page has."""

    page: str
    text: str
    is_python: bool = False


def said_in(page: str) -> Iterator[Said]:
    """Yield a page's commands, options and Python blocks, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"```(\w*)\n(.*?)```|`([^`]+)`", text, re.DOTALL):
        language, block, span = match.groups()
        if language == "python":
            yield Said(page=page, text=block, is_python=True)
        elif language == "sh":
            for line in block.replace("\\\n", "").splitlines():
                if command := re.sub(r"(^|\s+)#.*", "", line).strip():
                    yield Said(page=page, text=" ".join(command.split()))
        elif span:
            said = " ".join(span.split())
            paragraph = text[: match.start()].rpartition("\n\n")[2]
            if paragraph.startswith("| SOURCE ") and paragraph.rpartition("\n")[2].count("|") == 1 and said != "SOURCE":
                yield Said(page=page, text=f"ingest scan {said}")
            elif said.startswith("--") or (" " in said and re.match(f"({PROGRAMS})", said)):
                yield Said(page=page, text=said)


def meant(said: Said) -> str:
    """Return a command, or a block of Python, with its placeholders filled in."""
    command = said.text
    for pattern, replacement in (*MEANT.get(said.page, ()), *(() if said.is_python else MEANT[""])):
        command = re.sub(pattern, replacement, command)
    return command


def matching(table: dict[str, Any], command: str) -> Any:
    return next((value for pattern, value in table.items() if re.fullmatch(pattern, command)), None)


class Afternoon:
    """The working folder, what runs in the background, and what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[str] = []
        self.num_run = 0
        self._service: int | None = None
        self._output = folder.parent / f"{folder.name}.out"

    def spend(self, pages: list[str]) -> None:
        """Go through the pages."""
        for page in pages:
            for said in said_in(page):
                began = time.monotonic()
                fault = self.fault_of(said)
                first = said.text.partition("\n")[0]
                print(f"{time.monotonic() - began:6.1f} s  {page}: {first}{' …' if said.is_python else ''}", flush=True)
                if fault:
                    self.faults.append(f"{page}: {first}\n{fault}")
                    print(fault, flush=True)
            self.end_service()

    def fault_of(self, said: Said) -> str | None:
        """Try what a page says, and return what is wrong with it."""
        command = meant(said)
        if said.is_python:
            return self.run(said.text, lambda: exec(compile(command, said.page, "exec"), {"__name__": "__main__"}))
        if command.startswith("--"):
            return fault_of_option(said.page, command)
        if matching(NOT_RUN, command):
            target = re.fullmatch(r"make (\S+).*", command)
            known = target is None or re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
            return None if known else f"the Makefile has no target {target and target[1]}"
        if "…" in command or not re.match(r"(ingest|store|loader|bucketline|torchrun|openssl|examples/runs/|PET_)", command):
            return f"{said.page} has a command that nobody tries: {command}; add it to MEANT or NOT_RUN in {__file__}"
        before = matching(BEFORE, command)
        if isinstance(before, str):
            if fault := self.run_command(before):
                return fault
        elif before:
            before(self.folder)
        return self.run_command(command)

    def run_command(self, command: str) -> str | None:
        """Run a command; `loader serve` continues in the background until the page ends."""
        if "$SHARD" in command:
            command = command.replace("$SHARD", min(self.folder.glob("lost.store/shards/*.lmdb")).stem)
        if "$GENERATION" in command:
            newest = json.loads((self.folder / "photos.store" / "manifest.json").read_bytes())["generation"]
            command = command.replace("$GENERATION", str(newest - 1))
        words = shlex.split(command.replace("$PWD", str(self.folder)))
        expected = matching(EXIT_CODES, command) or 0
        is_console = metadata.entry_points(group="console_scripts", name=words[0])
        if ">" in words or not (words[0] == "torchrun" or is_console):
            return self.run(command, lambda: os.execvp("bash", ["bash", "-c", command]), expected)
        if words[:2] == ["loader", "serve"] and "--at" in words:
            self.end_service()
            self._output.write_bytes(b"")
            self._service = self.fork(lambda: program(words))
            return self.fault_of_service(command)
        if words[0] != "torchrun":
            return self.run(command, lambda: program(words), expected)
        ranks = 1
        if words[1] == "--nproc_per_node":
            ranks = int(words[2])
            del words[1:3]
        return self.run(command, lambda: python(words[1:]), expected, ranks)

    def run(self, command: str, main: Callable[[], object], expected: int = 0, ranks: int = 0) -> str | None:
        """Run `main` in a child, or in as many as there are ranks, and return what is wrong with code or output."""
        self.num_run += 1
        self._output.write_bytes(b"")
        with kept_port() as port:
            given = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            pids = [self.fork(main, **given, RANK=n, LOCAL_RANK=n) for n in range(ranks)] or [self.fork(main)]
            codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
        output = self._output.read_text(encoding="utf-8", errors="replace")
        if codes != {expected}:
            return f"{command}\nexit code {codes}, expected {expected}\n{output}"
        return f"{command}\nprinted a traceback\n{output}" if "Traceback" in output else None

    def fork(self, main: Callable[[], object], **environment: object) -> int:
        """Start a child in the working folder: an empty stdin, a home of its own, its output in a file."""
        if pid := os.fork():
            return pid
        code: object = 1
        try:
            for fd in (1, 2):
                os.dup2(os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115 - pytest has replaced them
            os.chdir(self.folder)
            signal.alarm(LONGEST_S)
            os.environ.update({name: str(value) for name, value in environment.items()})
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
        except BaseException:  # noqa: BLE001 - counted as a fault of the command; a child must not continue from here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def fault_of_service(self, command: str) -> str | None:
        assert self._service is not None
        while not (self.folder / "service.sock").exists():
            if os.waitpid(self._service, os.WNOHANG)[0]:
                self._service = None
                return f"{command}\nended before it served\n{self._output.read_text(encoding='utf-8')}"
            time.sleep(0.05)
        return None

    def end_service(self) -> None:
        """Stop `loader serve`, which must exit with 0."""
        if self._service is not None:
            os.kill(self._service, signal.SIGTERM)
            code = os.waitstatus_to_exitcode(os.waitpid(self._service, 0)[1])
            self._service = None
            if code:
                self.faults.append(f"loader serve: exit code {code} after SIGTERM, expected 0")


def program(words: list[str]) -> None:
    """Run an installed console command."""
    sys.argv = words
    (found,) = metadata.entry_points(group="console_scripts", name=words[0])
    sys.exit(found.load()())


def python(words: list[str]) -> None:
    """Run `python -m MODULE …` or `python FILE …`."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def fault_of_option(page: str, option: str) -> str | None:
    """Return what is wrong with an option of a page: an unknown name, or a value that its command's parser refuses.

    Options of diffusers' scripts, in the table for those who come from them, must have an answer in the trainer.
    """
    from bucketline.coming_from import answer
    from bucketline.ingest.commands.pack import Pack
    from bucketline.ingest.commands.scan import Scan
    from bucketline.options import parse_options
    from bucketline.train.commands.export_model import ExportModel
    from bucketline.train.config import TrainConfig, parse

    trains = page == "docs/training.md"
    exported, known = (
        option_names(ExportModel),
        option_names(TrainConfig) if trains else words_of(Pack) | words_of(Scan),
    )
    words = shlex.split(option)
    asked = {word.partition("=")[0] for word in words if word.startswith("--")}
    if trains and asked <= exported - known:
        return None
    if trains and all("_" in word or word == "--rank" for word in asked):
        unanswered = {word for word in asked if word.replace("_", "-") not in known and not answer("train", word)}
        return f"{option}: bucketline train has no answer to {', '.join(sorted(unanswered))}" if unanswered else None
    if unknown := asked - known - (exported if trains else option_names(TrainConfig) if len(words) == 1 else set()):
        return f"{option}: {'bucketline train' if trains else 'ingest'} has no {', '.join(sorted(unknown))}"
    if len(words) == 1:
        return None
    try:
        if trains:
            size = [] if "--batch" in option else ["--batch", "1"]
            given = [] if "--store" in option else ["--store", "a.store"]
            length = [] if "--epochs" in option else ["--max-steps", "1"]
            parse([*given, "--model", "m", "--output-dir", "o", *length, *size, *words], "train")
        else:
            words += ["--engine", "ray"] if "--workers" in asked else []
            parse_options(Pack, ["photos", "a.store", "--model", "m", *words], "pack")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the parser raises is what is wrong
        return f"{option}: {error!r}"
    return None


def words_of(command: type) -> set[str]:
    from bucketline.options import options_of

    return {word for one in options_of(command) for word in one.names}


def option_names(command: Any) -> set[str]:
    return {"--" + field.name.replace("_", "-") for field in fields(command)}


def write_prompts(path: Path) -> None:
    path.write_text("a red cat\nthe house\n", encoding="utf-8")


def write_ids(path: Path) -> None:
    path.write_text("cats/a.png\n1/1.jpg\n", encoding="utf-8")


def cut_short(store: Path) -> None:
    """Lose the end of a store's first shard."""
    shard = min(store.glob("shards/*.lmdb"))
    os.truncate(shard, shard.stat().st_size // 2)


def prepare(folder: Path) -> None:
    """Make what a user has before the afternoon: photographs in every kind of source, and two models."""
    from tests.family_models import write_pipeline
    from tests.photographs import crop_of

    for name in ("photos/cats/a.png", *(f"photos/{n % 3}/{n}.jpg" for n in range(24)), *(f"scans/{n}.png" for n in range(6))):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        number = 3 if name.startswith("photos/cats") else int(path.stem)
        crop_of(number, *((200, 280), (260, 200), (240, 240))[number % 3]).save(path)
        path.with_suffix(".txt").write_text(f"a photograph of a {('cat', 'house', 'dog')[number % 3]}\n", encoding="utf-8")
    (folder / "photos" / "broken.jpg").write_bytes((folder / "photos" / "0" / "0.jpg").read_bytes()[:2000])
    rows = [{"file_name": f"{n}/{n}.jpg", "text": f"photograph {n}"} for n in range(3)]
    some = folder / "photos" / "some.jsonl"
    some.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with some.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ["file_name", "text"])
        table.writeheader()
        table.writerows(rows)
    shutil.copytree(folder / "scans", folder / "my dog")
    guide = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
    several = [text for text in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL) if "[[source]]" in text]
    (folder / "data.toml").write_text("".join(several), encoding="utf-8")
    (folder / "tars").mkdir()
    for n in range(13):
        with tarfile.open(folder / "tars" / f"{n:03d}.tar", "w") as tar:
            for suffix in (".jpg", ".txt"):
                tar.add(folder / "photos" / str(n % 3) / f"{n}{suffix}", f"{n}{suffix}")
    for name in ("examples", "train"):  # the checkout's
        (folder / name).symlink_to(ROOT / name)
    for name, family in ((SD, "sd"), (SDXL, "sdxl")):
        unet = write_pipeline(folder / name, family) / "unet" / "config.json"
        small = {**json.loads(unet.read_text(encoding="utf-8")), "sample_size": 32}  # buckets of 64 x 64 px
        unet.write_text(json.dumps(small), encoding="utf-8")


def write_tables(folder: Path) -> None:
    """Write a Parquet table and a saved dataset, whose libraries start threads: in a child."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"{n}/{n}.jpg" for n in range(3)]
    pq.write_table(pa.table({"file_name": names, "text": ["a cat"] * 3}), folder / "photos" / "some.parquet")
    rows = {"image": [str(folder / "photos" / name) for name in names], "text": ["a cat"] * 3}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(str(folder / "dataset"))
    (folder / "hub" / "data").mkdir(parents=True)
    images = [{"bytes": (folder / "photos" / f"{n}/{n}.jpg").read_bytes(), "path": None} for n in range(3)]
    table = pa.table({"image": images, "text": [f"photograph {n}" for n in range(3)]})
    pq.write_table(table, folder / "hub" / "data" / "train-00000-of-00004.parquet")


def main() -> None:
    """Spend the afternoon.

    Raises:
        SystemExit: if anything was wrong, with all of it.
    """
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    home = folder.parent / f"{folder.name}.home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("HF_", "XDG_", "MPL", "TORCH"))]:
        del os.environ[name]
    os.environ |= {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    import bucketline.ingest.encoders.text.registry
    import bucketline.train.trainer  # noqa: F401 - imported once for all

    afternoon = Afternoon(folder)
    prepare(folder)
    assert afternoon.run("write tables", lambda: write_tables(folder)) is None
    try:
        afternoon.spend(sys.argv[2:] or list(PAGES))
    finally:
        afternoon.end_service()
    if afternoon.faults:
        sys.exit("\n\n".join(["what is wrong:", *afternoon.faults]))
    print(f"{afternoon.num_run} commands and blocks run, nothing wrong")


if __name__ == "__main__":
    main()
