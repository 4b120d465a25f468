"""Workloads as data: who asks what, and when. No engine code; a Player says what is due.

A workload is a list of sessions. A session arrives at a step and has turns; each later turn comes a
few steps after the reply to the one before, and its prompt is *the token ids so far* plus the ids of
the new text. Generated text is never turned into tokens again: "Hello!" may have been generated as
two tokens that a tokenizer would write as one, and then the longest prefix match ends there.

    workload = load("mixed")                   # a name of WORKLOADS, or a JSON or recording file
    player = Player(workload, engine.encode)
    for asked in player.due(step):             # before each step
        player.sent(asked, engine.add_request(asked.prompt, asked.params))
    player.finished(output, step)              # for each GenerationOutput

Texts are from the classroom Llama's lessons; other models read them as well.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirad import errors
from minirad.config import SamplingParams, drawn_seed
from minirad.frontend import Program
from minirad.model.classroom import corpus
from minirad.observe.events import RequestAborted, RequestAdded, RequestFinished, TokenSampled
from minirad.programs import programs
from minirad.schedule.request import TokenMask

if TYPE_CHECKING:
    from minirad.engine import Engine

Encode = Callable[[str], Sequence[int]]
END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: what is added to the history, and how to go on from there.

    text, or token_ids where a recording or file has them. wait: steps after the reply before.
    sampling: all that a recording says of how to continue, in the place of the six fields before it.
    reply: what was said to it, where a recording tells; a run without a model says it again.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    max_new_tokens: int = 24
    temperature: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sampling: SamplingParams | None = None
    wait: int = 2
    reply: tuple[int, ...] | None = None

    def params(self) -> SamplingParams:
        return self.sampling or SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n, seed=self.seed,
            stop=self.stop, ignore_eos=self.ignore_eos,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that build on one another. arrival: the step before which the first one is sent.

    token_mask: of all its replies, as Engine.add_request takes it.
    """

    name: str
    turns: tuple[Turn, ...]
    arrival: int = 0
    extra_key: str | int | None = None
    priority: int = 0
    lora: str = ""  # an adapter of the engine's
    token_mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions by arrival. kv_tokens: a pool small enough for evictions to be seen.

    program: in the place of sessions, programs that find out what they ask while they run.
    notes: of a recording's requests, a sentence each on what of the recording is not in them.
    """

    name: str
    title: str
    sessions: tuple[Session, ...]
    kv_tokens: int = 512
    program: Program | None = None
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """How many there will be; 0 where programs decide that."""
        return sum(len(session.turns) for session in self.sessions)

    def save(self, path: str | Path) -> None:
        """As JSON that `load` reads. ValueError for programs: they are code, not data."""
        if self.program is not None:
            raise ValueError(f"workload {self.name!r} is a program: there is nothing to write to a file")
        data = asdict(self)
        del data["program"], data["notes"]
        Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")


# ---------------------------------------------------------------------- the built-in ones


def _chat(name: str, arrival: int, questions: Iterable[str], system: str, **turn: Any) -> Session:
    """A ChatML chat; the system prompt goes before the first question."""
    turns: list[Turn] = []
    for question in questions:
        said = [corpus.message("user", question)]
        if not turns:
            said.insert(0, corpus.message("system", system))
        turns.append(Turn(corpus.chat_text(said, add_generation_prompt=True), **turn))
    return Session(name, tuple(turns), arrival)


def chat() -> Workload:
    """Chat sessions of several turns under one system prompt."""
    talks = (
        ("Hello", "My name is Ada.", "What is my name?", "Thanks!"),
        ("Hi", "What is the capital of France?", "What color is the sky?"),
        ("Hello", "What does a dog say?", "What can you do?"),
        ("Good morning", "What is the opposite of hot?", "Goodbye"),
    )
    sessions = tuple(
        _chat(f"chat {number}", 5 * (number - 1), talk, corpus.SYSTEM_PROMPT, max_new_tokens=40)
        for number, talk in enumerate(talks, start=1)
    )
    return Workload("chat", "Chat sessions", sessions, kv_tokens=220)


def _header(examples: int) -> str:
    return corpus.few_shot_header(corpus.few_shot_examples(examples, random.Random("few-shot")))


def few_shot(examples: int = 6) -> Workload:
    """A batch of questions behind the same solved examples."""
    questions = [
        "What is the capital of Italy?", "What color is snow?", "What does a cow say?",
        "What is the opposite of big?", "What day comes after Monday?", "What is the capital of Peru?",
    ]  # fmt: skip
    return Workload(
        "few-shot", "Few-shot batch",
        tuple(
            _few_shot_session(f"few-shot {i}", 0 if i == 1 else 4, examples, question)
            for i, question in enumerate(questions, start=1)
        ),
        kv_tokens=320,
    )  # fmt: skip


def _few_shot_session(name: str, arrival: int, examples: int, question: str) -> Session:
    text = _header(examples) + corpus.few_shot_question(examples + 1, question)
    return Session(name, (Turn(text, max_new_tokens=8, stop=("\n",)),), arrival)


def agents() -> Workload:
    """Agents that share a prompt of some 270 tokens word for word."""
    tasks = (
        ("Who are you?", "What is the capital of Japan?"),
        ("What color is grass?", "What does a bee say?"),
        ("What is the opposite of fast?", "Thank you"),
        ("What is the capital of Egypt?",),
        ("What day comes after Friday?",),
    )
    sessions = tuple(
        _chat(f"agent {number}", 4 * (number - 1), talk, corpus.AGENT_PROMPT)
        for number, talk in enumerate(tasks, start=1)
    )
    return Workload("agents", "Agents with one long prompt", sessions, kv_tokens=400)


def raw() -> Workload:
    """Prompts that share nothing: the cache can only be in the way."""
    sessions = tuple(
        Session(f"raw {i}", (Turn(raw_prompt(i), max_new_tokens=12),), 2 * (i - 1)) for i in range(1, 13)
    )
    return Workload("raw", "Raw prompts, nothing shared", sessions, kv_tokens=256)


def raw_prompt(number: int) -> str:
    """A text whose very first token differs from that of its neighbours."""
    rng = random.Random(f"raw {number}")
    first = corpus.WORDS[number % len(corpus.WORDS)]
    return " ".join([first, *(rng.choice(corpus.WORDS) for _ in range(16))])


def agent_prompt(question: str) -> str:
    """A question to an agent, behind the long prompt that all agents share."""
    said = [corpus.message("system", corpus.AGENT_PROMPT), corpus.message("user", question)]
    return corpus.chat_text(said, add_generation_prompt=True)


def chat_prompt(question: str) -> str:
    """A question as the first turn of a chat."""
    said = [corpus.message("system", corpus.SYSTEM_PROMPT), corpus.message("user", question)]
    return corpus.chat_text(said, add_generation_prompt=True)


def self_consistency(samples: int = 4) -> Workload:
    """One question, several sampled answers: the prompt is computed once and shared."""
    asks = [corpus.PROBLEMS[0], "Write a story about a cat.", "Name an animal."]
    sessions = []
    for number, ask in enumerate(asks, start=1):
        turn = Turn(chat_prompt(ask), max_new_tokens=28, temperature=0.9, n=samples, seed=number)
        sessions.append(Session(f"samples {number}", (turn,), 12 * (number - 1)))
    return Workload("self-consistency", "Several samples of one prompt", tuple(sessions), kv_tokens=300)


def mixed() -> Workload:
    """A little of everything, crowded enough for splits, evictions and retractions."""
    sessions: list[Session] = []

    def add(arrival: int, *more: Session) -> None:
        sessions.extend(replace(session, arrival=arrival + i) for i, session in enumerate(more))

    talk = chat().sessions
    add(0, talk[0])
    add(6, talk[1])
    shots = few_shot(5).sessions
    add(10, shots[0])
    add(13, shots[1], shots[2], shots[3])
    agent = agents().sessions
    add(20, agent[0])
    add(34, agent[1], agent[2])
    add(42, talk[2])
    story = {"max_new_tokens": 110, "temperature": 0.7}
    for number, animal in enumerate(("cat", "dog", "cow", "bee", "pig"), start=1):
        ask = f"Write a story about a {animal}."
        add(68 + number, _chat(f"story {number}", 0, (ask,), corpus.SYSTEM_PROMPT, seed=number, **story))
    add(126, self_consistency(4).sessions[2], *raw().sessions[:3])
    add(142, talk[3], agent[3])
    title = "Chats, few-shot, agents, stories, samples, raw prompts"
    return Workload("mixed", title, tuple(sorted(sessions, key=lambda s: s.arrival)), kv_tokens=400)


def queue() -> Workload:
    """Who runs next matters: questions about three long texts come in turn, and the pool holds one text.

    First come, first served computes a text anew for nearly every question; to take those first whose
    text is there computes each once, and lets the others wait.
    """
    sessions = []
    for number in range(12):
        text, turn = number % 3, number // 3
        name = f"text {'ABC'[text]}, question {turn + 1}"
        prompt = _few_shot_text(text, 6) + corpus.few_shot_question(7, _QUESTIONS[number])
        sessions.append(Session(name, (Turn(prompt, max_new_tokens=2 + number % 4),), number // 4))
    return Workload("queue", "Questions about three texts, in turn", tuple(sessions), kv_tokens=210)


def again() -> Workload:
    """Who is evicted matters: prompts come again and again, and the pool holds three of them."""
    sessions = []
    for step, letter in enumerate("ABCADADABEDADEADEDA"):
        text = raw_prompt("ABCDE".index(letter) + 1)
        priority = int(letter == "C")  # for the policy of that name: precious, and never wanted again
        sessions.append(Session(f"prompt {letter}", (Turn(text, max_new_tokens=1),), step, None, priority))
    return Workload("again", "Prompts that come again, room for three", tuple(sessions), kv_tokens=170)


def tiers() -> Workload:
    """Four long texts asked about in turn, in a pool for two: what is evicted is soon wanted again."""
    sessions = []
    for number in range(16):
        name = f"text {'ABCD'[number % 4]}, question {number // 4 + 1}"
        prompt = _few_shot_text(number % 4, 6) + corpus.few_shot_question(7, _QUESTIONS[number % 12])
        sessions.append(Session(name, (Turn(prompt, max_new_tokens=3),), 4 * number))
    return Workload("tiers", "Four texts in turn, room for two", tuple(sessions), kv_tokens=300)


def drafts() -> Workload:
    """Words to repeat and JSON to write, which can be guessed, and which begin alike and go on otherwise."""
    words = "Repeat: apple river stone cloud"
    talks = (
        (f"{words} tiger piano", f"{words} bread seven", "What color is snow?"),
        ("Write JSON for Tom, age 7.", "Write JSON for Tom, age 42.", "Write JSON for Ada, age 42."),
        (f"{words} tiger ocean paper", "Write a story about a cat."),
        (f"{words} honey garden silver", f"{words} honey"),
        ("Write JSON for Ada, age 42.", "What is the capital of France?", "What is the capital of Peru?"),
    )
    sessions = tuple(
        _chat(f"chat {number}", 4 * (number - 1), talk, corpus.SYSTEM_PROMPT, max_new_tokens=32)
        for number, talk in enumerate(talks, start=1)
    )
    return Workload("drafts", "Words to repeat, and JSON", sessions, kv_tokens=320)


_QUESTIONS = (
    "What is the capital of Italy?", "What color is snow?", "What does a cow say?",
    "What is the opposite of big?", "What day comes after Monday?", "What is the capital of Peru?",
    "What color is grass?", "What does a dog say?", "What is the opposite of hot?",
    "What day comes after Friday?", "What is the capital of Japan?", "What color is the sky?",
)  # fmt: skip


def _few_shot_text(text: int, examples: int) -> str:
    """Solved examples, others for each `text`."""
    found = corpus.few_shot_examples(examples, random.Random(f"text {text}"))
    return corpus.few_shot_header(found)


def adapters(names: Sequence[str] = ()) -> Workload:
    """The same questions under no adapter and under each of these: equal tokens, other keys and values."""
    sessions = []
    for number, question in enumerate(_ADAPTED):
        for place, name in enumerate(("", *names)):
            arrival = 3 * (number * (len(names) + 1) + place)
            turn = Turn(chat_prompt(question), max_new_tokens=48)
            sessions.append(Session(question, (turn,), arrival, None, 0, name))
    title = f"The same questions under {len(names) or 'no'} adapter{'s' * (len(names) != 1)}"
    return Workload("adapters", title, tuple(sessions), kv_tokens=480)


_ADAPTED = (
    "What is the capital of France?", "What color is snow?", "What does a cow say?",
    "What is the capital of Italy?",
)  # fmt: skip


def nothing() -> Workload:
    """No requests: for typing one's own."""
    return Workload("none", "Your own prompts", (), kv_tokens=480)


