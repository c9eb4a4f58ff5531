"""Measures of engines and gateways as Ray metrics: a row for each measure, and the exporter of a table of rows.

The names are the field's (vLLM's, under our own prefix); `python -m jobs.measure_tables` writes
docs/reference/measures.md from the rows. In a Serve replica each measure has the tags `application`, `deployment` and
`replica` too.

A counter is exported at 0 from the start, because `rate()` misses a rise from no value to 1.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ray.serve import metrics

from mbd_core.decoding.blocks.request import FinishReason
from mbd_core.engine.measures import EngineMeasures, RecentValues
from mbd_core.serving.server.measures import RequestMeasures

log = logging.getLogger("ray.serve")

PREFIX = "mbd_"
EXPORT_SECONDS = 2.0
SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
TOKENS_PER_FORWARD = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
LIFETIMES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0)
REASONS: tuple[FinishReason, ...] = ("stop", "length")
STATUSES = (400, 404, 429, 500, 503, 504)

M = TypeVar("M")


@dataclass(frozen=True)
class ExportedMeasure(Generic[M]):
    """A row: the measure's name, its type, its meaning, and the function that reads it from `M`.

    read        gives a number; for a histogram `RecentValues`; with a `label` a number for each value of the label
    label       a tag beside `model`
    boundaries  boundaries of a histogram's buckets
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    read: Callable[[M], float | RecentValues | Mapping[str, float]]
    label: str | None = None
    boundaries: Sequence[float] = ()

    @property
    def exported_name(self) -> str:
        """The name under which Ray's agents export it."""
        return f"ray_{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


def _dropped(*samples: RecentValues) -> int:
    return sum(s.num_dropped for s in samples)


