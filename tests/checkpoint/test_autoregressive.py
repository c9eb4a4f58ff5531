"""Autoregressive folders as transformers writes them: the same logits, and the same greedy tokens by any batch."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from thread_ranks import ThreadRanks
from torch import Tensor

from mbd_core.checkpoint.config import load_config, read_config, write_config
from mbd_core.checkpoint.folder import with_method
from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder
from mbd_core.models.shard import Shard
from mbd_core.ops.attention.whole import DenseAttention

LENGTH, NUM = 48, 12  # tokens of a prompt, and of an answer
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama, head size": ("Llama", {"head_dim": 16}),
    "llama, llama3": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}),
    "qwen2, linear": ("Qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, yarn": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
            },
        },
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "qwen3 moe, dense layers": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder that transformers wrote, and its own model of it."""
    kind, changes = CONFIGS[request.param]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **changes)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            tensor.normal_(0.0, 0.3) if tensor.ndim > 1 else tensor.normal_("norm" in name, 0.1)
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return folder, theirs


def logits_of(model: Decoder, ids_T: Tensor) -> Tensor:
    causal = DenseAttention(torch.ones(1, 1, len(ids_T), len(ids_T), dtype=torch.bool).tril())
    return model.logits(model(ids_T[None], torch.arange(len(ids_T))[None], causal)[0])


