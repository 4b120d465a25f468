"""What a program holds in its hands: a text that grows, as token ids, and the calls that make it grow.

`gen` and `select` put a request on its way at once and return something to await; until it is there,
the state cannot be changed or read. What the model said enters the history as the ids that were sampled
and is never tokenised again. (Not so its end token: it has no KV yet, and the chat template closes the
turn with the same one.)

The calls are those of SGLang's frontend (Zheng et al. 2024, section 2), as coroutines.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from minirad.config import SamplingParams
from minirad.frontend.tasks import ProgramError, Task, Waitable
from minirad.frontend.texts import Texts
from minirad.text import valid_text

T = TypeVar("T")
TokenMask = Callable[[list[int]], Any]


class Host(Protocol):
    """What a state asks of the player that runs its program."""

    @property
    def texts(self) -> Texts: ...

    @property
    def hints(self) -> bool:
        """Whether prefixes are sent ahead of what forks from them."""
        ...

    def ask(
        self, what: str, prompt: list[int], params: SamplingParams, token_mask: TokenMask | None = None
    ) -> Waitable[Any]:
        """Sends a request; the value is its GenerationOutput (or a simulation's)."""
        ...

    def spawn(self, what: str, coroutine: Coroutine[Any, None, T]) -> Task[T]:
        """Starts a coroutine of the program at once."""
        ...

    def seed(self, place: tuple[int, ...]) -> int:
        """A seed for one call, a function of the program's own seed and the call's place in it."""
        ...

    def pin(self, tokens: list[int]) -> Any: ...
    def unpin(self, pin: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Said:
    """One result of `gen` or `select`.

    logprobs: of each token under the model's own distribution (natural logarithm; empty in a simulation).
    scores: for `select`, each choice's mean log-probability per token. finish_reason: "stop", "length",
    or "select".
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    scores: dict[str, float]

    @property
    def score(self) -> float:
        """Mean log-probability per token; 0 if none is known."""
        return statistics.fmean(self.logprobs) if self.logprobs else 0.0


class State:
    """A program's text so far. `tokens` is all of it; `s["name"]` is what a call of that name gave.

    A chat is written with `system`, `user` and `assistant`, any other text with `s += "text"`.
    """

    def __init__(self, host: Host, place: tuple[int, ...] = ()) -> None:
        self.tokens: list[int] = []
        self._host = host
        self._place = place  # which branch of which fork: () is the program's own state
        self._values: dict[str, Any] = {}
        self._fresh: dict[str, None] = {}  # those of them that are not the parent's, in order
        self._said: dict[str, Said] = {}
        self._role = ""  # whose turn is being written
        self._call: Task[Any] | None = None  # the last one
        self._calls = 0

    # ------------------------------------------------------------ text

    def system(self, text: str) -> None:
        """The system prompt; only at the very beginning."""
        self._settled()
        if self.tokens:
            raise ValueError(f"a system prompt can only come first: {text!r}")
        self._write(self._host.texts.template.put("system", text))
        self._role = "system"

    def user(self, text: str) -> None:
        """A user's turn; it closes the reply before."""
        self._settled()
        if self._role == "user" or (self.tokens and not self._role):
            after = "another user turn" if self._role else "plain text"
            raise ValueError(f"a user turn cannot follow {after}: {text!r}")
        place = {"": "first", "system": "after_system", "assistant": "turn"}[self._role]
        self._write(self._host.texts.template.put(place, text))
        self._role = "user"

    def assistant(self, text: str = "") -> None:
        """Opens the assistant's turn, with a beginning of it or a whole reply; `gen` continues it."""
        self._settled()
        if self._role not in ("user", "assistant"):
            raise ValueError(f"an assistant's turn follows a user's: {text!r}")
        opening = self._host.texts.template.reply if self._role == "user" else ""
        self._write(opening + text)
        self._role = "assistant"

    def __iadd__(self, text: str | Sequence[int]) -> State:
        """Plain text, or token ids, added as they are; within a chat to the turn that is being written."""
        self._settled()
        if isinstance(text, str):
            self._write(text, beginning=not self.tokens)
        else:
            self.tokens += [int(token) for token in text]
        return self

    def _write(self, text: str, beginning: bool = False) -> None:
        self.tokens += self._host.texts.ids(text, self.tokens, beginning)

    # ------------------------------------------------------------ calls

    def gen(
        self,
        name: str,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: tuple[str, ...] | str = (),
        regex: str | None = None,
        json_schema: str | None = None,
        seed: int | None = None,
    ) -> Task[str]:
        """The model continues; after a user's turn it opens its own. Await it for the text.

        stop: the text ends before it; the history keeps the ids as sampled, the stop text included.
        regex: the text matches it as a whole, or, cut off after `max_new_tokens`, begins a match;
        json_schema (itself JSON): the same for JSON of this schema. Only one of these and `stop`.
        seed: None: one that depends only on the program's own seed and on where in the program this
        call is, so branches differ and company changes nothing.
        """
        self._begin_reply()
        asked = {"regex": regex, "json_schema": json_schema, "stop": stop or None}
        several = [f"{what} {wish!r}" for what, wish in asked.items() if wish is not None]
        if len(several) > 1:
            raise ValueError(
                f"{' and '.join(several)}: a reply follows one of them, and cut it may not match"
            )
        mask = self._host.texts.mask(regex, json_schema)
        self._calls += 1
        seed = self._host.seed((*self._place, self._calls)) if seed is None else seed
        params = SamplingParams(max_new_tokens, temperature, top_p, stop=stop, seed=seed)
        return self._start(name, self._gen(name, params, mask))

    async def _gen(self, name: str, params: SamplingParams, mask: TokenMask | None) -> str:
        output = await self._ask(name, self.tokens, params, mask)
        ids, logprobs = list(output.token_ids), list(getattr(output, "logprobs", ()))
        ended = bool(ids) and ids[-1] in self._host.texts.eos_ids
        self.tokens += ids[:-1] if ended else ids
        text = getattr(output, "text", "")
        return self._keep(name, Said(text, ids, logprobs, output.finish_reason, {}))

    def select(self, name: str, choices: Sequence[str]) -> Task[str]:
        """Takes the choice that the model finds likeliest, by mean log-probability per token.

        The mean is that of SGLang's default (`token_length_normalized`): a sum would favour short
        choices. The prefix is computed once (a prefill-only request, pinned), then all choices together,
        each at the cost of its own tokens and one more, whose logits say how likely its first one is.
        Each choice is tokenised by itself; among equals the first one wins.
        """
        self._begin_reply()
        if not self.tokens:
            raise ValueError(f"select {name!r}: an empty state says nothing about the first token")
        for choice in choices:
            valid_text(choice, f"select {name!r}: a choice")
        ids = [self._host.texts.ids(choice, self.tokens) for choice in choices]
        if not ids or not all(ids) or len(set(choices)) < len(choices):
            raise ValueError(f"select {name!r}: the choices must be different texts, none empty: {choices}")
        return self._start(name, self._select(name, list(choices), ids))

    async def _select(self, name: str, choices: list[str], ids: list[list[int]]) -> str:
        pin = await self._hint(name)
        try:
            params = SamplingParams(max_new_tokens=0, logprob_start=len(self.tokens))
            calls = [
                self._ask(f"{name} = {choice}", self.tokens + each, params)
                for choice, each in zip(choices, ids, strict=True)
            ]
            logprobs = [list(getattr(await call, "prompt_logprobs", ())) for call in calls]
        finally:
            self._host.unpin(pin)
        means = [statistics.fmean(each) if each else 0.0 for each in logprobs]
        best = max(range(len(choices)), key=means.__getitem__)
        self.tokens += ids[best]
        scores = dict(zip(choices, means, strict=True))
        return self._keep(name, Said(choices[best], ids[best], logprobs[best], "select", scores))

    def fork(self, n: int, *, hint: bool = True) -> Task[Branches]:
        """`n` states that go on from here, each on its own; await it for them.

        hint: the text so far is sent first, as a prefill-only request, and pinned until the branches
        are joined: then it is in the tree before they arrive. Without it, all branches that the first
        step admits compute it side by side, since none finds what another has not finished: with a
        prefix of P tokens, branches of s more and steps of C, that is min(n, ceil(C / (P + s))) times
        (P + s <= C), unless the scheduler's `in_batch_prefix` holds all but one of them back.
        """
        self._settled()
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"a fork has at least one branch, got {n!r}")
        self._calls += 1
        return self._start("fork", self._fork(n, hint, self._calls))

    async def _fork(self, n: int, hint: bool, number: int) -> Branches:
        pin = await self._hint("fork") if hint and self.tokens else None
        states = []
        for index in range(n):
            state = State(self._host, (*self._place, number, index))
            state.tokens, state._role = list(self.tokens), self._role
            state._values, state._said = dict(self._values), dict(self._said)
            states.append(state)
        return Branches(self, states, self._host, pin)

    # ------------------------------------------------------------ results

    def __getitem__(self, name: str) -> Any:
        """The text that `gen` or `select` gave; after a join, the list of the branches' texts."""
        self._settled()
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._fresh[name] = None

    def said(self, name: str) -> Said:
        """A call's text with its ids, log-probabilities and scores."""
        self._settled()
        return self._said[name]

    @property
    def text(self) -> str:
        """The whole text, special tokens included."""
        return self._host.texts.decode(self.tokens)

    # ------------------------------------------------------------ within

    def _settled(self) -> None:
        """ProgramError while the last call is on its way; its error, unless the program has met it."""
        call, self._call = self._open_call, None
        if call is not None and not call.done:
            self._call = call
        if call is not None:
            call.result()

    @property
    def _open_call(self) -> Task[Any] | None:
        """The last call, unless its outcome has reached the program."""
        return None if self._call is None or self._call.heard else self._call

    def _begin_reply(self) -> None:
        self._settled()
        if self._role == "user":
            self.assistant()

    def _start(self, name: str, coroutine: Coroutine[Any, None, T]) -> Task[T]:
        task = self._host.spawn(f"the call {self._named(name)!r}", coroutine)
        self._call = task
        return task

    def _ask(
        self, what: str, prompt: list[int], params: SamplingParams, mask: TokenMask | None = None
    ) -> Waitable[Any]:
        return self._host.ask(self._named(what), list(prompt), params, mask)

    async def _hint(self, what: str) -> Any:
        if not self._host.hints:
            return None
        try:
            await self._ask(f"{what}: prefix hint", self.tokens, SamplingParams(max_new_tokens=0))
        except ProgramError:  # too long, say: it only helps, and whoever asks for more is told
            return None
        return self._host.pin(self.tokens)

    def _named(self, what: str) -> str:
        """With the branch's place: `idea in branch 2.3` is in the 2nd branch's own 3rd branch."""
        branch = ".".join(str(index + 1) for index in self._place[1::2])
        return f"{what} in branch {branch}" if branch else what

    def _keep(self, name: str, said: Said) -> str:
        self._said[name] = said
        self[name] = said.text
        return said.text


class Branches(Sequence[State]):
    """The states of one fork."""

    def __init__(self, parent: State, states: list[State], host: Host, pin: Any) -> None:
        self._parent, self._states, self._host, self._pin = parent, states, host, pin

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> State: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[State]: ...

    def __getitem__(self, index: int | slice) -> State | Sequence[State]:
        return self._states[index]

    def __setitem__(self, index: int, state: State) -> None:
        """For `branches[0] += "text"`, which ends with an assignment; a branch cannot be replaced."""
        if self._states[index] is not state:
            raise TypeError(f"branch {index} can be added to, not replaced by {state!r}")

    def each(self, program: Callable[[State, int], Awaitable[T]]) -> Task[list[T]]:
        """Runs `program(branch, index)` in all branches at once; await it for what they return.

        All run to their end; then the first error, by branch, is raised.
        """
        name = getattr(program, "__name__", "program")  # a functools.partial has none
        tasks = [
            self._host.spawn(f"the branch {state._named(name)!r}", _run(program, state, index))
            for index, state in enumerate(self._states)
        ]
        return self._host.spawn("each()", _all(tasks))

    def join(self) -> Task[None]:
        """Waits for what the branches still have on its way, and lets the prefix go.

        What the branches have named since the fork becomes a list in the parent, in branch order.
        """
        return self._host.spawn("join()", self._join())

    async def _join(self) -> None:
        try:
            calls = [state._open_call for state in self._states]
            await _all([call for call in calls if call is not None])
        finally:
            pin, self._pin = self._pin, None
            self._host.unpin(pin)
        for name in dict.fromkeys(name for state in self._states for name in state._fresh):
            self._parent[name] = [state._values.get(name) for state in self._states]


async def _run(program: Callable[[State, int], Any], state: State, index: int) -> Any:
    found = program(state, index)
    if not isinstance(found, Awaitable):
        raise TypeError(f"what branches run is an `async def` function, not {program!r}")
    return await found


async def _all(tasks: Sequence[Waitable[T]]) -> list[T]:
    """Waits for all of them to end; then their values, or the first error."""
    errors: list[Exception] = []
    values: list[T] = []
    for task in tasks:
        try:
            values.append(await task)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return values


__all__ = ["Branches", "Host", "ProgramError", "Said", "State"]
