"""The objectives of adaptation against literal loops: what is masked, what is shown, and what a label weighs."""

import json
import math
import random
from collections import Counter
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from base_folders import base_folder
from family_models import FAMILIES, random_model
from torch import Tensor
from torch.nn import functional as F

from jobs.convert_checkpoint import main as convert
from jobs.prepare_data import main as prepare_data
from mbd_core.checkpoint.config import load_config
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.recipes.adaptation import ADAPTATION_RECIPES
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import as_recorded, other_settings
from mbd_core.multitf.run import __main__ as run
from mbd_core.multitf.run.start import check_model
from mbd_core.multitf.states.batch import AR_SLOT, MultiTFBatch
from mbd_core.multitf.states.block_warmup import in_blocks, longest_length, states_at
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.noise import choose_masked
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.step.loss import denominator, multitf_loss
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.ops.attention.whole import DenseAttention

B, EOS, MASK = 4, 1, 0


def in_small(name: str) -> StateConfig:
    return replace(RECIPES[name].states, block_size=B, block_warmup=())


def sample(length: int, prompt: int, seed: int = 0) -> Example:
    rng = random.Random(seed)
    return Example((*(rng.randrange(2, 300) for _ in range(length - 2)), EOS, EOS), prompt)


def batch_of(states: StateConfig, examples: list[Example], *, shift: bool = False, seed: int = 0) -> MultiTFBatch:
    rngs = [random.Random(f"{seed}/{n}") for n in range(len(examples))]
    return build_batch(examples, states, mask_token_id=MASK, rngs=rngs, shift=shift)


def streams_of(batch: MultiTFBatch, row: int) -> list[dict[str, Tensor]]:
    """The noisy streams of a row, each as its columns."""
    numbers = sorted(set(batch.stream[row].tolist()) - {-1, 0})
    columns = vars(batch).items()
    return [{name: column[row][batch.stream[row] == number] for name, column in columns} for number in numbers]


def literal_ce(model: Decoder, example: Example, shown: list[int], place: int, *, shift: bool = False) -> Tensor:
    """The CE of a place: its block as it is shown, behind a clean prefix, in a forward of its own."""
    start = place // B * B
    ids = torch.tensor([[*example.tokens[:start], *shown[start : start + B]]])
    block = torch.arange(len(ids[0])) // B
    mask = (block[:, None] >= block)[None, None]
    logits = model.logits(model(ids, torch.arange(len(ids[0]))[None], DenseAttention(mask)))[0]
    return F.cross_entropy(logits[place - shift], torch.tensor(example.tokens[place]))


def shown_tokens(stream: dict[str, Tensor], example: Example) -> list[int]:
    return [*example.tokens[: int(stream["positions"][0])], *stream["input_ids"].tolist()]


EXAMPLES = [sample(24, 6), sample(16, 3, seed=1)]


def test_a2d_is_bd3lms_bound_with_one_ratio_a_sample() -> None:
    model = random_model(FAMILIES["sdar"]).double().train()
    batch = batch_of(in_small("a2d"), EXAMPLES)
    total = torch.zeros((), dtype=torch.float64)
    for row, example in enumerate(EXAMPLES):
        (stream,) = streams_of(batch, row)
        (t,) = set(stream["ratio"].tolist())
        assert 0.001 <= t <= 1.0
        shown = shown_tokens(stream, example)
        masked = [p for p in range(example.prompt_length, len(example.tokens)) if shown[p] == MASK]
        ce = [literal_ce(model, example, shown, place) for place in masked]
        total = total + sum(ce) / t / (len(example.tokens) - example.prompt_length)
    loss, _ = multitf_loss(model, batch)
    assert loss.item() == pytest.approx(total.item() / len(EXAMPLES), rel=1e-6)


def test_sdars_blocks_have_ratios_of_their_own() -> None:
    model = random_model(FAMILIES["sdar"]).double().train()
    batch = batch_of(in_small("sdar"), EXAMPLES)
    total = torch.zeros((), dtype=torch.float64)
    for row, example in enumerate(EXAMPLES):
        (stream,) = streams_of(batch, row)
        first = int(stream["positions"][0])
        shown, blocks = shown_tokens(stream, example), (len(example.tokens) - first) // B
        assert len(set(stream["ratio"].tolist())) == blocks
        for place in range(example.prompt_length, len(example.tokens)):
            if shown[place] == MASK:
                t = stream["ratio"][place - first].item()
                total = total + literal_ce(model, example, shown, place) / t / blocks
    loss, _ = multitf_loss(model, batch)
    assert loss.item() == pytest.approx(total.item() / len(EXAMPLES), rel=1e-6)


