"""What clients of the server see, and what HTTP costs, when requests do not wait for one another.

An open loop: requests arrive as a Poisson process of each of `--rates` (inf: all at once), also while others
are still being answered. `--prefixes` prompts of `--shared` tokens are continued by `--own` tokens for each
request, and `--new-tokens` are generated, whatever they are (random ids, greedy, end tokens passed over).
Printed is what vLLM's and SGLang's bench_serving print, by their definitions (minirad/bench/latency.py).

Beside it the same prompts at the same moments given to an engine in this process, without a server: "direct".
Both begin with an empty cache. In the server one Python process reads HTTP and drives the engine; the client
here is another one, and the share of a core that it took stands below the table: near 100% the figures would
be the client's. --url measures a server that runs already (any that speaks OpenAI's /v1/completions and takes
token ids); there is nothing to lay beside it then, and its cache is emptied only if it has POST /flush_cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minirad.bench import http_load
from minirad.bench.http_load import Address
from minirad.bench.latency import Timeline, arrivals, report
from minirad.bench.tables import processor, table
from minirad.command import one_line, positive
from minirad.fleet.endpoints import free_ports
from minirad.options import add_engine_options, engine_config, engine_words
from minirad.server.settings import needed

Prompts = list[list[int]]
IDS = range(10, 1000)  # of tokens that every vocabulary has
BETWEEN = "ITL over HTTP is between pieces, which may bring several tokens: compare TPOT with direct, not ITL"
STARTS_WITHIN = 300.0  # seconds: a model may have to be read from a disk


def rates(text: str) -> list[float]:
    """An option's numbers above 0, separated by commas; inf is one."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(rate > 0 for rate in found):
        raise argparse.ArgumentTypeError(f"rates are numbers above 0 such as 1,4,inf, not {one_line(text)!r}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a server that runs already (default: one is started, and ended)")
    parser.add_argument("--api-key", help="that the server of --url wants")
    parser.add_argument(
        "--rates", type=rates, default=[4.0, 16.0, math.inf], help="requests a second: 1,4,inf"
    )
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--prefixes", type=positive, default=8, help="different beginnings of prompts")
    parser.add_argument("--shared", type=positive, default=128, help="tokens of such a beginning")
    parser.add_argument("--own", type=positive, default=32, help="prompt tokens of each request's own")
    parser.add_argument("--new-tokens", type=positive, default=32)
    parser.add_argument("--threads", type=positive, default=1, help="of torch, in the server and directly")
    parser.add_argument("--skip-direct", action="store_true", help="the server only")
    parser.add_argument("--json", action="store_true")
    add_engine_options(parser)


def main(args: argparse.Namespace) -> int:
    """Prints the table; 1 if a request failed."""
    prompts = make_prompts(args.requests, args.prefixes, args.shared, args.own, args.seed or 0)
    runs: list[dict[str, Any]] = []
    with server(args) as address:
        model = address.ask("/v1/models")["data"][0]["id"]
        engine = None if args.url or args.skip_direct else _engine(args)
        for rate in args.rates:
            moments = arrivals(len(prompts), rate, args.seed or 0)
            runs.append({"rate": rate, **over_http(address, model, prompts, moments, args.new_tokens)})
            if engine is not None:
                runs[-1]["direct"] = directly(engine, prompts, moments, args.new_tokens)
    names = ("requests", "prefixes", "shared", "own", "new_tokens", "threads")
    result = {
        "server": "own" if args.url is None else args.url, "model": model, "processor": processor(),
        "workload": {name: getattr(args, name) for name in names}, "seed": args.seed or 0, "runs": runs,
    }  # fmt: skip
    if args.json:
        for run in runs:  # there is no infinity in JSON
            run["rate"] = run["rate"] if math.isfinite(run["rate"]) else "inf"
        print(json.dumps(result, indent=1))
    else:
        print(as_text(result))
    return 1 if any(run["http"]["Failed requests"] for run in runs) else 0


