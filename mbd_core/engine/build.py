"""An engine's parts, built from a model and a configuration; and how many KV pages fit on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mbd_core.decoding.blocks.adjustments import Adjustments
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.sampling import Draw, Vocab, choose
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.draft_model import check_loaded_pair, draft_pair
from mbd_core.engine.memory.adapters import ResidentAdapters
from mbd_core.engine.memory.pages import HostPages, PagedKVCache, PagePool
from mbd_core.engine.schedule.drafting import Drafting
from mbd_core.engine.schedule.pacing import Pacer
from mbd_core.engine.schedule.scheduler import Scheduler
from mbd_core.engine.seating import Ledger, Seating
from mbd_core.engine.sequences.admission import Admission
from mbd_core.engine.step.batch import BatchRows, pack
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

# How many KV pages fit: the device's free memory after the weights, less the memory of the largest forward.
#
# On a GPU the largest step is run once and its peak is read from the allocator, as vLLM and nano-vllm do. The pages
# then take the rest of `kv_memory_fraction` of the card, since cached prefixes make use of it. On a CPU, whose
# memory other processes use too, nothing is measured. There the pages take at most half of `kv_memory_fraction` of
# the free memory, and no more than the sequences of all batch rows can fill at the model's full length.


def bytes_per_page(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of all layers for a page of tokens."""
    heads = map(model.of_layer, range(model.num_layers))
    return 2 * page_size * dtype.itemsize * sum(c.num_kv_heads * c.head_dim for c in heads)


