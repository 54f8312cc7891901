"""Output projection and cross entropy without all logits at once: laconic beside torch and Liger."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.activations import compressed
from benchmarks.contenders.training import EXACT, Change, Contender, Training


def _head(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Change:
    """A loss of hidden states [n, hidden], weight [vocabulary, hidden] and labels [n]."""

    def change(training: Training, ids: Tensor) -> None:
        model = training.model

        def loss_of(ids: Tensor) -> Tensor:
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            return loss(hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight, ids[:, 1:].reshape(-1))

        training.loss_of = loss_of

    return change


def torch_chunked() -> Change:
    """torch's linear_cross_entropy with the options it chooses itself."""
    return _head(
        lambda hidden, weight, labels: F.linear_cross_entropy(
            hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions()
        )
    )


def _compiled() -> Change:
    def change(training: Training, ids: Tensor) -> None:
        def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(hidden, weight).float(), labels)

        _head(torch.compile(plain))(training, ids)

    return change


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)[0]


def contenders() -> list[Contender]:
    """The rows of the table."""
    chunked = hasattr(torch.nn, "LinearCrossEntropyOptions")  # torch 2.13
    return [
        Contender(EXACT),
        Contender("laconic, chunked loss", [compressed(bits=16, loss="chunked")]),
        *([Contender("torch, linear_cross_entropy, chunked", [torch_chunked()])] if chunked else []),
        *([Contender("torch.compile of projection and loss", [_compiled()], compiled=True)]
          if shutil.which("c++") else []),
        Contender("Liger, fused linear cross entropy", [_head(_liger)], package="liger_kernel",
                  cannot="needs a GPU: it is written in Triton"),
    ]  # fmt: skip
