"""Parity with the reference implementations: `pytest tests/parity --fixtures DIR` runs a folder of fixtures.

A kind of case that the project has no counterpart for is skipped and says so; a case marked as a quirk, where the
reference does what the paper contradicts, is skipped with the fixture's own reason, unless the quirk is in its
counting alone (then its tokens are checked), or this project has that behaviour as an option.
"""

import json
from pathlib import Path
from typing import Any

import aup_checks
import block_checks
import causal_checks
import distillation_checks
import full_attention_checks
import gemma_checks
import logits_checks
import pytest
import training_checks
import verified_checks

CHECKS = {
    **logits_checks.CHECKS,
    **block_checks.CHECKS,
    **causal_checks.CHECKS,
    **full_attention_checks.CHECKS,
    **gemma_checks.CHECKS,
    **training_checks.CHECKS,
    **distillation_checks.CHECKS,
    **aup_checks.CHECKS,
    **verified_checks.CHECKS,
}
# Kinds of cases that this project has no such objective, layout or schedule for.
NOT_OFFERED = {("dream", "blockbatch"), ("opdlm", "rollout"), ("opdlm", "lr"), ("opdlm", "threshold")}
# Kinds of cases that are checked where the reference has a quirk, too.
CHECKED_QUIRKS = (
    full_attention_checks.NFE_ONLY_QUIRKS
    + training_checks.IMPLEMENTED_QUIRKS
    + block_checks.NAMED_QUIRKS
    + causal_checks.NAMED_QUIRKS
)
WITH_MODEL = ("sdar", "llada2", "llada22", "llada", "dream", "fastdllm2", "nemotron", "diffusiongemma", "s2d2")


def fixture_folders(config: pytest.Config) -> list[Path]:
    return sorted(p.parent for p in Path(config.getoption("--fixtures")).glob("*/cases.json"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        params = [
            pytest.param(folder, case, id=f"{folder.name}/{case['name']}")
            for folder in fixture_folders(metafunc.config)
            for case in json.loads((folder / "cases.json").read_text())["cases"]
        ]
        where = metafunc.config.getoption("--fixtures")
        absent = pytest.param(None, None, marks=pytest.mark.skip(reason=f"no fixtures in {where}"))
        metafunc.parametrize(("folder", "case"), params or [absent])
    elif "checkpoint" in metafunc.fixturenames:
        folders = [f for f in fixture_folders(metafunc.config) if f.name.rsplit("-", 1)[0] in WITH_MODEL]
        absent = pytest.param(None, marks=pytest.mark.skip(reason="no fixtures with a checkpoint"))
        metafunc.parametrize("checkpoint", folders or [absent], ids=lambda f: getattr(f, "name", "none"))


def kind_of(folder: Path, case: dict[str, Any]) -> tuple[str, str]:
    """The family of models and the group of cases, by which a check is found."""
    return folder.name.rsplit("-", 1)[0], case["name"].split("_")[0]


def test_case(folder: Path, case: dict[str, Any]) -> None:
    kind = kind_of(folder, case)
    if case.get("quirk") and kind not in CHECKED_QUIRKS:
        pytest.skip(f"quirk of the reference: {case['quirk_note']}")
    if kind in NOT_OFFERED:
        pytest.skip(f"this project has no such objective or layout: {kind[0]} {case['name']}")
    CHECKS[kind](folder, case)


def test_every_check_has_cases(pytestconfig: pytest.Config) -> None:
    """A name that no case has would check nothing, and its cases would be skipped."""
    folders = fixture_folders(pytestconfig)
    kinds = {kind_of(f, case) for f in folders for case in json.loads((f / "cases.json").read_text())["cases"]}
    families = {family for family, _ in kinds}
    named = CHECKS.keys() | NOT_OFFERED | set(CHECKED_QUIRKS)
    assert {kind for kind in named if kind[0] in families} == kinds
    assert CHECKS.keys().isdisjoint(NOT_OFFERED) and CHECKS.keys() >= set(CHECKED_QUIRKS)


SECOND_SEED = Path(__file__).resolve().parents[3] / "shared" / "golden" / "s2d2-1"


@pytest.mark.skipif(not SECOND_SEED.exists(), reason=f"the second seed's draws are not in {SECOND_SEED}")
@pytest.mark.parametrize("name", ["sdar_configA", "llada2_quality", "fast_hyst_soft"])
def test_verified_decoding_has_the_second_seeds_results_too(name: str) -> None:
    """One case a family; `--fixtures` runs all."""
    cases = json.loads((SECOND_SEED / "cases.json").read_text())["cases"]
    verified_checks.check_verified(SECOND_SEED, next(case for case in cases if case["name"].startswith(name)))


def test_hugging_face_round_trip_is_exact(checkpoint: Path, tmp_path: Path) -> None:
    logits_checks.check_round_trip(checkpoint, tmp_path)
