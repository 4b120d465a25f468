"""The notebook widget: one tree with everything around it, to step through and to drive.

    Stepper(recording)      looks: forwards, backwards, by event, step or scene, with a quiz
    Stepper(engine)         also drives: submit prompts, step, evict, flush, and fork from any moment

ipywidgets hold the controls; one anywidget (static/tree.js and stepper.js, no network) holds the tree,
pool map, requests and events, and lights what belongs together. Everything also works from Python:
`forward`, `back`, `go`, `submit`, `state`, `sentence`, ... Where no JavaScript runs, a PNG of the tree
and the step's sentences stand in.

Does not decide anything about caching: it asks the engine and shows frames. Uses no browser storage,
and saves no picture into a notebook but that PNG.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets

from minirad.cache.radix_cache import RadixCache
from minirad.config import SamplingParams
from minirad.engine import Engine
from minirad.errors import InvariantError
from minirad.model.classroom import corpus
from minirad.record import Recorder, Recording, State
from viz.dot import DotError
from viz.fork import evict_by_hand, fork
from viz.panels import Ledger, payload
from viz.quiz import Question, question_for, why
from viz.trace import GRANULARITIES, Decode, Trace, View, decoder_of, ids_as_text, summary
from viz.tree import Options, tree_png, tree_svg

__all__ = ["Stepper", "fork"]

STATIC = Path(__file__).parent / "static"
ANIMATION = 350  # milliseconds
LONGEST_RUN = 20_000  # steps that "run to end" takes before it gives up


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
    """Tree, pool map, requests and events of one position, drawn by static/stepper.js."""

    _esm = _esm()
    _css = _css()
    # JSON text: as a dictionary, ipywidgets would search every number in it for binary buffers.
    payload = traitlets.Unicode("{}").tag(sync=True)
    height = traitlets.Unicode("430px").tag(sync=True)


class Stepper:
    """Steps through a recording, or through an engine that it also drives.

    source: a Recording, or an Engine (which is recorded from now on). recording: an open Recorder of
    that engine, to have its past as well. params: how submitted prompts are continued. decode: token
    ids to text, where the recording names no tokenizer.

    Attributes to set: quiz (going forward asks for the next victim or hit length first), as_chat
    (submitted text becomes a chat message), params. To read: message (the last answer or error),
    question, score (right, asked), shown (what the browser draws), engine, recording, trace, widget
    (the ipywidgets box).
    """

    def __init__(
        self,
        source: Engine | Recording,
        *,
        recording: Recorder | None = None,
        granularity: str = "step",
        params: SamplingParams | None = None,
        decode: Decode | None = None,
        height: int = 340,
    ) -> None:
        self.engine: Engine | None = None if isinstance(source, Recording) else source
        self.params = params or SamplingParams(max_new_tokens=24)
        self.options = Options()
        self.message = ""
        self.question: Question | None = None
        self.score = [0, 0]  # right, asked
        self._decode = decode
        self._submitted = {"agent": 0, "raw": 0}
        self._originals: list[tuple[Engine, Recording, int]] = []
        self._granularity, self._index = granularity, 0
        self.quiz = False
        self.as_chat = True
        self.controls: _Controls | None = None
        self.shown: dict[str, Any] = {}
        self._ticket, self._direction, self._jumped = 0, 1, False
        self._broke = False  # in the engine's last step
        self.view_widget = StepperView(height=f"{height}px")
        self.view_widget.on_msg(self._from_browser)
        self._open(recording or (Recorder(source) if isinstance(source, Engine) else source))
        self.controls = _Controls(self)
        self.widget = self.controls.box
        self.last()

    def _open(self, recording: Recording) -> None:
        self.recording = recording
        decode = self._decode or _decoder_of_engine(self.engine)
        self.trace = Trace(recording, decode)
        self.ledger = Ledger(recording, self.trace.decode)
        self.question = None

    # ------------------------------------------------------------ where we are

    @property
    def index(self) -> int:
        """The position on view: 0 is the start, k the moment after the k-th event, step or scene."""
        return self._index

    @property
    def count(self) -> int:
        """How many positions there are."""
        return self.trace.count(self._granularity)

    @property
    def view(self) -> View:
        """The position on view, with its state, events and node statuses."""
        return self.trace.view(self._granularity, self._index)

    @property
    def state(self) -> State:
        """The engine's whole state at the position on view, in the shape of `Engine.snapshot()`."""
        return self.view.state

    @property
    def sentence(self) -> str:
        """What happened, in one sentence."""
        return summary(self.view.events)[1]

    @property
    def at_present(self) -> bool:
        """Nothing newer is recorded than what is on view."""
        return self._index == self.count - 1

    @property
    def granularity(self) -> str:
        """ "event", "step" or "scene"; setting it stays at the same moment."""
        return self._granularity

    @granularity.setter
    def granularity(self, name: str) -> None:
        index = self.trace.convert(self._granularity, self._index, name)
        self._granularity, self.question = name, None
        self.go(index)

    # ------------------------------------------------------------ moving

    def go(self, index: int) -> None:
        """Shows a position; ValueError if there is none with that number."""
        if not 0 <= index < self.count:
            raise ValueError(
                f"there is no {self._granularity} {index}: positions go from 0 to {self.count - 1}"
            )
        self._direction, self._jumped = 1 if index >= self._index else -1, abs(index - self._index) > 1
        self._index, self.message, self.question = index, "", None
        self.refresh()

    def forward(self) -> None:
        """The next position. At the present, an engine with work takes a step; in a quiz, it asks first."""
        if self.at_present:
            if not self._can_step:
                self._say("Nothing is left to do." if self.engine else "This is the end of the recording.")
                return
            self._engine_step()
        target = min(self._index + 1, self.count - 1)
        if self.quiz and self.question is None:
            self.question = question_for(self.trace, self._granularity, target)
            if self.question is not None:
                self._say("")
                return
        self.go(target)

    def back(self) -> None:
        """The position before this one."""
        if self._index:
            self.go(self._index - 1)

    def first(self) -> None:
        """The start."""
        self.go(0)

    def last(self) -> None:
        """The present."""
        self.go(self.count - 1)

    def jump(self, kind: str, direction: int = 1) -> bool:
        """To the next (or, -1, the one before) "split", "evict" or "retract"; False if there is none.

        ValueError for another kind.
        """
        if kind not in _MARK_WORDS:
            raise ValueError(f"there is nothing called {kind!r} to jump to: {', '.join(_MARK_WORDS)}")
        index = self.trace.next_mark(self._granularity, self._index, kind, direction)
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
        self.go(min(self._index + 1, self.count - 1))
        word = "Right" if right else f"Not quite: it is {question.answer}"
        self._say(f"{word}. {question.explanation}. ({self.score[0]} of {self.score[1]} right)")
        return right

    def why(self) -> list[str]:
        """Why the victims of this position had to go: the policy's key, and the runner-up's."""
        return why(self.trace, self.view) or ["Nothing was evicted here."]

    # ------------------------------------------------------------ driving

    def submit(
        self, text: str, *, chat: bool | None = None, system: str = corpus.SYSTEM_PROMPT
    ) -> str | None:
        """Queues a prompt at the present and shows it waiting; its id, or None if it was refused.

        chat: wrap the text as a user's message (None: as the widget's box says). A refused prompt (too
        long, say) changes nothing; the reason is in `message`.
        """
        if not text.strip():
            self._say("The prompt is empty: type something first.")
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
        gone = self._guarded(lambda engine: evict_by_hand(engine, tokens))
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
            if name == getattr(engine.cache, "eviction_policy", ""):
                raise ValueError(f"The eviction policy is {name} already.")
            engine.set_eviction_policy(name)
            return True

        done = self._guarded(change)
        if done:
            self._arrived("")
        return bool(done)

    def what_if(self, text: str, *, chat: bool | None = None) -> tuple[int, int]:
        """(tokens of a prompt that would hit now, all its tokens). The engine is not touched."""
        if self.engine is None:
            raise ValueError("this stepper has a recording, not an engine")
        tokens = self.engine.encode(self.prompt(text, chat=chat))
        return (self.engine.peek(tokens) if len(tokens) else 0), len(tokens)

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
            self._say("Only an engine can be forked, this is a recording: use viz.stepper.fork.")
            return False
        engine = self.engine
        made = self._guarded(lambda _: self._forked(engine, config_changes))
        if made is None:
            return False
        self._originals.append((engine, self.recording, self.view.frame))
        self.engine = made[0]
        self._open(made[1])
        self.last()
        changes = ", ".join(f"{name} {value}" for name, value in config_changes.items()) or "nothing changed"
        self._say(f"Forked at step {self.view.step} with {changes}.")
        return True

    def _forked(self, engine: Engine, changes: dict[str, Any]) -> tuple[Engine, Recorder]:
        if not isinstance(engine.cache, RadixCache):
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
        self.engine, recording, frame = self._originals.pop()
        self._open(recording)
        self.go(self.trace.position_of(self._granularity, frame))
        return True

    # ------------------------------------------------------------ how

    @property
    def _can_step(self) -> bool:
        return self.engine is not None and self.engine.has_work

    def _guarded(self, act: Callable[[Engine], Any]) -> Any:
        """Does something with the engine; a refusal becomes the message on view, and None comes back."""
        if self.engine is None:
            self._say("This is a recording: there is no engine to drive.")
            return None
        try:
            return act(self.engine)
        except ValueError as error:  # a caller's mistake: its text says all
            self._say(str(error))
            return None

    def pressed(self, act: Callable[[], Any]) -> None:
        """What a button or key does. Any error is shown as the message: the picture must stay."""
        try:
            act()
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")

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

    def refresh(self, ms: int = ANIMATION) -> None:
        """Draws the position on view again."""
        view = self.view
        try:
            svg = tree_svg(view, self.trace.decode, self.options)
        except DotError as error:
            svg, self.message = "", str(error)
        around = payload(self.trace, view, self.ledger)
        self.shown = {**around, "svg": svg, "ms": ms, "message": self.message}
        self.view_widget.payload = json.dumps(self.shown, separators=(",", ":"), ensure_ascii=False)
        if self.controls is not None:
            self.controls.show()
        self._ticket += 1
        threading.Thread(target=self._draw_ahead, args=(self._ticket, self._index), daemon=True).start()

    def _draw_ahead(self, ticket: int, index: int) -> None:
        """Lays out the neighbours of a position, so that the next click finds its picture ready."""
        trace, granularity, options = self.trace, self._granularity, self.options
        # Whoever drags the slider is elsewhere in a moment: then this would only be in the way.
        time.sleep(0.25 if self._jumped else 0.03)
        for near in (index + self._direction, index - self._direction):
            if ticket != self._ticket:
                return  # somewhere else by now
            with contextlib.suppress(DotError, ValueError):
                tree_svg(trace.view(granularity, near), trace.decode, options)

    def _from_browser(self, _: Any, content: Any, __: Any) -> None:
        """Keys pressed and folded subtrees opened in the picture."""
        kind = content.get("kind") if isinstance(content, dict) else None
        moves = {"forward": self.forward, "back": self.back, "first": self.first, "last": self.last}
        if kind in moves:
            self.pressed(moves[kind])
        elif kind == "open" and isinstance(content.get("node"), int):
            opened = self.options.opened ^ {content["node"]}
            self.options = Options(opened=frozenset(opened))
            self.refresh()
        elif kind == "play":
            self.toggle_play()

    def toggle_play(self) -> None:
        """Starts or pauses playing."""
        if self.controls is not None:
            self.controls.play.playing = not self.controls.play.playing

    # ------------------------------------------------------------ without JavaScript

    def sentences(self) -> list[str]:
        """Every event of the position on view, in words."""
        return [event.describe() for event in self.view.events]

    def __repr__(self) -> str:
        lines = self.sentences()
        more = [f"... and {len(lines) - 40} more"] if len(lines) > 40 else []
        body = "".join(f"\n  {line}" for line in [*lines[:40], *more])
        return f"{self.view.title}: {self.sentence}.{body}"

    def png(self) -> bytes:
        """The tree on view as a picture."""
        return tree_png(self.view, self.trace.decode, self.options)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = dict(self.widget._repr_mimebundle_(**kwargs) or {})
        bundle["text/plain"] = repr(self)
        try:
            bundle["image/png"] = self.png()
        except DotError as error:
            bundle["text/plain"] += f"\n({error})"
        return bundle


