"""`python -m tests.walks`: how much of the house a reader needs. Sizes by folder, and the files that each walk runs through.

A walk is something that a user does. It is done once, so that all is imported, and then traced: the files of ours of which
a function ran, in any thread and in the service's process, and the kinds of records (dataclasses, named tuples) that were made.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("store", "ingest", "loader", "train", "bucketline", "bench", "tests")
GENERATED = "<string>"  # the file of the code that `dataclass` and `NamedTuple` make
PARTS = ("folders", "pack", "drop", "open", "service", "train")


# folders


def folders() -> dict[str, dict[str, int]]:
    """Return lines, files, classes, records and raises of each folder."""
    return {folder: _sizes(ROOT / folder) for folder in FOLDERS}


def _sizes(folder: Path) -> dict[str, int]:
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return {
        "lines": sum(text.count("\n") for text in texts),
        "files": len(texts),
        "classes": len(classes),
        "records": sum(map(_is_record, classes)),
        "raises": sum(isinstance(node, ast.Raise) for node in nodes),
    }


def _is_record(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list]
    return "dataclass" in decorators or any(ast.unparse(base).rpartition(".")[2] == "NamedTuple" for base in node.bases)


# walks


@dataclass(kw_only=True)
class Trace:
    """The files, functions and records of ours that ran while it was active, and what was opened."""

    files: dict[str, set[str]] = field(default_factory=dict)  # the functions of each
    records: set[str] = field(default_factory=set)
    manifests: list[str] = field(default_factory=list)
    is_active: bool = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; the profile function of each thread."""
        if event != "call" or not self.is_active:
            return
        code = frame.f_code
        if code.co_filename == GENERATED:
            made = frame.f_locals.get("self", frame.f_locals.get("_cls"))
            kind = made if isinstance(made, type) else type(made)
            if code.co_name in ("__init__", "<lambda>") and kind.__module__.startswith("bucketline"):
                self.records.add(f"{kind.__module__}.{kind.__qualname__}")
            return
        if (name := _ours(code.co_filename)) is not None and not code.co_name.startswith("<module"):
            self.files.setdefault(name, set()).add(code.co_qualname)

    def opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a manifest that is opened; an audit hook."""
        if event == "open" and self.is_active and arguments and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fsdecode(arguments[0])
            if path.endswith(".json") and ("/generations/" in path or path.endswith("manifest.json")):
                self.manifests.append(path.rpartition("/")[2])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Trace, in this thread and those that it starts."""
        threading.setprofile(self)
        sys.setprofile(self)
        self.is_active = True
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Trace no more."""
        self.is_active = False
        sys.setprofile(None)
        threading.setprofile(None)

    def found(self) -> dict[str, Any]:
        return {
            "files": len(self.files),
            "functions": sum(map(len, self.files.values())),
            "records": len(self.records),
            "names of files": sorted(self.files),
            "names of records": sorted(self.records),
        }


_NAMES: dict[str, str | None] = {}


def _ours(filename: str) -> str | None:
    """Return the path of a file of the product below the root, or None."""
    if filename not in _NAMES:
        path = Path(filename).resolve()
        is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS[:5]
        _NAMES[filename] = path.relative_to(ROOT).as_posix() if is_ours else None
    return _NAMES[filename]


def _traced(warm: Callable[[], object], walk: Callable[[], object]) -> Trace:
    trace = Trace()
    sys.addaudithook(trace.opened)
    warm()
    with trace.active():
        walk()
    return trace


def pack(work: Path) -> dict[str, Any]:
    """An image to its row: four photographs packed by `ingest pack`."""
    from tests.commands import call
    from tests.models import write_model
    from tests.photographs import crop_of

    images, model = work / "photos", write_model(work / "bert")
    images.mkdir()
    for n in range(4):
        crop_of(n, 130 + n, 180).convert("RGB").save(images / f"{n}.jpg")
        (images / f"{n}.txt").write_text("a red cat\n", encoding="utf-8")
    options = ("--model", model, "--grid", "64x96", "--min-size-px", 32)
    return _traced(
        lambda: call("ingest", "pack", images, work / "warm", *options).done(),
        lambda: call("ingest", "pack", images, work / "s", *options).done(),
    ).found()


def drop(work: Path) -> dict[str, Any]:
    """`store drop` of one id from a store at a URL."""
    from bucketline.store.write import publish
    from tests import object_storage
    from tests.commands import call

    _store(work / "s")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(object_storage.CREDENTIALS)
    requests, bare = list[str](), object_storage._Atomic.__call__

    def counted(self: Any, environ: dict[str, Any], start_response: Any) -> Any:
        requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        return bare(self, environ, start_response)

    with object_storage.s3_on_loopback() as endpoint:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/walks", method="PUT")).close()
        for name in ("warm", "s"):
            call("store", "push", work / "s", f"s3://walks/{name}", "--endpoint", endpoint).done()

        def dropped(name: str) -> None:
            call("store", "drop", f"s3://walks/{name}", "3.png", "--endpoint", endpoint).done()

        object_storage._Atomic.__call__ = counted  # type: ignore[method-assign]

        def warm() -> None:
            dropped("warm")
            requests.clear()
            publish._indexes.clear()  # a command of its own has none

        trace = _traced(warm, lambda: dropped("s"))
        object_storage._Atomic.__call__ = bare  # type: ignore[method-assign]
    return {**trace.found(), "requests": len(requests), "their paths": requests}


def open_loader(work: Path) -> dict[str, Any]:
    """`Loader(store)`."""
    from bucketline.loader import Loader, LoaderConfig

    _store(work / "s")

    def opened() -> None:
        Loader(work / "s", LoaderConfig(batch_size=2)).close()

    return _traced(opened, opened).found()


def service(work: Path) -> dict[str, Any]:
    """The first batch of a loader through a service: files of the client, of the server, and of either."""
    from bucketline.loader import Loader, LoaderConfig

    _store(work / "s")
    server, socket = Trace(), work / "s.sock"
    child = os.fork()
    if not child:
        code = 1
        try:
            with server.active():
                from bucketline.loader.cli import main

                code = main(["serve", str(work / "s"), "--at", f"unix:{socket}"])
        finally:
            (work / "server.json").write_text(json.dumps(server.found()), encoding="utf-8")
            os._exit(code)
    while not socket.exists():
        time.sleep(0.01)

    def first() -> None:
        with Loader(work / "s", LoaderConfig(batch_size=2), service=f"unix:{socket}") as loader:
            next(iter(loader))

    client = _traced(first, first).found()
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    served = json.loads((work / "server.json").read_bytes())
    either = {*client["names of files"], *served["names of files"]}
    return {"files": client["files"], "of the server": served["files"], "of either": len(either), "client": client}


def train(work: Path) -> dict[str, Any]:
    """`main` to the first optimizer step: files, and how often manifests are opened."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from bucketline.train.main import main
    from tests.commands import call
    from tests.family_models import write_pipeline
    from tests.models import png

    model, images = write_pipeline(work / "sd", "sd"), work / "photos"
    images.mkdir()
    for n in range(6):
        (images / f"{n}.png").write_bytes(png(16, 24, seed=n))
        (images / f"{n}.txt").write_text("a red cat\n", encoding="utf-8")
    packing = ("--model", model, "--grid", "16x24", "--min-size-px", 8, "--val-fraction", 0.4)
    call("ingest", "pack", images, work / "s", *packing).done()
    options = ("--store", work / "s", "--model", model, "--batch-size", 2, "--max-steps", 1, "--num-images", 0)
    trace = Trace()

    def run(name: str) -> None:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
            main([str(word) for word in (*options, "--output-dir", work / name)])

    sys.addaudithook(trace.opened)
    run("warm")
    hook = register_optimizer_step_post_hook(lambda *_: trace.stop())
    with trace.active():
        run("run")
    hook.remove()
    return {**trace.found(), "manifests": len(trace.manifests), "opened": trace.manifests}


