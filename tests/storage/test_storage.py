"""Remote folders keep the rules of local ones: refused before any work, replaced on demand, never partial."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from object_store import only_known_keys

from mbd_core.files import MANIFEST, claim_folder, folder_beside
from mbd_core.storage import remote
from mbd_core.storage.errors import TakenOver
from mbd_core.storage.folder import JOB_COPY, Folder
from mbd_core.storage.local import LocalText
from mbd_core.storage.models import fetch_model
from mbd_core.storage.remote_files import UNFINISHED


@pytest.fixture(params=["memory", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL of an empty folder: in this process's memory, or on an S3 server."""
    return (
        f"memory://{tmp_path.name}"
        if request.param == "memory"
        else f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    )


def names(folder: Folder) -> list[str]:
    system, path = fsspec.core.url_to_fs(folder.location, use_listings_cache=False)
    try:
        return sorted(str(name).strip("/")[len(path.strip("/")) + 1 :] for name in system.find(path))
    except FileNotFoundError:
        return []


def write(folder: Folder, files: dict[str, str], *, kind: str = "model", overwrite: bool = False) -> None:
    with folder.staged(kind, overwrite=overwrite) as path, folder_beside(path, kind) as beside:
        for name, text in files.items():
            (beside / name).parent.mkdir(exist_ok=True)
            (beside / name).write_text(text)


def put(folder: Folder, name: str, text: str) -> None:
    """A file of somebody else's."""
    system, path = fsspec.core.url_to_fs(folder.location)
    system.pipe_file(f"{path}/{name}", text.encode())


def test_a_folder_is_uploaded_whole_and_replaced_on_demand(base: str) -> None:
    folder = Folder.at(f"{base}/runs") / "model"
    assert not folder.exists()
    write(folder, {"a.txt": "1", "shards/b.txt": "2"})
    assert names(folder) == ["a.txt", MANIFEST, "shards/b.txt"]
    assert folder.exists() and folder.read_text("shards/b.txt") == "2" and folder.read_text("c.txt") is None
    with pytest.raises(ValueError, match="--overwrite"):
        write(folder, {"a.txt": "3"})
    with pytest.raises(ValueError, match="not a sweep"):
        folder.check_target("sweep", overwrite=True)
    assert folder.read_text("a.txt") == "1"
    write(folder, {"a.txt": "3"}, overwrite=True)
    assert names(folder) == ["a.txt", MANIFEST] and folder.read_text("a.txt") == "3"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_of_the_user_s_is_kept(base: str, overwrite: bool) -> None:
    mine, ours = Folder.at(base) / "thesis", Folder.at(base) / "model"
    put(mine, "thesis.txt", "years of work")
    with pytest.raises(ValueError, match="thesis"):
        mine.check_target("model", overwrite=overwrite)
    with pytest.raises(ValueError, match=r"thesis.txt"):
        (mine / "thesis.txt").check_target("model", overwrite=overwrite)
    write(ours, {"a.txt": "1"})
    put(ours, "notes.txt", "precious")
    with pytest.raises(ValueError, match=r"notes.txt|give another folder, or --overwrite"):
        write(ours, {"a.txt": "2"}, overwrite=overwrite)
    assert (ours.read_text("a.txt"), ours.read_text("notes.txt"), names(mine)) == ("1", "precious", ["thesis.txt"])


