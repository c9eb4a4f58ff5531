"""What FP8 weights cost a model in accuracy, and what they save in memory.

    python jobs/fp8_report.py --model tiny-mbd --parts all --json out/fp8.json

Text of the model's own tokenizer (both tasks' test problems with their solutions), or random ids where a folder has
none, goes through the model as it is stored and with FP8 weights. Compared are the raw logits at the same positions,
half of each solution: once all tokens are shown, once those positions are masked as in decoding. Errors are absolute.
"""

import argparse
import dataclasses
import itertools
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mbd_core.bench.tables import markdown, write_json
from mbd_core.checkpoint.loading import TOKENIZER_FILES, load_config, load_model, load_tokenizer
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.quantize import Parts, quantize_weights, weight_bytes
from mbd_core.ops.attention_dense import DenseAttention
from mbd_core.ops.fp8 import logit_error
from mbd_core.tasks import code_mini, gsm_mini

COLUMNS = {
    "model": "model",
    "parts": "FP8",
    "inputs": "inputs",
    "positions": "positions",
    "max_abs": "largest error|.4f",
    "mean_abs": "mean error|.4f",
    "logit_std": "logits' std|.3f",
    "top1_agreement": "top-1 agreement|.2%",
    "mean_kl": "mean KL (nats)|.2e",
}
RANDOM_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sequence of tokens and the positions, ascending, at which logits are compared."""

    tokens: list[int]
    asked: list[int]


def samples(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None, *, prompts: int, seed: int
) -> list[Sample]:
    """`prompts` sequences, the same for the same seed; half of each one's solution is asked for."""
    rng = random.Random(seed)
    pairs = _random_pairs(config, rng, prompts) if tokenizer is None else _task_pairs(tokenizer, prompts, seed)
    out = []
    for prompt, answer in pairs:
        tokens = (prompt + answer)[: config.max_positions]
        answered = range(min(len(prompt), len(tokens) - 1), len(tokens))
        out.append(Sample(tokens, sorted(rng.sample(answered, -(-len(answered) // 2)))))
    return out


def _random_pairs(config: ModelConfig, rng: random.Random, prompts: int) -> list[tuple[list[int], list[int]]]:
    special = {config.mask_token_id, *config.eos_token_ids}
    ids = [i for i in range(config.vocab_size) if i not in special]
    half = min(RANDOM_LENGTH, config.max_positions) // 2
    return [(rng.choices(ids, k=half), rng.choices(ids, k=half)) for _ in range(prompts)]


def _task_pairs(tokenizer: PreTrainedTokenizerBase, prompts: int, seed: int) -> list[tuple[list[int], list[int]]]:
    gsm = ((p["question"], p["answer"]) for p in gsm_mini.generate(split="test", seed=seed))
    code = ((p["prompt"], p["canonical_solution"]) for p in code_mini.generate(split="test", seed=seed))
    both = itertools.chain.from_iterable(zip(gsm, code, strict=False))
    return [(_opening(tokenizer, user), _ids(tokenizer, answer)) for user, answer in itertools.islice(both, prompts)]


def _opening(tokenizer: PreTrainedTokenizerBase, user: str) -> list[int]:
    """The tokens in front of the assistant's answer; a tokenizer without a chat template gets the bare text."""
    if tokenizer.chat_template is None:
        return _ids(tokenizer, user + "\n")
    chat = [{"role": "user", "content": user}]
    return _ids(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def logits(model: Decoder, asked: Sequence[Sample], *, masked: bool) -> Tensor:
    """Logits (A, V - 1) on the CPU that predict the positions asked for; the mask's own, never predicted, left out."""
    c, device, out = model.config, model.model.norm.weight.device, []
    for sample in asked:
        tokens, at = torch.tensor(sample.tokens), torch.tensor(sample.asked)
        if masked:
            tokens[at] = c.mask_token_id
        positions = torch.arange(len(tokens), device=device)
        blocks = positions // c.block_size if c.attention == "block_causal" else torch.zeros_like(positions)
        attend = DenseAttention((blocks[None, :] <= blocks[:, None])[None, None])
        hidden = model(tokens.to(device)[None], positions[None], attend)[0]
        rows = (at - 1).clamp(min=0) if c.shift_logits else at
        row_V = model.logits(hidden[rows.to(device)]).float().cpu()
        out.append(torch.cat((row_V[:, : c.mask_token_id], row_V[:, c.mask_token_id + 1 :]), dim=1))
    return torch.cat(out)


def report(
    folder: Path, *, parts: Parts | None, prompts: int, seed: int, device: torch.device
) -> list[dict[str, Any]]:
    """One row for shown and one for masked inputs; without `parts` the experts are rounded, or all if there are none.

    Raises `ValueError` for a folder or parts that cannot be had.
    """
    config = load_config(folder)
    if parts == "experts" and config.moe is None:
        raise ValueError(f"--parts experts: the {config.architecture} in {folder} has no experts; use --parts all")
    parts = parts or ("all" if config.moe is None else "experts")
    model = load_model(folder, dtype=torch.float32 if device.type == "cpu" else None, device=device)
    with_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(folder, config) if with_tokenizer else None
    asked = samples(config, tokenizer, prompts=prompts, seed=seed)
    before = weight_bytes(model)
    wide = {masked: logits(model, asked, masked=masked) for masked in (False, True)}
    quantize_weights(model, parts)
    rows = []
    for masked, expected in wide.items():
        error = logit_error(expected, logits(model, asked, masked=masked))
        rows.append(
            {
                "model": folder.name,
                "parts": parts,
                "inputs": ("masked" if masked else "clean") + (" text" if with_tokenizer else " random ids"),
                **dataclasses.asdict(error),
                "logit_std": float(expected.std()),
                "bytes_before": before,
                "bytes_after": weight_bytes(model),
                "dtype": str(model.model.norm.weight.dtype).removeprefix("torch."),
                "device": device.type,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shipped model's name, or a model folder")
    parser.add_argument("--parts", choices=("experts", "all"), help="what is rounded (default: experts if it has any)")
    parser.add_argument("--prompts", type=int, default=16, help="sequences compared (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="F", help="also write the rows to this file")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if args.prompts < 1:
            raise ValueError(f"--prompts {args.prompts} must be at least 1")
        folder = model_folder(args.model)
        rows = report(folder, parts=args.parts, prompts=args.prompts, seed=args.seed, device=device)
        if args.json is not None:
            command = "python jobs/fp8_report.py " + shlex.join(sys.argv[1:] if argv is None else argv)
            write_json(args.json, {"command": command, "torch": torch.__version__, "rows": rows})
    except (ValueError, OSError) as error:
        print(f"fp8_report: {error}", file=sys.stderr)
        return 2
    print(markdown(rows, COLUMNS))
    after, before, dtype = rows[0]["bytes_after"], rows[0]["bytes_before"], rows[0]["dtype"]
    print(f"\nweights: {after:,} bytes, {before:,} before ({after / before:.2f} of {dtype})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
