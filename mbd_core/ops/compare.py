"""Slots as rows against the prefix read once, timed side by side, and the rule that follows from the times.

    python -m mbd_core.ops.compare --prefixes 512,2048,8192,16384 --buffers 1,2,4 --json out/attention.json

Measures one layer's attention on this machine, on the GPU if there is one, where both ways are replayed as CUDA graphs
as a decode step would be.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mbd_core.ops.attention import Choice, resolve
from mbd_core.ops.merged import MergeRule
from mbd_core.ops.row_layout import RowLayout
from mbd_core.ops.timing import best_seconds

# What an engine tries when it starts, and the most keys it does so on: a fraction of a gigabyte.
START_PREFIXES = (512, 2048, 8192)
_MOST_KEYS = 2**17


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Attention of one layer. The default is LLaDA2-mini's."""

    block_size: int = 32
    page_size: int = 32
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class AttentionTiming:
    """Seconds of one layer's attention both ways: the slots as rows, and the prefix once with a merge."""

    backend: str
    rows: int
    buffer_size: int
    block_size: int
    prefix: int
    rows_seconds: float
    merged_seconds: float

    @property
    def faster(self) -> str:
        """`"rows"` or `"merged"`."""
        return "merged" if self.merged_seconds < self.rows_seconds else "rows"


def merge_rule(timings: Sequence[AttentionTiming], *, measured_at: str) -> MergeRule:
    """For every number of rows and slots the smallest measured prefix from which merging won there and beyond."""
    merge_from: dict[tuple[int, int], int | None] = {}
    for rows, size in {(t.rows, t.buffer_size) for t in timings if t.buffer_size > 1}:
        merge_from[rows, size] = None
        same = [t for t in timings if (t.rows, t.buffer_size) == (rows, size)]
        for timing in sorted(same, key=lambda t: -t.prefix):
            if timing.faster == "rows":
                break
            merge_from[rows, size] = timing.prefix
    return MergeRule(merge_from=merge_from, measured_at=measured_at)


