"""Full-attention decoding: LLaDA, Dream, Fast-dLLM, LocalLeap and BlockBatch, run by the plain loop.

The references fill the whole canvas; where an EOS ends the request, tokens are compared up to it.
"""

from pathlib import Path
from typing import Any

from block_checks import loaded

from mbd_core.decoding.blocks.canvas_config import Branches, Canvas, Leap, MultiBlock
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.branches import BranchedCanvas
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.decoding.canvas.plan import CanvasPlan, PlannedDecoder
from mbd_core.plain_loops import ContiguousCache, run_planned

SCORES = {"entropy": "neg_entropy", "maskgit_plus": "confidence", "topk_margin": "margin"}


def check_llada_vanilla(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    canvas = Canvas(
        block_length=inputs["block_length"],
        steps=inputs["steps"],
        accept="quota",
        score={"low_confidence": "confidence", "random": "random"}[inputs["remasking"]],
        cfg_scale=inputs.get("cfg_scale", 0.0),
        forbid_eos=inputs.get("logits_eos_inf", False),
    )
    eos = (inputs["eos_token_id"],) if canvas.forbid_eos else ()
    check(folder, case, canvas, inputs["gen_length"], eos, case["expected"]["nfe"])


def check_llada_fast(folder: Path, case: dict[str, Any]) -> None:
    """Fast-dLLM and BlockBatch's fork of it; forwards the reference spends on a finished block are not ours."""
    inputs, expected = case["inputs"], case["expected"]
    kind = case["name"].split("_")[1]
    canvas = Canvas(
        block_length=inputs["block_length"],
        cache="none" if kind == "nocache" else kind,
        **acceptance(inputs),
    )
    check(folder, case, canvas, inputs["gen_length"], (), expected.get("nfe_without_wasted", expected["nfe"]))


def acceptance(inputs: dict[str, Any]) -> dict[str, Any]:
    if inputs["threshold"] is not None:
        return {"accept": "threshold", "tau": inputs["threshold"]}
    if inputs.get("factor") is not None:
        return {"accept": "factor", "factor": inputs["factor"]}
    return {"accept": "quota", "steps": inputs["steps"]}


def check_localleap(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    leap = Leap(tau_relaxed=inputs["relaxed_threshold"], radius=inputs["radius"])
    eos = (inputs["eos_token_id"],) if inputs["early_stop"] else ()
    canvas = Canvas(block_length=inputs["block_length"], tau=inputs["threshold"], leap=leap)
    check(folder, case, canvas, inputs["gen_length"], eos, expected["nfe"])
    if "nfe_plain_threshold" in expected:
        plain = Canvas(block_length=inputs["block_length"], tau=inputs["threshold"])
        run = run_planned(loaded(folder), decoder(folder, case, plain, inputs["gen_length"], eos))
        assert run.num_forwards == expected["nfe_plain_threshold"]


def check_blockbatch(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    branches = Branches(
        block_lengths=tuple(inputs["block_sizes"]),
        tau_merge=min(inputs["conf_threshold"], 1.0),
        tau_sync=inputs["sync_threshold"],
        refresh=inputs["refresh_block_size"],
        eos_test="block_forward",
    )
    canvas = Canvas(tau=inputs["threshold"], branches=branches)
    eos = (inputs["eos_token_id"],)
    ours = check(folder, case, canvas, inputs["gen_length"], eos, expected["forward_calls"])
    assert isinstance(ours, BranchedCanvas)
    wanted = expected["stats"]
    by_length = {str(s.block_length): s for s in ours.stats()}
    assert {n: s.num_merged for n, s in by_length.items()} == wanted["tokens_merged_per_block_size"]
    assert {n: s.num_decoded for n, s in by_length.items()} == wanted["tokens_decoded_per_block_size"]
    assert {n: s.num_copied for n, s in by_length.items()} == wanted["tokens_copied_from_per_block_size"]
    assert {
        n: {"nfe_init": s.num_init, "nfe_block": s.num_block, "nfe_refresh": s.num_refresh}
        for n, s in by_length.items()
    } == wanted["nfe_per_block_size"]
    assert by_length[str(wanted["final_block_size"])] == ours.stats()[ours.winner or 0]
    for n, branch in zip(by_length, ours.branches, strict=True):
        assert branch.lane.tokens.tolist() == expected["branch_tokens"][n], f"branch {n}"


def check_dream_vanilla(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    canvas = Canvas(
        block_length=None, steps=inputs["steps"], accept="schedule", score=SCORES[inputs["alg"]], eps=inputs["eps"]
    )
    check(folder, case, canvas, inputs["max_new_tokens"], (), case["expected"]["nfe"])


def check_dream_fast(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    canvas = Canvas(block_length=None, steps=inputs["steps"], tau=inputs["threshold"])
    check(folder, case, canvas, inputs["max_new_tokens"], (), case["expected"]["nfe"])


def check_d3llm(folder: Path, case: dict[str, Any]) -> None:
    """Tokens, the forward of each, and the window that every forward computes."""
    inputs, expected = case["inputs"], case["expected"]
    cached = inputs["kv_cache"]
    blocks = MultiBlock(
        tau_entropy=inputs["threshold"],
        tau_add=inputs["block_add_threshold"],
        tau_active=inputs["decoded_token_threshold"],
        cache_delay=inputs["cache_delay_iter"] if cached else None,
        refresh=inputs["refresh_interval"] if cached else None,
    )
    canvas = Canvas(block_length=inputs["block_size"], multi_block=blocks)
    eos = (inputs["eos_token_id"],) if inputs["early_stop"] else ()
    ours = decoder(folder / case["checkpoint"], case, canvas, inputs["max_new_tokens"], eos)
    lengths, starts = [], []

    def watch(plan: CanvasPlan, _: ContiguousCache) -> None:
        lengths.append(plan.num_positions)
        starts.append(plan.queries[0].start)

    run_planned(loaded(folder / case["checkpoint"]), ours, watch=watch)
    begin = len(inputs["prompt"])
    wanted = expected["tokens"][begin:]
    stop = next((i + 1 for i, t in enumerate(wanted) if t in eos), len(wanted))
    assert ours.tokens == wanted[:stop]
    assert ours.num_forwards == expected["forwards"]
    assert lengths == expected["query_lengths"]
    assert starts == expected.get("query_starts", [0] * len(starts))
    number = {position: k for k, positions in enumerate(expected["accepted"], 1) for position in positions}
    assert ours.steps == [number[begin + i] for i in range(len(ours.steps))]


def check(
    folder: Path, case: dict[str, Any], canvas: Canvas, max_tokens: int, eos: tuple[int, ...], num_forwards: int
) -> PlannedDecoder:
    """Tokens as the reference's, up to the EOS that ends the request; forwards as given."""
    ours = decoder(folder, case, canvas, max_tokens, eos)
    run_planned(loaded(folder), ours)
    wanted = case["expected"]["tokens"][len(case["inputs"]["prompt"]) :]
    stop = next((i + 1 for i, t in enumerate(wanted) if t in eos), len(wanted))
    assert ours.tokens == wanted[:stop]
    assert ours.num_forwards == num_forwards
    return ours


def decoder(
    folder: Path, case: dict[str, Any], canvas: Canvas, max_tokens: int, eos: tuple[int, ...]
) -> PlannedDecoder:
    config = loaded(folder).config
    return canvas_decoder(
        tuple(case["inputs"]["prompt"]),
        max_tokens,
        canvas,
        Sampling(),
        eos_token_ids=eos,
        vocab=Vocab(config.mask_token_id, config.vocab_size),
        shift=config.shift_logits,
    )


# cases marked for how the reference counts its forwards; what they decode is by the rules and passes these checks
NFE_ONLY_QUIRKS = (("llada", "fastdllm"), ("llada", "blockbatch"))

CHECKS = {
    ("llada", "vanilla"): check_llada_vanilla,
    ("llada", "fastdllm"): check_llada_fast,
    ("llada", "bbfork"): check_llada_fast,
    ("llada", "localleap"): check_localleap,
    ("llada", "blockbatch"): check_blockbatch,
    ("d3llm", "llada"): check_d3llm,
    ("d3llm", "dream"): check_d3llm,
    ("dream", "vanilla"): check_dream_vanilla,
    ("dream", "fastdllm"): check_dream_fast,
}
