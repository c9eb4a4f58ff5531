"""Ray Serve LLM's own `build_openai_app` takes our engine by its `server_cls` line, deploys it and answers with it."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is
MODEL, APP = "tiny", "llm"

BUILD = """
import json, sys
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

folder, app, path = sys.argv[1:]
environment = {"env_vars": {"PYTHONPATH": path}}
ray.init(log_to_driver=False)
config = LLMConfig(
    model_loading_config={"model_id": "tiny", "model_source": folder},
    server_cls="actors.serving.llm_server:DiffusionServer",
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
        shutil.copy(ROOT / "tests" / "support" / "serving" / "openai_types.py", package / "protocol.py")
        path.append(str(folder))
    return os.pathsep.join(path)


@pytest.fixture(scope="module")
def application(
    serve_instance: str, dashboard_url: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The deployments of Ray's application and their status. A job builds it: this process has not the types."""
    from ray import serve
    from ray.job_submission import JobSubmissionClient

    folder = tmp_path_factory.mktemp("types")
    path = path_with_request_types(folder)
    program = folder / "build.py"
    program.write_text(BUILD)
    client = JobSubmissionClient(dashboard_url)
    job = client.submit_job(
        entrypoint=shlex.join([sys.executable, str(program), str(tiny_model_dir), APP, path]),
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    deadline = time.monotonic() + LIMIT
    while not (status := client.get_job_status(job)).is_terminal():
        assert time.monotonic() < deadline, client.get_job_logs(job)[-3000:]
        time.sleep(0.5)
    assert status == "SUCCEEDED", client.get_job_logs(job)[-3000:]
    deployments = serve.status().applications[APP].deployments
    yield {name: str(one.status.value) for name, one in deployments.items()}
    serve.delete(APP)


def test_without_their_types_ray_says_what_to_install(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) for name in ("vllm", "sglang")):
        pytest.skip("vLLM or SGLang is installed here")
    command = [sys.executable, "-c", "import ray.serve.llm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Neither vLLM nor SGLang is installed" in done.stderr


@pytest.mark.slow
def test_rays_application_deploys_our_engine(application: dict[str, str]) -> None:
    assert set(application.values()) == {"HEALTHY"}
    assert any(name.startswith("LLMServer") or "tiny" in name for name in application), application


@pytest.fixture
def client(application: dict[str, str], serve_instance: str) -> Iterator["openai.OpenAI"]:
    import openai

    with openai.OpenAI(base_url=f"{serve_instance}/{APP}/v1", api_key="none", max_retries=0, timeout=LIMIT) as made:
        yield made


@pytest.mark.slow
def test_rays_ingress_answers_with_our_engine(client: "openai.OpenAI") -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    ask = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    messages = [{"role": "user", "content": "Tom has 12 pens."}]
    whole = client.chat.completions.create(messages=messages, **ask)
    stream = client.chat.completions.create(messages=messages, stream=True, **ask)
    streamed = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
    assert streamed == whole.choices[0].message.content
    assert 0 < whole.usage.completion_tokens <= 12
    text = client.completions.create(prompt="Tom has", **ask)
    assert text.usage.completion_tokens <= 12
    blocks = {"custom_params": {"decoding": {"buffer_size": 1}}}
    assert client.completions.create(prompt="Tom has", extra_body=blocks, **ask).choices[0].finish_reason


@pytest.mark.slow
def test_what_cannot_be_honoured_is_a_400_at_rays_ingress(client: "openai.OpenAI") -> None:
    import openai

    refused = {"custom_params": {"decoding": {"buffer_size": 99}}}
    with pytest.raises(openai.BadRequestError, match="buffer_size"):
        client.completions.create(model=MODEL, prompt="Tom", max_tokens=4, extra_body=refused)
    with pytest.raises(openai.APIStatusError, match="not supported"):
        client.embeddings.create(model=MODEL, input="Tom", encoding_format="float")
