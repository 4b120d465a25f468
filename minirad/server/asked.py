"""A parsed request becomes what the engine is asked for: prompts, sampling parameters, masks.

Refuses here what does not fit the model. Called in a thread that may take its time: a long prompt is
tokenised, a schema compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from minirad.cache.node import Slots
from minirad.command import one_line
from minirad.config import SamplingParams
from minirad.errors import said
from minirad.server.prompts import chat_prompt, completion_prompts, prompt_name
from minirad.server.protocol import ApiError, Body, Chat, Completion
from minirad.server.service import Service, Spec

USUAL_TOKENS = 16  # of a completion whose request names no max_tokens, as OpenAI has it


def completion_spec(body: Completion, service: Service) -> Spec:
    """Of a completion: as many prompts as it has."""
    engine, most = service.engine, service.limits.prompts
    if len(body.prompt) > most:
        raise ApiError(f"prompt: {len(body.prompt)} prompts in one request, at most {most}", param="prompt")
    prompts = completion_prompts(body, engine.tokenizing)
    params = []
    for at, prompt in enumerate(prompts):
        where = prompt_name(body, at)
        _check_ids(prompt, engine.runner.vocab_size, where)
        new = body.max_tokens
        if new is None:
            new = max(min(USUAL_TOKENS, _context(service) - len(prompt)), 1)
        _check_fits(len(prompt), new, service, where)
        params.append(_params(body, new, service, 0 if body.echo and body.logprobs is not None else None))
    return _spec(body, prompts, params, service, body.logprobs, ())


def chat_spec(body: Chat, service: Service) -> Spec:
    """Of a conversation: one prompt."""
    engine = service.engine
    prompt = chat_prompt(body, engine.tokenizing)
    new = body.max_completion_tokens or body.max_tokens
    if new is None:
        new = max(_context(service) - len(prompt), 1)
    _check_fits(len(prompt), new, service, "messages")
    masks = _format_mask(body.response_format, service)
    tops = (body.top_logprobs or 0) if body.logprobs else None
    return _spec(body, [prompt], [_params(body, new, service, None)], service, tops, masks)


def _context(service: Service) -> int:
    """Tokens of a prompt with its reply at most: the model's, or what the pool holds."""
    config = service.engine.config
    assert config.max_context is not None and config.kv_tokens is not None
    return min(config.max_context, config.kv_tokens)


def _spec(
    body: Body, prompts: Sequence[Slots], params: Sequence[SamplingParams], service: Service,
    tops: int | None, masks: Any,
) -> Spec:  # fmt: skip
    lora = body.adapter(dict(service.engine.config.lora))
    spec = Spec(tuple(prompts), tuple(params), body.stream, tops, masks, body.cache_salt, lora)
    if spec.samples > service.capacity:
        raise ApiError(
            f"n: {len(prompts)} prompts with n={body.n} are {spec.samples} replies; this server has "
            f"place for {service.capacity}", param="n",
        )  # fmt: skip
    return spec


def _params(body: Body, new: int, service: Service, logprob_start: int | None) -> SamplingParams:
    rows, vocab = service.engine.config.max_running, service.engine.runner.vocab_size
    if body.n > rows:
        raise ApiError(f"n: at most {rows} (the rows of this engine), got {body.n}", param="n")
    wrong = [token for token in body.stop_token_ids or () if token >= vocab]
    if wrong:
        raise ApiError(
            f"stop_token_ids: token id {wrong[0]} is outside the vocabulary of {vocab}",
            param="stop_token_ids",
        )
    try:
        return SamplingParams(
            max_new_tokens=new, temperature=body.temperature, top_p=body.top_p, top_k=max(body.top_k, 0),
            stop=body.stops, ignore_eos=body.ignore_eos, n=body.n,
            seed=None if body.seed is None else body.seed % (1 << 63), logprob_start=logprob_start,
            stop_token_ids=tuple(body.stop_token_ids or ()),
        )  # fmt: skip
    except ValueError as error:  # a stop text that is none
        raise ApiError(f"stop: {one_line(error)}", param="stop") from None


def _check_ids(prompt: Slots, vocab: int, param: str) -> None:
    outside = np.flatnonzero(prompt >= vocab)
    if len(outside):
        raise ApiError(
            f"{param}: token id {prompt[outside[0]]} is outside the vocabulary of {vocab}", param=param
        )


def _check_fits(length: int, new: int, service: Service, param: str) -> None:
    """In OpenAI's words, which clients look for."""
    limit = _context(service)
    if length == 0:
        raise ApiError(f"{param}: the prompt is empty: at least one token is needed", param=param)
    if length + new <= limit:
        return
    raise ApiError(
        f"This model's maximum context length is {limit} tokens. However, you requested {length + new} "
        f"tokens ({length} in the {param}, {new} in the completion). Please reduce the length of the "
        f"{param} or completion.", param=param, code="context_length_exceeded",
    )  # fmt: skip


def _format_mask(format: dict[str, Any] | None, service: Service) -> tuple[Any, ...]:
    """The mask that keeps a reply to its response_format; () where any text will do."""
    kind = None if format is None else format["type"]
    if format is None or kind == "text":
        return ()
    schema = {"type": "object"} if kind == "json_object" else format["json_schema"]["schema"]
    from minirad.grammar import json_mask  # llguidance, where it is installed

    engine = service.engine
    try:
        mask = json_mask(json.dumps(schema), engine.tokenizer, engine.eos_ids, engine.runner.vocab_size)
        mask([])  # some are found to be too large only when they are used
        return (mask,)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"response_format: {one_line(error)}", param="response_format") from None
    except ModuleNotFoundError as error:
        raise ApiError(f"response_format {said(kind)}: {one_line(error)}", param="response_format") from None
