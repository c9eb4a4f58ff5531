"""Canvases at once, beside LLaDA's own batch: one tensor of token ids, computed whole by each forward.

Its `generate` has the canvases of a batch in one tensor, takes logits at every position, and accepts row by row. Every
canvas of the batch is in the same block, which ends when all rows have filled it. So it computes more positions than
the engine and has hardly any bookkeeping.

Shape legend: B canvases, L positions of each, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.decoders import MethodCase, ModelCase, engine_of
from benchmarks.measuring import interleaved, median_times, timed
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.unmasking import quota, steps_of_block
from mbd_core.models.decoder import Decoder

PROMPT_LENGTH = 20


@dataclass(frozen=True)
class WholeAttention:
    """The `Attend` of equally long sequences in which each position sees all of its own sequence."""

    num_sequences: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B L, H, C), keys and values (B L, K, C) -> (B L, H, C)."""
        q, k, v = (x.unflatten(0, (self.num_sequences, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)


@torch.inference_mode()
def own_batch(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, canvas: Canvas) -> list[list[int]]:
    """The tokens of all canvases; an EOS ends none. Raises `ValueError` for prompts of different lengths, for models
    with shifted logits, and for canvases that keep keys or have other acceptance rules than LLaDA and Fast-dLLM.
    """
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) != 1:
        raise ValueError(f"a batch has prompts of one length, not of {sorted(lengths)}")
    if model.config.shift_logits or not is_batched(canvas):
        raise ValueError(f"LLaDA's batch decodes neither shifted logits nor {canvas}")
    (start,) = lengths
    vocab = Vocab(model.config.mask_token_id, model.config.vocab_size)
    tokens_BL = torch.tensor([[*prompt, *[vocab.mask_token_id] * max_tokens] for prompt in prompts])
    masked_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
    masked_BL[:, start:] = True
    positions = torch.arange(tokens_BL.shape[1]).repeat(len(prompts))
    attend, size = WholeAttention(len(prompts)), canvas.block_length or max_tokens
    for begin in range(0, max_tokens, size):
        block = slice(start + begin, start + min(begin + size, max_tokens))
        length, step = block.stop - block.start, 0
        num_steps = steps_of_block(canvas.steps or max_tokens, max_tokens, begin, block.stop - start)
        while masked_BL[:, block].any():
            hidden = model(tokens_BL.flatten(), positions, attend)
            token, confidence = vocab.likeliest(model.logits(hidden))
            open_BL = masked_BL[:, block]
            score_BL = confidence.view(tokens_BL.shape)[:, block].masked_fill(~open_BL, -torch.inf)
            for row, score_L in enumerate(score_BL):
                count = quota(length, num_steps, step) if canvas.accept == "quota" else 1
                best_L = score_L.topk(min(count, int(open_BL[row].sum()))).indices
                accepted_L = torch.zeros_like(open_BL[row]).index_fill_(0, best_L, True)
                if canvas.accept == "threshold":
                    accepted_L |= score_L >= canvas.tau
                at = accepted_L.nonzero()[:, 0] + block.start
                tokens_BL[row, at] = token.view(tokens_BL.shape)[row, at]
                masked_BL[row, at] = False
            step += 1
    return tokens_BL[:, start:].tolist()


def measure_batch(
    model: ModelCase, method: MethodCase, *, max_tokens: int, repeats: int, tick: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """One row: the engine with as many requests as the model has prompts, all of one length, and LLaDA's own batch of
    them. `tick` is called after each of the `2 * repeats` timed runs."""
    canvas = method.decoding.canvas
    assert canvas is not None
    prompts = [(prompt * PROMPT_LENGTH)[:PROMPT_LENGTH] for prompt in model.prompts]
    requests = [
        Request(request_id=str(n), prompt=prompt, max_tokens=max_tokens, decoding=method.decoding, ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]
    engine = engine_of(model, method, max_rows=len(requests))
    tokens = [list(output.tokens) for output in engine.generate(requests)]
    is_same = tokens == own_batch(model.model, prompts, max_tokens, canvas)
    runs = {
        "batch": timed(lambda: own_batch(model.model, prompts, max_tokens, canvas)),
        "engine": timed(lambda: engine.generate(requests)),
    }
    times = median_times(interleaved(runs, repeats=repeats, after=tick))
    return {
        "model": model.label,
        "method": method.label,
        "requests": len(requests),
        "batch_seconds": times["batch"].wall,
        "engine_seconds": times["engine"].wall,
        "engine_over_batch": times["batch"].wall / times["engine"].wall,
        "engine_over_batch_processor": times["batch"].processor / times["engine"].processor,
        "same_tokens": is_same,
    }


def is_batched(canvas: Canvas | None) -> bool:
    """Whether `own_batch` decodes such a canvas: all forwards are whole, and a threshold or a number of tokens a step
    decides what is accepted."""
    if canvas is None:
        return False
    plain = Canvas(block_length=canvas.block_length, steps=canvas.steps, accept=canvas.accept, tau=canvas.tau)
    return canvas == plain and canvas.accept in ("quota", "threshold")
