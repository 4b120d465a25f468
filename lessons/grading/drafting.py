"""A student's functions of lesson 13 in a real engine: its keys, its units, its drafts.

    python -m viz.live --speculative ngram --cache lessons/13_isolation_and_drafts/exercise.py

Tree, pool, scheduler, model and drafter are the engine's; what is written takes the place of the engine's own
rule, what is not does not. The books are checked after every step: what a student's function raises, what
makes no sense and the first invariant that does not hold end the run with a sentence that says where.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from lessons.grading.shared import whole
from lessons.grading.spec import students_file
from lessons.grading.words import said, shown
from minirad.cache.node import MAX_TOKEN, RadixKey
from minirad.config import AdapterKey, EngineConfig
from minirad.engine import Engine
from minirad.errors import InvariantError
from minirad.rooms import room
from minirad.schedule.request import Request

KEYS, PAIRS, DRAFTS = ("space_of",), ("to_pairs", "commit"), ("accept", "room_for", "roll_back")
PARTS = (*KEYS, *PAIRS, *DRAFTS)


class YourCode(InvariantError):
    """A student's function raised something or gave back nonsense; the message names it and the moment."""


def is_drafting(path: str | Path) -> bool:
    """Whether a file is one of lesson 13: it has one of these functions, written or not."""
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # who loads it says what is wrong with it
    return any(isinstance(part, ast.FunctionDef) and part.name in PARTS for part in body)


