"""The disk tier on the page: what lies there, what was written and read, and that a second run finds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browsers import at, browser, leaving, open_at, settle, tab, until_idle

from minirad.observe import disk_events as dv
from minirad.observe.recorder import Recorder
from minirad.tiers.disk import DiskTier
from viz.draw import tree
from viz.live import Driver, Live, Replay, Run, Settings, main
from viz.view.disk import Disk
from viz.web import runs
from viz.web.commands import COMMANDS, Session
from viz.web.page import Page

__all__ = ["browser", "tab"]  # fixtures


@dataclass
class Twice:
    """The same workload in two runs, one after the other, on one folder."""

    folder: Path
    first: Run
    second: Run


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """However slow the disk: what was written is told, and what is there is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "DISK_WAIT", 600.0)
        patch.setattr(DiskTier, "read_wait", 600.0)
        yield


def settings(folder: Path) -> Settings:
    return Settings(workload="tiers", host_kv_tokens=800, disk_dir=str(folder), disk_mb=8)


def played(run: Run, steps: int = 100) -> Run:
    while not run.idle and run.clock < steps:
        run.advance()
        run.engine.check()
    return run


@pytest.fixture(scope="module")
def twice(tmp_path_factory) -> Twice:
    folder = tmp_path_factory.mktemp("disk") / "blocks"
    first = played(Run(1, settings(folder), None))
    first.close()
    return Twice(folder, first, played(Run(2, settings(folder), None)))


def disk(page: Page, granularity: str, index: int) -> dict:
    """The part of a view, without drawing the others."""
    page.frames()
    return page._disk(page.trace.view(granularity, index))


def last(page: Page) -> dict:
    return page.view("step", len(page.trace))["disk"]


def test_the_first_run_writes(twice):
    page, files = twice.first.page, list(twice.folder.glob("*.safetensors"))
    assert page.meta()["disk"] == {"bytes": 8_000_000, "folder": "blocks"}
    start, end = page.view("step", 0)["disk"], last(page)
    assert (start["files"], start["bytes"], start["total"]["written"]) == (0, 0, 0)
    assert (end["files"], end["bytes"]) == (len(files), sum(file.stat().st_size for file in files))
    assert end["tokens"] == end["total"]["written"] == 64 * len(files) > 0 and end["total"]["read"] == 0
    assert not any(request.get("disk") for request in page.requests().values())
    written = [i for i in range(len(page.trace) + 1) if disk(page, "step", i)["now"]["written"]]
    assert sum(disk(page, "step", i)["now"]["written"] for i in written) == end["total"]["written"]
    assert any("written to the disk in" in told["text"] for told in page.view("step", written[0])["events"])


def test_the_second_run_finds_what_the_first_wrote(twice):
    page, end = twice.second.page, last(twice.first.page)
    assert page.view("step", 0)["disk"]["files"] == end["files"], "known before anything was read"
    view = page.view("step", 1)
    assert view["disk"]["now"]["read"] == view["disk"]["total"]["read"] == 128
    assert page.requests()["R1"]["disk"] == page.requests()["R1"]["hit"] == 128
    assert "128 tokens of R1 read from the disk as n1" in view["say"]
    assert view["nodes"][1]["disk"] and "FROM DISK" in view["svg"] and "from disk, " in view["svg"]
    assert sum(each.get("disk", 0) for each in page.requests().values()) == last(page)["total"]["read"]
    later = page.view("step", 3)
    assert later["nodes"][1]["disk"] and tree.FROM_DISK not in later["svg"], "it was read before"
    assert not any(node.get("disk") for node in twice.first.page.view("step", 3)["nodes"].values())


def test_each_moment_has_its_own_totals(twice):
    """By event they grow within a step; back in time they are what they were."""
    trace, page = twice.second.trace, twice.second.page
    grown = []
    for index in range(trace.convert("step", 3, "event"), -1, -1):
        shown, events = disk(page, "event", index), trace.view("event", index).events
        assert shown["now"]["read"] == sum(len(e.host_slots) for e in events if isinstance(e, dv.BlocksRead))
        grown.append(shown["total"]["read"])
    assert grown == sorted(grown, reverse=True) and grown[0] == 128 and grown[-1] == 0
    for index in range(trace.count("scene")):
        frame = trace.frame_at("scene", index)
        assert disk(page, "scene", index)["total"] == disk(page, "step", frame + 1)["total"]


def test_parts_of_what_came_from_the_disk_are_from_the_disk(twice):
    page, divided = twice.second.page, 0
    for index in range(0, len(page.trace) + 1, 4):
        view = page.view("step", index)
        for node in view["nodes"].values():
            parent = view["nodes"].get(node["parent"])
            if node.get("disk") and parent is not None:  # read below it, or divided
                divided += bool(parent.get("disk"))
    assert divided and {"H K", "D+H K"} <= {
        sign
        for sign in ("D K", "H K", "D+H K")
        for detail in tree.DETAILS
        if f"{sign} ·" in tree.dot_text(page.trace.view("step", 12), str, tree.Options(detail=detail))
    }


