"""One rank's messages in their order: a model publisher that loses messages, forgets and begins anew."""

from __future__ import annotations

from typing import Any

import pytest
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


def test_what_is_lost_while_an_answer_without_news_comes_is_asked_for() -> None:
    ordered, told = following(0, 1)
    ordered.live(*message(2), 1.0)
    ordered.check(1.1)
    ordered.answer(*message(2), 1.2)
    ordered.live(*message(4), 1.3)  # 3 was sent after the answer was made, and lost
    told.question = None
    ordered.answers_end(1.4)
    assert told.question == 2 and ordered.asking
    for number in (2, 3, 4):
        ordered.answer(*message(number), 1.5)
    ordered.answers_end(1.6)
    assert [each[0] for each in told.take()] == [2, 3, 4] and not ordered.asking


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


@pytest.mark.parametrize("held", [False, True])
def test_an_answer_that_begins_right_behind_the_last_message_proves_nothing(held: bool) -> None:
    """Another publisher may have come that far, and nothing of the one before is there to compare."""
    ordered, told = following(0, 1)
    ordered.disconnected()
    ordered.connected(2.0)
    if held:
        ordered.live(*message(2, epoch=1), 2.1)
    ordered.answer(*message(2 + held, epoch=1), 2.2)
    (what, why), *rest = told.take()
    assert what == "trouble" and why.endswith("no longer holds message 1") and len(rest) == 1 + held


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
    said = told.take()
    assert [each[3].split(",")[0] for each in said if each[0] == "gap"] == [
        "they were sent before this began to listen", "they were lost on the way",
        "they were sent before there was a connection to who began anew",
    ]  # fmt: skip
    kinds = [each[:3] if each[0] == "gap" else each for each in said]
    assert kinds == [
        ("gap", 0, 3), (*message(4), False), ("gap", 5, 6), (*message(7), False),
        ("restart", "message 2 came after message 7"), ("gap", 0, 1), (*message(2, epoch=1), False),
    ]  # fmt: skip
    assert told.question is None


def test_without_a_replay_it_is_said_that_another_connection_may_be_another_publisher() -> None:
    told = Told()
    ordered = Order(told, replay=False)
    ordered.connected(0.0)
    ordered.live(*message(0), 0.1)
    ordered.disconnected()
    ordered.connected(1.0)
    assert told.take() == [(*message(0), False)]
    ordered.live(*message(1, epoch=1), 1.1)
    ordered.live(*message(2, epoch=1), 1.2)
    (kind, why), *rest = told.take()
    assert kind == "trouble" and why.startswith("message 1 came after message 0 on another connection")
    assert rest == [(*message(1, epoch=1), False), (*message(2, epoch=1), False)]
    ordered.connected(2.0)
    ordered.live(*message(0, epoch=2), 2.1)
    assert [each[0] for each in told.take()] == ["restart", 0]


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


def test_an_answer_without_its_end_is_asked_for_again() -> None:
    ordered, told = following(0)
    ordered.live(*message(3), 1.0)
    ordered.answer(*message(0), 1.1)
    ordered.answer(*message(1), 1.1)
    ordered.tick(1.1 + PATIENCE)
    assert told.question == 1 and told.take() == [(*message(1), True)]
    for number in (1, 2):
        ordered.answer(*message(number), 7.0)
    ordered.answers_end(7.0)
    assert told.take() == [(*message(2), True), (*message(3), False)]


def test_an_answer_that_says_the_same_again_and_again_is_given_up() -> None:
    ordered, told = following(0, 1, 2)
    ordered.live(*message(4), 1.0)
    now = 1.0
    while now < 1.0 + PATIENCE:
        ordered.answer(*message(2), now)
        ordered.tick(now)
        assert not told.take()
        now += 0.5
    ordered.answer(*message(2), now)
    ordered.tick(now)
    assert [each[0] for each in told.take()] == ["trouble", "gap", 4]
    ordered.live(*message(5), now)
    assert told.take() == [(*message(5), False)]


def test_what_is_held_fills_what_the_answer_lacks() -> None:
    told = Told()
    ordered = Order(told, replay=True)
    ordered.connected(0.0)
    for number in (3, 4):
        ordered.live(*message(number), 0.1)
    ordered.answer(*message(5), 0.2)
    assert [each[:3] for each in told.take()] == [
        ("gap", 0, 2), (*message(3), False), (*message(4), False), (*message(5), True),
    ]  # fmt: skip


def test_what_was_held_of_the_publisher_before_is_dropped() -> None:
    ordered, told = following(0)
    ordered.live(*message(5), 1.0)
    ordered.live(*message(0, epoch=1), 1.1)
    ordered.answer(*message(0, epoch=1), 1.2)
    ordered.answers_end(1.2)
    assert told.take() == [("restart", "message 0 came after message 5"), (*message(0, epoch=1), True)]


