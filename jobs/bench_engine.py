"""A decode step of the engine beside its bare forward and beside the least time the machine allows.

    python jobs/bench_engine.py --model sdar-50m --rows 8 --buffer 1,2,4 --prefix 512 --json out/engine.json
    python jobs/bench_engine.py --model sdar-null --rows 1,8,64 --buffer 4   # the engine's own work alone

The model is a shape by name, with random weights, or a folder. Every (rows, buffer, prefix) is one row: the median
whole step, the median forward on the identical batches, and the roofline floor, whose bandwidth and FLOP/s are
measured first. docs/benchmarks.md explains the columns.
"""

import argparse
import math
import platform
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from mbd_core.bench.roofline import Machine, floor_seconds, measure_machine, step_cost
from mbd_core.bench.step_timing import WARM_UP, StepCase, filled_engine, measure_host, measure_step
from mbd_core.bench.tables import PAPER_TABLE_3, buffer_ratios, host_growth, markdown
from mbd_core.checkpoint.loading import load_config, load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.engine import EngineConfig
from mbd_core.files import check_new_file, write_json
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.quantize import Parts, quantize_weights
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.ops.attention import resolve

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = {
    "model": "model",
    "rows": "rows",
    "buffer_size": "N_buf",
    "prefix": "prefix",
    "step_seconds": "step (ms)|.2f",
    "forward_seconds": "forward (ms)|.2f",
    "step_over_forward": "step / forward|.3f",
    "host_seconds": "host (ms)|.3f",
    "beside_seconds": "step - forward (ms)|.2f",
    "layout_seconds": "layout (ms)|.2f",
    "floor_seconds": "floor (ms)|.2f",
    "step_over_floor": "step / floor|.2f",
    "tpf": "TPF|.2f",
    "tps": "TPS|.0f",
    "trace_cost": "recorder / step|.2%",
}
RATIO_COLUMNS = {
    "rows": "rows",
    "prefix": "prefix",
    "buffer_size": "N_buf",
    "step_over_single": "step / step at N_buf=1|.2f",
    "paper": "paper",
}
GROWTH_COLUMNS = {
    "buffer_size": "N_buf",
    "prefix": "prefix",
    "from_rows": "from rows",
    "to_rows": "to rows",
    "growth": "host work grows|.2f",
    "growth_beside_forward": "step - forward grows|.2f",
}
PAPER_COLUMNS = {
    "model": "paper's Table 3",
    "buffer_size": "N_buf",
    "step_seconds": "step (ms)|.2f",
    "tpf": "TPF",
    "tps": "TPS",
}


def counts(text: str) -> list[int]:
    """`"1,2,4"` as numbers of at least 1."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,4") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number under 1")
    return values


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdar-50m", help=f"a folder, or one of: {', '.join(SHAPES)}")
    parser.add_argument("--buffer", type=counts, default=[1, 2, 4], metavar="N,...", help="slots (default: 1,2,4)")
    parser.add_argument("--prefix", type=counts, default=[512], metavar="N,...", help="stored tokens (default: 512)")
    parser.add_argument("--rows", type=counts, default=[8], metavar="N,...", help="sequences (default: 8)")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        "--static", action="store_true", default=None, help="every slot of every row (default on a GPU)"
    )
    shapes.add_argument("--dynamic", dest="static", action="store_false", help="resident slots only")
    parser.add_argument("--eager", action="store_true", help="on a GPU, run static steps without CUDA graphs")
    parser.add_argument("--fp8", choices=get_args(Parts), help="round these weights to FP8")
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default: 20)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--attention", help="the attention kernel by name (default: the best there is)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="threads of a CPU's tensor operation (default: torch's)")
    parser.add_argument(
        "--tpf", type=float, help="tokens a forward, to state TPS (default: Table 3's, 3.47 at N_buf=1, else 6.19)"
    )
    parser.add_argument("--trace", action="store_true", help="measure a trace recorder too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    for name in ("steps", "threads", "tpf"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value} must be a number above 0")
    return args


def config_of(model: str) -> ModelConfig:
    """A shape's, or a folder's; `ValueError` for a name that is neither."""
    if model in SHAPES:
        return SHAPES[model]
    try:
        folder = model_folder(model)
    except ValueError as error:
        raise ValueError(f"{error}; shapes: {', '.join(SHAPES)}") from None
    return load_config(folder)


def check_cases(
    args: argparse.Namespace, config: ModelConfig, cases: list[StepCase], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `ValueError` for what can be known to fail before anything is measured or loaded."""
    size = config.block_size
    for case in cases:
        if case.prefix % size:
            raise ValueError(f"--prefix {case.prefix} is not a multiple of the model's block_size={size}")
        if case.prefix + case.num_tokens(size) > config.max_positions:
            raise ValueError(
                f"--prefix {case.prefix} and the {case.num_tokens(size)} tokens that --steps {case.steps} may decode "
                f"exceed the model's {config.max_positions} positions; lower one of them"
            )
    if args.fp8 == "experts" and config.moe is None:
        raise ValueError(f"--fp8 experts cannot be honoured: {args.model} has no experts; --fp8 all rounds its layers")
    if args.eager and (device.type != "cuda" or args.static is False):
        raise ValueError("--eager leaves CUDA graphs out, which there are on a GPU and without --dynamic only")
    page_size = EngineConfig().resolve_page_size(size)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    resolve(device, dtype, config.head_dim, page_size, args.attention, num_heads=heads, num_kv_heads=kv_heads)
    check_fits(args.model, config, cases, dtype, device)
    if args.json is not None:
        check_new_file(args.json)


