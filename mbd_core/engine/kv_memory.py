"""How many KV pages fit: from the device's free memory after the weights, less what the largest forward takes.

On a GPU the largest step is run once and its peak is read from the allocator, as vLLM and nano-vllm do. The pages then
take all that `kv_memory_fraction` of the card leaves, since cached prefixes make use of it. On a CPU, whose memory
belongs to others too, nothing is measured: the pages take at most half of `kv_memory_fraction` of the free memory, and
no more than the sequences of all batch rows can fill at the model's full length.
"""

import torch

from mbd_core.decoding.sampling import Draw, Vocab, choose
from mbd_core.engine.batch import Rows, pack
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.engine.kv_cache import PagedKVCache
from mbd_core.engine.model_runner import ModelRunner
from mbd_core.models.model_config import ModelConfig
from mbd_core.ops.host_memory import free_host_memory


def bytes_per_page(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Keys and values of all layers for a page of tokens."""
    return 2 * model.num_layers * page_size * model.num_kv_heads * model.head_dim * dtype.itemsize


def longest_in_pages(model: ModelConfig, config: EngineConfig, page_size: int) -> int:
    """Pages that the longest possible sequence fills, with a full buffer behind it."""
    return -(-model.max_positions // page_size) + config.num_slots


def fit_num_pages(
    runner: ModelRunner, config: EngineConfig, *, block_size: int, page_size: int, logits_at_once: int
) -> int:
    """The number of pages, the null page included; `ValueError` where not even one sequence's block fits."""
    model, weights = runner.model.config, runner.model.model.norm.weight
    each = bytes_per_page(model, page_size, weights.dtype)
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
        # graphs keep the temporary memory of a step for themselves, beside that of steps that run eagerly
        steps = 1 if config.graphs is False else 2
        budget = free - steps * activations - int((1 - config.kv_memory_fraction) * total)
        most = budget // each
    else:
        budget = int(config.kv_memory_fraction * free_host_memory() / 2)
        most = min(budget // each, config.max_rows * longest_in_pages(model, config, page_size) + 1)
    if most < 2:
        raise ValueError(
            f"no KV page of {each:,} bytes fits into the {max(0, budget):,} bytes that are left beside the weights; "
            "raise kv_memory_fraction, lower max_prefill_tokens, or use a larger device"
        )
    return int(most)


def _profile(
    runner: ModelRunner, config: EngineConfig, *, block_size: int, page_size: int, logits_at_once: int
) -> None:
    """The largest step: a full prefill budget, every batch row's whole buffer, and a chunk of logits to draw from.

    All rows write to the null page and attend to the other page of a cache of two: the values mean nothing, the shapes
    are right.
    """
    device = runner.model.model.norm.weight.device
    decoding = config.max_rows * config.num_slots
    num_rows = max(1, config.max_prefill_tokens // block_size) + decoding
    positions = torch.arange(block_size, device=device).repeat(num_rows)
    num_asked = min(logits_at_once, decoding * block_size)
    rows = Rows(
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
    """The least cache that a forward can run on."""
    return PagedKVCache(model, num_pages=2, page_size=page_size, dtype=weights.dtype, device=weights.device)
