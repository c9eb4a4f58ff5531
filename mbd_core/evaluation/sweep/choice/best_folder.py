"""The best swept configuration in a model folder's `generation_config.json`, from which engine and endpoint read it.

The file's other fields stay. Its earlier decoding fields lie under `chosen_decoding`, beside a record of the choice.
So a sweep's methods start from the author's recommendation, before and after a choice. Decoding fields that were
edited by hand after the choice count as the author's recommendation.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mbd_core.checkpoint.base_files import CHOSEN
from mbd_core.checkpoint.config import load_config, load_generation_defaults
from mbd_core.checkpoint.folder import METHOD_FIELDS
from mbd_core.checkpoint.shipped import SHIPPED
from mbd_core.decoding.blocks.config import FIELDS_WITH, decoding_config, read_decoding
from mbd_core.decoding.blocks.methods import read_front
from mbd_core.evaluation.sweep.choice.best import BestPoint, decoding_fields
from mbd_core.files import check_writable, write_json

FILE = "generation_config.json"


def check_best_folder(folder: Path) -> None:
    """Raise `ValueError` if a choice cannot be written into a model folder."""
    if folder.resolve().is_relative_to(SHIPPED):
        raise ValueError(
            f"a best configuration cannot be written into {folder.name}, a shipped model that belongs to the package; "
            f"copy its folder ({folder}) and sweep the copy"
        )
    file = folder / FILE
    if file.exists() and not os.access(file, os.W_OK):
        raise ValueError(f"{file} cannot be written: it is read-only")
    check_writable(folder, file)


def author_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """A `generation_config.json` as it was before any choice; if its decoding was edited since, its present fields."""
    choice = generation.get(CHOSEN)
    if choice is None:
        return dict(generation)
    if not isinstance(choice, Mapping) or not isinstance(choice.get("replaced"), Mapping):
        raise ValueError(
            f"{FILE}: {CHOSEN} must be an object with the fields that it 'replaced'; --write-best writes it"
        )
    if is_edited(generation):
        return {name: value for name, value in generation.items() if name != CHOSEN}
    other_fields = {name: value for name, value in generation.items() if name not in METHOD_FIELDS and name != CHOSEN}
    return other_fields | dict(choice["replaced"])


def is_edited(generation: Mapping[str, Any]) -> bool:
    """Whether decoding fields differ from the fields that a choice wrote; `False` if the choice did not record
    them."""
    choice = generation.get(CHOSEN)
    choice_fields = choice.get("written") if isinstance(choice, Mapping) else None
    return choice_fields is not None and choice_fields != {
        n: value for n, value in generation.items() if n in METHOD_FIELDS
    }


def edit_notes(folders: Mapping[str, Path]) -> list[str]:
    """Notes on the model folders, by name, whose decoding was edited after a choice."""
    return [
        f"{name}: the decoding fields of its {FILE} differ from those that --write-best wrote; the sweep starts "
        "from the fields that the file has now"
        for name, folder in folders.items()
        if is_edited(load_generation_defaults(folder))
    ]


def write_best(folder: Path, point: BestPoint) -> None:
    """Make the chosen configuration the folder's own; `ValueError` for a configuration that the model cannot
    honour."""
    defaults = author_defaults(load_generation_defaults(folder))
    config = decoding_fields(point.best.config)
    whole = ("canvas", "causal", "verify")  # parts that leave few other fields
    allowed = next((FIELDS_WITH[part] for part in whole if part in config), METHOD_FIELDS - set(whole))
    choice = {name: value for name, value in config.items() if name in METHOD_FIELDS and name in allowed}
    contents = {name: value for name, value in defaults.items() if name not in METHOD_FIELDS} | choice
    old_fields = {name: value for name, value in defaults.items() if name in METHOD_FIELDS}
    contents[CHOSEN] = {**point.record, "written": choice, "replaced": old_fields}
    block_size = defaults.get("block_size", load_config(folder).block_size)
    try:
        decoding = decoding_config(contents, {}, block_size=block_size)
        if decoding != read_decoding(point.best.config):
            raise ValueError(f"block_size={point.best.config['block_size']} is not the model's {block_size}")
        read_front(contents, block_size=block_size)
    except ValueError as error:
        raise ValueError(f"the chosen decoding does not fit {folder}: {error}") from None
    write_json(folder / FILE, contents)
