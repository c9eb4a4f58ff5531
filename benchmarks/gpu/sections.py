"""The sections of a day on a GPU (`gpu/day.py`): each is a function of the day's sizes that returns rows.

A section raises if one of its checks fails; rows that it has returned before stay. On a CPU the same functions run at
toy sizes, which shows that they work and measures nothing of interest.
"""

import importlib.metadata
import json
import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.capacity.chips import Chip, chip_of
from benchmarks.engine import StepBenchmark
from benchmarks.gpu import checks as gpu_checks
from benchmarks.gpu import kernel_checks
from benchmarks.measuring import device_name
from benchmarks.roofline import Machine, measure_bandwidth, measure_machine, moe_layers, route_uniformly
from benchmarks.step_timing import StepCase, filled_engine
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.step.graphs import capture
from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import MoE
from mbd_core.models.model_config import Fp8Parts, MoEConfig
from mbd_core.models.quantize import quantize_weights
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.ops.attention.choice import resolve
from mbd_core.ops.experts import expert_products as experts_triton
from mbd_core.ops.experts.expert_products import FULL_ROWS
from mbd_core.ops.machine import best_seconds

TableRow = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Day:
    """The device and the sizes of all sections, and the folder in which a section leaves files for later sections.

    chip  the data sheet from which steps get their budgets; `None` if it is not known
    """

    device: torch.device
    out: Path
    chip: Chip | None = None
    mini: str = "llada2-mini"
    dense: str = "sdar-8b"
    prefixes: tuple[int, ...] = (512, 2048)
    buffers: tuple[int, ...] = (1, 2, 4)
    many_rows: int = 8
    steps: int = 20
    prompt: int = 2048
    soak_seconds: float = 90.0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32


def gpu_day(device: torch.device, out: Path) -> Day:
    """The sizes for a GPU, and its budgets by the device's name."""
    return Day(device=device, out=out, chip=chip_of(device_name(device)))


def toy_day(out: Path) -> Day:
    """Sizes at which all sections together take seconds on a CPU."""
    return Day(
        device=torch.device("cpu"),
        out=out,
        mini="tiny-llada2",
        dense="tiny-sdar",
        prefixes=(32,),
        buffers=(1, 2),
        many_rows=2,
        steps=2,
        prompt=64,
        soak_seconds=1.0,
    )


