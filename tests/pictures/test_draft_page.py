"""The page's data about drafts: what was guessed, accepted and given back at a position, and the sums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minirad.config import SamplingParams
from minirad.observe import events as ev
from minirad.observe.draft_events import DraftVerified, TokensDrafted, TokensForced
from minirad.observe.recorder import Recorder
from viz import live
from viz.live import Replay, Run, Settings
from viz.notebook.panels import Ledger, payload
from viz.view.drafts import Draft, draft_pages, drafts_in, told
from viz.view.pool import page_map
from viz.words import summary

SHOWN = 24  # steps in the first ten seconds: three a second, once the engine is there


@pytest.fixture(scope="module", params=[("eagle", 1), ("ngram", 4)], ids=["eagle", "ngram, pages of 4"])
def run(request):
    """The workload of that page with two samples of a story beside it, in a pool that it does not fit."""
    source, page = request.param
    settings = Settings("drafts", kv_tokens=200, page_size=page, speculative=source)
    run = Run(1, settings, None)
    story = "<|im_start|>user\nWrite a story about a cat.<|im_end|>\n<|im_start|>assistant\n"
    run.engine.add_request(story, SamplingParams(max_new_tokens=24, temperature=0.8, n=2, seed=3))
    while not run.idle:
        run.advance()
        run.engine.check()
    assert any(isinstance(e, ev.RequestForked) for frame in run.recorder.frames for e in frame.events)
    return run


def events_of(run, kind):
    """(frame, position by event, event) of each event of a kind."""
    at = 0
    for index, frame in enumerate(run.recorder.frames):
        for event in frame.events:
            at += 1
            if isinstance(event, kind):
                yield index, at, event


def test_a_steps_headline_counts_what_drafts_yielded(run):
    seen = 0
    for index, frame in enumerate(run.recorder.frames):
        found = [event for event in frame.events if isinstance(event, DraftVerified)]
        said = summary(frame.events)[1]
        if found and "drafted tokens accepted" in said:
            seen += 1
            got = sum(len(event.tokens) for event in found)
            assert f"{got} token" in said, (index, said)
        assert not (found and "decoded for" in said), "the batch as scheduled is not what came of it"
    assert seen > 3


def drafts_at(run, granularity, index):
    return run.page.view(granularity, index)["drafts"]


def line_of(shown, request):
    return next(line for line in shown["lines"] if line["request"] == request)


def pages_of(shown, request):
    return {
        fate: [page for first, count in runs for page in range(first, first + count)]
        for fate, name, runs in shown["pages"]
        if name == request
    }


def test_sums_are_the_engines_own(run):
    shown, counted = drafts_at(run, "step", len(run.trace)), run.engine.drafts
    assert shown["sums"] == {
        "drafted": counted.drafted, "accepted": counted.accepted,
        "length": counted.acceptance_length, "a_pass": counted.tokens_a_pass,
        "tokens": counted.tokens, "forced": 0,
    }  # fmt: skip
    assert 0 < counted.accepted < counted.drafted
    middle = drafts_at(run, "step", len(run.trace) // 2)["sums"]
    assert 0 < middle["drafted"] < counted.drafted  # so far: up to the moment on view


def test_every_decoding_request_has_a_line_and_says_what_it_sampled(run):
    decode, idle = run.trace.decode, 0
    for index, frame in enumerate(run.recorder.frames):
        lines = drafts_at(run, "step", index + 1)["lines"]
        drafted = {e.request: e for e in frame.events if isinstance(e, TokensDrafted)}
        assert set(drafted) <= {line["request"] for line in lines}
        for line in lines:
            sampled = [e.token for e in frame.events if isinstance(e, ev.TokenSampled)
                       and e.request == line["request"]]  # fmt: skip
            assert sampled and len(line["own"]) == 1
            accepted = [text for text, fate in line["tokens"] if fate == "accepted"]
            assert len(accepted) + 1 == len(sampled)
            assert "■" in line["own"][0] or decode(sampled[-1:]).strip() == line["own"][0].strip(" ␣¶")
            idle += line["stage"] == "none"
            assert (line["request"] in drafted) == (line["stage"] == "returned")
        computed = [e for e in frame.events if isinstance(e, ev.BatchScheduled) and e.kind == "decode"]
        assert not computed or [line["request"] for line in lines] == list(computed[0].requests)
    assert idle or run.settings.speculative == "eagle"  # ngram finds nothing now and then


def test_by_event_slots_are_held_then_judged_then_free(run):
    rejected = kept = 0
    for _frame, at, event in events_of(run, TokensDrafted):
        page = run.settings.page_size
        before, drafted = drafts_at(run, "event", at - 1), drafts_at(run, "event", at)
        assert line_of(before, event.request)["stage"] == "slots"  # handed out before they are drafted
        line = line_of(drafted, event.request)
        assert line["now"] and drafted["now"] == "draft" and not line["own"]
        assert [fate for _, fate in line["tokens"]] == ["held"] * len(event.tokens)
        pages = sorted({slot // page for slot in event.slots})
        assert pages_of(drafted, event.request) == {"held": pages}
        cells = page_map(run.trace.view("event", at)).cells
        assert all(cells[number - 1] < 0 for number in pages)  # the request's own
        verified, after = drafts_at(run, "event", at + 1), drafts_at(run, "event", at + 2)
        told_of = run.trace.view("event", at + 1).events[0]
        assert isinstance(told_of, DraftVerified) and verified["now"] == "verify"
        accepted = [fate for _, fate in line_of(verified, event.request)["tokens"]].count("accepted")
        assert accepted == told_of.accepted
        free = run.trace.view("event", at + 2).events[0]
        if isinstance(free, ev.SlotsFreed) and free.cause == "rejected":
            rejected += 1
            assert after["now"] == "return" and line_of(after, event.request)["stage"] == "returned"
            back = sorted({slot // page for slot in free.slots})
            assert pages_of(after, event.request)["returned"] == back
            cells = page_map(run.trace.view("event", at + 2), with_ghosts=False).cells
            assert not any(cells[number - 1] for number in back)
        else:
            kept += 1
            assert line_of(verified, event.request)["stage"] == "returned"
    assert rejected and kept


def test_a_recording_shows_the_same(run, tmp_path):
    run.recorder.save(tmp_path / "drafts.jsonl")
    again = Replay(Recorder.load(tmp_path / "drafts.jsonl"), "drafts.jsonl").page
    assert again.meta()["speculative"] == run.settings.speculative
    for granularity in ("step", "scene"):
        for index in range(run.trace.count(granularity)):
            assert again.view(granularity, index)["drafts"] == drafts_at(run, granularity, index)


def test_a_scene_has_the_drafts_of_all_its_steps(run):
    scene = max(range(run.trace.count("scene")), key=lambda i: len(drafts_at(run, "scene", i)["lines"]))
    lines = drafts_at(run, "scene", scene)["lines"]
    assert len({line["step"] for line in lines}) > 1 and all(line["tokens"] for line in lines)


def test_the_notebook_draws_every_moment_of_a_draft(run):
    ledger = Ledger(run.recorder, run.trace.decode)
    _, at, event = next(events_of(run, TokensDrafted))
    for index in range(at - 1, at + 4):
        shown = payload(run.trace, run.trace.view("event", index), ledger)
        assert len(shown["pool"]["cells"]) == 200 // run.settings.page_size
        assert shown["sentence"]
    assert f"{event.request}: {len(event.tokens)} tokens drafted" in str(
        payload(run.trace, run.trace.view("event", at), ledger)["events"]
    )


def test_a_page_without_drafts_has_no_panel():
    run = Run(1, Settings("raw"), None)
    run.advance()
    assert "drafts" not in run.page.view("step", 1) and "speculative" not in run.page.meta()


@pytest.mark.parametrize("source", ["ngram", "eagle"])
def test_the_workload_shows_it_within_seconds(source):
    """Drafts that hold and drafts that do not, and a fork: with eagle of pairs."""
    run = Run(1, live.settings_of(live._parser().parse_args(["--speculative", source])), None)
    assert run.settings.workload == "drafts" and run.engine.config.bigram_keys == (source == "eagle")
    while run.clock < SHOWN:
        run.advance()
    verified = [event for *_, event in events_of(run, DraftVerified)]
    assert sum(e.accepted for e in verified) >= 10
    assert sum(not e.accepted for e in verified) >= 2
    assert any(events_of(run, ev.NodeSplit))


def test_words():
    draft = Draft("R1", 0, "verified", "eagle", (5, 6, 7, 8), (9, 10, 11, 14), 1, (4,))
    assert told(draft) == "1 of 4 accepted; slots 10–11, 14 to give back"
    assert draft.fates() == ["accepted", "rejected", "rejected", "rejected"]
    assert draft_pages([draft], 4) == [("rejected", "R1", [2, 3]), ("accepted", "R1", [2])]
    assert told(Draft("R1", 0, "returned", "eagle", (5, 6), (9, 10), 0, (4,), (10,))) == (
        "0 of 2 accepted; slot 10 given back, 1 kept in a page in use"
    )
    ends = Draft("R1", 0, "returned", "eagle", (5, 6), (9, 10), 1, (6,), ())
    assert ends.fates() == ["accepted", "last"] and told(ends) == "1 of 2 accepted; 1 kept in a page in use"
    assert told(Draft("R1", 0, "slots", slots=(7,))) == "slot 7 handed out"
    assert told(Draft("R1", 0, "returned", "eagle", (5,), (9,), 1, (6,))) == "1 of 1 accepted"


def test_a_retracted_request_is_none_that_decodes():
    """It may come back in the same step, with a prompt to compute."""
    events = [ev.RequestRetracted("R1", 3, 2), ev.BatchScheduled("mixed", ("R1", "R2"), (5, 1))]
    assert [draft.request for draft in drafts_in(events, 2, {"R1", "R2"})] == ["R2"]


def test_a_stream_of_others_drafts_nothing(capsys):
    assert live.main(["--connect", "tcp://127.0.0.1:1", "--speculative", "ngram"]) == 2
    assert "--speculative with --connect" in capsys.readouterr().err


# ---------------------------------------------------------------------- jump-forward


@pytest.fixture(scope="module", params=[None, "eagle"], ids=["alone", "beside drafts"])
def jumping(request):
    """Records as JSON, of which a grammar forces much."""
    run = Run(1, live.settings_of(live._parser().parse_args(["--jump-forward"])), None)
    assert run.settings.workload == "records" and run.engine.config.jump_forward
    run = Run(1, replace(run.settings, speculative=request.param, page_size=2), None)
    while not run.idle:
        run.advance()
        run.engine.check()
    return run


def test_sums_of_forced_tokens_are_the_engines_own(jumping):
    sums, counted = drafts_at(jumping, "step", len(jumping.trace))["sums"], jumping.engine.drafts
    told_of = {"drafted", "accepted", "forced", "tokens"}
    assert {name: sums[name] for name in told_of} == {name: getattr(counted, name) for name in told_of}
    assert sums["a_pass"] == pytest.approx(counted.tokens_a_pass) and sums["a_pass"] > 3
    assert sums["forced"] > sums["tokens"] / 2 and bool(sums["drafted"]) == bool(jumping.settings.speculative)


def test_what_is_forced_is_drawn_so_from_the_slots_to_the_tokens(jumping):
    """In the panel, in the pool and in the request's lane: never as a guess, and none of it is given back."""
    seen, page = 0, jumping.settings.page_size
    meta = jumping.page.meta()
    assert meta["jump_forward"] and meta.get("speculative") == jumping.settings.speculative
    for frame, at, event in events_of(jumping, TokensForced):
        pages = sorted({slot // page for slot in event.slots})
        for moment in (at - 1, at, at + 1):
            shown = drafts_at(jumping, "event", moment)
            mine = [line for line in shown["lines"] if line["request"] == event.request]
            if not mine or mine[0]["stage"] == "none":  # what happened before was about another one
                assert moment == at - 1
                continue
            assert {fate for _, fate in mine[0]["tokens"]} == {"forced"}
            assert pages_of(shown, event.request) == {"forced": pages}
            cells = page_map(jumping.trace.view("event", moment)).cells
            assert all(cells[number - 1] < 0 for number in pages)  # the request's own
        assert drafts_at(jumping, "event", at)["now"] == "force"
        line = line_of(drafts_at(jumping, "step", frame + 1), event.request)
        sampled = [e.token for e in jumping.recorder.frames[frame].events if isinstance(e, ev.TokenSampled)
                   and e.request == event.request]  # fmt: skip
        assert len(line["tokens"]) == len(event.tokens) == len(sampled) - 1 and len(line["own"]) == 1
        assert line["say"].startswith(f"{len(event.tokens)} forced by its grammar, in slot")
        seen += 1
    assert seen > 12
    for name, life in jumping.page._lives.by_id.items():
        forced = [(frame, e) for frame, _, e in events_of(jumping, TokensForced) if e.request == name]
        assert jumping.page._request(life)["forced"] == [(frame, len(e.tokens)) for frame, e in forced] != []


def test_a_steps_headline_counts_what_was_forced(jumping):
    seen = 0
    for frame in jumping.recorder.frames:
        forced = [event for event in frame.events if isinstance(event, TokensForced)]
        said = summary(frame.events)[1]
        assert not (forced and "decoded for" in said)
        seen += f"{sum(len(event.tokens) for event in forced)} tokens forced for R" in said
    assert seen > 5


def test_a_recording_of_forced_tokens_shows_the_same(jumping, tmp_path):
    jumping.recorder.save(tmp_path / "forced.jsonl")
    again = Replay(Recorder.load(tmp_path / "forced.jsonl"), "forced.jsonl").page
    for index in range(jumping.trace.count("step")):
        assert again.view("step", index)["drafts"] == drafts_at(jumping, "step", index)


def test_forced_tokens_in_words():
    draft = Draft("R1", 0, "forced", "", (5, 6), (9, 10), own=(4,), forced=True, said=3)
    assert told(Draft("R1", 0), "forced") == "nothing forced yet"
    assert told(draft) == "2 forced by its grammar, in slots 9–10" and draft.fates() == ["forced"] * 2
    assert draft_pages([draft], 4) == [("forced", "R1", [2])] and draft.rejected == ()
    assert Draft("R1", 0, "slots", slots=(9, 10), forced=True).fates() == ["forced"] * 2
