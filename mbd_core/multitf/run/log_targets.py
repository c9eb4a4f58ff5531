"""Where a run's numbers go besides `losses.jsonl`: TensorBoard in its folder, Weights & Biases, MLflow.

A resumed run continues in the same logs, and no step is in them twice. TensorBoard drops the steps of an earlier start
from the first new step on. The other two get only steps that they lack, because a repeated step has the same numbers.
"""

import importlib.util
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mbd_core.errors import error_sentence
from mbd_core.files import naming
from mbd_core.storage.folder import Folder

TENSORBOARD = "tensorboard"
PACKAGES = {TENSORBOARD: "mbd-cluster[train]", "wandb": "wandb", "mlflow": "mlflow"}
"""Each target, which is also the name of its package, and the package to install for it."""
PROJECT = "mbd-cluster"
"""The project or experiment of logged runs, unless `WANDB_PROJECT` or `MLFLOW_EXPERIMENT_NAME` names another."""
NO_TARGET = "none"
SPEED = ("seconds", "tokens_per_second", "mfu", "tokens", "padding", "tflop")
"""The numbers that a dashboard shows as a group of their own."""
MLFLOW_BATCH = 100  # parameters that MLflow takes at once


class RunLogger(Protocol):
    """A place where numbers of updates are logged in the order of their steps; `amend` adds numbers to an earlier
    step."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...
    def amend(self, step: int, values: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def chosen_targets(text: str | None) -> tuple[str, ...] | None:
    """The targets of `--log-to`; `None`, the default, is TensorBoard if it is installed.

    Raises `ValueError` for a target that is not known, or not installed here.
    """
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == (NO_TARGET,):
        return ()
    for name in names or (text,):
        if name not in PACKAGES:
            raise ValueError(
                f"--log-to {name!r}: known are {', '.join(PACKAGES)}, separated by commas, and {NO_TARGET}"
            )
        if not is_installed(name):
            raise ValueError(f"--log-to {name}: the package is not installed: pip install '{PACKAGES[name]}'")
    return names


def is_installed(target: str) -> bool:
    """Whether the target's package is installed."""
    return importlib.util.find_spec(target) is not None


def default_targets() -> tuple[tuple[str, ...], str]:
    """The targets of a run that names no target, and a sentence if no default target is installed."""
    if is_installed(TENSORBOARD):
        return (TENSORBOARD,), ""
    return (), f"no TensorBoard logs: the package is not installed (pip install '{PACKAGES[TENSORBOARD]}')"


def tag(name: str) -> str:
    """A number's name in groups, as dashboards show them."""
    if name.startswith("validation_"):
        group, _, name_in_group = tag(name.removeprefix("validation_")).rpartition("/")
        return f"{group.replace('train', 'validation').replace('loss_by', 'validation_loss_by')}/{name_in_group}"
    groups = {"loss_slot_": "loss_by_slot", "loss_ratio_": "loss_by_mask_ratio", "sweep_": "sweep"}
    for start, group in groups.items():
        if name.startswith(start):
            return f"{group}/{name.removeprefix(start)}"
    return f"{'speed' if name in SPEED else 'train'}/{name}"


