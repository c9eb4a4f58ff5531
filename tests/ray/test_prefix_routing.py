"""Models of one application by name, each with its settings; conversations stay with the replica that knows them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mbd_core.engine.config import LEAST_SLOTS

LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is
MAX_ROWS, PAGE = 4, 16
CONVERSATIONS, TURNS = 6, 4
STICKY, LOOSE, OTHER = "sticky", "loose", "tiny@v2"


APP = "models"


@pytest.fixture(scope="module")
def url(serve_instance: str, tiny_model_dir: Path) -> Iterator[str]:
    """The same folder three times: behind the prefix router, behind Serve's, and as another version with settings of
    its own."""
    from ray import serve

    from actors.serving.app import build

    engine = {"max_rows": MAX_ROWS, "num_pages": 400, "page_size": PAGE}
    two = {"model": str(tiny_model_dir), "replicas": 2, "engine": engine}
    models = [
        two | {"name": STICKY},
        two | {"name": LOOSE, "routing": "load"},
        {"model": str(tiny_model_dir), "name": OTHER, "engine": engine | {"buffer_size": 6, "num_pages": 100}},
    ]
    serve.run(build({"device": "cpu", "models": models}), name=APP, route_prefix=f"/{APP}")
    yield f"{serve_instance}/{APP}"
    serve.delete(APP)


def complete(url: str, model: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 16} | fields
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def replicas(url: str, model: str) -> list[dict[str, Any]]:
    """What the replicas of a model say of themselves."""
    models = httpx.get(f"{url}/health", timeout=LIMIT).json()["models"]
    (found,) = [one["replicas"] for one in models if one["name"] == model]
    answered: list[dict[str, Any]] = found
    assert all(one["ready"] for one in answered), answered
    return answered


def counts(url: str, model: str, kind: str) -> list[int]:
    """A count of the prefix caches, of each replica."""
    return [replica["prefix_cache"][kind] for replica in replicas(url, model)]


def converse(url: str, model: str) -> int:
    """Conversations turn by turn, side by side; the prompt tokens that the caches held, of those they could hold.

    The answers of a random model say nothing, so each turn is the one before and 32 tokens more.
    """
    cached = 0
    for turn in range(1, TURNS + 1):
        for conversation in range(CONVERSATIONS):
            prompt = [5 + (conversation * 37 + i * (conversation + 3)) % 400 for i in range(turn * 2 * PAGE)]
            usage = complete(url, model, prompt)["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_models_and_versions_answer_by_name_with_their_own_settings(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models", timeout=LIMIT).json()["data"]
    assert [model["id"] for model in listed] == [STICKY, LOOSE, OTHER]
    assert httpx.get(f"{url}/v1/models/{OTHER}", timeout=LIMIT).json()["id"] == OTHER
    texts = {name: complete(url, name, "Tom has 12 pens.")["choices"][0]["text"] for name in (STICKY, LOOSE, OTHER)}
    assert len(set(texts.values())) == 1, "one folder, one answer"
    assert [len(replicas(url, name)) for name in (STICKY, LOOSE, OTHER)] == [2, 2, 1]
    (other,) = replicas(url, OTHER)
    assert (other["engine"]["buffer_size"], other["kv_cache"]["num_pages"]) == (6, 100)
    assert all(one["engine"]["buffer_size"] == LEAST_SLOTS for one in replicas(url, STICKY))
    wide = {"model": OTHER, "prompt": "Tom", "max_tokens": 8, "decoding": {"buffer_size": 6}}
    assert httpx.post(f"{url}/v1/completions", json=wide, timeout=LIMIT).status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json=wide | {"model": STICKY}, timeout=LIMIT)
    assert refused.status_code == 400 and "buffer_size" in refused.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/completions", json=wide | {"model": "tiny@v3"}, timeout=LIMIT).status_code == 404


def test_conversations_find_their_pages(url: str) -> None:
    """Each turn's prompt begins with the whole of the one before, which is whole pages: all of it could be found."""
    possible = CONVERSATIONS * sum(turn * 2 * PAGE for turn in range(1, TURNS))
    before = counts(url, STICKY, "looked_up")
    sticky = converse(url, STICKY)
    assert sticky == possible, "a turn went to a replica that did not know it"
    assert all(now > then for now, then in zip(counts(url, STICKY, "looked_up"), before, strict=True))
    assert converse(url, LOOSE) < sticky, "Serve's own router finds as much: 18 turns by chance where they were"
    assert sum(counts(url, STICKY, "found")) > sum(counts(url, LOOSE, "found"))


