"""Decoding block by block in the engine: SDAR, LLaDA2 (plain, dInfer, DMax) and D2F on LLaDA and Dream; and LLaDA2.2's
edits in the plain loop."""

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.config import DecodingConfig, EntropyBound, EntropyRule, Levenshtein, Soft
from mbd_core.decoding.blocks.levenshtein import VARIANTS, EditTokens
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder
from mbd_core.plain_loops import run_edits


def check_sdar_generation(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    size, length = inputs["block_length"], len(inputs["prompt"])
    stops = tuple(inputs["stopping_criteria_idx"] or ())
    model = with_config(loaded(folder), block_size=size, **({"eos_token_ids": stops} if stops else {}))
    dynamic = inputs["remasking_strategy"] == "low_confidence_dynamic"
    decoding = DecodingConfig(
        block_size=size,
        buffer_size=1,
        tau_m2t=inputs["confidence_threshold"] if dynamic else 1.0,
        tokens_per_step=size // inputs["denoising_steps"],
        fallback="leftmost" if inputs["remasking_strategy"] == "sequential" else "confidence",
    )
    # the reference goes on to the end of the last block, whatever gen_length says
    end = -(-(length + inputs["gen_length"]) // size) * size
    request = Request(
        request_id="case",
        prompt=tuple(inputs["prompt"]),
        max_tokens=end - length,
        decoding=decoding,
        ignore_eos=not stops,
    )
    output = Engine(model, EngineConfig(max_rows=1)).generate([request])[0]
    wanted = expected["tokens"][length:]
    if stops:
        wanted = wanted[: next(i for i, t in enumerate(wanted) if t in stops)]
    assert list(output.tokens) == wanted
    counts = output.counts
    assert counts.num_forwards - counts.num_store_forwards == expected["denoise_forwards"]
    assert counts.num_store_forwards == expected["block_store_forwards"]


def check_entropy_bound(folder: Path, case: dict[str, Any]) -> None:
    """Both released rules, with and without a stop word; the references end behind the block that holds it."""
    inputs, expected = case["inputs"], case["expected"]
    size, length = inputs["block_length"], len(inputs["prompt"])
    stops = tuple(inputs["stop_words"])
    rule: EntropyRule = "jetengine" if case["name"].startswith("eb_jet") else "paper"
    decoding = DecodingConfig(block_size=size, entropy=EntropyBound(gamma=inputs["eb_threshold"], rule=rule))
    end = -(-(length + inputs["gen_length"]) // size) * size
    wanted = expected["tokens"][length:]
    output = decode(
        folder / case["checkpoint"], inputs["prompt"], end - length, decoding, eos=stops[0] if stops else None
    )
    assert list(output.tokens) == (before(wanted, stops[0]) if stops else wanted)
    counts = output.counts
    assert counts.num_forwards - counts.num_store_forwards == expected["denoise_forwards"]
    assert counts.num_store_forwards == expected["block_store_forwards"]
    assert output.piece.steps is not None
    steps = (*output.piece.steps, *(output.tail.steps or ()))
    positions = {step: [length + i for i, s in enumerate(steps) if s == step] for step in sorted(set(steps))}
    assert list(positions.values()) == [sorted(each) for each in expected["accepted"]]


def decode(
    folder: Path,
    prompt: list[int],
    max_tokens: int,
    decoding: DecodingConfig,
    *,
    eos: int | None,
    replay: bool = True,
) -> Output:
    model = with_config(
        loaded(folder), block_size=decoding.block_size, **({"eos_token_ids": (eos,)} if eos is not None else {})
    )
    request = Request(
        request_id="case",
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        decoding=decoding,
        ignore_eos=eos is None,
        replay=replay,
        logprobs=True,
    )
    config = EngineConfig(max_rows=1, buffer_size=decoding.buffer_size)
    return Engine(model, config).generate([request])[0]


def reaches(tau: float) -> float:
    """The threshold that is exceeded exactly by what reaches `tau`: the references compare by >=, we by >."""
    return max(0.0, math.nextafter(tau, 0.0))


def before(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos)] if eos in tokens else tokens


def check_llada2_generation(folder: Path, case: dict[str, Any]) -> None:
    """The reference computes every block anew and stores nothing: its forwards are our denoising ones."""
    inputs, expected = case["inputs"], case["expected"]
    size, length = inputs["block_length"], len(inputs["prompt"])
    decoding = DecodingConfig(block_size=size, tau_m2t=inputs["threshold"], tokens_per_step=size // inputs["steps"])
    # generation runs to the end of the last block, and the output is cut afterwards
    end = -(-(length + inputs["gen_length"]) // size) * size
    eos = inputs["eos_id"]
    output = decode(folder, inputs["prompt"], end - length, decoding, eos=eos)
    wanted = before(expected["output"], eos)
    assert list(output.tokens)[: inputs["gen_length"]] == wanted
    assert output.counts.num_forwards - output.counts.num_store_forwards == expected["nfe"]


def check_dinfer(folder: Path, case: dict[str, Any]) -> None:
    """SingleBD whose store rides on the next block's first forward, which is a buffer of 2 and tau_add = 1."""
    inputs, expected = case["inputs"], case["expected"]
    decoding = DecodingConfig(
        block_size=inputs["block_length"], buffer_size=2, tau_add=1.0, tau_m2t=reaches(inputs["threshold"])
    )
    check_riding_store(folder, inputs, expected, decoding)


def check_soft(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    assert inputs["soft_top_k"] == 1 and inputs["max_steps_per_block"] == inputs["block_length"]
    decoding = DecodingConfig(
        block_size=inputs["block_length"],
        buffer_size=2,
        tau_add=1.0,
        tau_m2t=reaches(inputs["threshold"]),
        soft=Soft(stop_confidence=inputs["stop_confidence"]),
    )
    check_riding_store(folder, inputs, expected, decoding)


def check_riding_store(
    folder: Path, inputs: dict[str, Any], expected: dict[str, Any], decoding: DecodingConfig
) -> None:
    length, eos = len(inputs["prompt"]), inputs["eos_id"]
    generated = expected["tokens"][length:]
    output = decode(folder, inputs["prompt"], len(generated), decoding, eos=eos)
    assert list(output.tokens) == before(generated, eos)
    # the last block's own store, and nothing else, is ours alone
    assert output.counts.num_store_forwards == 1
    assert output.counts.num_forwards - 1 == expected["denoise_forwards"]


def check_d2f(folder: Path, case: dict[str, Any]) -> None:
    """D2F's reference goes on after an EOS until all resident blocks are full; ours stops at the EOS's block."""
    inputs, expected = case["inputs"], case["expected"]
    size, length = inputs["block_size"], len(inputs["prompt"])
    num_blocks = inputs["max_new_tokens"] // size
    fallback = {"default": "confidence", "neg_entropy": "neg_entropy", "margin_confidence": "margin"}
    decoding = DecodingConfig(
        block_size=size,
        buffer_size=num_blocks,
        tau_add=reaches(inputs["tau_add"]),
        tau_semi=inputs["tau_act"],
        tau_m2t=inputs["tau_conf"],
        fallback=fallback[inputs["sampling_strategy"]],  # type: ignore[arg-type]
        prompt_attention="full",
    )
    eos, generated = inputs["eos_token_id"], expected["tokens"][length:]
    output = decode(folder, inputs["prompt"], num_blocks * size, decoding, eos=eos)
    assert list(output.tokens) == before(generated, eos)
    forwards = output.counts.num_forwards - 1  # the reference never stores what nothing follows
    assert forwards == expected["forwards"] if eos not in generated else forwards <= expected["forwards"]


def check_fast_dllm_v2(folder: Path, case: dict[str, Any]) -> None:
    """`generate`, and `batch_sample` with all its rows in one engine: tokens, and the positions of every forward.

    The reference ends one token behind its last block, and at a stop word before it has filled the word's block; its
    rows of a batch wait for each other, which counts in its forwards and in no row's tokens.
    """
    inputs, expected = case["inputs"], case["expected"]
    if inputs["use_block_cache"]:
        pytest.skip("the cache of stale sub-block keys is not part of this project")
    size, stop, alone = inputs["block_size"], inputs["stop_token"], "prompt" in inputs
    prompts = [inputs["prompt"]] if alone else inputs["prompts"]
    rows = [expected["tokens"]] if alone else expected["tokens"]
    end = (max(len(p) for p in prompts) // size + inputs["max_new_tokens"] // size) * size
    decoding = DecodingConfig(
        block_size=size, sub_block=inputs["small_block_size"], tau_m2t=inputs["threshold"], carry=True
    )
    requests = [
        Request(
            request_id=str(i),
            prompt=tuple(prompt),
            max_tokens=end - len(prompt),
            decoding=decoding,
            replay=True,
        )
        for i, prompt in enumerate(prompts)
    ]
    model = with_config(loaded(folder), block_size=size, eos_token_ids=(stop,))
    outputs = Engine(model, EngineConfig(max_rows=len(rows))).generate(requests)
    for i, (prompt, row, output) in enumerate(zip(prompts, rows, outputs, strict=True)):
        stops = stop in row[len(prompt) :]
        assert list(output.tokens) == (before(row[len(prompt) :], stop) if stops else row[len(prompt) : end])
        written = [each for each in forwards_of(output, len(prompt), size) if each]
        wanted = [sorted(each) for each in accepted_of_row(expected, i, alone=alone) if each]
        assert written[: len(wanted)] == wanted
        assert stops or len(written) == len(wanted)
        if alone and not stops:
            counts = output.counts
            assert counts.num_forwards - counts.num_store_forwards == expected["denoise_forwards"]
            # the store of a prompt's last block is a forward of its own here, and part of the prefill there
            assert counts.num_store_forwards == expected["store_forwards"] + (len(prompt) % size == 0)


def forwards_of(output: Output, start: int, size: int) -> list[list[int]]:
    """The positions that each forward filled; those at which a block begins are filled by the store before it."""
    assert output.piece.steps is not None
    steps = (*output.piece.steps, *(output.tail.steps or ()))
    return [
        [start + i for i, s in enumerate(steps) if s == step and (start + i) % size] for step in sorted(set(steps))
    ]


def accepted_of_row(expected: dict[str, Any], row: int, *, alone: bool) -> list[list[int]]:
    if alone:
        return expected["accepted"]
    return [
        positions[rows.index(row)]
        for positions, rows in zip(expected["accepted"], expected["rows"], strict=True)
        if row in rows
    ]


def check_edit_script(folder: Path, case: dict[str, Any]) -> None:
    """One block whose logits are given; every record of every forward."""
    inputs, expected = case["inputs"], case["expected"]
    logits = load_file(folder / "logits.safetensors")[f"{case['name']}.logits"]
    ids = EditTokens(inputs["mask_id"], inputs["delete_token_id"], inputs["split_token_id"])
    rule, size = edit_rule(inputs), len(inputs["block"])
    block = VARIANTS[rule.variant](
        inputs["block"], inputs["prompt_len"], threshold=inputs["threshold"], rule=rule, ids=ids
    )
    for number, record in enumerate(expected["records"]):
        block.advance(logits[number], number + 1)
        assert block.tokens == record["tokens"]
        is_mask = [int(cell.original) for cell in block.cells]
        assert is_mask == record["is_original_mask"] and block.done == record["done"]
        counted = (record["step_id"], record["post_steps"]) if rule.variant == "fluxserve" else None
        counted = counted or (record["num_update_steps"], record["post_edit_steps"])
        assert (block.num_steps, block.num_post_steps) == counted
    assert block.tokens == expected["tokens"] and len(block.tokens) == size
    assert len(expected["records"]) == expected["num_forwards"]


def check_edit_generation(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    eos = tuple(inputs["eos_ids"])
    model = with_config(loaded(folder), **({"eos_token_ids": eos} if eos else {}))
    decoding = DecodingConfig(block_size=inputs["block_length"], tau_m2t=inputs["threshold"], edit=edit_rule(inputs))
    run = run_edits(model, inputs["prompt"], inputs["gen_length"], decoding, ignore_eos=not eos)
    wanted = expected["output"]
    assert run.tokens == [token for token in wanted if token not in eos]
    assert run.num_forwards == expected["num_forwards"]
    assert (run.finish_reason == "stop") == (wanted[-1] in eos)
    output = decode(
        folder, inputs["prompt"], inputs["gen_length"], decoding, eos=eos[0] if eos else None, replay=False
    )
    assert list(output.tokens) == run.tokens and output.counts.num_forwards == run.num_forwards
    assert output.piece.logprobs == pytest.approx(run.log_probs, abs=1e-3)


def edit_rule(inputs: dict[str, Any]) -> Levenshtein:
    names = {"steps": "steps", "max_steps_per_block": "max_steps", "max_post_steps": "max_post_steps"}
    values = {ours: inputs[theirs] for theirs, ours in names.items() if theirs in inputs}
    return Levenshtein(tau=inputs["editing_threshold"], variant=inputs["variant"], **values)


@functools.lru_cache(maxsize=4)
def loaded(folder: Path) -> Decoder:
    """A folder's model, read once for its cases, which change no weight and come one behind another."""
    return load_model(folder)


def with_config(model: Decoder, **changes: Any) -> Decoder:
    """The same modules under a config of their own."""
    model = copy.copy(model)
    model.config = dataclasses.replace(model.config, **changes)
    return model


NAMED_QUIRKS = (("llada22", "script"),)  # a variant by name is the released code's, quirks included
CHECKS = {
    ("sdar", "gen"): check_sdar_generation,
    ("sdar-eb", "eb"): check_entropy_bound,
    **{("fastdllm2", kind): check_fast_dllm_v2 for kind in ("gen", "batch1", "batch2", "batch3")},
    ("llada2", "gen"): check_llada2_generation,
    ("llada2", "dinfer"): check_dinfer,
    ("llada2", "spd"): check_soft,
    ("llada22", "script"): check_edit_script,
    ("llada22", "gen"): check_edit_generation,
    ("llada", "d2f"): check_d2f,
    ("dream", "d2f"): check_d2f,
}
