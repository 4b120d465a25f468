"""Plausible wrong solutions of lesson 08: stories that turn out otherwise."""

from __future__ import annotations

from lessons.grading import Mutant

_SPLIT = "def split_story"
_FORGET = "def forget_story"
_NINE = "def nine_steps"
_POOL = "pool = first + problem + thanks + few_shot + 2"
_EXACT = "len(first) + 3 + len(second) - common(first, second) + 3"
_SUM = "first + second + third + 4"

MUTANTS = [
    # ------------------------------------------------------------ split_story
    Mutant("split_story", "the shared part is counted twice", _EXACT, "len(first) + 3 + len(second) + 3"),
    Mutant("split_story", "the last token of a reply is counted", _EXACT, f"{_EXACT} + 2"),
    Mutant(
        "split_story", "replies are not counted", _EXACT, "len(first) + len(second) - common(first, second)"
    ),
    Mutant("split_story", "one slot too few", _EXACT, f"{_EXACT} - 1"),
    Mutant("split_story", "one slot too many", _EXACT, f"{_EXACT} + 1"),
    Mutant("split_story", "a pool that is large enough for anything", _EXACT, "1000"),
    Mutant(
        "split_story",
        "the system prompt is taken for what is shared",
        _EXACT,
        "len(first) + 3 + len(second) - len(encode(system)) + 3",
    ),
    Mutant(
        "split_story",
        "characters instead of tokens",
        _EXACT,
        "len(first_prompt(system, 'Hello')) + len(first_prompt(system, 'What can you do?'))",
    ),
    Mutant("split_story", "both in one step", "reply(4))], [Ask(", "reply(4)), Ask("),
    Mutant(
        "split_story",
        "the same chat goes on",
        'Ask("chat 2", "V1", "What can you do?", reply(4))',
        'Ask("chat 1", "V1", "What can you do?", reply(4))',
        after=_SPLIT,
    ),
    Mutant(
        "split_story",
        "the second says the same: no split",
        'Ask("chat 2", "V1", "What can you do?", reply(4))',
        'Ask("chat 2", "V1", "Hello", reply(4))',
        after=_SPLIT,
    ),
    Mutant(
        "split_story",
        "counted for a system prompt of its own",
        "(encode(first_prompt(system, text)) for",
        '(encode(first_prompt("You are a helpful assistant.", text)) for',
    ),
    # ------------------------------------------------------------ forget_story
    Mutant("forget_story", "room for everything: nothing is forgotten", _SUM, "first + second + third + 200"),
    Mutant("forget_story", "the second turn does not fit", _SUM, "first + second - 10"),
    Mutant(
        "forget_story",
        "chat 2 needs too much: the first turn goes, too",
        '"V1", LONG, reply(4)',
        '"V1", LONG + LONG, reply(4)',
    ),
    Mutant("forget_story", "chat 2 needs too little", '"V1", LONG, reply(4)', '"V1", "Hi", reply(2)'),
    Mutant("forget_story", "chat 1 goes on in step 3", '"chat 2", "V1"', '"chat 1", "V1"', after=_FORGET),
    Mutant("forget_story", "another chat comes back", '"chat 1", "U3"', '"chat 3", "U3"', after=_FORGET),
    Mutant("forget_story", "chat 2 says what chat 1 said", '"V1", LONG, reply(4)', '"V1", "Hello", reply(4)'),
    Mutant(
        "forget_story",
        "the second turn is as short as a word",
        '"U2", LONG, reply(4)',
        '"U2", "Hi", reply(4)',
    ),
    Mutant("forget_story", "the third turn was forgotten", _SUM, "first + second + 6"),
    Mutant(
        "forget_story",
        "counted for a system prompt of its own",
        "first = len(encode(first_prompt(system,",
        "first = len(encode(first_prompt('You are a very helpful and a very kind assistant.',",
        after=_FORGET,
    ),
    # ------------------------------------------------------------ nine_steps
    Mutant("nine_steps", "room for everything", _POOL, f"{_POOL} + 300"),
    Mutant("nine_steps", "the pool of the paper's story", _POOL, "pool = 352"),
    Mutant("nine_steps", "the pool is too small for the queries", _POOL, f"{_POOL} - 30"),
    Mutant("nine_steps", "thirty slots too many", _POOL, f"{_POOL} + 30"),
    Mutant(
        "nine_steps", "U2 is short", "problem, thanks = later(PLENTY, 4)", "problem, thanks = later(LONG, 4)"
    ),
    Mutant(
        "nine_steps",
        "the story fits beside U2",
        "room = (few_shot + thanks + 2 + problem + thanks) // 2",
        "room = few_shot + thanks - 8",
    ),
    Mutant(
        "nine_steps",
        "the story takes everything",
        "room = (few_shot + thanks + 2 + problem + thanks) // 2",
        "room = problem + thanks + 20",
    ),
    Mutant(
        "nine_steps",
        "the samples are too short",
        "need = leaves[0] + leaves[2] + leaves[3] // 2 + 2",
        "need = leaves[0]",
    ),
    Mutant(
        "nine_steps",
        "the samples are too long",
        "need = leaves[0] + leaves[2] + leaves[3] // 2 + 2",
        "need = 3 * sum(leaves)",
    ),
    Mutant("nine_steps", "one sample", "need // samples + 1, n=samples", "need + 1, n=1"),
    Mutant("nine_steps", "samples of another question", '"A", questions[1]', '"A", questions[2]'),
    Mutant(
        "nine_steps",
        "the same question four times",
        '" friend", " fruit", " city"',
        '" color", " color", " color"',
    ),
    Mutant("nine_steps", "chat 2 comes back", 'Ask("chat 1", "U3"', 'Ask("chat 2", "U3"', after=_NINE),
    Mutant("nine_steps", "no empty step", "        [],\n", ""),
    Mutant(
        "nine_steps",
        "the queries one after the other",
        '[Ask("few-shot", f"Q{at}", questions[at - 1], reply(4)) for at in (2, 3, 4)],',
        '*[[Ask("few-shot", f"Q{at}", questions[at - 1], reply(4))] for at in (2, 3, 4)],',
    ),
]
