"""S2D2's self-verification with its recorded draws, in the plain loop and in the engine: every forward in its order.

Not offered here, so skipped: acceptance of refused positions by their ratio, routing by a bandit, the older rule of
short spans, leading tokens of a draft in order without keys that are stored so, stale keys, a remainder of the quota.
"""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from block_checks import before, loaded, with_config
from safetensors.torch import load_file
from torch import Tensor

from mbd_core.decoding.blocks.config import T2T, DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Draw, Vocab
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.canvas.plan import CanvasPlan
from mbd_core.decoding.causal.verified import VerifyingDecoder
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder
from mbd_core.plain_loops import ContiguousCache, forward_canvas, prefix_rows, run_planned

NOT_OFFERED = {
    "ssd_ratio_threshold": lambda value: True,
    "always_check_high_confidence": bool,
    "legacy_ssd_span_strategy": bool,
    "use_block_cache": bool,
    "prefill_mask_additive01": bool,
    "allow_resample": lambda value: not value,
    "do_verify_policy": lambda value: value == "contextual_bandit_ucb",
}


class RecordedNoise:
    """The draws of a case, in their order; the inverse of the cumulative weights gives a token."""

    def __init__(self, draws: list[dict[str, Any]]) -> None:
        self._draws, self._refusal = deque(draws), 0.0

    def uniforms(self, draw: Draw) -> Tensor:
        record = self._draws.popleft()
        assert record["kind"] == "accept" and len(record["u"]) == len(draw.position_P)
        if self._draws and self._draws[0]["kind"] == "resample":
            (self._refusal,) = self._draws.popleft()["u"]
        return torch.tensor(record["u"])

    def tokens(self, weight_PV: Tensor, draw: Draw) -> Tensor:
        total_PV = weight_PV.double().cumsum(-1)
        return (total_PV / total_PV[:, -1:] <= self._refusal).sum(-1)


