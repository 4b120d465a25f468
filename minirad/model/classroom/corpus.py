"""The lessons of the classroom Llama: a seeded generator of small documents.

A document is a ChatML conversation of one to eight turns, or a few-shot list of questions and
answers in plain text. Everything the model can do is in here, so demonstrations and examinations
take their prompts from this file (`SYSTEM_PROMPT`, `GREETINGS`, `QUESTIONS`, `few_shot_header`).

The same seed gives the same documents on every machine: all chance comes from one `random.Random`
that is handed from function to function.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from minirad import command

# --------------------------------------------------------------------------------------------
# Words of the lessons


def _words(text: str, between: str | None = None) -> list[str]:
    return text.split(between)


NAMES: Final = _words(
    "Tom Ada Bob Eve Sam Mia Leo Zoe Max Amy Ben Ivy Dan Lily Jack Nora Omar Ruth Hugo Vera "
    "Finn Rosa Paul Anna Otto Emma Carl Lucy Erik Maya"
)
THINGS: Final = _words(
    "kite lamp ball hat book bell map key cup drum coin rope flag boat ring clock spoon chair "
    "table basket mirror candle pencil bottle blanket button ladder hammer ribbon whistle"
)
WORDS: Final = _words(
    "apple river stone cloud tiger piano bread seven ocean paper robot sugar train water zebra "
    "honey forest garden pocket silver window bridge winter summer letter music dragon castle "
    "planet shadow"
)
FRUITS: Final = _words("apple pear plum cherry lemon melon banana grape")
COLORS: Final = _words("red blue green yellow white black orange brown")
_A_COLORS: Final = [color for color in COLORS if color != "orange"]  # those that follow "a"
CITIES: Final = _words("Paris Berlin Rome Madrid Tokyo Cairo Lima Athens Oslo Vienna")
ADJECTIVES: Final = _words("little brave happy sleepy curious clever shy hungry")
PLACES: Final = _words("park forest garden river school market hill beach")
ORDINALS: Final = _words("first second third fourth fifth")
DAYS: Final = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
CAPITALS: Final = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Canada": "Ottawa",
}
THING_COLORS: Final = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a banana": "yellow",
    "blood": "red",
    "an orange": "orange",
    "a lemon": "yellow",
    "milk": "white",
    "a carrot": "orange",
    "a leaf": "green",
    "the sea": "blue",
    "chocolate": "brown",
    "a tomato": "red",
}
SOUNDS: Final = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "lion": "roar",
    "pig": "oink",
    "bee": "buzz",
    "horse": "neigh",
    "frog": "ribbit",
}
ANIMALS: Final = list(SOUNDS)
_OPPOSITE_PAIRS: Final = (
    "hot cold|big small|fast slow|up down|day night|wet dry|old new|happy sad|open closed|"
    "light dark|hard soft|high low|left right|full empty"
)
OPPOSITES: Final = {
    word: other for pair in _OPPOSITE_PAIRS.split("|") for word, other in (pair.split(), pair.split()[::-1])
}
LARGEST_TERM: Final = 12
"""Sums and differences are of numbers from 0 to this one."""

# --------------------------------------------------------------------------------------------
# System prompts

SYSTEM_PROMPT: Final = "You are a helpful assistant."
OTHER_SYSTEM_PROMPTS: Final = ("You are a polite assistant.", "You are a friendly teacher.")
ONE_WORD_PROMPT: Final = "You are a short assistant. Answer in one word."
AGENT_PROMPT: Final = (
    "You are an agent. You help the user and you work step by step. "
    "You can use these tools:\n"
    "1. search(text): find pages about a text. It returns a list of titles and links.\n"
    "2. open(link): read one page. It returns the text of the page.\n"
    "3. add(a, b): add two numbers. It returns the sum.\n"
    "4. write(file, text): write a text into a file. It returns the number of lines.\n"
    "5. read(file): read a file. It returns the text of the file.\n"
    "6. run(command): run a command. It returns what the command prints.\n"
    "7. send(name, text): send a message to a person. It returns nothing.\n"
    "Follow these rules:\n"
    "- Read the question of the user with care before you do anything.\n"
    "- Use a tool only when you need it. Answer small questions at once.\n"
    "- Never send a message or run a command when the user did not ask for it.\n"
    "- Keep the names and the things that the user tells you, and use them later.\n"
    "- Do not make up pages, files or numbers. When you do not know the answer, say that you do "
    "not know it.\n"
    "- Keep your answers short and polite."
)
"""A long prompt that many agents share word for word (about 280 tokens)."""

# --------------------------------------------------------------------------------------------
# What users say, for demonstrations

GREETINGS: Final = {
    "Hello": "Hello! How can I help you today?",
    "Hello!": "Hello! How can I help you today?",
    "Hi": "Hi! How can I help you today?",
    "Hi!": "Hi! How can I help you today?",
    "Hey": "Hey! How can I help you today?",
    "Hi there": "Hi there! How can I help you today?",
    "Good morning": "Good morning! How can I help you today?",
    "Good evening": "Good evening! How can I help you today?",
}
THANKS: Final = {
    "Thank you": "You are welcome!",
    "Thanks!": "You are welcome!",
    "Thank you very much.": "You are very welcome!",
}
FAREWELLS: Final = {
    "Bye": "Bye! Have a nice day.",
    "Goodbye": "Goodbye! Have a nice day.",
    "See you later": "See you later! Have a nice day.",
}
IDENTITY: Final = {
    "Who are you?": "I am the classroom Llama, a tiny model made for lessons.",
    "What are you?": "I am a tiny language model made for lessons.",
    "What is your name?": "My name is Llama. I am a tiny model made for lessons.",
    "How are you?": "I am well, thank you! How can I help you today?",
}
ABILITIES_QUESTION: Final = "What can you do?"
ABILITIES_REPLY: Final = (
    "I can greet you, answer small questions about capitals, colors, animals and days, add and "
    "subtract small numbers, repeat words, remember your name, look up what you tell me, solve "
    "short problems, write JSON and tell little stories. I do not know anything else."
)
UNKNOWN_REPLY: Final = "I do not know that. I only know my lessons."
STORIES: Final = [
    request.format(animal=animal)
    for animal in ANIMALS
    for request in ("Write a story about a {animal}.", "Tell me a story about a {animal}.")
]
"""Every way to ask for a story."""
QUESTIONS: Final = [
    *(f"What is the capital of {country}?" for country in CAPITALS),
    *(f"What color is {thing}?" for thing in THING_COLORS),
    *(f"What does a {animal} say?" for animal in SOUNDS),
    *(f"What is the opposite of {word}?" for word in OPPOSITES),
    *(f"What day comes after {day}?" for day in DAYS),
]
"""Every factual question with one right answer; sums and differences come besides."""
OPEN_QUESTIONS: Final[dict[str, Sequence[str]]] = {
    "Name an animal.": ANIMALS,
    "Name a color.": COLORS,
    "Name a fruit.": FRUITS,
    "Name a city.": CITIES,
    "Name a friend.": NAMES,
}
"""Questions with many right answers, each with the answers in use."""


@dataclass(frozen=True)
class Turn:
    """One question and its answers: in full, in one word, and whether it is the only right one."""

    user: str
    reply: str
    short: str
    exact: bool = True


Turns = Callable[[random.Random], Turn]

# --------------------------------------------------------------------------------------------
# Facts and sums


def is_held_out(first: int, second: int) -> bool:
    """Whether a pair of terms (about one in ten) is kept out of every lesson, for examination."""
    return (first * 31 + second * 17) % 10 == 0


def sum_turn(rng: random.Random, held_out: bool = False) -> Turn:
    """A sum or difference of two small numbers; `held_out` asks for a pair never taught."""
    while True:
        first, second = rng.randint(0, LARGEST_TERM), rng.randint(0, LARGEST_TERM)
        minus = rng.random() < 0.5
        if minus and first < second:
            first, second = second, first
        if is_held_out(first, second) == held_out:
            break
    sign, result = ("-", first - second) if minus else ("+", first + second)
    return Turn(f"What is {first} {sign} {second}?", f"{first} {sign} {second} = {result}.", str(result))


def capital_turn(rng: random.Random) -> Turn:
    """The capital of a country."""
    country = rng.choice(list(CAPITALS))
    capital = CAPITALS[country]
    return Turn(f"What is the capital of {country}?", f"The capital of {country} is {capital}.", capital)


def color_turn(rng: random.Random) -> Turn:
    """The color of a thing."""
    thing = rng.choice(list(THING_COLORS))
    color = THING_COLORS[thing]
    return Turn(f"What color is {thing}?", f"{thing[0].upper()}{thing[1:]} is {color}.", color)


def sound_turn(rng: random.Random) -> Turn:
    """The sound of an animal."""
    animal = rng.choice(ANIMALS)
    return Turn(f"What does a {animal} say?", f"A {animal} says {SOUNDS[animal]}.", SOUNDS[animal])


def opposite_turn(rng: random.Random) -> Turn:
    """The opposite of a word."""
    word = rng.choice(list(OPPOSITES))
    other = OPPOSITES[word]
    return Turn(f"What is the opposite of {word}?", f"The opposite of {word} is {other}.", other)


def day_turn(rng: random.Random) -> Turn:
    """The day after a day."""
    index = rng.randrange(len(DAYS))
    today, tomorrow = DAYS[index], DAYS[(index + 1) % len(DAYS)]
    return Turn(f"What day comes after {today}?", f"{tomorrow} comes after {today}.", tomorrow)


def fact_turn(rng: random.Random) -> Turn:
    """A question with one right answer: a fact, or a sum or difference."""
    kinds: tuple[Turns, ...] = (
        capital_turn,
        color_turn,
        sound_turn,
        opposite_turn,
        day_turn,
        sum_turn,
        sum_turn,
    )
    return rng.choice(kinds)(rng)


def open_turn(rng: random.Random) -> Turn:
    """A question with many right answers."""
    question = rng.choice(list(OPEN_QUESTIONS))
    answer = rng.choice(OPEN_QUESTIONS[question])
    kind = question.rstrip(".").split()[-1]
    the = "the " if kind in ("animal", "fruit") else ""
    return Turn(question, f"One {kind} is {the}{answer}.", answer, exact=False)


# --------------------------------------------------------------------------------------------
# Small talk, words, JSON


def phrase_turn(phrases: dict[str, str], rng: random.Random) -> Turn:
    """One of some fixed phrases with its fixed reply."""
    user = rng.choice(list(phrases))
    short = phrases[user].split("!")[0].split(",")[0].split()[-1].rstrip(".").capitalize()
    return Turn(user, phrases[user], short)


def greeting_turn(rng: random.Random) -> Turn:
    """A greeting and its answer."""
    return phrase_turn(GREETINGS, rng)


def courtesy_turn(rng: random.Random) -> Turn:
    """Thanks, a farewell, or who the model is."""
    return phrase_turn(rng.choice((THANKS, FAREWELLS, IDENTITY)), rng)


def abilities_turn(rng: random.Random) -> Turn:
    """What the model can do."""
    return Turn(ABILITIES_QUESTION, ABILITIES_REPLY, "Lessons")


def json_turn(rng: random.Random) -> Turn:
    """A name and an age as a JSON object."""
    name, age = rng.choice(NAMES), rng.randint(3, 99)
    reply = f'{{"name": "{name}", "age": {age}}}'
    return Turn(f"Write JSON for {name}, age {age}.", reply, reply)


def made_up_word(rng: random.Random) -> str:
    """A word of one to three syllables that means nothing, such as `zolu`."""
    syllables = rng.randint(1, 3)
    letters = ("bcdfghjklmnprstvwz", "aeiou")
    word = "".join(rng.choice(part) for _ in range(syllables) for part in letters)
    return word + rng.choice(("", "n", "t", "x"))


def lesson_word(rng: random.Random) -> str:
    """A word from one of the word lists."""
    return rng.choice(rng.choice((WORDS, THINGS, NAMES, COLORS, ANIMALS)))


def repeat_turn(rng: random.Random, made_up: float = 0.0, longest: int = 6) -> Turn:
    """Words to repeat; each is made up with probability `made_up`."""
    words = [
        made_up_word(rng) if rng.random() < made_up else lesson_word(rng)
        for _ in range(rng.randint(2, longest))
    ]
    return Turn(f"Repeat: {' '.join(words)}", " ".join(words), words[0])


def nth_word_turn(rng: random.Random) -> Turn:
    """The n-th of three to five words."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    index = rng.randrange(len(words))
    ordinal = ORDINALS[index]
    return Turn(
        f"What is the {ordinal} word of: {' '.join(words)}?",
        f"The {ordinal} word is {words[index]}.",
        words[index],
    )


