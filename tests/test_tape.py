"""Answers that are played back: each once, in the order they came."""

import pytest

from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.exported import Tape
from tvmpaged.tuning.results import Measured

pytestmark = pytest.mark.runtime
SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)


def answer(us: float, key: str = "leader") -> Measured:
    return Measured(str(SPEC), "search", ("default", key), ("0", "1"), {"us": us})


def played(tape: Tape, *, again: bool = False) -> float | None:
    found = tape.play(SPEC, "search", ("default", "leader"), again=again)
    return None if found is None else float(found.reply["us"])


def test_who_leads_is_asked_for_several_times_and_each_answer_counts_once() -> None:
    tape = Tape([answer(5), answer(9, "other"), answer(3), answer(4)])
    assert [played(tape) for _ in range(4)] == [5, 3, 4, None]
    assert tape.knows(SPEC, "other")


def test_without_a_device_the_last_answer_is_given_again() -> None:
    """With several devices who led hung on who answered first; played back, it may differ."""
    tape = Tape([answer(5), answer(3)])
    assert [played(tape, again=True) for _ in range(4)] == [5, 3, 3, 3]
    assert played(Tape([]), again=True) is None


def test_a_new_answer_counts_as_played() -> None:
    tape = Tape([answer(5)])
    assert [played(tape), played(tape)] == [5, None]
    tape.keep(answer(3))
    assert played(tape) is None
    assert [each.reply["us"] for each in tape.answers] == [5, 3]
    resumed = Tape(tape.answers)
    assert [played(resumed) for _ in range(3)] == [5, 3, None]
