"""The processes of `python -m viz.live --tp 2`: started plainly it starts the ranks with torchrun's launcher,
under torchrun it is one of them. Rank 0 has the page, the others follow it and say nothing.

torchrun ends all ranks when one has died, and rank 0 says on its page what happened before it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from minirad.model.config import LlamaConfig
from minirad.model.load import load_tokenizer, resolve_model
from viz.web.driver import Driver

LOOK = 0.5  # seconds between two looks whether the launcher is still there
GRACE = 1.0  # seconds in which rank 0 may find out itself which rank was lost
LAST = 20.0  # seconds for a step to end, so that the others can be told that all is over


def my_rank() -> int | None:
    """This process' number in the run of a torchrun; None: there is none."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["RANK"]) if all(map(os.environ.get, names)) else None


def start(tp: int, model: Path, arguments: Sequence[str]) -> int:
    """Runs the same command on so many ranks, to their end; returns the exit code.

    ValueError, before anything is started, for a model that cannot be cut into so many parts.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from minirad.fleet.endpoints import free_ports
    from minirad.ranks.model import local_config

    local_config(LlamaConfig.from_dir(model), tp)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would do the same, with a warning
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is told by the ranks, in words
    logging.disable(logging.CRITICAL)  # the ranks themselves say what it was
    try:
        where = ["--master-addr", "127.0.0.1", "--master-port", str(free_ports(1))]
        what = [*where, "--nproc-per-node", str(tp), "-m", "viz.live", *arguments]
        run(parse_args(what))  # type: ignore[no-untyped-call]
    except SignalException as error:
        return 0 if error.sigval == signal.SIGINT else 128 + error.sigval
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return 2 if 2 in codes else 1
    return 0


def follow(model: str | None) -> int:
    """Another rank's whole life; returns its exit code."""
    from minirad import ranks

    load_tokenizer(resolve_model(model))  # what takes its time, on all ranks at once
    try:
        ranks.follow()
    except SystemExit as end:
        return int(end.code or 0) if not isinstance(end.code, str) else 1
    return 0


def check(options: argparse.Namespace) -> None:
    """ValueError, in one sentence, for what does not go with --tp, or not on these ranks."""
    why = {
        "compare": "two engines are compared on one rank each",
        "replay": "nothing runs, and a recording knows its ranks",
        "cache": "each rank has the engine's own tree",
    }
    for name, reason in why.items():
        if getattr(options, name):
            raise ValueError(f"--tp {options.tp} with --{name}: {reason}")
    if my_rank() is not None and int(os.environ["WORLD_SIZE"]) != options.tp:
        raise ValueError(f"--tp {options.tp} under a torchrun of {os.environ['WORLD_SIZE']} processes")


@contextlib.contextmanager
def ranks_of(driver: Driver) -> Iterator[None]:
    """Around the page of rank 0, if there are more: they begin and end with it."""
    if driver.settings.tp > 1:
        tell_the_end(driver)
    try:
        yield
    finally:
        if driver.settings.tp > 1:
            leave(driver)


def tell_the_end(driver: Driver) -> None:
    """From now on it becomes the driver's error, if that has not noticed by itself, when the launcher says
    that all is over (SIGTERM), or has gone without a word."""
    told, parent = threading.Event(), os.getppid()

    def look() -> None:
        while not told.wait(LOOK) and os.getppid() == parent:
            pass
        time.sleep(GRACE)
        driver.fail(_who_ended() if told.is_set() else "torchrun has ended")

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: told.set())
        threading.Thread(target=look, daemon=True).start()


def _who_ended() -> str:
    """Why torchrun ends all ranks: one was lost, or somebody told it to. Says something, to find that out."""
    from minirad.errors import RankLost
    from minirad.ranks.group import joined
    from minirad.ranks.messages import BEAT, Message

    group = joined()
    if group is None:
        return "another rank has ended"
    try:
        group.tell(Message(BEAT))
    except RankLost as lost:
        return f"RankLost: {lost}"  # as the engine's thread says it
    return "the run was told to end (SIGTERM)"


def leave(driver: Driver | None = None) -> None:
    """Rank 0's run is over: the others are told, once no step is under way."""
    from minirad import ranks

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's and the launcher's: one is enough
    if driver is not None:
        driver.stop()
        driver.join(timeout=LAST)
    if driver is None or not driver.is_alive():
        ranks.leave()
