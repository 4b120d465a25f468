"""viz/web/ranks.py: the page of one engine on several ranks, from recordings as `--tp` leaves them."""

from __future__ import annotations

import base64
import copy
import dataclasses
import gzip
import json
import re
from pathlib import Path

import pytest
from test_live import Client, wait

from minirad import SamplingParams, workloads
from minirad.observe import events as ev
from minirad.observe.rank_events import RanksAgreed, RanksDiffered, RanksTold
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from viz import live
from viz.live import Driver, Live, Replay, Run, Settings
from viz.web import launch
from viz.web.ranks import Ranks, difference, rank_path, recorded_ranks

UNLIKE = "rank 1 has lock_ref 2 at n3 ('Answer'), rank 0 has 1"


@pytest.fixture(scope="module")
def alone() -> Recording:
    """The first sessions of the mixed workload on one rank, in a pool small enough for evictions."""
    mixed = workloads.load("mixed")
    some = dataclasses.replace(mixed, sessions=mixed.sessions[:8], kv_tokens=320)
    run = Run(1, Settings(), some)
    while not run.idle:
        run.advance()
    run.close()
    return run.recorder


def as_ranks(alone: Recording, tp: int = 2, differ: int | None = None) -> list[Recording]:
    """What so many ranks would have recorded of it. differ: the step after which rank 1 is not as rank 0."""
    header = copy.deepcopy(alone.header)
    header["config"]["tp"] = tp
    ranks = [Recording(copy.deepcopy(header)) for _ in range(tp)]
    since: list[ev.Event] = []  # asked between two steps: the others hear of it with the next one
    for frame in alone.frames:
        since += frame.events
        events = list(frame.events)
        if events[-1].ends_frame:
            asked = [event for event in since if isinstance(event, ev.RequestAdded)]
            ended = tuple(event.request for event in since if isinstance(event, ev.RequestAborted))
            size = 40 + sum(60 + 4 * len(event.token_ids) for event in asked)
            names = tuple(event.request for event in asked)
            events.insert(0, RanksTold(frame.step, names, ended, (), size, tp))
            same = RanksAgreed(frame.step, f"{frame.step:032x}", tp)
            events.insert(-1, same if frame.step != differ else RanksDiffered(frame.step, 1, UNLIKE))
            for other in ranks[1:]:
                other.frames.append(Frame(len(other), frame.step, tuple(since)))
            since = []
        ranks[0].frames.append(Frame(len(ranks[0]), frame.step, tuple(events)))
        if frame.step == differ:
            break
    return ranks


def shown(ranks: list[Recording]) -> Ranks:
    return Ranks(Replay(ranks[0], "run.jsonl"), dict(enumerate(ranks[1:], start=1)))


def test_all_that_a_page_asks_for_as_it_grows_is_all_there_is() -> None:
    """Also of ranks whose frames are fewer: rank 0 alone has one of what is asked between two steps."""
    run = Run(1, Settings(workload="none", kv_tokens=200), None)
    for _ in range(3):
        run.engine.add_request("Who are you?", SamplingParams(max_new_tokens=3))
        run.recorder.cut()
        while run.engine.has_work:
            run.engine.step()
    run.close()
    whole = as_ranks(run.recorder)
    assert len(whole[0]) > len(whole[1])
    grown = [Recording(each.header) for each in whole]
    page, known, had = shown(grown).page, {}, 0
    for frame in whole[0].frames:
        grown[0].frames.append(frame)
        grown[1].frames += [each for each in whole[1].frames[len(grown[1]) :] if each.step <= frame.step]
        known |= page.requests(had)
        had = len(page.frames())
    assert known == page.requests() and len(known) == 6


@pytest.fixture(scope="module")
def pair(alone) -> Ranks:
    return shown(as_ranks(alone))


@pytest.fixture
def files(alone, tmp_path) -> Path:
    """run.jsonl with run.rank1.jsonl and run.rank2.jsonl beside it."""
    path = tmp_path / "run.jsonl"
    for rank, recording in enumerate(as_ranks(alone, 3)):
        recording.save(rank_path(path, rank) if rank else path)
    return path


# ------------------------------------------------------------------ one position


