"""The notebook widget: one tree with everything around it, to step through and to drive.

    Stepper(recording)      looks: forwards, backwards, by event, step or scene, with a quiz
    Stepper(engine)         also drives: submit prompts, step, evict, flush, and fork from any moment

A Stepper is a position on a recording, moved from Python: `forward`, `back`, `go`, `submit`, `state`,
`sentence`, ... Showing it in a cell makes an `Output`: one small anywidget (static/tree.js and stepper.js,
no network) with the tree, pool map, requests, events and all controls, and a position of its own. It stays
where it was when its cell ran, until it is moved there; all share recording and engine. Where
no JavaScript runs, a PNG of the tree and the step's sentences stand in.

Does not decide anything about caching: it asks the engine and shows frames. Uses no browser storage,
and saves no picture into a notebook but that PNG.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

import anywidget
import traitlets
from IPython import get_ipython

from minirad.cache.eviction import POLICIES as EVICTION
from minirad.config import SamplingParams
from minirad.engine import Engine
from minirad.errors import InvariantError, said, whole
from minirad.model.classroom import corpus
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.snapshot import State
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.why.command import text_for
from viz.draw.dot import DotError
from viz.draw.tree import Options, tree_png, tree_svg
from viz.fork import Found, changeable_policy, evict_by_hand, fork, unmasked, what_if
from viz.notebook.panels import Ledger, event_text, nodes_told, payload
from viz.notebook.reasons import Why
from viz.trace import GRANULARITIES, Decode, Trace, View, decoder_of, ids_as_text, is_fleet, summary_of
from viz.view.quiz import Question, question_for, why

STATIC = Path(__file__).parents[1] / "static"
ANIMATION = 350  # milliseconds
LONGEST_RUN = 20_000  # steps that "run to end" takes before it gives up
MOST_OUTPUTS = 100  # that are kept alive in one kernel
_NODE = re.compile(r'id="n(\d+)"')  # in a drawn tree
_REQUEST = re.compile(r"R\d+(#\d+)?")  # how the engine names requests

Result = TypeVar("Result")


def _esm() -> str:
    """stepper.js with tree.js inside: an anywidget is one module and may import nothing nearby."""
    tree = (STATIC / "tree.js").read_text(encoding="utf-8")
    exported = re.findall(r"^export (?:async )?(?:function|const) (\w+)", tree, re.MULTILINE)
    tree = re.sub(r"^export default .*$", "", tree, flags=re.MULTILINE)
    tree = re.sub(r"^export ", "", tree, flags=re.MULTILINE)
    inlined = f"const tree = (() => {{\n{tree}\nreturn {{ {', '.join(exported)} }};\n}})();"
    own = (STATIC / "stepper.js").read_text(encoding="utf-8")
    line = 'import * as tree from "./tree.js";'
    if line not in own:
        raise RuntimeError(f"stepper.js must begin with {line}")
    return own.replace(line, inlined, 1)


def _css() -> str:
    files = (STATIC / "tree.css", STATIC / "stepper.css")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


class StepperView(anywidget.AnyWidget):
    """What the browser has of one output: its position and its controls, drawn by static/stepper.js."""

    _esm = _esm()
    _css = _css()
    # JSON text: as a dictionary, ipywidgets would search every number in it for binary buffers.
    payload = traitlets.Unicode("{}").tag(sync=True)
    controls = traitlets.Unicode("{}").tag(sync=True)
    height = traitlets.Unicode("430px").tag(sync=True)


class _Session:
    """An engine (or none) and its recording, as one object for all outputs that show them."""

    def __init__(self, engine: Engine | None, recording: Recording, decode: Decode | None) -> None:
        self.engine, self.recording = engine, recording
        self.trace = Trace(recording, decode or _decoder_of_engine(engine))
        self.ledger = Ledger(recording, self.trace.decode)
        self.outputs: weakref.WeakSet[Output] = weakref.WeakSet()

    def tell(self, author: Output | None) -> None:
        """Something may have happened: the others keep their position, and learn how far they can go."""
        for output in list(self.outputs):
            if output is not author:
                output.show_controls()


class Stepper:
    """Steps through a recording, or through an engine that it also drives.

    source: a Recording, or an Engine (which is recorded from now on). recording: an open Recorder of
    that engine, to have its past as well; with None as the source it is only looked at. params: how
    submitted prompts are continued. decode: token ids to text, where the recording names no tokenizer.

    Attributes to set: quiz (going forward asks for the next victim or hit length first), as_chat
    (submitted text becomes a chat message), params. To read: message (the last answer or error),
    question, score (right, asked), shown (what a browser draws here), engine, recording, trace, output
    (where it is on view; None for one that is only moved from Python).
    """

    def __init__(
        self,
        source: Engine | Recording | None,
        *,
        recording: Recorder | None = None,
        granularity: str = "step",
        params: SamplingParams | None = None,
        decode: Decode | None = None,
        height: int = 340,
    ) -> None:
        self.params = params or SamplingParams(max_new_tokens=24)
        self.options = Options()
        self.message = ""
        self.question: Question | None = None
        self.score = [0, 0]  # right, asked
        self.quiz = False
        self.as_chat = True
        self.output: Output | None = None
        self.height = height
        self._decode = decode
        self._submitted = {"agent": 0, "raw": 0}  # by all outputs together: none asks what another has asked
        self._originals: list[tuple[_Session, int]] = []
        self._granularity, self._index = granularity, 0
        self._broke = False  # in the engine's last step
        self._in_press = False  # of a button or key
        engine = source if isinstance(source, Engine) else None
        taped = recording or (Recorder(source) if isinstance(source, Engine) else source)
        if not isinstance(taped, Recording) or not isinstance(source, Engine | Recording | None):
            raise ValueError(f"a stepper takes an Engine or a Recording, got {said(source)}")
        self._session = _Session(engine, taped, decode)
        self.last()

    @property
    def engine(self) -> Engine | None:
        """The engine that it drives, if any."""
        return self._session.engine

    @property
    def recording(self) -> Recording:
        """What it looks at."""
        return self._session.recording

    @property
    def _theirs(self) -> bool:
        """A stream of other servers: it names no victims and asks nothing."""
        return is_fleet(self.recording.header["start"])

    @property
    def trace(self) -> Trace:
        """The recording with random access to any position."""
        return self._session.trace

    # ------------------------------------------------------------ where we are

    @property
    def index(self) -> int:
        """The position on view: 0 is the start, k the moment after the k-th event, step or scene."""
        return min(self._index, self.count - 1)  # a title that is given later may join scenes

    @property
    def count(self) -> int:
        """How many positions there are."""
        return self.trace.count(self._granularity)

    @property
    def view(self) -> View:
        """The position on view, with its state, events and node statuses."""
        return self.trace.view(self._granularity, self.index)

    @property
    def state(self) -> State:
        """The engine's whole state at the position on view, in the shape of `Engine.snapshot()`."""
        return self.view.state

    @property
    def sentence(self) -> str:
        """What happened, in one sentence."""
        return summary_of(self.view)[1]

    @property
    def at_present(self) -> bool:
        """Nothing newer is recorded than what is on view."""
        return self.index == self.count - 1

    @property
    def granularity(self) -> str:
        """ "event", "step" or "scene"; setting it stays at the same moment."""
        return self._granularity

    @granularity.setter
    def granularity(self, name: str) -> None:
        index = self.trace.convert(self._granularity, self.index, name)
        self._granularity, self.question = name, None
        self.go(index)

    # ------------------------------------------------------------ moving

    def go(self, index: int) -> None:
        """Shows a position; ValueError if there is none with that number."""
        if not 0 <= whole("the position", index) < self.count:
            raise ValueError(
                f"there is no {self._granularity} {index}: positions go from 0 to {self.count - 1}"
            )
        self._index, self.message, self.question = index, "", None
        self.refresh()

    def forward(self) -> None:
        """The next position. At the present, an engine with work takes a step; in a quiz, it asks first."""
        if self.at_present:
            if not self._can_step:
                self._say("Nothing is left to do." if self.engine else "This is the end of the recording.")
                return
            self._engine_step()
        target = min(self.index + 1, self.count - 1)
        if self.quiz and self.question is None:
            self.question = question_for(self.trace, self._granularity, target)
            if self.question is not None:
                self._say("")
                return
        self.go(target)

    def back(self) -> None:
        """The position before this one."""
        if self.index:
            self.go(self.index - 1)

    def first(self) -> None:
        """The start."""
        self.go(0)

    def last(self) -> None:
        """The present."""
        self.go(self.count - 1)

    def jump(self, kind: str, direction: int = 1) -> bool:
        """To the next (or, -1, the one before) "split", "evict" or "retract"; False if there is none.

        In another server's stream there is "gap" as well. ValueError for another kind.
        """
        known = self.trace.marks()
        if kind not in known:
            raise ValueError(f"there is nothing called {kind!r} to jump to: {', '.join(known)}")
        index = self.trace.next_mark(self._granularity, self.index, kind, direction)
        if index is None:
            self._say(f"There is no {'further' if direction > 0 else 'earlier'} {_MARK_WORDS[kind]}.")
            return False
        self.go(index)
        return True

    # ------------------------------------------------------------ quiz and reasons

    def answer(self, given: str) -> bool:
        """Answers the question on view, shows what happens, and says whether it was right."""
        question = self.question
        if question is None:
            self._say("There is no question now.")
            return False
        right = question.check(given)
        self.score[0] += right
        self.score[1] += 1
        self.go(min(self.index + 1, self.count - 1))
        word = "Right" if right else f"Not quite: it is {question.answer}"
        self._say(f"{word}. {question.explanation}. ({self.score[0]} of {self.score[1]} right)")
        return right

    @overload
    def why(self) -> list[str]: ...
    @overload
    def why(self, asked: str | Sequence[int], *, chat: bool | None = None, namespace: Any = None) -> Why: ...

    def why(
        self, asked: str | Sequence[int] | None = None, *, chat: bool | None = None, namespace: Any = None
    ) -> list[str] | Why:
        """Why the victims of this position had to go; or why a request or a prompt hits no further.

        asked: a request ("R7", of its admission; "R7#2" after a retraction), or a prompt as text or token
        ids: what it would find at the position on view, of a stream on each rank. The answer shows its
        sentence and has its `data`. chat: as in `submit`; a recording without an engine takes a text as it
        is. namespace: the prompt's, by its number (of a stream its name). ValueError for a request that was
        not admitted and for an empty prompt.
        """
        if asked is None:
            removed = self._theirs and any(event.mark == "evict" for event in self.view.events)
            none = (
                "A stream tells what a server removed, and not why."
                if removed
                else "Nothing was evicted here."
            )
            return why(self.trace, self.view) or [none]
        reasons = self._session.ledger.reasons
        if isinstance(asked, str) and (_REQUEST.fullmatch(asked) or reasons.asked(asked)):
            return reasons.of(asked)
        return reasons.now(self._tokens(asked, chat), self.view.frame, namespace)

    def _now(self, text: str) -> Why:
        """What a prompt would find at the present, whatever is on view."""
        reasons, frames = self._session.ledger.reasons, len(self.recording.frames)
        return reasons.now(self._tokens(text, None), frames - 1)

    def _tokens(self, asked: str | Sequence[int], chat: bool | None) -> Sequence[int]:
        """A prompt as ids, by the engine's tokenizer or the one that the recording names."""
        if not isinstance(asked, str):
            return asked
        prompt = self.prompt(asked, chat=chat)
        if not isinstance(prompt, str):
            return prompt  # type: ignore[no-any-return]
        if self.engine is not None:
            return [int(token) for token in self.engine.encode(prompt)]
        text = text_for(None, self.recording.header)
        if text is None:
            raise ValueError("this recording has no tokenizer here: ask with token ids, not with a text")
        return text.encode(prompt)

    # ------------------------------------------------------------ driving

    def submit(
        self, text: str, *, chat: bool | None = None, system: str = corpus.SYSTEM_PROMPT
    ) -> str | None:
        """Queues a prompt at the present and shows it waiting; its id, or None if it was refused.

        chat: wrap the text as a user's message (None: as the widget's box says). A refused prompt (too
        long, say) changes nothing; the reason is in `message`.
        """
        if not isinstance(text, str):
            raise ValueError(f"a prompt is a text here, got {said(text)}; engine.add_request takes token ids")
        if not text.strip():
            self._refuse("The prompt is empty: type something first.")
            return None
        prompt = self.prompt(text, chat=chat, system=system)
        was_past = not self.at_present
        request = self._guarded(lambda engine: engine.add_request(prompt, self.params))
        if request is not None:
            self._arrived(f"{request} went to the present." if was_past else "")
        return request

    def agent(self) -> str | None:
        """Submits a question behind the long prompt that all agents share."""
        return self.submit(self._next_question("agent"), chat=True, system=corpus.AGENT_PROMPT)

    def raw(self) -> str | None:
        """Submits words that share nothing with anything."""
        number = self._submitted["raw"] = self._submitted["raw"] + 1
        words = corpus.WORDS[number * 7 % 11 :] + corpus.THINGS[number * 5 % 13 :]
        return self.submit(f"{number} {' '.join(words[number % 5 :: 2][:22])}", chat=False)

    def _next_question(self, kind: str) -> str:
        number = self._submitted[kind] = self._submitted[kind] + 1
        return corpus.QUESTIONS[number * 7 % len(corpus.QUESTIONS)]

    def step(self) -> None:
        """One step of the engine, shown."""
        if not self.run(1):
            self._say("Nothing is left to do.")

    def run(self, steps: int = LONGEST_RUN) -> int:
        """Steps until nothing is left to do (or so many steps); how many were taken."""
        taken, self._broke = 0, False
        try:
            while taken < steps and self.engine is not None and self.engine.has_work:
                self._engine_step()
                taken += 1
        finally:
            if not self._broke:
                self.last()
        return taken

    def _engine_step(self) -> None:
        """A tree that breaks in it is shown as it then is: that picture tells more than a traceback."""
        assert self.engine is not None
        self._broke = False
        try:
            self.engine.step()
        except InvariantError as error:
            self._broke = True
            self._arrived(f"This step broke the tree: {error}")
            raise

    def evict(self, tokens: int) -> int:
        """Evicts at least so many unlocked cached tokens; how many went."""

        def some(engine: Engine) -> int:
            return evict_by_hand(engine, whole("tokens to evict", tokens, 1))

        gone = self._guarded(some)
        if gone is not None:
            self._arrived("" if gone else "Nothing is unlocked: no token can be evicted.")
        return gone or 0

    def flush(self) -> bool:
        """Empties the cache; refused while requests live."""

        def empty(engine: Engine) -> bool:
            engine.flush_cache()
            return True

        done = self._guarded(empty)
        if done:
            self._arrived("")
        return bool(done)

    def set_policy(self, name: str) -> bool:
        """From now on the engine evicts by another policy; False (and why, in `message`) if it cannot."""

        def change(engine: Engine) -> bool:
            if name == changeable_policy(engine):
                raise ValueError(f"The eviction policy is {name} already.")
            engine.set_eviction_policy(name)
            return True

        done = self._guarded(change)
        if done:
            self._arrived("")
        return bool(done)

    def what_if(self, text: str, *, chat: bool | None = None) -> tuple[int, int]:
        """(tokens of a prompt that need not be computed if it came now, all its tokens): whole pages, all but
        one at most, also those that would be loaded back. The engine is not touched."""
        found, total = self._would_find(text, chat)
        return found.hit + found.back, total

    def _would_find(self, text: str, chat: bool | None = None) -> tuple[Found, int]:
        if self.engine is None:
            raise ValueError("this stepper has a recording, not an engine")
        tokens = self.engine.encode(self.prompt(text, chat=chat))
        return what_if(self.engine, tokens.tolist()), len(tokens)

    def prompt(self, text: str, *, chat: bool | None = None, system: str = corpus.SYSTEM_PROMPT) -> Any:
        """What a text becomes: a chat with the system prompt, or itself (token ids without a tokenizer)."""
        has_tokenizer = self.engine is not None and _tokenizer(self.engine) is not None
        if not has_tokenizer and re.fullmatch(r"[\d\s]*", text):
            return [int(number) for number in text.split()]
        if not (self.as_chat if chat is None else chat) or not has_tokenizer:
            return text
        assert self.engine is not None
        messages = [corpus.message("system", system), corpus.message("user", text)]
        tokenizer = _tokenizer(self.engine)
        if not getattr(tokenizer, "chat_template", None):
            return corpus.chat_text(messages, True)
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    # ------------------------------------------------------------ forks

    def fork(self, **config_changes: Any) -> bool:
        """From here on, with another policy or pool: the requests so far on a new engine.

        False (and nothing changed) if that cannot be; `message` says why. `original` goes back.
        """
        if self.engine is None:
            self._refuse("Only an engine can be forked, this is a recording: use viz.stepper.fork.")
            return False
        engine = self.engine
        made = self._guarded(lambda _: self._forked(engine, config_changes))
        if made is None:
            return False
        free = unmasked(self.recording.frames[: self.view.frame + 1])
        self._originals.append((self._session, self.view.frame))
        self._enter(_Session(made[0], made[1], self._decode))
        self.last()
        changes = ", ".join(f"{name} {value}" for name, value in config_changes.items()) or "nothing changed"
        self._say(f"Forked at step {self.view.step} with {changes}.{free and f' {free}'}")
        return True

    def _forked(self, engine: Engine, changes: dict[str, Any]) -> tuple[Engine, Recorder]:
        if not changeable_policy(engine):
            raise ValueError(
                f"this engine runs on a tree of its own ({type(engine.cache).__name__}): a fork would run on "
                "minirad's, and show another tree than yours. Make a new engine with a new tree instead."
            )
        tokenizer = _tokenizer(engine)
        return fork(self.recording, self.view.frame, model=engine.model, tokenizer=tokenizer, **changes)

    def original(self) -> bool:
        """Back to the engine that was forked, at the moment where that happened; False if none was."""
        if not self._originals:
            self._say("This is the original.")
            return False
        session, frame = self._originals.pop()
        self._enter(session)
        self.go(self.trace.position_of(self._granularity, frame))
        return True

    def _enter(self, session: _Session) -> None:
        """Looks at another recording. Other outputs stay with the one that they have."""
        if self.output is not None:
            self._session.outputs.discard(self.output)
            session.outputs.add(self.output)
        self._session, self.question = session, None

    # ------------------------------------------------------------ how

    @property
    def _can_step(self) -> bool:
        return self.engine is not None and self.engine.has_work

    def _guarded(self, act: Callable[[Engine], Result]) -> Result | None:
        """Does something with the engine; a refusal becomes the message on view, and None comes back."""
        if self.engine is None:
            self._refuse("This is a recording: there is no engine to drive.")
            return None
        try:
            return act(self.engine)
        except ValueError as error:  # a caller's mistake: its text says all
            self._refuse(str(error))
            return None

    def _refuse(self, message: str) -> None:
        """Also printed below a cell that asked for it: what the cell does next may move on, and hide it."""
        self._say(message)
        if not self._in_press:
            print(message)

    def pressed(self, act: Callable[[], Any]) -> None:
        """What a button or key does. Any error is shown as the message: the picture must stay."""
        self._in_press = True
        try:
            act()
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")
        finally:
            self._in_press = False

    def _arrived(self, message: str) -> None:
        """Shows the present, with what happened since the last step as a position of its own."""
        if isinstance(self.recording, Recorder):
            self.recording.cut()
        self.last()
        if message:
            self._say(message)

    def _say(self, message: str) -> None:
        self.message = message
        self.refresh()

    def refresh(self) -> None:
        """Draws the position on view again, where it is shown."""
        if self.output is not None:
            self.output.show()
        self._session.tell(self.output)

    # ------------------------------------------------------------ in a notebook

    @property
    def shown(self) -> dict[str, Any]:
        """What a browser draws of the position on view, and the message."""
        message = self.message
        try:
            svg = tree_svg(self.view, self.trace.decode, self.options)
        except DotError as error:
            svg, message = "", str(error)
        around = payload(self.trace, self.view, self._session.ledger)
        if "ranks" in around:
            drawn = (int(number) for number in _NODE.findall(svg))
            around["ranks"]["nodes"] = nodes_told(self.view, drawn)
        return {**around, "svg": svg, "ms": ANIMATION, "message": message}

    def display(self) -> Output:
        """A picture at this position that is moved on its own from now on; showing it in a cell makes one.

        To put it into a box of widgets, take its `model`.
        """
        twin = copy.copy(self)
        twin.score, twin._originals = list(self.score), list(self._originals)
        twin.output = Output(twin)
        self._session.outputs.add(twin.output)
        twin.refresh()
        return twin.output

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle, about = self.display().model._repr_mimebundle_(**kwargs) or ({}, {})
        bundle["text/plain"] = repr(self)
        try:
            bundle["image/png"] = self.png()
        except DotError as error:
            bundle["text/plain"] += f"\n({error})"
        return bundle, about

    # ------------------------------------------------------------ without JavaScript

    def sentences(self) -> list[str]:
        """Every event of the position on view, in words."""
        return [event_text(event, self._session.ledger.reasons) for event in self.view.events]

    def __repr__(self) -> str:
        lines = self.sentences()
        more = [f"... and {len(lines) - 40} more"] if len(lines) > 40 else []
        body = "".join(f"\n  {line}" for line in [*lines[:40], *more])
        return f"{self.view.title}: {self.sentence}.{body}"

    def png(self) -> bytes:
        """The tree on view as a picture."""
        return tree_png(self.view, self.trace.decode, self.options)


