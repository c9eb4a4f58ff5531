"""The engine benchmark: decode steps, compared with their bare forward and with the least time on this machine."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measuring import device_name, markdown
from benchmarks.roofline import Machine, floor_seconds, measure_machine, route_uniformly, step_cost
from benchmarks.step_timing import StepCase, filled_engine, measure_host, measure_step
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.build import attention_kernel
from mbd_core.engine.config import EngineConfig
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import quantize_weights
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.ops.machine import free_host_memory

# Table 3 of the MBD-LMs paper: LLaDA2-Mini at batch 1 on two H100 (TP=2), by N_buf. Step latency in seconds.
PAPER_TABLE_3: dict[int, dict[str, Any]] = {
    1: {"model": "LLaDA2-Mini", "step_seconds": 7.07e-3, "tpf": 3.47, "tps": 517.16},
    2: {"model": "MBD-LLaDA2-Mini", "step_seconds": 8.78e-3, "tpf": 6.19, "tps": 745.92},
}
PAPER_STEP_RATIO = 1.24


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
    "touched_experts": "experts|.0f",
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


@dataclass(frozen=True, kw_only=True)
class StepBenchmark:
    """A model, its device and dtype, and the cases to measure; each case is one row of the report.

    model  the name of a shape, which gets random weights, or a model folder
    fp8    round these weights to FP8; a folder with "blocks" has them already
    tpf    tokens per forward, from which TPS is computed; by default that of Table 3
    uniform_routing  tokens choose their experts evenly, as by a trained router; a random router chooses unevenly
    """

    model: str
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    cases: list[StepCase]
    fp8: Fp8Parts | None = None
    tpf: float | None = None
    uniform_routing: bool = False

    def check(self) -> None:
        """Raise `ValueError` for settings that cannot work, before anything is loaded or measured."""
        config, size = self.config, self.config.block_size
        for case in self.cases:
            if case.prefix % size:
                raise ValueError(f"--prefix {case.prefix} is not a multiple of the model's block_size={size}")
            if case.prefix + case.num_tokens(size) > config.max_positions:
                raise ValueError(
                    f"--prefix {case.prefix} and the {case.num_tokens(size)} tokens that --steps {case.steps} may "
                    f"decode exceed the model's {config.max_positions} positions; lower one of them"
                )
        if self.fp8 in ("experts", "blocks") and config.moe is None:
            raise ValueError(
                f"--fp8 {self.fp8} cannot be honoured: {self.model} has no experts; --fp8 all rounds its layers"
            )
        if self.uniform_routing and config.moe is None:
            raise ValueError(f"--uniform-routing cannot be honoured: {self.model} has no experts")
        page_size = EngineConfig().resolve_page_size(size)
        attention_kernel(config, self.device, self.dtype, page_size, self.cases[0].attention)
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise `ValueError` if the weights and the pages of the largest case exceed the free memory."""
        pages = max(case.kv_bytes(self.config, self.dtype) for case in self.cases)
        num_bytes = self.config.num_parameters * self.dtype.itemsize + pages
        on_gpu = self.device.type == "cuda"
        free_bytes = torch.cuda.mem_get_info(self.device)[0] if on_gpu else free_host_memory()
        dtype = str(self.dtype).removeprefix("torch.")
        if num_bytes > free_bytes:
            raise ValueError(
                f"{self.model} needs {num_bytes / 1e9:.1f} GB in {dtype} and {self.device} has "
                f"{free_bytes / 1e9:.1f} GB free; take a smaller shape, fewer rows, or a smaller --dtype"
            )

    def run(self, *, tick: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Measure the machine, then every case; `tick` is called after each timed step. Returns the whole report."""
        machine = measure_machine(self.device, self.dtype)
        model = self.load()
        rows = [self.row(model, case, machine, tick) for case in self.cases]
        return {
            "settings": {
                "torch": torch.__version__,
                "machine": platform.machine(),
                "threads": torch.get_num_threads(),
                "steps": self.cases[0].steps,
                "num_parameters": self.config.num_parameters,
                "bandwidth": machine.bandwidth,
                "flops": machine.flops,
            },
            "rows": rows,
            "buffer_ratios": buffer_ratios(rows),
            "host_growth": host_growth(rows),
            "paper_table_3": [{"buffer_size": n, **row} for n, row in PAPER_TABLE_3.items()],
        }

    def load(self) -> Decoder:
        if self.model in SHAPES:
            model = random_model(self.config, device=self.device, dtype=self.dtype)
            model = model if self.fp8 is None else quantize_weights(model, self.fp8)
        else:
            model = load_model(model_folder(self.model), dtype=self.dtype, device=self.device, fp8=self.fp8)
        if self.uniform_routing:
            most_tokens = max(case.rows * case.buffer_size for case in self.cases) * self.config.block_size
            route_uniformly(model, num_tokens=most_tokens)
        return model

    def row(self, model: Decoder, case: StepCase, machine: Machine, tick: Callable[[], object]) -> dict[str, Any]:
        engine = filled_engine(model, case)
        times = measure_step(engine, case, tick=tick)
        host = measure_host(engine, case)
        cost = step_cost(
            model.config,
            rows=case.rows,
            buffer_size=case.buffer_size,
            prefix=case.prefix,
            dtype_bytes=self.dtype.itemsize,
            matrix_bytes=1 if self.fp8 == "all" else None,
            expert_bytes=1 if self.fp8 else None,
            logit_tokens=round(times.num_logits),
            touched_experts=times.touched,
        )
        floor = floor_seconds(cost, machine)
        tpf = self.tpf if self.tpf is not None else PAPER_TABLE_3[min(case.buffer_size, 2)]["tpf"]
        row = {
            "model": self.model,
            "rows": case.rows,
            "buffer_size": case.buffer_size,
            "prefix": case.prefix,
            "step_seconds": times.step,
            "forward_seconds": times.forward,
            "step_over_forward": times.step / times.forward,
            "floor_seconds": floor,
            "step_over_floor": times.step / floor,
            "backend": times.backend,
            "device": device_name(self.device),
            "host_seconds": host,
            "beside_seconds": times.step - times.forward,
            "layout_seconds": times.layout,
            "forward_tokens": times.num_tokens,
            "logit_tokens": times.num_logits,
            "touched_experts": times.touched,
            "floor_bytes": cost.bytes,
            "floor_flops": cost.flops,
            "dtype": str(self.dtype).removeprefix("torch."),
            "static_shapes": engine.static_shapes,
            "graphs": engine.graphs,
            "fp8": self.fp8,
            "routing": "uniform" if self.uniform_routing else "the router's",
            "tpf": tpf,
            "tpf_assumed": True,
            "tps": case.rows * tpf / times.step,
        }
        return row if times.recorder is None else {**row, "trace_cost": times.recorder / times.step}


def buffer_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The step time at buffer_size N divided by that at 1, for every (model, rows, prefix) that has both."""
    single = {(r["model"], r["rows"], r["prefix"]): r["step_seconds"] for r in rows if r["buffer_size"] == 1}
    return [
        {
            "model": r["model"],
            "rows": r["rows"],
            "prefix": r["prefix"],
            "buffer_size": r["buffer_size"],
            "step_over_single": r["step_seconds"] / single[key],
            "paper": PAPER_STEP_RATIO if r["buffer_size"] == 2 else None,
        }
        for r in rows
        if r["buffer_size"] > 1 and (key := (r["model"], r["rows"], r["prefix"])) in single
    ]


def host_growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ratio of a step's host work at the most rows to that at the fewest, for every (model, buffer, prefix) with
    several; `growth_beside_forward` is the same ratio of step time minus forward time."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["buffer_size"], row["prefix"]), []).append(row)
    growths = []
    for (model, buffer_size, prefix), group in groups.items():
        fewest, most = (pick(group, key=lambda r: r["rows"]) for pick in (min, max))
        if fewest["rows"] == most["rows"]:
            continue
        growths.append(
            {
                "model": model,
                "buffer_size": buffer_size,
                "prefix": prefix,
                "from_rows": fewest["rows"],
                "to_rows": most["rows"],
                "growth": most["host_seconds"] / fewest["host_seconds"],
                "growth_beside_forward": (most["step_seconds"] - most["forward_seconds"])
                / (fewest["step_seconds"] - fewest["forward_seconds"]),
            }
        )
    return growths


def shape_or_folder(model: str) -> ModelConfig:
    """The configuration of a shape by name, or of a model folder; `ValueError` for a name that is neither."""
    if model in SHAPES:
        return SHAPES[model]
    try:
        folder = model_folder(model)
    except ValueError as error:
        raise ValueError(f"{error}; shapes: {', '.join(SHAPES)}") from None
    return load_config(folder)


def print_report(report: dict[str, Any], *, trace: bool) -> None:
    """Print the machine's speeds and the tables; `trace`: with the recorder's column."""
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
