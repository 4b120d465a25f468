"""`kv-events --json` against the truth of who sent: tests/kv_sources/ in a process of its own.

shapes_source.py writes the formats of vLLM and SGLang; sglang_source.py is SGLang's own radix cache, event
recorder and publisher. It needs MINIRAD_SGLANG, a folder with `sg/sglang` and `venv` as its head says.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "kv_sources"

# Ports below those that the system gives to connections; a worker has its own.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = iter(range(20_000 + 200 * _worker, 20_200 + 200 * _worker, 4))


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _has_client(port: int) -> bool:
    """Somebody is connected there, as Linux knows."""
    text = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = map(str.split, text.splitlines())
    return any(line[1].endswith(f":{port:04X}") and line[3] == "01" for line in lines)


def _four_ports() -> int:
    return next(base for base in _ports if all(_free(base + at) for at in range(4)))


def _follow(port: int, ranks: int, seconds: float) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "minirad", "kv-events", f"tcp://127.0.0.1:{port}",
        "--replay", f"tcp://127.0.0.1:{port + 2}", "--ranks", str(ranks), "--seconds", str(seconds), "--json",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _finish(follower: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The ranks that it rebuilt."""
    out, _ = follower.communicate(timeout=200)
    assert follower.returncode == 0
    ranks: list[dict[str, Any]] = json.loads(out)["ranks"]
    return ranks


def _shapes(tmp_path: Path, shape: str, hashes: str, *more: str, late: bool = False) -> None:
    """Two ranks of one shape: what is rebuilt is what they hold. late: connect when all is sent."""
    port, truth = _four_ports(), tmp_path / "truth.json"
    command = [
        sys.executable, str(SOURCES / "shapes_source.py"), "--port", str(port),
        "--replay-port", str(port + 2), "--truth", str(truth), "--shape", shape, "--hash", hashes,
        "--ranks", "2", "--requests", "120", "--capacity", "200", "--rate", "400", *more,
        *([] if late else ["--wait-asked"]),
    ]  # fmt: skip
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as source:
        assert source.stdout is not None
        try:
            follower = None if late else _follow(port, 2, seconds=300)
            assert source.stdout.readline() == "sent\n"
            if follower is None:
                follower = _follow(port, 2, seconds=1)
            else:
                follower.send_signal(signal.SIGINT)
            rebuilt = _finish(follower)
            printed = json.loads(source.communicate(timeout=60)[0])
        finally:
            source.kill()
    for rank, sent in enumerate(json.loads(truth.read_text())["ranks"]):
        assert rebuilt[rank]["blocks"] == sent["blocks"]
        assert rebuilt[rank]["batches"] == printed["batches"][rank] and rebuilt[rank]["gaps"] == 0
        assert (rebuilt[rank]["unknown"] > 0) == ("--odd" in more and shape in ("vllm-main", "sglang-map"))
        assert rebuilt[rank]["replayed"] == rebuilt[rank]["batches"] or not late


@pytest.mark.slow
def test_maps_of_vllm_with_losses_and_odd_events(tmp_path: Path) -> None:
    _shapes(tmp_path, "vllm-main", "bytes", "--drop", "0.05", "--odd", "--replay-topic")


@pytest.mark.slow
def test_positional_events_of_an_old_sglang_that_are_over(tmp_path: Path) -> None:
    _shapes(tmp_path, "sglang-old", "int", late=True)


_SHAPES = [*product(("vllm-main", "vllm-0.23", "sglang-map", "sglang-old"), ("int", "bytes"),
                    ((), ("--odd", "--replay-topic"), ("--drop", "0.05")), (False, True))]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "hashes", "odd", "late"),
    [
        # Some of all by slow tests, the whole product by hand.
        pytest.param(*each, marks=pytest.mark.slow if at % 7 in (0, 3) else pytest.mark.exhaustive)
        for at, each in enumerate(_SHAPES)
    ],
)
def test_every_shape(tmp_path: Path, shape: str, hashes: str, odd: tuple[str, ...], late: bool) -> None:
    _shapes(tmp_path, shape, hashes, *odd, late=late)