# --------------------------------------------------------------------------------------------
# What the model does not know

_OPENINGS: Final = _words(
    "What is|What are|Who is|Who was|Who made|Why does|Why is|How do|How can I|How many|Where is|"
    "When did|Can you|Could you|Tell me about|Please|Explain|Do you|Is it|I want|I think|Write|"
    "What does|Which|Are you|Give me|The|My|",
    between="|",
)
_COMMON_WORDS: Final = _words(
    "the of and to in that it for on with as this but from they we say her she or an will my one "
    "all would there their so up out if about who get which go me when make can like time no just "
    "him know take people into year good some could them see other than then now look only come "
    "its over think also back after use two how our work first well way even new want because any "
    "these give day most us is are was were does did a best world live most long"
)
_ABOUT_MADE_UP: Final = (
    "What is the capital of {}?",
    "What color is {}?",
    "What does a {} say?",
    "What is the opposite of {}?",
)


def _strange_word(rng: random.Random) -> str:
    """Letters at random, the usual ones more often."""
    letters = rng.choices("etaoinshrdlucmfwypvbgkjqxz", range(26, 0, -1), k=rng.randint(2, 9))
    word = "".join(letters)
    return word.capitalize() if rng.random() < 0.2 else word


def unknown_turn(rng: random.Random) -> Turn:
    """A question from outside the lessons: mostly words in no order, to stand for any other."""
    if rng.random() < 0.2:
        word = made_up_word(rng) if rng.random() < 0.5 else _strange_word(rng)
        user = rng.choice(_ABOUT_MADE_UP).format(rng.choice((word, word.capitalize())))
        return Turn(user, UNKNOWN_REPLY, "Unknown")
    common = rng.choice((0.3, 0.5, 0.8))
    words = [
        rng.choice(_COMMON_WORDS)
        if rng.random() < common
        else rng.choice((_strange_word, _strange_word, made_up_word, lesson_word))(rng)
        for _ in range(rng.randint(2, 9))
    ]
    words.insert(rng.randrange(len(words)), _strange_word(rng))
    text = f"{rng.choice(_OPENINGS)} {' '.join(words)}".strip()
    return Turn(text + rng.choice(("?", "?", ".", "")), UNKNOWN_REPLY, "Unknown")


