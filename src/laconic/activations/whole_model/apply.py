"""`compress_activations` converts a model, `decompress_activations` converts it back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from laconic.activations.forwards.attention import AttentionCore, attention_core_of
from laconic.activations.forwards.base import LinearForward, NormForward, SiteForward
from laconic.activations.forwards.checkpoint import LayerForward, is_checkpointed_layer
from laconic.activations.forwards.dropout import DropoutForward
from laconic.activations.forwards.elementwise import ElementwiseForward
from laconic.activations.forwards.experts import ExpertsForward, RouterForward
from laconic.activations.forwards.feedforward import MlpForward, RecomputedMlpForward
from laconic.activations.forwards.functional import FunctionsForward
from laconic.activations.forwards.host_checkpoint import CheckpointingForward, checkpoints_others
from laconic.activations.forwards.inner_attention import InnerAttentionForward
from laconic.activations.forwards.leaves import LeafForward
from laconic.activations.forwards.mixer import MixerForward
from laconic.activations.forwards.replacement import Replacement, check_module, check_whole, replacements_of
from laconic.activations.forwards.torch_layers import mixer_of
from laconic.activations.keep.choice import Choice, Recompute
from laconic.activations.recognize.leaf_layers import LeafSpec
from laconic.activations.recognize.plan import ATTENTION, ActivationPlan, Policy, careful_head
from laconic.activations.recognize.sites import FunctionsSpec, InnerAttentionSpec, MixerSpec, Site, find_sites
from laconic.activations.whole_model.causal_loss import CausalLossForward, has_causal_loss
from laconic.activations.whole_model.follow import follow
from laconic.activations.whole_model.head import CausalForward, CausalHead, HeadForward, find_head
from laconic.activations.whole_model.hooks import ExactForward, HooksForward
from laconic.activations.whole_model.report import (
    SAVINGS_LOGGER,
    Measurement,
    Report,
    make_report,
    measure,
    measure_first,
    only_runs_exactly,
    sample_inputs,
)
from laconic.errors import FormatError, ModelError
from laconic.formats import BlockFormat
from laconic.options import ACTIVATION_BITS, ATTENTIONS, CODE_BITS, LOSSES, MODES, Loss, Mode, refused, takes

_FORWARDS: Mapping[str, type[SiteForward] | type[LeafForward]] = {
    "norm": NormForward,
    "linear": LinearForward,
    "mlp": MlpForward,
    "router": RouterForward,
    "experts": ExpertsForward,
    "activation": ElementwiseForward,
    "dropout": DropoutForward,
    "functions": FunctionsForward,
}


@torch.inference_mode(False)  # whose tensors no backward could use: neither those of trials nor of measurements
def compress_activations(
    model: nn.Module,
    bits: int = 4,
    *,
    format: str | None = None,
    block_size: int = 64,
    scale_dtype: torch.dtype = torch.bfloat16,
    attention: str | BlockFormat | None = None,
    checkpoint: str | BlockFormat | None = None,
    policy: Policy | None = None,
    plan: ActivationPlan | None = None,
    mode: Mode = "sites",
    loss: Loss = "exact",
    example_inputs: Mapping[str, Any] | None = None,
    sequence_length: int = 128,
) -> Report:
    """Make a model save packed tensors for backward instead of exact ones.

    The layer-aware activation quantization of AGoQ (arXiv 2605.00539): one packed input per norm, from which the inputs
    of the linear layers behind it are rebuilt; the packed gate and up projections, from which the activation product
    and the input of the down projection are rebuilt; the attention output once. Forward values, parameters, names and
    state dict stay exactly as they were. After an error the model is unchanged. Call it before the model is wrapped in
    DDP or FSDP2. A model may be given to torch.compile before or after.

    Args:
        model: changed in place. Any Hugging Face model or convolutional network; with `mode="hooks"` or "combined" any
            module.
        bits: 2, 4, 5, 6, 8, or 16 for leaving everything as it is. Below 8 bits the input of the final norm, which the
            output projection depends on, is kept at 8 (see `careful_head`). 2 bits are rounded stochastically (see
            `seed_rounding`); take block_size=256 with them.
        format: "nf4" (default at 4 bits), "e2m1" or "int4"; other numbers of bits have one format each.
        block_size: values per scale: 16, 32, 64, 128 or 256.
        scale_dtype: torch.bfloat16, torch.float16 or torch.float32.
        attention: how query, key and value are kept: "exact" leaves attention as it is; "int8", "nf4" (any code) or a
            format packs them, and attention runs again in backward. The output then costs nothing. "recompute" keeps
            the input of the attention module in 8 bits instead, and the whole module runs again, its projections
            included. None is "int8" (`ATTENTION`), "exact" if `bits` is 16, or what the policy or plan says if there
            is one. Other mixers of tokens (state-space models) keep their packed input.
        checkpoint: how a layer's input is kept where Hugging Face's `gradient_checkpointing_enable`, before or after
            this call, computes the layer again in backward: "exact", a code or a format. None is "int8", "exact" if
            `bits` is 16. Such a layer keeps nothing else, and its second run is exact but for its input.
        policy: decides site by site instead of `bits` and `format`.
        plan: the decision as data, instead of a policy; sites it does not name stay exact.
        mode: "sites" rewrites recognized layers; "hooks" packs every large saved tensor of whatever model; "combined"
            rewrites recognized layers and packs what the code around them saves. A site that a policy or plan leaves
            exact stays exact in all of them.
        loss: "exact" computes the loss as it was, bit for bit; that of a causal Hugging Face model some rows of the
            logits at a time, without two fp32 copies of them. "chunked" computes the loss of a Hugging Face language
            model from its hidden states, without holding its logits (see `linear_cross_entropy`): calls with labels
            and gradients return the loss, and logits of no tokens.
        example_inputs: keyword arguments of a training forward, for measuring bytes; made up for Hugging Face models.
            The measuring forward leaves the model, its buffers and all random states as they were.
        sequence_length: tokens of the measuring forward when its inputs are made up, fewer if the model has fewer
            positions.

    Returns:
        The sites found and what each saves; `print` it. `left_exact` names modules that save tensors as before;
        `unmeasured` says why there are no measured bytes, if so.

    Raises:
        FormatError: bits, format, block_size, scale_dtype, attention or checkpoint is not supported.
        ModelError: nothing is recognized, the model is compressed already, the plan names sites it does not have, the
            loss is not one that can be chunked, or the model is no module.
    """
    check_module(model)
    if isinstance(model, OptimizedModule):  # what it compiles at its next call
        model = model._orig_mod
    check_whole(model)
    for name, value, allowed in (("mode", mode, MODES), ("loss", loss, LOSSES)):
        if not takes(allowed, value):
            raise ModelError(refused(name, value, allowed))
    of_bits = [code for code, width in CODE_BITS.items() if width == bits]
    if format is not None and format not in of_bits and takes(ACTIVATION_BITS, bits):
        one_of = f"one of {', '.join(of_bits)}, or " if of_bits else ""
        raise FormatError(f"format is {format!r}, but with bits = {bits} it must be {one_of}left out")
    block_format = BlockFormat.from_bits(bits, code=format, block_size=block_size, scale_dtype=scale_dtype)
    if attention is not None and (policy is not None or plan is not None):
        raise ModelError(
            "attention= is for the default policy; with policy= or plan=, that decides about attention sites"
        )
    kept_attention = attention
    if kept_attention is None:
        kept_attention = "exact" if block_format is None else ATTENTION
    attention_format: Choice = Recompute()
    if kept_attention != "recompute":
        attention_format = _format("attention", kept_attention, block_size, scale_dtype)
    kept_input = checkpoint
    if kept_input is None:
        kept_input = "exact" if block_format is None else "int8"
    input_format = _format("checkpoint", kept_input, block_size, scale_dtype)
    if _forwards(model):
        raise ModelError(
            f"{type(model).__name__} has compressed activations already; "
            f"call laconic.decompress_activations(model) before compressing it again"
        )
    sites = find_sites(model)
    if mode != "hooks":
        if not sites and mode == "sites":
            raise ModelError(
                f"no site recognized in {type(model).__name__}: it has no linear layer, norm, feed-forward block or "
                f"convolution that laconic knows; mode='hooks' packs the saved tensors of any model"
            )
        if plan is None:
            plan = ActivationPlan.make(sites, policy or careful_head(block_format, attention_format))
        plan.check(sites)
    elif loss == "chunked":
        raise ModelError("mode='hooks' leaves the loss as it is; loss='chunked' needs mode='sites'")
    elif policy is not None or plan is not None or attention not in (None, "exact"):
        raise ModelError("mode='hooks' packs all saved tensors alike; policy=, plan= and attention= need mode='sites'")
    elif checkpoint not in (None, "exact"):
        raise ModelError(
            f"checkpoint is {checkpoint!r}, but mode='hooks' knows no layers and leaves what a checkpoint keeps exact; "
            f"leave checkpoint= out, or take mode='combined'"
        )

    if mode != "sites":
        _check_initialized(model, mode)
    head = find_head(model) if loss == "chunked" else None
    loss_owner = _loss_owner(model) if loss == "exact" and mode != "hooks" else None
    before, call, unmeasured = measure_first(model, sample_inputs(model, example_inputs, sequence_length))
    try:
        if mode != "hooks":
            assert plan is not None
            convert(model, sites, plan, head, input_format)
        if mode == "combined" and block_format is not None:
            assert plan is not None
            _leave_exact(model, [site.name for site in sites if plan.choices.get(site.name) is None])
        if mode != "sites" and block_format is not None:
            HooksForward(model, block_format).install()
        after = None
        if call is not None:
            try:
                after = measure(model, call)
            except Exception as error:
                raise only_runs_exactly(model, error) from error
        packed_bits = None if block_format is None or mode == "sites" else block_format.bits
        report = _report(model, mode, sites, plan, head, (before, after), unmeasured, packed_bits, loss_owner)
        if report.warning is not None:
            logging.getLogger(SAVINGS_LOGGER).warning("%s: %s", type(model).__name__, report.warning)
        return report
    except BaseException:
        _take_out(model)
        raise


def convert(
    model: nn.Module,
    sites: Sequence[Site],
    plan: ActivationPlan,
    head: CausalHead | None,
    input_format: BlockFormat | None,
) -> None:
    """Install what the plan says for these sites; nothing is measured, and checks are the caller's.

    Args:
        model: without compressed activations.
        sites: of the model.
        plan: that fits them.
        head: whose loss is computed in chunks; None leaves the loss.
        input_format: of the inputs of layers that gradient checkpointing computes again; None leaves them.
    """
    modules = dict(model.named_modules())
    choices = {site.name: None if plan.recomputes(site) else plan.choices.get(site.name) for site in sites}
    if head is not None:
        site = next(site for site in sites if site.name == head.projection)
        chosen = plan.choices.get(site.name)
        assert not isinstance(chosen, Recompute)  # which the plan's check refuses for linear layers
        projection = HeadForward(modules[site.name], site, chosen, head.spec)
        projection.install()
        CausalForward(modules[head.name], projection, head).install()
    others = [site for site in sites if head is None or site.name != head.projection]
    _install([(modules[site.name], site, choices[site.name]) for site in others])
    for name, module in modules.items():
        if head is None and any(choice is not None for choice in choices.values()) and has_causal_loss(module):
            CausalLossForward(module).install()
        if name in plan.layers:
            LayerForward(module, plan.layers[name], recompute=True).install()
        elif is_checkpointed_layer(module) and input_format is not None:
            LayerForward(module, input_format, recompute=False).install()
        elif checkpoints_others(module) and input_format is not None:
            CheckpointingForward(module, input_format).install()
    follow(model, choices, _install)


def _check_initialized(model: nn.Module, mode: Mode) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"{name} gets its shape in the model's first forward, but mode={mode!r} tells parameters from what is"
                " packed before it; run the model once before"
            )


def _leave_exact(model: nn.Module, names: Sequence[str]) -> None:
    """Keep hooks around the model from packing what these sites save."""
    for name in names:
        module = model.get_submodule(name)
        if module is not model:
            ExactForward(module).install()


def _install(chosen: Sequence[tuple[nn.Module, Site, Choice]]) -> None:
    """Give each module the forward that the choice for its site asks for."""
    recomputed = []
    for module, site, choice in chosen:
        if choice is not None and isinstance(site.spec, InnerAttentionSpec):
            packing = BlockFormat("int8") if isinstance(choice, Recompute) else choice  # its input is query, key, value
            InnerAttentionForward(module, site, packing).install()
        elif choice is not None and isinstance(site.spec, MixerSpec):
            packing = BlockFormat("int8") if isinstance(choice, Recompute) else choice
            mixer_of(module)(module, site, packing).install()
        elif isinstance(choice, Recompute) and site.kind == "attention":
            MixerForward(module, site, BlockFormat("int8")).install()
        elif isinstance(choice, Recompute):
            recomputed.append(RecomputedMlpForward(module, site))
            recomputed[-1].install()
        elif choice is not None and isinstance(site.spec, FunctionsSpec):
            FunctionsForward(module, site, choice).install()
        elif choice is not None and site.kind == "attention":
            AttentionCore(module, site, choice)
        elif choice is not None:
            forward = LeafForward if isinstance(site.spec, LeafSpec) else _FORWARDS[site.kind]
            forward(module, site, choice).install()
    for block in recomputed:
        block.note_projections()


def _loss_owner(model: nn.Module) -> str | None:
    """See `Report.loss_owner`."""
    try:
        return find_head(model).name
    except Exception:  # of a model that nobody asked to have one
        return None


def _report(
    model: nn.Module,
    mode: str,
    sites: Sequence[Site],
    plan: ActivationPlan | None,
    head: CausalHead | None,
    measured: tuple[Measurement | None, Measurement | None],
    unmeasured: str | None,
    packed_bits: int | None,
    loss_owner: str | None,
) -> Report:
    modules = dict(model.named_modules())
    found = _forwards(model)
    origins = {id(f.module): f.origin for f in found if isinstance(f, SiteForward) and f.origin is not None}
    rows: list[tuple[Site, Choice, str | None]] = []
    for site in sites if plan is not None else ():
        assert plan is not None
        choice = Recompute() if plan.recomputes(site) else plan.choices.get(site.name)
        if head is not None and site.name == head.projection:
            choice = None  # with labels, which is how it is measured
        rows.append((site, choice, origins.get(id(modules[site.name]))))
    in_training = [f for f in found if isinstance(f, LayerForward) and (f.recompute or _is_checkpointed(f.module))]
    checkpointed = {id(f.module): f.format for f in in_training}
    layers = {name: checkpointed[id(module)] for name, module in modules.items() if id(module) in checkpointed}
    return make_report(model, mode, rows, layers, *measured, unmeasured, packed_bits, loss_owner)


def _is_checkpointed(layer: nn.Module) -> bool:
    """Whether Hugging Face's checkpointing is on, which takes effect in training mode."""
    return bool(getattr(layer, "gradient_checkpointing", False))


