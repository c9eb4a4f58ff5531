"""A reward service: busy, slow, redirected, refusing, with a key; many answers at once."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from scored_rows import rewards_of, scores

from mbd_core.rl.parts import RewardFailed
from mbd_core.rl.rewards import RewardConfig, check_judges

Reply = int | str | bytes | tuple[int, dict[str, str], str]


class Service(ThreadingHTTPServer):
    """Gives its replies in turn, then the last one again: a status, a body, all bytes that it sends, or status,
    headers and body."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ServiceHandler)
        self.replies: list[Reply] = ['{"reward": 0.25}']
        self.seconds = 0.0
        self.asked: list[Any] = []
        self.heads: list[tuple[str, str | None]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class ServiceHandler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(question)
            self.server.heads.append((self.path, self.headers["Authorization"]))
            replies = self.server.replies
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
        time.sleep(self.server.seconds)
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            return
        parts = (reply, {}, "") if isinstance(reply, int) else (200, {}, reply) if isinstance(reply, str) else reply
        status, headers, body = parts
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def in_a_second() -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)  # whole seconds: at least one


@pytest.mark.parametrize(
    ("status", "after"),
    [(429, lambda: "1"), (503, in_a_second), (408, lambda: ""), (425, lambda: "soon"), (500, None)],
)
def test_a_busy_service_is_asked_again_when_it_says(
    service: Service, status: int, after: Callable[[], str] | None
) -> None:
    service.replies[:0] = [(status, {} if after is None else {"Retry-After": after()}, "busy")]
    began = time.monotonic()
    assert rewards_of(service.url, ["a"]) == [0.25]
    names_time = status in (429, 503)
    assert (0.9 if names_time else 0.2) < time.monotonic() - began < 5.0
    assert service.asked == [{"prompt": "Tom has 3.", "text": "a", "reference": "5", "problem_id": "p1"}] * 2


def test_a_service_that_stays_busy_is_given_up_in_a_sentence_that_names_the_time(service: Service) -> None:
    service.replies = [(503, {}, "the model is\n loading")]
    (sentence,) = rewards_of(service.url, ["a"], judge_patience=1.0)
    assert sentence.startswith(f"reward '{service.url}' gave none within 1 s (--judge-patience) and ")
    assert sentence.endswith("tries: status 503: the model is loading, for an answer to p1")
    assert len(service.asked) > 1
    service.replies = [(429, {"Retry-After": "3600"}, "")]
    began = time.monotonic()
    (sentence,) = rewards_of(service.url, ["a"], judge_patience=60.0)
    assert "1 try: status 429, and asks to wait 3600 s, for an answer" in sentence and time.monotonic() - began < 5.0


def test_a_service_that_is_not_there_is_given_up_once_for_all_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    began = time.monotonic()
    found = rewards_of(f"http://127.0.0.1:{port}/", ["a"] * 64, judge_patience=1.0, judge_concurrency=4)
    assert time.monotonic() - began < 8.0  # not 16 seconds
    assert all("Cannot connect to host" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ((404, {}, "no such\nroute"), "answers with status 404: no such route; correct the URL's path"),
        ((401, {}, ""), "answers with status 401; give its key with --judge-key"),
        ((422, {}, "x" * 999), f"answers with status 422: {'x' * 200}; see that the service takes the body"),
        (
            (302, {"Location": "/login"}, ""),
            "answers 302, a redirect to /login that drops the question; give that URL",
        ),
        ((307, {"Location": "/again"}, ""), "redirects more than 5 times, last to http://127.0.0.1"),
        ((308, {"Location": "ftp://elsewhere/"}, ""), "answers 308, to ftp://elsewhere/, where"),
        ("{}", "replied without a field 'reward', as in {\"reward\": 0.5}: {}"),
        ("0.5", "replied without a field 'reward'"),
        ("nothing", "is unreadable: the reply is not valid JSON"),
        ('{"reward": NaN}', "gave nan, which is no finite number"),
        ('{"reward": true}', "gave True, which"),
        ('{"reward": "0.5"}', "gave 0.5, which is no finite number"),
        (f'{{"reward": 1{"0" * 400}}}', "gave 1000"),
    ],
)
def test_what_is_no_reward_is_one_sentence_at_once(service: Service, reply: Reply, says: str) -> None:
    service.replies = [reply]
    (sentence,) = rewards_of(service.url, ["a"])
    assert sentence.startswith(f"reward '{service.url}' {says}") and "\n" not in sentence
    assert len(service.asked) == (6 if "redirects" in says else 1)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"SSH-2.0", "Bad status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "ClientPayloadError: "),
        (b"", "Server disconnected"),
    ],
)
def test_a_reply_that_is_cut_is_asked_for_again(service: Service, reply: bytes, says: str) -> None:
    service.replies.insert(0, reply)
    assert rewards_of(service.url, ["a"]) == [0.25]
    service.replies = [reply]
    (sentence,) = rewards_of(service.url, ["a"], judge_patience=0.5)
    assert says in sentence and "(--judge-patience)" in sentence


