"""Ray Serve LLM's own `build_openai_app` takes our engine by its `server_cls` line, and its ingress answers."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is
MODEL, APP = "tiny", "llm"

BUILD = """
import json, sys
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

address, folder, app, path = sys.argv[1:]
environment = {"env_vars": {"PYTHONPATH": path}}
ray.init(address=address, namespace="tests", log_to_driver=False, runtime_env=environment)
config = LLMConfig(
    model_loading_config={"model_id": "tiny", "model_source": folder},
    server_cls="actors.llm_server:DiffusionServer",
    accelerator_config={"kind": "cpu"},
    engine_kwargs={"engine": {"max_rows": 4, "num_pages": 100}},
    deployment_config={"num_replicas": 1},
    runtime_env=environment,
)
ingress = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}}
built = build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})
serve.run(built, name=app, route_prefix="/" + app)
"""


def path_with_request_types(folder: Path) -> str:
    """A `PYTHONPATH` on which Ray finds request types: those of vLLM or SGLang where installed, else the tests'."""
    path = [str(ROOT)]
    if not any(importlib.util.find_spec(name) for name in ("vllm", "sglang")):
        package = folder / "sglang" / "srt" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "support" / "openai_types.py", package / "protocol.py")
        path.append(str(folder))
    return os.pathsep.join(path)


@pytest.fixture(scope="module")
def url(
    serve_instance: str, ray_cluster: Any, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Ray's application. It is built by a program of its own: this process has not the request types."""
    from ray import serve

    path = path_with_request_types(tmp_path_factory.mktemp("types"))
    address = ray_cluster.get_runtime_context().gcs_address
    command = [sys.executable, "-c", BUILD, address, str(tiny_model_dir), APP, path]
    environment = os.environ | {"PYTHONPATH": path, "RAY_AUTH_MODE": "token"}  # as the cluster wants it
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    yield f"{serve_instance}/{APP}"
    serve.delete(APP)


def test_without_their_types_ray_says_what_to_install(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) for name in ("vllm", "sglang")):
        pytest.skip("vLLM or SGLang is installed here")
    command = [sys.executable, "-c", "import ray.serve.llm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Neither vLLM nor SGLang is installed" in done.stderr


def test_rays_ingress_answers_with_our_engine(url: str, tiny_model_dir: Path) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tom has 12 pens."}],
            "max_tokens": 24,
            "extra_body": {"custom_params": {"decoding": {"buffer_size": 1}}},
        }
        whole = client.chat.completions.create(**asked)
        assert whole.usage is not None and 0 < whole.usage.completion_tokens <= 24
        pieces = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == (
            whole.choices[0].message.content
        )
        counts = [json.loads(p.model_dump_json())["mbd"] for p in pieces if "mbd" in (p.model_extra or {})]
        assert counts[-1]["num_tokens"] == whole.usage.completion_tokens, "our counts stand in streams"
        text = client.completions.create(model=MODEL, prompt="Tom", max_tokens=8).choices[0].text
        assert isinstance(text, str)


def test_decoding_arrives_and_its_errors_come_back(url: str) -> None:
    body = {"model": MODEL, "prompt": "Tom", "custom_params": {"decoding": {"buffer_size": 99}}}
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT)
    assert refused.status_code == 400 and "buffer_size" in refused.json()["error"]["message"], refused.text
    unknown = httpx.post(f"{url}/v1/completions", json=body | {"model": "other"}, timeout=LIMIT)
    assert unknown.status_code == 404
    embedded = httpx.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": "Tom"}, timeout=LIMIT)
    assert embedded.status_code == 501 and "embeddings: not supported" in embedded.text
