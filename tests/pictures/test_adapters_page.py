"""Adapters on the page: whose tree is whose, what each said, and why another adapter's KV is of no use."""

from __future__ import annotations

import itertools

import pytest
from browsers import at, browser, leaving, open_at, tab, until, until_idle

from minirad import workloads
from minirad.observe import events as ev
from minirad.observe.event import Event
from minirad.observe.recorder import Recorder
from viz.draw import tree
from viz.fork import fork
from viz.live import Driver, Live, Replay, Run, Settings, main
from viz.web.ask import ask
from viz.web.commands import COMMANDS, Session
from viz.web.page import Page

__all__ = ["browser", "tab"]  # fixtures
NAMES = ("capitals", "oneword")
SETTINGS = Settings(workload="adapters", lora=NAMES)
TAGS = {"no adapter", *NAMES}


@pytest.fixture(scope="module")
def run() -> Run:
    run = Run(1, SETTINGS, None)
    while not run.idle:
        run.advance()
        run.engine.check()
    return run


def asked_alike(page: Page) -> dict[str, list[dict]]:
    """Requests by what they ask, in order."""
    requests = sorted(page.requests().values(), key=lambda each: int(each["id"][1:]))
    return {text: list(each) for text, each in itertools.groupby(requests, key=lambda each: each["label"])}


def told(frames) -> list[Event]:
    """All events but those with a time in them."""
    return [event for frame in frames for event in frame.events if not isinstance(event, ev.StepEnded)]


def test_each_question_is_asked_under_each_adapter_and_the_replies_differ(run):
    found = asked_alike(run.page)
    assert len(found) == 4 and all(len(each) == 3 for each in found.values())
    for requests in found.values():
        plain, capitals, oneword = requests
        assert [each["lora"] for each in requests] == ["", *NAMES]
        assert capitals["reply"] == plain["reply"].upper() != plain["reply"]
        assert len(oneword["reply"].split()) == 1 < len(plain["reply"].split())
        assert "<|" not in plain["reply"]


def test_the_cards_below_the_root_have_their_adapters_tag(run):
    view = run.trace.view("step")
    page = run.page.view("step", view.index)
    top = {number: node for number, node in page["nodes"].items() if node["parent"] == 0}
    assert sorted(node.get("lora", "") for node in top.values()) == ["", *NAMES]
    for detail in tree.DETAILS:
        text = tree.dot_text(view, run.trace.decode, tree.Options(detail=detail))
        cards = dict(line.split(" ", 1) for line in text.splitlines() if ' [id="n' in line)
        for number, node in page["nodes"].items():
            found = {tag for tag in TAGS if f">{tag}</" in cards[f"n{number}"]}
            wanted = {node.get("lora") or "no adapter"} if number in top else set()
            assert found == wanted, (detail, number)
    colours = dict(run.page.meta()["adapters"])
    assert list(colours) == [*NAMES, ""] and len(set(colours.values())) == 3
    assert all(colour in text for colour in colours.values())


def test_without_adapters_there_is_no_trace_of_one():
    run = Run(1, Settings(workload="adapters"), None)
    for _ in range(3):
        run.advance()
    assert "adapters" not in run.page.meta()
    assert not {"lora", "reply"} & set(next(iter(run.page.requests().values())))
    assert "adapter" not in run.page.view("step", 2)["svg"]


def test_why_another_adapters_kv_is_of_no_use(run):
    last = {"g": "step", "i": len(run.trace), "text": "What color is snow?", "as": "chat"}
    for name in ("", *NAMES):
        answer = ask(run.page, {**last, "lora": name})["answers"][0]
        assert answer["cause"] == "last" and answer["path"], "its own is there"
    first = next(i for i in range(1, 40) if "R1" in run.page.view("step", i)["left"])
    hello = {"g": "step", "i": first, "text": "What is the capital of France?", "as": "chat"}
    early = run.trace.view("event", next(
        i for i in range(1, 400) if "R2" in run.trace.view("event", i).state["requests"]
    ))  # fmt: skip
    asked = {**hello, "g": "event", "i": early.index, "lora": "oneword"}
    answer = ask(run.page, asked)["answers"][0]
    assert answer["cause"] == "adapter" and answer["cached"] == 0 and not answer["path"]
    assert "there under no adapter, where the same tokens have other keys and values" in answer["say"]
    why = run.page.requests()["R5"]["why"]  # its question came under no adapter before
    assert "that are there under no adapter" in why and "(by R4)" in why
    with pytest.raises(ValueError, match="an adapter has a name"):
        ask(run.page, {**last, "lora": 3})