def test_one_dominating_prefix_loads_both_replicas(url: str) -> None:
    """All requests are there at once, twice as many as one replica has rows, and all of them begin alike."""
    shared = list(range(5, 5 + 4 * PAGE))
    complete(url, STICKY, shared)
    before = counts(url, STICKY, "looked_up")
    slow = {"max_tokens": 120, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}}
    with ThreadPoolExecutor(4 * MAX_ROWS) as clients:
        list(clients.map(lambda i: complete(url, STICKY, [*shared, 5 + i], **slow), range(4 * MAX_ROWS)))
    added = [now - then for now, then in zip(counts(url, STICKY, "looked_up"), before, strict=True)]
    assert min(added) >= 4 * len(shared), f"one replica got next to nothing: {added}"


def test_all_prompts_and_choices_of_a_request_are_answered(url: str) -> None:
    """They are calls of one HTTP request, which Serve's router tells apart by nothing of theirs."""
    answer = complete(url, STICKY, [[7] * 20, [8] * 20, [9] * 20], n=2, temperature=1, seed=1, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))


@pytest.mark.slow
def test_rows_of_ray_data_are_answered_by_the_application(url: str, ray_cluster: Any) -> None:
    """More rows at once than there is room for, of two models; one of them is bad and is left out with its reason.

    A reply has an `id` of its own, so the rows are told apart by another column.
    """
    from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

    def request(row: dict[str, Any]) -> dict[str, Any]:
        number = int(row["id"])
        fields = {"model": (STICKY, OTHER)[number % 2], "prompt": f"Tom has {number} pens.", "max_tokens": 6}
        fields["decoding"] = {"buffer_size": 99 if number == 7 else 2}
        return {"method": "answer_completion", "request_kwargs": fields, "number": number}

    config = ServeDeploymentProcessorConfig(
        deployment_name="Gateway", app_name=APP, batch_size=10, concurrency=1, should_continue_on_error=True
    )
    processor = build_processor(
        config,
        preprocess=request,
        postprocess=lambda row: {
            "number": row["number"],
            "error": row["__inference_error__"],
            "text": None if row["__inference_error__"] else row["choices"][0]["text"],
        },
    )
    rows = {row["number"]: row for row in processor(ray_cluster.data.range(20)).take_all()}
    assert sorted(rows) == list(range(20))
    reason = rows[7].get("__inference_error__") or rows[7]["error"]  # Ray leaves rows that failed out of `postprocess`
    assert "buffer_size" in str(reason) and rows[7]["text"] is None, rows[7]
    for number in (0, 11):
        model = (STICKY, OTHER)[number % 2]
        alone = complete(url, model, f"Tom has {number} pens.", max_tokens=6, decoding={"buffer_size": 2})
        assert rows[number]["text"] == alone["choices"][0]["text"]
    assert all(not row["error"] for number, row in rows.items() if number != 7)


def test_rows_of_ray_data_are_answered_over_http_too(url: str, ray_cluster: Any) -> None:
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    processor = build_processor(
        HttpRequestProcessorConfig(url=f"{url}/v1/completions", batch_size=2, concurrency=1),
        preprocess=lambda row: {"payload": {"model": STICKY, "prompt": f"Tom has {row['id']} pens.", "max_tokens": 4}},
        postprocess=lambda row: {"text": row["http_response"]["choices"][0]["text"]},
    )
    rows = processor(ray_cluster.data.range(2)).take_all()
    alone = [complete(url, STICKY, f"Tom has {n} pens.", max_tokens=4)["choices"][0]["text"] for n in range(2)]
    assert sorted(row["text"] for row in rows) == sorted(alone)
