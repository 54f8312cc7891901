"""Router balance in training: losses that keep a model's experts evenly used, and biases that follow the load.

Forward hooks on the routers read their decisions, whether the model's own blocks call them or layers of laconic.moe.
The balance loss is that of Hugging Face's families (Switch Transformer, arXiv 2101.03961, equations 4 to 6, over all
layers as one). Shares are counted over the micro-batches of all processes, so the loss does not depend on the number of
processes that share the batch. A layer that a forward leaves out, on some processes or on all, has no share in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import ConfigError, ModelError
from laconic.moe.gates.losses import load_step, z_loss
from laconic.moe.huggingface import Block, find_blocks
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.world import World

_BIAS = "e_score_correction_bias"
"""Name of the buffer that families with DeepSeek-V3's balancing add to scores before the choice."""
_PATIENCE = 20
"""Steps without any call of a router after which the first call is given up. Layers may be left out at random."""
_BIAS_RATE = 1e-3
"""Update speed of the biases: DeepSeek-V3 (arXiv 2412.19437), section 4.2."""


@dataclass(frozen=True)
class _Seen:
    probabilities: Tensor
    """fp32 [E], mean over tokens; with a graph."""
    counts: Tensor
    """int64 [E], number of tokens that chose each expert."""
    num_tokens: int
    z: Tensor
    """The z-loss, 0-dim; with a graph."""


