"""Paged attention: every way of computing it gives what the equation gives, and the resolver says what it chose."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mbd_core.ops.attention import KERNELS, resolve
from mbd_core.ops.compare import AttentionTiming, compare_attention, merge_rule
from mbd_core.ops.merged import prefix_merged_attention
from mbd_core.ops.reference import paged_attention, paged_attention_lse, plan_bundles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS, KV_HEADS, CHANNELS = 4, 2, 8


def pages(count: int, size: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, size, KV_HEADS, CHANNELS, generator=generator, dtype=dtype)
    return k, v


def by_equation(q: Tensor, k_pages: Tensor, v_pages: Tensor, layout: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Softmax over each row's keys, token by token in plain products; also the log-sum-exp (T, H)."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    bounds = layout["cu_seqlens_q"].tolist()
    for r, n in enumerate(layout["kv_lens_R"].tolist()):
        k = k_pages[layout["page_table_RP"][r]].flatten(0, 1)[:n].repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v_pages[layout["page_table_RP"][r]].flatten(0, 1)[:n].repeat_interleave(HEADS // KV_HEADS, dim=1)
        part = slice(bounds[r], bounds[r + 1])
        scores = torch.einsum("qhc,khc->hqk", q[part], k) / math.sqrt(CHANNELS)
        out[part] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), v)
        lse[part] = scores.logsumexp(-1).T
    return out, lse


def sequences(
    spec: list[tuple[int, list[int]]], *, page_size: int, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Sequences as (prefix, lengths of the rows after it); a row sees everything up to its own end."""
    width = max(-(-(prefix + sum(lengths)) // page_size) for prefix, lengths in spec)
    generator = torch.Generator().manual_seed(seed)
    num_pages = len(spec) * width + 1
    table = torch.randperm(num_pages, generator=generator)[: len(spec) * width].view(len(spec), width)
    rows, kv_lens, lengths = [], [], []
    for i, (prefix, sizes) in enumerate(spec):
        for n, size in enumerate(sizes):
            rows.append(i)
            lengths.append(size)
            kv_lens.append(prefix + sum(sizes[: n + 1]))
    q = torch.randn(sum(lengths), HEADS, CHANNELS, generator=generator, dtype=dtype)
    layout = {
        "cu_seqlens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
        "kv_lens_R": torch.tensor(kv_lens),
        "page_table_RP": table[rows],
    }
    return q, *pages(num_pages, page_size, seed=seed, dtype=dtype), layout


row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
batches = st.lists(st.tuples(st.integers(0, 700), row_lengths), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(spec=batches, page_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99))
def test_every_way_is_the_equation(spec: list[tuple[int, list[int]]], page_size: int, seed: int) -> None:
    q, k, v, layout = sequences(spec, page_size=page_size, seed=seed)
    expected, expected_lse = by_equation(q, k, v, layout)
    torch.testing.assert_close(paged_attention(q, k, v, **layout), expected)
    torch.testing.assert_close(paged_attention(q, k, v, **layout, exact=True), expected)
    out, lse = paged_attention_lse(q, k, v, **layout)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.float())


def test_a_rows_own_length_is_respected_whatever_its_neighbours_see() -> None:
    """Neighbours with the same pages share a call, though their lengths neither grow nor agree."""
    k, v = pages(4, 4)
    q = torch.randn(9, HEADS, CHANNELS, dtype=torch.float64)
    layout = {
        "cu_seqlens_q": torch.tensor([0, 2, 5, 5, 9]),
        "kv_lens_R": torch.tensor([9, 1, 3, 12]),
        "page_table_RP": torch.tensor([[3, 1, 2]] * 4),
    }
    assert len(plan_bundles(*layout.values(), page_size=4)) == 1
    torch.testing.assert_close(paged_attention(q, k, v, **layout), by_equation(q, k, v, layout)[0])


def test_long_chunks_are_cut_and_like_sequences_share_a_call() -> None:
    q, k, v, layout = sequences([(0, [64] * 12), (40, [8, 8]), (72, [8, 8])], page_size=16, seed=1)
    bundles = plan_bundles(*layout.values(), page_size=16)
    assert [tuple(b.tokens_GQ.shape) for b in bundles] == [(1, 512), (1, 256), (2, 16)]
    torch.testing.assert_close(paged_attention(q, k, v, **layout), by_equation(q, k, v, layout)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    spec = [(70, [16, 16]), (333, [16]), (0, [16, 16, 16]), (1030, [5, 16])]
    q, k, v, layout = sequences(spec, page_size=16, seed=3, dtype=dtype)
    together = paged_attention(q, k, v, **layout, exact=True)
    bounds = layout["cu_seqlens_q"].tolist()
    for row in range(len(bounds) - 1):
        part = slice(bounds[row], bounds[row + 1])
        alone = paged_attention(
            q[part],
            k,
            v,
            cu_seqlens_q=torch.tensor([0, bounds[row + 1] - bounds[row]]),
            kv_lens_R=layout["kv_lens_R"][row : row + 1],
            page_table_RP=layout["page_table_RP"][row : row + 1],
            exact=True,
        )
        assert torch.equal(alone, together[part])


@settings(max_examples=30, deadline=None)
@given(
    prefixes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    slots=st.integers(1, 4),
    size=st.integers(1, 9),
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_prefix_once_merged_is_rows(prefixes: list[int], slots: int, size: int, page_size: int, seed: int) -> None:
    q, k, v, layout = sequences([(p, [size] * slots) for p in prefixes], page_size=page_size, seed=seed)
    merged = prefix_merged_attention(q, k, v, **layout, rows_per_sequence=slots)
    torch.testing.assert_close(merged, by_equation(q, k, v, layout)[0], rtol=1e-5, atol=1e-5)


def test_merging_takes_unused_slots_and_refuses_ragged_sequences() -> None:
    q, k, v, layout = sequences([(64, [8, 8, 8])], page_size=16, seed=0)
    layout["kv_lens_R"][2] = 1  # static shapes: a slot past the budget sees one key
    merged = prefix_merged_attention(q, k, v, **layout, rows_per_sequence=3)
    torch.testing.assert_close(merged, by_equation(q, k, v, layout)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="3 rows do not divide"):
        prefix_merged_attention(q, k, v, **layout, rows_per_sequence=2)


def test_comparison_times_both_and_the_rule_follows() -> None:
    timings = compare_attention(
        prefixes=(16, 32), buffer_sizes=(1, 2), block_size=8, head_dim=16, page_size=8, dtype=torch.float32, repeats=1
    )
    assert [(t.prefix, t.buffer_size) for t in timings] == [(16, 1), (16, 2), (32, 1), (32, 2)]
    assert all(t.backend == "reference" and min(t.rows_seconds, t.merged_seconds) > 0 for t in timings)
    with pytest.raises(ValueError, match="prefix=12 is not a multiple"):
        compare_attention(prefixes=(12,), block_size=8)

    def timing(prefix: int, buffer_size: int, merged_seconds: float) -> AttentionTiming:
        return AttentionTiming(
            backend="x",
            rows=1,
            block_size=8,
            prefix=prefix,
            buffer_size=buffer_size,
            rows_seconds=1.0,
            merged_seconds=merged_seconds,
        )

    rule = merge_rule([timing(512, 2, 0.5), timing(2048, 2, 1.5), timing(8192, 2, 0.5), timing(512, 4, 2.0)])
    assert [rule.merges(prefix=p, buffer_size=2) for p in (512, 2048, 8192, 16384)] == [False, False, True, True]
    assert not rule.merges(prefix=16384, buffer_size=4)
    assert not rule.merges(prefix=16384, buffer_size=1)


def gather_back(k_pages: Tensor, table: Tensor | None, starts: Tensor | None, lengths: Tensor) -> list[Tensor]:
    """Each row's keys from pages and a table, or from a packed tensor and where each row begins."""
    if table is not None:
        return [k_pages[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lengths.tolist(), strict=True)]
    assert starts is not None
    return [k_pages[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=False)]


class FakePackages:
    """Importable stand-ins that check the arguments they get and compute the equation from them alone."""

    def __init__(self, *missing: str) -> None:
        self.missing, self.calls, self.activated = missing, [], []

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], bounds: Tensor) -> tuple[Tensor, Tensor]:
        assert bounds.dtype == torch.int32
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for r, (k, v) in enumerate(zip(keys, values, strict=True)):
            part = slice(int(bounds[r]), int(bounds[r + 1]))
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("qhc,khc->hqk", q[part], k) / math.sqrt(q.shape[-1])
            out[part], lse[part] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), v), scores.logsumexp(-1).T
        return out, lse

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any,
        enable_gqa: bool,
        seqused_k: Tensor,
        num_splits: int | None,
        block_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert return_aux.lse and enable_gqa and seqused_k.dtype == torch.int32
        assert (cu_seq_k is None) != (block_table is None)
        self.calls.append({"max_q": max_q, "max_k": max_k, "exact": num_splits == 1})
        keys, values = (gather_back(x, block_table, cu_seq_k, seqused_k) for x in (key, value))
        return self.attend(query, keys, values, cu_seq_q)

    def vllm(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        seqused_k: Tensor,
        causal: bool,
        block_table: Tensor,
        return_softmax_lse: bool,
        num_splits: int,
        fa_version: int,
    ) -> tuple[Tensor, Tensor]:
        assert not causal and return_softmax_lse and block_table.dtype == seqused_k.dtype == torch.int32
        self.calls.append({"max_q": max_seqlen_q, "max_k": max_seqlen_k, "exact": num_splits == 1, "fa": fa_version})
        keys, values = (gather_back(x, block_table, None, seqused_k) for x in (k, v))
        out, lse = self.attend(q, keys, values, cu_seqlens_q)
        return out, lse.T

    def flash_2(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        return_attn_probs: bool,
        block_table: Tensor,
    ) -> tuple[Tensor, Tensor, None]:
        assert not causal and return_attn_probs and cu_seqlens_k.dtype == torch.int32
        self.calls.append({"max_q": max_seqlen_q, "max_k": max_seqlen_k, "exact": True})
        keys, values = (gather_back(x, block_table, None, cu_seqlens_k.diff()) for x in (k, v))
        out, lse = self.attend(q, keys, values, cu_seqlens_q)
        return out, lse.T, None

    def __call__(self, name: str) -> Any:
        modules = {
            "vllm.vllm_flash_attn": {"flash_attn_varlen_func": self.vllm},
            "vllm.vllm_flash_attn.flash_attn_interface": {"is_fa_version_supported": lambda version: version == 3},
            "torch.nn.attention.varlen": {"varlen_attn": self.varlen_attn, "AuxRequest": SimpleNamespace},
            "torch.nn.attention": {"activate_flash_attention_impl": self.activated.append},
            "flash_attn_interface": {},
            "flash_attn": {"flash_attn_varlen_func": self.flash_2},
            "kernels": {"get_kernel": lambda name: SimpleNamespace(flash_attn_varlen_func=self.vllm)},
        }
        if name in self.missing or name not in modules:
            raise ImportError(f"no module named {name}")
        return SimpleNamespace(**modules[name])