def of_program(name: str) -> Workload:
    """A program of the library (programs.py) as a workload."""
    program = programs()[name]
    return Workload(name, program.title, (), program.kv_tokens, program)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mixed": mixed,
    "chat": chat,
    "few-shot": few_shot,
    "agents": agents,
    "raw": raw,
    "self-consistency": self_consistency,
    "queue": queue,
    "again": again,
    "tiers": tiers,
    "adapters": adapters,
    "drafts": drafts,
    **{name: partial(of_program, name) for name in programs()},
    "none": nothing,
}


# ---------------------------------------------------------------------- from files


def load(name_or_file: str | Path, *, partly: bool = False) -> Workload:
    """A built-in workload by name, or one from a JSON file, or the requests of a recording.

    partly: take of a damaged recording what can be read; the workload's notes say so.
    ValueError names what is wrong with the name or the file.
    """
    errors.path("a workload", name_or_file)
    if str(name_or_file) in WORKLOADS:
        return WORKLOADS[str(name_or_file)]()
    path = Path(name_or_file)
    if not path.is_file():
        raise ValueError(
            f"no workload {str(name_or_file)!r}: there is no such file, and the names are "
            f"{', '.join(WORKLOADS)}"
        )
    with path.open("rb") as file:
        is_recording = file.read(13).removeprefix(b"\xef\xbb\xbf").startswith(b'{"minirad"')
    if is_recording:
        from minirad.observe.recorder import Recorder

        recording = Recorder.load(path)
        if recording.missing and not partly:  # every number of a part would be a wrong one of the whole
            raise ValueError(f"{recording.missing}, but as a workload a recording has to be whole")
        return from_recording(recording, name=path.stem)
    try:
        return from_json(json.loads(errors.read_text(path)))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no workload: {error}") from error


