"""Learning from an autoregressive teacher: its next-token distributions as targets at masked positions.

`TeacherSettings` has the divergence's formula. OPDLM (arXiv:2606.06712) uses it on the student's own answers.

Shape legend: N labels, D hidden, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import TeacherSettings
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.clean_text import Lesson
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.adapter import without_adapter
from mbd_core.multitf.step.loss import (
    DENSE,
    LossAndSums,
    Scores,
    hidden_states,
    in_pieces,
    loss_and_sums,
    roll_out,
    states_of_labels,
    wide_logits,
)


@dataclass(frozen=True)
class Teacher:
    """A frozen teacher: a model of its own, or `None` for the student without its adapter.

    It is no module, so that wrappers of the student's weights leave it alone.
    """

    settings: TeacherSettings
    model: Decoder | None = None

    @contextmanager
    def reading(self, student: Decoder) -> Iterator[Decoder]:
        """The teacher, without gradients."""
        with torch.no_grad():
            if self.model is not None:
                yield self.model
                return
            with without_adapter(student):
                yield student


def taught_loss(
    model: Decoder,
    batch: MultiTFBatch,
    lesson: Lesson,
    teacher: Teacher,
    divisor: Tensor | float | None = None,
    *,
    attention: TrainingAttention = DENSE,
    rolls_out: bool = False,
) -> LossAndSums:
    """`multitf_loss`, in which the teacher's divergence replaces the share `weight` of a label's CE, if the label has
    a target."""
    settings = teacher.settings
    with teacher.reading(model) as reader:
        taught_hidden = hidden_states(reader, lesson.reading, attention, (lesson.rows, lesson.places))
    if rolls_out:
        batch = roll_out(model, batch, attention=attention)
    states, head = states_of_labels(model, batch, attention), teacher.model or model  # the head has no adapter
    weights = settings.weight * lesson.has_target.to(states.weights)

    def score(hidden_ND: Tensor, taught_ND: Tensor, labels_N: Tensor, weights_N: Tensor) -> Scores:
        with torch.no_grad():
            teacher_NV = wide_logits(head.logits(taught_ND))
        student_NV = wide_logits(model.logits(hidden_ND))
        from_labels = F.cross_entropy(student_NV, labels_N, reduction="none")
        from_teacher = taught_divergence(student_NV, teacher_NV, settings)
        return torch.lerp(from_labels, from_teacher, weights_N.to(from_labels)), student_NV.argmax(-1) == labels_N

    scores = in_pieces(score, model, states.hidden, taught_hidden, states.labels, weights)
    return loss_and_sums(scores, states, batch, divisor)


def taught_divergence(student_NV: Tensor, teacher_NV: Tensor, settings: TeacherSettings) -> Tensor:
    """The divergence of `settings` between student and teacher at each position (N), given their logits.

    The student's vocabulary may have further tokens after the teacher's. The teacher has no probability for them, so
    their summands are left out.
    """
    student = (student_NV / settings.temperature).log_softmax(-1)[:, : teacher_NV.shape[1]]
    teacher = (teacher_NV / settings.temperature).log_softmax(-1)
    if settings.top_k is not None:
        top = teacher.topk(min(settings.top_k, teacher.shape[1]), dim=-1).indices
        student, teacher = student.gather(-1, top), teacher.gather(-1, top)
    if settings.jsd is None:
        sums = (1 - settings.reverse) * _kl(teacher, student) + settings.reverse * _kl(student, teacher)
    else:
        mean = torch.logaddexp(teacher + math.log(settings.jsd), student + math.log(1 - settings.jsd))
        sums = settings.jsd * _kl(teacher, mean) + (1 - settings.jsd) * _kl(student, mean)
    return sums * settings.temperature**2


def _kl(logs: Tensor, other_logs: Tensor) -> Tensor:
    """The summands of KL(P || Q) that these log-probabilities give, added up."""
    return F.kl_div(other_logs, logs, reduction="none", log_target=True).sum(-1)
