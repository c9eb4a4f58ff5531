"""Checks that must pass on a GPU before its times mean anything: every kernel equals its definition, a replayed step
equals the eager step, and a decoding step never waits for the device.

All checks also run on a CPU, at smaller sizes and without captures; the rows say so. Sizes for a GPU are
chosen so that its kernels take them: bfloat16, 128 channels, 32-token pages.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.step_timing import StepCase, filled_engine
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Soft
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.step.batch import Batch
from mbd_core.engine.step.kinds import StepKind
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import with_shared
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.ops.attention.choice import resolve
from mbd_core.ops.attention.definition import RowLayout, paged_attention
from mbd_core.ops.experts import fp8
from mbd_core.ops.experts.choice import loop_experts, resolve_experts
from mbd_core.ops.experts.expert_products import SharedExperts, expert_parts
from mbd_core.ops.launch import triton_serves
from mbd_core.ops.layer.confidence import confidence
from mbd_core.ops.layer.residual_norm import sum_experts

CheckRow = dict[str, object]

PAGE = 32
PLANNED_TOLERANCE = 0.05
"""Of the largest hidden state: a graph's products have other shapes, and so other roundings in bfloat16."""
GPU_DTYPE = torch.bfloat16


class CheckFailed(RuntimeError):
    """A kernel, a captured step or a steady step gives a wrong result; the message says where."""


RELEASED_SIZE = {"sdar": "sdar-8b", "llada2": "llada2-mini", "nemotron": "nemotron-8b"}


def check_config(family: str, *, on_gpu: bool) -> ModelConfig:
    """A small model of a `RELEASED_SIZE`: on a GPU with the head size and blocks of the released model, else tiny."""
    if not on_gpu:
        return SHAPES[f"tiny-{family}"]
    shape = SHAPES[RELEASED_SIZE[family]]
    moe = None if shape.moe is None else replace(shape.moe, num_experts=32, intermediate_size=128)
    return replace(
        shape,
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        max_positions=1024,
        mask_token_id=2047,
        eos_token_ids=(2046,),
        moe=moe,
    )


def check_model(family: str, device: torch.device) -> Decoder:
    """`check_config` with random weights, in the dtype of the device's checks."""
    on_gpu = device.type == "cuda"
    config = check_config(family, on_gpu=on_gpu)
    return random_model(config, device=device, dtype=GPU_DTYPE if on_gpu else torch.float32, std=0.1)


METHODS: dict[str, DecodingConfig] = {
    "single": DecodingConfig(block_size=32, buffer_size=1, tau_m2t=0.4),
    "multi": DecodingConfig(block_size=32, buffer_size=4, tau_m2t=0.4, tau_add=0.1),
    "t2t": DecodingConfig(block_size=32, buffer_size=2, tau_m2t=0.4, t2t=T2T(tau=0.2, max_edits=4)),
    "soft": DecodingConfig(block_size=32, buffer_size=3, tau_m2t=0.4, soft=Soft(stop_confidence=0.5)),
    "entropy": DecodingConfig(block_size=32, buffer_size=2, entropy=EntropyBound(gamma=2.0)),
    "parts": DecodingConfig(block_size=32, buffer_size=2, tau_m2t=0.4, sub_block=8),
    "several": DecodingConfig(block_size=32, buffer_size=2, tau_m2t=0.4, tokens_per_step=4),
    "margin": DecodingConfig(block_size=32, buffer_size=2, tau_m2t=0.4, fallback="margin"),
}
PLANNED: dict[str, tuple[str, DecodingConfig]] = {
    "token by token": ("nemotron", DecodingConfig(block_size=32, causal=Causal(method="ar"))),
    "verified": ("sdar", DecodingConfig(block_size=32, buffer_size=2, verify=Verify(exact=True, store="causal"))),
}
"""The family and the decoding of methods whose rows the host plans."""
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, top_p=0.9, seed=2),
    Sampling(logit_bias=((3, 2.0),), repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5),
    Sampling(temperature=0.8, min_p=0.05, frequency_penalty=0.5, seed=3),
)


