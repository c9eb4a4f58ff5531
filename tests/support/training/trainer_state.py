"""A trainer's state in one process: what a resumed run needs besides its recipe."""

from typing import Any

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
