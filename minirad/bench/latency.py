"""When requests come, when each piece of their answers came, and what is reported of that.

The figures, and their names, are those of vLLM's and SGLang's `bench_serving`, to be laid side by side:

* TTFT: from sending a request to its first piece.
* ITL: between two pieces of one answer, all of all answers together (pieces, not tokens: a server may put
  two tokens into one).
* TPOT: (E2E - TTFT) / (tokens - 1), one figure for each answer of two tokens or more.
* E2E: from sending to the last piece that brought output (a last message with the usage only is none).
* throughput: what the requests that succeeded had, over the time from the first request's moment until all
  had ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Timeline:
    """One request and its answer; times in seconds since the run began.

    due: when it should be sent; sent: when it was. pieces: when each came. error: "" for one that succeeded.
    """

    due: float = 0.0
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    error: str = ""


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each of `count` requests is sent, in seconds: a Poisson process of `rate` a second; inf: all at 0.

    As vLLM does it the gaps are scaled so that the last request comes after count / rate seconds: else the
    throughput at one rate would differ by the luck of the draw.
    """
    if math.isinf(rate):
        return [0.0] * count
    moments = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    scaled: list[float] = (moments * (count / rate / moments[-1])).tolist()
    return scaled


def _three(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile in milliseconds; None where nothing was measured."""
    if not seconds:
        return {f"{which} {name} (ms)": None for which in ("Mean", "Median", "P99")}
    row = 1000 * np.asarray(seconds)
    return {
        f"Mean {name} (ms)": float(row.mean()),
        f"Median {name} (ms)": float(np.median(row)),
        f"P99 {name} (ms)": float(np.percentile(row, 99)),
    }


def report(lines: Sequence[Timeline], seconds: float) -> dict[str, float | None]:
    """All figures of one run of `seconds`, by the names that vLLM and SGLang print."""
    done = [line for line in lines if not line.error]
    taken = [line.pieces[-1] - line.sent for line in done]
    first = [line.pieces[0] - line.sent for line in done]
    pairs = zip(done, taken, first, strict=True)
    per_token = [(all_ - ttft) / (line.new_tokens - 1) for line, all_, ttft in pairs if line.new_tokens > 1]
    between = [float(gap) for line in done for gap in np.diff(line.pieces)]
    prompt, new = sum(line.prompt_tokens for line in done), sum(line.new_tokens for line in done)
    return {
        "Successful requests": len(done),
        "Failed requests": len(lines) - len(done),
        "Benchmark duration (s)": seconds,
        "Total input tokens": prompt,
        "Cached input tokens": sum(line.cached_tokens for line in done),
        "Total generated tokens": new,
        "Request throughput (req/s)": len(done) / seconds,
        "Input token throughput (tok/s)": prompt / seconds,
        "Output token throughput (tok/s)": new / seconds,
        **_three("TTFT", first),
        **_three("TPOT", per_token),
        **_three("ITL", between),
        **_three("E2E", taken),
    }
