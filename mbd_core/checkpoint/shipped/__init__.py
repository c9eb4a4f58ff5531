"""The project's trained and shipped models, and the folder of a model by its name or path."""

from pathlib import Path

from mbd_core.checkpoint.adaptation.fetching import WHEELS, fetched_folder
from mbd_core.checkpoint.shipped.adapted import CONFIG, SHIPPED, adapted_folder, adapter_names


def named_model(model: str) -> str:
    """A model's name in recipes and records: a shipped model's name, or any other folder's absolute path.

    Raises `ValueError` as `model_folder` does.
    """
    folder = model_folder(model)
    return model if folder == SHIPPED / model else str(folder.resolve())


def model_folder(model: str) -> Path:
    """The folder of a shipped or fetched model by name, or of any model by path.

    The folder of a GGUF file or of a shipped adapter is in the user's cache; the first call makes it. Raises
    `ValueError` listing the known names, and as `folder_of_gguf` and `adapted_folder` do.
    """
    from mbd_core.checkpoint.adaptation.gguf_files import find_gguf, folder_of_gguf

    gguf = find_gguf(Path(model))
    if gguf is not None:
        return folder_of_gguf(gguf)
    if model in adapter_names():
        return adapted_folder(model)
    fetched = [fetched_folder(model)] if model in WHEELS else []
    for folder in (SHIPPED / model, Path(model), *fetched):
        if (folder / "config.json").is_file():
            return folder
    if (Path(model) / CONFIG).is_file():
        raise ValueError(
            f"{model} is an adapter, not a model; merge it into its base: mbd convert BASE --adapter {model} --out DIR"
        )
    if Path(model).exists():
        raise ValueError(f"{model} is no model folder: it holds no config.json")
    if model in WHEELS:
        raise ValueError(f"{model} is not on this machine yet; fetch it once: mbd fetch {model}")
    names = sorted([*(path.parent.name for path in SHIPPED.glob("*/config.json")), *adapter_names(), *WHEELS])
    raise ValueError(
        f"unknown model '{model}': neither a model folder nor a known name; known: {', '.join(names) or 'none'}"
    )
