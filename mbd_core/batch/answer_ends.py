"""The ends of answers: a stop string ends the decoding of its request, as does the limit of tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.request import Output, Request, StepOutput
from mbd_core.decoding.canvas.canvas_decoder import canvas_max_tokens
from mbd_core.engine.engine import Engine

TextOf = Callable[[Sequence[int]], str]
Stops = Mapping[str, Sequence[str]]


def fit_request(request: Request, positions: int) -> Request:
    """The request with `max_tokens` reduced to the room after its prompt in a model with `positions`. If there is no
    room, the request is unchanged, and the engine refuses it."""
    max_tokens = positions - len(request.prompt)
    if max_tokens < 1:
        return request
    canvas = request.decoding.canvas
    if canvas is None:
        return replace(request, max_tokens=min(request.max_tokens, max_tokens))
    return replace(request, max_tokens=canvas_max_tokens(canvas, preferred=request.max_tokens, most=max_tokens))


def generate_until(engine: Engine, requests: Sequence[Request], stops: Stops, decode: TextOf) -> list[Output]:
    """The outputs of `requests`, in order. Raises the errors of `Engine.generate`.

    A request ends as soon as its text has one of its stop strings (`stops`, by the request's id). Its reason is then
    `stop`. Its tokens end with the token that completes the string, and its forwards with the step that committed this
    token. Its rollout ends there too, and has no tail.
    """
    if not any(stops.get(request.request_id) for request in requests):
        return engine.generate(list(requests))
    engine.check_idle("generate_until")
    for checked_request in [engine.admission.check(request) for request in requests]:
        engine.add_admitted(checked_request)
    answers = {request.request_id: request.nothing for request in requests}
    outputs: dict[str, Output] = {}
    with engine.pacer.without_streams():
        while engine.has_work:
            for step in engine.step():
                if step.request_id in outputs:
                    continue  # the step after an abort
                answers[step.request_id] += step.piece
                output = output_at(step, answers[step.request_id], stops.get(step.request_id, ()), decode)
                if output is not None:
                    outputs[step.request_id] = output
                    if step.output is None:
                        engine.abort(step.request_id)
    return [outputs[request.request_id] for request in requests]


def output_at(step: StepOutput, answer: Piece, stop: Sequence[str], decode: TextOf) -> Output | None:
    """The output, if a request with this answer ends with this step, at a stop string or by itself; else `None`."""

    def has_stop(number: int) -> bool:
        text = decode(answer.tokens[:number])
        return any(s in text for s in stop)

    if not stop or not has_stop(len(answer)):
        return step.output
    number = len(answer) - len(step.piece) + 1
    while not has_stop(number):
        number += 1
    return Output(
        request_id=step.request_id,
        finish_reason="stop",
        counts=replace(step.counts, num_tokens=number),
        piece=answer[:number],
    )
