"""An OpenAI endpoint of nobody's, in this process: it serves what a test tells it to."""

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = tuple[int, Mapping[str, str], Mapping[str, Any]]  # status, headers, body
ANSWER = "Tom has #### 4"


def completion(
    text: str = ANSWER, *, usage: bool = True, kind: str = "chat.completion", **fields: Any
) -> dict[str, Any]:
    counts = {"usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}} if usage else {}
    said = {"message": {"role": "assistant", "content": text}} if kind == "chat.completion" else {"text": text}
    choice = {"index": 0, "finish_reason": "stop", **said}
    return {"id": "1", "object": kind, "created": 1, "model": "m", "choices": [choice], **counts, **fields}


class ScriptedEndpoint:
    """`script` gives the answer to a body; a request for one token, which asks whether it is there, is no part of
    `bodies`. With a `key` it refuses every other one. `is_dead`: its engine computes not even a token.
    `health`: it is of this project, and says this of its models. `refuse` gives the body of a refusal, if any."""

    def __init__(self, *, models: tuple[str, ...] = ("m",), key: str | None = None) -> None:
        self.models, self.key = models, key
        self.is_dead = False
        self.health: list[dict[str, Any]] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.script: Callable[[dict[str, Any]], Answer] = lambda body: (200, {}, completion())
        self.refuse: Callable[[dict[str, Any]], Mapping[str, Any] | None] = lambda body: None
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, key: str, body: dict[str, Any] | None) -> Answer:
        if self.key is not None and key != f"Bearer {self.key}":
            return 401, {}, {"error": {"message": "no such key", "type": "auth"}}
        if path == "/v1/models":
            return (
                200,
                {},
                {
                    "object": "list",
                    "data": [{"id": m, "object": "model", "created": 1, "owned_by": "x"} for m in self.models],
                },
            )
        if self.health is not None and path in ("/health", "/tokenize"):
            return 200, {}, {"models": self.health, "max_model_len": 256}
        if body is None or path not in ("/v1/chat/completions", "/v1/completions"):
            return 404, {}, {"error": {"message": f"no route {path}"}}
        refusal = self.refuse(body)
        if refusal is not None:
            return 400, {}, refusal
        if body.get("max_tokens", body.get("max_completion_tokens")) == 1:
            if self.is_dead:
                return 500, {"Retry-After": "0.01"}, {"error": {"message": "no engine"}}
            return 200, {}, completion() if self.health is None else completion(mbd={"num_forwards": 1})
        with self._lock:
            self.bodies.append({**body, "path": path})
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.script(body)
        finally:
            with self._lock:
                self._at_once -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self, body: dict[str, Any] | None) -> None:
                status, headers, content = endpoint.answer(self.path, self.headers.get("Authorization", ""), body)
                if status == 0:  # closed without an answer
                    self.close_connection = True
                    return
                data = json.dumps(content).encode()
                self.send_response(status)
                for name, value in {
                    "Content-Type": "application/json",
                    "Content-Length": len(data),
                    **headers,
                }.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_: Any) -> None: ...

        return Handler
