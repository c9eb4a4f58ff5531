"""Long prompts: storing and decoding beside the roofline, the host's work by depth, the gap they make in streams.

Seconds on a CPU are the processor's, so that other work on the machine counts little; ratios are of runs that take
turns. On a GPU they are the clock's. "One block" stores a prompt as engines without chunks do, a block a forward; the
plain loop stores it in one forward over contiguous keys, with a mask.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.roofline import Machine, StepCost, floor_seconds, measure_bandwidth, step_cost
from benchmarks.step_timing import StepCase, filled_engine, without_forward
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.pages import PagePool, chain_root, page_hash
from mbd_core.models.decoder import Decoder
from mbd_core.models.flops import matrix_flops, pair_flops
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES
from mbd_core.ops.attention import cpu
from mbd_core.ops.machine import measure_flops
from mbd_core.plain_loops import ContiguousCache, GridAttention
from mbd_core.serving.tokens.prefix_affinity import leading_pages

CHUNK = EngineConfig().max_prefill_tokens
FLOP_SIZE, SUM_SIZE = 1024, 2**25
DECODE_STEPS = 4
WITHOUT_LIMIT = 1e9

STORING = {
    "length": "prompt",
    "forwards": "forwards",
    "block_forwards": "one block a forward",
    "tokens_per_second": "tokens/s|.0f",
    "over_bare": "storing / bare forward|.3f",
    "over_floor": "storing / floor|.2f",
    "over_block": "one block / storing|.2f",
    "over_plain": "plain loop / storing|.2f",
    "first_seconds": "first tokens after (s)|.1f",
    "peak_mb": "peak memory (MB)|.0f",
    "kv_mb": "of it keys (MB)|.0f",
}
DECODING = {
    "length": "stored tokens",
    "step_seconds": "step of two slots (ms)|.0f",
    "step_over_forward": "step / forward|.3f",
    "over_floor": "step / floor|.2f",
    "over_tiles": "its forward without tiles|.2f",
}
HOST = {
    "length": "stored tokens",
    "pages": "pages",
    "host_seconds": "host work of a step (ms)|.3f",
    "growth": "of the first|.2f",
    "hash_seconds": "hash a prompt (ms)|.2f",
    "lookup_seconds": "look it up (ms)|.3f",
    "turn_hashes": "pages hashed for a turn's answer",
    "route_seconds": "a gateway's hashes (ms)|.2f",
}
GAP = {
    "limit": "limit of a step (s)|.2f",
    "quiet": "quiet step (ms)|.0f",
    "median_gap": "median gap beside it (ms)|.0f",
    "p99_gap": "p99 gap (ms)|.0f",
    "over_quiet": "p99 / quiet|.2f",
    "forwards": "forwards of the prompt",
    "stored_seconds": "stored after (s)|.1f",
}
COUNTED = {
    "model": "model",
    "length": "prompt",
    "forwards": "forwards",
    "block_forwards": "one block a forward",
    "tflop": "TFLOP|.0f",
    "attention": "of it attention|.0%",
    "floor": "floor (s)|.2f",
    "block_floor": "one block a forward, floor (s)|.2f",
    "kv_gb": "its keys (GB)|.2f",
}


def seconds_clock(device: torch.device) -> Callable[[], float]:
    """Seconds of the processor on a CPU, else of the clock."""
    return time.perf_counter if device.type == "cuda" else time.process_time


def timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def measure_machine(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> Machine:
    """Bytes a second of a sum, and operations a second of a large matrix product, both by `clock`."""
    a, b = torch.randn(FLOP_SIZE, FLOP_SIZE, dtype=dtype, device=device), torch.ones(SUM_SIZE, device=device)
    if device.type == "cuda":
        return Machine(bandwidth=measure_bandwidth(device), flops=measure_flops(device, dtype))
    product, total = (min(timed(run, clock) for _ in range(8)) for run in (lambda: a @ a, b.sum))
    return Machine(bandwidth=b.nbytes / total, flops=2 * FLOP_SIZE**3 / product)


def storing_cost(config: ModelConfig, start: int, stop: int, *, dtype_bytes: float) -> StepCost:
    """The cost of a forward that stores the blocks [start, stop) of a prompt: no logits, each block sees its end."""
    tokens, size = stop - start, config.block_size
    pairs = sum(size * end for end in range(start + size, stop + 1, size))
    cost = step_cost(config, rows=1, buffer_size=tokens // size, prefix=start, dtype_bytes=dtype_bytes, logit_tokens=0)
    return replace(cost, flops=tokens * matrix_flops(config) + pairs * pair_flops(config))


def storing_floor(config: ModelConfig, length: int, machine: Machine, *, chunk: int, dtype_bytes: float) -> float:
    """The least seconds in which a prompt is stored, `chunk` tokens a forward."""
    parts = [(start, min(length, start + chunk)) for start in range(0, length, chunk)]
    return sum(floor_seconds(storing_cost(config, *part, dtype_bytes=dtype_bytes), machine) for part in parts)


def random_prompt(config: ModelConfig, length: int, *, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(config.vocab_size - 8, (length,), generator=generator).tolist())


def single_token_steps(config: ModelConfig, buffer_size: int = 2) -> DecodingConfig:
    """Every block accepts one token a step, so that all slots are always in use."""
    return DecodingConfig(
        block_size=config.block_size, buffer_size=buffer_size, tau_add=0.5 / buffer_size, tau_semi=0.0, tau_m2t=1.0
    )


def long_engine(
    model: Decoder, length: int, *, rows: int = 1, max_tokens: int, clock: Callable[[], float], **changes: Any
) -> Engine:
    """An engine for `rows` sequences, one of them of `length` tokens."""
    size = model.config.block_size
    pages = rows * (max_tokens // size + 8) + -(-length // size) + 1
    config = EngineConfig(max_rows=rows, buffer_size=2, num_pages=pages, static_shapes=False)
    return Engine(model, replace(config, **changes), clock=clock)


def long_request(config: ModelConfig, length: int, *, max_tokens: int, name: str = "long") -> Request:
    return Request(
        request_id=name,
        prompt=random_prompt(config, length),
        max_tokens=max_tokens,
        decoding=single_token_steps(config),
        ignore_eos=True,
    )


def storing_row(model: Decoder, length: int, *, one_block: bool, plain: bool) -> dict[str, Any]:
    """A row for storing one prompt of `length` tokens; `one_block` and `plain` add these ways of storing it."""
    config, weight = model.config, model.lm_head.weight
    clock, size = seconds_clock(weight.device), config.block_size
    machine = measure_machine(weight.device, weight.dtype, clock)
    reset_peak(weight.device)
    engine = long_engine(model, length, max_tokens=4 * size, clock=clock)
    engine.add(long_request(config, length, max_tokens=4 * size))
    storing, bare, forwards = 0.0, 0.0, 0
    sequence = engine.scheduler.find("long")
    assert sequence is not None
    while not sequence.prompt_stored:
        stored = sequence.prefilled
        storing += timed(engine.step, clock)
        forwards += 1
        if not sequence.prompt_stored or stored + CHUNK >= length:
            batch = engine.runner.last_batch
            assert batch is not None
            bare += timed(lambda batch=batch: engine.runner.forward(batch), clock)  # type: ignore[misc]
    begin = clock()
    while not any(output.piece.tokens for output in engine.step()):
        pass
    first_seconds = storing + clock() - begin
    later = measure_machine(weight.device, weight.dtype, clock)
    machine = replace(machine, flops=max(machine.flops, later.flops))
    floor = storing_floor(config, length, machine, chunk=CHUNK, dtype_bytes=weight.dtype.itemsize)
    row = {
        "length": length,
        "forwards": forwards,
        "block_forwards": length // size,
        "tokens_per_second": length / storing,
        "over_bare": storing / bare,
        "over_floor": storing / floor,
        "first_seconds": first_seconds,
        "peak_mb": peak_bytes(weight.device) / 1e6,
        "kv_mb": 2 * config.num_layers * config.num_kv_heads * config.head_dim * weight.dtype.itemsize * length / 1e6,
        "machine_flops": machine.flops,
    }
    if one_block:
        row["over_block"] = block_by_block_seconds(model, length, clock) / storing
    if plain:
        row["over_plain"] = plain_seconds(model, length, clock) / storing
    return row


def without_tiles_ratio(engine: Engine, clock: Callable[[], float]) -> float | None:
    """The last step's forward: its seconds with torch's attention kernel alone, divided by its seconds with tiles.
    `None` on a GPU."""
    batch, runner, seconds = engine.runner.last_batch, engine.runner, dict[int, list[float]]()
    if runner.cache.k.is_cuda:
        return None
    assert batch is not None
    tiled = cpu.LONG
    for _ in range(DECODE_STEPS):
        for longest in (tiled, 1 << 62):
            cpu.LONG = longest
            seconds.setdefault(longest, []).append(timed(lambda: runner.forward(batch), clock))
    cpu.LONG = tiled
    return min(seconds[1 << 62]) / min(seconds[tiled])


def reset_peak(device: torch.device) -> None:
    """Forget the most memory that this process, or a GPU, had in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> float:
    """The most memory that was in use since `reset_peak`: of a GPU, else of this process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024.0 * int(status["VmHWM"].split()[0])


def block_by_block_seconds(model: Decoder, length: int, clock: Callable[[], float]) -> float:
    """The seconds in which a prompt is stored a block a forward."""
    engine = long_engine(
        model, length, max_tokens=model.config.block_size, clock=clock, max_prefill_tokens=model.config.block_size
    )
    engine.add(long_request(model.config, length, max_tokens=model.config.block_size))
    sequence = engine.scheduler.find("long")
    assert sequence is not None
    seconds = 0.0
    while not sequence.prompt_stored:
        seconds += timed(engine.step, clock)
    return seconds


@torch.inference_mode()
def plain_seconds(model: Decoder, length: int, clock: Callable[[], float]) -> float:
    """The seconds in which the plain loop stores a prompt: one forward."""
    device = model.lm_head.weight.device
    cache = ContiguousCache(model, num_lanes=1, length=length)
    ids = torch.tensor(random_prompt(model.config, length), device=device)
    attend = GridAttention(cache, 0, 0, model.config.block_size)
    return timed(lambda: model(ids, torch.arange(length, device=device), attend), clock)


def decoding_row(model: Decoder, length: int) -> dict[str, Any]:
    """A step of two slots after `length` random keys, which no forward stored."""
    config, weight = model.config, model.lm_head.weight
    clock = seconds_clock(weight.device)
    machine = measure_machine(weight.device, weight.dtype, clock)
    engine = filled_engine(model, StepCase(rows=1, buffer_size=2, prefix=length, steps=DECODE_STEPS, static=False))
    while not bool(engine.buffer.resident_RN[:, :2].all()):
        engine.step()
    steps, forwards, num_logits = list[float](), list[float](), 0
    for _ in range(DECODE_STEPS):
        steps.append(timed(engine.step, clock))
        batch = engine.runner.last_batch
        assert batch is not None
        num_logits = batch.num_logits
        forwards.append(timed(lambda batch=batch: engine.runner.forward(batch), clock))  # type: ignore[misc]
    later = measure_machine(weight.device, weight.dtype, clock)
    machine = Machine(bandwidth=max(machine.bandwidth, later.bandwidth), flops=max(machine.flops, later.flops))
    cost = step_cost(
        config, rows=1, buffer_size=2, prefix=length, dtype_bytes=weight.dtype.itemsize, logit_tokens=num_logits
    )
    return {
        "length": length,
        "step_seconds": min(steps),
        "step_over_forward": min(steps) / min(forwards),
        "over_floor": min(steps) / floor_seconds(cost, machine),
        "over_tiles": without_tiles_ratio(engine, clock),
    }


def host_rows(lengths: Sequence[int], *, steps: int) -> list[dict[str, Any]]:
    """The host's part of a step of two slots after `length` stored tokens, by a model of nearly nothing: planning,
    rows, the attention's layout, collecting. The steps of all lengths take turns; the fastest quarter counts."""
    shape = replace(SHAPES["sdar-null"], max_positions=2 * max(lengths))
    model = Decoder(shape).eval()
    engines = {n: filled_engine(model, StepCase(rows=1, buffer_size=2, prefix=n, steps=steps)) for n in lengths}
    seconds: dict[int, list[float]] = {n: [] for n in lengths}
    for engine in engines.values():
        while not bool(engine.buffer.resident_RN.all()):
            engine.step()
    with ExitStack() as stack:  # no forwards between steps: their keys would evict the host's data from the caches
        for engine in engines.values():
            stack.enter_context(without_forward(engine.runner))
        for _ in range(steps):
            for length, engine in engines.items():
                start = time.process_time()
                engine.step()
                batch = engine.runner.last_batch
                assert batch is not None
                engine.runner.bind(batch)
                seconds[length].append(time.process_time() - start)
    rows: list[dict[str, Any]] = []
    for length, engine in engines.items():
        fastest = sorted(seconds[length])[: max(1, steps // 4)]
        host = statistics.median(fastest)
        growth = host / rows[0]["host_seconds"] if rows else 1.0
        pages = length // engine.page_size
        rows.append({"length": length, "pages": pages, "host_seconds": host, "growth": growth} | prefix_times(length))
    return rows


def prefix_times(length: int, *, page_size: int = 32, turn: int = 256) -> dict[str, Any]:
    """Seconds to hash and to find a prompt, the pages that are hashed when `turn` more tokens are committed, and the
    seconds of a gateway's own hashes."""
    tokens = list(random_prompt(SHAPES["sdar-50m"], length))
    chain: list[bytes] = []

    def extend() -> None:
        for start in range(len(chain) * page_size, len(tokens) - page_size + 1, page_size):
            parent = chain[-1] if chain else chain_root("a model")
            chain.append(page_hash(parent, tokens[start : start + page_size]))

    hash_seconds = timed(extend, time.process_time)
    pool = PagePool(len(chain) + 2)
    for page, digest in zip(pool.alloc(len(chain)) or (), chain, strict=True):
        pool.publish(page, digest)
    lookup_seconds = min(timed(lambda: pool.lookup(chain), time.process_time) for _ in range(5))
    before = len(chain)
    tokens += tokens[:turn]
    extend()
    request = Request(
        request_id="r", prompt=tuple(tokens), max_tokens=8, decoding=single_token_steps(SHAPES["sdar-50m"])
    )
    route_seconds = timed(partial(leading_pages, request, page_size=page_size), time.process_time)
    return {
        "hash_seconds": hash_seconds,
        "lookup_seconds": lookup_seconds,
        "turn_hashes": len(chain) - before,
        "route_seconds": route_seconds,
    }


def gap_rows(model: Decoder, length: int, *, streams: int, limits: Sequence[float | None]) -> list[dict[str, Any]]:
    """`streams` short requests decode, and a prompt of `length` tokens comes: each of their steps is an event."""
    return [gap_row(model, length, streams=streams, limit=limit) for limit in limits]


def gap_row(model: Decoder, length: int, *, streams: int, limit: float | None) -> dict[str, Any]:
    config, clock = model.config, seconds_clock(model.lm_head.weight.device)
    budget = min(config.max_positions // 2, 4096)
    engine = long_engine(model, length, rows=streams + 1, max_tokens=budget, clock=clock, max_step_seconds=limit)
    for number in range(streams):
        engine.add(long_request(config, config.block_size, max_tokens=budget, name=f"stream {number}"))
    while not bool(engine.buffer.resident_RN[:streams, :2].all()):
        engine.step()
    # steps of whole blocks: the first steps of a stream have one slot, and half the work of later steps
    quiet = statistics.median(timed(engine.step, clock) for _ in range(2 * config.block_size))
    for name, number in (("learns", min(length, 1024)), ("long", length)):
        # The first prompt teaches the engine what a block costs here, as a server's first requests do.
        engine.add(
            replace(long_request(config, number, max_tokens=1, name=name), prompt=_own_prompt(config, number, name))
        )
        sequence = engine.scheduler.find(name)
        assert sequence is not None
        gaps = []
        while not sequence.prompt_stored:
            gaps.append(timed(engine.step, clock))
        engine.abort(name)
    gaps.sort()
    return {
        "limit": None if limit == WITHOUT_LIMIT else engine.pacer.limit,
        "quiet": quiet,
        "median_gap": statistics.median(gaps),
        "p99_gap": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        "over_quiet": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] / quiet,
        "forwards": len(gaps),
        "stored_seconds": sum(gaps),
    }


def _own_prompt(config: ModelConfig, length: int, name: str) -> tuple[int, ...]:
    return random_prompt(config, length, seed=sum(name.encode()))


def counted_rows(models: Sequence[str], lengths: Sequence[int], machine: Machine) -> list[dict[str, Any]]:
    """Forwards, operations, keys and floors of prompts of released shapes, in 16 bits."""
    rows = []
    for name in models:
        config = SHAPES[name]
        for length in lengths:
            floor = partial(storing_floor, config, length, machine, dtype_bytes=2)
            size = config.block_size
            pairs = (length + size) * length / 2
            attention = pairs * pair_flops(config)
            flops = length * matrix_flops(config) + attention
            rows.append(
                {
                    "model": name,
                    "length": length,
                    "forwards": -(-length // CHUNK),
                    "block_forwards": length // size,
                    "tflop": flops / 1e12,
                    "attention": attention / flops,
                    "floor": floor(chunk=CHUNK),
                    "block_floor": floor(chunk=size),
                    "kv_gb": 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * length / 1e9,
                }
            )
    return rows
