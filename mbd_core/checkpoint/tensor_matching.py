"""The check of a checkpoint's tensors against those that its config.json asks for."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mbd_core.checkpoint.safetensor_files import TensorInfo
from mbd_core.checkpoint.tensor_names import ExpertLayout, StoredTensor, TensorShape, stored_tensors
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig


def match_tensors(
    folder: Path, config: ModelConfig, listed: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, StoredTensor], ExpertLayout]:
    """The checkpoint's tensors to read, the decoder tensors that each of them holds, and the experts' layout.

    `listed` has all tensors of the files. Raises `ValueError` naming the file and the tensor if they are not exactly
    those that `config` asks for.
    """
    needed, shapes = dict(listed), decoder_shapes(config)
    _drop_tied_head(config, needed)
    layout = _detect_layout(config, shapes, needed)
    stored = stored_tensors(config, shapes, layout)
    _check_tensors(folder, config, needed, stored)
    return needed, stored, layout


def decoder_shapes(config: ModelConfig) -> dict[str, TensorShape]:
    """The shape of every tensor of the whole decoder, found without allocating it."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Decoder(config).state_dict().items()}


def _check_tensors(
    folder: Path, config: ModelConfig, listed: dict[str, TensorInfo], expected: dict[str, StoredTensor]
) -> None:
    """Raise `ValueError`, naming file and tensor, unless `listed` has exactly the expected tensors in their shapes."""
    for name, info in listed.items():
        if name not in expected:
            raise ValueError(f"{info.path} has an unexpected tensor '{name}' for {config.architecture}")
        wanted = expected[name].shape
        if info.shape == wanted:
            continue
        vocabulary = {"model.embed_tokens.weight", "lm_head.weight"} & {p.target for p in expected[name].parts}
        if vocabulary and info.shape[1:] == wanted[1:]:
            raise ValueError(
                f"{info.path}: tensor '{name}' has {info.shape[0]} rows, config.json says vocab_size={wanted[0]}"
            )
        raise ValueError(f"{info.path}: tensor '{name}' has shape {info.shape}, config.json asks for {wanted}")
    missing = sorted(expected.keys() - listed.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} lacks the tensor '{missing[0]}'{more}, which config.json asks for")


def _detect_layout(config: ModelConfig, shapes: dict[str, TensorShape], listed: Iterable[str]) -> ExpertLayout:
    """The layout that shares most names with the files, because no key of a config.json says it reliably."""
    layouts: tuple[ExpertLayout, ...] = ("per_expert", "fused", "decoder")
    names = set(listed)
    return max(layouts, key=lambda layout: len(names & stored_tensors(config, shapes, layout).keys()))


def _drop_tied_head(config: ModelConfig, listed: dict[str, TensorInfo]) -> None:
    """Remove the lm_head from `listed` if embeddings are tied: some files store the embeddings a second time there."""
    if config.tie_word_embeddings:
        untied = replace(config, tie_word_embeddings=False)
        for name in stored_tensors(untied, {"lm_head.weight": (1, 1)}, "per_expert"):
            listed.pop(name, None)
