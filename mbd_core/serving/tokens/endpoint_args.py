"""The arguments of a replica of the endpoint, checked against the model before a process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from mbd_core.calls.forms import CallFormName
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.sampling_config import sampling_defaults
from mbd_core.engine.config import EngineConfig
from mbd_core.fields import CLUSTER, ENGINE, MODEL, OUTPUT, Flag, Ge, configuration
from mbd_core.models.model_config import Fp8Parts

if TYPE_CHECKING:
    from mbd_core.checkpoint.folder import ModelFolder


@configuration(panel=MODEL)
class EndpointArgs:
    """The arguments of a replica."""

    model: Annotated[str, Flag(opened_by="workers")]
    """A shipped model's name, a model folder on every machine that serves it, or a storage URL."""
    name: str | None = None
    """The model's name for clients (default: the folder's name)."""
    fp8: Fp8Parts | None = None
    """FP8 weights: experts or all: round the weights of experts or of all layers; blocks: keep an FP8 folder's
    experts."""
    generation_config: Literal["model", "ignore"] = "model"
    """Defaults of temperature, top_p, top_k, min_p, repetition_penalty and length. model: from the model's
    generation_config.json; ignore: none. The decoding in that file always applies."""
    call_form: Annotated[CallFormName | None, Flag(metavar="FORM")] = None
    """How the model writes calls of functions: the name of a form, such as hermes (default: recognised from its chat
    template)."""
    tensor_parallel: Annotated[int, Ge(1), Flag(panel=CLUSTER)] = 1
    """Ranks of the model: GPUs of one node, or processes without GPUs."""
    engine: Annotated[EngineConfig, Flag(panel=ENGINE)] = EngineConfig()
    """The engine's sizes and switches."""
    max_waiting: Annotated[int, Ge(1), Flag(panel=ENGINE)] = 256
    """Requests that may wait for a batch row of a replica; further requests get 429."""
    threads: Annotated[int, Ge(1), Flag(panel=ENGINE)] = 1
    """Torch's threads of each rank."""
    trace: Annotated[Path | None, Flag(panel=OUTPUT, metavar="DIR", opened_by="each")] = None
    """Write step traces; each replica has its own folder in DIR."""

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.name or self.model.rstrip("/").rpartition("/")[2]

    def sampling(self, generation: Mapping[str, Any]) -> dict[str, float]:
        """The defaults of a request's sampling and `max_tokens` under the model's `generation_config.json`."""
        return {} if self.generation_config == "ignore" else sampling_defaults(generation)

    def checked(self) -> Self:
        """The arguments with the model's absolute path, its name, and the slots of its decoding.

        Raises `ValueError` for an unknown or damaged model, for a setting that the model does not support, and for a
        model whose own defaults cannot be served.
        """
        from mbd_core.checkpoint.block_experts import check_blocks
        from mbd_core.checkpoint.folder import read_folder
        from mbd_core.ops.attention.choice import KERNELS
        from mbd_core.serving.tokens.draft_folder import check_draft_folder, read_draft

        folder = read_folder(model_folder(self.model).resolve())
        if (draft := read_draft(self.engine)) is not None:
            check_draft_folder(folder, draft, self.engine, tensor_parallel=self.tensor_parallel)
        engine = _check_decoding(folder, self.engine)
        engine.positions(folder.config.max_positions)
        self.sampling(folder.defaults)
        if engine.attention not in (None, "reference", *KERNELS):
            raise ValueError(
                f"attention={engine.attention!r} is unknown; choose one of {', '.join([*KERNELS, 'reference'])}"
            )
        if self.fp8 == "experts" and folder.config.moe is None:
            raise ValueError(
                f"fp8=experts cannot be honoured: {folder.path.name} has no experts; fp8=all rounds its layers"
            )
        try:
            folder.config.sharded(self.tensor_parallel)
        except ValueError as error:
            raise ValueError(f"tensor_parallel={self.tensor_parallel} cannot be honoured: {error}") from None
        if self.fp8 is not None and engine.dtype == "int8":
            raise ValueError(f"fp8={self.fp8} cannot be honoured with dtype=int8: leave one of them out")
        if self.fp8 == "blocks":
            check_blocks(folder.path, num_ranks=self.tensor_parallel)
        if self.trace is not None and self.trace.exists() and not self.trace.is_dir():
            raise ValueError(f"trace={self.trace} is a file, not a folder")
        if draft is not None:
            engine = replace(engine, draft_model=str(draft.path))
        trace = None if self.trace is None else self.trace.resolve()
        return replace(self, model=str(folder.path), name=self.name or folder.path.name, engine=engine, trace=trace)


def _check_decoding(folder: ModelFolder, engine: EngineConfig) -> EngineConfig:
    """The engine with a buffer size that the model's default decoding fits into. Raises `ValueError` otherwise."""
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
