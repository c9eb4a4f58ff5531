"""Paged attention: every way of computing it gives what the equation gives, and the resolver says what it chose."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_attention import CHANNELS, HEADS, KV_HEADS, FakePackages, by_equation, pages, sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mbd_core.ops import compare
from mbd_core.ops.attention import KERNELS, Choice, resolve
from mbd_core.ops.attention_cpu import paged_attention, plan_bundles
from mbd_core.ops.compare import AttentionTiming, Shape, compare_attention, merge_rule, with_measured_rule
from mbd_core.ops.merged import MergeRule
from mbd_core.ops.row_layout import RowLayout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


REFERENCE = resolve(CPU, torch.float64, CHANNELS, 16, num_heads=HEADS, num_kv_heads=KV_HEADS)


def with_lse(choice: Choice, q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    return choice.bind_lse(layout)(q, k, v)


def merged(
    choice: Choice, q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, *, slots: int, block_size: int
) -> Tensor:
    return choice.bind(replace(layout, max_q=block_size), merge_slots=slots)(q, k, v)


row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
batches = st.lists(st.tuples(st.integers(0, 700), row_lengths), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(spec=batches, page_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99))
def test_every_way_is_the_equation(spec: list[tuple[int, list[int]]], page_size: int, seed: int) -> None:
    q, k, v, layout = sequences(spec, page_size=page_size, seed=seed)
    expected, expected_lse = by_equation(q, k, v, layout)
    torch.testing.assert_close(paged_attention(q, k, v, layout), expected)
    torch.testing.assert_close(paged_attention(q, k, v, replace(layout, exact=True)), expected)
    out, lse = with_lse(REFERENCE, q, k, v, layout)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.float())


def test_a_rows_own_length_is_respected_whatever_its_neighbours_see() -> None:
    """Neighbours with the same pages share a call, though their lengths neither grow nor agree."""
    k, v = pages(4, 4)
    q = torch.randn(9, HEADS, CHANNELS, dtype=torch.float64)
    layout = RowLayout(
        cu_seqlens_q=torch.tensor([0, 2, 5, 5, 9]),
        kv_lens_R=torch.tensor([9, 1, 3, 12]),
        page_table_RP=torch.tensor([[3, 1, 2]] * 4),
        page_size=4,
    )
    assert len(plan_bundles(layout)) == 1
    torch.testing.assert_close(paged_attention(q, k, v, layout), by_equation(q, k, v, layout)[0])


def test_long_chunks_are_cut_and_like_sequences_share_a_call() -> None:
    q, k, v, layout = sequences([(0, [64] * 12), (40, [8, 8]), (72, [8, 8])], page_size=16, seed=1)
    bundles = plan_bundles(layout)
    assert [tuple(b.tokens_GQ.shape) for b in bundles] == [(1, 512), (1, 256), (2, 16)]
    torch.testing.assert_close(paged_attention(q, k, v, layout), by_equation(q, k, v, layout)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    spec = [(70, [16, 16]), (333, [16]), (0, [16, 16, 16]), (1030, [5, 16])]
    q, k, v, layout = sequences(spec, page_size=16, seed=3, dtype=dtype)
    together = paged_attention(q, k, v, replace(layout, exact=True))
    bounds = layout.cu_seqlens_q.tolist()
    for row in range(len(bounds) - 1):
        part = slice(bounds[row], bounds[row + 1])
        alone = RowLayout(
            cu_seqlens_q=torch.tensor([0, bounds[row + 1] - bounds[row]]),
            kv_lens_R=layout.kv_lens_R[row : row + 1],
            page_table_RP=layout.page_table_RP[row : row + 1],
            page_size=16,
            exact=True,
        )
        assert torch.equal(paged_attention(q[part], k, v, alone), together[part])


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
    out = merged(REFERENCE, q, k, v, layout, slots=slots, block_size=size)
    torch.testing.assert_close(out, by_equation(q, k, v, layout)[0], rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    prefixes=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    used=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    page_size=st.sampled_from([8, 16]),
)
def test_unused_slots_do_not_keep_the_others_from_sharing(
    prefixes: list[int], used: list[int], page_size: int
) -> None:
    """Static shapes: a slot that holds no block sees one key, and so do all slots of a row without a sequence."""
    q, k, v, layout = sequences([(p // 8 * 8, [8] * 3) for p in prefixes], page_size=page_size, seed=0)
    for row, count in zip(range(len(prefixes)), used, strict=False):
        layout.kv_lens_R[3 * row + count : 3 * row + 3] = 1
    seen = []

    def bind_lse(given: RowLayout) -> Any:
        seen.append(given)
        return REFERENCE.bind_lse(given)

    choice = Choice(name="x", bind_rows=REFERENCE.bind_rows, bind_lse=bind_lse)
    out = merged(choice, q, k, v, layout, slots=3, block_size=8)
    torch.testing.assert_close(out, by_equation(q, k, v, layout)[0], rtol=1e-5, atol=1e-5)
    prefix, rest = seen
    whole = [(p // 8 * 8 + 8) // page_size * page_size if n else 0 for p, n in zip(prefixes, used, strict=False)]
    assert prefix.kv_lens_R.tolist() == [max(n, 1) for n in whole]
    assert rest.page_table_RP.shape[1] <= 1 + -(-24 // page_size)


def test_what_cannot_be_merged_is_refused() -> None:
    layout = sequences([(64, [8, 8, 8])], page_size=16, seed=0)[-1]
    with pytest.raises(ValueError, match="3 rows do not divide into buffers of 2 slots"):
        REFERENCE.bind(replace(layout, max_q=8), merge_slots=2)
    with pytest.raises(ValueError, match="cannot be exact"):
        REFERENCE.bind(replace(layout, max_q=8, exact=True), merge_slots=3)
    with pytest.raises(ValueError, match="needs max_q"):
        REFERENCE.bind(layout, merge_slots=3)


SMALL = Shape(block_size=8, head_dim=16, page_size=8, dtype=torch.float32)


def timing(rows: int, prefix: int, buffer_size: int, merged_seconds: float) -> AttentionTiming:
    return AttentionTiming(
        backend="x",
        rows=rows,
        block_size=8,
        prefix=prefix,
        buffer_size=buffer_size,
        rows_seconds=1.0,
        merged_seconds=merged_seconds,
    )


def test_comparison_times_both_ways() -> None:
    timings = compare_attention(prefixes=(16, 32), buffer_sizes=(1, 2), shape=SMALL, repeats=1)
    assert [(t.prefix, t.buffer_size) for t in timings] == [(16, 1), (16, 2), (32, 1), (32, 2)]
    assert all(t.backend == "reference" and min(t.rows_seconds, t.merged_seconds) > 0 for t in timings)
    with pytest.raises(ValueError, match="prefix=12 is not a multiple"):
        compare_attention(prefixes=(12,), buffer_sizes=(1,), shape=SMALL)


def test_both_ways_that_are_timed_compute_the_same() -> None:
    by_rows, once = compare._both(REFERENCE, SMALL, prefix=40, buffer_size=3, rows=2, device=CPU)
    assert isinstance(by_rows(), Tensor)
    torch.testing.assert_close(once(), by_rows(), rtol=1e-5, atol=1e-5)


def test_the_rule_follows_the_times() -> None:
    few = [timing(1, 512, 2, 0.5), timing(1, 2048, 2, 1.5), timing(1, 8192, 2, 0.5), timing(1, 512, 4, 2.0)]
    many = [timing(16, 512, 2, 0.9), timing(16, 2048, 2, 0.9), timing(1, 512, 1, 0.1)]
    many += [timing(4, 512, 3, 0.9), timing(8, 512, 3, 1.1)]
    rule = merge_rule([*few, *many], measured_at="here")
    assert rule.merge_from == {(1, 2): 8192, (1, 4): None, (4, 3): 512, (8, 3): None, (16, 2): 512}

    def merges(num_sequences: int, slots: int) -> list[bool]:
        return [
            rule.merges(num_sequences=num_sequences, slots=slots, longest_prefix=p) for p in (256, 512, 8192, 16384)
        ]

    assert merges(1, 2) == merges(15, 2) == [False, False, True, True]
    assert merges(16, 2) == merges(64, 2) == [False, True, True, True]
    assert merges(1, 3) == [False, True, True, True] and not any(merges(8, 3))
    assert not any(merges(1, 4) + merges(1, 1) + merges(1, 5))
    choice = Choice(name="x", bind_rows=REFERENCE.bind_rows, bind_lse=REFERENCE.bind_lse, merge_rule=rule)
    assert choice.merges(num_sequences=1, slots=2, longest_prefix=8192)
    assert "from prefix 8192 at 1 x 2 slots, never at 1 x 4 slots" in choice.describe()


def test_without_a_rule_nothing_is_merged_and_the_cpu_measures_none() -> None:
    assert not REFERENCE.merges(num_sequences=1, slots=4, longest_prefix=10**6)
    assert with_measured_rule(REFERENCE, SMALL, max_rows=4, buffer_size=4, device=CPU) is REFERENCE


def test_an_engine_on_a_gpu_measures_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, list[int]]] = []

    def record(*, prefixes: list[int], buffer_sizes: tuple[int], rows: int, **_: Any) -> list[AttentionTiming]:
        asked.append((rows, prefixes))
        return [timing(rows, p, buffer_sizes[0], 0.5 if rows > 1 else 1.5) for p in prefixes]

    monkeypatch.setattr(compare, "compare_attention", record)
    choice = with_measured_rule(REFERENCE, SMALL, max_rows=64, buffer_size=4, device=CUDA)
    assert asked == [(1, [512, 2048, 8192]), (64, [512, 2048])]
    assert choice.merge_rule == MergeRule(merge_from={(1, 4): None, (64, 4): 512}, measured_at="measured at start")
    assert with_measured_rule(REFERENCE, SMALL, max_rows=64, buffer_size=1, device=CUDA) is REFERENCE


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--buffers", "1,2", "--block-size", "8", "--repeats", "1", "--json", str(tmp_path / "deep" / "f.json")]
    assert compare.main(["--prefixes", "16,32", *small]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n| 1 | ") == 4 and "once / rows" in printed
    found = json.loads((tmp_path / "deep" / "f.json").read_text())
    assert [(r["prefix"], r["buffer_size"]) for r in found["rows"]] == [(16, 1), (16, 2), (32, 1), (32, 2)]
    assert "--prefixes 16,32" in found["settings"]["command"]
    assert compare.main(["--prefixes", "12", *small]) == 2
    assert capsys.readouterr().err == "compare: prefix=12 is not a multiple of block_size=8\n"


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
    for max_q in (7, None):
        bound = choice.bind(replace(layout, exact=exact, max_q=max_q))
        torch.testing.assert_close(bound(q, k, v), expected)
    for call in packages.calls:
        assert (call["max_q"], call["max_k"]) == (7, layout.page_table_RP.shape[1] * 16)
        assert call["exact"] == exact or name == "flash-attn"
        assert call.get("fa", 3) == 3
    torch.testing.assert_close(with_lse(choice, q, k, v, layout)[1], expected_lse.float())
    if not exact:
        q, k, v, layout = sequences([(50, [7, 7, 7]), (3, [7, 7, 7])], page_size=16, seed=6)
        out = merged(choice, q, k, v, layout, slots=3, block_size=7)
        torch.testing.assert_close(out, by_equation(q, k, v, layout)[0], rtol=1e-5, atol=1e-5)
        assert [call["max_q"] for call in packages.calls[-2:]] == [21, 7]


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
    q, k, v, layout = sequences([(50, [7, 7]), (3, [7])], page_size=16, seed=5)
    expected = by_equation(q, k, v, layout)[0]
    for exact in (False, True):
        bound = choice.bind(replace(layout, exact=exact))
        torch.testing.assert_close(bound(q, k, v), expected)


def on_gpu(layout: RowLayout) -> RowLayout:
    return replace(layout, **{name: t.cuda() for name, t in vars(layout).items() if isinstance(t, Tensor)})


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
    layout = RowLayout(cu_seqlens_q=bounds, kv_lens_R=kv_lens, page_table_RP=table, page_size=256)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected = paged_attention(q.float(), k.float(), v.float(), layout)
    out = choice.bind(on_gpu(layout))(q.cuda(), k.cuda(), v.cuda())
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=1e-2)
    table = torch.randperm(16).view(4, 4).repeat_interleave(2, 0)
    kv_lens = torch.tensor([544, 576, 32, 64, 992, 1024, 700, 1])
    bounds = torch.arange(9, dtype=torch.int32) * 32
    layout = RowLayout(cu_seqlens_q=bounds, kv_lens_R=kv_lens, page_table_RP=table, page_size=256)
    q = torch.randn(256, 8, 128).bfloat16()
    expected = paged_attention(q.float(), k.float(), v.float(), layout)
    out = merged(choice, q.cuda(), k.cuda(), v.cuda(), on_gpu(layout), slots=2, block_size=32)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.gpu
def test_gpu_engines_measure_a_rule() -> None:
    choice = resolve(CUDA, torch.bfloat16, 128, 32, num_heads=16, num_kv_heads=4)
    measured = with_measured_rule(choice, Shape(), max_rows=8, buffer_size=2, device=CUDA)
    assert measured.merge_rule is not None and set(measured.merge_rule.merge_from) == {(1, 2), (8, 2)}
