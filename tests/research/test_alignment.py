"""Training against inference as a user asks for it: what is written, what is read again, and what is refused."""

import json
from pathlib import Path

import pytest

from mbd_core.checkpoint.shipped import SHIPPED
from mbd_core.multitf.states.fitted_noise import read_noise
from research.alignment import study as alignment

ASKED = ["--limit", "24", "--max-tokens", "32"]
SMALL = ["--draws", "4", "--bootstrap", "20"]
SCHEDULES = ["--schedules", "chain_uniform,linear@one_group,fitted"]


@pytest.fixture(scope="module")
def report(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alignment") / "out"
    argv = [
        "--models",
        str(tiny_model_dir),
        "--decoding",
        '{"tau_m2t": 0.3}',
        *ASKED,
        *SMALL,
        *SCHEDULES,
        "--out",
        str(out),
    ]
    assert alignment.main(argv) == 0
    return out


def test_a_model_is_decoded_and_compared(report: Path) -> None:
    (model,) = json.loads((report / "alignment.json").read_text())["models"]
    assert model["name"] == "tiny-random" and model["inference"]["problems"] == 12
    names = [s["name"] for s in model["schedules"]]
    assert names == ["chain_uniform", "linear@one_group", "fitted"]
    w1 = {s["name"]: s["distances"]["slots_w1"][0]["value"] for s in model["schedules"]}
    assert w1["fitted"] < w1["chain_uniform"]
    noise = read_noise(report / "noise-tiny-random.json")
    assert sum(count for _, count in noise.states) == model["fitted_to_states"]
    text = (report / "alignment.md").read_text()
    for name in ("slot_ratios.png", "running_sets.png"):
        assert (report / name).stat().st_size > 1000 and name in text


def test_the_traces_alone_give_the_same_report(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("research.alignment.states.record_models", lambda *_: pytest.fail("a model was loaded"))
    argv = ["--traces", str(report / "traces"), *SMALL, *SCHEDULES, "--out", str(tmp_path / "again")]
    assert alignment.main(argv) == 0
    first, again = (json.loads((d / "alignment.json").read_text()) for d in (report, tmp_path / "again"))
    assert first["models"] == again["models"]
    assert again["settings"]["asked"] == first["settings"]["asked"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--models", "a", "--traces", "b"], "--models has no meaning with --traces"),
        (["--limit", "9", "--traces", "b"], "--limit has no meaning with --traces"),
        (["--schedules", "uniform"], "noise-schedule 'uniform' is unknown; known: chain_uniform"),
        (["--schedules", "linear@d2f"], "layout 'd2f' of linear@d2f is unknown"),
        (["--schedules", "fitted@all"], "layout 'all' of fitted@all is unknown"),
        (["--schedules", "slot_ranges"], "needs bounds.slots"),
        (["--recipe", "tiny"], "unknown recipe 'tiny'"),
        (["--task", "gsm"], "--task gsm must be one of gsm-mini, code-mini"),
        (["--traces", "nowhere"], "nowhere/traces.json cannot be read"),
        (["--decoding", '{"buffer_size": 2}'], "give --buffer-size instead"),
        (["--models", f"tiny-mbd,{SHIPPED}/tiny-mbd"], "two of --models are called tiny-mbd"),
    ],
)
def test_a_bad_command_line_is_one_sentence(
    argv: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert alignment.main([*argv, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("alignment: ") and sentence in line
    assert not (tmp_path / "out").exists()


def test_a_report_is_replaced_on_request_alone_and_never_with_its_traces_in_use(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--traces", str(report / "traces"), *SMALL, "--out", str(report)]
    assert alignment.main(argv) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert alignment.main([*argv, "--overwrite"]) == 2
    assert "which would be replaced" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ("{", "is not JSON"),
        ("{}", "is no record of traces: 'models' is missing"),
        (
            '{"asked": {}, "models": [{"name": "x", "prompt_lengths": [], "decoding": {}, "block_size": 4}]}',
            "x.parquet",
        ),
    ],
)
def test_a_folder_that_holds_no_traces_is_one_sentence(
    record: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces.json").write_text(record)
    assert alignment.main(["--traces", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