def check_fits(
    model: str, config: ModelConfig, cases: list[StepCase], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `ValueError` if the weights and the pages of the largest case exceed the memory that is free."""
    needed = config.num_parameters * dtype.itemsize + max(case.kv_bytes(config, dtype) for case in cases)
    free = free_bytes(device)
    if needed > free:
        raise ValueError(
            f"{model} needs {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} and {device} has "
            f"{free / 1e9:.1f} GB free; take a smaller shape, fewer rows, or a smaller --dtype"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; on a CPU what the kernel says, or the container's limit if that is less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def load(model: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    if model in SHAPES:
        return random_model(config, device=device, dtype=dtype)
    return load_model(model_folder(model), dtype=dtype, device=device)


def measure(
    args: argparse.Namespace, model: Decoder, case: StepCase, machine: Machine, device: torch.device, bar: tqdm
) -> dict[str, Any]:
    """One row of the report."""
    engine = filled_engine(model, case)
    times = measure_step(engine, case, tick=partial(bar.update, 1))
    host = measure_host(engine, case)
    weight = model.model.norm.weight
    cost = step_cost(
        model.config,
        rows=case.rows,
        buffer_size=case.buffer_size,
        prefix=case.prefix,
        dtype_bytes=weight.dtype.itemsize,
        matrix_bytes=1 if args.fp8 == "all" else None,
        expert_bytes=1 if args.fp8 else None,
        logit_tokens=round(times.num_logits),
    )
    floor = floor_seconds(cost, machine)
    paper = PAPER_TABLE_3[min(case.buffer_size, 2)]
    tpf = args.tpf if args.tpf is not None else paper["tpf"]
    row = {
        "model": args.model,
        "rows": case.rows,
        "buffer_size": case.buffer_size,
        "prefix": case.prefix,
        "step_seconds": times.step,
        "forward_seconds": times.forward,
        "step_over_forward": times.step / times.forward,
        "floor_seconds": floor,
        "step_over_floor": times.step / floor,
        "backend": times.backend,
        "device": device_name(device),
        "host_seconds": host,
        "beside_seconds": times.step - times.forward,
        "layout_seconds": times.layout,
        "forward_tokens": times.num_tokens,
        "logit_tokens": times.num_logits,
        "floor_bytes": cost.bytes,
        "floor_flops": cost.flops,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "static_shapes": engine.static_shapes,
        "graphs": engine.graphs,
        "fp8": args.fp8,
        "tpf": tpf,
        "tpf_assumed": True,
        "tps": case.rows * tpf / times.step,
    }
    if times.recorder is not None:
        row["trace_cost"] = times.recorder / times.step
    return row


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """The whole report; `ValueError` in one sentence for what cannot be measured."""
    try:
        device = torch.device(args.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(f"--device {args.device} cannot be used: {reason}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {args.device} cannot be used; take cpu or cuda")
    on_gpu = device.type == "cuda"
    dtype = DTYPES[args.dtype] if args.dtype else torch.bfloat16 if on_gpu else torch.float32
    config = config_of(args.model)
    cases = [
        StepCase(
            rows=rows,
            buffer_size=buffer_size,
            prefix=prefix,
            steps=args.steps,
            static=args.static,
            attention=args.attention,
            trace=args.trace,
            graphs=False if args.eager else None,
        )
        for prefix in args.prefix
        for rows in args.rows
        for buffer_size in args.buffer
    ]
    check_cases(args, config, cases, dtype, device)
    machine = measure_machine(device, dtype)
    model = load(args.model, config, device, dtype)
    if args.fp8 is not None:
        quantize_weights(model, args.fp8)
    with tqdm(total=len(cases) * (args.steps + WARM_UP), unit="step", desc=args.model, mininterval=1.0) as bar:
        rows = [measure(args, model, case, machine, device, bar) for case in cases]
    return {
        "settings": {
            "command": "python jobs/bench_engine.py " + shlex.join(argv),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "steps": args.steps,
            "num_parameters": config.num_parameters,
            "bandwidth": machine.bandwidth,
            "flops": machine.flops,
        },
        "rows": rows,
        "buffer_ratios": buffer_ratios(rows),
        "host_growth": host_growth(rows),
        "paper_table_3": [{"buffer_size": n, **row} for n, row in PAPER_TABLE_3.items()],
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        report = run(args, sys.argv[1:] if argv is None else argv)
        if args.json is not None:
            write_json(args.json, report)
    except (ValueError, OSError) as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return 2
    rows, settings = report["rows"], report["settings"]
    print(
        f"{args.model}, {settings['num_parameters'] / 1e6:.1f}M parameters, {rows[0]['dtype']}, {rows[0]['device']}, "
        f"attention {rows[0]['backend']}; here {settings['bandwidth'] / 1e9:.1f} GB/s and "
        f"{settings['flops'] / 1e12:.3f} TFLOP/s\n"
    )
    shown = {key: text for key, text in COLUMNS.items() if args.trace or not key.startswith("trace")}
    print(markdown(rows, shown))
    for part, columns in (("buffer_ratios", RATIO_COLUMNS), ("host_growth", GROWTH_COLUMNS)):
        if report[part]:
            print("\n" + markdown(report[part], columns))
    print("\n" + markdown(report["paper_table_3"], PAPER_COLUMNS))
    print("\nThe paper's rows: one sequence, two H100 with tensor parallelism. TPS is stated at an assumed TPF.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