def test_each_rank_is_shown_by_its_own_recording(pair):
    page = pair.page
    assert len(page) == len(page.pages[0].trace) == len(page.pages[1].trace)
    for index in (0, 1, 20, len(page)):
        view = page.view("step", index)
        first, second = view["sides"]
        assert first["svg"] == second["svg"] and first["pool"] == second["pool"]
        assert first == page.pages[0].view("step", index, height=400)
        assert view["unlike"] == []
    for bad in (("event", 1), ("step", -1), ("step", len(page) + 1), ("step", 1, (), 400, 0)):
        with pytest.raises(ValueError):
            page.view(*bad)


def test_between_two_steps_the_others_are_where_they_were(alone):
    ranks = as_ranks(alone)
    at = next(i for i, frame in enumerate(ranks[0]) if frame.step == 5)
    asked = next(e for frame in ranks[0] for e in frame.events if isinstance(e, ev.RequestAdded))
    late = dataclasses.replace(asked, request="R99")
    for frame in ranks[0].frames[at + 1 :]:
        ranks[0].frames[frame.index] = dataclasses.replace(frame, index=frame.index + 1)
    ranks[0].frames.insert(at + 1, Frame(at + 1, 5, (late,)))
    page = shown(ranks).page
    view = page.view("step", at + 2)
    assert "R99" in view["sides"][0]["requests"] and "R99" not in view["sides"][1]["requests"]
    assert view["say"] == "Between two steps: what was done here is sent with the next one"
    assert view["told"] is None and view["unlike"] == []
    assert page.frames()[at + 1]["a"] == 0 and page.frames()[at + 1]["t"] == [0, 0, 0, 0]


def with_a_cut(ranks: list[Recording], step: int) -> str:
    """A prompt comes between two steps: rank 0 has a frame of it, the others hear of it with the next one."""
    at = 1 + next(i for i, frame in enumerate(ranks[0]) if frame.step == step)
    late = next(e for frame in ranks[0].frames[at:] for e in frame.events if isinstance(e, ev.RequestAdded))
    for recording, start in zip(ranks, (at, len(ranks[1])), strict=True):
        for frame in recording.frames[at - 1 if recording is not ranks[0] else at :]:
            events = tuple(event for event in frame.events if event != late)
            recording.frames[frame.index] = dataclasses.replace(frame, events=events)
        recording.frames[start:] = [
            dataclasses.replace(frame, index=frame.index + 1) for frame in recording.frames[start:]
        ]
    ranks[0].frames.insert(at, Frame(at, step, (late,)))
    first = next(frame for frame in ranks[1] if frame.step == step + 1)
    ranks[1].frames[first.index] = dataclasses.replace(first, events=(late, *first.events))
    return late.request


def test_steps_are_the_engines_where_frames_were_cut_off_between_two(alone):
    ranks = as_ranks(alone)
    step = 5
    name = with_a_cut(ranks, step)
    page = shown(ranks).page
    index = next(i for i, row in enumerate(page.frames(), start=1) if row["s"] == step)
    titles = [page.view("step", at)["title"] for at in (0, index, index + 1, index + 2)]
    assert titles == ["the start", "step 5", "after step 5", "step 6"]
    assert [row["s"] for row in page.frames()[index - 1 : index + 2]] == [5, 5, 6]
    requests = page.requests()
    assert requests[f"0 {name}"]["admitted"] == requests[f"1 {name}"]["admitted"] + 1, "by frames"
    for number in (0, 1):
        mine, totals = requests[f"{number} {name}"], page.view("step", len(page))["totals"][number]
        assert mine["came"] == step and mine["began"] == requests[f"0 {name}"]["began"] >= step
        assert totals["steps"] == ranks[1].frames[-1].step
    for at in range(index + 2, len(page) + 1):
        first, second = page.view("step", at)["totals"]
        assert first == second
    assert [each["steps"] for each in page.view("step", index + 1)["totals"]] == [5, 5]


