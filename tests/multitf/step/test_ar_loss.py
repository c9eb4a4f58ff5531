"""The AR loss against transformers' own: the same loss and gradients, alone and beside an unchanged block loss."""

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from base_folders import base_folder
from family_models import FAMILIES, random_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from mbd_core.checkpoint.loading import load_model
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.data.example import IGNORE, Example, encode_example
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.run.start import check_model
from mbd_core.multitf.states.batch import AR_SLOT, MultiTFBatch
from mbd_core.multitf.states.layout import StateConfig, Weighting
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.step.loss import denominator, multitf_loss
from mbd_core.multitf.step.mfu import visible_pairs
from mbd_core.multitf.step.trainer import Trainer, split_batch

EOS, B = 1, 4
AR = RECIPES["ar"].states
BLOCKS = StateConfig(block_size=B, max_group=2, num_layouts=2, span="response", rounding="ceil")
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "tiny-llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", "tiny-qwen2", {}),
    "qwen3": ("Qwen3", "tiny-qwen3", {"head_dim": 16}),
}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    """A base of random weights in this project's network, and in transformers' own."""
    kind, shape, changes = KINDS[request.param]
    folder = base_folder(tmp_path_factory.mktemp("base") / "model", kind, shape, **changes)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    return load_model(folder, dtype=torch.float32).train(), theirs


def sample(prompt: int, response: int, *, seed: int, block_size: int = 1) -> Example:
    rng = random.Random(seed)
    tokens = [rng.randrange(2, 200) for _ in range(prompt + response)]
    example = encode_example(tokens[:prompt], tokens[prompt:], eos_token_id=EOS, block_size=block_size, max_length=256)
    assert example is not None
    return example


def samples(block_size: int = 1) -> list[Example]:
    sizes = ((3, 9), (12, 4), (1, 20), (7, 1))
    return [sample(*size, seed=n, block_size=block_size) for n, size in enumerate(sizes)]


def batch_of(examples: list[Example], states: StateConfig, *, mask: int = 0, **packing: Any) -> MultiTFBatch:
    rngs = [random.Random(n) for n in range(len(examples))]
    return build_batch(examples, states, mask_token_id=mask, rngs=rngs, **packing)


