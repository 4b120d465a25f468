"""Records as JSON: replies that match a regular expression, or a schema."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from minirad.evidence.kind import Kind
from minirad.evidence.reading import paragraphs
from minirad.frontend import Job, State
from minirad.model.classroom import corpus

_NAME, _WORD, _AGE = "[A-Z][a-z]{1,11}", "[a-z]{1,11}", "[1-9][0-9]"
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "name": {"type": "string", "pattern": f"^{_NAME}$"},
    "age": {"type": "integer", "minimum": 10, "maximum": 99},
    "friend": {"type": "string", "pattern": f"^{_NAME}$"},
    "has": {"type": "string", "pattern": f"^{_WORD}$"},
    "color": {"enum": corpus.COLORS},
    "city": {"enum": corpus.CITIES},
}
SCHEMA: Final = json.dumps(
    {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False}
)
"""What a record looks like: six fields, in this order."""
REGEX: Final = (
    rf'\{{"name": "{_NAME}", "age": {_AGE}, "friend": "{_NAME}", "has": "{_WORD}", '
    rf'"color": "({"|".join(corpus.COLORS)})", "city": "({"|".join(corpus.CITIES)})"\}}'
)
"""The same as a regular expression."""


@dataclass(frozen=True, slots=True)
class Person:
    """Whom a record is about, and what is told before."""

    name: str
    age: int
    told: str


async def json_by_regex(s: State, person: Person) -> str:
    """A record of a person as JSON, of the form of REGEX."""
    _ask(s, person)
    return await s.gen("record", max_new_tokens=96, regex=REGEX)


async def json_by_schema(s: State, person: Person) -> str:
    """A record of a person as JSON of the SCHEMA."""
    _ask(s, person)
    return await s.gen("record", max_new_tokens=96, json_schema=SCHEMA)


def _ask(s: State, person: Person) -> None:
    s.system(corpus.SYSTEM_PROMPT)
    s.user(person.told)
    s.assistant("Okay.")
    s.user(f"Write JSON for {person.name}, age {person.age}.")


def _people(count: int, rng: random.Random) -> list[Person]:
    return [
        Person(rng.choice(corpus.NAMES), rng.randint(10, 99), paragraphs(rng, 4)) for _ in range(count)
    ]  # fmt: skip


def regex_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    return tuple(Job(json_by_regex, (person,)) for person in _people(count, rng))


def schema_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    return tuple(Job(json_by_schema, (person,)) for person in _people(count, rng))


def says_whom(job: Job, value: Any) -> bool:
    """It is JSON, and about this person."""
    person: Person = job.args[0]
    try:
        record = json.loads(value)
    except ValueError:
        return False
    known = isinstance(record, dict) and record.keys() == _FIELDS.keys()
    return bool(known and record["name"] == person.name and record["age"] == person.age)


_PAPER: Final = "JSON decoding: a page about a city, then a record of 5 fields"
_SCALED: Final = (
    "about 400 tokens to read before the record; name and age are judged, which the lessons teach, the other "
    "fields only have to match"
)

KINDS: Final[Sequence[Kind]] = (
    Kind(
        "json-regex", "JSON by a regular expression",
        f"{_PAPER}, by a regular expression", _SCALED, 10, regex_jobs, says_whom,
    ),
    Kind(
        "json-schema", "JSON by a schema",
        f"{_PAPER}, by a schema (which the paper turned into a regular expression)", _SCALED,
        10, schema_jobs, says_whom,
    ),
)  # fmt: skip
