"""`load_engine` over several ranks: a model folder is served as over one."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_groups import LIMIT, child, gist, gone

from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.parallel.group import RankLost
from mbd_core.engine.parallel.leader import ParallelEngine
from mbd_core.serving.tokens.load import LoadedModel, load_engine

SIZES_OF_TINY = EngineConfig(max_rows=3, num_pages=48)


def asked(loaded: LoadedModel) -> list[Request]:
    prompts, methods = ((9, 9), (5, 6, 7, 8, 9, 10), (40,)), ({}, {"buffer_size": 1, "tau_m2t": 0.3}, {"t2t": {}})
    return [
        Request(request_id=f"r{i}", prompt=prompt, max_tokens=24, decoding=loaded.decoding(fields), logprobs=True)
        for i, (prompt, fields) in enumerate(zip(prompts, methods, strict=True))
    ]


def with_more_eos(tiny_model_dir: Path, folder: Path) -> Path:
    """A copy whose generation_config.json names one EOS id more than config.json, one that the model answers with."""
    shutil.copytree(tiny_model_dir, folder)
    with load_engine(folder, SIZES_OF_TINY) as loaded:
        (whole, *_) = loaded.engine.generate(asked(loaded))
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, whole.tokens[9]]}))
    return folder


def test_load_engine_over_two_ranks_serves_as_over_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The EOS ids that count are generation_config.json's on every rank: else the followers fall out of step."""
    folder = with_more_eos(tiny_model_dir, tmp_path / "model")
    with load_engine(folder, SIZES_OF_TINY) as one:
        wanted = one.engine.generate(asked(one))
        assert wanted[0].finish_reason == "stop" and len(wanted[0].tokens) < 10
        one.check_health()
    with load_engine(folder, SIZES_OF_TINY, tensor_parallel=2) as two:
        assert isinstance(two.engine, ParallelEngine)
        found = two.engine.generate(asked(two))
        pid = child(two.engine)
        two.check_health()
        assert (two.config, two.defaults) == (one.config, one.defaults)
        assert two.backend == f"{one.backend}, tensor parallel over 2 ranks"
    assert list(map(gist, found)) == list(map(gist, wanted))
    for two_ranks, one_rank in zip(found, wanted, strict=True):
        assert two_ranks.piece.logprobs == pytest.approx(one_rank.piece.logprobs, abs=1e-3)
    assert gone(pid) and not dist.is_initialized()
    with pytest.raises(RankLost):
        two.check_health()


def test_a_follower_s_death_is_known_before_anything_is_asked(tiny_model_dir: Path) -> None:
    with load_engine(tiny_model_dir, SIZES_OF_TINY, tensor_parallel=2) as loaded:
        assert isinstance(loaded.engine, ParallelEngine)
        loaded.check_health()
        os.kill(child(loaded.engine), signal.SIGKILL)
        deadline = time.monotonic() + LIMIT
        with pytest.raises(RankLost):  # noqa: PT012
            while time.monotonic() < deadline:
                loaded.check_health()
        with pytest.raises(RankLost) as caught:
            loaded.engine.generate(asked(loaded))
        assert caught.value.__notes__ == ["rank 1: ended by SIGKILL"]


def test_a_device_by_number_cannot_be_cut(tiny_model_dir: Path) -> None:
    with pytest.raises(ValueError, match="device=cuda:1"):
        load_engine(tiny_model_dir, SIZES_OF_TINY, device=torch.device("cuda:1"), tensor_parallel=2)