def from_json(data: Any) -> Workload:
    """The reverse of `Workload.save`; fields with a default may be left out."""
    if not isinstance(data, dict) or not isinstance(data.get("sessions"), list):
        raise ValueError('it must be an object with a list of "sessions"')
    sessions = []
    for number, each in enumerate(data["sessions"], start=1):
        turns = tuple(Turn(**{**turn, **_typed(turn)}) for turn in each["turns"])
        if not turns:
            raise ValueError(f"session {number} has no turns")
        for turn in turns:
            turn.params()  # ValueError now rather than in the middle of a run
            if not isinstance(turn.text, str):
                raise ValueError(f"session {number} has a turn whose text is {errors.said(turn.text)}")
            for token in (*turn.token_ids, *(turn.reply or ())):
                errors.whole("a token id", token, 0)
            if not turn.text and not turn.token_ids:
                raise ValueError(f"session {number} has a turn without text or token_ids")
        rest = {key: value for key, value in each.items() if key not in ("turns", "name")}
        errors.whole("arrival", rest.get("arrival", 0), 0)
        errors.whole("priority", rest.get("priority", 0))
        errors.extra_key(rest.get("extra_key"))
        sessions.append(Session(str(each.get("name", f"session {number}")), turns, **rest))
    name = str(data.get("name", "file"))
    pool = errors.whole("kv_tokens", data.get("kv_tokens", 512), 1)
    return Workload(name, str(data.get("title", name)), tuple(sessions), pool)


