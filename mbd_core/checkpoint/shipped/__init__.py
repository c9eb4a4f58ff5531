"""The project's trained and shipped models, and the folder of a model by its name or path."""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parent


def named_model(model: str) -> str:
    """A model's name in recipes and records: a shipped model's name, or any other folder's absolute path.

    Raises `ValueError` as `model_folder` does.
    """
    folder = model_folder(model)
    return model if folder == SHIPPED / model else str(folder.resolve())


def model_folder(model: str) -> Path:
    """The folder of a shipped model by name, or of any model by path. Raises `ValueError` listing the known names."""
    for folder in (SHIPPED / model, Path(model)):
        if (folder / "config.json").is_file():
            return folder
    if Path(model).exists():
        raise ValueError(f"{model} is no model folder: it holds no config.json")
    names = sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))
    raise ValueError(
        f"unknown model '{model}': neither a model folder nor a known name; known: {', '.join(names) or 'none'}"
    )
