"""Reward functions for tests, by what they do."""

import os
import time
from pathlib import Path


def digits(prompt: str, text: str, reference: str) -> float:
    """The share of the text that is digits."""
    print("what a function prints is no reward")
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def broken(prompt: str, text: str, reference: str) -> float:
    raise KeyError("no such\nkey")


def nan(prompt: str, text: str, reference: str) -> float:
    return float("nan")


def words(prompt: str, text: str, reference: str) -> str:
    return "good"


def hangs(prompt: str, text: str, reference: str) -> float:
    time.sleep(60)
    return 0.0


def leaves_a_child(prompt: str, text: str, reference: str) -> float:
    """Hangs in a process of its own too, which has all files that this one has open."""
    os.fork()
    time.sleep(90)
    return 0.0


def ends(prompt: str, text: str, reference: str) -> float:
    os._exit(3)


def broken_once(prompt: str, text: str, reference: str) -> float:
    """Fails until a file is there."""
    if not Path(os.environ["RL_REWARD_SWITCH"]).exists():
        raise RuntimeError("the switch is off")
    return float(len(text))
