"""Whether a hub has a model of a name; where it cannot be asked, what was downloaded before is used."""

from __future__ import annotations

from pathlib import Path

from bucketline.errors import ModelError

_TIMEOUT_S = 10.0


def cached_unless_reached(name: str) -> Path | None:
    """Give a model's folder in the hub's cache where the hub cannot be reached; None where it can, and has the model.

    Raises:
        ModelError: where the hub does not have it, or can neither be reached nor has been before.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    expected = "expected a model folder in diffusers' layout, or the name of a model on a hub"
    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except HFValidationError as error:
        raise ModelError(f"{name} is no folder here, and no name that a hub takes ({one_line(error)}); {expected}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is no folder here, and the hub has no such model, or none for you; check the name, or log in with "
            "`hf auth login` if it is private"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(f"{name} is no folder here, and the hub refused ({one_line(error)}); try again later") from error
    except Exception as error:  # noqa: BLE001 - whatever the hub's client of HTTP raises without a network
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ModelError(
                f"{name} is no folder here, and the hub could not be reached ({one_line(error)}); "
                "name a model's folder, or run it once where there is a network"
            ) from error
    return None


def fetch(name: str, file: str) -> Path | None:
    """Give a file of a model on a hub, downloaded; None where the model has no such file.

    Raises:
        ModelError: where it cannot be downloaded.
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
    r"""Give an error of a library in one line: those of a hub are several, with advice that is not meant for our users.

    >>> one_line(OSError("it is not there.\n\nPlease see https://example.org"))
    'it is not there'
    """
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return first[:200].rstrip(".")
