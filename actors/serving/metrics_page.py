"""`/metrics`: this application's measures from all of Ray's agents, as one page of Prometheus text.

Each node's agent serves the measures of `actors/serving/metrics.py`; this file only joins them.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mbd_core.serving.api.errors import ApiError

PAGE_PREFIX = "ray_mbd_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
AGENT_SECONDS = 10.0


async def metrics_page(nodes: Iterable[dict[str, Any]], *, application: str) -> str:
    """The page for `ray.nodes()`. Raises `ApiError` (503) if a node's agent does not answer, because sums without it
    would be wrong."""
    agents = [f"http://{_host(n)}:{n['MetricsExportPort']}/metrics" for n in nodes if n["Alive"]]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=AGENT_SECONDS)) as session:
        pages = await asyncio.gather(*(_page(session, agent) for agent in agents))
    return await asyncio.to_thread(merged, pages, application=application)


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


@dataclass(frozen=True)
class _Families:
    """Measures in the form of Prometheus' writer."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def merged(pages: Iterable[str], *, application: str) -> str:
    """The application's own measures from several pages. The format requires a measure's lines to stand together."""
    families: dict[str, Metric] = {}
    for page in pages:
        own_lines = "".join(
            f"{line}\n" for line in page.splitlines() if PAGE_PREFIX in line
        )  # a small part of Ray's page
        for family in text_string_to_metric_families(own_lines):
            own_samples = [s for s in family.samples if s.labels.get("application") == application]
            if own_samples:
                first = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                first.samples += own_samples
    return generate_latest(_Families(list(families.values()))).decode()
