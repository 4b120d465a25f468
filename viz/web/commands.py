"""What a page can ask of the engine: play, step, submit, evict, fork, ... each a function of `COMMANDS`.

They act on a `Session`, in the engine's thread (driver.py). A ValueError is the page's to show.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from minirad import workloads
from minirad.config import EngineConfig, SamplingParams
from minirad.observe.rank_events import LockPlanted
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from viz.fork import evict_by_hand, forked_config, require_here, unmasked, what_if
from viz.view.text import asked_text, short
from viz.web.compare import Pair, Shown
from viz.web.page import Page
from viz.web.runs import Run
from viz.web.settings import Settings

Json = dict[str, Any]
NEW_TOKENS = 24  # of a prompt typed on the page
MOST_KV_TOKENS = 1_000_000  # that a page may ask for: a slip of the finger must not take all memory
FASTEST = 1000.0  # steps per second that can be asked for


class Session:
    """What a page drives: the present run, at which speed it plays, and what a new one is made of."""

    def __init__(self, settings: Settings, speed: float, playing: bool, run: Shown | None) -> None:
        self.settings, self.speed, self.playing = settings, speed, playing
        self.run_now = run
        self.begun: Callable[[Shown], Any] = lambda run: None  # told of each new run, before its first step

    def begin(self, settings: Settings, workload: workloads.Workload | None) -> Shown:
        """A new engine with a new recording takes the place of the present one."""
        number = self.run_now.number + 1 if self.run_now else 1
        run = make_run(number, settings, workload)
        if self.run_now is not None:
            self.run_now.close()
        self.settings, self.run_now = settings, run
        self.begun(run)
        return run


def make_run(number: int, settings: Settings, workload: workloads.Workload | None = None) -> Shown:
    """One engine at work, on so many ranks, or two where two policies are compared."""
    if settings.compare is None:
        if settings.tp == 1:
            return Run(number, settings, workload)
        from viz.web.ranks import watched

        return watched(number, settings, workload)
    names, (first, second) = settings.sides()
    return Pair(number, settings, (Run(number, first, workload), Run(number, second, workload)), names)


class RunBroke(Exception):
    """Something failed within the run itself, not in what a page asked for; the cause is the error."""


@contextmanager
def _within_the_run() -> Iterator[None]:
    """Around a command's work on the engine. A refusal (ValueError) leaves the engine whole."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise RunBroke from error


def _driven(session: Session) -> Shown:
    if session.run_now is None or not session.run_now.drivable:
        raise ValueError("this is a recording: there is no engine to drive")
    return session.run_now


def _engine_run(session: Session) -> Run:
    run = _driven(session).alone
    if run is None:
        raise ValueError("two engines are compared here: this is possible with one only")
    return run


def _number(arguments: Json, name: str, otherwise: float) -> float:
    """A number of a command's body; fields send theirs as text. ValueError says what is wrong with it."""
    value = arguments.get(name, otherwise)
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return number


def _whole(arguments: Json, name: str, otherwise: int) -> int:
    number = _number(arguments, name, otherwise)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, not {number}")
    return int(number)


def _play(session: Session, arguments: Json) -> Json:
    _driven(session)
    session.playing = bool(arguments.get("on", True))
    return {}


def _speed(session: Session, arguments: Json) -> Json:
    session.speed = min(max(_number(arguments, "speed", 3), 0.0), FASTEST)
    return {}


def _step(session: Session, arguments: Json) -> Json:
    run = _driven(session)
    session.playing = False
    if run.idle:
        raise ValueError("nothing is left to do: submit a prompt, or restart with a workload")
    try:
        run.advance()
    except Exception as error:  # also a ValueError: the command had no argument to be wrong
        raise RunBroke from error
    return {"frames": len(run.trace)}


def _composed(arguments: Json) -> str:
    """The prompt that a typed text stands for: as it is, or as a question in a chat or to an agent."""
    text = arguments.get("text")
    if not isinstance(text, str):
        raise ValueError("a prompt must be text")
    frame = {"chat": workloads.chat_prompt, "agent": workloads.agent_prompt}.get(str(arguments.get("as")))
    return frame(text) if frame else text


def _adapter(arguments: Json) -> str:
    """The adapter that a page asks for; "" for none. The engine says which it knows."""
    name = arguments.get("lora", "")
    if not isinstance(name, str):
        raise ValueError(f"an adapter has a name, not {str(name)[:40]!r}")
    return name


