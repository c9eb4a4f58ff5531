"""The logs of a run: here and at a URL, of a run that goes on, and where a package is missing."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fsspec
import pytest
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run import log_targets
from mbd_core.multitf.run.curve_file import LOSSES, SPEEDS
from mbd_core.multitf.run.log import PLOT, RunLog
from mbd_core.multitf.run.log_targets import chosen_targets, flat, tag
from mbd_core.multitf.run.loss_plot import draw_losses, moving_mean
from mbd_core.multitf.step.mfu import Peak
from mbd_core.storage.folder import Folder

PEAK = Peak(1e12, "a test")


def point(step: int) -> dict[str, float]:
    return {
        "step": step,
        "loss": 3.0 - step / 10,
        "accuracy": 0.5,
        "lr": 1e-3,
        "tokens": 64,
        "grad_norm": 2.0,
        "tflop": 0.1,
        "loss_slot_1": 2.0,
        "loss_slot_2": 3.0 + step,
        "loss_ratio_75_100": 2.5,
    }


def logged(
    recipe: TrainingRecipe, folder: str, curve: list[dict[str, float]], until: int, *, closes: bool, **settings: Any
) -> RunLog:
    """A start of a run: it goes on from the curve, and ends or is killed after a checkpoint."""
    log = RunLog(Folder.at(folder), curve, recipe, peak=settings.pop("peak", PEAK), **settings)
    while len(curve) < until:
        log.begin()
        curve.append(point(len(curve)))
        log.add()
    log.flush()
    if closes:
        log.close()
    return log


def events(folder: Path) -> dict[str, list[int]]:
    """The steps of every tag that TensorBoard shows."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {name: [e.step for e in accumulator.Scalars(name)] for name in accumulator.Tags()["scalars"]}


@pytest.fixture(params=["here", "at a URL"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A run's folder, and a folder here with the same files, once `download` was called."""
    if request.param == "here":
        yield str(tmp_path / "run"), tmp_path / "run"
        return
    url = f"memory://{tmp_path.name}/run"
    yield url, tmp_path / "copy"
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def fetched(place: tuple[str, Path]) -> Path:
    url, copy = place
    if "://" in url:
        system, path = fsspec.core.url_to_fs(url)
        system.get(path, str(copy), recursive=True)
    return copy


@pytest.mark.usefixtures("rendered_pictures")
def test_a_run_that_goes_on_has_every_step_once(place: tuple[str, Path], tiny_recipe: TrainingRecipe) -> None:
    curve: list[dict[str, float]] = []
    logged(tiny_recipe, place[0], curve, 5, closes=False)
    first = [dict(p) for p in logged(tiny_recipe, place[0], list(curve), 5, closes=False).file.points]
    assert [p["step"] for p in first] == [0, 1, 2, 3, 4] and all(p["seconds"] > 0 for p in first)
    log = logged(tiny_recipe, place[0], curve[:3], 8, closes=True)  # the newest checkpoint was of step 3
    folder = fetched(place)
    lines = [json.loads(line) for line in (folder / LOSSES).read_text().splitlines()]
    assert lines == log.file.points and [p["step"] for p in lines] == list(range(8))
    assert lines[:3] == first[:3]  # their speeds too, which no checkpoint holds
    assert {k: v for k, v in lines[6].items() if k not in SPEEDS} == point(6)
    assert lines[6]["mfu"] == pytest.approx(0.1 / lines[6]["seconds"], rel=1e-3)
    assert lines[6]["tokens_per_second"] == pytest.approx(64 / lines[6]["seconds"], rel=1e-3)
    shown = events(folder / "tensorboard")
    assert shown["train/loss"] == shown["loss_by_slot/2"] == shown["speed/mfu"] == list(range(8))
    assert imread(folder / PLOT).shape[:2] == (836, 1650)


def test_a_line_that_a_lost_machine_cut_is_no_obstacle(tmp_path: Path, tiny_recipe: TrainingRecipe) -> None:
    curve = [point(0), point(1)]
    speed = {"seconds": 0.5, "tokens_per_second": 128.0}
    (tmp_path / LOSSES).write_text(json.dumps(point(0) | speed) + "\n" + '[]\n{"step": 1, "seco')
    log = RunLog(Folder.at(tmp_path), curve, tiny_recipe, peak=PEAK, targets=())
    assert log.file.points == [point(0) | speed, point(1)]


def test_without_a_peak_there_is_no_mfu(tmp_path: Path, tiny_recipe: TrainingRecipe) -> None:
    peak = Peak(None, "the peak of X is not known")
    log = logged(tiny_recipe, str(tmp_path), [], 1, closes=False, targets=(), peak=peak)
    assert "mfu" not in log.file.points[0] and "seconds" in log.file.points[0]
    assert log.describe() == "logs: losses.jsonl; MFU is left out: the peak of X is not known"


def test_without_the_package_a_run_says_so_and_goes_on(
    tmp_path: Path, tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_targets, "is_installed", lambda target: False)
    log = logged(tiny_recipe, str(tmp_path), [], 2, closes=True)
    assert "no TensorBoard logs: the package is not installed (pip install 'mbd-cluster[train]')" in log.describe()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOSSES, PLOT]


def test_a_full_disk_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = log_targets.TensorBoardLog(Folder.at(tmp_path), start=0)
    log._events = Path("/dev/full").open("ab")  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left on device: '.*/tensorboard/events\.out\.tfevents\."):
        log.add(1, {"loss": 1.0})
    assert not capfd.readouterr().err, "no thread prints a traceback"


def test_a_target_is_known_and_installed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_targets, "is_installed", lambda target: target != "wandb")
    assert chosen_targets(None) is None and chosen_targets("none") == ()
    assert chosen_targets("mlflow, tensorboard,mlflow") == ("mlflow", "tensorboard")
    with pytest.raises(ValueError, match="pip install 'wandb'"):
        chosen_targets("tensorboard,wandb")
    for text in ("tensorbord", "", "none,mlflow"):
        with pytest.raises(ValueError, match="tensorboard, wandb, mlflow"):
            chosen_targets(text)


