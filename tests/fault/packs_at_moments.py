"""Runs `ingest pack` again and again in children that kill themselves, `kill -9`, at a given moment. Not a test itself.

Arguments: a folder of images, a model, a grid, and pairs of a store and a moment. A moment is `NAME:N`: at the N-th call of
the function NAME (before it, or after it where `+` follows). Prints each child's wait status. The encoders are imported once.
Next to each store, STORE.committed lists the ids of the samples whose commit had returned; of a store at a URL, the file that
the variable COMMITTED names. The variable MORE has further arguments. A child that hangs prints where, and ends.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
from typing import Any

CHILD_S = 120  # a child takes a second or two
MOMENTS = {
    "commit": ("bucketline.store.write.shard_writer", "ShardWriter._write"),
    "row": ("bucketline.store.write.shard_writer", "_put_block"),
    "compact": ("bucketline.store.write.seal", "_write_anew"),
    "sidecar": ("bucketline.store.write.seal", "write_durably"),
    "move": ("bucketline.store.write.seal", "move_durably"),
    "publish": ("bucketline.store.write.target", "publish"),
    "manifest": ("bucketline.store.format.manifest", "write_or_explain"),
    "send": ("bucketline.store.transfer.upload", "Uploader._send"),
    "note": ("bucketline.store.transfer.sender", "note_description"),
    "shorten": ("bucketline.store.transfer.sender", "make_sparse"),
    "url-commit": ("bucketline.store.change.commit", "commit"),
    "let-go": ("bucketline.store.sync.working", "WorkingStore._let_go"),
    "never": ("bucketline.store.change.compact", "compact"),  # no pack calls it
}


def kill_at(moment: str) -> None:
    """Make the process kill itself there."""
    name, _, number = moment.partition(":")
    module_name, path = MOMENTS[name]
    owner: Any = importlib.import_module(module_name)
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function, left, after = getattr(owner, last), [int(number.rstrip("+"))], number.endswith("+")

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, counted)


def commit_often() -> None:
    """Commit after every image and close a shard after a few rows, so that there are many moments to die at."""
    writer: Any = importlib.import_module("bucketline.store.write.shard_writer")
    writer.COMMIT_BYTES, writer.FLUSH_AFTER_S = 1, -1.0
    packer: Any = importlib.import_module("bucketline.ingest.pipeline.slice_packer")
    packer.ShardFill.is_full = lambda self, _: self.num_rows > 12


def note_commits(path: str) -> None:
    """Write down the samples of each commit once it has returned."""
    writer: Any = importlib.import_module("bucketline.store.write.shard_writer").ShardWriter
    write = writer._write
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def noted(self: Any, chosen: list[Any]) -> None:
        write(self, chosen)
        ids = [sample.record.id for _, samples in chosen for sample in samples]
        os.write(fd, "".join(f"{sample_id}\n" for sample_id in ids).encode())

    writer._write = noted


def main() -> None:
    """Fork a child for each pair."""
    source, model, grid, *pairs = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    for module in ("bucketline.ingest.pack", "diffusers.models.autoencoders.autoencoder_kl", "transformers.models.bert"):
        importlib.import_module(module)
    cli = importlib.import_module("bucketline.ingest.cli")
    for store, moment in zip(pairs[::2], pairs[1::2], strict=True):
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(CHILD_S, exit=True)
            commit_often()
            note_commits(os.environ.get("COMMITTED") or f"{store}.committed")
            kill_at(moment)
            asked = [
                "pack",
                source,
                store,
                "--model",
                model,
                "--grid",
                grid,
                "--min-size-px",
                "8",
                "--batch-size",
                "3",
                "--json",
                *os.environ.get("MORE", "").split(),
            ]
            os._exit(cli.main(asked))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
