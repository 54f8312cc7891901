"""Tensors of a training in progress: what the lossless format meets on a wire and in a file."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from laconic.train.config.schema import ModelConfig
from laconic.train.model import build_model

LENGTH = 128
_BATCH = 16

Captured = dict[str, list[Tensor]]
"""Tensors by kind, in the dtype in which they travel or are stored."""


def capture(family: str, steps: int, hidden_size: int = 128, num_layers: int = 4) -> Captured:
    """Train a small model on the bytes of the Python standard library and take one more step under observation.

    Arguments:
        family: a model_type of transformers; one with experts adds what is dispatched to them.
        steps: optimizer steps before it.

    Parameters are fp32 and computed with in bf16, as the trainer does it. Kinds: weights, gradients and AdamW's moments
    in fp32 (as they are stored) and bf16 (as they are sent), the layers' outputs and the gradients of these in bf16
    (what pipeline stages send), and the tokens given to each expert.
    """
    extra = {"num_local_experts": 8} if family == "mixtral" else {}
    config = ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        extra=extra,
    )
    found: Captured = {}
    model, optimizer = _train(config, steps, lambda model, hooks: _observe(model, found, hooks))
    parameters = [p for p in model.parameters() if p.grad is not None]
    stored = {
        "weights": [p.detach() for p in parameters],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "Adam's first moment": [optimizer.state[p]["exp_avg"] for p in parameters],
        "Adam's second moment": [optimizer.state[p]["exp_avg_sq"] for p in parameters],
    }
    for kind, tensors in stored.items():
        found[f"{kind}, bf16"] = [tensor.bfloat16() for tensor in tensors]
        found[f"{kind}, fp32"] = [tensor.clone() for tensor in tensors]
    return found


def capture_routing(steps: int, num_experts: int, top_k: int) -> list[tuple[Tensor, Tensor]]:
    """What the routers of a small Qwen3-MoE say about real text after some training; aux losses do not count.

    Returns for each of four layers the experts, int64 [tokens, k], and weights, fp32 [tokens, k], of a batch.
    """
    shape = {"num_experts": num_experts, "num_experts_per_tok": top_k, "moe_intermediate_size": 32}
    config = ModelConfig(
        family="qwen3_moe",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        extra={**shape, "norm_topk_prob": True, "output_router_logits": True, "router_aux_loss_coef": 0.02},
    )
    found: list[tuple[Tensor, Tensor]] = []

    def of_experts(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append((args[1].detach().clone(), args[2].detach().float()))

    def observe(model: nn.Module, hooks: ExitStack) -> None:
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                hooks.callback(module.register_forward_pre_hook(of_experts).remove)

    _train(config, steps, observe)
    return found


def _train(
    config: ModelConfig, steps: int, observe: Callable[[nn.Module, ExitStack], None]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after some steps on real text, with the gradients of one more, which `observe` has hooks for."""
    model, optimizer = trained(config, steps, lambda step: min(1.0, (step + 1) / 20), torch.bfloat16)
    with ExitStack() as hooks:
        observe(model, hooks)
        batch = batch_of_text(steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return model, optimizer


def trained(
    config: ModelConfig, steps: int, rate: Callable[[int], float], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has learnt real text, and its optimizer; `rate` is the learning rate by step, as a factor."""
    model = build_model(config, 257, LENGTH, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate(step)
        batch = batch_of_text(step)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _observe(model: nn.Module, found: Captured, hooks: ExitStack) -> None:
    """Note the outputs of the layers, the gradients of these, and the inputs of experts."""

    def note(kind: str) -> Callable[[Tensor], None]:
        return lambda tensor: found.setdefault(kind, []).append(tensor.detach().bfloat16().clone())

    def of_layer(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        tensor = output if isinstance(output, Tensor) else output[0]
        note("layer outputs, bf16")(tensor)
        tensor.register_hook(note("gradients of layer outputs, bf16"))

    def of_experts(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        states, experts = args[0], args[1]  # [tokens, hidden] and [tokens, k]: to each expert go its tokens
        rows = [states[(experts == expert).any(-1)] for expert in range(int(experts.max()) + 1)]
        note("tokens for experts, bf16")(torch.cat(rows))

    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("layers"):
            hooks.callback(module.register_forward_hook(of_layer).remove)
        if name.endswith(".experts"):
            hooks.callback(module.register_forward_pre_hook(of_experts).remove)


@cache
def _text() -> Tensor:
    """Bytes of the Python standard library, int64."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of_text(number: int) -> Tensor:
    """Bytes of the Python standard library, int64 [16, LENGTH]; the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(_text()) - LENGTH, (_BATCH, 1), generator=generator)
    return _text()[starts + torch.arange(LENGTH)]
