"""The sub-commands that measure the engine, training and FP8 weights on this machine: their options and help.

What they measure is in the modules of the same names, which are imported when a command runs.
"""

from __future__ import annotations

import math
import platform
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from tqdm import tqdm

from benchmarks.measuring import device_name, markdown, usable_device
from jobs.command_line import (
    DATA,
    DECODING,
    ENGINE,
    MODEL,
    OUTPUT,
    JsonFile,
    MaxTokens,
    ModelName,
    OwnThreads,
    Seed,
    command,
    command_text,
)
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.files import check_new_file, write_json
from mbd_core.models.model_config import Parts
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.recipes.shipped import TINY_MODEL
from mbd_core.options import names, numbers

TRAINED = {"tiny": TINY_MODEL, **SHAPES}
LEAST_ANSWERS = 16

Device = Annotated[
    str | None, typer.Option(help="cpu or cuda (default: the GPU if there is one)", rich_help_panel=ENGINE)
]
Static = Annotated[
    bool | None,
    typer.Option(
        "--static/--dynamic",
        help="Every slot of every row, or resident slots only (default: static on a GPU)",
        rich_help_panel=ENGINE,
    ),
]
Repeats = Annotated[
    int, typer.Option(help="Repetitions, in turn with what is compared.", min=1, rich_help_panel=ENGINE)
]
Buffer = Annotated[
    str, typer.Option("--buffer", metavar="N,...", help="Slots of each sequence.", rich_help_panel=DATA)
]


def _begin(json: Path | None, threads: int | None) -> None:
    """Refuse an existing file of results, and set torch's threads."""
    import torch

    if json is not None:
        check_new_file(json)
    if threads is not None:
        torch.set_num_threads(threads)


def _write(json: Path | None, context: typer.Context, settings: dict[str, Any], **parts: Any) -> None:
    """Write the results with the command that gave them, where a file is named."""
    if json is not None:
        write_json(json, {"settings": {"command": command_text(context), **settings}, **parts})


