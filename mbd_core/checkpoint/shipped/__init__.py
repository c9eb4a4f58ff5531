"""The project's trained and shipped models, and the folder of a model by its name or path."""

from pathlib import Path

from mbd_core.checkpoint.adaptation.fetching import WHEELS, fetched_folder

SHIPPED = Path(__file__).resolve().parent


def named_model(model: str) -> str:
    """A model's name in recipes and records: a shipped model's name, or any other folder's absolute path.

    Raises `ValueError` as `model_folder` does.
    """
    folder = model_folder(model)
    return model if folder == SHIPPED / model else str(folder.resolve())


def model_folder(model: str) -> Path:
    """The folder of a shipped or fetched model by name, or of any model by path; a GGUF file's is in the user's cache.

    Raises `ValueError` listing the known names, and as `folder_of_gguf` does.
    """
    from mbd_core.checkpoint.adaptation.gguf_files import find_gguf, folder_of_gguf

    gguf = find_gguf(Path(model))
    if gguf is not None:
        return folder_of_gguf(gguf)
    fetched = [fetched_folder(model)] if model in WHEELS else []
    for folder in (SHIPPED / model, Path(model), *fetched):
        if (folder / "config.json").is_file():
            return folder
    if Path(model).exists():
        raise ValueError(f"{model} is no model folder: it holds no config.json")
    if model in WHEELS:
        raise ValueError(f"{model} is not on this machine yet; fetch it once: mbd fetch {model}")
    names = sorted([*(path.parent.name for path in SHIPPED.glob("*/config.json")), *WHEELS])
    raise ValueError(
        f"unknown model '{model}': neither a model folder nor a known name; known: {', '.join(names) or 'none'}"
    )
