"""One optimizer step and one evaluation, the same code for one process and many.

Everything random in step s of rank r is seeded by (seed, s, r), and samples are a function of (seed, s), so a step
needs nothing from the steps before it but weights and optimizer moments.

The loss is the mean over all tokens of the global batch: micro-batches are equally large, so the mean of their means is
that. Before the update all processes add up three numbers (loss, non-finite values, requests to stop) in one small
all-reduce, and therefore always take the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from laconic.activations import SavedTensorTracker
from laconic.train.config import OptimizerConfig, TrainConfig
from laconic.train.data import TokenDataset, batch
from laconic.train.parallel import accumulate, autocast, clip_gradients, full_value, gradient_norm, plain_model
from laconic.train.sampler import split_mix
from laconic.train.schedule import learning_rate
from laconic.train.stop import StopRequest
from laconic.train.wire import WireCounter
from laconic.train.world import World

__all__ = ["StepResult", "Trainer", "make_optimizer"]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, the same on every process."""

    loss: float
    """Mean over the tokens of the global batch, nats per token, before the update."""
    grad_norm: float
    """2-norm of all gradients before clipping."""
    learning_rate: float
    skipped: bool
    """Whether the update was left out, because loss or gradient of some process was not finite."""
    stop: bool
    """Whether some process was asked to stop."""


class Trainer:
    """Owns the model, its optimizer and the data, and runs steps and evaluations.

    `model` may be plain, DDP- or FSDP2-wrapped. `validation` None: `evaluate` gives None.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: TokenDataset,
        validation: TokenDataset | None,
    ) -> None:
        self._config = config
        self._world = world
        self.model = model
        self.optimizer = optimizer
        self._train = train
        self._validation = validation
        self._micro_batch_size = config.batch_size // (world.size * config.accumulation)
        self.saved_nbytes: int | None = None
        """Bytes kept for backward by one micro-batch on this process; measured in the first step."""
        self.wire_nbytes: int | None = None
        """Bytes this process sends per step; measured in the first step."""

    def step(self, step: int, stop: StopRequest) -> StepResult:
        """Run optimizer step `step` (0-based). All processes call it together; a stop asked of one is told to all."""
        config, world = self._config, self._world
        rate = learning_rate(config.optimizer, step, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(split_mix(split_mix(split_mix(config.seed) ^ step) ^ world.rank))

        with ExitStack() as measuring:
            counter = measuring.enter_context(WireCounter(world.size)) if self.wire_nbytes is None else None
            loss = self._forward_backward(step)
            parameters = list(self.model.parameters())
            norm = gradient_norm(parameters)
            norm_value = full_value(norm)
            bad = ~(torch.isfinite(norm_value) & torch.isfinite(loss))
            votes = torch.stack([loss / world.size, bad.to(loss.dtype), torch.full_like(loss, float(stop.requested))])
            mean_loss, num_bad, num_stop = world.sum(votes).tolist()
        if counter is not None:
            self.wire_nbytes = counter.nbytes

        skipped = num_bad > 0
        if not skipped:
            clip_gradients(parameters, norm, config.optimizer.clip_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(mean_loss, float(norm_value), rate, skipped, num_stop > 0)

    def _forward_backward(self, step: int) -> torch.Tensor:
        """Gradients of this process's share of the batch, and its mean loss, fp64 0-dim on the device."""
        config, world = self._config, self._world
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        for micro in range(config.accumulation):
            tokens = batch(
                self._train, config.seed, step, config.batch_size, config.accumulation, micro, world.rank, world.size
            ).to(world.device)
            with accumulate(self.model, last=micro == config.accumulation - 1):
                if self.saved_nbytes is None:
                    with SavedTensorTracker(plain_model(self.model)) as tracker:
                        loss = self._loss(self.model, tokens)
                    self.saved_nbytes = tracker.nbytes
                else:
                    loss = self._loss(self.model, tokens)
                (loss / config.accumulation).backward()
            total += loss.detach().double() / config.accumulation
        return total

    def _loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, fp32, of the model's predictions on `tokens`, int64 [n, T + 1]."""
        with autocast(model, self._world.device, self._config.precision):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss over the validation sequences, the same ones each time, shared by the processes."""
        if self._validation is None:
            return None
        world = self._world
        model = plain_model(self.model)
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for tokens, weight in self._validation_batches():
            total[0] += weight
            total[1] += weight * self._loss(model, tokens)
        model.train()
        count, loss = world.sum(total).tolist()
        return float(loss / count)

    def _validation_batches(self) -> Iterator[tuple[torch.Tensor, int]]:
        """This process's validation sequences in batches, [n, T + 1], with how many of them count: n, or 0."""
        assert self._validation is not None
        config, world = self._config, self._world
        available = len(self._validation)
        num_sequences = min(config.eval_sequences, available)
        chosen = [index * available // num_sequences for index in range(num_sequences)]
        own = chosen[world.rank :: world.size]
        size = self._micro_batch_size
        # FSDP2 gathers in every forward, so all processes make equally many, if need be with a batch that counts 0.
        num_rounds = math.ceil(math.ceil(num_sequences / world.size) / size)
        for start in range(0, num_rounds * size, size):
            part = own[start : start + size]
            sequences = [self._validation[index] for index in part or chosen[:1]]
            yield torch.stack(sequences).to(world.device), len(part)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over `model`'s trainable parameters; vectors (norms, biases) are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