def _typed(turn: dict[str, Any]) -> dict[str, Any]:
    """What JSON has no type of its own for."""
    lists = ("token_ids", "stop", "reply")
    found: dict[str, Any] = {key: tuple(turn[key]) for key in lists if turn.get(key) is not None}
    if turn.get("sampling") is not None:
        found["sampling"] = SamplingParams(**turn["sampling"])
    return found


def recorded_request(
    event: RequestAdded, engine_seed: int | None = None, spaces: dict[str, int] | None = None
) -> Session:
    """A recorded request as it came, to be asked again: its prompt, and all that the event says of how it
    was to be continued. (Masks are functions, and no event holds one.)

    engine_seed: EngineConfig.seed; the request is then given the seed that it had under its recorded number.
    spaces: of each adapter the namespace of its first request, kept here from one request to the next: it is
    the one of requests without an extra_key.
    """
    names = [each.name for each in fields(SamplingParams)]
    sampling = SamplingParams(**{name: getattr(event, name) for name in names if hasattr(event, name)})
    number = event.request.removeprefix("R")
    if engine_seed is not None and sampling.seed is None and re.fullmatch(r"[0-9]{1,18}", number):
        sampling = replace(sampling, seed=drawn_seed(engine_seed, int(number)))
    turn = Turn(token_ids=event.token_ids, sampling=sampling)
    space = event.namespace or None
    if event.lora and spaces is not None and spaces.setdefault(event.lora, event.namespace) == space:
        space = None
    return Session(event.request, (turn,), 0, space, event.priority, event.lora)


