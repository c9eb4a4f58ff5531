"""How many KV pages fit: the device's free memory after the weights, less the memory of the largest forward.

On a GPU the largest step is run once and its peak is read from the allocator, as vLLM and nano-vllm do. The pages then
take the rest of `kv_memory_fraction` of the card, since cached prefixes make use of it. On a CPU, whose memory other
processes use too, nothing is measured. There the pages take at most half of `kv_memory_fraction` of the free memory,
and no more than the sequences of all batch rows can fill at the model's full length.
"""

from dataclasses import replace

import torch

from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.blocks.work import ALL_WORK
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.step.batch import BatchRows, pack
from mbd_core.engine.step.decode import StepState
from mbd_core.engine.step.kinds import row_limits
from mbd_core.engine.step.rows import StepRows
from mbd_core.models.model_config import ModelConfig
from mbd_core.ops.machine import free_host_memory


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


def fit_num_pages(state: StepState, config: EngineConfig) -> int:
    """The number of pages, the null page included, beside all else that `state` holds. Raises `ValueError` if no page,
    or not the largest step, fits."""
    model, weights = state.runner.model.config, state.runner.model.model.norm.weight
    free, activations = free_host_memory(), 0
    total: int | None = None
    if weights.device.type == "cuda":
        try:
            activations = _measured(state, config)
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                "the largest step does not fit beside the weights; lower max_prefill_tokens or max_rows, or use a "
                "larger device"
            ) from error
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(weights.device)
    return pages_within(
        free,
        model,
        config,
        page_size=state.page_size,
        dtype=weights.dtype,
        total=total,
        activations=activations,
        draft=None if state.draft_runner is None else state.draft_runner.model.config,
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
    activations  bytes of the GPU that steps need beside weights and pages
    draft        the draft model, whose keys lie in the same pages
    """
    page_bytes = sum(bytes_per_page(each, page_size, dtype) for each in (model, draft) if each is not None)
    if total is not None:
        budget = free - activations - int((1 - config.kv_memory_fraction) * total)
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


@torch.inference_mode()
def _measured(state: StepState, config: EngineConfig) -> int:
    """The bytes that steps need beside weights and pages: those of the largest step, and if graphs are captured once
    more those of what graphs hold, because graphs keep temporary memory of their own.

    The largest step has a full prefill budget and the most positions of every batch row, in both models. It reads all
    slots with all optional work, in chunks. Of planned rows it holds the logits of the drafts that it judges, its own
    logits, and what decoders make of both: a copy request by request.

    All rows are as long as a page, write to the null page and attend to the other page of a cache of two: the values
    mean nothing, the shapes are right.
    """
    runner, draft_runner, device = state.runner, state.draft_runner, state.tables_RP.device
    draft = None if draft_runner is None else draft_runner.model.config
    most = row_limits(runner.model.config, config, state.page_size, draft)
    size, num_tokens = state.page_size, config.max_prefill_tokens + config.max_rows * most.positions
    num_rows, num_held = -(-num_tokens // size), config.max_rows * most.logits
    num_read = state.buffer.masked_RNB.numel()
    rows = BatchRows(
        tokens_T=torch.zeros(num_rows * size, dtype=torch.int64, device=device),
        positions_T=torch.arange(size, device=device).repeat(num_rows),
        lengths_K=size,
        kv_lens_K=torch.full((num_rows,), size, device=device),
        pages_KP=torch.ones((num_rows, state.tables_RP.shape[1]), dtype=torch.int64, device=device),
        stored_K=torch.zeros(num_rows, dtype=torch.bool, device=device),
        logits_at_A=torch.arange(max(num_held, num_read), device=device),
        adapter_K=None if runner.adapters is None else torch.zeros(num_rows, dtype=torch.int64, device=device),
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    batch = pack([rows], page_size=state.page_size)
    hidden_AD = runner.forward(batch)
    slots, logits_of = StepRows(groups=[rows], num_asked=num_read), state.logits_of(hidden_AD, batch, ALL_WORK)
    state.predict(slots, state.buffer, logits_of, ALL_WORK)
    in_graphs = torch.cuda.max_memory_allocated(device) - before
    held = [runner.logits(hidden_AD[:num_held]) for _ in range(2)] if num_held else []
    if draft_runner is not None:
        draft_runner.forward(replace(batch, adapter_T=None))
    if held:
        held += [part.clone() for part in held]
        state.predict(slots, state.buffer, logits_of, ALL_WORK)
    at_most = torch.cuda.max_memory_allocated(device) - before
    for each in (runner, draft_runner):
        if each is not None:
            each.forget_batch()
    return at_most if config.graphs is False else at_most + in_graphs