def check_verified(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    for name, refuses in NOT_OFFERED.items():
        if name in inputs and refuses(inputs[name]):
            pytest.skip(f"not offered: {name}={inputs[name]}")
    if inputs.get("draft_ver") and not inputs["cache_ver"]:
        pytest.skip("not offered: draft_ver without cache_ver")
    if inputs.get("block_length", 1) % inputs.get("denoising_steps", 1):
        pytest.skip("not offered: a remainder of the quota")
    model, request = request_of(folder, case)
    plain = decoder_of(model, request, inputs)
    kinds: list[str] = []
    positions: list[list[int]] = []
    first_logits: list[Tensor] = []

    def watch(plan: CanvasPlan, cache: ContiguousCache) -> None:
        kinds.append({"draft": "D", "judge": "V", "store": "S"}[plain.phase])
        if plain.phase == "judge":
            positions.append(plain.judged_positions)
            if "tensors" in case and not first_logits:
                with torch.inference_mode():
                    first_logits.extend(forward_canvas(model, cache, plan.queries, torch.device("cpu")))

    run_planned(model, plain, prefix=prefix_rows(request), watch=watch)
    answer = expected["tokens"][len(request.prompt) :]
    is_cut = not request.ignore_eos and (end := model.config.eos_token_ids[0]) in plain.tokens
    found_tokens = before(plain.tokens, end) if is_cut else plain.tokens
    assert found_tokens[: len(answer)] == (before(answer, end) if is_cut else answer)
    wanted_kinds = expected["kinds"].removeprefix("P")
    if case["name"].startswith("fast") and len(request.prompt) % request.decoding.block_size == 0:
        wanted_kinds = "S" + wanted_kinds  # the prefill of the last whole block gives its token
    if not case["name"].startswith("fast"):
        wanted_kinds = wanted_kinds.removesuffix("S")  # the last block is never stored
    found = "".join(kinds)
    assert wanted_kinds.startswith(found) if is_cut else found == wanted_kinds
    assert positions == [v["positions"] for v in expected["verifications"]][: len(positions)]
    engine = Engine(model, EngineConfig(max_rows=1))
    engine.add(request)
    sequence = engine.scheduler.find("case")
    assert sequence is not None
    sequence.decoder = decoder_of(model, request, inputs)
    (output,) = [step.output for step in iter_steps(engine) if step.output is not None]
    assert list(output.tokens) == found_tokens
    assert output.counts.num_forwards == len(kinds)
    if "tensors" in case:
        check_verifier(folder, case, torch.cat(first_logits), request.decoding)


def iter_steps(engine: Engine) -> Any:
    while engine.has_work:
        yield from engine.step()


def check_verifier(folder: Path, case: dict[str, Any], logits: Tensor, decoding: DecodingConfig) -> None:
    """The logits of the first verification, from its own rows behind the prefix of a plain run."""
    first = case["expected"]["verifications"][0]["positions"]
    reference = load_file(folder / "logits.safetensors")[case["name"]].float()
    reference = reference[0] if reference.ndim == 3 else reference
    start = first[0] // decoding.block_size * decoding.block_size
    at = torch.tensor(first) - start - int(decoding.carry)
    torch.testing.assert_close(logits, reference[at], atol=1e-3, rtol=0)


def request_of(folder: Path, case: dict[str, Any]) -> tuple[Decoder, Request]:
    inputs, family = case["inputs"], case["name"].split("_")[0]
    size, length = inputs.get("block_length") or inputs["block_size"], len(inputs["prompt"])
    stop = inputs.get("eos_id") or inputs.get("stop_token") or (inputs.get("stopping_criteria_idx") or [None])[0]
    model = with_config(loaded(folder / case["checkpoint"]), block_size=size)
    if stop is not None:
        model = with_config(model, eos_token_ids=(stop,))
    if family == "fast":  # whole blocks, and one token
        end = (length // size + inputs["max_new_tokens"] // size) * size + 1
    else:
        end = -(-(length + inputs["gen_length"]) // size) * size
    fields: dict[str, Any] = {"tau_m2t": inputs.get("confidence_threshold", inputs.get("threshold"))}
    if inputs.get("remasking_strategy") == "low_confidence_static":
        fields["tau_m2t"] = 1.0
    if family == "fast":
        fields |= {"carry": True, "sub_block": inputs["small_block_size"]}
    if family == "llada2":
        fields["t2t"] = T2T(tau=min(1.0, inputs["editing_threshold"]), max_edits=inputs["max_post_steps"])
    fields["tokens_per_step"] = size // inputs.get("denoising_steps", size)
    decoding = DecodingConfig(block_size=size, verify=rule_of(inputs), **fields)
    return model, Request(
        request_id="case",
        prompt=tuple(inputs["prompt"]),
        max_tokens=end - length,
        decoding=decoding,
        ignore_eos=stop is None,
    )


def rule_of(inputs: dict[str, Any]) -> Verify:
    fields: dict[str, Any] = {}
    fields["route"] = {"mask_span_length": "span", "score_threshold": "score", "score_hysteresis": "hysteresis"}[
        inputs["do_verify_policy"]
    ]
    if fields["route"] == "span":
        fields["min_span"] = inputs["min_ssd_span_length"]
    else:
        is_static = inputs["do_verify_score_type"] == "difference_static"
        is_margin = inputs["token_acceptance_estimator"] == "hard_margin_threshold"
        fields |= {"cost": inputs["score_penalty_coef"], "cost_of": "verification" if is_static else "confident"}
        fields |= {"estimate": "margin" if is_margin else "entropy"}
        if is_margin:
            fields["tau_margin"] = inputs.get("ssd_confidence_margin_threshold", 0.05)
    if fields["route"] == "score":
        fields["tau_score"] = inputs["do_verify_score_threshold"]
    if fields["route"] == "hysteresis":
        fields |= {"tau_on": inputs["hysteresis_threshold_on"], "tau_off": inputs["hysteresis_threshold_off"]}
    fields["temper"] = inputs.get("ssd_ratio_tempering_factor", 1.0)
    fields["store"] = "causal" if inputs.get("cache_ver") else "block"
    fields["lead"] = "causal" if inputs.get("draft_ver") else "block"
    return Verify(**fields)


def decoder_of(model: Decoder, request: Request, inputs: dict[str, Any]) -> VerifyingDecoder:
    config = model.config
    return VerifyingDecoder(
        request,
        eos_token_ids=config.eos_token_ids,
        vocab=Vocab(config.mask_token_id, config.vocab_size),
        noise=RecordedNoise(inputs["draws"]),
    )


CHECKS = {("s2d2", family): check_verified for family in ("sdar", "llada2", "fast")}
