"""The nine steps of the RadixAttention paper's figure 3, run by the real engine with the classroom Llama.

    python -m minirad.figure3 [--json] [--page-size 4] [--eviction-policy fifo] [--kv-tokens 300]

Two chats share a system prompt, four few-shot queries share their examples, and one small pool holds
it all: the tree grows, splits and forgets. The requests below are data, and they are all that is
scripted; which node is hit, split or evicted is the engine's own decision, read off its events.
`check_story` says which rows of the figure's table hold (on the committed weights: all of them).

What makes it work: the problem of chat 1 is long, so that its turn (U2) alone makes room for the
story (V2) and for all few-shot queries; replaying it in step 8 (U3) takes the place of all that chat 2
had; and the samples of step 9 need more than the two oldest of three answered questions.

Does not draw (viz/figure3.py does), and makes nothing up: without a model there is no story.
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m minirad.figure3")  # before what takes its time to import

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.classroom.corpus import few_shot_header, few_shot_question
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.replies import Replies, Unsaid

if TYPE_CHECKING:
    from pathlib import Path

    from minirad.outputs import GenerationOutput

Panel = dict[str, Any]

KV_TOKENS = 352
"""The pool of all nine steps; the tests prove that a little less or more works as well."""

# ---------------------------------------------------------------------- the requests

SYSTEM = "You are a helpful assistant."
HELLO = "Hello"
PROBLEM = (
    "Solve this problem: In the morning Otto has 4 pears in a red basket. Then Erik comes and gives 4 "
    "pears to Otto. In the evening Otto eats 4 pears with some bread. On the way home Otto finds 2 "
    "pears under a tree. How many pears does Otto have now? Show every step of your work."
)
ABILITIES = "What can you do?"
STORY = "Write a story about a sheep."
COME_BACK = "Thank you"
EXAMPLES = (
    ("What is the capital of France?", "Paris"),
    ("What color is the sky?", "blue"),
    ("Name a fruit.", "pear"),
    ("What does a cow say?", "moo"),
)
QUESTIONS = ("Name a color.", "Name a friend.", "Name a fruit.", "Name a city.")
"""All of one pattern, so that the shared prefix ends in the middle of a sentence."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    of: the chat that it continues, or "few-shot" (every prompt starts anew).
    turn: its name in the figure's table. text: a chat's message, or the whole few-shot prompt.
    """

    of: str
    turn: str
    text: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that are sent together and run to their end. says: what is asked. lesson: what to learn."""

    title: str
    asks: tuple[Ask, ...]
    says: str
    lesson: str = ""


def _few_shot(question: str) -> str:
    return few_shot_header(EXAMPLES) + few_shot_question(len(EXAMPLES) + 1, question)


def _chat(of: str, turn: str, text: str, most: int) -> Ask:
    return Ask(of, turn, text, SamplingParams(max_new_tokens=most))


def _query(turn: str, question: str) -> Ask:
    return Ask("few-shot", turn, _few_shot(question), SamplingParams(max_new_tokens=12, stop="\n"))


SAMPLES = SamplingParams(max_new_tokens=12, temperature=1.0, n=3, seed=35)
"""Of step 9. Without a stop text the samples run on into a question 6 of their own."""

