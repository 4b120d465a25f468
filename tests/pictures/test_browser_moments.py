"""What a page says and does at odd moments: when the engine has broken, a picture fails, something is clicked
twice, another run has begun meanwhile, or another server is there. In a real browser."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from browsers import SEEK, at, break_at, browser, leaving, open_at, run_to_its_end, tab, until

from minirad import Engine, EngineConfig, SamplingParams
from minirad.fleet.endpoints import free_ports
from minirad.observe.recorder import Recorder
from viz.live import Driver, Live, Replay, Settings
from viz.web.export import export

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "tab"]  # fixtures

PLAY, PAUSE = "Play (space)", "Pause (space)"
SAID = "document.querySelector('.say .text').innerText"
SLOW = """([failing, delay]) => {
    const real = window.real ??= window.fetch;
    window.fetch = (where, ...more) => {
        if (!String(where).startsWith(failing ? 'view' : 'do/')) return real(where, ...more);
        window.asked = (window.asked ?? 0) + 1;
        if (failing && !delay) return Promise.reject(new Error('no picture'));
        return new Promise((done) => setTimeout(done, delay)).then(() => real(where, ...more));
    };
}"""


def title(tab) -> str:
    return tab.get_attribute(".go.main", "title")


@contextmanager
def paused_at(tab, steps, **settings):
    """A page whose engine stands still after some steps, with more to do."""
    driver = Driver(Settings(**settings), speed=8, paused=True)
    with leaving(tab, Live(driver)) as server:
        for _ in range(steps):
            driver.command("step", {}).result(60)
        tab.goto(server.url)
        at(tab, f"step {steps}")
        yield driver


@pytest.mark.parametrize("compare", [None, "lru,lfu"])
def test_what_an_engine_did_before_it_broke_can_be_played(tab, monkeypatch, capfd, compare):
    break_at(monkeypatch, 10)
    with leaving(tab, Live(Driver(Settings(workload="chat", compare=compare), speed=0))) as server:
        tab.goto(server.url)
        until(tab, "document.querySelector('.banner').innerText.includes('a broken promise')")
        at(tab, "step 10")
        assert title(tab) == PLAY
        tab.select_option("select[aria-label=Speed]", "8")
        tab.keyboard.press("Home")
        at(tab, "step 0")
        tab.keyboard.press("End")
        at(tab, "step 10")
        tab.locator(".go.main").click()
        until(tab, "['step 2', 'step 3', 'step 4'].includes(document.body.dataset.position)")
        assert title(tab) == PAUSE
        at(tab, "step 10")
        until(tab, f"document.querySelector('.go.main').title === '{PLAY}'")


@pytest.mark.parametrize("compare", [None, "lru,lfu"])
@pytest.mark.parametrize("delay", [0, 150], ids=["failing", "late"])
def test_a_picture_that_fails_or_is_late_never_starts_the_engine(tab, compare, delay):
    """The past is played, and its pictures fail; or they are late, and others are asked for meanwhile."""
    with paused_at(tab, 30, workload="chat", compare=compare) as driver:
        tab.evaluate(SEEK, 5)
        at(tab, "step 5")
        tab.locator(".go.main").click()
        until(tab, "Number(document.body.dataset.position.split(' ')[1]) >= 7")
        tab.evaluate(SLOW, [True, delay])
        for key in "12" * 6:
            tab.wait_for_timeout(60)
            if delay:
                tab.keyboard.press(key if compare is None else " ")
        if not delay:
            until(tab, f"document.querySelector('.go.main').title === '{PLAY}'")
            assert "the server does not answer" in tab.evaluate(SAID)
        tab.wait_for_timeout(500)
        steps = driver.run_now.clock if compare is None else driver.run_now.sides[0].clock
        assert not driver.playing and steps == 30
        tab.keyboard.press("2")
        tab.evaluate(SLOW, [False, 0])


def test_the_last_picture_is_asked_for_again(tab):
    """Nothing newer comes when a run is over. And not oftener for each of the frames that came meanwhile."""
    with paused_at(tab, 3, workload="chat") as driver:
        tab.evaluate(SLOW, [True, 0])
        for _ in range(9):
            driver.command("step", {}).result(60)
            tab.wait_for_timeout(50)
        until(tab, f"{SAID}.includes('the server does not answer')")
        before = tab.evaluate("window.asked")
        tab.wait_for_timeout(1500)
        assert tab.evaluate("window.asked") <= before + 3
        tab.evaluate(SLOW, [False, 0])
        at(tab, "step 12")


def test_a_fork_is_from_the_step_that_its_button_names(tab):
    """The page plays on behind the open panel."""
    driver = Driver(Settings(workload="chat"), speed=8)
    with leaving(tab, Live(driver)) as server:
        tab.goto(server.url)
        until(tab, "Number(document.body.dataset.position?.split(' ')[1]) >= 3")
        tab.get_by_role("button", name="restart…").click()
        until(tab, "Number(document.body.dataset.position?.split(' ')[1]) >= 8")
        button = tab.locator(".panel.restart button", has_text="fork from step")
        with tab.expect_request("**/do/fork") as asked:
            named = button.evaluate(
                "(b) => { const { textContent } = b; b.click(); b.click(); return textContent; }"
            )
        assert named == f"fork from step {asked.value.post_data_json['frame'] + 1}"
        assert asked.value.response().status == 200
        until(tab, "document.querySelector('.panel.restart').hidden")
        assert driver.run_now.number == 2, "clicked twice, begun once"


def test_a_prompt_is_sent_once_and_the_next_one_can_be_typed(tab):
    with paused_at(tab, 2, workload="chat") as driver:
        before = len(driver.run_now.page.requests())
        tab.evaluate(SLOW, [False, 300])
        tab.fill(".prompt", "Who are you?")
        with tab.expect_response("**/do/submit"):
            tab.keyboard.press("Enter")
            tab.keyboard.press("Enter")
            tab.fill(".prompt", "And who am I?")
        until(tab, f"{SAID}.includes('waits in the queue; press step or play')")
        assert tab.input_value(".prompt") == "And who am I?"
        tab.evaluate(SLOW, [False, 0])
        assert len(driver.run_now.page.requests()) == before + 1


def test_a_request_that_waits_no_more_is_not_said_to_wait(tab):
    """The notice stood in the place of the headline for seconds after the request was done."""
    with paused_at(tab, 0, workload="none") as driver:
        tab.fill(".prompt", "Who are you?")
        with tab.expect_response("**/do/submit"):
            tab.keyboard.press("Enter")
        at(tab, "step 1")
        until(tab, f"{SAID}.includes('R1 waits in the queue; press step or play')")
        driver.command("step", {}).result(60)
        at(tab, "step 2")
        assert "waits" not in tab.evaluate(SAID) and tab.evaluate(SAID).startswith("R1 matched 0 of ")


def test_a_notice_stands_while_the_page_goes_on(tab):
    with paused_at(tab, 20, workload="chat") as driver:
        driver.command("policy", {"policy": "lfu"}).result(60)
        driver.command("speed", {"speed": 20}).result(60)
        for number in (2, 3):  # the same words again are news of another run
            frame = len(driver.run_now.trace) - 1
            driver.command("fork", {"frame": frame}).result(60)
            until(tab, f"{SAID}.startsWith('This fork has the recorded requests only')")
            until(tab, "Number(document.body.dataset.position.split(' ')[1]) >= 8")
            assert tab.evaluate(SAID).startswith("This fork has the recorded requests only")
            tab.keyboard.press("ArrowLeft")
            until(tab, f"!{SAID}.startsWith('This fork')")
            assert driver.run_now.number == number
            driver.command("policy", {"policy": "fifo"}).result(60)


def test_who_looks_closer_or_steps_by_hand_stops_the_engine(tab):
    for key in ("1", "ArrowRight"):
        driver = Driver(Settings(workload="chat"), speed=8)
        with leaving(tab, Live(driver)) as server:
            tab.goto(server.url)
            until(tab, "Number(document.body.dataset.position?.split(' ')[1]) >= 3")
            with tab.expect_response("**/do/*"):
                tab.keyboard.press(key)
            until(tab, "document.querySelector('.status').innerText.includes('paused')")
            assert title(tab) == PLAY and not driver.playing


@pytest.mark.parametrize("key", ["1", "s"])
def test_a_question_ends_where_the_page_goes_elsewhere(tab, tmp_path, key):
    with run_to_its_end(Settings(workload="mixed"), tmp_path) as (server, _):
        open_at(tab, server.url, "step 0")
        tab.keyboard.press("q")
        while not tab.is_visible(".panel.quiz"):
            step = tab.evaluate("document.body.dataset.position")
            tab.keyboard.press("ArrowRight")
            moved = f"document.body.dataset.position !== '{step}'"
            until(tab, f"{moved} || !document.querySelector('.panel.quiz').hidden")
        tab.locator("h1").click()
        tab.keyboard.press(key)
        until(tab, "document.querySelector('.panel.quiz').hidden")
        tab.goto("about:blank")


def test_a_new_run_has_none_of_the_requests_that_were_asked_about(tab):
    """The texts stay: they are typed ones now."""
    with paused_at(tab, 40, workload="chat") as driver:
        tab.keyboard.press("d")
        until(tab, "document.querySelector('.doctor .verdict')")
        picks = "[...document.querySelectorAll('.doctor select')].map((one) => one.value)"
        assert all(tab.evaluate(picks))
        tab.keyboard.press("Escape")
        tab.keyboard.press("w")
        tab.locator(".lane").first.click()
        until(tab, "document.querySelector('.miss .verdict')")
        driver.command("restart", {"workload": "none", "kv_tokens": 4000}).result(60)
        at(tab, "step 0")
        until(tab, "document.querySelector('.miss .verdict')?.innerText.includes('finds 0 of')")
        tab.keyboard.press("Escape")
        tab.keyboard.press("d")
        assert not any(tab.evaluate(picks))
        tab.locator(".doctor textarea").first.press_sequentially("!")
        until(tab, "document.querySelector('.doctor .verdict').innerText.startsWith('They part')")
        assert tab.locator(".doctor p.bad, .miss p.bad").all_inner_texts() == []


def test_the_speed_is_changed_while_the_past_is_played(tab, tmp_path):
    """At half a step in a second this would take minutes."""
    with run_to_its_end(Settings(workload="mixed"), tmp_path) as (server, file):
        steps = len(server.driver.run_now.trace)
        assert steps > 100
        open_at(tab, file.as_uri(), "step 0")
        tab.select_option("select[aria-label=Speed]", "0.5")
        tab.locator(".go.main").click()
        at(tab, "step 1")
        tab.select_option("select[aria-label=Speed]", "0")
        at(tab, f"step {steps}")


@pytest.mark.parametrize("compare", [None, "lru,lfu"])
def test_the_menu_of_speeds_shows_the_engines_own(tab, compare):
    """Whichever it is: it showed the entry that is nearest by difference, so 1000 was 8 and 0.2 "max"."""
    chosen = "document.querySelector('select[aria-label=Speed]').selectedOptions[0]?.textContent"
    entries = (
        "[...document.querySelectorAll('select[aria-label=Speed] option')].map(o => o.textContent).join()"
    )
    with paused_at(tab, 1, workload="chat", compare=compare) as driver:
        known = tab.evaluate(entries)
        for speed, text in [(20, "20 /s"), (1000, "1000 /s"), (0.2, "0.2 /s"), (0, "max"), (2.5, "2.5 /s")]:
            driver.command("speed", {"speed": speed}).result(60)
            until(tab, f"{chosen} === '{text}'")
        assert tab.evaluate(entries) == known.replace("3 /s", "2.5 /s,3 /s")
        driver.command("speed", {"speed": 8}).result(60)
        until(tab, f"{chosen} === '8 /s'")
        assert tab.evaluate(entries) == known


def test_usage_counts_what_was_used_and_the_steps_that_were_recorded(tab, tmp_path):
    """Nothing used is 0, not 1; of a recording that begins later the steps before are none."""
    said = {}
    for name, (tokens, before, steps) in {"unused": (2048, 0, 0), "late": (64, 5, 3)}.items():
        engine = Engine(EngineConfig(kv_tokens=tokens))
        if steps:
            engine.add_request("Who are you?", SamplingParams(max_new_tokens=30, ignore_eos=True))
        for _ in range(before):
            engine.step()
        recorder = Recorder(engine)
        for _ in range(max(steps, 1)):
            engine.step()
        export(Replay(recorder, name).page, tmp_path / f"{name}.html")
        open_at(tab, (tmp_path / f"{name}.html").as_uri(), "step 0")
        tab.keyboard.press("End")
        at(tab, f"step {len(recorder.frames)}")
        said[name] = tab.inner_text(".card:has(.chart) h2:has-text('Usage') small")
        tab.goto("about:blank")
    assert said == {"unused": "at most 0 of 2048", "late": "over 3 steps"}


def test_who_was_there_before_the_recording_has_a_lane(tab, tmp_path):
    """From its first moment on, at which one runs and one waits."""
    engine = Engine(EngineConfig(kv_tokens=64, max_running=1))
    for _ in range(2):
        engine.add_request("Who are you?", SamplingParams(max_new_tokens=5, ignore_eos=True))
    for _ in range(3):
        engine.step()
    recorder = Recorder(engine)
    while engine.has_work:
        engine.step()
    export(Replay(recorder, "late").page, tmp_path / "late.html")
    open_at(tab, (tmp_path / "late.html").as_uri(), "step 0")
    lanes = "[...document.querySelectorAll('.lane')].map(e => e.dataset.request + e.className.slice(4))"
    lanes += ".join()"
    assert tab.evaluate(lanes) == "R1 runs,R2 waits"
    assert "came before the recording began" in tab.inner_text(".lane:first-child .who")
    tab.keyboard.press("ArrowRight")
    at(tab, "step 1")
    assert "1 st" in tab.inner_text(".lane:last-child .hitbar")
    tab.keyboard.press("End")
    at(tab, f"step {len(recorder.frames)}")
    assert tab.evaluate(lanes) == "R1,R2" and tab.inner_text(".hitbar >> nth=0").startswith("0/")


@pytest.mark.parametrize("compare", [None, "lru,lfu"])
def test_an_address_beyond_the_end_is_the_present(tab, compare):
    """As long as there is no more; and then the page follows."""
    with paused_at(tab, 4, workload="chat", compare=compare) as driver:
        url = tab.url.split("#")[0]
        tab.goto("about:blank")
        tab.goto(f"{url}#step=50")
        at(tab, "step 4")
        driver.command("step", {}).result(60)
        at(tab, "step 5")


@pytest.mark.parametrize("compare", [None, "lru,lfu"])
def test_a_page_that_is_loaded_again_goes_on_where_it_was(tab, compare):
    """At the start of a run that has not begun; at the present, which the address is behind; in the past."""
    with paused_at(tab, 0, workload="chat", compare=compare) as driver:
        tab.keyboard.press("Home")
        until(tab, "location.hash === '#step=0'")
        tab.reload()
        at(tab, "step 0")
        tab.locator(".go.main").click()
        until(tab, "Number(document.body.dataset.position.split(' ')[1]) >= 6")
        tab.reload()
        until(tab, f"document.querySelector('.go.main')?.title === '{PAUSE}'")
        until(tab, "Number(document.body.dataset.position?.split(' ')[1]) >= 12")
        tab.keyboard.press("ArrowLeft")
        until(tab, "document.querySelector('.status').innerText.includes('paused')")
        before = tab.evaluate("document.body.dataset.position")
        until(tab, f"location.hash === '#{before.replace(' ', '=')}' && !history.state.follow")
        tab.reload()
        at(tab, before)
        assert title(tab) == PLAY and not driver.playing


@pytest.mark.parametrize("compare", [None, "lru,lfu"])
def test_the_browsers_back_leads_back(tab, compare):
    """To a position; and to where a page followed, which is the present."""
    with paused_at(tab, 9, workload="chat", compare=compare):
        until(tab, "location.hash === '#step=9' && history.state.follow")
        for step in (5, 3):
            tab.evaluate(f"location.hash = '#step={step}'")
            at(tab, f"step {step}")
            until(tab, f"location.hash === '#step={step}' && history.state?.follow === false")
        for step in (5, 9):
            tab.go_back()
            at(tab, f"step {step}")
            until(tab, f"location.hash === '#step={step}'")


def test_waits_are_counted_where_a_recording_begins_in_the_middle(tab):
    engine = Engine(EngineConfig(kv_tokens=400, max_running=1))
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine.generate(["Once"], params)
    for text in ("one", "two"):
        engine.add_request(text, params)
    recorder = Recorder(engine)
    engine.add_request("three", params)
    while engine.has_work:
        engine.step()
    with leaving(tab, Live(Driver(Settings(), 0, replay=Replay(recorder, "later")))) as server:
        open_at(tab, server.url, "step 4")
        assert tab.locator(".lane.waits .hitbar").first.get_attribute("title").startswith("waits for 4 steps")


def test_what_is_done_by_hand_is_no_step(tab):
    """A request waits for steps of the engine, whatever is clicked between two of them."""
    with paused_at(tab, 0, workload="none", kv_tokens=400) as driver:
        driver.command("submit", {"text": "Who are you?", "as": "chat"}).result(60)
        waits = "document.querySelector('.lane.waits .hitbar')?.title"
        until(tab, f"{waits} === 'not admitted yet'")
        for policy in ("lfu", "fifo"):
            driver.command("policy", {"policy": policy}).result(60)
        at(tab, "step 3")
        assert tab.evaluate(waits) == "not admitted yet"
        tab.get_by_role("button", name="restart…").click()
        chosen = "[...document.querySelectorAll('.panel.restart select')].map((one) => one.value)"
        assert "fifo" in tab.evaluate(chosen) and "lru" not in tab.evaluate(chosen)


def test_who_can_do_nothing_is_told_why(tab):
    tab.allowed_complaints += ["ERR_", "Failed to load"]
    with Live(Driver(Settings(workload="none", kv_tokens=400), speed=0)) as server:
        tab.goto(server.url)
        until(tab, "document.querySelector('.status').innerText === 'no request yet'")
        for press in ("ArrowRight", " "):
            tab.keyboard.press(press)
            until(tab, f"{SAID} === 'Nothing is left to do: submit a prompt, or restart.'")
            tab.keyboard.press("Home")
            until(tab, f"!{SAID}.includes('restart')")
    until(tab, "document.querySelector('.status').innerText.includes('lost')")
    tab.click("text=flush")
    until(tab, f"{SAID} === 'the server does not answer'")


def test_another_server_is_there_with_another_page(tab):
    tab.allowed_complaints += ["ERR_", "Failed to load"]
    port = free_ports(1)
    with Live(Driver(Settings(workload="chat"), speed=0), port) as server:
        tab.goto(server.url)
        until(tab, "document.querySelector('.status').innerText.includes('all requests done')")
    until(tab, "document.querySelector('.status').innerText.includes('lost')")
    with leaving(tab, Live(Driver(Settings(workload="chat", compare="lru,lfu"), speed=0), port)):
        tab.wait_for_selector(".sides .card")  # which also waits for a page that is being loaded
        until(tab, "document.querySelector('.status').innerText.includes('both are done')")
        assert tab.locator(".undrawn").count() == 0