def test_a_step_in_which_ranks_differ_is_shown_of_all_that_told_it(alone):
    """As the engine leaves it: no rank came to that step's end."""
    ranks = as_ranks(alone, differ=12)
    for recording in ranks:
        last = recording.frames[-1]
        recording.frames[-1] = dataclasses.replace(last, step=11, events=last.events[:-1])
    page = shown(ranks).page
    view = page.view("step", len(page))
    assert view["at"] == [12, 12] and view["title"] == "step 12" and view["unlike"][0][0] == 1
    assert [side["i"] for side in view["sides"]] == [len(each) for each in ranks]
    before = page.view("step", len(page) - 1)
    assert before["at"] == [11, 11] and before["title"] == "step 11" and before["unlike"] == []
    assert [side["i"] for side in before["sides"]] == [len(each) - 1 for each in ranks]
    ranks[1].frames.pop()  # a recording of before: rank 0 alone told of that step
    assert shown(ranks).page.view("step", len(page))["at"] == [12, 11]


def test_what_was_sent_is_listed_and_summed(pair):
    page, frames = pair.page, pair.page.frames()
    first = next(i for i, frame in enumerate(frames, start=1) if frame["t"][0])
    view = page.view("step", first)
    name, text, prompt = view["told"]["requests"][0]
    assert name == "R1" and text and prompt == pair.first.page.requests()["R1"]["prompt"]
    assert view["told"]["bytes"] == frames[first - 1]["t"][3] == 40 + 60 + 4 * prompt
    assert view["say"].startswith("Rank 0 sent R1 (") and "no slots, no drawn tokens" in view["say"]
    assert "what both ranks made of it is the same" in view["say"] and view["tone"] == "new"
    quiet = next(i for i, frame in enumerate(frames, start=1) if frame["t"] == [0, 0, 0, 40])
    assert "nothing but the word to go on (40 bytes" in page.view("step", quiet)["say"]
    sums = page.view("step", len(page))["sums"]
    requests = [r for r in pair.first.page.requests().values() if not r["sample"]]
    assert sums["requests"] == sum(frame["t"][0] for frame in frames) == len(requests)
    assert sums["bytes"] == sum(frame["t"][3] for frame in frames)
    assert sums["agreed"] == sums["steps"] == len(page.pages[1].trace)
    assert sums["slots"] > 100 < sums["tokens"]


def test_a_difference_is_red_with_its_node_and_rank(alone):
    page = shown(as_ranks(alone, differ=12)).page
    assert page.frames()[-1]["a"] == -1 and page.frames()[-1]["m"][-1] == "differ"
    assert all(frame["a"] >= 0 for frame in page.frames()[:-1])
    view = page.view("step", len(page))
    assert view["unlike"] == [[1, UNLIKE, [3]]] and view["tone"] == "evict" and view["digest"] == ""
    assert view["say"] == UNLIKE[0].upper() + UNLIKE[1:]
    before = page.view("step", len(page) - 1)
    assert before["unlike"] == [] and re.fullmatch("0{31}[0-9a-f]", before["digest"])


def changed(state, **fields):
    """A state whose node n2 is another."""
    nodes = [{**node, **fields} if node["id"] == 2 else node for node in state["tree"]["nodes"]]
    return {**state, "tree": {**state["tree"], "nodes": nodes}}


def test_recordings_that_differ_are_told_without_a_digest(pair):
    state = pair.first.trace.view("step", 20).state
    assert difference(state, state) == ""
    (node,) = [node for node in state["tree"]["nodes"] if node["id"] == 2]
    lock = node["lock_ref"]
    assert difference(state, changed(state, lock_ref=lock + 1)) == (
        f"has lock_ref {lock + 1} at n2, rank 0 has {lock}"
    )
    assert difference(state, changed(state, slots=[*node["slots"], 1])) == "has other slots at n2"
    less = {**state, "tree": {**state["tree"], "nodes": [n for n in state["tree"]["nodes"] if n != node]}}
    assert difference(state, less) == "has no n2, rank 0 has"
    assert difference(less, state) == "has n2, rank 0 has not"
    assert difference(state, {**state, "free": state["free"] + 1}).startswith(f"has {state['free'] + 1} free")


