"""On a GPU: model and step in Triton kernels, compared with the same computation in torch's operations.

The router and the layers differ only by rounding. A step's work on the Block Buffer is bitwise equal.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu.checks import CheckFailed, CheckRow, check_model
from benchmarks.step_timing import StepCase, filled_engine
from mbd_core.decoding.blocks.work import ALL_WORK, StepWork
from mbd_core.engine.step.kinds import StepKind
from mbd_core.engine.step.static_step import static_step
from mbd_core.models.decoder import Decoder
from mbd_core.models.fused import fuse
from mbd_core.models.mlp import Router
from mbd_core.models.shapes import SHAPES
from mbd_core.ops.launch import triton_serves

WORKS = (StepWork(), StepWork(revises=True, softens=True), replace(ALL_WORK, adapts=False))


def kernel_form_rows(device: torch.device) -> Iterator[CheckRow]:
    """One row per comparison. Raises `CheckFailed` if two forms differ."""
    if not triton_serves(device, torch.bfloat16):
        for name in ("router", "layers", "steps"):
            yield {"kernel": f"{name} by kernels", "right": None, "not_run": "needs CUDA and Triton"}
        return
    yield router_row(device)
    for family in ("sdar", "llada2"):
        model, case = check_model(family, device), StepCase(rows=3, buffer_size=3, prefix=64, steps=6)
        yield layers_row(model, case)
        yield steps_row(model, case)


def router_row(device: torch.device) -> CheckRow:
    """LLaDA2-mini's router: the share of tokens with the same experts. The two forms round the logits differently."""
    config = SHAPES["llada2-mini"]
    assert config.moe is not None
    generator = torch.Generator(device=device).manual_seed(0)
    router = Router(config.hidden_size, config.moe).to(device, torch.bfloat16).requires_grad_(False)
    router.weight.normal_(0.0, 0.02, generator=generator)
    router.expert_bias.normal_(0.0, 0.1, generator=generator)
    x_TD = torch.randn(256, config.hidden_size, generator=generator, device=device).bfloat16()
    with torch.no_grad():
        expected, weights = router(x_TD)
    with torch.inference_mode():
        result, result_weights = router(x_TD)
    is_same = (result.sort(-1).values == expected.sort(-1).values).all(-1)
    error = float((result_weights.sum(-1) - weights.sum(-1)).abs().max())
    share = float(is_same.float().mean())
    if share < 0.98 or error > 1e-3:
        raise CheckFailed(f"the router by kernels: {share:.3f} of the tokens have its experts, weights off by {error}")
    return {"kernel": "router by kernels", "size": "256 tokens", "largest_error": error, "right": True}


def layers_row(model: Decoder, case: StepCase) -> CheckRow:
    """The hidden states of a decoding batch by kernels. A token's error is its distance from the torch form's state,
    as a share of that state's norm.

    In a dense model the error of every token is bounded. In a mixture of experts rounding sends some tokens to other
    experts, which changes them by far more. There the median and the share of such tokens are bounded.
    """
    engine = filled_engine(model, case)
    for _ in range(2):
        engine.step()
    engine.land()
    runner, batch = engine.runner, engine.runner.last_batch
    assert batch is not None
    hidden = []
    for kernels in (True, False):
        form = fuse(model, num_positions=4096, kernels=kernels)
        attend = runner.bind(batch)
        hidden.append(form.forward(batch.input_ids_T, batch.positions_T, attend, live=batch.live_T).float())
    live_rows = slice(None) if batch.live_T is None else batch.live_T
    result, expected = (states[live_rows] for states in hidden)
    error_T = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
    engine.close()
    if model.config.moe is None:
        error, right = float(error_T.max()), bool((error_T < 5e-2).all())
    else:
        error = float(error_T.median())
        right = error < 2e-2 and float((error_T > 0.1).float().mean()) < 0.2
    if not right:
        raise CheckFailed(f"{model.config.architecture}: layers by kernels are off by {error}, a share of the norm")
    return {
        "kernel": "layers by kernels",
        "size": model.config.architecture,
        "largest_error": error,
        "right": True,
    }


def steps_row(model: Decoder, case: StepCase) -> CheckRow:
    """One step done twice from the same state: with its work on the Block Buffer compiled, and eagerly."""
    engine = filled_engine(model, replace(case, static=True, graphs=False))
    state, buffer = engine._state, engine.buffer
    for _ in range(case.steps):
        engine.step()
        for work in WORKS:
            kind = StepKind(num_rows=case.rows, num_slots=case.buffer_size, num_asked=None, work=work)
            buffer_before, last_before, results = buffer.save_all(), state.runner.last_RD.clone(), []
            for compiled in (True, False):
                report = static_step(state, kind, num_pages=state.tables_RP.shape[1], compiled=compiled)
                results.append([report.clone(), *buffer.save_all()])
                buffer.restore_all(buffer_before)
                state.runner.last_RD.copy_(last_before)
            if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
                raise CheckFailed(f"{model.config.architecture}: a compiled step is not the step ({work})")
    engine.close()
    return {"kernel": "compiled steps", "size": model.config.architecture, "largest_error": 0.0, "right": True}
