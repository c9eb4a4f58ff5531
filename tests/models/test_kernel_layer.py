"""The decoder's form for CUDA is the fused one, its kernels interpreted: every family, ranks and adapters too."""

from triton_interpreter import run_interpreted

FORWARD = """
from dataclasses import replace
import torch
from family_models import FAMILIES, random_model
from mbd_core.engine.memory.pages import PagedKVCache
from mbd_core.engine.step.runner import PagedAttention
from mbd_core.models import mlp as moe
from mbd_core.models.fused import fuse
from mbd_core.models.kernel_layer import KernelLayer
from mbd_core.models.lora import Adapter, AdapterSlots, adapted_modules
from mbd_core.ops.experts.choice import ExpertsKernel, fused_experts
from mbd_core.ops.layer.residual_norm import RankParts
from mbd_core.ops.attention.definition import RowLayout
from mbd_core.ops.attention import cpu as attention_cpu
kernels = ExpertsKernel(name="triton", call=fused_experts, fused_below=float("inf"))
T, SIZE, PAGES = 6, 2, 8

def hidden(model, by_kernels, *, adapters=None):
    moe.triton_serves = lambda device, dtype: by_kernels
    whole = fuse(model, num_positions=40, kernels=by_kernels)
    assert isinstance(whole._layers[0], KernelLayer) == by_kernels
    if by_kernels:
        moe.kernel_for = lambda gate: kernels
    cpu = torch.device("cpu")
    cache = PagedKVCache(model.config, num_pages=PAGES, page_size=SIZE, dtype=torch.float32, device=cpu)
    layout = RowLayout(
        cu_seqlens_q=torch.tensor([0, 2, 4, 6]), kv_lens_R=torch.tensor([2, 4, 1]), page_size=SIZE, max_q=SIZE,
        page_table_RP=torch.tensor([[3, 5], [3, 5], [0, 0]]),
    )
    places = torch.tensor([6, 7, 10, 11, 0, 1])
    live, positions = torch.arange(T) < 4, torch.arange(T) % 4 + 20
    ids = torch.arange(T) * 3 % model.config.vocab_size
    attend = PagedAttention(cache, places, [attention_cpu.bind(layout)] * len(cache.layers))
    out = whole.forward(ids, positions, attend, adapters=adapters, live=live)
    moe.kernel_for = right
    return out[live], cache

def check(model, **given):
    plain, plain_cache = hidden(model, False, **given)
    found, cache = hidden(model, True, **given)
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache.k, plain_cache.k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache.v, plain_cache.v, atol=1e-4, rtol=1e-4)

class Twice:
    # two ranks with the same parts, which the kernels read where they lie
    def __init__(self, limit=10**6):
        self.places, self.shared, self.limit = {}, [], limit

    def __call__(self, x):
        return x * 2

    def place(self, number, like):
        if like.numel() <= self.limit:
            self.places[number] = torch.full_like(like, torch.nan)
            return self.places[number]

    def share(self, number):
        self.shared.append(number)
        return RankParts(torch.tensor([self.places[number].data_ptr()] * 2))

right = moe.kernel_for
for family in ("llada2", "sdar-moe", "dream", "nemotron"):
    model = random_model(FAMILIES[family])
    check(model)
    model.reduce = lambda partial: partial * 2
    check(model)
    model.reduce = Twice()
    check(model)
    assert model.reduce.shared == [0, 1] * model.config.num_layers, "the sums take turns"
    model.reduce = Twice(limit=1)
    check(model)
    assert not model.reduce.shared, "parts that do not fit are reduced"
    model.reduce = None
    slots = AdapterSlots(model.config, model.shard, model.model.norm.weight, num_slots=2, max_rank=2)
    generator = torch.Generator().manual_seed(0)
    modules = dict(model.named_modules())
    factors = {
        name: tuple(torch.randn(size, generator=generator) / 4 for size in ((2, modules[name].in_features),
                                                                        (modules[name].out_features, 2)))
        for _, _, name in adapted_modules(model.config)
    }
    slots.write(1, Adapter(2, factors))
    check(model, adapters=slots.choose(torch.arange(T) % 2))
print("all held")
"""


def test_layers_of_kernels_are_the_fused_ones() -> None:
    run_interpreted(FORWARD)
