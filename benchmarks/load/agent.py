"""The turns of an agent's session: how much of the prompt the cache has, and the time to the first tokens by part."""

from __future__ import annotations

import asyncio
import json as json_module
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tqdm import tqdm

from benchmarks.commands import BenchmarkOptions
from benchmarks.load.agent_session import CLIENT_SECONDS, SESSIONS, AgentSession, agent_tools, all_tools, result_text
from benchmarks.load.endpoints import own_endpoint
from benchmarks.measuring import interleaved, markdown
from mbd_core.command_line import CommandText, Fields, command
from mbd_core.fields import DATA, MODEL, Flag, Ge
from mbd_core.models.shapes import SHAPES

if TYPE_CHECKING:
    from mbd_core.serving.server.engine_service import EngineService
    from mbd_core.serving.server.model_route import ModelRoute

TURNS = {
    "turn": "turn",
    "prompt": "prompt tokens",
    "new": "not found",
    "first_seconds": "TTFT (s)|.2f",
    "seconds": "answer (s)|.2f",
}
SHOWN = (1, 2, 3, 5, 10, 20, 30, 40)
PARTS = {
    "parse": "the body parsed",
    "tokenise": "templated and tokenised",
    "grammar": "grammar, at the gateway and at the engine",
    "route": "pages hashed at the gateway",
    "schedule": "the scheduler: pages hashed, found, taken",
    "steps": "the engine's other work, which is its forwards",
}
FORWARDS = "forwards"
CHARACTERS_A_TOKEN = 4
REPEATS = BenchmarkOptions(repeats=8, threads=1)


