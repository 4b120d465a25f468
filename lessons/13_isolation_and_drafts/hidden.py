"""Hidden cases of lesson 13: random ones, in the engine's tree and in whole runs of the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from lessons.grading import Failure, expect, sibling
from lessons.grading.drafting import Yours, pair_key, student_engine
from lessons.grading.shared import as_ints, whole
from lessons.grading.words import shown
from minirad import Engine, EngineConfig, Recorder, SamplingParams
from minirad.cache.eviction import POLICIES, EvictionPolicy
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.errors import InvariantError
from minirad.observe.draft_events import DraftVerified, TokensDrafted
from minirad.observe.events import SlotsFreed
from minirad.workloads import chat_prompt

exercises = sibling(__file__, "exercises")
Asked = exercises.Asked

# ---------------------------------------------------------------------- namespaces and adapters


def random_salt(rng: Random, deep: int = 2) -> Any:
    """None, a text, a number, or a tuple of these."""
    kind = rng.randrange(4 if deep else 3)
    if kind == 3:
        return tuple(random_salt(rng, deep - 1) for _ in range(rng.randrange(4)))
    return (None, rng.choice(("", "ann", "bob", "d1", "d2", "d3", "a")), rng.randrange(-2, 3))[kind]


def random_loads(rng: Random) -> dict[str, str]:
    """Some adapters, with weights d1 to d4."""
    names = rng.sample(("capitals", "oneword", "a", "d1"), rng.randrange(1, 4))
    return {name: f"d{rng.randint(1, 4)}" for name in names}


def random_request(rng: Random, loaded: Mapping[str, str]) -> Any:
    """A request at a time when these are loaded."""
    return Asked(random_salt(rng), rng.choice(("", *loaded)), loaded)


def random_tenants(impl: ModuleType, rng: Random) -> None:
    """Random salts, adapters and reloads."""
    for _ in range(4):
        loads = [random_loads(rng) for _ in range(4)]
        exercises.share_alike(impl, [random_request(rng, rng.choice(loads)) for _ in range(40)])


def random_reloads(impl: ModuleType, rng: Random) -> None:
    """A tree in which outdated leaves are evicted first, as the engine does with old weights."""
    for _ in range(4):
        loads = [random_loads(rng) for _ in range(3)]
        ours, theirs = RadixCache(), RadixCache()
        for at in range(0, 90, 3):
            asked, slots = random_request(rng, rng.choice(loads)), [at, at + 1, at + 2]
            for tree, key in ((ours, exercises.space(impl, asked)), (theirs, asked.engines_key())):
                tree.insert(RadixKey(slots, key), slots)  # tokens of its own: who shares is not asked here
        for now in (random_loads(rng), {}):
            outdated_first(ours, lambda space, now=now: impl.outdated(space, dict(now)))
            outdated_first(theirs, lambda key, now=now: engines_outdated(key, now))
            count = rng.randrange(3, 20)
            got, wanted = (tree.evict(count).slots.tolist() for tree in (ours, theirs))
            words = (
                f"with {now} loaded and {loads} before, evict({count}) freed the slots {got}, not {wanted}"
            )
            expect(got == wanted, f"{words}: what is outdated goes first, then least recently used", hint=1)


def engines_outdated(key: Hashable, now: Mapping[str, str]) -> bool:
    """Of a namespace by the engine's rule."""
    adapter = getattr(key, "adapter", None)
    return adapter is not None and adapter not in now.values()


def outdated_first(tree: RadixCache, outdated: Callable[[Hashable], bool]) -> None:
    """The tree's leaves by this rule, then least recently used (as cache/versions.py does it)."""
    lru = POLICIES["lru"]
    key = lambda node: (not outdated(node.namespace[0]), lru.key(node))  # noqa: E731
    tree._queue.rebuild(EvictionPolicy("lru", key, lru.reason), tree.walk())


# ---------------------------------------------------------------------- pairs


