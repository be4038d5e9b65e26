"""How a product's instructions are written, one for each step of its sum, as a tiling says.

Which registers things lie in differs by it, and a kernel's time by a few percent, either way: it was measured.
"""

from typing import Literal

# "by steps": each step is an operation of the kernel language; "whole": all steps are one piece of assembly; "anew":
# so, and a product that begins a sum names no registers of sums before, so that ptxas may place the scores elsewhere
Written = Literal["by steps", "whole", "anew"]