# ------------------------------------------------------------ SGLang itself


@pytest.fixture(scope="module")
def sglang() -> tuple[Path, Path]:
    """SGLang's folder, and the Python that runs it."""
    folder = os.environ.get("MINIRAD_SGLANG")
    if not folder:
        pytest.skip("MINIRAD_SGLANG names no folder with SGLang; sglang_source.py says how to fill one")
    root, python = Path(folder) / "sg", Path(folder) / "venv" / "bin" / "python"
    if not (root / "sglang" / "srt").is_dir() or not python.exists():
        pytest.skip(f"{folder} holds no sg/sglang/srt and venv/bin/python")
    return root, python


Cell = tuple[tuple[int, ...], str | None]  # all tokens to the end of a block; salt


def _cells(nodes: list[dict[str, Any]], page: int) -> set[Cell]:
    """The blocks that SGLang's nodes (their whole paths) are made of."""
    return {
        (tuple(node["tokens"][:end]), node["cache_salt"])
        for node in nodes
        for end in range(page, len(node["tokens"]) + 1, page)
    }


def _paths(blocks: dict[str, Any], known: dict[str, Any]) -> set[Cell]:
    """The same of what was rebuilt; known: all blocks, also those that only stand above."""
    found: dict[str, tuple[int, ...]] = {}

    def path(name: str) -> tuple[int, ...]:
        chain = []
        while name not in found:
            chain.append(name)
            if known[name]["parent"] is None:
                break
            name = known[name]["parent"]
        tokens = found.get(name, ())
        for each in reversed(chain):
            tokens = found[each] = tokens + tuple(known[each]["tokens"])
        return tokens

    return {(path(name), block["space"]) for name, block in blocks.items()}


_SGLANG = [*product((1, 4, 16), ("", "--salt", "--extra-key", "--clear-at 60", "--salt --clear-at 60"),
                    (False, True))]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "options", "late"),
    [
        pytest.param(*each, marks=pytest.mark.exhaustive if at % 3 else pytest.mark.slow)
        for at, each in enumerate(_SGLANG)
    ],
)
def test_sglangs_own_tree(
    tmp_path: Path, sglang: tuple[Path, Path], page: int, options: str, late: bool
) -> None:
    root, python = sglang
    port, truth = _four_ports(), tmp_path / "truth.json"
    command = [
        str(python), str(SOURCES / "sglang_source.py"), "--root", str(root), "--port", str(port),
        "--replay-port", str(port + 2), "--truth", str(truth), "--page", str(page), "--requests", "100",
        "--rate", "400", "--linger", "200", "--wait", "1.5", "--seed", str(page), *options.split(),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as source:
        assert source.stdout is not None
        try:
            follower = None if late else _follow(port, 1, seconds=100)
            printed = json.loads(source.stdout.readline())  # all is sent now
            if follower is None:
                follower = _follow(port, 1, seconds=1)
            else:
                while follower.poll() is None and not _has_client(port):
                    time.sleep(0.05)
                time.sleep(1)  # its publisher has a queue and a thread
                follower.send_signal(signal.SIGINT)
            (rebuilt,) = _finish(follower)
        finally:
            source.kill()
    assert rebuilt["batches"] == printed["batches"] and rebuilt["gaps"] == 0
    nodes, known = json.loads(truth.read_text()), {**rebuilt["ambiguous"], **rebuilt["blocks"]}
    if "--extra-key" not in options:
        assert _paths(rebuilt["blocks"], known) == _cells(nodes, page) and not rebuilt["ambiguous"]
        return
    # Two tenants' equal tokens have one hash there: a set of paths, and those in doubt are marked.
    truly = {tokens for tokens, _ in _cells(nodes, page)}
    held = {tokens for tokens, _ in _paths(rebuilt["blocks"], known)}
    doubtful = {tokens for tokens, _ in _paths(rebuilt["ambiguous"], known)}
    assert held - doubtful <= truly <= held | doubtful
