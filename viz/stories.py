"""The gallery's stories: short runs of the real engine, each made to show one thing.

`tell(policy)` asks the same questions under one eviction policy; nearly each takes another victim at the
end. `encore(policy)` goes on and asks for what was there before. `host_tier`, `policy_change` and
`new_weights` show what their names say. Only an answer's first token is asked for, and that has no KV: a leaf
of the tree is exactly one question.

Does not draw or write anything (gallery.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minirad import figure3
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.classroom.corpus import chat_text, message
from minirad.model.load import load_tokenizer, resolve_model
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from viz.trace import Trace


@dataclass(frozen=True, slots=True)
class Visit:
    """One scene: a question, asked `times` times in a row. title: of the scene, where the question is not it.

    before: what is done to the engine first.
    """

    question: str
    times: int = 1
    priority: int = 1
    title: str = ""
    before: Callable[[Engine], None] | None = None

    @property
    def heading(self) -> str:
        return self.title or f"{self.question} {f'({self.times} times)' if self.times > 1 else ''}".strip()


VISITS = (
    Visit("Hello"),
    Visit("Who are you?", times=3),
    Visit("Name a fruit.", times=2),
    Visit("Good morning"),
    Visit("Repeat: apple river", times=3, priority=0),
    Visit("Tell me a story about a cat."),
    Visit("What day comes after Monday?", times=3),
    Visit("Hello", times=2),
    Visit("Tell me a story about a cat.", times=2),
    Visit("Bye"),
)
"""Which question came when, how often, and how important it was: each policy evicts another leaf, but
brrip that of lfu: so early its leases go by the hits alone.

first in: Hello. Last in: What day. Longest unused: Who are you. Just used: Tell me. Never asked again:
Good morning. Longest unused of those asked again at most once: Name a fruit. Least priority: Repeat.
"""
SPARE = 4  # slots left when all leaves are in: the last question needs a few more

ENCORE = (
    Visit("Who are you?"), Visit("Hello"), Visit("Name a fruit."), Visit("Tell me a story about a cat."),
    Visit("Who are you?"), Visit("What day comes after Monday?"), Visit("Repeat: apple river", priority=0),
    Visit("Hello"), Visit("Good morning"), Visit("Who are you?"),
)  # fmt: skip
"""Which questions come back after that. What was evicted is computed anew, in another leaf's place."""

ONE, TWO, THREE, FOUR, FIVE = (
    "Who are you?", "Name a fruit.", "What day comes after Monday?", "Repeat: apple river", "Good morning",
)  # fmt: skip

LONG = "Tell me a story about a cat."

