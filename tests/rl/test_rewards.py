"""Rewards: the graders' and TPF, a user's function in its own process, a service; failures are one sentence."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pyarrow as pa
import pytest

from mbd_core.options import changed
from mbd_core.rl import rewards
from mbd_core.rl.rewards import RewardConfig, RewardFailed, score_table
from mbd_core.rl.rollouts import ROLLOUT_COLUMNS

ROW = {
    "task": "gsm-mini",
    "problem_id": "p1",
    "prompt": "Tom has 3.",
    "reference": "5",
    "entry_point": "",
    "error": None,
    "finish_reason": "stop",
    "num_tokens": 12,
    "num_forwards": 4,
}


def table(*changes: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([ROW | change for change in changes], schema=ROLLOUT_COLUMNS)


def scores(changes: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = score_table(table(*changes), RewardConfig(**settings)).to_pylist()
    return [row | {"rewards": json.loads(row["rewards"] or "null")} for row in rows]


def test_right_answers_and_speed_are_rewarded_apart() -> None:
    right, wrong, cut, nothing = scores(
        [
            {"text": "so\n#### 5"},
            {"text": "#### 6", "num_forwards": 3},
            {"text": "#### 5", "finish_reason": "length"},
            {"text": None, "error": "too long"},
        ]
    )
    assert right == {"correct": True, "overlong": False, "reason": "passed", "rewards": {"correct": 1.0, "tpf": 3.0}}
    assert wrong["rewards"] == {"correct": 0.0, "tpf": 4.0} and not wrong["correct"]
    assert cut["overlong"] and not cut["correct"] and cut["rewards"]["correct"] == 0.0
    assert nothing["rewards"] is None and nothing["reason"] == "undecoded"
    (lenient,) = scores([{"text": "#### 5", "finish_reason": "length"}], overlong_is_wrong=False)
    assert lenient["correct"] and lenient["overlong"]


def test_a_function_rewards_beside_the_grader_and_may_print() -> None:
    found = scores([{"text": "a1"}, {"text": "11"}], rewards={"correct": 1.0, "rl_rewards:digits": 2.0, "tpf": 0.0})
    assert [row["rewards"] for row in found] == [
        {"correct": 0.0, "rl_rewards:digits": 0.5},
        {"correct": 0.0, "rl_rewards:digits": 1.0},
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", "raised KeyError: 'no such"),
        ("nan", "gave nan, which is no finite number"),
        ("words", "gave good, which is no finite number"),
        ("hangs", "did not answer within 1 s"),
        ("ends", "ended its process"),
        ("leaves_a_child", "did not answer within 1 s"),
        ("absent", "raised AttributeError: "),
    ],
)
def test_a_function_that_gives_no_reward_is_one_sentence(name: str, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(RewardFailed) as failed:
        scores([{"text": "a"}], rewards={f"rl_rewards:{name}": 1.0}, reward_seconds=1.0)
    assert time.monotonic() - began < 60  # no child of the function's process is waited for
    sentence = str(failed.value)
    assert sentence.startswith(f"reward 'rl_rewards:{name}' {says}") and sentence.endswith(", for an answer to p1")
    assert "\n" not in sentence


class Scorer(HTTPServer):
    """A service that answers with the next of its replies: a status, a text, or bytes that are all that it sends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScorerHandler)
        self.replies: list[int | str | bytes] = []
        self.asked: list[Any] = []


class ScorerHandler(BaseHTTPRequestHandler):
    server: Scorer

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        reply = self.server.replies.pop(0)
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            return
        self.send_response(reply if isinstance(reply, int) else 200)
        self.end_headers()
        if isinstance(reply, str):
            self.wfile.write(reply.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    server = Scorer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_service_rewards_and_is_asked_again_where_it_fails(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "PAUSE", 0.0)
    url = f"http://127.0.0.1:{scorer.server_port}/score"
    scorer.replies += [503, '{"reward": 0.25}']
    (row,) = scores([{"text": "a"}], rewards={url: 1.0})
    assert row["rewards"] == {url: 0.25}
    assert scorer.asked == [{"prompt": "Tom has 3.", "text": "a", "reference": "5", "problem_id": "p1"}] * 2
    failing: list[tuple[list[int | str | bytes], str]] = [
        ([500] * 3, "does not answer"),
        ([404], "does not answer"),
        (["{}"], "replied without a field 'reward'"),
        (["nothing"], "is unreadable: the reply is not valid JSON"),
        (['{"reward": NaN}'], "gave nan"),
        ([f'{{"reward": 1{"0" * 400}}}'], "gave 1000"),
        ([b"SSH-2.0"] * 3, "does not answer .*Bad status line.*SSH-2"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"] * 3, r"does not answer \(ClientPayloadError: "),
    ]
    for replies, says in failing:
        scorer.replies += replies
        with pytest.raises(RewardFailed, match=says):
            scores([{"text": "a"}], rewards={url: 1.0})
        assert not scorer.replies


def test_a_service_that_sends_its_reply_too_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and all of them would take five seconds: of the body, and of the head. Then nothing is
    left that waits for them."""
    monkeypatch.setattr(rewards, "TRIES", 1)
    for reply in (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n" + b" " * 50, b"HTTP/1.1 200 OK\r\nX: " + b"x" * 50):
        with socket.create_server(("127.0.0.1", 0)) as service:
            (dripping := threading.Thread(target=drip, args=(service, reply), daemon=True)).start()
            url, began = f"http://127.0.0.1:{service.getsockname()[1]}/", time.monotonic()
            with pytest.raises(RewardFailed, match=r"does not answer \(no whole reply within 0\.5 s\)"):
                scores([{"text": "a"}], rewards={url: 1.0}, reward_seconds=0.5)
            dripping.join(timeout=2.0)
            assert time.monotonic() - began < 4.0 and not dripping.is_alive(), "its caller has hung up"


def drip(service: socket.socket, reply: bytes) -> None:
    """Answer one caller, a byte every tenth of a second of its last 50."""
    caller, _ = service.accept()
    with caller, suppress(OSError):
        caller.sendall(reply[:-50])
        for place in range(len(reply) - 50, len(reply)):
            time.sleep(0.1)
            caller.sendall(reply[place : place + 1])


def test_a_reward_is_named_and_weighed() -> None:
    with pytest.raises(ValueError, match=r'rewards={"correct": "a", "tpf": 1\.0} must be an object whose values'):
        changed(RewardConfig(), {"rewards": {"correct": "a"}})
    with pytest.raises(ValueError, match="unknown reward 'speed'; known: correct, tpf"):
        RewardConfig(rewards={"speed": 1.0})
    with pytest.raises(ValueError, match="no part with a weight other than 0"):
        RewardConfig(rewards={"correct": 0.0})
    with pytest.raises(ValueError, match="weight of reward 'tpf' must be a finite number"):
        RewardConfig(rewards={"tpf": float("inf")})
    with pytest.raises(ValueError, match="weight of reward 'tpf' must be a finite number"):
        RewardConfig(rewards={"tpf": 10**400})
    for url in ("http://", "http://a b/", "http://host:port/", "http://[::1/"):
        with pytest.raises(ValueError, match="is no URL of a service"):
            RewardConfig(rewards={url: 1.0})
    assert RewardConfig(rewards={"correct": 1, "tpf": 0}).weights == {"correct": 1}
