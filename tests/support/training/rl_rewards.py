"""Reward functions for tests, by what they do."""

import asyncio
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


def short(prompt: str, text: str, reference: str) -> float:
    return -float(len(text))


def only_long(prompt: str, text: str, reference: str) -> float | None:
    """Applies to long answers alone."""
    return float(len(text)) if len(text) > 3 else None


def inverse(text: str) -> float:
    """Fails for an empty text."""
    return 1 / len(text)


def fails_for_some(text: str) -> float:
    """For about a third of all answers."""
    if sum(text.encode()) % 3 == 0:
        raise ValueError("an odd answer")
    return float(len(text))


def waits(text: str) -> float:
    time.sleep(0.5)
    return float(text)


async def waits_together(text: str) -> float:
    await asyncio.sleep(0.5)
    return float(text)


async def hangs_for_one(text: str) -> float:
    await asyncio.sleep(60 if text == "3" else 0)
    return float(text)


async def ends_for_one(text: str) -> float:
    await asyncio.sleep(0.2 if text != "0" else 0)
    if text == "3":
        os._exit(3)
    return float(text)


class Judge:
    """Is built without arguments and called."""

    def __call__(self, *, reference: str, text: str) -> dict[str, float] | float:
        return float(reference == text)

    async def together(self, text: str, **others: str) -> int:
        return len(others)


judge = Judge()
no_function = "text"


def of_trl(prompts: list[str], completions: list[str], **columns: list[str]) -> list[float | None]:
    """TRL's form: relative to the other answers to the prompt."""
    longest = max(map(len, completions))
    return [len(text) / longest if text else None for text in completions]


def too_few(completions: list[str], **columns: list[str]) -> list[float]:
    return [1.0]


def of_trl_messages(completions: list[list[dict[str, str]]], **columns: list[str]) -> list[float]:
    return [float(len(messages[0]["content"])) for messages in completions]


def of_trl_solution(completions: list[str], solution: list[str], **columns: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, str]) -> dict[str, object]:
    """verl's form."""
    assert data_source == "gsm-mini" and extra_info == {"prompt": "Tom has 3.", "problem_id": "p1"}
    return {"score": float(ground_truth in solution_str), "acc": True}


def constant(score: float = 1.0) -> float:
    return score


def of_others(query: str, response: str) -> float:
    return 1.0
