"""An engine's parts, built from a model and a configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mbd_core.decoding.blocks.adjustments import Adjustments
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.draft_model import check_loaded_pair, draft_pair
from mbd_core.engine.memory.adapters import ResidentAdapters
from mbd_core.engine.memory.pages import HostPages, PagedKVCache, PagePool
from mbd_core.engine.num_pages import fit_num_pages, longest_in_pages
from mbd_core.engine.schedule.drafting import Drafting
from mbd_core.engine.schedule.pacing import Pacer
from mbd_core.engine.schedule.scheduler import Scheduler
from mbd_core.engine.seating import Ledger, Seating
from mbd_core.engine.sequences.admission import Admission
from mbd_core.engine.step.decode import StepState
from mbd_core.engine.step.graphs import StepGraphs, graphs_obstacle
from mbd_core.engine.step.kinds import StepKinds
from mbd_core.engine.step.planned_rows import PlannedRuns
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.engine.step.vocab import shared_vocab, whole_vocab
from mbd_core.models.decoder import Decoder
from mbd_core.models.lora import AdapterSlots
from mbd_core.models.model_config import ModelConfig
from mbd_core.ops.attention.choice import AttentionKernel, resolve
from mbd_core.ops.machine import free_host_memory


def probe_cache(model: ModelConfig, page_size: int, weights: torch.Tensor) -> PagedKVCache:
    """The smallest cache that a forward can run on."""
    return PagedKVCache(model, num_pages=2, page_size=page_size, dtype=weights.dtype, device=weights.device)


LOGITS_AT_ONCE = 1 << 26


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The parts that `Engine` works with."""

    block_size: int
    page_size: int
    num_pages: int
    static_shapes: bool
    overlap: bool
    admission: Admission
    seating: Seating
    state: StepState
    kinds: StepKinds
    graphs: StepGraphs
    adapters: ResidentAdapters
    pacer: Pacer
    drafting: Drafting | None


def build_parts(
    model: Decoder,
    config: EngineConfig,
    *,
    vocab_limit: int | None,
    grammars: bool = False,
    draft_model: Decoder | None = None,
) -> EngineParts:
    """An engine's parts. Raises `ValueError`, with the reason, for a setting that cannot be honoured."""
    if config.draft_model is not None and draft_model is None:
        raise ValueError(f"draft_model={config.draft_model} cannot be honoured: this engine was given no draft model")
    c, weights = model.config, model.model.norm.weight
    block_size = _check(model, config, vocab_limit)
    page_size = config.resolve_page_size(block_size)
    on_gpu = weights.device.type == "cuda"
    draft = None if draft_model is None else draft_model.config
    runner, draft_runner = _runner(model, config, page_size, draft), None
    if draft_model is not None:
        check_loaded_pair(model, draft_model, config, vocab_limit=vocab_limit)
        draft_runner = _runner(draft_model, replace(config, max_adapters=0), page_size, draft)
    state = _step_state(runner, config, vocab_limit, draft_runner=draft_runner)
    num_pages = config.num_pages or fit_num_pages(state, config)
    state = replace(state, tables_RP=state.tables_RP[:, :num_pages].contiguous())
    runners = [each for each in (runner, draft_runner) if each is not None]
    for each in runners:
        each.cache = PagedKVCache(
            each.model.config, num_pages=num_pages, page_size=page_size, dtype=weights.dtype, device=weights.device
        )
    static_shapes = on_gpu if config.static_shapes is None else config.static_shapes
    if config.overlap and not static_shapes:
        raise ValueError("overlap=True cannot be honoured without static_shapes=True: static steps only have it")
    attentions = [each.attention for each in runners]
    obstacle = graphs_obstacle(config, attentions, weights.device, static_shapes=static_shapes)
    pool = PagePool(num_pages, _host_pages([each.cache for each in runners], config))
    adapters = ResidentAdapters(c, model.shard, runner.adapters)
    return EngineParts(
        block_size=block_size,
        page_size=page_size,
        num_pages=num_pages,
        static_shapes=static_shapes,
        overlap=on_gpu if config.overlap is None else config.overlap,
        admission=Admission(
            c,
            max_positions=config.positions(c.max_positions),
            block_size=block_size,
            buffer_size=config.num_slots,
            page_size=page_size,
            num_pages=pool.capacity,
            prefix_caching=config.prefix_caching,
            adapters=adapters.names,
            ar_adapters=adapters.ar_names,
            grammars=grammars,
            draft=draft,
            batch_invariant=config.batch_invariant,
        ),
        seating=Seating(
            _scheduler(model, config, pool, block_size=block_size, page_size=page_size),
            state.buffer,
            Ledger(config.max_rows, num_slots=config.num_slots, block_size=block_size, page_size=page_size),
            PlannedRuns(c, runner.cache, state.vocab, pair=None if draft is None else draft_pair(c, draft)),
            state.tables_RP,
            state.adapters_R,
        ),
        state=state,
        kinds=StepKinds(
            max_rows=config.max_rows,
            num_slots=config.num_slots,
            block_size=block_size,
            batch_invariant=config.batch_invariant,
            adapters=config.max_adapters > 0,
            blocks_each=None if config.block_budget is None else config.blocks_each,
        ),
        graphs=StepGraphs(state, obstacle),
        adapters=adapters,
        pacer=Pacer(c, max_step_seconds=config.max_step_seconds),
        drafting=Drafting() if config.block_budget is not None and "linear-spec" in c.ar_methods else None,
    )


