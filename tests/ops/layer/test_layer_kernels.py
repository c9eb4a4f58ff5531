"""The kernels of a layer are their definitions in plain torch, the kernels being interpreted."""

from triton_interpreter import run_interpreted

RESIDUAL = """
import torch
from mbd_core.models.layer_parts import RMSNorm
from mbd_core.ops.layer.residual_norm import ExpertParts, RankParts, add_norm, sum_experts
from mbd_core.ops.layer.swiglu import gated
generator = torch.Generator().manual_seed(0)
draw = lambda *size: torch.randn(size, generator=generator)
TOLERANCE = {4: {"rtol": 1e-5, "atol": 1e-5}, 2: {"rtol": 3e-2, "atol": 1e-2}}
close = lambda found, wanted: torch.testing.assert_close(found, wanted, **TOLERANCE[found.itemsize])
for dtype, tokens, width in ((torch.float32, 5, 20), (torch.bfloat16, 3, 64), (torch.float32, 1, 100)):
    x, part = draw(tokens, width).to(dtype), draw(tokens, width).to(dtype)
    norm = RMSNorm(width, 1e-6).to(dtype).requires_grad_(False)
    norm.weight += draw(width).to(dtype)
    total, normed = add_norm(x, norm.weight, 1e-6)
    assert total is x
    close(normed, norm(x))
    total, normed = add_norm(x, norm.weight, 1e-6, part_TD=part)
    close(total, x + part)  # the interpreter cuts bfloat16 off where a GPU rounds it
    close(normed, norm(x + part))
    y, ids = draw(tokens, 3, width), torch.tensor([[4, 1, 0], [7, 7, 7], [2, 5, 6], [7, 7, 7], [0, 1, 2]])[:tokens]
    wanted = (x.float() + part.float() + torch.where(ids[:, :1] < 7, y.sum(1), 0.0)).to(dtype)
    y[ids[:, 0] == 7] = torch.nan
    total, normed = add_norm(x, norm.weight, 1e-6, part_TD=part, experts=ExpertParts(y, ids, 7))
    close(total, wanted)
    close(normed, norm(total))
    only, same = add_norm(x, None, 1e-6, part_TD=part, experts=ExpertParts(y, ids, 7))
    assert only is same and torch.equal(only, total)
    assert torch.equal(sum_experts(ExpertParts(y, ids, 7), dtype, out_TD=only), only)
    parts = [part, draw(tokens, width).to(dtype), draw(tokens, width).to(dtype)]
    ranks = RankParts(torch.tensor([p.data_ptr() for p in parts]))
    total, normed = add_norm(x, norm.weight, 1e-6, ranks=ranks)
    close(total, (x.float() + sum(p.float() for p in parts)).to(dtype))
    close(normed, norm(total))
    assert torch.equal(add_norm(x, None, 1e-6, ranks=ranks)[0], total)
    gate_up = draw(tokens, 2 * width).to(dtype)
    gate, up = gate_up.float().chunk(2, -1)
    close(gated(gate_up), (torch.nn.functional.silu(gate) * up).to(dtype))
print("all held")
"""

HEADS = """
import torch
from mbd_core.models.fused import Norm, Rotations
from mbd_core.models.model_config import ModelConfig
from mbd_core.ops.layer.heads import store_heads
generator = torch.Generator().manual_seed(0)
draw = lambda *size: torch.randn(size, generator=generator)
for heads, kv_heads, channels, rotated, norms, dtype in (
    (4, 2, 8, 8, True, torch.float32), (3, 1, 12, 4, True, torch.float32), (2, 2, 16, 16, False, torch.float32),
    (4, 2, 16, 8, True, torch.bfloat16),
):
    config = ModelConfig(
        architecture="SDARForCausalLM", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, block_size=4,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=channels, rotary_dim=rotated, rope_theta=1e4,
        rms_norm_eps=1e-6, max_positions=64, tie_word_embeddings=True, mask_token_id=0, eos_token_ids=(1,),
    )
    tokens, places = 7, torch.tensor([9, 3, 4, 0, 0, 11, 2])
    positions = torch.tensor([3, 40, 0, 1, 1, 63, 7])
    qkv = draw(tokens, (heads + 2 * kv_heads) * channels).to(dtype)
    gain = draw(heads + kv_heads, channels).to(dtype) if norms else None
    rotations = Rotations(config, 64, qkv)
    keys, values = torch.full((2, 12, kv_heads, channels), torch.nan, dtype=dtype)
    q = store_heads(
        qkv, gain, rotations.table_P2C, positions, keys_LKC=keys, values_LKC=values, places_T=places,
        num_rotated=rotated, eps=1e-6,
    )
    split = qkv.unflatten(-1, (-1, channels))
    qk = split[:, : heads + kv_heads]
    qk = rotations.at(positions)(qk.clone() if gain is None else Norm(gain, 1e-6)(qk))
    tolerance = {"rtol": 1.6e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(q, qk[:, :heads], **tolerance)
    stored = [0, 1, 2, 5, 6]  # the tokens whose place is their own
    torch.testing.assert_close(keys[places[stored]], qk[stored, heads:], **tolerance)
    assert torch.equal(values[places[stored]], split[stored, heads + kv_heads :])
    assert keys[[1, 5, 6, 7, 8, 10]].isnan().all() and values[[1, 5, 6, 7, 8, 10]].isnan().all()
print("all held")
"""

