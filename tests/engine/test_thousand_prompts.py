"""A thousand prompts of a task on shipped weights in float32: verified answers are those of block size 1, without a
difference."""

import dataclasses

import pytest
from test_verified_decoding import EXACT, at_block_size_1

from mbd_core.checkpoint.chat import question_prompt
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.serving.tokens.load import load_engine

SIZES = EngineConfig(max_rows=32, num_pages=32 * 32, dtype="float32", buffer_size=2)


@pytest.mark.slow
def test_verified_answers_of_a_shipped_model_are_those_of_block_size_1() -> None:
    problems = load_problems(find_task("gsm-mini"), split="valid", seed=0, limit=1000).problems
    with load_engine(model_folder("tiny-bd"), SIZES) as loaded:
        requests = [
            Request(
                request_id=str(number),
                prompt=tuple(question_prompt(loaded.tokenizer, problem.prompt)),
                max_tokens=32,
                decoding=DecodingConfig(block_size=1),
            )
            for number, problem in enumerate(problems)
        ]
        assert len({r.prompt for r in requests}) > 950
        alone = Engine(at_block_size_1(loaded.engine.model), SIZES, vocab_limit=len(loaded.tokenizer))
        wanted = alone.generate(requests)
        for slots in (1, 2):
            decoding = DecodingConfig(block_size=loaded.engine.block_size, buffer_size=slots, verify=EXACT)
            found = loaded.engine.generate([dataclasses.replace(r, decoding=decoding) for r in requests])
            differing = [
                r.request_id
                for r, o, w in zip(requests, found, wanted, strict=True)
                if (o.tokens, o.finish_reason) != (w.tokens, w.finish_reason)
            ]
            tokens_each = sum(len(o.tokens) for o in found) / sum(o.counts.num_forwards for o in found)
            print(f"{slots} slots: {len(differing)} of {len(found)} differ, {tokens_each:.2f} tokens a forward")
            assert not differing, slots
