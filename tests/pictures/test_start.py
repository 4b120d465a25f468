"""The way to the first tree imports no more than it needs, and shows the page before there is an engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from minirad.route.policies import POLICIES
from viz import measure, start
from viz.web import asked
from viz.web.driver import Driver
from viz.web.settings import Settings

NEVER = (
    "plotly", "transformers", "huggingface_hub", "jinja2", "pandas", "scipy", "matplotlib", "PIL", "IPython",
    "ipywidgets", "anywidget", "jupyter_client", "traitlets", "zmq", "msgspec", "starlette", "uvicorn",
    "httpx", "gguf", "pytest", "llguidance", "peft",
    "minirad.simulate", "minirad.logs", "minirad.doctor", "minirad.theorem", "minirad.fleet.flight",
    "minirad.fleet.publish", "minirad.route", "minirad.server.service", "minirad.ranks", "minirad.tiers",
    "minirad.speculative", "minirad.adapters", "minirad.bench", "viz.web.stream", "viz.web.served",
    "viz.web.routed", "viz.web.ranks", "viz.web.fleet", "viz.notebook", "viz.draw.charts", "lessons",
)  # fmt: skip
FIRST_VIEW = """
import json, sys, time
from urllib.request import urlopen
from viz import live
from viz.web.driver import Driver

def first():
    before["page"], before["modules"] = urlopen(page.url).status, sorted(sys.modules)

before = {}
driver = Driver(live.settings_of(live._parser().parse_args([])), 0.0)
driver.first = first
page = live.Live(driver)
with page:
    while driver.run_now is None or not len(driver.run_now.trace):
        assert not driver.error, driver.error
        time.sleep(0.01)
    drawn = b"<svg" in urlopen(f"{page.url}view?run={driver.key(driver.run_now)}&g=step&i=1").read()
print(json.dumps({"before": before, "drawn": drawn, "modules": sorted(sys.modules)}))
"""


def test_the_first_tree_is_drawn_without_what_it_does_not_need_and_the_page_comes_before_torch() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_VIEW], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["drawn"] and "torch" in said["modules"] and "tokenizers" in said["modules"]
    never = tuple(f"{name}." for name in NEVER)
    assert [name for name in said["modules"] if f"{name}.".startswith(never)] == []
    assert said["before"]["page"] == 200
    assert not {"torch", "tokenizers", "graphviz"} & set(said["before"]["modules"])


def test_what_an_engine_needs_is_done_first_in_its_own_thread() -> None:
    order: list[str] = []
    driver = Driver(Settings(workload="nowhere"), 1.0)
    driver.first = lambda: order.append("first")
    driver.run()  # in this thread
    assert order == ["first"] and "nowhere" in driver.error and driver.run_now is None


def test_help_names_the_routing_policies_that_there_are() -> None:
    assert tuple(POLICIES) == asked.ROUTES and asked.ROUTE in POLICIES


@pytest.mark.slow
def test_a_start_is_measured_from_the_command_to_the_tree() -> None:
    marks = {**start.finished("interpreter", "-c", "pass"), **start.one_start()}
    assert list(marks) == ["interpreter", "address", "page", "engine", "event", "tree"]
    clock = [marks[name][0] for name in list(marks)[1:]]
    assert clock == sorted(clock) and marks["interpreter"][0] > 0
    used = [marks[name][1] for name in list(marks)[1:]]
    assert None in used or used == sorted(used)
    rows = [
        {"mark": name, "what": start.ROWS[name], "seconds": seconds, "processor": processor}
        for name, (seconds, processor) in {"torch": (1.0, 0.5), **marks}.items()
    ]
    assert "drawn" in start.as_table(rows) and str(start.as_table(rows)).count("\n") > 6


def test_a_browser_is_asked_for_with_a_start_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--browser"]) == 2
    assert "--browser goes with --start" in capsys.readouterr().err