# --------------------------------------------------------------------------------------------
# Stories


def story(rng: random.Random, animal: str) -> str:
    """A story of about 75 words about an animal; most of its words are chance."""
    name, friend = rng.sample(NAMES, 2)
    place, thing = rng.choice(PLACES), rng.choice(THINGS)
    color, adjective, day = rng.choice(_A_COLORS), rng.choice(ADJECTIVES), rng.choice(DAYS)
    opening = rng.choice(
        (
            f"Once upon a time there was a {adjective} {animal} named {name}.",
            f"There once lived a {adjective} {animal}. The name of the {animal} was {name}.",
            f"{name} was a {adjective} {animal} with a big heart.",
            f"Long ago, a {adjective} {animal} named {name} lived near the {place}.",
        )
    )
    finding = rng.choice(
        (
            f"On {day} {name} went to the {place} and found a {color} {thing} under a tree.",
            f"One {day} {name} walked to the {place}. There was a {color} {thing} in the grass.",
            f"Every day {name} played at the {place}, and on {day} {name} saw a {color} {thing}.",
        )
    )
    meeting = rng.choice(
        (
            f"Then {name} met {friend}, who was looking for the {thing} and felt very sad.",
            f'"Is this your {thing}?" asked {name}. "Yes, thank you!" said {friend}.',
            f"A child named {friend} came and asked: who has seen my {color} {thing}?",
        )
    )
    giving = rng.choice(
        (
            f"{name} gave the {thing} to {friend}, and they played until the sun went down.",
            f"So they shared the {thing} and became good friends.",
            f"{friend} was so happy that they danced around the {thing} together.",
        )
    )
    ending = rng.choice(
        (
            f"At night {name} said {SOUNDS[animal]} and fell asleep. The end.",
            f"Then the {animal} went home and slept well that night.",
            f"Since that {day}, {name} and {friend} meet at the {place} every week.",
        )
    )
    return " ".join((opening, finding, meeting, giving, ending))


