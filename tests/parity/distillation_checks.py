"""On-policy distillation: drawn states, their mask, teacher and student logits, losses and gradients, rollout lengths.

OPDLM's training blocks begin at the prompt's end. Its row of several answers is padded on both sides; here each answer
has a row, and padding behind an answer's end stays in it, because the other tokens of its block see it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import TeacherSettings
from mbd_core.multitf.states.batch import MultiTFBatch, collate
from mbd_core.multitf.states.clean_text import Lesson
from mbd_core.multitf.states.drawn_states import drawn_states, learned_row
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.multitf.states.replay import AnswerGrid, ReplayState, replayed_states
from mbd_core.multitf.step.loss import DENSE, states_of_labels
from mbd_core.multitf.step.teaching import Teacher, taught_divergence, taught_loss
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.rl.config import RolloutConfig

PADDING = 252


def grid_of(prompt: list[int], response: list[int], steps: list[int], size: int) -> AnswerGrid:
    """Blocks from the prompt's end; the prompt's are counted back from there."""
    places = np.arange(-len(prompt), len(response)) // size
    return AnswerGrid(
        tokens=np.array([*prompt, *response]),
        steps=np.array([*[0] * len(prompt), *steps]),
        logprobs=np.zeros(len(places)),
        blocks=places - places.min(),
    )


def read_rows(case: dict[str, Any]) -> list[tuple[list[int], list[int], list[int]]]:
    """Each row's prompt, clean response and noisy response, without the padding before the prompt."""
    width, length = case["inputs"]["prompt_width"], case["inputs"]["response_width"]
    rows = []
    for ids in case["inputs"]["extended_input_ids"]:
        start = next(place for place, token in enumerate(ids) if token != PADDING)
        rows.append((ids[start:width], ids[width : width + length], ids[width + length :]))
    return rows


