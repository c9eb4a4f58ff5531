"""The decoding configurations of a sweep: the grid, the methods, and what is refused."""

import pytest

from mbd_core.evaluation.sweep.grid import Variant, parse_grid, parse_methods, plan_variants
from mbd_core.multitf.recipes.by_name import RECIPES

DEFAULTS = {"tau_m2t": 0.9, "buffer_size": 1, "trained_with": "teacher_forcing", "eos_token_id": [1]}


def variants(text: str, *methods: str, **defaults: object) -> list[Variant]:
    return plan_variants(parse_grid(text), methods, defaults={**DEFAULTS, **defaults}, block_size=8)


def test_the_grid_is_a_product_of_which_single_takes_its_own_fields() -> None:
    planned = variants("tau_m2t=0.7,0.8;buffer_size=2,4;tau_add=0.1,0.2", "single", "multi")
    settings = [(v.method, v.decoding.buffer_size, v.decoding.tau_m2t, v.decoding.tau_add) for v in planned]
    multi = {("MultiBD (training-free)", n, m, a) for n in (2, 4) for m in (0.7, 0.8) for a in (0.1, 0.2)}
    assert set(settings) == {("SingleBD", 1, 0.7, 0.1), ("SingleBD", 1, 0.8, 0.1)} | multi
    assert len(settings) == len(set(settings)) == 10


def test_the_label_says_how_the_model_was_trained() -> None:
    assert variants("buffer_size=2", "multi", trained_with="multitf")[0].method == "MBD"
    assert variants("buffer_size=2", "multi", trained_with=None)[0].method == "MultiBD"
    with pytest.raises(ValueError, match="trained_with='other'"):
        variants("buffer_size=2", "multi", trained_with="other")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_what_a_recipe_trains_can_be_swept(name: str) -> None:
    """Its export says how it was trained, and a sweep has a label for that."""
    trained_with = RECIPES[name].generation.get("trained_with")  # an AR recipe decodes no blocks, and says nothing
    (variant,) = variants("buffer_size=2", "multi", trained_with=trained_with)
    assert (variant.method == "MBD") == (trained_with == "multitf")