@pytest.mark.parametrize("family", ["fastdllm2", "sdar"])
def test_fast_dllm_v2_learns_each_token_of_the_answer_once(family: str) -> None:
    """From the row before it where the family's logits are shifted."""
    model = random_model(FAMILIES[family]).double().train()
    shift, states = model.config.shift_logits, in_small("fast-dllm-v2")
    batch = batch_of(states, EXAMPLES, shift=shift)
    ce = []
    for row, example in enumerate(EXAMPLES):
        pair = [shown_tokens(stream, example) for stream in streams_of(batch, row)]
        assert len(pair) == 2
        for place, token in enumerate(example.tokens):
            tokens = {shown[place] for shown in pair}
            if place < example.prompt_length:
                assert tokens == {token}
                continue
            assert tokens == {token, MASK}
            shown = next(shown for shown in pair if shown[place] == MASK)
            ce.append(literal_ce(model, example, shown, place, shift=shift))
    loss, _ = multitf_loss(model, batch, denominator(batch, states.weighting))
    assert loss.item() == pytest.approx(sum(ce).item() / len(ce), rel=1e-6)
    assert len(ce) == sum(len(e.tokens) - e.prompt_length for e in EXAMPLES)


def test_efficient_dlms_masks_have_the_probabilities_of_successive_draws() -> None:
    """Every set of masked positions against its exact probability: without replacement, by exp(ln 2 / h (1 - t) i)."""
    t, half_life, places = 0.5, 1.0, range(8, 12)
    weights = {i: math.exp(math.log(2) / half_life * (1 - t) * i) for i in places}
    exact: Counter[frozenset[int]] = Counter()
    for first, second in product(places, repeat=2):
        if first != second:
            rest = sum(weights.values()) - weights[first]
            exact[frozenset((first, second))] += weights[first] / sum(weights.values()) * weights[second] / rest
    assert sum(exact.values()) == pytest.approx(1.0)
    rng, draws = random.Random(0), 40_000
    found = Counter(frozenset(choose_masked(places, t, "nearest", rng, half_life=half_life)) for _ in range(draws))
    statistic = sum((found[masked] - draws * p) ** 2 / (draws * p) for masked, p in exact.items())
    assert statistic < 20.5, "chi-square with 5 degrees of freedom, at 0.001"
    assert exact[frozenset((10, 11))] > 2 * exact[frozenset((8, 9))]


def test_efficient_dlms_counts_and_weights() -> None:
    model = random_model(FAMILIES["sdar"]).double().train()
    batch = batch_of(in_small("efficient-dlm"), EXAMPLES)
    total = torch.zeros((), dtype=torch.float64)
    for row, example in enumerate(EXAMPLES):
        (stream,) = streams_of(batch, row)
        first, shown = int(stream["positions"][0]), shown_tokens(stream, example)
        for start in range(first, len(example.tokens), B):
            own = [p for p in range(start, start + B) if p >= example.prompt_length]
            masked = [p for p in own if shown[p] == MASK]
            t = stream["ratio"][start - first].item()
            assert len(masked) == round(t * len(own))
            for place in masked:
                ce = literal_ce(model, example, shown, place)
                total = total + ce / t / (len(example.tokens) - example.prompt_length)
    loss, _ = multitf_loss(model, batch)
    assert loss.item() == pytest.approx(total.item() / len(EXAMPLES), rel=1e-6)


def test_llada2s_blocks_warm_up_and_decay() -> None:
    states = RECIPES["llada2-wsd"].states
    sizes = [states_at(states, share / 100).block_size for share in range(100)]
    assert [size for n, size in enumerate(sizes) if not n or sizes[n - 1] != size] == [
        1,
        4,
        32,
        64,
        4096,
        2048,
        256,
        32,
    ]
    assert sizes[4] == 1 and sizes[5] == 4 and sizes[-1] == states.block_size == 32
    assert states_at(RECIPES["a2d"].states, 0.5) is RECIPES["a2d"].states

    example = Example((5, 6, 7, 8, 9, EOS, EOS, EOS), 3)
    small, own = in_blocks(example, replace(states, block_size=3))
    assert small.tokens == (*example.tokens, EOS) and own.block_size == 3
    whole, own = in_blocks(example, replace(states, block_size=4096))
    assert whole == example and own.block_size == 8
    assert longest_length(96, states) == 128 and longest_length(96, RECIPES["a2d"].states) == 96


