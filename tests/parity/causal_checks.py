"""Nemotron-Labs-Diffusion in the engine: single tokens, self-speculation, diffusion; every forward in its order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from block_checks import before, loaded, with_config

from mbd_core.decoding.blocks.causal_config import Causal, Thinking
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.canvas.plan import Query
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine


def check_generation(folder: Path, case: dict[str, Any]) -> None:
    """Tokens, forwards, and the kind, tokens and place of each.

    The prompt's last token is a decode forward here, which gives the first token; `dlm` does not count it. A token
    that ends the answer as a block's seed is noticed at once here, and after one more forward in the reference.
    """
    inputs, expected, eos = case["inputs"], case["expected"], case["inputs"].get("eos_id")
    causal = causal_of(case["kind"], inputs)
    if case.get("quirk") and causal.thinking is not None:
        pytest.skip(f"quirk of the reference: {case['quirk_note']}")
    model = with_config(loaded(folder), **({} if eos is None else {"eos_token_ids": (eos,)}))
    request = Request(
        request_id="case",
        prompt=tuple(inputs["prompt"]),
        max_tokens=inputs["max_new_tokens"],
        decoding=DecodingConfig(block_size=model.config.block_size, causal=causal),
        ignore_eos=eos is None,
    )
    output, rows = run(Engine(model, EngineConfig(max_rows=1)), request)
    assert list(output.tokens) == before(expected["generated"], eos)[: request.max_tokens]
    assert output.counts.num_forwards == len(rows)
    has_seed = causal.context == "causal"
    if has_seed:
        assert (rows[0].start, rows[0].causal) == (len(request.prompt) - 1, True)
    rest = rows[has_seed:]
    if causal.method == "dlm":
        wanted = [(kind == "denoise", length, start) for kind, length, start in expected["forward_list"][1:]]
        found = [(len(q.logits_at) > 1 or not q.causal, q.stop - q.start, q.start) for q in rest]
        if not has_seed:  # no row of a store is causal there
            found = [(len(q.logits_at) > 0, *place) for q, (_, *place) in zip(rest, found, strict=True)]
        assert found == wanted or case.get("quirk")
    elif causal.method == "linear_spec":
        assert len(rows) == expected["nfe"]
        for round_ in expected["rounds"]:
            drafts, verify = rest[: round_["draft_forwards"]], rest[round_["draft_forwards"]]
            rest = rest[round_["draft_forwards"] + 1 :]
            assert not any(q.causal for q in drafts) and verify.causal
            assert {q.start for q in (*drafts, verify)} == {round_["cache_len"]}
            assert verify.tokens.tolist() == round_["block"]
        assert not rest
    else:
        assert len(rows) == expected["nfe"] and all(q.causal and q.stop - q.start == 1 for q in rows)


def causal_of(kind: str, inputs: dict[str, Any]) -> Causal:
    thinking = None
    if "max_thinking_tokens" in inputs:
        thinking = Thinking(budget=inputs["max_thinking_tokens"], end_token_id=inputs["end_think_token_id"])
    if kind == "ar":
        return Causal(method="ar", thinking=thinking)
    shared: dict[str, Any] = {"block_length": inputs["block_length"], "thinking": thinking}
    if kind == "dlm":
        context = "causal" if inputs["causal_context"] else "full"
        return Causal(method="dlm", tau=inputs["threshold"], context=context, **shared)
    return Causal(method="linear_spec", tau=inputs["threshold"] or None, **shared)


@torch.inference_mode()
def run(engine: Engine, request: Request) -> tuple[Output, list[Query]]:
    """The output of a request alone, and the row of each of its forwards."""
    engine.add(request)
    rows: list[Query] = []
    while True:
        step = engine.launch(engine.schedule())
        rows += [query for run in engine._seating.planned.running for query in run.plan.queries]
        for output in engine.collect(step):
            if output.output is not None:
                return output.output, rows


# `dlm_eos*`: masks behind an EOS are stored; `ls_*`: the answer is not trimmed. Their tokens are checked all the same.
NAMED_QUIRKS = (("nemotron", "dlm"), ("nemotron", "ls"))
CHECKS = {("nemotron", kind): check_generation for kind in ("ar", "dlm", "ls", "lsflux")}
