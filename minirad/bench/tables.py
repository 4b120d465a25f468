"""Plain-text tables, the clock and the machine: what all measurements share."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import minirad

Clock = Callable[[], int]


def cpu_clock() -> tuple[str, Clock]:
    """Name and function of the best clock here, in nanoseconds.

    The thread's own CPU time where the platform has it: other processes on a busy machine do not count.
    """
    if hasattr(time, "thread_time_ns"):
        return "thread_time_ns", time.thread_time_ns
    return "perf_counter_ns", time.perf_counter_ns


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of some runs, and the lowest and highest of them."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def machine() -> dict[str, Any]:
    """Where figures were taken, with what, and how busy it was before."""
    return {
        "processor": processor(), "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(), "torch": version("torch"), "minirad": minirad.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def processor() -> str:
    """The CPU's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check_threads(threads: int) -> None:
    """ValueError for more threads than there are cores: they would wait for each other."""
    cores = os.cpu_count() or 1
    if threads > cores:
        raise ValueError(f"--threads {threads}: this machine has {cores} cores")


def number(value: object) -> str:
    """A figure with three significant digits at least; None is a dash, text stays text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns: text to the left, figures to the right, as their first row has it."""
    cells = [list(head), *([number(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    left = [not rows or isinstance(value, str) for value in (rows[0] if rows else head)]
    lines = []
    for row in cells:
        parts = [
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
