"""All ranks give their memory back and take it again, together."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from small_groups import LIMIT, SIZES, gist, requests

from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.dormant import DormantMemory
from mbd_core.engine.parallel import leader
from mbd_core.engine.parallel.follow import run_follower
from mbd_core.engine.parallel.group import Rank
from mbd_core.engine.parallel.leader import start_parallel
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.model_config import Fp8Parts

pytestmark = pytest.mark.usefixtures("warm_followers")


def test_ranks_sleep_and_wake_up_together_or_not_at_all(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower has no memory when it is asked the first time."""
    monkeypatch.setattr(leader, "run_follower", run_follower_that_wakes_up_late)
    with closing(start_parallel(folders["dense"], SIZES, size=2, timeout=LIMIT)) as engine:
        before = engine.generate(requests(3))
        cache = engine.runner.cache
        size = cache.k.nbytes + cache.v.nbytes
        with pytest.raises(ValueError, match="needs an engine that sleeps"):
            engine.wake_up()
        engine.add(requests(1)[0])
        with pytest.raises(ValueError, match="needs an idle engine"):
            engine.sleep()
        engine.abort_all()
        for number in range(2):
            assert engine.sleep() == 2 * size
            assert engine.asleep and cache.k.untyped_storage().nbytes() == 0
            with pytest.raises(RequestRefused, match="wake it up first"):
                engine.add(requests(1)[0])
            with pytest.raises(ValueError, match="sleeps already"):
                engine.sleep()
            if number == 0:
                with pytest.raises(torch.OutOfMemoryError, match="wake up: rank 1: full"):
                    engine.wake_up()
                assert engine.asleep and cache.k.untyped_storage().nbytes() == 0
            Engine.wake_up(engine)  # as `AsyncEngine.call` does it
            assert not engine.asleep
            assert list(map(gist, engine.generate(requests(3)))) == list(map(gist, before))


def run_follower_that_wakes_up_late(folder: Path, rank: Rank, dtype: torch.dtype | None, fp8: Fp8Parts | None) -> None:
    restore, refusals = DormantMemory.restore, ["full"]

    def restore_later(memory: DormantMemory) -> None:
        if refusals:
            raise torch.OutOfMemoryError(refusals.pop())
        restore(memory)

    DormantMemory.restore = restore_later  # type: ignore[method-assign]
    run_follower(folder, rank, dtype, fp8)
