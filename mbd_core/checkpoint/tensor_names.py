"""The names and shapes of the decoder's tensors in a checkpoint: the family's names, fused projections, experts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mbd_core.checkpoint.families import FAMILIES
from mbd_core.models.model_config import ModelConfig

# A checkpoint as Hugging Face writes it, or as torch.distributed.checkpoint does.
Format = Literal["hf", "dcp"]

ExpertLayout = Literal["per_expert", "fused", "decoder"]
FLOAT32_ALWAYS = ("expert_bias",)  # tensors with these name endings are float32, whatever the checkpoint's dtype
TensorShape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A part of a stored tensor: the decoder's tensor `target`, or only its expert number `expert`."""

    target: str
    expert: int | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A checkpoint's tensor: its shape, and its parts, which lie one after another along dimension 0.

    `lengths` has the rows of each part.
    """

    shape: TensorShape
    parts: tuple[TensorPart, ...]
    lengths: tuple[int, ...]


def stored_tensors(
    config: ModelConfig, shapes: Mapping[str, TensorShape], experts: ExpertLayout
) -> dict[str, StoredTensor]:
    """Every tensor of this model's checkpoint, by its name there; `shapes` are those of the whole decoder.

    "per_expert": one tensor an expert, as in published checkpoints. "fused": a layer's experts stacked, as in training
    checkpoints. "decoder": the decoder's own names and shapes, as our trainer writes them.
    """
    names: Mapping[str, str] = {} if experts == "decoder" else FAMILIES[config.architecture].names
    parts_of: dict[str, list[TensorPart]] = {}
    for ours in shapes:
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = _stored_name(ours, names)
        if "{e}" not in theirs:
            parts_of.setdefault(theirs, []).append(TensorPart(ours))
        elif experts == "fused":
            parts_of[ours] = [TensorPart(ours)]
        else:
            for expert in range(shapes[ours][0]):
                parts_of[theirs.replace("{e}", str(expert))] = [TensorPart(ours, expert)]
    return {name: _stored_tensor(parts, shapes) for name, parts in parts_of.items()}


def _stored_name(ours: str, names: Mapping[str, str]) -> str:
    """The family's name for the decoder tensor `ours`; modules that are not in `names` keep their names."""
    layer = re.search(r"\.layers\.(\d+)\.", ours)
    number = layer[1] if layer else ""
    pattern = ours.replace(f".layers.{number}.", ".layers.{i}.", 1) if layer else ours
    if pattern in names:
        return names[pattern].replace("{i}", number)
    module, _, leaf = pattern.rpartition(".")
    return f"{names.get(module, module)}.{leaf}".replace("{i}", number)


def _stored_tensor(parts: list[TensorPart], shapes: Mapping[str, TensorShape]) -> StoredTensor:
    each = [shapes[p.target] if p.expert is None else shapes[p.target][1:] for p in parts]
    lengths = tuple(shape[0] for shape in each)
    return StoredTensor((sum(lengths), *each[0][1:]), tuple(parts), lengths)
