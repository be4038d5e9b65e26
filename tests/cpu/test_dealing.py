"""The order of tests in a parallel run."""

from __future__ import annotations

import pytest

from tests.dealing import AT_ONCE, dealt

# file -> number of tests; long ones begin with an "l"
FILES = {"q many": 950, "l a": 30, "q few": 5, "l b": 20, "q some": 40, "l c": 45}
TESTS = [(name, n) for name, many in FILES.items() for n in range(many)]


def ordered(workers: int) -> list[tuple[str, int]]:
    return dealt(TESTS, workers, lambda test: test[0], lambda test: test[0].startswith("l"))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_test_is_dealt_once(workers: int) -> None:
    assert sorted(ordered(workers)) == sorted(TESTS)


def test_each_of_two_shares_begins_with_long_tests_and_ends_with_those_of_the_largest_file() -> None:
    found = ordered(2)
    shares = found[: len(found) // 2], found[len(found) // 2 :]
    for share in shares:
        assert share[-1][0] == "q many"
    long = [sum(name.startswith("l") for name, _ in share) for share in shares]
    assert long == [65, 30]
    assert {name for name, _ in shares[0][: long[0]]} <= {"l a", "l b", "l c"}


def test_a_file_stays_together() -> None:
    found = [name for name, _ in ordered(2)]
    for name in ("l a", "l b", "l c", "q few", "q some"):
        at = found.index(name)
        assert found[at : at + FILES[name]] == [name] * FILES[name]
    assert FILES["q many"] > AT_ONCE
