"""A sweep's best configuration in a model folder, by the command that a user runs, from rows alone."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from full_attention_folder import make_folder
from written_sweeps import graded_table, planned_rows, sweep_record, timed_table

from jobs import report_sweep
from jobs.eval_sweep import main as eval_main
from mbd_core.batch.parts import cut
from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.base_files import CHOSEN as KEY
from mbd_core.checkpoint.folder import METHOD_FIELDS, read_folder
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, decoding_config
from mbd_core.evaluation.report.best_choice import check_choice
from mbd_core.evaluation.sweep.choice.best_folder import FILE, author_defaults, edit_notes
from mbd_core.evaluation.sweep.folder import SweepFolder
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.serving.tokens.load import load_engine

pytestmark = pytest.mark.usefixtures("unrendered_pictures")

BEST = DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.6, t2t=T2T(tau=0.4))
WORSE = DecodingConfig(block_size=4, buffer_size=1, tau_m2t=0.9)


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model folder as the hub's cache has it: its files are links, with the settings of other libraries."""
    place = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    generation = json.loads((place / FILE).read_text())
    (tmp_path / "blob").write_text(json.dumps({**generation, "do_sample": False, "tau_stable": None, "tau_semi": 0.5}))
    (place / FILE).unlink()
    (place / FILE).symlink_to(tmp_path / "blob")
    return place


def write_sweep(
    path: Path, model: Path, configs: Sequence[DecodingConfig], *, timed: Sequence[int] = (), parts_missing: int = 0
) -> str:
    """A sweep of a model whose first configuration is right on all problems, and the others on every other one."""
    texts = [json.dumps(asdict(config)) for config in configs]
    rows = [
        {**row, "config": text, "sample": 2 * row["sample"] + number}
        for row in planned_rows(tasks=("a",), problems=12)[::2]
        for number, text in enumerate(texts)
    ]
    plan = {"models": {"m": model_digest(model)}, "configurations": {"m": [["MBD", text] for text in texts]}}
    parts = cut(rows, rows_per_part=8)
    with SweepFolder.claim(path, sweep_record(rows, parts, num_cases=len(timed), **plan)) as there:
        for part in parts[: len(parts) - parts_missing]:
            table = graded_table(part).to_pylist()
            right = [row["config"] == texts[0] or int(row["problem_id"][2:]) % 2 == 0 for row in table]
            column = graded_table(part).schema.get_field_index("correct")
            there.write_part(part.number, graded_table(part).set_column(column, "correct", [right]))
        for number in timed:
            there.write_case(number, timed_table(rows[number]))
    return str(path)