def decompress_activations(model: nn.Module) -> nn.Module:
    """Restore the forward that every module of `model` had before `compress_activations`; returns the model.

    Raises:
        ModelError: nothing in the model is compressed, or it is no module.
    """
    check_module(model)
    if not _forwards(model):
        raise ModelError(f"{type(model).__name__} has no compressed activations, so there is nothing to take out")
    _take_out(model)
    return model


def _take_out(model: nn.Module) -> None:
    for forward in _forwards(model):
        forward.remove()


def _format(argument: str, value: str | BlockFormat, block_size: int, scale_dtype: torch.dtype) -> BlockFormat | None:
    if isinstance(value, BlockFormat):
        return value
    if value == "exact":
        return None
    if value not in CODE_BITS:
        words = ", ".join(ATTENTIONS if argument == "attention" else ("exact", *CODE_BITS))
        raise FormatError(f"{argument} is {value!r}, but it must be a BlockFormat or one of {words}")
    return BlockFormat(value, block_size=block_size, scale_dtype=scale_dtype)


def _forwards(model: nn.Module) -> list[Replacement | AttentionCore]:
    """The replaced forwards of a model; of several forwards of one module the outermost first."""
    found: list[Replacement | AttentionCore] = []
    for module in model.modules():
        found += replacements_of(module)
        core = attention_core_of(module)
        found += [] if core is None else [core]
    return found