@torch.inference_mode()
def test_logits_are_those_of_transformers(case: tuple[Path, Any]) -> None:
    folder, theirs = case
    ids_T = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids_T[None]).logits[0]
    torch.testing.assert_close(logits_of(load_model(folder), ids_T), expected, rtol=1e-4, atol=1e-4)
    ranks = ThreadRanks(2)

    @torch.inference_mode()
    def part(rank: int) -> Tensor:
        return logits_of(load_model(folder, shard=Shard(rank=rank, size=2), reduce=ranks.reduce(rank)), ids_T)

    torch.testing.assert_close(ranks.run(part)[0], expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_file_of_llama_1_names_no_key_value_heads(tmp_path: Path) -> None:
    """Such files have `max_sequence_length`, which nobody reads, beside `max_position_embeddings`."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": SIZES["num_attention_heads"]})
    transformers.LlamaForCausalLM(config).eval().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = {**json.loads(file.read_text()), "max_sequence_length": 128}
    del written["num_key_value_heads"]
    file.write_text(json.dumps(written))
    theirs, ids_T = transformers.LlamaForCausalLM.from_pretrained(tmp_path), torch.arange(3, 3 + LENGTH)
    model = load_model(tmp_path)
    assert model.config.num_kv_heads == 4 and model.config.max_positions == 256
    torch.testing.assert_close(logits_of(model, ids_T), theirs(ids_T[None]).logits[0], rtol=1e-4, atol=1e-4)
    for other in ("mistral", "qwen2"):  # transformers takes 8 and 32 there, whatever the number of heads
        renamed = {**written, "model_type": other, "architectures": [f"{other.title()}ForCausalLM"]}
        for key in ("attention_bias", "mlp_bias", "max_sequence_length"):
            renamed.pop(key)
        with pytest.raises(ValueError, match="no 'num_key_value_heads'"):
            read_config(renamed)


# Their logits are compared above; the models that they vary are decoded here.
VARIANTS = ("llama, head size", "qwen2, linear", "qwen3 moe, dense layers")


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in CONFIGS],
    indirect=True,
)
def test_greedy_tokens_are_those_of_transformers(case: tuple[Path, Any]) -> None:
    """One by one, together, with prompts in chunks, from a warm prefix cache, after a preemption."""
    folder, theirs = case
    model, decoding = load_model(folder), DecodingConfig(block_size=1, causal=Causal(method="ar"))
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (5, 17, 40, 33)]
    expected = []
    for prompt in prompts:
        ids = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM, min_new_tokens=NUM)
        expected.append(tuple(ids[0, len(prompt) :].tolist()))
    requests = [
        Request(request_id=str(n), prompt=tuple(p), max_tokens=NUM, decoding=decoding, min_tokens=NUM)
        for n, p in enumerate(prompts)
    ]
    for rows, chunk in ((4, 4096), (1, 16), (3, 16)):
        engine = Engine(model, EngineConfig(max_rows=rows, num_pages=64, max_prefill_tokens=chunk))
        for _ in range(2):  # the second time from the prefix cache
            outputs = engine.generate(requests)
            assert [o.tokens for o in outputs] == expected
            assert {o.counts.num_forwards for o in outputs} == {NUM}, "one token a forward"
    engine = Engine(model, EngineConfig(max_rows=4, num_pages=64))
    for request in requests:
        engine.add(request)
    tokens = {}
    for number in range(200):
        tokens |= {step.request_id: step.output.tokens for step in engine.step() if step.output is not None}
        if number % 7 == 3:
            engine.preempt()
    assert [tokens[request.request_id] for request in requests] == expected


def test_a_config_is_written_as_it_is_read(case: tuple[Path, Any]) -> None:
    config = load_config(case[0])
    assert config.block_size == 1 and not config.has_mask and config.prefix_methods == ("ar",)
    assert read_config(write_config(config)) == config


def test_what_an_autoregressive_model_cannot_do_is_refused(case: tuple[Path, Any]) -> None:
    engine = Engine(load_model(case[0]), EngineConfig(max_rows=1, num_pages=16))
    plain = Request(request_id="0", prompt=(5,), max_tokens=4, decoding=DecodingConfig(block_size=1))
    with pytest.raises(RequestRefused, match="decodes with ar"):
        engine.add(plain)
    drafts = DecodingConfig(block_size=1, causal=Causal(method="dlm"))
    with pytest.raises(RequestRefused, match='"method": "ar"'):
        engine.add(replace(plain, decoding=drafts))
    token_by_token, digits = (
        DecodingConfig(block_size=1, causal=Causal(method="ar")),
        Grammar(syntax="regex", text="1"),
    )
    with pytest.raises(RequestRefused, match="without a tokenizer"):
        engine.add(replace(plain, decoding=token_by_token, grammar=digits))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Mistral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("Qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("Llama", {"attention_bias": True}, "attention_bias=True"),
        ("Llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ("Llama", {"hidden_size": 30}, "30 has no 4 equal heads"),
    ],
)
def test_another_network_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    written = json.loads(getattr(transformers, f"{kind}Config")(**SIZES).to_json_string())
    written |= {"architectures": [f"{kind}ForCausalLM"], **changes}
    written = {key: value for key, value in written.items() if key != "head_dim" or kind != "Llama"}
    with pytest.raises(ValueError, match=message):
        read_config(written)


OF_ADAPTED = pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "qwen3, yarn"], indirect=True)
ADAPTED = {"llama": "A2DLlamaLMHeadModel", "qwen2": "A2DQwen2LMHeadModel", "qwen3": "A2DQwen3LMHeadModel"}


def adapted(base: Path, folder: Path, *, generation: dict[str, Any] | None = None) -> Path:
    """The folder of an adapted base as dllm leaves it: another architecture, and a mask token in the tokenizer."""
    config = json.loads((base / "config.json").read_text())
    kind = config["model_type"]
    shutil.copytree(base, folder)
    written = {**config, "model_type": f"a2d-{kind}", "architectures": [ADAPTED[kind]]}
    (folder / "config.json").write_text(json.dumps(written))
    added = {"90": {"content": "<|mask|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"mask_token": "<|mask|>", "added_tokens_decoder": added})
    )
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@torch.inference_mode()
@OF_ADAPTED
@pytest.mark.parametrize("attention", ["block_causal", "full"])
def test_an_adapted_folder_is_its_base_under_another_mask(
    case: tuple[Path, Any], tmp_path: Path, attention: str
) -> None:
    """dllm's A2D layout: the logits of the same modules of transformers, which take the mask."""
    base, theirs = case
    generation = {"block_size": 8, "attention": attention}
    folder = adapted(base, tmp_path / "a2d", generation=generation)
    config = load_config(folder)
    assert config.mask_token_id == 90, "the tokenizer's"
    assert (config.block_size, config.attention, config.shift_logits) == (8, attention, False)
    assert with_method({}, config) == ({"canvas": {}} if attention == "full" else {})
    ids_T = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(1))
    block_T = torch.arange(LENGTH) // 8
    mask = block_T[:, None] >= block_T if attention == "block_causal" else torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    expected = theirs(ids_T[None], attention_mask=mask[None, None]).logits[0]
    model = load_model(folder)
    hidden = model(ids_T[None], torch.arange(LENGTH)[None], DenseAttention(mask[None, None]))
    torch.testing.assert_close(model.logits(hidden[0]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen3"], indirect=True)  # SDAR is Qwen3 with a mask
def test_an_adapted_folder_decodes_as_the_same_weights_in_sdars_layout(case: tuple[Path, Any], tmp_path: Path) -> None:
    a2d = load_model(adapted(case[0], tmp_path / "a2d", generation={"block_size": 8}))
    sdar = Decoder(replace(a2d.config, architecture="SDARForCausalLM")).eval()
    sdar.load_state_dict(a2d.state_dict())
    decoding = DecodingConfig(block_size=8, buffer_size=2, tau_m2t=0.5)
    requests = [
        Request(request_id=str(n), prompt=tuple(range(4, 9 + n)), max_tokens=20, decoding=decoding) for n in range(3)
    ]
    tokens = [
        [o.tokens for o in Engine(model, EngineConfig(max_rows=2, num_pages=32)).generate(requests)]
        for model in (a2d, sdar)
    ]
    assert tokens[0] == tokens[1]


BLOCK, MASK, EOS = 8, 90, 2


def literal_loop(theirs: Any, prompt: list[int], *, attention: str, num_blocks: int, steps: int) -> list[int]:
    """LLaDA's loop at temperature 0, a whole forward a step: of a block's masks the most confident become their
    likeliest tokens, as many in each of its `steps`. Under full attention all later blocks are there, as masks."""
    ids_T = torch.tensor(prompt + [MASK] * BLOCK * num_blocks)
    block_T = torch.arange(len(ids_T)) // BLOCK
    sees = (
        block_T[:, None] >= block_T if attention == "block_causal" else torch.ones(2 * ids_T.shape, dtype=torch.bool)
    )
    for block in range(len(prompt) // BLOCK, int(block_T[-1]) + 1):
        for _ in range(steps):
            logits = theirs(ids_T[None], attention_mask=sees[None, None]).logits[0]
            confidence_T, token_T = logits.softmax(-1).max(-1)
            confidence_T[(ids_T != MASK) | (block_T != block)] = -torch.inf
            best = confidence_T.topk(BLOCK // steps).indices
            ids_T[best] = token_T[best]
    return ids_T[len(prompt) :].tolist()


@torch.inference_mode()
@OF_ADAPTED
@pytest.mark.parametrize("attention", ["block_causal", "full"])
@pytest.mark.parametrize("steps", [8, 4, 1])
def test_an_adapted_folder_decodes_as_the_literal_loop_over_its_base(
    case: tuple[Path, Any], tmp_path: Path, attention: str, steps: int
) -> None:
    """Prompts are whole blocks: there dllm's grid, which pads a prompt on the left, and the engine's are one."""
    base, theirs = case
    model = load_model(adapted(base, tmp_path / "a2d", generation={"block_size": BLOCK, "attention": attention}))
    decoding = (
        DecodingConfig(block_size=BLOCK, buffer_size=1, tau_m2t=1.0, tokens_per_step=BLOCK // steps)
        if attention == "block_causal"
        else DecodingConfig(block_size=BLOCK, canvas=Canvas(block_length=BLOCK, accept="quota", steps=3 * steps))
    )
    draw = torch.Generator().manual_seed(0)
    expected: dict[tuple[int, ...], list[int]] = {}
    while len(expected) < 3:
        prompt = torch.randint(3, MASK, (BLOCK * (len(expected) + 1),), generator=draw).tolist()
        answer = literal_loop(theirs, prompt, attention=attention, num_blocks=3, steps=steps)
        if MASK not in answer:  # the loop may choose the mask, and the decoder may not
            expected[tuple(prompt)] = answer[: answer.index(EOS)] if EOS in answer else answer
    requests = [
        Request(request_id=str(n), prompt=prompt, max_tokens=3 * BLOCK, decoding=decoding)
        for n, prompt in enumerate(expected)
    ]
    outputs = Engine(model, EngineConfig(max_rows=2, num_pages=32)).generate(requests)
    assert [list(output.tokens) for output in outputs] == list(expected.values())


@OF_ADAPTED
def test_an_adapted_folder_without_a_mask_is_refused(case: tuple[Path, Any], tmp_path: Path) -> None:
    folder = adapted(case[0], tmp_path / "a2d")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="add it to generation_config"):
        load_config(folder)
    (folder / "generation_config.json").write_text('{"mask_token_id": 90, "attention": "sideways"}')
    with pytest.raises(ValueError, match="sideways"):
        load_config(folder)
