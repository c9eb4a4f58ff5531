"""On-policy distillation (OPDLM, arXiv:2606.06712): rollouts in, the teacher's judgement of their states, new weights
out.

The student's own answers are the data. The frozen teacher reads each finished answer once, and its distributions at
the masks of drawn states (`states/drawn_states.py`) are the targets: no label and no reward is needed.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import ReplayStates, Sharding, TrainConfig
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.batch import MultiTFBatch, SequenceColumns, collate
from mbd_core.multitf.states.clean_text import Lesson
from mbd_core.multitf.states.drawn_states import drawn_rows
from mbd_core.multitf.step.loss_buckets import BUCKETS, NUM_SLOTS, bucket_means
from mbd_core.multitf.step.mfu import forward_flops, update_flops
from mbd_core.multitf.step.rollout_learner import RolloutLearner
from mbd_core.multitf.step.teaching import Teacher
from mbd_core.multitf.step.trainer import Objective, split_batch
from mbd_core.multitf.step.workers import ALONE, Workers


@dataclass(frozen=True, kw_only=True)
class DistillerReport:
    """One update, over all workers.

    loss        the mean over answers of the mean divergence of their labels
    divergence  the mean over labels, and in `parts` by slot and by mask ratio
    agreement   the share of labels that the student would decide as the rollout did
    labels      masks of drawn states
    tokens      tokens that the student computed
    positions   tokens with padding
    """

    step: int
    loss: float
    divergence: float
    agreement: float
    lr: float
    grad_norm: float
    answers: int
    labels: int
    tokens: int
    positions: int
    tflop: float
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)

    def point(self) -> dict[str, float]:
        """The update as a point of a run's curve."""
        numbers = asdict(self)
        parts = numbers.pop("parts")
        return numbers | parts


@dataclass(frozen=True)
class DrawnAnswer:
    """An answer's sequence of drawn states, and its teacher's reading: the answer's text, or the states block by
    block."""

    row: SequenceColumns
    text: tuple[int, ...]
    blocks: SequenceColumns


