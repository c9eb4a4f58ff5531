"""A day on a GPU in three calls: `python -m benchmarks.gpu.day --part 1|2|3 --out DIR`.

Each call takes less than nine minutes. Every section runs in its own process with a time limit, so that a hanging or
failing section loses only its unfinished rows. The first section of part 1 ends the part if it fails. DIR gets one
JSON file and one Markdown file a part, written anew after each section. A part needs no network, and few of this
package's dependencies (docs/reference/gpu.md). `--toy` runs all sections on a CPU at toy sizes.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.gpu import sections as gpu_sections
from benchmarks.gpu.sections import Day, TableRow, gpu_day, toy_day
from benchmarks.measuring import markdown
from mbd_core.files import check_new_file, write_json, write_text


@dataclass(frozen=True)
class Section:
    """A part's section: the time limit of its process in seconds, its call, and whether its failure ends the part."""

    limit: float
    run: Callable[[Day], Iterable[TableRow]]
    required: bool = False


def _mini_steps(day: Day) -> Iterator[TableRow]:
    return gpu_sections.steps(day, shape=day.mini, rows=1, eager=True)


def _mini_own_routing(day: Day) -> Iterator[TableRow]:
    return gpu_sections.steps(day, shape=day.mini, rows=1, uniform=False)


def _mini_many(day: Day) -> Iterator[TableRow]:
    return gpu_sections.swept_steps(day, rows=day.many_rows)


def _dense_steps(day: Day) -> Iterator[TableRow]:
    return gpu_sections.steps(day, shape=day.dense, rows=1, eager=True)


