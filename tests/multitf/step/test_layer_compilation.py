"""Compiled layers: the losses of eager ones, and compilations that do not grow with the lengths of batches.

Most tests take `aot_eager`, which traces as inductor does and generates no code.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, random_model
from gloo_workers import started
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.mask import dual_stream_sees, whole_sequence_sees
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.step import compute as layer_compilation
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.ops.attention import whole as attention_flex
from mbd_core.ops.attention.whole import FlexAttention, block_mask

B = 4
LENGTHS = (16, 24, 40, 32, 20, 48, 28, 36, 12, 44, 52, 56)


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(layer_compilation, "BACKEND", counter)
    return counter


def trainer(family: str, *, compile: bool, states: StateConfig | None = None, **settings) -> Trainer:
    """Samples of a dozen lengths, two at once."""
    rng = random.Random(0)
    examples = [Example(tuple(rng.randrange(2, 300) for _ in range(n)), 5) for n in LENGTHS for _ in range(2)]
    config = TrainConfig(
        **{"steps": 12, "batch_size": 2, "lr": 1e-3, "precision": "float32", "compile": compile} | settings
    )
    return Trainer(random_model(FAMILIES[family]), examples, states or StateConfig(block_size=B, max_group=2), config)


@pytest.mark.parametrize(
    ("family", "again", "graphs"),
    [
        pytest.param("sdar", True, 2, id="dense layers, computed again"),
        pytest.param("sdar", False, 2, id="dense layers", marks=pytest.mark.slow),
        pytest.param("llada2", False, 4, id="experts", marks=pytest.mark.slow),
        pytest.param("llada2", True, 4, id="experts, computed again", marks=pytest.mark.slow),
    ],
)
def test_the_losses_are_the_eager_ones_and_lengths_compile_nothing(
    family: str, again: bool, graphs: int, compilations: CompileCounterWithBackend
) -> None:
    """A layer is one graph; of the kind with experts the projections and the shared expert are one each. The last
    layer's is one more, because its MLP has the predicted tokens alone."""
    eager, compiled = (trainer(family, compile=c, activation_checkpointing=again) for c in (False, True))
    lengths, counts = [], []
    for step in range(6):
        lengths.append(compiled.batch(step).stream.shape[1])
        expected, found = eager.step(), compiled.step()
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        counts.append(compilations.frame_count)
    assert len(set(lengths)) >= 5
    assert 1 <= counts[1] == counts[-1] <= graphs


@pytest.mark.slow
def test_roll_outs_and_single_samples_compile_once_more_each(compilations: CompileCounterWithBackend) -> None:
    """With gradients and without, one sample at once and two, of the last layer and the others: nothing else
    multiplies the compilations."""
    states = StateConfig(block_size=B, max_group=2, self_denoising="both", labels="answer")
    for micro_batch in (2, 1):
        compiled = trainer("sdar", compile=True, states=states, micro_batch=micro_batch)
        for _ in range(3):
            compiled.step()
    assert 2 <= compilations.frame_count <= 8


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_adapter_is_trained_in_compiled_layers(dropout: float, compilations: CompileCounterWithBackend) -> None:
    lora = LoraSettings(rank=2, dropout=dropout)
    eager, compiled = (trainer("sdar", compile=c, lora=lora, activation_checkpointing=True) for c in (False, True))
    counts = []
    for _ in range(4):
        expected, found = eager.step(), compiled.step()
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        counts.append(compilations.frame_count)
    assert 1 <= counts[1] == counts[-1] <= 3