STEPS = (
    Step("Nothing yet", (), "No request has come."),
    Step(
        "Chat 1: hello",
        (_chat("chat 1", "U1", HELLO, 16),),
        "System prompt, greeting and reply become one edge.",
    ),
    Step(
        "Chat 1: a problem to solve",
        (_chat("chat 1", "U2", PROBLEM, 112),),
        "The second prompt repeats the first turn and adds a problem.",
        "What was said before is not computed again.",
    ),
    Step(
        "Chat 2 starts",
        (_chat("chat 2", "V1", ABILITIES, 72),),
        "Another user, the same system prompt.",
        "The edge b is split where the two chats part.",
    ),
    Step(
        "Chat 2: a story",
        (_chat("chat 2", "V2", STORY, 112),),
        "Chat 2 asks for a story.",
        "The pool is full: the oldest leaf gives way, its parent stays.",
    ),
    Step(
        "A few-shot query",
        (_query("Q1", QUESTIONS[0]),),
        "Solved examples and a question, in plain text.",
        "Nothing in common with the chats: it hangs off the root.",
    ),
    Step(
        "Three more queries",
        tuple(_query(f"Q{at}", text) for at, text in enumerate(QUESTIONS[1:], start=2)),
        "A batch of three with the same examples.",
        "The edge e is split in the middle of a sentence.",
    ),
    Step(
        "Chat 1 comes back",
        (_chat("chat 1", "U3", COME_BACK, 16),),
        "Chat 1 replays its history and says thank you.",
        "The evicted problem is history too: it is computed again, and chat 2 has to go.",
    ),
    Step(
        "More samples for one query",
        (Ask("few-shot", "A", _few_shot(QUESTIONS[1]), SAMPLES),),
        "Three more answers to question j, sampled.",
        "They share all of j's prompt; the other questions give way one by one.",
    ),
)

TABLE_LETTERS: Mapping[int, Mapping[tuple[str, ...], str]] = {
    3: {("S", "U1"): "b"},
    4: {("U2",): "c", ("V1",): "d"},
    6: {("F", "Q1"): "e"},
    8: {("Q1",): "i", ("Q2",): "j", ("Q3",): "k", ("Q4",): "l"},
}
"""Which node has which letter, by the turns that it holds."""
EVICTED_LETTERS: Mapping[int, Mapping[tuple[str, ...], str]] = {
    5: {("U2",): "c"},
    8: {("V1",): "g", ("V2",): "h"},
    9: {("Q1",): "i", ("Q3",): "k", ("Q4",): "l"},
}

# ---------------------------------------------------------------------- running them


@dataclass(slots=True)
class Strand:
    """One conversation as token ids, and where each of its turns ends.

    The history of a chat is exactly these ids: generated text is never tokenised again.
    """

    tokens: list[int] = field(default_factory=list)
    ends: list[tuple[str, int]] = field(default_factory=list)

    def turns(self, start: int, stop: int, page: int) -> tuple[str, ...]:
        """Which turns the tokens [start, stop) belong to; turns end with whole pages in a tree."""
        found, begin = [], 0
        for turn, end in self.ends:
            end = end // page * page
            if max(begin, start) < min(end, stop):
                found.append(turn)
            begin = end
        return tuple(found)


