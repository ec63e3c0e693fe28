"""Upload exports to the Hugging Face hub while training continues; what fails is reported and never ends a run."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from bucketline.joinable_thread import JoinableThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

_POLL_S = 0.2
_OF_ONE_REQUEST = re.compile(r" *\(Request ID: [^)]*\)")


class HubUploads:
    """Uploads one folder at a time, in order, each as a commit; with the token that huggingface_hub finds.

    Its thread does not keep the process: uploads that are not finished when it ends are lost, and their folders remain.
    """

    def __init__(self, repo: str, say: Callable[[str], None]) -> None:
        """Begin to make the repository, so that what prevents it is reported at the start of a run, not at its end."""
        self._repo, self._say = repo, say
        self._api = HfApi()
        self._reported: set[str] = set()  # reasons of failures
        if get_token() is None:
            log.warning(
                "--push-to-hub %s: there is no token, so nothing is uploaded until `hf auth login` or HF_TOKEN gives one; "
                "the run continues",
                repo,
            )
        self._left: list[Path] = []
        self._asked: queue.SimpleQueue[tuple[Path, str] | None] = queue.SimpleQueue()
        self._thread = JoinableThread(self._run, name="hub")
        self._thread.start()

    def push(self, folder: Path, message: str) -> None:
        """Upload a folder's files to the root of the repository, after the ones before."""
        self._left.append(folder)
        self._asked.put((folder, message))

    def finish(self, is_stopped: Callable[[], bool]) -> None:
        """Wait for the uploads, until `is_stopped`; then report what is not uploaded."""
        self._asked.put(None)
        if self._left and get_token() is not None and not is_stopped():
            self._say(f"uploading to {self._repo}; Ctrl-C ends that, the run is complete")
        while self._thread.is_alive() and not is_stopped():
            self._thread.join(_POLL_S)
        for folder in list(self._left):
            log.warning("%s is not uploaded: hf upload %s %s does it", folder, self._repo, folder)

    def _run(self) -> None:
        disable_progress_bars()  # the run has its own
        if get_token() is not None:
            with self._warning("the repository cannot be made or reached"):
                self._api.create_repo(self._repo, private=True, exist_ok=True)
        while (asked := self._asked.get()) is not None:
            if get_token() is None:
                continue
            folder, message = asked
            with self._warning(f"{folder} cannot be uploaded"):
                self._api.create_repo(self._repo, private=True, exist_ok=True)
                self._api.upload_folder(repo_id=self._repo, folder_path=folder, commit_message=message)
                self._left.remove(folder)

    @contextlib.contextmanager
    def _warning(self, failure: str) -> Iterator[None]:
        """Report an error of the body as a warning, once if others have the same reason."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever happens there, the run continues
            reason = " ".join(f"{type(error).__name__}: {_OF_ONE_REQUEST.sub('', str(error))}".split())[:300]
            cause = error.__cause__
            if cause is not None and str(cause) not in str(error):
                reason += f" ({cause!r:.200})"
            if reason not in self._reported:
                self._reported.add(reason)
                log.warning("--push-to-hub %s: %s: %s", self._repo, failure, reason)
