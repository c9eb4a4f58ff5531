"""Models at URLs, which are downloaded before they are read."""

import os
from pathlib import Path

from mbd_core.storage.folder import SCHEME, Folder


def fetch_model(model: str, *, cache: Path | None = None) -> str:
    """The argument of `model_folder` for a model's name, path or URL; a remote folder is downloaded first.

    It goes to `cache`, by default the user's (`XDG_CACHE_HOME`), once for each version. Raises `ValueError` if it
    cannot be read.
    """
    if SCHEME.match(model) is None:
        return model
    return str(Folder.at(model).fetch(cache or user_cache("models")))


def user_cache(kind: str) -> Path:
    """The user's folder for files of a kind that can be fetched again (`XDG_CACHE_HOME`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mbd-cluster" / kind
