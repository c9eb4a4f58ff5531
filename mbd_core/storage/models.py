"""Models at URLs, which are downloaded before they are read."""

from pathlib import Path

from mbd_core.storage.cache import user_cache
from mbd_core.storage.folder import SCHEME, Folder


def fetch_model(model: str, *, cache: Path | None = None) -> str:
    """The argument of `model_folder` for a model's name, path or URL; a remote folder is downloaded first.

    It goes to `cache`, by default the user's, once for each version however many processes want it. Raises
    `ValueError` if it cannot be read, or does not fit on the disk.
    """
    if SCHEME.match(model) is None:
        return model
    return str(Folder.at(model).fetch(cache or user_cache("models")))
