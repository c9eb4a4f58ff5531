"""The table of speeds in a report, with what each column means."""

from collections.abc import Mapping, Sequence

from mbd_core.evaluation.markdown_sections import table_line
from mbd_core.evaluation.speed import Speed
from mbd_core.evaluation.sweep_report import ReportKey

HEADS = (
    "Model",
    "Method",
    "Task",
    "Config",
    "n alone",
    "Batch-1 TPS (per request, end to end, tok/s)",
    "Batch-1 decode TPS (its forwards alone, tok/s)",
    "Batch-1 forward (ms)",
    "Latency alone p50 / p90 (s)",
    "n together",
    "Throughput (aggregate of all requests, tok/s)",
    "Latency together p50 / p90 / p99 (s)",
)
DEFINITIONS = (
    "Measured on the machine named above, each configuration by itself in an engine of its own buffer size that runs "
    "nothing else, warmed up with the same requests, without a prefix cache. No number above this section differs "
    "from run to run. A request's seconds run from the moment when the engine is given its tokens to the moment when "
    "it gives the whole answer back, prompt included, tokenizer and network not. Batch-1 TPS: useful tokens / these "
    "seconds, one request at a time. Batch-1 decode TPS: useful tokens / seconds of the forwards that NFE counts (TPF "
    "/ step time). Throughput: useful tokens of all requests / seconds from the first's beginning to the last's end, "
    "with {together} requests under way as long as there are as many. Latency: nearest-rank percentiles of these "
    "seconds; a dash where too few requests were timed."
)


def speed_lines(times: Sequence[Speed], labels: Mapping[str, str], varied: Mapping[ReportKey, str]) -> list[str]:
    """The section; `varied` has the settings in which a method's configurations differ."""
    together = " or ".join(str(count) for count in sorted({speed.concurrency for speed in times}))
    lines = ["", "## Speed", "", DEFINITIONS.format(together=together), ""]
    lines += ["| " + " | ".join(HEADS) + " |", "|---|---|---|---|" + "---:|" * (len(HEADS) - 4)]
    for s in times:
        cells = [
            *(s.model, s.method, labels[s.task], varied[ReportKey(s.model, s.method, s.task, s.config)] or "-"),
            *(str(s.num_alone), f"{s.tps_batch_1:.1f}", f"{s.decode_tps_batch_1:.1f}", f"{s.forward_ms_batch_1:.2f}"),
            _seconds(s.latency_alone_p50, s.latency_alone_p90),
            *(str(s.num_together), f"{s.throughput:.1f}"),
            _seconds(s.latency_together_p50, s.latency_together_p90, s.latency_together_p99),
        ]
        lines.append(table_line(cells))
    return lines


def _seconds(*values: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:.3f}" for value in values)
