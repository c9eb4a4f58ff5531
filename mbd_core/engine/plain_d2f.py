"""The plain loop of D2F: one request, no engine. The prompt attends in full and the block grid begins at its end.

It is Algorithm 4 of `decoding/reference.py` behind a prompt that the algorithm does not see; its block-causal variant
(App. C.5) and shifted models (Dream), which `plain.multi_bd` does not have, are here too.

Shape legend: T packed query tokens, H query heads, K key/value heads, C head channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.decoding.config import DecodingConfig
from mbd_core.decoding.reference import Tokens, Weights, naive_multibd
from mbd_core.decoding.sampling import choose
from mbd_core.engine.plain import ContiguousCache, PlainRun, attend_to
from mbd_core.models.decoder import Decoder


@dataclass(frozen=True)
class GridAttention:
    """The `Attend` of blocks from `start` on, on a grid that begins at `origin`: each sees all up to its own end."""

    cache: ContiguousCache
    origin: int
    start: int
    block_size: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (T, H, C), keys and values (T, K, C) -> (T, H, C); what lies before `origin` is one block."""
        stop = self.start + len(q)
        self.cache.k[layer, 0, self.start : stop] = k
        self.cache.v[layer, 0, self.start : stop] = v
        mask = None
        if stop > self.origin and len(q) > self.block_size:
            block = (torch.arange(stop, device=q.device) - self.origin).clamp(min=-1) // self.block_size
            mask = block[self.start :, None] >= block
        return attend_to(q, self.cache.k[layer, 0, :stop], self.cache.v[layer, 0, :stop], mask)


@torch.inference_mode()
def d2f(
    model: Decoder, prompt: list[int], max_tokens: int, config: DecodingConfig, *, ignore_eos: bool = False
) -> PlainRun:
    """D2F and its variants with at most `buffer_size` resident blocks, greedy; `ValueError` for what it has not."""
    if config.canvas is not None or config.soft is not None or config.fallback in ("margin", "neg_entropy"):
        raise ValueError(
            "the plain D2F loop has no canvas, no soft, and no fallback by margin or entropy; use the engine"
        )
    size, device, shift = config.block_size, model.lm_head.weight.device, model.config.shift_logits
    origin = len(prompt) if config.prompt_attention == "full" else 0
    num_stored = origin + (len(prompt) - origin) // size * size
    span = origin + -(-(len(prompt) - origin + max_tokens) // size) * size
    cache = ContiguousCache(model, num_lanes=1, length=span)
    forbidden_V = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)
    forbidden_V[model.config.mask_token_id] = True
    hidden, hidden_start = torch.zeros(0), 0  # of the last forward, and where it began
    before: Tensor | None = None  # of the last committed position, from which a shifted model predicts the next

    def forward(ids: list[int], start: int) -> Tensor:
        nonlocal hidden, hidden_start, before
        positions = torch.arange(start, start + len(ids), device=device)
        if start > hidden_start:
            before = hidden[start - 1 - hidden_start]
        hidden = model(torch.tensor(ids, device=device), positions, GridAttention(cache, origin, start, size))
        hidden_start = start
        if not shift:
            return hidden
        return torch.cat((hidden[:1] if before is None else before[None], hidden[:-1]))

    def predict(cached: list[int], blocks: list[Tokens], weights: list[Weights]) -> list[list[tuple[int, float]]]:
        ids = [model.config.mask_token_id if t is None else t for block in blocks for t in block]
        token, confidence = choose(model.logits(forward(ids, origin + len(cached))), forbidden_V)
        pairs = list(zip(token.tolist(), confidence.tolist(), strict=True))
        return [pairs[i : i + size] for i in range(0, len(pairs), size)]

    if num_stored:
        forward(prompt[:num_stored], 0)
    eos = () if ignore_eos else model.config.eos_token_ids
    run = naive_multibd(prompt[origin:], max_tokens, config, predict, eos=eos, cap=config.buffer_size)
    assert run.finish_reason is not None
    return PlainRun(
        run.tokens,
        run.finish_reason,
        run.num_forwards,
        run.num_store_forwards,
        num_prefill_forwards=int(num_stored > 0),
    )
