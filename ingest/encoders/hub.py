"""Look up a model on a hub, and in the hub's local cache if the hub cannot be reached."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from bucketline.errors import ModelError
from bucketline.model_file import INDEX, MODULAR_INDEX, error_line

_TIMEOUT_S = 10.0
_CONFIG = "/config.json"


def snapshot(name: str) -> tuple[Path, tuple[str, ...] | None]:
    """Return the folder of a hub model's commit in the cache, named after it, with its configurations downloaded.

    Also return the paths of all files on the hub; None if it could not be reached, and the folder is as it was.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    expected = "expected a model folder in diffusers' layout, or the name of a model on a hub"
    try:
        info = HfApi().model_info(name, timeout=_TIMEOUT_S)
    except HFValidationError as error:
        raise ModelError(f"{name} is neither a folder nor a valid hub name ({error_line(error)}); {expected}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is not a local folder, and the hub has no such model, or it is private; check the name, or log in with "
            "`hf auth login` if it is private"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"{name} is not a local folder, and the hub refused the request ({error_line(error)}); try again later"
        ) from error
    except Exception as error:  # noqa: BLE001 - whatever the hub's HTTP client raises without a network
        try:
            # no pattern: no file has to be there, since parts that were never used were never downloaded either
            path = snapshot_download(name, local_files_only=True, allow_patterns=[])
            return Path(path), None
        except LocalEntryNotFoundError:
            raise ModelError(
                f"{name} is not a local folder, and the hub could not be reached ({error_line(error)}); "
                "name a model's folder, or run it once with network access"
            ) from error
    files = tuple(file.rfilename for file in info.siblings or ())
    configs = [file for file in files if file in (INDEX, MODULAR_INDEX) or file.endswith(_CONFIG)]
    if not configs:
        raise ModelError(f"{name}: the model on the hub has no {INDEX} and no config.json in a folder; {expected}")
    try:
        # one by one, since a snapshot of these few would draw its progress bar at every start
        paths = [Path(hf_hub_download(name, file)).parents[file.count("/")] for file in configs]
    except Exception as error:  # as above
        raise ModelError(
            f"{name}: its configuration cannot be downloaded from the hub: {error_line(error)}; "
            "log in with `hf auth login`, or try again"
        ) from error
    return paths[-1], files


def downloaded(name: str, files: list[str], revision: str) -> list[Path]:
    """Return the paths of a hub model's files in the cache, after downloading those that it lacks."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):  # all of them are there: nothing is requested
        return [Path(hf_hub_download(name, file, revision=revision, local_files_only=True)) for file in files]
    try:
        return [Path(hf_hub_download(name, file, revision=revision)) for file in files]
    except Exception as error:  # whatever the hub's HTTP client raises
        raise ModelError(f"{name}: its weights cannot be downloaded from the hub: {error_line(error)}; try again") from error
