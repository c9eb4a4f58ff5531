"""Measures of engines and gateways as Ray metrics, and `/metrics`, what Ray's agents export of them as one page.

The names are the field's (vLLM's, under our own prefix); docs/reference/observability.md lists them. In a Serve
replica each carries the tags `application`, `deployment` and `replica` too.

A counter is exported from its first moment on, at 0: `rate()` does not see a rise from nothing to 1.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import aiohttp
from ray.serve import metrics

from mbd_core.decoding.blocks.request import FinishReason
from mbd_core.engine.measures import EngineMeasures, Samples
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.server.measures import RequestMeasures, ServerMeasures

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


class Total:
    """A counter that is told its total instead of its rises."""

    def __init__(self, name: str, description: str, tags: tuple[str, ...] = ()) -> None:
        self._counter = metrics.Counter(PREFIX + name, description=description, tag_keys=("model", *tags))
        self._exported: dict[tuple[str, ...], float] = {}

    def export(self, total: float, **tags: str) -> None:
        """The total since the process started; it never falls."""
        key = tuple(tags.values())
        if key not in self._exported:
            self._exported[key] = 0
            self._counter._record(0, tags)  # `inc` refuses 0
        if total > self._exported[key]:
            self._counter.inc(total - self._exported[key], tags)
            self._exported[key] = total


class Level:
    """A gauge."""

    def __init__(self, name: str, description: str) -> None:
        self._gauge = metrics.Gauge(PREFIX + name, description=description, tag_keys=("model",))

    def export(self, value: float, **tags: str) -> None:
        self._gauge.set(value, tags)


class Distribution:
    """A histogram of what `Samples` collected since the last export."""

    def __init__(self, name: str, description: str, boundaries: Sequence[float]) -> None:
        self._histogram = metrics.Histogram(
            PREFIX + name, description=description, boundaries=list(boundaries), tag_keys=("model",)
        )

    def export(self, samples: Samples, **tags: str) -> None:
        for value in samples.take():
            self._histogram.observe(value, tags)


class EngineExporter:
    """One engine's measures; `read` says what they are now."""

    def __init__(self, read: Callable[[], EngineMeasures], *, model: str) -> None:
        self._read, self._model = read, model
        self._running = Level("num_requests_running", "requests that hold a batch row")
        self._waiting = Level("num_requests_waiting", "requests that wait for a batch row")
        self._kv_usage = Level("kv_cache_usage_perc", "share of the KV pages that running requests own, 0 to 1")
        self._active = Level("active_slots", "Block Buffer slots whose block is being decoded")
        self._dummy = Level("dummy_slots", "Block Buffer slots without a block, of the same rows")
        self._queries = Total("prefix_cache_queries", "prompt tokens that were looked up in the prefix cache")
        self._hits = Total("prefix_cache_hits", "prompt tokens that the prefix cache held")
        self._preemptions = Total("num_preemptions", "requests that lost their pages for a while")
        self._host_pages = Level("host_cache_pages", "pages that lie in the host's memory")
        self._pages_to_host = Total("pages_to_host", "pages that were copied to the host's memory")
        self._pages_from_host = Total("pages_from_host", "pages that were copied back from the host's memory")
        self._step_limit = Level(
            "step_limit_seconds", "what a step in which requests decode may take with its prompts"
        )
        self._token_seconds = Level("prompt_token_seconds", "what a prompt token costs at the beginning of its prompt")
        self._forwards = Total("forward_passes", "forwards of the model, by kind", ("kind",))
        self._sequence_forwards = Total("sequence_forwards", "forwards, each as often as sequences took part in it")
        self._static_steps = Total("static_steps", "steps of a static shape, by how they ran", ("mode",))
        self._committed = Total("committed_tokens", "tokens that were committed and handed out")
        self._edited = Total("edited_tokens", "tokens that were overwritten before they were committed")
        self._dropped = Total("dropped_samples", "values that came too fast for the histograms")
        self._distributions = {
            "tokens_per_forward": Distribution(
                "tokens_per_forward", "useful tokens of a request for each of its forwards", TOKENS_PER_FORWARD
            ),
            "block_lifetimes": Distribution(
                "block_lifetime_steps", "forwards from a block's activation to its commit", LIFETIMES
            ),
            "queue_seconds": Distribution(
                "request_queue_time_seconds", "from a request's arrival at its replica to its batch row", SECONDS
            ),
            "prefill_seconds": Distribution(
                "request_prefill_time_seconds", "from a request's batch row to the end of its prompt", SECONDS
            ),
        }

    def export(self) -> None:
        now, tags = self._read(), {"model": self._model}
        counts = now.counts
        self._running.export(now.running, **tags)
        self._waiting.export(now.waiting, **tags)
        self._kv_usage.export(now.kv_usage, **tags)
        self._active.export(now.active_slots, **tags)
        self._dummy.export(now.dummy_slots, **tags)
        self._queries.export(now.prefix_queries, **tags)
        self._hits.export(now.prefix_hits, **tags)
        self._preemptions.export(now.preemptions, **tags)
        self._host_pages.export(now.host_pages, **tags)
        self._pages_to_host.export(now.pages_to_host, **tags)
        self._pages_from_host.export(now.pages_from_host, **tags)
        self._step_limit.export(now.step_limit, **tags)
        self._token_seconds.export(now.token_seconds, **tags)
        for kind, number in counts.forwards.items():
            self._forwards.export(number, kind=kind, **tags)
        self._sequence_forwards.export(counts.sequence_forwards, **tags)
        self._static_steps.export(now.replayed_steps, mode="graph", **tags)
        self._static_steps.export(now.eager_steps, mode="eager", **tags)
        self._committed.export(counts.committed_tokens, **tags)
        self._edited.export(counts.edited_tokens, **tags)
        samples = {name: getattr(counts, name) for name in self._distributions}
        for name, distribution in self._distributions.items():
            distribution.export(samples[name], **tags)
        self._dropped.export(sum(s.num_dropped for s in samples.values()), **tags)


