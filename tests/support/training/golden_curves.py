"""Curves of 20 updates on the CPU, each number as its bits. `MADE_WITH` writes them anew.

Which bits come out is up to torch's build and the CPU it runs on, so the file says on what it was made (`Arithmetic`).
A change of the file is a change of what is trained: say in its commit which one, and why.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from family_models import FAMILIES, random_model
from torch.nn import functional as F
from trainer_state import D2F_STATES

from mbd_core.files import write_json
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.step.trainer import Trainer

MADE_WITH = "PYTHONPATH=tests/support/models python tests/support/training/golden_curves.py"
FILE = Path(__file__).resolve().parents[2] / "multitf" / "step" / "golden_curves.json"
STEPS = 20
MULTITF = StateConfig(block_size=4, max_group=3, num_random=1, num_layouts=3, rounding="ceil")
ADAMW = TrainConfig(
    steps=STEPS, batch_size=4, lr=5e-3, warmup=2, precision="float32", optimizer="adamw", schedule="cosine"
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Arithmetic:
    """What decides about a curve's bits beside this project: torch's build, the CPU's instructions, their results."""

    torch: str
    cpu: str
    probes: str

    @classmethod
    @one_thread()
    def here(cls) -> "Arithmetic":
        """Of this process; `probes` is a digest of a few of torch's operations, of the sizes that the curves have."""
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(4, 96, 16, generator=draws, requires_grad=True)
        weight = torch.randn(24, 16, generator=draws)
        y = F.silu(F.linear(x, weight)) @ weight
        heads = y.unflatten(-1, (2, 8)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=torch.zeros(96, 96))
        loss = F.cross_entropy(out.transpose(1, 2).flatten(0, 1).flatten(-2), torch.zeros(384, dtype=torch.long))
        loss.backward()
        assert x.grad is not None
        narrow = weight.bfloat16() @ weight.bfloat16().T
        probes = sha256()
        for tensor in (y, out, loss, x.grad, narrow.float(), weight.exp(), weight.cos(), torch.rsqrt(weight.square())):
            probes.update(tensor.detach().contiguous().numpy().tobytes())
        return cls(torch.__version__, torch.backends.cpu.get_cpu_capability(), probes.hexdigest())


def samples() -> list[Example]:
    """Samples of 3 to 8 blocks of 4, with prompts that end within blocks."""
    rng = random.Random(0)
    lengths = [4 * rng.randrange(3, 9) for _ in range(12)]
    return [Example(tuple(rng.randrange(2, 300) for _ in range(n)), rng.randrange(1, n // 2)) for n in lengths]


def multitf() -> Trainer:
    """MultiTF's own: systematic and random layouts, cross-entropy, Muon."""
    train = replace(ADAMW, optimizer="muon", schedule="trapezoid")
    return Trainer(random_model(FAMILIES["sdar"]), samples(), MULTITF, train)


def denoised() -> Trainer:
    """DMax's OPUT on experts, computed sample by sample and again in the backward pass."""
    states = replace(MULTITF, max_group=2, num_random=0, labels="answer", self_denoising="both")
    train = replace(ADAMW, micro_batch=1, activation_checkpointing=True)
    return Trainer(random_model(FAMILIES["llada2"]), samples(), states, train)


def blockwise() -> Trainer:
    """SDAR's weights, pooled over the batch, over the response alone."""
    states = replace(MULTITF, weighting="self_normalised", span="response", schedule="sorted_uniform")
    return Trainer(random_model(FAMILIES["sdar-moe"]), samples(), states, ADAMW)


def distilled() -> Trainer:
    """D2F: an adapter with dropout learns from the network without it, whose logits predict the next token."""
    train = replace(ADAMW, distillation="student_teacher", lora=LoraSettings(rank=4, alpha=8, dropout=0.1))
    return Trainer(random_model(FAMILIES["dream"]), samples(), D2F_STATES, train)


RUNS: dict[str, Callable[[], Trainer]] = {run.__name__: run for run in (multitf, denoised, blockwise, distilled)}


def curve(name: str) -> list[list[str]]:
    """Loss and gradients' norm of each update, in hexadecimal: no digit is rounded."""
    with one_thread():
        trainer = RUNS[name]()
        points = [trainer.step() for _ in range(STEPS)]
    return [[metrics.loss.hex(), metrics.grad_norm.hex()] for metrics in points]


def main() -> None:
    content = {"made_with": MADE_WITH, "arithmetic": asdict(Arithmetic.here())}
    write_json(FILE, {**content, "curves": {name: curve(name) for name in RUNS}})


if __name__ == "__main__":
    sys.exit(main())