def check_requests(config: ModelConfig, *, max_tokens: int) -> list[Request]:
    """Every method, and every kind of work that a step may have to do for it, without adapters."""
    generator = torch.Generator().manual_seed(0)
    out: list[Request] = []
    for number, (name, decoding) in enumerate(METHODS.items()):
        for sampling in SAMPLINGS if name == "multi" else SAMPLINGS[:1]:
            prompt = torch.randint(config.vocab_size - 8, (20 + 30 * number,), generator=generator).tolist()
            out.append(
                Request(
                    request_id=f"{name} {len(out)}",
                    prompt=tuple(prompt),
                    max_tokens=max_tokens,
                    decoding=decoding,
                    sampling=sampling,
                    ignore_eos=True,
                    logprobs=sampling.penalises,
                    top_logprobs=5 * sampling.penalises,
                )
            )
    return out


def graphs_are_eager(
    model: Decoder, *, adapters: Mapping[str, Path] | None = None, max_tokens: int = 48, max_rows: int = 4
) -> CheckRow:
    """Serve all requests eagerly, capture the kinds of steps that came up, and serve them again from graphs.

    With `adapters`, folders by name, requests have one of them or none, in turn. Raises `CheckFailed` if a token
    differs, or if on a GPU a step of the second time was not a replay.
    """
    on_gpu = model.model.norm.weight.is_cuda
    sizes = EngineConfig(
        max_rows=max_rows,
        num_pages=256,
        page_size=PAGE,
        static_shapes=True,
        overlap=False,
        max_step_seconds=1e6,  # prompts are cut at the same places in both runs
        max_adapters=len(adapters or {}),
        max_rank=8,
    )
    requests = check_requests(model.config, max_tokens=max_tokens)
    if adapters:
        names = cycle((None, *adapters))
        requests = [replace(request, adapter=next(names)) for request in requests]
    eager_engine = _with_adapters(Engine(model, replace(sizes, graphs=False)), adapters or {})
    expected, kinds = _serve(eager_engine, requests)
    graph_engine = _with_adapters(Engine(model, sizes), adapters or {})
    start = time.perf_counter()
    num_captured = graph_engine._graphs.capture(kinds)
    capture_seconds = time.perf_counter() - start
    result, _ = _serve(graph_engine, requests)
    differences = [name for name, output in expected.items() if result[name].tokens != output.tokens]
    if differences:
        raise CheckFailed(f"replayed steps decode other tokens than eager ones, for {', '.join(sorted(differences))}")
    report = graph_engine.graph_report()
    if on_gpu and (num_captured != len(kinds) or report["steps_eager"]):
        raise CheckFailed(
            f"of {len(kinds)} kinds {num_captured} were captured, {report['steps_eager']} steps ran eagerly"
        )
    return {
        "model": model.config.architecture,
        "attention": graph_engine.attention.name,
        "kinds": len(kinds),
        "captured": num_captured,
        "capture_s": capture_seconds,
        "replayed": report["steps_replayed"],
        "eager": report["steps_eager"],
        "same": True,
    }


