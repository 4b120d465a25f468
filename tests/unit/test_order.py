"""One rank's messages in their order: a model publisher that loses messages, forgets and begins anew."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minirad.fleet import order
from minirad.fleet.order import PATIENCE, SILENCE, Order


class Told:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.question: int | None = None

    def deliver(self, seq: int, payload: bytes, replayed: bool) -> None:
        self.log.append((seq, payload, replayed))

    def gap(self, first: int, last: int, why: str) -> None:
        self.log.append(("gap", first, last, why))

    def restart(self, why: str) -> None:
        self.log.append(("restart", why))

    def trouble(self, why: str) -> None:
        self.log.append(("trouble", why))

    def ask(self, start: int) -> None:
        self.question = start

    def take(self) -> list[tuple[Any, ...]]:
        log, self.log = self.log, []
        return log


def message(number: int, epoch: int = 0) -> tuple[int, bytes]:
    return number, b"%d of %d" % (number, epoch)


def following(*numbers: int) -> tuple[Order, Told]:
    """An order that is connected and has had these from the replay."""
    told = Told()
    ordered = Order(told, replay=True)
    ordered.connected(0.0)
    for number in numbers:
        ordered.answer(*message(number), 0.0)
    ordered.answers_end(0.0)
    told.take()
    return ordered, told


def test_a_first_connection_asks_from_0_and_holds_what_comes_live() -> None:
    told = Told()
    ordered = Order(told, replay=True)
    ordered.connected(0.0)
    assert told.question == 0 and ordered.asking
    ordered.live(*message(2), 0.1)
    for number in (0, 1):
        ordered.answer(*message(number), 0.2)
    ordered.answers_end(0.2)
    ordered.live(*message(3), 0.3)
    assert told.take() == [
        (*message(0), True),
        (*message(1), True),
        (*message(2), False),
        (*message(3), False),
    ]
    assert not ordered.asking and ordered.duplicates == 0


def test_a_gap_is_asked_for_from_the_last_message_on() -> None:
    ordered, told = following(0, 1)
    ordered.live(*message(4), 1.0)
    assert told.question == 1 and told.take() == []
    for number in (1, 2, 3, 4):
        ordered.answer(*message(number), 1.1)
    ordered.answers_end(1.1)
    assert told.take() == [(*message(number), True) for number in (2, 3, 4)]
    assert ordered.duplicates == 1


def test_a_gap_that_the_buffer_no_longer_holds_is_told() -> None:
    ordered, told = following(0, 1)
    ordered.live(*message(9), 1.0)
    ordered.answer(*message(7), 1.1)
    ordered.answer(*message(8), 1.1)
    ordered.answers_end(1.1)
    assert told.take() == [
        ("gap", 2, 6, "the replay buffer no longer holds them"), (*message(7), True), (*message(8), True),
        (*message(9), False),
    ]  # fmt: skip


def test_a_hole_in_an_answer_is_asked_for_again_before_it_is_a_gap() -> None:
    ordered, told = following(0)
    ordered.live(*message(5), 1.0)
    for number in (0, 1, 3):  # 2 was lost on the way
        ordered.answer(*message(number), 1.1)
    assert told.question == 1 and told.take() == [(*message(1), True)]
    ordered.answer(*message(1), 1.2)
    ordered.answer(*message(3), 1.2)
    assert [each[:3] for each in told.take()] == [("gap", 2, 2), (*message(3), True)]


def test_silence_asks_after_2_seconds_then_doubles() -> None:
    ordered, told = following(0, 1)
    asked, now = [], 0.0
    while now < 130:
        now += 0.25
        told.question = None
        ordered.tick(now)
        if told.question is not None:
            assert told.question == 1 and ordered.checking
            asked.append(now)
            ordered.answer(*message(1), now)
            ordered.answers_end(now)
    assert [after - before for before, after in zip([0.0, *asked], asked, strict=False)] == [
        2,
        4,
        8,
        16,
        30,
        30,
        30,
    ]
    assert told.take() == []


def test_a_lost_last_message_is_found_in_silence() -> None:
    ordered, told = following(0)
    ordered.tick(SILENCE + 0.1)
    ordered.answer(*message(0), 2.2)
    ordered.answer(*message(1), 2.2)
    ordered.answers_end(2.2)
    assert told.take() == [(*message(1), True)]


def test_a_number_that_does_not_rise_is_a_restart() -> None:
    ordered, told = following(0, 1)
    ordered.live(*message(2), 1.0)
    ordered.live(*message(0, epoch=1), 1.1)
    ordered.answer(*message(0, epoch=1), 1.2)
    ordered.answers_end(1.2)
    assert told.question == 0
    assert told.take() == [
        (*message(2), False), ("restart", "message 0 came after message 2"), (*message(0, epoch=1), True),
    ]  # fmt: skip


def test_another_message_in_the_place_of_the_last_one_is_a_restart() -> None:
    ordered, told = following(0, 1)
    ordered.disconnected()
    ordered.connected(1.0)
    ordered.live(*message(2, epoch=1), 1.0)  # looks as if nothing had happened
    ordered.answer(*message(1, epoch=1), 1.1)
    assert told.question == 0
    for number in (0, 1, 2):
        ordered.answer(*message(number, epoch=1), 1.2)
    ordered.answers_end(1.2)
    assert told.take() == [
        ("restart", "message 1 is another one now"),
        *((*message(number, epoch=1), True) for number in (0, 1, 2)),
    ]  # fmt: skip


def test_a_replay_that_knows_less_than_was_delivered_is_a_restart() -> None:
    ordered, told = following(0, 1, 2)
    ordered.tick(SILENCE)
    ordered.answers_end(2.1)
    assert told.take() == [("restart", "the replay does not know message 2")] and told.question == 0
    ordered.answer(*message(0, epoch=1), 2.2)
    ordered.answers_end(2.2)
    assert told.take() == [(*message(0, epoch=1), True)]


def test_a_replay_that_does_not_answer_is_given_up_and_the_gap_told() -> None:
    told = Told()
    ordered = Order(told, replay=True)
    ordered.connected(0.0)
    ordered.live(*message(3), 4.9)
    ordered.tick(PATIENCE - 0.1)
    assert told.take() == []
    ordered.tick(PATIENCE)
    assert told.take() == [
        ("trouble", "the replay endpoint did not answer within 5 seconds"),
        ("gap", 0, 2, "the replay endpoint did not answer"), (*message(3), False),
    ]  # fmt: skip
    assert not ordered.asking


def test_without_a_replay_gaps_are_told_at_once() -> None:
    told = Told()
    ordered = Order(told, replay=False)
    ordered.connected(0.0)
    ordered.live(*message(4), 0.1)
    ordered.live(*message(7), 0.2)
    ordered.live(*message(2, epoch=1), 0.3)
    ordered.tick(99.0)
    kinds = [each[:3] if each[0] == "gap" else each for each in told.take()]
    assert kinds == [
        ("gap", 0, 3), (*message(4), False), ("gap", 5, 6), (*message(7), False),
        ("restart", "message 2 came after message 7"), ("gap", 0, 1), (*message(2, epoch=1), False),
    ]  # fmt: skip
    assert told.question is None


def test_what_cannot_be_held_is_asked_for_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(order, "MOST_HELD", 2)
    told = Told()
    ordered = Order(told, replay=True)
    ordered.connected(0.0)
    for number in range(1, 6):
        ordered.live(*message(number), 0.1)
    ordered.answer(*message(0), 0.2)
    ordered.answers_end(0.2)
    ordered.live(*message(6), 0.3)
    assert told.question == 2 and told.take() == [
        (*message(0), True),
        (*message(1), False),
        (*message(2), False),
    ]
    for number in range(2, 7):
        ordered.answer(*message(number), 0.4)
    ordered.answers_end(0.4)
    assert told.take() == [(*message(number), True) for number in range(3, 7)]


class Publisher(RuleBasedStateMachine):
    """A publisher with a small buffer, a network that loses messages and parts of answers, and an Order."""

    replay = True

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self.order = Order(self.told, self.replay)
        self.now, self.epoch, self.sent, self.size = 0.0, 0, 0, 4
        self.wire: list[tuple[int, bytes]] = []  # on its way
        self.answers: list[tuple[int, bytes] | None] = []  # None: the end
        self.up = False
        self.told.log.clear()
        self.checked: list[tuple[Any, ...]] = []  # all that was told
        self.proved = True  # whether what was delivered is known to be the present publisher's

    @rule(count=st.integers(1, 4))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.wire.append(message(self.sent, self.epoch))
            self.sent += 1

    @precondition(lambda self: self.wire)
    @rule(at=st.integers(0, 30))
    def lose(self, at: int) -> None:
        self.wire.pop(at % len(self.wire))

    @precondition(lambda self: self.up and self.wire)
    @rule(count=st.integers(1, 6))
    def arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            self.order.live(*self.wire.pop(0), self.now)

    @precondition(lambda self: not self.up)
    @rule()
    def connect(self) -> None:
        self.wire.clear()  # what was sent before is not for us
        self.up = True
        self.order.connected(self.now)

    @precondition(lambda self: self.up)
    @rule(begins_anew=st.booleans(), more=st.integers(0, 6))
    def disconnect(self, begins_anew: bool, more: int) -> None:
        self.up = False
        self.wire.clear()
        self.answers.clear()
        self.order.disconnected()
        if begins_anew:
            self.epoch, self.sent = self.epoch + 1, 0
        self.sent += more

    @precondition(lambda self: self.told.question is not None)
    @rule(cut=st.integers(0, 12), hole=st.integers(0, 20))
    def serve(self, cut: int, hole: int) -> None:
        start, self.told.question = self.told.question, None
        held = range(max(0, self.sent - self.size), self.sent)
        self.answers = [message(number, self.epoch) for number in held if number >= (start or 0)]
        self.answers.append(None)
        if cut < 3:  # the end is lost
            del self.answers[cut:]
        elif hole < len(self.answers) - 1:
            self.answers.pop(hole)

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 12))
    def answer(self, count: int) -> None:
        for _ in range(count):
            if not self.answers or self.told.question is not None:
                self.answers = []  # it was put aside for a new question
                return
            each = self.answers.pop(0)
            if each is None:
                self.order.answers_end(self.now)
            else:
                self.order.answer(*each, self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.order.tick(self.now)

    @invariant()
    def numbers_go_on_or_a_gap_is_told(self) -> None:
        self.checked += self.told.take()
        last = -1
        for each in self.checked:
            if each[0] == "restart":
                last = -1
            elif each[0] == "gap":
                assert each[1] == last + 1 and each[2] >= each[1]
                last = each[2]
            elif each[0] != "trouble":
                assert each[0] == last + 1
                last = each[0]
        assert last == self.order.last

    @invariant()
    def publishers_are_not_mixed(self) -> None:
        """A batch of another publisher comes only behind a restart, a gap, or an unanswered question."""
        epoch = None
        for each in self.checked:
            if each[0] in ("restart", "gap", "trouble"):
                epoch = None
                continue
            of = each[1].split()[-1]
            assert epoch in (None, of) or not self.replay
            epoch = of

    def teardown(self) -> None:
        """In the end everything that the buffer holds was delivered, by the present publisher."""
        if not self.replay:
            return
        if not self.up:
            self.connect()
        for _ in range(40):
            self.now += 1.0
            self.order.tick(self.now)
            while self.wire:
                self.order.live(*self.wire.pop(0), self.now)
            if self.told.question is not None:
                self.serve(cut=9, hole=99)
                self.answer(99)
        self.numbers_go_on_or_a_gap_is_told()
        self.publishers_are_not_mixed()
        assert self.order.last == self.sent - 1
        newest = [each for each in self.checked if each[0] != "trouble"][-1:]
        assert not self.sent or newest[0][:2] == message(self.sent - 1, self.epoch)


class Mute(Publisher):
    """Without a replay."""

    replay = False


TestPublisher = Publisher.TestCase
TestPublisher.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestMute = Mute.TestCase
TestMute.settings = settings(max_examples=20, stateful_step_count=30, deadline=None, derandomize=True)
