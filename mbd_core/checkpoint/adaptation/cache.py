"""The user's cache: models that were fetched, by name, and the folders of GGUF files."""

import os
from pathlib import Path

CACHED_MODELS, FETCHED = "gguf", "models"


def cache_folder() -> Path:
    """The project's folder in the user's cache, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mbd-cluster"
