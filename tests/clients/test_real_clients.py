"""Clients of other people against this server: what they send by themselves is taken, and what comes back they read.

Each client of clients.toml is installed into a cache folder, once, and its program in programs/ is run for each kind.
The model answers nonsense, and a program fails for none of it: it fails where a client cannot read a reply.

    pytest -m slow tests/clients --write-clients

makes the table of docs/reference/clients.md and tests/serving/api/client_bodies.jsonl anew. Without the option, a
field that a client sends and that the file lacks is a failure.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_bodies import FILE, Body, bodies_of, read_bodies, write_bodies
from client_installs import CLIENTS, Client, NoRegistry, installed, run_program
from client_table import PAGE, with_table
from gateway_in_process import running_gateway
from recording_proxy import Exchange, recording_proxy

from actors.serving.args import ServingArgs
from mbd_core.checkpoint.shipped import model_folder

pytestmark = pytest.mark.slow

MODEL = "tiny-mbd"
POSITIONS = 131_072  # an agent's instructions and tools are long
CASES = [(client, kind) for client in CLIENTS for kind in client.kinds]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, with more positions than it was trained for."""
    folder = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(model_folder(MODEL), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return folder


@pytest.fixture(scope="module")
def endpoint(model_dir: Path) -> Iterator[tuple[str, list[Exchange]]]:
    model = {"model": str(model_dir), "name": MODEL, "engine": {"max_rows": 4, "num_pages": 9_000}}
    args = ServingArgs.read({"device": "cpu", "models": [model]})
    with running_gateway(args) as (url, _), recording_proxy(url) as recorded:
        yield recorded


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> Iterator[list[Body]]:
    """What the clients sent, which at the end takes the place of what is recorded, where that is asked for."""
    bodies: list[Body] = []
    yield bodies
    if request.config.getoption("write_clients"):
        fresh = {(body.client, body.kind) for body in bodies}
        kept = [body for body in read_bodies(FILE) if (body.client, body.kind) not in fresh]
        order = [(client.name, kind) for client, kind in CASES]
        known = [body for body in (*kept, *bodies) if (body.client, body.kind) in order]
        write_bodies(FILE, sorted(known, key=lambda body: order.index((body.client, body.kind))))
        PAGE.write_text(with_table(PAGE.read_text()))


@pytest.mark.parametrize(("client", "kind"), CASES, ids=[f"{client.name}-{kind}" for client, kind in CASES])
def test_a_client_is_served(
    client: Client,
    kind: str,
    endpoint: tuple[str, list[Exchange]],
    model_dir: Path,
    seen: list[Body],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    try:
        folder = installed(client)
    except NoRegistry as error:
        pytest.skip(str(error))
    url, exchanges = endpoint
    start = len(exchanges)
    done = run_program(client, kind, folder, url=f"{url}/v1", model=MODEL, model_dir=model_dir, work=tmp_path)
    own = exchanges[start:]
    assert [exchange.refusal for exchange in own if exchange.refusal] == []
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    came_back = json.loads(done.stdout.strip().splitlines()[-1])
    assert came_back, "the client got nothing"
    bodies = bodies_of(client.name, kind, own)
    assert bodies, "the client asked for no answer"
    seen += bodies
    if not request.config.getoption("write_clients"):
        known = {path for body in read_bodies(FILE) if body.route == bodies[0].route for path in body.fields}
        fresh = sorted({path for body in bodies if body.route == bodies[0].route for path in body.fields} - known)
        assert fresh == [], "the recorded bodies lack these fields; run with --write-clients"
