"""DiffusionGemma's layers: which tokens are denoised, rows apart, ranks, and what Gemma's layers refuse."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gemma_models import GEMMA, gemma
from thread_ranks import ThreadRanks
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder
from mbd_core.models.gemma import Denoising
from mbd_core.models.lora import AdapterSlots
from mbd_core.models.quantize import quantize_weights
from mbd_core.models.shard import Shard
from mbd_core.ops.attention.whole import DenseAttention

T, P = 13, 5  # tokens, of which the first P are context


class Masked:
    """Causal context, and a run of denoised tokens that see it and each other; without windows."""

    def __init__(self, at_T: Tensor) -> None:
        sees = torch.ones(len(at_T), len(at_T), dtype=torch.bool).tril() | at_T[:, None]
        self.dense = DenseAttention(sees[None, None])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.dense(layer, q[None], k[None], v[None])[0]


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Denoising]:
    generator = torch.Generator().manual_seed(seed)
    ids, expected = torch.randint(48, (T,), generator=generator), torch.randn(T, 32, generator=generator)
    return ids, torch.arange(T), Denoising(torch.arange(T) >= P, expected)


APART = {"split": [P, T - P]}  # context and denoised tokens, each in calls of its own: equal to the last bit


@torch.no_grad()
def hidden(model: Decoder, denoising: Denoising | None, seed: int = 0, **settings: object) -> Tensor:
    ids, positions, given = inputs(seed)
    return model(ids, positions, Masked(given.at), denoising=denoising, **settings)


def test_context_knows_nothing_of_denoised_tokens_and_their_expectations_count_for_them_alone() -> None:
    model, (_, _, given) = gemma(), inputs()
    plain, denoised = hidden(model, None, **APART), hidden(model, given, **APART)
    assert torch.equal(plain[:P], denoised[:P]) and not torch.allclose(plain[P:], denoised[P:], atol=1e-2)
    elsewhere = given.expected.clone()
    elsewhere[:P] += 5.0
    assert torch.equal(hidden(model, Denoising(given.at, elsewhere), **APART), denoised)
    other = given.expected.clone()
    other[P:] += 1.0
    assert not torch.allclose(hidden(model, Denoising(given.at, other))[P:], denoised[P:], atol=1e-2)


def test_each_kind_of_token_has_its_own_scalar() -> None:
    model, (_, _, given) = gemma(), inputs()
    everywhere = Denoising(torch.ones(T, dtype=torch.bool), given.expected)
    before, all_denoised = hidden(model, given, **APART), hidden(model, everywhere)
    with torch.no_grad():
        model.model.layers[0].layer_scalar.mul_(0.5)
    after = hidden(model, given, **APART)
    assert torch.equal(after[:P], before[:P]) and not torch.allclose(after[P:], before[P:], atol=1e-2)
    with torch.no_grad():
        model.model.layers[0].layer_scalar.mul_(2.0)
        model.model.layers[0].context_scalar.mul_(0.5)
    assert torch.equal(hidden(model, everywhere), all_denoised)
    assert not torch.allclose(hidden(model, given)[:P], before[:P], atol=1e-2)


def test_rows_apart_have_the_same_bits_alone() -> None:
    model = gemma()

    class Own:
        """Rows that attend to themselves."""

        def __init__(self, lengths: list[int]) -> None:
            self.lengths = lengths

        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            sees = DenseAttention(torch.ones(1, 1, 1, 1, dtype=torch.bool))
            rows = zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)
            return torch.cat([sees(layer, *(x.clone()[None] for x in row))[0] for row in rows])

    ids, positions, given = inputs()
    lengths = [5, 1, 7]
    with torch.no_grad():
        packed = model(ids, positions, Own(lengths), split=lengths, denoising=given)
        starts = [0, 5, 6]
        for start, n in zip(starts, lengths, strict=True):
            part = slice(start, start + n)
            own = Denoising(given.at[part].clone(), given.expected[part].clone())
            alone = model(ids[part].clone(), positions[part].clone(), Own([n]), split=[n], denoising=own)
            assert torch.equal(alone, packed[part])
        torch.testing.assert_close(model(ids, positions, Own(lengths), denoising=given), packed)


def test_two_ranks_are_one_model(tmp_path: Path) -> None:
    model, ranks = gemma(), ThreadRanks(2)
    save_model(tmp_path / "model", model)
    parts = [load_model(tmp_path / "model", shard=Shard(rank=r, size=2), reduce=ranks.reduce(r)) for r in range(2)]
    _, _, given = inputs()
    probabilities = torch.randn(3, 48, generator=torch.Generator().manual_seed(1)).softmax(-1)

    @torch.no_grad()
    def work(part: Decoder) -> tuple[Tensor, Tensor]:
        return part.logits(hidden(part, given)), part.expected_embedding(probabilities)

    found = ranks.run(lambda rank: work(parts[rank]))
    for logits, expected in found:
        torch.testing.assert_close(logits, work(model)[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(expected, work(model)[1])
        assert torch.equal(logits, found[0][0])


def test_an_expected_embedding_is_the_mean_of_the_embeddings() -> None:
    model = gemma()
    one = torch.eye(48)[7]
    torch.testing.assert_close(model.expected_embedding(one), model.embed(torch.tensor(7)))
    half = (one + torch.eye(48)[9]) / 2
    torch.testing.assert_close(model.expected_embedding(half), model.embed(torch.tensor([7, 9])).mean(0))


def test_logits_stay_within_the_cap() -> None:
    model = gemma()
    assert model.config.gemma is not None
    capped = replace(model.config.gemma, softcap=0.5)
    before = model.logits(hidden(model, None))
    model.config = replace(model.config, gemma=capped)
    after = model.logits(hidden(model, None))
    assert before.abs().max() > 1 > 0.5 >= after.abs().max()
    torch.testing.assert_close(after, 0.5 * torch.tanh(30.0 * torch.atanh(before / 30.0) / 0.5), rtol=1e-4, atol=1e-5)


def test_what_gemmas_layers_refuse() -> None:
    model = gemma()
    with pytest.raises(ValueError, match="fp8=experts"):
        quantize_weights(model, "experts")
    with pytest.raises(ValueError, match="adapters"):
        AdapterSlots(model.config, Shard(), model.model.norm.weight, num_slots=1, max_rank=2)
    with pytest.raises(ValueError, match="num_global_key_value_heads=1"):
        replace(GEMMA, gemma=replace(GEMMA.gemma, global_kv_heads=1)).sharded(2)
