"""What a run on the live page is made of: workload, model, pool, policies, files.

Makes no engine: runs.py does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minirad import own_policy, workloads
from minirad.cache.eviction import POLICIES as EVICTION
from minirad.config import EngineConfig, adapters_by_name
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.workloads import Workload

DISK_MB = EngineConfig().disk_mb


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made of. kv_tokens None: the workload's own pool size. compare: two policies."""

    workload: str = "mixed"
    model: str | None = None
    kv_tokens: int | None = None
    page_size: int = 1
    schedule_policy: str = "lpm"
    eviction_policy: str = "lru"
    chunk_tokens: int = 128
    record: str | None = None
    compare: str | None = None
    cache: tuple[str, ...] = ()  # a student's files
    host_kv_tokens: int = 0
    host_write: str = "write_through"
    bigram_keys: bool | None = None  # None: as the drafts want it
    speculative: str | None = None
    draft_tokens: int = 4
    jump_forward: bool = False
    tp: int = 1
    lora: tuple[str, ...] = ()  # adapters as they were typed: NAME=DIR, or the name of a shipped one
    disk_dir: str | None = None
    disk_mb: int = DISK_MB
    base: EngineConfig = field(default_factory=EngineConfig)  # for the rest: a fork's is the recorded one

    def sides(self) -> tuple[tuple[str, str], tuple[Settings, Settings]]:
        """Both policies of `compare`, and the settings with each of them. ValueError if it is nonsense."""
        setting, names = compared(self.compare or "")
        changes: list[dict[str, Any]] = [
            {setting: name, "record": beside(self.record, name)} for name in names
        ]
        first, second = (dataclasses.replace(self, compare=None, **each) for each in changes)
        return names, (first, second)

    def config(self, kv_tokens: int) -> EngineConfig:
        """The engine's configuration; kv_tokens: the pool where none is set. ValueError as its own."""
        tokens, page = kv_tokens if self.kv_tokens is None else self.kv_tokens, max(self.page_size, 1)
        config = dataclasses.replace(
            self.base, model=self.model, page_size=self.page_size, schedule_policy=self.schedule_policy,
            eviction_policy=self.eviction_policy, chunk_tokens=self.chunk_tokens,
            host_kv_tokens=self.host_kv_tokens // page * page, host_write=self.host_write,
            bigram_keys=self.bigram_keys, tp=self.tp, speculative=self.speculative,
            draft_tokens=self.draft_tokens, jump_forward=self.jump_forward,
            kv_tokens=max(tokens // page, 1) * page,
            lora=self.lora, disk_dir=self.disk_dir, disk_mb=self.disk_mb,
        )  # fmt: skip
        if tokens < page:
            raise ValueError(f"a pool of {tokens} tokens does not hold one page of {page}")
        return config

    @property
    def students(self) -> str:
        """What of the engine a learner wrote: "tree", "code" (lesson 13's), "policy" or ""."""
        if self.cache:
            return "code" if self._driving() else "tree"
        named = (self.eviction_policy, *(self.compare or "").split(","))
        return "policy" if any(map(own_policy.is_file, named)) else ""

    @property
    def workload_name(self) -> str:
        """What pages call the workload: of a file the end of its name, since pages name no files."""
        return self.workload if self.workload in workloads.WORKLOADS else Path(self.workload).name

    def load_workload(self) -> Workload:
        """The workload by its name; the one of adapters asks under each that is there."""
        if self.workload == "adapters":
            return workloads.adapters([name for name, _ in adapters_by_name(self.lora)])
        return workloads.load(self.workload)

    def students_tree(self) -> Any:
        """The tree of a learner's files, or None for the engine's own. ValueError if they cannot run."""
        trees = [path for path in self.cache if path not in self._driving()]
        if not trees:
            return None
        if self.host_kv_tokens:
            raise ValueError(
                f"--host-kv-tokens {self.host_kv_tokens} with --cache: a tree of your own has no host tier"
            )
        from lessons.grading import student_cache

        return student_cache(trees, self.page_size, self.eviction_policy)

    def students_code(self) -> Any:
        """The functions of a learner's files that the engine calls (drafting.Yours), or None. ValueError if
        they cannot run."""
        driving = self._driving()
        if not driving:
            return None
        from lessons.grading.drafting import Yours

        return Yours.read(driving)

    def _driving(self) -> list[str]:
        """Those of a learner's files that are no tree, but lesson 13's."""
        if not self.cache:
            return []
        from lessons.grading.drafting import is_drafting

        return [path for path in self.cache if is_drafting(path)]


def beside(path: str | None, what: str) -> str | None:
    """run.jsonl as run-what.jsonl."""
    return path and str(Path(path).with_name(f"{Path(path).stem}-{what}{Path(path).suffix}"))


def telling_workload(
    compare: str | None, host_kv_tokens: int, speculative: str | None = None, lora: Sequence[str] = (),
    jump_forward: bool = False,
) -> str:  # fmt: skip
    """The built-in workload on which two policies differ at a glance, adapters or a host tier are used,
    drafts hold, or a grammar forces much."""
    names = [name.strip() for name in (compare or "").split(",")]
    if all(name in SCHEDULE for name in names):
        return "queue"
    if all(name in EVICTION for name in names):
        return "again"
    if lora:
        return "adapters"
    if jump_forward:
        return "records"
    return "tiers" if host_kv_tokens else "drafts" if speculative else "mixed"


# ---------------------------------------------------------------------- two policies


KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "schedule_policy": ("schedule", SCHEDULE),
    "eviction_policy": ("eviction", EVICTION),
}


def compared(text: str) -> tuple[str, tuple[str, str]]:
    """ "lpm,fcfs" as the setting it is about and both values: ("schedule_policy", ("lpm", "fcfs")).

    ValueError says what is wrong with it.
    """
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise ValueError(f"--compare takes two policies such as lpm,fcfs or lru,lfu, not {text!r}")
    first, second = (_kind_of(name) for name in names)
    if first != second:
        told = [f"{name} is {_a(KINDS[k][0])} policy" for name, k in zip(names, (first, second), strict=True)]
        raise ValueError(f"--compare takes two policies of one kind, but {' and '.join(told)}")
    if names[0] == names[1]:
        raise ValueError(f"--compare takes two different policies, not {names[0]} twice")
    return first, (names[0], names[1])


def _kind_of(name: str) -> str:
    for setting, (_, known) in KINDS.items():
        if name in known:
            return setting
    listed = "; ".join(f"{word} policies are {', '.join(known)}" for word, known in KINDS.values())
    raise ValueError(f"there is no policy {name!r} to compare: {listed}")


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
