"""The schedule that is fitted to traces: it draws what was measured, and its file is held to its form."""

import json
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe, with_fitted_noise
from mbd_core.multitf.run import __main__ as run
from mbd_core.multitf.states.fitted_noise import FittedNoise, fit_noise, read_noise, write_noise
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.noise import SCHEDULES, NoiseBounds

MEASURED = [(1.0,)] * 5 + [(0.25, 1.0)] * 3 + [(0.5, 0.75)] + [(0.125, 0.5, 1.0)] * 2


def measured() -> FittedNoise:
    return fit_noise(MEASURED, source="a test")


def test_each_size_is_drawn_as_often_as_it_was_measured() -> None:
    """And with the ratios that belong together: 0.25 is never drawn with 0.75."""
    rng, bounds = random.Random(0), NoiseBounds(fitted=measured())
    drawn = Counter(tuple(SCHEDULES["fitted"](2, bounds, rng)) for _ in range(8000))
    assert set(drawn) == {(0.25, 1.0), (0.5, 0.75)}
    assert drawn[0.25, 1.0] / 8000 == pytest.approx(0.75, abs=0.02)


def test_its_slots_are_nearer_to_the_traces_than_chain_uniforms() -> None:
    rng = random.Random(1)
    traces = [(rng.choice((0.1, 0.2, 0.3)), rng.choice((0.8, 1.0))) for _ in range(400)]
    bounds, distances = NoiseBounds(fitted=fit_noise(traces, source="a test")), {}
    for name in ("fitted", "chain_uniform"):
        draws = np.array([SCHEDULES[name](2, bounds, rng) for _ in range(4000)])
        for slot in range(2):
            ours, theirs = (
                np.histogram(values, bins=10, range=(0, 1))[0] / len(values)
                for values in (draws[:, slot], np.array(traces)[:, slot])
            )
            distances[name, slot] = np.abs(ours - theirs).sum() / 2
    assert max(distances["fitted", 0], distances["fitted", 1]) < 0.05
    assert min(distances["chain_uniform", 0], distances["chain_uniform", 1]) > 0.2


def test_sizes_that_were_not_measured_follow_from_those_that_were() -> None:
    """Fewer blocks: the first ones of a larger running-set. More: fully masked ones behind the largest."""
    without_two = fit_noise([r for r in MEASURED if len(r) != 2], source="a test")
    assert without_two.draw(2, random.Random(0)) == [0.125, 0.5]
    assert without_two.draw(5, random.Random(0)) == [0.125, 0.5, 1.0, 1.0, 1.0]
    assert without_two.draw(1, random.Random(0)) == [1.0]


def test_a_generator_gives_the_same_draws() -> None:
    first, second = ([measured().draw(2, random.Random(seed)) for seed in range(50)] for _ in range(2))
    assert first == second and len(set(map(tuple, first))) == 2


def test_states_without_a_mask_are_left_out() -> None:
    assert fit_noise([(0.0, 0.0), (0.0, 0.5)], source="a test").states == (((0.0, 0.5), 1),)
    with pytest.raises(ValueError, match="states is empty"):
        fit_noise([(0.0,)], source="a test")
    with pytest.raises(ValueError, match=r"bounds.fitted"):
        StateConfig(block_size=4, max_group=2, schedule="fitted")


def test_a_file_is_read_as_it_was_written(tmp_path: Path, tiny_recipe: TrainingRecipe) -> None:
    path = tmp_path / "noise.json"
    write_noise(path, measured())
    assert read_noise(path) == measured()
    chosen = with_fitted_noise(tiny_recipe, path)
    assert chosen.states.schedule == "fitted" and chosen.states.bounds.fitted == measured()
    assert chosen.states.bounds.t_high == tiny_recipe.states.bounds.t_high
    recorded = json.loads(json.dumps(asdict(chosen), default=str))
    assert recorded["states"]["bounds"]["fitted"]["source"] == "a test"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "noise"}, 'kind="noise" must be "fitted noise"'),
        ({"states": []}, "states is empty"),
        ({"states": {"0": 1}}, 'states={"0": 1} must be a list'),
        (
            {"states": [{"ratios": [0.5, 1.5], "count": 1}]},
            "states.0.ratios=[0.5, 1.5] must be a list of numbers from 0 to 1",
        ),
        ({"states": [{"ratios": [0.5], "count": 0}]}, "states.0.count=0 must be a whole number of at least 1"),
        (
            {"states": [{"ratios": ["half"], "count": 1}]},
            'states.0.ratios=["half"] must be a list of numbers from 0 to 1',
        ),
        ({"states": [{"ratios": [0.0], "count": 1}]}, "states: each needs a mask ratio above 0"),
        ({"gamma": 2}, "unknown field 'gamma'; known: kind, source, states"),
        (None, "it is not valid JSON"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_the_field(
    change: dict | None,
    sentence: str,
    tmp_path: Path,
    tiny_recipe: TrainingRecipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(RECIPES, tiny_recipe.name, tiny_recipe)
    path = tmp_path / "noise.json"
    write_noise(path, measured())
    text = "{" if change is None else json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    argv = ["--recipe", tiny_recipe.name, "--set", f"fitted_noise={path}", "--out", str(tmp_path / "model")]
    assert run.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path} is no fitted noise-schedule: {sentence}" in line
    assert not (tmp_path / "model").exists()


def test_a_recipe_is_trained_with_it(
    tiny_recipe: TrainingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, tiny_recipe.name, tiny_recipe)
    path, out = tmp_path / "noise.json", tmp_path / "model"
    write_noise(path, measured())
    argv = ["--recipe", tiny_recipe.name, "--set", f"fitted_noise={path}", "--steps", "1", "--out", str(out)]
    assert run.main(argv) == 0
    states = json.loads((out / "recipe.json").read_text())["states"]
    assert states["schedule"] == "fitted" and len(states["bounds"]["fitted"]["states"]) == 4
