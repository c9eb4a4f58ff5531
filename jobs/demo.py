"""The demo (`make demo`): a short training job, a sweep, the endpoint and questions to it, on this machine."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tqdm import tqdm

from mbd_core.command_line import command
from mbd_core.fields import DATA, MODEL, OUTPUT, Flag, Ge
from mbd_core.files import check_target_folder
from mbd_core.tasks import gsm_mini

if TYPE_CHECKING:
    from cluster.local import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
SERVE_SECONDS = 180.0
SHOWN_SECONDS = 0.5  # between two updates of a progress bar
BASE, TRAINED = "ledger-bd", "ledger-mbd"
THRESHOLDS, SHOWN_THRESHOLD, SLOTS = (0.8, 0.9, 0.95), 0.9, 4
NUM_QUESTIONS = 8


def run(
    *,
    out: Annotated[Path, Flag("Folder for all results.", OUTPUT, metavar="DIR")] = Path("out/demo"),
    steps: Annotated[int, Ge(1), Flag("Updates of the short training job.", MODEL)] = 30,
    limit: Annotated[int, Ge(1), Flag("Problems of the sweep.", DATA)] = 100,
) -> None:
    """Train a little, sweep a base and its MBD, serve a model and ask it questions, all on this machine.

    It starts a local Ray cluster, submits a short MultiTF job and a sweep to it (ray job submit), starts the endpoint
    on it, asks eight questions over HTTP, and stops everything that it started. A table and three sentences show the
    results. The jobs' output goes to demo.log in --out. The model and the sweep of an earlier demo in --out are
    replaced.
    """
    from cluster.local import local_cluster
    from mbd_core.checkpoint.saving import MODEL_KIND
    from mbd_core.evaluation.sweep.folder import check_sweep_folder

    out, began = out.resolve(), time.perf_counter()
    check_target_folder(out / "trained", MODEL_KIND, overwrite=True)
    check_sweep_folder(out / "sweep", overwrite=True)
    out.mkdir(parents=True, exist_ok=True)
    log = out / "demo.log"
    log.write_text("")
    print("Four parts, about three minutes on two cores. All of it runs on this machine.", flush=True)
    with local_cluster() as cluster:
        jobs = Jobs(cluster, log)
        curve = train(jobs, out, steps=steps)
        rows = sweep(jobs, out, limit=limit)
        with endpoint(jobs, "tiny-mbd") as url:
            answers = ask(url, "tiny-mbd")
    minutes = (time.perf_counter() - began) / 60
    print(summary(rows, answers, out=out, curve=curve, minutes=minutes), flush=True)


@dataclass(frozen=True)
class Jobs:
    """Runs jobs on a cluster and appends their output to a log."""

    cluster: LocalCluster
    log: Path

    def submit(self, bar: tqdm[Any], count_done: Callable[[], int], *arguments: str) -> None:
        """Run a command on the cluster while the bar shows its progress.

        Raises `RuntimeError` if the command fails.
        """
        submission = ("-m", "ray.scripts.scripts", "job", "submit", "--", "python", "-m", "jobs")
        with self.start_job(*submission, *arguments) as job:
            while job.poll() is None:
                show(bar, count_done())
                time.sleep(SHOWN_SECONDS)
        if job.returncode:
            raise RuntimeError(f"{arguments[0]} ended with exit code {job.returncode}; its output is in {self.log}")
        show(bar, sys.maxsize)

    @contextmanager
    def start_job(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a child process whose output goes to the log and whose Ray is the cluster; it ends with the block."""
        with self.log.open("ab") as log:
            command = [sys.executable, *arguments]
            child = subprocess.Popen(
                command, cwd=ROOT, env=self.cluster.environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                yield child
            finally:
                child.terminate()
                try:
                    child.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    child.kill()


def bar(part: str, total: int, unit: str) -> tqdm[Any]:
    """The progress bar of the demo's part `part`. Outside a terminal it is drawn every 30 seconds."""
    return tqdm(
        total=total,
        desc=f"{part:<30}",
        bar_format="{desc} |{bar:18}| {n_fmt}/{total_fmt} " + unit + " [{elapsed}{postfix}]",
        ncols=shutil.get_terminal_size().columns,
        mininterval=1.0 if sys.stderr.isatty() else 30.0,
    )


def show(bar: tqdm[Any], number: int) -> None:
    """Set the bar to `number`; on a terminal, also redraw its clock."""
    assert bar.total is not None
    bar.set_postfix_str("its processes start" if number == 0 else "", refresh=False)
    bar.update(min(number, bar.total) - bar.n)
    if sys.stderr.isatty():
        bar.refresh()


def train(jobs: Jobs, out: Path, *, steps: int) -> Path:
    """Train in a new folder of `runs`; the model replaces the earlier model in `trained`. Returns the plot's path."""
    from mbd_core.multitf.run.curve_file import LOSSES
    from mbd_core.multitf.run.log import PLOT

    name = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = out / "runs" / name

    def num_updates() -> int:
        losses = folder / LOSSES
        return losses.read_text().count("\n") if losses.exists() else 0

    with bar("1/4 train: a short MultiTF run", steps, "updates") as progress:
        jobs.submit(
            progress,
            num_updates,
            *("train", "--recipe", TRAINED, "--steps", str(steps)),
            *("--storage", str(out / "runs"), "--run-name", name, "--out", str(out / "trained"), "--overwrite"),
        )
    return folder / PLOT


def sweep(jobs: Jobs, out: Path, *, limit: int) -> list[dict[str, Any]]:
    """Sweep a base and its MBD on ledger-mini with several thresholds. Returns the report's rows."""
    from mbd_core.evaluation.sweep.folder import REPORT

    samples, began = out / "sweep" / "samples", time.time()

    def num_answers() -> int:
        from pyarrow.parquet import read_metadata

        parts = [part for part in samples.glob("part-*.parquet") if part.stat().st_mtime >= began]
        return sum(read_metadata(part).num_rows for part in parts)

    grid = f"tau_m2t={','.join(map(str, THRESHOLDS))};buffer_size={SLOTS}"
    with bar("2/4 sweep: base against MBD", limit * 4 * len(THRESHOLDS), "answers") as progress:
        jobs.submit(
            progress,
            num_answers,
            *("sweep", "--models", f"{BASE},{TRAINED}", "--tasks", "ledger-mini"),
            *("--grid", grid, "--limit", str(limit), "--timed", "0", "--out", str(out / "sweep"), "--overwrite"),
        )
    rows: list[dict[str, Any]] = json.loads((out / "sweep" / REPORT).read_text())["rows"]
    return rows


@contextmanager
def endpoint(jobs: Jobs, model: str) -> Iterator[str]:
    """Run the endpoint as a child process during the block. Yields its base URL once it is ready."""
    from cluster.local import free_ports

    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with jobs.start_job("-m", "jobs", "serve", "--model", model, "--port", str(port)) as child:
        with bar(f"3/4 serve: {model} over HTTP", 2, "processes") as progress:
            wait_until_ready(child, url, progress, log=jobs.log, deadline=time.monotonic() + SERVE_SECONDS)
        yield url


def wait_until_ready(child: subprocess.Popen[bytes], url: str, bar: tqdm[Any], *, log: Path, deadline: float) -> None:
    """Return once the endpoint is ready. Its proxy answers before its replica can.

    Raises `RuntimeError` if the endpoint ends, or the deadline passes, first.
    """
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"the endpoint ended with exit code {child.returncode}; its output is in {log}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                show(bar, 2)
                return
        except urllib.error.HTTPError:
            show(bar, 1)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            show(bar, 0)
        time.sleep(SHOWN_SECONDS)
    raise RuntimeError(f"the endpoint was not ready within {SERVE_SECONDS:.0f} seconds; its output is in {log}")


@dataclass(frozen=True)
class DemoAnswer:
    """The endpoint's answer to a problem, and whether its result is right."""

    question: str
    text: str
    is_right: bool
    tpf: float


def ask(url: str, model: str) -> list[DemoAnswer]:
    """Ask `NUM_QUESTIONS` problems of the test split, one chat completion each."""
    answers = []
    problems = list(itertools.islice(gsm_mini.generate(split="test", seed=0), NUM_QUESTIONS))
    with bar(f"4/4 ask: {NUM_QUESTIONS} questions", len(problems), "answers") as progress:
        for problem in problems:
            messages = [{"role": "user", "content": problem["question"]}]
            request = urllib.request.Request(
                f"{url}/v1/chat/completions",
                data=json.dumps({"model": model, "messages": messages}).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                reply = json.load(response)
            text = reply["choices"][0]["message"]["content"]
            is_right = text.splitlines()[-1:] == problem["answer"].splitlines()[-1:]
            answers.append(DemoAnswer(problem["question"], text, is_right, reply["mbd"]["tpf"]))
            show(progress, len(answers))
    return answers


def summary(rows: list[dict[str, Any]], answers: list[DemoAnswer], *, out: Path, curve: Path, minutes: float) -> str:
    """A table of four rows, three sentences, the pictures, and what to type next."""
    cells = {
        (row["model"], row["config"]["buffer_size"]): row
        for row in rows
        if row["config"]["tau_m2t"] == SHOWN_THRESHOLD
    }
    table = [f"{'model':<34}{'blocks at once':>16}{'right answers':>16}{'tokens a forward':>19}"]
    for model, stage in ((BASE, "the base"), (TRAINED, "after MultiTF")):
        for slots in (1, SLOTS):
            row = cells[model, slots]
            name = f"{model}, {stage}" if slots == 1 else ""
            table.append(f"{name:<34}{slots:>16}{row['accuracy']:>14.0f} %{row['tpf']:>19.1f}")
    single, base, trained = cells[BASE, 1], cells[BASE, SLOTS], cells[TRAINED, SLOTS]
    right, mean = sum(answer.is_right for answer in answers), sum(answer.tpf for answer in answers) / len(answers)
    first = answers[0]
    return "\n".join(
        [
            "",
            *table,
            f"Both are shipped models; {TRAINED} was trained by MultiTF from the base. Part 1 ran the first updates "
            f"of such a training: {curve}",
            "",
            f"With {SLOTS} blocks at once the base writes {base['tpf'] / single['tpf']:.1f} times as many tokens in a "
            f"forward, and {base['accuracy']:.0f} % of its answers are right instead of {single['accuracy']:.0f} %.",
            f"After MultiTF, which trains for this way of decoding, {trained['accuracy']:.0f} % are right, with "
            f"{trained['tpf']:.1f} tokens in a forward.",
            f"The endpoint answered {right} of {len(answers)} questions correctly, {mean:.1f} tokens in a forward.",
            "",
            f"A question    {first.question}",
            *(f"{'' if at else 'its answer':<13} {line}" for at, line in enumerate(first.text.splitlines())),
            "",
            "Pictures",
            f"  {out / 'sweep' / 'plot.png'}: right answers over tokens in a forward",
            f"  {out / 'sweep' / 'report.html'}: all tables, and samples decoded forward by forward",
            f"  {curve}: the loss of the short training, whose own model is {out / 'trained'}",
            "",
            "Next",
            "  make serve                  an endpoint with a playground at http://127.0.0.1:8000",
            "  source .venv/bin/activate   then the commands of docs/guide/tutorial.md, with data of your own",
            "",
            f"Done in {minutes:.1f} minutes. All that was started has ended; {out / 'demo.log'} has its output.",
        ]
    )


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
