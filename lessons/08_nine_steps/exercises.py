"""What lesson 08 asks for: stories, run by the real engine and judged by what became of the tree."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch  # noqa: F401  (mapped before the limit on memory is set)

from lessons.grading import Exercise, Failure, expect
from minirad import figure3
from minirad.config import EngineConfig
from minirad.engine import Engine
from minirad.figure3 import Ask, Panel, Step, check_story, one_thread
from minirad.record import Recorder

MEMORY_MB = 2048
SYSTEMS = ("You are a helpful assistant.", "You are a careful teacher. You answer with one short sentence.")
LARGEST = 2000  # slots: what a story may have
LETTERS = dict(figure3.MARKS)

# ---------------------------------------------------------------------- running a story


@functools.cache
def _first_engine() -> Engine:
    """Loads model and tokenizer once for all stories."""
    engine = Engine(EngineConfig(device="cpu", kv_tokens=16))
    assert engine.tokenizer is not None
    return engine


def encode(text: str) -> list[int]:
    return list(_first_engine().tokenizer.encode(text, add_special_tokens=False))


class Teller(figure3.Player):
    """figure3's player with another system prompt, and with panels whose texts say what a node holds.

    A panel's text is made of token ids, and of one mark for each turn where its question ends; so
    figure3's check finds the turns whatever the texts are.
    """

    def __init__(
        self, engine: Engine, recorder: Recorder, system: str, steps: Sequence[Sequence[Ask]]
    ) -> None:
        self.system, self.steps = system, steps
        self.marks: list[tuple[str, list[int]]] = []
        self.known: dict[int, list[str]] = {}
        super().__init__(engine, recorder, {})
        self.marks.append((LETTERS["S"], self._encode(f"<|im_start|>system\n{system}")))
        few = [self._encode(ask.text) for step in steps for ask in step if ask.of == "few-shot"]
        if few and self.shared["few-shot"][1]:
            self.marks.append((LETTERS["F"], few[0][: self.shared["few-shot"][1]]))

    def _shared(self, kind: str) -> int:
        asks = [ask for step in self.steps for ask in step if ask.of.startswith(kind)]
        firsts = {ask.of if kind == "chat" else ask.turn: ask for ask in reversed(asks)}
        prompts = [self._prompt(ask) for ask in firsts.values()]
        columns = zip(*prompts, strict=False)
        return next((at for at, column in enumerate(columns) if len(set(column)) > 1), 0)

    def _prompt(self, ask: Ask) -> list[int]:
        if ask.of == "few-shot" or ask.of in self.chats:
            return super()._prompt(ask)
        message = f"<|im_start|>user\n{ask.text}<|im_end|>\n<|im_start|>assistant\n"
        return self._encode(f"<|im_start|>system\n{self.system}<|im_end|>\n{message}")

    def tell(self, number: int, asks: Sequence[Ask]) -> Panel:
        for ask in asks:
            prompt = self._prompt(ask)
            if ask.turn in LETTERS:
                end = len(prompt)
                if ask.of != "few-shot":  # the <|im_end|> of the message
                    end -= len(self._encode("<|im_end|>\n<|im_start|>assistant\n")) - 1
                self.marks.append((LETTERS[ask.turn], prompt[:end]))
        panel = self.play(number, Step(f"step {number}", tuple(asks), ""))
        self._mark(panel)
        return panel

    def _mark(self, panel: Panel) -> None:
        nodes = self.recorder.replay_to(len(self.recorder.frames) - 1).nodes
        known: dict[int, list[str]] = {}
        for node in panel["nodes"]:
            path, start = figure3.path_tokens(nodes, nodes[node["id"]])
            pieces = [self._piece(path, at) for at in range(start, len(path))]
            node["text"], known[node["id"]] = "".join(pieces), pieces
        for node in panel["evicted"]:  # where it was split before it went, the lower half kept its number
            node["text"] = "".join(self.known.get(node["id"], ["?"])[-node["tokens"] :])
        self.known = known

    def _piece(self, path: list[int], at: int) -> str:
        found = [mark for mark, ids in self.marks if len(ids) == at + 1 and ids == path[: at + 1]]
        return f"{path[at]} {''.join(found)}"


def turns(node: Panel) -> list[str]:
    """Which turns a node of a told panel holds, "S" for the system prompt among them."""
    return [turn for turn, mark in figure3.MARKS if mark in node["text"]]


Turns = list[list[tuple[str, str]]]


def run(
    impl: ModuleType, name: str, system: str, wanted: Turns | int
) -> tuple[list[list[Ask]], list[Panel], Recorder]:
    """Asks for a story, checks that it is one with these turns (or so many steps), and runs it."""
    story = getattr(impl, name)(system, encode)
    expect(
        isinstance(story, tuple) and len(story) == 2, f"{name} returned {story!r:.80}, not (steps, kv_tokens)"
    )
    steps, kv_tokens = story
    whole = isinstance(kv_tokens, int) and not isinstance(kv_tokens, bool)
    expect(
        whole and 1 <= kv_tokens <= LARGEST,
        f"{name}: kv_tokens is {kv_tokens!r}, it should be 1 to {LARGEST}",
    )
    asks = [ask for step in steps for ask in step]
    wrong = next((ask for ask in asks if not isinstance(ask, Ask)), None)
    expect(wrong is None, f"{name}: {wrong!r:.80} is no Ask")
    _check_turns(f"{name}, {about(system)}", in_step(steps), wanted)
    new = sum(ask.params.max_new_tokens * ask.params.n for ask in asks)
    expect(len(asks) <= 12 and new <= 600, f"{name}: {len(asks)} requests with {new} new tokens are too many")
    engine = Engine(
        EngineConfig(device="cpu", kv_tokens=kv_tokens),
        model=_first_engine().model, tokenizer=_first_engine().tokenizer,
    )  # fmt: skip
    panels: list[Panel] = []
    with one_thread(), Recorder(engine) as recorder:
        teller = Teller(engine, recorder, system, steps)
        for number, step in enumerate(steps, start=1):
            panels.append(teller.tell(number, step))
            refused = panels[-1]["title"].partition("(refused: ")[2]
            expect(
                not refused, f"{about(system)}, step {number}: refused {refused.rstrip(')')}", draw(panels)
            )
    return steps, panels, recorder


def _check_turns(where: str, found: Turns, wanted: Turns | int) -> None:
    number = wanted if isinstance(wanted, int) else len(wanted)
    expect(len(found) == number, f"{where}: {len(found)} steps, it should be {number}")
    for at, (mine, theirs) in enumerate(
        zip(found, wanted if isinstance(wanted, list) else found, strict=True), 1
    ):
        expect(mine == theirs, f"{where}, step {at}: the requests are {mine}, they should be {theirs}")


def about(system: str) -> str:
    return (
        f"with the system prompt {system!r}"
        if len(system) < 40
        else f"with the system prompt {system[:30]!r}..."
    )


def draw(panels: Sequence[Panel]) -> list[tuple[str, Any]]:
    """The last panels as text."""
    return [(f"after step {panel['step']}", outline(panel)) for panel in panels[-3:]]


def outline(panel: Panel) -> str:
    """A panel's tree, a node in each line, with the turns that it holds."""
    lines = [f"{panel['kv_used']} of {panel['kv_capacity']} slots used"]
    depth = {None: 0}
    for node in panel["nodes"]:
        depth[node["id"]] = depth[node["parent"]] + 1
        lines.append(f"{'    ' * depth[node['parent']]}{_said(node)}, {node['state']}")
    lines += [f"x   {_said(node)}, evicted" for node in panel["evicted"]]
    return "\n".join(lines)