def random_texts_as_pairs(impl: ModuleType, rng: Random) -> None:
    """Random texts in two trees of pairs, and how much of the next prompt they save."""
    yours = Yours({})
    for page in (1, 2, 4):
        ours, theirs = RadixCache(page), RadixCache(page)
        manager = exercises.manager_of(theirs, page)
        known: list[list[int]] = []
        for number in range(8):
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            if known and rng.random() < 0.7:
                tokens = rng.choice(known)[: rng.randint(1, 12)] + tokens[:4]
            common = max((_common(tokens, text) for text in known), default=0)
            request = exercises.request_of(tokens, pairs=True)
            hit = manager.cached(request, theirs.peek(request.key()))
            got = impl.cached_tokens(common, len(tokens), page, True)
            where = f"cached_tokens({common}, {len(tokens)}, {page}, True)"
            words = f"{where} gave {shown(got)}; the engine finds {hit}: {tokens} after {known}"
            expect(whole(got) == hit, words, hint=2)
            row = [100 * (number + 1) + at for at in range(rng.randint(max(hit, 1), len(tokens)))]
            exercises.commits_alike(impl, tokens, row, page)
            pairs, slots, _ = impl.commit(list(tokens), list(row), page)
            ours.insert(pair_key(yours, "commit", "R1", pairs, None), slots)
            request.kv_len = len(row)
            key = request.committed_key()
            theirs.insert(key, row[: len(key)])
            got, wanted = held_by(ours), held_by(theirs)
            where = f"pages of {page}, after {tokens} with {len(row)} slots"
            expect(got == wanted, f"{where}: the tree holds {got}; the engine's holds {wanted}", hint=1)
            where, back = f"to_tokens(to_pairs({tokens}))", tokens if len(tokens) > 1 else []
            again = as_ints(impl.to_tokens(impl.to_pairs(list(tokens))), where)
            expect(again == back, f"{where} is {again}, not {back}")
            known.append(tokens[: len(key) + 1])


def random_hits(impl: ModuleType, rng: Random) -> None:
    """Prompts of up to 60 tokens, pages of up to 16, tokens and pairs."""
    for _ in range(40):
        page, length, pairs = rng.randint(1, 16), rng.randint(1, 60), rng.random() < 0.5
        common = length if rng.random() < 0.3 else rng.randint(0, length)
        hit = exercises.cached_by(exercises.manager_of(RadixCache(page), page), common, length, pairs)
        exercises.hits_alike(impl, common, length, page, pairs, hit)


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def held_by(tree: Any) -> list[tuple[Any, Any]]:
    """Units and slots of each node, whatever the nodes are called."""
    return sorted(
        (node.key.tokens.tolist(), node.slots.tolist()) for node in tree.walk() if node.parent is not None
    )


# ---------------------------------------------------------------------- whole runs


@cache
def classroom() -> tuple[Any, Any]:
    """The classroom Llama and its tokenizer; one for all runs of this process."""
    engine = Engine(EngineConfig(kv_tokens=64))
    return engine.model, engine.tokenizer


SCENES = 6  # of each kind
WORDS = ("apple", "river", "stone", "cloud", "tiger", "piano", "honey", "garden")


class Told:
    """What an engine said and did: its replies, what was drafted, kept and freed, and its tree at the end."""

    def __init__(self, engine: Engine, prompts: list[str], params: SamplingParams) -> None:
        self.drafts: list[str] = []
        with Recorder(engine) as recording:
            self.replies = [out.text for out in engine.generate(prompts, params)]
        for frame in recording:
            for event in frame.events:
                if isinstance(event, TokensDrafted | DraftVerified | SlotsFreed):
                    self.drafts.append(f"step {frame.step}: {event}")
        self.tree = held_by(engine.cache)


def spoil(engine: Any, seed: int) -> Any:
    """The same engine; its drafter guesses wrong now and then, at the same places for the same seed."""
    drafter, rng = getattr(engine.runner, "drafter", None), Random(seed)
    if drafter is not None:
        guessed = drafter.draft

        def draft(requests: Any, counts: Any) -> list[list[int]]:
            drafts = [list(tokens) for tokens in guessed(requests, counts)]
            for tokens in drafts:
                if tokens and rng.random() < 0.5:
                    tokens[rng.randrange(len(tokens))] = 5
            return drafts

        drafter.draft = draft
    return engine


