"""CPU implementation: the C++ kernels of csrc/, or the reference where they were not built.

The extension takes raw pointers only. The files here, one per family of ops, allocate results and pass sizes that the
checks of `declarations/` have seen.
"""

from laconic.ops.native.accumulate import *
from laconic.ops.native.adamw import *
from laconic.ops.native.bits import *
from laconic.ops.native.blockwise import *
from laconic.ops.native.gated import *
from laconic.ops.native.library import *
from laconic.ops.native.linear import *
from laconic.ops.native.lossless import *
from laconic.ops.native.reduce import *
from laconic.ops.native.rows import *