def test_an_upload_that_is_cut_off_is_no_folder_and_can_be_repeated(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.at(base) / "model"
    write(folder, {"a.txt": "old", "z.txt": "old"})
    system, _ = folder.filesystem()
    put_file = system.put_file

    def cut_off(source: str, target: str) -> None:
        if target.endswith("b.txt"):
            raise ConnectionError("the network\nis down")
        put_file(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(system, "put_file", cut_off)
        with pytest.raises(OSError, match="the network"):
            write(folder, {"a.txt": "new", "b.txt": "new"}, overwrite=True)
    assert MANIFEST not in names(folder) and UNFINISHED in names(folder)
    with pytest.raises(ValueError, match="was not written to its end"):
        folder.fetch(tmp_path / "cache")
    with pytest.raises(ValueError, match="give another folder, or --overwrite"):
        folder.check_target("model")
    write(folder, {"a.txt": "new", "b.txt": "new"}, overwrite=True)
    assert names(folder) == ["a.txt", "b.txt", MANIFEST] and folder.read_text("a.txt") == "new"


@pytest.mark.parametrize("keep", [True, False])
def test_what_could_not_be_uploaded_is_kept_where_it_is_asked_for(tmp_path: Path, keep: bool) -> None:
    folder = Folder.at(f"memory://{tmp_path.name}/report")
    paths: list[Path] = []

    def write_while_another_does() -> None:
        with folder.staged("sweep", keep=keep) as path:
            paths.append(claim_folder(path, "sweep", ["a.txt"]))
            put(folder, "b.txt", "somebody was faster")

    with pytest.raises(ValueError, match="was not written by this project"):
        write_while_another_does()
    assert (names(folder), folder.read_text("b.txt")) == (["b.txt"], "somebody was faster")
    assert paths[0].exists() == keep
    shutil.rmtree(paths[0].parent, ignore_errors=True)


def test_a_mirrored_folder_fills_file_by_file_and_begins_with_what_is_there(base: str, tmp_path: Path) -> None:
    folder, files = Folder.at(f"{base}/sweep"), ["samples/part-*.txt", "report.txt"]

    def interrupted() -> None:
        with folder.mirrored("sweep", files) as mirror:
            claim_folder(mirror.path, "sweep", files)
            (mirror.path / "samples").mkdir()
            (mirror.path / "samples" / "part-1.txt").write_text("1")
            mirror.publish("samples/part-1.txt")
            assert names(folder) == [UNFINISHED, "samples/part-1.txt"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    put(folder, "notes.txt", "somebody else's")
    with pytest.raises(ValueError, match="was not written to its end"):
        folder.fetch(tmp_path / "cache")
    with folder.mirrored("sweep", files) as mirror:
        assert (mirror.path / "samples" / "part-1.txt").read_text() == "1"
        assert not (mirror.path / "notes.txt").exists()
        (mirror.path / "report.txt").write_text("whole")
        (mirror.path / "samples" / "part-1.txt").unlink()
        mirror.publish("report.txt")
        mirror.publish("samples/part-1.txt")
    assert names(folder) == [MANIFEST, "notes.txt", "report.txt"]
    assert not mirror.path.parent.exists()
    with folder.mirrored("sweep", files):
        assert MANIFEST in names(folder), "nothing was written"
    with pytest.raises(ValueError, match="not a model"), folder.mirrored("model", files):
        pass
    foreign = Folder.at(f"{base}/foreign")
    put(foreign, "a.txt", "mine")
    with pytest.raises(ValueError, match="was not written by this project"), foreign.mirrored("sweep", files):
        pass
    assert (names(foreign), foreign.read_text("a.txt")) == (["a.txt"], "mine")


def test_a_mirrored_folder_that_was_killed_before_its_first_file_is_gone_on_with(base: str) -> None:
    folder, files = Folder.at(f"{base}/sweep"), ["report.txt"]
    put(folder, UNFINISHED, json.dumps({"kind": "sweep", "files": files}))
    with folder.mirrored("sweep", files) as mirror:
        claim_folder(mirror.path, "sweep", files)
        (mirror.path / "report.txt").write_text("whole")
        mirror.publish("report.txt")
    assert names(folder) == [MANIFEST, "report.txt"]


def test_a_model_is_fetched_once_a_version(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = Folder.at(base) / "tiny", tmp_path / "cache"
    with pytest.raises(ValueError, match="/tiny;"):
        fetch_model(str(folder), cache=cache)
    write(folder, {"config.json": "{}", "shards/a.bin": "1"})
    first = Path(fetch_model(str(folder), cache=cache))
    assert first.name == "tiny"
    assert (first / "config.json").read_text() == "{}" and (first / "shards" / "a.bin").read_text() == "1"
    with monkeypatch.context() as patch:
        patch.setattr(remote, "download", lambda *_, **__: pytest.fail("it was fetched before"))
        assert fetch_model(str(folder), cache=cache) == str(first)
    time.sleep(1.1)  # S3's times are whole seconds, and what somebody writes after the manifest is taken as it is
    put(folder, "shards/a.bin", "22")
    second = Path(fetch_model(str(folder), cache=cache))
    assert ((second / "shards" / "a.bin").read_text(), (first / "shards" / "a.bin").read_text()) == ("22", "1")


def test_names_and_paths_are_left_to_the_caller(tmp_path: Path) -> None:
    assert fetch_model("tiny-mbd") == "tiny-mbd"
    assert fetch_model(f"file://{tmp_path}/model") == f"{tmp_path}/model"


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = Folder.at(f"memory://{tmp_path.name}/tiny")
    MemoryFileSystem.store[f"/{tmp_path.name}/tiny/../../escaped"] = MemoryFileSystem().open("/x", "wb")
    try:
        with pytest.raises(ValueError, match=r"escaped would be written outside of its folder$"):
            folder.fetch(tmp_path / "cache")
    finally:
        del MemoryFileSystem.store[f"/{tmp_path.name}/tiny/../../escaped"]
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def in_the_way(path: Path) -> str:
    (path / "file").write_text("")
    return str(path / "file" / "out")


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (in_the_way, r"file/out cannot be written: \S*/file: Not a directory; give another place$"),
        (
            lambda path: f"file://{in_the_way(path)}",
            r"file/out cannot be written: \S*/file: Not a directory; give another place$",
        ),
        (lambda path: f"{path}/{'x' * 300}", r"cannot be written: its name is longer than 200 bytes"),
        (lambda _: "/proc/mbd/out", r"^/proc/mbd/out cannot be written: /proc: "),
        (lambda _: "s4://bucket/out", r"^s4://bucket/out cannot be reached: unknown scheme 's4'; give a path"),
        (lambda _: "", "^an empty name is no folder; give a path, or a URL"),
        (lambda _: "s3://", "^s3:// names no folder; give one as s3://bucket/path$"),
        (lambda _: "gs://bucket/out", r"^gs://bucket/out needs a package that is not installed: .*gcsfs"),
        (lambda _: "https://127.0.0.1:9/out", r"^https://127\.0\.0\.1:9/out cannot be written: "),
    ],
    ids=[
        "file-in-the-way",
        "file-url",
        "long-name",
        "no-permission",
        "unknown",
        "empty",
        "no-bucket",
        "no-package",
        "read-only",
    ],
)
def test_what_cannot_be_written_is_one_sentence(target: Callable[[Path], str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence) as raised:
        Folder.at(target(tmp_path)).check_target("model")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "changes", "sentence"),
    [
        ("s3://none-such/out", {}, r"^s3://none-such/out cannot be written: .*bucket does not exist"),
        (
            "s3://bucket/out",
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
            "Unable to locate credentials",
        ),
        ("s3://bucket/out", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect to the endpoint URL"),
    ],
    ids=["bucket", "credentials", "endpoint"],
)
def test_an_s3_that_takes_nothing_is_one_sentence(
    s3: str,
    url: str,
    changes: dict[str, str | None],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where credentials may lie too
    for name, value in changes.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(ValueError, match=sentence) as raised:
        Folder.at(url).check_target("model")
    assert "\n" not in str(raised.value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_credentials_that_are_wrong_are_one_sentence(s3: str, s3_server: dict[str, str], tmp_path: Path) -> None:
    reason = r"The AWS Access Key Id you provided does not exist in our records\.$"
    folder = Folder.at(f"{s3}/out")
    with only_known_keys(s3_server):
        with pytest.raises(ValueError, match=rf"^s3://bucket/out cannot be written: {reason}"):
            folder.check_target("model")
        with pytest.raises(ValueError, match=rf"^s3://bucket/out cannot be read: {reason}"):
            folder.fetch(tmp_path)
    folder.check_target("model")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # what it imported before
    with pytest.raises(ValueError, match=r"install mbd-cluster\[s3\]$"):
        Folder.at("s3://bucket/x")


def test_a_relative_path_in_a_submitted_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's working directory is a copy, and goes with it."""
    monkeypatch.chdir(tmp_path)
    assert Folder.at("out/x") == Folder.at(tmp_path / "out" / "x")
    copy = tmp_path / "runtime_resources" / JOB_COPY / "package"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    with pytest.raises(ValueError, match="absolute path"):
        Folder.at("out/x")
    assert Folder.at(copy / "out").path == copy / "out"


def test_a_folder_holds_what_lies_in_it() -> None:
    folder = Folder.at("s3://bucket/runs/mine")
    assert folder.holds(folder) and folder.holds(folder / "model") and Folder.at("s3://bucket").holds(folder)
    assert not folder.holds(Folder.at("s3://bucket/runs/mine-too")) and not folder.holds(Folder.at("/runs/mine/x"))
    assert Folder.at("/").holds(Folder.at("/runs"))


@pytest.fixture(params=["disk", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A folder that is yet to be made: on this machine, in this process's memory, or on an S3 server."""
    bases = {"disk": lambda: str(tmp_path), "memory": lambda: f"memory://{tmp_path.name}"}
    s3 = lambda: f"{request.getfixturevalue('s3')}/{tmp_path.name}"  # noqa: E731
    return Folder.at(bases.get(request.param, s3)()) / "run"


def test_a_file_appears_whole_or_not_at_all(place: Folder) -> None:
    def interrupted() -> None:
        with place.staged_file("learner/00001.pt") as path:
            path.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert place.files("learner/*") == [] and not place.has("learner/00001.pt")
    for content in (b"whole", b"written again"):
        with place.staged_file("learner/00001.pt") as path:
            path.write_bytes(content)
        with place.local_file("learner/00001.pt") as path:
            assert path.read_bytes() == content
    place.write_text("rollouts/00000/part-000.txt", "0")
    place.write_text("rollouts/00010/part-001.txt", "1")
    place.write_text("run.json", "{}")
    assert place.files("rollouts/*/part-*.txt") == ["rollouts/00000/part-000.txt", "rollouts/00010/part-001.txt"]
    assert place.files("rollouts/00010/*") == ["rollouts/00010/part-001.txt"]
    assert place.files("*.json") == ["run.json"] and place.files("rollouts/*") == place.files("none/*") == []
    assert place.has("run.json") and not place.has("rollouts") and not place.has("rollouts/00000")
    for _ in range(2):
        place.remove("run.json")
    assert place.files("*.json") == []
    with pytest.raises(OSError), place.local_file("run.json") as path:
        path.read_bytes()


def test_one_process_writes_in_a_claimed_folder(place: Folder) -> None:
    """A second one is refused on a disk, and takes a folder at a URL over."""
    files = ("run.json", ".lock")
    first = place.claim("run", files, lock=".lock")
    assert place.kind() == "run"
    first.check()
    if not place.is_remote:
        with pytest.raises(ValueError, match="another process"):
            place.claim("run", files, lock=".lock")
        first.close()
    second = place.claim("run", files, lock=".lock")
    if place.is_remote:
        with pytest.raises(TakenOver, match=rf"^{place} was taken over by process {os.getpid()} on "):
            first.check()
        first.close()
    second.check()
    second.close()
    place.claim("run", files, lock=".lock").close()
    with pytest.raises(ValueError, match="holds a run, not a sweep"):
        place.claim("sweep", files, lock=".lock")


class Disk(LocalFileSystem):
    """Storage with folders, which must be made before a file is."""

    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("disk://").strip("/")


def test_storage_with_folders_gets_them_made(tmp_path: Path) -> None:
    fsspec.register_implementation("disk", Disk, clobber=True)
    folder = Folder.at(f"disk://{tmp_path}/runs/mine")
    write(folder, {"a.txt": "1", "shards/b.txt": "2"})
    folder.write_text("run.json", "{}")
    assert (tmp_path / "runs" / "mine" / "shards" / "b.txt").read_text() == "2"
    assert folder.fetch(tmp_path / "cache").name == "mine"


def test_ray_writes_where_we_do(base: str, tmp_path: Path) -> None:
    folder = Folder.at(base)
    path, system = folder.for_ray()
    assert system is not None
    system.create_dir(f"{path}/run")
    (tmp_path / "state.pt").write_text("weights")
    pyarrow.fs.copy_files(str(tmp_path / "state.pt"), f"{path}/run/state.pt", destination_filesystem=system)
    assert (folder / "run").read_text("state.pt") == "weights"
    assert Folder.at(tmp_path).for_ray() == (str(tmp_path), None)


def test_a_record_is_written_whole_or_not_at_all(base: str, tmp_path: Path) -> None:
    for folder in (Folder.at(base) / "run", Folder.at(tmp_path) / "run"):
        folder.write_text("run.json", json.dumps({"steps": 1}))
        folder.write_text("run.json", json.dumps({"steps": 2}))
        assert json.loads(folder.read_text("run.json") or "") == {"steps": 2}
        assert folder.exists()
    assert os.listdir(tmp_path / "run") == ["run.json"]


def test_a_line_that_a_full_disk_does_not_take_is_an_error_with_the_file_s_name() -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        LocalText(Path("/dev/full")).append("a line\n")


def test_files_on_their_way_to_a_url_do_not_outlive_who_wrote_them(base: str) -> None:
    workspace = (Folder.at(base) / "run").workspace()
    path = workspace.path
    (path / "events").write_text("1")
    workspace.flush()
    with pytest.warns(ResourceWarning):  # nobody closed it
        del workspace
    assert not path.exists()
    assert (Folder.at(base) / "run").read_text("events") == "1"
