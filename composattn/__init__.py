"""composattn: attention that you compose. Write masks and score mods in Python, get one exact fused kernel."""

from typing import TYPE_CHECKING, NoReturn

from . import backends, errors, mods, nn
from .api import Attention, attention
from .call.block_sparse import BlockSparse
from .call.checks import debug_checks
from .call.eight_bits import Quantized
from .call.merge import merge_states
from .call.schedule import Schedule
from .call.sequences import Paged, Varlen
from .errors import ComposattnError
from .flex import flex_attention
from .graph.scalar import Scalar
from .mods.mask import Mask
from .mods.score import Score
from .parallel import ContextParallel
from .quantising import QuantizedInputs, quantize
from .weights import attention_weights

__version__ = "0.1.0"

mask = Mask.of
"""`ca.mask(fn)`: a `(b, h, q_idx, kv_idx) -> bool` callable as a composable `Mask`."""

score = Score.of
"""`ca.score(fn)`: a `(score, b, h, q_idx, kv_idx) -> score` callable as a composable `Score`."""

scalar = Scalar
"""`ca.scalar(x)`: a run-time number in a mod; a new `.value` never recompiles."""

if not TYPE_CHECKING:  # to a type checker each name would be there

    def __getattr__(name: str) -> NoReturn:
        """Says where a name is that is sought here: a ready mod, or a module that is not imported with the package."""
        found = {"testing": "import composattn.testing", "integrations": "import composattn.integrations.NAME"}
        found |= {f"{kind}_mod": f"a function becomes one by composattn.{kind}(fn)" for kind in ("mask", "score")}
        found |= {mod: f"it is composattn.mods.{mod}" for mod in mods.__all__}
        where = f"; {found[name]}" if name in found else ""
        raise AttributeError(f"module 'composattn' has no attribute {name!r}{where}")


__all__ = [
    "Attention",
    "BlockSparse",
    "ComposattnError",
    "ContextParallel",
    "Mask",
    "Paged",
    "Quantized",
    "QuantizedInputs",
    "Scalar",
    "Schedule",
    "Score",
    "Varlen",
    "attention",
    "attention_weights",
    "backends",
    "debug_checks",
    "errors",
    "flex_attention",
    "mask",
    "merge_states",
    "mods",
    "nn",
    "quantize",
    "scalar",
    "score",
]