def machine(day: Day) -> list[TableRow]:
    """Versions, copy bandwidth and the chosen kernels. Raises if no graph can hold the attention, or if the measured
    bandwidth exceeds the chip's data sheet."""
    config = SHAPES["llada2-mini"]
    attention = resolve(
        day.device, day.dtype, config.head_dim, 32, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
    )
    if day.on_gpu and not attention.capturable:
        raise RuntimeError(f"no CUDA graph can hold the attention that was chosen: {attention.describe()}")
    versions = {name: _version(name) for name in ("torch", "triton", "transformers", "vllm", "flash_attn", "kernels")}
    bandwidth = measure_bandwidth(day.device, num_bytes=None if day.on_gpu else 2**22)
    name, share = device_name(day.device), None if day.chip is None else bandwidth / day.chip.bandwidth
    if share is not None and share > 1:
        raise RuntimeError(f"{name} has {bandwidth / 1e9:.0f} GB/s, more than its data sheet: one of both is wrong")
    return [
        {"what": "device", "value": name},
        {"what": "chip", "value": f"{name} is unknown: no budgets" if day.chip is None else day.chip.describe()},
        {"what": "python", "value": platform.python_version()},
        {"what": "cuda", "value": torch.version.cuda},
        *({"what": name, "value": version} for name, version in versions.items()),
        {"what": "bandwidth, GB/s", "value": bandwidth / 1e9},
        {"what": "bandwidth, of the data sheet", "value": share},
        {"what": "attention", "value": attention.name},
        *({"what": f"not {name}", "value": reason} for name, reason in attention.reasons.items()),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def kernels(day: Day) -> Iterator[TableRow]:
    """Every kernel beside its definition, at real sizes; the forms that consist of kernels."""
    yield from gpu_checks.kernel_rows(day.device, small=not day.on_gpu)
    yield from kernel_checks.kernel_form_rows(day.device)


def graphs(day: Day) -> Iterator[TableRow]:
    """Replayed steps beside eager ones, for every kind; steady steps in which every wait is an error."""
    for family in ("sdar", "llada2"):
        model = gpu_checks.check_model(family, day.device)
        tokens, max_rows = (48, 4) if day.on_gpu else (8, 2)
        yield gpu_checks.graphs_are_eager(model, max_tokens=tokens, max_rows=max_rows)
        case = StepCase(rows=2, buffer_size=2, prefix=64, steps=day.steps)
        yield {"model": model.config.architecture, **gpu_checks.steady_steps_never_wait(model, case)}
    for method in gpu_checks.PLANNED:
        yield gpu_checks.planned_forwards_are_eager(method, day.device, max_tokens=tokens)


def steps(
    day: Day, *, shape: str, rows: int, parts: Fp8Parts | None = None, eager: bool = False, uniform: bool = True
) -> Iterator[TableRow]:
    """The step of one shape at every prefix and buffer; with `eager` once more without graphs. Then the kernels that
    each step runs: the profiler comes last, because it may slow everything that is timed after it.

    The routing to experts is uniform, because a random router chooses few experts; without `uniform` it is the
    router's own.
    """
    cases = [
        StepCase(rows=rows, buffer_size=n, prefix=prefix, steps=day.steps)
        for prefix in day.prefixes
        for n in day.buffers
    ]
    if eager:
        cases.append(replace(cases[0], graphs=False))
    config = SHAPES[shape]
    benchmark = StepBenchmark(
        model=shape,
        config=config,
        device=day.device,
        dtype=day.dtype,
        cases=cases,
        fp8=parts,
        uniform_routing=uniform and config.moe is not None,
    )
    benchmark.check()
    speed = measure_machine(day.device, day.dtype) if day.on_gpu else Machine(bandwidth=1e10, flops=1e10)
    model = benchmark.load()
    for case in cases:
        row = _step_row(day, benchmark, model, case, speed)
        yield row
        if day.on_gpu and row["step_over_floor"] < 1:
            raise RuntimeError(f"a step is faster than its floor, so one of the two is measured wrongly: {row}")
    for case in cases:
        yield _nodes_row(day, shape, model, case)


GOAL = 1.3
"""The most that a step is to take, in floors by the chip's data sheet."""


def _step_row(day: Day, benchmark: StepBenchmark, model: Decoder, case: StepCase, speed: Machine) -> TableRow:
    row = benchmark.row(model, case, speed, lambda: None)
    row_of_step = {
        **{key: row[key] for key in ("model", "rows", "prefix", "buffer_size", "fp8", "routing", "graphs", "backend")},
        "step_ms": row["step_seconds"] * 1e3,
        "forward_ms": row["forward_seconds"] * 1e3,
        "floor_ms": row["floor_seconds"] * 1e3,
        "step_over_floor": row["step_over_floor"],
        "touched_experts": row["touched_experts"],
        "gb_per_s": row["floor_bytes"] / row["step_seconds"] / 1e9,
        **_budget(day.chip, row),
    }
    moe, tokens = model.config.moe, case.rows * case.buffer_size * model.config.block_size
    with torch.inference_mode():
        is_fused = moe is not None and moe_layers(model)[0].fuses(tokens)
    if moe is not None and is_fused:
        row_of_step["tiles"] = [*_tiles_in_use(moe, tokens, 1 if benchmark.fp8 else benchmark.dtype.itemsize)]
    return row_of_step


def _budget(chip: Chip | None, row: TableRow) -> TableRow:
    """The milliseconds that the step may take on this chip, and whether it does; nothing for an unknown chip."""
    if chip is None:
        return {"budget_ms": None, "within_budget": None}
    seconds = GOAL * max(row["floor_bytes"] / chip.bandwidth, row["floor_flops"] / chip.flops)
    return {"budget_ms": seconds * 1e3, "within_budget": row["step_seconds"] <= seconds}


def _tiles_in_use(moe: MoEConfig, tokens: int, size: int) -> experts_triton.ExpertTiles:
    """The tiles of a layer's routed and shared experts for `tokens` tokens; `size` is a weight in bytes."""
    tokens_per_expert = tokens * (moe.experts_per_token + moe.num_shared_experts) / moe.num_experts
    return experts_triton.tiles_for(tokens, moe.intermediate_size, size, each=tokens_per_expert)


def _nodes_row(day: Day, shape: str, model: Decoder, case: StepCase) -> TableRow:
    """The kernels that one step of a case runs on the device."""
    engine = filled_engine(model, case)
    for _ in range(4 * day.steps if day.on_gpu else 2):
        engine.step()
    nodes, top = profile_call(engine.step, day.device)
    graphs = engine.graphs
    engine.close()
    case_fields = {"model": shape, "rows": case.rows, "prefix": case.prefix, "buffer_size": case.buffer_size}
    return {**case_fields, "graphs": graphs, "nodes": nodes, "top": top}


def profile_call(
    run: Callable[[], object], device: torch.device, *, most: int = 20
) -> tuple[int | None, list[TableRow]]:
    """The number of kernels, copies and fills that the device ran for one call, and the `most` with the most time.

    On a CPU the number is `None` and the list is of operations.
    """
    on_gpu = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    if on_gpu:
        torch.cuda.synchronize(device)  # earlier launches are not part of the call
    with torch.profiler.profile(activities=kinds) as profile:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    total: dict[str, tuple[int, float]] = {}
    device_type = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    for event in profile.events() or ():
        if event.device_type == device_type:
            count, seconds = total.get(event.name, (0, 0.0))
            total[event.name] = count + 1, seconds + (event.device_time if on_gpu else event.self_cpu_time_total)
    top = sorted(total.items(), key=lambda item: -item[1][1])[:most]
    rows = [{"kernel": name[:80], "count": count, "microseconds": seconds} for name, (count, seconds) in top]
    return (sum(count for count, _ in total.values()) if on_gpu else None), rows


CANDIDATES = [
    experts_triton.ExpertTiles(rows, columns, 128, stages, warps)
    for rows in (16, 32, 64)
    for columns in (32, 64, 128)
    for stages in (2, 3, 4)
    for warps in (4, 8)
]
TILES_FILE = "tiles.jsonl"


def tile_sweep(day: Day) -> Iterator[TableRow]:
    """The best tiles of the fused experts for several numbers of tokens, in bfloat16 and in FP8; later sections of the
    day use them. A layer's router and all its experts are timed, as a step runs them. Tiles of many rows are tried
    where an expert has many tokens, others where it has few."""
    if not day.on_gpu:
        yield {"tokens": None, "not_run": "the fused experts need a GPU"}
        return
    config = replace(SHAPES[day.mini], num_layers=2)
    assert config.moe is not None
    (day.out / TILES_FILE).write_text("")
    models = {2: random_model(config, device=day.device, dtype=day.dtype)}
    models[1] = quantize_weights(random_model(config, device=day.device, dtype=day.dtype), "experts")
    for tokens in TOKEN_COUNTS:
        for size, model in models.items():
            layer = moe_layers(route_uniformly(model, num_tokens=TOKEN_COUNTS[-1]))[0]
            x_TD = torch.randn(tokens, config.hidden_size, device=day.device, dtype=day.dtype)
            row = _best_tiles(day, layer, config.moe, x_TD, size)
            with (day.out / TILES_FILE).open("a") as file:  # at once: a later search may fail, or take too long
                file.write(json.dumps(row) + "\n")
            yield row


TOKEN_COUNTS = (32, 64, 128, 256, 512, 1024)
"""Numbers of tokens that the sweep finds tiles for."""


def _best_tiles(day: Day, layer: MoE, moe: MoEConfig, x_TD: Tensor, size: int) -> TableRow:
    """The fastest candidate for these tokens, and the default; `size` are the bytes of a weight."""
    tokens, width = len(x_TD), moe.intermediate_size
    default = _tiles_in_use(moe, tokens, size)
    seconds_of: dict[experts_triton.ExpertTiles, float] = {}
    for tiles in dict.fromkeys((default, *CANDIDATES)):
        if tiles != default and (tiles.rows == FULL_ROWS) != (default.rows == FULL_ROWS):
            continue
        experts_triton.TILES[tokens, width, size] = tiles
        seconds = _graph_seconds(day, partial(layer.parts, x_TD, None, shares=True))
        if seconds is not None:
            seconds_of[tiles] = seconds
    best = min(seconds_of, key=lambda tiles: seconds_of[tiles])
    experts_triton.TILES[tokens, width, size] = best
    return {
        "tokens": tokens,
        "width": width,
        "bytes": size,
        "tiles": [*best],
        "microseconds": seconds_of[best] * 1e6,
        "default_tiles": [*default],
        "default": seconds_of[default] * 1e6,
        "tried": len(seconds_of),
    }


@torch.inference_mode()
def _graph_seconds(day: Day, run: Callable[[], object]) -> float | None:
    """Seconds of a call as a graph, `None` where these tiles do not fit into the chip's shared memory."""
    try:
        graph, _ = capture(run, device=day.device, warm_up=1)
    except experts_triton.too_large():
        return None
    seconds = best_seconds(graph.replay, day.device, 3, calls=20)
    graph.reset()
    return seconds


def swept_steps(day: Day, *, rows: int, parts: Fp8Parts | None = None) -> Iterator[TableRow]:
    """`steps` of the mixture with the tiles that the sweeps of this day found best."""
    path = day.out / TILES_FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        # this process measures and ends; the table in the source changes when its numbers are copied there
        tiles = experts_triton.ExpertTiles(*row["tiles"])
        experts_triton.TILES[row["tokens"], row["width"], row["bytes"]] = tiles
    yield from steps(day, shape=day.mini, rows=rows, parts=parts)


def prefill(day: Day) -> list[TableRow]:
    """`Day.prompt` tokens of a longer prompt stored in one step, in which nothing decodes."""
    model = random_model(SHAPES[day.mini], device=day.device, dtype=day.dtype)
    route_uniformly(model, num_tokens=day.prompt)
    pages = 2 * (2 * day.prompt // 32 + 8)
    sizes = EngineConfig(
        max_rows=1, num_pages=pages, page_size=32, max_prefill_tokens=day.prompt, prefix_caching=False, graphs=False
    )
    engine = Engine(model, sizes)
    seconds = []
    for number in range(4):
        request = _request(number, random.Random(number), SHAPES[day.mini].vocab_size, prompt=2 * day.prompt, tokens=1)
        engine.add(request)
        start = time.perf_counter()
        engine.step()
        if day.on_gpu:
            torch.cuda.synchronize(day.device)
        seconds.append(time.perf_counter() - start)
        engine.abort(request.request_id)
    best = min(seconds[1:])
    return [{"model": day.mini, "stored": day.prompt, "ms": best * 1e3, "tokens_per_s": day.prompt / best}]


def soak(day: Day) -> list[TableRow]:
    """Requests that join, end, are aborted and preempted, with and without drawing; nothing is lost or leaks."""
    model = gpu_checks.check_model("llada2", day.device)
    engine = Engine(model, EngineConfig(max_rows=4, num_pages=64, page_size=32, max_prefill_tokens=256))
    decoding = DecodingConfig(block_size=32, buffer_size=4, tau_m2t=0.5, tau_add=0.1)
    engine.prepare(decoding)
    rng, deadline = random.Random(0), time.monotonic() + day.soak_seconds
    counts = dict.fromkeys(("added", "finished", "aborted", "preempted", "steps"), 0)
    memory: list[int] = []
    ids: list[str] = []
    while time.monotonic() < deadline or engine.has_work:
        if time.monotonic() < deadline and engine.num_known < 8:
            engine.add(_request(counts["added"], rng, model.config.vocab_size - 8, tokens=rng.randint(4, 96)))
            ids.append(str(counts["added"]))
            counts["added"] += 1
        if ids and rng.random() < 0.02:
            counts["aborted"] += engine.abort(ids.pop(rng.randrange(len(ids)))) is not None
        if rng.random() < 0.02:
            counts["preempted"] += engine.preempt() is not None
        counts["finished"] += sum(step.output is not None for step in engine.step())
        counts["steps"] += 1
        if day.on_gpu and counts["steps"] % 50 == 0:
            memory.append(torch.cuda.memory_allocated(day.device))
    engine.check_integrity()
    if counts["finished"] + counts["aborted"] != counts["added"]:
        raise RuntimeError(f"requests were lost: {counts}")
    growth = max(memory[len(memory) // 2 :], default=0) - max(memory[: len(memory) // 2], default=0)
    report = engine.graph_report()
    engine.close()
    return [{**counts, "memory_growth_bytes": growth, **report}]


def _request(number: int, rng: random.Random, vocabulary: int, *, tokens: int, prompt: int | None = None) -> Request:
    return Request(
        request_id=str(number),
        prompt=tuple(rng.randrange(vocabulary) for _ in range(prompt or rng.randint(1, 200))),
        max_tokens=tokens,
        decoding=DecodingConfig(block_size=32, buffer_size=4, tau_m2t=0.5, tau_add=0.1),
        sampling=Sampling(temperature=rng.choice((0.0, 0.0, 0.8)), top_p=rng.choice((1.0, 0.9)), seed=number),
        ignore_eos=True,
    )


_until_exit: dict[str, Engine] = {}  # engines that live until the interpreter ends


def clean_exit(day: Day) -> list[TableRow]:
    """An engine with graphs is left as it is, a step still under way: the process must end by itself, with code 0."""
    engine = _until_exit["engine"] = filled_engine(
        gpu_checks.check_model("sdar", day.device), StepCase(rows=2, buffer_size=2, prefix=64)
    )
    for _ in range(3):
        engine.step()
    return [{"steps": 3, **engine.graph_report()}]