def _said(node: Panel) -> str:
    return f"n{node['id']} {' '.join(turns(node)) or '(a reply)'}: {node['tokens']} tokens"


def in_step(steps: Sequence[Sequence[Ask]]) -> Turns:
    """Who asks what in each step."""
    return [[(ask.of, ask.turn) for ask in asks] for asks in steps]


# ---------------------------------------------------------------------- the three stories


def split_happens(impl: ModuleType) -> None:
    """Two chats, two system prompts."""
    for system in SYSTEMS:
        check_split(impl, system)


def check_split(impl: ModuleType, system: str) -> None:
    steps, panels, recorder = run(impl, "split_story", system, 2)
    where = f"split_story, {about(system)}"
    sizes = [len(step) for step in steps]
    expect(sizes == [1, 1], f"{where}: {sizes} requests in its steps, it should be one in each of two")
    (one,), (two,) = steps
    chats = one.of.startswith("chat") and two.of.startswith("chat") and one.of != two.of
    expect(chats, f"{where}: the requests are of {one.of!r} and {two.of!r}; take two different chats")
    first, second = panels
    shown = draw(panels)
    expect(not first["evicted"] and not second["evicted"], f"{where}: something was evicted", shown, hint=1)
    expect(len(first["nodes"]) == 1, f"{where}: {len(first['nodes'])} nodes after step 1, not one", shown)
    splits = [e for f in recorder.frames for e in f.events if type(e).__name__ == "NodeSplit"]
    expect(len(splits) == 1, f"{where}: {len(splits)} splits, it should be one", shown)
    upper = next(node for node in second["nodes"] if node["id"] == splits[0].upper)
    expect(
        upper["state"] == "hit" and len(second["nodes"]) == 3,
        f"{where}: after step 2 there should be three nodes: the shared one, hit, and two below it",
        shown,
    )
    used, capacity = second["kv_used"], second["kv_capacity"]
    expect(
        used == capacity,
        f"{where}: {used} of {capacity} slots are used in the end; the pool should be full",
        shown,
        hint=2,
    )


