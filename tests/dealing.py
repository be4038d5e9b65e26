"""In which order the workers of a parallel run take the tests: long ones first, so that none is left over at the end.

Workers begin with equal shares, each in a row, and who is done takes over the second half of what another still has,
while that has two tests left. So shares begin with tests of seconds and end with those of milliseconds: what is handed
over late is small. Tests of one file stay together for what they keep, 100 at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import TypeVar

Test = TypeVar("Test")
AT_ONCE = 100


def dealt(
    tests: Iterable[Test], workers: int, file_of: Callable[[Test], Hashable], is_long: Callable[[Test], bool]
) -> list[Test]:
    """Tests in an order whose shares are about equal in number; it depends on their files and order alone.

    Long ones first; then by how many tests a file has, as files of few have long ones.
    """
    files: dict[Hashable, list[Test]] = {}
    for test in tests:
        files.setdefault(file_of(test), []).append(test)
    shares: list[list[Test]] = [[] for _ in range(workers)]
    for file in sorted(files.values(), key=lambda file: (not is_long(file[0]), len(file))):
        rest = iter(file)
        while piece := list(islice(rest, AT_ONCE)):
            min(shares, key=len).extend(piece)
    return [test for share in shares for test in share]
