"""What a table's row says of its evidence, against the gains that the recorded sweep has of its shapes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from composattn.backends.fused.planning.tables import Row


def check_evidence(row: Row[Any], gains: Sequence[float]) -> None:
    """`gains`: for each of the row's shapes the time of the best other form over the row's own; none: not measured."""
    assert row.evidence.shapes == len(gains), row
    if gains:
        assert row.evidence.gain == pytest.approx(statistics.geometric_mean(gains), abs=1e-3)
