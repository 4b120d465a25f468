"""What comes out of the engine: finished samples, step reports, streamed tokens, pins. Values only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One finished sample.

    cached_tokens: prompt tokens whose KV came from the tree (with n > 1 they count once per request,
    like prompt_tokens). ttft, seconds: wall-clock from add_request to the first token, to the end.
    logprobs: one per generated token; prompt_logprobs: from `logprob_start` on (None for token 0).
    finish_reason: "stop", "length", "abort" or "error" (then `error` says what). Each of n samples has an
    output, also where the request ended before they parted.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str
    ttft: float
    seconds: float
    logprobs: list[float]
    prompt_logprobs: list[float | None]
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. Request ids; tokens are counted over the whole batch.

    kind: "prefill", "decode", "mixed" or "idle". hit_tokens of prompt_tokens came from the cache,
    for the requests admitted in this step for the first time. again_hit_tokens of again_tokens did
    for those admitted again after a retraction (prompt and what was generated before it).
    new_token_ratio: what share of the tokens still to be generated admission reckons with.
    """

    index: int
    kind: str
    admitted: list[str]
    batch: list[str]
    finished: list[GenerationOutput]
    retracted: list[str]
    evicted_tokens: int
    hit_tokens: int
    prompt_tokens: int
    seconds: float
    again_hit_tokens: int = 0
    again_tokens: int = 0
    new_token_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamToken:
    """One new token of a streamed request. Texts joined together are the output's text.

    text: may be empty while a character or a stop text is not complete. finish_reason: None but for the
    last one of each sample. token_id: None in a last one that brings no token: the request was aborted or
    failed ("abort", "error"; then `error` says what), or no token was asked for. Its `text` is what had
    been held back.
    """

    request_id: str
    index: int
    token_id: int | None
    text: str
    finish_reason: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """A held prefix: `length` tokens of it are in the tree and stay there until `unpin` of its engine."""

    id: int
    length: int
    engine: Any = field(default=None, repr=False, compare=False)


class Outbox:
    """Outputs that no caller has been given yet, in the order in which they came."""

    def __init__(self) -> None:
        self._outputs: list[GenerationOutput] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def put(self, output: GenerationOutput) -> None:
        self._outputs.append(output)

    def take(self) -> list[GenerationOutput]:
        """All of them."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_of(self, request_ids: Collection[str]) -> list[GenerationOutput]:
        """Those of some requests; the others stay."""
        mine = [output for output in self._outputs if output.request_id in request_ids]
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
        return mine

    def put_back(self, outputs: Sequence[GenerationOutput]) -> None:
        """Taken, but not delivered: they come first again."""
        self._outputs = [*outputs, *self._outputs]