class Routers:
    """Balances the routers of a model in training.

    Call `begin` before each forward and `loss` after it, and `after_step` after the update of the step.

    Args:
        model: gets a forward hook on each router.
        blocks: of `model`, with their routers known.
        aux_loss_coef, z_loss_coef, bias_rate: coefficients of `[moe]`; 0 turns a term off.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[Block],
        world: World,
        *,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        self.aux_loss_coef, self.z_loss_coef, self.bias_rate = aux_loss_coef, z_loss_coef, bias_rate
        named = {block.router: block for block in blocks if block.router is not None}
        # Blocks may share a router.
        first = {id(model.get_submodule(name)): name for name in reversed(named)}
        self._routers = {name: block.num_experts for name, block in named.items() if name in first.values()}
        self._model, self._world = model, world
        self._seen: dict[str, list[_Seen]] = {}
        # Sums since the last step: balance losses, z-losses, number of forwards, calls of routers.
        self._sums = torch.zeros(4, dtype=torch.float64, device=world.device)
        self._loads: dict[str, Tensor] = {}
        self._steps_to_first: int | None = _PATIENCE  # None: a router was called, on some process
        self._with_logits: set[str] = set()
        self.loads: list[list[int]] | None = None
        """Tokens of each expert by layer, over all processes, in the last step that was asked for them."""
        for name, num_experts in self._routers.items():
            model.get_submodule(name).register_forward_hook(self._watch(name, num_experts))
        for name in named:
            router = model.get_submodule(name)
            check = self._check_called(first[id(router)], router)
            model.get_submodule(name.rpartition(".")[0]).register_forward_hook(check)

    def begin(self) -> None:
        """Start a forward: drop records of an unfinished one, and of layers that ran a second time in backward."""
        self._seen.clear()

    def loss(self) -> Tensor | None:
        """Compute the term to add to the loss of the forward that has ended; all processes call it together.

        Returns:
            fp32, 0-dim, with a graph if any router was called; None if both coefficients are 0.
        """
        seen = [one for calls in self._seen.values() for one in calls]
        for name, calls in self._seen.items():
            counts = torch.stack([one.counts for one in calls]).sum(0)
            self._loads[name] = self._loads[name] + counts if name in self._loads else counts
        total: Tensor | None = None
        self._sums[2] += 1
        self._sums[3] += len(seen)
        if self.aux_loss_coef:
            balance = self._balance(seen)
            self._sums[0] += balance.detach()
            total = self.aux_loss_coef * balance
        if self.z_loss_coef:
            z = torch.stack([one.z for one in seen]).mean() if seen else self._sums.new_zeros(()).float()
            self._sums[1] += z.detach()
            total = self.z_loss_coef * z if total is None else total + self.z_loss_coef * z
        if seen and total is not None and not total.requires_grad:
            raise ModelError(
                f"the logits of router {next(iter(self._seen))} have no gradient, so no loss can balance them; set "
                "moe.router_aux_loss_coef = 0 and moe.router_z_loss_coef = 0"
            )
        self._seen.clear()
        return total

    def after_step(self, skipped: bool, count_loads: bool = False) -> dict[str, float]:
        """Update the biases from the load, unless the step's update was `skipped`; all processes call it together.

        `count_loads`: also set `loads`.

        Returns:
            Fields for metrics.jsonl: means over the forwards since the last call, and the range of the biases.

        Raises:
            ModelError: no router was called on any process in this and all steps before, and these were many.
        """
        fields: dict[str, float] = {}
        balance, z, num_forwards, num_calls = self._world.sum(self._sums.clone()).tolist()
        if num_calls:
            self._steps_to_first = None
        elif num_forwards and self._steps_to_first is not None:
            self._steps_to_first -= 1
        if self._steps_to_first == 0:
            raise ModelError(
                f"router {next(iter(self._routers))} was not called in a training forward of {_PATIENCE} steps, nor was"
                " any other, so none can be balanced; train the model in training mode, or set"
                " moe.router_aux_loss_coef, moe.router_z_loss_coef and moe.bias_rate to 0"
            )
        if num_forwards and self.aux_loss_coef:
            fields["moe_balance_loss"] = balance / num_forwards
        if num_forwards and self.z_loss_coef:
            fields["moe_z_loss"] = z / num_forwards
        if count_loads and num_forwards:
            self.loads = [load.tolist() for load in self._summed_loads()]
        if self.bias_rate and num_forwards:
            fields["moe_bias_range"] = self._update_biases(skipped)
        self.clear()
        return fields

    def clear(self) -> None:
        """Drop the records and sums of all forwards since the last step."""
        self._seen.clear()
        self._sums.zero_()
        self._loads.clear()

    def __str__(self) -> str:
        terms = {"balance loss": self.aux_loss_coef, "z-loss": self.z_loss_coef, "bias by load": self.bias_rate}
        found = ", ".join(f"{term} {value:g}" for term, value in terms.items() if value)
        return f"routers: {found or 'nothing balances them'}"

    def _watch(self, name: str, num_experts: int) -> Callable[[nn.Module, Any, Any], None]:
        def watch(router: nn.Module, _: Any, out: Any) -> None:
            if not router.training:
                return
            logits, indices = _decision(name, out, num_experts)
            num_tokens = len(logits)
            if num_tokens and (self.aux_loss_coef or self.z_loss_coef) and name not in self._with_logits:
                self._with_logits.add(name)  # checked once: the check waits for a GPU
                if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-2).all()):
                    raise ModelError(
                        f"router {name} returns probabilities, but balance and z-loss need logits; set"
                        " moe.router_aux_loss_coef and moe.router_z_loss_coef to 0"
                    )
            seen = _Seen(
                logits.softmax(-1).sum(0) / max(num_tokens, 1) if self.aux_loss_coef else logits.new_zeros(num_experts),
                torch.bincount(indices.flatten(), minlength=num_experts),
                num_tokens,
                z_loss(logits) if self.z_loss_coef else logits.new_zeros(()),
            )
            self._seen.setdefault(name, []).append(seen)

        return watch

    def _check_called(self, name: str, router: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        """Make the forward hook of a block that refuses decisions which its router `name` did not make as a module."""

        def check(_: nn.Module, __: Any, ___: Any) -> None:
            if router.training and name not in self._seen:
                raise ModelError(
                    f"a block ran in a training forward, but its router {name} was not called, so it cannot be"
                    " balanced; set moe.router_aux_loss_coef, moe.router_z_loss_coef and moe.bias_rate to 0"
                )

        return check

    def _balance(self, seen: Sequence[_Seen]) -> Tensor:
        """E * sum over experts of (assignments per token) * (mean probability), both means over layers too; 0-dim."""
        num_experts = next(iter(self._routers.values()))  # of each layer
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=self._world.device)
        for one in seen:
            counts[:-1] += one.counts
            counts[-1] += one.num_tokens
        counts = self._world.sum(counts)
        shares = counts[:num_experts].float() / counts[num_experts].clamp_min(1)
        if not seen:
            return shares.new_zeros(())
        return num_experts * torch.dot(shares, torch.stack([one.probabilities for one in seen]).mean(0))

    @torch.no_grad()
    def _update_biases(self, skipped: bool) -> float:
        """Lower biases of experts above the mean load, raise those below; return the widest layer's max - min."""
        widest = 0.0
        for name, load in zip(self._routers, self._summed_loads(), strict=True):
            bias = self._model.get_submodule(name).get_buffer(_BIAS)
            if not skipped:
                bias += load_step(load, self.bias_rate, bias.dtype)
            widest = max(widest, float(bias.max() - bias.min()))
        return widest

    def _summed_loads(self) -> tuple[Tensor, ...]:
        """Tokens of each expert since the last step over all processes, int64 [E] per router, 0 where none came."""
        sizes = list(self._routers.values())
        loads = torch.zeros(sum(sizes), dtype=torch.int64, device=self._world.device)
        for name, part in zip(self._routers, loads.split(sizes), strict=True):
            if name in self._loads:
                part.copy_(self._loads[name])
        return self._world.sum(loads).split(sizes)


