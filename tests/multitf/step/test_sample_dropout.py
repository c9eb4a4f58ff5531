"""Dropout by the sample: its draws depend on the sample alone, and are those of dropout."""

import pytest
import torch

from mbd_core.multitf.step.sample_dropout import CurrentDraws, SampleDraws, SampleDropout


def drop(x: torch.Tensor, *rows: SampleDraws, layer: int = 0, p: float = 0.25) -> torch.Tensor:
    return SampleDropout(p, layer, CurrentDraws([[row] for row in rows]))(x)


def test_a_sample_s_draws_do_not_depend_on_its_neighbours_or_its_padding() -> None:
    first, second = (SampleDraws.of(n, tokens=tokens, seed=1, step=2) for n, tokens in ((3, 5), (4, 7)))
    both = drop(torch.ones(2, 9, 16), first, second)
    for row, draws in enumerate((first, second)):
        alone = drop(torch.ones(1, draws.tokens, 16), draws)
        assert torch.equal(both[row, : draws.tokens], alone[0])
    assert not torch.equal(both[0, :5], both[1, :5])


def test_samples_of_one_sequence_have_their_own_draws() -> None:
    first, second = (SampleDraws.of(n, tokens=tokens, seed=1, step=2) for n, tokens in ((3, 5), (4, 7)))
    packed = SampleDropout(0.25, 0, CurrentDraws([[second], [first, second]]))(torch.ones(2, 14, 16))
    assert torch.equal(packed[0, :7], drop(torch.ones(1, 7, 16), second)[0])
    assert torch.equal(packed[1, :5], drop(torch.ones(1, 5, 16), first)[0])
    assert torch.equal(packed[1, 5:12], packed[0, :7]) and (packed[1, 12:] == packed[1, -1, -1]).all()


def test_a_share_is_dropped_and_the_others_make_up_for_it() -> None:
    x = torch.rand(1, 400, 50) + 0.5
    dropped = drop(x, SampleDraws.of(0, tokens=400, seed=0, step=0))
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], x[kept] / 0.75)


def test_samples_steps_seeds_and_layers_have_draws_of_their_own() -> None:
    x = torch.ones(1, 20, 8)
    numbers = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    draws = [SampleDraws.of(sample, tokens=20, seed=seed, step=step) for sample, seed, step in numbers]
    patterns = [drop(x, one) for one in draws] + [drop(x, draws[0], layer=1)]
    assert len({tuple(pattern.flatten().tolist()) for pattern in patterns}) == 5


def test_nothing_is_dropped_in_evaluation_or_without_a_sample() -> None:
    module, x = SampleDropout(0.5, 0, CurrentDraws()), torch.ones(1, 4, 8)
    with pytest.raises(AssertionError):
        module(x)
    assert torch.equal(module.eval()(x), x)