def from_recording(
    recording: Any, until: int | None = None, name: str = "fork", engine_seed: int | None = None,
    masks: Mapping[str, TokenMask] | None = None,
) -> Workload:  # fmt: skip
    """The requests of a recording, each at the step at which it came, as ready token ids.

    until: index of the last frame whose requests count; None: all. Replies may differ from those
    recorded (another policy, pool or seed), prompts do not: they come as they came. engine_seed: see
    recorded_request. masks: of requests by their recorded ids, since no recording holds them.
    """
    sessions: list[Session] = []
    spaces: dict[str, int] = {}
    frames = recording.frames if until is None else recording.frames[: until + 1]
    replies = _replies(frames)
    for frame in frames:
        for event in frame.events:
            if isinstance(event, RequestAdded):
                asked = recorded_request(event, engine_seed, spaces)
                turns = tuple(replace(turn, reply=replies.get(event.request)) for turn in asked.turns)
                mask = (masks or {}).get(event.request)
                arrival = max(frame.step - 1, 0)
                sessions.append(replace(asked, turns=turns, arrival=arrival, token_mask=mask))
    pool = int(recording.header["start"]["kv_tokens"]) or 512
    notes = _notes(recording, name, sessions) if sessions else ()
    return Workload(name, f"Requests of a recording ({len(sessions)})", tuple(sessions), pool, notes=notes)


