"""Plain loops: one request, no engine, no pages. The baseline of the engine, which generates the same tokens.

Keys and values lie in contiguous tensors; acceptance runs on the host, in Python, after every forward. Planned rows
run their `PlannedDecoder`; block decoding, D2F included, runs `naive_multibd` of
`decoding/blocks/literal_algorithms.py`.

Shape legend: T packed query tokens, L positions, Q one query's tokens, H query heads, K key/value heads, C head
channels.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.decoding.blocks.acceptance import FALLBACKS
from mbd_core.decoding.blocks.acceptance import predict as predict_tokens
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.levenshtein import EditTokens, LevenshteinRun
from mbd_core.decoding.blocks.literal_algorithms import BlockTokens, Predictions, Weights, naive_multibd
from mbd_core.decoding.blocks.request import FinishReason, Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.plan import CanvasPlan, PlannedDecoder, Query
from mbd_core.decoding.causal.renoise import CanvasReading, Noise, RenoisingDecoder
from mbd_core.models.decoder import Decoder
from mbd_core.models.gemma import Denoising


@dataclass(frozen=True)
class PlainRun:
    """One request decoded: tokens (EOS excluded), why it ended, and its forwards counted as in `Counts`."""

    tokens: list[int]
    finish_reason: FinishReason
    num_forwards: int
    num_store_forwards: int = 0
    num_prefill_forwards: int = 0
    log_probs: list[float] = field(default_factory=list)


class ContiguousCache:
    """Keys and values (layers, lanes, L, K, C) of a model."""

    def __init__(self, model: Decoder, *, num_lanes: int, length: int) -> None:
        config, weight = model.config, model.lm_head.weight
        shape = (config.num_layers, num_lanes, length, config.num_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.v = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def copy_lane(self, source: int, target: int) -> None:
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]

    def positions(self, lane: int) -> Tensor:
        """A lane's keys and values (L, D), one row for each position."""
        pair = torch.stack((self.k[:, lane], self.v[:, lane]))
        return pair.permute(2, 0, 1, 3, 4).flatten(1)


Watch = Callable[[CanvasPlan, ContiguousCache], None]


@dataclass(frozen=True)
class LaneAttention:
    """The `Attend` of planned rows: it writes all queries' keys; then each query attends to its keys of its lane."""

    cache: ContiguousCache
    queries: list[Query]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (T, H, C), keys and values (T, K, C) -> (T, H, C)."""
        lengths = [row.stop - row.start for row in self.queries]
        for row, new_k, new_v in zip(self.queries, k.split(lengths), v.split(lengths), strict=True):
            self.cache.k[layer, row.lane, row.start : row.stop] = new_k
            self.cache.v[layer, row.lane, row.start : row.stop] = new_v
        outs = []
        for row, row_q in zip(self.queries, q.split(lengths), strict=True):
            keys, values = (cache[layer, row.lane, : row.num_keys] for cache in (self.cache.k, self.cache.v))
            mask = torch.ones(len(row_q), len(keys), dtype=torch.bool, device=row_q.device)
            mask.tril_(len(keys) - len(row_q))
            if row.gap and row.causal:
                mask.tril_(len(keys) - len(row_q) - row.gap - 1)
                mask[:, row.start :] = torch.eye(len(row_q), dtype=torch.bool, device=row_q.device)
            elif row.gap:
                mask = torch.ones_like(mask)
                mask[:, row.start - row.gap : row.start] = False
            outs.append(attend_to(row_q, keys, values, mask if row.causal or row.gap else None))
        return torch.cat(outs)


@dataclass(frozen=True)
class GridAttention:
    """The block-causal `Attend` of positions from `start` on; the block grid begins at `origin`."""

    cache: ContiguousCache
    origin: int
    start: int
    block_size: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (T, H, C), keys and values (T, K, C) -> (T, H, C); positions before `origin` are one block."""
        stop = self.start + len(q)
        self.cache.k[layer, 0, self.start : stop] = k
        self.cache.v[layer, 0, self.start : stop] = v
        mask = None
        if stop > self.origin and len(q) > self.block_size:
            block = (torch.arange(stop, device=q.device) - self.origin).clamp(min=-1) // self.block_size
            mask = block[self.start :, None] >= block
        return attend_to(q, self.cache.k[layer, 0, :stop], self.cache.v[layer, 0, :stop], mask)