SIZES = {"dtype": torch.bfloat16, "head_dim": 128, "page_size": 256, "num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize(
    "name", ["vllm-flash-attn", "torch-varlen", "flash-attn", "kernels-hub", "torch-varlen-gathered"]
)
@pytest.mark.parametrize("exact", [False, True])
def test_adapters_hand_each_kernel_what_it_means(name: str, exact: bool) -> None:
    packages = FakePackages()
    choice = resolve(CUDA, preference=name, capability=(9, 0), load=packages, **SIZES)
    assert choice.name == name and set(choice.reasons) == {*KERNELS, "reference"} - {name}
    q, k, v, layout = sequences([(50, [7, 7]), (3, [7]), (120, [7, 7, 7])], page_size=16, seed=5)
    expected, expected_lse = by_equation(q, k, v, layout)
    torch.testing.assert_close(choice.call(q, k, v, **layout, exact=exact), expected)
    bound = choice.bind(**layout, page_size=16, exact=exact, max_q=7)
    torch.testing.assert_close(bound(q, k, v), expected)
    for call in packages.calls:
        assert (call["max_q"], call["max_k"]) == (7, layout["page_table_RP"].shape[1] * 16)
        assert call["exact"] == exact or name == "flash-attn"
        assert call.get("fa", 3) == 3
    torch.testing.assert_close(choice.call_lse(q, k, v, **layout)[1], expected_lse)
    rows = {**layout, "rows_per_sequence": 1, "attend_lse": choice.call_lse}
    torch.testing.assert_close(prefix_merged_attention(q, k, v, **rows), expected)


