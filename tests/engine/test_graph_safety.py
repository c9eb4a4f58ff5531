"""What a GPU would find out first, found without one.

An engine whose device is not the host (`fake_device`) gives the tokens it gives on the host; its decode steps are
captured as graphs and replayed, and nothing in a capture waits for the device, comes from the host or mixes the two.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_layers import cut_tiles
from fake_attention import FakePackages, sequences
from fake_device import FREE, PEAK, TOTAL, FakeDevice, Graph, OnDevice, fake_device
from small_engines import (
    BLOCKWISE,
    CAUSAL,
    EXPERTS,
    FULL,
    MASK,
    SHIFTED,
    SHIFTED_VERIFY,
    VERIFY,
    VOCAB,
    B,
    build,
    gist,
    request,
)
from test_two_sizes import drafted, large_model, small_model, two_sizes
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.step_nodes import CUDA
from benchmarks.step_timing import StepCase, filled_engine, measure_host, measure_step
from mbd_core.decoding.blocks import sampling
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.blocks.work import WORK_NAMES
from mbd_core.engine import build as build_module
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.num_pages import bytes_per_page
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.engine.step import vocab as device_vocab
from mbd_core.engine.step.kinds import StepKind
from mbd_core.engine.step.planned_graphs import planned_kinds
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.engine.step_ahead import StepPlan
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import Fp8Parts
from mbd_core.models.quantize import quantize_weights
from mbd_core.models.shard import Shard
from mbd_core.ops import launch as triton_launch
from mbd_core.ops.attention import choice as attention
from mbd_core.ops.attention import flash
from mbd_core.ops.attention import paged_attention as attention_triton
from mbd_core.ops.attention.definition import RowLayout, paged_attention
from mbd_core.ops.experts import choice as moe
from mbd_core.ops.experts import expert_products as moe_triton
from mbd_core.ops.experts import fp8
from mbd_core.ops.experts.choice import sort_by_expert, without_sentinels
from mbd_core.ops.experts.expert_tiles import SortedTiles

FAMILIES: dict[str, dict[str, Any]] = {
    "sdar": {},
    "llada2": {
        "architecture": "LLaDA2MoeModelLM",
        "moe": EXPERTS,
    },
    "dream": {
        "architecture": "DreamModel",
        "attention": "full",
        "shift_logits": True,
        "qk_norm": False,
        "qkv_bias": True,
    },
    "fast-dllm-v2": {
        "architecture": "Fast_dLLM_QwenForCausalLM",
        "shift_logits": True,
        "qk_norm": False,
        "qkv_bias": True,
    },
}
KERNELS: dict[str, Callable[[FakePackages, FakeDevice], flash.FlashKernel]] = {
    "vllm": lambda packages, device: flash.vllm_flash(device.kernel(packages.vllm), fa_version=3),
    "flash 3": lambda packages, device: flash.flash_3(device.kernel(packages.flash_3)),
    "flash 2": lambda packages, device: flash.flash_2(device.kernel(packages.flash_2)),
    "torch": lambda packages, device: flash.torch_varlen(device.kernel(packages.varlen_attn)),
    "triton": lambda packages, device: attention_triton.bind,
}


class Launcher:
    """A Triton kernel's place: `kernel[grid](...)` runs what stands in for it, which is told the grid."""

    def __init__(self, device: FakeDevice, run: Callable[..., None]) -> None:
        self._run = device.kernel(run)

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return lambda *args, **options: self._run(grid, *args, **options)


def tiles(grid: tuple[int, int], expert: Tensor, first: Tensor, end: Tensor) -> Iterator[tuple[int, slice]]:
    assert {t.dtype for t in (expert, first, end)} == {torch.int32} and grid[0] == len(expert)
    for e, start, stop in zip(expert.tolist(), first.tolist(), end.tolist(), strict=True):
        if stop > start:
            assert stop - start <= moe_triton.FULL_ROWS
            yield e, slice(start, stop)