_MARK_WORDS = {"split": "split", "evict": "eviction", "retract": "retraction"}


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


class _Controls:
    """The buttons, boxes and sliders around the picture. Each only calls a method of the stepper."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._quiet = False
        rows = [self._moving(), self._jumping(), self._asking(), stepper.view_widget]
        if stepper.engine is not None:
            rows += [self._prompting(), self._driving(), self._forking()]
        self.box = widgets.VBox(rows)

    def _button(
        self, text: str, tip: str, act: Callable[[], Any], *, style: str = "", width: str = "60px"
    ) -> widgets.Button:
        button = widgets.Button(description=text, tooltip=tip, button_style=style, layout=_width(width))
        button.on_click(lambda _: self.stepper.pressed(act))
        return button

    # ------------------------------------------------------------ rows

    def _moving(self) -> widgets.Widget:
        step = self.stepper
        self.first = self._button("|◀", "first (Home)", step.first, width="40px")
        self.back = self._button("◀", "back (left arrow)", step.back, width="40px")
        self.forward = self._button("▶", "forward (right arrow)", step.forward, width="40px")
        self.last = self._button("▶|", "last (End)", step.last, width="40px")
        self.play = widgets.Play(value=0, min=0, max=1, interval=900, layout=_width("130px"))
        if hasattr(self.play, "show_repeat"):
            self.play.show_repeat = False
        self.slider = widgets.IntSlider(
            value=0, min=0, max=1, readout=False, layout=widgets.Layout(flex="1 1 auto", min_width="120px")
        )
        # In the browser: playing goes on while Python is busy with the step before.
        self._link = widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.slider.observe(self._slid, "value")
        self.granularity = widgets.ToggleButtons(
            options=list(GRANULARITIES), value=step.granularity, style={"button_width": "68px"},
            layout=_width("226px"),
        )  # fmt: skip
        self.granularity.observe(self._granularity_chosen, "value")
        self.where = widgets.Label()
        return _row(
            self.first, self.back, self.forward, self.last, self.play, self.granularity, self.slider,
            self.where,
        )  # fmt: skip

    def _jumping(self) -> widgets.Widget:
        step = self.stepper
        self.jumps = {
            kind: self._button(f"next {word}", f"to the next {word}", partial(step.jump, kind), width="auto")
            for kind, word in _MARK_WORDS.items()
        }
        self.why = self._button(
            "why this victim?", "the policy's key and the runner-up", self._why, width="auto"
        )
        self.quiz = widgets.ToggleButton(value=False, description="quiz", layout=_width("70px"))
        self.quiz.observe(self._quiz_switched, "value")
        return _row(*self.jumps.values(), self.why, self.quiz)

    def _asking(self) -> widgets.Widget:
        self.question = widgets.Label()
        self.choice = widgets.Dropdown(options=[], layout=_width("100px"))
        self.number = widgets.IntText(value=0, layout=_width("90px"))
        self.answer = self._button("answer", "see whether it is right", self._answered, width="80px")
        self.asking = _row(self.question, self.choice, self.number, self.answer)
        self.asking.layout.display = "none"
        return self.asking

    def _prompting(self) -> widgets.Widget:
        step = self.stepper
        self.text = widgets.Text(
            placeholder="Type a prompt", continuous_update=True,
            layout=widgets.Layout(flex="1 1 auto", min_width="200px"),
        )  # fmt: skip
        self.text.observe(lambda _: self._what_if(), "value")
        self.chat = widgets.Checkbox(
            value=step.as_chat, description="as chat", indent=False, layout=_width("80px")
        )
        self.chat.observe(self._chat_switched, "value")
        self.submit = self._button("submit", "queue this prompt", self._submit, style="primary", width="80px")
        self.agent = self._button(
            "agent", "a question behind the agents' long shared prompt", step.agent, width="70px"
        )
        self.raw = self._button("raw", "words that share nothing", step.raw, width="60px")
        self.hits = widgets.HTML()
        return widgets.VBox([_row(self.text, self.chat, self.submit, self.agent, self.raw), self.hits])

    def _driving(self) -> widgets.Widget:
        step = self.stepper
        self.step = self._button("step", "one step of the engine", step.step, width="70px")
        self.run = self._button("run to end", "steps until nothing is left to do", step.run, width="100px")
        self.tokens = widgets.BoundedIntText(value=20, min=1, max=10**9, layout=_width("80px"))
        self.evict = self._button(
            "evict", "at least so many tokens", lambda: step.evict(self.tokens.value), width="70px"
        )
        self.flush = self._button("flush", "empty the cache", step.flush, width="70px")
        self.policy = widgets.Dropdown(
            options=self._policies(), layout=_width("90px"), tooltip="who is evicted from now on"
        )
        self.policy.observe(self._policy_chosen, "value")
        self.present = widgets.Label()
        by = widgets.Label("by")
        return _row(self.step, self.run, self.evict, self.tokens, by, self.policy, self.flush, self.present)

    def _policies(self) -> list[str]:
        """The policies to choose from; of a tree of its own there is nothing to choose."""
        from minirad.cache.eviction import POLICIES

        own = self.stepper.engine is not None and isinstance(self.stepper.engine.cache, RadixCache)
        return list(POLICIES) if own else ["its own"]

    def _forking(self) -> widgets.Widget:
        from minirad.cache.eviction import POLICIES as EVICTION
        from minirad.schedule.policies import POLICIES as SCHEDULE

        assert self.stepper.engine is not None
        config = self.stepper.engine.config
        self.fork_fields: dict[str, Any] = {
            "eviction_policy": widgets.Dropdown(
                options=list(EVICTION), value=config.eviction_policy, layout=_width("90px")
            ),
            "schedule_policy": widgets.Dropdown(
                options=list(SCHEDULE), value=config.schedule_policy, layout=_width("80px")
            ),
            "kv_tokens": widgets.IntText(value=config.kv_tokens, layout=_width("80px")),
            "page_size": widgets.IntText(value=config.page_size, layout=_width("60px")),
        }
        self.fork = self._button(
            "fork from here", "the requests so far, on a new engine", self._fork, width="120px"
        )
        self.original = self._button(
            "original", "back to where it was forked", self.stepper.original, width="80px"
        )
        labels = ("evict by", "serve by", "pool", "page")
        fields = zip(labels, self.fork_fields.values(), strict=True)
        return _row(
            self.fork, *(w for label, box in fields for w in (widgets.Label(label), box)), self.original
        )

    # ------------------------------------------------------------ what they do

    def _slid(self, change: Any) -> None:
        if not self._quiet and change["new"] != self.stepper.index:
            self.stepper.go(min(change["new"], self.stepper.count - 1))

    def _granularity_chosen(self, change: Any) -> None:
        if not self._quiet and change["new"] != self.stepper.granularity:
            self.stepper.granularity = change["new"]

    def _why(self) -> None:
        self.stepper._say("\n".join(self.stepper.why()))

    def _quiz_switched(self, change: Any) -> None:
        self.stepper.quiz = bool(change["new"])
        self.stepper.question = None
        self.stepper._say("Go forward: some steps will ask you first." if change["new"] else "")

    def _answered(self) -> None:
        question = self.stepper.question
        by_choice = question is not None and question.choices
        self.stepper.answer(str(self.choice.value if by_choice else self.number.value))

    def _chat_switched(self, change: Any) -> None:
        self.stepper.as_chat = bool(change["new"])
        self._what_if()

    def _submit(self) -> None:
        if self.stepper.submit(self.text.value) is not None:
            self.text.value = ""

    def _fork(self) -> None:
        assert self.stepper.engine is not None
        config = self.stepper.engine.config
        wanted = {name: box.value for name, box in self.fork_fields.items()}
        changes = {name: value for name, value in wanted.items() if value != getattr(config, name)}
        self.stepper.fork(**changes)

    def _policy_chosen(self, change: Any) -> None:
        if not self._quiet and change["new"] is not None:
            self.stepper.pressed(partial(self.stepper.set_policy, change["new"]))

    def _what_if(self) -> None:
        text = self.text.value
        try:
            hits, total = self.stepper.what_if(text) if text else (0, 0)
        except ValueError as error:
            self.hits.value = _note(str(error), "#c92a2a")
            return
        self.hits.value = _note(f"{hits} of {total} tokens would hit", "#1864ab") if text else ""

    # ------------------------------------------------------------ showing where we are

    def show(self) -> None:
        """Brings all controls into line with the stepper."""
        self._quiet = True
        try:
            self._show()
        finally:
            self._quiet = False

    def _show(self) -> None:
        step = self.stepper
        top = step.count - 1
        for control in (self.slider, self.play):
            control.max = max(top, 1)
            control.value = step.index
        self.granularity.value = step.granularity
        self.where.value = f"{step.index} of {top}"
        can_step = step._can_step
        self.forward.disabled = step.at_present and not can_step
        self.back.disabled = self.first.disabled = step.index == 0
        marks = step.trace.marks()
        for kind, button in self.jumps.items():
            button.disabled = not marks[kind]
        self._show_question(step.question)
        if step.engine is not None:
            self._show_engine(can_step)

    def _show_question(self, question: Question | None) -> None:
        self.asking.layout.display = "none" if question is None else "flex"
        if question is not None:
            self.question.value = question.text
            self.choice.options = list(question.choices)
            self.choice.layout.display = "block" if question.choices else "none"
            self.number.layout.display = "none" if question.choices else "block"

    def _show_engine(self, can_step: bool) -> None:
        step = self.stepper
        self.step.disabled = self.run.disabled = not can_step
        self.original.disabled = not step._originals
        if step.engine is not None and isinstance(step.engine.cache, RadixCache):
            self.policy.value = step.engine.cache.eviction_policy
        else:
            self.policy.disabled = True
        self.present.value = (
            "" if step.at_present else "The past is on view: a prompt goes to the present, or fork from here."
        )
        self._what_if()


def _width(width: str) -> widgets.Layout:
    return widgets.Layout(width=width)


def _row(*children: widgets.Widget) -> widgets.HBox:
    return widgets.HBox(list(children), layout=widgets.Layout(align_items="center", flex_flow="row wrap"))


def _note(text: str, colour: str) -> str:
    return f'<span style="color:{colour};font-size:12px">{html.escape(text)}</span>'
