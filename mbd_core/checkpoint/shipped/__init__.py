"""The models that the project trained and ships, and the folder of a model by its name or path."""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parent


def model_folder(model: str) -> Path:
    """The folder of a shipped model by name, or of any model by path; `ValueError` lists the known names."""
    for folder in (SHIPPED / model, Path(model)):
        if (folder / "config.json").is_file():
            return folder
    if Path(model).exists():
        raise ValueError(f"{model} is no model folder: it holds no config.json")
    known = sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))
    raise ValueError(
        f"unknown model '{model}': neither a model folder nor a known name; known: {', '.join(known) or 'none'}"
    )
