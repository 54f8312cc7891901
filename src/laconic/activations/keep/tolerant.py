"""Functions of torch whose backward tolerates rounded saved tensors.

Rounding multiplies a value by something between 0 and 2: a small one becomes zero, and one just above half of the
lowest level doubles. A function is tolerant if its derivative stays finite under that, as products, convolutions, norms
and bounded activations do. It is not if backward divides by what it saved (`div`, `log`, `sqrt`, `rsqrt`, `acos`), asks
where two saved tensors are equal (`amax`, `norm` of order infinity), or multiplies exponentials that only the exact
statistic balances (`exp`, `softmax`, `logsumexp`, attention, cross entropy), nor if its derivative turns within a step
of the format (`sin`, `cos`: SIREN multiplies their input by 30), nor if it saves a result that saturates (`sigmoid`,
`tanh`, `logsigmoid`): the loss behind divides by y (1 - y), which backward has to cancel exactly (binary cross entropy,
the logarithm of 1 - tanh^2 of squashed policies). Whatever is not listed here counts as intolerant: functions of one's
own, compiled graphs, functions that torch will have next year.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PRODUCTS = """mul multiply square matmul mm bmm mv dot inner outer ger vdot addmm addmv addbmm baddbmm addr addcmul
    chain_matmul einsum tensordot kron linear bilinear prelu lerp dropout feature_dropout dropout1d dropout2d
    dropout3d"""
_CONVOLUTIONS = """conv1d conv2d conv3d convolution conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    unfold fold max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    interpolate upsample"""
_ACTIVATIONS = """relu relu6 leaky_relu elu selu celu gelu silu mish softplus
    hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink threshold glu erf"""
_RECURRENT = "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
_NORMS = "layer_norm rms_norm group_norm instance_norm batch_norm"
_POWERS = "pow float_power"

_LARGEST_POWER = 3
"""Of a power, backward multiplies by at most the square of what it saved."""


def functions_named(names: str) -> frozenset[Callable[..., Any]]:
    """Everything in torch that goes by one of the names, also in place."""
    homes = (torch, Tensor, F, torch._C._nn, torch.special)
    spellings = [spelling for name in names.split() for spelling in (name, f"{name}_")]
    return frozenset(getattr(home, name) for home, name in product(homes, spellings) if hasattr(home, name))


_TOLERANT = functions_named(" ".join((_PRODUCTS, _CONVOLUTIONS, _ACTIVATIONS, _RECURRENT)))
_NORM_FUNCTIONS = functions_named(_NORMS)
_POWER_FUNCTIONS = functions_named(_POWERS)


def least_numel(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """How many values a tensor that `function(*args, **kwargs)` saves must have to be rounded; None if none may be.

    A norm's statistics, which are smaller than its input, belong to the exact input and so stay exact.
    """
    if function in _TOLERANT:
        return 0
    if function in _NORM_FUNCTIONS:
        x = args[0] if args else kwargs.get("input")
        return x.numel() if isinstance(x, Tensor) else None
    if function in _POWER_FUNCTIONS:
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
        return 0 if isinstance(exponent, int | float) and 1 <= exponent <= _LARGEST_POWER else None
    return None