def widened(stack: Tensor, scale: Tensor, expert: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """The weights of an expert, which are FP8 if a scale has `rows`."""
    if not rows:
        return stack[expert]
    return fp8.dequantize(fp8.Fp8Weight(stack[expert], scale[expert], (rows, columns) if columns else None), dtype)


def swiglu_kernel(
    grid: Any,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor,
    up_scale: Tensor,
    shared_gate: Tensor,
    shared_up: Tensor,
    hidden: Tensor,
    order: Tensor,
    expert: Tensor,
    first: Tensor,
    end: Tensor,
    D: int,
    F_: int,
    E: int,
    K: int,
    num_scales: int,
    *,
    SHARES: bool,
    ROWS: int,
    COLUMNS: int,
    BLOCK_F: int,
    **_: Any,
) -> None:
    assert not SHARES and len(gate) == E and (ROWS == 0 or gate_scale[0].numel() == up_scale[0].numel() == num_scales)
    assert x.shape[1] == D and gate.shape[1:] == up.shape[1:] == (F_, D) and grid[1] == -(-F_ // BLOCK_F)
    for e, rows in tiles(grid, expert, first, end):
        source = x[order[rows] // K]
        g, u = (
            F.linear(source, widened(w, s, e, x.dtype, ROWS, COLUMNS)) for w, s in ((gate, gate_scale), (up, up_scale))
        )
        hidden[rows] = (F.silu(g) * u).to(hidden.dtype)


def down_kernel(
    grid: Any,
    hidden: Tensor,
    down: Tensor,
    scale: Tensor,
    shared_down: Tensor,
    weights: Tensor,
    y: Tensor,
    order: Tensor,
    expert: Tensor,
    first: Tensor,
    end: Tensor,
    D: int,
    F_: int,
    E: int,
    wide: int,
    num_scales: int,
    *,
    SHARES: bool,
    ROWS: int,
    COLUMNS: int,
    BLOCK_D: int,
    **_: Any,
) -> None:
    assert not SHARES and len(down) == E and (ROWS == 0 or scale[0].numel() == num_scales)
    assert hidden.shape[1] == F_ and y.shape == (len(order), D) and grid[1] == -(-D // BLOCK_D)
    for e, rows in tiles(grid, expert, first, end):
        out = F.linear(hidden[rows], widened(down, scale, e, hidden.dtype, ROWS, COLUMNS)).float()
        y[order[rows]] = out * weights.flatten()[order[rows], None]


def tiles_by_sorting(ids: Tensor, num_experts: int, tile: int) -> SortedTiles:
    order, ends = sort_by_expert(ids, num_experts)
    return SortedTiles(order, *cut_tiles(ends, len(order), tile))


def sum_of_parts(y: Tensor, ids: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    return without_sentinels(y.sum(1), ids, num_experts).to(dtype)


def split_kernel(
    grid: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Tensor,
    lse: Tensor,
    bounds: Tensor,
    keys: Tensor,
    first_keys: Tensor,
    hidden: Tensor,
    table: Tensor,
    *strides: float,
    EACH: int,
    PAGE: int,
    SPLITS: int,
    CAUSAL: bool,
    GAP: bool,
    **_: Any,
) -> None:
    """All of a row's keys are in the first split; the others have none."""
    assert {t.dtype for t in (bounds, keys, table)} == {torch.int32} and grid[1:] == (k.shape[2], SPLITS)
    assert len(table) % EACH == 0 and grid[0] == len(table) // EACH * strides[9]
    table = table.view(-1, EACH, table.shape[-1])[:, :1].expand(-1, EACH, -1).flatten(0, 1).long()  # a sequence's own
    if CAUSAL:
        out = attention_of_tokens(
            q, k, v, table.repeat_interleave(bounds.diff(), dim=0), keys, hidden if GAP else None
        )
    else:
        layout = RowLayout(cu_seqlens_q=bounds, kv_lens_R=keys, page_table_RP=table, page_size=PAGE)
        out = paged_attention(q, k, v, layout)
    if SPLITS == 1:
        parts.copy_(out)
    else:
        parts.fill_(torch.nan)[0].copy_(out)
        lse.fill_(-torch.inf)[0] = 0.0


def attention_of_tokens(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, keys: Tensor, hidden: Tensor | None) -> Tensor:
    """Each token with its own number of keys, of which some may be hidden."""
    out = torch.empty_like(q)
    for t, number in enumerate(keys.tolist()):
        seen = torch.ones(number, dtype=torch.bool)
        if hidden is not None:
            seen[hidden[0, t] : hidden[1, t]] = False
        table = pages[t, : -(-number // k.shape[1])]
        own_k, own_v = (x[table].flatten(0, 1)[:number][seen].transpose(0, 1)[None] for x in (k, v))
        out[t] = F.scaled_dot_product_attention(q[None, t, :, None], own_k, own_v, enable_gqa=True)[0, :, 0]
    return out


def join_kernel(grid: Any, parts: Tensor, lse: Tensor, out: Tensor, *_: int, SPLITS: int, **__: Any) -> None:
    assert grid == (lse[0].numel(),) and len(parts) == len(lse) == SPLITS
    out.copy_((parts.nan_to_num() * lse.softmax(0)[..., None]).sum(0))


def likeliest(logits_PV: Tensor, *, mask_token_id: int, size: int) -> tuple[Tensor, Tensor]:
    assert logits_PV.stride(1) == 1, "the kernel reads rows of neighbouring numbers"
    return Vocab(mask_token_id, size).likeliest(logits_PV)


def likeliest_of_part(logits_PV: Tensor, *, mask_token_id: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.arange(logits_PV.shape[1])
    barred = (ids == mask_token_id) | (ids >= size)
    logit, place = logits_PV.float().masked_fill(barred, -torch.inf).max(-1)
    return place, logit, logits_PV.float().logsumexp(-1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The fake device, with stand-ins for the Triton kernels."""
    with fake_device() as found:
        monkeypatch.setattr(triton_launch, "_has_triton", lambda: False)  # layers and steps in torch's own operations
        monkeypatch.setattr(moe_triton, "sorted_tiles", found.kernel(tiles_by_sorting))
        summed = found.kernel(sum_of_parts)
        for module in (moe, fp8):
            monkeypatch.setattr(
                module, "sum_experts", lambda p, dtype: summed(p.y_TKD, p.ids_TK, p.num_experts, dtype)
            )
        for module, stand_ins in (
            (moe_triton, {"SWIGLU": swiglu_kernel, "DOWN": down_kernel}),
            (attention_triton, {"SPLIT": split_kernel, "JOIN": join_kernel}),
        ):
            for name, kernel in stand_ins.items():
                monkeypatch.setattr(module, name, Launcher(found, kernel))
        monkeypatch.setattr(device_vocab, "confidence", found.kernel(likeliest))
        monkeypatch.setattr(device_vocab, "part_confidence", found.kernel(likeliest_of_part))
        yield found


def attend_by(monkeypatch: pytest.MonkeyPatch, kernel: flash.FlashKernel) -> None:
    """Engines made from now on take this kernel, in any dtype."""
    monkeypatch.setattr(build_module, "resolve", lambda *_, **__: attention.flash_attention("stand-in", kernel, {}))


def requests(family: str) -> list[Request]:
    """Every method the family decodes with, and every kind of work a program may have to do."""
    blockwise = [*BLOCKWISE.values(), {"tau_m2t": 0.4, "tokens_per_step": 2}, {"tau_m2t": 0.4, "fallback": "margin"}]
    canvases = [method for method in FULL.values() if "canvas" in method]
    others = [*canvases, *(m for m in FULL.values() if m not in canvases)]
    methods = {"dream": others, "fast-dllm-v2": [*SHIFTED.values(), BLOCKWISE["multi"]]}.get(family, blockwise)
    plain = [
        request(
            f"r{i}",
            i,
            "multi",
            decoding=DecodingConfig(block_size=B, **method),
            sampling=Sampling(temperature=0.8 if i % 2 else 0.0, top_p=1.0 if i == 1 else 0.9, seed=i),
            max_tokens=24 if method in canvases else 6 + 4 * (i % 2 == 0),
            ignore_eos=True,
        )
        for i, method in enumerate(methods)
    ]
    changed = Sampling(
        logit_bias=((7, 1.5),), repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3, min_p=0.1
    )
    adjusted = [
        request(
            f"adjusted {t}",
            70,
            "multi",
            sampling=replace(changed, temperature=t),
            max_tokens=10,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=int(5 * t),
        )
        for t in (0.0, 0.8)
    ]
    return plain + adjusted


SIZES = EngineConfig(max_rows=2, num_pages=100, page_size=16, max_prefill_tokens=12)


def capture_every_kind(monkeypatch: pytest.MonkeyPatch, served: Engine) -> set[StepKind]:
    """Every kind of step that comes up gets a graph of its own before it runs; the kinds so far."""
    kinds: set[StepKind] = set()
    run = served._graphs.run

    def capturing(kind: StepKind, *, num_pages: int) -> Tensor:
        served._graphs.capture([kind])
        kinds.add(kind)
        return run(kind, num_pages=num_pages)

    monkeypatch.setattr(served._graphs, "run", capturing)
    return kinds


@functools.cache
def hosts_answers(family: str) -> list[tuple[int, ...]]:
    """The tokens of the family's requests by an engine on the host, in float64."""
    return [gist(o)[0] for o in Engine(build(**FAMILIES[family]).double(), SIZES).generate(requests(family))]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_on_a_device_of_its_own_gives_the_hosts_tokens(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, family: str
) -> None:
    """Graphs, overlap and all, over real values; float64, so that no rounding is left to explain a difference."""
    model, wanted = build(**FAMILIES[family]).double(), hosts_answers(family)
    attend_by(monkeypatch, KERNELS["triton"](FakePackages(), device))
    served = Engine(device.move(model), SIZES)
    kinds = capture_every_kind(monkeypatch, served)
    assert served.static_shapes and served.overlap and served._state.tables_RP.device == CUDA
    assert [gist(o)[0] for o in served.generate(requests(family))] == wanted
    assert served.ahead.num_ahead > 0
    for flag in set(WORK_NAMES) - {"adapts"} if family in ("sdar", "llada2") else ():  # adapters: test_adapters.py
        assert {getattr(kind.work, flag) for kind in kinds} == {False, True}
    report = served.graph_report()
    assert report["captured"] == len(kinds) > 0 and report["steps_replayed"] > 0 == report["steps_eager"]


@pytest.mark.parametrize("family", [pytest.param("sdar", marks=pytest.mark.slow), "llada2"])
def test_a_rank_of_several_waits_for_nothing_within_a_step(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, family: str
) -> None:
    """Its embeddings, its part of the vocabulary and whole logits, in captured steps of every kind of work."""
    model = Decoder(build(**FAMILIES[family]).config, shard=Shard(rank=1, size=2), reduce=lambda x: x)
    init_weights(model, seed=1, std=0.35)
    model = model.double().eval().requires_grad_(False)
    asked = requests(family)[3:9]  # with and without each kind of work that is looked for below
    wanted = [gist(o)[0] for o in Engine(model, SIZES).generate(asked)]
    attend_by(monkeypatch, KERNELS["triton"](FakePackages(), device))
    served = Engine(device.move(model), SIZES)
    kinds = capture_every_kind(monkeypatch, served)
    assert [gist(o)[0] for o in served.generate(asked)] == wanted
    for flag in ("draws", "scores", "softens"):
        assert {getattr(kind.work, flag) for kind in kinds} == {False, True}
    report = served.graph_report()
    assert report["captured"] == len(kinds) > 0 and report["steps_replayed"] > 0 == report["steps_eager"]


@pytest.mark.parametrize("plain", [True, False])
def test_graphs_captured_at_start_serve_every_request(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, plain: bool
) -> None:
    """None is captured later: plain requests replay small ones, any other the one that does all work. When all are let
    go of, as before a sleep, they can be captured again."""
    model = build().double()
    plain_batch = [
        request(f"r{i}", i, ("multi", "single")[i % 2], sampling=Sampling(), max_tokens=20, ignore_eos=True)
        for i in range(3)
    ]
    batch = plain_batch if plain else requests("sdar")
    wanted = [gist(o)[0] for o in Engine(model, SIZES).generate(batch)] if plain else hosts_answers("sdar")
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    served = Engine(device.move(model), SIZES)
    # for 1 and for 2 batch rows: each quarter of the buffer that 3 of its 4 slots may ask, and all work at once, with
    # changes of logits and without
    assert served.prepare(plain_batch[0].decoding) == served.graph_report()["captured"] == 2 * (3 + 2)
    assert [gist(o)[0] for o in served.generate(batch)] == wanted
    report = served.graph_report()
    assert report["captured"] == 10 and report["steps_replayed"] > 0 == report["steps_eager"]
    served.close()
    assert served.prepare(plain_batch[0].decoding) == 10
    assert [gist(o)[0] for o in served.generate(batch[-2:])] == wanted[-2:]


@pytest.mark.parametrize("family", ["llada2", "dream"])
def test_steps_that_store_prompts_replay_the_graph_of_those_that_decode(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, family: str
) -> None:
    """A long prompt comes in while others decode; tokens are those of one forward for both."""
    model = build(**FAMILIES[family]).double()
    method = "multi" if family == "llada2" else "d2f"
    batch = [request(f"r{i}", 9 * i, method, sampling=Sampling(), max_tokens=20, ignore_eos=True) for i in range(5)]
    sizes = replace(SIZES, max_rows=3)
    wanted = [gist(o)[0] for o in Engine(model, sizes).generate(batch)]
    attend_by(monkeypatch, KERNELS["triton"](FakePackages(), device))
    served = Engine(device.move(model), sizes)
    kinds = capture_every_kind(monkeypatch, served)
    launched: list[StepPlan] = []
    launch = served.launch
    monkeypatch.setattr(served, "launch", lambda plan: (launched.append(plan), launch(plan))[1])
    assert [gist(o)[0] for o in served.generate(batch)] == wanted and kinds
    decoding = [plan for plan in launched if plan.decoding]
    storing = [{c.sequence.row for c in plan.chunks} - plan.decoding.keys() for plan in decoding if plan.chunks]
    assert len(storing) > 1 and not all(storing), "rows whose prompt is complete decode at once"
    assert any(storing) == (family == "llada2"), "a prompt under full attention is stored in one step"
    report = served.graph_report()
    assert report["steps_replayed"] == len(decoding) and report["steps_eager"] == 0


NEMOTRON = {"architecture": "NemotronLabsDiffusionModel", "attention": "causal", "qk_norm": False}
PLANNED = {
    **{name: (NEMOTRON, fields) for name, fields in CAUSAL.items()},
    **{name: (FAMILIES["sdar"], fields) for name, fields in VERIFY.items()},
    **{name: (FAMILIES["fast-dllm-v2"], fields) for name, fields in SHIFTED_VERIFY.items()},
}


OTHER_RULES = ("verify score", "verify t2t", "verify carry")  # the rows of `verify` and `verify carry exact`


# with the kernel of a package our own serves the rows with a gap alone
@pytest.mark.parametrize(
    ("method", "kernel"),
    [
        *(pytest.param(name, "vllm", marks=pytest.mark.slow if name in OTHER_RULES else ()) for name in PLANNED),
        ("verify exact", "triton"),
    ],
)
def test_forwards_of_planned_rows_replay_graphs_captured_at_start(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, method: str, kernel: str
) -> None:
    """Whatever its rows: no forward is larger than the largest graph, and its padding changes nothing."""
    family, fields = PLANNED[method]
    model, decoding = build(**family).double(), DecodingConfig(block_size=B, **fields)
    batch = [
        request(
            f"r{i}",
            5 * i,
            "multi",
            decoding=decoding,
            sampling=Sampling(temperature=0.8 * (i % 2), seed=i),
            max_tokens=9 + 4 * i,
            ignore_eos=True,
        )
        for i in range(4)
    ]
    sizes = replace(SIZES, max_rows=3)
    wanted = [gist(o)[0] for o in Engine(model, sizes).generate(batch)]
    attend_by(monkeypatch, KERNELS[kernel](FakePackages(), device))
    served = Engine(device.move(model), sizes)
    assert served.prepare(decoding) > 0
    assert [gist(o)[0] for o in served.generate(batch)] == wanted
    report = served.graph_report()
    assert report["steps_replayed"] > 0 == report["steps_eager"]


@pytest.mark.parametrize("kind", ["ar", pytest.param("block size 1", marks=pytest.mark.slow)])
def test_both_models_of_two_sizes_replay_graphs(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, kind: str
) -> None:
    """Captured for a decoding in the large model's blocks, as a server has it: drafts have the draft model's."""
    model, draft = large_model(kind).double(), small_model().double()
    decoding = replace(drafted(2), block_size=model.config.block_size)
    batch = [request(f"r{i}", 5 * i, "multi", decoding=decoding, max_tokens=9 + 4 * i) for i in range(4)]
    wanted = [gist(o)[0] for o in two_sizes(model, draft, page_size=16, max_rows=3).generate(batch)]
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    served = two_sizes(device.move(model), device.move(draft), page_size=16, max_rows=3)
    assert served.prepare(decoding) > 0
    assert [gist(o)[0] for o in served.generate(batch)] == wanted
    report = served.graph_report()
    assert report["steps_replayed"] > 0 == report["steps_eager"]


def test_a_draft_models_graphs_are_captured_beside_adapters_and_released_whole(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    """The large model alone has adapters, and after a release no runner holds memory of a graph."""
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    models = [device.move(model.double()) for model in (large_model(), small_model())]
    served = two_sizes(*models, page_size=16, max_rows=1, max_adapters=1)
    kinds = served._graphs._captured_forwards
    assert served.prepare(drafted(1)) == len(kinds) > 0
    assert {(kind.by_draft_model, kind.adapts) for kind in kinds} == {(False, False), (False, True), (True, False)}
    served.close()
    runners = (served.runner, served._state.draft_runner)
    assert [len(runner._hidden_TD) for runner in runners if runner is not None] == [0, 0]


def test_a_forward_of_single_tokens_is_padded_to_no_more_rows_than_tokens(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    served = Engine(device.move(build(**NEMOTRON).double()), SIZES)
    served.prepare(DecodingConfig(block_size=B, **CAUSAL["ar"]))
    captured = served._graphs._captured_forwards
    assert {(kind.num_tokens, len(forward._batch.kv_lens_K)) for kind, forward in captured.items()} == {(1, 1), (2, 2)}


def test_nothing_is_captured_for_a_draft_model_that_the_engine_lacks(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    """As with a model folder whose default decoding names one: its requests are refused, and others are served."""
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    assert Engine(device.move(build().double()), SIZES).prepare(drafted(2)) == 0


def watch_sizes(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, bool], int]:
    """The most tokens of a forward so far and the most positions of one product of logits, by whether the model is the
    small one."""
    found: dict[tuple[str, bool], int] = {}

    def watch(name: str, size: Callable[..., int]) -> None:
        method = getattr(ModelRunner, name)

        def watched(runner: ModelRunner, x: Any, **options: Any) -> Tensor:
            key = name, runner.model.config.num_layers == small_model().config.num_layers
            found[key] = max(found.get(key, 0), size(x))
            result: Tensor = method(runner, x, **options)
            return result

        monkeypatch.setattr(ModelRunner, name, watched)

    watch("forward", lambda batch: len(batch.input_ids_T))
    watch("logits", len)
    return found


@pytest.mark.parametrize("method", ["slots", "verified", "two sizes"])
def test_a_gpu_gives_what_the_largest_step_leaves(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, method: str
) -> None:
    """The pages leave free the peak of the measured step, the same again for graphs, and the share of the card that is
    not ours. Beside a full prefill budget, the step has the positions of the largest graph that is captured, and no
    step that serves is larger, of either model."""
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    truncated, num_drawn = sampling._draw_truncated, []
    monkeypatch.setattr(sampling, "_draw_truncated", lambda x, draw: num_drawn.append(len(x)) or truncated(x, draw))
    sizes, rows, slots = EngineConfig(max_rows=2, page_size=16, max_prefill_tokens=12), 2, 4
    models: tuple[Decoder, ...] = (build().double(),)
    decoding, most = DecodingConfig(block_size=B, buffer_size=slots), slots * B
    if method == "slots":  # of a model that verifies nothing
        models = (build(**FAMILIES["dream"]).double(),)
    if method == "verified":
        decoding, most = replace(decoding, verify=Verify(exact=True, store="causal")), 2 * slots * B
    if method == "two sizes":
        models, decoding, most = (large_model().double(), small_model().double()), drafted(slots), (3 * slots + 1) * B
    found = watch_sizes(monkeypatch)
    moved = [device.move(model) for model in models]
    served = Engine(moved[0], sizes, vocab_limit=VOCAB, draft_model=moved[1] if len(moved) > 1 else None)
    page_bytes = sum(bytes_per_page(model.config, 16, torch.float64) for model in models)
    assert served.num_pages == (FREE - 2 * PEAK - int((1 - sizes.kv_memory_fraction) * TOTAL)) // page_bytes
    assert set(num_drawn) == {rows * slots * models[0].config.block_size}, "all slots are drawn from some of the ids"
    measured, is_small = dict(found), len(models) == 1
    whole_pages = -(-(12 + rows * most) // 16) * 16
    assert {size for (name, _), size in measured.items() if name == "forward"} == {whole_pages}
    found.clear()
    assert served.prepare(decoding) > 0
    captured = [size for (name, _), size in found.items() if name == "forward"]
    assert captured and set(captured) == {rows * most}
    served.generate([request(f"r{i}", 7 * i, "multi", decoding=decoding, max_tokens=16) for i in range(3)])
    assert all(size <= measured.get((name, small), measured[name, is_small]) for (name, small), size in found.items())


def test_pages_are_counted_for_a_step_without_graphs(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    sizes = EngineConfig(max_rows=3, page_size=16, graphs=False)
    served = Engine(device.move(build().double()), sizes)
    page_bytes = bytes_per_page(served.model.config, 16, torch.float64)
    assert served.num_pages == (FREE - PEAK - int((1 - sizes.kv_memory_fraction) * TOTAL)) // page_bytes
    assert Engine(device.move(build().double()), replace(sizes, num_pages=77)).num_pages == 77


def test_nothing_is_captured_for_rows_that_no_request_may_have(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    served = Engine(device.move(build(**NEMOTRON).double()), SIZES)
    ahead = DecodingConfig(block_size=B, causal=Causal(block_length=8, ahead=True))
    with pytest.raises(RequestRefused, match="72 positions of a forward"):
        served.add(request("ahead", 0, "multi", decoding=ahead))
    assert served.prepare(ahead) == 0


def test_graphs_of_planned_rows_share_their_page_table_and_their_result(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    models = [device.move(model.double()) for model in (large_model(), small_model())]
    served = two_sizes(*models, page_size=16, max_rows=2)
    served.prepare(drafted(1))
    forwards = served._graphs._captured_forwards
    addresses = {
        (kind.by_draft_model, t.content.data_ptr())
        for kind, forward in forwards.items()
        for t in (forward._hidden_TD, forward._batch.pages_KP)
    }
    assert len(forwards) > 4 == len(addresses)


def test_a_draft_model_that_no_graph_can_hold_is_an_obstacle(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    """Its attention may be another kernel than the model's."""
    flashing = attention.flash_attention("stand-in", KERNELS["vllm"](FakePackages(), device), {})
    reference = attention.resolve(torch.device("cpu"), torch.float64, 8, 16)
    models = [device.move(model.double()) for model in (large_model(), small_model())]
    for kernels, subject in (((flashing, reference), "draft model"), ((reference, flashing), "model")):
        for graphs in (None, True):
            left = list(kernels)
            monkeypatch.setattr(build_module, "resolve", lambda *_, left=left, **__: left.pop(0))
            obstacle = f"the {subject}'s attention, reference, reads rows' lengths on the host"
            if graphs:
                with pytest.raises(ValueError, match=f"graphs=True cannot be honoured: {obstacle}"):
                    two_sizes(*models, page_size=16, graphs=True)
                continue
            served = two_sizes(*models, page_size=16)
            assert served.graph_report()["not_used"] == obstacle and served.prepare(drafted(2)) == 0


def test_a_graph_has_no_longer_rows_than_its_requests() -> None:
    """The longest row sets a kernel's tiles, whatever the reach of all rows of a request."""
    ahead = DecodingConfig(block_size=B, **CAUSAL["linear spec ahead"])
    verified = DecodingConfig(block_size=B, buffer_size=2, **VERIFY["verify exact"])
    for decoding, longest in ((ahead, 3), (verified, 2 * B)):
        assert decoding.planned is not None and decoding.planned.longest > longest
        kinds = planned_kinds(decoding, max_rows=4, adapters=False)
        assert max(kind.longest for kind in kinds) == longest


def test_a_step_without_a_graph_runs_eagerly_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    model = build().double()
    batch = [request(f"r{i}", i, "multi", max_tokens=20, ignore_eos=True) for i in range(3)]
    wanted = [gist(o)[0] for o in Engine(model, SIZES).generate(batch)]
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    served = Engine(device.move(model), SIZES)
    assert [gist(o)[0] for o in served.generate(batch)] == wanted
    report = served.graph_report()
    assert report["captured"] == report["steps_replayed"] == 0 < report["steps_eager"]


def test_a_step_launched_ahead_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    """Nor does what it needs of the host, new pages above all: else the device would stand idle meanwhile."""
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    served = Engine(device.move(build()), SIZES)
    served.prepare(request("", 0, "multi").decoding)
    for i in range(2):
        served.add(request(f"r{i}", i, "multi", max_tokens=60, ignore_eos=True))
    grown = 0
    while served.has_work:
        before, pages = (
            (device.waits.copy(), device.uploads.copy(), served.ahead.num_ahead),
            served.scheduler.pool.num_free,
        )
        served.step()
        if served.ahead.num_ahead > before[2] and served.num_running == 2:
            assert (device.waits, device.uploads) == before[:2]
            grown += served.scheduler.pool.num_free < pages
    assert grown > 1


def test_a_saturated_step_replays_a_narrow_graph_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    """Two rows have one block each of a budget of two, the last one alone two blocks; nothing is captured later."""
    sizes = replace(SIZES, block_budget=2)
    batch = [
        request(f"r{i}", i, "multi", sampling=Sampling(), max_tokens=12 + 8 * i, ignore_eos=True) for i in range(3)
    ]
    model = build().double()
    wanted = [gist(o)[0] for o in Engine(model, replace(sizes, static_shapes=True, overlap=True)).generate(batch)]
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    served = Engine(device.move(model), sizes)
    served.prepare(batch[0].decoding)
    replayed: set[tuple[int, int]] = set()
    graph_for = served._graphs._graph_for

    def spy(kind: StepKind) -> object:
        replayed.add((kind.num_rows, kind.num_slots))
        return graph_for(kind)

    monkeypatch.setattr(served._graphs, "_graph_for", spy)
    for r in batch:
        served.add(r)
    outputs, held = {}, set()
    while served.has_work:
        before, ahead, running = (
            (device.waits.copy(), device.uploads.copy()),
            served.ahead.num_ahead,
            served.num_running,
        )
        outputs |= {o.request_id: o.output.tokens for o in served.step() if o.output is not None}
        if served.ahead.num_ahead > ahead and served.num_running == running:
            assert (device.waits, device.uploads) == before
            held.add(served.buffer.max_blocks)
    assert [outputs[r.request_id] for r in batch] == wanted
    assert (2, 1) in replayed and {slots for _, slots in replayed} == held == {1, 2}
    assert served.graph_report()["steps_eager"] == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernels_layout_is_captured(device: FakeDevice, kernel: str) -> None:
    q, k, v, layout = sequences([(50, [8] * 3), (3, [8] * 3)], page_size=16, seed=6)
    layout = replace(layout, max_q=8)
    wanted = attention.resolve(torch.device("cpu"), q.dtype, 8, 16).bind(layout)(q, k, v)
    choice = attention.flash_attention("stand-in", KERNELS[kernel](FakePackages(), device), {})
    on_device = replace(layout, **{name: device.put(t) for name, t in vars(layout).items() if isinstance(t, Tensor)})
    pages = [device.put(t) for t in (q, k, v)]
    graph = Graph()
    with device.capture(graph):
        out = choice.bind(on_device)(*pages)
    out.content.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(out.content, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("sdar", "all"),
        pytest.param("llada2", "experts", marks=pytest.mark.slow),
        ("llada2", "blocks"),
        pytest.param("llada2", None, marks=pytest.mark.slow),
        pytest.param("dream", "all", marks=pytest.mark.slow),
    ],
)
def test_bfloat16_and_fp8_are_captured(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, family: str, parts: Fp8Parts | None
) -> None:
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    model = device.move(build(**FAMILIES[family]).bfloat16())
    assert isinstance(model, Decoder)
    if parts is not None:
        quantize_weights(model, parts)
    served = Engine(model, SIZES)
    kinds = capture_every_kind(monkeypatch, served)
    outputs = served.generate([replace(r, max_tokens=5) for r in requests(family) if r.decoding.canvas is None])
    assert all(len(o.tokens) == 5 and MASK not in o.tokens and max(o.tokens) < VOCAB for o in outputs)
    assert kinds and served.graph_report()["steps_eager"] == 0


def test_experts_by_sorting_and_grouped_products_are_captured(device: FakeDevice) -> None:
    choice = moe.resolve_experts(CUDA, torch.bfloat16, capability=(9, 0), has_triton=True)
    assert choice.name == "triton+grouped"
    generator = torch.Generator().manual_seed(0)
    for tokens in (3, 200):  # the first goes to the Triton kernels, the second to torch's grouped products
        x, gate, up, down = (
            torch.randn(size, generator=generator).bfloat16()
            for size in ((tokens, 32), (4, 16, 32), (4, 16, 32), (4, 32, 16))
        )
        ids = torch.rand(tokens, 4, generator=generator).topk(2).indices
        weights = torch.rand(tokens, 2, generator=generator)
        arguments = (x, gate, up, down, ids, weights)
        on_device = [device.put(t.clone()) for t in arguments]
        graph = Graph()
        with device.capture(graph):
            out = choice.call(*on_device)
        on_device[4].content.copy_(ids.flip(0))
        graph.replay()
        expected = moe.loop_experts(x, gate, up, down, ids.flip(0), weights)
        torch.testing.assert_close(out.content, expected, rtol=5e-2, atol=5e-2)


def test_a_replayed_steps_forward_is_measured_on_its_own_batch(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    """Programs of several kinds take turns; none reads the batch of another, whose memory is overwritten."""
    attend_by(monkeypatch, KERNELS["vllm"](FakePackages(), device))
    case = StepCase(rows=2, buffer_size=4, prefix=16, steps=12)
    with torch.inference_mode():
        served = filled_engine(device.move(build()), case)
        times = measure_step(served, case)
        assert served.graph_report()["steps_replayed"] > 1 and times.num_tokens == 2 * 4 * 4 > times.num_logits
        assert measure_host(served, case) > 0


@pytest.mark.parametrize(
    ("step", "caught"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense makes the host wait"),
        (lambda x: bool((x > 1).any()), "makes the host wait"),
        (lambda x: x.tolist(), "tolist makes the host wait"),
        (lambda x: x.cpu(), "_to_copy to the host makes the host wait"),
        (lambda x: x[x > 1], "aten.index makes the host wait"),
        (lambda x: x.nonzero(), "aten.nonzero makes the host wait"),
        (lambda x: x.repeat_interleave((x > 0).long()), "aten.repeat_interleave makes the host wait"),
        (lambda x: x + torch.ones(3), "takes tensors of the device and of the host"),
        (lambda x: x.index_select(0, torch.tensor([1])), "takes tensors of the device and of the host"),
        (lambda x: torch.tensor([1.0], device=x.device), "torch.tensor copies from the host"),
        (lambda x: x.copy_(torch.ones(3)), "copy_ from the host copies from the host"),
        (lambda x: torch.ones(3).to(x.device), "_to_copy from the host copies from the host"),
    ],
)
def test_what_no_graph_can_capture_is_caught(device: FakeDevice, step: Callable[[Tensor], Any], caught: str) -> None:
    x = torch.arange(3.0, device=CUDA)
    with pytest.raises(AssertionError, match=caught), device.capture(Graph()):
        step(x)


def test_a_graph_repeats_the_devices_work_and_nothing_else(device: FakeDevice) -> None:
    """What was on the host when it was captured stays as it was, and what a graph made is another's to overwrite."""
    total, step, pool = torch.zeros(2, device=CUDA), 1.0, torch.cuda.graph_pool_handle()
    graph, other = Graph(), Graph()
    with device.capture(graph, pool):
        made = total + 10
        total[1:].add_(step)
    step = 5.0
    assert isinstance(total, OnDevice) and total.tolist() == [0, 0]
    graph.replay()
    graph.replay()
    assert total.tolist() == [0, 2] and made.tolist() == [10, 11]
    with device.capture(other, pool):
        total.mul_(step)
    other.replay()
    assert total.tolist() == [0, 10] and made.isnan().all()


def test_a_layout_without_its_longest_row_is_read_back(device: FakeDevice) -> None:
    bounds = torch.tensor([0, 2, 5], device=CUDA)
    layout = RowLayout(
        cu_seqlens_q=bounds,
        kv_lens_R=bounds[1:],
        page_table_RP=torch.zeros(2, 3, dtype=torch.int64, device=CUDA),
        page_size=4,
    )
    assert layout.for_kernels().max_q == 3 and device.waits["aten._local_scalar_dense"] == 1
    with device.capture(Graph()):
        assert replace(layout, max_q=3).for_kernels().max_k == 12