class Scene(NamedTuple):
    """What an engine is asked in one run; one of few, so that its own run is made once in a process."""

    prompts: list[str]
    params: SamplingParams
    config: EngineConfig
    seed: int

    @classmethod
    def of(cls, number: int, **config: Any) -> Scene:
        """Scene `number` with an engine of this configuration."""
        rng = Random(number)
        picked = " ".join(rng.sample(WORDS, 3))
        prompts = [chat_prompt(f"Repeat: {picked} {word}") for word in rng.sample(WORDS, 2)]
        params = SamplingParams(max_new_tokens=rng.randint(6, 9) if "speculative" in config else 2)
        settings = EngineConfig(kv_tokens=128, draft_tokens=rng.randint(2, 4), chunk_tokens=24, **config)
        return cls(prompts, params, settings, rng.randrange(1000))

    def told(self, engine: Engine) -> Told:
        """What an engine does in it."""
        return Told(spoil(engine, self.seed), self.prompts, self.params)


@cache
def engines_own(number: int, **config: Any) -> Told:
    """What the engine does by itself in a scene."""
    model, tokenizer = classroom()
    scene = Scene.of(number, **config)
    return scene.told(Engine(scene.config, model=model, tokenizer=tokenizer))


def runs_alike(impl: ModuleType, names: tuple[str, ...], rng: Random, **config: Any) -> None:
    """The engine on a student's functions does what it does on its own."""
    number = rng.randrange(SCENES)
    scene, own = Scene.of(number, **config), engines_own(number, **config)
    yours, (model, tokenizer) = Yours({name: getattr(impl, name) for name in names}), classroom()
    mine = f"the engine on your {', '.join(names)}"
    try:
        told = scene.told(student_engine(scene.config, yours, model=model, tokenizer=tokenizer))
    except InvariantError as error:
        raise Failure(f"{mine}, asked {scene.prompts}: {error}") from error
    expect(told.replies == own.replies, f"{mine} says {told.replies}; without it says {own.replies}")
    for got, wanted in zip(told.drafts, own.drafts, strict=False):
        expect(got == wanted, f"{mine}: {got}; on its own: {wanted}")
    expect(len(told.drafts) == len(own.drafts), f"{mine} drafts in other steps than on its own")
    expect(told.tree == own.tree, f"{mine}: in the end the tree holds {told.tree}; on its own {own.tree}")


def drafts_in_the_engine(impl: ModuleType, rng: Random) -> None:
    """The engine with drafts on this accept."""
    runs_alike(impl, ("accept",), rng, speculative="ngram", page_size=1)


def rows_in_the_engine(impl: ModuleType, rng: Random) -> None:
    """The engine with drafts on this room_for and roll_back, pages of 4."""
    runs_alike(impl, ("room_for", "roll_back"), rng, speculative="ngram", page_size=4)


def pairs_in_the_engine(impl: ModuleType, rng: Random) -> None:
    """The engine with a tree of pairs on this to_pairs and commit."""
    runs_alike(impl, ("to_pairs", "commit"), rng, bigram_keys=True, page_size=2)


def random_drafts(impl: ModuleType, rng: Random) -> None:
    """Random drafts of up to 8 tokens, ended by tokens or by length."""
    for _ in range(150):
        size = rng.randrange(9)
        draft = [rng.randrange(4) for _ in range(size)]
        chosen = [each if rng.random() < 0.8 else rng.randrange(4) for each in [*draft, 0]]
        ends = exercises.Ends(
            last=rng.sample(range(4), rng.choice((0, 0, 1))), most=rng.choice((99, 99, rng.randint(1, 9)))
        )
        exercises.accepts_alike(impl, draft, chosen, ends)


def random_rolls(impl: ModuleType, rng: Random) -> None:
    """Random rows, pages of up to 16."""
    for _ in range(12):
        page, length = rng.randint(1, 16), rng.randint(1, 20)
        pool = exercises.Pool(page, length, rng.randrange(3))
        for _ in range(4):
            wanted, left = rng.randrange(12), rng.randint(1, 12)
            free = pool.manager.allocator.available
            count = pool.drafts_with_room(wanted, left)
            got = impl.room_for(wanted, left, length, free, page)
            where = f"room_for({wanted}, {left}, {length}, {free}, {page})"
            expect(got == count, f"{where} gave {got}; the engine gives slots to {count}", hint=0)
            kept = rng.randint(0, count)
            before, after, freed = pool.rolled_back(count, kept)
            exercises.rolls_alike(impl, before, length, kept, page, after, freed)


HIDDEN = {
    "namespaces": [random_tenants],
    "adapters": [random_reloads],
    "bigrams": [random_texts_as_pairs, random_hits, pairs_in_the_engine],
    "accept": [random_drafts, drafts_in_the_engine],
    "roll_back": [random_rolls, rows_in_the_engine],
}