def planned_forwards_are_eager(method: str, device: torch.device, *, max_tokens: int = 48) -> CheckRow:
    """Each forward of a method of `PLANNED` from the graphs captured at start, beside the same forward eagerly.

    Raises `CheckFailed` if hidden states differ by more than roundings, or if on a GPU a forward was not a replay.
    """
    family, decoding = PLANNED[method]
    model = check_model(family, device)
    engine = Engine(model, EngineConfig(max_rows=4, num_pages=256, page_size=PAGE, static_shapes=True))
    num_captured, errors = engine.prepare(decoding), []
    replay = engine._graphs.forward

    def beside_eager(runner: ModelRunner, batch: Batch) -> Tensor:
        replayed_AD = replay(runner, batch).clone()
        eager_AD = runner.forward(batch)
        errors.append(float((replayed_AD - eager_AD).abs().max() / eager_AD.abs().max().clamp(min=1e-6)))
        return replayed_AD

    engine._graphs.forward = beside_eager  # type: ignore[method-assign]
    prompts = [tuple(range(20 + i, 50 + 11 * i)) for i in range(6)]
    engine.generate(
        [
            Request(request_id=str(i), prompt=prompt, max_tokens=max_tokens, decoding=decoding, ignore_eos=True)
            for i, prompt in enumerate(prompts)
        ]
    )
    report, largest = engine.graph_report(), max(errors)
    if not largest <= PLANNED_TOLERANCE:
        raise CheckFailed(f"a replayed forward of {method} differs from the eager one by {largest:.3g}")
    if device.type == "cuda" and (report["steps_eager"] or not report["steps_replayed"]):
        raise CheckFailed(f"{report['steps_eager']} forwards of {method} ran eagerly, {len(errors)} were asked for")
    return {
        "model": model.config.architecture,
        "method": method,
        "captured": num_captured,
        "replayed": report["steps_replayed"],
        "eager": report["steps_eager"],
        "largest_error": largest,
    }


def _with_adapters(engine: Engine, adapters: Mapping[str, Path]) -> Engine:
    for name, folder in adapters.items():
        engine.load_adapter(name, folder)
    return engine


def _serve(engine: Engine, requests: list[Request]) -> tuple[dict[str, Output], set[StepKind]]:
    """The outputs by request, and the kinds of the static steps, also of steps that store prompts."""
    for request in requests:
        engine.add(request)
    outputs: dict[str, Output] = {}
    kinds: set[StepKind] = set()
    with torch.inference_mode():
        while engine.has_work:
            plan = engine.schedule()
            if engine._is_static(plan):
                kinds.add(plan.kind)
            for step in engine.collect(engine.launch(plan)):
                if step.output is not None:
                    outputs[step.request_id] = step.output
    return outputs, kinds


def steady_steps_never_wait(model: Decoder, case: StepCase) -> CheckRow:
    """Run steps that only decode while torch raises on synchronisation; the host waits for a report by an event."""
    engine = filled_engine(model, case)
    for _ in range(4):
        engine.step()
    on_gpu = model.model.norm.weight.is_cuda
    with _waits_are_errors() if on_gpu else nullcontext():
        for _ in range(case.steps):
            engine.step()
    engine.land()
    return {"steps": case.steps, "checked": on_gpu, **engine.graph_report()}


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    mode_before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode_before)


def kernel_rows(device: torch.device, *, small: bool) -> Iterator[CheckRow]:
    """Each kernel beside its definition: name, size, largest error. After the last row, raises `CheckFailed` if a
    kernel is off."""
    checks: tuple[Callable[..., CheckRow], ...] = (
        _attention_row,
        _long_attention_row,
        _experts_row,
        _shared_experts_row,
        _fp8_experts_row,
        partial(_fp8_experts_row, block=fp8.RELEASED),
        _fp8_linear_row,
        _confidence_row,
    )
    generator = torch.Generator(device=device).manual_seed(0)
    wrong = []
    for check in checks:
        row = check(device, GPU_DTYPE if device.type == "cuda" else torch.float32, generator, small)
        yield row
        if row["right"] is False:
            wrong.append(f"{row['kernel']} by {row['largest_error']}")
    if wrong:
        raise CheckFailed(f"these kernels differ from their definitions: {', '.join(wrong)}")


def _row(kernel: str, size: str, result: Tensor, expected: Tensor, *, rtol: float, atol: float) -> CheckRow:
    """`result` beside `expected`; the error may be the sum of both tolerances, as in `torch.testing.assert_close`."""
    error = (result.float() - expected.float()).abs()
    right = bool(result.isfinite().all()) and bool((error <= atol + rtol * expected.float().abs()).all())
    return {"kernel": kernel, "size": size, "largest_error": float(error.max()), "right": right}


def _attention_row(device: torch.device, dtype: torch.dtype, generator: torch.Generator, small: bool) -> CheckRow:
    return _attention(device, dtype, generator, prefixes=(40, 8) if small else (512, 2048, 31, 1, 700, 64, 5, 1024))