HOST_VISITS = (
    Visit(ONE, title=f"{ONE} → computed; then copied to the host"),
    Visit(TWO, title=f"{TWO} → copied as well"),
    Visit(THREE, title=f"{THREE} → the device is full now"),
    Visit(FOUR, title=f"{FOUR} → the leaf unused for longest is demoted: its copy stays"),
    Visit(FIVE, title=f"{FIVE} → and the next one"),
    Visit(ONE, title=f"{ONE} → is back: found on the host, and loaded"),
    Visit(TWO, title=f"{TWO} → is back, too"),
    Visit(LONG, title=f"{LONG} → the host has to make room, too"),
)
CHANGE_VISITS = (
    Visit(ONE, times=3, title=f"{ONE} → asked three times: the most popular question"),
    Visit(TWO),
    Visit(THREE),
    Visit(FOUR, title=f"{FOUR} → lru: the oldest goes, which was asked three times"),
    Visit(ONE, times=3, title=f"{ONE} → (3 times) computed again"),
    Visit(FIVE, title=f"{FIVE} → from here on the policy is lfu",
          before=lambda engine: engine.set_eviction_policy("lfu")),
    Visit(LONG, title=f"{LONG} → what was never asked again goes first"),
    Visit("Bye", title="Bye → lru would take “Who are you?” now; lfu does not"),
    Visit(ONE, title=f"{ONE} → is still there"),
)  # fmt: skip
WEIGHTS_VISITS = (
    Visit(ONE),
    Visit(TWO),
    Visit(ONE, title=f"{ONE} → a hit"),
    Visit(ONE, title=f"{ONE} → other weights: nothing that was cached matches",
          before=lambda engine: engine.update_weights(_other_weights(engine))),
    Visit(ONE, title=f"{ONE} → a hit again, of the new weights' KV"),
    Visit(THREE, title=f"{THREE} → room is needed: what is of the old weights goes as it gets old"),
    Visit(FOUR, title=f"{FOUR} → and the rest of it"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Story:
    """A recorded run of visits. victims: the question of each node that was evicted, and the reason."""

    policy: str
    recording: Recording
    labels: dict[str, str]
    kv_tokens: int
    victims: tuple[tuple[str, str], ...]


def tell(policy: str) -> Story:
    """Runs VISITS under an eviction policy."""
    return _run(VISITS, _room(VISITS[:-1]) + SPARE, eviction_policy=policy)


def encore(policy: str) -> Story:
    """Runs VISITS, and then ENCORE in the same pool."""
    return _run((*VISITS, *ENCORE), _room(VISITS[:-1]) + SPARE, eviction_policy=policy)


def host_tier() -> Story:
    """Three questions fit on the device, five on the host: what was evicted is not computed again."""
    room = _room([Visit(question) for question in (ONE, TWO, THREE)]) + SPARE
    host = _room([Visit(question) for question in (ONE, TWO, THREE, FOUR, FIVE)]) + SPARE
    return _run(HOST_VISITS, room, host_kv_tokens=host, load_back_threshold=1)


def policy_change() -> Story:
    """lru, and from the middle on lfu."""
    return _run(CHANGE_VISITS, _room([Visit(question) for question in (ONE, TWO, THREE)]) + SPARE)


def new_weights() -> Story:
    """The engine goes on with other weights."""
    return _run(WEIGHTS_VISITS, _room([Visit(question) for question in (ONE, TWO, ONE, THREE)]) + 14 + SPARE)


def returned(story: Story) -> tuple[int, int]:
    """Of ENCORE's prompts: tokens that were in the cache, and all."""
    admitted = [e for frame in story.recording for e in frame.events if isinstance(e, ev.RequestAdmitted)]
    last = admitted[-sum(visit.times for visit in ENCORE) :]
    return sum(e.cached for e in last), sum(e.length for e in last)


def kept(story: Story) -> set[str]:
    """The questions that are in the tree at the end."""
    trace = Trace(story.recording)
    return {_question(trace, node) for node in trace.view().nodes.values()}


def _run(visits: Sequence[Visit], kv_tokens: int, **config: Any) -> Story:
    tokenizer = load_tokenizer(resolve_model(None))
    engine = Engine(EngineConfig(device="cpu", kv_tokens=kv_tokens, **config), tokenizer=tokenizer)
    labels: dict[str, str] = {}
    with figure3.one_thread(), Recorder(engine) as recording:
        for visit in visits:
            recording.scene(visit.heading)
            if visit.before is not None:
                visit.before(engine)
            prompt = _prompt(tokenizer, visit.question)
            for _ in range(visit.times):
                params = SamplingParams(max_new_tokens=1)
                labels[engine.add_request(prompt, params, priority=visit.priority)] = visit.question
                while engine.has_work:
                    engine.step()
                    engine.check()
    policy = engine.config.eviction_policy
    return Story(policy, recording, labels, kv_tokens, _victims(recording))


def _room(visits: Sequence[Visit]) -> int:
    """Slots that hold the questions of these visits, their common beginning once."""
    tokenizer = load_tokenizer(resolve_model(None))
    prompts = [_prompt(tokenizer, visit.question) for visit in visits]
    bye = _prompt(tokenizer, VISITS[-1].question)
    distinct = list({tuple(prompt): prompt for prompt in prompts}.values())
    shared = min(_common(bye, prompt) for prompt in distinct)
    return shared + sum(len(prompt) - shared for prompt in distinct)


def _other_weights(engine: Engine) -> Any:
    """A model of the same shape that knows nothing."""
    from minirad.model.llama import LlamaModel, random_weights

    model = engine.model
    return LlamaModel(
        model.config, random_weights(model.config, 1, dtype=model.dtype, device=str(model.device))
    )


def _prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [message("system", figure3.SYSTEM), message("user", question)]
    ids: list[int] = tokenizer.encode(chat_text(messages, add_generation_prompt=True))
    return ids


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two prompts share; no prompt is the beginning of another one."""
    return next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


def _victims(recording: Recording) -> tuple[tuple[str, str], ...]:
    trace = Trace(recording)
    found = []
    for scene in range(1, trace.count("scene")):
        view = trace.view("scene", scene)
        nodes = {**view.nodes, **view.ghosts}
        for event in view.so_far:
            gone = ev.eviction(event)
            if gone is not None:
                text = _question(trace, nodes[gone.node]) if gone.node in nodes else ""
                found.append((text, gone.reason))
    return tuple(found)


def _question(trace: Trace, node: Mapping[str, Any]) -> str:
    """What a leaf's visitor asked."""
    return trace.node_text(node).partition("<|im_end|>")[0]
