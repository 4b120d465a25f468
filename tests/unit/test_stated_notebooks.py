"""What the texts of the notebooks say of the figures beside them, held against the notebooks' own code.

A test runs those cells that make the figures, without a kernel and without the cells that only draw or only
measure seconds, and looks at the sign. What a notebook's own `assert` says is not said again here: those run
in tests/course/test_notebooks.py. Figures that are the machine's (milliseconds) are looked at in what stands
behind them: tokens, calls, bytes.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from support import ROOT

from minirad.bench.dummy import SHAPES
from minirad.cache.eviction import POLICIES

pytest.importorskip("anywidget", reason="needs the extra 'viz'")

CELL = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The chapters that make statements about figures, and the test of each.
NOTEBOOKS = {
    "00_tour": "test_tour",
    "01_kv_cache": "test_kv_cache",
    "02_radix_tree": "test_radix_tree",
    "03_locks_and_eviction": "test_locks_and_eviction",
    "04_pools": "test_pools",
    "05_paged_attention": "test_paged_attention",
    "06_request_life": "test_request_life",
    "07_scheduling": "test_scheduling",
    "08_nine_steps": "test_nine_steps",
    "09_pages_and_tails": None,  # its figures are asserted in its own cells, as those of all below
    "10_host_tier": None,
    "11_programs": None,
    "12_many_workers": None,
    "13_isolation_and_drafts": None,
    "14_capacity": None,
    "15_your_own_server": None,
}


def played(notebook: str, *starts: str) -> dict[str, Any]:
    """Names after the first cell, the predictions, and cells with one of these, in their order."""
    text = (ROOT / "notebooks" / f"{notebook}.md").read_text(encoding="utf-8")
    first, *cells = CELL.findall(text)
    for start in starts:
        assert any(start in cell for cell in cells), f"{notebook}: no cell has {start!r}"
    names: dict[str, Any] = {"__name__": notebook}
    asked = (" = predict(", *starts)
    for cell in (first, *(each for each in cells if any(start in each for start in asked))):
        exec(compile(cell, notebook, "exec"), names)
    return names


def says(notebook: str, *words: str) -> None:
    """Fails if the notebook says something else by now: then its test has to be looked at again."""
    text = " ".join((ROOT / "notebooks" / f"{notebook}.md").read_text(encoding="utf-8").split())
    for each in words:
        assert each in text, f"{notebook} no longer says: {each}"


def test_every_notebook_has_its_test() -> None:
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == sorted(NOTEBOOKS)
    for name, test in NOTEBOOKS.items():
        cells = CELL.findall((ROOT / "notebooks" / f"{name}.md").read_text(encoding="utf-8"))
        asserted = sum(isinstance(node, ast.Assert) for cell in cells for node in ast.walk(ast.parse(cell)))
        assert test in globals() if test else asserted >= 4, name


def computed(hit: Any) -> int:
    return int(hit.prompt_tokens - hit.cached_tokens)


def test_tour() -> None:
    says(
        "00_tour",
        "One! The whole prompt was in the tree.",
        "The first agent pays for the page, the others do not",
        "It forgets **leaves**",
        "Lesson 03 lets you try all eight policies",
    )
    it = played("00_tour", "for _ in range(2)", "for press in", "questions = [")
    first, second, page, *others = it["kv"].request_hits(it["tour"].recording)
    assert first.cached_tokens == 0 and computed(second) == 1
    agents = [each for each in others if each.cached_tokens > 100]
    assert len(agents) == 2 and all(5 * computed(each) < computed(page) for each in agents)
    small, before = it["small"], it["small"].index
    (why,) = small.why()
    assert "by the policy lru: oldest unlocked leaf" in why and len(POLICIES) == 8
    small.back()
    nodes = small.state["tree"]["nodes"]
    gone = next(node for node in nodes if node["id"] == int(why.split()[0][1:]))
    assert gone["id"] not in [node["parent"] for node in nodes] and before > small.index


def test_kv_cache() -> None:
    says(
        "01_kv_cache",
        "Two thirds, and nothing at all.",
        "Green up to the first token that differs, then red.",
        "The same long prompt, once when nothing is known and once when all but a question is in the tree",
        "128 kB per token",
    )
    it = played(
        "01_kv_cache",
        "chats = [",
        "def computed_alone",
        "ids_1, keys_1",
        "k_diff =",
        "def turned",
        "per_token = ",
    )
    _, second, third = it["kv"].request_hits(it["tour"].recording)
    assert 0.6 < second.cached_tokens / second.prompt_tokens < 0.75 and third.cached_tokens == 0
    alike = it["alike"]
    assert it["k_diff"][:, :alike].max() < 1e-4 < 0.01 < it["k_diff"][1:, alike].min()
    assert it["turned_diff"][0].max() < 1e-3 < it["key_diff"][0].max() and it["value_diff"][0].max() < 1e-3
    assert it["turned_diff"][1:].mean() > 0.01
    shape = SHAPES["llama-3.1-8b"]
    numbers = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    assert numbers * 2 == 128 * 1024
    engine, ask = it["engine"], it["agent_prompt"]
    warm = [
        engine.generate([ask(each)], it["SamplingParams"](max_new_tokens=1))[0] for each in ("Hello", "Who?")
    ]
    assert 10 * computed(warm[1]) < warm[0].prompt_tokens


def test_radix_tree() -> None:
    says(
        "02_radix_tree",
        "One node per *turn* and per *fork*, not one per token.",
        "two of these chats begin with `Hello`",
        "Blocks and a tree with pages of the same size find the same",
        "the tree may also have pages of a single token",
        "In between it has its row of slots",
        "The claim holds, even for a model as small as this one",
        "A request asks the tree some nine times",
    )
    it = played("02_radix_tree", "def serve(", "def whole_prompts(", "class Counted(", "cold = [")
    assert 5 * it["nodes"]["radix tree"] < it["nodes"]["trie"]
    assert it["nodes"]["radix tree"] <= 2 * len(it["served"])
    counts, prompts = it["counts"], [tuple(prompt) for prompt, _ in it["served"]]
    twice = [prompt for at, prompt in enumerate(prompts) if prompt in prompts[:at]]
    assert len(twice) == 1 and counts["whole prompts"] == len(twice[0]) - 1
    assert counts["whole prompts"] < counts["blocks of 16"] == counts["tree, pages of 16"]
    assert counts["tree, pages of 16"] < counts["tree, pages of 1"]
    assert it["rows"][0][1] > 0 and it["decodes"][-1] > 0 and sum(it["decodes"][:-1]) == 0
    assert it["found"] == 0 and 8.5 < it["cache"].calls / len(it["cold"]) < 9.5


@pytest.mark.slow
def test_locks_and_eviction() -> None:
    says(
        "03_locks_and_eviction",
        "What was locked is still there, and the two requests never noticed",
        "in a pool that is too small for all of them",
        "and `lru` throws it away",
        "What collecting costs grows with the tree; what the kept heap costs hardly does",
        "The first one asked for tokens 0 and 1 and got slots **4 and 5**",
        "here more than two per request",
    )
    it = played(
        "03_locks_and_eviction",
        "def asked(",
        "small = Stepper(",
        "gone = small.evict",
        "class Careless",
        "CIRCLE =",
        "def two_look_ups(",
        "class Chained(",
    )
    assert it["unsafe"]["first"] == [4, 5] and it["safe"]["first"] == [0, 1]
    alike, victims, moves = it["games"]["lru"]
    assert alike == victims > 1000 and 2 * 2000 < moves < 3 * 2000
    assert it["gone"] > 0 and it["cache"].evictable_size == 0 < it["cache"].protected_size
    locked = it["answers"](it["RadixCache"]())
    assert len(locked) == 6 and not any("InvariantError" in text for text in locked)
    assert it["answers"](it["Careless"]()) != locked
    poisoned = it["answers"](it["Careless"](), poison_freed=True)
    assert poisoned != locked and all(a.startswith(b) for a, b in zip(locked, poisoned, strict=True)), (
        "cut off"
    )
    rates = it["rates"]
    assert rates["lru"] == min(rates.values()) < max(rates.values())


@pytest.mark.slow
def test_pools() -> None:
    says(
        "04_pools",
        "3 shared, 4 of R1's own, 2 of R2's",
        "These chats share a system prompt of 14 tokens",
        "In the mean a request leaves half a page idle",
        "1,400: 53% saved",
        "compute 3,000 tokens and hold 3,000 slots for that moment",
        "of 800 tokens only 768 are whole pages of 64",
    )
    it = played("04_pools", "tour = Stepper(", "QUESTIONS = [", "def cost(")
    first, second = ({slot // 4 for slot in slots} for slots in it["held"].values())
    assert (len(first & second), len(first - second), len(second - first)) == (3, 4, 2)
    by = it["results"]
    cached, idle, entries = ([by[size][at] for size in (1, 4, 16)] for at in (0, 2, 3))
    assert cached[0] > cached[1] > cached[2] > 0 and idle[0] == 0 < idle[1] < idle[2]
    assert entries[0] > entries[1] > entries[2] and 16 / 4 < idle[2] < 16 * 3 / 4
    computed, in_use, most = ({name: numbers[at] for name, numbers in it["ways"].items()} for at in (0, 1, 2))
    assert computed["one after the other"] == in_use["one after the other"] == 800 + 3 * 200
    assert most["at once, nobody waits"] == 3000 > in_use["at once, nobody waits"] == 1400
    assert computed["one after the other, pages of 64"] == 1400 + 2 * (800 - 768)


def test_paged_attention() -> None:
    says(
        "05_paged_attention",
        "Scattered pages are not an approximation",
        "Eight agents share a prompt of some 280 tokens",
        "With one request most of a step is reading weights",
        "256 requests take less than three times as long",
        "even two halves do not weigh the same",
    )
    it = played(
        "05_paged_attention",
        "tour = Stepper(",
        "def logits(",
        "metadata = build_metadata(",
        "tidy = KVPool(",
        "big = KVPool(",
        "off = {}",
        "asking = torch",
        "small = Stepper(",
        "measured = roofline",
    )
    assert it["answer"] == it["again"] and abs(it["neat"] - it["messy"]).max() < 1e-3
    assert all(float((out - it["by"]["gather"]).abs().max()) < 1e-4 for out in it["by"].values())
    assert it["apart"] < 1e-5 < min(it["off"].values())
    (segment,) = [each for each in it["segments"] if len(each.entries) == 8]
    assert segment.end - segment.begin > 250 and 3 * it["shared"] < it["one_by_one"]
    steps = {row["batch"]: row for row in it["measured"]["roofline"]}
    assert steps[1]["weight_ms"] > 0.7 * steps[1]["step_ms"]
    assert 2 < steps[256]["step_ms"] / steps[1]["step_ms"] < 3
    assert steps[256]["kv_ms"] == pytest.approx(256 * steps[1]["kv_ms"])


@pytest.mark.slow
def test_request_life() -> None:
    says(
        "06_request_life",
        "What is in whole pages is the tree's, once, and both rows point there",
        "The second copy of the prompt is free again",
        "R2 belongs to Ada, and it says *Otto*",
        "By then two chunks were in the tree",
        "The first keeps its slots, the second frees its own",
        "With pages of 5 the engine has 5 + 3 + 24",
        "67 + 37 = 104 tokens, of which 90 are computed",
        "was deferred in 18 steps, and came back at step 66",
        "R3 ends at step 12 instead of 26, and the two others at 26 instead of 24",
    )
    it = played(
        "06_request_life",
        "QUESTION = ",
        "def commits(",
        "happened = next(",
        "class Forgetful(",
        "long = ",
        "def between(",
        "def serve(",
        "R25 = [",
        "R10 = [",
        "def urgent(",
    )
    state = it["tour"].recording.state(0)
    assert (3, 5, 24) not in it["parts"].values() and it["waited"]["R10"] == 18
    assert it["ends"][1]["R3"] == 12 < it["ends"][0]["R3"] == 26
    rows = it["commits"](it["tour"].recording)
    (_, one), (_, two), *_ = rows
    assert one[0] == one[1] == 0 < one[2], "all whole pages are new"
    assert two[0] == 0 < two[1] == two[2] == one[2], "all whole pages are duplicates"
    assert one[3] - one[2] == two[3] - two[2] == 1 and state["kv_tokens"] == 128
    right, wrong = (it["answers"](it["play"](kind)) for kind in (it["CacheManager"], it["Forgetful"]))
    assert "Ada" in right["R2"] and "Otto" in wrong["R2"]
    first, second = it["first"], it["second"]
    assert first.cached_tokens == 0 < second.cached_tokens < second.prompt_tokens - 1
    assert second.cached_tokens == 2 * 22 // 4 * 4


@pytest.mark.slow  # hundreds of requests under eight policies
def test_scheduling() -> None:
    says(
        "07_scheduling",
        "There are about 3,200 prompt tokens in all",
        "**all cached tokens that nobody needs**",
        "First come, first served (`fcfs`) computes **everything**",
        "Under `lpm` it is the last of all",
        "even its longest wait is shorter than the mean wait under fcfs",
        "`fair 1` loses a point of hit rate",
    )
    it = played(
        "07_scheduling",
        "AGENT = ",
        "prompts = [(0, 1, 2)",
        "def crowd(",
        "def busy(",
        "engine = Engine(EngineConfig(kv_tokens=340",
    )
    total = sum(hit.prompt_tokens for hit in it["kv"].request_hits(it["runs"]["fcfs"].recording))
    assert 3000 < total < 3400 and it["computed"]["fcfs"] == total
    assert it["computed"]["lpm"] == min(it["computed"].values()) < total / 3
    assert it["ours"].computed == it["C"] < it["as_they_came"].computed
    served = {
        name: [hit.request for hit in it["kv"].request_hits(each.recording)]
        for name, each in it["crowds"].items()
    }
    wait = {name: it["wait_of"](each.recording, "R2") for name, each in it["crowds"].items()}
    assert served["lpm"][-1] == "R2" and wait["fcfs"] < wait["fair"] < wait["lpm"]
    rows = it["rows"]
    assert max(rows, key=lambda name: rows[name][0]) in ("lpm", "dfs-weight")
    assert rows["lpm"][2] < rows["fcfs"][1] and rows["fcfs"][0] < rows["fair 1"][0] < rows["lpm"][0]
    assert rows["lpm"][0] - rows["fair 1"][0] < 0.03
    assert it["engine"].cache.lock_cost(it["key"]) > 200


@pytest.mark.slow
def test_nine_steps() -> None:
    says(
        "08_nine_steps",
        "Only **one leaf** went",
        "split it **in the middle of a sentence**",
        "Under `lfu`, step 8 takes the four answered questions",
        "With pages of 4 all but the last step happen as before",
        "A larger pool tells a duller story",
        "A smaller one forgets what the next request needs",
    )
    it = played("08_nine_steps", "recording, panels = ", "def rows(**changes)")
    assert not it["broken"] and len(it["panels"][4]["evicted"]) == 1
    wrong = {policy: it["rows"](eviction_policy=policy) for policy in ("lru", "lfu")}
    assert wrong["lru"][0] == [] and 8 in wrong["lfu"][0]
    gone = [node["text"] for node in wrong["lfu"][1][7]["evicted"]]
    assert sum("Answer 5" in text for text in gone) == 4 and "What can you do?" in gone[-1]
    pages = {page: it["rows"](page_size=page) for page in (4, 8, 16)}
    assert pages[4][0] == [9] and set(pages[4][0]) < set(pages[8][0])
    cached = [sum(panel["cached_tokens"] for panel in others) for _, others in pages.values()]
    assert cached[0] > cached[1] > cached[2]
    found = {size: it["rows"](kv_tokens=size) for size in (280, 352, 440)}
    assert [bool(rows) for rows, _ in found.values()] == [True, False, True]
    small, right, large = (sum(p["cached_tokens"] for p in panels) for _, panels in found.values())
    assert small < right == large
    small, right, large = (sum(len(p["evicted"]) for p in panels) for _, panels in found.values())
    assert small > right > large > 0
