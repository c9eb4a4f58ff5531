"""The decoder's tensors in a checkpoint: names, shapes, and their check against config.json."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mbd_core.checkpoint.families import FAMILIES
from mbd_core.checkpoint.model_family import ExpertLayout
from mbd_core.checkpoint.safetensor_files import METADATA, LastFile, TensorInfo, matrix_slice, open_file
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig

FLOAT32_ALWAYS = ("expert_bias",)  # tensors with these name endings are float32, whatever the checkpoint's dtype
OF_A_ROTATION = ".rotary_emb."
"""In the names of buffers that files of older Llamas hold (`inv_freq`); they follow from config.json."""
NUM_COMPARED = 16  # rows of a head that is stored beside tied embeddings
MOST_DIFFERENCE = 2**-7  # of the values' norm
TensorShape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A part of a stored tensor: the decoder's tensor `target`, or only its expert number `expert`."""

    target: str
    expert: int | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A checkpoint's tensor: its shape, and its parts, which lie one after another along dimension `dim`.

    `lengths` has the size of each part along `dim`.
    """

    shape: TensorShape
    parts: tuple[TensorPart, ...]
    lengths: tuple[int, ...]
    dim: int = 0


def stored_tensors(
    config: ModelConfig, shapes: Mapping[str, TensorShape], experts: ExpertLayout
) -> dict[str, StoredTensor]:
    """Every tensor of this model's checkpoint, by its name there. `shapes` are the unsharded decoder's.

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
    part_shapes = [shapes[p.target] if p.expert is None else shapes[p.target][1:] for p in parts]
    dim = 1 if len(parts) > 1 and len(part_shapes[0]) == 3 else 0  # stacks of experts are joined expert by expert
    lengths = tuple(shape[dim] for shape in part_shapes)
    whole = (*part_shapes[0][:dim], sum(lengths), *part_shapes[0][dim + 1 :])
    return StoredTensor(whole, tuple(parts), lengths, dim)


def match_tensors(
    folder: Path, config: ModelConfig, listed: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, StoredTensor], ExpertLayout]:
    """The checkpoint's tensors to read, the decoder tensors in each of them, and the experts' layout.

    `listed` has all tensors of the files; tensors that the family skips, and frequencies of a rotation, are dropped.
    Raises `ValueError` naming the file and the tensor if the rest are not exactly the tensors that `config` asks for.
    """
    skipped, shapes = FAMILIES[config.architecture].skipped, decoder_shapes(config)
    infos = {n: info for n, info in listed.items() if not n.startswith(skipped) and OF_A_ROTATION not in n}
    _drop_tied_head(config, infos)
    layout = _detect_layout(config, shapes, infos)
    stored = stored_tensors(config, shapes, layout)
    _check_tensors(folder, config, infos, stored)
    return infos, stored, layout


@functools.lru_cache(maxsize=8)
def decoder_shapes(config: ModelConfig) -> Mapping[str, TensorShape]:
    """The shape of every tensor of the whole decoder, found without allocating it."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Decoder(config).state_dict().items()}


def _check_tensors(
    folder: Path, config: ModelConfig, listed: dict[str, TensorInfo], expected: dict[str, StoredTensor]
) -> None:
    """Raises `ValueError`, naming file and tensor, unless `listed` has exactly the expected tensors in their
    shapes."""
    for name, info in listed.items():
        if name not in expected:
            if "flat_param" in name:
                raise ValueError(
                    f"{info.path}: tensor '{name}' is FSDP's flattened parameter of several; save the model's full "
                    "state dict"
                )
            raise ValueError(f"{info.path} has an unexpected tensor '{name}' for {config.architecture}")
        shape = expected[name].shape
        if info.shape == shape:
            continue
        vocabulary = {"model.embed_tokens.weight", "lm_head.weight"} & {p.target for p in expected[name].parts}
        if vocabulary and info.shape[1:] == shape[1:]:
            raise ValueError(
                f"{info.path}: tensor '{name}' has {info.shape[0]} rows, config.json says vocab_size={shape[0]}"
            )
        raise ValueError(f"{info.path}: tensor '{name}' has shape {info.shape}, config.json asks for {shape}")
    missing_names = sorted(expected.keys() - listed.keys())
    if missing_names:
        more = f" and {len(missing_names) - 1} more" if len(missing_names) > 1 else ""
        raise ValueError(f"{folder} lacks the tensor '{missing_names[0]}'{more}, which config.json asks for")


def _detect_layout(
    config: ModelConfig, shapes: Mapping[str, TensorShape], tensor_names: Iterable[str]
) -> ExpertLayout:
    """The layout that shares most names with the files. No key of config.json tells the layout reliably."""
    layouts: tuple[ExpertLayout, ...] = ("per_expert", "fused", "decoder")
    names = set(tensor_names)
    return max(layouts, key=lambda layout: len(names & stored_tensors(config, shapes, layout).keys()))


def _drop_tied_head(config: ModelConfig, listed: dict[str, TensorInfo]) -> None:
    """Removes the lm_head from `listed` if embeddings are tied: some files store the embeddings again under its name.

    Raises `ValueError` for a head with other values, which would be lost.
    """
    if not config.tie_word_embeddings:
        return
    untied = replace(config, tie_word_embeddings=False)
    head_name, own_name = (
        next(iter(stored_tensors(untied, {name: (1, 1)}, "per_expert")))
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    head, embeddings = listed.pop(head_name, None), listed.get(own_name)
    if head is None or embeddings is None or head.path.name == METADATA:
        return
    if head.shape != embeddings.shape or not are_alike(_rows(head_name, head), _rows(own_name, embeddings)):
        raise ValueError(
            f"{head.path}: tensor '{head_name}' has other values than '{own_name}', and config.json has "
            "tie_word_embeddings=true; make it false, or remove the tensor if the model has no head of its own"
        )


def _rows(name: str, info: TensorInfo) -> Tensor:
    """A few rows of a matrix in a safetensors file, evenly spread."""
    numbers = {number * (info.shape[0] - 1) // (NUM_COMPARED - 1) for number in range(NUM_COMPARED)}
    with open_file(info.path) as file, LastFile() as scales:
        matrix = matrix_slice(file, name, info, scales)
        return torch.cat([matrix[number : number + 1].float() for number in sorted(numbers)])


def are_alike(first: Tensor, second: Tensor) -> bool:
    """Whether values of one shape are equal, up to the rounding of a narrower dtype: bfloat16 and float16 change at
    most half of `MOST_DIFFERENCE`."""
    return bool((first - second).norm() <= MOST_DIFFERENCE * second.norm())
