"""MultiTF's layouts, masks, noise and losses."""

import random
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import checkpoint_tensors
from mbd_core.models.decoder import Training
from mbd_core.multitf.config import Distillation
from mbd_core.multitf.data.example import IGNORE, Example, answer_labels
from mbd_core.multitf.states.batch import MultiTFBatch, collate
from mbd_core.multitf.states.layout import GroupLayout, StateConfig, released_random_layout, systematic_layouts
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.multitf.states.noise import SCHEDULES, NoiseBounds, d2f_monotonic, num_masked
from mbd_core.multitf.states.sample import NoisyStream, lay_out, lay_out_d2f
from mbd_core.multitf.step.loss import denominator, distillation_loss, multitf_loss, roll_out
from mbd_core.ops.attention.whole import DenseAttention


def check_systematic_layouts(folder: Path, case: dict[str, Any]) -> None:
    for key, layouts in case["expected"]["layouts"].items():
        blocks, group = (int(part[1:]) for part in key.split("_"))
        assert [list(lay.sizes) for lay in systematic_layouts(blocks, group)] == layouts


def check_random_layouts(folder: Path, case: dict[str, Any]) -> None:
    """The released rule of repairing and shuffling: `random_sizes="released"`."""
    for key, stats in case["expected"]["stats"].items():
        blocks, group = (int(part[1:]) for part in key.split("_"))
        rng = random.Random(key)
        drawn = [released_random_layout(blocks, group, rng).sizes for _ in range(case["inputs"]["draws"])]
        assert all(sum(sizes) == blocks for sizes in drawn)
        assert min(map(min, drawn)) == stats["min_size"] and max(map(max, drawn)) == stats["max_size"]
        assert sum(1 in sizes for sizes in drawn) / len(drawn) == stats["singleton_fraction"]


