"""Models at URLs, which are downloaded before they are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from mbd_core.storage.cache import user_cache
from mbd_core.storage.folder import SCHEME, Folder

UrlWeights = Literal["cache", "stream"]


def check_url_weights(models: Sequence[str], url_weights: UrlWeights) -> None:
    """Raise `ValueError` if weights are to be streamed, and no model is at a URL."""
    if url_weights == "stream" and models and not any(map(SCHEME.match, models)):
        raise ValueError(f"--url-weights stream has no meaning with {', '.join(models)}, at no URL; leave it out")


class FetchModel(Protocol):
    """A function that does for a job's models what `fetch_model` does."""

    def __call__(self, model: str, *, url_weights: UrlWeights = "cache") -> str: ...


def fetch_model(model: str, *, cache: Path | None = None, url_weights: UrlWeights = "cache") -> str:
    """The argument of `model_folder` for a model's name, path or URL; a remote folder is downloaded first.

    The download goes to `cache`, by default the user's cache. Each version is downloaded once, however many processes
    need it. With "stream" the safetensors of a model that is not in the cache stay at the URL (`streamed.py`). Raises
    `ValueError` if the folder cannot be read, or does not fit on the disk.
    """
    if SCHEME.match(model) is None:
        return model
    stubs = user_cache("streamed") if url_weights == "stream" else None
    return str(Folder.at(model).fetch(cache or user_cache("models"), stubs=stubs))
