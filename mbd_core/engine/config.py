"""The engine's sizes and switches."""

from dataclasses import replace
from typing import Annotated, Literal

from mbd_core.fields import ENGINE, MODEL, MOST, Flag, Ge, Gt, Le, configuration

Dtype = Literal["auto", "float32", "bfloat16", "int8"]
"""The numbers in which an engine computes. `int8`: products of int8 weights and inputs, the rest float32 (CPUs)."""
SwapMode = Literal["wait", "preempt"]
"""When new weights are swapped in: after the running requests have ended, or at once."""
LEAST_SLOTS = 4
"""The default number of slots of each batch row, unless the model decodes with more."""


@configuration(panel=ENGINE)
class EngineConfig:
    """The engine's sizes and switches. `None` leaves a choice to the engine.

    A block budget only delays blocks. But a request's tokens then depend on the engine's load, so a request can
    decline the budget (`DecodingConfig.adaptive`). With static shapes a step sends all slots (Alg. 5). Otherwise it
    sends the resident slots (Alg. 4), together with prompts.
    """

    max_rows: Annotated[int, Ge(1)] = 16
    """Sequences decoded at once."""
    buffer_size: Annotated[
        int | None,
        Ge(1),
        Flag(
            help="Slots of a sequence, the most that a request may ask for (default: as many as the model decodes "
            f"with, at least {LEAST_SLOTS})."
        ),
    ] = None
    block_budget: Annotated[int | None, Ge(1)] = None
    """The most blocks of all running sequences together: many for each sequence in an idle engine, one in a busy
    engine. Sequences that draft go on token by token while the budget has fewer blocks than sequences, or while drafts
    give fewer tokens a second (default: no budget)."""
    block_size: Annotated[int | None, Ge(1)] = None
    """Tokens of D2F's blocks (default: the model's), for a model that was trained without blocks (LLaDA, Dream)."""
    max_model_len: Annotated[int | None, Ge(2)] = None
    """Tokens that a prompt and its answer can have together, at most the model's positions (default: the model's
    positions, or fewer if the pages hold fewer)."""
    page_size: Annotated[int | None, Ge(1)] = None
    """Tokens of a page, a multiple of the block size (default: at least 16)."""
    num_pages: Annotated[int | None, Ge(2)] = None
    """Pages of KV memory, each engine's (default: as many as fit)."""
    kv_memory_fraction: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of a device's memory for an engine, where the number of pages is not given. Engines on CPUs divide it."""
    max_prefill_tokens: Annotated[int, Ge(1)] = 2048
    """Prompt tokens stored in a step, at most."""
    max_step_seconds: Annotated[float | None, Gt(0)] = None
    """Seconds of a step in which sequences decode; it stores as many blocks of prompts as fit, at least one (default:
    1.75 times the measured seconds of a step without prompts, at least 0.05, and enough for a chunk's operations to be
    half of its cost)."""
    prefix_caching: bool = True
    """Keep stored blocks, of prompts and answers, for later requests that begin with the same tokens."""
    host_kv_bytes: Annotated[int, Ge(0)] = 0
    """Bytes of the host's memory, each rank's, for cached pages that a device has no room for (0: none)."""
    static_shapes: bool | None = None
    """In steps that decode blocks alone, send every slot through the model, so that a CUDA graph can be replayed;
    prompts have a forward of their own before it (default: on a GPU)."""
    graphs: bool | None = None
    """Replay static steps and forwards of planned rows as CUDA graphs, where kernels allow it (default: on a GPU)."""
    overlap: bool | None = None
    """Launch a static step before the previous step's results are read, where that is safe (default: on a GPU)."""
    batch_invariant: bool = False
    """Compute every request by itself. This is slower, and a request's numbers are the same, bit for bit, whatever
    runs beside it."""
    dtype: Dtype = "auto"
    """float32, bfloat16, int8 (a CPU's products; the rest in float32), or auto: on a GPU the dtype of the stored
    weights; on a CPU bfloat16 if the CPU computes it and at least 50 million weights are stored in it, else
    float32."""
    attention: Annotated[str | None, Flag(metavar="NAME")] = None
    """The attention kernel (default: the best available kernel); the error for an unknown name lists the kernels."""
    url_weights: Literal["cache", "stream"] = "cache"
    """Safetensors of a model at a URL. cache: downloaded once a machine, sha256 compared; stream: each rank reads its
    part by range at every start, for machines that start only once; sizes and versions are compared, no sha256."""
    draft_model: Annotated[str | None, Flag(panel=MODEL, metavar="MODEL", opened_by="workers")] = None
    """A smaller model of the same tokenizer, which drafts in blocks; answers are the model's own, greedy or drawn, in
    fewer of its forwards (`verified-two-sizes`, then the default decoding). A page holds the keys of both models."""
    max_adapters: Annotated[int, Ge(0), Flag(name=False)] = 0
    """LoRA adapters that can be loaded at once; 0: none, at no cost."""
    max_rank: Annotated[int, Ge(1), Flag(name=False)] = 16
    """The largest rank of an adapter. Each adapter takes the memory of this rank."""

    def __post_init__(self) -> None:
        if self.block_budget is not None and self.batch_invariant:
            raise ValueError(
                f"block_budget={self.block_budget} cannot be honoured with batch_invariant=True: under a budget a "
                "request's tokens depend on how many others run"
            )

        if self.host_kv_bytes and not self.prefix_caching:
            raise ValueError(
                f"host_kv_bytes={self.host_kv_bytes} cannot be honoured with prefix_caching=False: only pages that "
                "others may find again are kept"
            )

    @property
    def num_slots(self) -> int:
        """Physical slots a batch row."""
        return LEAST_SLOTS if self.buffer_size is None else self.buffer_size

    def for_decoding(self, buffer_size: int) -> "EngineConfig":
        """The configuration with a number of slots: the chosen number, else enough for a model that decodes with
        `buffer_size`."""
        return replace(self, buffer_size=max(LEAST_SLOTS, buffer_size)) if self.buffer_size is None else self

    def blocks_each(self, num_running: int) -> int:
        """Blocks that each of `num_running` sequences may grow to have in the Block Buffer at once."""
        return max(1, min(self.num_slots, self.budget_each(num_running)))

    def budget_each(self, num_running: int) -> int:
        """Blocks of the budget for each of `num_running` sequences, maybe none; without a budget, any number."""
        return MOST if self.block_budget is None else self.block_budget // max(1, num_running)

    def positions(self, model_positions: int) -> int:
        """Positions of the longest sequence; `ValueError` if `max_model_len` asks for more than the model has."""
        if self.max_model_len is not None and self.max_model_len > model_positions:
            raise ValueError(
                f"max_model_len={self.max_model_len} exceeds the model's {model_positions} positions; lower it, "
                "or raise max_position_embeddings in the model's config.json, with a rope_scaling that reaches so far"
            )
        return model_positions if self.max_model_len is None else self.max_model_len

    def resolve_page_size(self, block_size: int) -> int:
        """Tokens a page; `ValueError` if `page_size` is not a multiple of the model's block size."""
        page_size = -(-16 // block_size) * block_size if self.page_size is None else self.page_size
        if page_size < 1 or page_size % block_size:
            raise ValueError(f"page_size={page_size} is not a multiple of the model's block_size={block_size}")
        return page_size
