"""What a table's row says of its evidence, against the gains that the recorded sweep has of its shapes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

import pytest

from composattn.backends.hopper.evidence import Evidence, Measured


class HasEvidence(Protocol):
    @property
    def evidence(self) -> Evidence: ...


def check_evidence(row: HasEvidence, gains: Sequence[float]) -> None:
    """`gains`: for each of the row's shapes the time of the best other form over the row's own; none: not measured."""
    assert isinstance(row.evidence, Measured) == bool(gains), row
    if isinstance(row.evidence, Measured):
        assert row.evidence.shapes == len(gains)
        assert row.evidence.gain == pytest.approx(statistics.geometric_mean(gains), abs=1e-3)
