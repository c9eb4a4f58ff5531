"""jobs/serve.py ends in good order and in one sentence while it is still starting; no Ray is started here."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import serve as job


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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

    ray = SimpleNamespace(is_initialized=lambda: True, get_actor=no_actor, nodes=nodes, shutdown=shutdown)
    serve = SimpleNamespace(start=start, shutdown=lambda: stopped.append("serve"))
    for name, stand_in in (("connect", connect), ("ray", ray), ("serve", serve)):
        monkeypatch.setattr(job, name, stand_in)
    assert job.main(["--model", str(tiny_model_dir)]) == 0
    assert capsys.readouterr().out == "stopping\n"
    up = {"after it": ["ray"], "while Serve starts": ["serve", "ray"]}
    assert stopped == up.get(when, [])


def test_a_port_that_is_taken_is_named_before_ray_is_started(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(**_: Any) -> bool:
        raise RuntimeError("RuntimeError: as far as Ray")

    monkeypatch.setattr(job, "connect", connect)
    monkeypatch.setattr(job, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = ["--model", str(tiny_model_dir), "--port", str(port)]
        assert job.main(asked) == 2
        told = capsys.readouterr().err
        assert told.startswith(
            f"serve: --port {port} on --host 127.0.0.1 cannot be listened on: Address already in use;"
        )
        assert len(told.splitlines()) == 1
        with monkeypatch.context() as patch:
            patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # the port would be another machine's
            assert job.main(asked) == 1
    assert job.main(asked) == 1
    assert "as far as Ray" in capsys.readouterr().err
