"""Samples of generated data: written once on a machine, read by all of its workers, the same as by one alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from gloo_workers import started
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import chat_prompt, question
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.data import prepared
from mbd_core.multitf.data.prepared import PreparedExamples, TinyData, conversations, write_conversations
from mbd_core.multitf.step.workers import ALONE

SECONDS = 120


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model_dir, load_model(tiny_model_dir).config)


def reports(out: Path, *sentence: str) -> list[dict[str, Any]]:
    """What two workers say."""
    with started("machine_folder.py", str(out), *sentence) as workers:
        assert [worker.wait(timeout=SECONDS) for worker in workers] == [0, 0]
    return [json.loads((out / str(rank)).read_text()) for rank in range(2)]


def test_one_worker_of_a_machine_writes_the_folder_of_all(tmp_path: Path) -> None:
    first, second = reports(tmp_path)
    (folder,) = first["wrote"]
    assert second["wrote"] == []
    assert first["seen"] == second["seen"] == "whole"
    assert first["folder"] == second["folder"] == folder and not Path(folder).exists()


def test_what_cannot_be_written_is_said_by_all(tmp_path: Path) -> None:
    first, second = reports(tmp_path, "sample 7 is too long")
    assert first["seen"] == second["seen"] == "sample 7 is too long"
    assert not Path(first["wrote"][0]).exists()


def test_a_full_disk_is_one_sentence_with_a_way_out() -> None:
    def write(folder: Path) -> None:
        folders.append(folder)
        raise OSError(28, "No space left on device")

    folders: list[Path] = []
    sentence = "the training samples cannot be written: .*No space left on device; TMPDIR names another place"
    with pytest.raises(ValueError, match=sentence), ALONE.folder_of_machine(write):
        pass
    assert not folders[0].exists()


def test_the_samples_are_the_conversations_in_their_order(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = 64
    monkeypatch.setattr(prepared, "BATCH", batch)
    data = TinyData(per_task=batch)  # of two tasks: two batches
    with ALONE.folder_of_machine(
        lambda folder: write_conversations(folder, tokenizer, data, block_size=8, max_length=512)
    ) as folder:
        examples = PreparedExamples(folder, block_size=8, max_length=512)
    assert not folder.exists() and len(examples) == 2 * batch
    pairs = list(conversations(data))
    for number in (0, 1, batch - 1, batch, 2 * batch - 1):
        user, answer = pairs[number]
        prompt = chat_prompt(tokenizer, question(user))
        response = tokenizer(answer, add_special_tokens=False)["input_ids"]
        fill = -(len(prompt) + len(response) + 1) % 8 + 1
        assert examples[number].tokens == (*prompt, *response, *[tokenizer.eos_token_id] * fill)
        assert examples[number].prompt_length == len(prompt)


def test_a_sample_that_does_not_fit_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    data = TinyData(per_task=4, tasks=("gsm-mini",))
    with pytest.raises(ValueError, match="max_length=16"):
        write_conversations(tmp_path, tokenizer, data, block_size=8, max_length=16)