def longest_in_pages(
    model: ModelConfig, config: EngineConfig, page_size: int, draft: ModelConfig | None = None
) -> int:
    """Pages of the longest possible sequence with a full buffer after it, or with the rows of verified drafts after it
    if these take more."""
    positions = config.positions(model.max_positions)
    block_size = (config.block_size or model.block_size) if draft is None else draft.block_size
    overhang = Verify().rows(block_size, config.num_slots).overhang
    return max(-(-positions // page_size) + config.num_slots, -(-(positions + overhang) // page_size))


def fit_num_pages(
    runner: ModelRunner,
    config: EngineConfig,
    *,
    block_size: int,
    page_size: int,
    logits_at_once: int,
    draft: ModelConfig | None = None,
) -> int:
    """The number of pages, the null page included. Raises `ValueError` if no page, or not the largest step, fits."""
    model, weights = runner.model.config, runner.model.model.norm.weight
    free, activations = free_host_memory(), 0
    total: int | None = None
    if weights.device.type == "cuda":
        try:
            _profile(runner, config, block_size=block_size, page_size=page_size, logits_at_once=logits_at_once)
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                "the largest step does not fit beside the weights; lower max_prefill_tokens or max_rows, or use a "
                "larger device"
            ) from error
        activations = torch.cuda.max_memory_allocated(weights.device) - torch.cuda.memory_allocated(weights.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(weights.device)
    return pages_within(
        free,
        model,
        config,
        page_size=page_size,
        dtype=weights.dtype,
        total=total,
        activations=activations,
        draft=draft,
    )


def pages_within(
    free: int,
    model: ModelConfig,
    config: EngineConfig,
    *,
    page_size: int,
    dtype: torch.dtype,
    total: int | None = None,
    activations: int = 0,
    draft: ModelConfig | None = None,
) -> int:
    """The number of pages that fit, the null page included. Raises `ValueError` if only the null page fits.

    free         bytes that the weights leave
    total        bytes of the GPU, None on a CPU
    activations  bytes of the GPU that the largest step needs beside weights and pages
    draft        the draft model, whose keys lie in the same pages
    """
    page_bytes = sum(bytes_per_page(each, page_size, dtype) for each in (model, draft) if each is not None)
    if total is not None:
        # graphs keep their own temporary memory, beside the temporary memory of eager steps
        steps = 1 if config.graphs is False else 2
        budget = free - steps * activations - int((1 - config.kv_memory_fraction) * total)
        num_pages = budget // page_bytes
    else:
        budget = int(config.kv_memory_fraction * free / 2)
        longest = longest_in_pages(model, config, page_size, draft)
        num_pages = min(budget // page_bytes, config.max_rows * longest + 1)
    if num_pages < 2:
        raise ValueError(
            f"no KV page of {page_bytes:,} bytes fits into the {max(0, budget):,} bytes left beside the weights; "
            "raise kv_memory_fraction, lower max_prefill_tokens, or use a larger device"
        )
    return int(num_pages)


def _profile(
    runner: ModelRunner, config: EngineConfig, *, block_size: int, page_size: int, logits_at_once: int
) -> None:
    """Run the largest step: a full prefill budget, every batch row's full buffer, and a chunk of logits to draw from.

    All rows write to the null page and attend to the other page of a cache of two: the values mean nothing, the shapes
    are right.
    """
    device = runner.model.model.norm.weight.device
    num_slots = config.max_rows * config.num_slots
    num_rows = max(1, config.max_prefill_tokens // block_size) + num_slots
    positions = torch.arange(block_size, device=device).repeat(num_rows)
    num_asked = min(logits_at_once, num_slots * block_size)
    rows = BatchRows(
        tokens_T=torch.zeros(num_rows * block_size, dtype=torch.int64, device=device),
        positions_T=positions,
        lengths_K=block_size,
        kv_lens_K=torch.full((num_rows,), block_size, device=device),
        pages_KP=torch.ones((num_rows, 1), dtype=torch.int64, device=device),
        stored_K=torch.zeros(num_rows, dtype=torch.bool, device=device),
        logits_at_A=torch.arange(num_asked, device=device),
        adapter_K=None if runner.adapters is None else torch.zeros(num_rows, dtype=torch.int64, device=device),
    )
    torch.cuda.reset_peak_memory_stats(device)
    logits_AV = runner.logits(runner.forward(pack([rows], page_size=page_size)))
    half_A = torch.full((num_asked,), 0.5, device=device)
    zeros_A = torch.zeros_like(half_A, dtype=torch.int64)
    # sorting the vocabulary for top_p takes more memory than anything else
    draw = Draw(
        temperature_P=half_A, top_p_P=half_A, top_k_P=zeros_A, seed_P=zeros_A, position_P=zeros_A, forward_P=zeros_A
    )
    choose(logits_AV, Vocab(runner.model.config.mask_token_id, logits_AV.shape[-1]), draw)


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
    logits_chunk = _logits_chunk(c.vocab_size, block_size)
    draft = None if draft_model is None else draft_model.config
    runner, draft_runner = _runner(model, config, page_size, draft), None
    if draft_model is not None:
        check_loaded_pair(model, draft_model, config, vocab_limit=vocab_limit)
        draft_runner = _runner(draft_model, replace(config, max_adapters=0), page_size, draft)
    num_pages = config.num_pages or fit_num_pages(
        runner, config, block_size=block_size, page_size=page_size, logits_at_once=logits_chunk, draft=draft
    )
    runners = [each for each in (runner, draft_runner) if each is not None]
    for each in runners:
        each.cache = PagedKVCache(
            each.model.config, num_pages=num_pages, page_size=page_size, dtype=weights.dtype, device=weights.device
        )
    state = _step_state(
        runner, config, vocab_limit, num_pages=num_pages, logits_chunk=logits_chunk, draft_runner=draft_runner
    )
    static_shapes = on_gpu if config.static_shapes is None else config.static_shapes
    if config.overlap and not static_shapes:
        raise ValueError("overlap=True cannot be honoured without static_shapes=True: static steps only have it")
    obstacle = graphs_obstacle(config, runner.attention, weights.device, static_shapes=static_shapes)
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
    block_size = _check(model, config, None)
    page_size = config.resolve_page_size(block_size)
    return fit_num_pages(
        _runner(model, config, page_size),
        config,
        block_size=block_size,
        page_size=page_size,
        logits_at_once=_logits_chunk(model.config.vocab_size, block_size),
    )


def _logits_chunk(vocab_size: int, block_size: int) -> int:
    """Positions, in whole blocks, whose float32 logits stay under 256 MiB. With all copies of these logits a greedy
    step then needs about 1 GB, a step that draws from a part of the vocabulary about 3 GB."""
    return max(1, LOGITS_AT_ONCE // vocab_size // block_size) * block_size


def _check(model: Decoder, config: EngineConfig, vocab_limit: int | None) -> int:
    """The engine's block size; `ValueError` for settings that contradict the model."""
    c = model.config
    if vocab_limit is not None and not 1 <= vocab_limit <= c.vocab_size:
        raise ValueError(f"vocab_limit={vocab_limit} must lie in 1..{c.vocab_size}")
    if config.block_size not in (None, c.block_size) and c.attention == "block_causal":
        raise ValueError(f"block_size={config.block_size} cannot be honoured: the model has {c.block_size}")
    config.positions(c.max_positions)
    block_size = config.block_size or c.block_size
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
    runner: ModelRunner,
    config: EngineConfig,
    vocab_limit: int | None,
    *,
    num_pages: int,
    logits_chunk: int,
    draft_runner: ModelRunner | None,
) -> StepState:
    c, device, page_size = runner.model.config, runner.cache.k.device, runner.cache.page_size
    draft = None if draft_runner is None else draft_runner.model.config
    width = min(num_pages, longest_in_pages(c, config, page_size, draft))
    longest = min(config.positions(c.max_positions), num_pages * page_size)
    return StepState(
        runner=runner,
        buffer=BlockBuffer(
            num_rows=config.max_rows,
            num_slots=config.num_slots,
            block_size=config.block_size or c.block_size,
            mask_token_id=c.mask_token_id,
            eos_token_ids=c.eos_token_ids,
            device=device,
            adjustments=Adjustments(
                config.max_rows,
                length=longest + (config.num_slots + 1) * (config.block_size or c.block_size),
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
        logits_chunk=logits_chunk,
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
