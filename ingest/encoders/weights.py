"""Check that loaded weights are complete, and compute digests of weights and tokenizers."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bucketline.errors import BucketlineError, ModelError
from bucketline.fingerprint import json_hash
from bucketline.model_file import error_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder


@contextmanager
def loading(model: ModelFolder, part: str) -> Iterator[None]:
    """Turn any exception of the libraries in the block, of which broken files cause almost any, into a ModelError."""
    try:
        yield
    except BucketlineError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{model.name}: {part}/ requires custom code (auto_map), which is never run; "
                "use a model whose parts transformers itself has"
            ) from error
        if (lacks := model.lacks(part)) is not None:
            raise ModelError(f"{model.name}: {part}/ has {lacks}; download or save the model again") from error
        raise ModelError(f"{model.name}: {part}/ cannot be loaded: {error_line(error)}") from error


def refuse_incomplete(item: str, told: Mapping[str, Any], unread: str | None = None) -> frozenset[str]:
    """Refuse a part whose files lack weights, which the libraries would initialise at random.

    Weights whose names begin with `unread` may be missing. Return the names of those that are.
    """
    spared: set[str] = set()
    for what in ("missing_keys", "mismatched_keys"):
        names = {str(key[0] if isinstance(key, tuple) else key) for key in told.get(what) or ()}
        spared |= {name for name in names if unread is not None and name.startswith(unread)}
        if wrong := names - spared:
            raise ModelError(
                f"{item} is incomplete: {len(wrong)} of its weights are {what.removesuffix('_keys')}, such as {min(wrong)}; "
                "download or save the model again"
            )
    return frozenset(spared)


def tokenizer_hash(tokenizer: Any) -> str:  # noqa: ANN401 - any transformers tokenizer
    """Return the digest of what determines a tokenizer's output: its complete pipeline if it has one, else its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    if backend is not None:  # set again at every call
        rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
    return json_hash([type(tokenizer).__name__, tokenizer.special_tokens_map, rules])