ROUTER = """
import torch
from mbd_core.models.model_config import MoEConfig
from mbd_core.models.mlp import Router
from mbd_core.ops.layer.router import route
generator = torch.Generator().manual_seed(0)
for experts, groups, kept, each, score, bias, normalizes, capacity in (
    (16, 4, 2, 4, "sigmoid", True, True, 0), (12, 3, 2, 3, "sigmoid", True, True, 0),
    (9, 1, 1, 2, "softmax", False, True, 0), (20, 5, 5, 1, "softmax", True, False, 0),
    (7, 1, 1, 7, "sigmoid", False, False, 0), (16, 4, 2, 4, "sigmoid", True, True, 5),
    (12, 1, 1, 3, "softmax", True, False, 3), (9, 1, 1, 2, "sigmoid", False, True, 9),
):
    config = MoEConfig(
        num_experts=experts, experts_per_token=each, intermediate_size=4, score=score, norm_topk_prob=normalizes,
        expert_bias=bias, num_groups=groups, topk_groups=kept, routed_scaling=2.5, expert_capacity=capacity,
    )
    router = Router(8, config, block_size=3).requires_grad_(False)
    router.weight.normal_(generator=generator)
    if bias:
        router.expert_bias.normal_(generator=generator)
    x = torch.randn(9, 8, generator=generator)
    live = torch.arange(9) // 3 != 1 if capacity else torch.arange(9) % 3 != 1
    wanted_ids, wanted = router(x)
    logits = router.logits(x)
    logits[~live] = torch.nan
    arguments = {
        "per_token": each, "sigmoid": score == "sigmoid", "bias_E": router.expert_bias if bias else None,
        "num_groups": groups, "kept_groups": kept, "normalizes": normalizes, "scaling": 2.5,
        "capacity": capacity, "block_size": 3,
    }
    ids, weights = route(logits, live_T=live, **arguments)
    assert ids.dtype == torch.int64 and (ids[~live] == experts).all()
    assert torch.equal(ids[live], wanted_ids[live]), (ids, wanted_ids)
    torch.testing.assert_close(weights[live], wanted[live], rtol=1e-5, atol=1e-6)
    ids, _ = route(logits, **arguments)
    assert ids.max() < experts, "ids of unread logits stay ids"
    for shared in (1, 3):
        wanted_ids, wanted = router(x, live, shared)
        ids, weights = route(logits, live_T=live, num_shared=shared, **arguments)
        assert torch.equal(ids, wanted_ids) and (ids[live, each:] == torch.arange(experts, experts + shared)).all()
        assert (ids[~live] == experts + shared).all() and (weights[live, each:] == 1).all()
        torch.testing.assert_close(weights[live], wanted[live], rtol=1e-5, atol=1e-6)
print("all held")
"""

TILES = """
import torch
from expert_layers import cut_tiles
from mbd_core.ops.experts.choice import sort_by_expert
from mbd_core.ops.experts.expert_tiles import sorted_tiles
generator = torch.Generator().manual_seed(0)
for tokens, each, experts, tile in ((1, 3, 5, 4), (20, 1, 6, 8), (37, 8, 40, 16), (7, 2, 3, 16)):
    for few in (experts, 1):
        ids = torch.randint(few, (tokens, each), generator=generator)
        ids[2:5] = experts
        order, ends = sort_by_expert(ids, experts)
        wanted = cut_tiles(ends, len(order), tile)
        found = sorted_tiles(ids, experts, tile)
        assert torch.equal(found.order_A, order)
        used = wanted[2] > wanted[1]
        for mine, theirs in zip(found[1:], wanted, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine[used], theirs[used])
        assert torch.equal(found.end_N[~used], found.first_N[~used])
print("all held")
"""


def test_the_residual_and_its_norm() -> None:
    run_interpreted(RESIDUAL)


def test_heads_are_normed_rotated_and_stored() -> None:
    run_interpreted(HEADS)


def test_experts_are_chosen_by_the_routers_rule() -> None:
    run_interpreted(ROUTER)


def test_assignments_are_sorted_and_cut() -> None:
    run_interpreted(TILES)
