"""Loading and saving models in the Hugging Face layout: config.json, safetensors, tokenizer, generation_config.json.

Every tensor must be there, none may be left over, each must have its shape: a wrong folder is an error, not a model
with random weights. A folder is written beside its place and renamed.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mbd_core.models.config import ModelConfig
from mbd_core.models.decoder import Decoder
from mbd_core.models.families import read_config, write_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; a missing or malformed one is a `ValueError` that names it."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def load_config(folder: Path) -> ModelConfig:
    """The model's configuration, from `config.json` alone."""
    return read_config(read_json(folder / "config.json"))


def load_generation_defaults(folder: Path) -> dict[str, Any]:
    """What the model's author recommends for decoding (`generation_config.json`), empty where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def load_tokenizer(folder: Path, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, checked against the model: the mask id must be the same and no id may exceed the vocabulary."""
    # tokenizer.json is the whole tokenizer; without it the class named by the checkpoint has to build one
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").exists() else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {error}") from None
    if tokenizer.mask_token_id != config.mask_token_id:
        raise ValueError(
            f"{folder}: config.json says mask_token_id={config.mask_token_id} but the tokenizer's mask token "
            f"{tokenizer.mask_token!r} is {tokenizer.mask_token_id}"
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}")
    return tokenizer


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """The weights of a checkpoint folder, in evaluation mode; raises `ValueError` naming the file and the tensor."""
    config = load_config(folder)
    with torch.device("meta"):
        model = Decoder(config)
    wanted = dict(model.state_dict())
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    found: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        for name, tensor in _read_tensors(path).items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if name not in wanted:
                raise ValueError(f"{path} has an unexpected tensor '{name}' for {config.architecture}")
            if tensor.shape != wanted[name].shape:
                raise ValueError(
                    f"{path}: tensor '{name}' has shape {tuple(tensor.shape)}, config.json asks for "
                    f"{tuple(wanted[name].shape)}"
                )
            found[name] = tensor.to(device=device, dtype=dtype)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors, the first is '{missing[0]}'")
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    model.load_state_dict(found, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def save_model(
    folder: Path,
    model: Decoder,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    extra: dict[str, str] | None = None,
) -> None:
    """Write a complete model folder, replacing what is there; `extra` adds small text files (name -> content)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        weights = {n: t.detach().to("cpu", dtype).contiguous() for n, t in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        kept = next(iter(weights.values())).dtype
        config = {**write_config(model.config), "dtype": str(kept).removeprefix("torch.")}
        files = {"config.json": json.dumps(config, indent=2) + "\n", **(extra or {})}
        ids = {"eos_token_id": list(model.config.eos_token_ids), "mask_token_id": model.config.mask_token_id}
        files["generation_config.json"] = (
            json.dumps({**ids, "block_size": model.config.block_size, **(generation or {})}, indent=2) + "\n"
        )
        save_file(weights, beside / WEIGHTS, metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        for name, text in files.items():
            (beside / name).write_text(text)
        beside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else [WEIGHTS]
    for name in names:
        if not (folder / name).exists():
            raise ValueError(f"{folder} lacks the weights file {name}")
    return [folder / name for name in names]


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from None
