"""Benchmark the load-adaptive buffer: fixed buffer sizes beside a block budget, at 1 to 64 requests at once."""

from functools import partial
from typing import Annotated, Any

import typer
from tqdm import tqdm

from benchmarks.tables import markdown
from jobs.command_line import (
    DATA,
    ENGINE,
    MODEL,
    OUTPUT,
    JsonFile,
    MaxTokens,
    OwnThreads,
    command,
    command_text,
    numbers,
)
from mbd_core.files import check_new_file, write_json
from mbd_core.models.shapes import SHAPES

Name = Annotated[
    str,
    typer.Option(
        "--model",
        help=f"A shipped model's name or a folder; or a shape, with random weights: {', '.join(SHAPES)}.",
        rich_help_panel=MODEL,
    ),
]
Concurrency = Annotated[str, typer.Option(metavar="N,...", help="Requests at once.", rich_help_panel=DATA)]
BufferSizes = Annotated[
    str, typer.Option("--buffer", metavar="N,...", help="Fixed buffer sizes.", rich_help_panel=DATA)
]
Budgets = Annotated[
    str,
    typer.Option("--budget", metavar="N,...", help="Block budgets, for the largest buffer.", rich_help_panel=DATA),
]
Answers = Annotated[int, typer.Option(help="Measured answers a row, at least 16 in all.", min=1, rich_help_panel=DATA)]
Repeats = Annotated[int, typer.Option(help="Repetitions, of which the fastest counts.", min=1, rich_help_panel=ENGINE)]
Static = Annotated[
    bool | None,
    typer.Option(
        "--static/--dynamic",
        help="Every slot of every row, or resident slots only (default: static on a GPU)",
        rich_help_panel=ENGINE,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda (default: the GPU if there is one)", rich_help_panel=ENGINE)
]
Predict = Annotated[
    str | None, typer.Option(metavar="SHAPE", help="Also compute the table of this model.", rich_help_panel=OUTPUT)
]
Bandwidth = Annotated[float, typer.Option(help="GB/s of the machine to compute it for.", rich_help_panel=OUTPUT)]
Tflops = Annotated[float, typer.Option(help="TFLOP/s of that machine, in 16 bits.", rich_help_panel=OUTPUT)]
Prefix = Annotated[int, typer.Option(help="Stored tokens of each sequence there.", min=0, rich_help_panel=OUTPUT)]

LEAST_ANSWERS = 16


def run(
    context: typer.Context,
    *,
    model: Name = "tiny-mbd",
    concurrency: Concurrency = "1,2,4,8,16,32,64",
    buffer: BufferSizes = "1,2,4",
    budget: Budgets = "16",
    max_tokens: MaxTokens = 128,
    answers: Answers = 2,
    repeats: Repeats = 3,
    static: Static = None,
    device: Device = None,
    threads: OwnThreads = None,
    predict: Predict = None,
    bandwidth: Bandwidth = 3350.0,
    tflops: Tflops = 989.0,
    prefix: Prefix = 512,
    json: JsonFile = None,
) -> None:
    """Tokens a second and tokens per forward of fixed buffer sizes and of block budgets, by the requests at once.

    A request follows as soon as another ends. --predict computes from a roofline what the measured tokens per forward
    would give with another model on another machine; its default is an H100's data sheet.
    """
    import torch

    from benchmarks.buffer_load import COLUMNS, Buffer, load_model_and_requests, measure_load, predict_load
    from benchmarks.roofline import Machine
    from benchmarks.step_rows import device_name, usable_device

    if json is not None:
        check_new_file(json)
    if predict is not None and predict not in SHAPES:
        raise ValueError(f"--predict {predict} must be one of {', '.join(SHAPES)}")
    if min(bandwidth, tflops) <= 0:
        raise ValueError(f"--bandwidth {bandwidth} and --tflops {tflops} must be above 0")
    if threads is not None:
        torch.set_num_threads(threads)
    place = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    at_once, sizes = numbers(concurrency, "--concurrency"), numbers(buffer, "--buffer")
    buffers = [Buffer(size=size) for size in sizes]
    buffers += [Buffer(size=max(sizes), budget=blocks) for blocks in numbers(budget, "--budget")]
    load = load_model_and_requests(model, max_tokens=max_tokens, device=place, number=max(64, *at_once))
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(at_once) * len(buffers) * repeats, unit="run", desc=model, mininterval=1.0) as bar:
        for number in at_once:
            rows += measure_load(
                load,
                buffers,
                rows=number,
                answers=max(LEAST_ANSWERS, answers * number),
                repeats=repeats,
                static=static,
                tick=partial(bar.update, 1),
            )
    print(f"{model}, {device_name(place)}, {torch.get_num_threads()} threads; the fastest of {repeats} runs\n")
    print(markdown(rows, COLUMNS))
    computed: list[dict[str, Any]] = []
    if predict is not None:
        tpf = {r["buffer_size"]: r["tpf"] for r in rows if r["block_budget"] is None and r["rows"] == max(at_once)}
        machine = Machine(bandwidth=bandwidth * 1e9, flops=tflops * 1e12)
        computed = predict_load(SHAPES[predict], machine, tpf, rows=at_once, prefix=prefix)
        print(f"\nComputed: {predict} in 16 bits at {bandwidth:g} GB/s and {tflops:g} TFLOP/s, prefix {prefix}\n")
        _print_computed(computed, sizes)
    if json is not None:
        write_json(json, {"settings": {"command": command_text(context)}, "rows": rows, "computed": computed})


def _print_computed(rows: list[dict[str, Any]], sizes: list[int]) -> None:
    columns = {f"tps_{size}": f"tok/s at N_buf={size}|.0f" for size in sizes}
    print(markdown(rows, {"rows": "at once", **columns, "best": "best N_buf", "budget": "its blocks in all"}))


main = command(run, "python -m benchmarks buffer")
