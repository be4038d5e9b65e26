"""Which tests wait for the night follows from what they took."""

from __future__ import annotations

from tests.durations import BUDGET_S, OTHERS, measured, waits_for_the_night


def test_the_slowest_wait_until_the_others_fit():
    seconds = {"a[1]": 5.0, "a[2]": 9.0, "a[3]": 7.0, "b": 5.5, OTHERS: 20.0}
    assert waits_for_the_night(seconds, 60.0) == frozenset()
    assert waits_for_the_night(seconds, 38.0) == {"a[2]"}
    assert waits_for_the_night(seconds, 36.0) == {"a[2]", "a[3]"}


def test_one_of_each_test_stays_by_day_unless_it_takes_long():
    assert waits_for_the_night({"a[1]": 3.0, "a[2]": 9.0, "b": 20.0, OTHERS: 0.0}, 0.0) == {"a[2]", "b"}


def test_the_day_that_was_measured_fits_its_budget():
    seconds = measured()
    waiting = waits_for_the_night(seconds)
    assert sum(time for name, time in seconds.items() if name not in waiting) <= BUDGET_S + 0.1