class RequestExporter:
    """The measures of one gateway's requests, by model; the model is "" where a request named none that is served."""

    def __init__(self, measures: ServerMeasures, *, least_replicas: Mapping[str, int] = MappingProxyType({})) -> None:
        """`least_replicas` of each model that has engines of its own; adapters have their model's."""
        self._measures, self._least = measures, least_replicas
        self._least_replicas = Level(
            "least_replicas", "engine replicas that a model has at least, 0 where it may rest"
        )
        self._prompt_tokens = Total("prompt_tokens", "prompt tokens of the requests that were accepted")
        self._generation_tokens = Total("generation_tokens", "tokens that came for clients")
        self._finished = Total("request_success", "choices that ended by themselves, by reason", ("finished_reason",))
        self._aborted = Total("request_aborted", "choices whose client left")
        self._errors = Total("request_errors", "requests that were refused or failed, by HTTP status", ("status",))
        self._lost = Total("request_lost_replicas", "times that a request lost its replica and looked for another")
        self._dropped = Total("dropped_request_samples", "values that came too fast for the histograms")
        self._distributions = {
            "time_to_first_token": Distribution(
                "time_to_first_token_seconds", "from a request's arrival to its first committed tokens", SECONDS
            ),
            "inter_token_latency": Distribution(
                "inter_token_latency_seconds",
                "between two commits of a request; a commit's tokens come at once",
                SECONDS,
            ),
            "time_per_output_token": Distribution(
                "request_time_per_output_token_seconds", "a request's mean time per token after the first", SECONDS
            ),
            "end_to_end": Distribution(
                "e2e_request_latency_seconds", "from a request's arrival to its last tokens", SECONDS
            ),
        }

    def export(self) -> None:
        for model, number in self._least.items():
            self._least_replicas.export(number, model=model)
        for model, measures in self._measures.by_model.items():
            self._export(measures, {"model": model})

    def _export(self, measures: RequestMeasures, tags: dict[str, str]) -> None:
        self._prompt_tokens.export(measures.prompt_tokens, **tags)
        self._generation_tokens.export(measures.generation_tokens, **tags)
        for reason in REASONS:
            self._finished.export(measures.finished[reason], finished_reason=reason, **tags)
        self._aborted.export(measures.aborted, **tags)
        for status in dict.fromkeys((*STATUSES, *list(measures.errors))):
            self._errors.export(measures.errors[status], status=str(status), **tags)
        self._lost.export(measures.lost_replicas, **tags)
        samples: dict[str, Samples] = {name: getattr(measures, name) for name in self._distributions}
        for name, distribution in self._distributions.items():
            distribution.export(samples[name], **tags)
        self._dropped.export(sum(s.num_dropped for s in samples.values()), **tags)


class ExportTimer:
    """Calls `export` every `seconds` in a thread of its own, and once more when it is stopped."""

    def __init__(self, exporter: EngineExporter | RequestExporter, *, seconds: float = EXPORT_SECONDS) -> None:
        self._exporter, self._seconds = exporter, seconds
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
                self._exporter.export()
            except Exception:  # what is measured goes on without its measures
                log.exception("metrics could not be exported")


# `/metrics`: what Ray's agents export of this application, as one page of Prometheus text.
#
# It computes nothing and counts nothing: the measures are those of `actors/serving/metrics.py`, which every node's
# agent serves.

PAGE_PREFIX = "ray_mbd_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
AGENT_SECONDS = 10.0
NAME = re.compile(r"(?:# (?:HELP|TYPE) )?([A-Za-z_:][\w:]*)")
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


async def metrics_page(nodes: Iterable[dict[str, Any]], *, application: str) -> str:
    """The page for `ray.nodes()`; `ApiError` (503) where a node's agent does not answer, since sums without it would
    be wrong."""
    agents = [f"http://{_host(n)}:{n['MetricsExportPort']}/metrics" for n in nodes if n["Alive"]]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=AGENT_SECONDS)) as session:
        pages = await asyncio.gather(*(_page(session, agent) for agent in agents))
    return merged(pages, application=application)


def _host(node: dict[str, Any]) -> str:
    address = str(node["NodeManagerAddress"])
    return f"[{address}]" if ":" in address else address


async def _page(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as answer:
            answer.raise_for_status()
            return await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        message = f"the metrics agent of a node does not answer ({url}: {type(error).__name__}); try again"
        raise ApiError(503, message, code="no_metrics", headers={"Retry-After": "10"}) from None


def merged(pages: Iterable[str], *, application: str) -> str:
    """The application's own measures of several pages; each measure's lines stand together, as the format asks."""
    families: dict[str, tuple[dict[str, None], list[str]]] = {}
    label = f'application="{application}"'
    for page in pages:
        names: set[str] = set()
        for line in page.splitlines():
            match = NAME.match(line)
            if match is None or not match[1].startswith(PAGE_PREFIX):
                continue
            name = match[1]
            if line.startswith("#"):
                names.add(name)
            elif label not in line:
                continue
            elif name not in names:
                name = SUFFIXES.sub("", name)
            comments, samples = families.setdefault(name, ({}, []))
            if line.startswith("#"):
                comments[line] = None
            else:
                samples.append(line)
    return "".join(f"{line}\n" for comments, samples in families.values() if samples for line in (*comments, *samples))