def test_a_trainers_updates_have_the_blocks_of_their_share() -> None:
    states = replace(in_small("a2d"), block_warmup=((0.25, 1), (0.5, 2), (0.75, 4096)))
    train = TrainConfig(steps=8, batch_size=2, lr=1e-3, precision="float32", optimizer="adamw")
    trainer = Trainer(random_model(FAMILIES["sdar"]), EXAMPLES, states, train)
    sizes = []
    for step in range(8):
        batch = trainer.batch(step)
        noisy = batch.stream[0] > 0
        sizes.append(int(batch.block[0][noisy].bincount().max()))
        assert math.isfinite(trainer.step().loss)
    assert sizes[:4] == [1, 1, 2, 2] and sizes[6:] == [B, B] and min(sizes[4:6]) > 2 * B


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"half_life_ratio": 0.25, "rounding": "bernoulli"}, "give rounding=nearest"),
        ({"half_life_ratio": 0.0}, "half_life_ratio"),
        ({"layouts": "d2f", "complementary": True}, "leave complementary, block_warmup and clean out"),
        ({"block_warmup": ((0.5, 1), (0.2, 4))}, "ascending and between 0 and 1"),
        ({"block_warmup": ((1.0, 4),)}, "ascending and between 0 and 1"),
        ({"block_warmup": ((0.5, 0),)}, "a block size of at least 1"),
    ],
)
def test_states_that_contradict_themselves_are_refused(fields: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StateConfig(block_size=4, **fields)


def test_a_warmup_of_blocks_is_not_packed() -> None:
    recipe = RECIPES["llada2-wsd"]
    packed = replace(recipe, max_length=64, train=replace(recipe.train, pack=512))
    with pytest.raises(ValueError, match=r"train\.pack plans with their last lengths"):
        check_model(packed, FAMILIES["sdar"], "mine")


def test_a_run_of_before_these_fields_goes_on() -> None:
    wanted = as_recorded(RECIPES["tiny-mbd"])
    recorded = as_recorded(RECIPES["tiny-mbd"])
    for name in ("ar_weight", "complementary", "half_life_ratio", "block_warmup"):
        del recorded["states"][name]
    assert not other_settings(recorded, wanted)
    assert other_settings(recorded, as_recorded(replace(RECIPES["tiny-mbd"], states=RECIPES["a2d"].states)))


def test_every_recipe_trains_a_converted_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base_folder(tmp_path / "base", "Llama", "tiny-llama", tie_word_embeddings=True)
    rows = [{"prompt": f"What is {n} and {n}?", "response": f"It is {2 * n}."} for n in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert convert(["base", "--to", "block-diffusion", "--out", "diffusion", "--block-size", "8"]) == 0
    assert prepare_data(["rows.jsonl", "--model", "diffusion", "--max-length", "128", "--out", "data"]) == 0
    options = ["--base", "diffusion", "--data", "data", "--precision", "float32", "--steps", "2", "--batch-size", "2"]
    for recipe in ADAPTATION_RECIPES:
        assert recipe.base is None and recipe.data is None and asdict(recipe)["source"]
        size = [] if recipe.name == "ar" else ["--set", "states.block_size=8"]
        assert run.main(["--recipe", recipe.name, *options, *size]) == 0
        assert load_config(Path("out") / recipe.name).block_size == 8


@pytest.mark.parametrize("name", [recipe.name for recipe in ADAPTATION_RECIPES if recipe.states.fills_masks])
def test_a_masked_label_is_never_the_prompts(name: str) -> None:
    batch = batch_of(in_small(name), EXAMPLES)
    for row, example in enumerate(EXAMPLES):
        labelled = (batch.labels[row] != IGNORE) & (batch.slot[row] != AR_SLOT)
        assert int(batch.positions[row][labelled].min()) >= example.prompt_length
