"""A loaded model folder: engine, tokenizer, and the decoding that the folder recommends."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.base_values import check_base
from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.loading import load_model, weights_dtype
from mbd_core.checkpoint.tokenizer import grammars_of
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.engine.config import Dtype, EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.huge_pages import in_huge_pages
from mbd_core.engine.parallel.leader import ParallelEngine, start_parallel
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import is_int8, quantized_parts
from mbd_core.ops.machine import computes_bfloat16, end_team, warn_of_emulation
from mbd_core.serving.tokens.draft_folder import check_draft_folder, drafted_defaults, read_draft
from mbd_core.trace.recorder import TraceRecorder


@dataclass(frozen=True)
class LoadedModel:
    """An engine with its tokenizer and configurations; `defaults` is the model's `generation_config.json`.

    The caller closes it, or uses it as a context, because a tensor-parallel engine has other processes.
    """

    name: str
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    config: ModelConfig
    defaults: dict[str, Any]
    stored_dtype: torch.dtype

    def decoding(self, overrides: Mapping[str, Any]) -> DecodingConfig:
        """The model's defaults, overridden by a request's own fields. Raises `ValueError` for an unsupported field."""
        return decoding_config(self.defaults, overrides, block_size=self.engine.block_size)

    def prepare(self) -> int:
        """Capture the graphs of default requests (`Engine.prepare`). Returns their number."""
        return self.engine.prepare(self.decoding({}))

    def check_health(self) -> None:
        """Raises `RankLost` if a process of a tensor-parallel engine has ended; never waits."""
        if isinstance(self.engine, ParallelEngine):
            self.engine.check_health()

    def close(self) -> None:
        """Ends the engine's processes and threads; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def backend(self) -> str:
        """The device and dtype, the weights' stored form if it differs, and the number of ranks."""
        weights = self.engine.model.model.norm.weight
        dtype = _name(weights.dtype)
        dtype_note = "" if weights.dtype == self.stored_dtype else f" (stored as {_name(self.stored_dtype)})"
        rounded = quantized_parts(self.engine.model)
        dtype_note += "" if rounded is None else f", FP8 weights ({rounded})"
        dtype_note += ", int8 products" * is_int8(self.engine.model)
        size = self.engine.model.shard.size
        ranks = "" if size == 1 else f", tensor parallel over {size} ranks"
        return f"torch {weights.device.type} {dtype}{dtype_note}{ranks}"


def load_engine(
    folder: Path,
    config: EngineConfig,
    *,
    trace: TraceRecorder | None = None,
    device: torch.device | None = None,
    fp8: Fp8Parts | None = None,
    tensor_parallel: int = 1,
    adapters: Mapping[str, Path] | None = None,
) -> LoadedModel:
    """Loads a Hugging Face model folder into an engine. Raises `ValueError` that names the folder's fault.

    device           default: the GPU if there is one; its precision is `config.dtype`
    fp8              the FP8 weights (`models.quantize`): the weights of the experts or of all layers, rounded;
                     or FP8 experts in blocks, as the folder has them
    tensor_parallel  number of ranks, each a process: rank r on GPU r, or all on the CPU
    adapters         the folders of LoRA adapters to load, by name; `config.max_adapters` must leave room for them
    """
    contents, draft = read_folder(folder), read_draft(config)
    if draft is not None:
        check_draft_folder(contents, draft, config, tensor_parallel=tensor_parallel)
    config = slots_chosen(contents, config)
    device = device or default_device()
    dtype = engine_dtype(config.dtype, contents, device)
    if dtype == torch.bfloat16:
        warn_of_emulation(device)
    grammars = grammars_of(contents.tokenizer, contents.config)
    engine: Engine
    if tensor_parallel != 1:
        if device.index is not None:
            raise ValueError(f"device={device} cannot be honoured with tensor_parallel: rank r takes GPU r")
        engine = start_parallel(
            folder,
            config,
            size=tensor_parallel,
            device=device.type,
            dtype=dtype,
            fp8=fp8,
            trace=trace,
            vocab_limit=len(contents.tokenizer),
            grammars=grammars,
        )
    else:
        engine = Engine(
            in_huge_pages(load_model(folder, dtype=dtype, device=device, fp8=fp8)),
            config,
            trace=trace,
            vocab_limit=len(contents.tokenizer),
            grammars=grammars,
            draft_model=None if draft is None else in_huge_pages(load_model(draft.path, dtype=dtype, device=device)),
        )
    try:
        for name, adapter in (adapters or {}).items():
            check_base(adapter, folder)
            engine.load_adapter(name, adapter)
    except ValueError:
        engine.close()
        raise
    end_team()
    defaults = decoding_defaults(contents, config)
    return LoadedModel(folder.name, engine, contents.tokenizer, contents.config, defaults, contents.stored_dtype)


BFLOAT16_PAYS = 50_000_000
"""From this number of parameters on, a CPU with bfloat16 arithmetic is faster in bfloat16; a smaller model is bound by
calls."""


def engine_dtype(choice: Dtype, folder: ModelFolder, device: torch.device) -> torch.dtype:
    """The dtype that `choice` stands for, with a folder on `device`. Raises `ValueError` for int8 on a GPU."""
    if choice != "auto":
        if choice == "int8" and device.type != "cpu":
            raise ValueError("dtype=int8 cannot be honoured on a GPU: int8 products are for CPUs; use fp8=all")
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}[choice]
    if device.type != "cpu":
        return weights_dtype(folder.path)
    is_large = folder.config.num_parameters >= BFLOAT16_PAYS
    narrow = folder.stored_dtype == torch.bfloat16 and is_large and computes_bfloat16(device)
    return torch.bfloat16 if narrow else torch.float32


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def decoding_defaults(folder: ModelFolder, config: EngineConfig) -> dict[str, Any]:
    """The folder's `generation_config.json`. A model that was trained without a block size gets the engine's; with a
    draft model the decoding is that of the pair."""
    draft = read_draft(config)
    if draft is not None:
        return drafted_defaults(folder.defaults, draft)
    if config.block_size is None or folder.config.attention != "full":
        return folder.defaults
    return {**folder.defaults, "block_size": config.block_size}


def slots_chosen(folder: ModelFolder, config: EngineConfig) -> EngineConfig:
    """The engine's configuration with a buffer size: its own, else that of the folder's recommended decoding.

    Raises `ValueError` for an unsupported `generation_config.json`.
    """
    if config.buffer_size is not None:
        return config
    return config.for_decoding(recommended(folder, config).buffer_size)


def recommended(folder: ModelFolder, config: EngineConfig) -> DecodingConfig:
    """The decoding of a request without decoding fields."""
    block_size = config.block_size or folder.config.block_size
    return decoding_config(decoding_defaults(folder, config), {}, block_size=block_size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