class Yours:
    """A student's functions by name, and where the engine is when it calls one."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = dict(functions)
        self.moment = "before the first step"
        self.called: dict[str, None] = {}  # in this step, in order

    @classmethod
    def read(cls, paths: Sequence[str | Path]) -> Yours:
        """Those that are written in a lesson's files.

        ValueError for a file that cannot be loaded, or where everything is still to do.
        """
        functions: dict[str, Callable[..., Any]] = {}
        for path in map(Path, paths):
            functions.update(_written(path))
        if not functions:
            names, parts = ", ".join(map(str, paths)), ", ".join(PARTS)
            raise ValueError(f"{names}: nothing is written yet that the engine could run ({parts})")
        return cls(functions)

    def __contains__(self, name: str) -> bool:
        return name in self.functions

    def note(self, config: EngineConfig) -> str:
        """Which functions drive an engine of this configuration, and which are not written yet; one line."""
        used = [*KEYS, *(PAIRS if config.bigram_keys else ()), *(DRAFTS if config.drafting else ())]
        mine = ", ".join(name for name in used if name in self) or "none of your functions"
        missing = ", ".join(name for name in used if name not in self)
        return f"driven by {mine}" + (f"; not written yet, so the engine's own: {missing}" if missing else "")

    def call(self, name: str, who: str, *arguments: Any) -> Any:
        """What the student's function returns for a request."""
        self.called[name] = None
        try:
            return self.functions[name](*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise YourCode(f"{self.moment}, {who}: your {name} raised {said(error)}") from error

    def wrong(self, name: str, who: str, returned: Any, why: str) -> YourCode:
        """The error for an answer that the engine cannot go on with."""
        return YourCode(f"{self.moment}, {who}: your {name} returned {shown(returned)}: {why}")


def _written(path: Path) -> dict[str, Callable[..., Any]]:
    own, todo = students_file(path)
    if "to_pairs" in todo:  # `commit` may call it
        own["to_pairs"] = pairs_of
    return {name: own[name] for name in PARTS if name not in todo and callable(own.get(name))}


def pairs_of(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The engine's own pairs, as a student's function gives them."""
    return [tuple(pair) for pair in RadixKey(list(tokens), is_bigram=True).tokens.tolist()]


def student_engine(config: EngineConfig, yours: Yours, cache: Any = None, **more: Any) -> Engine:
    """An engine that runs a student's functions. cache and the rest: as for Engine."""
    base = room("speculative.engine").DraftingEngine if config.drafting else Engine
    kind = type("StudentEngine", (_Driven, base), {"yours": yours})
    return cast(Engine, kind(config, cache, **more))


class _Driven(Engine):
    """The engine's own steps, with a student's functions where they are written."""

    yours: Yours

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.intake = cast(Any, _Intake(self))
        if "accept" in self.yours and hasattr(self.runner, "verified"):
            self.runner.verified = type("Verified", (_Accepted, self.runner.verified), {"yours": self.yours})

    def _step(self) -> Any:
        yours = self.yours
        yours.moment = f"step {self.steps + 1}"
        try:
            report = super()._step()
            self.check()
        except YourCode:
            raise
        except InvariantError as error:
            whose = f" (after your {', '.join(yours.called)})" if yours.called else ""
            raise InvariantError(f"{yours.moment}{whose}: {error}") from error
        yours.called.clear()
        return report

    def _room_for_drafts(self, request: Request, chunk: int) -> int:
        above: Any = super()
        if "room_for" not in self.yours or self.config.jump_forward:
            return int(above._room_for_drafts(request, chunk))
        manager, page = self.cache_manager, self.allocator.page_size
        left = request.params.max_new_tokens - len(request.output)
        wanted = self.runner.drafter.propose(request, self.config.draft_tokens)
        for free in (manager.room, manager.allocator.available):  # a copy may lock what counts as evictable
            free = free // page * page
            answer = self.yours.call("room_for", request.id, wanted, left, request.kv_len, free, page)
            count, most = whole(answer), min(wanted, left - 1)
            if count is None or not 0 <= count <= most:
                why = f"{wanted} drafts are wanted and {left} tokens left, so it is 0 to {most}"
                raise self.yours.wrong("room_for", request.id, answer, why)
            if not count or manager.extend(request, request.kv_len + count):
                return count
            if count > -request.kv_len % page + free:
                why = f"the row has {request.kv_len} tokens, {free} slots are free in pages of {page}"
                raise self.yours.wrong("room_for", request.id, count, why)
        return 0

    def _take_back(self, request: Request, accepted: int) -> None:
        if "roll_back" not in self.yours:
            cast(Any, super())._take_back(request, accepted)
            return
        row = self.rows.rows[request.row, : request.kv_len].tolist()
        page = self.allocator.page_size
        answer = self.yours.call("roll_back", request.id, list(row), request.length, accepted, page)
        try:
            kept, freed = ([operator.index(slot) for slot in slots] for slots in answer)
        except (TypeError, ValueError):
            raise self.yours.wrong("roll_back", request.id, answer, "not two lists of slots") from None
        end = request.length + accepted
        if kept != row[:end]:
            why = f"of the row {row} the first {end} slots go on"
            raise self.yours.wrong("roll_back", request.id, answer, why)
        if not set(freed) <= set(row[end:]):
            why = f"of the row {row} only {row[end:]} can be given up"
            raise self.yours.wrong("roll_back", request.id, answer, why)
        request.kv_len = end
        self.cache_manager._release(np.array(freed, dtype=np.int64), request.row, "rejected")


# ---------------------------------------------------------------------- keys


class YourAdapterKey(AdapterKey):
    """The namespace that a student's space_of gives a request under an adapter: equal to what equals that."""

    __slots__ = ("space",)
    space: Hashable

    def __init__(self, adapter: str, extra_key: Hashable, space: Hashable) -> None:
        AdapterKey.__init__(self, adapter, extra_key)
        object.__setattr__(self, "space", space)

    def __eq__(self, other: object) -> bool:
        return bool(self.space == (other.space if isinstance(other, YourAdapterKey) else other))

    def __hash__(self) -> int:
        return hash(self.space)


class _Intake:
    """Makes requests as the engine does, with the student's keys."""

    def __init__(self, engine: _Driven) -> None:
        self.engine, self.yours, self.inner = engine, engine.yours, engine.intake
        adapters = getattr(getattr(engine.runner, "model", None), "adapters", {})
        self.loaded = {name: adapter.digest for name, adapter in adapters.items()}

    def request(
        self, prompt: Any, params: Any = None, extra_key: Hashable = None, priority: int = 0,
        token_mask: Any = None, lora: str = "",
    ) -> Request:  # fmt: skip
        """As Intake.request."""
        made = self.inner.request(prompt, params, extra_key, priority, token_mask, lora)
        made.extra_key = self._space(made.extra_key, extra_key, lora)
        if made.is_bigram and any(name in self.yours for name in PAIRS):
            return PairRequest.of(made, self.engine)
        return made

    def key(self, tokens: Any, extra_key: Hashable, lora: str) -> RadixKey:
        """As Intake.key."""
        plain = self.inner.key(tokens, extra_key, lora)
        space = self._space(plain.extra_key, extra_key, lora)
        if plain.is_bigram and "to_pairs" in self.yours:
            pairs = self.yours.call("to_pairs", "a look", [int(token) for token in tokens])
            return pair_key(self.yours, "to_pairs", "a look", pairs, space)
        return RadixKey(tokens, space, plain.is_bigram)

    def _space(self, engines: Hashable, salt: Hashable, adapter: str) -> Hashable:
        if "space_of" not in self.yours:
            return engines
        who = f"a request with salt {salt!r} and adapter {adapter!r}"
        space: Hashable = self.yours.call("space_of", who, salt, adapter, dict(self.loaded))
        try:
            hash(space)
        except TypeError:
            raise self.yours.wrong("space_of", who, space, "it cannot be hashed") from None
        return YourAdapterKey(adapter, salt, space) if adapter else space


# ---------------------------------------------------------------------- pairs


def pair_key(yours: Yours, name: str, who: str, pairs: Any, space: Hashable) -> RadixKey:
    """A tree key of pairs that a student's function made."""
    try:
        units = np.array(
            [[operator.index(first), operator.index(second)] for first, second in pairs], dtype=np.int64
        )
    except (TypeError, ValueError):
        raise yours.wrong(name, who, pairs, "not a list of pairs of tokens") from None
    if units.size and not 0 <= units.min() <= units.max() <= MAX_TOKEN:
        raise yours.wrong(name, who, pairs, f"tokens are 0 to {MAX_TOKEN}")
    return RadixKey._from_bytes(units.astype(np.int32).tobytes(), (space, True), 8)


class PairRequest(Request):
    """A request whose units are a student's pairs."""

    __slots__ = ("engine",)
    engine: Any

    @classmethod
    def of(cls, request: Request, engine: Any) -> PairRequest:
        """The same request, not queued yet."""
        made = cls(**{each.name: getattr(request, each.name) for each in fields(Request) if each.init})
        made.engine = engine
        return made

    def branch(self, index: int) -> Request:
        """As Request.branch."""
        return PairRequest.of(Request.branch(self, index), self.engine)

    def key(self, length: int | None = None) -> RadixKey:
        """As Request.key."""
        yours = self.engine.yours
        if "to_pairs" not in yours:
            return Request.key(self, length)
        pairs = yours.call("to_pairs", self.id or "a new request", self.tokens[:length].tolist())
        return pair_key(yours, "to_pairs", self.id, pairs, self.extra_key)

    def committed_key(self) -> RadixKey:
        """As Request.committed_key."""
        yours, page = self.engine.yours, self.engine.allocator.page_size
        if "commit" not in yours:
            key = Request.committed_key(self)
            if len(key) > self.kv_len:
                raise yours.wrong("to_pairs", self.id, key.tokens.tolist(), f"{self.kv_len} slots have KV")
            return key
        row = self.engine.rows.rows[self.row, : self.kv_len].tolist()
        answer = yours.call("commit", self.id, self.tokens.tolist(), list(row), page)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise yours.wrong("commit", self.id, answer, "not (pairs, slots, tail)")
        key = pair_key(yours, "commit", self.id, answer[0], self.extra_key)
        count = len(key)
        if [list(slots) for slots in answer[1:]] != [row[:count], row[count:]]:
            lengths = " and ".join(str(len(slots)) for slots in answer[1:])
            why = (
                f"these units have the slots row[:{count}], and the tail is row[{count}:]; the row has "
                f"{len(row)} slots, and these lists have {lengths}"
            )
            raise yours.wrong("commit", self.id, answer, why)
        if count % page or count < self.protected_len:
            why = f"{count} units; {self.protected_len} are the tree's already, in pages of {page}"
            raise yours.wrong("commit", self.id, answer, why)
        return key


# ---------------------------------------------------------------------- drafts


@dataclass
class _Drawn:
    """What the model said at each place, -1 where it was not asked; and how likely that was."""

    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, draws: Sequence[Any]) -> _Drawn:
        found = [(draw.result.tokens or ((-1, 0.0),))[0] for draw in draws]
        return cls([int(token) for token, _ in found], [float(logprob) for _, logprob in found])


class _Accepted:
    """A verified batch in which a student says which drafts hold (a part of Verified)."""

    yours: Yours

    def _accept(self, result: Any, draft: list[int], draws: Sequence[Any], vocab: int) -> None:
        cast(Any, super())._accept(result, draft, draws, vocab)  # draws one by one where there is a mask
        if result.error:
            return
        request, drawn = draws[0].request, _Drawn.of(draws)

        def ends(tokens: Sequence[int]) -> bool:
            return bool(cast(Any, self)._has_ended(request, [(int(token), 0.0) for token in tokens]))

        answer = self.yours.call("accept", request.id, list(draft), list(drawn.tokens), ends)
        try:
            tokens, kept = [operator.index(token) for token in answer[0]], operator.index(answer[1])
        except (TypeError, ValueError, IndexError):
            raise self.yours.wrong("accept", request.id, answer, "not (tokens, kept)") from None
        if not 0 <= kept <= len(draft) or len(tokens) != kept + 1:
            why = f"of {len(draft)} drafts 0 to {len(draft)} are kept, and one token more joins the reply"
            raise self.yours.wrong("accept", request.id, answer, why)
        if not all(0 <= token < vocab for token in tokens):
            raise self.yours.wrong("accept", request.id, answer, f"tokens are 0 to {vocab - 1}")
        logprobs = drawn.logprobs
        result.tokens = list(zip(tokens, logprobs, strict=False))
        result.accepted = kept