def flat(settings: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Nested settings by the dotted names of their fields."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        values |= flat(value, f"{start}{name}.") if isinstance(value, Mapping) else {f"{start}{name}": value}
    return values


class TensorBoardLog:
    """Event files in the run's folder `tensorboard/`; at a URL they are uploaded whenever `flush` is called.

    An event is written at once. torch's `SummaryWriter` leaves it to a thread, which prints the traceback of a full
    disk. Raises `OSError`, which names the file, if an event cannot be written.
    """

    def __init__(self, folder: Folder, *, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._files = (folder / TENSORBOARD).workspace()
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"  # read in this order
        self.path = self._files.path / name
        self._files.path.mkdir(parents=True, exist_ok=True)
        self._events = self.path.open("ab")
        self._write(step=start, file_version="brain.Event:2")
        self._write(step=start, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        with naming(self.path):
            RecordWriter(self._events).write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._events.flush()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag(name), simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=scalars))

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        self.add(step, values)

    def flush(self) -> None:
        self._files.flush()

    def close(self) -> None:
        self.flush()
        self._events.close()
        self._files.close()


class WandbLog:
    """A run of Weights & Biases, found again by the id that the run's folder keeps."""

    def __init__(self, run_id: str | None, *, name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        self.id = run_id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            id=self.id,
            resume="allow",
            config=dict(settings),
        )
        self._next = int(self._run.starting_step)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._next:
            self._run.log({tag(key): value for key, value in values.items()}, step=step)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """W&B takes no earlier step: these numbers have an axis of their own, `sweep/step`."""
        names = {tag(key): value for key, value in values.items()}
        for name in names:
            self._run.define_metric(name, step_metric="sweep/step")
        self._run.log({**names, "sweep/step": step})

    def flush(self) -> None:
        """Weights & Biases uploads by itself."""

    def close(self) -> None:
        self._run.finish()


class MlflowLog:
    """A run of MLflow, on the server of `MLFLOW_TRACKING_URI`, found again by the id that the run's folder keeps."""

    def __init__(self, run_id: str | None, *, name: str, settings: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        self._next = 0
        if run_id is None:
            experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
            self.id = self._client.create_run(experiment.experiment_id, run_name=name).info.run_id
            params = [Param(name, str(value)[:500]) for name, value in flat(settings).items()]
            self._client.log_batch(self.id, params=params[:MLFLOW_BATCH])
        else:
            self.id = run_id
            self._client.update_run(run_id, status="RUNNING")
            self._next = 1 + max((m.step for m in self._client.get_metric_history(run_id, tag("loss"))), default=-1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._next:
            self.amend(step, values)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, [Metric(tag(key), value, now, step) for key, value in values.items()])

    def flush(self) -> None:
        """Every update is sent at once."""

    def close(self) -> None:
        self._client.set_terminated(self.id)


class GuardedLog:
    """A service's log whose failure does not end the training: it reports its first failure, and takes no more
    numbers."""

    def __init__(self, name: str, log: RunLogger) -> None:
        self.name, self._log = name, log
        self.failed = False

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda: self._log.add(step, values))

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda: self._log.amend(step, values))

    def flush(self) -> None:
        self._try(self._log.flush)

    def close(self) -> None:
        self._try(self._log.close)

    def _try(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            call()
        except Exception as error:  # whatever the service's package raises
            self.failed = True
            print(
                f"{self.name} fails and gets no more numbers of this start: {error_sentence(error)}", file=sys.stderr
            )


SERVICES: dict[str, type[WandbLog] | type[MlflowLog]] = {"wandb": WandbLog, "mlflow": MlflowLog}


def open_logs(
    targets: Sequence[str],
    folder: Folder,
    *,
    start: int,
    ids: dict[str, str],
    name: str,
    settings: Mapping[str, Any],
) -> list[RunLogger]:
    """The logs of a run that continues with step `start`. New ids at services are added to
    `ids`.

    Raises `ValueError` if a service does not open for a new run. Its later failures do not end the training
    (`GuardedLog`).
    """
    loggers: list[RunLogger] = []
    for target in targets:
        if target == TENSORBOARD:
            loggers.append(TensorBoardLog(folder, start=start))
        else:
            try:
                service = SERVICES[target](ids.get(target), name=name, settings=settings)
            except Exception as error:  # whatever the service's package raises
                sentence = f"--log-to {target} does not open: {error_sentence(error)}"
                if target not in ids:
                    raise ValueError(f"{sentence}; check its own settings, or leave it out") from error
                print(f"{sentence}; it gets no numbers of this start", file=sys.stderr)
                continue
            ids[target] = service.id
            loggers.append(GuardedLog(target, service))
    return loggers
