"""The targets of a load test: any endpoint, our endpoint, its engine alone; and the rounds in which they take
turns."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from tqdm import tqdm

from benchmarks.load.stream_client import AskedPrompt, StreamRoute, Target, open_session, record_stream, served_models
from mbd_core.batch.tool_chats import ToolChat
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig

if TYPE_CHECKING:
    from benchmarks.load.loads import Load, LoadRun, RequestRecord
    from mbd_core.serving.tokens.endpoint_args import EndpointArgs
    from mbd_core.serving.tokens.load import LoadedModel

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS, STOP_SECONDS = 300.0, 120.0
MAX_POSITIONS = 4096  # of a model with random weights: short requests need no more, and a CPU's KV memory stays small
ENGINE_ALONE = "engine alone"
Side = Callable[["Load", Sequence[AskedPrompt]], "LoadRun"]
"""Sends a load of prompts to one target and waits for its end."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """The requests' settings for all targets: model name, route, tokens of an answer, extra fields, time limit."""

    model: str | None
    route: StreamRoute
    max_tokens: int
    extra: Sequence[Mapping[str, Any]]
    seconds: float

    def extra_of(self, number: int) -> Mapping[str, Any]:
        """The extra fields of the target with this number."""
        return self.extra[number if len(self.extra) > 1 else 0]


def url_sides(urls: Sequence[str], asking: Asking) -> dict[str, Side]:
    """One side for each endpoint; its name is its URL, with a number where a URL is given twice."""
    addresses = [url.rstrip("/").removesuffix("/v1") for url in urls]
    sides: dict[str, Side] = {}
    for number, address in enumerate(addresses):
        name = address if addresses.count(address) == 1 else f"{address} ({number + 1})"
        target = asyncio.run(_target(name, address, asking, asking.extra_of(number)))
        sides[name] = http_side(target, seconds=asking.seconds)
    return sides


async def _target(name: str, url: str, asking: Asking, extra: Mapping[str, Any]) -> Target:
    async with open_session(seconds=30, api_key=os.environ.get("OPENAI_API_KEY")) as session:
        models = await served_models(session, url)
    if asking.model is None and len(models) != 1:
        raise ValueError(f"{url} serves {', '.join(models) or 'no model'}; choose one with --model")
    if asking.model is not None and asking.model not in models:
        raise ValueError(f"{url} does not serve '{asking.model}'; it serves {', '.join(models) or 'no model'}")
    model = asking.model or models[0]
    return Target(name=name, url=url, model=model, route=asking.route, max_tokens=asking.max_tokens, extra=extra)


def http_side(target: Target, *, seconds: float) -> Side:
    """A target behind HTTP; each load has connections of its own."""
    from benchmarks.load.loads import send_load

    async def send_all(load: Load, prompts: Sequence[AskedPrompt]) -> LoadRun:
        async with open_session(seconds=seconds, api_key=os.environ.get("OPENAI_API_KEY")) as session:

            async def send_one(number: int, due: float) -> RequestRecord:
                return await record_stream(session, target, prompts[number], due)

            return await send_load(send_one, load, len(prompts))

    return lambda load, prompts: asyncio.run(send_all(load, prompts))


def engine_side(loaded: LoadedModel, asking: Asking) -> Side:
    """The engine in this process; its prompts are tokenised before the load begins."""
    from benchmarks.load.loads import load_engine_alone
    from mbd_core.checkpoint.chat import plain_prompt, question_prompt

    decoding = loaded.decoding(asking.extra_of(0).get("decoding", {}))

    def send(load: Load, prompts: Sequence[AskedPrompt]) -> LoadRun:
        ids = question_prompt if asking.route == "chat/completions" else plain_prompt
        requests = []
        for number, asked in enumerate(prompts):
            grammar = None
            if isinstance(asked, ToolChat):
                prompt = asked.prompt(loaded.tokenizer)
                grammar = asked.answer_grammar(loaded.tokenizer, prompt)
            else:
                prompt = ids(loaded.tokenizer, asked)
            requests.append(
                Request(
                    request_id=str(number),
                    prompt=tuple(prompt),
                    max_tokens=asking.max_tokens,
                    decoding=decoding,
                    grammar=grammar,
                )
            )
        return load_engine_alone(loaded.engine, requests, load)

    return send


