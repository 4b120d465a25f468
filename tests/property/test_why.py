"""Why did it miss? Every answer of random traffic against an oracle that keeps everything that ever was.

The oracle is written as naively as can be: after each event it looks at the tree, node by node, and keeps of
every prefix (a tuple of tokens) in which media it lies and what became of it. It judges each token by itself.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from support import LateCopier

from minirad.cache.eviction import POLICIES
from minirad.cache.radix_cache import RadixCache
from minirad.config import HOST_WRITE, EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.parts import Parts
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.simulate import Script
from minirad.tiers.hiradix_cache import HiRadixCache, NothingToCopy
from minirad.why import Answer
from minirad.why.recorded import Recorded
from minirad.why.words import Words

Prefix = tuple[Any, ...]  # namespace, then units
DEVICE, HOST = "GPU", "CPU"
GAMES = int(os.environ.get("MINIRAD_WHY_GAMES", "30"))
FIRST = int(os.environ.get("MINIRAD_WHY_FIRST", "0"))
# What has to happen in these games for them to be worth anything.
REACHED = (
    "new", "differs", "evicted", "flushed", "weights", "host", "namespace", "running", "aborted", "retracted",
    "failed", "unkept", "page", "logprobs", "last", "evicted from GPU", "evicted from CPU",
    "evicted from CPU along", "(for somebody)", "weights from CPU", "flushed from CPU",
)  # fmt: skip
# Events that leave the tree as it is.
QUIET = (
    ev.SlotsAllocated, ev.SlotsFreed, ev.NodeLocked, ev.NodeUnlocked, ev.TokenSampled, ev.BatchScheduled,
    ev.RequestAdded, ev.RequestDeferred,
)  # fmt: skip


class Oracle:
    """All prefixes that ever were in an engine's tree, or that a request computed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.page = engine, engine.config.page_size
        self.held: dict[Prefix, set[str]] = {}  # now
        self.gone: dict[Prefix, list[tuple[int, str, str]]] = {}  # step, medium, why; until they are back
        self.used: dict[Prefix, tuple[int, str]] = {}
        self.made: dict[Prefix, str] = {}  # by which request
        self.asked: dict[Prefix, list[Any]] = {}  # [request, its end or ""]
        self.live: dict[str, tuple[Request, int, list[Any]]] = {}  # with the length that it was admitted with
        self.fresh: set[Prefix] = set()
        self.takers: set[tuple[int, str]] = set()
        self.step = 1
        self.objects: dict[str, Request] = {}
        self.forked: dict[str, Request] = {}  # until they are seen in the scheduler, samples as they must be
        self.causes: dict[str, list[str]] = {}  # by admission, of each token that is computed
        self.details: dict[str, list[Any]] = {}
        self.found: dict[str, tuple[int, int, int]] = {}  # by admission: step, matched, cached
        engine.bus.subscribe(None, self.take)

    # what is there

    def units(self, tokens: Any) -> list[Any]:
        row = [int(token) for token in tokens]
        return list(pairwise(row)) if self.engine.config.bigram_keys else row

    def look(self, why: str) -> None:
        """The tree, node by node, against what was there at the last look."""
        now: dict[Prefix, set[str]] = {}
        for node in self.engine.cache.walk():
            if node.parent is None or node.outdated:
                continue
            path, step = [], node
            while step.parent is not None:
                path.append(step.key.tokens.tolist())
                step = step.parent
            units = [tuple(u) if isinstance(u, list) else u for part in reversed(path) for u in part]
            media = {DEVICE} if len(node.slots) else set()
            if isinstance(self.engine.cache, HiRadixCache) and node.backed_up:
                media.add(HOST)
            for end in range(len(units) - len(node.key) + 1, len(units) + 1):
                now.setdefault((node.namespace[0], *units[:end]), set()).update(media)
        step_now = self.step
        for prefix in self.held.keys() | now.keys():
            before, after = self.held.get(prefix, set()), now.get(prefix, set())
            for medium in sorted(before - after, key=(DEVICE, HOST).index):
                self.gone.setdefault(prefix, []).append((step_now, medium, why))
            for medium in after - before:
                self.gone[prefix] = [each for each in self.gone.get(prefix, []) if each[1] != medium]
                if medium == DEVICE:
                    self.fresh.add(prefix)
                    self.used[prefix] = step_now, self.used.get(prefix, (0, ""))[1]
        self.held = now

    def next_step(self) -> None:
        """From now on it is the next step's frame."""
        self.step = self.engine.steps + 1

    def take(self, event: ev.Event) -> None:
        whys = {ev.CacheFlushed: "flushed", ev.VersionBumped: "weights"}
        if type(event) not in QUIET:
            self.look(whys.get(type(event), "evicted"))
        self.objects |= {request.id: request for request in self.engine.scheduler.requests()}
        if isinstance(event, ev.PrefixTouched):
            self.fresh.clear()
            nodes = {node.id: node for node in self.engine.cache.walk()}
            if event.path:
                last = nodes[event.path[-1]]
                if not last.outdated:
                    self.use(last, "")
        elif isinstance(event, ev.LoadStarted):
            self.fresh.clear()
        elif isinstance(event, ev.Committed):
            for prefix in self.fresh:
                self.made[prefix] = event.request
                self.used[prefix] = self.step, event.request
            self.fresh.clear()
            nodes = {node.id: node for node in self.engine.cache.walk()}
            if event.node and not nodes[event.node].outdated:
                self.use(nodes[event.node], event.request)
        elif isinstance(event, ev.SlotsAllocated):
            self.takers.add((self.step, event.request))
        elif isinstance(event, ev.RequestAdmitted):
            self.takers.add((self.step, event.request))
            request = self.objects[event.request]
            self.judge(event, request)
            nodes = {node.id: node for node in self.engine.cache.walk()}
            if event.node:
                self.use(nodes[event.node], event.request)
            self.begin(request)
        elif isinstance(event, ev.RequestForked) and event.row >= 0:
            leader = self.live[event.leader][0]
            sample = Request(
                event.request,
                leader.prompt,
                leader.params,
                0,
                0,
                leader.extra_key,
                is_bigram=leader.is_bigram,
            )
            self.forked[event.request] = sample
            self.begin(sample)
        elif isinstance(event, ev.TokenSampled):
            if event.request in self.forked:
                self.forked[event.request].append(event.token, 0.0)
        elif isinstance(event, ev.RequestRetracted):
            self.end(event.request, "retracted")
        elif isinstance(event, ev.RequestAborted):
            self.end(event.request, "aborted")
        elif isinstance(event, ev.RequestFinished):
            self.end(event.request, "failed" if event.reason == "error" else "finished")

    def use(self, node: Any, by: str) -> None:
        path, step = [], node
        while step.parent is not None:
            path.append(step.key.tokens.tolist())
            step = step.parent
        units = [tuple(u) if isinstance(u, list) else u for part in reversed(path) for u in part]
        for end in range(1, len(units) + 1):
            prefix = (node.namespace[0], *units[:end])
            self.used[prefix] = self.step, by or self.used.get(prefix, (0, ""))[1]

    # what requests do

    def begin(self, request: Request) -> None:
        mark = [request.id, ""]
        self.live[request.id] = request, request.length, mark
        for prefix in self.prefixes(request, request.length):
            self.asked[prefix] = mark

    def computed(self, request: Request, admitted: int) -> int:
        """Tokens that it has computed or is about to; the last one that it drew is not among them."""
        return max(request.length - 1, admitted, len(request.prompt))

    def prefixes(self, request: Request, length: int) -> list[Prefix]:
        more = self.engine.config.bigram_keys and length < request.length
        units = self.units(request.tokens[: length + more])
        return [(request.extra_key, *units[: end + 1]) for end in range(len(units))]

    def end(self, name: str, how: str) -> None:
        if name not in self.live:
            return
        request, admitted, mark = self.live.pop(name)
        mark[1] = how
        for prefix in self.prefixes(request, self.computed(request, admitted)):
            self.asked[prefix] = mark

    # why

    def judge(self, event: ev.RequestAdmitted, request: Request) -> None:
        name = event.request if event.attempt == 1 else f"{event.request}#{event.attempt}"
        self.found[name] = self.step, event.matched, event.cached
        units, space, page = self.units(request.tokens), request.extra_key, self.page
        n, usable = request.length, request.usable_prefix
        prefix = [(space, *units[:end]) for end in range(len(units) + 1)]

        def pages_held(space: Any) -> int:
            at = 0
            while at + page <= len(units) and DEVICE in self.held.get((space, *units[: at + page]), ()):
                at += page
            return at

        def seen(key: Prefix) -> bool:
            return key in self.held or key in self.gone or key in self.asked

        def known_to(space: Any) -> int:
            return next((i for i in range(len(units)) if not seen((space, *units[: i + 1]))), len(units))

        matched, own = pages_held(space), known_to(space)
        runs = [
            self.prefixes(other, self.computed(other, admitted))
            for key, (other, admitted, _) in self.live.items()
            if key != request.id and other.extra_key == space
        ]  # fmt: skip
        far = [sum(each in path for each in map(tuple, prefix[1:])) for path in map(set, runs)]
        running = max([each for each in far if each > matched], default=0)
        spaces = {key[0] for key in self.held.keys() | self.asked.keys() | self.gone.keys()} - {space}
        others: dict[Any, int] = {}
        for other in spaces:
            most = known_to(other)
            if most // page * page > pages_held(other):  # the page in which they part is not there
                most = pages_held(other)
            if most // page * page > own:
                others[other] = most
        elsewhere = max(others.values(), default=0)
        common = max(own, running, elsewhere)
        known = min(common, usable)
        pages = known // page * page
        cached = min(matched, pages)

        def of_page(end: int) -> str:
            key = prefix[end]
            media = self.held.get(key, set())
            if media:
                between = [self.held.get(prefix[at], set()) for at in range(matched + page, end + 1, page)]
                return "host" if all(each == {HOST} for each in between) else "hole"
            if end <= running:
                return "running"
            if self.gone.get(key):
                return self.gone[key][-1][2]
            if key in self.asked:
                mark = self.asked[key]
                return mark[1] if mark[1] != "finished" else "unkept"
            return "namespace" if end <= elsewhere else "unknown"

        def of_rest() -> str:
            if common == len(units):
                return "last"
            if common == 0:
                return "new"
            wide = common + 2  # with the namespace
            if own == common:
                everything = self.held.keys() | self.gone.keys() | self.asked.keys()
                goes_on = any(len(key) == wide and key[:-1] == prefix[common] for key in everything)
            elif running == common:
                goes_on = any(len(path) > common for path, at in zip(runs, far, strict=True) if at == common)
            else:
                heads = {
                    (other, *units[:common])
                    for other, most in others.items() if most == common == known_to(other)
                }  # fmt: skip
                everything = self.held.keys() | self.gone.keys() | self.asked.keys()
                goes_on = any(len(key) == wide and key[:-1] in heads for key in everything)
            return "differs" if goes_on else "new"

        causes, details = [], []
        for at in range(cached, n):
            end = (at // page + 1) * page
            if at < pages:
                causes.append(of_page(end))
                details.append((prefix[end], *self.detail(prefix[end])))
                continue
            details.append(None)
            if at < known:
                causes.append("page")
            elif at < common:
                causes.append("last" if at == n - 1 else "logprobs")
            else:
                causes.append(of_rest())
        self.causes[name], self.details[name] = causes, details

    def detail(self, key: Prefix) -> tuple[Any, ...]:
        return tuple(self.gone.get(key, ())), self.used.get(key, (0, "")), self.made.get(key, "")


class Logprobs(Script):
    """A script that tells log-probabilities of prompt tokens as a runner does; sometimes a request fails."""

    model = SimpleNamespace(config=SimpleNamespace(num_parameters=0))  # for the recorder

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def launch(self, batch: Any) -> Any:
        pending = super().launch(batch)
        return SimpleNamespace(read=lambda: self.with_logprobs(batch, pending.read()))

    def with_logprobs(self, batch: Any, results: list[Any]) -> list[Any]:
        for request, start, result in zip(batch.requests, batch.starts, results, strict=True):
            if self.rng.random() < 0.01:
                result.error, result.tokens, result.branches = "as the test wishes", (), ()
                continue
            if request.next_logprob < len(request.prompt):
                first = max(request.next_logprob - 1, start)
                stop = min(request.kv_len, len(request.prompt) - 1)
                result.prompt_logprobs = [0.0] * max(stop - first, 0)
        return results


class Traffic:
    """A random engine without a model, and what is asked of it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        page = rng.choice([1, 1, 4, 4, 16])
        scale = 4 if page == 16 else 1
        host = rng.choice([0, 16, 16, 32, 64]) * scale // page * page
        kv = rng.choice([32, 48, 96]) * scale
        self.scale = scale
        config = EngineConfig(
            kv_tokens=kv, page_size=page, max_running=rng.choice([1, 2, 4]), max_context=kv,
            chunk_tokens=rng.choice([3, 8, 16, 64]), schedule_policy=rng.choice(["lpm", "fcfs"]),
            eviction_policy=rng.choice(sorted(POLICIES)), host_kv_tokens=host,
            host_write=rng.choice([*HOST_WRITE, "write_back"]), bigram_keys=rng.random() < 0.15,
            preemption=rng.random() < 0.3, radix_cache=host > 0 or rng.random() > 0.2,
        )  # fmt: skip
        self.script = Logprobs(rng)
        rows = ReqToTokenPool(config.max_running, kv)
        cache = RadixCache(page, config.eviction_policy)
        if host:
            cache = HiRadixCache(
                page, config.eviction_policy, host_tokens=host, host_write=config.host_write,
                copier=LateCopier(NothingToCopy(), seed), load_back_threshold=rng.choice([1, 1, 6]),
            )  # fmt: skip
        self.engine = Engine(parts=Parts(config, self.script, cache, rows, self.script))
        self.oracle = Oracle(self.engine)
        self.recorder = Recorder(self.engine)
        base = [rng.randrange(5, 9) for _ in range(30 * scale)]
        self.texts = [base, base[: 9 * scale] + [rng.randrange(5, 9) for _ in range(20 * scale)]]
        self.asked: list[tuple[list[int], str]] = []

    def prompt(self) -> list[int]:
        rng = self.rng
        done = self.asked[-12:]
        if done and rng.random() < 0.4:  # the next turn of a chat
            prompt, name = rng.choice(done)
            return [*prompt, *self.replies.get(name, []), *([7, 8, 9] if rng.random() < 0.7 else [])]
        text = rng.choice(self.texts)[: rng.choice([4, 8, 12, 16, 20, 25]) * self.scale]
        return text + [rng.randrange(5, 9) for _ in range(rng.choice([0, 0, 1, 3]))]

    replies: dict[str, list[int]]

    def play(self, turns: int = 60) -> Iterator[str]:
        rng, engine = self.rng, self.engine
        self.replies = {}
        for _ in range(turns):
            self.oracle.next_step()
            act = rng.random()
            if act < 0.45:
                prompt = self.prompt()
                start = rng.choice([None] * 12 + [0, len(prompt) // 2])
                params = SamplingParams(
                    max_new_tokens=rng.choice([0, 1, 3, 6]), n=rng.choice([1, 1, 1, 2]), logprob_start=start
                )
                try:
                    name = engine.add_request(
                        prompt, params, rng.choice([None] * 6 + ["a", "b"]), rng.choice([0, 0, 1])
                    )
                except ValueError:
                    continue
                self.asked.append((prompt, name))
            elif act < 0.5 and engine.has_work:
                engine.abort(rng.choice([request.group for request in engine.scheduler.requests()] or ["R0"]))
            elif act < 0.508:
                with engine.transaction:
                    engine.cache.bump_version()
                    engine.scheduler.put_back(engine.scheduler.live)
            elif act < 0.525 and not engine.has_work:
                engine.flush_cache()
            else:
                for _ in range(rng.randrange(1, 5)):
                    self.oracle.next_step()
                    for output in engine.step().finished:
                        self.replies[output.request_id] = output.token_ids
                    engine.check()
            yield "turn"
        self.recorder.close()


def expanded(answer: Answer) -> list[str]:
    return [loss.cause for loss in answer.losses for _ in range(loss.tokens)]


def compare(oracle: Oracle, told: Recorded, seen: Counter[str]) -> None:
    """Every admission of a run."""
    assert set(told.answers) == set(oracle.causes) and told.unknown == told.misfits == []
    for name, answer in told.answers.items():
        _, matched, cached = oracle.found[name]
        causes = oracle.causes[name]
        assert answer.cached == cached, (name, answer)
        assert matched in (answer.matched, cached) or answer.matched >= matched, (name, answer, matched)
        assert expanded(answer) == causes, (name, answer.cached, expanded(answer), causes, answer)
        assert sum(loss.tokens for loss in answer.losses) == answer.missed == len(causes)
        assert Words().sentence(answer).startswith(f"{name.partition('#')[0]} finds {cached} of ")
        seen.update(causes)
        for loss in answer.losses:
            if loss.cause in ("evicted", "flushed", "weights", "host"):
                for at in range(loss.start, loss.start + loss.tokens):
                    _, gone, used, made = oracle.details[name][at - cached]
                    left = [(each.when, each.medium, each.why) for each in loss.left]
                    assert left == list(gone), (name, loss, gone)
                    assert (loss.used, loss.user) == used, (name, loss, used)
                    assert loss.other == made, (name, loss, made)
                for each in loss.left:
                    assert all((each.when, by) in oracle.takers for by in each.by) or each.medium == HOST
                    seen[f"{each.why} from {each.medium}{' along' if each.along else ''}"] += 1
                    seen["(for somebody)"] += bool(each.by)


def test_every_answer_is_that_of_the_oracle() -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + GAMES):
        traffic, growing = Traffic(seed), None
        for _ in traffic.play():  # read while it grows
            growing = growing or Recorded(traffic.recorder.header)
            growing.catch_up(traffic.recorder.frames)
        assert growing is not None
        growing.catch_up(traffic.recorder.frames)
        try:
            compare(traffic.oracle, growing, seen)
        except AssertionError as error:
            raise AssertionError(f"game {seed}: {error}") from error
    missing = [each for each in REACHED if not seen[each]]
    assert not missing or GAMES < 30, (missing, seen)