def run_decoders(
    context: typer.Context,
    *,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Models whose name begins with one of these (default: all)", rich_help_panel=MODEL
        ),
    ] = None,
    fixtures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of model folders, for the families' models (default: random weights)",
            rich_help_panel=MODEL,
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests, and how many are decoded at once.", min=1, rich_help_panel=DATA)
    ] = 8,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Methods whose name contains one of these (default: all)",
            rich_help_panel=DECODING,
        ),
    ] = None,
    max_tokens: MaxTokens = 64,
    repeats: Repeats = 5,
    threads: OwnThreads = None,
    json: JsonFile = None,
) -> int:
    """Every decoder beside a plain loop of the same method: tokens, forwards, and wall time.

    A row is one method on one model. The plain loop decodes one request after another without an engine; the engine
    decodes the same requests one after another, and all at once; the medians of the repetitions count. The exit code
    is 1 if the engine's tokens are not the plain loop's (where they differ in float32, float64 decides). The models
    are the shipped ones, and one of each family at the size of the parity fixtures.
    """
    import torch

    from benchmarks.decoders import chosen_cases, measure_method, model_cases, print_rows

    _begin(json, threads)
    pairs = chosen_cases(
        model_cases(fixtures, num_requests=requests, max_tokens=max_tokens),
        None if models is None else names(models, "--models"),
        None if methods is None else names(methods, "--methods"),
    )
    rows = []
    with tqdm(total=len(pairs) * repeats * 3, unit="run", desc="decoders", mininterval=1.0) as bar:
        for model, method in pairs:
            bar.set_postfix_str(f"{model.label}, {method.label}", refresh=False)
            tick = partial(bar.update, 1)
            rows.append(measure_method(model, method, max_tokens=max_tokens, repeats=repeats, tick=tick))
    settings = {
        "requests_at_once": requests,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    _write(json, context, settings, rows=rows)
    print(f"N = {requests} requests at once; medians of {repeats}\n")
    return print_rows(rows)


def run_engine(
    context: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Option("--model", help=f"A model folder, or a shape: {', '.join(SHAPES)}.", rich_help_panel=MODEL),
    ] = "sdar-50m",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="(default: bfloat16 on a GPU, else float32)", rich_help_panel=MODEL),
    ] = None,
    fp8: Annotated[
        Parts | None,
        typer.Option(
            help="Round these weights to FP8; blocks: the experts, with a scale for each block, an FP8 folder's own.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    uniform_routing: Annotated[
        bool, typer.Option("--uniform-routing", help="Tokens choose their experts evenly.", rich_help_panel=MODEL)
    ] = False,
    rows: Annotated[str, typer.Option(metavar="N,...", help="Sequences.", rich_help_panel=DATA)] = "8",
    prefix: Annotated[
        str, typer.Option(metavar="N,...", help="Stored tokens of each sequence.", rich_help_panel=DATA)
    ] = "512",
    buffer: Buffer = "1,2,4",
    tpf: Annotated[
        float | None,
        typer.Option(
            help="Tokens a forward, to state TPS (default: Table 3's, 3.47 with one slot, else 6.19)",
            rich_help_panel=DATA,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Measured steps.", min=1, rich_help_panel=ENGINE)] = 20,
    static: Static = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="On a GPU, run static steps without CUDA graphs.", rich_help_panel=ENGINE)
    ] = False,
    attention: Annotated[
        str | None, typer.Option(help="The attention kernel (default: the best there is)", rich_help_panel=ENGINE)
    ] = None,
    device: Device = None,
    threads: OwnThreads = None,
    trace: Annotated[bool, typer.Option("--trace", help="Measure a trace recorder too.", rich_help_panel=OUTPUT)] = (
        False
    ),
    json: JsonFile = None,
) -> None:
    """A decode step of the engine beside its bare forward and beside the least time the machine allows.

    Every combination of rows, prefix and buffer is one row: the median whole step, the median forward on the identical
    batches, and the roofline floor, whose bandwidth and FLOP/s are measured first. benchmarks/README.md explains the
    columns. The shape sdar-null has a forward of nearly nothing: its step is the engine's own work.
    """
    import torch

    from benchmarks.engine import StepBenchmark, print_report, shape_or_folder
    from benchmarks.step_timing import WARM_UP, StepCase

    _begin(json, threads)
    if tpf is not None and not 0 < tpf < math.inf:
        raise ValueError(f"--tpf {tpf} must be a number above 0")
    place = usable_device(device)
    if eager and (place.type != "cuda" or static is False):
        raise ValueError("--eager leaves CUDA graphs out, which exist only on a GPU and without --dynamic")
    common = partial(StepCase, steps=steps, static=static, attention=attention, trace=trace)
    sizes = product(numbers(prefix, "--prefix"), numbers(rows, "--rows"), numbers(buffer, "--buffer"))
    benchmark = StepBenchmark(
        model=model,
        config=shape_or_folder(model),
        device=place,
        dtype=getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32")),
        cases=[
            common(prefix=length, rows=number, buffer_size=slots, graphs=False if eager else None)
            for length, number, slots in sizes
        ],
        fp8=fp8,
        tpf=tpf,
        uniform_routing=uniform_routing,
    )
    benchmark.check()
    with tqdm(total=len(benchmark.cases) * (steps + WARM_UP), unit="step", desc=model, mininterval=1.0) as bar:
        report = benchmark.run(tick=partial(bar.update, 1))
    _write(json, context, **report)
    print_report(report, trace=trace)


