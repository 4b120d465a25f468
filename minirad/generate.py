"""`generate` and `stream`: run an engine until some requests are done, and lose nothing of the others.

What finishes lies in the engine's outbox until a caller takes it: `step` takes all of it for its report,
`generate` and `stream` only what is theirs. So one that is interrupted leaves none of its requests behind,
and the others' outputs are in the next report. engine.py finds this file by name (rooms.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from minirad import errors
from minirad.config import SamplingParams, sampling
from minirad.outputs import GenerationOutput, StreamToken
from minirad.parts import Prompt
from minirad.schedule.request import Request

if TYPE_CHECKING:
    from minirad.engine import Engine


def generate(
    engine: Engine, prompts: Prompt | Sequence[Prompt], params: Any, extra_key: Hashable, lora: str = ""
) -> list[GenerationOutput]:
    """Runs prompts to their end; outputs in their order, samples by index."""
    requests = _requests(engine, prompts, params, extra_key, lora)
    try:
        try:
            engine.enqueue(requests)
            order = {request.group: at for at, request in enumerate(requests)}
            while any(request.group in order for request in engine.scheduler.requests()):
                engine.advance()
            mine = engine.outbox.take_of(order)
            return sorted(mine, key=lambda output: (order[output.request_id], output.index))
        except BaseException:
            engine.leave([request.group for request in requests])
            raise
    except BaseException:  # Ctrl-C once more, while they were being left
        engine.leave([request.group for request in requests])
        raise


class _Listener:
    """What a stream is told of its request: tokens as they are sampled, outputs as they come."""

    def __init__(self) -> None:
        self.fresh: deque[tuple[int, int]] = deque()  # index, token
        self.finished: dict[int, GenerationOutput] = {}

    def token(self, request: Request, token: int) -> None:
        self.fresh.append((request.index, token))

    def ended(self, output: GenerationOutput) -> None:
        self.finished[output.index] = output


def stream(engine: Engine, request: Request) -> Iterator[StreamToken]:
    """Yields a new request's tokens as they are sampled. Others may drive the engine between two of them."""
    heard = request.listener = _Listener()
    texts = [engine.tokenizing.stream(request.params.stop) for _ in range(request.params.n)]
    try:
        try:
            engine.enqueue([request])
            yield from _pieces(engine, request, heard, texts)
        finally:
            engine.leave([request.group])
    except BaseException:  # Ctrl-C while it was being left
        engine.leave([request.group])
        raise


def _pieces(
    engine: Engine, request: Request, heard: _Listener, texts: Sequence[Any]
) -> Iterator[StreamToken]:
    rid, ended = request.group, set[int]()
    while heard.fresh or len(heard.finished) < request.params.n:
        if not heard.fresh:
            engine.advance()
            continue
        index, token = heard.fresh.popleft()
        done = heard.finished.get(index)
        if done is None or len(done.token_ids) > texts[index].count + 1:
            yield StreamToken(rid, index, token, texts[index].add(token))
        else:
            ended.add(index)
            yield StreamToken(rid, index, token, texts[index].end(done.text), done.finish_reason, done.error)
    for index, done in sorted(heard.finished.items()):
        if index not in ended:  # it ended without a token of its own: aborted, an error
            yield StreamToken(rid, index, None, texts[index].end(done.text), done.finish_reason, done.error)


def _requests(
    engine: Engine, prompts: Prompt | Sequence[Prompt], params: Any, extra_key: Hashable, lora: str
) -> list[Request]:
    """One for each prompt; params: for all, or one for each. All are checked before any is queued."""
    many = _as_prompts(prompts)
    if params is None or isinstance(params, SamplingParams):
        params = [sampling(params)] * len(many)
    if not isinstance(params, Sequence) or isinstance(params, str):
        sampling(params)  # says what it should have been
    if len(params) != len(many):
        raise ValueError(f"{len(many)} prompts but {len(params)} sampling parameters")
    take = engine.intake.request
    return [take(each, param, extra_key, lora=lora) for each, param in zip(many, params, strict=True)]


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several: a text is one, and so is a row of ids."""
    errors.prompts(prompts)
    if isinstance(prompts, str) or (len(prompts) and _is_id(prompts[0])):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _is_id(value: Any) -> bool:
    """A single number, as far as it looks, and no row of them: so it is a prompt that it begins."""
    try:
        return not isinstance(value, str) and np.ndim(value) == 0
    except ValueError:  # rows of different lengths: a wrong prompt, and refused as that
        return False
