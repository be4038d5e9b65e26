"""Where a loop over tiles is whose next ones are copied meanwhile."""

from typing import Any

from cutlass import Int32

from ...primitives.values import Bundle


class Step(Bundle):
    """Which tile of a loop it is, and the stage in which it lies, of one or two."""

    def __init__(self, stages: int, number: Any, stage: Any = 0) -> None:
        assert stages <= 2, "a stage is followed by the other one"
        self.stages, self.number, self.stage = stages, number, stage
        self.parts = ("number", "stage") if stages > 1 else ("number",)

    @staticmethod
    def first(stages: int) -> "Step":
        return Step(stages, Int32(0), Int32(0) if stages > 1 else 0)

    def next(self) -> "Step":
        return self.after(1)

    def after(self, count: int) -> "Step":
        """The step `count` later."""
        stage = self.stage if count % self.stages == 0 else self.stage ^ 1
        return Step(self.stages, self.number + count, stage)

    def anew(self) -> "Step":
        """The first one of another loop, in the stage of this one."""
        return Step(self.stages, Int32(0), self.stage)
