"""Loading and saving models in the Hugging Face layout: config.json, safetensors, tokenizer, generation_config.json.

Every tensor must be there, none may be left over, each must have its shape: a wrong folder is an error, not a model
with random weights, and it is found out from the files' headers before a weight is read. No weight may be NaN or
infinite, which is found out as it is read. Weights stream from the files into a model made without memory, so that the
peak is the model and one tensor. A folder is written beside its place and renamed.
"""

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mbd_core.checkpoint.families import read_config, write_config
from mbd_core.checkpoint.safetensor_files import (
    DTYPES,
    MAX_SHARD_BYTES,
    METADATA,
    ShardWriter,
    TensorInfo,
    list_tensors,
    open_file,
    read_json,
)
from mbd_core.checkpoint.tensor_names import ExpertLayout, Shape, Stored, stored_tensors
from mbd_core.models.decoder import Decoder, Reduce
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.quantize import quantized_parts
from mbd_core.models.shard import Shard, split_dim

FLOAT32_ALWAYS = ("expert_bias",)
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_config(folder: Path) -> ModelConfig:
    """The model's configuration: config.json, and generation_config.json for ids and block size it leaves out.

    Its EOS ids are generation_config.json's, which may be more than config.json's. Raises `ValueError` where the two
    files contradict each other.
    """
    config, generation = read_json(folder / "config.json"), load_generation_defaults(folder)
    try:
        return _agreed(read_config(config, generation), generation)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _agreed(config: ModelConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """`config` with `generation_config.json`'s EOS ids, which may be more; the mask id must be the same in both."""
    mask, given = generation.get("mask_token_id"), generation.get("eos_token_id")
    if mask is not None and mask != config.mask_token_id:
        raise ValueError(f"generation_config.json says mask_token_id={mask}, config.json says {config.mask_token_id}")
    if given is None:
        return config
    eos = given if isinstance(given, list) else [given]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in eos):
        raise ValueError(f"generation_config.json says eos_token_id={given!r}, which is no list of token ids")
    ours = list(config.eos_token_ids)
    if not set(ours) <= set(eos):
        raise ValueError(f"generation_config.json says eos_token_id={given}, config.json says {ours}")
    if set(eos) == set(ours):
        return config
    try:
        return replace(config, eos_token_ids=tuple(dict.fromkeys(eos)))
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None


def load_generation_defaults(folder: Path) -> dict[str, Any]:
    """What the model's author recommends for decoding (`generation_config.json`), empty where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def load_tokenizer(folder: Path, config: ModelConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer, checked against the model: the mask id must be the same and no id may exceed the vocabulary.

    Tokenizers that name no mask token (LLaDA's) must have a special token at the model's mask id.
    """
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    kind = _tokenizer_kind(folder)
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {' '.join(str(error).split())}") from None
    added = tokenizer.added_tokens_decoder.get(config.mask_token_id)
    unnamed = tokenizer.mask_token is None and added is not None and added.special
    if tokenizer.mask_token_id != config.mask_token_id and not unnamed:
        raise ValueError(
            f"{folder}: config.json says mask_token_id={config.mask_token_id} but the tokenizer's mask token "
            f"{tokenizer.mask_token!r} is {tokenizer.mask_token_id}"
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}")
    return tokenizer


