"""DiffusionGemma: forwards over stored pages, part by part, and decoding with the reference's draws.

Shape legend: T tokens, D hidden, E experts, P positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mbd_core.checkpoint.loading import load_model
from mbd_core.engine.pages import PagedKVCache
from mbd_core.engine.runner import ModelRunner, Rows, pack
from mbd_core.models.decoder import Decoder
from mbd_core.models.gemma import GemmaRouter
from mbd_core.ops.attention.choice import resolve

PAGE, PAGES = 8, (5, 2, 9, 1, 7, 4, 3, 11, 6, 10, 12, 8, 13)
ATOL = {"layer": 1e-4, "router": 1e-5, "keys": 1e-4, "values": 1e-4, "embedded": 1e-5, "conditioned": 1e-5}
LOGITS_ATOL = 1e-3


def check_context(folder: Path, case: dict[str, Any]) -> None:
    """Causal rows, whole and in chunks: the logits of their hidden states, and what the cache holds of each layer."""
    inputs, name = case["inputs"], case["name"]
    run = Forward(folder)
    chunks = inputs.get("chunks", [len(inputs["input_ids"])])
    for stop in _ends(chunks):
        seen = run.store(inputs["input_ids"][:stop])
    stored = {f"keys{i}": run.stored(i, 0) for i in range(run.model.config.num_layers)}
    stored |= {f"values{i}": run.stored(i, 1) for i in range(run.model.config.num_layers)}
    run.compare(case, name, seen | stored)


def check_canvas(folder: Path, case: dict[str, Any]) -> None:
    """A canvas behind stored rows, twice: it changes nothing that is stored."""
    inputs, name = case["inputs"], case["name"]
    run = Forward(folder)
    for stop in _ends(inputs["encoder_chunks"]):
        run.store(inputs["prompt"][:stop])
    logits_PV = None
    if inputs["self_conditioning"] and inputs.get("self_conditioning_mask", True):
        logits_PV = run.expected[f"{name}.self_conditioning_logits"]
    for _ in range(2):
        run.compare(case, name, run.denoise(inputs["canvas"], logits_PV))


def _ends(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


class Forward:
    """A model over the pages of one sequence, and the case's tensors."""

    def __init__(self, folder: Path) -> None:
        self.model: Decoder = load_model(folder)
        self.expected = load_file(folder / "logits.safetensors")
        self.length = 0
        c, cpu = self.model.config, torch.device("cpu")
        self.cache = PagedKVCache(c, num_pages=14, page_size=PAGE, dtype=torch.float32, device=cpu)
        attention = resolve(cpu, torch.float32, c.head_dim, PAGE)
        self.runner = ModelRunner(self.model, self.cache, attention, num_rows=1, num_positions=PAGE * len(PAGES))

    def store(self, tokens: list[int]) -> dict[str, Tensor]:
        """Store what is not stored yet, in a causal row."""
        seen = self._forward(tokens[self.length :], causal=True)
        self.length = len(tokens)
        return seen

    def denoise(self, canvas: list[int], logits_PV: Tensor | None) -> dict[str, Tensor]:
        """A canvas conditioned on the logits of the forward before, if there was one."""
        c = self.model.config
        expected_PD = torch.zeros(len(canvas), c.hidden_size)
        if logits_PV is not None:
            with torch.inference_mode():
                expected_PD = self.model.expected_embedding(logits_PV.view(len(canvas), -1).softmax(-1))
        return self._forward(canvas, causal=False, expected_TD=expected_PD)

    def _forward(self, tokens: list[int], *, causal: bool, expected_TD: Tensor | None = None) -> dict[str, Tensor]:
        stop = self.length + len(tokens)
        rows = Rows(
            tokens_T=torch.tensor(tokens),
            positions_T=torch.arange(self.length, stop),
            lengths_K=[len(tokens)],
            kv_lens_K=torch.tensor([stop]),
            causal_K=torch.tensor([causal]),
            pages_KP=torch.tensor([PAGES]),
            stored_K=torch.ones(1, dtype=torch.bool),
            logits_at_A=torch.arange(len(tokens)),
            expected_TD=expected_TD,
        )
        seen: dict[str, Tensor] = {}
        with _watched(self.model, seen):
            hidden_TD = self.runner.forward(pack([rows], page_size=PAGE))
        seen["embedded" if causal else "conditioned"] = seen.pop("input")
        return seen | {"hidden": hidden_TD, "": self.runner.logits(hidden_TD)}

    def stored(self, layer: int, which: int) -> Tensor:
        """Keys or values of a layer (heads, T, C) as the reference's cache has them: those that a later token sees."""
        pages = self.cache.layers[layer][which][list(PAGES)].flatten(0, 1)[: self.length].transpose(0, 1)
        window = self.model.config.window_of(layer)
        return pages if window is None else pages[:, -(window - 1) :]

    def compare(self, case: dict[str, Any], name: str, seen: dict[str, Tensor]) -> None:
        """Every tensor of the case."""
        for key in case["tensors"]:
            part = key.removeprefix(name).removeprefix(".")
            if part == "self_conditioning_logits":
                continue
            atol = ATOL.get(part.rstrip("0123456789"), LOGITS_ATOL)
            wanted = self.expected[key]
            torch.testing.assert_close(seen[part].view_as(wanted), wanted, atol=atol, rtol=1e-4)


@contextmanager
def _watched(model: Decoder, seen: dict[str, Tensor]) -> Iterator[None]:
    """Record the input of layer 0, each layer's output, and its router's probabilities."""

    def layer_hook(number: int, module: nn.Module, args: tuple[Any, ...], output: list[Tensor]) -> None:
        if number == 0:
            seen["input"] = args[0][0]
        seen[f"layer{number}"] = output[0]

    def router_hook(number: int, module: GemmaRouter, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        seen[f"router{number}"] = module.logits(module.scaled(args[0])).softmax(-1)

    handles = []
    for number, layer in enumerate(model.model.layers):
        handles.append(layer.register_forward_hook(partial(layer_hook, number)))
        handles.append(layer.router.register_forward_hook(partial(router_hook, number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


CHECKS: dict[tuple[str, str], Callable[[Path, dict[str, Any]], None]] = {
    ("diffusiongemma", "enc"): check_context,
    ("diffusiongemma", "dec"): check_canvas,
}
