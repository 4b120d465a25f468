"""Agents: one that thinks, acts and observes in turn; several that live in a town and remember."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minirad.evidence.kind import Kind
from minirad.evidence.reading import solved_questions
from minirad.evidence.retriever import Retriever, words
from minirad.frontend import Branches, Job, State
from minirad.model.classroom import corpus

# ---------------------------------------------------------------------- thought, action, observation

MOST_STEPS: Final = 5
_SMALL_WORDS: Final = frozenset(
    ["a", "an", "the", "has", "have", "does", "what", "who", "is", "of", "i", "do"]
)
_LINE: Final = re.compile(r"[^.?!\n]+[.?!]")


@dataclass(frozen=True, slots=True)
class Errand:
    """A question, the pages to search, and the right answer (which is no part of the prompt)."""

    question: str
    pages: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Example:
    """An errand that somebody went on: thoughts with their actions, and what was observed between them."""

    question: str
    steps: tuple[tuple[str, str], ...]  # thought, action
    observed: tuple[str, ...]


class Tools:
    """The tools of ReAct's paper over some pages. A page's first paragraph is what a search shows of it."""

    def __init__(self, pages: Sequence[str]) -> None:
        self._library = Retriever(pages)
        self._page = ""

    def use(self, tool: str, argument: str) -> str:
        """What is observed."""
        if tool == "Lookup":
            return self.lookup(argument)
        (self._page,) = self._library.search(argument, 1)
        return self._page.partition("\n\n")[0]

    def lookup(self, word: str) -> str:
        """The last sentence of the page with this word."""
        found = [line.strip() for line in _LINE.findall(self._page) if word.lower() in words(line)]
        return found[-1] if found else f"There is nothing about {word}."


async def react(s: State, examples: tuple[Example, ...], errand: Errand) -> str:
    """Thinks, acts and observes until it finishes with an answer (Yao et al. 2023).

    The model thinks freely. What it may do then is a regular expression made of its own words: search for
    what it thinks about; look that up on the page that was found; finish, once an observation says what it
    thinks (or at the last step).
    """
    s.system(corpus.AGENT_PROMPT)
    for example in examples:
        for at, (thought, action) in enumerate(example.steps):
            s.user(_turn(example.observed[at - 1] if at else "", example.question))
            s.assistant(f"{thought}\n{action}")
    tools, observed = Tools(errand.pages), ""
    for step in range(1, MOST_STEPS + 1):
        s.user(_turn(observed, errand.question))
        thought = await s.gen(f"thought {step}", max_new_tokens=24, stop="\n")
        tool, arguments = _allowed(thought, errand.question, observed, step)
        s += "\n"
        action = await s.gen(
            f"action {step}", max_new_tokens=16, regex=rf"{tool}\[({'|'.join(map(re.escape, arguments))})\]"
        )
        argument = action.partition("[")[2].rstrip("]")
        if tool == "Finish":
            break
        observed = tools.use(tool, argument)
    return argument


def _turn(observed: str, question: str) -> str:
    return f"{observed} {question}" if observed else question


def _allowed(thought: str, question: str, observed: str, step: int) -> tuple[str, list[str]]:
    """The tool, and what may be asked of it."""
    asked, said = _plain(question), _plain(thought)
    about = [word for word in said if word in asked] or asked
    new = [word for word in said if word not in asked] or ["nothing"]
    if step == MOST_STEPS or (observed and _supports(observed, thought)):
        return "Finish", list(dict.fromkeys(new))
    return "Lookup" if observed else "Search", list(dict.fromkeys(about))


def _plain(text: str) -> list[str]:
    """The words that say something, as they are written."""
    return [word for word in re.findall(r"[A-Za-z0-9]+", text) if word.lower() not in _SMALL_WORDS]


def _supports(observed: str, thought: str) -> bool:
    """One sentence has all that the thought says."""
    wanted = set(words(" ".join(_plain(thought))))
    return bool(wanted) and any(wanted <= set(words(line)) for line in _LINE.findall(observed))


def _errand(rng: random.Random) -> tuple[Errand, Example]:
    """An errand, and how it goes well: found, looked up, finished."""
    facts = corpus.lookup_facts(rng, 12)
    names = list(facts)
    groups = [{name: facts[name] for name in names[at : at + 3]} for at in range(0, 12, 3)]
    pages = tuple(f"{solved_questions(rng, 3)}\n\n{corpus.lookup_text(group)}" for group in groups)
    name = rng.choice(names)
    turn, guess = corpus.lookup_turn(facts, name), rng.choice(corpus.THINGS)
    tools = Tools(pages)
    observed = tools.use("Search", name), tools.use("Lookup", name)
    steps = (
        (f"{name} has a {guess}.", f"Search[{name}]"),
        (f"{name} has a {guess}.", f"Lookup[{name}]"),
        (turn.reply, f"Finish[{turn.short}]"),
    )
    return Errand(turn.user, pages, turn.short), Example(turn.user, steps, observed)


def react_jobs(count: int, rng: random.Random, examples: int = 5) -> tuple[Job, ...]:
    """Errands, each with pages of its own, behind the same examples."""
    shown = tuple(_errand(rng)[1] for _ in range(examples))
    return tuple(Job(react, (shown, _errand(rng)[0])) for _ in range(count))


def is_done(job: Job, value: Any) -> bool:
    return bool(value == job.args[1].answer)


# ---------------------------------------------------------------------- a town of agents

RECALLED: Final = 6  # memories in a prompt
RECENCY: Final = 0.9  # what a memory is worth a day later
TOWN: Final = (
    "You live in a little town by the sea. There is a park with old trees, a market where people buy apples "
    "and bread, and a school on the hill. Every day you go to one of these places, you meet who is there, "
    "and you tell each other what you know. You remember what you see and hear. When somebody asks you "
    "something, you think of what you remember and answer in one short sentence."
)
CALLS: Final = {
    "place": (
        "You choose where to go today. Think of whom you met, and where. You can go to the park, to the "
        "market or to the school. Name one place."
    ),
    "says": "You answer a question of somebody whom you met. Use what you remember, and nothing else.",
    "rating": (
        "You say how important something is to you, from 1 to 9. 1 is like every day: you brush your teeth, "
        "you make the bed. 9 is what changes a life: a wedding, a child that is born."
    ),
}
"""What each kind of call begins with, for all agents alike."""


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
    memories: list[Memory]

    def recall(self, about: str, day: int) -> str:
        """The memories that matter most now, by relevance, recency and importance (Park et al. 2023)."""
        scores = Retriever([memory.text for memory in self.memories]).scores(about)
        most = max(scores, default=0) or 1

        def worth(at: int) -> float:
            memory = self.memories[at]
            return 2 * scores[at] / most + RECENCY ** (day - memory.day) + memory.importance / 9

        best = sorted(range(len(scores)), key=worth, reverse=True)[:RECALLED]
        return " ".join(self.memories[at].text for at in sorted(best))

    def knows_of(self, names: Iterable[str]) -> list[str]:
        """Of whom it remembers what they have."""
        return [name for name in names if any(each.text.startswith(f"{name} has") for each in self.memories)]


async def town(s: State, facts: dict[str, str], days: int = 3) -> dict[str, tuple[str, str]]:
    """Agents that go to places, meet, tell each other who has what, and remember it.

    facts: who has what; at first each knows this of itself and of one other. Each call of an agent has a
    prompt of its own: the town, what kind of call it is, and what the agent remembers. Returns what each of
    them says in the end about the one whom it heard of last: name -> (whom, what it says).
    """
    names = list(facts)
    town = Town(
        [
            Resident(name, [Memory(f"{each} has a {facts[each]}.", 9, 0) for each in (name, names[at - 1])])
            for at, name in enumerate(names)
        ]
    )
    agents = await s.fork(len(names))
    for _ in range(days):
        town.day += 1
        await agents.each(town.goes_out)
        town.tell(agents)
        await agents.each(town.remembers)
    town.day += 1
    said = await agents.each(town.is_asked)
    await agents.join()
    return dict(zip(names, said, strict=True))


@dataclass(slots=True)
class Town:
    """Who lives there, and the day. Its coroutines are what an agent does in its branch; at: which agent."""

    people: list[Resident]
    day: int = 0

    async def goes_out(self, agent: State, at: int) -> None:
        """Chooses a place (`select`), and what to tell there."""
        person = self.people[at]
        text = f"{person.recall('place', self.day)} Where does {person.name} go today?"
        call = await _call(agent, "place", text)
        call.assistant(f"{person.name} goes to the")
        agent["place"] = await call.select("place", (" park.", " market.", " school."))
        known = person.knows_of([each.name for each in self.people])
        agent["tells"] = await self.says(agent, person, known[self.day % len(known)])

    async def says(self, agent: State, person: Resident, whom: str) -> str:
        """What somebody has, as this person remembers it."""
        question = f"What does {whom} have?"
        call = await _call(agent, "says", f"{person.recall(question, self.day)} {question}")
        return (await call.gen("says", max_new_tokens=16)).strip()

    def tell(self, agents: Branches) -> None:
        """Those in one place see and hear each other; what they did not know are the day's events."""
        for person, agent in zip(self.people, agents, strict=True):
            met = [
                (other, there)
                for other, there in zip(self.people, agents, strict=True)
                if there["place"] == agent["place"] and other is not person
            ]
            names = " and ".join(other.name for other, _ in met) or "nobody"
            seen = f"On day {self.day} {person.name} met {names} at the{agent['place']}"
            known = {memory.text for memory in person.memories}
            told = dict.fromkeys(there["tells"] for _, there in met)
            agent["events"] = [seen, *(text for text in told if text not in known)]

    async def remembers(self, agent: State, at: int) -> None:
        """Rates the day's events, one after the other: a memory bears on what the next is worth."""
        person = self.people[at]
        for event in agent["events"]:
            text = f"{person.recall(event, self.day)} How important is this: {event}"
            call = await _call(agent, "rating", text)
            rating = await call.gen("rating", max_new_tokens=2, regex="[1-9]")
            person.memories.append(Memory(event, int(rating or 5), self.day))

    async def is_asked(self, agent: State, at: int) -> tuple[str, str]:
        """Says what the one has of whom it heard last."""
        person = self.people[at]
        names = [each.name for each in self.people]
        heard = [
            name for memory in person.memories for name in names if memory.text.startswith(f"{name} has")
        ]
        return heard[-1], await self.says(agent, person, heard[-1])