def make_prompts(requests: int, prefixes: int, shared: int, own: int, seed: int) -> Prompts:
    """Random token ids; which request begins how is drawn, too."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        drawn: list[int] = rng.integers(IDS.start, IDS.stop, count).tolist()
        return drawn

    beginnings = [ids(shared) for _ in range(prefixes)]
    return [beginnings[rng.integers(prefixes)] + ids(own) for _ in range(requests)]


# ---------------------------------------------------------------------- through a server


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[Address]:
    """The address of a server that takes requests; one that was started here is ended."""
    if args.url is not None:
        yield Address.of(args.url, args.api_key)
        return
    needed("bench serve")
    address = Address("127.0.0.1", free_ports(1), False, "")
    words = [
        "serve", "--host", address.host, "--port", str(address.port),
        "--max-queue", str(args.requests), *engine_words(args),
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "minirad", *words], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            env={**os.environ, **threads},
        )  # fmt: skip
        try:
            _wait_until_it_serves(address, process, said)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it_serves(address: Address, process: subprocess.Popen[bytes], said: Any) -> None:
    began = time.monotonic()
    while time.monotonic() - began < STARTS_WITHIN:
        if process.poll() is not None:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise ValueError(f"the server ended with code {process.returncode}: {lines[-1] if lines else ''}")
        try:
            address.ask("/health", timeout=5)
            return
        except (OSError, ValueError):
            time.sleep(0.1)
    raise ValueError(f"the server at {address} was not ready within {STARTS_WITHIN:.0f} s")


def over_http(
    address: Address, model: str, prompts: Prompts, moments: Sequence[float], new_tokens: int
) -> dict[str, Any]:
    """One run from an empty cache: its figures, what the client itself took, and why requests failed."""
    said = {
        "model": model, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    warm = {**said, "prompt": [5, 6, 7], "max_tokens": 4}
    http_load.run(address, [warm] * 2, [0.0, 0.0])
    with contextlib.suppress(ValueError):  # not every server has it
        address.ask("/flush_cache", {})
    run = http_load.run(address, [{**said, "prompt": prompt} for prompt in prompts], moments)
    return {
        "http": report(run.lines, run.seconds),
        "client": {"core": run.busy / run.seconds, "late_ms": 1000 * run.late},
        "errors": sorted({line.error for line in run.lines if line.error}),
    }


# ---------------------------------------------------------------------- without a server


def _engine(args: argparse.Namespace) -> Any:
    import torch

    from minirad.engine import Engine

    torch.set_num_threads(args.threads)
    return Engine(engine_config(args))


class _Listener:
    """Notes when each token of one request is sampled."""

    def __init__(self, line: Timeline, began: float) -> None:
        self._line, self._began = line, began

    def token(self, request: Any, token: int) -> None:
        self._line.pieces.append(time.perf_counter() - self._began)

    def ended(self, output: Any) -> None:
        line = self._line
        line.prompt_tokens, line.cached_tokens = output.prompt_tokens, output.cached_tokens
        line.new_tokens, line.error = len(output.token_ids), output.error


def directly(engine: Any, prompts: Prompts, moments: Sequence[float], new_tokens: int) -> dict[str, Any]:
    """The same requests at the same moments, from an empty cache, in the engine's own thread.

    One that comes while a step runs waits for its end, which counts: it was sent at its moment.
    """
    from minirad.config import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    engine.generate([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
    engine.flush_cache()
    lines = [Timeline(due=moment, sent=moment) for moment in moments]
    waiting = deque(zip(lines, prompts, strict=True))
    began = time.perf_counter()
    while waiting or engine.scheduler.has_work:
        now = time.perf_counter() - began
        while waiting and waiting[0][0].due <= now:
            line, prompt = waiting.popleft()
            request = engine.intake.request(prompt, params)
            request.listener = _Listener(line, began)
            engine.enqueue([request])
        if engine.scheduler.has_work:
            engine.advance()
        else:
            time.sleep(max(waiting[0][0].due - now, 0.0))
    seconds = time.perf_counter() - began
    engine.outbox.take()
    return report(lines, seconds)


# ---------------------------------------------------------------------- showing


def as_text(result: dict[str, Any]) -> str:
    """The figures of all rates side by side, and what HTTP costs, in words."""
    work, runs = result["workload"], result["runs"]
    prompt = f"{work['shared'] + work['own']} tokens ({work['shared']} one of {work['prefixes']} beginnings)"
    lines = [
        f"{result['model']} on {result['processor']}: {work['requests']} requests of {prompt}, "
        f"{work['new_tokens']} new each, {work['threads']} thread(s), seed {result['seed']}",
        "",
    ]
    columns = {
        f"{run['rate']:g}/s {way}": run[way] for run in runs for way in ("http", "direct") if way in run
    }
    rows = [[name, *(each[name] for each in columns.values())] for name in runs[0]["http"]]
    lines += [table(["", *columns], rows), "", BETWEEN]
    for run in runs:
        lines.append(_cost(run))
        lines += [f"  failed: {one_line(error)}" for error in run["errors"][:3]]
    return "\n".join(lines)


def _cost(run: dict[str, Any]) -> str:
    http, direct, client = run["http"], run.get("direct"), run["client"]
    said = f"rate {run['rate']:g}: "
    if direct is not None and http["Successful requests"]:
        first, between = (
            http[f"Median {name} (ms)"] - (direct[f"Median {name} (ms)"] or 0.0) for name in ("TTFT", "TPOT")
        )
        name = "Output token throughput (tok/s)"
        said += (
            f"HTTP costs {first:+.2f} ms of the median first token, {between:+.2f} ms a token after it, "
            f"{1 - http[name] / direct[name]:.1%} of the tokens per second; "
        )
    said += f"the client took {client['core']:.0%} of a core and sent 99% within {client['late_ms']:.1f} ms"
    if client["core"] > 0.5:
        said += " (too much of a core: the figures are partly the client's)"
    return said
