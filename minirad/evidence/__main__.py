"""Runs every kind of program once: how long it takes, what it asks for, and how many answers are right."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence

from minirad import command
from minirad.config import EngineConfig
from minirad.engine import Engine
from minirad.evidence.kinds import KINDS
from minirad.evidence.measure import right
from minirad.frontend import ProgramError, run_many

COLUMNS = "{:20} {:>5} {:>8} {:>7} {:>6} {:>6} {:>7} {:>6}"  # prompt: tokens of a request


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command.Parser(prog="python -m minirad.evidence", description=__doc__)
    parser.add_argument(
        "--kinds", type=command.some_of(KINDS), default=tuple(KINDS),
        help=f"with commas between them: {', '.join(KINDS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--model", help="default: the classroom Llama")
    parser.add_argument(
        "--jobs", type=command.positive, help="programs of each kind; default: the kind's own"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    engine = Engine(EngineConfig(model=options.model, kv_tokens=8192))
    print(COLUMNS.format("kind", "jobs", "requests", "prompt", "hits", "new", "right", "s"))
    for name in options.kinds:
        print(row(engine, name, options.jobs, options.seed), flush=True)
    return 0


def row(engine: Engine, name: str, count: int | None, seed: int) -> str:
    """One run of a kind in an empty cache."""
    kind = KINDS[name]
    jobs = kind.make(count or kind.jobs, random.Random(f"{name} {seed}"))
    engine.flush_cache()
    start = time.perf_counter()
    outcomes = run_many(engine, jobs)
    seconds = time.perf_counter() - start
    requests, prompt, cached, new = (
        sum(getattr(outcome.usage, field) for outcome in outcomes)
        for field in ("requests", "prompt_tokens", "cached_tokens", "new_tokens")
    )
    for outcome in outcomes:
        outcome.result()
    known = right(kind, jobs, outcomes)
    return COLUMNS.format(
        name, len(jobs), requests, f"{prompt / requests:.0f}", f"{cached / prompt:.1%}", new,
        "-" if known is None else "{}/{}".format(*known), f"{seconds:.1f}",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(command.run("minirad.evidence", main, ProgramError))
