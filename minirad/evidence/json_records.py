"""Records as JSON: replies that match a regular expression, or a schema."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from minirad.evidence.kind import Kind
from minirad.frontend import Job, State
from minirad.model.classroom import corpus

_NAME, _WORD = r'"[A-Z][a-z]{1,11}"', r'"[a-z]{1,11}"'
RECORD: Final = (
    r'\{"name": ' + _NAME + r', "age": [1-9][0-9], "friend": ' + _NAME + r', "has": ' + _WORD
    + r', "color": "(' + "|".join(corpus.COLORS) + r')", "city": "(' + "|".join(corpus.CITIES) + r')"\}'
)  # fmt: skip
"""What a record looks like: six fields, in this order."""


@dataclass(frozen=True, slots=True)
class Person:
    """Whom a record is about, and what is told before."""

    name: str
    age: int
    told: str


async def json_record(s: State, person: Person) -> str:
    """A record of a person as JSON, of the form of RECORD."""
    s.system(corpus.SYSTEM_PROMPT)
    s.user(f"{person.told} Write JSON for {person.name}, age {person.age}.")
    return await s.gen("record", max_new_tokens=96, regex=RECORD)


def json_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    jobs = []
    for _ in range(count):
        name = rng.choice(corpus.NAMES)
        told = " ".join(corpus.story(rng, rng.choice(corpus.ANIMALS)) for _ in range(4))
        jobs.append(Job(json_record, (Person(name, rng.randint(10, 99), told),)))
    return tuple(jobs)


def says_whom(job: Job, value: Any) -> bool:
    """It is JSON, and about this person."""
    person: Person = job.args[0]
    try:
        record = json.loads(value)
    except ValueError:
        return False
    return bool(record["name"] == person.name and record["age"] == person.age)


KINDS: Final[Sequence[Kind]] = (
    Kind(
        "json", "JSON by a regular expression",
        "JSON decoding: a page about a city, then a record of 5 fields, each by a regular expression",
        "stories of about 400 tokens before the record; name and age are judged, which the lessons teach, other "
        "fields only have to match",
        10, json_jobs, says_whom,
    ),
)  # fmt: skip
