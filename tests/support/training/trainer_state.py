"""Training states as D2F's released code draws them, and a trainer's own state: what a resumed run needs."""

from typing import Any

from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.noise import NoiseBounds
from mbd_core.multitf.step.trainer import Trainer


def trainer_state(trainer: Trainer) -> dict[str, Any]:
    """Weights, optimizer states, step."""
    return {
        "step": trainer.step_number,
        "model": trainer.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }


def load_trainer(trainer: Trainer, state: dict[str, Any]) -> None:
    """Let the trainer go on from `trainer_state`."""
    trainer.model.load_state_dict(state["model"])
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    trainer.step_number = state["step"]


D2F_STATES = StateConfig(
    block_size=4,
    layouts="d2f",
    schedule="d2f_monotonic",
    bounds=NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0),
    rounding="bernoulli",
    weighting="ratio_mean",
)
