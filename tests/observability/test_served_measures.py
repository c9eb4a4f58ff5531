"""A running service as its operators see it: through a real Prometheus, in its logs and in its spans."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from observed_service import (
    LIMIT,
    MODEL,
    ROOT,
    RULES,
    ObservedService,
    observed_service,
    prometheus,
    wait_for,
    wait_for_equal,
)
from session_processes import check_loopback_only

DOCUMENT = ROOT / "docs" / "reference" / "measures.md"
REQUEST_ID, TRACE_ID, SPAN_ID = "request-42", "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LEFT = 16  # choices of the request whose client leaves: the service decodes two at a time
SUFFIXES = re.compile(r"_(bucket|sum|count)$")
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Tom has 12 pens. Tom buys 3 bags.",
    "max_tokens": 40,
    "temperature": 1,
    "seed": 7,
    "decoding": {"buffer_size": 2, "tau_m2t": 1.0},
}
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no `prometheus` program here")


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path) -> Iterator[ObservedService]:
    """A service that has answered one request and its stream, lost a client, and refused two."""
    with observed_service(tiny_model_dir) as service:
        headers = {"X-Request-ID": REQUEST_ID, "traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
        completions = f"{service.url}/v1/completions"
        answer = httpx.post(completions, json=BODY, headers=headers, timeout=LIMIT)
        assert answer.headers["x-request-id"] == REQUEST_ID
        service.usage.update(answer.json()["usage"])
        assert httpx.post(completions, json={**BODY, "model": "other"}, timeout=LIMIT).status_code == 404
        assert httpx.post(completions, json={**BODY, "max_tokens": -1}, timeout=LIMIT).status_code == 400
        with httpx.stream(
            "POST", completions, json={**BODY, "stream": True, "max_tokens": 300, "n": LEFT}, timeout=LIMIT
        ) as left:
            next(left.iter_lines())
        yield service


@pytest.fixture(scope="module")
def scraped(service: ObservedService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes it."""
    with prometheus(service, tmp_path_factory.mktemp("prometheus")) as url:
        yield url


