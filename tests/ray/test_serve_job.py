"""jobs/serve.py: its options reach the engine, and it ends in good order while it starts; no Ray is started here."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RayServeException

from actors import paths
from actors.paths import JobPaths
from actors.serving import serve as serving
from actors.serving.args import ModelArgs, ServingArgs
from cluster import ray_private
from jobs import serve as job


@pytest.fixture(autouse=True)
def no_nodes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look would start a Ray cluster in this process."""
    monkeypatch.setattr(paths, "look", lambda *_, **__: {})


@pytest.fixture(autouse=True)
def own_signals_and_environment() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with patch.dict(os.environ):
        yield
    for number, handler in before.items():
        signal.signal(number, handler)


def no_actor(*_: Any, **__: Any) -> None:
    raise ValueError("no such actor")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["before Ray", "within ray.init", "after it", "while Serve starts"])
def test_a_signal_while_it_starts_is_an_end_in_good_order(
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    number: signal.Signals,
) -> None:
    stopped: list[str] = []

    def hit(now: str) -> None:
        if now == when:
            os.kill(os.getpid(), number)

    def connect(**_: Any) -> bool:
        hit("before Ray")
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as ray.init does
        hit("within ray.init")
        return True

    def nodes() -> list[dict[str, Any]]:
        hit("after it")
        return [{"Alive": True, "Resources": {"CPU": 4.0}}]

    def start(**_: Any) -> None:
        hit("while Serve starts")
        raise AssertionError("the signal was not heard")

    def shutdown() -> None:
        os.kill(os.getpid(), number)  # once more, by somebody impatient
        stopped.append("ray")

    ray = SimpleNamespace(is_initialized=lambda: True, get_actor=no_actor, nodes=nodes)
    serve = SimpleNamespace(start=start, shutdown=lambda: stopped.append("serve"))
    for name, stand_in in (("connect", connect), ("disconnect", shutdown), ("ray", ray), ("serve", serve)):
        monkeypatch.setattr(serving, name, stand_in)
    for name in serving.PROXY_CHECKS:
        os.environ.pop(name, None)
    assert job.main(["--model", str(tiny_model_dir)]) == 0
    assert {name: os.environ.get(name) for name in serving.PROXY_CHECKS} == serving.PROXY_CHECKS
    assert capsys.readouterr().out == "stopping\n"
    up = {"after it": ["ray"], "while Serve starts": ["serve", "ray"]}
    assert stopped == up.get(when, [])


class ScriptedGateways:
    """A deployment handle: what the gateways answer to each `drain`, and what happens meanwhile."""

    def __init__(self, *answers: list[Any], meanwhile: Callable[[int], None] = lambda _: None) -> None:
        self.calls, self._answers, self._meanwhile = list[tuple[str, float]](), answers, meanwhile
        self.describe = SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda: ["start line"]))

    def broadcast(self, method: str, seconds: float) -> Any:
        self.calls.append((method, seconds))

        def results(**_: Any) -> list[Any]:
            self._meanwhile(len(self.calls))
            answers = self._answers[min(len(self.calls), len(self._answers)) - 1]
            if answers and answers[0] is RayServeException:
                raise RayServeException("no replica")
            return answers

        return SimpleNamespace(results=results)


def ended(monkeypatch: pytest.MonkeyPatch, gateways: ScriptedGateways, argv: list[str], number: signal.Signals) -> int:
    """The exit code of a job that serves until `number`; Ray and Serve are stopped then."""
    stopped: list[str] = []
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}]
    ray = SimpleNamespace(is_initialized=lambda: True, get_actor=no_actor, nodes=lambda: nodes)
    serve = SimpleNamespace(
        start=lambda **_: None, run=lambda *_, **__: gateways, shutdown=lambda: stopped.append("serve")
    )
    monkeypatch.setattr(serving, "disconnect", lambda: stopped.append("ray"))
    for name, stand_in in (("connect", lambda **_: True), ("ray", ray), ("serve", serve)):
        monkeypatch.setattr(serving, name, stand_in)
    for name in ("POLL_SECONDS", "PASS_ON_SECONDS"):
        monkeypatch.setattr(serving, name, 0.01)
    monkeypatch.setattr(signal, "pause", lambda: os.kill(os.getpid(), number))
    code = job.main(argv)
    assert stopped == ["serve", "ray"]
    return code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_and_the_second_stops_at_once(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def second_signal(call: int) -> None:
        if call == 3:
            os.kill(os.getpid(), number)

    gateways = ScriptedGateways([2, 1], meanwhile=second_signal)
    assert ended(monkeypatch, gateways, ["--model", str(tiny_model_dir)], number) == 0
    assert len(gateways.calls) == 3
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "draining 3 requests, at most 30 s; a second signal stops at once",
        "stopping",
    ]