def run_buffer(
    context: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help=f"A shipped model's name or a folder; or a shape, with random weights: {', '.join(SHAPES)}.",
            rich_help_panel=MODEL,
        ),
    ] = "tiny-mbd",
    concurrency: Annotated[
        str, typer.Option(metavar="N,...", help="Requests at once.", rich_help_panel=DATA)
    ] = "1,2,4,8,16,32,64",
    buffer: Buffer = "1,2,4",
    budget: Annotated[
        str,
        typer.Option("--budget", metavar="N,...", help="Block budgets, for the largest buffer.", rich_help_panel=DATA),
    ] = "16",
    max_tokens: MaxTokens = 128,
    answers: Annotated[
        int, typer.Option(help="Measured answers a row, at least 16 in all.", min=1, rich_help_panel=DATA)
    ] = 2,
    repeats: Repeats = 3,
    static: Static = None,
    device: Device = None,
    threads: OwnThreads = None,
    predict: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Also compute the table of this model.", rich_help_panel=OUTPUT)
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(help="GB/s of the machine to compute it for.", rich_help_panel=OUTPUT)
    ] = 3350.0,
    tflops: Annotated[
        float, typer.Option(help="TFLOP/s of that machine, in 16 bits.", rich_help_panel=OUTPUT)
    ] = 989.0,
    prefix: Annotated[
        int, typer.Option(help="Stored tokens of each sequence there.", min=0, rich_help_panel=OUTPUT)
    ] = 512,
    json: JsonFile = None,
) -> None:
    """Tokens a second and tokens per forward of fixed buffer sizes and of block budgets, by the requests at once.

    A request follows as soon as another ends; the fastest repetition counts. --predict computes from a roofline what
    the measured tokens per forward would give with another model on another machine; its default is an H100's data
    sheet.
    """
    import torch

    from benchmarks.buffer import COLUMNS, BufferCase, load_model_and_requests, measure_load, predict_load
    from benchmarks.roofline import Machine

    _begin(json, threads)
    if predict is not None and predict not in SHAPES:
        raise ValueError(f"--predict {predict} must be one of {', '.join(SHAPES)}")
    if min(bandwidth, tflops) <= 0:
        raise ValueError(f"--bandwidth {bandwidth} and --tflops {tflops} must be above 0")
    place = usable_device(device)
    at_once, sizes = numbers(concurrency, "--concurrency"), numbers(buffer, "--buffer")
    buffers = [BufferCase(size=size) for size in sizes]
    buffers += [BufferCase(size=max(sizes), budget=blocks) for blocks in numbers(budget, "--budget")]
    decoder, requests = load_model_and_requests(model, max_tokens=max_tokens, device=place, number=max(64, *at_once))
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(at_once) * len(buffers) * repeats, unit="run", desc=model, mininterval=1.0) as bar:
        for number in at_once:
            measured = measure_load(
                decoder,
                requests,
                buffers,
                rows=number,
                answers=max(LEAST_ANSWERS, answers * number),
                repeats=repeats,
                static=static,
                tick=partial(bar.update, 1),
            )
            rows += [{"model": model, **row} for row in measured]
    print(f"{model}, {device_name(place)}, {torch.get_num_threads()} threads; the fastest of {repeats} runs\n")
    print(markdown(rows, COLUMNS))
    computed: list[dict[str, Any]] = []
    if predict is not None:
        tpf = {r["buffer_size"]: r["tpf"] for r in rows if r["block_budget"] is None and r["rows"] == max(at_once)}
        machine = Machine(bandwidth=bandwidth * 1e9, flops=tflops * 1e12)
        computed = predict_load(SHAPES[predict], machine, tpf, rows=at_once, prefix=prefix)
        columns = {f"tps_{size}": f"tok/s at N_buf={size}|.0f" for size in sizes}
        columns = {"rows": "at once", **columns, "best": "best N_buf", "budget": "its blocks in all"}
        print(f"\nComputed: {predict} in 16 bits at {bandwidth:g} GB/s and {tflops:g} TFLOP/s, prefix {prefix}\n")
        print(markdown(computed, columns))
    _write(json, context, {}, rows=rows, computed=computed)