def attend_to(q_QHC: Tensor, k_LKC: Tensor, v_LKC: Tensor, mask_QL: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention of one sequence -> (Q, H, C)."""
    out = F.scaled_dot_product_attention(
        q_QHC.transpose(0, 1)[None],
        k_LKC.transpose(0, 1)[None],
        v_LKC.transpose(0, 1)[None],
        attn_mask=mask_QL,
        enable_gqa=q_QHC.shape[1] != k_LKC.shape[1],
    )
    return out[0].transpose(0, 1)


@torch.inference_mode()
def run_planned(
    model: Decoder,
    decoder: PlannedDecoder,
    *,
    prefix: Sequence[Query] = (),
    drafts: Decoder | None = None,
    watch: Watch | None = None,
) -> PlainRun:
    """Decode one request to its end, after the tokens that the rows of `prefix` store. `watch` is called after each
    forward, before its logits are used. `drafts` is the model of rows that draft, if that is another model."""
    device = model.lm_head.weight.device
    cache = ContiguousCache(model, num_lanes=decoder.num_lanes, length=decoder.length)
    if prefix:
        forward_canvas(model, cache, list(prefix), device)
    while not decoder.done:
        plan = decoder.plan()
        for source, target in plan.copies:
            cache.copy_lane(source, target)
        drafting = drafts is not None and plan.queries[0].drafts
        logits = forward_canvas(drafts if drafting else model, cache, plan.queries, device)  # type: ignore[arg-type]
        if watch is not None:
            watch(plan, cache)
        decoder.update(logits)
    tokens, log_probs = decoder.tokens, decoder.log_probs
    if tokens and tokens[-1] in model.config.eos_token_ids and len(tokens) < decoder.length:
        return PlainRun(tokens[:-1], "stop", decoder.num_forwards, log_probs=log_probs[:-1])
    return PlainRun(tokens, "length", decoder.num_forwards, log_probs=log_probs)


def forward_canvas(model: Decoder, cache: ContiguousCache, queries: list[Query], device: torch.device) -> list[Tensor]:
    """One packed forward of `queries`; returns the logits (A, V) of each query."""
    ids = torch.cat([q.tokens for q in queries]).to(device)
    positions = torch.cat([torch.arange(q.start, q.stop) - q.gap for q in queries]).to(device)
    hidden = model(ids, positions, LaneAttention(cache, queries))
    begins = [0]
    for q in queries:
        begins.append(begins[-1] + q.stop - q.start)
    rows = torch.cat([q.logits_at - q.start + b for q, b in zip(queries, begins[:-1], strict=True)]).to(device)
    return list(model.logits(hidden[rows]).split([len(q.logits_at) for q in queries]))


def prefix_rows(request: Request) -> list[Query]:
    """The rows that store a request's prefix before its planned rows; none where there is nothing to store."""
    planned, known = request.decoding.planned, (*request.prompt, *request.committed)
    stop = 0 if planned is None else request.first_block_start(len(known))
    if planned is None or not stop:
        return []
    origin = request.decoding.grid_origin(len(request.prompt))
    bounds = sorted({0, *range(origin, stop, planned.store or stop), stop})
    tokens, nowhere = torch.tensor(known[:stop]), torch.zeros(0, dtype=torch.int64)
    return [
        Query(0, start, end, tokens[start:end], nowhere, num_keys=end, causal=planned.store is None)
        for start, end in itertools.pairwise(bounds)
    ]


@torch.inference_mode()
def multi_bd(
    model: Decoder, prompt: list[int], max_tokens: int, config: DecodingConfig, *, ignore_eos: bool = False
) -> PlainRun:
    """Naive MultiBD (Alg. 4), greedy, with at most `buffer_size` resident blocks; `ValueError` for other methods.

    A prefill forward stores the prompt's whole blocks. Then every step is one forward of the resident blocks, which
    writes their keys at their positions and so stores final blocks. The prefill of a D2F prompt stores all of it, and
    the algorithm begins with an empty prompt.
    """
    if config.canvas is not None or config.edit is not None:
        raise ValueError("the plain block loop decodes no canvas (run_planned does) and no edits (run_edits does)")
    if config.prompt_attention == "full" and model.config.attention != "full":
        raise ValueError(
            f"prompt_attention='full' needs full attention; {model.config.architecture} attends in blocks"
        )
    size, device, shift = config.block_size, model.lm_head.weight.device, model.config.shift_logits
    origin = config.grid_origin(len(prompt))
    num_stored = origin + max(0, len(prompt) - origin - config.carry) // size * size
    span = origin + -(-(len(prompt) - origin + max_tokens) // size) * size
    cache = ContiguousCache(model, num_lanes=1, length=span)
    vocab = Vocab(model.config.mask_token_id, model.config.vocab_size)
    hidden, hidden_start = torch.zeros(0), 0  # the last forward's hidden states, and its first position
    last_hidden: Tensor | None = None  # the last committed position's, for a model with shifted logits

    def forward(ids: list[int], start: int, weights: list[float] | None = None) -> Tensor:
        nonlocal hidden, hidden_start, last_hidden
        positions = torch.arange(start, start + len(ids), device=device)
        if start > hidden_start:
            last_hidden = hidden[start - 1 - hidden_start]
        soft = None if weights is None else torch.tensor(weights, device=device)
        attend = GridAttention(cache, origin, start, size)
        hidden = model(torch.tensor(ids, device=device), positions, attend, soft_weight=soft)
        hidden_start = start
        if not shift:
            return hidden
        return torch.cat((hidden[:1] if last_hidden is None else last_hidden[None], hidden[:-1]))

    def predict(cached: list[int], blocks: list[BlockTokens], weights: list[Weights]) -> list[Predictions]:
        ids = [model.config.mask_token_id if t is None else t for block in blocks for t in block]
        soft = [w for block in weights for w in block] if config.soft else None
        shifted_logits = forward(ids, origin + len(cached), soft)
        if config.carry:  # a complete block predicts the token after it
            ends = [i * size for i, block in enumerate(blocks) if None not in block]
            shifted_logits[ends] = hidden[[end + size - 1 for end in ends]]
        logits, fallback_P = model.logits(shifted_logits), None
        if config.ranks_by_score:
            fallback_P = torch.full((len(ids),), FALLBACKS[config.ranking], device=device)
        shape = torch.Size((len(ids),))
        found = predict_tokens(
            lambda part: logits[part], len(ids), None, vocab, shape=shape, chunk=len(ids), fallback_P=fallback_P
        )
        values = found.token_RNB.tolist(), found.confidence_RNB.tolist(), found.score_RNB.tolist()
        triples = list(zip(*values, strict=True))
        return [triples[i : i + size] for i in range(0, len(triples), size)]

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


@torch.inference_mode()
def run_edits(
    model: Decoder, prompt: list[int], max_tokens: int, config: DecodingConfig, *, ignore_eos: bool = False
) -> PlainRun:
    """LLaDA2.2's decoding; the forward that takes a block's final tokens stores the block."""
    device, size = model.lm_head.weight.device, config.block_size
    sizes = model.config
    assert sizes.edit_token_ids is not None, "the model has no tokens that edit"
    eos = () if ignore_eos else sizes.eos_token_ids
    run = LevenshteinRun(prompt, max_tokens, config, EditTokens(*sizes.edit_token_ids), sizes.vocab_size, eos)
    cache = ContiguousCache(model, num_lanes=1, length=len(prompt) + max_tokens + size)

    def forward(ids: list[int], start: int) -> Tensor:
        positions = torch.arange(start, start + len(ids), device=device)
        return model(torch.tensor(ids, device=device), positions, GridAttention(cache, 0, start, size))

    if run.start:
        forward(prompt[: run.start], 0)
    num_prefill = int(run.start > 0)
    while run.finish_reason is None:
        run.advance(model.logits(forward(run.block.tokens, run.start)))
    tokens = [cell.token for cell in run.useful]
    return PlainRun(
        tokens, run.finish_reason, run.num_forwards, num_prefill_forwards=num_prefill, log_probs=run.log_probs
    )


@torch.inference_mode()
def run_renoise(
    model: Decoder,
    request: Request,
    *,
    noise: Noise | None = None,
    first: tuple[Tensor, Tensor] | None = None,
    watch: Callable[[RenoisingDecoder, CanvasReading], None] | None = None,
) -> PlainRun:
    """DiffusionGemma's decoding without a cache: every forward computes the prompt, the finished canvases and the one
    under way. `first` are a first canvas and the logits that condition it; `watch` is called with each forward's
    reading, before it is used."""
    c, device = model.config, model.lm_head.weight.device
    vocab = Vocab(c.mask_token_id, c.vocab_size)
    decoder = RenoisingDecoder(request, eos_token_ids=c.eos_token_ids, vocab=vocab, noise=noise)
    if first is not None:
        decoder.canvas_L, decoder.expected_LD = first[0], model.expected_embedding(first[1].softmax(-1))
    while not decoder.done:
        canvas = decoder.plan().queries[-1]
        known = [*request.prompt, *decoder.tokens]
        ids = torch.cat((torch.tensor(known), canvas.tokens)).to(device)
        positions = torch.arange(len(ids), device=device)
        expected = torch.zeros(len(ids), c.hidden_size, device=device)
        if canvas.expected is not None:
            expected[len(known) :] = canvas.expected
        denoising = Denoising(positions >= len(known), expected)
        hidden = model(ids, positions, CanvasAttention(model, len(known), len(ids)), denoising=denoising)[len(known) :]
        reading = decoder.read(lambda part, hidden=hidden: model.logits(hidden[part]), model.expected_embedding)  # type: ignore[misc]
        if watch is not None:
            watch(decoder, reading)
        decoder.take(reading)
    tokens, ends = decoder.tokens, request.ends(c.eos_token_ids)
    is_ended = tokens[-1] in ends
    number = len(tokens) - is_ended
    return PlainRun(
        tokens[:number], "stop" if is_ended else "length", decoder.num_forwards, log_probs=decoder.log_probs[:number]
    )


class CanvasAttention:
    """`Attend` of known tokens in order and of a canvas after them, by a mask; layers may have a window."""

    def __init__(self, model: Decoder, start: int, stop: int) -> None:
        i = torch.arange(stop, device=model.lm_head.weight.device)
        own = torch.where(i < start, i, stop - 1)  # the last key that each token sees
        first = torch.where(i < start, i, start)  # a window is counted back from here
        self._config = model.config
        self._masks = {
            window: (i <= own[:, None]) & (i > (-1 if window is None else first[:, None] - window))
            for window in {self._config.window_of(layer) for layer in range(self._config.num_layers)}
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_to(q, k, v, self._masks[self._config.window_of(layer)])