def test_order_on_cuda_and_reasons() -> None:
    assert resolve(CUDA, capability=(9, 0), load=FakePackages(), **SIZES).name == "vllm-flash-attn"
    packages = FakePackages("vllm.vllm_flash_attn")
    second = resolve(CUDA, capability=(9, 0), load=packages, **SIZES)
    assert second.name == "torch-varlen" and packages.activated == ["FA3"]
    assert "no module named vllm" in second.reasons["vllm-flash-attn"]
    assert (
        "network"
        in resolve(CUDA, capability=(8, 0), load=FakePackages("vllm.vllm_flash_attn", "flash_attn"), **SIZES).reasons[
            "kernels-hub"
        ]
    )
    small = resolve(CUDA, capability=(8, 0), load=FakePackages("vllm.vllm_flash_attn"), **{**SIZES, "page_size": 32})
    assert small.name == "torch-varlen-gathered"
    assert "multiples of 256" in small.reasons["flash-attn"] and "FlashAttention 3" in small.reasons["torch-varlen"]
    assert "not flash-attn: its pages" in small.describe()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "not float32"),
        ({"head_dim": 264}, "up to 256"),
        ({"head_dim": 12}, "steps of 8"),
        ({"page_size": 24}, "multiples of 16"),
        ({"capability": (7, 5)}, r"this device has 7\.5"),
        ({"device": CPU}, "this is cpu"),
    ],
)
def test_a_preference_that_cannot_be_honoured_is_an_error(change: dict[str, Any], reason: str) -> None:
    setting: dict[str, Any] = {"device": CUDA, "capability": (9, 0), "load": FakePackages(), **SIZES, **change}
    with pytest.raises(ValueError, match=f"cannot be used: .*{reason}"):
        resolve(preference="vllm-flash-attn", **setting)


