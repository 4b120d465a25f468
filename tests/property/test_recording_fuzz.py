"""A recording is data from a stranger: edited in every way, it is read, or refused in one sentence.

What could be read is walked through as the page, the notebook and the export do. Nothing else than a
ValueError with one line may come out, and a short file may not take much memory.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CheckedEngine
from support import PlainCache

from minirad.config import SamplingParams
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from viz import kv
from viz.draw import tree
from viz.fork import fork
from viz.notebook import panels
from viz.trace import Trace
from viz.web.consult import consult
from viz.web.export import page_data
from viz.web.page import Page

MakeEngine = Callable[..., CheckedEngine]
Lines = list[Any]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
VALUES: tuple[Any, ...] = (
    None, True, "", "x", "R1", "\ud800", [], {}, [[]], ["x"], [None], -1, 0, 1, 2, 7,
    10**9, 2**63, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"),
    [10**9], [-1], [0, 0, 0], {"id": 1},
)  # fmt: skip


def recorded(make_engine: MakeEngine, kind: str) -> Lines:
    """The lines of a small recording, parsed: "plain", with two "tiers", or of a "silent" tree."""
    tight: dict[str, Any] = {"kv_tokens": 24, "chunk_tokens": 5, "page_size": 1 if kind == "silent" else 2}
    if kind == "tiers":
        tight.update(host_kv_tokens=32, load_back_threshold=2)
    engine = make_engine(PlainCache() if kind == "silent" else None, **tight)
    with Recorder(engine, keyframe_every=3, notes={"labels": {"R1": "first"}, "title": "t"}) as recording:
        reply = SamplingParams(max_new_tokens=1)
        engine.generate([PROMPT], reply)
        engine.generate([[*PROMPT[:6], 20, 21]], SamplingParams(max_new_tokens=2, n=2, ignore_eos=True))
        engine.generate([[30] * 18], reply)
        engine.generate([PROMPT], reply)
        if kind == "plain":
            engine.update_weights(engine.model)
            engine.flush_cache()
    return [recording.header, *(json.loads(frame.to_json()) for frame in recording)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def edited(lines: Lines, rng: random.Random) -> bytes:
    """The file after one or two random edits."""
    lines = copy.deepcopy(lines)
    text: list[str] | None = None
    for _ in range(rng.choice((1, 1, 1, 2))):
        what = rng.randrange(12)
        number = rng.randrange(len(lines))
        if what < 7:
            paths = list(places(lines[number]))
            *inside, key = rng.choice(paths)
            parent = at(lines[number], tuple(inside))
            if what == 0:
                del parent[key]
            elif what == 1 and isinstance(parent, list):
                parent.insert(key, copy.deepcopy(parent[key]))
            elif what == 2 and isinstance(parent[key], int):
                parent[key] += rng.choice((-1, 1, 100))
            elif what == 3:
                parent[key] = copy.deepcopy(at(lines[number], rng.choice(paths)))
            else:
                parent[key] = copy.deepcopy(rng.choice(VALUES))
        elif what == 7 and number:
            lines[number]["events"] = rng.sample(lines[number]["events"], len(lines[number]["events"]))
        elif what == 8:
            lines.insert(number, copy.deepcopy(rng.choice(lines)))
        elif what == 9 and len(lines) > 1:
            del lines[number]
        elif what == 10:
            rng.shuffle(lines)
        else:
            text = [json.dumps(line) for line in lines]
            cut = rng.randrange(len(text[number]))
            text[number] = text[number][:cut] + rng.choice(("", "\n", "[" * 5000, "\x00", "9" * 5000, '"'))
    data = "\n".join(text or [json.dumps(line) for line in lines]).encode()
    if rng.random() < 0.05:
        spot = rng.randrange(len(data))
        data = data[:spot] + bytes([rng.randrange(256)]) + data[spot + 1 :]
    return data


def walk(recording: Recording) -> None:
    """All that the pictures ask of a recording, for every position."""
    trace = Trace(recording)
    page = Page(trace, recording.header.get("notes", {}).get("labels", {}))
    ledger = panels.Ledger(recording, trace.decode)
    data = page_data(page, "title", recording.missing)
    json.dumps(data).encode()
    for index in range(trace.count("step")):
        json.dumps(panels.payload(trace, trace.view("step", index), ledger)).encode()
    for look in (kv.usage_points, kv.request_hits, kv.spans, kv.evictions):
        look(recording)
    kv.pages(trace.state())
    kv.host_pages(trace.state())
    recording.check()


@pytest.fixture(autouse=True)
def drawn_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphviz takes most of the time, and sees nothing but DOT text."""
    monkeypatch.setattr(tree, "svg", lambda text: text)


def outcome(data: bytes, path: Path) -> str:
    """ "whole", "part" or "refused"; anything else that is raised is a fault."""
    path.write_bytes(data)
    try:
        recording = Recorder.load(path)
    except ValueError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < 600
        return "refused"
    walk(recording)
    if not recording.missing:
        return "whole"
    assert recording.missing.startswith(f"{path}, line ") and "\n" not in recording.missing
    return "part"


@pytest.mark.parametrize("kind", ["plain", "tiers", "silent"])
def test_an_edited_recording_is_read_or_refused(make_engine: MakeEngine, tmp_path: Path, kind: str) -> None:
    lines = recorded(make_engine, kind)
    path = tmp_path / "r.jsonl"
    whole = "\n".join(json.dumps(line) for line in lines)
    assert outcome(whole.encode(), path) == "whole"
    rng = random.Random(f"{kind} 13")
    found = [outcome(edited(lines, rng), path) for _ in range(30)]
    assert min(found.count(word) for word in ("whole", "part", "refused")) > 0, (
        "the edits reach every way out"
    )


def test_no_name_in_a_recording_is_given_to_the_hub(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def fetched(*args: Any, **options: Any) -> None:
        raise AssertionError(f"asked the hub for {args}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    lines = recorded(make_engine, "plain")
    lines[0]["model"]["tokenizer"] = lines[0]["config"]["model"] = "somebody/anything"
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    recording = Recorder.load(path)
    page = Page(Trace(recording))
    assert page.prompt_text("R1") == " ".join(map(str, PROMPT)), "ids where there is no tokenizer"
    with pytest.raises(ValueError, match=r"'somebody/anything', is no folder here \(nothing is fetched\)"):
        consult(page, {"a": "one prompt", "b": "another"})
    with pytest.raises(ValueError, match="'somebody/anything' is not here, and none is fetched"):
        fork(recording)
