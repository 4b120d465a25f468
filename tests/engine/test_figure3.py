"""The nine steps: every row of the figure's table, on the committed weights and the real engine."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import one_slow

from minirad import Engine, EngineConfig, SamplingParams, figure3
from minirad.figure3 import KV_TOKENS, Panel, Strand, check_story, run
from minirad.observe import events as ev
from minirad.observe.recording import Recording
from minirad.replies import Replies, Unsaid


@pytest.fixture(scope="module")
def replies() -> Replies:
    return Replies()


@pytest.fixture(scope="module")
def story(replies: Replies) -> tuple[Recording, list[Panel]]:
    return run(replies=replies)


@pytest.fixture(scope="module")
def panels(story: tuple[Recording, list[Panel]]) -> list[Panel]:
    return story[1]


def shape(panel: Panel, parent: int | None = None) -> list[Any]:
    """Trees as nested lists: [(state, label, number of tokens, children), ...]."""
    return [
        (node["state"], node["label"], node["tokens"], shape(panel, node["id"]))
        for node in panel["nodes"]
        if node["parent"] == parent
    ]


def outline(trees: list[Any]) -> list[Any]:
    """The same without token counts."""
    return [(state, label, outline(below)) for state, label, _, below in trees]


def gone(panel: Panel) -> list[str | None]:
    return [node["label"] for node in panel["evicted"]]


def one(panel: Panel, text: str) -> Panel:
    """The one node with this in its text."""
    found = [node for node in panel["nodes"] if text in node["text"]]
    assert len(found) == 1, (text, [node["text"] for node in panel["nodes"]])
    return found[0]


# ---------------------------------------------------------------------- the rows


def test_all_nine_rows_hold(panels: list[Panel]) -> None:
    assert check_story(panels) == []


def test_step_1_is_empty(panels: list[Panel]) -> None:
    assert panels[0]["nodes"] == [] and panels[0]["evicted"] == []
    assert panels[0]["kv_used"] == panels[0]["prompt_tokens"] == panels[0]["cached_tokens"] == 0


def test_step_2_is_one_edge(panels: list[Panel]) -> None:
    assert outline(shape(panels[1])) == [("new", None, [])]
    text = panels[1]["nodes"][0]["text"]
    assert text.startswith("<|im_start|>system\n") and "user\nHello<|im_end|>" in text
    assert text.endswith("Hello! How can I help you today?")  # the closing token has no KV


def test_step_3_hits_b_and_adds_u2(panels: list[Panel]) -> None:
    assert outline(shape(panels[2])) == [("hit", "b", [("new", None, [])])]
    before, (b, u2) = panels[1]["nodes"][0], panels[2]["nodes"]
    assert (b["id"], b["text"]) == (before["id"], before["text"])
    assert figure3.PROBLEM in u2["text"] and u2["text"].startswith("<|im_end|>\n<|im_start|>user\n")
    assert panels[2]["cached_tokens"] == b["tokens"]


def test_step_4_splits_b(panels: list[Panel]) -> None:
    assert outline(shape(panels[3])) == [
        ("hit", None, [("cached", None, [("cached", "c", [])]), ("new", "d", [])])
    ]
    s, u1, u2, v1 = panels[3]["nodes"]
    b, c = panels[2]["nodes"]
    assert s["text"] + u1["text"] == b["text"] and s["tokens"] + u1["tokens"] == b["tokens"]
    assert u1["id"] == b["id"]  # the lower half keeps its id, the upper one is new
    assert (u2["id"], u2["text"]) == (c["id"], c["text"])
    assert v1["text"].startswith("What can you do?<|im_end|>")
    assert panels[3]["cached_tokens"] == s["tokens"]


def test_step_5_evicts_c(panels: list[Panel]) -> None:
    assert outline(shape(panels[4])) == [
        ("hit", None, [("cached", None, []), ("hit", None, [("new", None, [])])])
    ]
    assert gone(panels[4]) == ["c"] and figure3.PROBLEM in panels[4]["evicted"][0]["text"]
    assert figure3.STORY in panels[4]["nodes"][3]["text"]


def test_step_6_hangs_e_below_the_root(panels: list[Panel]) -> None:
    chats, few_shot = outline(shape(panels[5]))
    assert few_shot == ("new", "e", []) and gone(panels[5]) == []
    assert chats == ("cached", None, [("cached", None, []), ("cached", None, [("cached", None, [])])])
    e = panels[5]["nodes"][-1]
    assert e["parent"] is None and e["text"].startswith("Answer the questions.")
    assert panels[5]["cached_tokens"] == 0


def test_step_7_splits_e_and_evicts_nobody(panels: list[Panel]) -> None:
    few_shot = outline(shape(panels[6]))[-1]
    assert few_shot == ("hit", None, [("cached", None, []), *[("new", None, [])] * 3])
    assert gone(panels[6]) == []
    f = one(panels[6], "Answer the questions.")
    e = panels[5]["nodes"][-1]
    first = next(node for node in panels[6]["nodes"] if node["parent"] == f["id"])
    assert f["text"] + first["text"] == e["text"] and first["id"] == e["id"]
    assert panels[6]["cached_tokens"] == 3 * f["tokens"]


def test_step_8_replays_what_was_evicted(panels: list[Panel]) -> None:
    chats, few_shot = outline(shape(panels[7]))
    assert chats == ("hit", None, [("hit", None, [("new", None, [])])])
    assert few_shot == ("cached", None, [("cached", letter, []) for letter in "ijkl"])
    assert sorted(gone(panels[7])) == ["g", "h"]
    u3, u2 = one(panels[7], figure3.COME_BACK + "<|im_end|>"), panels[4]["evicted"][0]
    assert u3["text"].startswith(u2["text"]) and u3["tokens"] > u2["tokens"]


def test_step_9_samples_below_j(panels: list[Panel]) -> None:
    chats, few_shot = outline(shape(panels[8]))
    assert chats == ("cached", None, [("cached", None, [("cached", None, [])])])  # U3 stays
    samples = [("new", None, [])] * 3
    assert few_shot == ("hit", None, [("hit", None, [("cached", None, []), *samples])])
    assert sorted(gone(panels[8])) == ["i", "k", "l"]
    question = one(panels[8], "friend.\nAnswer 5:")
    assert question["text"].endswith("Answer 5:")
    j = next(node for node in panels[7]["nodes"] if node["label"] == "j")
    answers = [node["text"] for node in panels[8]["nodes"] if node["parent"] == question["id"]]
    assert question["text"] + answers[0] == j["text"]
    assert len({answer.split(".")[0] for answer in answers}) == 4
    assert panels[8]["cached_tokens"] == panels[8]["prompt_tokens"] - 1  # one is always computed


# ---------------------------------------------------------------------- the run


def test_nothing_but_requests_is_scripted(story: tuple[Recording, list[Panel]]) -> None:
    recording, _ = story
    added = [e for frame in recording for e in frame.events if isinstance(e, ev.RequestAdded)]
    assert [e.temperature for e in added] == [0.0] * 9 + [1.0] and added[-1].n == 3
    config = recording.header["config"]
    assert (config["page_size"], config["eviction_policy"], config["kv_tokens"]) == (1, "lru", KV_TOKENS)
    assert config["model"] is None
    assert all(frame.events[-1].kind != "mixed" for frame in recording)  # every frame is a step's


def test_the_recording_has_nine_scenes_that_agree(story: tuple[Recording, list[Panel]]) -> None:
    recording, panels = story
    starts = [at for at, frame in enumerate(recording) if frame.scene is not None]
    assert [recording.frames[at].scene for at in starts] == [panel["title"] for panel in panels]
    for panel, end in zip(panels, [*starts[1:], len(recording)], strict=True):
        state = recording.state(end - 1)
        nodes = {node["id"]: (node["parent"] or None, len(node["tokens"])) for node in state["tree"]["nodes"]}
        assert nodes == {node["id"]: (node["parent"], node["tokens"]) for node in panel["nodes"]}
        assert panel["kv_used"] == panel["kv_capacity"] - state["free"]


@pytest.mark.parametrize("more", [-4, 4])
def test_nine_pools_in_a_row_work(more: int, replies: Replies) -> None:
    assert check_story(run(kv_tokens=KV_TOKENS + more, replies=replies)[1]) == []


@pytest.mark.parametrize("more", [-16, 16])
def test_with_less_or_more_the_story_is_another(more: int, replies: Replies) -> None:
    assert check_story(run(kv_tokens=KV_TOKENS + more, replies=replies)[1])


@pytest.mark.parametrize(
    "options", [{"page_size": 4, "eviction_policy": "fifo"}, {"page_size": 16, "eviction_policy": "lfu"}]
)
def test_other_settings_tell_another_story(options: dict[str, Any], replies: Replies) -> None:
    _, panels = run(**options, replies=replies)
    broken = check_story(panels)
    assert len(panels) == 9 and broken
    assert "no longer hold" in figure3.verdict(broken)
    for panel in panels:
        assert figure3.text_panel(panel, figure3.holds(panel, broken))


def test_a_pool_too_small_for_a_request_leaves_it_out() -> None:
    _, panels = run(kv_tokens=100)
    assert "refused: U2" in panels[2]["title"] and "KV pool of 100" in panels[2]["title"]
    assert figure3.caption(panels[2]).startswith("No request could be served")
    assert panels[2]["prompt_tokens"] == 0 and panels[3]["prompt_tokens"] > 0
    assert all(panel["kv_used"] <= 100 for panel in panels)


def test_forced_lengths() -> None:
    _, panels = run(forced_lengths={"U1": 4, "V2": 30}, kv_tokens=400)
    hello = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    reply = panels[1]["nodes"][0]["text"].removeprefix(hello + "<|im_start|>assistant\n")
    assert reply == "Hello! How"  # 4 tokens, the last of which has no KV
    assert panels[2]["cached_tokens"] == panels[1]["nodes"][0]["tokens"]
    assert check_story(panels)


def test_torch_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with figure3.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_bad_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="kv_tokens"):
        run(kv_tokens=0)
    with pytest.raises(ValueError, match="page_size"):
        run(page_size=0)
    with pytest.raises(ValueError, match="nosuch"):
        run(eviction_policy="nosuch")
    assert figure3.main(["--kv-tokens", "10", "--page-size", "4"]) == 2
    assert "does not divide" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_story_in_which_all_is_refused_is_no_success(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert figure3.main(["--kv-tokens", "10", *words]) == 1
    out, err = capsys.readouterr()
    assert "refused: " in out and err == ""


# ---------------------------------------------------------------------- the check


def mutate(change: Callable[[list[Panel]], None]) -> Callable[[list[Panel]], list[Panel]]:
    def changed(panels: list[Panel]) -> list[Panel]:
        panels = copy.deepcopy(panels)
        change(panels)
        return panels

    return changed


def set_node(step: int, node: int, /, **values: Any) -> Callable[[list[Panel]], list[Panel]]:
    return mutate(lambda panels: panels[step - 1]["nodes"][node].update(values))


def set_panel(step: int, /, **values: Any) -> Callable[[list[Panel]], list[Panel]]:
    return mutate(lambda panels: panels[step - 1].update(values))


MUTANTS = {
    "b has no letter": set_node(3, 0, label=None),
    "b is not hit": set_node(3, 0, state="cached"),
    "d is somebody else": mutate(
        lambda p: (p[3]["nodes"][2].update(label="d"), p[3]["nodes"][3].update(label="c"))
    ),
    "V1 hangs off the root": set_node(4, 3, parent=None),
    "V1 hangs off nothing": set_node(4, 3, parent=99),
    "the parent is hit for no reason": set_node(6, 0, state="hit"),
    "something new was there before": set_node(7, 0, state="new"),
    "nobody is evicted in step 5": set_panel(5, evicted=[]),
    "only two go in step 9": mutate(lambda p: p[8]["evicted"].pop()),
    "somebody else goes in step 6": mutate(lambda p: p[5]["evicted"].append(p[4]["evicted"][0])),
    "g and h are mixed up": mutate(
        lambda p: (p[7]["evicted"][0].update(label="g"), p[7]["evicted"][1].update(label="h"))
    ),
    "a victim of another length": mutate(lambda p: p[4]["evicted"][0].update(tokens=1)),
    "a victim of another name": mutate(lambda p: p[4]["evicted"][0].update(id=77)),
    "one node less": mutate(lambda p: p[8]["nodes"].pop()),
    "one node more": mutate(lambda p: p[1]["nodes"].append({**p[1]["nodes"][0], "id": 9})),
    "another text": set_node(2, 0, text="Good morning"),
    "an old answer changes": mutate(
        lambda p: next(n for n in p[8]["nodes"] if n["tokens"] == 2).update(text=" me.")
    ),
    "another length": set_node(2, 0, tokens=3),
    "no tokens": set_node(9, 5, tokens=0),
    "more used than there is": set_panel(6, kv_used=KV_TOKENS + 1),
    "the pool grows": set_panel(7, kv_capacity=KV_TOKENS + 50),
    "more cached than hit": mutate(lambda p: p[3].update(cached_tokens=p[3]["cached_tokens"] + 1)),
    "no prompt": set_panel(5, prompt_tokens=0),
    "a prompt in step 1": set_panel(1, prompt_tokens=5),
    "a step twice": set_panel(4, step=3),
    "eight steps": mutate(lambda p: p.pop()),
    "no steps": mutate(lambda p: p.clear()),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_finds(name: str, panels: list[Panel]) -> None:
    assert check_story(MUTANTS[name](panels)), name


def test_more_samples_are_as_good(panels: list[Panel]) -> None:
    panels = copy.deepcopy(panels)
    extra = {**panels[8]["nodes"][-1], "id": 99, "text": " Zoe.", "tokens": 2}
    panels[8]["nodes"].append(extra)
    panels[8]["kv_used"] += 2
    assert check_story(panels) == []


def test_turns_of_a_strand_end_with_pages() -> None:
    strand = Strand(list(range(20)), [("S", 7), ("U1", 13), ("U2", 20)])
    assert strand.turns(0, 7, 1) == ("S",) and strand.turns(0, 13, 1) == ("S", "U1")
    assert strand.turns(0, 4, 4) == ("S",) and strand.turns(4, 12, 4) == ("U1",)
    assert strand.turns(12, 20, 4) == ("U2",) and strand.turns(20, 20, 4) == ()


# ---------------------------------------------------------------------- the command


def test_a_second_run_is_the_same_as_json(panels: list[Panel], capsys: pytest.CaptureFixture[str]) -> None:
    assert figure3.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == panels
    keys = ["step", "title", "nodes", "evicted", "prompt_tokens", "cached_tokens", "kv_used", "kv_capacity"]
    assert all(list(panel) == keys for panel in said)
    nodes = [node for panel in said for node in panel["nodes"]]
    assert all(list(node) == ["id", "parent", "text", "tokens", "state", "label"] for node in nodes)
    victims = [node for panel in said for node in panel["evicted"]]
    assert all(list(node) == ["id", "text", "tokens", "label"] for node in victims)


def test_terminal(
    story: tuple[Recording, list[Panel]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(figure3, "run", lambda *options: story)
    assert figure3.main([]) == 0
    said = capsys.readouterr().out
    assert "(b) n1 hit" in said and " x  (c) n2 evicted" in said
    assert "All nine rows of the figure's table hold." in said


def test_importing_it_loads_neither_torch_nor_viz() -> None:
    code = "import sys, minirad.figure3; print([m for m in ('torch', 'viz', 'graphviz') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------- what was said before


@pytest.mark.parametrize(
    "options",
    one_slow(
        2, [{}, {"eviction_policy": "lfu"}, {"page_size": 8, "eviction_policy": "fifo"}, {"kv_tokens": 200}]
    ),
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "as it is",
)
def test_replies_that_are_kept_tell_the_story_that_the_model_tells(
    story: tuple[Recording, list[Panel]], replies: Replies, options: dict[str, Any]
) -> None:
    """Events, but for the seconds that steps took, and panels."""
    recording, panels = run(**options, replies=replies)
    asked, panels_of_the_model = run(**options)
    assert panels == panels_of_the_model
    assert [without_seconds(frame.events) for frame in recording] == [
        without_seconds(frame.events) for frame in asked
    ]
    assert recording.header["model"] == asked.header["model"]


def without_seconds(events: Sequence[ev.Event]) -> list[ev.Event]:
    return [dataclasses.replace(e, seconds=0.0) if isinstance(e, ev.StepEnded) else e for e in events]


def test_the_model_is_asked_what_it_was_not_asked_before(
    story: tuple[Recording, list[Panel]], replies: Replies
) -> None:
    """A longer greeting: chat 1's later prompts are other ones, and end a run that only repeats."""
    changed: dict[str, Any] = {"forced_lengths": {"U1": 4, "V2": 30}, "kv_tokens": 400}
    engine = replies.engine(EngineConfig(kv_tokens=400, device="cpu"))
    with pytest.raises(Unsaid, match="R1 asks what was not asked"):
        engine.generate("Hello")
    engine.check()
    first = replies.first
    assert run(**changed, replies=replies)[1] == run(**changed)[1] and replies.first is first
    with pytest.raises(ValueError, match="replies of model None, not of 'elsewhere'"):
        replies.engine(EngineConfig(model="elsewhere"))


def test_a_sample_that_hangs_on_what_came_before_is_not_kept(replies: Replies) -> None:
    kept, asked = Replies(), SamplingParams(max_new_tokens=3, temperature=1.0)
    engine = Engine(EngineConfig(kv_tokens=64, device="cpu"))
    (output,) = engine.generate([5, 6, 7], asked)
    kept.keep(engine, [5, 6, 7], asked, output)
    with pytest.raises(Unsaid):
        kept.engine(EngineConfig(kv_tokens=64)).generate([5, 6, 7], asked)
