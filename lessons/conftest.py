"""pytest's options and summary for the lessons."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lessons.grading.report import table
from lessons.grading.show import show
from lessons.grading.testing import RESULTS


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lessons")
    group.addoption("--show", action="store_true", help="draw what failed and open it in the browser")
    group.addoption("--patience", type=float, default=1.0, help="factor on the exercises' time limits")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Every lesson has a test_lesson.py in a folder that is no package: pytest would take them for one."""
    if isinstance(collector, pytest.Module):
        known = sys.modules.get(collector.path.stem)
        file = getattr(known, "__file__", None)
        if file is not None and collector.path.stem == "test_lesson" and Path(file) != collector.path:
            del sys.modules[collector.path.stem]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = list(config.stash.get(RESULTS, {}).values())
    if not results:
        return
    terminalreporter.section("points")
    terminalreporter.write_line(table(results))
    if config.getoption("--show") and any(r.status not in ("passed", "todo") for r in results):
        terminalreporter.write_line(f"\ndrawn: {show(results)}")
