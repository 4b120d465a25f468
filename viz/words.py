"""In words: the tag before an event's sentence, one sentence for many events, the text of token ids.

What each kind of event says stands with the event (minirad/observe/events.py). Token ids become text with the
tokenizer that a recording names, if it is here: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from minirad.observe.draft_events import DraftVerified, TokensForced
from minirad.observe.event import EVENT_TYPES, TIER_SUMS, Event, Word
from minirad.observe.events import BatchScheduled
from minirad.observe.snapshot import State

Decode = Callable[[Sequence[int]], str]

WORDS: Mapping[type[Event], Word] = {kind: kind.word for kind in EVENT_TYPES}
NOTHING_YET = "Nothing has happened yet: the tree is empty"
PASSED = Word("passed", "wait")  # no event tells of it: a request behind a waiting one was admitted


def word_of(event: Event) -> Word:
    """What stands before an event's sentence."""
    return event.word


def summary(events: Iterable[Event]) -> tuple[str, str]:
    """What a stretch of events comes to: (tone, one plain sentence).

    tone: "evict", "retract", "split", "hit", "new", "finish", "decode" or "", for its colour.
    """
    events = tuple(events)
    if len(events) == 1:
        return events[0].tone(), events[0].describe()
    by: dict[type[Event], list[Any]] = {}
    for event in events:
        if event.headline.rank:
            by.setdefault(type(event), []).append(event)
    if DraftVerified in by or TokensForced in by:
        by.pop(BatchScheduled, None)  # with drafts a pass yields more tokens than were scheduled for it
    greatest = sorted(by, key=lambda kind: kind.headline.rank, reverse=True)[:2]
    parts = [kind.together(by[kind]) for kind in greatest]
    if not parts and events:  # nothing that makes a headline: the last event, with all of its kind
        kind = type(events[-1])
        parts = [kind.together([event for event in events if type(event) is kind])]
    if not parts:
        return "", NOTHING_YET
    return parts[0][0], "; ".join(text for _, text in parts)


def beginning(start: State) -> str:
    """One plain sentence for the moment before the first event, which may be in the midst of a run."""
    step, nodes = start["step"], len(start["tree"]["nodes"])
    if step:
        return f"The recording begins here, after step {step:,}"
    if nodes:
        return (
            f"The recording begins here: {nodes:,} node{'s are' if nodes != 1 else ' is'} in the tree already"
        )
    return NOTHING_YET


def tier_sums(events: Iterable[Event]) -> dict[str, int]:
    """Tokens that a stretch of events copied to the host, demoted, loaded back, computed again although the
    host had them, and evicted from the host."""
    sums = dict.fromkeys(TIER_SUMS, 0)
    for event in events:
        if event.tier_sum:
            sums[event.tier_sum] += len(getattr(event, "slots", ()) or getattr(event, "host_slots", ()))
    return sums


# ---------------------------------------------------------------------- token ids to text


def ids_as_text(tokens: Sequence[int]) -> str:
    """Where there is no tokenizer: the ids themselves."""
    return " ".join(str(token) for token in tokens)


def decoder_for(header: State) -> Decode:
    """The decoder that a recording's header names; ids as text where there is none to be had."""
    model = header.get("model") or {}
    if not model:
        return ids_as_text  # a cache on its own knows no text
    return decoder_from(model.get("tokenizer"))


@lru_cache(maxsize=8)
def decoder_from(source: str | None) -> Decode:
    """Token ids -> text, special tokens visible.

    source: a model directory; None: the classroom's; "": there is none, ids are shown as numbers.
    """
    folder = local_folder(source)
    if folder is None:
        return ids_as_text
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library raises plain Exception for what is no tokenizer
            return ids_as_text
        return _careful(lambda ids: str(fast.decode(ids, skip_special_tokens=False)), fast.get_vocab_size())
    try:
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError):
        return ids_as_text
    return decoder_of(slow)


def local_folder(source: str | None) -> Path | None:
    """The folder of the tokenizer that a recording names, if it is one here: no name of a file is fetched.

    source: None: the classroom's, which comes with the package.
    """
    if source is None:
        import minirad.model

        return Path(minirad.model.__file__).parent / "classroom" / "weights"
    if not source or source.startswith(("//", "\\\\")):  # on Windows that is another machine's disk
        return None
    try:
        return Path(source) if Path(source).is_dir() else None
    except (OSError, ValueError):  # longer than a path may be, or with a zero in it
        return None


def decoder_of(tokenizer: Any) -> Decode:
    """The decoder of a transformers tokenizer, special tokens visible."""
    return _careful(
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        len(tokenizer),
    )


def _careful(decode: Callable[[list[int]], str], size: int) -> Decode:
    """Remembers what was decoded, and shows ids outside the vocabulary as numbers."""

    @lru_cache(maxsize=4096)
    def remembered(tokens: tuple[int, ...]) -> str:
        if all(0 <= token < size for token in tokens):
            return decode(list(tokens))
        return "".join(decode([t]) if 0 <= t < size else f"⟨{t}⟩" for t in tokens)

    return lambda tokens: remembered(tuple(tokens))
