"""Diffusion models of the diffusers package: forward bits, gradients, bytes kept for backward, and time of a step.

A step is forward and backward of the mean square distance to noise, in training mode and fp32. Small models with random
weights; parameters that start at zero, as the last layers of diffusion transformers do, get random values, or else most
gradients would be zero. Bytes are what autograd keeps in one training forward (`SavedTensorTracker`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from benchmarks.kit.timing import UNUSUAL_ROUNDS, seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.activations import SavedTensorTracker

_NOISE = torch.Generator()


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_NOISE.manual_seed(1))


_STEPS = torch.tensor([3, 500])
_TEXT = {"attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 48, "pooled_projection_dim": 32}
_IMAGE = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "attention_head_dim": 16, "num_attention_heads": 4}


def _latents() -> dict[str, Any]:
    return {"hidden_states": _noise(2, 4, 16, 16), "timestep": _STEPS}


def _text() -> dict[str, Any]:
    return {"encoder_hidden_states": _noise(2, 12, 48)}


MODELS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "UNet2DModel": (
        {
            "sample_size": 32,
            "block_out_channels": (32, 64, 64),
            "norm_num_groups": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {"sample": _noise(2, 3, 32, 32), "timestep": _STEPS},
    ),
    "UNet2DConditionModel": (
        {
            "sample_size": 16,
            "layers_per_block": 1,
            "block_out_channels": (32, 64),
            "norm_num_groups": 8,
            "cross_attention_dim": 48,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        lambda: {"sample": _noise(2, 4, 16, 16), "timestep": _STEPS, **_text()},
    ),
    "AutoencoderKL": (
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 8,
            "sample_size": 32,
        },
        lambda: {"sample": _noise(2, 3, 32, 32)},
    ),
    "DiTTransformer2DModel": (
        {**_IMAGE, "num_layers": 3, "num_embeds_ada_norm": 10},
        lambda: {**_latents(), "class_labels": torch.tensor([1, 2])},
    ),
    "PixArtTransformer2DModel": (
        {**_IMAGE, "num_layers": 3, "cross_attention_dim": 64, "caption_channels": 48},
        lambda: {**_latents(), **_text(), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SD3Transformer2DModel": (
        {**_IMAGE, **_TEXT, "num_layers": 3, "caption_projection_dim": 64, "out_channels": 4},
        lambda: {**_latents(), **_text(), "pooled_projections": _noise(2, 32)},
    ),
    "FluxTransformer2DModel": (
        {**_TEXT, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": (4, 4, 8)},
        lambda: {
            "hidden_states": _noise(2, 64, 4),
            "timestep": _STEPS / 1000,
            **_text(),
            "pooled_projections": _noise(2, 32),
            "img_ids": torch.zeros(64, 3),
            "txt_ids": torch.zeros(12, 3),
        },
    ),
}
"""By class of diffusers, its configuration and the arguments of its forward."""


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model in training mode, and its arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import diffusers
    sizes, arguments = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**sizes).train()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model, arguments()


def step_of(model: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], int]:
    """One training step: what the model returns, its gradients, and the bytes that were kept."""
    torch.manual_seed(5)
    model.zero_grad()
    with SavedTensorTracker(model) as tracker:
        output = model(**arguments).sample
    (output - _noise(*output.shape)).square().mean().backward()
    return output.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, tracker.nbytes


@benchmark("diffusion", cases=MODELS)
def diffusion(options: Options) -> list[Table]:
    """Each model at 4 and 8 bits, by its sites alone and combined with hooks."""
    names = options.only or list(MODELS)[: 1 if options.smoke else None]
    rows = [row for name in names for row in _rows(name, options)]
    header = ["model", "kept", "forward", "cosine of gradients", "worst", "exact, KB", "kept, KB", "factor", "step"]
    note = (
        "forward: bits of the output beside the unmodified model's. worst: least cosine of one parameter's gradient,"
        " of those with a thousandth of the norm of all. step: time over the exact step's, medians of"
        f" {options.rounds} rounds by turns, {options.thread_text}."
    )
    return [Table("Diffusion models, small", header, rows, note)]


def _rows(name: str, options: Options) -> list[list[str]]:
    plain, arguments = made(name)
    output, exact, before = step_of(plain, arguments)
    norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    models: dict[str, nn.Module] = {"exact": plain}
    found = {}
    for bits, mode in ((4, "sites"), (4, "combined"), (8, "combined")):
        title = f"{bits} bits, {mode}"
        models[title] = model = copy.deepcopy(plain)
        laconic.compress_activations(model, bits, mode=mode, example_inputs=arguments)
        got, gradients, after = step_of(model, arguments)
        large = [n for n, gradient in exact.items() if gradient.norm() > 1e-3 * norm]
        worst = min(_cosine(exact[n], gradients[n]) for n in large)
        whole = _cosine(*(torch.cat([g[n].flatten() for n in exact]) for g in (exact, gradients)))
        bits_are = "equal" if torch.equal(got, output) else "differ"
        sizes = [f"{before / 1e3:.0f}", f"{after / 1e3:.0f}", f"{before / after:.2f}x"]
        found[title] = [bits_are, f"{whole:.4f}", f"{worst:.3f}", *sizes]
    steps = {title: partial(step_of, model, arguments) for title, model in models.items()}
    seconds = seconds_of(steps, options.rounds, warm_up_rounds=UNUSUAL_ROUNDS, shuffle=True)
    return [[name, title, *cells, f"{seconds[title].over(seconds['exact']):.2f}"] for title, cells in found.items()]


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0).item()