def test_one_restart_is_told_once() -> None:
    ordered, told = following(0)
    ordered.live(*message(1), 1.0)
    ordered.disconnected()
    ordered.connected(2.0)
    ordered.answer(*message(1, epoch=1), 2.1)
    for number in (0, 1):
        ordered.answer(*message(number, epoch=1), 2.2)
    ordered.answers_end(2.2)
    told.take()
    ordered.live(*message(1, epoch=1), 2.3)  # late, and no sign of another publisher
    assert told.take() == [] and ordered.duplicates == 1


class Publisher(RuleBasedStateMachine):
    """A publisher with a small buffer, a network that loses messages and parts of answers, and an Order.

    What is told is read as it comes: numbers go on, or a gap is told; another publisher's message comes
    only behind a restart, a gap, or a question without an answer.
    """

    replay = True

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self.order = Order(self.told, self.replay)
        self.now, self.epoch, self.sent, self.size = 0.0, 0, 0, 6
        self.wire: list[tuple[int, bytes]] = []  # on its way
        self.answers: list[tuple[int, bytes] | None] = []  # None: the end
        self.last, self.of, self.newest = (
            -1,
            None,
            b"",
        )  # what was told: a number, of which publisher, a payload
        self.order.connected(self.now)

    @rule(count=st.integers(1, 3))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.wire.append(message(self.sent, self.epoch))
            self.sent += 1

    @precondition(lambda self: self.wire)
    @rule(at=st.integers(0, 30))
    def lose(self, at: int) -> None:
        self.wire.pop(at % len(self.wire))

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 6))
    def arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            self.order.live(*self.wire.pop(0), self.now)

    @rule(begins_anew=st.booleans(), more=st.integers(0, 8))
    def lose_the_connection(self, begins_anew: bool, more: int) -> None:
        self.wire.clear()
        self.answers.clear()
        self.order.disconnected()
        self.order.tick(self.now)
        if begins_anew:
            self.epoch, self.sent = self.epoch + 1, 0
        self.sent += more
        self.order.connected(self.now)

    @precondition(lambda self: self.told.question is not None)
    @rule(fault=st.sampled_from(["", "", "cut", "hole"]), at=st.integers(0, 8), part=st.integers(1, 20))
    def answer(self, fault: str, at: int, part: int) -> None:
        """The question is served, with a fault or none, and the first part of the answer arrives."""
        start, self.told.question = self.told.question or 0, None
        held = range(max(0, self.sent - self.size), self.sent)
        self.answers = [*(message(number, self.epoch) for number in held if number >= start), None]
        if fault == "cut":
            del self.answers[at:]
        elif fault and at < len(self.answers) - 1:
            self.answers.pop(at)
        self.more_of_the_answer(part)

    @precondition(lambda self: self.answers)
    @rule(part=st.integers(1, 20))
    def more_of_the_answer(self, part: int) -> None:
        while self.answers and part and self.told.question is None:
            each, part = self.answers.pop(0), part - 1
            if each is None:
                self.order.answers_end(self.now)
            else:
                self.order.answer(*each, self.now)
        if self.told.question is not None:
            self.answers.clear()  # it was put aside

    @rule(seconds=st.sampled_from([0.1, 2.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.order.tick(self.now)

    @invariant()
    def read(self) -> None:
        for each in self.told.take():
            if each[0] == "restart":
                self.last, self.of = -1, None
            elif each[0] == "gap":
                assert each[1] == self.last + 1 and each[2] >= each[1]
                self.last, self.of = each[2], None
            elif each[0] == "trouble":
                self.of = None
            else:
                assert each[0] == self.last + 1
                self.last, self.newest = each[:2]
                of = self.newest.split()[-1]
                assert self.of in (None, of) or not self.replay
                self.of = of
        assert self.last == self.order.last

    def teardown(self) -> None:
        """In the end all is told, up to the present publisher's newest message."""
        self.lose_the_connection(False, 0)
        for _ in range(40 * self.replay):
            self.now += 1.0
            self.order.tick(self.now)
            if self.told.question is not None:
                self.answer("", 0, 99)
            self.read()
        if self.replay and self.sent:
            assert (self.last, self.newest) == message(self.sent - 1, self.epoch)


class Mute(Publisher):
    """Without a replay."""

    replay = False


TestPublisher = Publisher.TestCase
TestPublisher.settings = settings(max_examples=150, stateful_step_count=25, deadline=None, derandomize=True)
TestMute = Mute.TestCase
TestMute.settings = settings(max_examples=20, stateful_step_count=20, deadline=None, derandomize=True)