def run(
    page_size: int = 1,
    eviction_policy: str = "lru",
    kv_tokens: int | None = None,
    model: str | Path | None = None,
    forced_lengths: Mapping[str, int] | None = None,
    replies: Replies | None = None,
) -> tuple[Recording, list[Panel]]:
    """Runs the nine steps on a new engine; returns its recording (nine scenes) and nine panels.

    kv_tokens: None is `KV_TOKENS`, rounded up to whole pages.
    model: None is the classroom Llama; see EngineConfig.
    forced_lengths: by turn ("U1", "Q2", ...; "A" for the samples of step 9) how many tokens are
    generated, whatever they say: for another model, or to see how the story hangs on its lengths.
    replies: kept from run to run, so that the model is asked only what it has not said before.

    ValueError for a page size, policy, pool or model that EngineConfig refuses. A request that is too
    large for the pool is left out, and its panel's title says so.
    """
    if kv_tokens is None:
        page = max(page_size, 1)  # EngineConfig refuses a smaller one, in better words
        kv_tokens = -(-KV_TOKENS // page) * page
    config = EngineConfig(
        model=model, device="cpu", page_size=page_size, eviction_policy=eviction_policy, kv_tokens=kv_tokens
    )
    lengths, replies = forced_lengths or {}, Replies() if replies is None else replies
    with one_thread():
        if replies.first is not None:
            with suppress(Unsaid):
                return _played(replies.engine(config), lengths, replies)
        return _played(Engine(config), lengths, replies)


def _played(engine: Engine, lengths: Mapping[str, int], replies: Replies) -> tuple[Recording, list[Panel]]:
    with Recorder(engine) as recorder:
        player = Player(engine, recorder, lengths, replies)
        return recorder, [player.play(number, step) for number, step in enumerate(STEPS, start=1)]


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread meanwhile: with so small a model, more of them only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Player:
    """Sends the requests of each step and describes what came of them."""

    def __init__(
        self,
        engine: Engine,
        recorder: Recorder,
        forced_lengths: Mapping[str, int],
        replies: Replies | None = None,
    ) -> None:
        self.engine, self.recorder, self.forced = engine, recorder, forced_lengths
        self.replies = Replies() if replies is None else replies
        self.page = engine.config.page_size
        self.chats: dict[str, Strand] = {}
        self.strands: list[Strand] = []
        self.shared = {"chat": ("S", self._shared("chat")), "few-shot": ("F", self._shared("few-shot"))}

    def _shared(self, kind: str) -> int:
        """How many tokens the first prompts of both chats (of all few-shot queries) have in common."""
        asks = [ask for step in STEPS for ask in step.asks if ask.of.startswith(kind)]
        firsts = {ask.of if kind == "chat" else ask.turn: ask for ask in reversed(asks)}
        prompts = [self._prompt(ask) for ask in firsts.values()]
        columns = zip(*prompts, strict=False)
        return next((at for at, column in enumerate(columns) if len(set(column)) > 1), 0)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.engine.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _prompt(self, ask: Ask) -> list[int]:
        """Token ids; for a chat its history, whatever closes the last reply, and the new message."""
        if ask.of == "few-shot":
            return self._encode(ask.text)
        message = f"<|im_start|>user\n{ask.text}<|im_end|>\n<|im_start|>assistant\n"
        history = self.chats[ask.of].tokens if ask.of in self.chats else []
        if not history:
            return self._encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{message}")
        closed = history[-1] in self.engine.eos_ids
        return history + self._encode(("" if closed else "<|im_end|>") + "\n" + message)

    def _params(self, ask: Ask) -> SamplingParams:
        if ask.turn not in self.forced:
            return ask.params
        return replace(ask.params, max_new_tokens=self.forced[ask.turn], stop=(), ignore_eos=True)

    # ------------------------------------------------------------ one step

    def play(self, number: int, step: Step) -> Panel:
        """Runs a step to its end and returns its panel."""
        first = len(self.recorder.frames)
        before = self.recorder.replay_to(first - 1)
        self.recorder.scene(step.title)
        sent: dict[str, tuple[Ask, list[int]]] = {}
        refused: dict[str, str] = {}
        for ask in step.asks:
            prompt = self._prompt(ask)
            try:
                sent[self.engine.add_request(prompt, self._params(ask))] = ask, prompt
            except ValueError as refusal:
                refused[ask.turn] = str(refusal)
        outputs = self._run_to_the_end()
        for output in outputs:
            ask, prompt = sent[output.request_id]
            self.replies.keep(self.engine, prompt, self._params(ask), output)
            self._remember(ask, prompt, output)
        scene = _Scene.watch(before, self.recorder.frames[first:])
        counted = [output for output in outputs if output.index == 0]  # n samples are one prompt
        return {
            "step": number,
            "title": step.title + _say_refused(refused),
            "nodes": self._nodes(number, scene),
            "evicted": self._evicted(number, scene),
            "prompt_tokens": sum(output.prompt_tokens for output in counted),
            "cached_tokens": sum(output.cached_tokens for output in counted),
            "kv_used": self.engine.allocator.num_tokens - self.engine.allocator.available,
            "kv_capacity": self.engine.allocator.num_tokens,
        }

    def _run_to_the_end(self) -> list[GenerationOutput]:
        outputs = list(self.engine.step().finished)  # idle if nothing was sent: a scene has a frame
        self.engine.check()
        while self.engine.has_work:
            outputs += self.engine.step().finished
            self.engine.check()
        return outputs

    def _remember(self, ask: Ask, prompt: list[int], output: GenerationOutput) -> None:
        """Notes a sequence with its turns. The last token has no KV and belongs to the next turn."""
        kind = "few-shot" if ask.of == "few-shot" else "chat"
        earlier = self.chats.get(ask.of, Strand(ends=[self.shared[kind]]))
        tokens = prompt + output.token_ids
        strand = Strand(tokens, [*earlier.ends, (ask.turn, len(tokens) - 1)])
        if kind == "chat":
            self.chats[ask.of] = strand
        self.strands.append(strand)

    # ------------------------------------------------------------ its panel

    def _nodes(self, number: int, scene: _Scene) -> list[Panel]:
        letters = TABLE_LETTERS.get(number, {})
        return [
            {
                "id": node["id"],
                "parent": node["parent"] or None,
                "text": self._text(node["tokens"]),
                "tokens": len(node["tokens"]),
                "state": scene.state(node["id"]),
                "label": letters.get(self._turns(*path_tokens(scene.after.nodes, node))),
            }
            for node in _in_order(scene.after.nodes)
        ]

    def _evicted(self, number: int, scene: _Scene) -> list[Panel]:
        letters = EVICTED_LETTERS.get(number, {})
        return [
            {
                "id": node["id"],
                "text": self._text(node["tokens"]),
                "tokens": len(node["tokens"]),
                "label": letters.get(self._turns(path, start)),
            }
            for node, path, start in scene.evicted
        ]

    def _turns(self, path: list[int], start: int) -> tuple[str, ...]:
        """The turns that a node holds, by the latest conversation that runs through it."""
        for strand in reversed(self.strands):
            if strand.tokens[: len(path)] == path:
                return strand.turns(start, len(path), self.page)
        return ()

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.engine.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def _say_refused(refused: Mapping[str, str]) -> str:
    *_, reason = ["", *refused.values()]
    return f" (refused: {', '.join(refused)}; {reason})" if refused else ""


@dataclass(slots=True)
class _Scene:
    """What happened to the tree over a run of frames, added up."""

    after: ReplayState
    new: set[int] = field(default_factory=set)
    hit: set[int] = field(default_factory=set)
    evicted: list[tuple[Panel, list[int], int]] = field(default_factory=list)  # node, path, where it starts

    @classmethod
    def watch(cls, before: ReplayState, frames: Iterable[Frame]) -> _Scene:
        scene = cls(before)
        for frame in frames:
            for event in frame.events:
                scene._take(event)
                scene.after.apply(event)
        return scene

    def _take(self, event: ev.Event) -> None:
        if isinstance(event, ev.NodeInserted):
            self.new.add(event.node)
        elif isinstance(event, ev.PrefixTouched) and event.hit:
            self.hit.update(event.path)
        elif isinstance(event, ev.NodeSplit):
            for kept in (self.new, self.hit):
                if event.lower in kept:
                    kept.add(event.upper)
        elif isinstance(event, ev.NodeEvicted):
            node = self.after.nodes[event.node]
            self.evicted.append((dict(node), *path_tokens(self.after.nodes, node)))

    def state(self, node: int) -> str:
        return "new" if node in self.new else "hit" if node in self.hit else "cached"


def path_tokens(nodes: Mapping[int, Panel], node: Panel) -> tuple[list[int], int]:
    """All tokens from the root to the end of a node, and where the node's own begin."""
    path, number = list(node["tokens"]), node["parent"]
    while number:
        path = nodes[number]["tokens"] + path
        number = nodes[number]["parent"]
    return path, len(path) - len(node["tokens"])


def _in_order(nodes: Mapping[int, Panel]) -> list[Panel]:
    """Parents before children, siblings in order of creation (a split's upper half has a new id)."""
    below: dict[int, list[Panel]] = {}
    for node in sorted(nodes.values(), key=lambda node: (node["created"], node["id"])):
        below.setdefault(node["parent"], []).append(node)
    ordered, todo = [], below.get(0, [])[::-1]
    while todo:
        node = todo.pop()
        ordered.append(node)
        todo += below.get(node["id"], [])[::-1]
    return ordered


# ---------------------------------------------------------------------- the table, as a check

MARKS = (
    ("S", SYSTEM),
    ("U1", f"{HELLO}<|im_end|>"),
    ("U2", PROBLEM),
    ("U3", f"{COME_BACK}<|im_end|>"),
    ("V1", f"{ABILITIES}<|im_end|>"),
    ("V2", STORY),
    ("F", few_shot_header(EXAMPLES).strip()),
    *(
        (f"Q{at}", f" {question.split()[-1]}\nAnswer {len(EXAMPLES) + 1}:")
        for at, question in enumerate(QUESTIONS, start=1)
    ),
)
"""Texts that say which turns a node holds: what was asked, not what the model made of it."""

ANSWER = "no question"  # a node that holds no question, such as a sampled answer

Row = tuple[str, str, str, str | None]  # what it holds, its parent, state, letter
_S, _U1, _V1 = ("S", "", "hit", None), ("U1", "S", "cached", None), ("V1", "S", "cached", None)
_OLD_F = ("F", "", "cached", None)
_ROWS: Mapping[int, list[Row]] = {
    1: [],
    2: [("S U1", "", "new", None)],
    3: [("S U1", "", "hit", "b"), ("U2", "S U1", "new", None)],
    4: [_S, _U1, ("U2", "U1", "cached", "c"), ("V1", "S", "new", "d")],
    5: [_S, _U1, ("V1", "S", "hit", None), ("V2", "V1", "new", None)],
    6: [
        ("S", "", "cached", None), _U1, _V1, ("V2", "V1", "cached", None),
        ("F Q1", "", "new", "e"),
    ],
    7: [
        ("S", "", "cached", None), _U1, _V1, ("V2", "V1", "cached", None),
        ("F", "", "hit", None), ("Q1", "F", "cached", None),
        *((f"Q{at}", "F", "new", None) for at in (2, 3, 4)),
    ],
    8: [
        _S, ("U1", "S", "hit", None), ("U2 U3", "U1", "new", None), _OLD_F,
        *((f"Q{at}", "F", "cached", letter) for at, letter in enumerate("ijkl", start=1)),
    ],
    9: [
        ("S", "", "cached", None), _U1, ("U2 U3", "U1", "cached", None), ("F", "", "hit", None),
        ("Q2", "F", "hit", None), (ANSWER, "Q2", "cached", None),
        *[(ANSWER, "Q2", "new", None)] * 3,
    ],
}  # fmt: skip
_GONE: Mapping[int, list[tuple[str, str]]] = {
    5: [("U2", "c")],
    8: [("V2", "h"), ("V1", "g")],
    9: [("Q1", "i"), ("Q3", "k"), ("Q4", "l")],
}
_HIT_PATHS: Mapping[int, list[str]] = {  # whose lengths add up to the cached tokens
    3: ["S U1"], 4: ["S"], 5: ["S", "V1"], 7: ["F", "F", "F"], 8: ["S", "U1"], 9: ["F", "Q2"],
}  # fmt: skip


def check_story(panels: Sequence[Panel]) -> list[str]:
    """Which rows of the table do not hold, and in what; an empty list when all nine do.

    Judges the panels alone, by the texts in them: structure, states, letters, victims, token counts,
    and that what is cached in one panel was there in the one before.
    """
    wrong = []
    if [panel["step"] for panel in panels] != list(range(1, len(_ROWS) + 1)):
        wrong.append(f"steps 1 to {len(_ROWS)} expected, got {[panel['step'] for panel in panels]}")
    if len({panel["kv_capacity"] for panel in panels}) > 1:
        wrong.append("the pool's size changes")
    before: Panel | None = None
    for panel in panels:
        faults = _check_row(panel)
        if not faults:  # where the row is another one, counts would only say so again
            faults = [*_check_counts(panel), *_check_continuity(before, panel)]
        wrong += [f"step {panel['step']}: {fault}" for fault in faults]
        before = panel
    return wrong


def _names(panel: Panel) -> dict[int | None, str]:
    """What each node of a panel holds, by its text; "" for the root."""
    names: dict[int | None, str] = {None: ""}
    for node in panel["nodes"]:
        names[node["id"]] = _name(node["text"])
    return names


def _name(text: str) -> str:
    return " ".join(turn for turn, mark in MARKS if mark in text) or ANSWER


def _check_row(panel: Panel) -> list[str]:
    names = _names(panel)
    found = [
        (names[node["id"]], names.get(node["parent"], "nothing known"), node["state"], node["label"])
        for node in panel["nodes"]
    ]
    expected = list(_ROWS.get(panel["step"], []))
    for row in found:  # more samples than three are as good
        if row == (ANSWER, "Q2", "new", None) and found.count(row) > expected.count(row) >= 3:
            expected.append(row)
    gone = [(_name(node["text"]), node["label"]) for node in panel["evicted"]]
    wanted = _GONE.get(panel["step"], [])
    return [
        *(f"{_say(row)} is missing" for row in _minus(expected, found)),
        *(f"{_say(row)} is not in the table" for row in _minus(found, expected)),
        *(f"{name} should be evicted as {letter}" for name, letter in _minus(wanted, gone)),
        *(f"{name} is evicted{_as(letter)}" for name, letter in _minus(gone, wanted)),
    ]


def _minus(these: Sequence[Any], those: Sequence[Any]) -> list[Any]:
    """What is in the one list and not in the other; what is there twice counts twice."""
    return list((Counter(these) - Counter(those)).elements())


def _as(letter: str | None) -> str:
    return f" as {letter}" if letter else ""


def _say(row: Row) -> str:
    name, parent, state, letter = row
    return f"[{name}] {state}{_as(letter)} below {f'[{parent}]' if parent else 'the root'}"


def _check_counts(panel: Panel) -> list[str]:
    faults = []
    names, held = _names(panel), sum(node["tokens"] for node in panel["nodes"])
    if held != panel["kv_used"] or held > panel["kv_capacity"]:
        faults.append(f"{held} tokens in the tree, {panel['kv_used']} of {panel['kv_capacity']} used")
    tokens = {names[node["id"]]: node["tokens"] for node in panel["nodes"]}
    cached = sum(tokens[name] for name in _HIT_PATHS.get(panel["step"], []))
    most = panel["prompt_tokens"] - (1 if panel["prompt_tokens"] else 0)  # one is always computed
    if panel["cached_tokens"] != min(cached, most):
        faults.append(f"{panel['cached_tokens']} prompt tokens cached, the nodes that were hit hold {cached}")
    if (panel["prompt_tokens"] > 0) != bool(panel["step"] > 1):
        faults.append(f"{panel['prompt_tokens']} prompt tokens")
    if any(node["tokens"] < 1 or not node["text"] for node in panel["nodes"]):
        faults.append("a node is empty")
    return faults


def _check_continuity(before: Panel | None, panel: Panel) -> list[str]:
    """What is not new was there before, whole or as part of a longer edge; what went had been there."""
    faults = []
    was = {} if before is None else {node["id"]: node for node in before["nodes"]}
    paths = _path_texts(before) if before is not None else []
    for text, node in zip(_path_texts(panel), panel["nodes"], strict=True):
        if node["state"] != "new" and not any(path.startswith(text) for path in paths):
            faults.append(f"n{node['id']} is {node['state']} but was not there before")
        if node["state"] == "new" and node["id"] in was:
            faults.append(f"n{node['id']} is new but was there before")
    for node in panel["evicted"]:
        old = was.get(node["id"])
        if old is None or (old["text"], old["tokens"]) != (node["text"], node["tokens"]):
            faults.append(f"n{node['id']} was evicted but was not there before")
    kept = sum(node["tokens"] for node in panel["nodes"] if node["state"] != "new")
    gone = sum(node["tokens"] for node in panel["evicted"])
    if kept + gone != sum(node["tokens"] for node in was.values()):
        faults.append("tokens that were there are neither kept nor evicted")
    return faults


def _path_texts(panel: Panel) -> list[str]:
    texts: dict[int | None, str] = {None: ""}
    for node in panel["nodes"]:
        texts[node["id"]] = texts.get(node["parent"], "?") + node["text"]
    return [texts[node["id"]] for node in panel["nodes"]]


# ---------------------------------------------------------------------- telling it


def caption(panel: Panel, told: bool = True) -> str:
    """What happened in a step, in a few sentences. `told` adds what the story teaches: it is true only
    where the row of the table holds."""
    step = STEPS[panel["step"] - 1]
    if step.asks and not panel["prompt_tokens"]:
        return "No request could be served: the pool is too small."
    parts = [step.says]
    if panel["prompt_tokens"]:
        parts.append(f"{panel['cached_tokens']} of {panel['prompt_tokens']} prompt tokens were cached.")
    if panel["evicted"]:
        names = [node["label"] or f"n{node['id']}" for node in panel["evicted"]]
        tokens = sum(node["tokens"] for node in panel["evicted"])
        parts.append(f"Evicted: {', '.join(names)} ({tokens} tokens).")
    if told and step.lesson:
        parts.append(step.lesson)
    return " ".join(parts)


def short_text(text: str, most: int = 46) -> str:
    """A node's text on one line, its middle left out."""
    line = text.replace("\n", "⏎")
    if len(line) <= most:
        return line
    head = (most - 1) // 2
    return f"{line[:head]}…{line[-(most - 1 - head) :]}"


def text_panel(panel: Panel, told: bool = True) -> str:
    """One step for the terminal: title, caption, tree, victims."""
    lines = [f"{panel['step']}. {panel['title']}", f"   {caption(panel, told)}"]
    children: dict[int | None, list[Panel]] = {}
    for node in panel["nodes"]:
        children.setdefault(node["parent"], []).append(node)

    def draw(parent: int | None, indent: str) -> None:
        nodes = children.get(parent, [])
        for node in nodes:
            last = node is nodes[-1]
            lines.append(indent + ("└─ " if last else "├─ ") + _text_node(node, node["state"]))
            draw(node["id"], indent + ("   " if last else "│  "))

    lines.append(f"   root  ({panel['kv_used']} of {panel['kv_capacity']} KV slots used)")
    draw(None, "   ")
    lines += [f"    x  {_text_node(node, 'evicted')}" for node in panel["evicted"]]
    return "\n".join(lines)


def _text_node(node: Panel, state: str) -> str:
    letter = f"({node['label']}) " if node["label"] else ""
    word = state.upper() if state == "new" else state
    return f"{letter}n{node['id']} {word} {node['tokens']} | {short_text(node['text'])}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = command.Parser(prog="python -m minirad.figure3", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print nine objects instead of nine trees")
    add_options(parser)
    args = parser.parse_args(arguments)
    return command.run(parser.prog, lambda: _print(args))


