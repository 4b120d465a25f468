"""`bench serve`: its figures by the definitions, its arrivals, and a client that reads what servers write."""

from __future__ import annotations

import argparse
import json
import math
import socketserver
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from minirad.bench import http_load, serve
from minirad.bench.http_load import Address
from minirad.bench.latency import Timeline, arrivals, report


def test_the_figures_are_those_of_bench_serving() -> None:
    lines = [
        Timeline(0.0, 0.5, [1.0, 1.25, 2.0], prompt_tokens=10, cached_tokens=4, new_tokens=4),
        Timeline(1.0, 1.0, [1.125], prompt_tokens=6, new_tokens=1),  # no token after the first: no TPOT
        Timeline(1.0, 1.0, [1.5, 9.0], prompt_tokens=99, new_tokens=99, error="429"),
    ]
    said = report(lines, 4.0)
    assert said["Successful requests"] == 2 and said["Failed requests"] == 1
    assert said["Total input tokens"] == 16 and said["Cached input tokens"] == 4
    assert said["Total generated tokens"] == 5
    assert said["Request throughput (req/s)"] == 0.5
    assert said["Input token throughput (tok/s)"] == 4.0 and said["Output token throughput (tok/s)"] == 1.25
    assert said["Mean TTFT (ms)"] == said["Median TTFT (ms)"] == (500 + 125) / 2
    assert said["P99 TTFT (ms)"] == pytest.approx(125 + 0.99 * 375)
    assert said["Mean TPOT (ms)"] == pytest.approx(1000 / 3)  # (1500 - 500) / (4 - 1)
    assert said["Mean ITL (ms)"] == said["Median ITL (ms)"] == 500  # of 250 and 750
    assert said["Mean E2E (ms)"] == (1500 + 125) / 2


def test_where_nothing_succeeded_there_are_no_times() -> None:
    said = report([Timeline(error="refused")], 1.0)
    assert said["Successful requests"] == 0 and said["Output token throughput (tok/s)"] == 0
    assert said["Mean TTFT (ms)"] is said["P99 ITL (ms)"] is None


def test_requests_come_as_a_poisson_process() -> None:
    moments = arrivals(4000, 8.0, seed=3)
    assert moments == arrivals(4000, 8.0, seed=3) != arrivals(4000, 8.0, seed=4)
    assert moments[-1] == pytest.approx(500)
    gaps = np.diff(moments)
    assert (gaps > 0).all() and np.std(gaps) == pytest.approx(1 / 8, rel=0.05)  # as large as the mean
    assert arrivals(3, math.inf, 0) == [0.0, 0.0, 0.0]


def test_prompts_share_their_beginnings() -> None:
    prompts = serve.make_prompts(40, 3, 20, 5, seed=1)
    assert prompts == serve.make_prompts(40, 3, 20, 5, seed=1) != serve.make_prompts(40, 3, 20, 5, seed=2)
    assert {len(prompt) for prompt in prompts} == {25}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 3 and len(set(map(tuple, prompts))) == 40


@pytest.mark.parametrize("text", ["0", "1,-2", "nan", "x", "", "1,,2"])
def test_a_rate_is_a_number_above_zero(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="rates are numbers above 0"):
        serve.rates(text)
    assert serve.rates("1,2.5,inf") == [1.0, 2.5, math.inf]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


def test_the_engine_options_go_to_the_server() -> None:
    said = ["--kv-tokens", "512", "--mixed", "--no-preemption", "--seed", "4", "--eviction-policy", "lfu"]
    words = serve.engine_words(options("--requests", "3", *said))
    assert vars(options(*words)) == vars(options(*said)) and sorted(words) == sorted(said)
    assert serve.engine_words(options()) == []


@pytest.mark.parametrize("url", ["", "ftp://x", "127.0.0.1:8000", "http://", "http://x:port"])
def test_an_address_is_one(url: str) -> None:
    with pytest.raises(ValueError, match="--url"):
        Address.of(url)


def test_addresses() -> None:
    assert str(Address.of("http://[::1]:8000/v1/")) == "http://[::1]:8000"
    assert Address.of("https://host/api/v1") == Address("host", 443, True, "/api")


# ---------------------------------------------------------------------- servers that write in many ways


def event(choices: int, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "x"}] * choices, **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
WHOLE = b": ping\n\n" + event(1) * 3 + event(0, usage=USAGE) + b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\n"


def chunked(text: bytes, size: int) -> bytes:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


