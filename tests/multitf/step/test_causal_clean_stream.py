"""Blocks behind a causal clean stream, with the AR loss on it: decoding's own forwards, and a model that drafts."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from base_folders import base_folder
from family_models import FAMILIES, random_model
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from jobs.convert_checkpoint import main as convert
from jobs.prepare_data import main as prepare_data
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.run import __main__ as run
from mbd_core.multitf.run.start import check_model
from mbd_core.multitf.states.batch import AR_SLOT, MultiTFBatch
from mbd_core.multitf.states.clean_text import Lesson
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.step.loss import denominator, multitf_loss
from mbd_core.multitf.step.mfu import visible_pairs
from mbd_core.ops.attention.whole import DenseAttention

B, EOS, MASK = 4, 1, 0
NEMOTRON = replace(RECIPES["nemotron"].states, block_size=B)


def sample(length: int, prompt: int, seed: int) -> Example:
    rng = random.Random(seed)
    return Example((*(rng.randrange(2, 300) for _ in range(length - 2)), EOS, EOS), prompt)


EXAMPLES = [sample(24, 6, 0), sample(16, 3, 1), sample(12, 8, 2)]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model(FAMILIES["nemotron"]).double().train()


def batch_of(states: StateConfig, together: list[list[int]] | None = None) -> MultiTFBatch:
    rngs = [random.Random(n) for n in range(len(EXAMPLES))]
    return build_batch(EXAMPLES, states, mask_token_id=MASK, rngs=rngs, together=together)


def test_labels_are_predicted_as_decoding_predicts_them(model: Decoder) -> None:
    """Masks in a row without order behind causal rows, next tokens by those rows: each in a forward of its own."""
    batch, losses = batch_of(NEMOTRON), []
    for row, example in enumerate(EXAMPLES):
        noisy = batch.stream[row] == 1
        first = int(batch.positions[row][noisy][0])
        shown = [*example.tokens[:first], *batch.input_ids[row][noisy].tolist()]
        length = len(shown)
        for start in range(first, length, B):
            ids = torch.tensor([[*example.tokens[:start], *shown[start : start + B]]])
            sees = torch.ones(start + B, start + B, dtype=torch.bool).tril()
            sees[start:] = True
            hidden = model(ids, torch.arange(start + B)[None], DenseAttention(sees[None, None]))
            logits = model.logits(hidden)[0]
            for place in range(start, start + B):
                if place >= example.prompt_length and shown[place] == MASK:
                    losses.append(F.cross_entropy(logits[place], torch.tensor(example.tokens[place])))
        ids = torch.tensor([example.tokens])
        sees = torch.ones(length, length, dtype=torch.bool).tril()
        logits = model.logits(model(ids, torch.arange(length)[None], DenseAttention(sees[None, None])))[0]
        for place in range(example.prompt_length, length - 1):  # the last token is fill behind the EOS
            losses.append(F.cross_entropy(logits[place - 1], torch.tensor(example.tokens[place])))
    loss, _ = multitf_loss(model, batch, denominator(batch, NEMOTRON.weighting))
    assert int((batch.labels != IGNORE).sum()) == len(losses)
    assert loss.item() == pytest.approx(sum(losses).item() / len(losses), rel=1e-6)


def test_packed_it_is_the_same_and_it_costs_no_further_stream(model: Decoder) -> None:
    separate, packed = batch_of(NEMOTRON), batch_of(NEMOTRON, [[0], [2, 1]])
    losses = [multitf_loss(model, batch, denominator(batch, "label_mean"))[0].item() for batch in (separate, packed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert visible_pairs(packed) == visible_pairs(separate)
    third = batch_of(replace(NEMOTRON, clean="block_causal"))
    assert separate.num_tokens < third.num_tokens
    assert set(separate.slot[separate.stream == 0].tolist()) == {AR_SLOT}


def test_the_counted_pairs_are_the_masks() -> None:
    for states in (NEMOTRON, replace(NEMOTRON, max_group=3, num_random=1, complementary=True)):
        batch = batch_of(states)
        mask = dual_stream_mask(batch.stream, batch.block, batch.first)
        assert visible_pairs(batch) == int(mask[batch.stream >= 0].sum())


def test_a_teacher_reads_the_clean_tokens_and_not_their_labels() -> None:
    """Also before a response that begins with a block, where the clean stream's last token has a label."""
    batch = batch_of(NEMOTRON)
    lesson = Lesson.of(batch, (EOS,))
    read = {tuple(ids[stream > 0].tolist()) for ids, stream in zip(*texts_of(lesson), strict=True)}
    assert read == {example.tokens for example in EXAMPLES}
    assert EXAMPLES[2].prompt_length % B == 0 and int(batch.labels[2][batch.positions[2] == 7].max()) != IGNORE
    assert not lesson.has_target[batch.slot[batch.labels != IGNORE] == AR_SLOT].any()


