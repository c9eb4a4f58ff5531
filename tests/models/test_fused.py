"""The fused decoder: every family's numbers, its rank's part, its files to the byte, and memory held once."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, SDAR, random_model
from torch import Tensor
from torch.nn import functional as F

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder
from mbd_core.models.fused import Norm, fuse
from mbd_core.models.fused_layer import FusedLayer
from mbd_core.models.layer_parts import RMSNorm
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import quantize_weights, round_to_int8
from mbd_core.models.shard import Shard, served_dim
from mbd_core.ops.attention.whole import DenseAttention

T, LATEST = 12, 40


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Packed heads (T, H, C), all of which see each other."""
    dense = DenseAttention(torch.ones(1, 1, len(q), len(q), dtype=torch.bool))
    return dense(layer, q[None], k[None], v[None])[0]


def inputs(model: Decoder) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (T,), generator=generator)
    weight = torch.rand(T, generator=generator).masked_fill(torch.arange(T) % 3 == 0, 1.0)
    return ids, torch.randperm(LATEST, generator=generator)[:T], weight


def both(model: Decoder, *, soft: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states of the decoder, computed before it is fused, and of its fused form."""
    ids, positions, weight = inputs(model)
    with torch.no_grad():
        plain = model(ids, positions, attend, soft_weight=weight if soft else None)
    fused = fuse(model, num_positions=LATEST)
    return plain, fused.forward(ids, positions, attend, soft_weight=weight if soft else None)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_is_the_decoder(family: str, soft: bool) -> None:
    plain, fused = both(random_model(FAMILIES[family]), soft=soft)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_double_is_far_closer(family: str) -> None:
    """Norms and rotations keep the decoder's float32; nothing else may be narrow."""
    plain, fused = both(random_model(FAMILIES[family]).double())
    torch.testing.assert_close(fused, plain, atol=2e-7, rtol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_int8_is_the_decoder_in_int8(family: str) -> None:
    """A value of another last bit may round to the next whole number, so what int8 itself errs is the measure."""
    wide = random_model(FAMILIES[family])
    rounded = round_to_int8(copy.deepcopy(wide))
    (plain, fused), (exact, _) = both(rounded), both(wide)
    assert all(isinstance(layer, FusedLayer) for layer in fuse(rounded, num_positions=LATEST)._layers)
    assert (fused - plain).norm() < 0.1 * (plain - exact).norm()


@pytest.mark.parametrize("family", ["sdar", "llada", "dream", "llada2"])
def test_fused_bfloat16_errs_no_more_than_the_decoder(family: str) -> None:
    """Against float32 with the same weights. Experts might be chosen differently, so none here."""
    config = replace(FAMILIES[family], moe=None)
    model = random_model(config).bfloat16()
    exact = random_model(config)
    exact.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    (plain, fused), (wide, _) = both(model), both(exact)
    assert fused.dtype == torch.bfloat16
    error = (fused.float() - wide).norm() / wide.norm()
    assert error < 1.25 * (plain.float() - wide).norm() / wide.norm() + 1e-3
    assert error < 0.03


def test_norm_keeps_the_casts_of_bfloat16() -> None:
    """Normed values are rounded before the gain, and again behind it."""
    norm = RMSNorm(64, 1e-6).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.add_(torch.randn(64, generator=generator))
    for scale in (1e-3, 1.0, 1e3):
        x = (torch.randn(50, 64, generator=generator) * scale).bfloat16()
        with torch.no_grad():
            assert (Norm.of(norm)(x) != norm(x)).float().mean() < 1e-3
            rounded_late = (norm.weight.float() * F.rms_norm(x.float(), (64,), None, 1e-6)).bfloat16()
            assert (rounded_late != norm(x)).float().mean() > 0.05


@pytest.mark.parametrize("family", ["sdar", "llada2", "dream"])
def test_partial_sums_of_ranks_are_reduced(family: str) -> None:
    """One rank's part: `reduce` is asked for the embeddings and for each partial sum, twice a layer, and its answer is
    what goes on."""
    whole = random_model(FAMILIES[family])
    calls: list[int] = []

    def twice(partial: Tensor) -> Tensor:
        calls.append(len(partial))
        return partial * 2

    rank = Decoder(FAMILIES[family], shard=Shard(rank=1, size=2), reduce=twice)
    state = whole.state_dict()
    for name, target in rank.state_dict().items():
        dim = served_dim(name)
        source = state[name]
        target.copy_(source if dim is None else source.chunk(2, dim=dim)[1])
    plain, fused = both(rank)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    assert calls == [T] * 2 * (1 + 2 * rank.config.num_layers)


@pytest.mark.parametrize("parts", ["experts", "all"])
def test_fp8_products_are_left_alone(parts: Fp8Parts) -> None:
    config = replace(FAMILIES["llada2"], hidden_size=32, intermediate_size=32, num_heads=4, num_kv_heads=2)
    model = random_model(config)
    quantize_weights(model, parts)
    plain, fused = both(model)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_the_same_to_the_byte(family: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[family])
    state = {name: t.clone() for name, t in model.state_dict().items()}
    save_model(tmp_path / "before", model)
    fuse(model, num_positions=LATEST)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(t, state[name]) and t.is_contiguous() for name, t in model.state_dict().items())
    save_model(tmp_path / "after", model)
    before, after = ({p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("before", "after"))
    assert before == after
    loaded = load_model(tmp_path / "after")
    fuse(loaded, num_positions=LATEST)
    assert all(torch.equal(t, state[name]) for name, t in loaded.state_dict().items())


def storages(model: Decoder) -> dict[int, int]:
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in model.state_dict().values())}


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_held_twice(family: str) -> None:
    model = random_model(FAMILIES[family])
    size = sum(storages(model).values())
    parameters = [id(p) for p in model.parameters()]
    first = fuse(model, num_positions=LATEST)
    held = storages(model)
    assert sum(held.values()) == size
    assert [id(p) for p in model.parameters()] == parameters
    fuse(model, num_positions=LATEST)
    assert storages(model) == held
    # so weights loaded in place are seen
    other = random_model(FAMILIES[family], seed=1)
    ids, positions, _ = inputs(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.copy_(other.model.layers[0].self_attn.k_proj.weight)
        plain = model(ids, positions, attend)
    torch.testing.assert_close(first.forward(ids, positions, attend), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [SDAR, replace(SDAR, rotary_dim=4), replace(SDAR, num_kv_heads=4, qk_norm=False)])
def test_heads_may_rotate_in_part(config: ModelConfig) -> None:
    plain, fused = both(random_model(config))
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


def test_positions_have_an_end() -> None:
    model = random_model(SDAR)
    fused = fuse(model, num_positions=8)
    forward: Callable[..., Tensor] = fused.forward
    forward(torch.zeros(1, dtype=torch.int64), torch.tensor([7]), attend)
    with pytest.raises((IndexError, RuntimeError)):
        forward(torch.zeros(1, dtype=torch.int64), torch.tensor([8]), attend)