def test_the_best_configuration_is_the_folder_s_default_and_all_else_stays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, before = write_sweep(tmp_path / "sweep", folder, [BEST, WORSE]), json.loads((folder / FILE).read_text())
    planned = plan_sweep(load_inputs(SweepOptions(models=[str(folder)], tasks=["gsm-mini"], limit=1))).variants
    assert report_sweep.main(["best", sweep, "--by", "accuracy", "--folder", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "The best by accuracy of m's 2 configurations: MBD" in printed and f"default of {folder / FILE}" in printed
    after = json.loads((folder / FILE).read_text())
    others = {name: value for name, value in before.items() if name not in METHOD_FIELDS}
    assert {name: after[name] for name in others} == others and others["do_sample"] is False
    assert after[KEY]["tasks"]["a"]["accuracy"] == 100 and "answers to the other problems: accuracy 100" in printed
    with load_engine(
        folder, plan_sweep(load_inputs(SweepOptions(models=[str(folder)], tasks=["gsm-mini"], limit=1))).engine
    ) as it:
        assert it.decoding({}) == BEST
        assert it.decoding({"tau_m2t": 0.3}) == DecodingConfig(**{**vars(BEST), "tau_m2t": 0.3})
    assert json.loads((tmp_path / "blob").read_text()) == before, "the cache's blob is not ours"
    assert plan_sweep(load_inputs(SweepOptions(models=[str(folder)], tasks=["gsm-mini"], limit=1))).variants == planned
    assert not [path.name for path in folder.iterdir() if "partial" in path.name]

    other = write_sweep(tmp_path / "other", folder, [WORSE, BEST])
    assert report_sweep.main(["best", other, "--by", "accuracy", "--folder", str(folder)]) == 0
    last = json.loads((folder / FILE).read_text())
    assert decoding_config(last, {}, block_size=4) == WORSE, "what the first choice set is gone"
    assert "t2t" not in last and author_defaults(last) == before


def test_decoding_that_was_edited_after_a_choice_is_what_is_swept_and_kept(folder: Path, tmp_path: Path) -> None:
    options = SweepOptions(models=[str(folder)], tasks=["gsm-mini"], limit=1, methods=["multi"])
    sweep = write_sweep(tmp_path / "sweep", folder, [BEST, WORSE])
    arguments = ["best", sweep, "--by", "accuracy", "--folder", str(folder)]
    assert report_sweep.main(arguments) == 0
    chosen = json.loads((folder / FILE).read_text())
    assert edit_notes({"m": folder}) == []
    (folder / FILE).write_text(json.dumps({**chosen, "tau_m2t": 0.8}))
    ((variant,),) = plan_sweep(load_inputs(options)).variants.values()
    assert json.loads(variant.config) == json.loads(json.dumps(asdict(replace(BEST, tau_m2t=0.8))))
    (note,) = edit_notes({"m": folder})
    assert (
        note.startswith("m: the decoding fields") and "the sweep starts from the fields that the file has now" in note
    )
    assert report_sweep.main(arguments) == 0
    assert author_defaults(json.loads((folder / FILE).read_text()))["tau_m2t"] == 0.8
    older = {**chosen, KEY: {name: value for name, value in chosen[KEY].items() if name != "written"}, "tau_m2t": 0.8}
    assert author_defaults(older) == author_defaults(chosen), "a choice without a record of what it wrote"


def test_a_canvas_model_decodes_as_chosen_and_is_swept_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model_dir: Path
) -> None:
    tokenizer = read_folder(tiny_model_dir).tokenizer
    folder = make_folder("llada", tmp_path / "llada", tokenizer)
    size = read_folder(folder).config.block_size
    options = SweepOptions(models=[str(folder)], tasks=["gsm-mini"], limit=1, methods=["llada", "d2f"])
    planned = plan_sweep(load_inputs(options)).variants
    blocks = DecodingConfig(block_size=size, buffer_size=2, prompt_attention="full", tau_m2t=0.7)
    canvas = DecodingConfig(block_size=size, canvas=Canvas())
    for number, best in enumerate((blocks, canvas)):
        sweep = write_sweep(tmp_path / str(number), folder, [best])
        assert report_sweep.main(["best", sweep, "--by", "knee", "--folder", str(folder)]) == 0
        assert decoding_config(read_folder(folder).defaults, {}, block_size=size) == best
        assert plan_sweep(load_inputs(options)).variants == planned


def test_tps_is_of_timed_runs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--by", "tps", "--folder", str(folder)]
    timed, untimed = (
        write_sweep(tmp_path / name, folder, [BEST, WORSE], timed=cases)
        for name, cases in (("timed", (0, 1)), ("untimed", ()))
    )
    assert report_sweep.main(["best", timed, *arguments]) == 0
    assert "2 configurations, 2 of them timed" in capsys.readouterr().out
    assert report_sweep.main(["best", untimed, *arguments]) == 2
    assert "tps needs timed runs" in capsys.readouterr().err


def test_what_cannot_be_chosen_or_written_is_one_sentence_and_changes_nothing(
    folder: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sweep, before = write_sweep(tmp_path / "sweep", folder, [BEST]), (folder / FILE).read_text()
    unfinished = write_sweep(tmp_path / "unfinished", folder, [BEST], parts_missing=1)
    foreign = Path(shutil.copytree(tiny_model_dir, tmp_path / "foreign"))
    (foreign / "more.json").write_text("{}")

    def refused(*arguments: Any, sentence: str) -> None:
        assert report_sweep.main(["best", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert sentence in error and len(error.splitlines()) == 1

    by = ("--by", "accuracy")
    refused(sweep, *by, sentence="Missing option '--folder'")
    refused(sweep, *by, "--folder", foreign, sentence="holds none of the sweep's models, m: its files differ")
    refused(
        sweep, *by, "--folder", "tiny-mbd", sentence="a shipped model that belongs to the package; copy its folder"
    )
    refused(unfinished, *by, "--folder", folder, sentence="needs a finished sweep, and 8 of 12 samples are there")
    refused(sweep, *by, "--folder", tmp_path / "none", sentence="unknown model")
    twin = shutil.copytree(folder, tmp_path / "twin")
    refused(
        sweep, *by, "--folder", folder, "--folder", twin, sentence=f"{folder} and --folder {twin} hold equal files"
    )

    def denied(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    refused(sweep, *by, "--folder", folder, sentence=f"{folder / FILE} cannot be written")
    assert (folder / FILE).read_text() == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"--models": "tiny-mbd"}, "tiny-mbd, a shipped model that belongs to the package"),
        ({"--write-best": "tps", "--timed": "0"}, "tps needs timed runs, and --timed 0 leaves them out"),
        ({"--shard": "1/2"}, "--shard 1/2 computes a part; join the shards"),
        ({"--limit": "1"}, "the 1 of gsm-mini are all in one half"),
        ({"--write-best": "speed"}, "Invalid value for '--write-best'"),
    ],
)
def test_a_sweep_that_could_not_be_chosen_from_does_not_begin(
    change: dict[str, str], sentence: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--models": str(folder), "--tasks": "gsm-mini", "--limit": "8", "--out": str(tmp_path / "out")}
    options |= {"--write-best": "accuracy", **change}
    assert eval_main([part for option in options.items() for part in option]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_nothing_is_chosen_on_log_likelihoods() -> None:
    scored = SimpleNamespace(name="harness:arc", inputs=SimpleNamespace(scores=True), problems=[])
    sweep: Any = SimpleNamespace(tasks=[scored])
    with pytest.raises(ValueError, match=r"on harness:arc nothing is decoded.*choose on other tasks"):
        check_choice(sweep, "accuracy", folders={}, shard=SweepShard(), timing=Timing())