@pytest.mark.parametrize(
    ("answers", "switches", "calls", "printed"),
    [
        ([[0, 0]], [], 1, []),
        ([[1, 0], [1, 0], [0, 0]], [], 3, ["draining 1 request, at most 30 s; a second signal stops at once"]),
        ([[2, 0], [RuntimeError("a replica died"), 0]], [], 2, ["draining 2 requests, at most 30 s; a second"]),
        ([[2, 0], [TimeoutError("slow"), 0], [0, 0]], [], 3, ["draining 2 requests, at most 30 s; a second"]),
        ([[2, 0], [RayServeException]], [], 2, ["draining 2 requests, at most 30 s; a second"]),
        ([[2, 3]], ["--drain-seconds", "0"], 0, []),
        (
            [[2, 3]],
            ["--drain-seconds", "0.05"],
            None,
            ["draining 5 requests, at most 0.05 s; a second", "cutting 5 of them, which did not end in 0.05 s"],
        ),
    ],
)
def test_a_drain_ends_with_the_requests_or_with_its_time(
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answers: list[list[Any]],
    switches: list[str],
    calls: int | None,
    printed: list[str],
) -> None:
    gateways = ScriptedGateways(*answers)
    assert ended(monkeypatch, gateways, ["--model", str(tiny_model_dir), *switches], signal.SIGTERM) == 0
    assert calls is None or len(gateways.calls) == calls
    assert {method for method, _ in gateways.calls} <= {"drain"}
    *_, last = lines = capsys.readouterr().out.splitlines()[3:]  # after the three lines of the start
    assert last == "stopping"
    assert len(lines) == len(printed) + 1
    assert all(line.startswith(expected) for line, expected in zip(lines, printed, strict=False))


