"""The Monte Carlo log-likelihood: exact where there is nothing to draw, the expectation elsewhere, and repeatable."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mbd_core.batch.likelihood import Draws, log_likelihood
from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.multitf.states.mask import block_causal_mask
from mbd_core.ops.attention.whole import DenseAttention

PREFIX = [5, 6, 7, 8, 9, 10]
TARGET = [21, 22, 23, 24, 25, 26, 27]
FEW = Draws(number=6, per_forward=4)


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path) -> dict[str, Decoder]:
    """One that attends in blocks of 4, a full-attention one, and one that also shifts its logits."""
    found = {"blocks": load_model(tiny_model_dir, dtype=torch.float32, device=torch.device("cpu"))}
    for name, family in (("full", "llada"), ("shifted", "dream")):
        config = replace(SHAPES[f"tiny-{family}"], vocab_size=64, mask_token_id=0, eos_token_ids=(1,))
        found[name] = random_model(config, device=torch.device("cpu"), dtype=torch.float32, std=0.2)
    return found


@torch.inference_mode()
def log_probs(model: Decoder, tokens: Sequence[int], masked: Sequence[int], *, blocks: bool) -> Tensor:
    """Log-probabilities of every position in one plain forward over the sequence with these positions masked."""
    given = torch.tensor([[model.config.mask_token_id if n in masked else t for n, t in enumerate(tokens)]])
    positions = torch.arange(len(tokens))
    see = block_causal_mask(positions // 4) if blocks else torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    out = model.logits(model(given, positions[None], DenseAttention(see[None, None])))[0]
    if model.config.shift_logits:
        out = out.roll(1, dims=0)
    return out.float().log_softmax(-1)


def exact(model: Decoder, tokens: Sequence[int], group: Sequence[int], *, blocks: bool) -> float:
    """The expectation over k and over the masked positions of one group, all of them counted."""
    total = 0.0
    for k in range(1, len(group) + 1):
        sets = list(itertools.combinations(group, k))
        for masked in sets:
            found = log_probs(model, tokens, masked, blocks=blocks)
            nats = sum(float(found[n, tokens[n]]) for n in masked)
            total += len(group) / k * nats / len(sets) / len(group)
    return total


@pytest.mark.parametrize("name", ["blocks", "full", "shifted"])
def test_one_token_has_its_probability_and_all_tokens_together_have_one(models: dict[str, Decoder], name: str) -> None:
    model = models[name]
    nats = [log_likelihood(model, PREFIX, [t], block_size=4, draws=Draws(number=1)) for t in range(64)]
    found = log_probs(model, [*PREFIX, 3], [6], blocks=name == "blocks")[6]
    assert nats == pytest.approx(found[:64].tolist(), abs=1e-4)
    if name != "blocks":
        assert sum(map(math.exp, nats)) == pytest.approx(1.0, abs=1e-4)


def test_blocks_of_one_token_are_a_chain_of_conditionals(models: dict[str, Decoder]) -> None:
    """With nothing to draw the blocks of the two streams must give what each gives alone."""
    model = models["blocks"]
    whole = log_likelihood(model, PREFIX, TARGET, block_size=1, draws=Draws(number=2))
    parts = [
        log_likelihood(model, [*PREFIX, *TARGET[:n]], [token], block_size=1, draws=Draws(number=1))
        for n, token in enumerate(TARGET)
    ]
    assert whole == pytest.approx(sum(parts), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "groups"), [("blocks", [(6, 7), (8, 9, 10)]), ("full", [(6, 7, 8, 9)]), ("shifted", [(6, 7, 8)])]
)
def test_the_estimate_is_the_expectation_over_all_masks(
    models: dict[str, Decoder], name: str, groups: list[tuple[int, ...]]
) -> None:
    model, blocks = models[name], name == "blocks"
    target = TARGET[: sum(map(len, groups))]
    tokens = [*PREFIX, *target]
    expected = sum(exact(model, tokens[: group[-1] + 1], group, blocks=blocks) for group in groups)
    found = log_likelihood(model, PREFIX, target, block_size=4, draws=Draws(number=2000, per_forward=250))
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", ["blocks", "full"])
def test_an_estimate_repeats_and_does_not_depend_on_how_many_draws_share_a_forward(
    models: dict[str, Decoder], name: str
) -> None:
    model = models[name]
    found = [
        log_likelihood(model, PREFIX, TARGET, block_size=4, draws=draws)
        for draws in (FEW, FEW, replace(FEW, per_forward=1), replace(FEW, seed=1))
    ]
    assert found[0] == found[1] == pytest.approx(found[2], abs=1e-4)
    assert found[3] != pytest.approx(found[0], abs=1e-4)


def test_a_model_with_causal_rows_has_the_chain_that_it_decodes_by() -> None:
    """Exact, without a draw: the sum of the log-probabilities with which an engine decodes the same tokens."""
    model = random_model(SHAPES["tiny-nemotron"], device=torch.device("cpu"), dtype=torch.float32, std=0.2)
    decoding = DecodingConfig(block_size=model.config.block_size, causal=Causal(method="ar"))
    request = Request(
        request_id="a", prompt=tuple(PREFIX), max_tokens=20, decoding=decoding, ignore_eos=True, logprobs=True
    )
    output = Engine(model, EngineConfig(max_rows=1, num_pages=20)).generate([request])[0]
    assert output.piece.logprobs is not None
    found = log_likelihood(model, PREFIX, output.tokens, block_size=32, draws=FEW)
    assert found == pytest.approx(sum(output.piece.logprobs), abs=1e-3) and found < -1
    with pytest.raises(ValueError, match="the text has none before it"):
        log_likelihood(model, [], TARGET, block_size=32, draws=FEW)


def test_what_has_no_estimate_is_refused(models: dict[str, Decoder]) -> None:
    assert log_likelihood(models["full"], PREFIX, [], block_size=4, draws=FEW) == 0.0
    with pytest.raises(ValueError, match="513 tokens exceeds the model's 512"):
        log_likelihood(models["blocks"], PREFIX, [5] * 507, block_size=4, draws=FEW)
    with pytest.raises(ValueError, match="the text has none before it"):
        log_likelihood(models["shifted"], [], TARGET, block_size=4, draws=FEW)
    with pytest.raises(ValueError, match="at least one draw"):
        Draws(number=0)