def _tokenizer_kind(folder: Path) -> Any:
    """The class to load a tokenizer with: no checkpoint's own code is run."""
    # importing transformers takes as long as importing torch, and tensor-parallel followers need no tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast  # the file is the whole tokenizer
    settings = folder / "tokenizer_config.json"
    if settings.exists() and read_json(settings).get("tokenizer_class") == "DreamTokenizer":
        return Qwen2Tokenizer  # Dream's is Qwen2's, under a name of its own
    return AutoTokenizer


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    shard: Shard | None = None,
    reduce: Reduce | None = None,
) -> Decoder:
    """The weights of a checkpoint folder, in evaluation mode; raises `ValueError` naming the file and the tensor.

    Without `dtype` they stay as stored (where a checkpoint mixes dtypes, in the one that config.json names); the
    router's `expert_bias` is float32 in any case. With a `shard`, only that tensor-parallel rank's slices are read;
    `reduce` must then sum over the ranks (see `Decoder`).
    """
    refuse_dcp(folder)
    config = load_config(folder)
    with torch.device("meta"):
        model = Decoder(config, shard=shard, reduce=reduce)
    found, expected, _ = match_tensors(folder, config, list_tensors(folder))
    common = dtype or _stored_dtype(folder, found)
    weights = {
        name: torch.empty(t.shape, dtype=torch.float32 if name.endswith(FLOAT32_ALWAYS) else common, device=device)
        for name, t in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    for path, names in itertools.groupby(found, key=lambda name: found[name].path):
        with open_file(path) as file:
            for name in names:
                written = _copy_in(weights, file.get_slice(name), expected[name], model.shard)
                if not all(_is_finite(part) for part in written):
                    kind = str(written[0].dtype).removeprefix("torch.")
                    raise ValueError(f"{path}: tensor '{name}' has values that are not finite in {kind}")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def save_model(
    folder: Path,
    model: Decoder,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    generation: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    extra: dict[str, str] | None = None,
    experts: ExpertLayout = "per_expert",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a complete model folder, replacing what is there; `extra` adds small text files (name -> content).

    Weights are cast to `dtype` (None: stay as they are), the router's `expert_bias` never is.
    """
    if model.shard.size > 1:
        raise ValueError(f"rank {model.shard.rank} of {model.shard.size} holds only its part of the model to be saved")
    if quantized_parts(model) is not None:
        raise ValueError("the model's weights were rounded to FP8; save the one that it was made from")
    kept = dtype or model.model.embed_tokens.weight.dtype
    tensors = (
        (name, tensor.detach().to(torch.float32 if name.endswith(FLOAT32_ALWAYS) else dtype))
        for name, tensor in checkpoint_tensors(model, experts)
    )
    with written_beside(folder) as beside:
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        _write(beside, model.config, tensors, kept, experts, max_shard_bytes, generation)
        for name, text in (extra or {}).items():
            (beside / name).write_text(text)


def save_random(
    config: ModelConfig,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a folder of random weights in a real model's layout, tensor by tensor: about a shard is in memory.

    It has no tokenizer. `progress` hears of bytes written so far and in all. Raises `ValueError`, before anything is
    written, for a folder that is there already and where the disk has no room.
    """
    check_new(folder)
    generator = torch.Generator().manual_seed(seed)
    stored = stored_tensors(config, decoder_shapes(config), "per_expert")
    dtypes = {name: torch.float32 if name.endswith(FLOAT32_ALWAYS) else dtype for name in stored}
    total, done = sum(math.prod(s.shape) * dtypes[name].itemsize for name, s in stored.items()), 0
    check_room(folder, total)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal done
        for name, wanted in stored.items():
            tensor = torch.empty(wanted.shape, dtype=dtypes[name])
            if tensor.ndim > 1:
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            done += tensor.nbytes
            progress(done, total)
            yield name, tensor

    with written_beside(folder) as beside:
        _write(beside, config, tensors(), dtype, "per_expert", max_shard_bytes)


def _write(
    folder: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    experts: ExpertLayout,
    max_shard_bytes: int,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """The safetensors files, config.json and generation_config.json: ids and block size, then what is recommended."""
    writer = ShardWriter(folder, max_bytes=max_shard_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.close()
    ids = {"eos_token_id": list(config.eos_token_ids), "mask_token_id": config.mask_token_id}
    files = {
        "config.json": {**write_config(config, fused=experts == "fused"), "dtype": str(dtype).removeprefix("torch.")},
        "generation_config.json": {**ids, "block_size": config.block_size, **(generation or {})},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def checkpoint_tensors(model: Decoder, experts: ExpertLayout) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors one by one under the names, and in the shapes, of its family's checkpoints."""
    state = model.state_dict()
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    for name, stored in stored_tensors(model.config, shapes, experts).items():
        parts = [state[p.target] if p.expert is None else state[p.target][p.expert] for p in stored.parts]
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts)


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` if the body succeeds, and vanishes if it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield beside
        beside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_new(folder: Path) -> None:
    """Raise `ValueError` if `folder` is there already, be it as a link to nothing."""
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists already; give a folder that is yet to be made")


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise `ValueError` if the disk where `folder` is to be made has less than `num_bytes` free."""
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise ValueError(f"{folder} needs {num_bytes:,} bytes and {there} has {free:,} free; choose another disk")


def refuse_dcp(folder: Path) -> None:
    """Raise `ValueError` for a distributed checkpoint where a Hugging Face folder is needed."""
    if (folder / METADATA).exists():
        raise ValueError(
            f"{folder} is a distributed checkpoint; make a model folder of it with "
            "jobs/convert_checkpoint.py --format hf"
        )


def decoder_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the whole decoder; no memory is taken for them."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Decoder(config).state_dict().items()}


def match_tensors(
    folder: Path, config: ModelConfig, listed: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, Stored], ExpertLayout]:
    """Of a checkpoint's tensors those that count, what lies in each, and how its experts lie.

    Raises `ValueError` naming the file and the tensor if they are not exactly `config`'s.
    """
    found, shapes = dict(listed), decoder_shapes(config)
    _drop_tied_head(config, found)
    layout = _detect_layout(config, shapes, found)
    stored = stored_tensors(config, shapes, layout)
    _check_tensors(folder, config, found, stored)
    return found, stored, layout


def _check_tensors(
    folder: Path, config: ModelConfig, found: dict[str, TensorInfo], expected: dict[str, Stored]
) -> None:
    """Every expected tensor is there in its shape, and no other; `ValueError` names the file and the tensor."""
    for name, info in found.items():
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
    missing = sorted(expected.keys() - found.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} lacks the tensor '{missing[0]}'{more}, which config.json asks for")


def _detect_layout(config: ModelConfig, shapes: dict[str, Shape], found: Iterable[str]) -> ExpertLayout:
    """The layout whose names fit best: nothing in a config.json tells it reliably."""
    layouts: tuple[ExpertLayout, ...] = ("per_expert", "fused", "decoder")
    names = set(found)
    return max(layouts, key=lambda layout: len(names & stored_tensors(config, shapes, layout).keys()))


def _drop_tied_head(config: ModelConfig, found: dict[str, TensorInfo]) -> None:
    """Pass over the copy of the embeddings that some files of tied models hold as lm_head."""
    if config.tie_word_embeddings:
        untied = replace(config, tie_word_embeddings=False)
        for name in stored_tensors(untied, {"lm_head.weight": (1, 1)}, "per_expert"):
            found.pop(name, None)


def _stored_dtype(folder: Path, found: dict[str, TensorInfo]) -> torch.dtype:
    """The one dtype of all weights; where there are several, the one of config.json's `dtype` or `torch_dtype`."""
    dtypes = {info.dtype for name, info in found.items() if not name.endswith(FLOAT32_ALWAYS)}
    if len(dtypes) == 1:
        return dtypes.pop()
    config = read_json(folder / "config.json")
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = next((d for d in DTYPES.values() if str(d) == f"torch.{name}" or str(d) == name), None)
    if dtype is None:
        raise ValueError(f"{folder} holds weights of several dtypes and config.json's dtype is {name!r}; ask for one")
    return dtype


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor an infinity: its least and its greatest value tell, at a copy's speed."""
    low, high = tensor.aminmax()
    return math.isfinite(low) and math.isfinite(high)


def _copy_in(weights: dict[str, Tensor], source: Any, stored: Stored, shard: Shard) -> list[Tensor]:
    """Copy a stored tensor's parts, or this rank's slices of them, to their places in the model; these places."""
    places: list[Tensor] = []
    start = 0
    for part, length in zip(stored.parts, stored.lengths, strict=True):
        target = weights[part.target] if part.expert is None else weights[part.target][part.expert]
        where = [slice(start, start + length)] + [slice(None)] * (len(stored.shape) - 1)
        dim = split_dim(part.target)
        if shard.size > 1 and dim is not None:
            dim -= part.expert is not None
            begin = (start if dim == 0 else 0) + shard.rank * target.shape[dim]
            where[dim] = slice(begin, begin + target.shape[dim])
        target.copy_(source[tuple(where)])
        places.append(target)
        start += length
    return places