def run_train(
    context: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="SHAPE,...", help=f"Shapes, with random weights: {', '.join(TRAINED)}.", rich_help_panel=MODEL
        ),
    ] = "tiny,sdar-50m",
    layouts: Annotated[
        str,
        typer.Option(
            metavar="G:N,...", help="Largest noise-groups, each with a number of random layouts.", rich_help_panel=DATA
        ),
    ] = "2:0,2:2,4:2,4:3",
    length: Annotated[str, typer.Option(metavar="N,...", help="Tokens of a sample.", rich_help_panel=DATA)] = "128",
    count: Annotated[
        bool, typer.Option("--count", help="Count operations instead of measuring.", rich_help_panel=OUTPUT)
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Count the padding of batches of this prepared data, with --pack and without, instead of measuring.",
            rich_help_panel=DATA,
        ),
    ] = None,
    pack: Annotated[
        str,
        typer.Option(metavar="N,...", help="With --data: tokens of samples that are packed.", rich_help_panel=DATA),
    ] = "2048",
    batch: Annotated[int, typer.Option(help="With --data: samples of a step.", min=1, rich_help_panel=DATA)] = 32,
    micro_batch: Annotated[
        str, typer.Option(metavar="N,...", help="With --data: sequences computed at once.", rich_help_panel=DATA)
    ] = "1,4",
    repeats: Repeats = 3,
    device: Device = None,
    threads: OwnThreads = None,
    json: JsonFile = None,
) -> None:
    """Samples a second and peak memory of one training sequence with a shared clean stream, and of separate ones.

    Measured is forward and backward of one sample, both ways in turn, in float32; on a CPU in seconds of the
    processor; and what it gains that the last layer's MLP runs on labelled tokens alone. --count counts the forward's
    operations instead, also of models that fit on no machine here: those of dense attention, and of FlexAttention's
    blocks. --data counts the padding of batches, in the shapes' blocks.
    """
    import torch

    from benchmarks import training
    from mbd_core.multitf.states.mask import TrainingAttention

    _begin(json, threads)
    groups, lengths, shapes = [_layouts(text) for text in layouts.split(",")], numbers(length, "--length"), {}
    for name in model.split(","):
        if name not in TRAINED:
            raise ValueError(f"--model {name} must be one of {', '.join(TRAINED)}")
        shapes[name] = TRAINED[name]
        for tokens in lengths:
            training.check_length(tokens, TRAINED[name].block_size)
    cases = [{"length": tokens, "max_group": g, "num_random": n} for tokens in lengths for g, n in groups]
    if not (count or data):
        place = usable_device(device)
        attention = TrainingAttention("auto", place)
        print(f"{device_name(place)}, {torch.get_num_threads()} threads, {attention.describe()}; {repeats} steps each")
    rows: list[dict[str, Any]] = []
    for name, config in shapes.items():
        if data is not None:
            together, packs = numbers(micro_batch, "--micro-batch"), numbers(pack, "--pack")
            of_model = training.padding_rows(config, data, micro_batches=together, packs=packs, batch_size=batch)
            title = f"{of_model[0]['samples']} samples in blocks of {config.block_size}, {batch} a step"
            columns = training.PADDING
        elif count:
            of_model = [training.count_row(config, **case) for case in cases]
            title, columns = "TFLOP of one sample's forward", training.COUNTED
        else:
            measure = partial(training.measure_row, training.random_model(config, place), attention, repeats=repeats)
            of_model = [measure(**case) for case in tqdm(cases, unit="row", desc=name, mininterval=1.0)]
            title, columns = f"forward and backward of one sample of {length} tokens", training.COLUMNS
        print(f"\n{name}: {title}\n\n{markdown(of_model, columns)}")
        rows += [{"model": name, **row} for row in of_model]
    _write(json, context, {}, rows=rows)


def _layouts(text: str) -> tuple[int, int]:
    group, mark, number = text.partition(":")
    if not (mark and group.isdecimal() and number.isdecimal() and int(group) >= 2):
        raise ValueError(f"--layouts {text} must be G:N, a group size of at least 2 and a number of random layouts")
    return int(group), int(number)


def run_fp8(
    context: typer.Context,
    *,
    model: ModelName,
    limit: Annotated[int, typer.Option(help="Sequences that are compared.", min=1, rich_help_panel=DATA)] = 16,
    seed: Seed = 0,
    parts: Annotated[
        Parts | None,
        typer.Option(help="What is rounded (default: the experts, or all without any)", rich_help_panel=ENGINE),
    ] = None,
    json: JsonFile = None,
) -> None:
    """What FP8 weights cost a model in accuracy, and what they save in memory.

    The model's logits are compared before and after rounding, at half of the positions of each solution: with all
    tokens shown, and with those positions masked as in decoding. The texts are both tasks' test problems; a model
    folder without a tokenizer gets random ids. It runs on the GPU if there is one.
    """
    import torch

    from benchmarks.fp8 import COLUMNS, fp8_rows

    _begin(json, None)
    rows = fp8_rows(model_folder(model), parts=parts, num_sequences=limit, seed=seed, device=usable_device(None))
    _write(json, context, {"torch": torch.__version__}, rows=rows)
    print(markdown(rows, COLUMNS))
    after, before, dtype = rows[0]["bytes_after"], rows[0]["bytes_before"], rows[0]["dtype"]
    print(f"\nweights: {after:,} bytes, {before:,} before ({after / before:.2f} of {dtype})")


decoders = command(run_decoders, "python -m benchmarks decoders")
engine = command(run_engine, "python -m benchmarks engine")
buffer = command(run_buffer, "python -m benchmarks buffer")
train = command(run_train, "python -m benchmarks train")
fp8 = command(run_fp8, "python -m benchmarks fp8")