ANSWERS: dict[str, tuple[bytes, str]] = {
    "chunks as events": (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(WHOLE, 400), ""),
    "chunks anywhere": (OK + b"transfer-encoding: Chunked\r\n\r\n" + chunked(WHOLE, 7), ""),
    "with a length": (OK + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE, ""),
    "until the end": (OK + b"\r\n" + WHOLE.replace(b"\n", b"\r\n"), ""),
    "no end": (OK + b"\r\n" + event(1), "the stream ended before [DONE]"),
    "hung up in a chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(WHOLE, 9)[:40], "hung up"),
    "hung up before the length": (OK + b"Content-Length: 9999\r\n\r\n" + event(1), "hung up"),
    "an error in the stream": (OK + b"\r\n" + event(1) + event(0, error={"message": "sorry"}), "sorry"),
    "an error": (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", "429 full"),
    "nothing": (b"", "hung up"),
    "no HTTP": (b"hello\r\n\r\n", "no answer of an HTTP server"),
    "no JSON": (OK + b"\r\ndata: {\n\n", "DecodeError"),
    "no output": (OK + b"\r\n" + event(0, usage=USAGE) + b"data: [DONE]\n\n", "no output came"),
}  # fmt: skip


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], Address]]:
    """Makes servers that answer every request with the same bytes."""
    servers: list[socketserver.ThreadingTCPServer] = []

    def serve_it(answer: bytes) -> Address:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                length = 0
                while line := self.rfile.readline().strip():
                    name, _, value = line.lower().partition(b":")
                    length = int(value) if name == b"content-length" else length
                heard.append(json.loads(self.rfile.read(length)))
                self.wfile.write(answer)

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return Address("127.0.0.1", server.server_address[1], False, "")

    heard: list[object] = []
    serve_it.heard = heard  # type: ignore[attr-defined]
    yield serve_it
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", ANSWERS)
def test_the_client_reads_what_servers_write(name: str, answering: Callable[[bytes], Address]) -> None:
    answer, error = ANSWERS[name]
    run = http_load.run(answering(answer), [{"prompt": [1, 2]}] * 3, [0.0, 0.0, 0.01])
    assert answering.heard == [{"prompt": [1, 2]}] * 3  # type: ignore[attr-defined]
    for line in run.lines:
        if error:
            assert error in line.error
        else:
            assert not line.error
            assert (line.prompt_tokens, line.cached_tokens, line.new_tokens) == (7, 5, 3)
            assert len(line.pieces) == 3 and line.due <= line.sent <= line.pieces[0] <= line.pieces[-1]
    assert run.late >= 0 and run.busy > 0


def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as gone:
        address = Address("127.0.0.1", gone.server_address[1], False, "")
    run = http_load.run(address, [{}], [0.0])
    assert "ConnectionRefusedError" in run.lines[0].error


# ---------------------------------------------------------------------- without a server


def test_direct_runs_say_the_same_about_the_same_requests() -> None:
    args = options("--requests", "6", "--kv-tokens", "512")
    prompts = serve.make_prompts(6, 1, 40, 4, 0)
    engine = serve._engine(args)
    for moments in ([0.0] * 6, arrivals(6, 60.0, 0)):
        said = serve.directly(engine, prompts, moments, 5)
        engine.check()
        assert not engine.has_work
        assert said["Successful requests"] == 6 and said["Total generated tokens"] == 30
        assert said["Total input tokens"] == 6 * 44 and said["Cached input tokens"] >= 3 * 40
        assert said["Median TPOT (ms)"] > 0 and said["Median TTFT (ms)"] < said["Median E2E (ms)"]


def test_the_table_says_what_http_costs() -> None:
    def figures(first: float, rate: float) -> dict[str, float | None]:
        lines = [Timeline(0.0, 0.0, [first, first + 0.5], prompt_tokens=4, new_tokens=2)]
        return report(lines, 2 / rate)

    run = {
        "rate": math.inf, "http": figures(0.25, 8.0), "direct": figures(0.125, 16.0),
        "client": {"core": 0.75, "late_ms": 1.5}, "errors": ["429 full"],
    }  # fmt: skip
    work = {"requests": 1, "prefixes": 1, "shared": 3, "own": 1, "new_tokens": 2, "threads": 1}
    text = serve.as_text({"model": "m", "processor": "p", "workload": work, "seed": 0, "runs": [run]})
    assert serve.BETWEEN in text  # what may not be laid side by side is said
    assert "inf/s http  inf/s direct" in text and "Median TTFT (ms)" in text
    assert "+125.00 ms of the median first token, +0.00 ms a token after it, 50.0%" in text
    assert "75% of a core" in text and "partly the client's" in text and "failed: 429 full" in text
