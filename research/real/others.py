"""The base in the engines of other projects, for comparison with this project's arms: one request, greedy, on this
machine."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import Dtype


@dataclass(frozen=True, kw_only=True)
class ArmReply:
    """A text, its tokens, and the forwards that made them."""

    text: str
    tokens: int
    forwards: int


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


def check_llama_cpp(file: Path) -> None:
    """Raises `ValueError` if there is no such file, or no llama.cpp to read it."""
    if not file.is_file():
        raise ValueError(f"--llama-cpp {file} is no file: name the model's GGUF file (the model's wheel may hold one)")
    try:
        importlib.import_module("llama_cpp")
    except ImportError as error:
        raise ValueError(
            f"--llama-cpp needs the package llama-cpp-python: pip install llama-cpp-python ({error})"
        ) from None


def by_llama_cpp(file: Path, *, max_tokens: int) -> Callable[[str], ArmReply]:
    """The base by llama.cpp's greedy decoding of a GGUF file, on as many threads as PyTorch has."""
    import torch
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    network = Llama(str(file), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def ask(question: str) -> ArmReply:
        network.reset()  # no request gets the keys of an earlier request
        turns = [{"role": "user", "content": question}]
        reply = network.create_chat_completion(turns, temperature=0.0, repeat_penalty=1.0, max_tokens=max_tokens)
        choice, tokens = reply["choices"][0], reply["usage"]["completion_tokens"]
        num_ends = int(choice["finish_reason"] == "stop")
        return ArmReply(text=choice["message"]["content"], tokens=tokens, forwards=tokens + num_ends)

    return ask
