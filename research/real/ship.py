"""A trained adapter as a shipped one: in bfloat16, with names instead of the paths of the machine that trained it."""

import json
from pathlib import Path
from typing import Annotated

from mbd_core.checkpoint.shipped.adapted import PARTS, SHIPPED, wheel_of
from mbd_core.command_line import command
from mbd_core.fields import MODEL, OUTPUT, Flag
from mbd_core.files import check_target_folder, folder_beside, write_json

KIND = "shipped adapter"


def run(
    *,
    adapter: Annotated[Path, Flag("The folder that a training wrote (--write adapter).", MODEL, metavar="DIR")],
    base: Annotated[str, Flag("The base's name: a model to fetch, or a shipped adapter.", MODEL, metavar="NAME")],
    name: Annotated[str, Flag("The name to ship it by.", OUTPUT, metavar="NAME")],
    about: Annotated[str, Flag("A sentence for its README: what it was trained on.", OUTPUT, metavar="TEXT")],
    out: Annotated[Path, Flag("The folder in which it is put.", OUTPUT, metavar="DIR")] = SHIPPED,
    overwrite: Annotated[bool, Flag("Replace a shipped adapter of this name.", OUTPUT)] = False,
) -> None:
    """Writes a trained adapter as a shipped one."""
    import torch
    from safetensors.torch import load_file, save_file

    from mbd_core.checkpoint.adapter import CONFIG, WEIGHTS

    licence = wheel_of(base).licence
    check_target_folder(out / name, KIND, overwrite=overwrite)
    settings = json.loads((adapter / CONFIG).read_text())
    recipe = json.loads((adapter / "recipe.json").read_text())
    recipe |= {"base": base, "data": {**recipe["data"], "path": "research/real"}}
    if start := recipe["train"]["lora"].get("start"):
        recipe["train"]["lora"]["start"] = Path(start).name
    card = f"---\nlicense: {licence.lower()}\nbase_model: {base}\n---\n{name}: {base}, adapted. {about}\n"
    with folder_beside(out / name, KIND, overwrite=overwrite) as folder:
        tensors = {key: tensor.to(torch.bfloat16) for key, tensor in load_file(adapter / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        write_json(folder / CONFIG, {**settings, "base_model_name_or_path": base})
        write_json(folder / "recipe.json", recipe)
        (folder / "README.md").write_text(card)
    assert {path.name for path in (out / name).iterdir()} >= set(PARTS)
    print(f"wrote {out / name}")


main = command(run, "python -m research ship")
