"""Engines on several ranks in tests: this process is rank 0, the others are processes of their own.

    pair = RankPair()            # also as a context
    engine = Engine(EngineConfig(tp=2, kv_tokens=64), model=model)
    ...
    pair.close()

A process is of one group at a time: a new pair ends the one before. It serves any number of engines, one
after another or at once. After a rank was killed, stopped or ended by an alarm, a new pair is needed: `close`
gets rid of all that is left of the old one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from datetime import timedelta
from typing import Any

from support import ROOT, LateCopier

from minirad.fleet.endpoints import free_ports
from minirad.ranks import group as ranks_group


def late_copies(engine: Any, seed: int) -> None:
    """Copies between the tiers end late, and some fail: on rank 0, and so on all."""
    copier = engine.cache.copier  # of the engine's ranks; `inner` is this rank's own
    copier.inner = LateCopier(copier.inner, seed)


FOLLOW = "from minirad.ranks import follow; follow()"


class RankPair:
    """`tp` ranks on this machine. timeout: MINIRAD_RANKS_TIMEOUT. code: what the other processes run."""

    current: RankPair | None = None

    def __init__(self, tp: int = 2, *, timeout: float | None = None, code: str = FOLLOW) -> None:
        ranks_group.leave()
        self.tp, RankPair.current = tp, self
        ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)), "WORLD_SIZE": str(tp)}
        if timeout is not None:
            ours["MINIRAD_RANKS_TIMEOUT"] = str(timeout)
        self._before = {name: os.environ.get(name) for name in (*ours, "RANK", "LOCAL_RANK")}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.processes: dict[int, subprocess.Popen[str]] = {}
        for rank in range(1, tp):
            env = {
                **os.environ, **ours, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(rank),
            }  # fmt: skip
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True
            )
        os.environ.update(ours, RANK="0", LOCAL_RANK="0")
        ranks_group.START = timedelta(seconds=240)  # as long as importing torch may take on a busy machine

    def kill(self, rank: int) -> None:
        """The process ends at once, without a word."""
        self.processes[rank].kill()
        self.processes[rank].wait(60)

    def stop(self, rank: int) -> None:
        """The process hangs (not on Windows)."""
        self.processes[rank].send_signal(signal.SIGSTOP)

    def close(self) -> dict[int, tuple[int, str]]:
        """Rank 0's run is over. The exit code of each other rank, and what it said on stderr."""
        if RankPair.current is self:
            ranks_group.leave()
            RankPair.current = None
        ends: dict[int, tuple[int, str]] = {}
        for rank, process in self.processes.items():
            try:
                _, said = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                _, said = process.communicate()
            ends[rank] = (process.returncode, said)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        return ends

    def __enter__(self) -> RankPair:
        return self

    def __exit__(self, *exc: Any) -> None:
        with contextlib.suppress(Exception):
            self.close()