_MARK_WORDS = {"split": "split", "evict": "eviction", "retract": "retraction", "gap": "gap"}


def _tokenizer(engine: Engine) -> Any:
    """The engine's tokenizer, or None where it has none."""
    try:
        return engine.tokenizer
    except ValueError:
        return None


def _decoder_of_engine(engine: Engine | None) -> Decode | None:
    """For an engine with a ready-made model, whose recording cannot say where its tokenizer is."""
    if engine is None or engine.model_path is not None:
        return None
    tokenizer = _tokenizer(engine)
    return ids_as_text if tokenizer is None else decoder_of(tokenizer)


class Output:
    """One picture in a notebook with its controls: a position of its own on a recording that others share.

    stepper: what it shows; moving that moves this picture and no other. model: the anywidget. cell, run:
    where it was made, as the notebook names it.
    """

    _alive: ClassVar[list[Output]] = []  # of this kernel: a cell may show another stepper in each run

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.model = StepperView(height=f"{stepper.height}px")
        self.model.on_msg(lambda _, message, __: self.received(message))
        self._typed, self._taken = "", 0  # the prompt in the box; how many were accepted
        self._drawn, self._at = 0, stepper.index
        self.cell, self.run = _running_cell()
        self._live_on()

    # ------------------------------------------------------------ to the browser

    def show(self) -> None:
        """Sends the position and the controls."""
        moved, self._at = self.stepper.index - self._at, self.stepper.index
        self._drawn += 1  # so that the same picture drawn again is an answer, too
        with self.model.hold_sync():
            self.model.payload = _compact({**self.stepper.shown, "drawn": self._drawn})
            self.show_controls()
        ahead = threading.Thread(target=self._draw_ahead, args=(self._drawn, self._at, moved), daemon=True)
        ahead.start()

    def show_controls(self) -> None:
        """Sends what can be pressed now, the position left as it is."""
        self.model.controls = _compact(self.controls())

    def controls(self) -> dict[str, Any]:
        """What can be pressed, chosen and answered at this position; `engine` is None for a recording."""
        step = self.stepper
        marks, question = step.trace.marks(), step.question
        asked = None if question is None else {"text": question.text, "choices": list(question.choices)}
        return {
            "index": step.index, "count": step.count,
            "granularity": step.granularity, "granularities": list(GRANULARITIES),
            "back": step.index > 0, "forward": not step.at_present or step._can_step,
            "jumps": [[kind, _MARK_WORDS[kind], bool(frames)] for kind, frames in marks.items()],
            "quiz": None if step._theirs else step.quiz, "question": asked,
            "engine": None if step.engine is None else self._engine_controls(step.engine),
        }  # fmt: skip

    def _engine_controls(self, engine: Engine) -> dict[str, Any]:
        step = self.stepper
        policy = changeable_policy(engine)
        hits, refused = self._hits()
        present = "The past is on view: a prompt goes to the present, or fork from here."
        return {
            "chat": step.as_chat, "taken": self._taken, "hits": hits, "refused": refused,
            "because": "" if refused or not hits else self._because(),
            "step": step._can_step, "original": bool(step._originals),
            "policies": list(EVICTION) if policy else ["its own"],
            "policy": policy or None,
            "present": "" if step.at_present else present,
            "fork": self._fork_fields(engine),
        }  # fmt: skip

    def _fork_fields(self, engine: Engine) -> list[list[Any]]:
        """What may be changed: its name, its label, the choices, and what it is at the moment on view."""
        config, there = engine.config, self.stepper.state["tree"]["eviction_policy"]
        return [
            [
                "eviction_policy",
                "evict by",
                list(EVICTION),
                there if there in EVICTION else config.eviction_policy,
            ],
            ["schedule_policy", "serve by", list(SCHEDULE), config.schedule_policy],
            ["kv_tokens", "pool", None, config.kv_tokens],
            ["page_size", "page", None, config.page_size],
        ]

    def _hits(self) -> tuple[str, bool]:
        """What the prompt in the box would hit, or why it is refused (True)."""
        if not self._typed:
            return "", False
        try:
            (hits, back), total = self.stepper._would_find(self._typed)
        except ValueError as error:
            return str(error), True
        except Exception as error:  # of a student's tree: this output says it, the others go on
            return f"{type(error).__name__}: {error}", True
        more = f", {back} more would be loaded back from the host" if back else ""
        return f"{hits} of {total} tokens would hit{more}", False

    def _because(self) -> str:
        """Why the prompt in the box would hit no further; "" where the memory and the engine do not agree."""
        step = self.stepper
        try:
            (answer,) = step._now(self._typed).answers
            (hits, _), _ = step._would_find(self._typed)
        except Exception:  # of a student's tree: its hits are shown, without a reason
            return ""
        return step._session.ledger.reasons.clauses(answer) if answer.cached == hits else ""

    def _draw_ahead(self, drawn: int, index: int, moved: int) -> None:
        """Lays out the neighbours of a position, so that the next click finds its picture ready."""
        step = self.stepper
        trace, granularity, options = step.trace, step.granularity, step.options
        # A slider that is being dragged is elsewhere in a moment: then this would only be in the way.
        time.sleep(0.25 if abs(moved) > 1 else 0.03)
        direction = 1 if moved >= 0 else -1
        for near in (index + direction, index - direction):
            if drawn != self._drawn:
                return  # somewhere else by now
            with contextlib.suppress(DotError, ValueError):
                tree_svg(trace.view(granularity, near), trace.decode, options)

    # ------------------------------------------------------------ from the browser

    def received(self, message: Any) -> None:
        """What a button, key or box asks for: {"do": name, "value": ...}. Nonsense is left alone."""
        name = message.get("do") if isinstance(message, dict) else None
        kind, act = self._acts().get(name, (None, None)) if isinstance(name, str) else (None, None)
        if act is None or type(message.get("value")) is not kind:
            return
        value = message.get("value")
        self.stepper.pressed(act if value is None else lambda: act(value))

    def _acts(self) -> dict[str, tuple[type, Callable[..., Any]]]:
        """What can be asked for: the type of the value that comes with it, and what is done."""
        step, none = self.stepper, type(None)
        plain = (step.forward, step.back, step.first, step.last, step.agent, step.raw, step.step, step.run)
        return {
            **{act.__name__: (none, act) for act in (*plain, step.flush, step.original)},
            "go": (int, step.go), "granularity": (str, self._granularity), "jump": (str, step.jump),
            "why": (none, self._why), "quiz": (bool, self._quiz), "answer": (str, step.answer),
            "type": (str, self._type), "chat": (bool, self._chat), "submit": (str, self._submit),
            "evict": (int, step.evict), "policy": (str, step.set_policy), "fork": (dict, self._fork),
            "open": (int, self._open),
        }  # fmt: skip

    def _granularity(self, name: str) -> None:
        self.stepper.granularity = name

    def _why(self) -> None:
        self.stepper._say("\n".join(self.stepper.why()))

    def _quiz(self, on: bool) -> None:
        self.stepper.quiz, self.stepper.question = on, None
        self.stepper._say("Go forward: some steps will ask you first." if on else "")

    def _type(self, text: str) -> None:
        self._typed = text
        self.show_controls()

    def _chat(self, on: bool) -> None:
        self.stepper.as_chat = on
        self.show_controls()

    def _submit(self, text: str) -> None:
        if self.stepper.submit(text) is not None:
            self._typed, self._taken = "", self._taken + 1
            self.show_controls()

    def _fork(self, wanted: dict[str, Any]) -> None:
        engine = self.stepper.engine
        known = {} if engine is None else {name: value for name, _, _, value in self._fork_fields(engine)}
        self.stepper.fork(**{name: new for name, new in wanted.items() if new != known.get(name)})

    def _open(self, node: int) -> None:
        self.stepper.options = Options(opened=frozenset(self.stepper.options.opened) ^ {node})
        self.stepper.refresh()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Takes the picture off the page; the stepper stays and can be displayed again."""
        self.stepper._session.outputs.discard(self)
        self.stepper.output = None
        self._alive[:] = [other for other in self._alive if other is not self]
        self._drawn += 1  # nothing is laid out ahead any more
        self.model.layout.close()
        self.model.close()

    def _live_on(self) -> None:
        """Ends the outputs of this cell's runs before: ipywidgets would keep every model for ever."""
        self._alive.append(self)
        gone = [old for old in self._alive if old.cell == self.cell != "" and old.run != self.run]
        for old in gone:
            old.close()
        for old in self._alive[:-MOST_OUTPUTS]:
            old.close()


def _running_cell() -> tuple[str, str]:
    """(cell, run) of the cell that runs now; the cell is "" where the notebook does not name it."""
    parent = getattr(get_ipython(), "parent_header", None) or {}
    return str(parent.get("metadata", {}).get("cellId", "")), str(parent.get("header", {}).get("msg_id", ""))


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)
