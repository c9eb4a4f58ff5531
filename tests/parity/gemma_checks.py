"""DiffusionGemma: forwards over stored pages, part by part, and decoding with the reference's draws.

Shape legend: T tokens, D hidden, E experts, P positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from block_checks import loaded, with_config
from safetensors.torch import load_file
from torch import Tensor, nn

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.causal_config import Renoise
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.causal.renoise import CanvasReading, Noise, RenoisingDecoder, accept_within
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.pages import PagedKVCache
from mbd_core.engine.step.batch import BatchRows, pack
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.models.decoder import Decoder
from mbd_core.models.gemma import Denoising, GemmaRouter
from mbd_core.ops.attention.choice import resolve
from mbd_core.plain_loops import PlainRun, run_renoise

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
        rows = BatchRows(
            tokens_T=torch.tensor(tokens),
            positions_T=torch.arange(self.length, stop),
            lengths_K=[len(tokens)],
            kv_lens_K=torch.tensor([stop]),
            causal_K=torch.tensor([causal]),
            pages_KP=torch.tensor([PAGES]),
            stored_K=torch.ones(1, dtype=torch.bool),
            logits_at_A=torch.arange(len(tokens)),
            denoising=None
            if expected_TD is None
            else Denoising(torch.ones(len(tokens), dtype=torch.bool), expected_TD),
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


def check_generation(folder: Path, case: dict[str, Any]) -> None:
    """Every step of every canvas in the plain loop, and the same answers from the engine, cut at `max_tokens`."""
    inputs, expected = case["inputs"], case["expected"]
    tensors, name = load_file(folder / "logits.safetensors"), case["name"]
    eos = inputs["eos_token_id"]
    model = with_config(loaded(folder), eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))
    rows = inputs.get("prompts") or [inputs["prompt"]]
    requests, plain = [], []
    for row, prompt in enumerate(rows):
        several = "prompts" in inputs
        recorded = Recorded(inputs, len(prompt), row if several else None)
        steps = [] if several else _flat(expected["canvas"])
        request = Request(
            request_id=str(row),
            prompt=tuple(prompt),
            max_tokens=inputs["max_new_tokens"],
            decoding=renoise(inputs),
            sampling=Sampling(seed=row),
            logprobs=True,
        )
        requests.append(request)
        whole = -(-inputs["max_new_tokens"] // inputs["canvas_length"]) * inputs["canvas_length"]
        seen = Seen(inputs["entropy_bound"])
        run = run_renoise(
            model,
            replace(request, max_tokens=whole),
            noise=recorded,
            first=_given(inputs, tensors),
            watch=seen,
        )
        plain.append(run)
        wanted = (expected["output"][row] if several else expected["output"])[len(prompt) :]
        ends = [i for i, token in enumerate(wanted) if token in model.config.eos_token_ids]
        assert run.tokens == (wanted[: ends[0]] if ends else wanted)
        assert run.num_forwards == (expected["row_forwards"][row] if several else expected["decoder_forwards"])
        if not several:
            assert seen.canvases == steps
            assert seen.accepted == _flat(expected["accepted"])
            assert seen.bests == _flat(expected["argmax"])
            entropy = torch.cat(seen.entropies).view_as(tensors[f"{name}.entropy"])
            torch.testing.assert_close(
                entropy, tensors[f"{name}.entropy"], atol=expected["tolerance"]["entropy"], rtol=0
            )
    if "first_canvas" not in inputs:
        check_engine(model, inputs, requests, plain)


def check_engine(model: Decoder, inputs: dict[str, Any], requests: list[Request], plain: list[PlainRun]) -> None:
    """All rows in one batch, the prompts in chunks."""

    def recorded(seed: int, size: int) -> Noise:
        return Recorded(inputs, len(requests[seed].prompt), seed if "prompts" in inputs else None)

    with patch("mbd_core.decoding.causal.renoise.PositionNoise", recorded):
        config = EngineConfig(max_rows=len(requests), max_prefill_tokens=model.config.block_size)
        outputs = Engine(model, config).generate(requests)
    for output, run, request in zip(outputs, plain, requests, strict=True):
        assert list(output.tokens) == run.tokens[: request.max_tokens]
        assert output.counts.num_forwards == run.num_forwards and output.finish_reason == run.finish_reason
        assert output.piece.logprobs == pytest.approx(run.log_probs[: request.max_tokens], abs=1e-3)


def _flat(canvases: list[list[Any]]) -> list[Any]:
    return [step for canvas in canvases for step in canvas]


def renoise(inputs: dict[str, Any]) -> DecodingConfig:
    return DecodingConfig(
        block_size=inputs["canvas_length"],
        renoise=Renoise(
            steps=inputs["max_denoising_steps"],
            entropy_bound=inputs["entropy_bound"],
            t_max=inputs["t_max"],
            t_min=inputs["t_min"],
            stability=inputs["stability_threshold"],
            tau_entropy=inputs["confidence_threshold"],
        ),
    )


def _given(inputs: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    if "first_canvas" not in inputs:
        return None
    logits = tensors[inputs["first_self_conditioning"]]
    return torch.tensor(inputs["first_canvas"]), logits.view(len(inputs["first_canvas"]), -1)


class Recorded:
    """The case's draws, of one row where it has several; the canvas is told from the position."""

    def __init__(self, inputs: dict[str, Any], start: int, row: int | None) -> None:
        self._draws, self._start, self._row = inputs["draws"], start, row
        self._size = inputs["canvas_length"]

    def fresh(self, position_P: Tensor, step: int) -> Tensor:
        canvas = (int(position_P[0]) - self._start) // self._size
        return self._of(self._draws["initial"][canvas] if step < 0 else self._draws["renoise"][canvas][step])

    def drawn(self, log_p_PV: Tensor, position_P: Tensor, step: int) -> Tensor:
        canvas, offset = divmod(int(position_P[0]) - self._start, self._size)
        return self._of(self._draws["sampled"][canvas][step])[offset : offset + len(log_p_PV)]

    def _of(self, draws: list[Any]) -> Tensor:
        return torch.tensor(draws if self._row is None else draws[self._row])


class Seen:
    """What each forward of a plain run began with and said."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self.canvases: list[list[int]] = []
        self.accepted: list[list[int]] = []
        self.bests: list[list[int]] = []
        self.entropies: list[Tensor] = []

    def __call__(self, decoder: RenoisingDecoder, reading: CanvasReading) -> None:
        self.canvases.append(decoder.canvas_L.tolist())
        self.bests.append(reading.best_L.tolist())
        self.entropies.append(reading.entropy_L)
        self.accepted.append(accept_within(reading.entropy_L, self._bound).nonzero()[:, 0].tolist())


CHECKS: dict[tuple[str, str], Callable[[Path, dict[str, Any]], None]] = {
    ("diffusiongemma", "enc"): check_context,
    ("diffusiongemma", "dec"): check_canvas,
    ("diffusiongemma", "gen"): check_generation,
}
