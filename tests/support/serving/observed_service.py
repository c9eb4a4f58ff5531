"""A service of its own Ray, watched from outside: a real Prometheus scrapes it, and its spans come here."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cluster.local import free_ports

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "k8s" / "observability"
LIMIT = 300  # seconds for what happens by itself, however busy the machine is
MODEL = "tiny"


@dataclass(frozen=True)
class ObservedService:
    """`session` is the folder of its Ray, `spans` those that came, as OTLP's own objects, and `usage` is that of a
    request that the test made."""

    url: str
    session: Path
    spans: list[Any] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def targets(self) -> Path:
        """Where Ray lists what Prometheus is to scrape."""
        return self.session / "prom_metrics_service_discovery.json"

    def log_lines(self, process: str) -> list[dict[str, Any]]:
        """The JSON lines in the logs of the processes whose log's name begins with `process`."""
        logs = (self.session / "session_latest" / "logs" / "serve").glob(f"{process}*.log")
        return [json.loads(line) for log in logs for line in log.read_text().splitlines()]


@contextmanager
def span_sink(spans: list[Any]) -> Iterator[str]:
    """An OTLP endpoint that keeps the spans that it is sent."""

    class Sink(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def observed_service(model: Path) -> Iterator[ObservedService]:
    """`jobs/serve.py` with an exporter for its spans; none of its processes outlives the block."""
    (port,) = free_ports(1)
    spans: list[Any] = []
    with span_sink(spans) as sink:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "RAY_metrics_report_interval_ms": "1000",
            "OTEL_EXPORTER_OTLP_ENDPOINT": sink,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        options = ["--name", MODEL, "--port", str(port), "--max-rows", "2", "--num-pages", "64"]
        command = [sys.executable, "jobs/serve.py", "--model", str(model), *options]
        url = f"http://127.0.0.1:{port}"
        with ExitStack() as running:
            job = running.enter_context(_job(command, environment))
            if not _serves(job, url):  # its Ray, on a busy machine: one more try, as the tests' own Ray has
                job = running.enter_context(_job(command, environment))
                assert _serves(job, url), "it ended before it served, twice"
            yield ObservedService(url, _session(job.pid), spans)


@contextmanager
def _job(command: list[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as job:
        try:
            yield job
        finally:
            children = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
            job.kill()
            for process in children:
                if process.is_running():
                    process.kill()


def _serves(job: "subprocess.Popen[str]", url: str) -> bool:
    """Wait until the job says that it serves; false if it ends before."""
    assert job.stdout is not None
    return f"serving {MODEL} at {url}/v1\n" in iter(job.stdout.readline, "")


def _session(pid: int) -> Path:
    """The folder that the job's Ray was given, from its supervisor's command line."""
    for process in psutil.Process(pid).children():
        command = process.cmdline()
        if any(part.endswith("supervisor.py") for part in command):
            return Path(command[command.index(str(pid)) + 1])
    raise AssertionError("the job has no Ray of its own")


def rule_file(manifest: Path, folder: Path) -> Path:
    """What stands in a PrometheusRule, as a rule file of Prometheus."""
    path = folder / f"{manifest.stem}.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(manifest.read_text())["spec"]))
    return path


@contextmanager
def prometheus(service: ObservedService, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes what Ray's service discovery lists and evaluates our rules; its URL."""
    wait_for(service.targets.exists)
    rules = [rule_file(path, folder) for path in (RULES / "alerts.yaml", RULES / "vllm-names" / "recordings.yaml")]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": "ray", "file_sd_configs": [{"files": [str(service.targets)], "refresh_interval": "1s"}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    program = shutil.which("prometheus")
    assert program is not None
    command = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: _answers(f"{url}/-/ready"))
            yield url
        finally:
            server.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=LIMIT).status_code == 200
    except httpx.ConnectError:
        return False


def wait_for(state: Callable[[], Any]) -> None:
    """Until `state()` is true; fails with what it last said."""
    deadline = time.monotonic() + LIMIT
    while not (last := state()):
        assert time.monotonic() < deadline, f"still {last!r} after {LIMIT} s"
        time.sleep(0.2)


def wait_for_equal(value: Callable[[], Any], expected: Any) -> None:
    """Until `value()` is what is expected."""
    deadline = time.monotonic() + LIMIT
    while (last := value()) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert last == expected
