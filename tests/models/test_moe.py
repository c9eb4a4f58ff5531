"""The mixture-of-experts layer: its router against the rule token by token, its sum against plain SwiGLUs."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from mbd_core.models.decoder import Decoder, Training
from mbd_core.models.mlp import Experts, MoE, Router, experts_kernel, kernel_for
from mbd_core.models.model_config import ModelConfig, MoEConfig
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.ops.experts.choice import grouped_experts, loop_experts

GROUPED = MoEConfig(
    num_experts=16,
    experts_per_token=4,
    intermediate_size=12,
    score="sigmoid",
    norm_topk_prob=True,
    num_shared_experts=1,
    expert_bias=True,
    num_groups=4,
    topk_groups=2,
    routed_scaling=2.5,
    first_dense_layers=1,
)
SOFTMAX = MoEConfig(
    num_experts=16, experts_per_token=4, intermediate_size=12, score="softmax", norm_topk_prob=True, sparse_step=2
)
CONFIG = ModelConfig(
    architecture="LLaDA2MoeModelLM",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_positions=64,
    tie_word_embeddings=False,
    mask_token_id=0,
    eos_token_ids=(1,),
    block_size=4,
    moe=GROUPED,
)


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.normal_(0, 0.5, generator=generator)
    return module


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(3))


def by_hand(config: MoEConfig, router: Router, x: torch.Tensor) -> dict[int, float]:
    """One token's experts and weights, on Python lists."""
    logits = [float(row @ x) for row in router.weight]
    top = max(logits)
    total = sum(math.exp(v - top) for v in logits)
    scores = [1 / (1 + math.exp(-v)) if config.score == "sigmoid" else math.exp(v - top) / total for v in logits]
    choice = [s + (float(router.expert_bias[e]) if config.expert_bias else 0.0) for e, s in enumerate(scores)]
    size = config.num_experts // config.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    if config.num_groups > 1:
        groups.sort(key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:2]))
    allowed = [e for g in groups[: config.topk_groups] for e in g]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: config.experts_per_token]
    norm = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
    return {e: scores[e] / norm * config.routed_scaling for e in chosen}


@pytest.mark.parametrize(
    "config", [GROUPED, SOFTMAX, replace(SOFTMAX, norm_topk_prob=False)], ids=["grouped", "softmax", "unnormalised"]
)
def test_router_is_its_rule(config: MoEConfig) -> None:
    router = drawn(Router(16, config))
    x = tokens(64)
    with torch.no_grad():
        ids, weights = router(x)
        for token in range(64):
            wanted = by_hand(config, router, x[token])
            assert dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True)) == pytest.approx(wanted)


