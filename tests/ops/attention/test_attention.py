"""The resolver says which attention kernel it chose and why no other; every kernel gives what the equation gives."""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_attention import FakePackages, by_equation, sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from mbd_core.ops.attention.choice import KERNELS, resolve
from mbd_core.ops.attention.definition import RowLayout, paged_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = {"dtype": torch.bfloat16, "head_dim": 128, "page_size": 256, "num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize("name", ["vllm-flash-attn", "torch-varlen", "flash-attn", "kernels-hub"])
@pytest.mark.parametrize(("exact", "causal"), [(False, False), (True, False), (False, True)])
def test_adapters_hand_each_kernel_what_it_means(name: str, exact: bool, causal: bool) -> None:
    packages = FakePackages()
    attention = resolve(CUDA, preference=name, capability=(9, 0), load=packages, **SIZES)
    assert attention.name == name and set(attention.reasons) == {*KERNELS, "reference"} - {name}
    spec = [(50, [7, 7]), (3, [7]), (120, [7, 7, 7])]
    q, k, v, layout = sequences(spec, page_size=16, seed=5, causal=causal)
    expected = by_equation(q, k, v, layout)
    for max_q in (7, None):
        bound = attention.bind(replace(layout, exact=exact, max_q=max_q))
        torch.testing.assert_close(bound(q, k, v), expected)
    for call in packages.calls:
        assert (call["max_q"], call["max_k"]) == (7, layout.page_table_RP.shape[1] * 16)
        assert call["exact"] == exact or name == "flash-attn"
        assert call.get("fa", 3) == 3


def test_the_stand_in_for_torchs_function_has_its_signature() -> None:
    real, ours = (inspect.signature(f).parameters for f in (varlen_attn, FakePackages().varlen_attn))
    if "block_table" not in real:
        pytest.skip(f"torch {torch.__version__} has an older one, which the test below has")
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in real.values()]


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
    assert small.name == "triton"
    assert "multiples of 256" in small.reasons["flash-attn"] and "FlashAttention 3" in small.reasons["torch-varlen"]
    assert "not flash-attn: its pages" in small.describe()


def test_torch_and_triton_alone_are_enough_to_capture_a_step() -> None:
    """torch 2.11's `varlen_attn` takes neither key lengths nor a block table, and no other package is installed."""

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        raise AssertionError

    modules = {"torch.nn.attention.varlen": SimpleNamespace(varlen_attn=varlen_attn), "triton": SimpleNamespace()}

    def load(name: str) -> Any:
        if name not in modules:
            raise ImportError(f"no module named {name}")
        return modules[name]

    chosen = resolve(CUDA, capability=(9, 0), load=load, **{**SIZES, "page_size": 32})
    assert (chosen.name, chosen.capturable) == ("triton", True)
    assert chosen.reasons["torch-varlen"] == "the installed varlen_attn takes no block_table; a newer one does"
    del modules["triton"]
    chosen = resolve(CUDA, capability=(9, 0), load=load, **{**SIZES, "page_size": 32})
    assert (chosen.name, chosen.capturable) == ("reference", False) and "no module" in chosen.reasons["triton"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "not float32"),
        ({"head_dim": 264}, "up to 256"),
        ({"head_dim": 12}, "steps of 8"),
        ({"page_size": 24}, "multiples of 16"),
        ({"windows": True}, "sliding windows"),
        ({"capability": (7, 5)}, r"this device has 7\.5"),
        ({"device": CPU}, "this is cpu"),
    ],
)
def test_a_preference_that_cannot_be_honoured_is_an_error(change: dict[str, Any], reason: str) -> None:
    setting: dict[str, Any] = {"device": CUDA, "capability": (9, 0), "load": FakePackages(), **SIZES, **change}
    with pytest.raises(ValueError, match=reason):
        resolve(preference="vllm-flash-attn", **setting)


def test_windows_and_wide_heads_are_tritons() -> None:
    """DiffusionGemma's layers: the larger head size stands for both."""
    chosen = resolve(CUDA, capability=(9, 0), load=FakePackages(), **{**SIZES, "head_dim": 512, "windows": True})
    assert chosen.name == "triton" and "up to 256" in chosen.reasons["vllm-flash-attn"]


def test_limits_that_no_kernel_can_lift() -> None:
    with pytest.raises(ValueError, match="num_heads=6"):
        resolve(CPU, torch.float32, 16, 16, num_heads=6, num_kv_heads=4)
    with pytest.raises(ValueError, match=r"choose one of .*reference"):
        resolve(CPU, torch.float32, 16, 16, "flash")


def test_the_cpu_takes_the_reference_and_imports_nothing() -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} was imported")

    attention = resolve(CPU, torch.float32, 16, 24, load=refuse)
    assert attention.name == "reference" and set(attention.reasons) == set(KERNELS)
    q, k, v, layout = sequences([(50, [7, 7]), (3, [7])], page_size=16, seed=5)
    expected = by_equation(q, k, v, layout)
    for exact in (False, True):
        bound = attention.bind(replace(layout, exact=exact))
        torch.testing.assert_close(bound(q, k, v), expected)


def on_gpu(layout: RowLayout) -> RowLayout:
    return replace(layout, **{name: t.cuda() for name, t in vars(layout).items() if isinstance(t, Tensor)})


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*KERNELS, "reference"])
def test_gpu_kernels_are_the_definition(name: str) -> None:
    try:
        attention = resolve(CUDA, torch.bfloat16, 128, 256, name, num_heads=8, num_kv_heads=2)
    except ValueError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    k, v = torch.randn(2, 16, 256, 2, 128).bfloat16()
    pages = torch.randperm(16).view(4, 4)
    for table, kv_lens in (
        (pages[[0, 0, 1, 2, 2, 2, 3]], [544, 576, 32, 1000, 1016, 1024, 700]),
        (pages.repeat_interleave(2, 0), [544, 576, 32, 64, 992, 1024, 700, 1]),  # whole buffers, the last slot unused
    ):
        bounds = torch.arange(len(kv_lens) + 1, dtype=torch.int32) * 32
        q = torch.randn(32 * len(kv_lens), 8, 128).bfloat16()
        plain = RowLayout(cu_seqlens_q=bounds, kv_lens_R=torch.tensor(kv_lens), page_table_RP=table, page_size=256)
        for causal_R in (None, (torch.arange(len(kv_lens)) % 3 == 1) & (plain.kv_lens_R >= 32)):
            layout = replace(plain, causal_R=causal_R)
            expected = paged_attention(q.float(), k.float(), v.float(), layout)
            out = attention.bind(on_gpu(layout))(q.cuda(), k.cuda(), v.cuda())
            torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=1e-2)


row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
batches = st.lists(st.tuples(st.integers(0, 700), row_lengths), min_size=1, max_size=5)


@settings(max_examples=40)
@given(
    spec=batches,
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 5, 300]),
)
def test_the_definition_is_the_equation(
    spec: list[tuple[int, list[int]]], page_size: int, seed: int, causal: bool, window: int | None
) -> None:
    q, k, v, layout = sequences(spec, page_size=page_size, seed=seed, causal=causal)
    layout = replace(layout, window=window)
    expected = by_equation(q, k, v, layout)
    torch.testing.assert_close(paged_attention(q, k, v, layout), expected)
    torch.testing.assert_close(paged_attention(q, k, v, replace(layout, exact=True)), expected)