def _replies(frames: Iterable[Any]) -> dict[str, tuple[int, ...]]:
    """The whole replies that frames tell, by request; of several samples there is not the one reply."""
    said: dict[str, list[int]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for event in (event for frame in frames for event in frame.events):
        if isinstance(event, RequestAdded) and event.n == 1:
            said[event.request] = []
        elif isinstance(event, TokenSampled) and event.request in said:
            said[event.request].append(event.token)
        elif isinstance(event, RequestFinished | RequestAborted):
            reply = said.pop(event.request, [])
            if reply:  # none: it was cancelled, or failed, before it said anything
                found[event.request] = tuple(reply)
    return found


_SERVED_WITH = (
    "page_size", "eviction_policy", "schedule_policy", "max_running", "chunk_tokens", "mixed", "radix_cache",
    "host_kv_tokens",
)  # fmt: skip


def _notes(recording: Any, name: str, sessions: Sequence[Session]) -> tuple[str, ...]:
    told = sum(session.turns[0].reply is not None for session in sessions)
    every = told == len(sessions)
    replies = "replies" if every else f"{told} of {len(sessions)} replies (the others are made up)"
    config = recording.header.get("config") or {}
    own = ", ".join(f"{key} {config[key]}" for key in _SERVED_WITH if key in config)
    had = f" (the recording had {own})" if own else ""
    settings = (
        f"{name}: prompts are the recording's, and so are times and {replies} where they come over time; "
        f"page size, policies, chunks and tiers are those of this run{had}"
    )
    return (*([recording.missing] if recording.missing else []), settings)


# ---------------------------------------------------------------------- playing one


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is due: add it to an engine, then tell `Player.sent` its id."""

    session: Session
    turn: int
    prompt: list[int]
    params: SamplingParams
    token_mask: TokenMask | None = None
    reply: tuple[int, ...] | None = None  # Turn.reply

    @property
    def label(self) -> str:
        many = len(self.session.turns) > 1
        return f"{self.session.name} · turn {self.turn + 1}" if many else self.session.name


@dataclass(slots=True)
class _Running:
    session: Session
    turn: int = 0
    due: int | None = 0  # the step before which the next turn is to be sent; None: being answered
    history: list[int] = field(default_factory=list)


class Player:
    """Says which requests of a workload are due: those of its sessions, or those its programs ask for.

    encode: text -> token ids, called for the texts of the workload only. engine: what programs pin their
    prefixes in and read replies with; None in a simulation. A driver that stops before `done` calls `close`.
    """

    def __init__(self, workload: Workload, encode: Encode, engine: Engine | None = None) -> None:
        program = workload.program
        self._programs = program.player(encode, engine) if program else None
        self._driven: Any = self._programs or SessionPlayer(workload, encode)
        self.labels: dict[str, str] = self._driven.labels

    def due(self, step: int) -> list[Asked]:
        """What is to be sent before step `step` (counted from 0) is run."""
        asked: list[Asked] = self._driven.due(step)
        return asked

    def sent(self, asked: Asked, request_id: str) -> None:
        """The engine's id of a request that was due."""
        self._driven.sent(asked, request_id)

    def refused(self, asked: Asked, error: str | Exception = "the engine refused it") -> None:
        """The engine refused it (too long, say): the session ends, a program gets an error."""
        self._driven.refused(asked, error)

    def finished(self, output: Any, step: int) -> None:
        """Takes a GenerationOutput, or a simulation's."""
        self._driven.finished(output, step)

    def close(self) -> None:
        """Ends programs that still run: their requests are aborted, their pins released."""
        if self._programs is not None:
            self._programs.close()

    @property
    def failures(self) -> list[str]:
        """What went wrong in programs that have ended."""
        ended = self._programs.outcomes if self._programs else []
        return [f"{outcome.name} failed: {outcome.error}" for outcome in ended if outcome.error]

    @property
    def next_due(self) -> int | None:
        """The step at which something is due next; None if nothing is (or only after replies)."""
        step: int | None = self._driven.next_due
        return step

    @property
    def done(self) -> bool:
        """Everything was sent and answered."""
        return bool(self._driven.done)


class SessionPlayer:
    """Plays sessions, each one's history kept as token ids. The methods are Player's."""

    def __init__(self, workload: Workload, encode: Encode) -> None:
        self.labels: dict[str, str] = {}
        self._encode = encode
        self._sessions = [_Running(session, due=session.arrival) for session in workload.sessions]
        self._sent: dict[str, _Running] = {}

    def due(self, step: int) -> list[Asked]:
        """What is to be sent before step `step` (counted from 0) is run."""
        asked = []
        for running in self._sessions:
            if running.due is not None and running.due <= step:
                turn = running.session.turns[running.turn]
                new = list(turn.token_ids) or [int(token) for token in self._encode(turn.text)]
                running.history += new
                running.due = None
                mask = running.session.token_mask
                prompt = list(running.history)
                asked.append(Asked(running.session, running.turn, prompt, turn.params(), mask, turn.reply))
        return asked

    def sent(self, asked: Asked, request_id: str) -> None:
        """The engine's id of a request that was due."""
        self.labels[request_id] = asked.label
        self._sent[request_id] = next(r for r in self._sessions if r.session is asked.session)

    def refused(self, asked: Asked, error: str | Exception = "") -> None:
        """The engine refused it (too long, say): the session ends here."""
        self._sessions = [r for r in self._sessions if r.session is not asked.session]

    def finished(self, output: Any, step: int) -> None:
        """Takes a GenerationOutput: its first sample is what the next turn builds on."""
        running = self._sent.get(output.request_id)
        if running is None or output.index != 0:
            return
        del self._sent[output.request_id]
        running.turn += 1
        if output.finish_reason in ("abort", "error") or running.turn >= len(running.session.turns):
            self._sessions = [r for r in self._sessions if r is not running]
            return
        running.history += output.token_ids
        # A reply that was cut by its length lacks the end sign; after it, ChatML breaks the line.
        closing = "\n" if output.finish_reason == "stop" else f"{END}\n"
        running.history += [int(token) for token in self._encode(closing)]
        running.due = step + running.session.turns[running.turn].wait

    @property
    def next_due(self) -> int | None:
        """The step at which something is due next; None if nothing is (or only after replies)."""
        return min((r.due for r in self._sessions if r.due is not None), default=None)

    @property
    def done(self) -> bool:
        """Everything was sent and answered."""
        return not self._sessions