def _print(args: argparse.Namespace) -> int:
    _, panels = run(args.page_size, args.eviction_policy, args.kv_tokens)
    code = 1 if served_none(panels) else 0
    if args.json:
        print(json.dumps(panels, indent=2))
        return code
    broken = check_story(panels)
    for panel in panels:
        print(text_panel(panel, holds(panel, broken)), end="\n\n")
    print(verdict(broken))
    return code


def served_none(panels: Sequence[Panel]) -> bool:
    """Whether every request of the story was refused."""
    return not any(panel["prompt_tokens"] for panel in panels)


def holds(panel: Panel, broken: Sequence[str]) -> bool:
    """Whether `check_story` found no fault with this panel."""
    return not any(fault.startswith(f"step {panel['step']}:") for fault in broken)


def verdict(broken: Sequence[str], most: int = 3) -> str:
    """What `check_story` found, for people: at most so many faults per row."""
    if not broken:
        return "All nine rows of the figure's table hold."
    rows: dict[str, list[str]] = {}
    for fault in broken:
        row, _, what = fault.rpartition(": ")
        rows.setdefault(row, []).append(what)
    lines = ["With these settings it is another story. Rows of the table that no longer hold:"]
    for row, faults in rows.items():
        more = f"; and {len(faults) - most} more" if len(faults) > most else ""
        lines.append(f"- {row or 'all'}: {'; '.join(faults[:most])}{more}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The settings that change the story."""
    from minirad.cache.eviction import POLICIES

    parser.add_argument("--page-size", type=int, default=1, metavar="N", help="tokens per page (1)")
    parser.add_argument(
        "--eviction-policy", choices=tuple(POLICIES), default="lru", help="who goes first (lru)"
    )
    parser.add_argument("--kv-tokens", type=int, metavar="N", help=f"size of the pool ({KV_TOKENS})")


if __name__ == "__main__":
    sys.exit(main())
