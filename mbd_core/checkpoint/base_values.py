"""Values of a base's weights, which an adapter records: an adapter beside another base of equal shapes is refused.

The values are the first of a row of some adaptable projections. So a copy in other shards, under other names of files
or in another precision is the same base, and so is the block-diffusion model that is made of an autoregressive base.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from mbd_core.checkpoint.adapter import CONFIG, WEIGHTS
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.safetensor_files import HfFolder, open_file, read_json
from mbd_core.checkpoint.tensor_pieces import TensorPieces
from mbd_core.checkpoint.tensors import TensorPart, are_alike, match_tensors
from mbd_core.models.lora import adapted_modules

RECORD = "base_values"
"""The entry of the metadata of an adapter's safetensors: values by the decoder's names of weights, in JSON."""
NUM_WEIGHTS, NUM_VALUES = 4, 64


def base_values(folder: Path) -> dict[str, list[float]]:
    """Values of a model folder's weights, by the decoder's names; none of weights in 8 bits."""
    source, config = HfFolder(folder), load_config(folder)
    pieces = TensorPieces(source, match_tensors(folder, config, source.tensors)[1])
    names = [f"{module}.weight" for _, _, module in adapted_modules(config)]
    values = {}
    for name in {names[number * (len(names) - 1) // (NUM_WEIGHTS - 1)]: None for number in range(NUM_WEIGHTS)}:
        place = pieces.places[TensorPart(name)]
        info = source.tensors[place.name]
        if info.scales is None and info.dtype.itemsize > 1:
            row, column = (0, place.start) if place.dim else (place.start, 0)
            with open_file(info.path) as file:
                rows = file.get_slice(info.name or place.name)[row : row + 1]
            values[name] = rows[0, column : column + NUM_VALUES].float().tolist()
    return values


def check_base(adapter: Path, base: Path) -> None:
    """Raises `ValueError`, which names both, if an adapter records values of another base than the folder `base`.

    An adapter without a record is taken.
    """
    path = adapter / WEIGHTS
    if not path.is_file():
        return
    with open_file(path) as file:
        recorded: Mapping[str, list[float]] = json.loads((file.metadata() or {}).get(RECORD, "{}"))
    if not recorded:
        return
    found = base_values(base)
    for name in recorded.keys() & found.keys():
        own, other = torch.tensor(recorded[name]), torch.tensor(found[name])
        if own.shape != other.shape or not are_alike(other, own):
            raise ValueError(
                f"{adapter} was trained beside {read_json(adapter / CONFIG).get('base_model_name_or_path')}, whose "
                f"{name} has other values than that of {base}; give the adapter its own base"
            )
