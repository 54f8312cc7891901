"""The specification of every op, in plain torch, one file per family.

All arithmetic is IEEE fp32 with round to nearest even, without fused multiply-add and without flushing subnormals. The
C++ and Triton kernels return the same bits. docs/formats.md specifies the same in words and bytes.
"""

from laconic.ops.reference.accumulate import *
from laconic.ops.reference.adamw import *
from laconic.ops.reference.bits import *
from laconic.ops.reference.blockwise import *
from laconic.ops.reference.gated import *
from laconic.ops.reference.linear import *
from laconic.ops.reference.lossless import *
from laconic.ops.reference.reduce import *
from laconic.ops.reference.rows import *