def check_mask(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    if "layout" in inputs:
        layout, size = GroupLayout(tuple(inputs["layout"])), inputs["block_size"]
    elif case["name"].startswith("mask_bd3lm"):
        size = inputs["block_size"]
        layout = GroupLayout((1,) * (inputs["n"] // size))
    else:
        check_d2f_mask(folder, case)
        return
    blocks = torch.arange(layout.num_blocks).repeat_interleave(size)
    alpha = torch.tensor(layout.first_blocks()).repeat_interleave(size)
    mask = dual_stream_mask(
        torch.cat((torch.ones_like(blocks), torch.zeros_like(blocks))),
        torch.cat((blocks, blocks)),
        torch.cat((alpha, blocks + 1)),
    )
    assert torch.equal(mask, load_file(folder / "logits.safetensors")[case["name"]].bool())


def check_d2f_mask(folder: Path, case: dict[str, Any]) -> None:
    inputs, size = case["inputs"], case["inputs"]["block_size"]
    stored = load_file(folder / "logits.safetensors")[case["name"]].bool()
    for prompt, wanted in zip(inputs["prompt_lengths"], stored, strict=True):
        example = Example((2,) * inputs["L"], prompt)
        length = inputs["L"] - prompt
        unmasked = NoisyStream([2] * length, [False] * length, [0.5] * length)
        batch = collate([lay_out_d2f(example, unmasked, StateConfig(block_size=size, layouts="d2f"))])
        assert torch.equal(dual_stream_mask(batch.stream, batch.block, batch.first)[0], wanted)


def check_masked_count(folder: Path, case: dict[str, Any]) -> None:
    for maskable, ratio, count, _ in case["expected"]["rows"]:
        assert num_masked(ratio, maskable, "floor") == count


def stored_batch(inputs: dict[str, Any], *, rollout: bool = False, **states: Any) -> MultiTFBatch:
    """The case's one training sequence: its noisy stream under its layout, before its clean stream."""
    size, layout = inputs["block_size"], GroupLayout(tuple(inputs["layout"]))
    example = Example(tuple(inputs["clean"]), inputs["prompt_length"])
    noisy = NoisyStream(
        tokens=inputs["noisy"],
        masked=[n != c for n, c in zip(inputs["noisy"], inputs["clean"], strict=True)],
        ratio=[t for t in inputs.get("t_per_block", [1.0] * inputs["K"]) for _ in range(size)],
        rollout=rollout,
    )
    config = StateConfig(block_size=size, max_group=max(layout.sizes), **states)
    batch = collate([lay_out(example, [(layout, noisy)], config, first_block=0)])
    assert batch.labels[0, : len(inputs["labels"])].tolist() == inputs["labels"]
    return batch


def check_sdar_losses(folder: Path, case: dict[str, Any]) -> None:
    """Eq. B.13 over all K blocks, and the reference's own self-normalised loss with its gradients."""
    inputs, expected = case["inputs"], case["expected"]
    model = load_model(folder / inputs["checkpoint"])
    with torch.no_grad():
        loss, _ = multitf_loss(model, stored_batch(inputs, weighting="block_ratio"))
    assert float(loss) == pytest.approx(expected["paper_B13_over_all_K_blocks"], rel=1e-4)
    batch = stored_batch(inputs, weighting="self_normalised")
    loss, _ = multitf_loss(model, batch, denominator(batch, "self_normalised"))
    assert float(loss.detach()) == pytest.approx(expected["self_normalised_ipw_loss"], rel=1e-4)
    loss.backward()
    norm = global_norm(p.grad for p in model.parameters())
    assert float(norm) == pytest.approx(expected["self_normalised_ipw_grad_norm"], rel=1e-4)


def check_self_denoising(folder: Path, case: dict[str, Any]) -> None:
    """Alg. 2: the rolled-out tokens, and the losses of both branches on every answer position."""
    inputs, expected = case["inputs"], case["expected"]
    model = load_model(folder / inputs["checkpoint"])
    standard = stored_batch(inputs, labels="answer")
    rolled = roll_out(model, stored_batch(inputs, labels="answer", rollout=True))
    assert rolled.input_ids[0, : len(inputs["noisy"])].tolist() == expected["self_denoised_noisy"]
    with torch.no_grad():
        for batch, branch in ((standard, "standard"), (rolled, "self_denoised")):
            assert float(multitf_loss(model, batch)[0]) == pytest.approx(expected[f"loss_{branch}_branch"], rel=1e-4)


def check_oput(folder: Path, case: dict[str, Any]) -> None:
    (check_answer_labels if "label_trim" in case["name"] else check_self_denoising)(folder, case)


def check_answer_labels(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    assert inputs["input_ids"][-1] == inputs["pad_id"]
    assert answer_labels(inputs["input_ids"], inputs["prompt_length"]) == case["expected"]["labels"]


class StoredLogits(torch.nn.Module):
    """Stands for a student and its teacher: the stored logits, of whichever is asked."""

    def __init__(self, student: Tensor, teacher: Tensor) -> None:
        super().__init__()
        self.student, self.teacher = torch.nn.Parameter(student), teacher
        self.config = SimpleNamespace(vocab_size=student.shape[-1], mask_token_id=250, moe=None, num_layers=1)
        self.teaching = False

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Any, *, training: Training) -> Tensor:
        return (self.teacher if self.teaching else self.student).flatten(0, -2)[training.kept]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    @contextmanager
    def as_teacher(self) -> Iterator[None]:
        self.teaching = True
        yield
        self.teaching = False


def check_d2f(folder: Path, case: dict[str, Any]) -> None:
    if case["name"] == "d2f_noise_stats":
        check_d2f_noise(case)
    else:
        check_d2f_loss(folder, case)


def check_d2f_noise(case: dict[str, Any]) -> None:
    rng, bounds = random.Random(0), NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0)
    draws = [d2f_monotonic(case["inputs"]["blocks"], bounds, rng) for _ in range(20_000)]
    assert all(draw == sorted(draw) for draw in draws)
    for slot, name in ((0, "first"), (-1, "last")):
        column, wanted = [draw[slot] for draw in draws], case["expected"][name]
        assert sum(column) / len(column) == pytest.approx(wanted["mean"], abs=0.01)
        assert min(column) >= 0.2 and max(column) <= wanted["max"] + 1e-9


def check_d2f_loss(folder: Path, case: dict[str, Any]) -> None:
    """Both directions' code path: the reference's soft cross-entropy is KL(teacher || student) and the entropy."""
    inputs, expected = case["inputs"], case["expected"]
    stored, shift = load_file(folder / "logits.safetensors"), "dream" in case["name"]
    config = StateConfig(block_size=inputs["block_size"], layouts="d2f", weighting="ratio_mean")
    columns = (inputs[name] for name in ("input_ids", "noisy_ids", "masked", "p_mask", "prompt_lengths"))
    rows = []
    for clean, noisy, masked, ratio, prompt in zip(*columns, strict=True):
        stream = NoisyStream(noisy[prompt:], [bool(m) for m in masked[prompt:]], ratio[prompt:])
        rows.append(lay_out_d2f(Example(tuple(clean), prompt), stream, config, shift=shift))
    batch = collate(rows)
    mask = dual_stream_mask(batch.stream, batch.block, batch.first)
    assert torch.equal(mask, stored[f"{case['name']}.attention_mask"].bool().view_as(mask))
    model = StoredLogits(*(stored[f"{case['name']}.{who}_logits"].float() for who in ("student", "teacher")))
    divisor = denominator(batch, "ratio_mean")
    if not inputs["self_align"]:
        loss, _ = multitf_loss(model, batch, divisor)
        assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-4)
    else:
        direction: Distillation = "teacher_student"
        loss, _ = distillation_loss(model, batch, direction, as_teacher=model.as_teacher, divisor=divisor)
        assert float(loss.detach()) == pytest.approx(expected["loss_as_forward_kl"], rel=1e-4)
        chosen = batch.labels != IGNORE
        rows_, places = chosen.nonzero(as_tuple=True)
        teacher = model.teacher[rows_, batch.source[rows_, places]].log_softmax(-1)
        entropy = -(teacher.exp() * teacher).sum(-1)
        soft = loss.detach() + (batch.weights[chosen] * entropy).sum() / divisor
        assert float(soft) == pytest.approx(expected["loss"], rel=1e-4)
    loss.backward()
    assert float(model.student.grad.norm()) == pytest.approx(expected["grad_norm_student_logits"], rel=1e-4)


def check_masked_mean_loss(folder: Path, case: dict[str, Any]) -> None:
    """Eq. B.11 on a mixture of experts: mask, logits of the noisy stream, loss, and the gradient of every weight."""
    inputs, expected = case["inputs"], case["expected"]
    stored = load_file(folder / "logits.safetensors")
    batch, length = stored_batch(inputs), len(inputs["noisy"])
    mask = dual_stream_mask(batch.stream, batch.block, batch.first)
    assert torch.equal(mask[0], stored[f"{case['name']}.mask"].bool())
    model = load_model(folder / inputs["checkpoint"])
    with torch.no_grad():
        logits = model.logits(model(batch.input_ids, batch.positions, DenseAttention(mask[:, None])))
    torch.testing.assert_close(logits[0, :length], stored[f"{case['name']}.noisy_logits"], atol=1e-3, rtol=0)

    loss, _ = multitf_loss(model, batch)
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-4)
    loss.backward()
    assert float(global_norm(p.grad for p in model.parameters())) == pytest.approx(expected["grad_norm"], rel=1e-4)
    for parameter in model.parameters():
        parameter.data = parameter.grad  # so that the gradients come under the checkpoint's names
    norms = {name: float(tensor.norm()) for name, tensor in checkpoint_tensors(model, "per_expert")}
    wanted = expected["grad_norm_per_param"]
    assert {name: norms[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


def global_norm(tensors: Iterable[Tensor | None]) -> Tensor:
    """The L2 norm over all entries; every tensor must be there."""
    norms = []
    for tensor in tensors:
        assert tensor is not None
        norms.append(tensor.norm())
    return torch.stack(norms).norm()


def check_noise(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    bounds = NoiseBounds(t_low=inputs["low"], t_high=inputs["high"], margin=inputs["rho"])
    for key, stats in case["expected"]["stats"].items():
        name, size = key.rsplit("_n", 1)
        rng = random.Random(key)
        schedule = SCHEDULES[RELEASED_SCHEDULES.get(name, name)]
        draws = [schedule(int(size), bounds, rng) for _ in range(inputs["groups"])]
        for slot in range(int(size)):
            column = [draw[slot] for draw in draws]
            assert statistics.fmean(column) == pytest.approx(stats["mean"][slot], abs=0.02), key
            assert statistics.pstdev(column) == pytest.approx(stats["std"][slot], abs=0.02), key
        assert all(draw == sorted(draw) for draw in draws) == stats["monotone"]
    assert len(case["expected"]["stats"]) == 21


RELEASED_SCHEDULES = {
    "chain_uniform_opt": "chain_from_low",
    "random": "power_law",
    "linear_random": "stratified",
    "linear_ascend": "ascending",
}
"""The released code's names for what this project names otherwise."""

IMPLEMENTED_QUIRKS = (("training", "random"),)
"""Behaviours of the reference that the paper does not describe, and that this project has as an option."""

CHECKS = {
    ("training", "systematic"): check_systematic_layouts,
    ("training", "mask"): check_mask,
    ("training", "masked"): check_masked_count,
    ("training", "ce"): check_masked_mean_loss,
    ("training", "ipw"): check_sdar_losses,
    ("training", "oput"): check_oput,
    ("training", "d2f"): check_d2f,
    ("training", "random"): check_random_layouts,
    ("training", "noise"): check_noise,
}