async def _call(agent: State, kind: str, text: str) -> State:
    """A fresh text within an agent's branch."""
    (fresh,) = await agent.fork(1)
    fresh.system(f"{TOWN}\n\n{CALLS[kind]}")
    fresh.user(text)
    return fresh


def town_jobs(count: int, rng: random.Random, people: int = 5) -> tuple[Job, ...]:
    return tuple(Job(town, (corpus.lookup_facts(rng, people),)) for _ in range(count))


def all_know(job: Job, value: Any) -> bool:
    """Everybody says what is so."""
    facts: dict[str, str] = job.args[0]
    return value.keys() == facts.keys() and all(
        said == f"{whom} has a {facts.get(whom)}." for whom, said in value.values()
    )


KINDS: Final[Sequence[Kind]] = (
    Kind(
        "react", "An agent: thought, action, observation",
        "ReAct agents on HotpotQA (replayed traces): 6 solved examples (about 2,000 tokens), then turns "
        "of thought, action and observation, at most 200 tokens each",
        "about 750 tokens of instruction and examples, 3 to 5 turns; nothing is replayed: the tools run",
        10, react_jobs, is_done,
    ),
    Kind(
        "generative-agents", "A town of agents with memories",
        "generative agents (replayed calls): short answers to prompts of several hundred tokens; calls of "
        "a kind begin alike for all agents",
        "5 agents, 3 days, prompts of about 250 tokens; nothing is replayed: what they say is remembered",
        2, town_jobs, all_know,
    ),
)  # fmt: skip
