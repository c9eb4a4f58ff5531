"""A trained adapter as a shipped one: in bfloat16, with names instead of the paths of the machine that trained it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mbd_core.checkpoint.shipped.adapted import PARTS, SHIPPED, wheel_of
from mbd_core.command_line import command
from mbd_core.fields import MODEL, OUTPUT, Flag, Ge
from mbd_core.files import check_target_folder, folder_beside, write_json

if TYPE_CHECKING:
    from torch import Tensor

KIND = "shipped adapter"


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
    from safetensors.torch import load_file

    from mbd_core.checkpoint.adapter import CONFIG, WEIGHTS
    from mbd_core.checkpoint.safetensor_files import open_file, write_safetensors

    licence = wheel_of(base).licence
    settings = json.loads((adapter / CONFIG).read_text())
    if rank is not None and rank >= settings["r"]:
        raise ValueError(f"--rank {rank} must be below the adapter's own, {settings['r']}")
    check_target_folder(out / name, KIND, overwrite=overwrite)
    recipe = json.loads((adapter / "recipe.json").read_text())
    recipe |= {"base": base, "data": {**recipe["data"], "path": "research/real"}}
    if start := recipe["train"]["lora"].get("start"):
        recipe["train"]["lora"]["start"] = Path(start).name
    card = f"---\nlicense: {licence.lower()}\nbase_model: {base}\n---\n{name}: {base}, adapted. {about}\n"
    with folder_beside(out / name, KIND, overwrite=overwrite) as folder:
        tensors = load_file(adapter / WEIGHTS)
        if rank is not None:
            tensors = at_rank(tensors, rank)
            settings |= {"r": rank, "lora_alpha": settings["lora_alpha"] * rank / settings["r"]}
        with open_file(adapter / WEIGHTS) as file:
            metadata = file.metadata()
        small = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        write_safetensors(folder / WEIGHTS, small, metadata=metadata)
        write_json(folder / CONFIG, {**settings, "base_model_name_or_path": base})
        write_json(folder / "recipe.json", recipe)
        (folder / "README.md").write_text(card)
    assert {path.name for path in (out / name).iterdir()} >= set(PARTS)
    print(f"wrote {out / name}")


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