def texts_of(lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
    return lesson.reading.input_ids, lesson.reading.stream


def test_models_whose_keys_lie_otherwise_are_refused() -> None:
    nemotron = replace(RECIPES["nemotron"], max_length=64)
    check_model(nemotron, FAMILIES["nemotron"], "mine")
    with pytest.raises(ValueError, match="mine does not store its keys by causal rows"):
        check_model(replace(nemotron, base="mine"), FAMILIES["sdar"], "mine")
    with pytest.raises(ValueError, match=r"or give states\.clean=causal"):
        check_model(replace(RECIPES["a2d"], max_length=64), FAMILIES["nemotron"], "mine")
    with pytest.raises(ValueError, match="has no clean stream"):
        StateConfig(block_size=4, layouts="none", ar_weight=1.0, clean="causal")


def test_an_adapted_llama_drafts_its_own_greedy_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a Llama by one command each: its drafts are verified, and the tokens are those of transformers' Llama."""
    monkeypatch.chdir(tmp_path)
    base_folder(tmp_path / "base", "Llama", "tiny-llama", tie_word_embeddings=True)
    rows = [{"prompt": f"What is {n} and {n}?", "response": f"It is {2 * n}."} for n in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert convert(["base", "--to", "block-diffusion", "--out", "diffusion", "--block-size", "4"]) == 0
    assert prepare_data(["rows.jsonl", "--model", "diffusion", "--max-length", "128", "--out", "data"]) == 0
    options = ["--recipe", "nemotron", "--base", "diffusion", "--data", "data", "--set", "states.block_size=4"]
    options += ["--precision", "float32", "--steps", "12", "--batch-size", "6", "--lr", "1e-2"]
    assert run.main([*options, "--checkpoints", "run", "--log-to", "none"]) == 0
    points = [json.loads(line) for line in Path("run/losses.jsonl").read_text().splitlines()]
    assert points[-1]["loss_ar"] < points[0]["loss_ar"] and points[-1]["loss_slot_1"] < points[0]["loss_slot_1"]

    folder = read_folder(Path("out/nemotron"))
    assert (folder.config.attention, folder.config.block_size) == ("causal", 4)
    assert folder.config.architecture == "A2DLlamaLMHeadModel" and folder.defaults["causal"] == {}
    model = load_model(Path("out/nemotron"), dtype=torch.float32)
    config = json.loads(Path("out/nemotron/config.json").read_text())
    Path("out/nemotron/config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    theirs = LlamaForCausalLM.from_pretrained("out/nemotron", dtype=torch.float32).eval()
    prompts = [(5, 9, 30, 4, 77), (8,) * 11, tuple(range(20, 27))]
    expected = []
    for prompt in prompts:
        ids = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, min_new_tokens=16)
        expected.append(tuple(ids[0, len(prompt) :].tolist()))
    forwards = {}
    for method in ("ar", "linear_spec"):
        decoding = decoding_config(folder.defaults, {"causal": {"method": method}}, block_size=4)
        requests = [
            Request(request_id=str(n), prompt=prompt, max_tokens=16, min_tokens=16, decoding=decoding)
            for n, prompt in enumerate(prompts)
        ]
        outputs = Engine(model, EngineConfig(max_rows=2, num_pages=64)).generate(requests)
        assert [output.tokens for output in outputs] == expected
        forwards[method] = sum(output.counts.num_forwards for output in outputs)
    assert forwards["ar"] == 16 * len(prompts) != forwards["linear_spec"]

    # the same folder trains as a block-diffusion model too, and its keys change with the recipe
    capsys.readouterr()
    options[1] = "a2d"
    adapter = ["--lora", "2", "--write", "adapter", "--steps", "1"]
    assert run.main([*options, *adapter]) == 0
    options[1] = "nemotron"
    assert run.main([*options, *adapter, "--out", "adapter"]) == 2
    assert "an adapter keeps its base's block_causal keys" in capsys.readouterr().err