def _peek(session: Session, arguments: Json) -> Json:
    """What would hit if this prompt came now; the engine stays as it is."""
    run = _engine_run(session)
    engine = run.engine
    tokens = [int(token) for token in engine.encode(_composed(arguments))] if arguments.get("text") else []
    hit, back = what_if(engine, tokens, _adapter(arguments))
    limit = min(n for n in (engine.config.max_context, engine.config.kv_tokens) if n is not None)
    return {
        "tokens": len(tokens),
        "hit": hit,
        "back": back,
        "hit_text": run.trace.decode(tokens[: hit + back]),
        "rest_text": run.trace.decode(tokens[hit + back :]),
        "too_long": len(tokens) + NEW_TOKENS > limit,
        "limit": limit - NEW_TOKENS,
    }


def _submit(session: Session, arguments: Json) -> Json:
    run = _engine_run(session)
    text = _composed(arguments)
    if not str(arguments.get("text", "")).strip():
        raise ValueError("the prompt is empty: type something first")
    params, lora = SamplingParams(max_new_tokens=NEW_TOKENS), _adapter(arguments)
    name = run.engine.add_request(text, params, lora=lora)
    run.player.labels[name] = f"yours: {asked_text(text)}"
    run.recorder.cut()  # so that it is seen waiting
    run.note_idle()
    return {"request": name}


def _evict(session: Session, arguments: Json) -> Json:
    run = _engine_run(session)
    count = _whole(arguments, "tokens", 0)
    if count < 1:
        raise ValueError(f"evict at least 1 token, not {count}")
    with _within_the_run():
        freed = evict_by_hand(run.engine, count)
        run.recorder.cut()
    if not freed:
        raise ValueError("nothing can be evicted: no unlocked leaf is in the tree")
    return {"freed": freed}


def _plant(session: Session, arguments: Json) -> Json:
    """A lock_ref of rank 0's tree changes behind everything's back: what the digest is there to find."""
    run = _engine_run(session)
    if run.engine.config.tp == 1:
        raise ValueError("one rank alone cannot differ: a difference is planted with --tp 2")
    nodes = [node for node in run.engine.cache.walk() if node.parent is not None]
    if not nodes:
        raise ValueError("no node is in the tree yet: take a step first")
    node = max(nodes, key=lambda each: (each.lock_ref > 0, each.last_access, each.id))
    node.lock_ref += 1
    run.engine.bus.emit(LockPlanted(node.id, node.lock_ref))  # a picture is of what a rank holds
    return {"node": node.id, "lock_ref": node.lock_ref}


def _flush(session: Session, arguments: Json) -> Json:
    run = _engine_run(session)
    with _within_the_run():
        run.engine.flush_cache()
        run.recorder.cut()
    return {}


def _policy(session: Session, arguments: Json) -> Json:
    """Another eviction policy for the engine that runs."""
    run, name = _engine_run(session), arguments.get("policy")
    if not isinstance(name, str):
        raise ValueError(f"a policy has a name, not {name!r}")
    now = run.policy
    if not now:
        raise ValueError("this tree decides itself what is evicted: its policy cannot be changed here")
    if name == now:
        raise ValueError(f"the eviction policy is {name} already")
    with _within_the_run():
        run.engine.set_eviction_policy(name)
        run.recorder.cut()
    return {"policy": name}


CHANGEABLE = (
    "workload", "kv_tokens", "page_size", "schedule_policy", "eviction_policy", "host_kv_tokens",
    "host_write",
)  # fmt: skip


def _changed_settings(settings: Settings, arguments: Json) -> Settings:
    """The settings with what a page asks for. ValueError, and nothing has changed, for what there is not."""
    for name in arguments:
        if name not in (*CHANGEABLE, "frame"):  # of which a fork makes use
            raise ValueError(f"no setting {short(name, 60)!r}: there are {', '.join(CHANGEABLE)}")
    changes = {
        name: value for name, value in arguments.items() if name in CHANGEABLE and value not in ("", None)
    }
    for name in changes:
        if name in ("kv_tokens", "page_size", "host_kv_tokens"):
            changes[name] = _whole(changes, name, 0)
        elif not isinstance(changes[name], str):
            raise ValueError(f"{name} must be a name, not {changes[name]!r}")
    for name, what in (("kv_tokens", "a pool"), ("host_kv_tokens", "a host tier")):
        if changes.get(name, 0) > MOST_KV_TOKENS:
            raise ValueError(
                f"{what} of {changes[name]:,} tokens is more than a page may ask for: "
                f"at most {MOST_KV_TOKENS:,}"
            )
    if "workload" in changes and not _is_named(changes["workload"], settings.workload_name):
        del changes["workload"]
    if "workload" in changes and changes["workload"] != settings.workload:
        changes.setdefault("kv_tokens", None)
    return dataclasses.replace(settings, **changes)


