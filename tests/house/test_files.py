"""Nothing that is there is lost, and what is there is whole."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mbd_core.files import (
    MANIFEST,
    PartsFolder,
    check_new_file,
    check_target_folder,
    claim_folder,
    file_beside,
    folder_beside,
    folder_kind,
    is_partial,
    write_json,
)

ROOT = Path(__file__).resolve().parents[2]


def everything(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def written(folder: Path, text: str = "one", *, kind: str = "model", overwrite: bool = False) -> None:
    with folder_beside(folder, kind, overwrite=overwrite) as beside:
        (beside / "weights").write_text(text)


def test_a_folder_is_written_whole_with_its_manifest(tmp_path: Path) -> None:
    written(tmp_path / "a" / "model")
    manifest = json.loads((tmp_path / "a" / "model" / MANIFEST).read_text())
    assert manifest == {"written_by": "mbd-cluster", "kind": "model", "files": ["weights"]}


def test_a_full_disk_names_what_is_written(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for writing in (folder_beside(tmp_path / "model", "model"), file_beside(tmp_path / "model")):
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'model'}'") as failure, writing:
            raise full
        assert failure.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_the_project_did_not_write_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1").write_text("two years of work")
    with pytest.raises(ValueError):
        written(folder, overwrite=overwrite)
    assert everything(folder) == {"chapter1": "two years of work"}
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("x")
    link.symlink_to(tmp_path / "nowhere")
    for target in (file, link):
        with pytest.raises(ValueError):
            check_target_folder(target, "model", overwrite=overwrite)


def test_ours_is_replaced_only_when_asked_and_only_by_its_own_kind(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written(folder)
    with pytest.raises(ValueError, match="--overwrite"):
        written(folder, "two")
    with pytest.raises(ValueError, match="not an evaluation"):
        written(folder, "two", kind="evaluation", overwrite=True)
    with pytest.raises(ValueError, match="holds a model, not grades;"):
        written(folder, "two", kind="grades", overwrite=True)
    assert (folder / "weights").read_text() == "one"
    written(folder, "two", overwrite=True)
    assert (folder / "weights").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["model"], "nothing is left beside it"


@pytest.mark.parametrize("name", ["notes.txt", "deep/notes.txt"])
def test_a_foreign_file_in_ours_is_kept(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    written(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    with pytest.raises(ValueError, match=name):
        written(folder, "two", overwrite=True)
    assert (folder / name).read_text() == "mine" and (folder / "weights").read_text() == "one"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written(folder)
    with pytest.raises(KeyboardInterrupt), folder_beside(folder, "model", overwrite=True) as beside:  # noqa: PT012
        (beside / "weights").write_text("half")
        raise KeyboardInterrupt
    assert (folder / "weights").read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_was_there_comes_back_where_the_new_folder_does_not_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "model", Path.rename
    written(folder)

    def interrupted(source: Path, target: Path) -> Path:
        if (source / "weights").read_text() == "two":
            raise KeyboardInterrupt
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(folder, "two", overwrite=True)
    assert (folder / "weights").read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["model"]


KILLED = """
import os, sys
from pathlib import Path
from mbd_core import files

rename = Path.rename
def killed(source, target):
    rename(source, target)
    if sys.argv[2] == "replacing":
        os.kill(os.getpid(), 9)

Path.rename = killed
with files.folder_beside(Path(sys.argv[1]), "model", overwrite=True) as beside:
    (beside / "weights").write_text("two")
    if sys.argv[2] == "writing":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("moment", ["writing", "replacing"])
def test_the_next_writer_clears_what_a_killed_process_left(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "model"
    written(folder)
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), moment], cwd=ROOT, timeout=60)
    assert done.returncode == -9 and len(list(tmp_path.glob(".model-*"))) == 1
    assert folder.exists() == (moment == "writing")
    with pytest.raises(ValueError, match="--overwrite"):  # what was being replaced is back
        written(folder, "three")
    assert everything(folder)["weights"] == "one" and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_writer_leaves_another_writer_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with folder_beside(folder, "model") as first:
        (first / "weights").write_text("one")
        with pytest.raises(RuntimeError), folder_beside(folder, "model"):
            raise RuntimeError
    assert everything(folder)["weights"] == "one"


def test_a_claimed_folder_keeps_what_it_holds(tmp_path: Path) -> None:
    patterns = ["samples/part-*.parquet", "report.json"]
    folder = claim_folder(tmp_path / "sweep", "sweep", patterns)
    assert folder_kind(folder) == "sweep" and folder_kind(tmp_path) is None
    (folder / "samples").mkdir()
    names = ["report.json", "samples/.part-1.parquet.7.partial.parquet", "samples/part-0.parquet"]
    for name in names:
        (folder / name).write_text("old")
    claim_folder(folder, "sweep", patterns)
    assert sorted(everything(folder)) == sorted([MANIFEST, *names])
    assert [name for name in names if is_partial(Path(name))] == names[1:2]
    with pytest.raises(ValueError, match="not a model"):
        claim_folder(folder, "model", patterns)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError):
        claim_folder(tmp_path, "sweep", patterns)


@pytest.mark.parametrize("files", ["*", ["*.txt"]])
def test_only_what_the_manifest_names_is_ours(tmp_path: Path, files: object) -> None:
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / MANIFEST, {"kind": "model", "files": files})
    (tmp_path / "model" / "a").mkdir()
    (tmp_path / "model" / "a" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes.txt"):
        written(tmp_path / "model", overwrite=True)


def test_a_name_that_looks_like_a_pattern_is_still_ours(tmp_path: Path) -> None:
    with folder_beside(tmp_path / "model", "model") as beside:
        (beside / "a[1].txt").write_text("one")
    written(tmp_path / "model", overwrite=True)


def test_the_current_folder_is_claimed_but_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        check_target_folder(Path("."), "model")
    claim_folder(Path("."), "sweep", ["report.json"])
    assert (tmp_path / MANIFEST).exists()


def test_an_empty_folder_can_be_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    written(tmp_path / "model")
    assert (tmp_path / "model" / "weights").exists()


def test_a_file_is_new_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    check_new_file(path)
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": float("nan")})
    assert not path.exists()
    write_json(path, {"x": 1})
    with pytest.raises(ValueError):
        check_new_file(path)
    with pytest.raises(RuntimeError), file_beside(path) as beside:  # noqa: PT012
        beside.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"x": 1} and [p.name for p in path.parent.iterdir()] == ["report.json"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError):
        check_new_file(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="200 bytes"):
        check_target_folder(tmp_path / ("x" * 201), "model")
    for path in (tmp_path / ("x" * 300) / "model", tmp_path.joinpath(*["x" * 100] * 40), tmp_path / "a\nb"):
        with pytest.raises(ValueError):
            check_target_folder(path, "model")


def test_a_folder_whose_first_manifest_a_killed_process_did_not_finish_is_claimed_again(tmp_path: Path) -> None:
    (tmp_path / f".{MANIFEST}.77.partial.json").write_text("{")
    with PartsFolder(tmp_path, "sweep", (".lock", "part-*"), lock=".lock"):
        assert {path.name for path in tmp_path.iterdir()} == {MANIFEST, ".lock"}


def test_a_pipe_or_a_device_is_written_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, {"a": 1})
    assert os.read(reader, 100) == b'{\n  "a": 1\n}\n' and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