class Distiller(RolloutLearner):
    """A student in training on its own rollouts. `teacher` is the frozen model, or `None` for the student without its
    adapter; `config.teacher` says how it reads.

    The draw of an answer's states depends on the seed, the update and the answer's place alone.
    """

    def __init__(
        self,
        model: Decoder,
        config: TrainConfig,
        teacher: Decoder | None,
        *,
        states: ReplayStates = "exact",
        shrink: int = 1,
        workers: Workers = ALONE,
        sharding: Sharding | None = None,
    ) -> None:
        if config.teacher is None or (teacher is None and config.lora is None):
            raise ValueError(
                "distillation needs a teacher: a frozen model, or with an adapter (lora) the model without it"
            )
        if config.teacher.weight < 1:
            raise ValueError(
                f"teacher.weight={config.teacher.weight:g} leaves a rest to labels, and a rollout has none: give 1"
            )
        self.teacher = Teacher(config.teacher, teacher)
        objective = partial(Objective, model, None, rolls_out=False, teacher=self.teacher)
        super().__init__(
            model,
            config,
            objective,
            states=states,
            shrink=shrink,
            workers=workers,
            sharding=sharding,
            frozen=teacher,
        )

    def update(self, answers: Sequence[ReplayedAnswer]) -> DistillerReport:
        """Updates the weights on these answers, which all workers get in the same order.

        The same answers, weights and optimizer states give the same update, bit for bit. Before any change, raises
        `ValueError` without answers and for answers that cannot be replayed.
        """
        began, step, lr = time.perf_counter(), self.step_number, self.config.lr_at(self.step_number)
        drawn, batch = self._share(answers)
        parts = split_batch(batch, self.config.micro_batch)
        counts = torch.zeros(3 + 2 * len(BUCKETS), dtype=torch.float64)  # loss, hits, labels, buckets
        flops = update_flops(self.model.config, batch, lora=self.config.lora is not None)
        reader = (self.teacher.model or self.model).config
        for part in parts:
            lesson, labels = self._lesson(part, drawn), int((part.labels != IGNORE).sum())
            with self._gradients_stay_here(part is not parts[-1]):
                with self._autocast():
                    loss, measures = self.objective(
                        part.to(self.device), len(answers) / self.world_size, lesson.to(self.device)
                    )
                loss.backward()
            loss, measures = loss.detach().double().cpu(), measures.cpu()
            counts += torch.cat([torch.stack([loss, measures[0] * labels, torch.tensor(float(labels))]), measures[1:]])
            flops += forward_flops(reader, lesson.reading, labels)
        norm = self._apply()
        numbers = batch.num_tokens, sum(part.input_ids.numel() for part in parts), flops
        every = [
            given for given, is_counted in self.workers.all_values(((numbers, counts), self.counts)) if is_counted
        ]
        loss_sum, hits, labels_sum, *sums = torch.stack([own for _, own in every]).sum(0).tolist()
        tokens, positions, total_flops = (sum(column) for column in zip(*(own for own, _ in every), strict=True))
        return DistillerReport(
            step=step,
            loss=loss_sum / len(every),
            divergence=sum(sums[:NUM_SLOTS]) / max(1.0, labels_sum),
            agreement=hits / max(1.0, labels_sum),
            lr=lr,
            grad_norm=norm,
            answers=len(answers),
            labels=round(labels_sum),
            tokens=tokens,
            positions=positions,
            tflop=total_flops / 1e12,
            seconds=time.perf_counter() - began,
            parts=bucket_means(sums),
        )

    def _share(self, answers: Sequence[ReplayedAnswer]) -> tuple[list[DrawnAnswer], MultiTFBatch]:
        """This worker's answers, and their sequences as a batch. A worker with one answer less repeats the longest
        answer without labels, because workers with parts of one model must compute equally often."""
        place_of = {id(answer): place for place, answer in enumerate(answers)}
        order, own = self._dealt(answers)
        drawn = [self._drawn(answer, place_of[id(answer)]) for answer in own]
        if len(own) < math.ceil(len(order) / self.world_size):
            drawn.append(self._drawn(order[0], place_of[id(order[0])]))
            drawn[-1].row["labels"] = [IGNORE] * len(drawn[-1].row["labels"])
            drawn[-1].blocks["labels"] = [IGNORE] * len(drawn[-1].blocks["labels"])
        together = self._together(order, lambda answer: len(self._drawn(answer, place_of[id(answer)]).row["labels"]))
        return drawn, collate([each.row for each in drawn], together)

    def _drawn(self, answer: ReplayedAnswer, place: int) -> DrawnAnswer:
        model = self.model.config
        row, blocks = drawn_rows(
            answer,
            mask_token_id=model.mask_token_id,
            draws=random.Random(f"{self.config.seed}/states/{self.step_number}/{place}"),
            states=self.states,
            shrink=self.shrink,
            shift=model.shift_logits,
        )
        return DrawnAnswer(row, (*answer.prompt, *answer.tokens), blocks)

    def _lesson(self, part: MultiTFBatch, drawn: Sequence[DrawnAnswer]) -> Lesson:
        """The teacher's texts for a part of the batch, and the places of the labels' targets in them."""
        is_label = part.labels != IGNORE
        samples = part.sample[is_label]
        numbers, sequence = samples.unique(return_inverse=True)
        taught = [drawn[number] for number in numbers.tolist()] or drawn[:1]
        if self.teacher.settings.reads == "text":
            return Lesson.at([each.text for each in taught], sequence, part.positions[is_label] - 1)
        reading = collate([each.blocks for each in taught])
        # by sample, and within a sample in the part's order; a part without labels reads in vain
        targets = (reading.labels != IGNORE).nonzero() if len(samples) else torch.zeros(0, 2, dtype=torch.long)
        in_part = torch.empty_like(targets)
        in_part[samples.argsort(stable=True)] = targets
        return Lesson(reading, in_part[:, 0], in_part[:, 1], torch.ones(len(targets), dtype=torch.bool))