def ask(url: str, query: str) -> list[dict[str, Any]]:
    """The result of a PromQL query now."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=LIMIT).json()
    assert answer["status"] == "success", (query, answer)
    return answer["data"]["result"]


def total(url: str, query: str) -> float | None:
    result = ask(url, f"sum({query})")
    return float(result[0]["value"][1]) if result else None


def ended(url: str, how: str) -> float:
    """Choices that ended in one of two ways."""
    return total(url, f'ray_mbd_{how}_total{{model="{MODEL}"}}') or 0.0


def names(url: str) -> set[str]:
    return set(httpx.get(f"{url}/api/v1/label/__name__/values", timeout=LIMIT).json()["data"])


def expressions() -> list[str]:
    """The queries of the dashboard's panels, with its variables filled in."""
    panels = json.loads((RULES / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [q.replace("$__rate_interval", "1m").replace("$model", ".*") for q in queries]


def names_used() -> set[str]:
    rules = [yaml.safe_load(path.read_text()) for path in sorted(RULES.rglob("*.yaml"))]
    texts = [
        rule["expr"] for file in rules for group in file.get("spec", {}).get("groups", []) for rule in group["rules"]
    ]
    return {name for text in (*texts, *expressions()) for name in re.findall(r"\bray_\w+", text)}


@needs_prometheus
@pytest.mark.slow
def test_every_name_that_the_dashboard_and_the_rules_use_is_scraped(scraped: str) -> None:
    assert len(names_used()) > 30
    wait_for(lambda: names_used() <= names(scraped))


@needs_prometheus
@pytest.mark.slow
def test_every_panel_shows_something_and_every_rule_is_evaluated(service: ObservedService, scraped: str) -> None:
    def shown(query: str) -> bool:
        if "request_errors" in query:  # shown while there are some
            httpx.post(f"{service.url}/v1/completions", json={**BODY, "max_tokens": -1}, timeout=LIMIT)
        return bool(ask(scraped, query))

    for query in expressions():
        wait_for(lambda query=query: shown(query))
    wait_for(lambda: "vllm:time_to_first_token_seconds_bucket" in names(scraped))
    groups = httpx.get(f"{scraped}/api/v1/rules", timeout=LIMIT).json()["data"]["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    assert sum(len(group["rules"]) for group in groups) > 20
    (running,) = ask(scraped, f'vllm:num_requests_running{{model_name="{MODEL}"}}')
    assert running["metric"]["deployment"] == MODEL


@needs_prometheus
@pytest.mark.slow
def test_the_measures_are_those_of_what_was_asked(service: ObservedService, scraped: str) -> None:
    own = f'{{model="{MODEL}"}}'
    expected = {
        'ray_mbd_request_errors_total{model="",status="404"}': 1,
        f"ray_mbd_num_requests_running{own}": 0,
        f"ray_mbd_num_requests_waiting{own}": 0,
        f"ray_mbd_prompt_tokens_total{own}": (1 + LEFT) * service.usage["prompt_tokens"],
        f"ray_mbd_request_lost_replicas_total{own}": 0,
    }
    wait_for_equal(lambda: {query: total(scraped, query) for query in expected}, expected)
    wait_for_equal(lambda: ended(scraped, "request_success") + ended(scraped, "request_aborted"), 1 + LEFT)
    assert ended(scraped, "request_aborted") > 0
    latencies = f"ray_mbd_e2e_request_latency_seconds_count{own}"
    wait_for_equal(lambda: total(scraped, latencies), ended(scraped, "request_success"))
    generated, committed = (f"ray_mbd_{kind}_tokens_total{own}" for kind in ("generation", "committed"))
    wait_for(lambda: service.usage["completion_tokens"] < (total(scraped, generated) or 0))
    wait_for(lambda: (total(scraped, generated) or 0) <= (total(scraped, committed) or 0))
    assert total(scraped, f'ray_mbd_forward_passes_total{{model="{MODEL}",kind="decode"}}')
    assert total(scraped, f"ray_mbd_block_lifetime_steps_count{own}")


@needs_prometheus
@pytest.mark.slow
def test_the_document_lists_what_is_exported_and_nothing_else(scraped: str) -> None:
    listed = set(re.findall(r"^\| `(ray_mbd_\w+)`", DOCUMENT.read_text(), flags=re.MULTILINE))
    wait_for(lambda: listed <= {SUFFIXES.sub("", name) for name in names(scraped)})
    assert {SUFFIXES.sub("", name) for name in names(scraped) if name.startswith("ray_mbd_")} == listed


@pytest.mark.slow
def test_one_request_id_stands_in_the_logs_of_every_process(service: ObservedService) -> None:
    processes = ("proxy", "replica_mbd_Gateway", f"replica_mbd_{MODEL}")

    def silent() -> list[str]:
        return [p for p in processes if not any(one.get("request_id") == REQUEST_ID for one in service.log_lines(p))]

    wait_for(lambda: not silent())
    (last,) = [
        one
        for one in service.log_lines(processes[-1])
        if one.get("request_id") == REQUEST_ID and one["message"] == "request ended"
    ]
    assert last["finish_reason"] in ("stop", "length")
    assert last["prompt_tokens"] == service.usage["prompt_tokens"]
    assert last["tokens"] == service.usage["completion_tokens"]
    assert last["forwards"] > 0


@pytest.mark.slow
def test_the_spans_of_a_request_are_one_trace_that_began_at_the_client(service: ObservedService) -> None:
    def of_request() -> list[Any]:
        return [span for span in list(service.spans) if span.trace_id.hex() == TRACE_ID]

    def engine_spans() -> list[Any]:
        return [span for span in of_request() if any(a.key == "mbd.forwards" for a in span.attributes)]

    wait_for(engine_spans)
    (engine,) = engine_spans()
    attributes = {a.key: a.value for a in engine.attributes}
    assert attributes["deployment"].string_value == MODEL
    assert attributes["request_id"].string_value == REQUEST_ID
    assert attributes["mbd.tokens"].int_value == service.usage["completion_tokens"]
    wait_for(lambda: SPAN_ID in ancestors(engine, of_request()))
    deployments = {a.value.string_value for span in of_request() for a in span.attributes if a.key == "deployment"}
    assert deployments == {"Gateway", MODEL}


def ancestors(span: Any, spans: list[Any]) -> list[str]:
    """The ids of the spans above one, up to the first that is not known here."""
    by_id = {one.span_id: one for one in spans}
    found: list[str] = []
    while span is not None and span.parent_span_id:
        found.append(span.parent_span_id.hex())
        span = by_id.get(span.parent_span_id)
    return found


@pytest.mark.slow
def test_a_service_listens_on_loopback_alone(service: ObservedService) -> None:
    check_loopback_only(str(service.session))
