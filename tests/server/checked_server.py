"""The command `serve` whose engine checks all invariants after every step, and tells on stdout how it is.

For each line on stdin one of JSON comes: open files, memory, and how many objects of which kind there are.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from support import CheckedEngine

import minirad.engine
from minirad.__main__ import main

engines: list[Engine] = []


class Engine(CheckedEngine):
    """Counts the steps that were checked. An invariant that does not hold ends the server."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.checks = 0
        engines.append(self)

    def check(self) -> None:
        super().check()
        self.checks += 1


def look() -> dict[str, Any]:
    """How the process is; called while no request is there."""
    gc.collect()
    (engine,) = engines
    engine.check()
    kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    proc = Path("/proc/self")
    return {
        "files": len(os.listdir(proc / "fd")) if proc.exists() else 0,
        "megabytes": int((proc / "statm").read_text().split()[1]) * 4096 / 1e6 if proc.exists() else 0.0,
        "threads": threading.active_count(),
        "live": [request.id for request in engine.scheduler.requests()],
        "outbox": len(engine.outbox),
        "locked": engine.cache.protected_size,
        "slots": len(engine.allocator.free_pages()) * engine.config.page_size + engine.cache.evictable_size,
        "pool": engine.allocator.num_tokens,
        "steps": engine.steps,
        "checks": engine.checks,
        "retracted": engine.stats.retractions,
        "kinds": {kind: count for kind, count in kinds.items() if not kind.startswith("builtins.")},
    }


def answer_stdin() -> None:
    for _ in sys.stdin:
        print(f"LOOK {json.dumps(look())}", flush=True)


if __name__ == "__main__":
    minirad.engine.Engine = Engine  # type: ignore[misc]
    threading.Thread(target=answer_stdin, daemon=True).start()
    sys.exit(main())
