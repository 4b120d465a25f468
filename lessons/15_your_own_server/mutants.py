"""Plausible wrong solutions of lesson 15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lessons.grading import Mutant

_READ, _MAP, _RECORD, _SPACE = "def read_batch", "def _as_map", "def _record", "def _space"
_STORE, _REMOVE, _DROP = "def store", "def remove", "def _drop"
_ASK, _ANEW, _NEXT = "def _ask", "def _begin_anew", "def _next"
_CONNECTED, _LIVE, _ANSWER, _ANSWERED = "def connected", "def live", "def answer(", "def answered"
_HIT, _FOLLOWING = "def hit", "def _following"

_FILLED = "    if flat and len(flat) != size * len(hashes):\n        return None\n"
_NEW = "        if block is None or not block.seen:\n"
_HOLDS = "        rank.held.append((seq, payload))\n"


def _anywhere(blocks: dict[Any, Any], tokens: Sequence[int], space: tuple[str, ...] = ()) -> int:
    """Looks for the next tokens in all blocks, whatever they follow."""
    done = 0
    while True:
        for block in blocks.values():
            size = len(block.tokens)
            if size and block.media and block.space == space and tuple(tokens[done:][:size]) == block.tokens:
                done += size
                break
        else:
            return done


def _longest_anywhere(blocks: dict[Any, Any], tokens: Sequence[int], space: tuple[str, ...] = ()) -> int:
    """For each block upwards: is its path a beginning? (A path behind a placeholder is one, so.)"""
    best = 0
    for block in blocks.values():
        path: list[int] = []
        at = block
        while at is not None and at.media and at.space == space:
            path[:0] = at.tokens
            at = blocks.get(at.parent)
        if (at is None or not at.seen) and list(tokens[: len(path)]) == path:
            best = max(best, len(path))
    return best


def _by_a_table(blocks: dict[Any, Any], tokens: Sequence[int], space: tuple[str, ...] = ()) -> int:
    """Makes a table of a dict when it sees it first, and keeps it."""
    if _by_a_table.__dict__.get("of") is not blocks:
        there = {name: block for name, block in blocks.items() if block.seen and block.media}
        _by_a_table.of = blocks
        _by_a_table.rows = {(each.parent, each.tokens, each.space): name for name, each in there.items()}
    sizes = {len(row) for _, row, _ in _by_a_table.rows}
    done, at, parent = 0, 0, None
    while at is not None:
        rows = [(parent, tuple(tokens[done : done + size]), space) for size in sizes]
        at = next((_by_a_table.rows[row] for row in rows if row in _by_a_table.rows), None)
        done, parent = done + (len(blocks[at].tokens) if at is not None else 0), at
    return done


def _over_holes(blocks: dict[Any, Any], tokens: Sequence[int], space: tuple[str, ...] = ()) -> int:
    """Counts what is there, before a hole and behind it."""
    done, at, parent = 0, 0, None
    while True:
        for name, block in blocks.items():
            size = len(block.tokens)
            fits = block.parent == parent and block.seen and block.space == space
            if fits and tuple(tokens[at : at + size]) == block.tokens:
                done, at, parent = done + size * bool(block.media), at + size, name
                break
        else:
            return done


def _followed_before(blocks: dict[Any, Any], event: Any) -> None:
    """Looks once who is followed, and then takes the names as they come."""
    if not hasattr(event, "hashes"):
        blocks.clear()
        return
    followed = {block.parent for block in blocks.values()}
    for name in event.hashes:
        while name in blocks and event.medium in blocks[name].media:
            blocks[name].media.remove(event.medium)
            if not blocks[name].media and name not in followed:
                del blocks[name]


def _leaves_first(blocks: dict[Any, Any], event: Any) -> None:
    """Takes the names from the last to the first, so that none that goes is followed; holes above stay."""
    if not hasattr(event, "hashes"):
        blocks.clear()
        return
    for name in reversed(event.hashes):
        if name in blocks and event.medium in blocks[name].media:
            blocks[name].media.remove(event.medium)
            if not blocks[name].media and all(block.parent != name for block in blocks.values()):
                del blocks[name]


MUTANTS = [
    # ------------------------------------------------------------ read_batch
    Mutant(
        "read_batch",
        "SGLang's batch alone: a map is none",
        '(sent["ts"], sent["events"]) if isinstance(sent, dict) else sent[:2]',
        "(sent[0], sent[1])",
    ),
    Mutant(
        "read_batch",
        "the list of a batch has three entries",
        "else sent[:2]",
        "else (lambda ts, events, rank: (ts, events))(*sent)",
    ),
    Mutant(
        "read_batch",
        "lists of events occur in lists alone",
        "[_record(_as_map(event)) for event in events]",
        "[_record(event if isinstance(sent, dict) else _as_map(event)) for event in events]",
    ),
    Mutant(
        "read_batch",
        "events are lists always",
        "    if isinstance(event, dict):\n        return event\n",
        "",
        after=_MAP,
    ),
    Mutant("read_batch", "short and long lists raise", "strict=False", "strict=True"),
    Mutant(
        "read_batch",
        "a list that is too long raises",
        "    return {",
        "    assert len(event) <= len(names) + 1\n    return {",
        after=_MAP,
    ),
    Mutant(
        "read_batch",
        "fields that older servers had not must be there",
        "**dict(zip(names, event[1:], strict=False))",
        "**{name: event[1 + at] for at, name in enumerate(names)}",
    ),
    Mutant("read_batch", "lora_id is left out of a list's fields", '"lora_id", "medium"', '"medium"'),
    Mutant(
        "read_batch",
        "only the fields of an older server",
        '"lora_id", "medium", "lora_name",\n        "extra_keys",\n',
        '"lora_id", "medium",\n',
    ),
    Mutant(
        "read_batch",
        "an unknown event as a list raises",
        "FIELDS.get(event[0], ())",
        "FIELDS[event[0]]",
    ),
    Mutant(
        "read_batch",
        "an unknown event is Cleared",
        '    if event["type"] != "BlockStored":\n        return None\n',
        '    if event["type"] != "BlockStored":\n        return Cleared()\n',
    ),
    Mutant(
        "read_batch",
        "what is unknown or wrong ends the batch",
        "return float(time), [record for record in records if record is not None]",
        "return float(time), records[: records.index(None)] if None in records else records",
    ),
    Mutant(
        "read_batch",
        "None as a medium stays None",
        'medium = event.get("medium") or "GPU"',
        'medium = event.get("medium", "GPU")',
    ),
    Mutant(
        "read_batch",
        "a medium that is missing raises",
        'medium = event.get("medium") or "GPU"',
        'medium = event["medium"] or "GPU" if event["type"] != "AllBlocksCleared" else ""',
    ),
    Mutant(
        "read_batch",
        "blocks are removed from GPU always",
        'return Removed(tuple(event["block_hashes"]), medium)',
        'return Removed(tuple(event["block_hashes"]))',
    ),
    Mutant("read_batch", "sizes are believed", _FILLED, ""),
    Mutant(
        "read_batch",
        "tokens that are too many are cut off",
        _FILLED,
        "    if flat and len(flat) < size * len(hashes):\n        return None\n"
        "    flat = flat[: size * len(hashes)]\n",
    ),
    Mutant(
        "read_batch",
        "whole blocks are enough, however many",
        _FILLED,
        "    if flat and len(flat) % size:\n        return None\n",
    ),
    Mutant(
        "read_batch",
        "a wrong size raises",
        _FILLED,
        "    assert not flat or len(flat) == size * len(hashes)\n",
    ),
    Mutant(
        "read_batch",
        "a wrong size: the event stays, without tokens",
        _FILLED,
        "    if flat and len(flat) != size * len(hashes):\n        flat = []\n",
    ),
    Mutant(
        "read_batch",
        "copies are passed over: no tokens fill no blocks",
        "    if flat and len(flat) != size",
        "    if len(flat) != size",
    ),
    Mutant(
        "read_batch",
        "no tokens are an empty tuple for each block",
        "range(0, len(flat), size)) if flat else ()",
        "range(0, size * len(hashes), size))",
    ),
    Mutant(
        "read_batch",
        "a parent that is missing raises",
        'event.get("parent_block_hash"), tokens',
        'event["parent_block_hash"], tokens',
    ),
    Mutant(
        "read_batch",
        "a parent that is called 0 is taken for none",
        'event.get("parent_block_hash"), tokens',
        'event.get("parent_block_hash") or None, tokens',
    ),
    Mutant(
        "read_batch",
        "names in bytes become numbers",
        'hashes, size, flat = tuple(event["block_hashes"]),',
        "hashes, size, flat = tuple(int.from_bytes(name, 'big') if isinstance(name, bytes) else name "
        'for name in event["block_hashes"]),',
    ),
    Mutant(
        "read_batch",
        "what is removed comes first",
        "return float(time), [record for record in records if record is not None]",
        "return float(time), sorted((record for record in records if record), key=lambda record: "
        "isinstance(record, Stored))",
    ),
    Mutant(
        "read_batch",
        "time in whole seconds",
        "return float(time), [",
        "return float(int(time)), [",
    ),
    Mutant(
        "read_batch",
        "the salt comes before the adapter",
        'event.get("lora_name"), event.get("cache_salt"), *own',
        'event.get("cache_salt"), event.get("lora_name"), *own',
    ),
    Mutant(
        "read_batch",
        "the keys of a block come first",
        'event.get("lora_name"), event.get("cache_salt"), *own',
        '*own, event.get("lora_name"), event.get("cache_salt")',
    ),
    Mutant(
        "read_batch",
        "a list's salt is passed over",
        '"lora_name": None, **event["lora_name"]}',
        '"lora_name": None}',
    ),
    Mutant(
        "read_batch",
        "a list's salt is an adapter's name",
        '"lora_name": None, **event["lora_name"]}',
        '"lora_name": str(event["lora_name"])}',
    ),
    Mutant(
        "read_batch",
        "what stands where the adapter's name does is a text",
        'if isinstance(event.get("lora_name"), dict):',
        "if False:",
    ),
    Mutant("read_batch", "no salt", 'event.get("cache_salt"), *own', "*own"),
    Mutant(
        "read_batch",
        "lora_id in the place of a name",
        'parts = [event.get("lora_name"),',
        'parts = [event.get("lora_name") or str(event.get("lora_id") or ""),',
    ),
    Mutant("read_batch", "all blocks have the keys of the first", "keys[at] or []", "keys[0] or []"),
    Mutant("read_batch", "None in the keys raises", "(keys[at] or [])", "keys[at]"),
    Mutant(
        "read_batch",
        "a text that comes twice stays twice",
        "tuple(dict.fromkeys(part for part in parts if part))",
        "tuple(part for part in parts if part)",
    ),
    Mutant(
        "read_batch",
        "texts sorted",
        "tuple(dict.fromkeys(part for part in parts if part))",
        "tuple(sorted({part for part in parts if part}))",
    ),
    Mutant(
        "read_batch",
        'the text "" names something',
        "for part in parts if part)",
        "for part in parts if part is not None)",
    ),
    Mutant(
        "read_batch",
        "an empty space for each block where none has one",
        "spaces=spaces if any(spaces) else ()",
        "spaces=spaces",
    ),
    # ------------------------------------------------------------ store
    Mutant(
        "store",
        "new blocks share one set of media",
        "space, set(), True)",
        "space, blocks[parent].media if at else set(), True)",
    ),
    Mutant(
        "store",
        "no placeholder",
        "            if parent is not None and parent not in blocks:\n"
        "                blocks[parent] = Block(None, (), (), set(), False)\n",
        "",
    ),
    Mutant(
        "store",
        "a placeholder counts as told",
        "Block(None, (), (), set(), False)",
        "Block(None, (), (), set(), True)",
    ),
    Mutant(
        "store",
        "a placeholder is in the medium of what follows it",
        "Block(None, (), (), set(), False)",
        "Block(None, (), (), {event.medium}, False)",
    ),
    Mutant(
        "store",
        "a prompt's beginning follows a placeholder called None",
        "if parent is not None and parent not in blocks",
        "if parent not in blocks",
    ),
    Mutant(
        "store",
        "a parent that is called 0 gets no placeholder",
        "if parent is not None and parent not in blocks",
        "if parent and parent not in blocks",
    ),
    Mutant("store", "a placeholder that is told stays one", _NEW, "        if block is None:\n"),
    Mutant(
        "store",
        "a placeholder that is told follows nothing",
        "Block(parent, event.tokens[at], space, set(), True)",
        "Block(parent if block is None else None, event.tokens[at], space, set(), True)",
    ),
    Mutant(
        "store",
        "a placeholder that is told: what followed it is thrown away",
        "            block = blocks[name] =",
        "            for each in [each for each, b in blocks.items() if b.parent == name]:\n"
        "                del blocks[each]\n"
        "            block = blocks[name] =",
    ),
    Mutant(
        "store",
        "a block that is known is made anew: its other media are forgotten",
        _NEW,
        "        if block is None or not block.seen or event.tokens:\n",
    ),
    Mutant(
        "store",
        "a hole is taken for a placeholder",
        _NEW,
        "        if block is None or not block.media:\n",
    ),
    Mutant(
        "store",
        "a block that is known follows whom it is told behind now",
        "        block.media.add(event.medium)\n",
        "        block.parent = parent\n        block.media.add(event.medium)\n",
    ),
    Mutant(
        "store",
        "a block that is known gets the tokens that are told now",
        "        block.media.add(event.medium)\n",
        "        block.tokens = event.tokens[at] if event.tokens else block.tokens\n"
        "        block.media.add(event.medium)\n",
    ),
    Mutant(
        "store",
        "a block that is known gets the space that is told now",
        "        block.media.add(event.medium)\n",
        "        block.space = event.spaces[at] if event.spaces else ()\n"
        "        block.media.add(event.medium)\n",
    ),
    Mutant(
        "store",
        "a block is in one medium: it moves",
        "        block.media.add(event.medium)\n",
        "        block.media = {event.medium}\n",
    ),
    Mutant("store", "GPU always", "block.media.add(event.medium)", 'block.media.add("GPU")'),
    Mutant(
        "store",
        "all blocks follow the event's parent",
        "        parent = name\n",
        "        parent = event.parent\n",
        after=_STORE,
    ),
    Mutant(
        "store",
        "only the first block has the event's space",
        "space = event.spaces[at] if event.spaces else ()",
        "space = event.spaces[0] if event.spaces and not at else ()",
    ),
    Mutant(
        "store",
        "all blocks have the space of the first",
        "space = event.spaces[at] if event.spaces else ()",
        "space = event.spaces[0] if event.spaces else ()",
    ),
    Mutant("store", "no spaces raise", "event.spaces[at] if event.spaces else ()", "event.spaces[at]"),
    Mutant(
        "store",
        "a copy of what is not known becomes a block without tokens",
        "            if not event.tokens:\n                continue\n",
        "            event = event if event.tokens else type(event)(event.hashes, event.parent, "
        "((),) * len(event.hashes), event.block_size, event.medium)\n",
    ),
    Mutant(
        "store",
        "a copy of a placeholder is in the medium",
        _NEW,
        "        if block is None or (not block.seen and event.tokens):\n",
    ),
    Mutant(
        "store",
        "copies end at the first that is not known",
        "                continue\n",
        "                break\n",
        after=_STORE,
    ),
    Mutant(
        "store",
        "copies leave a placeholder for their parent",
        "    parent = event.parent\n",
        "    parent = event.parent\n"
        "    if parent is not None and parent not in blocks:\n"
        "        blocks[parent] = Block(None, (), (), set(), False)\n",
        after=_STORE,
    ),
    Mutant(
        "store",
        "copies are passed over",
        "    parent = event.parent\n",
        "    parent = event.parent\n    if not event.tokens:\n        return\n",
        after=_STORE,
    ),
    # ------------------------------------------------------------ remove
    Mutant(
        "remove",
        "out of one medium is out of all",
        "            blocks[name].media.remove(event.medium)\n",
        "            blocks[name].media.clear()\n",
    ),
    Mutant(
        "remove",
        "any medium is taken for GPU",
        "            blocks[name].media.remove(event.medium)\n",
        '            blocks[name].media.discard("GPU")\n',
    ),
    Mutant(
        "remove",
        "what is not in the medium leaves it all the same",
        "if name in blocks and event.medium in blocks[name].media:\n"
        "            blocks[name].media.remove(event.medium)\n",
        "if name in blocks:\n            blocks[name].media.clear()\n",
    ),
    Mutant(
        "remove",
        "what is not known raises",
        "if name in blocks and event.medium in",
        "if event.medium in",
    ),
    Mutant(
        "remove",
        "what is not in the medium raises",
        "if name in blocks and event.medium in blocks[name].media:",
        "if name in blocks:",
    ),
    Mutant(
        "remove",
        "ends at the first name that is not known",
        "            _drop(blocks, name)\n",
        "            _drop(blocks, name)\n        elif name not in blocks:\n            break\n",
    ),
    Mutant(
        "remove",
        "no holes: a block goes, whatever follows it",
        "        if any(block.parent == name for block in blocks.values()):\n            return\n",
        "",
    ),
    Mutant(
        "remove",
        "what follows goes as well",
        "            _drop(blocks, name)\n",
        "            _drop(blocks, name)\n"
        "            gone = [name] if name in blocks and not blocks[name].media else []\n"
        "            for one in gone:\n"
        "                gone += [each for each, block in blocks.items() if block.parent == one]\n"
        "                del blocks[one]\n",
    ),
    Mutant(
        "remove",
        "what follows becomes a beginning",
        "        if any(block.parent == name for block in blocks.values()):\n            return\n",
        "        for block in blocks.values():\n"
        "            block.parent = None if block.parent == name else block.parent\n",
    ),
    Mutant(
        "remove",
        "a hole counts as nothing that follows",
        "if any(block.parent == name for",
        "if any(block.parent == name and block.media for",
    ),
    Mutant(
        "remove",
        "holes above stay",
        "        name = blocks.pop(name).parent\n",
        "        del blocks[name]\n        return\n",
    ),
    Mutant(
        "remove",
        "one hole above goes, and no more",
        "            _drop(blocks, name)\n",
        "            above = blocks[name].parent\n"
        "            over = blocks[above].parent if above is not None else None\n"
        "            keep = {over: blocks[over]} if over is not None else {}\n"
        "            _drop(blocks, name)\n"
        "            blocks.update({each: kept for each, kept in keep.items() if each not in blocks})\n",
    ),
    Mutant(
        "remove",
        "a placeholder above stays",
        "while name is not None and not blocks[name].media:",
        "while name is not None and not blocks[name].media and blocks[name].seen:",
    ),
    Mutant(
        "remove",
        "what is above goes, though something else follows it",
        "        name = blocks.pop(name).parent\n",
        "        name = blocks.pop(name).parent\n"
        "        while name is not None and not blocks[name].media:\n"
        "            name = blocks.pop(name).parent\n"
        "        return\n",
    ),
    Mutant(
        "remove",
        "what is above goes, though it is in a medium",
        "    while name is not None and not blocks[name].media:\n",
        "    if blocks[name].media:\n        return\n    while name is not None:\n",
        after=_DROP,
    ),
    Mutant(
        "remove",
        "Cleared makes another dict",
        "        blocks.clear()\n",
        "        blocks = {}\n",
        after=_REMOVE,
    ),
    Mutant(
        "remove",
        "Cleared leaves what was never told",
        "        blocks.clear()\n",
        "        for name in [each for each, block in blocks.items() if block.seen]:\n"
        "            del blocks[name]\n",
        after=_REMOVE,
    ),
    Mutant(
        "remove",
        "Cleared clears GPU alone",
        "        blocks.clear()\n        return\n",
        '        event = Removed(tuple(blocks), "GPU")\n',
        after=_REMOVE,
    ),
    Mutant(
        "remove",
        "Cleared empties the media and leaves the blocks",
        "        blocks.clear()\n",
        "        for block in blocks.values():\n            block.media.clear()\n",
        after=_REMOVE,
    ),
    Mutant("remove", "who follows whom as it was before the event", replaces={"remove": _followed_before}),
    Mutant("remove", "leaves first, and nothing above goes", replaces={"remove": _leaves_first}),
    # ------------------------------------------------------------ order
    Mutant(
        "order",
        "live: a gap is one to the number before the publisher began anew",
        "    if seq <= rank.newest:\n        rank.held.clear()\n        _begin_anew(rank)\n"
        "    skipped, rank.newest = seq > rank.newest + 1, seq\n",
        "    skipped = seq > rank.newest + 1\n    if seq <= rank.newest:\n        rank.held.clear()\n"
        "        _begin_anew(rank)\n    rank.newest = seq\n",
    ),
    Mutant(
        "order",
        "asks from the first that is missing",
        "rank.ask(max(rank.last, 0))",
        "rank.ask(rank.last + 1)",
    ),
    Mutant(
        "order",
        "asks from -1 where nothing was delivered",
        "rank.ask(max(rank.last, 0))",
        "rank.ask(rank.last)",
    ),
    Mutant("order", "asks for everything each time", "rank.ask(max(rank.last, 0))", "rank.ask(0)"),
    Mutant(
        "order",
        "asking is not noted",
        "rank.asking, rank.top, rank.again = True, -1, False",
        "rank.top, rank.again = -1, False",
    ),
    Mutant(
        "order",
        "top stays from the answer before",
        "rank.asking, rank.top, rank.again = True, -1, False",
        "rank.asking, rank.again = True, False",
    ),
    Mutant(
        "order",
        "again stays from the answer before",
        "rank.asking, rank.top, rank.again = True, -1, False",
        "rank.asking, rank.top = True, -1",
    ),
    Mutant("order", "a new publisher: last stays", 'rank.last, rank.payload = -1, b""', 'rank.payload = b""'),
    Mutant("order", "a new publisher: nobody is told", "    rank.restart()\n", ""),
    Mutant(
        "order",
        "a new publisher: newest stays",
        "    rank.newest = rank.held[-1][0] if rank.held else -1\n",
        "",
    ),
    Mutant(
        "order",
        "a new publisher: newest is -1 though some are held",
        "rank.held[-1][0] if rank.held else -1",
        "-1",
    ),
    Mutant(
        "order",
        "a new publisher: newest is that of the first that is held",
        "rank.held[-1][0] if",
        "rank.held[0][0] if",
    ),
    Mutant(
        "order", "a new publisher is not asked", "    if rank.replay:\n        _ask(rank)\n", "", after=_ANEW
    ),
    Mutant(
        "order",
        "a new publisher is asked though nobody can be",
        "    if rank.replay:\n        _ask(rank)\n",
        "    _ask(rank)\n",
        after=_ANEW,
    ),
    Mutant("order", "delivered twice", "    if seq <= rank.last:\n        return\n", "", after=_NEXT),
    Mutant(
        "order",
        "nobody is told what is lost",
        "        rank.lost(rank.last + 1, seq - 1)\n",
        "        pass\n",
    ),
    Mutant(
        "order",
        "lost begins with one that was delivered",
        "rank.lost(rank.last + 1, seq - 1)",
        "rank.lost(rank.last, seq - 1)",
    ),
    Mutant(
        "order",
        "lost ends with one that is delivered",
        "rank.lost(rank.last + 1, seq - 1)",
        "rank.lost(rank.last + 1, seq)",
    ),
    Mutant(
        "order",
        "what was before the first message is not lost",
        "    if seq > rank.last + 1:\n",
        "    if -1 < rank.last < seq - 1:\n",
        after=_NEXT,
    ),
    Mutant(
        "order",
        "lost is told after the message behind it",
        "        rank.lost(rank.last + 1, seq - 1)\n    rank.last, rank.payload = seq, payload\n"
        "    rank.deliver(seq, payload)\n",
        "        rank.deliver(seq, payload)\n        rank.lost(rank.last + 1, seq - 1)\n    else:\n"
        "        rank.deliver(seq, payload)\n    rank.last, rank.payload = seq, payload\n",
    ),
    Mutant(
        "order",
        "what the last message was is not kept",
        "    rank.last, rank.payload = seq, payload\n",
        "    rank.last = seq\n",
    ),
    Mutant("order", "connected: what is held stays", "        rank.held.clear()\n", "", after=_CONNECTED),
    Mutant(
        "order",
        "connected: asks though nobody can be asked",
        "    if rank.replay:\n        rank.held.clear()\n        _ask(rank)\n",
        "    rank.held.clear()\n    _ask(rank)\n",
        after=_CONNECTED,
    ),
    Mutant(
        "order",
        "connected: another connection is a new publisher",
        "        _ask(rank)\n",
        "        _begin_anew(rank)\n",
        after=_CONNECTED,
    ),
    Mutant(
        "order",
        "connected: asks only the first time",
        "    if rank.replay:\n",
        "    if rank.replay and rank.last < 0:\n",
        after=_CONNECTED,
    ),
    Mutant(
        "order",
        "connected: asks only if it is not waiting",
        "    if rank.replay:\n",
        "    if rank.replay and not rank.asking:\n",
        after=_CONNECTED,
    ),
    Mutant(
        "order",
        "live: the same number again is passed over",
        "    if seq <= rank.newest:\n",
        "    if seq < rank.newest:\n",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: what an answer had already is a new publisher",
        "    if seq <= rank.newest:\n",
        "    if seq <= rank.last:\n",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: only number 0 is a new publisher",
        "    if seq <= rank.newest:\n",
        "    if seq == 0 and rank.newest >= 0:\n",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: the first message of a new publisher is forgotten",
        "        _begin_anew(rank)\n",
        "        _begin_anew(rank)\n        return\n",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: what is held of the old publisher stays",
        "        rank.held.clear()\n",
        "",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: an old number is late, and passed over",
        "        rank.held.clear()\n        _begin_anew(rank)\n",
        "        return\n",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: newest is never below last",
        "    skipped, rank.newest = seq > rank.newest + 1, seq\n",
        "    skipped, rank.newest = seq > rank.newest + 1, max(rank.newest, seq, rank.last)\n",
    ),
    Mutant(
        "order",
        "live: newest is set only for what is delivered",
        "skipped, rank.newest = seq > rank.newest + 1, seq",
        "skipped, rank.newest = seq > rank.newest + 1, rank.newest if rank.asking else seq",
    ),
    Mutant(
        "order", "live: a gap while waiting is not noted", "        rank.again = rank.again or skipped\n", ""
    ),
    Mutant(
        "order",
        "live: no gap, so again is False again",
        "rank.again = rank.again or skipped",
        "rank.again = skipped",
    ),
    Mutant(
        "order",
        "live: any message while waiting is a reason to ask again",
        "rank.again = rank.again or skipped",
        "rank.again = True",
    ),
    Mutant(
        "order",
        "live: again where it is beyond what was delivered",
        "seq > rank.newest + 1, seq",
        "seq > rank.last + 1, seq",
    ),
    Mutant(
        "order",
        "live: waiting is no reason to hold",
        "    if rank.asking:\n",
        "    if rank.asking and seq > rank.last + 1:\n",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: messages that come while waiting are dropped: the answer will have them",
        _HOLDS + "    elif",
        "    elif",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: the message behind a gap is not held",
        _HOLDS + "        _ask(rank)\n",
        "        _ask(rank)\n",
        after=_LIVE,
    ),
    Mutant(
        "order",
        "live: a gap is not asked for",
        "    elif seq > rank.last + 1 and rank.replay:\n",
        "    elif False:\n",
    ),
    Mutant(
        "order",
        "live: the first message is no gap, whatever its number",
        "    elif seq > rank.last + 1 and rank.replay:\n",
        "    elif -1 < rank.last < seq - 1 and rank.replay:\n",
    ),
    Mutant(
        "order",
        "live: a gap is held though nobody can be asked",
        "    elif seq > rank.last + 1 and rank.replay:\n",
        "    elif seq > rank.last + 1:\n",
    ),
    Mutant(
        "order",
        "live: a gap of one message is none",
        "    elif seq > rank.last + 1 and rank.replay:\n",
        "    elif seq > rank.last + 2 and rank.replay:\n",
    ),
    Mutant(
        "order",
        "answer: the message asked for once more is not compared",
        "    if seq == rank.last and payload != rank.payload:\n",
        "    if False:\n",
    ),
    Mutant(
        "order",
        "answer: the last message once more is a new publisher",
        "    if seq == rank.last and payload != rank.payload:\n",
        "    if seq == rank.last:\n",
    ),
    Mutant(
        "order",
        "answer: what is held does not stay for a new publisher",
        "        _begin_anew(rank)\n",
        "        rank.held.clear()\n        _begin_anew(rank)\n",
        after=_ANSWER,
    ),
    Mutant(
        "order",
        "answer: goes on with the other publisher's message",
        "        _begin_anew(rank)\n        return\n",
        "        _begin_anew(rank)\n",
        after=_ANSWER,
    ),
    Mutant(
        "order",
        "answer: what is held comes at the end, too late for its turn",
        "    for held in _held_before(rank, seq):\n        _next(rank, *held)\n",
        "",
    ),
    Mutant(
        "order",
        "answer: the held one with the same number has its turn first",
        "rank.held[0][0] < seq",
        "rank.held[0][0] <= seq",
    ),
    Mutant(
        "order",
        "answer: all that is held has its turn first",
        "while rank.held and rank.held[0][0] < seq:",
        "while rank.held:",
    ),
    Mutant(
        "order",
        "answer: only one of those that are held has its turn",
        "while rank.held and rank.held[0][0] < seq:",
        "if rank.held and rank.held[0][0] < seq:",
    ),
    Mutant(
        "order",
        "answer: asking is worth it though nothing new came",
        "    if seq > rank.last:\n        _next(rank, seq, payload)\n        rank.again = True\n",
        "    _next(rank, seq, payload)\n    rank.again = True\n",
    ),
    Mutant(
        "order",
        "answer: asking once is enough",
        "        _next(rank, seq, payload)\n        rank.again = True\n",
        "        _next(rank, seq, payload)\n",
        after=_ANSWER,
    ),
    Mutant("order", "answer: how far it came is not noted", "    rank.top = max(rank.top, seq)\n", ""),
    Mutant(
        "order",
        "answer: only what is new counts for how far it came",
        "    rank.top = max(rank.top, seq)\n",
        "    rank.top = max(rank.top, seq) if seq > rank.last else rank.top\n",
    ),
    Mutant(
        "order",
        "answered: an answer that ends early is taken for complete",
        "    if rank.top < rank.last:\n",
        "    if False:\n",
    ),
    Mutant(
        "order",
        "answered: an answer up to the last message ends early",
        "    if rank.top < rank.last:\n",
        "    if rank.top <= rank.last:\n",
    ),
    Mutant(
        "order",
        "answered: an empty answer says nothing",
        "    if rank.top < rank.last:\n",
        "    if -1 < rank.top < rank.last:\n",
    ),
    Mutant(
        "order",
        "answered: an answer that ends early: what is held has its turn all the same",
        "        _begin_anew(rank)\n        return\n",
        "        _begin_anew(rank)\n",
        after=_ANSWERED,
    ),
    Mutant(
        "order",
        "answered: what is held does not stay for a new publisher",
        "        _begin_anew(rank)\n",
        "        rank.held.clear()\n        _begin_anew(rank)\n",
        after=_ANSWERED,
    ),
    Mutant(
        "order",
        "answered: only the first of those that are held",
        "    while rank.held:\n",
        "    if rank.held:\n",
        after=_ANSWERED,
    ),
    Mutant("order", "answered: never asks again", "and rank.again:", "and False:"),
    Mutant(
        "order",
        "answered: asks for ever",
        "rank.held[0][0] > rank.last + 1 and rank.again:",
        "rank.held[0][0] > rank.last + 1:",
    ),
    Mutant(
        "order",
        "answered: asks again though nothing is missing",
        "if rank.held[0][0] > rank.last + 1 and rank.again:",
        "if rank.again:",
    ),
    Mutant(
        "order",
        "answered: what is behind a gap is given up before asking",
        "            _ask(rank)\n            return\n",
        "            rank.held.clear()\n            _ask(rank)\n            return\n",
        after=_ANSWERED,
    ),
    Mutant(
        "order",
        "answered: the one behind a gap is taken out before asking",
        "            _ask(rank)\n            return\n",
        "            rank.held.pop(0)\n            _ask(rank)\n            return\n",
        after=_ANSWERED,
    ),
    Mutant(
        "order",
        "answered: asks, and goes on",
        "            _ask(rank)\n            return\n",
        "            _ask(rank)\n",
        after=_ANSWERED,
    ),
    Mutant("order", "answered: waits for ever", "    rank.asking = False\n", "    pass\n", after=_ANSWERED),
    Mutant(
        "order",
        "answered: held messages stay held after their turn",
        "    while rank.held:\n",
        "    for each in list(rank.held):\n        if each[0] > rank.last + 1 and rank.again:\n"
        "            _ask(rank)\n            return\n        _next(rank, *each)\n    while False:\n",
        after=_ANSWERED,
    ),
    Mutant(
        "order",
        "answered: waits no longer though it asks again",
        "            _ask(rank)\n            return\n",
        "            _ask(rank)\n            break\n",
        after=_ANSWERED,
    ),
    # ------------------------------------------------------------ hit
    Mutant("hit", "counts blocks", "done += len(blocks[at].tokens)", "done += 1"),
    Mutant("hit", "a hole is a hit", "block.seen and block.media and", "block.seen and"),
    Mutant("hit", "the space is not looked at", " and block.space == space\n", "\n"),
    Mutant(
        "hit",
        "without a space any will do",
        "block.space == space\n",
        "(not space or block.space == space)\n",
    ),
    Mutant(
        "hit",
        "one text in common is the same space",
        "block.space == space\n",
        "(block.space == space or set(block.space) & set(space))\n",
    ),
    Mutant(
        "hit",
        "the order of a space's texts does not count",
        "block.space == space\n",
        "sorted(block.space) == sorted(space)\n",
    ),
    Mutant(
        "hit",
        "only the first block's space is looked at",
        "block.space == space\n",
        "(parent is not None or block.space == space)\n",
    ),
    Mutant(
        "hit",
        "GPU alone is somewhere",
        "block.seen and block.media and",
        'block.seen and "GPU" in block.media and',
    ),
    Mutant(
        "hit",
        "a block that the prompt ends in is a hit",
        "0 < size <= len(tokens) and tuple(tokens[:size]) == block.tokens",
        "0 < size and len(tokens) and tuple(tokens[:size]) == block.tokens[: len(tokens)]",
    ),
    Mutant(
        "hit",
        "a block that begins alike is a hit",
        "tuple(tokens[:size]) == block.tokens",
        "tokens[0] == block.tokens[0]",
    ),
    Mutant(
        "hit",
        "the tokens must be a tuple",
        "tuple(tokens[:size]) == block.tokens",
        "tokens[:size] == block.tokens",
    ),
    Mutant(
        "hit",
        "the first block that follows must be the right one",
        "            return name\n",
        "            return name\n        if block.parent == parent:\n            return None\n",
        after=_FOLLOWING,
    ),
    Mutant(
        "hit",
        "each block is compared with the beginning",
        "_following(blocks, at, tokens[done:], space)",
        "_following(blocks, at, tokens, space)",
    ),
    Mutant(
        "hit",
        "a prompt's beginning may come again",
        "block.parent == parent and",
        "block.parent in (None, parent) and",
    ),
    Mutant("hit", "ends at a block that is called 0", "while at is not None:", "while at:"),
    Mutant(
        "hit",
        "what follows a placeholder is a beginning",
        "block.parent == parent and",
        "(block.parent == parent or parent is None and block.seen and not blocks[block.parent].seen) and",
    ),
    Mutant(
        "hit",
        "holes are swept out on the way",
        "    done, at = 0,",
        "    for name in [name for name, block in blocks.items() if not block.media]:\n"
        "        del blocks[name]\n    done, at = 0,",
        after=_HIT,
    ),
    Mutant("hit", "follows nobody: any block with the next tokens", replaces={"hit": _anywhere}),
    Mutant("hit", "the longest path that fits, orphans too", replaces={"hit": _longest_anywhere}),
    Mutant("hit", "a table that is kept from call to call", replaces={"hit": _by_a_table}),
    Mutant("hit", "a hole is jumped over", replaces={"hit": _over_holes}),
    Mutant("hit", "the first block alone", "while at is not None:", "if at is not None:"),
]