def _store(path: Path) -> None:
    import numpy as np

    from bucketline.store import Column, LatentColumn, StoreWriter

    empty = {"tokens": np.zeros((1, 4), "<f2")}
    text, encoders = (Column(name="tokens", dtype="F16", shape=(4,)),), {"vae": {"scaling_factor": 0.5}}
    with StoreWriter(
        path, columns=(LatentColumn(channels=2, dtype="F16"),), text=text, empty_caption=empty, encoders=encoders
    ) as writer:
        for n in range(8):
            writer.add(f"{n}.png", "train", {"target": np.full((2, 8, 8), n, "<f2")}, {f"image {n}": empty})


WALKS = {"pack": pack, "drop": drop, "open": open_loader, "service": service, "train": train}
LISTS = ("names of files", "names of records", "their paths", "opened", "client")


def main() -> int:
    """Print sizes and walks."""
    parser = argparse.ArgumentParser(prog="python -m tests.walks", description=__doc__)
    parser.add_argument("only", nargs="*", choices=[[], *PARTS], default=[], help="default: all")
    parser.add_argument("--json", type=Path, help="also write all, with the names of files and records, to this file")
    asked = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found: dict[str, Any] = {}
    if not asked.only or "folders" in asked.only:
        found["folders"] = folders()
        print(f"{'folder':<12}" + "".join(f"{name:>9}" for name in found["folders"]["store"]))
        totals = {"product": dict.fromkeys(found["folders"]["store"], 0)}
        for name, sizes in found["folders"].items():
            if name != "tests":
                totals["product"] = {key: totals["product"][key] + sizes[key] for key in sizes}
        for name, sizes in (*found["folders"].items(), *totals.items()):
            print(f"{name:<12}" + "".join(f"{number:>9}" for number in sizes.values()))
    for name in [name for name in WALKS if not asked.only or name in asked.only]:
        with tempfile.TemporaryDirectory(prefix="walk-") as work:
            found[name] = WALKS[name](Path(work))
        about = (WALKS[name].__doc__ or "").partition("\n")[0].rstrip(".")
        print(f"{about}: {', '.join(f'{key} {value}' for key, value in found[name].items() if key not in LISTS)}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
