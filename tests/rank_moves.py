"""What tests have other ranks do: functions that a RankPair runs there, and what is sent along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rank_support import RankPair
from support import ToldTier

from minirad.ranks.group import joined
from minirad.ranks.messages import Message
from minirad.tiers.hiradix_cache import HiRadixCache

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A tokenizer of single letters: token 0 says "a"."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(LETTERS[token] for token in ids)


class EveryOther:
    """A mask: ids of one parity alone, which changes with each token; after `free` tokens anything goes."""

    def __init__(self, vocab: int, free: int) -> None:
        self.vocab, self.free = vocab, free

    def allowed(self, count: int) -> list[int]:
        """The ids that may come after so many."""
        every = range(self.vocab)
        return list(every) if count >= self.free else [token for token in every if (token + count) % 2]

    def __call__(self, output: list[int]) -> Any:
        if len(output) >= self.free:
            return None
        row = torch.zeros(self.vocab, dtype=torch.bool)
        row[self.allowed(len(output))] = True
        return row


class FailsAt(EveryOther):
    """A mask whose answer to `free` tokens is an error, or no mask at all."""

    def __init__(self, vocab: int, free: int, wrong: Any) -> None:
        super().__init__(vocab, free)
        self.wrong = wrong

    def __call__(self, output: list[int]) -> Any:
        if len(output) < self.free:
            return super().__call__(output)
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong


# ---------------------------------------------------------------------- what other ranks are made to do

DO = "do as the test says"  # an action of a message, beside those of minirad/ranks/messages.py
TESTS = str(Path(__file__).parent)


class Moves(RankPair):
    """Ranks of which a test can have more done. checks: they check their engines after every step, too."""

    def __init__(self, tp: int = 2, *, timeout: float | None = None, checks: bool = True) -> None:
        code = f"import sys; sys.path.insert(0, {TESTS!r}); import rank_moves; rank_moves.follow({checks})"
        super().__init__(tp, timeout=timeout, code=code)
        self._again = {"timeout": timeout, "checks": checks}

    def all_here(self) -> Moves:
        """The same, begun anew if a rank was lost."""
        group = joined()
        lost = any(process.poll() is not None for process in self.processes.values())
        if lost or (group is not None and group.broken):
            self.close()
            self.__init__(self.tp, **self._again)  # type: ignore[misc]
        return self

    def on(self, rank: int, engine: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(its engine, *arguments)` there, between two steps; both have to be found by name.

        It sees what the last step left: what was asked for since then is told in the next one.
        """
        group = engine.group
        named = (rank, function.__module__, function.__name__, arguments)
        with group.lock:
            group.tell(Message(DO, engine.number, more=named))
            result, problem = group.gather_any((None, ""))[rank]
        assert not problem, f"on rank {rank}: {problem}"
        return result


def follow(checks: bool) -> None:
    """What a rank of `Moves` runs."""
    from minirad.ranks import digest

    following = import_module("minirad.ranks.follower")
    as_told, of_engine = following._do, digest.of_engine

    def do(group: Any, engines: dict[int, Any], message: Message) -> None:
        if message.action != DO:
            as_told(group, engines, message)
            return
        rank, module, name, arguments = message.more
        result, problem = None, ""
        if rank == group.rank:
            try:
                function = getattr(import_module(module), name)
                result = function(engines[message.engine], *arguments)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        group.gather_any((result, problem))

    def checked(engine: Any) -> bytes:
        engine.check()
        return of_engine(engine)

    following._do = do
    if checks:
        digest.of_engine = checked
    following.follow()


# ---------------------------------------------------------------------- done on another rank, to its engine


def begin(engine: Any) -> None:
    """A second tier's copies end as late as they may here: only when they are waited for."""
    if isinstance(engine.cache, HiRadixCache):
        slow_tier(engine)


def slow_tier(engine: Any, happened: Counter[str] | None = None) -> ToldTier:
    """Puts a ToldTier between an engine's tree and its second tier."""
    copier = engine.cache.copier  # which asks rank 0
    copier.inner = ToldTier(copier.inner, Counter() if happened is None else happened)
    return copier.inner


def held(engine: Any) -> dict[str, Any]:
    """All that an engine holds, written down here apart from the digest."""
    state = {name: value for name, value in engine.snapshot().items() if name != "ranks"}
    for node in state["tree"]["nodes"]:
        del node["namespace"]  # numbered as events tell of them, and there are listeners on one rank only
    requests = engine.scheduler.requests()
    return {
        **state,
        "requests in order": [request.id for request in requests],
        "said": {request.id: (request.output, request.output_logprobs) for request in requests},
        "free pages": engine.allocator._stack[: engine.allocator._top].tolist(),
        "owners": engine.cache_manager._owner.tolist(),
        "free rows": list(engine.rows._free),
        "pins": {number: node.id for number, node in engine._pins.items()},
        "sizes": (engine.cache.evictable_size, engine.cache.protected_size, engine.cache.version),
        "namespaces": {node.id: repr(node.namespace) for node in engine.cache.walk()},
        "ratio": engine.scheduler.future.ratio,
        "stats": repr(engine.stats),
    }


def copies_fail_here(engine: Any) -> None:
    """Copies between the tiers cannot begin on this rank any more."""
    engine.cache.copier.inner = _NoCopies()


class _NoCopies:
    def backup(self, device_slots: Any, host_slots: Any) -> Any:
        raise MemoryError("as the test wishes")

    load = backup

    def fence(self) -> None:
        """There is nothing to wait for."""
