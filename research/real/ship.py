"""A trained adapter as a shipped one: in bfloat16, with names instead of the paths of the machine that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mbd_core.checkpoint.adaptation.fetching import WHEELS
from mbd_core.checkpoint.shipped.adapted import PARTS, SHIPPED, adapter_names, base_of, wheel_of
from mbd_core.command_line import command
from mbd_core.fields import MODEL, OUTPUT, Flag, Ge
from mbd_core.files import check_target_folder, folder_beside, write_json

if TYPE_CHECKING:
    from torch import Tensor

KIND, RECIPE = "shipped adapter", "recipe.json"


def run(
    *,
    adapter: Annotated[Path, Flag("The folder that a training wrote (--write adapter).", MODEL, metavar="DIR")],
    base: Annotated[str, Flag("The base's name: a model to fetch, or a shipped adapter.", MODEL, metavar="NAME")],
    name: Annotated[str, Flag("The name to ship it by.", OUTPUT, metavar="NAME")],
    about: Annotated[str, Flag("A sentence for its README: what it was trained on.", OUTPUT, metavar="TEXT")],
    rank: Annotated[
        int | None, Ge(1), Flag("Ship its best approximation of this lower rank.", MODEL, default="its own")
    ] = None,
    out: Annotated[Path, Flag("The folder in which it is put.", OUTPUT, metavar="DIR")] = SHIPPED,
    overwrite: Annotated[bool, Flag("Replace a shipped adapter of this name.", OUTPUT)] = False,
) -> None:
    """Writes a trained adapter as a shipped one."""
    import torch

    from mbd_core.checkpoint.adapter import CONFIG, WEIGHTS, rank_and_scale
    from mbd_core.checkpoint.safetensor_files import open_file, read_json, write_safetensors

    _check_names(name, base)
    trained_rank, _ = rank_and_scale(adapter)
    if rank is not None and rank >= trained_rank:
        raise ValueError(f"--rank {rank} must be below the adapter's own, {trained_rank}")
    check_target_folder(out / name, KIND, overwrite=overwrite)
    settings, recipe = read_json(adapter / CONFIG), _recipe_of(adapter / RECIPE)
    recipe |= {"base": base, "data": {**recipe["data"], "path": "research/real"}}
    if start := recipe["train"]["lora"].get("start"):
        recipe["train"]["lora"]["start"] = Path(start).name
    licence = wheel_of(base).licence
    card = f"---\nlicense: {licence.lower()}\nbase_model: {base}\n---\n{name}: {base}, adapted. {about}\n"
    with open_file(adapter / WEIGHTS) as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    with folder_beside(out / name, KIND, overwrite=overwrite) as folder:
        if rank is not None:
            tensors = at_rank(tensors, rank)
            settings |= {"r": rank, "lora_alpha": settings["lora_alpha"] * rank / trained_rank}
        small = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
        write_safetensors(folder / WEIGHTS, small, metadata=metadata)
        write_json(folder / CONFIG, {**settings, "base_model_name_or_path": base})
        write_json(folder / RECIPE, recipe)
        (folder / "README.md").write_text(card)
    assert {path.name for path in (out / name).iterdir()} >= set(PARTS)
    print(f"wrote {out / name}")


def _check_names(name: str, base: str) -> None:
    """Raises `ValueError` for a base that is not known, and for a name that no adapter of this base can have."""
    if base not in (known := [*WHEELS, *adapter_names()]):
        raise ValueError(f"unknown --base {base}; known: {', '.join(known)}")
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"--name {name} must be a name alone; --out says the folder in which it is put")
    while base not in WHEELS and base != name:
        base = base_of(base)
    if base == name:
        raise ValueError(f"--name {name} is the base itself, or below it; give another name")


def _recipe_of(file: Path) -> dict[str, Any]:
    """The recipe of an adapter's training. Raises `ValueError` for a recipe that lacks what is shipped with it."""
    from mbd_core.checkpoint.adaptation.trained_config import whole_recipe
    from mbd_core.checkpoint.safetensor_files import read_json

    if not file.is_file():
        raise ValueError(f"{file.parent} holds no {file.name}; name the folder that a training wrote")
    recipe = whole_recipe(file, read_json(file))
    train = recipe.get("train")
    lora = train.get("lora") if isinstance(train, dict) else None
    for part, value in (("data", recipe.get("data")), ("train.lora", lora)):
        if not isinstance(value, dict):
            raise ValueError(f"{file} says no {part}; name the folder of an adapter that was trained on data")
    return recipe


def at_rank(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """An adapter's matrices A (r, I) and B (O, r) for which B A is nearest to the given ones', at a lower rank."""
    import torch

    out = {}
    for name in (name for name in tensors if ".lora_A." in name):
        other = name.replace(".lora_A.", ".lora_B.")
        left, inner_left = torch.linalg.qr(tensors[other].float())
        right, inner_right = torch.linalg.qr(tensors[name].float().T)
        u, sizes, v = torch.linalg.svd(inner_left @ inner_right.T)
        roots = sizes[:rank].sqrt()
        out[other] = (left @ u[:, :rank] * roots).contiguous()
        out[name] = (roots[:, None] * (v[:rank] @ right.T)).contiguous()
    return out


main = command(run, "python -m research ship")
