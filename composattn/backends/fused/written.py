"""How a product's instructions are written, one for each step of its sum.

Which registers things lie in differs by it, and so does a kernel's time, by -4 to 4 %: a tiling says what was measured.
"""

from typing import Literal

# "by steps": an operation of the kernel language for each; "whole": one for all of them; "anew": so, and a sum that
# begins goes on from no registers, where "whole" names those of the sum before
Written = Literal["by steps", "whole", "anew"]