def _host_pages(caches: Sequence[PagedKVCache], config: EngineConfig) -> HostPages | None:
    """Pages in the host's memory, `None` if the configuration gives them no memory. Raises `ValueError` if the memory
    is less than a page or more than the host has free."""
    if not config.host_kv_bytes:
        return None
    layers = [layer for cache in caches for layer in cache.layers]
    page_bytes = sum(2 * k[0].numel() * k.element_size() for k, _ in layers)
    if config.host_kv_bytes < page_bytes:
        raise ValueError(f"host_kv_bytes={config.host_kv_bytes} holds no page, which takes {page_bytes:,} bytes")
    free = free_host_memory()
    if config.host_kv_bytes > free and caches[0].k.device.type != "meta":
        raise ValueError(f"host_kv_bytes={config.host_kv_bytes} exceeds the {free:,} bytes of free host memory")
    return HostPages(layers, num_pages=config.host_kv_bytes // page_bytes)


def fitting_pages(model: Decoder, config: EngineConfig) -> int:
    """How many KV pages fit beside `model` in an engine of `config`, whatever its `num_pages` is.

    For ranks that must agree on a number before they build their engines. Raises `ValueError` if no page fits.
    """
    config = replace(config, num_pages=None)
    page_size = config.resolve_page_size(_check(model, config, None))
    return fit_num_pages(_step_state(_runner(model, config, page_size), config, None), config)


def _logits_chunk(vocab_size: int, block_size: int) -> int:
    """Positions, in whole blocks, whose float32 logits stay under 256 MiB. With all copies of these logits a greedy
    step then needs about 1 GB, a step that draws from a part of the vocabulary about 3 GB."""
    return max(1, LOGITS_AT_ONCE // vocab_size // block_size) * block_size


def _check(model: Decoder, config: EngineConfig, vocab_limit: int | None) -> int:
    """The engine's block size; `ValueError` for settings that contradict the model."""
    vocab_size = model.config.vocab_size
    if vocab_limit is not None and not 1 <= vocab_limit <= vocab_size:
        raise ValueError(f"vocab_limit={vocab_limit} must lie in 1..{vocab_size}")
    return engine_block_size(model.config, config)


def engine_block_size(model: ModelConfig, config: EngineConfig) -> int:
    """The block size of an engine of a model; `ValueError` for lengths that contradict the model or each other."""
    if config.block_size not in (None, model.block_size) and model.attention == "block_causal":
        raise ValueError(f"block_size={config.block_size} cannot be honoured: the model has {model.block_size}")
    config.positions(model.max_positions)
    block_size = config.block_size or model.block_size
    if config.max_prefill_tokens < block_size:
        raise ValueError(f"max_prefill_tokens={config.max_prefill_tokens} is less than a block ({block_size})")
    return block_size


def attention_kernel(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, page_size: int, preference: str | None
) -> AttentionKernel:
    """The attention kernel for the sizes of `model`, or of one rank's part of it. Raises the errors of `resolve`."""
    return resolve(
        device,
        dtype,
        max(model.of_layer(layer).head_dim for layer in range(model.num_layers)),
        page_size,
        preference,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        windows=model.gemma is not None,
    )


def _runner(model: Decoder, config: EngineConfig, page_size: int, draft: ModelConfig | None = None) -> ModelRunner:
    c, weights = model.config, model.model.norm.weight
    attention = attention_kernel(c, weights.device, weights.dtype, page_size, config.attention)
    longest = longest_in_pages(c, config, page_size, draft)
    if config.num_pages is not None:
        longest = min(config.num_pages, longest)
    adapters = None
    if config.max_adapters:
        adapters = AdapterSlots(c, model.shard, weights, num_slots=config.max_adapters, max_rank=config.max_rank)
    return ModelRunner(
        model.eval(),
        probe_cache(c, page_size, weights),
        attention,
        num_rows=config.max_rows,
        # slots that are not resident stand after the longest sequence
        num_positions=(longest + config.num_slots + 1) * page_size,
        adapters=adapters,
    )


def _step_state(
    runner: ModelRunner, config: EngineConfig, vocab_limit: int | None, *, draft_runner: ModelRunner | None = None
) -> StepState:
    """The state of steps over `config.num_pages` pages; if they are not known yet, over as many as the longest
    sequence takes."""
    c, device, page_size = runner.model.config, runner.cache.k.device, runner.cache.page_size
    draft = None if draft_runner is None else draft_runner.model.config
    width, longest = longest_in_pages(c, config, page_size, draft), config.positions(c.max_positions)
    if config.num_pages is not None:
        width, longest = min(config.num_pages, width), min(config.num_pages * page_size, longest)
    block_size = config.block_size or c.block_size
    return StepState(
        runner=runner,
        buffer=BlockBuffer(
            num_rows=config.max_rows,
            num_slots=config.num_slots,
            block_size=block_size,
            mask_token_id=c.mask_token_id,
            eos_token_ids=c.eos_token_ids,
            device=device,
            adjustments=Adjustments(
                config.max_rows,
                length=longest + (config.num_slots + 1) * block_size,
                vocab_size=c.vocab_size,
                num_eos=len(c.eos_token_ids),
                device=device,
            ),
        ),
        tables_RP=torch.zeros((config.max_rows, width), dtype=torch.int64, device=device),
        vocab=whole_vocab(runner.model, vocab_limit or c.vocab_size),
        shared_vocab=shared_vocab(runner.model, vocab_limit or c.vocab_size),
        page_size=page_size,
        batch_invariant=config.batch_invariant,
        logits_chunk=_logits_chunk(c.vocab_size, block_size),
        adapters_R=torch.zeros(config.max_rows, dtype=torch.int64, device=device) if config.max_adapters else None,
        draft_runner=draft_runner,
    )


def _scheduler(model: Decoder, config: EngineConfig, pool: PagePool, *, block_size: int, page_size: int) -> Scheduler:
    return Scheduler(
        max_rows=config.max_rows,
        block_size=block_size,
        page_size=page_size,
        pool=pool,
        max_prefill_tokens=config.max_prefill_tokens,
        prefix_caching=config.prefix_caching,
        # the last hidden state of a prefix predicts the token after it, and pages do not hold hidden states
        compute_last_block=model.config.shift_logits,
    )