def with_measured_rule(
    choice: Choice, shape: Shape, *, max_rows: int, buffer_size: int, device: torch.device
) -> Choice:
    """`choice` with a rule for an engine of `max_rows` x `buffer_size` slots, from about a second's measuring.

    On a CPU it stays as it is: the reference reads a prefix once for all slots already. What merging could still save
    there is the mask over the prefix: under 2048 tokens nothing, beyond about a tenth of attention (this file's
    command shows it), for which a CPU's numbers are not made to depend on the length of a prefix.
    Needs a fraction of a gigabyte for as long as it measures.
    """
    if device.type != "cuda" or buffer_size == 1:
        return choice
    timings = []
    for rows in sorted({1, max_rows}):
        prefixes = [p // shape.block_size * shape.block_size for p in START_PREFIXES if rows * p <= _MOST_KEYS]
        timings += compare_attention(
            prefixes=prefixes,
            buffer_sizes=(buffer_size,),
            rows=rows,
            shape=shape,
            device=device,
            choice=choice,
            repeats=3,
        )
    return dataclasses.replace(choice, merge_rule=merge_rule(timings, measured_at="measured at start"))


def compare_attention(
    *,
    prefixes: Sequence[int],
    buffer_sizes: Sequence[int],
    rows: int = 1,
    shape: Shape | None = None,
    device: torch.device | None = None,
    choice: Choice | None = None,
    repeats: int = 5,
) -> list[AttentionTiming]:
    """Time one layer at every prefix and buffer size on random keys, `rows` sequences at once.

    Both ways take turns, and the best of `repeats` counts, so that a slow spell of the machine decides little.
    `choice` defaults to what `resolve` gives for the shape. Laying out a batch, done once for all layers, is not timed
    on a CPU. Raises `ValueError` for a prefix that is no multiple of the block.
    """
    s = shape or Shape()
    device = device or torch.device("cpu")
    if choice is None:
        choice = resolve(device, s.dtype, s.head_dim, s.page_size, num_heads=s.num_heads, num_kv_heads=s.num_kv_heads)
    timings = []
    for prefix in prefixes:
        if prefix < 1 or prefix % s.block_size:
            raise ValueError(f"prefix={prefix} is not a multiple of block_size={s.block_size}")
        for buffer_size in buffer_sizes:
            by_rows, merged = _both(choice, s, prefix=prefix, buffer_size=buffer_size, rows=rows, device=device)
            rows_seconds = merged_seconds = float("inf")
            for _ in range(repeats):
                rows_seconds = min(rows_seconds, best_seconds(by_rows, device, 1))
                merged_seconds = min(merged_seconds, best_seconds(merged, device, 1))
            timings.append(
                AttentionTiming(
                    backend=choice.name,
                    rows=rows,
                    buffer_size=buffer_size,
                    block_size=s.block_size,
                    prefix=prefix,
                    rows_seconds=rows_seconds,
                    merged_seconds=merged_seconds,
                )
            )
    return timings


def _both(
    choice: Choice, s: Shape, *, prefix: int, buffer_size: int, rows: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same attention as rows and merged, on random queries and keys."""
    width = -(-(prefix + buffer_size * s.block_size) // s.page_size)
    generator = torch.Generator(device).manual_seed(prefix + buffer_size)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=s.dtype)

    k, v = (draw(rows * width, s.page_size, s.num_kv_heads, s.head_dim) for _ in range(2))
    slots = rows * buffer_size
    q = draw(slots * s.block_size, s.num_heads, s.head_dim)
    ends = prefix + s.block_size * torch.arange(1, buffer_size + 1, device=device)
    table = torch.arange(rows * width, device=device, dtype=torch.int32).view(rows, width)
    bounds = torch.arange(slots + 1, device=device, dtype=torch.int32) * s.block_size
    kv_lens, pages = ends.repeat(rows).int(), table.repeat_interleave(buffer_size, 0)

    layout = RowLayout(
        cu_seqlens_q=bounds, kv_lens_R=kv_lens, page_table_RP=pages, page_size=s.page_size, max_q=s.block_size
    )
    ways = [choice.bind(layout), choice.bind(layout, merge_slots=buffer_size)]
    by_rows, merged = (_replayed(lambda way=way: way(q, k, v), device) for way in ways)  # type: ignore[misc]
    return by_rows, merged


def _replayed(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same call; on CUDA captured as a graph, so that launching kernels one by one is not what is timed."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def table(timings: Sequence[AttentionTiming]) -> str:
    """The timings in Markdown."""
    lines = [
        "| sequences | prefix | N_buf | slots as rows (ms) | prefix once (ms) | once / rows | faster |",
        "|---" * 7 + "|",
    ]
    for t in timings:
        ratio = t.merged_seconds / t.rows_seconds
        cells = (t.rows, t.prefix, t.buffer_size, f"{t.rows_seconds * 1e3:.3f}", f"{t.merged_seconds * 1e3:.3f}")
        lines.append("| " + " | ".join(map(str, (*cells, f"{ratio:.2f}", t.faster))) + " |")
    return "\n".join(lines)


def _counts(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,4") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number under 1")
    return values


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mbd_core.ops.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefixes", type=_counts, default=[512, 2048, 8192, 16384], metavar="N,...")
    parser.add_argument("--buffers", type=_counts, default=[1, 2, 4], metavar="N,...", help="slots (default: 1,2,4)")
    parser.add_argument("--rows", type=_counts, default=[1], metavar="N,...", help="sequences at once (default: 1)")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--page-size", type=int, help="tokens a page (default: a block)")
    parser.add_argument("--attention", help="the kernel by name (default: the best there is)")
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many counts (default: 5)")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="F", help="also write the times to this file")
    args = parser.parse_args(argv)
    for name in ("block_size", "page_size", "repeats", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    shape = Shape(
        block_size=args.block_size,
        page_size=args.block_size if args.page_size is None else args.page_size,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    try:
        choice = resolve(
            device,
            shape.dtype,
            shape.head_dim,
            shape.page_size,
            args.attention,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
        )
        timings = [
            timing
            for rows in args.rows
            for timing in compare_attention(
                prefixes=args.prefixes,
                buffer_sizes=args.buffers,
                rows=rows,
                shape=shape,
                device=device,
                choice=choice,
                repeats=args.repeats,
            )
        ]
        chip = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        )
        settings = {
            "command": "python -m mbd_core.ops.compare " + shlex.join(sys.argv[1:] if argv is None else argv),
            "device": chip,
            "torch": torch.__version__,
            **{f.name: str(getattr(shape, f.name)) for f in dataclasses.fields(shape)},
        }
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            found = {"settings": settings, "rows": [dataclasses.asdict(t) for t in timings]}
            args.json.write_text(json.dumps(found, indent=2) + "\n")
    except (ValueError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(f"attention: {choice.name}, {str(shape.dtype).removeprefix('torch.')}, {chip}, torch {torch.__version__}\n")
    print(table(timings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