def test_a_block_chooses_among_its_own_best_experts() -> None:
    """Token by token on Python lists; without the other tokens of its block a token would choose differently."""
    config = replace(GROUPED, expert_capacity=5)
    router = drawn(Router(16, config, block_size=4))
    x = tokens(12)
    differ = 0
    with torch.no_grad():
        ids, weights = router(x)
        choice = (router.logits(x).sigmoid() + router.expert_bias).tolist()
        for token in range(12):
            block = choice[token // 4 * 4 : token // 4 * 4 + 4]
            kept = sorted(range(16), key=lambda e: -max(row[e] for row in block))[:5]
            chosen = sorted(kept, key=lambda e: -choice[token][e])[:4]
            assert ids[token].tolist() == chosen
            scores = router.logits(x[token]).sigmoid()[chosen]
            torch.testing.assert_close(weights[token], scores / scores.sum() * 2.5)
            differ += sorted(chosen) != sorted(range(16), key=lambda e: -choice[token][e])[:4]
        assert differ
        with pytest.raises(ValueError, match="10 tokens"):
            router(tokens(10))


def test_the_last_layer_of_a_training_forward_chooses_for_whole_blocks() -> None:
    model = drawn(Decoder(replace(CONFIG, moe=replace(GROUPED, expert_capacity=5))))
    ids, positions = torch.arange(2, 26).view(2, 12), torch.arange(12).expand(2, -1)
    attend, kept = DenseAttention(torch.ones(1, 1, 12, 12).bool()), torch.tensor([1, 6, 7, 20])
    with torch.no_grad():
        whole = model(ids, positions, attend).flatten(0, 1)[kept]
        torch.testing.assert_close(model(ids, positions, attend, training=Training(kept=kept)), whole)
    with pytest.raises(ValueError, match="6 tokens"):
        model(ids.view(4, 6), positions.reshape(4, 6), DenseAttention(torch.ones(1, 1, 6, 6).bool()))


def test_offsets_steer_the_choice_and_not_the_weights() -> None:
    router = drawn(Router(16, replace(GROUPED, norm_topk_prob=False, routed_scaling=1.0)))
    x = tokens(8)
    with torch.no_grad():
        router.expert_bias.zero_()[:4] = 100.0
        ids, weights = router(x)
        assert (ids.sort(-1).values == torch.arange(4)).all()
        torch.testing.assert_close(weights, router.logits(x).sigmoid().gather(-1, ids))


@pytest.mark.parametrize("config", [GROUPED, SOFTMAX], ids=["grouped", "softmax"])
def test_layer_is_the_sum_over_its_experts(config: MoEConfig) -> None:
    moe = drawn(MoE(replace(CONFIG, moe=config)))
    x = tokens(10).view(2, 5, 16)
    with torch.no_grad():
        out = moe(x)
        for token, found in zip(x.view(10, 16), out.view(10, 16), strict=True):
            wanted = torch.zeros(16) if moe.shared_experts is None else moe.shared_experts(token)
            for e, weight in by_hand(config, moe.gate, token).items():
                gate, up, down = (getattr(moe.experts, f"{p}_proj")[e] for p in ("gate", "up", "down"))
                wanted += weight * (down @ (F.silu(gate @ token) * (up @ token)))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def chosen(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids (T, 4) and weights (T, 4) of `count` tokens."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(count)])
    return ids, torch.rand(count, 4, generator=generator)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("width", [16, 18], ids=["aligned", "odd"])
def test_chosen_experts_are_the_loop(dtype: torch.dtype, atol: float, width: int) -> None:
    """Whatever was chosen, outputs and gradients are the loop's."""
    layer = drawn(Experts(16, replace(SOFTMAX, intermediate_size=width))).to(dtype)
    quick = width == 16 and dtype != torch.float64
    assert kernel_for(layer.gate_proj).call is (grouped_experts if quick else loop_experts)
    x, (ids, weights) = tokens(24).to(dtype).requires_grad_(), chosen(24)
    wanted = loop_experts(x, layer.gate_proj, layer.up_proj, layer.down_proj, ids, weights)
    found = layer(x, ids, weights)
    torch.testing.assert_close(found, wanted, atol=atol, rtol=atol)
    inputs = (x, *layer.parameters())
    for got, want in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(got, want, atol=20 * atol, rtol=atol)


def test_experts_heed_autocast() -> None:
    """Grouped products do not by themselves: with bfloat16 activations on float32 weights they would fail."""
    layer, (ids, weights) = drawn(Experts(16, replace(SOFTMAX, intermediate_size=16))), chosen(24)
    wide = layer(tokens(24), ids, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x in (tokens(24), tokens(24).bfloat16()):
            found = layer(x, ids, weights)
            assert found.dtype == x.dtype and kernel_for(layer.gate_proj).call is grouped_experts
            torch.testing.assert_close(found.float(), wide, atol=0.3, rtol=0.05)
            assert not torch.equal(found.float(), wide)


def test_gradients_rule_out_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    names = {
        differentiable: experts_kernel(
            torch.device("cuda"), torch.bfloat16, 64, 64, differentiable=differentiable
        ).name
        for differentiable in (True, False)
    }
    experts_kernel.cache_clear()
    assert names == {True: "grouped", False: "triton+grouped"}


def test_rows_computed_apart_keep_their_bits_in_any_batch() -> None:
    """What batch-invariant mode rests on, with grouped experts too: a call sees one row, wherever that lies."""
    config = replace(CONFIG, moe=replace(GROUPED, intermediate_size=16), hidden_size=16)
    model = drawn(Decoder(config)).eval()
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(2, 64, (length,), generator=generator) for length in (4, 4, 1, 4, 7, 4)]

    def hidden(batch: list[torch.Tensor]) -> list[torch.Tensor]:
        split = [len(row) for row in batch]
        positions = torch.cat([torch.arange(n) for n in split])
        with torch.inference_mode():
            out = model(torch.cat(batch), positions, lambda layer, q, k, v: q + 0 * v[:, :1], split=split)
        return list(out.split(split))

    assert kernel_for(model.model.layers[1].mlp.experts.gate_proj).call is grouped_experts
    alone = [hidden([row])[0] for row in rows]
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1], [2, 0, 4]):
        for index, found in zip(order, hidden([rows[i] for i in order]), strict=True):
            assert torch.equal(found, alone[index])


def test_offsets_stay_float32_through_every_move() -> None:
    model = Decoder(CONFIG)
    bias = model.model.layers[1].mlp.gate.expert_bias
    bias.copy_(torch.arange(16) * 1.001)
    for moved in (model.to(torch.bfloat16), model.half(), model.to("cpu", torch.float64)):
        gate = moved.model.layers[1].mlp.gate
        assert gate.weight.dtype == moved.lm_head.weight.dtype
        assert torch.equal(gate.expert_bias, torch.arange(16) * 1.001)
        assert gate.expert_bias.dtype == torch.float32
    meta = Decoder(CONFIG).to("meta").to(torch.bfloat16)
    assert meta.model.layers[1].mlp.gate.expert_bias.dtype == torch.float32
    assert meta.to_empty(device="cpu").model.layers[1].mlp.gate.expert_bias.dtype == torch.float32


def test_which_layers_have_experts() -> None:
    assert [CONFIG.is_sparse(i) for i in range(4)] == [False, True, True, True]
    every_second = replace(CONFIG, moe=replace(SOFTMAX, dense_layers=(3,)))
    assert [every_second.is_sparse(i) for i in range(4)] == [False, True, False, False]
    for config in (CONFIG, every_second):
        model = Decoder(config)
        assert [isinstance(layer.mlp, MoE) for layer in model.model.layers] == [config.is_sparse(i) for i in range(4)]
        assert sum(p.numel() for p in model.parameters()) == config.num_parameters


def test_llada2_mini_has_as_many_parameters_as_published() -> None:
    mini = replace(
        CONFIG,
        vocab_size=157184,
        hidden_size=2048,
        intermediate_size=5120,
        num_layers=20,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        rotary_dim=64,
        block_size=32,
        moe=replace(GROUPED, num_experts=256, experts_per_token=8, intermediate_size=512, num_groups=8, topk_groups=4),
    )
    assert mini.num_parameters == pytest.approx(16.256e9, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 3}, "num_experts=16 does not divide into n_group=3"),
        ({"topk_groups": 5}, "topk_group=5 must lie in 1..n_group=4"),
        ({"experts_per_token": 9}, "num_experts_per_tok=9 must lie in 1..8"),
        ({"num_groups": 16, "topk_groups": 8}, "n_group=16 leaves fewer than 2"),
    ],
)
def test_impossible_routers_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GROUPED, **changes)