def test_a_port_that_is_taken_is_named_before_ray_is_started(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(**_: Any) -> bool:
        raise RuntimeError("RuntimeError: as far as Ray")

    monkeypatch.setattr(serving, "connect", connect)
    monkeypatch.setattr(serving, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = ["--model", str(tiny_model_dir), "--port", str(port)]
        assert job.main(asked) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(
            f"serve: --port {port} on --host 127.0.0.1 cannot be listened on: Address already in use;"
        )
        assert len(printed.splitlines()) == 1
        with monkeypatch.context() as patch:
            patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # the port would be another machine's
            assert job.main(asked) == 1
    assert job.main(asked) == 1
    assert "as far as Ray" in capsys.readouterr().err


def served(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> ModelArgs:
    """What the command would serve."""
    calls: list[ModelArgs] = []
    monkeypatch.setattr(serving, "check_port", lambda *_: None)
    monkeypatch.setattr(serving, "serve_until_stopped", lambda args, *_, **__: calls.append(args))
    assert job.main(argv) == 0
    (args,) = calls
    return args


def test_the_switches_of_the_job_reach_the_engine(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ["--model", str(tiny_model_dir)]
    args = served(monkeypatch, model)
    assert args == ModelArgs(model=str(tiny_model_dir)), "the engine's own defaults"
    assert (args.trace, args.engine.prefix_caching, args.engine.batch_invariant) == (None, True, False)
    assert served(monkeypatch, [*model, "--tensor-parallel", "2"]).tensor_parallel == 2
    switches = ["--no-prefix-caching", "--batch-invariant", "--attention", "reference", "--block-size", "4"]
    memory = ["--num-pages", "40", "--kv-memory-fraction", "0.5"]
    args = served(monkeypatch, [*model, *switches, *memory, "--trace", str(tmp_path / "t"), "--max-rows", "3"])
    assert (args.engine.prefix_caching, args.engine.batch_invariant, args.engine.max_rows) == (False, True, 3)
    assert (args.engine.attention, args.engine.block_size) == ("reference", 4)
    assert (args.engine.num_pages, args.engine.kv_memory_fraction) == (40, 0.5)
    assert args.trace == tmp_path / "t"


@pytest.mark.parametrize(
    ("switches", "sentence"),
    [
        (["--block-size", "8"], "block_size=8 cannot be honoured: tiny-random has 4"),
        (["--trace", __file__], "is a file, not a folder"),
        (["--tensor-parallel", "3"], "tensor_parallel=3 cannot be honoured: num_key_value_heads=2 does not divide"),
        (["--attention", "magic"], "attention='magic' is unknown"),
        (["--block-size", "0"], "--block-size 0 must be a whole number of at least 1"),
        (["--tensor-parallel", "0"], "--tensor-parallel 0 must be a whole number of at least 1"),
        (["--kv-memory-fraction", "0"], "--kv-memory-fraction 0 must be a number above 0"),
        (["--port", "70000"], "--port 70000 must be a whole number from 1 to 65535"),
        (["--drain-seconds", "-1"], "--drain-seconds -1 must be a number of at least 0"),
        (["--client-requests", "2"], "client_requests=2 needs api_keys"),
    ],
)
def test_a_bad_switch_is_one_sentence_and_exit_2(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], switches: list[str], sentence: str
) -> None:
    assert job.main(["--model", str(tiny_model_dir), *switches]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not printed.out


def test_clients_are_limited_by_their_keys_alone(tmp_path: Path) -> None:
    one = {"device": "cpu", "models": [{"model": "tiny-mbd"}], "client_requests": 2}
    with pytest.raises(ValueError, match="client_requests=2 needs api_keys"):
        ServingArgs.read(one)
    assert ServingArgs.read(one | {"api_keys": str(tmp_path)}).client_requests == 2


def test_the_example_has_a_place_for_a_key_and_no_key(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, key = tmp_path / "keys", "ann-0123456789abcdef"
    keys.write_text(f"ann {key}\n")
    for switches, expected in (([], 0), (["--api-keys", str(keys)], 1)):
        ended(monkeypatch, ScriptedGateways([0]), ["--model", str(tiny_model_dir), *switches], signal.SIGTERM)
        printed = capsys.readouterr().out
        (example,) = [line for line in printed.splitlines() if line.startswith("curl ")]
        assert example.count("-H 'Authorization: Bearer YOUR_KEY'") == expected
        assert key not in printed


@pytest.mark.parametrize(
    ("failure", "code", "sentence"),
    [
        (
            "ray::Replica\nTraceback\n  File\nValueError: attention='x' cannot be used: no GPU",
            2,
            "attention='x' cannot",
        ),
        ("ray::Replica\nTraceback\n  File\nMemoryError: no memory", 1, "MemoryError: no memory"),
    ],
)
def test_the_failure_of_a_replica_is_told_in_its_last_line(
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    code: int,
    sentence: str,
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError(failure)

    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}]
    ray = SimpleNamespace(is_initialized=lambda: True, get_actor=no_actor, nodes=lambda: nodes)
    status = SimpleNamespace(applications={})
    serve = SimpleNamespace(start=lambda **_: None, shutdown=lambda: None, run=failing, status=lambda: status)
    for name, stand_in in (("connect", lambda **_: False), ("ray", ray), ("serve", serve)):
        monkeypatch.setattr(serving, name, stand_in)
    assert job.main(["--model", str(tiny_model_dir)]) == code
    printed = capsys.readouterr().err
    assert printed.startswith(f"serve: {sentence}")
    assert len(printed.splitlines()) == 1


def started_with(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> list[str]:
    """Ray and Serve whose `functions` are scripted; what was stopped, with what Ray printed meanwhile."""
    stopped: list[str] = []
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}]

    def message(text: str) -> None:  # as Ray's thread does that listens to the cluster
        ray_private.worker.print_to_stdstream({"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False)

    def end(name: str) -> Callable[[], None]:
        def stop() -> None:
            stopped.append(name)
            message(f"Task ServeController.{name} failed. There are infinite retries remaining")

        return stop

    ray = SimpleNamespace(is_initialized=lambda: True, get_actor=no_actor, nodes=lambda: nodes)
    handle = ScriptedGateways([0])
    serve: dict[str, Any] = {"start": lambda **_: None, "run": lambda *_, **__: handle, "shutdown": end("serve")}
    for name, stand_in in (
        ("connect", lambda **_: True),
        ("disconnect", end("ray")),
        ("ray", ray),
        ("serve", SimpleNamespace(**(serve | functions))),
    ):
        monkeypatch.setattr(serving, name, stand_in)
    monkeypatch.setattr(signal, "pause", lambda: os.kill(os.getpid(), signal.SIGTERM))
    return stopped


def test_an_end_says_nothing_of_the_tasks_that_it_ends(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = ray_private.worker.print_to_stdstream
    stopped = started_with(monkeypatch)
    assert job.main(["--model", str(tiny_model_dir)]) == 0
    assert stopped == ["serve", "ray"]
    printed = capsys.readouterr()
    assert printed.out.splitlines()[3:] == ["stopping"]
    assert printed.err == ""
    assert ray_private.worker.print_to_stdstream is prints, "the next cluster's messages are printed"


@pytest.mark.parametrize(
    ("where", "error", "sentence"),
    [
        ("start", ActorDiedError(), "Serve's HTTP proxy did not start on 127.0.0.1:8000; the machine may be too busy"),
        ("start", TimeoutError("HTTP proxies not available after 60s."), "Serve's HTTP proxy was not ready on 127"),
        ("run", ActorDiedError(), "Serve could not serve"),
        ("run", RayServeException("There is no Serve instance."), "Serve could not serve"),
    ],
)
def test_a_start_that_serve_does_not_survive_is_one_sentence(
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: Exception,
    sentence: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    stopped = started_with(monkeypatch, **{where: fail})
    assert job.main(["--model", str(tiny_model_dir)]) == 1
    assert stopped == ["serve", "ray"]
    printed = capsys.readouterr()
    assert printed.err.startswith(f"serve: {sentence}")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_what_an_application_waits_for_is_said_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wants = iter([serving.STARTING, "no room"])
    monkeypatch.setattr(serving, "WANTS_SECONDS", 0.01)
    monkeypatch.setattr(serving, "missing", lambda: next(wants, serving.STARTING))
    monkeypatch.setattr(serving, "application", lambda *_: None)
    monkeypatch.setattr(serving.serve, "run", lambda *_, **__: time.sleep(0.5))
    serving._deploy(ServingArgs(models=[ModelArgs(model="tiny-mbd")], device="cpu"), JobPaths())
    assert capsys.readouterr().err == "waiting: no room\n"