@contextmanager
def own_sides(
    asking: Asking, engine: EngineConfig, *, threads: int, replicas: Sequence[int]
) -> Iterator[dict[str, Side]]:
    """The engine alone in this process, and an endpoint of ours for each number of replicas."""
    import torch

    from mbd_core.checkpoint.saving import save_random
    from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer
    from mbd_core.models.shapes import SHAPES
    from mbd_core.serving.tokens.endpoint_args import EndpointArgs
    from mbd_core.serving.tokens.load import load_engine

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-serve-")))
        model = asking.model or "sdar-50m"
        folder = scratch / model if model in SHAPES else model_folder(model).resolve()
        if model in SHAPES:
            config = SHAPES[model]
            config = replace(config, max_positions=min(config.max_positions, MAX_POSITIONS))
            save_random(config, folder, tokenizer=shape_tokenizer(config), dtype=torch.float32)
        # bad input before anything is started
        args = EndpointArgs(model=str(folder), engine=engine, threads=threads).checked()
        torch.set_num_threads(threads)
        loaded_model = stack.enter_context(load_engine(folder, engine, device=torch.device("cpu")))
        sides = {ENGINE_ALONE: engine_side(loaded_model, asking)}
        for count in replicas:
            options = _serve_options(args, count)
            endpoint = stack.enter_context(own_endpoint(options, log=scratch / f"serve-{count}.log"))
            name = f"endpoint, {count} replica" + ("s" if count > 1 else "")
            target = asyncio.run(
                _target(name, endpoint.url, replace(asking, model=args.served_name), asking.extra_of(0))
            )
            sides[name] = http_side(target, seconds=asking.seconds)
        yield sides


def _serve_options(args: EndpointArgs, replicas: int) -> list[str]:
    engine = args.engine
    options = ["--model", args.model, "--replicas", str(replicas), "--threads", str(args.threads)]
    options += ["--max-rows", str(engine.max_rows), "--buffer-size", str(engine.buffer_size)]
    return options + ([] if engine.num_pages is None else ["--num-pages", str(engine.num_pages)])


@dataclass(frozen=True, kw_only=True)
class OwnEndpoint:
    """A running endpoint. `process` supervises it; all its processes are descendants of `process`."""

    url: str
    process: psutil.Process


@contextmanager
def own_endpoint(options: Sequence[str], *, log: Path) -> Iterator[OwnEndpoint]:
    """`jobs/serve.py` with these options on a free port, for as long as the block lasts; its output goes to `log`.

    It starts a local Ray and joins no Ray that is running, also where RAY_ADDRESS is set. It ends with this process,
    however this process ends; the folder of `log` is then removed. Raises `RuntimeError` with the last line of its
    output if not all its replicas serve within `START_SECONDS`.
    """
    from cluster.local import SUPERVISOR, free_ports

    (port,) = free_ports(1)
    command = [sys.executable, "-P", str(SUPERVISOR), str(os.getpid()), str(log.parent)]
    command += [sys.executable, str(ROOT / "jobs" / "serve.py"), *options, "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as output:
        supervisor = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    process = psutil.Process(supervisor.pid)
    try:
        _wait_until_served(supervisor, log)
        yield OwnEndpoint(url=f"http://127.0.0.1:{port}", process=process)
    finally:
        _stop(supervisor, process)


def _wait_until_served(supervisor: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the job reports that all replicas are ready. /health would be too early: one ready replica is
    enough."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        lines = log.read_text().splitlines()
        if any(line.startswith("serving ") for line in lines):
            return
        if supervisor.poll() is not None or time.monotonic() > deadline:
            last_line = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            raise RuntimeError(f"the endpoint did not start: {last_line}")
        time.sleep(0.2)


def _stop(supervisor: subprocess.Popen[bytes], process: psutil.Process) -> None:
    """Let the job end its own processes; its supervisor then ends too. After the time limit the supervisor kills the
    processes that are left."""
    if supervisor.poll() is None:
        for job in process.children():
            with suppress(psutil.Error):
                job.terminate()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(timeout=STOP_SECONDS)
    supervisor.terminate()
    supervisor.wait()


def measure(
    sides: Mapping[str, Side],
    loads: Sequence[Load],
    counts: Sequence[int],
    prompts: Sequence[AskedPrompt],
    *,
    warm_up: int,
    repeats: int,
) -> dict[str, list[list[LoadRun]]]:
    """The runs of each target, load by load. In a round all targets get the same prompts; each round begins with
    another target."""
    from benchmarks.load.loads import Concurrency

    names = list(sides)
    runs: dict[str, list[list[LoadRun]]] = {name: [[] for _ in loads] for name in names}
    if warm_up:
        for side in sides.values():
            side(Concurrency(warm_up), prompts[:warm_up])
    start = warm_up
    with tqdm(total=repeats * len(names) * sum(counts), unit="request", mininterval=1.0) as bar:
        for turn in range(repeats):
            first = turn % len(names)
            for number, (load, count) in enumerate(zip(loads, counts, strict=True)):
                for name in names[first:] + names[:first]:
                    bar.set_description(f"{name}, {load}")
                    runs[name][number].append(sides[name](load, prompts[start : start + count]))
                    bar.update(count)
                start += count
    return runs