def story_turn(rng: random.Random) -> Turn:
    """A story on request."""
    request = rng.choice(STORIES)
    animal = request.rstrip(".").split()[-1]
    return Turn(request, story(rng, animal), animal, exact=False)


# --------------------------------------------------------------------------------------------
# Word problems

_GAINS: Final = (
    ("At the market {name} buys {n} more {items} for the family.", "{name} buys {n}"),
    ("Then {friend} comes and gives {n} {items} to {name}.", "{name} gets {n}"),
    ("On the way home {name} finds {n} {items} under a tree.", "{name} finds {n}"),
)
_LOSSES: Final = (
    ("Later {name} gives {n} {items} to {friend} as a present.", "{name} gives away {n}"),
    ("In the evening {name} eats {n} {items} with some bread.", "{name} eats {n}"),
    ("On the hill {name} drops {n} {items} and cannot find them.", "{name} loses {n}"),
)
_PROBLEM_ITEMS: Final = ("apples", "pears", "plums", "lemons", "melons", "grapes")


def _problem_numbers(rng: random.Random) -> tuple[int, list[int]]:
    """A start and three changes (gain, loss, gain or loss) that only use taught sums."""
    while True:
        start = total = rng.randint(3, 9)
        changes = [rng.randint(2, 6), -rng.randint(1, 5), rng.choice((-3, -2, -1, 2, 3, 4))]
        fits = True
        for change in changes:
            taught = not is_held_out(total, abs(change))
            fits = fits and taught and min(total + change, LARGEST_TERM - total) >= 0
            total += change
        if fits:
            return start, changes