def test_numbers_stand_in_groups() -> None:
    names = ("loss", "loss_slot_2", "loss_ratio_25_50", "mfu", "lr")
    found = [tag(name) for name in names]
    assert found == ["train/loss", "loss_by_slot/2", "loss_by_mask_ratio/25_50", "speed/mfu", "train/lr"]
    assert flat({"a": 1, "b": {"c": None, "d": {"e": 2}}}) == {"a": 1, "b.c": None, "b.d.e": 2}


class Service:
    """What stands in for the packages of both services: it keeps what it is told, by run and step."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, Mapping[str, float]]] = {}
        self.ended: list[str] = []

    def wandb(self) -> ModuleType:
        def init(**settings: Any) -> Any:
            steps = self.runs.setdefault(settings["id"], {})
            assert settings["resume"] == "allow" and settings["config"]["name"] == "tiny-random"

            def log(values: Mapping[str, float], step: int) -> None:
                assert step not in steps
                steps[step] = values

            finish = lambda: self.ended.append(settings["id"])  # noqa: E731
            return SimpleNamespace(starting_step=len(steps), log=log, finish=finish)

        module = ModuleType("wandb")
        module.init = init  # type: ignore[attr-defined]
        return module

    def mlflow(self) -> tuple[ModuleType, ModuleType]:
        service = self

        class Client:
            def create_run(self, experiment: str, run_name: str) -> Any:
                run = f"{experiment}-{run_name}-{len(service.runs)}"
                service.runs[run] = {}
                return SimpleNamespace(info=SimpleNamespace(run_id=run))

            def update_run(self, run: str, status: str) -> None:
                assert run in service.runs and status == "RUNNING"

            def get_metric_history(self, run: str, key: str) -> list[Any]:
                return [SimpleNamespace(step=step) for step, values in service.runs[run].items() if key in values]

            def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
                assert all(isinstance(p.value, str) for p in params)
                for metric in metrics:
                    assert metric.key not in service.runs[run].setdefault(metric.step, {})
                    service.runs[run][metric.step] |= {metric.key: metric.value}

            def set_terminated(self, run: str) -> None:
                service.ended.append(run)

        module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
        module.MlflowClient = Client  # type: ignore[attr-defined]
        module.set_experiment = lambda name: SimpleNamespace(experiment_id=name)  # type: ignore[attr-defined]
        entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)  # type: ignore[attr-defined]
        entities.Param = lambda key, value: SimpleNamespace(key=key, value=value)  # type: ignore[attr-defined]
        return module, entities


def test_services_get_every_step_once_under_one_run(
    place: tuple[str, Path], tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that both packages document, on stand-ins; the packages themselves are asked further down."""
    wandb, mlflow = Service(), Service()
    module, entities = mlflow.mlflow()
    for name, stand_in in (("wandb", wandb.wandb()), ("mlflow", module), ("mlflow.entities", entities)):
        monkeypatch.setitem(sys.modules, name, stand_in)
    curve: list[dict[str, float]] = []
    logged(tiny_recipe, place[0], curve, 5, closes=False, targets=("wandb", "mlflow"))
    logged(tiny_recipe, place[0], curve[:3], 7, closes=True, targets=("wandb", "mlflow"))
    for service in (wandb, mlflow):
        ((run, steps),) = service.runs.items()
        assert list(steps) == list(range(7)) and service.ended == [run]
        assert steps[6]["train/loss"] == pytest.approx(2.4)


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a file that W&B writes offline: LevelDB's log format after 7 bytes, of protocol buffers.

    Blocks of 32 KiB hold fragments: a checksum of 4 bytes, a length of 2, a type (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.slow
def test_wandb_itself_has_every_update(
    tmp_path: Path, tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's own package, without a server: the file that `wandb sync` sends."""
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = logged(tiny_recipe, str(tmp_path / "run"), [], 3, closes=False, targets=("wandb",))
    log.amend(2, {"sweep_accuracy": 0.25, "sweep_tpf": 2.0})
    log.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(file))
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    updates = [row for row in rows if "train/loss" in row]
    assert [(row["_step"], row["train/loss"]) for row in updates] == [(n, point(n)["loss"]) for n in range(3)]
    assert [(row["sweep/step"], row["sweep/accuracy"]) for row in rows if "sweep/accuracy" in row] == [(1, 0.25)]
    (start,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in start.config.update}
    assert start.project == "mbd-cluster" and config["train"]["lr"] == tiny_recipe.train.lr
    assert json.loads((tmp_path / "run" / "log_ids.json").read_text())["wandb"] == start.run_id


@pytest.mark.slow
def test_mlflow_itself_has_every_update_once(
    tmp_path: Path, tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's own package on a file of SQLite: a run that goes on is the same run, without repeated steps."""
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(store)
    curve: list[dict[str, float]] = []
    logged(tiny_recipe, str(tmp_path / "run"), curve, 4, closes=False, targets=("mlflow",))
    log = logged(tiny_recipe, str(tmp_path / "run"), curve[:2], 6, closes=False, targets=("mlflow",))
    log.amend(2, {"sweep_accuracy": 0.25, "sweep_tpf": 2.0})
    log.close()
    (run,) = mlflow.search_runs(experiment_names=["mbd-cluster"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(n, point(n)["loss"]) for n in range(6)]
    assert [m.step for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, "sweep/accuracy")] == [1]
    assert run.info.status == "FINISHED" and run.data.params["train.lr"] == str(tiny_recipe.train.lr)


def test_a_service_gets_what_a_lost_machine_did_not_send(
    tmp_path: Path, tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Service()
    monkeypatch.setitem(sys.modules, "wandb", wandb.wandb())
    curve: list[dict[str, float]] = []
    logged(tiny_recipe, str(tmp_path), curve, 5, closes=False, targets=("wandb",))
    ((_, steps),) = wandb.runs.items()
    del steps[3], steps[4]
    logged(tiny_recipe, str(tmp_path), curve, 7, closes=True, targets=("wandb",))
    assert list(steps) == list(range(7)) and steps[4]["train/loss"] == pytest.approx(2.6)


def test_a_service_that_fails_ends_no_training(
    tmp_path: Path, tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = Service()
    module, entities = mlflow.mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    curve: list[dict[str, float]] = []
    log = logged(tiny_recipe, str(tmp_path), curve, 2, closes=False, targets=("mlflow",))

    def fails(*_: Any, **__: Any) -> None:
        raise ConnectionError("the server is gone\nits traceback")

    for call in ("log_batch", "set_terminated", "create_run", "update_run"):
        monkeypatch.setattr(module.MlflowClient, call, fails)
    for _ in range(2):
        log.begin()
        curve.append(point(len(curve)))
        log.add()
    log.close()
    said = "mlflow fails and gets no more numbers of this start: the server is gone\n"
    assert capsys.readouterr().err == said and len(log.file.points) == 4
    logged(tiny_recipe, str(tmp_path), curve, 5, closes=True, targets=("mlflow",))
    sentence = "--log-to mlflow does not open: the server is gone"
    assert capsys.readouterr().err == f"{sentence}; it gets no numbers of this start\n"
    with pytest.raises(ValueError, match=f"{sentence}; check its own settings, or leave it out"):
        RunLog(Folder.at(tmp_path / "fresh"), [], tiny_recipe, peak=PEAK, targets=("mlflow",))


def test_a_moving_mean_is_over_the_updates_before() -> None:
    assert moving_mean([1.0, 3.0, 5.0, 7.0], 2).tolist() == [1.0, 2.0, 4.0, 6.0]
    assert moving_mean([2.0], 100).tolist() == [2.0]


@pytest.mark.usefixtures("rendered_pictures")
def test_one_update_alone_has_a_plot(tmp_path: Path) -> None:
    draw_losses([point(0)], tmp_path / "one.png", title="x")
    draw_losses([point(step) for step in range(300)], tmp_path / "many.png", title="x")
    assert len({imread(tmp_path / name).tobytes() for name in ("one.png", "many.png")}) == 2