def _is_named(name: str, present: str) -> bool:
    """Whether a workload goes by this name; not if it stands for the present one, a file's (Settings'
    workload_name): files are named on the command line only. ValueError: there is none.
    """
    if name in workloads.WORKLOADS:
        return True
    if name != present:
        raise ValueError(f"no workload {short(name, 60)!r}: there are {', '.join(workloads.WORKLOADS)}")
    return False


def _recorded_settings(settings: Settings, recording: Recording) -> Settings:
    """What a recording's engine was made of; a model that `settings` name serves it instead of its own."""
    if settings.model is None:
        config = forked_config(recording)
        require_here(config.model)
    else:
        config = forked_config(recording, model=settings.model, dummy_weights=None)
    names = {each.name for each in dataclasses.fields(Settings)}
    same = [each.name for each in dataclasses.fields(EngineConfig) if each.name in names]
    recorded = {name: getattr(config, name) for name in same}
    recorded["lora"] = settings.lora or recorded["lora"]  # a recording has only the adapters' names,
    if settings.disk_dir is not None:  # and no folder
        recorded |= {"disk_dir": settings.disk_dir, "disk_mb": settings.disk_mb}
    return dataclasses.replace(settings, base=config, **recorded)


def _left_out(frames: Sequence[Frame]) -> str:
    """One sentence on what was done to the engine beside its requests: a fork on the page leaves it out."""
    counts: Counter[str] = Counter()
    for frame in frames:
        counts.update(event.by_caller for event in frame.events if event.by_caller)
        evicts = any(event.victim in ("evicted", "demoted") for event in frame.events)
        if evicts and not any(event.ends_frame for event in frame.events):
            counts["evictions by hand"] += 1
    told = ", ".join(f"{what} ({count})" for what, count in sorted(counts.items()))
    return told and f"This fork has the recorded requests only; what was done beside is left out: {told}."


def _restart(session: Session, arguments: Json) -> Json:
    _driven(session)
    session.begin(_changed_settings(session.settings, arguments), None)
    session.playing = True
    return {"run": session.run_now.number if session.run_now else 0}


def _fork(session: Session, arguments: Json) -> Json:
    """The requests recorded up to a frame, as they came, on a new engine with other settings."""
    if session.run_now is None:
        raise ValueError("nothing has run yet")
    page = session.run_now.single_page
    if page is None:
        raise ValueError("a comparison cannot be forked")
    if session.run_now.page.kind == "ranks":
        raise ValueError("a run of several ranks cannot be forked on its page: viz.fork does that, on one")
    recording = page.trace.recording
    count = len(recording.frames)
    until = _whole(arguments, "frame", count - 1)
    if not -1 <= until < count:
        raise ValueError(f"frame {until} is not in this recording of {count} frames")
    recorded = _recorded_settings(session.settings, recording)
    masks = session.run_now.alone.masks if session.run_now.alone else {}
    workload = workloads.from_recording(recording, until, engine_seed=recorded.base.seed, masks=masks)
    if not workload.sessions:
        raise ValueError("no request had come by then: there is nothing to replay")
    frames = recording.frames[: until + 1]
    told = [_left_out(frames), unmasked(frames, masks)]
    forked = session.begin(_changed_settings(recorded, {**arguments, "workload": ""}), workload)
    forked.notices.extend(filter(None, told))
    session.playing = True
    return {"requests": len(workload.sessions)}


def _prompt(session: Session, arguments: Json) -> Json:
    """A request's whole prompt as text."""
    return {"text": _one_page(session).prompt_text(str(arguments.get("request")))}


def _doctor(session: Session, arguments: Json) -> Json:
    """Where two prompts part, and what that costs; works on a recording, too."""
    from viz.web.consult import consult

    return consult(_one_page(session), arguments)


def _one_page(session: Session) -> Page:
    page = session.run_now.single_page if session.run_now else None
    if page is None:
        raise ValueError("the doctor looks at the prompts of one run")
    return page


Command = Callable[[Session, Json], Json]
COMMANDS: dict[str, Command] = {
    "play": _play, "speed": _speed, "step": _step, "peek": _peek, "submit": _submit, "evict": _evict,
    "plant": _plant, "flush": _flush, "policy": _policy, "restart": _restart, "fork": _fork,
    "prompt": _prompt, "doctor": _doctor,
}  # fmt: skip


LOOKING = frozenset({_peek, _prompt, _doctor})
"""Commands that a page may send at any time: none of them is a reason to let the engine wait."""
