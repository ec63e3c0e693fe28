"""Upload exports to the Hugging Face hub while training continues; what fails is reported and never ends a run."""

from __future__ import annotations

import logging
import re
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

_POLL_S = 0.2
_OF_ONE_REQUEST = re.compile(r" *\(Request ID: [^)]*\)")


class HubUploads:
    """Uploads one folder at a time, in order, each as a commit; by huggingface_hub's own thread and with the token it finds."""

    def __init__(self, repo: str, say: Callable[[str], None]) -> None:
        """Begin to make the repository, so that what prevents it is reported at the start of a run, not at its end."""
        self._repo, self._say, self._api = repo, say, HfApi()
        self._reported: set[str] = set()  # reasons of failures
        self._uploads: list[tuple[Path, Future[None]]] = []
        if get_token() is None:
            log.warning(
                "--push-to-hub %s: there is no token, so nothing is uploaded until `hf auth login` or HF_TOKEN gives one; "
                "the run continues",
                repo,
            )
            return
        disable_progress_bars()  # the run has its own
        made = self._api.run_as_future(self._make)
        made.add_done_callback(lambda one: self._report("the repository cannot be made or reached", one))

    def push(self, folder: Path, message: str) -> None:
        """Upload a folder's files to the root of the repository, after the ones before."""
        upload: Future[None] = Future()
        if get_token() is None:
            upload.cancel()
        else:
            upload = self._api.run_as_future(self._upload, folder, message)
            upload.add_done_callback(lambda one: self._report(f"{folder} cannot be uploaded", one))
        self._uploads.append((folder, upload))

    def finish(self, is_stopped: Callable[[], bool]) -> None:
        """Wait for the uploads, until `is_stopped`: those that have not begun are left. Then report what is not uploaded."""
        pending = [upload for _, upload in self._uploads if not upload.done()]
        if pending and not is_stopped():
            self._say(f"uploading to {self._repo}; Ctrl-C leaves what has not begun, the run is complete")
        while not is_stopped() and wait(pending, _POLL_S).not_done:
            pass
        for folder, upload in self._uploads:
            upload.cancel()
            if not upload.done() or upload.cancelled() or upload.exception() is not None:
                log.warning("%s is not uploaded: hf upload %s %s does it", folder, self._repo, folder)

    def _make(self) -> None:
        self._api.create_repo(self._repo, private=True, exist_ok=True)

    def _upload(self, folder: Path, message: str) -> None:
        self._make()
        self._api.upload_folder(repo_id=self._repo, folder_path=folder, commit_message=message)

    def _report(self, failure: str, ended: Future[None]) -> None:
        """Report an error as a warning, once if others have the same reason; whatever happens there, the run continues."""
        if ended.cancelled() or (error := ended.exception()) is None:
            return
        reason = " ".join(f"{type(error).__name__}: {_OF_ONE_REQUEST.sub('', str(error))}".split())[:300]
        cause = error.__cause__
        if cause is not None and str(cause) not in str(error):
            reason += f" ({cause!r:.200})"
        if reason not in self._reported:
            self._reported.add(reason)
            log.warning("--push-to-hub %s: %s: %s", self._repo, failure, reason)