def forget_happens(impl: ModuleType) -> None:
    """Four turns, two system prompts."""
    for system in SYSTEMS:
        check_forget(impl, system)


def check_forget(impl: ModuleType, system: str) -> None:
    wanted = [[("chat 1", "U1")], [("chat 1", "U2")], [("chat 2", "V1")], [("chat 1", "U3")]]
    _, panels, _ = run(impl, "forget_story", system, wanted)
    where = f"forget_story, {about(system)}"
    shown = draw(panels)
    for panel in panels[:2]:
        gone = [turns(node) for node in panel["evicted"]]
        expect(
            not gone, f"{where}, step {panel['step']}: {gone} is evicted, and nothing should be yet", shown
        )
    gone = [turns(node) for node in panels[2]["evicted"]]
    words = f"{where}, step 3: evicted are nodes with {gone}; it should be [['U2']]"
    expect(gone == [["U2"]], words, shown, hint=1)
    kept = sum(node["tokens"] for node in panels[2]["nodes"] if set(turns(node)) & {"S", "U1"})
    held = {turn for node in panels[2]["nodes"] for turn in turns(node)}
    expect(
        {"S", "U1"} <= held, f"{where}, step 3: the first turn of chat 1 should still be there", shown, hint=1
    )
    cached = panels[3]["cached_tokens"]
    expect(
        cached == kept,
        f"{where}, step 4: {cached} prompt tokens were cached, not the {kept} up to the first turn's end",
        shown,
        hint=2,
    )


def nine_happen(impl: ModuleType) -> None:
    """The nine steps under one system prompt."""
    check_nine(impl, SYSTEMS[0])


TURNS = [
    [], [("chat 1", "U1")], [("chat 1", "U2")], [("chat 2", "V1")], [("chat 2", "V2")], [("few-shot", "Q1")],
    [("few-shot", "Q2"), ("few-shot", "Q3"), ("few-shot", "Q4")], [("chat 1", "U3")], [("few-shot", "A")],
]  # fmt: skip


def check_nine(impl: ModuleType, system: str) -> None:
    _, panels, _ = run(impl, "nine_steps", system, TURNS)
    where = f"nine_steps, {about(system)}"
    broken = check_story(panels)
    if broken:
        row = int(broken[0].partition(":")[0].split()[-1]) if broken[0].startswith("step ") else 9
        faults = [fault for fault in broken if fault.startswith(f"step {row}:")] or broken
        raise Failure(f"{where}, {'; '.join(faults[:3])}", draw(panels[:row]), _hint_of(row))


def _hint_of(row: int) -> int:
    """Up to step 4 the sizes are at fault, up to step 8 the pool, and then the samples."""
    return int(row > 4) + int(row > 8)


EXERCISES = [
    Exercise(
        "split_story", 2, [split_happens],
        hints=(
            "Draw the tree after each step on paper and write a letter for the size of each node. Only then "
            "think about numbers.",
            "First prompt + 3 + second prompt - shared + 3, with replies of 4: the last token of a reply is "
            "not in the tree. `encode` says how many tokens a text has.",
            "Not only the system prompt. Encode both first prompts and walk along the two lists up to where "
            "they differ.",
        ),
        seconds=60,
    ),
    Exercise(
        "forget_story", 3, [forget_happens],
        hints=(
            "Write one for each step: what must fit (sum <= pool), and what must not (sum > pool). The leaf "
            "that was not used for longest goes first, and no more than is needed.",
            "With s for the first turn (system prompt included), u for the second, v for what chat 2 adds: "
            "s + u <= pool < s + u + v at least. Without u it has to fit, or U1 goes as well. So what about "
            "s + v?",
            "With w for the third turn: chat 1 comes back with s, u and w. Only s may be there still, and s "
            "+ u + w has to fit at all.",
        ),
        seconds=60,
    ),
    Exercise(
        "nine_steps", 5, [nine_happen],
        hints=(
            "U2 has to be long, longer than everything few-shot; a long text is cheaper than a long reply. "
            "Questions should differ in one word, and that word should be one token in all of them, or "
            "nearly.",
            "Write F for the part that all queries share and q for one question with its answer. After step "
            "8 the tree holds S, U1, U2, U3, F and four q. Make the pool just that. Which inequality for V1 "
            "+ V2 comes out of steps 5 to 7? Which one for V1 out of step 8?",
            "The samples need more than Q1 and Q3 together, and not more than Q1, Q3 and Q4. Each sample of "
            "n tokens needs n - 1 slots of its own.",
        ),
        seconds=90,
    ),
]  # fmt: skip