def run(
    command_line: CommandText,
    *,
    model: Annotated[str, Flag(f"A shape, with random weights: {', '.join(SHAPES)}.", MODEL)] = "sdar-50m",
    route: Annotated[Literal["messages", "chat"], Flag("Whose client asks: Anthropic's or OpenAI's.", MODEL)] = (
        "messages"
    ),
    tool_characters: Annotated[int, Ge(1), Flag("Characters of all tools.", DATA)] = 100_000,
    turns: Annotated[int, Ge(3), Flag("Turns of the session.", DATA)] = 50,
    asked: Annotated[
        tuple[Annotated[int, Ge(1)], ...],
        Flag("Turns that are sent; the answers of the other turns are made up (default: all).", DATA, commas=True),
    ] = (),
    result_characters: Annotated[int, Ge(16), Flag("Characters of a call's result, a turn's new text.", DATA)] = 300,
    answer_tokens: Annotated[int, Ge(32), Flag("Tokens of an answer, at most.", DATA)] = 128,
    measuring: Annotated[BenchmarkOptions, Fields("repeats", "threads", "json")] = REPEATS,
) -> None:
    """An agent's session: every turn sends all tools and all messages, the answer is a call, and the next turn has its
    result.

    The official client asks our endpoint over HTTP. Then turn 2 and the last turn are sent again, alternately, with
    other results, so that their times can be compared. Last, both turns run in this process, which times their parts:
    the gateway's work, the scheduler's, and the forwards. The shape's positions are raised to the session's length,
    and its tokenizer has learned the words of the tools.
    """
    import torch

    from mbd_core.checkpoint.saving import save_random
    from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer

    measuring.begin()
    if model not in SHAPES:
        raise ValueError(f"--model {model} must be one of {', '.join(SHAPES)}")
    if asked and max(asked) > turns:
        raise ValueError(f"--asked {max(asked)} must be at most --turns {turns}")
    tools = agent_tools(tool_characters)
    tokenizer = shape_tokenizer(SHAPES[model], lessons=[json_module.dumps(tool) for tool in all_tools()])
    size = SHAPES[model].block_size
    text = json_module.dumps(tools) + result_text(0, result_characters) * turns
    length = (len(tokenizer(text)["input_ids"]) * 5 // 4 + turns * answer_tokens * 2) // size * size
    config = replace(SHAPES[model], max_positions=length)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-agent-")))
        save_random(config, scratch / model, tokenizer=tokenizer, dtype=torch.bfloat16)
        threads = measuring.threads or 1
        options = ["--model", str(scratch / model), "--threads", str(threads), "--max-rows", "2"]
        options += ["--num-pages", str(2 * length // size), "--request-seconds", str(CLIENT_SECONDS)]
        with own_endpoint(options, log=scratch / "serve.log") as endpoint:
            session = SESSIONS[route](endpoint.url, model, tools, answer_tokens=answer_tokens)
            rows: list[dict[str, Any]] = []
            for number in tqdm(range(1, turns + 1), unit="turn", desc="turns"):
                result = result_text(number, result_characters)
                if asked and number not in asked:
                    session.made_up_turn(number, result)
                else:
                    rows.append({"turn": number, **asdict(session.turn(result))})
            shown = [row for row in rows if row["turn"] in (*SHOWN, *asked, turns)]
            print(f"{model}, /v1/{route}, {len(tools)} tools of {tool_characters} characters\n")
            print(markdown(shown, TURNS) + "\n")
            compared = [2, turns]
            new = {turn: session.again(turn, result_text("again", result_characters)).new for turn in compared}
            lengths = result_lengths(result_characters, new, block_size=size, repeats=measuring.repeats)
            again = _asked_again(session, lengths)
            print(markdown(again, {**TURNS, "over_first": "TTFT / turn 2's|.2f"}) + "\n")
        torch.set_num_threads(threads)
        bodies = bodies_of(session, lengths)
        inside, forwards = asyncio.run(inside_rows(scratch / model, route, bodies, num_pages=2 * length // size))
        for row in inside:
            row["part"] = PARTS[row["part"]]
        columns = {str(number): f"turn {number} (ms)|.1f" for number in compared}
        print(markdown(inside, {"part": "part of the TTFT", **columns, "share": f"of turn {turns}'s|.1%"}))
        [steps] = (row for row in inside if row["part"] == PARTS["steps"])
        second, last = (steps[str(number)] / forwards[number] for number in compared)
        counts = ", ".join(f"turn {number}: {mean:.2f}" for number, mean in forwards.items())
        print(f"\nforwards before the first tokens: {counts}; turn {turns}'s take {last / second:.2f} times turn 2's")
    measuring.write(
        command_line, {"torch": torch.__version__}, turns=rows, again=again, inside=inside, forwards=forwards
    )


def result_lengths(characters: int, new: Mapping[int, int], *, block_size: int, repeats: int) -> dict[int, list[int]]:
    """For each turn the characters of `repeats` results, so that turns are compared at equal new text.

    `new` are the tokens of each turn that were not found, for results of one length. They differ by the part of a
    page in which the text before the result ends; a turn that has fewer gets a longer result. Where in a block a
    prompt ends decides whether one forward or two come before the first tokens, so lengths spread over a block.
    """
    most = max(new.values())
    return {
        turn: [
            characters + CHARACTERS_A_TOKEN * (most - tokens + block_size * number // repeats)
            for number in range(repeats)
        ]
        for turn, tokens in new.items()
    }


def _asked_again(session: AgentSession, lengths: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """The means of turns that are sent alternately, each time with a result of another length."""
    left = {turn: list(of_turn) for turn, of_turn in lengths.items()}

    def again(turn: int) -> dict[str, Any]:
        length = left[turn].pop()
        return asdict(session.again(turn, result_text(f"again {turn} {length}", length)))

    repeats = min(map(len, lengths.values()))
    runs = interleaved({str(turn): partial(again, turn) for turn in lengths}, repeats=repeats)
    rows = [
        {
            "turn": turn,
            **{name: statistics.fmean(run[name] for run in runs[str(turn)]) for name in runs[str(turn)][0]},
        }
        for turn in lengths
    ]
    for row in rows:
        row["over_first"] = row["first_seconds"] / rows[0]["first_seconds"]
    return rows


# -- the parts, in this process -----------------------------------------------------------------------------------


def bodies_of(session: AgentSession, lengths: Mapping[int, Sequence[int]]) -> dict[int, list[bytes]]:
    """A body of each turn for each length of its result, after one that has the last of these lengths, too."""
    return {
        turn: [
            json_module.dumps(
                session.body(session.messages_of(turn, result_text(f"inside {turn} {number}", length)))
            ).encode()
            for number, length in enumerate([of_turn[-1], *of_turn])
        ]
        for turn, of_turn in lengths.items()
    }


async def inside_rows(
    folder: Path, kind: str, bodies: dict[int, list[bytes]], *, num_pages: int
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """The mean seconds of each part until a turn's first tokens, and the part's share of the last turn's total; and
    each turn's mean number of forwards until then.

    The first bodies store the prompts. `kind` is the route.
    """
    from mbd_core.engine.config import EngineConfig
    from mbd_core.serving.server.engine_service import EngineService
    from mbd_core.serving.tokens.endpoint_args import EndpointArgs

    args = EndpointArgs(model=str(folder), engine=EngineConfig(max_rows=2, num_pages=num_pages)).checked()
    service = EngineService(args)
    try:
        return await _rows(service, kind, bodies)
    finally:
        await service.stop()


async def _rows(
    service: EngineService, kind: str, bodies: dict[int, list[bytes]]
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    from mbd_core.serving.server.model_route import ModelRoute

    route = ModelRoute(service.served_model(), logging.getLogger(__name__))
    for turn in sorted(bodies, reverse=True):  # the longest prompt first: it stores the beginning of the other prompts
        await _parts(route, service, kind, bodies[turn][0])
    runs: dict[int, list[dict[str, float]]] = {turn: [] for turn in bodies}
    for number in range(1, len(next(iter(bodies.values())))):
        for turn, of_turn in bodies.items():
            runs[turn].append(await _parts(route, service, kind, of_turn[number]))
    route.stop()
    means = {
        turn: {part: statistics.fmean(run[part] for run in of_turn) for part in of_turn[0]}
        for turn, of_turn in runs.items()
    }
    *_, last = means
    total = sum(means[last][part] for part in PARTS)
    return [
        {"part": part, **{str(turn): means[turn][part] for turn in means}, "share": means[last][part] / total}
        for part in PARTS
    ], {turn: of_turn[FORWARDS] for turn, of_turn in means.items()}


async def _parts(route: ModelRoute, service: EngineService, kind: str, body: bytes) -> dict[str, float]:
    """The seconds of each part until the first tokens of a request, and the forwards; the request is then ended."""
    from mbd_core.serving.api.messages import MessagesRequest
    from mbd_core.serving.api.parsing import parse
    from mbd_core.serving.api.requests import ChatRequest
    from mbd_core.serving.tokens.prefix_affinity import leading_pages

    watch, engine = Stopwatch(), service.loaded.engine
    with watch.part("parse"):
        chat = parse(MessagesRequest, body).chat if kind == "messages" else parse(ChatRequest, body)
    with watch.part("tokenise"):
        [request] = route.tokenized(route.with_defaults(chat), seed=0).requests
    with watch.part("grammar"):
        await route.check_grammar(chat, [request])
        admitted = replace(engine.admission.check(request), guide=engine.compile(request))
    with watch.part("route"):
        leading_pages(request, page_size=engine.page_size)
    scheduler = engine.scheduler
    names = ("add", "admit", "grow", "prefill", "publish_chunks", "commit")
    plain = {name: getattr(scheduler, name) for name in names}
    for name, method in plain.items():
        setattr(scheduler, name, watch.watched("schedule", method))
    try:
        with watch.part("steps"):
            engine.add_admitted(admitted)
            forwards = 1
            while not any(step.piece.tokens for step in engine.step()):
                forwards += 1
    finally:
        for name in names:
            delattr(scheduler, name)
    engine.abort(request.request_id)
    watch.seconds["steps"] -= watch.seconds["schedule"]
    return {**watch.seconds, FORWARDS: forwards}


class Stopwatch:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block's seconds."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose seconds are counted."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        return watched


main = command(run, "python -m benchmarks agent")