def test_asking_by_hand_has_a_choice_of_the_adapter(run):
    session = Session(SETTINGS, 0, False, run)
    asked = {"text": "What color is snow?", "as": "chat"}
    assert COMMANDS["peek"](session, {**asked, "lora": "capitals"})["hit"] > 20
    name = COMMANDS["submit"](session, {**asked, "lora": "capitals"})["request"]
    while not run.idle:
        run.advance()
    done = run.page.requests()[name]
    assert (done["lora"], done["reply"]) == ("capitals", "SNOW IS WHITE.")
    for command in ("peek", "submit"):
        with pytest.raises(ValueError, match="unknown adapter 'loud'; known: capitals, oneword"):
            COMMANDS[command](session, {**asked, "lora": "loud"})
        with pytest.raises(ValueError, match="an adapter has a name, not '7'"):
            COMMANDS[command](session, {**asked, "lora": 7})


def test_recordings_forks_and_files_know_the_adapters(run, tmp_path):
    Recorder.save(run.recorder, tmp_path / "run.jsonl")
    replay = Replay(Recorder.load(tmp_path / "run.jsonl"), "run")
    assert asked_alike(replay.page) == asked_alike(run.page)
    assert replay.page.meta()["adapters"] == run.page.meta()["adapters"]
    engine, recorder = fork(replay.recording, 30)
    assert told(recorder.frames) == told(run.recorder.frames[:31])
    session = Session(Settings(), 0, False, replay)
    COMMANDS["fork"](session, {"frame": 12})
    assert session.settings.load_workload() and session.run_now.engine.config.lora == engine.config.lora
    again = workloads.from_recording(replay.recording)
    assert {(each.lora, each.extra_key) for each in again.sessions} == {
        ("", None),
        *((n, None) for n in NAMES),
    }


def test_what_does_not_go_is_one_sentence(capsys, tmp_path):
    for arguments, sentence in (
        (["--lora", "nosuch"], "nosuch"),
        (["--lora", "capitals", "--lora", "capitals"], "two adapters have the name 'capitals'"),
        (["--lora", "capitals", "--tp", "2"], "lora is for one process"),
        (["--lora", "capitals", "--connect", "tcp://127.0.0.1:1"], "--lora with --connect"),
    ):
        assert main([*arguments, "--no-open", "--export", str(tmp_path / "a.html")]) == 2
        said = capsys.readouterr().err.strip()
        assert sentence in said and "\n" not in said, said


@pytest.mark.browser
@pytest.mark.slow
def test_three_namespaces_in_a_browser(tab):
    driver = Driver(SETTINGS, speed=0)
    with leaving(tab, Live(driver)) as live:
        until_idle(driver)
        count = len(driver.run_now.trace)
        open_at(tab, live.url, f"step {count}")
        assert tab.locator(".adapters .adapter").all_inner_texts() == ["capitals", "oneword", "no adapter"]
        assert set(tab.locator(".lane .adapter").all_inner_texts()) == TAGS
        assert "SNOW IS WHITE." in tab.locator(".lane .reply").all_inner_texts()
        for name in TAGS:
            assert tab.locator(".mr-tree text", has_text=name).count() == 1
        tab.select_option("select.lora", "oneword")
        tab.fill("input.prompt", "What color is snow?")
        until(tab, "document.querySelector('.whatif b.some')")
        tab.keyboard.press("Enter")
        until(tab, "document.querySelector('.lane[data-request=R13] .reply')?.innerText === 'white'")
        tab.locator("input.prompt").blur()
        tab.keyboard.press("Home")
        at(tab, "step 0")
        tab.evaluate("location.hash = '#step=1'")
        at(tab, "step 1")
        assert tab.locator(".lane .reply").all_inner_texts() == [""], "no reply before it was given"
        tab.keyboard.press("w")
        tab.select_option(".miss select[aria-label=Adapter]", "capitals")
        tab.select_option(".miss select >> nth=0", "chat")
        tab.fill(".miss textarea", "What is the capital of France?")
        until(tab, "document.querySelector('.miss .verdict')?.innerText.includes('under no adapter')")
        assert "another adapter" in tab.inner_text(".miss .keys")
