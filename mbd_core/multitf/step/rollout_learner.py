"""The common part of learners of rollouts: answers dealt out to workers, weights for engines, a state to resume."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import ReplayStates, Sharding, TrainConfig, check_learning, check_workers
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.packing import Together, packed_alike
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.adapter import merged_tensors
from mbd_core.multitf.step.trainer import Updater
from mbd_core.multitf.step.workers import Workers


class RolloutLearner(Updater):
    """A model in training on rollouts. `states` and `shrink` choose the states that it learns in.

    `frozen` is a second model that the objective compares with; `None` if the objective needs none, or compares with
    the trained model without its adapter. A saved state can be loaded only beside the same frozen model.
    """

    def __init__(
        self,
        model: Decoder,
        config: TrainConfig,
        objective: Callable[[TrainingAttention], nn.Module],
        *,
        states: ReplayStates,
        shrink: int,
        workers: Workers,
        sharding: Sharding | None,
        frozen: Decoder | None,
    ) -> None:
        check_workers(config, workers.size)
        check_learning(config)
        self.states, self.shrink, self.workers, self._frozen = states, shrink, workers, frozen
        if config.attention == "auto" and workers.device.type == "cpu" and not config.compile:
            config = replace(config, attention="streams")  # a mask over many noisy streams hides most pairs
        super().__init__(
            model,
            config,
            objective,
            rank=workers.rank,
            world_size=workers.size,
            device=workers.device,
            sharding=sharding,
        )

    def _dealt(self, answers: Sequence[ReplayedAnswer]) -> tuple[list[ReplayedAnswer], list[ReplayedAnswer]]:
        """The answers longest first, and this worker's share, so that workers have about equally many tokens.

        Raises `ValueError` without answers.
        """
        if not answers:
            raise ValueError("an update needs at least one answer")
        order = sorted(answers, key=lambda answer: -len(answer.prompt) - len(answer.steps))
        return order, order[self.rank :: self.world_size]

    def _together(self, order: Sequence[ReplayedAnswer], length: Callable[[ReplayedAnswer], int]) -> Together | None:
        """Which samples of this worker share a training sequence; `None` without `pack`.

        Every worker makes equally many sequences. `order` has all workers' answers. A worker that has one answer less
        than the others computes the longest answer again.
        """
        if self.config.pack is None:
            return None
        lengths = [length(answer) for answer in order]
        lengths += lengths[:1] * (-len(order) % self.world_size)
        shares = [lengths[rank :: self.world_size] for rank in range(self.world_size)]
        return packed_alike(shares, self.config.pack)[self.rank]

    def weights(self) -> dict[str, Tensor]:
        """Copies of the policy's tensors on the CPU, by the decoder's names and with an adapter merged, for
        `Engine.update_weights`.

        Every worker calls it.
        """
        return merged_tensors(self.model)

    def state_dict(self) -> dict[str, Any]:
        """The state from which a learner of the same first model resumes: step, weights and optimizer states.

        The tensors are copies on the CPU. Every worker calls it. The first worker gets the state, the others
        an empty one.
        """
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=self.config.lora is not None
        )
        model = get_model_state_dict(self.model, options=options)
        optimizers = get_optimizer_state_dict(self.model, self.optimizers, options=options)
        if not self.workers.is_first:
            return {}
        state = {
            "step": self.step_number,
            "model": model,
            "optimizers": optimizers,
            "reference": self._reference_digest(),
        }
        return deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state. Every worker calls it: the first with the state, the others with an empty one.

        Raises `ValueError` if the state's reference is another model than this learner's.
        """
        step, digest = self.workers.all_values((state.get("step", 0), state.get("reference")))[0]
        if digest != self._reference_digest():
            raise ValueError(
                "the saved state is of a learner with another frozen reference: start from the model that the saved "
                "run started from, with the same objective"
            )
        has_others = self.workers.size > 1
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=has_others, strict=self.config.lora is None
        )
        state = deepcopy(dict(state))
        set_model_state_dict(self.model, state.get("model", {}), options=options)
        set_optimizer_state_dict(self.model, self.optimizers, state.get("optimizers", {}), options=options)
        self.step_number = step

    def _reference_digest(self) -> str | None:
        """A digest of the frozen reference's tensors; `None` without a reference."""
        if self._frozen is None:
            return None
        digest = sha256()
        for name, tensor in self._frozen.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
