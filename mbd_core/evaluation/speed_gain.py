"""The gain in TPS that tokens per forward and the time of a forward predict, beside the measured one (MBD-LMs, 4.5).

TPS = TPF / T_step, so a configuration with `tpf_gain` times the tokens a forward and `latency_cost` times the seconds
a forward is to have `tpf_gain / latency_cost` times the TPS. That holds for the decode TPS by definition; what is
measured here is a whole request's, with its prompt and what the engine does between forwards, which can miss it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbd_core.evaluation.markdown_sections import one_line, table_line
from mbd_core.evaluation.speed import Speed
from mbd_core.evaluation.sweep_report import ReportKey, ReportRow, best_row

HEADS = (
    *("Model", "Method", "Task", "Config", "TPF gain", "Latency cost"),
    *("Predicted TPS gain", "Measured TPS gain", "Measured / predicted"),
)
DEFINITIONS = (
    "TPF gain: tokens per forward of the requests that were timed one at a time (ratio of sums), against the task's "
    "baseline. Latency cost: milliseconds of a forward, likewise. Predicted TPS gain: their quotient (MBD-LMs, "
    "Section 4.5). Measured TPS gain: Batch-1 TPS of the table above, likewise, prompts included. The baseline is the "
    "most accurate timed configuration of the report's first model and method:"
)


@dataclass(frozen=True, kw_only=True)
class SpeedGain:
    """A configuration's speed as multiples of its baseline's, which is a configuration on the same task."""

    baseline: str
    tpf_gain: float
    latency_cost: float
    predicted_tps_gain: float
    measured_tps_gain: float


def speed_gains(times: Sequence[Speed], rows: Sequence[ReportRow]) -> dict[ReportKey, SpeedGain]:
    """The gain of every timed configuration; none on a task whose baseline gave no token."""
    timed = {_key(speed): speed for speed in times}
    gains: dict[ReportKey, SpeedGain] = {}
    for task in dict.fromkeys(key.task for key in timed):
        of_task = [row for row in rows if row.key.task == task and row.key in timed]
        first = [row for row in of_task if _method(row) == _method(of_task[0])]
        baseline = best_row(first)
        base = timed[baseline.key]
        if not base.tps_batch_1:
            continue
        name = ", ".join(filter(None, (baseline.key.model, baseline.key.method, baseline.varied)))
        for row in of_task:
            speed = timed[row.key]
            if speed.tps_batch_1:
                gains[row.key] = _gain(name, speed, base)
    return gains


def _gain(baseline: str, speed: Speed, base: Speed) -> SpeedGain:
    tpf_gain = speed.tpf_alone / base.tpf_alone
    latency_cost = speed.forward_ms_batch_1 / base.forward_ms_batch_1
    return SpeedGain(
        baseline=baseline,
        tpf_gain=tpf_gain,
        latency_cost=latency_cost,
        predicted_tps_gain=tpf_gain / latency_cost,
        measured_tps_gain=speed.tps_batch_1 / base.tps_batch_1,
    )


def gain_lines(
    gains: Mapping[ReportKey, SpeedGain], labels: Mapping[str, str], varied: Mapping[ReportKey, str]
) -> list[str]:
    """The table, with what its columns mean."""
    if not gains:
        return []
    baselines = {one_line(f"- {labels[key.task]}: {gain.baseline}"): None for key, gain in gains.items()}
    lines = ["", "### TPS gain, predicted and measured", "", DEFINITIONS, "", *baselines, ""]
    lines += ["| " + " | ".join(HEADS) + " |", "|---|---|---|---|" + "---:|" * (len(HEADS) - 4)]
    for key, gain in gains.items():
        ratio = gain.measured_tps_gain / gain.predicted_tps_gain
        cells = (gain.tpf_gain, gain.latency_cost, gain.predicted_tps_gain, gain.measured_tps_gain)
        numbers = [*(f"{value:.2f}x" for value in cells), f"{ratio:.2f}"]
        lines.append(table_line([key.model, key.method, labels[key.task], varied[key] or "-", *numbers]))
    return lines


def _key(speed: Speed) -> ReportKey:
    return ReportKey(speed.model, speed.method, speed.task, speed.config)


def _method(row: ReportRow) -> tuple[str, str]:
    return row.key.model, row.key.method