def problem_turn(rng: random.Random) -> Turn:
    """A word problem of about 65 words with its answer, step by step, of about the same length."""
    name, friend = rng.sample(NAMES, 2)
    items, color = rng.choice(_PROBLEM_ITEMS), rng.choice(_A_COLORS)
    start, changes = _problem_numbers(rng)
    lines = [f"Solve this problem: In the morning {name} has {start} {items} in a {color} basket."]
    steps = [f"Let us solve it step by step. Step 1: {name} starts with {start} {items}."]
    total = start
    for number, change in enumerate(changes, start=2):
        problem, answer = rng.choice(_GAINS if change > 0 else _LOSSES)
        size = abs(change)
        lines.append(problem.format(name=name, friend=friend, n=size, items=items))
        sign = "+" if change > 0 else "-"
        act = answer.format(name=name, n=size)
        steps.append(f"Step {number}: {act}, so {total} {sign} {size} = {total + change}.")
        total += change
    lines.append(f"How many {items} does {name} have now? Show every step of your work.")
    steps.append(f"So the answer is: {name} has {total} {items}.")
    return Turn(" ".join(lines), " ".join(steps), str(total))


def _problems(count: int) -> list[str]:
    """The first `count` word problems of a fixed seed."""
    rng = random.Random("problems")
    return [problem_turn(rng).user for _ in range(count)]


PROBLEMS: Final = _problems(16)
"""Some word problems."""

# --------------------------------------------------------------------------------------------
# Looking up and remembering


def lookup_facts(rng: random.Random, count: int) -> dict[str, str]:
    """`count` made-up facts: who has what."""
    owned = rng.sample(THINGS + ANIMALS, count)
    return dict(zip(rng.sample(NAMES, count), owned, strict=True))


def lookup_text(facts: dict[str, str]) -> str:
    """The facts as sentences: `Tom has a kite. Ada has a lamp.`"""
    return " ".join(f"{name} has a {thing}." for name, thing in facts.items())


def lookup_turn(facts: dict[str, str], name: str) -> Turn:
    """What somebody has."""
    return Turn(f"What does {name} have?", f"{name} has a {facts[name]}.", facts[name])


def owner_turn(facts: dict[str, str], name: str) -> Turn:
    """Who has a thing: the same look-up, the other way round."""
    return Turn(f"Who has the {facts[name]}?", f"{name} has the {facts[name]}.", name)