def test_a_recording_says_the_same(twice, tmp_path):
    Recorder.save(twice.second.recorder, tmp_path / "run.jsonl")
    replay = Replay(Recorder.load(tmp_path / "run.jsonl"), "run")
    for index in (0, 1, 9, len(replay.trace)):
        assert replay.page.view("step", index)["disk"] == twice.second.page.view("step", index)["disk"]
    assert replay.page.requests() == twice.second.page.requests()
    assert replay.page.meta()["disk"] == twice.second.page.meta()["disk"]
    session = Session(Settings(), 0, False, replay)
    COMMANDS["fork"](session, {"frame": 5})
    assert session.settings.disk_dir is None, "no file says where it is written"
    assert "disk" not in session.run_now.page.meta()


@pytest.mark.parametrize("note", [None, 3, {}, {"files": -1, "bytes": True}, {"files": "x" * 99}])
def test_what_a_stranger_notes_is_not_believed(twice, note):
    header = {**twice.second.recorder.header, "notes": {"disk": note}}
    assert Disk.of(header) == Disk(None, None)
    assert Disk.of({**header, "notes": note}) == Disk(None, None)


def test_the_page_s_run_writes_what_the_tree_holds_when_it_ends(tmp_path):
    """With write_back nothing is copied before it is evicted: at the end it is written all the same."""
    from dataclasses import replace

    run = Run(1, replace(settings(tmp_path), host_write="write_back"), None)
    played(run, 4)
    assert not list(tmp_path.glob("*.safetensors"))
    run.close()
    assert list(tmp_path.glob("*.safetensors"))
    again = played(Run(2, settings(tmp_path), None), 2)
    assert again.page.view("step", 1)["disk"]["total"]["read"] == 128
    again.close()


def test_without_a_disk_there_is_no_trace_of_one():
    run = played(Run(1, Settings(workload="tiers", host_kv_tokens=800), None), 4)
    assert "disk" not in run.page.meta() and "disk" not in run.page.view("step", 3)


def test_what_does_not_go_is_one_sentence(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for arguments, sentence in (
        (["--disk-dir", "x"], "needs host_kv_tokens"),
        (["--disk-dir", str(tmp_path / "file"), "--host-kv-tokens", "99"], "cannot be a folder"),
        (["--disk-dir", "x", "--host-kv-tokens", "99", "--tp", "2"], "disk_dir is for one process"),
        (["--disk-dir", "x", "--connect", "tcp://127.0.0.1:1"], "--disk-dir with --connect"),
        (["--disk-mb", "0"], "--disk-mb"),
        (["--disk-dir", "", "--host-kv-tokens", "99"], "disk_dir must be a path, got ''"),
        (["--draft-tokens", "9"], "--draft-tokens 9 goes with --speculative"),
    ):
        try:
            assert main([*arguments, "--no-open", "--export", str(tmp_path / "a.html")]) == 2
        except SystemExit as end:
            assert end.code == 2
        said = capsys.readouterr().err.strip()
        assert sentence in said and "\n" not in said, said


@pytest.mark.browser
@pytest.mark.slow
def test_a_second_run_in_a_browser(tab, twice):
    """What came from the disk, in a page of 1280 and one of 800 pixels, and before the projector."""
    driver = Driver(settings(twice.folder), speed=0)
    with leaving(tab, Live(driver)) as live:
        until_idle(driver)
        open_at(tab, live.url, "step 1")
        assert "128 tokens came from disk" in tab.inner_text(".disknow")
        assert "128 read in" in tab.inner_text(".disknow .moved")
        assert "files · " in tab.inner_text(".diskpart h2") and "of 8 MB" in tab.inner_text(".diskpart h2")
        assert tab.locator(".mr-tree text", has_text="· FROM DISK").count() == 1
        assert tab.is_visible(".tier.disk") and tab.locator(".lane .hitbar em.disk").count() == 1
        for width, projector in ((1280, False), (1280, True), (800, False)):
            tab.set_viewport_size({"width": width, "height": 800})
            if projector != ("projector" in (tab.get_attribute("body", "class") or "")):
                tab.keyboard.press("p")
            settle(tab)
            card, part = (tab.locator(each).bounding_box() for each in (".poolcard", ".diskpart"))
            assert part["y"] + part["height"] <= card["y"] + card["height"] + 1, (width, projector)
        tab.keyboard.press("Home")
        at(tab, "step 0")
        assert "0 tokens came from disk" in tab.inner_text(".disknow")