def _long_attention_row(device: torch.device, dtype: torch.dtype, generator: torch.Generator, small: bool) -> CheckRow:
    return _attention(device, dtype, generator, prefixes=(100,) if small else (16000,))


def _attention(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator, *, prefixes: tuple[int, ...]
) -> CheckRow:
    """Two slots of each sequence, the last sequence's second slot not resident. On a GPU values that no row may read
    are NaN; the CPU's attention masks them instead."""
    heads, kv_heads, channels, slots, size = 16, 4, 128, 2, 32
    kernel = resolve(device, dtype, channels, PAGE, num_heads=heads, num_kv_heads=kv_heads)
    width = -(-(max(prefixes) + slots * size) // PAGE)
    pages = len(prefixes) * width + 1
    filler = torch.nan if device.type == "cuda" else 0.0
    k, v = torch.full((2, pages, PAGE, kv_heads, channels), filler, dtype=dtype, device=device)
    table = (torch.randperm(pages - 1, generator=generator, device=device) + 1).view(len(prefixes), width)
    lens = [prefix + size * (slot + 1) for prefix in prefixes for slot in range(slots)]
    lens[-1] = 1
    for row in range(len(prefixes)):
        places = torch.arange(max(lens[row * slots : (row + 1) * slots]), device=device)
        for part in (k, v):
            values = torch.randn(len(places), kv_heads, channels, generator=generator, device=device)
            part[table[row, places // PAGE], places % PAGE] = values.to(dtype)
    q = torch.randn(len(lens) * size, heads, channels, generator=generator, device=device).to(dtype)
    layout = RowLayout(
        cu_seqlens_q=torch.arange(0, len(q) + 1, size, device=device),
        kv_lens_R=torch.tensor(lens, device=device),
        page_table_RP=table.repeat_interleave(slots, 0),
        page_size=PAGE,
        max_q=size,
        rows_each=slots,
    )
    expected = paged_attention(q.float(), k.float(), v.float(), layout)
    result = kernel.bind(layout)(q, k, v)
    size_text = f"{len(prefixes)} x {slots} slots, prefix up to {max(prefixes)}"
    return _row(f"attention: {kernel.name}", size_text, result, expected, rtol=2e-2, atol=1e-2)


def _expert_layer(dtype: torch.dtype, generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
    """x, gate, up, down, ids, weights: LLaDA2-mini's experts for 64 tokens; if `small`, few and small experts."""
    tokens, depth, width, experts, experts_per_token = (9, 32, 48, 6, 2) if small else (64, 2048, 512, 256, 8)
    device = generator.device

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5).to(dtype)

    ids = torch.rand(tokens, experts, generator=generator, device=device).topk(experts_per_token).indices
    weights = torch.rand(tokens, experts_per_token, generator=generator, device=device)
    x = draw(tokens, depth) * depth**0.5
    return x, draw(experts, width, depth), draw(experts, width, depth), draw(experts, depth, width), ids, weights


def _exact_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The experts' sum in float32: in bfloat16 the definition itself is off by 0.03 where experts cancel."""
    return loop_experts(x.float(), gate.float(), up.float(), down.float(), ids, weights)


def _experts_row(device: torch.device, dtype: torch.dtype, generator: torch.Generator, small: bool) -> CheckRow:
    x, gate, up, down, ids, weights = _expert_layer(dtype, generator, small)
    experts = resolve_experts(device, dtype, expert_size=gate.shape[1], hidden_size=gate.shape[2])
    result = experts.call(x, gate, up, down, ids, weights)
    expected = _exact_experts(x, gate, up, down, ids, weights)
    return _row(
        f"experts: {experts.name}", f"{len(x)} tokens, {len(gate)} experts", result, expected, rtol=3e-2, atol=2e-2
    )


def _shared_experts_row(device: torch.device, dtype: torch.dtype, generator: torch.Generator, small: bool) -> CheckRow:
    """Two shared experts among the routed experts."""
    name = "experts: the shared among them"
    if not triton_serves(device, dtype):
        reason = "needs CUDA and Triton"
        return {"kernel": name, "size": "", "largest_error": None, "right": None, "not_run": reason}
    x, gate, up, down, ids, weights = _expert_layer(dtype, generator, small)
    wide_gate, wide_up, wide_down = gate[:2].flatten(0, 1), up[2:4].flatten(0, 1), torch.cat((*down[:2],), 1)
    exact_x = x.float()
    expected = _exact_experts(x, gate, up, down, ids, weights)
    expected += F.linear(
        F.silu(F.linear(exact_x, wide_gate.float())) * F.linear(exact_x, wide_up.float()), wide_down.float()
    )
    joint = with_shared(ids, weights, len(gate), 2)
    parts = expert_parts(x, gate, up, down, *joint, shared=SharedExperts(wide_gate, wide_up, wide_down))
    result = sum_experts(parts, dtype)
    return _row(name, f"{len(x)} tokens, {len(gate)} experts", result, expected, rtol=3e-2, atol=2e-2)


def _fp8_experts_row(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    small: bool,
    *,
    block: fp8.BlockShape | None = None,
) -> CheckRow:
    name = "experts in FP8" if block is None else "experts in FP8 blocks"
    x, *stacks, ids, weights = _expert_layer(dtype, generator, small)
    quantized = [fp8.quantize(stack, block=block) for stack in stacks]
    obstacle = fp8.fp8_obstacle(stacks[0], block=block)
    if obstacle is not None:
        return {"kernel": name, "size": "", "largest_error": None, "right": None, "not_run": obstacle}
    result = fp8.fp8_experts(x, quantized[0], quantized[1], quantized[2], ids, weights)
    gate, up, down = (fp8.dequantize(stack, dtype) for stack in quantized)
    expected = _exact_experts(x, gate, up, down, ids, weights)
    return _row(name, f"{len(x)} tokens, {len(gate)} experts", result, expected, rtol=3e-2, atol=2e-2)


def _fp8_linear_row(device: torch.device, dtype: torch.dtype, generator: torch.Generator, small: bool) -> CheckRow:
    """FP8 on a GPU rounds the inputs too: the bound covers both roundings."""
    tokens, inner, outer = (9, 32, 48) if small else (64, 2048, 3072)
    weight = torch.randn(outer, inner, generator=generator, device=device) / inner**0.5
    obstacle = fp8.fp8_obstacle(weight)
    if obstacle is not None:
        return {"kernel": "product in FP8", "size": "", "largest_error": None, "right": None, "not_run": obstacle}
    x = torch.randn(tokens, inner, generator=generator, device=device).to(dtype)
    result = fp8.linear(x, fp8.quantize(weight))
    bound = (x.float().abs() @ weight.abs().T) * 0.14 + 1e-2
    error = (result.float() - x.float() @ weight.T).abs()
    return {
        "kernel": "product in FP8",
        "size": f"{tokens} x {inner} x {outer}",
        "largest_error": float(error.max()),
        "right": bool((error <= bound).all()),
    }


def _confidence_row(device: torch.device, dtype: torch.dtype, generator: torch.Generator, small: bool) -> CheckRow:
    positions, vocabulary = (5, 500) if small else (64, 157184)
    if device.type != "cuda":
        return {"kernel": "confidence", "size": "", "largest_error": None, "right": None, "not_run": "needs CUDA"}
    logits = torch.randn(positions, vocabulary, generator=generator, device=device).mul_(4).to(dtype)
    vocab = Vocab(mask_token_id=3, size=vocabulary - vocabulary // 10)
    token, probability = confidence(logits, mask_token_id=vocab.mask_token_id, size=vocab.size)
    expected_token, expected = vocab.likeliest(logits)
    row = _row("confidence", f"{positions} x {vocabulary}", probability, expected, rtol=1e-3, atol=1e-7)
    return {**row, "right": row["right"] is True and torch.equal(token, expected_token)}
