"""What is said of a job's paths, by what the other nodes have; `tests/hosts` has real ones that share no disk."""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors import paths
from actors.paths import JobPaths, OpenedPath, Sight, check_everywhere, known_paths, model_paths, sight
from actors.serving.app import model_paths_of
from actors.serving.args import ServingArgs
from mbd_core.storage.contents import Contents, contents_of
from mbd_core.storage.folder import Folder

CPU = {"CPU": 1.0}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "samples.arrow").write_bytes(b"samples")
    return folder


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What other nodes have, by their host: contents of each path, or nothing; `blind` ones see no mark."""
    there: dict[str, Any] = {}

    def look(
        read: Sequence[str], files: Sequence[str], *, bundle: Mapping[str, float], own: bool = False
    ) -> dict[str, Sight]:
        assert bundle == CPU and all(Path(file).exists() for file in files)
        sights = {
            host: Sight([has(path) for path in read], [host != "blind" for _ in files]) for host, has in there.items()
        }
        return ({"head": sight(read, files)} if own else {}) | sights

    store: list[bytes] = []
    monkeypatch.setattr(paths, "look", look)
    monkeypatch.setattr(paths, "this_host", lambda: "head")
    monkeypatch.setattr(paths.ray, "put", lambda chunk: store.append(chunk) or len(store) - 1)
    monkeypatch.setattr(paths.ray, "get", store.__getitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return there


def same(path: str) -> Contents | None:
    return contents_of(Path(path))


def other(path: str) -> Contents:
    return Contents(7, "of another")


def missing(path: str) -> None:
    return None


def test_nothing_is_said_or_carried_where_all_have_the_same(data: Path, nodes: dict[str, Any]) -> None:
    nodes["one"] = nodes["two"] = same
    said: list[str] = []
    with known_paths([OpenedPath("--data", str(data))], bundle=CPU, say=said.append) as found:
        assert found.fetch(str(data)) == str(data) and found.fetch("tiny-mbd") == "tiny-mbd"
    assert said == [] and found.read[0].copy is None


@pytest.mark.parametrize("has", [missing, other])
def test_what_is_small_is_carried_and_each_node_reads_its_own_or_the_copy(
    data: Path, nodes: dict[str, Any], has: Any, tmp_path: Path
) -> None:
    nodes |= {"one": same, "two": has}
    said: list[str] = []
    with known_paths([OpenedPath("--data", str(data))], bundle=CPU, say=said.append) as found:
        assert said == [f"--data {data}: 0.0 MB go from head to two, through Ray"]
        assert found.fetch(str(data)) == str(data)
        original = contents_of(data)
        shutil.rmtree(data)  # as on a node without it
        copy = Path(found.fetch(str(data)))
        assert copy.is_relative_to(tmp_path / "cache") and copy.name == "data" and contents_of(copy) == original
        data.mkdir()
        (data / "samples.arrow").write_bytes(b"another")
        assert found.fetch(str(data)) == str(copy)


def test_what_is_large_is_refused_with_its_hosts(
    data: Path, nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "MOST_CARRIED", 3)
    nodes |= {"one": same, **{f"worker{number}": missing for number in range(6)}, "two": other}
    hosts = r"worker0, worker1, worker2, worker3 and 3 more lack it or hold another"
    with (
        pytest.raises(ValueError, match=rf"^--data {data} is on head, one, and {hosts}: give a URL as s3://"),
        known_paths([OpenedPath("--data", str(data))], bundle=CPU),
    ):
        pass


def test_a_node_that_joins_later_looks_for_itself(data: Path, nodes: dict[str, Any]) -> None:
    """All had it when the job began, so nothing is carried; and the mark is seen by those who share the folder."""
    nodes["one"] = same
    shared = [("--storage", Folder.at(data.parent / "runs"))]
    with known_paths([OpenedPath("--data", str(data))], shared, bundle=CPU) as found:
        found.check_shared()
        shutil.rmtree(data)
        with pytest.raises(ValueError, match=r"is on head, and head lacks it or holds another: give a URL"):
            found.fetch(str(data))
        Path(found.marks[0].file).unlink()
        with pytest.raises(ValueError, match=r"--storage .*runs is not one folder for all: head does not see what"):
            found.check_shared()


def test_a_folder_that_some_do_not_see_is_refused_and_no_mark_is_left(data: Path, nodes: dict[str, Any]) -> None:
    nodes |= {"one": same, "blind": same}
    runs = data.parent / "runs"
    with (
        pytest.raises(ValueError, match=r"one folder for all: blind does not see what head writes there; give a URL"),
        known_paths([], [("--storage", Folder.at(runs))], bundle=CPU),
    ):
        pass
    assert list(runs.iterdir()) == []
    with known_paths([], [("--storage", Folder.at("memory://runs"))], bundle=CPU) as found:
        assert found == JobPaths()


def test_marks_of_killed_jobs_go_and_those_of_running_ones_stay(tmp_path: Path, nodes: dict[str, Any]) -> None:
    old, young = (tmp_path / f"{paths.PROBE}{name}" for name in ("old", "young"))
    old.touch()
    young.touch()
    long_ago = time.time() - (paths.MARK_DAYS + 1) * 86400
    os.utime(old, (long_ago, long_ago))
    with known_paths([], [("--storage", Folder.at(tmp_path))], bundle=CPU):
        assert not old.exists() and young.exists() and len(list(tmp_path.glob(f"{paths.PROBE}*"))) == 2


def test_what_the_jobs_machine_lacks_is_named_with_who_has_it(data: Path, nodes: dict[str, Any]) -> None:
    nodes |= {"one": other, "two": missing}
    with (
        pytest.raises(ValueError, match=r"--data .*none cannot be read on head; it is on one"),
        known_paths([OpenedPath("--data", str(data / "none"))], bundle=CPU),
    ):
        pass


def test_models_by_a_shipped_name_or_a_url_have_no_path(tiny_model_dir: Path) -> None:
    found = model_paths("--models", "tiny-mbd", "s3://bucket/model", str(tiny_model_dir))
    assert found == [OpenedPath("--models", str(tiny_model_dir.resolve()), str(tiny_model_dir))]


def test_a_deployment_takes_what_every_node_has(data: Path, nodes: dict[str, Any]) -> None:
    nodes["one"] = nodes["two"] = same
    paths = [OpenedPath("models[0].model", path) for path in (str(data), "tiny-mbd", "s3://bucket/model")]
    check_everywhere(paths, [OpenedPath("api_keys", str(data))], bundle=CPU)


@pytest.mark.parametrize(
    ("has", "sentence"),
    [
        ({"one": same, "two": missing}, "is on head, one, and two lacks it or holds another: give a URL"),
        ({"one": other, "two": missing}, "is on head, and one, two lack it or hold another: give a URL"),
    ],
)
def test_a_deployment_of_what_some_nodes_lack_is_refused(
    data: Path, nodes: dict[str, Any], has: dict[str, Any], sentence: str
) -> None:
    nodes |= has
    with pytest.raises(ValueError, match=rf"^models\[0\]\.model {data} {sentence}"):
        check_everywhere([OpenedPath("models[0].model", str(data))], bundle=CPU)


def test_a_deployment_of_what_no_node_has_is_refused(data: Path, nodes: dict[str, Any]) -> None:
    nodes |= {"one": missing}
    with pytest.raises(ValueError, match=r"none is on no node: give a URL"):
        check_everywhere([OpenedPath("models[0].model", str(data / "none"))], bundle=CPU)


def test_a_file_of_keys_may_be_each_node_its_own(data: Path, nodes: dict[str, Any]) -> None:
    keys = [OpenedPath("api_keys", str(data / "samples.arrow"))]
    nodes |= {"one": other}
    check_everywhere([], keys, bundle=CPU)
    nodes |= {"blind": other}
    with pytest.raises(ValueError, match=r"^api_keys .* is on head, one, and blind lacks it"):
        check_everywhere([], keys, bundle=CPU)


def test_all_paths_of_an_application_are_looked_at() -> None:
    model = {"model": "/m", "adapters": {"poet": "/a"}, "weights": "s3://b/w", "engine": {"max_adapters": 1}}
    args = ServingArgs.read({"device": "cpu", "models": [{"model": "tiny-mbd"}, {"name": "two", **model}]})
    assert [tuple(opened)[:2] for opened in model_paths_of(args)] == [
        ("models[0].model", "tiny-mbd"),
        ("models[1].model", "/m"),
        ("models[1].adapters.poet", "/a"),
        ("models[1].weights", "s3://b/w"),
    ]