def test_a_rank_that_recorded_something_else_is_found(alone):
    ranks = as_ranks(alone, 3)
    for recording in ranks:  # as with rank_digest=False
        recording.frames = [
            dataclasses.replace(f, events=tuple(e for e in f.events if not isinstance(e, RanksAgreed)))
            for f in recording.frames
        ]
    page = shown(ranks).page
    assert page.view("step", 9)["say"].endswith("all 3 ranks went on from it")
    at = next(i for i, f in enumerate(ranks[2]) if any(isinstance(e, ev.NodeLocked) for e in f.events))
    without = tuple(e for e in ranks[2].frames[at].events if not isinstance(e, ev.NodeLocked))
    ranks[2].frames[at] = dataclasses.replace(ranks[2].frames[at], events=without)
    ranks = [Recording(each.header, each.frames) for each in ranks]
    page = shown(ranks).page
    step = ranks[2].frames[at].step
    index = 1 + next(i for i, f in enumerate(ranks[0]) if f.step == step and f.events[-1].ends_frame)
    ((rank, what, nodes),) = page.view("step", index)["unlike"]
    assert rank == 2 and what.startswith("rank 2 has lock_ref 0 at n") and len(nodes) == 1
    assert page.view("step", index)["say"].startswith("Rank 2 has lock_ref 0")


def test_what_a_stranger_says_is_short_and_harmless(alone):
    ranks = as_ranks(alone, differ=12)
    frames = ranks[0].frames

    def spoilt(event: ev.Event) -> ev.Event:
        if isinstance(event, RanksTold):
            names = tuple(f"R{number}" for number in range(1, 3000))
            return dataclasses.replace(event, requests=names, aborts=names[:100], other=("<b>\n\x00" * 99,))
        if isinstance(event, RanksAgreed):
            return dataclasses.replace(event, digest="\n" * 999)
        return (
            dataclasses.replace(event, rank=4000, what="n3\x1b " * 999)
            if isinstance(event, RanksDiffered)
            else event
        )

    for at in (5, len(frames) - 1):
        frames[at] = dataclasses.replace(frames[at], events=tuple(map(spoilt, frames[at].events)))
    page = shown(ranks).page
    for index in (6, len(frames)):
        view = page.view("step", index)
        text = json.dumps({**view, "sides": []})
        assert "\\u000" not in text and "\\u001" not in text and len(json.dumps(view["told"])) < 20_000
        assert len(view["say"]) < 500 and len(view["digest"]) <= 64 and view["told"]["more"] == 2999 - 60 + 40
    ((rank, what, nodes),) = view["unlike"]
    assert rank == 4000 and len(what) <= 400 and nodes == [3]


# ------------------------------------------------------------------ growing


def test_growth_shows_only_what_all_ranks_have_done(alone):
    ranks = as_ranks(alone)
    whole = [list(each.frames) for each in ranks]
    for each in ranks:
        each.frames.clear()
    run = shown(ranks)
    run.page.over = False  # as if they still ran
    assert len(run.page) == 0
    while len(ranks[0]) < len(whole[0]):
        ranks[0].frames.append(whole[0][len(ranks[0])])
        step, ends = ranks[0].frames[-1].step, ranks[0].frames[-1].events[-1].ends_frame
        if ends:
            assert len(run.page) == len(ranks[0]) - 1, "rank 1 has not said what it did"
            ranks[1].frames += [frame for frame in whole[1] if frame.step == step]
        assert len(run.page) == len(ranks[0])
        assert len(run.page.frames(len(run.page) - 1)) == 1
    ranks[1].frames.pop()
    assert len(run.page) < len(ranks[0])
    run.close()
    assert len(run.page) == len(ranks[0]), "how it ended is shown, whether all ranks told it or not"
    assert run.page.view("step", len(run.page))["sides"][1]["i"] == len(ranks[1])


# ------------------------------------------------------------------ files


def test_replay_finds_the_other_ranks_beside_it(files, capsys):
    replay = live._replay(str(files))
    assert isinstance(replay, Ranks) and replay.page.names == ("rank 0", "rank 1", "rank 2")
    assert not replay.drivable and replay.alone is None and replay.page.kind == "ranks"
    assert replay.single_page is replay.page.pages[0]
    rank_path(files, 1).unlink()
    replay = live._replay(str(files))
    assert replay.page.names == ("rank 0", "rank 2") and replay.page.tp == 3
    notice = "rank 1 is not shown: there is no run.rank1.jsonl beside run.jsonl"
    assert replay.notices == [notice] and notice in capsys.readouterr().err
    rank_path(files, 2).unlink()
    assert isinstance(live._replay(str(files)), Replay)