def test_what_was_trained_for_several_blocks_is_not_called_training_free() -> None:
    labels = {name: variants("buffer_size=2", "multi", trained_with=name)[0].method for name in ("d2f", "dmax_oput")}
    assert labels == {"d2f": "MultiBD", "dmax_oput": "MultiBD (training-free)"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tau=0.7", "there is no field tau"),
        ("tau_m2t", "has no values"),
        ("tau_m2t=high", "tau_m2t=high must be a number from 0 to 1"),
        ("buffer_size=2.5", "buffer_size=2.5 must be a whole number"),
        ("tau_m2t=0.7;tau_m2t=0.8", "given twice"),
        ("tau_m2t=1.5;buffer_size=2", "tau_m2t=1.5 must be a number from 0 to 1"),
        ("buffer_size=1", "needs buffer_size of at least 2"),
        ("t2t=0.5", "there is no field t2t; it holds fields, as t2t.tau"),
        ("t2t.tau=0.5", "grid field 't2t.tau' concerns none of the methods multi; define one: --method NAME="),
        ("t2t.theta=0.5", "there is no field t2t.theta; is"),
        ("tau_m2t.tau=0.5", "there is no field tau_m2t.tau"),
        ("t2t.max_edits=2.5", "t2t.max_edits=2.5 must be a whole number"),
        ("prefix_cache=1", "prefix_cache=1 must be one of null, true, false"),
        ("canvas.branches.block_lengths=4,8", "is a list; give it with --method"),
        ("block_size=4;buffer_size=2", "the model has 8"),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        variants(text, "multi")


@pytest.mark.parametrize("field", ["buffer_size=2,4", "tau_add=0.1", "tau_semi=0.9"])
def test_a_field_of_several_slots_is_refused_where_no_method_has_them(field: str) -> None:
    name = field.partition("=")[0]
    said = f"grid field '{name}' concerns none of the methods single; it needs a method with several slots"
    with pytest.raises(ValueError, match=said):
        variants(field, "single")
    assert len(variants(field, "single", "multi")) == 1 + len(field.split(","))


def test_a_row_of_table_4_has_a_name() -> None:
    names = [f"table-4/SDAR-8B-Chat-b4/{family}/multi" for family in ("math", "code")]
    math, code = plan_variants({"tau_m2t": (0.8,)}, names, methods=parse_methods([]), defaults={}, block_size=4)
    assert [one.method for one in (math, code)] == names
    rows = [(one.decoding.buffer_size, one.decoding.tau_add, one.decoding.tau_semi) for one in (math, code)]
    assert rows == [(4, 0.1, 0.25), (4, 0.75, 0.75)] and code.decoding.tau_m2t == 0.8


def test_an_unknown_method_lists_the_known() -> None:
    with pytest.raises(ValueError, match="known: single, multi"):
        variants("buffer_size=2", "double")


def planned(grid: str, *given: str, defaults: dict[str, object] | None = None) -> list[Variant]:
    """What is run of methods given as NAME=JSON, or by name alone."""
    methods = parse_methods([g for g in given if "=" in g])
    names = [g.partition("=")[0] for g in given]
    return plan_variants(
        parse_grid(grid), names, methods=methods, defaults={**DEFAULTS, **(defaults or {})}, block_size=8
    )


def test_a_grid_reaches_into_the_parts_of_the_methods_that_have_them() -> None:
    found = planned(
        "t2t.tau=0.3,0.5;tau_m2t=0.6,0.7;buffer_size=2",
        "single",
        "multi",
        'edit={"t2t": {"max_edits": 3}, "buffer_size": 1}',
        "multi-bd-t2t",
    )
    by_method = {v.method: [w.decoding for w in found if w.method == v.method] for v in found}
    assert {name: len(of) for name, of in by_method.items()} == {
        "SingleBD": 2,
        "MultiBD (training-free)": 2,
        "edit": 4,
        "multi-bd-t2t": 4,
    }
    edit = {(d.t2t.tau, d.t2t.max_edits, d.tau_m2t, d.buffer_size) for d in by_method["edit"] if d.t2t is not None}
    assert edit == {(tau, 3, m2t, 1) for tau in (0.3, 0.5) for m2t in (0.6, 0.7)}
    assert {d.buffer_size for d in by_method["multi-bd-t2t"]} == {2}
    assert all(d.t2t is None for name in ("SingleBD", "MultiBD (training-free)") for d in by_method[name])


def test_a_canvas_is_varied_in_its_own_fields_only() -> None:
    (single, *leaps) = planned(
        "canvas.leap.radius=2,4;canvas.tau=0.8;tau_m2t=0.9", "single", "local-leap", 'fast={"canvas": {}}'
    )
    assert single.decoding.canvas is None
    assert [(v.method, v.decoding.canvas and v.decoding.canvas.tau) for v in leaps] == [
        ("local-leap", 0.8),
        ("local-leap", 0.8),
        ("fast", 0.8),
    ]
    radii = [v.decoding.canvas.leap.radius for v in leaps if v.decoding.canvas and v.decoding.canvas.leap]
    assert radii == [2, 4]


def test_the_model_s_own_editing_can_be_varied_and_switched_off() -> None:
    defaults: dict[str, object] = {"t2t": {"tau": 0.4, "max_edits": 5}, "buffer_size": 2}
    (multi,) = planned("t2t.tau=0.7", "multi", defaults=defaults)
    assert multi.decoding.t2t is not None
    assert (multi.decoding.t2t.tau, multi.decoding.t2t.max_edits, multi.decoding.buffer_size) == (0.7, 5, 2)
    (off,) = planned("", 'off={"t2t": null}', defaults=defaults)
    assert (off.method, off.decoding.t2t) == ("off", None)


def test_multi_has_several_slots_also_where_the_model_recommends_one() -> None:
    assert [v.decoding.buffer_size for v in variants("", "multi")] == [4]
    assert [v.decoding.buffer_size for v in variants("", "multi", buffer_size=2)] == [2]
    assert [v.decoding.tau_stable for v in planned("tau_stable=none,0.5", "dmax")] == [None, 0.5]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("edit", "must be NAME=JSON"),
        ("={}", "must be NAME=JSON"),
        ("a,b={}", "without a comma"),
        ("single={}", "this name is taken"),
        ("MBD={}", "this name is taken"),
        ("edit={t2t}", "is not valid JSON"),
        ("edit=[1]", "must be a JSON object"),
    ],
)
def test_a_method_that_cannot_be_read_is_refused(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_methods([given])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('edit={"t2t": {"tau": "x"}}', "method 'edit': t2t.tau=\"x\" must be a number"),
        ("a|b={}", "without a comma or |"),
        ("a\u2028b={}", "the name printable"),
        ('edit={"tau": 1}', "method 'edit': unknown decoding field 'tau'"),
        ('both={"t2t": {}, "soft": {}}', "method 'both': t2t and soft are two ways"),
    ],
)
def test_a_method_that_cannot_be_run_is_refused_by_name(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        planned("", given)
