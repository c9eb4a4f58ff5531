"""A rollout run again, forward by forward, with the definition: no engine, no cache, no buffer."""

import pytest
import torch

from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling import Draw, Vocab, choose, log_probability
from mbd_core.models.decoder import Decoder
from mbd_core.ops.attention.whole import DenseAttention


def check_replay(model: Decoder, request: Request, output: Output, *, vocab_size: int | None = None) -> int:
    """Each forward of the output's step map predicts the tokens and log-probabilities that it says; their number."""
    whole = output.piece + output.tail
    assert whole.steps is not None and whole.logprobs is not None
    tokens, steps, logprobs = whole.tokens, whole.steps, whole.logprobs
    assert len(tokens) == len(steps) == len(logprobs)
    prompt_and_answer = (*request.prompt, *request.committed)
    origin, size = request.decoding.grid_origin(len(request.prompt)), request.decoding.block_size
    length = -(-(len(prompt_and_answer) + len(tokens) - origin) // size) * size + origin
    block_L = (torch.arange(length) - origin).div(size, rounding_mode="floor").clamp(min=-1)
    attention = DenseAttention((block_L[None, :] <= block_L[:, None])[None, None])
    shift = model.config.shift_logits
    for forward in sorted(set(steps) - {0}):
        visible = [t if step < forward else model.config.mask_token_id for t, step in zip(tokens, steps, strict=True)]
        ids = torch.tensor(
            [*prompt_and_answer, *visible]
            + [model.config.mask_token_id] * (length - len(prompt_and_answer) - len(visible))
        )
        with torch.no_grad():
            hidden = model(ids[None], torch.arange(length)[None], attention)[0]
            places = [len(prompt_and_answer) + i for i, step in enumerate(steps) if step == forward]
            logits = model.logits(hidden[[p - shift for p in places]])
        vocab = Vocab(model.config.mask_token_id, vocab_size or model.config.vocab_size)
        choice, confidence = choose(logits, vocab, _draw(request, places, forward))
        assert choice.tolist() == [tokens[p - len(prompt_and_answer)] for p in places]
        expected = [logprobs[p - len(prompt_and_answer)] for p in places]
        assert log_probability(confidence).tolist() == pytest.approx(expected, abs=2e-4)
    return len(set(steps) - {0})


def text_log_probabilities(model: Decoder, text: tuple[int, ...]) -> torch.Tensor:
    """(L - 1, V) of each token of a text but the first, before it stands there and masks in the rest of its block."""
    rows = []
    for i in range(1, len(text)):
        length = (i // model.config.block_size + 1) * model.config.block_size
        ids = torch.tensor([[*text[:i], *[model.config.mask_token_id] * (length - i)]])
        block_L = torch.arange(length) // model.config.block_size
        attention = DenseAttention((block_L[None, :] <= block_L[:, None])[None, None])
        with torch.no_grad():
            hidden = model(ids, torch.arange(length)[None], attention)[0]
            rows.append(model.logits(hidden[[i]])[0].float().log_softmax(-1))
    return torch.stack(rows) if rows else torch.zeros(0, model.config.vocab_size)


def _draw(request: Request, places: list[int], forward: int) -> Draw | None:
    sampling = request.sampling
    if not sampling.draws:
        return None
    ones = torch.ones(len(places), dtype=torch.int64)
    return Draw(
        temperature_P=ones * sampling.temperature,
        top_p_P=ones * sampling.top_p,
        top_k_P=ones * sampling.top_k,
        seed_P=ones * sampling.seed,
        position_P=torch.tensor(places),
        forward_P=ones * (forward - 1),
    )
