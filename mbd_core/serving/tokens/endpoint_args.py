"""What a replica of the endpoint needs to start, checked against the model before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.models.model_config import Parts

if TYPE_CHECKING:
    from mbd_core.checkpoint.folder import ModelFolder


@dataclass(frozen=True, kw_only=True)
class EndpointArgs:
    """What a replica needs to start.

    folder           the model folder, on the replica's machine
    name             the name clients call the model by
    engine           the engine's sizes and switches
    max_waiting      requests that may wait for a batch row; more get 429
    num_threads      torch's threads a rank
    trace            a folder for step traces, on the replica's machine; each replica writes into its own folder in it
    fp8              which weights are FP8: rounded, or with "blocks" as the folder has them
    tensor_parallel  ranks the model is cut among, each a process with a GPU of its own where the replica has GPUs
    """

    folder: str
    name: str
    engine: EngineConfig = EngineConfig()
    max_waiting: int = 256
    num_threads: int = 1
    trace: str | None = None
    fp8: Parts | None = None
    tensor_parallel: int = 1


def endpoint_args(
    model: str,
    *,
    name: str | None = None,
    engine: EngineConfig = EndpointArgs.engine,
    max_waiting: int = EndpointArgs.max_waiting,
    num_threads: int = EndpointArgs.num_threads,
    trace: Path | None = None,
    fp8: Parts | None = None,
    tensor_parallel: int = EndpointArgs.tensor_parallel,
) -> EndpointArgs:
    """The arguments to serve `model`, a shipped model's name or a folder, by `name` (default: the folder's).

    Raises `ValueError` for an unknown or damaged model, for a setting that this model cannot honour, and for a model
    whose own defaults cannot be served.
    """
    from mbd_core.checkpoint.folder import read_folder
    from mbd_core.checkpoint.loading import check_blocks
    from mbd_core.ops.attention.choice import KERNELS

    folder = read_folder(model_folder(model).resolve())
    engine = _check_decoding(folder, engine)
    if engine.attention not in (None, "reference", *KERNELS):
        raise ValueError(
            f"attention={engine.attention!r} is unknown; choose one of {', '.join([*KERNELS, 'reference'])}"
        )
    if fp8 == "experts" and folder.config.moe is None:
        raise ValueError(
            f"fp8=experts cannot be honoured: {folder.path.name} has no experts; fp8=all rounds its layers"
        )
    try:
        folder.config.sharded(tensor_parallel)
    except ValueError as error:
        raise ValueError(f"tensor_parallel={tensor_parallel} cannot be honoured: {error}") from None
    if fp8 == "blocks":
        check_blocks(folder.path, num_ranks=tensor_parallel)
    if trace is not None and trace.exists() and not trace.is_dir():
        raise ValueError(f"trace={trace} is a file, not a folder")
    return EndpointArgs(
        folder=str(folder.path),
        name=name or folder.path.name,
        engine=engine,
        max_waiting=max_waiting,
        num_threads=num_threads,
        trace=None if trace is None else str(trace.resolve()),
        fp8=fp8,
        tensor_parallel=tensor_parallel,
    )


def _check_decoding(folder: ModelFolder, engine: EngineConfig) -> EngineConfig:
    """The engine with a buffer size; it can serve a request that asks for nothing special."""
    from mbd_core.serving.tokens.load import recommended, slots_chosen

    name, block_size = folder.path.name, engine.block_size or folder.config.block_size
    if block_size != folder.config.block_size and folder.config.attention != "full":
        raise ValueError(f"block_size={block_size} cannot be honoured: {name} has {folder.config.block_size}")
    default, engine = recommended(folder, engine), slots_chosen(folder, engine)
    if default.buffer_size > engine.num_slots:
        raise ValueError(
            f"{name} decodes with buffer_size={default.buffer_size} unless a request says otherwise; "
            f"the engine's buffer_size={engine.buffer_size} must be at least that"
        )
    return engine