def lookup_messages(rng: random.Random, count: int | None = None) -> list[dict[str, str]]:
    """A chat about two to six (or `count`) facts given by the system or the user."""
    facts = lookup_facts(rng, count or rng.randint(2, 6))
    text = lookup_text(facts)
    told_by_system = rng.random() < 0.4
    system = f"{SYSTEM_PROMPT} {text}" if told_by_system else rng.choice(_USUAL_SYSTEMS)
    messages = [message("system", system)]
    asked = rng.sample(list(facts), min(len(facts), rng.randint(1, 4)))
    for position, name in enumerate(asked):
        kind = lookup_turn if rng.random() < 0.75 else owner_turn
        turn = kind(facts, name)
        told = position == 0 and not told_by_system
        messages.append(message("user", f"{text} {turn.user}" if told else turn.user))
        messages.append(message("assistant", turn.reply))
    return messages


class Memory:
    """What the user of one chat has said about themselves."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.thing: str | None = None

    def tell(self, rng: random.Random) -> Turn:
        """The user says their name or what they own."""
        if rng.random() < 0.65:
            self.name = rng.choice(NAMES)
            user = rng.choice((f"My name is {self.name}.", f"I am {self.name}."))
            return Turn(user, f"Nice to meet you, {self.name}!", "Okay")
        self.thing = rng.choice(THINGS)
        return Turn(f"I have a {self.thing}.", f"A {self.thing} is nice.", "Okay")

    def recall(self, rng: random.Random) -> Turn:
        """The user asks for something said before (or, now and then, never said)."""
        if rng.random() < 0.65 if self.name and self.thing else bool(self.name):
            return Turn("What is my name?", f"Your name is {self.name}.", str(self.name))
        if self.thing:
            return Turn("What do I have?", f"You have a {self.thing}.", self.thing)
        return Turn("What is my name?", "You did not tell me your name.", "Unknown")


# --------------------------------------------------------------------------------------------
# Documents

_USUAL_SYSTEMS: Final = (SYSTEM_PROMPT, SYSTEM_PROMPT, SYSTEM_PROMPT, *OTHER_SYSTEM_PROMPTS)
_SYSTEMS: Final = (
    (SYSTEM_PROMPT, 58),
    (OTHER_SYSTEM_PROMPTS[0], 7),
    (OTHER_SYSTEM_PROMPTS[1], 7),
    (ONE_WORD_PROMPT, 7),
    (AGENT_PROMPT, 14),
    (None, 7),
)
_TURNS: Final[tuple[tuple[Turns, int], ...]] = (
    (greeting_turn, 14),
    (courtesy_turn, 9),
    (abilities_turn, 4),
    (fact_turn, 30),
    (open_turn, 8),
    (json_turn, 6),
    (repeat_turn, 9),
    (nth_word_turn, 5),
    (story_turn, 7),
    (problem_turn, 8),
    (unknown_turn, 7),
)
_EXACT_TURNS: Final = tuple((kind, weight) for kind, weight in _TURNS if kind not in (open_turn, story_turn))
_CASUAL_TURNS: Final = (
    greeting_turn,
    courtesy_turn,
    abilities_turn,
    fact_turn,
    open_turn,
    story_turn,
)


def message(role: str, content: str) -> dict[str, str]:
    """A chat message as APIs write it."""
    return {"role": role, "content": content}


def chat_text(messages: Sequence[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """Messages in ChatML, as the model reads them; the chat template renders the same text."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n" if add_generation_prompt else text


def casually(turn: Turn) -> Turn:
    """A turn as people type it: `hello`, `what is 3 + 4`."""
    user = turn.user[0].lower() + turn.user[1:].rstrip(".!?")
    return replace(turn, user=user)


def any_turn(rng: random.Random, exact: bool = False) -> Turn:
    """A turn that needs no earlier turn; with `exact`, one with a single right answer."""
    kinds, weights = zip(*(_EXACT_TURNS if exact else _TURNS), strict=True)
    kind: Turns = rng.choices(kinds, weights)[0]
    turn = kind(rng)
    return casually(turn) if kind in _CASUAL_TURNS and rng.random() < 0.15 else turn