def _decision(name: str, out: Any, num_experts: int) -> tuple[Tensor, Tensor]:
    """Find logits and chosen experts among the outputs of a router.

    Returns:
        Logits, fp32 [n, E], and chosen experts, int64 [n, k].
    """
    parts = [part for part in (out if isinstance(out, tuple | list) else (out,)) if isinstance(part, Tensor)]
    logits = [part for part in parts if part.is_floating_point() and part.shape[-1] == num_experts]
    indices = [part for part in parts if part.dtype in (torch.int64, torch.int32)]
    if not logits or len(indices) != 1:
        raise ModelError(
            f"router {name} returned {[f'{p.dtype} {list(p.shape)}' for p in parts]}, but balancing needs logits of"
            f" {num_experts} experts and the chosen ones; set moe.router_aux_loss_coef, moe.router_z_loss_coef and"
            " moe.bias_rate to 0"
        )
    return logits[0].reshape(-1, num_experts).float(), indices[0].long()


def watch_routers(model: nn.Module, config: TrainConfig, world: World) -> tuple[Routers | None, str | None]:
    """Hook the routers of `model` to balance them as `[moe]` asks.

    Call it before the model's blocks are replaced or its parts wrapped. Where the configuration asks for nothing, the
    family decides: its `router_aux_loss_coef`, and DeepSeek-V3's rate where there are biases.

    Returns:
        The routers and a line that describes their balancing; None and a line with the reason where nothing balances
        them; None, None for a dense model.
    """
    moe = config.moe
    if moe.gate is not None:
        return None, f"routers: a {moe.gate} gate decides in their place; nothing balances it"
    asked = {
        name: value
        for name in ("router_aux_loss_coef", "router_z_loss_coef", "bias_rate")
        if (value := getattr(moe, name))
    }
    try:
        blocks, reason = find_blocks(model), "the model has no mixture-of-experts blocks"
    except ModelError as error:
        blocks, reason = {}, str(error)
        if not asked:
            return None, f"routers: nothing balances them; {reason}"
    if blocks and (without := [name for name, block in blocks.items() if block.router is None]):
        blocks, reason = {}, f"no module beside {without[0]} is its router for certain"
        if not asked:
            return None, f"routers: nothing balances them; {reason}"
    routers = [block.router for block in blocks.values() if block.router is not None]
    if not routers and asked:
        name, value = next(iter(asked.items()))
        raise ConfigError(f"moe.{name} is {value}, but {reason}; leave it out")
    if not routers:
        return None, None
    if config.pipeline.stages > 1:
        return None, "routers: nothing balances them between stages of a pipeline"
    biased = all(_BIAS in model.get_submodule(name)._buffers for name in routers)
    family: Any = getattr(model, "config", None)
    of_family = getattr(family, "router_aux_loss_coef", None)
    if moe.router_aux_loss_coef and biased and of_family is None:
        raise ConfigError(
            f"moe.router_aux_loss_coef is {moe.router_aux_loss_coef}, but the routers of {type(model).__name__} have"
            " biases for that; use moe.bias_rate"
        )
    if moe.bias_rate and not biased:
        raise ConfigError(
            f"moe.bias_rate is {moe.bias_rate}, but the routers of {type(model).__name__} have no {_BIAS}; use "
            "moe.router_aux_loss_coef"
        )
    aux_loss_coef = moe.router_aux_loss_coef if moe.router_aux_loss_coef is not None else float(of_family or 0.0)
    frozen = config.lora.r is not None  # biases belong to the weights that adapters leave as they are
    default_rate = _BIAS_RATE if biased and not frozen else 0.0
    bias_rate = moe.bias_rate if moe.bias_rate is not None else default_rate
    _check_alike(model, blocks, aux_loss_coef)
    made = Routers(
        model,
        blocks.values(),
        world,
        aux_loss_coef=aux_loss_coef,
        z_loss_coef=moe.router_z_loss_coef,
        bias_rate=bias_rate,
    )
    return made, str(made)


def _check_alike(model: nn.Module, blocks: Mapping[str, Block], aux_loss_coef: float) -> None:
    """Check that all layers have the same number of experts, which the balance loss needs."""
    sizes = {block.num_experts for block in blocks.values()}
    if aux_loss_coef and len(sizes) > 1:
        raise ConfigError(
            f"moe.router_aux_loss_coef is {aux_loss_coef}, but layers of {type(model).__name__} have {sorted(sizes)}"
            " experts, which no loss over all layers can count together; set it to 0"
        )