PARTS: dict[int, dict[str, Section]] = {
    1: {
        "machine": Section(60, gpu_sections.machine, required=True),
        "kernels": Section(80, gpu_sections.kernels),
        "graphs": Section(110, gpu_sections.graphs),
        "mini": Section(165, _mini_steps),
        "mini, its own routing": Section(100, _mini_own_routing),
    },
    2: {
        "tiles": Section(170, gpu_sections.tile_sweep),
        "mini, swept tiles": Section(105, partial(gpu_sections.swept_steps, rows=1)),
        "mini, many rows": Section(140, _mini_many),
        "mini, FP8 experts": Section(105, partial(gpu_sections.swept_steps, rows=1, parts="experts")),
    },
    3: {
        "dense": Section(165, _dense_steps),
        "mini, FP8 experts in blocks": Section(100, partial(gpu_sections.swept_steps, rows=1, parts="blocks")),
        "prefill": Section(60, gpu_sections.prefill),
        "soak": Section(150, gpu_sections.soak),
        "clean exit": Section(50, gpu_sections.clean_exit),
    },
}
PART_SECONDS = 525.0
ROW = "row: "  # the prefix of a row's line


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all sections are done, 1 if a section is not, and 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.day", description=__doc__)
    parser.add_argument("--part", type=int, choices=sorted(PARTS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--only", action="append", metavar="SECTION", help="run this section only; may be repeated")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # in the process of one section: its name
    options = parser.parse_args(argv)
    sections = PARTS[options.part]
    try:
        unknown = [
            name
            for name in (*(options.only or ()), *([options.section] * bool(options.section)))
            if name not in sections
        ]
        if unknown:
            raise ValueError(f"part {options.part} has no section '{unknown[0]}'; it has {', '.join(sections)}")
        if not options.toy and not torch.cuda.is_available():
            raise ValueError("no CUDA device is here; --toy runs at toy sizes on the CPU")
        if options.section is not None:
            return _run_here(options)
        options.out.mkdir(parents=True, exist_ok=True)
        for ending in ("json", "md"):
            check_new_file(options.out / f"part{options.part}.{ending}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    choice = {name: section for name, section in sections.items() if options.only is None or name in options.only}
    results = _run_all(options, choice)
    return 0 if all(result["state"] == "done" for result in results.values()) else 1


def _run_here(options: argparse.Namespace) -> int:
    """One section, in this process; each row goes to standard output, as a line, as soon as it is known."""
    day = toy_day(options.out) if options.toy else gpu_day(torch.device("cuda", 0), options.out)
    for row in PARTS[options.part][options.section].run(day):
        values = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        print(ROW + json.dumps(values), flush=True)
    return 0


def _run_all(options: argparse.Namespace, sections: Mapping[str, Section]) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + PART_SECONDS
    for name, section in sections.items():
        command = [sys.executable, "-m", "benchmarks.gpu.day", "--part", str(options.part), "--section", name]
        command += ["--out", str(options.out), *(["--toy"] if options.toy else [])]
        limit = min(section.limit, deadline - time.monotonic())
        print(f"{name}: at most {limit:.0f} s", flush=True)
        results[name] = run_apart(command, limit)
        print(f"{name}: {results[name]['state']}, {results[name]['seconds']:.0f} s", flush=True)
        ends = section.required and results[name]["state"] != "done"
        if ends:
            not_run = {"state": "not run", "why": f"{name} failed", "seconds": 0.0}
            results |= {name_after: not_run for name_after in sections if name_after not in results}
        record = {"part": options.part, "toy": options.toy, "sections": results}
        write_json(options.out / f"part{options.part}.json", record)
        write_text(options.out / f"part{options.part}.md", report(options.part, results, toy=options.toy))
        if ends:
            break
    return results


def run_apart(command: Sequence[str], limit: float) -> dict[str, Any]:
    """The result of a command that prints rows: its state ("done", "failed", "over its limit" or "not run"), its
    seconds, and the rows that it printed.
    """
    start = time.monotonic()
    if limit <= 0:
        return {"state": "not run", "why": "the time of the part was over", "seconds": 0.0}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        seconds = time.monotonic() - start
        rows = [json.loads(line.removeprefix(ROW)) for line in _lines(stdout) if line.startswith(ROW)]
        last_lines = "\n".join(_lines(stderr)[-12:])
    if code is None:
        reason = f"it was ended after {limit:.0f} s\n{last_lines}".strip()
        return {"state": "over its limit", "why": reason, "seconds": seconds, "rows": rows}
    if code:
        return {"state": "failed", "code": code, "why": last_lines, "seconds": seconds, "rows": rows}
    return {"state": "done", "seconds": seconds, "rows": rows}


def _lines(file: IO[bytes]) -> list[str]:
    """The lines that a process has written, without an unfinished last line."""
    file.seek(0)
    return file.read().decode(errors="replace").rpartition("\n")[0].splitlines()


def report(part: int, results: Mapping[str, Mapping[str, Any]], *, toy: bool) -> str:
    """A part's results as Markdown: a table for each section, and below it the most expensive kernels of the first
    profiled row."""
    lines = [f"# A day on a GPU, part {part}" + (", at toy sizes on a CPU" if toy else "")]
    for name, result in results.items():
        lines += ["", f"## {name}", "", f"{result['state']}, {result['seconds']:.1f} s"]
        if result["state"] != "done":
            lines += ["", "```", str(result.get("why", "")), "```"]
        rows = result.get("rows", [])
        if not rows:
            continue
        keys = list(dict.fromkeys(key for row in rows for key in row if key != "top"))
        lines += ["", markdown([_text_row(row) for row in rows], {key: key for key in keys})]
        profile_rows = [row for row in rows if row.get("top")]
        for row in profile_rows[:1]:
            columns = {"kernel": "kernel", "count": "count", "microseconds": "microseconds|.1f"}
            case = f"prefix {row['prefix']}, {row['buffer_size']} slots"
            lines += ["", f"The most expensive kernels of a step ({case}):", "", markdown(row["top"], columns)]
    return "\n".join(lines) + "\n"


def _text_row(row: TableRow) -> TableRow:
    return {
        key: f"{v:.4g}" if isinstance(v, float) else str(v) if isinstance(v, list) else v for key, v in row.items()
    }


if __name__ == "__main__":
    sys.exit(main())
