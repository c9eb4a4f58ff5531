"""The sub-commands that compute a deployment: `capacity`, `arrivals`, `beyond`; and `agreement`, which checks them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from tqdm import tqdm

from benchmarks.capacity.beyond import HOST_COLUMNS, LINK_SHARE, POOL_COLUMNS, Turns, host_tier_rows, pool_rows
from benchmarks.capacity.plan import PLAN_COLUMNS, Demand, Place, best_plan, gpu_place
from benchmarks.capacity.step_model import CPU, Deployment
from benchmarks.capacity.traffic import Routing, Traffic
from benchmarks.measuring import markdown
from jobs.command_line import JsonFile, OwnThreads, Seed
from mbd_core.command_line import CommandText, Fields, command
from mbd_core.engine.config import EngineConfig
from mbd_core.fields import CLUSTER, DATA, DECODING, LOAD, MODEL, Flag, Ge, Gt, Le
from mbd_core.files import check_new_file, write_json
from mbd_core.models.shapes import SHAPES

if TYPE_CHECKING:
    from mbd_core.decoding.blocks.config import DecodingConfig

FOUR_ROWS = EngineConfig(max_rows=4, buffer_size=2, num_pages=512)
SMALL_TRAFFIC = Traffic(sessions=24, prompt=192, output=64)


def place_of(deployment: Deployment) -> Place:
    """Where replicas of a deployment run. On this CPU the steps are measured, on one thread."""
    if deployment.chip != CPU:
        return gpu_place(deployment)
    import torch

    from benchmarks.capacity.agreement import measured_steps
    from mbd_core.ops.machine import free_host_memory

    torch.set_num_threads(1)
    steps = measured_steps(deployment.config)
    free = free_host_memory() - steps.cost.stored_bytes
    return Place(
        name=f"{deployment.model} on this CPU, one thread",
        config=deployment.config,
        steps=steps,
        page_bytes=deployment.memory_fraction * free / 2,  # as the engine takes: mbd_core/engine/build.py
        static=False,
    )


def run_capacity(
    command_line: CommandText,
    *,
    deployment: Deployment,
    demand: Demand,
    json: JsonFile = None,
) -> None:
    """How many replicas a load needs on a chip, with which buffer and batch, and what memory they take.

    A row for each buffer size: the batch at which the fewest replicas meet the limits, and the reason against a larger
    batch. Steps on a GPU are computed from the roofline, a data sheet and estimates of the
    engine's own part; steps on a CPU are measured. benchmarks/capacity/README.md has the model. None of it ran on a
    GPU.
    """
    if json is not None:
        check_new_file(json)
    longest = demand.context + demand.output
    if longest > deployment.config.max_positions:
        raise ValueError(
            f"--context {demand.context} and --output {demand.output} exceed the {deployment.config.max_positions} "
            f"positions of {deployment.model}"
        )
    if deployment.chip != CPU:
        deployment.check_memory(longest)
    place = place_of(deployment)
    rows, refusals = [], []
    for slots, tpf in zip(demand.buffer, demand.tpf, strict=True):
        try:
            rows.append(best_plan(place, demand, buffer_size=slots, tpf=tpf))
        except ValueError as error:  # another buffer may meet the limits
            refusals.append(error)
    if not rows:
        raise refusals[0]
    print(f"{place.name}; room for {place.page_tokens} tokens\n\n{markdown(rows, PLAN_COLUMNS)}")
    for refusal in refusals:
        print(f"\n{refusal}")
    if json is not None:
        write_json(json, {"settings": {"command": command_line}, "rows": rows})


def run_arrivals(
    command_line: CommandText,
    *,
    deployment: Deployment,
    traffic: Traffic,
    replicas: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag("Engines.", CLUSTER, commas=True)] = (1,),
    rate_each: Annotated[
        bool, Flag("--rate is the rate of each replica, and so the whole rate grows with their number.", LOAD)
    ] = False,
    routing: Annotated[Routing, Flag("Where requests go; load: the less busy of two.", CLUSTER)] = "prefix",
    buffer: Annotated[int, Ge(1), Flag("Slots of a sequence.", DECODING)] = 2,
    tpf: Annotated[float, Gt(0), Flag("Tokens a forward.", DECODING)] = 6.19,
    engine: Annotated[
        EngineConfig,
        Fields(
            *("max_rows", "num_pages", "page_size", "max_prefill_tokens", "max_step_seconds", "prefix_caching"),
            "host_kv_bytes",
        ),
    ],
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """Arrivals on simulated replicas: the real router, admission and scheduler, with computed steps and their clock.

    A row for each number of replicas: time to first tokens, tokens a second of a request (from its arrival to its end)
    and of all requests together, the share of prompts that prefix caches held, and the term that bounds most of the
    steps' time. The same seed gives the same rows. What a gateway and HTTP add is not in them.
    """
    from benchmarks.capacity.arrivals import COLUMNS, Simulated, serve
    from benchmarks.capacity.counted_blocks import rate_for
    from benchmarks.capacity.simulated_engine import SimulatedEngine, weightless
    from mbd_core.decoding.blocks.config import DecodingConfig

    if json is not None:
        check_new_file(json)
    config = deployment.config
    if traffic.longest > config.max_positions:
        raise ValueError(
            f"a session of up to {traffic.longest} tokens exceeds the {config.max_positions} positions of "
            f"{deployment.model}; lower --prompt, --output, --turns or --turn-tokens"
        )
    if deployment.chip != CPU:
        deployment.check_memory(traffic.longest)
    place = place_of(deployment)
    decoding: DecodingConfig = DecodingConfig(block_size=config.block_size, buffer_size=buffer)
    rate = rate_for(tpf, decoding, length=traffic.output)
    model = weightless(config)
    page_size = engine.resolve_page_size(config.block_size)
    engine = replace(
        engine,
        buffer_size=buffer,
        num_pages=engine.num_pages or place.page_tokens // page_size,
        static_shapes=place.static,
        overlap=place.static,
    )
    page_bytes = page_size * place.steps.cost.kv_token_bytes
    page_seconds = 0.0 if deployment.chip == CPU else page_bytes / (LINK_SHARE * deployment.sheet.pcie)
    print(f"{place.name}; room for {place.page_tokens} tokens\n")
    rows = []
    for number in replicas:
        load = replace(traffic, rate=traffic.rate * (number if rate_each else 1))
        engines = [
            SimulatedEngine(
                model, engine, steps=place.steps, rate=rate, page_seconds=page_seconds, seed=seed + replica
            )
            for replica in range(number)
        ]
        total = load.turns * (load.sessions or 20 * number)
        with tqdm(total=total, unit="request", desc=f"{number} replicas", mininterval=1.0) as bar:
            timed = [Simulated(simulated) for simulated in engines]
            served = serve(timed, load, decoding, routing=routing, seed=seed, tick=partial(bar.update, 1))
        bounds: dict[str, float] = {}
        for simulated in engines:
            for name, seconds in simulated.bounds.items():
                bounds[name] = bounds.get(name, 0.0) + seconds
        row = served.row(number, load)
        rows.append({"rate": load.rate, **row, "bound": max(bounds, key=lambda name: bounds[name])})
    columns = {key: title for key, title in COLUMNS.items() if key in rows[0]}
    print(markdown(rows, columns))
    if json is not None:
        write_json(json, {"settings": {"command": command_line}, "rows": rows})


def run_beyond(
    command_line: CommandText,
    *,
    turns: Turns,
    speed: Annotated[float, Gt(0), Flag("Tokens a second of an answer, at least, in the second table.", LOAD)] = 100.0,
    found: Annotated[
        float, Ge(0), Le(0.99), Flag("Share of a prompt that is found in a cache, in the second table.", DATA)
    ] = 0.9,
    json: JsonFile = None,
) -> None:
    """Where pages beyond a replica's GPUs would pay, for the released shapes and the prompts of agents.

    The first table: pages that fell out of the GPUs' memory are copied back from the host's, or computed anew. The
    second: a pool of replicas stores prompts and hands the pages to other replicas, which decode; or each replica does
    both.
    """
    if json is not None:
        check_new_file(json)
    host, pools = list(host_tier_rows(turns)), list(pool_rows(turns, speed=speed, found=found))
    print(f"Pages in the host's memory, over PCIe; {turns.think:g} s between two turns\n")
    print(markdown(host, HOST_COLUMNS) + "\n")
    print(f"Two pools; {speed:g} tokens a second, {found:.0%} found\n\n{markdown(pools, POOL_COLUMNS)}")
    if json is not None:
        write_json(json, {"settings": {"command": command_line}, "host": host, "pools": pools})


AGREEMENT_COLUMNS = {
    "rate": "sessions/s|.3g",
    "requests": "requests",
    "busy_measured": "busy|.0%",
    "ttft_measured": "measured: mean TTFT (ms)|.1f",
    "ttft_predicted": "predicted (ms)|.1f",
    "ttft_ratio": "ratio|.3f",
    "ttft_p90_measured": "measured: p90 (ms)|.1f",
    "ttft_p90_predicted": "predicted p90 (ms)|.1f",
    "ttft_p90_ratio": "ratio of p90|.3f",
    "tps_measured": "measured: tok/s|.2f",
    "tps_ratio": "ratio of tok/s|.3f",
    "busy_ratio": "ratio of busy seconds|.3f",
    "steps_measured": "measured: steps",
    "steps_predicted": "predicted",
    "fixed": "fitted: a forward (ms)|.1f",
    "flops": "GFLOP/s in matrices|.0f",
    "score_flops": "in attention|.0f",
}
MOST_ERROR = 0.15


def run_agreement(
    command_line: CommandText,
    *,
    model: Annotated[str, Flag(f"A shape, with random weights: {', '.join(SHAPES)}.", MODEL)] = "sdar-50m",
    rates: Annotated[
        tuple[Annotated[float, Gt(0)], ...],
        Flag("Sessions that begin in a second of the processor.", LOAD, metavar="R,...", commas=True),
    ] = (0.3, 0.6, 1.0),
    buffer: Annotated[int, Ge(1), Flag("Slots of a sequence.", DECODING)] = 2,
    traffic: Annotated[
        Traffic, Fields("sessions", "burst", "prompt", "output", "vary", "turns", "turn_tokens", "think", "shared")
    ] = SMALL_TRAFFIC,
    engine: Annotated[EngineConfig, Fields("max_rows", "num_pages", "max_prefill_tokens")] = FOUR_ROWS,
    threads: OwnThreads = 1,
    seed: Seed = 0,
    json: JsonFile = None,
) -> int:
    """Predicted beside measured, on this CPU: a simulated engine and a real one get the same arrivals.

    The real engine's steps are timed in seconds of the processor, and its clock stands still between them, so that
    other work on the machine counts little. The step model is fitted to other loads, before and after each compared
    load. The exit code is 1 if a predicted mean time to first tokens, tokens a second or number of steps is more than
    15 % away; the p90 is only shown, because the requests are few.
    """
    import torch

    from benchmarks.capacity.agreement import Agreement
    from mbd_core.decoding.blocks.config import DecodingConfig

    if json is not None:
        check_new_file(json)
    if model not in SHAPES:
        raise ValueError(f"--model {model} must be one of {', '.join(SHAPES)}")
    torch.set_num_threads(threads or 1)
    config = SHAPES[model]
    decoding = DecodingConfig(block_size=config.block_size, buffer_size=buffer, tau_m2t=1.0, tokens_per_step=4)
    agreement = Agreement(
        config=config, engine=replace(engine, buffer_size=buffer), decoding=decoding, traffic=traffic
    )
    total = len(rates) * traffic.turns * (traffic.sessions or 20)
    with tqdm(total=total, unit="request", desc=model, mininterval=1.0) as bar:
        rows = agreement.run(rates, seed=seed, tick=partial(bar.update, 1))
    print(f"{model}, {torch.get_num_threads()} thread, seconds of the processor\n")
    print(markdown(rows, AGREEMENT_COLUMNS))
    names = ("ttft_ratio", "tps_ratio", "steps_ratio")
    worst = max(abs(row[name] - 1) for row in rows for name in names)
    print(f"\nthe largest difference is {worst:.1%}; at most {MOST_ERROR:.0%} is asked")
    if json is not None:
        write_json(json, {"settings": {"command": command_line}, "rows": rows})
    return int(worst > MOST_ERROR)


capacity = command(run_capacity, "python -m benchmarks capacity")
arrivals = command(run_arrivals, "python -m benchmarks arrivals")
beyond = command(run_beyond, "python -m benchmarks beyond")
agreement = command(run_agreement, "python -m benchmarks agreement")
