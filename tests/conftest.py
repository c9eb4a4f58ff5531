"""What the tests share: the order in which workers take them, random tiny models, the folder of golden fixtures."""

import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mbd_core.multitf.recipes.recipe import TrainingRecipe

ROOT = Path(__file__).resolve().parent.parent
# What tests share, by subject: modules of these folders are imported by their names, in processes of their own too.
SUPPORT = sorted(map(str, (ROOT / "tests" / "support").iterdir()))
sys.path[:0] = SUPPORT

with suppress(ModuleNotFoundError):  # the tests on a GPU run without it
    from hypothesis import settings

    settings.register_profile("house", deadline=None)  # how long an example takes says how busy the machine is
    settings.load_profile("house")

# Ray reads these once, when it is imported, and its processes inherit them; a job's runtime_env would come too late
# and would keep workers from being started ahead.
os.environ.update(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_COLOR_PREFIX": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",  # beside other tests its processes would starve
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.1",
        # As in the manifests, and where jobs/serve.py starts Ray.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "actors.serving.proxy.middlewares",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *SUPPORT, os.environ.get("PYTHONPATH")])),
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fixtures DIR` (with a space). Pytest lists its fixtures under that name; here only `--funcargs` does."""
    group = parser.getgroup("mbd")
    group._arggroup.conflict_handler = "resolve"
    group.addoption(
        "--fixtures",
        dest="golden_fixtures",
        type=Path,
        metavar="DIR",
        default=ROOT / "tests" / "parity" / "fixtures",
        help="folder of golden fixtures (default: tests/parity/fixtures, seed 0)",
    )
    group.addoption(
        "--write-clients",
        action="store_true",
        help="write what tests/clients found: the table of docs/reference/clients.md and the bodies that were sent",
    )


# Rooms whose tests start Ray: under pytest-xdist the tests of such a room run in one process, in turn.
ONE_BY_ONE = ("cluster", "hosts", "observability", "ray")
# Files of `tests/ray` that serve nothing: they run in turn on a Ray of their own, beside the others.
RAY_JOBS = [
    f"tests/ray/test_{name}.py"
    for name in ("data_encoding", "eval_sweep", "killed_sweeps", "rl", "study_on_ray", "submitted_jobs", "train")
]
# When a test that is marked slow counts as hanging, in seconds; the others' limit is in pyproject.toml.
SLOW_SECONDS = 3_600


# CPU seconds of the scopes whose tests take longer than most, which take a fifth of a second each. By their number of
# tests these would start last, and one worker would end long after the others.
SCOPE_SECONDS = {
    "ray": 400,
    "ray without Serve": 200,
    "cluster": 60,
    "tests/benchmarks/capacity/test_arrivals.py": 15,
    "tests/benchmarks/gpu/test_gpu_day.py": 25,
    "tests/benchmarks/gpu/test_step_nodes.py": 10,
    "tests/benchmarks/test_modes.py": 10,
    "tests/checkpoint/test_shape_tokenizer.py": 20,
    "tests/decoding/blocks/test_block_buffer.py": 15,
    "tests/engine/test_adapters.py": 15,
    "tests/engine/test_exactness.py": 40,
    "tests/engine/test_graph_safety.py": 70,
    "tests/engine/test_guided_tokens.py": 20,
    "tests/engine/test_guided_verification.py": 30,
    "tests/engine/test_host_pages.py": 15,
    "tests/engine/test_two_sizes.py": 30,
    "tests/engine/test_verified_slots.py": 15,
    "tests/engine/test_weight_swap.py": 20,
    "tests/evaluation/tasks/test_real_benchmarks.py": 15,
    "tests/house/test_imports.py": 20,
    "tests/house/test_wheel.py": 15,
    "tests/multitf/step/test_layer_compilation.py": 25,
    "tests/ops/test_triton_compiled.py": 80,
    "tests/rl/test_loop.py": 30,
}


def scope_of(nodeid: str) -> str:
    """What runs in one process: a file, as what its tests share is made once a process; or a room in `ONE_BY_ONE`."""
    file = nodeid.partition("::")[0]
    room = file.removeprefix("tests/").partition("/")[0]
    if file in RAY_JOBS:
        return "ray without Serve"
    return room if room in ONE_BY_ONE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take scopes whole, in the order in which `pytest_collection_modifyitems` leaves them."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return ByFileOrRoom(config, log)


class Room(pytest.Package):
    """A folder whose fixtures of scope "package" end behind its last test. pytest asks for an `__init__.py` to do so:
    with one, `tests/ray` would hide Ray itself."""

    def setup(self) -> None:
        """There is no module to prepare."""


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return Room.from_parent(parent, path=path) if path == ROOT / "tests" / "ray" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes a million objects that stay; each search for garbage among them would take half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
    if "PYTEST_XDIST_WORKER" in os.environ:  # its worker's: one process alone keeps the order of the folders
        seconds = {scope: num / 5 for scope, num in Counter(scope_of(item.nodeid) for item in items).items()}
        seconds |= {scope: SCOPE_SECONDS[scope] for scope in seconds.keys() & SCOPE_SECONDS.keys()}
        items.sort(key=lambda item: -seconds[scope_of(item.nodeid)])


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights: 2 layers, hidden size 64, block size 4, the tasks' own tokenizer."""
    from mbd_core.checkpoint.saving import save_model
    from mbd_core.models.decoder import Decoder, init_weights
    from mbd_core.models.model_config import ModelConfig
    from mbd_core.multitf.data.prepared import TinyData, conversations
    from mbd_core.tasks.tiny_tokenizer import train_tokenizer

    config = ModelConfig(
        architecture="SDARForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        max_positions=512,
        tie_word_embeddings=True,
        mask_token_id=0,
        eos_token_ids=(1,),
        block_size=4,
    )
    model = Decoder(config)
    init_weights(model, seed=0, std=0.2)
    texts = itertools.chain.from_iterable(conversations(TinyData(per_task=200)))
    tokenizer = train_tokenizer(texts, vocab_size=config.vocab_size)
    folder = tmp_path_factory.mktemp("models") / "tiny-random"
    save_model(folder, model, tokenizer=tokenizer, generation={"buffer_size": 4, "tau_m2t": 0.9})
    return folder


@pytest.fixture(scope="session")
def large_model_dir(tiny_model_dir: Path) -> Path:
    """An autoregressive model, for which `tiny_model_dir` may draft: wider and deeper, with the same tokenizer."""
    from mbd_core.checkpoint.config import load_config
    from mbd_core.checkpoint.saving import save_model
    from mbd_core.checkpoint.tokenizer import load_tokenizer
    from mbd_core.models.decoder import Decoder, init_weights
    from mbd_core.models.model_config import NO_MASK

    small = load_config(tiny_model_dir)
    config = replace(
        small,
        architecture="Qwen3ForCausalLM",
        attention="causal",
        mask_token_id=NO_MASK,
        block_size=1,
        hidden_size=96,
        num_layers=3,
    )
    model = Decoder(config)
    init_weights(model, seed=1, std=0.2)
    folder = tiny_model_dir.parent / "large"
    save_model(folder, model, tokenizer=load_tokenizer(tiny_model_dir, small))
    return folder


@pytest.fixture(scope="session")
def tiny_recipe(tiny_model_dir: Path) -> "TrainingRecipe":
    """A training run of seconds from `tiny_model_dir`: 12 updates of 8 samples, in float32."""
    from mbd_core.multitf.config import TrainConfig
    from mbd_core.multitf.data.prepared import TinyData
    from mbd_core.multitf.recipes.recipe import TrainingRecipe
    from mbd_core.multitf.states.layout import StateConfig

    return TrainingRecipe(
        name="tiny-random",
        base=str(tiny_model_dir),
        model=None,
        data=TinyData(per_task=24),
        states=StateConfig(block_size=4, max_group=2, num_layouts=2, span="response", rounding="ceil"),
        train=TrainConfig(steps=12, batch_size=8, lr=2e-3, warmup=1, precision="float32"),
        max_length=400,
        generation={"buffer_size": 2, "tau_m2t": 0.9},
    )


@pytest.fixture(scope="module")
def unrendered_pictures() -> Iterator[Callable[..., None]]:
    """Pictures are made, and their files hold titles and numbers: rendering takes as long as a small run. Yields the
    function that renders."""
    from matplotlib.figure import Figure

    render = Figure.savefig

    def savefig(figure: Figure, target: Any, **_: Any) -> None:
        shown = [(a.get_title(), [(li.get_label(), li.get_xydata().tolist()) for li in a.lines]) for a in figure.axes]
        content = b"\x89PNG" + repr(shown).encode()
        if hasattr(target, "write"):
            target.write(content)
        else:
            Path(target).write_bytes(content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield render


@pytest.fixture
def rendered_pictures(unrendered_pictures: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the pictures themselves, where the others of its file render none."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", unrendered_pictures)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server in a process of its own, with the bucket `bucket`; the environment by which clients find it."""
    from object_store import running_server

    with running_server() as environment:
        yield environment


@pytest.fixture
def s3(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """`s3://bucket`, which is found through the environment."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return "s3://bucket"
