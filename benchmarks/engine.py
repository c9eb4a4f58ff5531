"""Benchmark the engine's decode step: the options, and the tables."""

import math
from functools import partial
from typing import Annotated, Any, Literal

import typer
from tqdm import tqdm

from benchmarks.tables import markdown
from jobs.command_line import DATA, ENGINE, MODEL, OUTPUT, JsonFile, OwnThreads, command, command_text, numbers
from mbd_core.files import check_new_file, write_json
from mbd_core.models.model_config import Parts
from mbd_core.models.shapes import SHAPES

Dtype = Literal["float32", "bfloat16", "float16"]


ShapeName = Annotated[
    str,
    typer.Option("--model", help=f"A model folder, or a shape: {', '.join(SHAPES)}.", rich_help_panel=MODEL),
]
DtypeName = Annotated[
    Dtype | None, typer.Option(help="(default: bfloat16 on a GPU, else float32)", rich_help_panel=MODEL)
]
Fp8 = Annotated[
    Parts | None,
    typer.Option(
        help="Round these weights to FP8; blocks: the experts, with a scale for each block, an FP8 folder's own.",
        rich_help_panel=MODEL,
    ),
]
Uniform = Annotated[
    bool, typer.Option("--uniform-routing", help="Tokens choose their experts evenly.", rich_help_panel=MODEL)
]
Rows = Annotated[str, typer.Option(metavar="N,...", help="Sequences.", rich_help_panel=DATA)]
Prefix = Annotated[str, typer.Option(metavar="N,...", help="Stored tokens of each sequence.", rich_help_panel=DATA)]
Buffer = Annotated[str, typer.Option(metavar="N,...", help="Slots of each sequence.", rich_help_panel=DATA)]
Tpf = Annotated[
    float | None,
    typer.Option(
        help="Tokens a forward, to state TPS (default: Table 3's, 3.47 with one slot, else 6.19)", rich_help_panel=DATA
    ),
]
Steps = Annotated[int, typer.Option(help="Measured steps.", min=1, rich_help_panel=ENGINE)]
Static = Annotated[
    bool | None,
    typer.Option(
        "--static/--dynamic",
        help="Every slot of every row, or resident slots only (default: static on a GPU)",
        rich_help_panel=ENGINE,
    ),
]
Eager = Annotated[
    bool, typer.Option("--eager", help="On a GPU, run static steps without CUDA graphs.", rich_help_panel=ENGINE)
]
Attention = Annotated[
    str | None, typer.Option(help="The attention kernel (default: the best there is)", rich_help_panel=ENGINE)
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda (default: the GPU if there is one)", rich_help_panel=ENGINE)
]
Trace = Annotated[bool, typer.Option("--trace", help="Measure a trace recorder too.", rich_help_panel=OUTPUT)]


def run(
    context: typer.Context,
    *,
    model: ShapeName = "sdar-50m",
    dtype: DtypeName = None,
    fp8: Fp8 = None,
    uniform_routing: Uniform = False,
    rows: Rows = "8",
    prefix: Prefix = "512",
    buffer: Buffer = "1,2,4",
    tpf: Tpf = None,
    steps: Steps = 20,
    static: Static = None,
    eager: Eager = False,
    attention: Attention = None,
    device: Device = None,
    threads: OwnThreads = None,
    trace: Trace = False,
    json: JsonFile = None,
) -> None:
    """A decode step of the engine beside its bare forward and beside the least time the machine allows.

    Every combination of rows, prefix and buffer is one row: the median whole step, the median forward on the identical
    batches, and the roofline floor, whose bandwidth and FLOP/s are measured first. benchmarks/README.md explains the
    columns. The shape sdar-null has a forward of nearly nothing: its step is the engine's own work.
    """
    import torch

    from benchmarks.step_rows import StepBenchmark, shape_or_folder, usable_device
    from benchmarks.step_timing import WARM_UP, StepCase

    if json is not None:
        check_new_file(json)
    if tpf is not None and not 0 < tpf < math.inf:
        raise ValueError(f"--tpf {tpf} must be a number above 0")
    if threads is not None:
        torch.set_num_threads(threads)
    place = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if eager and (place.type != "cuda" or static is False):
        raise ValueError("--eager leaves CUDA graphs out, which exist only on a GPU and without --dynamic")
    graphs = False if eager else None
    benchmark = StepBenchmark(
        model=model,
        config=shape_or_folder(model),
        device=place,
        dtype=getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32")),
        cases=[
            StepCase(**size, steps=steps, static=static, attention=attention, trace=trace, graphs=graphs)
            for size in _sizes(rows, prefix, buffer)
        ],
        fp8=fp8,
        tpf=tpf,
        uniform_routing=uniform_routing,
    )
    benchmark.check()
    with tqdm(total=len(benchmark.cases) * (steps + WARM_UP), unit="step", desc=model, mininterval=1.0) as bar:
        report = benchmark.run(tick=partial(bar.update, 1))
    report["settings"] = {"command": command_text(context), **report["settings"]}
    if json is not None:
        write_json(json, report)
    _print(report, trace=trace)


def _sizes(rows: str, prefix: str, buffer: str) -> list[dict[str, int]]:
    """Every combination of the three lists, as fields of `StepCase`."""
    return [
        {"prefix": length, "rows": num_rows, "buffer_size": buffer_size}
        for length in numbers(prefix, "--prefix")
        for num_rows in numbers(rows, "--rows")
        for buffer_size in numbers(buffer, "--buffer")
    ]


def _print(report: dict[str, Any], *, trace: bool) -> None:
    from benchmarks.step_rows import COLUMNS, GROWTH_COLUMNS, PAPER_COLUMNS, RATIO_COLUMNS

    rows, settings = report["rows"], report["settings"]
    print(
        f"{rows[0]['model']}, {settings['num_parameters'] / 1e6:.1f}M parameters, {rows[0]['dtype']}, "
        f"{rows[0]['device']}, attention {rows[0]['backend']}; here {settings['bandwidth'] / 1e9:.1f} GB/s and "
        f"{settings['flops'] / 1e12:.3f} TFLOP/s\n"
    )
    print(markdown(rows, {key: text for key, text in COLUMNS.items() if trace or not key.startswith("trace")}))
    for part, columns in (("buffer_ratios", RATIO_COLUMNS), ("host_growth", GROWTH_COLUMNS)):
        if report[part]:
            print("\n" + markdown(report[part], columns))
    print("\n" + markdown(report["paper_table_3"], PAPER_COLUMNS))
    print("\nThe paper's rows: one sequence, two H100 with tensor parallelism. TPS is stated at an assumed TPF.")


main = command(run, "python -m benchmarks engine")
