"""The engine's sizes and switches."""

from dataclasses import dataclass, replace

LEAST_SLOTS = 4
"""Slots of each batch row where nobody chose a number, or as many more as the model decodes with."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's sizes and switches. `None` leaves a choice to the engine.

    max_rows            sequences decoded at once
    buffer_size         physical slots a batch row; a request may ask for fewer (default: `LEAST_SLOTS`, or as many
                        more as the model decodes with unless a request says otherwise, see `for_decoding`)
    block_budget        blocks that all running sequences together may grow to have in the Block Buffer, but at least
                        one each: many blocks a sequence while few run, one when as many run as the budget has blocks.
                        It only delays blocks, yet tokens then depend on how busy the engine is, so a request can
                        decline it (`DecodingConfig.adaptive`). Default: no budget
    block_size          for a model that was trained without blocks (LLaDA, Dream): the block size D2F decodes it in
    page_size           tokens a page, a multiple of the block size (default: the least such of at least 16)
    num_pages           pages of KV memory (default: as many as fit, see `engine/build.py`)
    kv_memory_fraction  share of the device's memory that the engine may use where `num_pages` is not given
    max_prefill_tokens  prompt tokens stored a step, at most
    prefix_caching      keep stored blocks, prompt and generated, for requests that begin alike
    static_shapes       in steps that decode in blocks alone, send every slot of the batch rows in use through the
                        model, resident or not (Alg. 5), so that a CUDA graph can be replayed, and prompts by a forward
                        of their own before it; otherwise only resident slots (Alg. 4), and prompts with them. Default:
                        on a GPU
    graphs              replay static steps as CUDA graphs, with kernels that allow it. Default: on a GPU
    overlap             launch a static step before the results of the one before are read, where that is safe.
                        Default: on a GPU
    batch_invariant     compute every row by itself: slower, and a request's numbers do not depend on the others, bit
                        for bit
    attention           the attention kernel by name (default: the best there is)
    max_adapters        LoRA adapters that can be loaded at once; 0: none, and no step does anything for them
    max_rank            the largest rank of an adapter; memory is taken for `max_adapters` of this rank
    """

    max_rows: int = 16
    buffer_size: int | None = None
    block_budget: int | None = None
    block_size: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_memory_fraction: float = 0.9
    max_prefill_tokens: int = 2048
    prefix_caching: bool = True
    static_shapes: bool | None = None
    graphs: bool | None = None
    overlap: bool | None = None
    batch_invariant: bool = False
    attention: str | None = None
    max_adapters: int = 0
    max_rank: int = 16

    def __post_init__(self) -> None:
        for name in ("max_rows", "buffer_size", "block_budget", "num_pages", "max_prefill_tokens", "max_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.max_adapters < 0:
            raise ValueError(f"max_adapters={self.max_adapters} must be at least 0")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ValueError(
                f"kv_memory_fraction={self.kv_memory_fraction} must be a share of the memory, above 0 and at most 1"
            )

        if self.block_budget is not None and self.batch_invariant:
            raise ValueError(
                f"block_budget={self.block_budget} cannot be honoured with batch_invariant=True: under a budget a "
                "request's tokens depend on how many others run"
            )

    @property
    def num_slots(self) -> int:
        """Physical slots a batch row."""
        return LEAST_SLOTS if self.buffer_size is None else self.buffer_size

    def for_decoding(self, buffer_size: int) -> "EngineConfig":
        """The configuration with a number of slots: the chosen one, else enough for a model that decodes with
        `buffer_size`."""
        return replace(self, buffer_size=max(LEAST_SLOTS, buffer_size)) if self.buffer_size is None else self

    def blocks_each(self, num_running: int) -> int:
        """Blocks that each of `num_running` sequences may grow to have in the Block Buffer at once."""
        if self.block_budget is None:
            return self.num_slots
        return max(1, min(self.num_slots, self.block_budget // max(1, num_running)))

    def resolve_page_size(self, block_size: int) -> int:
        """Tokens a page; `ValueError` if `page_size` is not a multiple of the model's block size."""
        page_size = -(-16 // block_size) * block_size if self.page_size is None else self.page_size
        if page_size < 1 or page_size % block_size:
            raise ValueError(f"page_size={page_size} is not a multiple of the model's block_size={block_size}")
        return page_size
