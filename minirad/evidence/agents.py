"""Agents: one that thinks, acts and observes in turn; several that live in a town and remember."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minirad.evidence.kind import Kind
from minirad.evidence.retriever import Retriever, words
from minirad.frontend import Job, State
from minirad.model.classroom import corpus

# ---------------------------------------------------------------------- thought, action, observation

MOST_STEPS: Final = 4
_SMALL_WORDS: Final = frozenset("a an the has have does what who is of i do not know that only my".split())


@dataclass(frozen=True, slots=True)
class Errand:
    """A question, the pages that a search looks through, and the right answer (no part of the prompt)."""

    question: str
    pages: tuple[str, ...]
    answer: str


Example = tuple[str, str, str, str]  # question, page, reply, answer


async def react(s: State, examples: tuple[Example, ...], errand: Errand) -> str:
    """Thinks, acts and observes until it finishes with an answer (Yao et al. 2023).

    What it may do is a regular expression, made of its own thought: an answer that no observation says is
    searched for, and one that is observed finishes. The search is a real one.
    """
    s.system(corpus.AGENT_PROMPT)
    for question, page, reply, answer in examples:
        s.user(question)
        s.assistant(f"{reply}\nAction: Search[{_named(reply, question)[0]}]")
        s.user(f"Observation: {page} {question}")
        s.assistant(f"{reply}\nAction: Finish[{answer}]")
    s.user(errand.question)
    observed: list[str] = []
    for step in range(1, MOST_STEPS + 1):
        thought = await s.gen(f"thought {step}", max_new_tokens=24, stop="\n")
        done = step == MOST_STEPS or any(_supports(page, thought) for page in observed)
        tool, arguments = ("Finish", _new_words(thought, errand.question)) if done else (
            "Search", _named(thought, errand.question))  # fmt: skip
        s += "\nAction: "
        said = await s.gen(
            f"action {step}", max_new_tokens=16, regex=rf"{tool}\[({'|'.join(map(re.escape, arguments))})\]"
        )
        argument = said.partition("[")[2].rstrip("]")
        if done:
            return argument
        observed += Retriever(errand.pages).search(argument, 1)
        s.user(f"Observation: {observed[-1]} {errand.question}")
    raise AssertionError("the last step finishes")


def _plain(text: str) -> list[str]:
    """The words that say something, as they are written."""
    return [word for word in re.findall(r"[A-Za-z0-9]+", text) if word.lower() not in _SMALL_WORDS]


def _named(thought: str, question: str) -> list[str]:
    """What the thought takes from the question; else what the question names."""
    asked = _plain(question)
    return list(dict.fromkeys(word for word in _plain(thought) if word in asked)) or asked


def _new_words(thought: str, question: str) -> list[str]:
    """What the thought adds to the question; else anything."""
    asked = _plain(question)
    return list(dict.fromkeys(word for word in _plain(thought) if word not in asked)) or ["nothing"]


def _supports(page: str, thought: str) -> bool:
    """The page has a sentence with all the words of the thought."""
    wanted = {word.lower() for word in _plain(thought)}
    return bool(wanted) and any(wanted <= set(words(sentence)) for sentence in page.split("."))


def _errand(rng: random.Random) -> tuple[Errand, str]:
    facts = corpus.lookup_facts(rng, 12)
    names = list(facts)
    pages = tuple(
        corpus.lookup_text({name: facts[name] for name in names[at : at + 3]}) for at in range(0, 12, 3)
    )
    name = rng.choice(names)
    what = rng.random() < 0.6
    turn = corpus.lookup_turn(facts, name) if what else corpus.owner_turn(facts, name)
    return Errand(turn.user, pages, turn.short), turn.reply


def react_jobs(count: int, rng: random.Random, examples: int = 6) -> tuple[Job, ...]:
    """Errands, each with pages of its own, behind the same solved ones."""
    solved = []
    for _ in range(examples):
        errand, reply = _errand(rng)
        page = Retriever(errand.pages).search(_named(reply, errand.question)[0], 1)[0]
        solved.append((errand.question, page, reply, errand.answer))
    return tuple(Job(react, (tuple(solved), _errand(rng)[0])) for _ in range(count))


def is_done(job: Job, value: Any) -> bool:
    return bool(value == job.args[1].answer)


# ---------------------------------------------------------------------- a town of agents

DAYS: Final = 3
RECALLED: Final = 6  # memories in a prompt
RECENCY: Final = 0.9  # what a memory is worth after a day, of what it was worth before


@dataclass(frozen=True, slots=True)
class Memory:
    """What an agent saw or heard. importance: 1 to 9, as the model rated it; day: when."""

    text: str
    importance: int
    day: int


@dataclass(slots=True)
class Resident:
    """One agent, and all that it remembers."""

    name: str
    memories: list[Memory] = field(default_factory=list)

    def recall(self, about: str, day: int) -> list[str]:
        """The memories that matter most now: relevant, recent, important (Park et al. 2023)."""
        relevant = {text: rank for rank, text in enumerate(self._by_words(about))}

        def worth(memory: Memory) -> float:
            relevance = 1 - relevant[memory.text] / len(relevant)
            return 2 * relevance + RECENCY ** (day - memory.day) + memory.importance / 9

        best = sorted(self.memories, key=worth, reverse=True)[:RECALLED]
        return [memory.text for memory in sorted(best, key=self.memories.index)]

    def _by_words(self, about: str) -> list[str]:
        texts = list(dict.fromkeys(memory.text for memory in self.memories))
        return Retriever(texts).search(about, len(texts))


TOWN_RULES: Final = (
    "You live in a little town. Every day you go to a place, you meet people there, and you tell each other "
    "what you have seen. Answer with what you remember."
)


async def town(s: State, facts: dict[str, str]) -> dict[str, str]:
    """Agents that go to places, meet, tell each other who has what, and remember it.

    facts: who has what; at first each knows of itself and of one other. Every call has a prompt of its own,
    made of the rules, what is asked for, and the agent's memories: where to go (`select`), how important an
    event is (a digit), what it tells (a sentence that others remember). Returns what each of them says in the
    end about somebody it has heard of, by "name: question".
    """
    people = [Resident(name) for name in facts]
    for at, resident in enumerate(people):
        for known in (resident.name, people[(at + 1) % len(people)].name):
            resident.memories.append(Memory(f"{known} has a {facts[known]}.", 9, 0))
    agents = await s.fork(len(people))
    for day in range(1, DAYS + 1):
        places = await agents.each(lambda branch, at: _goes_to(branch, people[at], day))
        told = await agents.each(lambda branch, at: _tells(branch, people[at], facts, day))
        for at, resident in enumerate(people):
            heard = [
                told[other] for other in range(len(people)) if places[other] == places[at] and other != at
            ]
            events = list(dict.fromkeys([*heard, f"On day {day} I was at the {places[at]}."]))
            agents[at]["events"] = [
                text for text in events if text not in {m.text for m in resident.memories}
            ]
        await agents.each(lambda branch, at: _remembers(branch, people[at], day))
    answers = await agents.each(lambda branch, at: _answers(branch, people[at], facts))
    await agents.join()
    return dict(answers)


async def _call(branch: State) -> State:
    """A fresh text within a branch: each call of an agent has a prompt of its own."""
    (fresh,) = await branch.fork(1)
    fresh.system(TOWN_RULES)
    return fresh


async def _goes_to(branch: State, resident: Resident, day: int) -> str:
    s = await _call(branch)
    s.user(f"{' '.join(resident.recall('place', day))} Where does {resident.name} go on day {day}?")
    s.assistant(f"{resident.name} goes to the")
    return (await s.select("place", [f" {place}" for place in corpus.PLACES[:3]])).strip()


async def _tells(branch: State, resident: Resident, facts: dict[str, str], day: int) -> str:
    known = sorted(_heard_of(resident, facts))
    name = known[day % len(known)]
    return await _says(branch, resident, f"What does {name} have?", day)


async def _says(branch: State, resident: Resident, question: str, day: int) -> str:
    s = await _call(branch)
    s.user(f"{' '.join(resident.recall(question, day))} {question}")
    return (await s.gen("says", max_new_tokens=16)).strip()


async def _remembers(branch: State, resident: Resident, day: int) -> None:
    for event in branch["events"]:
        s = await _call(branch)
        s.user(f"How important is it to {resident.name}, from 1 to 9: {event}")
        rating = await s.gen("rating", max_new_tokens=2, regex="[1-9]")
        resident.memories.append(Memory(event, int(rating or 5), day))


async def _answers(branch: State, resident: Resident, facts: dict[str, str]) -> tuple[str, str]:
    name = sorted(_heard_of(resident, facts))[-1]
    question = f"What does {name} have?"
    return f"{resident.name}: {question}", await _says(branch, resident, question, DAYS + 1)


def _heard_of(resident: Resident, facts: dict[str, str]) -> set[str]:
    """Of whom it remembers something."""
    return {name for name in facts for memory in resident.memories if memory.text.startswith(f"{name} has")}


def town_jobs(count: int, rng: random.Random, people: int = 6) -> tuple[Job, ...]:
    return tuple(Job(town, (corpus.lookup_facts(rng, people),)) for _ in range(count))


def all_know(job: Job, value: Any) -> bool:
    """Everybody says of somebody else what is so."""
    facts = job.args[0]
    return all(
        said == corpus.lookup_turn(facts, question.split("does ")[1].split(" have")[0]).reply
        for question, said in value.items()
    )


KINDS: Final[Sequence[Kind]] = (
    Kind(
        "react", "An agent: thought, action, observation",
        "ReAct agents on HotpotQA (replayed traces): 6 solved examples (about 2,000 tokens), then up to 7 turns of "
        "thought, action, observation",
        "about 800 tokens of instruction and examples, 2 to 4 turns; nothing is replayed: the search runs",
        10, react_jobs, is_done,
    ),
    Kind(
        "generative-agents", "A town of agents with memories",
        "generative agents (replayed calls): short answers to prompts of several hundred tokens, one kind of call "
        "beginning alike for all agents",
        "6 agents, 3 days, prompts of about 120 tokens; nothing is replayed: what they say is remembered",
        3, town_jobs, all_know,
    ),
)  # fmt: skip
