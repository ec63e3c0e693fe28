"""Look up models and files on a hub; fall back to the local cache if the hub cannot be reached."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from bucketline.errors import ModelError

_TIMEOUT_S = 10.0


def cached_unless_reached(name: str) -> Path | None:
    """Return a model's folder in the hub cache if the hub cannot be reached; None if the hub has the model.

    Raises:
        ModelError: if the hub does not have the model, or cannot be reached and the model is not cached.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    expected = "expected a model folder in diffusers' layout, or the name of a model on a hub"
    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except HFValidationError as error:
        raise ModelError(f"{name} is neither a folder nor a valid hub name ({one_line(error)}); {expected}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is not a local folder, and the hub has no such model, or it is private; check the name, or log in with "
            "`hf auth login` if it is private"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"{name} is not a local folder, and the hub refused the request ({one_line(error)}); try again later"
        ) from error
    except Exception as error:  # noqa: BLE001 - whatever the hub's HTTP client raises without a network
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ModelError(
                f"{name} is not a local folder, and the hub could not be reached ({one_line(error)}); "
                "name a model's folder, or run it once with network access"
            ) from error
    return None


@lru_cache(maxsize=4)  # called once per part of a model
def file_names(name: str) -> tuple[str, ...]:
    """Return the paths of all files of a model on a hub.

    Raises:
        ModelError: if the hub does not list its files.
    """
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(name, timeout=_TIMEOUT_S).siblings
    except Exception as error:  # as above: whatever the client raises
        raise ModelError(f"{name}: the hub does not list its files ({one_line(error)}); try again") from error
    return tuple(file.rfilename for file in found or ())


def fetch(name: str, file: str) -> Path | None:
    """Download a file of a model and return its path; None if the model has no such file.

    Raises:
        ModelError: if the file cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file))
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{name}: {file} cannot be downloaded from the hub: {one_line(error)}; try again") from error
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        told = one_line(error)
        raise ModelError(f"{name}: the hub refuses {file}: {told}; log in with `hf auth login`, or try again") from error


def one_line(error: Exception) -> str:
    r"""Return the first line of a library's error message; the others hold advice that is not meant for our users.

    >>> one_line(OSError("it is not there.\n\nPlease see https://example.org"))
    'it is not there'
    """
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return first[:200].rstrip(".")