def check_rows(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    if inputs["random_mask"]:
        pytest.skip("states that no rollout was in: random masks are MultiTF's teacher forcing here")
    width, length, size = expected["prompt_width"], expected["response_width"], inputs["block_size"]
    draws = iter(inputs.get("drawn_state_index", ()))
    masks = load_file(folder / "logits.safetensors").get(f"{case['name']}.mask")
    for number, prompt in enumerate(inputs["prompts"]):
        response, steps = (inputs[name][number][:length] for name in ("responses", "step_maps"))
        grid = grid_of(prompt, response, steps, size)
        every = np.ones(len(grid.tokens), dtype=bool)
        if not inputs["one_state_per_block"]:
            check_all_states(case, grid, len(prompt))
            continue
        drawn = drawn_states(grid, "block-local", shrink=inputs["shrink"], choose=lambda _: next(draws), counted=every)
        for _ in range(-(-length // size) - len(drawn)):
            next(draws)  # a block of padding
        noisy = np.full(len(response), -1)
        for state in drawn:
            there = state.is_there.nonzero()[0]
            noisy[there - len(prompt)] = np.where(state.is_visible, grid.tokens, 250)[there]
        ids = expected["extended_input_ids"][number]
        assert noisy.tolist() == ids[width + length :][: len(response)]
        assert np.concatenate([state.is_label.nonzero()[0] for state in drawn]).tolist() == [
            len(prompt) + place for place, token in enumerate(noisy) if token == 250
        ]
        if masks is not None:
            padded = grid_of(prompt, ids[width : width + length], [*steps, *[0] * length][:length], size)
            check_mask(masks[number].bool(), padded, drawn, width=width, length=length, prompt=len(prompt))


def check_all_states(case: dict[str, Any], grid: AnswerGrid, prompt: int) -> None:
    """The states of a whole replay: row r has the r-th state of every block that has so many."""
    expected = case["expected"]
    states = list(replayed_states(grid, "block-local", 1))
    assert len(states) == len(expected["extended_input_ids"])
    for state, ids, labels in zip(states, expected["extended_input_ids"], expected["p_mask"], strict=True):
        there = state.is_there.nonzero()[0]
        noisy = np.array(ids[-expected["response_width"] :])
        assert np.array_equal(np.where(state.is_visible, grid.tokens, 250)[there], noisy[there - prompt])
        assert np.array_equal(state.is_label.nonzero()[0], np.array(labels).nonzero()[0])


def check_mask(
    reference: Tensor, grid: AnswerGrid, drawn: list[ReplayState], *, width: int, length: int, prompt: int
) -> None:
    longer = []
    for state in drawn:  # the last block with its padding
        block, tail = grid.blocks[state.is_there.nonzero()[0][0]], (0, len(grid.tokens) - len(state.is_there))
        is_visible, is_label = (np.pad(column, tail) for column in (state.is_visible, state.is_label))
        longer.append(ReplayState(grid.blocks == block, is_visible, is_label, np.full_like(grid.blocks, block)))
    batch = collate([learned_row(grid, longer, mask_token_id=250)])
    ours = dual_stream_mask(batch.stream, batch.block, batch.first)[0]
    positions, is_noisy = batch.positions[0], batch.stream[0] > 0
    places = torch.where(is_noisy, width + length - prompt, width - prompt) + positions
    assert torch.equal(ours, reference[places][:, places])
    assert torch.equal(ours.sum(-1), reference[places].sum(-1))  # and nothing else is seen


def models(folder: Path, case: dict[str, Any]) -> tuple[Decoder, Decoder]:
    student, teacher = (load_model(folder / case["inputs"][name]) for name in ("student", "teacher"))
    return student.train(), teacher.requires_grad_(False)


def state_of(grid: AnswerGrid, prompt: int, noisy: list[int], is_label: np.ndarray) -> ReplayState:
    """All response blocks as one stream, in which each is its own group."""
    is_there = np.arange(len(grid.tokens)) >= prompt
    is_visible = np.array([*[True] * prompt, *[token != 250 for token in noisy]])
    return ReplayState(is_there, is_visible, is_label, grid.blocks)


def batch_of(case: dict[str, Any], *, end: int | None, with_end: bool = False) -> tuple[MultiTFBatch, Lesson]:
    """The rows of a case as a batch, with the texts that its teacher reads."""
    rows, texts = [], []
    for prompt, clean, noisy in read_rows(case):
        grid = grid_of(prompt, clean, [0] * len(clean), case["inputs"]["block_size"])
        last = clean.index(end) + with_end if end in clean else len(clean)
        is_label = np.array([*[False] * len(prompt), *[t == 250 and i < last for i, t in enumerate(noisy)]])
        grid = replace(grid, steps=is_label.astype(int))
        state = state_of(grid, len(prompt), noisy, is_label)
        rows.append(learned_row(grid, [state], mask_token_id=250))
        texts.append((*prompt, *clean))
    batch = collate(rows)
    is_label = batch.labels != -100
    return batch, Lesson.at(texts, batch.sample[is_label], batch.positions[is_label] - 1)


def check_loss(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    if inputs["student_arm_shift"]:
        pytest.skip("with shifted logits a noise-group's first token is predicted by the clean token before it")
    if inputs["teacher_fill"] != "clean_fill":
        pytest.skip("the teacher reads the finished answer, and no guesses")
    settings = TeacherSettings(
        top_k=inputs["top_k_logits"] or None,
        reverse=inputs["reverse_kl_weight"],
        jsd=inputs["jsd_alpha"] if inputs["loss_type"] == "jsd" else None,
    )
    student, teacher = models(folder, case)
    batch, lesson = batch_of(case, end=inputs["im_end_id"], with_end=not inputs["exclude_im_end"])
    loss, _ = taught_loss(student, batch, lesson, Teacher(settings, teacher))
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-4)
    with Teacher(settings, teacher).reading(student) as reader:
        read = reader(lesson.reading.input_ids, lesson.reading.positions, DENSE.of(lesson.reading))
        taught = reader.logits(read[lesson.rows, lesson.places])
        own = student.logits(states_of_labels(student, batch, DENSE).hidden)
    found = taught_divergence(own, taught, settings).split([len(row) for row in expected["kl_at_places"]])
    width = inputs["prompt_width"]
    for number, (row, values, places) in enumerate(
        zip(found, expected["kl_at_places"], expected["places"], strict=True)
    ):
        prompt = len(read_rows(case)[number][0])
        labels = batch.positions[number][batch.labels[number] != -100]
        assert (labels - prompt + width).tolist() == places
        torch.testing.assert_close(row.float(), torch.tensor(values), rtol=1e-3, atol=1e-4)
        assert row.mean().item() == pytest.approx(expected["row_losses"][number], rel=1e-4)
    if "gradients" not in expected:
        return
    loss.backward()
    parameters = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in parameters.values()]).norm().item()
    assert norm == pytest.approx(expected["grad_norm"], rel=1e-3)
    for name, entry in expected["gradients"].items():
        assert parameters[name][tuple(entry["index"])].item() == pytest.approx(entry["value"], rel=2e-3), name
        assert parameters[name].norm().item() == pytest.approx(entry["norm"], rel=1e-3), name


def check_student(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    student = load_model(folder / inputs["student"])
    batch, _ = batch_of(case, end=None)
    with torch.no_grad():
        mask = dual_stream_mask(batch.stream, batch.block, batch.first)[:, None]
        logits = student.logits(student(batch.input_ids, batch.positions, DenseAttention(mask)))
    stored = load_file(folder / "logits.safetensors")[case["name"]]
    for number, (prompt, _, _) in enumerate(read_rows(case)):
        is_noisy = batch.stream[number] > 0
        places = batch.positions[number][is_noisy] - len(prompt) + inputs["prompt_width"] + inputs["response_width"]
        torch.testing.assert_close(logits[number][is_noisy], stored[number][places], rtol=0, atol=1e-3)


def check_teacher(folder: Path, case: dict[str, Any]) -> None:
    inputs, stored = case["inputs"], load_file(folder / "logits.safetensors")[case["name"]]
    if inputs.get("teacher_fill") == "argmax_fill":
        pytest.skip("the teacher reads the finished answer, and no guesses")
    teacher = load_model(folder / inputs["teacher"])
    if "teacher_fill" not in inputs:
        ids = inputs["input_ids"] if isinstance(inputs["input_ids"][0], list) else [inputs["input_ids"]]
        found = logits_of(teacher, [tuple(row) for row in ids])
        torch.testing.assert_close(found.reshape(stored.shape), stored, rtol=0, atol=1e-3)
        return
    for number, (prompt, clean, _) in enumerate(read_rows(case)):
        rows = logits_of(teacher, [(*prompt, *clean)])[0]
        response = stored[number][inputs["prompt_width"] :]
        torch.testing.assert_close(rows[len(prompt) - 1 : -1], response, rtol=0, atol=1e-3)


def logits_of(teacher: Decoder, texts: list[tuple[int, ...]]) -> Tensor:
    reading = Lesson.at(texts, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)).reading
    with torch.no_grad():
        return teacher.logits(teacher(reading.input_ids, reading.positions, DENSE.of(reading)))


def check_lengths(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    config = RolloutConfig(first_tokens=inputs["start"], ramp=inputs["ramp_steps"], ramp_shape=inputs["type"])
    for step, tokens in case["expected"]["max_token_at_rl_step"].items():
        found = config.tokens_at(int(step) - 1, most=inputs["end"], block_size=inputs["block_size"])
        assert found == tokens, step


CHECKS = {
    ("opdlm", "rows"): check_rows,
    ("opdlm", "student"): check_student,
    ("opdlm", "teacher"): check_teacher,
    ("opdlm", "loss"): check_loss,
    ("opdlm", "max"): check_lengths,
}
