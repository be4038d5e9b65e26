"""What Dynamo can't follow by itself in a mod, taught to it the first time that it follows one.

Dynamo calls the operators of Python objects, all but one: `~` it knows of tensors and integers only (torch 2.11 to
2.13). `~(q >= kv)` and `~causal()` are everyday masks, so the missing handler is added where there is none.
"""

from __future__ import annotations

from typing import Any


def teach_dynamo() -> bool:
    """Add the handler of `~`; run for real while Dynamo traces, as a function that is constant to it."""
    from torch._dynamo.variables import builtin, user_defined

    if not hasattr(builtin.BuiltinVariable, "call_invert"):

        def call_invert(self: Any, tx: Any, value: Any) -> Any:
            if isinstance(value, user_defined.UserDefinedObjectVariable):
                return value.call_method(tx, "__invert__", [], {})
            return None  # not ours: Dynamo goes on as it would have

        builtin.BuiltinVariable.call_invert = call_invert  # type: ignore[attr-defined]
    return True


teach_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result sets