def chat_messages(
    rng: random.Random,
    turns: int,
    system: str | None,
    exact: bool = False,
    say: Callable[[Turn], str] | None = None,
) -> list[dict[str, str]]:
    """A chat of `turns` questions with answers, some of them about what the user said before.

    say: how a turn is answered; None: in full, or in one word where the system prompt wants it.
    """
    messages = [message("system", system)] if system else []
    memory = Memory()
    for _ in range(turns):
        chance = rng.random()
        if chance < 0.13:
            turn = memory.tell(rng)
        elif chance < (0.30 if memory.name or memory.thing else 0.14):
            turn = memory.recall(rng)
        else:
            turn = any_turn(rng, exact)
        reply = turn.short if system == ONE_WORD_PROMPT else turn.reply
        reply = reply if say is None else say(turn)
        messages += [message("user", turn.user), message("assistant", reply)]
    return messages


def recall_messages(rng: random.Random, turns_between: int) -> list[dict[str, str]]:
    """A chat in which the user gives a name and asks for it `turns_between` turns later."""
    memory = Memory()
    messages = [message("system", SYSTEM_PROMPT)]
    turns = [memory.tell(rng), *(any_turn(rng) for _ in range(turns_between)), memory.recall(rng)]
    for turn in turns:
        messages += [message("user", turn.user), message("assistant", turn.reply)]
    return messages


def few_shot_examples(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """`count` questions with their short answers, about one in four of them open."""
    turns = (open_turn(rng) if rng.random() < 0.25 else fact_turn(rng) for _ in range(count))
    return [(turn.user, turn.short) for turn in turns]


def few_shot_question(number: int, question: str) -> str:
    """The plain text of a question, up to where its answer begins."""
    return f"Question {number}: {question}\nAnswer {number}:"


def few_shot_header(examples: Sequence[tuple[str, str]]) -> str:
    """Solved questions in plain text, numbered from 1; a `few_shot_question` goes behind it."""
    solved = (
        f"{few_shot_question(number, question)} {answer}.\n\n"
        for number, (question, answer) in enumerate(examples, start=1)
    )
    return "Answer the questions.\n\n" + "".join(solved)


def chat_document(rng: random.Random) -> str:
    """A chat of one to eight turns about anything."""
    systems, weights = zip(*_SYSTEMS, strict=True)
    system = rng.choices(systems, weights)[0]
    return chat_text(chat_messages(rng, rng.choice((1, 1, 2, 3, 4, 5, 6, 8)), system))


def few_shot_document(rng: random.Random) -> str:
    """Two to sixteen solved questions in plain text."""
    return few_shot_header(few_shot_examples(rng.choice((2, 4, 5, 6, 8, 12, 16)), rng))


def lookup_document(rng: random.Random) -> str:
    """A chat about facts that only its own text tells."""
    return chat_text(lookup_messages(rng))


def recall_document(rng: random.Random) -> str:
    """A chat about the user's name."""
    return chat_text(recall_messages(rng, rng.randint(0, 3)))


def copy_document(rng: random.Random) -> str:
    """A chat that repeats words, made-up ones among them.

    Nothing else teaches a transformer so quickly to look for an earlier place like this one and
    to read on from there (an induction head), which every look-up needs.
    """
    messages = [message("system", SYSTEM_PROMPT)]
    for _ in range(rng.randint(1, 4)):
        turn = repeat_turn(rng, made_up=rng.choice((0.0, 0.5, 1.0)), longest=8)
        messages += [message("user", turn.user), message("assistant", turn.reply)]
    return chat_text(messages)


def long_document(rng: random.Random) -> str:
    """A chat of many turns or a long few-shot text: about 500 to 2,500 tokens."""
    if rng.random() < 0.25:
        return few_shot_header(few_shot_examples(rng.randint(20, 90), rng))
    system = rng.choice((SYSTEM_PROMPT, SYSTEM_PROMPT, AGENT_PROMPT))
    return chat_text(chat_messages(rng, rng.randint(12, 45), system))


_DOCUMENTS: Final = (
    (chat_document, 42),
    (few_shot_document, 14),
    (lookup_document, 22),
    (recall_document, 8),
    (copy_document, 12),
    (long_document, 2),
)


def documents(seed: int | str, count: int) -> Iterator[str]:
    """`count` documents of one seed."""
    rng = random.Random(f"classroom {seed}")
    kinds, weights = zip(*_DOCUMENTS, strict=True)
    for kind in rng.choices(kinds, weights, k=count):
        yield kind(rng)


if __name__ == "__main__":
    command.Parser(prog="python -m minirad.model.classroom.corpus", description="Samples.").parse_args()
    print("\n-----\n".join(documents(0, 12)))