ENGINE_MEASURES: tuple[ExportedMeasure[EngineMeasures], ...] = (
    ExportedMeasure("num_requests_running", "gauge", "requests that hold a batch row", lambda m: m.running),
    ExportedMeasure(
        "num_requests_waiting",
        "gauge",
        "requests that wait for a batch row, in the engine or before it",
        lambda m: m.waiting,
    ),
    ExportedMeasure(
        "kv_cache_usage_perc",
        "gauge",
        "share, 0 to 1, of the KV pages that running requests own; cached prefixes that nobody uses do not count",
        lambda m: m.kv_usage,
    ),
    ExportedMeasure(
        "active_slots", "gauge", "Block Buffer slots whose block the last forward decoded", lambda m: m.active_slots
    ),
    ExportedMeasure(
        "dummy_slots",
        "gauge",
        "slots of the same batch rows without a block. A slot that is neither active nor a dummy waits to be stored",
        lambda m: m.dummy_slots,
    ),
    ExportedMeasure(
        "prefix_cache_queries",
        "counter",
        "prompt tokens that were looked up in the prefix cache",
        lambda m: m.prefix_queries,
    ),
    ExportedMeasure(
        "prefix_cache_hits", "counter", "prompt tokens that the prefix cache held", lambda m: m.prefix_hits
    ),
    ExportedMeasure(
        "num_preemptions", "counter", "how often a request lost its pages for a while", lambda m: m.preemptions
    ),
    ExportedMeasure(
        "host_cache_pages", "gauge", "pages that lie in the host's memory (`--host-kv-bytes`)", lambda m: m.host_pages
    ),
    ExportedMeasure(
        "pages_to_host", "counter", "pages that were copied to the host's memory", lambda m: m.pages_to_host
    ),
    ExportedMeasure(
        "pages_from_host",
        "counter",
        "pages that were copied back from the host's memory",
        lambda m: m.pages_from_host,
    ),
    ExportedMeasure(
        "step_limit_seconds",
        "gauge",
        "most seconds of a step in which requests decode, its part of prompts included (`--max-step-seconds`)",
        lambda m: m.step_limit,
    ),
    ExportedMeasure(
        "prompt_token_seconds",
        "gauge",
        "measured seconds of a prompt token at the beginning of its prompt; 0 before the first measurement",
        lambda m: m.token_seconds,
    ),
    ExportedMeasure(
        "forward_passes",
        "counter",
        "forwards: `decode` fills positions, `store` stores the blocks of all its sequences and fills no position "
        "(SingleBD's bubble), `prefill` carries prompts alone",
        lambda m: {str(kind): number for kind, number in m.counts.forwards.items()},
        label="kind",
    ),
    ExportedMeasure(
        "sequence_forwards",
        "counter",
        "forwards, each counted once for each of its sequences: the sum of the requests' NFE. Over "
        "`ray_mbd_forward_passes_total` it is the mean batch",
        lambda m: m.counts.sequence_forwards,
    ),
    ExportedMeasure(
        "static_steps",
        "counter",
        "static steps, and forwards of planned rows where these have graphs: `graph` replayed one, `eager` had none",
        lambda m: {"graph": m.replayed_steps, "eager": m.eager_steps},
        label="mode",
    ),
    ExportedMeasure(
        "committed_tokens",
        "counter",
        "useful tokens that were handed out. Over `ray_mbd_sequence_forwards_total` it is the TPF, as a ratio of sums",
        lambda m: m.counts.committed_tokens,
    ),
    ExportedMeasure(
        "verifications",
        "counter",
        "how often drafts of a request were judged. `ray_mbd_confirmed_tokens_total` over it is the mean "
        "accepted length",
        lambda m: m.counts.verifications,
    ),
    ExportedMeasure(
        "accepted_draft_tokens",
        "histogram",
        "accepted drafted tokens of each verification",
        lambda m: m.counts.accepted_lengths,
        boundaries=TOKENS_PER_FORWARD,
    ),
    ExportedMeasure(
        "drafted_tokens",
        "counter",
        "drafted tokens that a verification judged (`linear_spec`, `verify`)",
        lambda m: m.counts.drafted_tokens,
    ),
    ExportedMeasure(
        "confirmed_tokens",
        "counter",
        "drafted tokens that a verification accepted. Over `ray_mbd_drafted_tokens_total` it is the share of "
        "accepted drafts",
        lambda m: m.counts.confirmed_tokens,
    ),
    ExportedMeasure(
        "edited_tokens",
        "counter",
        "tokens that were overwritten after they had been filled (T2T, DMax)",
        lambda m: m.counts.edited_tokens,
    ),
    ExportedMeasure(
        "tokens_per_forward",
        "histogram",
        "useful tokens per forward of each request that ended by itself",
        lambda m: m.counts.tokens_per_forward,
        boundaries=TOKENS_PER_FORWARD,
    ),
    ExportedMeasure(
        "block_lifetime_steps",
        "histogram",
        "forwards of each block, from its activation to its storage, both included",
        lambda m: m.counts.block_lifetimes,
        boundaries=LIFETIMES,
    ),
    ExportedMeasure(
        "request_queue_time_seconds",
        "histogram",
        "from a request's arrival at its replica to its batch row",
        lambda m: m.counts.queue_seconds,
        boundaries=SECONDS,
    ),
    ExportedMeasure(
        "request_prefill_time_seconds",
        "histogram",
        "from a request's batch row to the end of the forward that stored the last of its prompt; 0 if the "
        "prefix cache held the whole prompt",
        lambda m: m.counts.prefill_seconds,
        boundaries=SECONDS,
    ),
    ExportedMeasure(
        "dropped_samples",
        "counter",
        "values that the histograms of engines miss, because more than 10,000 came between two exports",
        lambda m: _dropped(
            m.counts.tokens_per_forward,
            m.counts.accepted_lengths,
            m.counts.block_lifetimes,
            m.counts.queue_seconds,
            m.counts.prefill_seconds,
        ),
    ),
)

