"""The sub-commands about long contexts: their options and help."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from tqdm import tqdm

from benchmarks.commands import BenchmarkOptions
from benchmarks.measuring import device_name, markdown, usable_device
from mbd_core.command_line import CommandText, Fields, command, refuse_given
from mbd_core.fields import DATA, ENGINE, MODEL, OUTPUT, Flag, Ge, Gt
from mbd_core.models.shapes import SHAPES

PARTS = ("storing", "decoding", "host", "gap", "counted")


def run_context(
    command_line: CommandText,
    *,
    model: Annotated[str, Flag(f"A shape, with random weights: {', '.join(SHAPES)}.", MODEL)] = "sdar-50m",
    parts: Annotated[tuple[str, ...], Flag(f"What is measured: {', '.join(PARTS)}.", OUTPUT, commas=True)] = PARTS,
    length: Annotated[
        tuple[Annotated[int, Ge(1)], ...],
        Flag("Tokens of the prompts that are stored and then decoded.", DATA, commas=True),
    ] = (2048, 4096, 8192),
    compare: Annotated[
        int, Ge(0), Flag("Prompts up to this length are also stored a block a forward, and by the plain loop.", DATA)
    ] = 4096,
    host: Annotated[
        tuple[Annotated[int, Ge(1)], ...],
        Flag("Stored tokens of the sequences whose host work is measured.", DATA, commas=True),
    ] = (2048, 8192, 32768, 131072),
    steps: Annotated[int, Ge(4), Flag("Steps of that measurement, for each length.", DATA)] = 100,
    gap: Annotated[int, Ge(1), Flag("Tokens of the prompt that comes while streams decode.", DATA)] = 4096,
    streams: Annotated[int, Ge(1), Flag("Requests that decode meanwhile.", DATA)] = 2,
    max_step_seconds: Annotated[
        float | None,
        Gt(0),
        Flag("The engine's limit in the runs with a gap, compared with no limit (default: its own).", ENGINE),
    ] = None,
    counted: Annotated[tuple[str, ...], Flag("Released shapes whose prompts are counted.", MODEL, commas=True)] = (
        "sdar-8b",
        "llada2-mini",
        "llada2-flash",
    ),
    counted_length: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("Tokens of counted prompts.", DATA, commas=True)
    ] = (
        2048,
        16384,
        131072,
    ),
    bandwidth: Annotated[float, Gt(0), Flag("GB/s of the machine for which they are counted.", OUTPUT)] = 3350.0,
    tflops: Annotated[float, Gt(0), Flag("TFLOP/s of that machine, in 16 bits.", OUTPUT)] = 989.0,
    measuring: Annotated[BenchmarkOptions, Fields("device", "threads", "json")],
) -> None:
    """Long prompts: the time to store them, the time of a step after them, and the delay of other streams.

    storing: one prompt, beside the bare forward of the same chunks, the machine's floor, a block a forward, and the
    plain loop. decoding: a step after random keys. host: the host's part of a step and the hashes of a prefix, by
    depth. gap: the events of streams while a prompt is stored, with and without a limit on a step's seconds. counted:
    the costs of released shapes, which are not run; the defaults are an H100's data sheet.
    """
    import torch

    from benchmarks.context import storing
    from benchmarks.roofline import Machine
    from mbd_core.models.shapes import random_model

    measuring.begin()
    for name in {*parts} - {*PARTS}:
        raise ValueError(f"--parts {name} must be of {', '.join(PARTS)}")
    machine_fields = {"bandwidth": bandwidth, "tflops": tflops}
    of_parts: dict[tuple[str, ...], dict[str, Any]] = {
        ("storing",): {"compare": compare},
        ("storing", "decoding"): {"length": length},
        ("storing", "decoding", "gap"): {"model": model, "device": measuring.device},
        ("host",): {"host": host, "steps": steps},
        ("gap",): {"gap": gap, "streams": streams, "max_step_seconds": max_step_seconds},
        ("counted",): {"counted": counted, "counted_length": counted_length, **machine_fields},
    }
    for names, values in of_parts.items():
        if not {*names} & {*parts}:
            refuse_given(run_context, f"where --parts has no {' or '.join(names)}", **values)
    for name in {model, *counted} - SHAPES.keys():
        raise ValueError(f"{name} must be one of {', '.join(SHAPES)}")
    place, config, tables = usable_device(measuring.device), SHAPES[model], dict[str, list[dict[str, Any]]]()
    prompts = (*(length if {"storing", "decoding"} & {*parts} else ()), *((gap,) if "gap" in parts else ()))
    for tokens in prompts:
        if tokens % config.block_size or tokens + 8 * config.block_size > config.max_positions + 1:
            raise ValueError(
                f"a prompt of {tokens} tokens must be a multiple of {config.block_size} and leave room in the model's "
                f"{config.max_positions} positions"
            )
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    decoder = random_model(config, device=place, dtype=dtype) if {"storing", "decoding", "gap"} & {*parts} else None
    print(f"{model}, {device_name(place)}; seconds are the processor's on a CPU\n")
    if "storing" in parts and decoder is not None:
        tables["storing"] = [
            storing.storing_row(decoder, n, one_block=n <= compare, plain=n <= compare)
            for n in tqdm(length, unit="prompt", desc="storing")
        ]
        print(markdown(tables["storing"], storing.STORING) + "\n")
    if "decoding" in parts and decoder is not None:
        tables["decoding"] = [storing.decoding_row(decoder, n) for n in tqdm(length, unit="prompt", desc="decoding")]
        print(markdown(tables["decoding"], storing.DECODING) + "\n")
    if "host" in parts:
        tables["host"] = storing.host_rows(host, steps=steps)
        print(markdown(tables["host"], storing.HOST) + "\n")
    if "gap" in parts and decoder is not None:
        limits = (max_step_seconds, storing.WITHOUT_LIMIT)
        tables["gap"] = storing.gap_rows(decoder, gap, streams=streams, limits=limits)
        print(f"A prompt of {gap} tokens beside {streams} streams\n\n{markdown(tables['gap'], storing.GAP)}\n")
    if "counted" in parts:
        machine = Machine(bandwidth=bandwidth * 1e9, flops=tflops * 1e12)
        tables["counted"] = storing.counted_rows(counted, counted_length, machine)
        print(
            f"Counted, at {bandwidth:g} GB/s and {tflops:g} TFLOP/s\n\n{markdown(tables['counted'], storing.COUNTED)}"
        )
    measuring.write(command_line, {"torch": torch.__version__, "threads": torch.get_num_threads()}, **tables)


def run_turns(
    command_line: CommandText,
    *,
    model: Annotated[str, Flag(f"A shape, with random weights: {', '.join(SHAPES)}.", MODEL)] = "tiny-sdar",
    turns: Annotated[int, Ge(1), Flag("Turns of the conversation.", DATA)] = 10,
    turn_tokens: Annotated[int, Ge(128), Flag("Tokens of a turn, its answer included.", DATA)] = 3072,
    answer_tokens: Annotated[int, Ge(32), Flag("Tokens of its answer.", DATA)] = 64,
    measuring: Annotated[BenchmarkOptions, Fields("device", "threads", "json")],
) -> None:
    """A conversation's next turn: how much of the last answer the cache has, and a turn's cost beside a cold start.

    The first table has the share of an answer's tokens that the next turn finds again, for the chat templates of 21
    families: for answers in the tokenizer's own tokens, for answers in other tokens of the same text, and for answers
    whose `token_ids` are sent back. The second table serves one conversation to two engines in turn: one has seen the
    turns before, the other has not. The shape's positions are raised to the conversation's length.
    """
    import torch

    from benchmarks.context import turns as turns_module
    from mbd_core.models.shapes import random_model

    measuring.begin()
    if model not in SHAPES:
        raise ValueError(f"--model {model} must be one of {', '.join(SHAPES)}")
    if not 0 < answer_tokens < turn_tokens:
        raise ValueError(f"--answer-tokens {answer_tokens} must be less than --turn-tokens {turn_tokens}")
    place = usable_device(measuring.device)
    templates = turns_module.round_trip_rows()
    print(markdown(templates, turns_module.ROUND_TRIP) + "\n")
    talk = turns_module.Conversation(turns=turns, turn_tokens=turn_tokens, answer_tokens=answer_tokens)
    config = replace(SHAPES[model], max_positions=(turns + 1) * turn_tokens)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    rows = turns_module.turn_rows(random_model(config, device=place, dtype=dtype), talk)
    print(f"{model}, {device_name(place)}, turns of {turn_tokens} tokens\n\n{markdown(rows, turns_module.TURNS)}")
    measuring.write(command_line, {"torch": torch.__version__}, templates=templates, turns=rows)


def run_affinity(
    command_line: CommandText,
    *,
    conversations: Annotated[int, Ge(1), Flag("Conversations.", DATA)] = 200,
    turns: Annotated[int, Ge(1), Flag("Turns of each conversation.", DATA)] = 10,
    turn_tokens: Annotated[int, Ge(64), Flag("Tokens of a question and its answer, in halves.", DATA)] = 3000,
    rate: Annotated[float, Gt(0), Flag("Conversations that begin a second.", DATA)] = 0.5,
    replicas: Annotated[int, Ge(2), Flag("Replicas at the beginning.", ENGINE)] = 4,
    kills: Annotated[
        tuple[float, ...], Flag("Seconds at which the oldest replica is killed.", ENGINE, commas=True)
    ] = (150.0, 300.0),
    adds: Annotated[tuple[float, ...], Flag("Seconds at which a replica is added.", ENGINE, commas=True)] = (
        170.0,
        320.0,
        400.0,
    ),
    cache: Annotated[int, Ge(1024), Flag("Tokens that a replica's pages hold.", ENGINE)] = 1_000_000,
    balance: Annotated[
        int, Ge(0), Flag("Requests under way that a preferred replica may have more than another.", ENGINE)
    ] = 8,
    measuring: Annotated[BenchmarkOptions, Fields("json")],
) -> None:
    """Simulated conversations over replicas: the share of their prompts that the caches have under the served routing
    policy, and under a router that knows no prefixes. The replicas are steady, or are killed and added.
    """
    from benchmarks.context.affinity import COLUMNS, ConversationTraffic, Fleet, affinity_rows

    measuring.begin()
    traffic = ConversationTraffic(conversations=conversations, turns=turns, turn_tokens=turn_tokens, rate=rate)
    events = sorted([*((at, "kill") for at in kills), *((at, "add") for at in adds)])
    fleet = Fleet(replicas=replicas, events=tuple(events), cache_tokens=cache, balance=balance)  # type: ignore[arg-type]
    rows = affinity_rows(traffic, fleet)
    print(markdown(rows, COLUMNS))
    measuring.write(command_line, {}, rows=rows)


context = command(run_context, "python -m benchmarks context")
turns = command(run_turns, "python -m benchmarks turns")
affinity = command(run_affinity, "python -m benchmarks affinity")
