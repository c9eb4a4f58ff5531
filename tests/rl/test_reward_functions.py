"""A user's function: in processes of its own, many answers at once, in the forms that others write."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from scored_rows import rewards_of, scores

from mbd_core.rl import functions
from mbd_core.rl.rewards import RewardConfig, check_judges

NUMBERS = [str(number) for number in range(16)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", "raised KeyError: 'no such"),
        ("nan", "gave nan, which is no finite number"),
        ("words", "gave good, which is no finite number"),
        ("hangs", "did not answer within 1 s"),
        ("ends", "ended its process"),
        ("leaves_a_child", "did not answer within 1 s"),
        ("too_few", "gave a list of 1, not a list of 2 rewards"),
        ("of_trl_messages", "raised TypeError: string indices must be integers"),
    ],
)
def test_a_function_that_gives_no_reward_is_one_sentence(name: str, says: str) -> None:
    began = time.monotonic()
    for sentence in rewards_of(f"rl_rewards:{name}", ["a", "b"], reward_seconds=1.0):
        assert sentence.startswith(f"reward 'rl_rewards:{name}' {says}") and sentence.endswith(", for an answer to p1")
        assert "\n" not in sentence
    assert time.monotonic() - began < 60  # no child of the function's process is waited for


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent:f", "raised ModuleNotFoundError: No module named 'absent'"),
        ("absent.py:f", "raised FileNotFoundError: "),
        ("rl_rewards:absent", "raised AttributeError: "),
        ("rl_rewards:no_function", "is a str, which cannot be called; write no_function(prompt, text, reference) for"),
        ("rl_rewards:of_others", "needs the parameter 'query', which is not given; it is called by name with prompt,"),
        (
            "rl_rewards:of_trl_solution",
            "needs the parameter 'solution', .* called by name with prompts, completions",
        ),
        ("builtins:len", "needs the parameter 'obj', which is not given"),
        ("rl_rewards:constant", "takes no given parameter; it is called by name with prompt, text"),
    ],
)
def test_a_function_that_cannot_be_asked_is_found_before_any_work(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^reward '{name}' {says}".replace("(", r"\(").replace(")", r"\)")) as error:
        check_judges(RewardConfig(rewards={name: 1.0}))
    assert "\n" not in str(error.value)
    check_judges(RewardConfig(rewards={name: 0.0, "rl_rewards:digits": 1.0}))


def test_functions_of_other_libraries_and_callables_are_taken(tmp_path: Path) -> None:
    assert rewards_of("rl_rewards:of_trl", ["12", "1234", ""]) == [0.5, 1.0, None]
    assert rewards_of("rl_rewards:of_verl", ["so 5", "6"]) == [1.0, 0.0]
    assert rewards_of("rl_rewards:Judge", ["5", "6"]) == rewards_of("rl_rewards:judge", ["5", "6"]) == [1.0, 0.0]
    assert rewards_of("rl_rewards:judge.together", ["5"]) == [3.0]
    (tmp_path / "a file.py").write_text("import beside\ndef f(text): return beside.NUMBER\n")
    (tmp_path / "beside.py").write_text("NUMBER = 7\n")
    assert rewards_of(f"{tmp_path}/a file.py:f", ["5"]) == [7.0]


def test_a_function_of_lists_is_given_the_answers_to_one_prompt() -> None:
    rows = [{"text": text, "group": group} for text, group in (("1", 0), ("22", 0), ("333", 1), ("333", 1))]
    found = scores(rows, rewards={"rl_rewards:of_trl": 1.0})
    assert [row["rewards"]["rl_rewards:of_trl"] for row in found] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["waits", "waits_together"])
def test_a_function_that_waits_is_asked_about_many_answers_at_once(name: str) -> None:
    began = time.monotonic()
    assert rewards_of(f"rl_rewards:{name}", NUMBERS) == [float(number) for number in NUMBERS]
    assert time.monotonic() - began < 7.5  # 8 seconds in turn
    began = time.monotonic()
    assert rewards_of(f"rl_rewards:{name}", NUMBERS[:4], judge_concurrency=1) == [0.0, 1.0, 2.0, 3.0]
    assert time.monotonic() - began > 2.0


def test_a_function_that_computes_keeps_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = functions.FunctionProcess.start

    async def counted(process: functions.FunctionProcess) -> None:
        started.append(process)
        await start(process)

    monkeypatch.setattr(functions.FunctionProcess, "start", counted)
    assert rewards_of("rl_rewards:digits", NUMBERS) == [1.0] * 16
    assert len(started) == 1


def test_one_answer_of_an_async_function_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = rewards_of("rl_rewards:hangs_for_one", NUMBERS[:6], reward_seconds=1.0)
    assert hanging[:3] == [0.0, 1.0, 2.0] and hanging[4:] == [4.0, 5.0]
    assert hanging[3].startswith("reward 'rl_rewards:hangs_for_one' did not answer within 1 s")
    ending = rewards_of("rl_rewards:ends_for_one", NUMBERS[:6], judge_concurrency=2)
    assert "ended its process" in ending[3] and (ending[0], ending[5]) == (0.0, 5.0)


WITH_A_CHILD = """
import os, subprocess, sys, time

def reward(prompt, text, reference):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"])
    with open(text, "w") as file:
        print(os.getpid(), child.pid, file=file, flush=True)
    time.sleep(90)
"""
ASKER = """
import sys
from scored_rows import rewards_of

rewards_of(sys.argv[1], [sys.argv[2]])
"""


def pids_in(file: Path, *, count: int) -> list[int]:
    """The numbers that the function has written by now, or will have soon."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        pids = file.read_text().split() if file.is_file() else []
        if len(pids) == count:
            return [int(pid) for pid in pids]
        time.sleep(0.02)
    raise TimeoutError(f"{file} names no {count} processes")


def all_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    living = pids
    while living and time.monotonic() < deadline:
        living = [pid for pid in living if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        time.sleep(0.02)
    return not living


def test_what_a_function_has_started_ends_with_its_time(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WITH_A_CHILD)
    (said,) = rewards_of(f"{tmp_path}/own.py:reward", [str(tmp_path / "pids")], reward_seconds=2.0)
    assert "did not answer within 2 s" in said
    assert all_end(pids_in(tmp_path / "pids", count=2))


def test_nothing_of_a_function_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WITH_A_CHILD)
    command = [sys.executable, "-c", ASKER, f"{tmp_path}/own.py:reward", str(tmp_path / "pids")]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as asker:
        pids = pids_in(tmp_path / "pids", count=2)
        asker.kill()
    assert all_end(pids)
