"""What if? A recording's requests replayed on a new engine with another policy, page size or pool.

`fork` reads what was asked of the first engine (prompts, aborts, evictions by hand, flushes) and asks
the same of a new one at the same steps. What the new engine then does is its own: it computes anew.

Host tier, keys and all other settings are the recording's, where they are not changed. New weights are
given at the same moment, but the ones that the new engine has already: a recording holds no weights.

Not replayed: pins (no event tells of them), masks (`unmasked` says whose; a fork on the live page has those
of its run), and what a recording does not hold of a request. The new engine counts its requests from R1;
where the recorded one did not, each still gets the seed that it had (but the schedule policy "random"
shuffles by the new numbers).

`what_if` asks less: what a prompt would find in a running engine's cache if it came now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from minirad.cache.eviction import POLICIES
from minirad.cache.prefix_cache import TreeHooks, usable
from minirad.config import EngineConfig
from minirad.engine import Engine
from minirad.model.load import CLASSROOM, SMOLLM2
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.workloads import recorded_request
from viz.trace import local_folder


def fork(
    recording: Recording,
    upto: int | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    **config_changes: Any,
) -> tuple[Engine, Recorder]:
    """A new engine after the recorded requests of frames 0 to `upto` (None: all), and its recorder.

    config_changes: fields of EngineConfig (eviction_policy="fifo", kv_tokens=200, ...). model,
    tokenizer: ready-made ones, for a recording of an engine that was given them.

    Raises ValueError when the recording does not begin with an empty engine, is not of an engine, or
    a request does not fit the new sizes.
    """
    config = forked_config(recording, **config_changes)
    if model is None:
        require_here(config.model)
    last = len(recording) - 1 if upto is None else upto
    if not -1 <= last < len(recording):
        raise ValueError(f"frame {last} is not in this recording of {len(recording)} frames")
    engine = Engine(config, model=model, tokenizer=tokenizer)
    recorder, names, spaces = Recorder(engine), dict[str, str](), dict[str, int]()
    for frame in recording.frames[: last + 1]:
        if frame.scene is not None:
            recorder.scene(frame.scene)
        _replay_frame(engine, frame, names, spaces, keep_policy="eviction_policy" not in config_changes)
        recorder.cut()
    return engine, recorder


def require_here(model: Any) -> None:
    """A file's word for a model is never looked up on the hub: it names a folder, or what is installed.

    ValueError for any other."""
    if model == SMOLLM2:
        from minirad.model.smollm2 import packaged_gguf  # brings torch

        if packaged_gguf() is not None:
            return
    if model not in (None, CLASSROOM) and (model == SMOLLM2 or local_folder(str(model)) is None):
        raise ValueError(f"the recorded model {str(model)!r} is not here, and none is fetched: give model")


def unmasked(frames: Sequence[Frame], masks: Collection[str] = ()) -> str:
    """One sentence on the requests that had a mask (a grammar) and have none in a fork; "" if there are none.

    masks: the requests whose masks are at hand.
    """
    added = [event for frame in frames for event in frame.events if isinstance(event, ev.RequestAdded)]
    free = [each.request for each in added if each.masked and each.request not in masks]
    if not free:
        return ""
    some = ", ".join(free[:5]) + (f" and {len(free) - 5} more" if len(free) > 5 else "")
    return f"A recording holds no grammars: in this fork the replies of {some} are free."


def evict_by_hand(engine: Engine, tokens: int) -> int:
    """Evicts at least `tokens` cached tokens, or as many as are unlocked; returns how many went."""
    before = engine.allocator.available
    tokens = min(max(tokens, 0), engine.cache.evictable_size or 0)
    engine.cache_manager.make_room(before + tokens)
    return engine.allocator.available - before


class Found(NamedTuple):
    """Tokens of a prompt that need not be computed: `hit` lie on the device, `back` behind them are loaded
    back from host memory, if there is room. What a disk has is not looked for."""

    hit: int
    back: int


def what_if(engine: Engine, tokens: Sequence[int], lora: str = "") -> Found:
    """What would be used, not all that matches: whole pages, and one token at least is always computed.

    Changes nothing.
    """
    if not len(tokens):
        return Found(0, 0)
    tree: Any = engine.cache
    if hasattr(tree, "peek_tiers"):
        device, host = tree.peek_tiers(engine.intake.key(engine.encode(tokens), None, lora))
    else:
        device, host = engine.peek(tokens, lora=lora), 0
    hit, both = (usable(n, len(tokens), engine.config.page_size) for n in (device, device + host))
    return Found(hit, both - hit if host and both - hit >= tree.load_back_threshold else 0)


def changeable_policy(engine: Engine) -> str:
    """The eviction policy that may be changed in a running engine; "" where the tree decides itself."""
    return engine.cache.eviction_policy if isinstance(engine.cache, TreeHooks) else ""


def forked_config(recording: Recording, **changes: Any) -> EngineConfig:
    """The recorded engine's configuration, with changes; what the recorded machine had and this one has not
    (a GPU) is chosen anew. ValueError as `fork`, for all but the requests."""
    saved = recording.header.get("config") or {}
    start = recording.header["start"]
    if not saved:
        raise ValueError("only the recording of an engine can be forked: this one is of a cache on its own")
    if start["tree"]["nodes"] or start["requests"]:
        raise ValueError(
            f"this recording begins in the middle, at step {start['step']}: "
            "what was asked before is not known"
        )
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ValueError(f"EngineConfig has no {', '.join(unknown)}")
    config = {name: value for name, value in saved.items() if name in known}
    policy = start["tree"].get("eviction_policy")  # may have been changed before the recording began
    if policy in tuple(POLICIES):
        config["eviction_policy"] = policy
    if str(config.get("device")).startswith("cuda") and not _has_gpu():
        config |= dict.fromkeys(("device", "dtype", "attention"), "auto")
        config |= {"cuda_graphs": None, "cascade": None}
    drafts = saved.get("speculative")
    if changes.get("speculative", drafts) != drafts:  # what went with them by itself goes with the new ones
        config["draft_model"] = None
        if saved.get("bigram_keys") == (drafts == "eagle"):
            config["bigram_keys"] = None
    # The others of a run on several ranks were as rank 0. No file says in which folder is written.
    config |= {"tp": 1, "disk_dir": None} | changes
    page, host = config.get("page_size", 1), config.get("host_kv_tokens", 0)
    if "host_kv_tokens" not in changes and isinstance(page, int) and page > 0:
        config["host_kv_tokens"] = host // page * page  # whole pages of the new size
    return EngineConfig(**config)


def _has_gpu() -> bool:
    import torch  # not for a page that only looks on

    return torch.cuda.is_available()


def _replay_frame(
    engine: Engine, frame: Frame, names: dict[str, str], spaces: dict[str, int], keep_policy: bool
) -> None:
    """Asks the engine what was asked in this frame, and steps it if the frame was a step.

    names: the recorded ids of the requests so far, with those that they have here. spaces: see
    workloads.recorded_request.
    """
    is_step = any(event.ends_frame for event in frame.events)
    for event in frame.events:
        if isinstance(event, ev.RequestAdded):
            renumbered = event.request != f"R{len(names) + 1}"  # else its seed is the same by itself
            asked = recorded_request(event, engine.config.seed if renumbered else None, spaces)
            (turn,) = asked.turns
            names[event.request] = engine.add_request(
                turn.token_ids, turn.params(), asked.extra_key, asked.priority, lora=asked.lora
            )
        elif isinstance(event, ev.RequestAborted):
            engine.abort(names[event.request.split(".")[0]])
        elif isinstance(event, ev.PolicyChanged) and keep_policy:
            engine.set_eviction_policy(event.new)
        elif isinstance(event, ev.VersionBumped):
            engine.update_weights(engine.model)
        elif isinstance(event, ev.CacheFlushed):
            _flush(engine)
        elif not is_step and (gone := ev.device_eviction(event)) is not None:
            evict_by_hand(engine, len(gone.slots))
    if is_step:
        engine.step()


def _flush(engine: Engine) -> None:
    """No request was running when it was flushed; where one is here, all that is unlocked goes."""
    if engine.has_work:
        evict_by_hand(engine, engine.cache.evictable_size)
    else:
        engine.flush_cache()