def test_a_redirect_that_keeps_the_question_is_followed(service: Service) -> None:
    service.replies[:0] = [(307, {"Location": "/score/"}, ""), (308, {"Location": service.url + "/2"}, "")]
    assert rewards_of(service.url, ["a"]) == [0.25]
    assert [path for path, _ in service.heads] == ["/score", "/score/", "/score/2"] and len(service.asked[2]) == 4


def test_one_refused_answer_is_dropped_and_null_does_not_apply(service: Service) -> None:
    service.replies[:0] = [400, '{"reward": null}']
    first, second, third = scores([{"text": "a"}] * 3, rewards={service.url: 1.0, "tpf": 1.0}, judge_concurrency=1)
    assert "answers with status 400; see that" in first["failure"] and first["rewards"] is None
    assert second["rewards"] == {service.url: None, "tpf": 3.0} and third["rewards"] == {service.url: 0.25, "tpf": 3.0}
    service.replies[:0] = [400]
    with pytest.raises(RewardFailed, match="400"):
        scores([{"text": "a"}] * 3, rewards={service.url: 1.0}, on_reward_error="stop")


def test_many_answers_are_judged_at_once(service: Service) -> None:
    """As 64 answers to a judge of a second in under ten, in half the time."""
    service.seconds = 0.5
    began = time.monotonic()
    assert rewards_of(service.url, ["a"] * 64) == [0.25] * 64
    assert time.monotonic() - began < 5.0


def test_a_key_is_sent_and_never_shown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RewardConfig(rewards={service.url: 1.0}, judge_key={service.url: "JUDGE_KEY"})
    with pytest.raises(ValueError, match="environment variable"):
        check_judges(config)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    check_judges(config)
    assert rewards_of(service.url, ["a"], judge_key=config.judge_key) == [0.25]
    assert service.heads == [("/score", "Bearer secret")]
    service.replies = [(307, {"Location": "http://localhost:1/"}, "")]
    (sentence,) = rewards_of(service.url, ["a"], judge_key=config.judge_key)
    assert "would be sent to another server" in sentence and "secret" not in sentence


def test_a_service_that_sends_its_reply_too_slowly_is_not_waited_for() -> None:
    """Each byte comes in time, and all of them would take five seconds: of the body, and of the head. Then nothing is
    left that waits for them."""
    for reply in (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n" + b" " * 50, b"HTTP/1.1 200 OK\r\nX: " + b"x" * 50):
        with socket.create_server(("127.0.0.1", 0)) as service:
            (dripping := threading.Thread(target=drip, args=(service, reply), daemon=True)).start()
            url, began = f"http://127.0.0.1:{service.getsockname()[1]}/", time.monotonic()
            (sentence,) = rewards_of(url, ["a"], reward_seconds=0.5, judge_patience=0.6)
            assert "no whole reply within 0.5 s" in sentence
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