def test_limits_that_no_kernel_can_lift() -> None:
    with pytest.raises(ValueError, match="num_heads=6 is not a multiple"):
        resolve(CPU, torch.float32, 16, 16, num_heads=6, num_kv_heads=4)
    with pytest.raises(ValueError, match=r"'flash' is unknown; choose one of .*reference"):
        resolve(CPU, torch.float32, 16, 16, "flash")


def test_the_cpu_takes_the_reference_and_imports_nothing() -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} was imported")

    choice = resolve(CPU, torch.float32, 16, 24, load=refuse)
    assert choice.name == "reference" and set(choice.reasons) == set(KERNELS)
    assert "torch 2.4" in choice.reasons["vllm-flash-attn-wheel"]
    q, k, v, layout = sequences([(50, [7, 7]), (3, [7])], page_size=16, seed=5)
    expected = by_equation(q, k, v, layout)[0]
    for exact in (False, True):
        bound = choice.bind(**layout, page_size=16, exact=exact)
        torch.testing.assert_close(bound(q, k, v), expected)
        torch.testing.assert_close(choice.call(q, k, v, **layout, exact=exact), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*KERNELS, "reference"])
def test_gpu_kernels_are_the_reference(name: str) -> None:
    try:
        choice = resolve(CUDA, torch.bfloat16, 128, 256, name, num_heads=8, num_kv_heads=2)
    except ValueError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    table = torch.randperm(16).view(4, 4)[[0, 0, 1, 2, 2, 2, 3]]
    kv_lens = torch.tensor([544, 576, 32, 1000, 1016, 1024, 700])
    bounds = torch.arange(8, dtype=torch.int32) * 32
    q, k, v = torch.randn(224, 8, 128), *torch.randn(2, 16, 256, 2, 128)
    layout = {"cu_seqlens_q": bounds, "kv_lens_R": kv_lens, "page_table_RP": table}
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected = paged_attention(q.float(), k.float(), v.float(), **layout)
    on_gpu = {key: value.cuda() for key, value in layout.items()}
    out = choice.call(q.cuda(), k.cuda(), v.cuda(), **on_gpu)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=1e-2)
    merged = prefix_merged_attention(
        q.cuda(), k.cuda(), v.cuda(), **on_gpu, rows_per_sequence=1, attend_lse=choice.call_lse
    )
    torch.testing.assert_close(merged.float().cpu(), expected, rtol=2e-2, atol=1e-2)