REQUEST_MEASURES: tuple[ExportedMeasure[RequestMeasures], ...] = (
    ExportedMeasure(
        "prompt_tokens", "counter", "prompt tokens of the choices that were accepted", lambda m: m.prompt_tokens
    ),
    ExportedMeasure("generation_tokens", "counter", "tokens that came for clients", lambda m: m.generation_tokens),
    ExportedMeasure(
        "request_success",
        "counter",
        "choices that ended by themselves: `stop` or `length`",
        lambda m: {reason: m.finished[reason] for reason in REASONS},
        label="finished_reason",
    ),
    ExportedMeasure(
        "request_aborted",
        "counter",
        "choices whose client left before their end, or that an administrator ended",
        lambda m: m.aborted,
    ),
    ExportedMeasure(
        "request_errors",
        "counter",
        "API requests that were refused or failed; a stream that fails after its status was sent counts with "
        "the status it would have had",
        lambda m: {str(status): m.errors[status] for status in (*STATUSES, *list(m.errors))},
        label="status",
    ),
    ExportedMeasure(
        "request_lost_replicas",
        "counter",
        "how often a choice lost its replica; the choice went on at another replica, or failed after its time",
        lambda m: m.lost_replicas,
    ),
    ExportedMeasure(
        "time_to_first_token_seconds",
        "histogram",
        "from the arrival of an API request's whole body to the first commit of each of its choices",
        lambda m: m.time_to_first_token,
        boundaries=SECONDS,
    ),
    ExportedMeasure(
        "inter_token_latency_seconds",
        "histogram",
        "between two commits of a choice; a commit is one value, however many tokens it brings",
        lambda m: m.inter_token_latency,
        boundaries=SECONDS,
    ),
    ExportedMeasure(
        "request_time_per_output_token_seconds",
        "histogram",
        "of a choice of n tokens: seconds from its first commit to its last, over n - 1",
        lambda m: m.time_per_output_token,
        boundaries=SECONDS,
    ),
    ExportedMeasure(
        "e2e_request_latency_seconds",
        "histogram",
        "from the arrival of an API request's whole body to the end of each of its choices",
        lambda m: m.end_to_end,
        boundaries=SECONDS,
    ),
    ExportedMeasure(
        "dropped_request_samples",
        "counter",
        "values that the histograms of gateways miss, because more than 10,000 came between two exports",
        lambda m: _dropped(m.time_to_first_token, m.inter_token_latency, m.time_per_output_token, m.end_to_end),
    ),
)

MODEL_MEASURES: tuple[
    ExportedMeasure[int], ...
] = (  # for each model with its own engines; adapters use their model's engines
    ExportedMeasure(
        "least_replicas",
        "gauge",
        "least number of engine replicas of a model (`replicas`, or `min`); adapters have no replicas of their own",
        lambda least: least,
    ),
)


class Exporter(Generic[M]):
    """Exports the measures of a table; `read` gives the current values by model."""

    def __init__(self, rows: Sequence[ExportedMeasure[M]], read: Callable[[], Mapping[str, M]]) -> None:
        self._read, self._series = read, [(row, _Series(row)) for row in rows]

    def export(self) -> None:
        for model, measured in self._read().items():
            for row, series in self._series:
                reading = row.read(measured)
                if isinstance(reading, Mapping):
                    assert row.label is not None
                    for value, number in reading.items():
                        series.export(number, {row.label: value, "model": model})
                else:
                    series.export(reading, {"model": model})


class _Series:
    """Ray's metric for a row. `export` takes a counter's total, which never falls."""

    def __init__(self, row: ExportedMeasure[Any]) -> None:
        settings: dict[str, Any] = {
            "description": row.help,
            "tag_keys": ("model",) if row.label is None else ("model", row.label),
        }
        self._kind = row.kind
        self._exported: dict[tuple[str, ...], float] = {}  # a counter's total, by its tags
        match row.kind:
            case "gauge":
                self._metric = metrics.Gauge(PREFIX + row.name, **settings)
            case "counter":
                self._metric = metrics.Counter(PREFIX + row.name, **settings)
            case "histogram":
                self._metric = metrics.Histogram(PREFIX + row.name, boundaries=list(row.boundaries), **settings)

    def export(self, value: float | RecentValues, tags: dict[str, str]) -> None:
        if isinstance(value, RecentValues):
            for sample in value.take():
                self._metric.observe(sample, tags)
        elif self._kind == "gauge":
            self._metric.set(value, tags)
        else:
            key = tuple(tags.values())
            if key not in self._exported:
                self._exported[key] = 0
                self._metric._record(0, tags)  # `inc` refuses 0
            if value > self._exported[key]:
                self._metric.inc(value - self._exported[key], tags)
                self._exported[key] = value


class ExportTimer:
    """Calls `export` of each exporter every `seconds` in its own thread, and once more at `stop()`."""

    def __init__(self, *exporters: Exporter[Any], seconds: float = EXPORT_SECONDS) -> None:
        self._exporters, self._seconds = exporters, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stopped.wait(self._seconds)
            try:
                for exporter in self._exporters:
                    exporter.export()
            except Exception:  # the server goes on without its measures
                log.exception("metrics could not be exported")
