"""Prompts that `--image-prompts` gives as texts or in a file: encoded once, before training, and kept in the run's folder.

`ingest prompts` encodes them in a process of its own, by the text rules of the store, and writes nothing into the store. Its
memory is free before the model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import SourceError, UsageError
from bucketline.files.atomic_write import write_durably

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.store.read.store import Store
    from bucketline.train.config import TrainConfig

log = logging.getLogger(__name__)

PROMPTS_FOLDER = "prompts"  # in the run's
_TEXTS = "given text"
_ENCODED = ".safetensors"  # what `ingest prompts` has written
_FILES = (".txt", ".jsonl", ".json", ".ndjson", _ENCODED)
_PREFIX = "error: "


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    name: str
    path: Path | None  # of a user's file
    data: bytes | None  # None: the file has gone, and what was encoded of it may be kept

    @property
    def kept_name(self) -> str:
        about = self.data if self.path is None else str(self.path).encode()
        suffix = ".txt" if self.path is None else self.path.suffix
        return f"{hashlib.blake2b(about or b'', digest_size=8).hexdigest()}{suffix}"


def encode_given(config: TrainConfig, store: Store) -> dict[str, bytes]:
    """Return the prompts of a run, encoded as the captions of `store`, once.

    They are by the name for the ids of their images, each as `ingest prompts` writes a file.

    Raises:
        UsageError: if a file does not exist.
        SourceError: if they cannot be encoded.
    """
    folder, found = config.output_dir / PROMPTS_FOLDER, dict[str, bytes]()
    for source in _sources(config.image_prompts):
        kept = folder / source.kept_name
        encoded = kept if kept.suffix == _ENCODED else kept.with_name(f"{kept.name}{_ENCODED}")
        is_done = encoded.exists() and kept.exists() and source.data in (None, kept.read_bytes())
        if not is_done and source.data is None:
            raise UsageError(f"--image-prompts {source.path}: there is no such file")
        if not is_done and source.data is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if source.path is None:
                write_durably(kept, source.data)
            if kept != encoded:
                _encode(config, store, source.path or kept, encoded)
            write_durably(kept, source.data)
        found[source.name] = encoded.read_bytes()
    return found


def _sources(given: tuple[str, ...]) -> Iterator[_Source]:
    """Yield the files among what `--image-prompts` gives, and all of its texts as one."""
    texts = []
    for one in given:
        path = Path(one)
        if path.suffix.lower() in _FILES or os.path.isfile(one):  # noqa: PTH113 - a text may be too long for a path
            yield _Source(name=one, path=path, data=path.read_bytes() if os.path.isfile(one) else None)  # noqa: PTH113
        else:
            texts.append(" ".join(one.split()))
    if texts:
        yield _Source(name=_TEXTS, path=None, data="".join(f"{text}\n" for text in texts).encode())


def _encode(config: TrainConfig, store: Store, file: Path, output: Path) -> None:
    options = ["--model", str(config.model), "--output", str(output), "--json"]
    options += [] if config.model_config is None else ["--model-config", config.model_config]
    if store.source is not None:
        options += [] if config.endpoint is None else ["--endpoint", config.endpoint]
        options += [f"--store-option={one}" for one in config.store_option]
    command = [sys.executable, "-P", "-m", "bucketline.ingest", "prompts", str(file), str(store.place), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = [line.removeprefix(_PREFIX) for line in done.stderr.splitlines() if line.startswith(_PREFIX)]
        raise SourceError(f"--image-prompts cannot be encoded: {(said or done.stderr.splitlines() or ['no message'])[-1]}")
    for text in json.loads(done.stdout)["cut"]:
        log.warning("--image-prompts: %.80s is longer than the text encoder accepts (truncated)", text)