def test_weights_keep_their_names() -> None:
    names = [list(trainer("sdar", compile=c).model.state_dict()) for c in (False, True)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_inductor_s_losses_are_the_eager_ones() -> None:
    eager, compiled = (trainer("sdar", compile=c) for c in (False, True))
    for _ in range(3):
        assert compiled.step().loss == pytest.approx(eager.step().loss, rel=1e-4)


@pytest.mark.slow
def test_two_workers_train_compiled_layers_as_eager_ones(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Replicated weights, and sharded ones, which are gathered around the compiled layer."""
    with started("compiled_pair.py", str(tiny_model_dir), str(tmp_path / "losses.json")) as workers:
        assert [worker.wait(300.0) for worker in workers] == [0, 0]
    found = json.loads((tmp_path / "losses.json").read_text())
    for sharding in ("replicated", "sharded"):
        assert len(found[f"{sharding} eager"]) == 3
        assert found[f"{sharding} compiled"] == pytest.approx(found[f"{sharding} eager"], rel=1e-5)


@pytest.fixture
def counted_flex(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """The kernel of a GPU, compiled here by a backend that runs its eager reference."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    counter = CompileCounterWithBackend("eager")
    compile: Callable = torch.compile  # which torch's eager reference calls too, with a backend of its own

    def counted(function: Callable, *, backend: Callable | str = counter, **settings: bool) -> Callable:
        return compile(function, backend=backend, **settings)

    monkeypatch.setattr(torch, "compile", counted)
    attention_flex._compiled.cache_clear()
    yield counter
    attention_flex._compiled.cache_clear()


def test_flex_attention_is_compiled_twice_for_a_dozen_lengths(counted_flex: CompileCounterWithBackend) -> None:
    """Once for masks of one block of 128 tokens, a size that torch makes no symbol of, and once for all others."""
    attend: Callable = attention_flex._compiled(flex_attention, fullgraph=True)
    states = StateConfig(block_size=B, max_group=2)
    for number, length in enumerate(LENGTHS):
        examples = [Example(tuple(range(2, length + 2)), 5) for _ in range(2)]
        batch = build_batch(examples, states, mask_token_id=1, rngs=[random.Random(number)] * 2)
        samples, tokens = batch.stream.shape
        sees = dual_stream_sees(batch.stream, batch.block, batch.first)
        mask = block_mask(sees, batch=samples, length=tokens, device=batch.stream.device)
        q, k, v = (torch.randn(samples, tokens, heads, 16) for heads in (4, 2, 2))
        eager: Tensor = FlexAttention(mask)(0, q, k, v)
        with torch.no_grad():
            found = attend(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask, enable_gqa=True)
        torch.testing.assert_close(found.transpose(1, 2), eager)
    assert counted_flex.frame_count == 2


def test_a_compiled_layer_compiles_flex_attention_with_it(
    compilations: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards alone: torch has no gradients of it on a CPU."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    model = random_model(FAMILIES["sdar"])
    states = StateConfig(block_size=B, max_group=2)
    plain: list[Tensor] = []
    for compiled in (False, True):
        if compiled:
            layer_compilation.compile_layers(model)
        for number, length in enumerate(LENGTHS[:6]):
            examples = [Example(tuple(range(2, length + 2)), 5) for _ in range(2)]
            batch = build_batch(examples, states, mask_token_id=1, rngs=[random.Random(number)] * 2)
            sees = dual_stream_sees(batch.stream, batch.block, batch.first)
            mask = block_mask(sees, batch=2, length=batch.stream.shape[1], device=batch.stream.device)
            with torch.no_grad():
                hidden = model(batch.input_ids, batch.positions, FlexAttention(mask))
            if not compiled:
                plain.append(hidden)
            else:
                torch.testing.assert_close(hidden, plain[number], rtol=1e-4, atol=1e-5)
    assert 1 <= compilations.frame_count <= 2


def test_layers_are_compiled_inside_of_what_wraps_them() -> None:
    """Hooks stay eager, FSDP2's among them: a layer's call is its own, and only what it calls is compiled."""
    model = random_model(FAMILIES["sdar"])
    layer_compilation.compile_layers(model)
    assert all(type(layer)._call_impl is nn.Module._call_impl for layer in model.model.layers)
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


@pytest.fixture
def little_room() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


@pytest.mark.parametrize("compiles_masks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_flex_attention_compiles_more_variants_than_torch_s_own_limit(
    compiles_masks: bool, counted_flex: CompileCounterWithBackend, little_room: None
) -> None:
    """Numbers of samples and kinds of masks: none of them ends in the reference or an error."""
    attend: Callable = attention_flex._compiled(flex_attention, fullgraph=True)
    create: Callable = attention_flex._compiled(create_block_mask) if compiles_masks else create_block_mask
    counts = []
    for samples in (1, 2, 3) if compiles_masks else (1, 2):
        for whole in (False, True):
            streams = torch.zeros(samples, 260, dtype=torch.int64)
            sees = whole_sequence_sees(streams) if whole else dual_stream_sees(streams, streams, streams + 1)
            before = counted_flex.frame_count
            mask = create(sees, samples, None, 260, 260, device=torch.device("cpu"))
            counts.append(counted_flex.frame_count - before)
            q, k, v = (torch.randn(samples, heads, 260, 16) for heads in (4, 2, 2))
            with torch.no_grad():
                attend(q, k, v, block_mask=mask, enable_gqa=True)
    assert counted_flex.frame_count - sum(counts) >= 2
    assert sum(counts) >= 2 if compiles_masks else counted_flex.frame_count > 2 and sum(counts) == 0, counts