def test_a_file_of_another_run_is_not_shown_beside_it(files, alone):
    other = as_ranks(alone, 3)[1]
    other.header["start"]["kv_tokens"] = other.header["start"]["free"] = 999
    other.save(rank_path(files, 1))
    found, notices = recorded_ranks(files, Recording.load(files))
    assert list(found) == [2] and notices == ["rank 1 is not shown: run.rank1.jsonl is of another run"]
    lines = rank_path(files, 2).read_bytes().splitlines(keepends=True)
    rank_path(files, 2).write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    found, notices = recorded_ranks(files, Recording.load(files))
    assert len(found[2]) == len(lines) - 2 and "the last line is cut off" in notices[1]


def test_export(files, tmp_path, capsys):
    page = tmp_path / "ranks.html"
    assert live.main(["--replay", str(files), "--export", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert 'data-page="ranks"' in text and "/static/" not in text and "import {" not in text
    data = json.loads(gzip.decompress(base64.b64decode(re.search(r'id="recording">([^<]+)<', text).group(1))))
    assert len(data["views"]["step"]) == len(data["frames"]) + 1 and data["meta"]["tp"] == 3
    pictures = [side["svg"] for view in data["views"]["step"].values() for side in view["sides"]]
    assert len(set(pictures)) <= len(pictures) / 3, "what is the same on all ranks is there once"
    assert live.main(["--replay", str(files), "--export", str(tmp_path / "ranks.gif")]) == 2
    assert "need a .html file" in capsys.readouterr().err


def test_it_is_served(files):
    driver = Driver(Settings(), speed=0, replay=live._replay(str(files)))
    with Live(driver) as server:
        client = Client(server)
        assert b'data-page="ranks"' in client.request("GET", "/")[1]
        hello = client.stream(lambda event: event[1] == "status")
        assert hello[0][2]["meta"]["names"] == ["rank 0", "rank 1", "rank 2"]
        assert len(client.view(7)["sides"]) == 3
        for command in ("step", "submit", "evict", "plant", "restart"):
            assert client.do(command, text="x", tokens=3)[0] == 400
        asked = json.dumps({"run": client.run, "i": 7, "g": "step", "text": "Hello"})
        status = client.request("POST", "/why", asked, Content_Type="application/json")[0].status
        assert status == 200, "rank 0 can be asked: it stands for all"
    assert not driver.error


# ------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare", "lpm,fcfs"], "--tp 2 with --compare"),
        (["--replay", "none.jsonl"], "--tp 2 with --replay"),
        (["--cache", "mine.py"], "--tp 2 with --cache"),
        (["--connect", "tcp://127.0.0.1:1"], "--tp with --connect"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused(options, message, capsys):
    assert live.main(["--tp", "2", *options, "--no-open"]) == 2
    assert message in capsys.readouterr().err


def test_a_torchrun_of_another_size_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch.my_rank() == 0
    assert live.main(["--tp", "2", "--no-open"]) == 2
    assert "--tp 2 under a torchrun of 4 processes" in capsys.readouterr().err


def test_one_rank_alone_cannot_be_made_to_differ():
    driver = Driver(Settings(workload="none", kv_tokens=400), speed=0, paused=True)
    with Live(driver) as server:
        wait(lambda: driver.run_now is not None)
        status, answer = Client(server).do("plant")
        assert status == 400 and "one rank alone cannot differ" in answer["error"]


def test_why_all_ranks_are_ended_is_found_out(monkeypatch):
    """torchrun sends SIGTERM when it got one, and when a rank has died."""
    from minirad.errors import RankLost
    from minirad.ranks import group

    class Answers:
        def tell(self, message):
            return 33

    class Silent:
        def tell(self, message):
            raise RankLost("rank 1 ended (rank 0 was in step 3)")

    for there, said in (
        (None, "another rank has ended"),
        (Answers(), "the run was told to end (SIGTERM)"),
        (Silent(), "RankLost: rank 1 ended (rank 0 was in step 3)"),  # as where a step finds it out
    ):
        monkeypatch.setattr(group, "_joined", there)
        assert launch._who_ended() == said
