"""`/metrics`: what Ray's agents export of this application, as one page of Prometheus text.

It computes nothing and counts nothing: the measures are those of `actors/metrics.py`, which every node's agent serves.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import aiohttp

from mbd_core.serving.openai_errors import ApiError

PREFIX = "ray_mbd_"
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
    own = f'application="{application}"'
    for page in pages:
        declared: set[str] = set()
        for line in page.splitlines():
            match = NAME.match(line)
            if match is None or not match[1].startswith(PREFIX):
                continue
            name = match[1]
            if line.startswith("#"):
                declared.add(name)
            elif own not in line:
                continue
            elif name not in declared:
                name = SUFFIXES.sub("", name)
            comments, samples = families.setdefault(name, ({}, []))
            if line.startswith("#"):
                comments[line] = None
            else:
                samples.append(line)
    return "".join(f"{line}\n" for comments, samples in families.values() if samples for line in (*comments, *samples))
