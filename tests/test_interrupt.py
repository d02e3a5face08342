"""Signals: held back while a search runs, then raised, and never swallowed."""

import os
import signal

import pytest

from tvmpaged.tuning.interrupt import held_back


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_held_back_and_then_raised(number: signal.Signals) -> None:
    reached = []
    # As the command line has it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), held_back() as interrupt:  # noqa: PT012
            os.kill(os.getpid(), number)
            reached.append(interrupt())
        assert reached == [True]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A shell starts what runs in the background so."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_back() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert not interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_was_given_up_is_never_taken_for_done() -> None:
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), held_back():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [signal.SIGTERM]


def test_a_second_signal_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one was held back too")