def loss_of(model: Decoder, batch: MultiTFBatch, weighting: Weighting) -> Tensor:
    return multitf_loss(model, batch, denominator(batch, weighting))[0]


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def padded_to_longest(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Token ids and labels as transformers takes them: prompts and padding have no label, the first EOS has one."""
    ends = [len(e.tokens) - next(n for n, t in enumerate(reversed(e.tokens)) if t != EOS) + 1 for e in examples]
    ids, labels = torch.full((len(examples), max(ends)), EOS), torch.full((len(examples), max(ends)), IGNORE)
    for row, (example, end) in enumerate(zip(examples, ends, strict=True)):
        ids[row, :end] = torch.tensor(example.tokens[:end])
        labels[row, example.prompt_length : end] = ids[row, example.prompt_length : end]
    return ids, labels


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-4) -> None:
    assert found.keys() == wanted.keys() and len(found) > 10
    for name, tensor in wanted.items():
        largest = max(1e-4, float(tensor.abs().max()))
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=rtol * largest, msg=name)


def test_loss_and_gradients_are_transformers_own(case: tuple[Decoder, Any]) -> None:
    """The mean over all labels of a batch, with prompts of several lengths and padding."""
    model, theirs = case
    ids, labels = padded_to_longest(samples())
    expected = theirs(ids, labels=labels).loss
    batch = batch_of(samples(), AR)
    loss = loss_of(model, batch, AR.weighting)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients(model, loss), gradients(theirs, expected))


def test_packed_samples_have_the_loss_and_gradients_of_separate_ones(case: tuple[Decoder, Any]) -> None:
    model, _ = case
    separate, packed = (batch_of(samples(), AR, together=together) for together in (None, [[1], [3, 0, 2]]))
    assert len(packed.input_ids) == 2 and visible_pairs(packed) == visible_pairs(separate)
    losses = [loss_of(model, batch, AR.weighting) for batch in (separate, packed)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert_close(gradients(model, losses[1]), gradients(model, losses[0]))
    causal = sum(n * (n + 1) // 2 for n in (len(example.tokens) - 1 for example in samples()))
    assert visible_pairs(separate) == causal


@pytest.mark.parametrize("blocks", ["masked_mean", "block_ratio"])
def test_the_ar_loss_stands_beside_an_unchanged_block_loss(case: tuple[Decoder, Any], blocks: Weighting) -> None:
    """Their sum, and the sum of their gradients: no noisy token sees the causal stream."""
    model, theirs = case
    states, examples = replace(BLOCKS, weighting=blocks), samples(block_size=B)
    plain = loss_of(model, batch_of(examples, states), blocks)
    both = loss_of(model, batch_of(examples, replace(states, ar_weight=0.5)), blocks)
    means = []
    for example in examples:
        ids, labels = padded_to_longest([example])
        means.append(theirs(ids, labels=labels).loss)
    ar = sum(means) / len(means)
    assert both.item() == pytest.approx(plain.item() + 0.5 * ar.item(), rel=1e-5)
    found, block, causal = gradients(model, both), gradients(model, plain), gradients(theirs, ar)
    assert_close(found, {name: block[name] + 0.5 * causal[name] for name in block})


def test_pooled_labels_count_once_each(case: tuple[Decoder, Any]) -> None:
    model, theirs = case
    states, examples = replace(BLOCKS, weighting="self_normalised"), samples(block_size=B)
    alone, both = batch_of(examples, states), batch_of(examples, replace(states, ar_weight=2.0))
    ids, labels = padded_to_longest(examples)
    count = int((labels != IGNORE).sum())
    sums = multitf_loss(model, alone, 1.0)[0] + 2.0 * count * theirs(ids, labels=labels).loss
    expected = sums / (alone.weights.sum() + 2.0 * count)
    assert loss_of(model, both, "self_normalised").item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["sdar", "fastdllm2", "llada2"])
def test_without_a_weight_a_sequence_is_as_before(family: str) -> None:
    """Bit for bit, and with one the noisy streams draw the same layouts and masks."""
    shift = FAMILIES[family].shift_logits
    model, examples = random_model(FAMILIES[family]).train(), samples(block_size=B)
    plain, both = (batch_of(examples, replace(BLOCKS, ar_weight=w), shift=shift) for w in (0.0, 1.0))
    assert AR_SLOT not in plain.slot
    _, measures = multitf_loss(model, both)
    _, without = multitf_loss(model, plain)
    assert measures[0].item() == pytest.approx(without[0].item(), abs=1e-6), "the accuracy is the masked tokens'"
    torch.testing.assert_close(measures[1:13], without[1:13], rtol=1e-5, atol=1e-5)
    for row, other in zip(split_batch(plain, 1), split_batch(both, 1), strict=True):
        kept = other.slot[0] != AR_SLOT
        for name, column in vars(row).items():
            if name != "sample":
                assert torch.equal(column[0], getattr(other, name)[0][kept])


def test_the_answers_of_a_conversation_have_their_samples_losses() -> None:
    model = random_model(FAMILIES["sdar"]).double().train()
    tokens = [random.Random(5).randrange(2, 200) for _ in range(30)]
    spans = ((4, 9), (13, 18), (22, 30))
    answers = [
        encode_example(tokens[:start], tokens[start:end], eos_token_id=EOS, block_size=1, max_length=64)
        for start, end in spans
    ]
    first, second, last = (answer for answer in answers if answer is not None)
    whole = replace(last, earlier=(first, second))
    states = replace(AR, weighting="masked_mean")
    loss = loss_of(model, batch_of([whole], states), "masked_mean")
    alone = [loss_of(model, batch_of([answer], states), "masked_mean") for answer in (first, second, last)]
    assert loss.item() == pytest.approx(sum(alone).item() / 3, rel=1e-9)
    batch = batch_of([whole], states)
    assert batch.num_tokens == 30 and int((batch.labels != IGNORE).sum()) == sum(e - s + 1 for s, e in spans)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=8, dropout=0.0)], ids=["whole", "lora"])
def test_updates_are_those_of_a_literal_loop_over_transformers(case: tuple[Decoder, Any], lora: Any) -> None:
    """Three updates of AdamW, micro-batches and all, also by an adapter that peft puts on both."""
    ours, reference = deepcopy(case)
    train = TrainConfig(
        steps=3,
        batch_size=4,
        lr=1e-2,
        warmup=1,
        schedule="constant",
        weight_decay=0.0,
        clip=1e9,
        optimizer="adamw",
        betas=(0.9, 0.999),
        precision="float32",
        micro_batch=3,
        lora=lora,
    )
    trainer = Trainer(ours, samples(), AR, train)
    if lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=4, lora_alpha=8, target_modules=list(lora.modules))
        inject_adapter_in_model(config, reference)
        start = dict(ours.named_parameters())
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(start[name])
    optimizer = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0
    )
    for _ in range(3):
        ids, labels = padded_to_longest(samples())
        loss = reference(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step().loss == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"layouts": "none"}, "give ar_weight above 0"),
        ({"layouts": "none", "ar_weight": 1.0, "self_denoising": "both"}, "leave labels and self_denoising out"),
        ({"layouts": "none", "ar_weight": 1.0, "max_group": 2}, "leave max_group at 1"),
        ({"layouts": "d2f", "ar_weight": 0.5}, "has no AR mode"),
        ({"ar_weight": -1.0}, "ar_weight"),
    ],
)
def test_states_that_contradict_themselves_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StateConfig(block_size=4, **fields)


def test_models_without_an_ar_mode_are_refused() -> None:
    ar = replace(RECIPES["ar"], max_length=64)
    check_model(ar, FAMILIES["sdar"], "mine")
    check_model(ar, FAMILIES["nemotron"], "mine")
    for family in ("llada", "dream"):
        with pytest.raises(ValueError, match="mine attends to whole sequences: it has no AR mode"):
            check_model(ar, FAMILIES[family], "mine")
    llada2 = FAMILIES["llada2"]
    assert llada2.moe is not None
    with pytest.raises(ValueError, match="experts that a whole block chooses"):
        check_model(ar, replace(llada2, moe=replace(llada2.moe, expert_capacity=2)), "mine")
    train = replace(ar.train, distillation="student_teacher", lora=LoraSettings())
    with pytest.raises(ValueError, match="beside a distillation"):
        check_model(replace(ar, train=train), FAMILIES["sdar"], "mine")
