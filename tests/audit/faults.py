"""Silent faults, one entry each: what is planted where, the class it stands for, and a training that it spoils.

Each is planted into the library while it runs, by replacing one function or method. Nothing else looks for them: a test
plants one, calls the audit, and expects its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.activations.backward import decisions, functions, gated, replay, saving
from laconic.activations.forwards import attention, dropout, elementwise, leaves
from laconic.activations.forwards import base as forwards
from laconic.activations.keep import kept, masked_relu
from laconic.activations.whole_model import causal_loss, head
from laconic.auditing import AuditReport
from laconic.formats import BlockFormat, BlockTensor, QuantizedGradient
from laconic.gradients import store
from laconic.moe.permute import SortedOrder
from laconic.optim import adamw
from tests.audit import hosts
from tests.audit.hosts import Convolutions, Moving, Perceptron, language, plain

Patch = pytest.MonkeyPatch
Host = Callable[[Callable[[], None]], AuditReport]
checkpoint = import_module("laconic.activations.forwards.checkpoint")  # the package has a function of this name


@dataclass(frozen=True)
class Fault:
    """A fault: its name, the class it stands for, what plants it, and the training that shows it."""

    name: str
    kind: str
    plant: Callable[[Patch], None]
    host: Host


FAULTS: list[Fault] = []

LLAMA = language
GPT2 = partial(language, family="gpt2")
PERCEPTRON = partial(plain, model=partial(Perceptron, nn.GELU), shape=(6, 16, 64))
DROPPED = partial(plain, model=partial(Perceptron, nn.ReLU), shape=(6, 16, 64))
IMAGES = partial(plain, model=Convolutions, shape=(4, 3, 12, 12))


def fault(
    kind: str, host: Callable[[Callable[[], None]], AuditReport]
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def listed(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS.append(Fault(plant.__name__, kind, plant, host))
        return plant

    return listed


def after(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Let `change(result, *args)` decide what a function returns."""
    before = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(before(*args, **kwargs), *args)

    patch.setattr(owner, name, staticmethod(changed) if name in ("forward", "backward") else changed)


def nth(patch: Patch, function: type, index: int, change: Callable[[Tensor], Tensor | None]) -> None:
    """Change one of the gradients that an autograd function returns, where there is one."""

    def changed(grads: Any, *_: Any) -> Any:
        if len(grads) <= index or grads[index] is None:
            return grads
        return (*grads[:index], change(grads[index]), *grads[index + 1 :])

    after(patch, function, "backward", changed)


# --- norms ---


def by_another_norm(patch: Patch, **changes: Any) -> None:
    """Let the backward of norms be that of another one."""
    before = functions.norm_backward

    def other(grad: Tensor, x: Tensor, weight: Any, bias: Any, spec: Any, needs: Any) -> Any:
        return before(grad, x, weight, bias, replace(spec, **changes), needs)

    patch.setattr(functions, "norm_backward", other)


@fault("a constant is another in backward", LLAMA)
def the_eps_of_a_norm_is_another_in_backward(patch: Patch) -> None:
    by_another_norm(patch, eps=1e-3)


@fault("a term of a derivative is left out", LLAMA)
def a_norm_is_differentiated_as_a_scaling(patch: Patch) -> None:
    def scaled(grad: Tensor, x: Tensor, weight: Any, bias: Any, spec: Any, needs: Any) -> Any:
        r = (x.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
        return grad * weight * r, (grad * x * r).flatten(0, -2).sum(0), None

    patch.setattr(functions, "norm_backward", scaled)


@fault("a parameter without gradient", LLAMA)
def weights_of_norms_get_no_gradient(patch: Patch) -> None:
    after(patch, functions, "norm_backward", lambda grads, *_: (grads[0], None, None))


@fault("a parameter without gradient", GPT2)
def biases_of_norms_get_no_gradient(patch: Patch) -> None:
    after(patch, functions, "norm_backward", lambda grads, *_: (grads[0], grads[1], None))


@fault("a derivative of another function", GPT2)
def a_layer_norm_is_differentiated_as_an_rms_norm(patch: Patch) -> None:
    by_another_norm(patch, kind="rms")
    after(patch, functions, "norm_backward", lambda grads, grad, *_: (*grads[:2], grad.flatten(0, -2).sum(0)))


@fault("a value is rebuilt without a parameter", LLAMA)
def a_norm_is_rebuilt_without_its_weight(patch: Patch) -> None:
    before = functions.norm_again
    patch.setattr(functions, "norm_again", lambda x, weight, **spec: before(x, torch.ones_like(weight), **spec))


@fault("a constant is left out", partial(language, family="gemma2"))
def the_offset_of_a_norms_weight_is_left_out(patch: Patch) -> None:
    by_another_norm(patch, unit_offset=False)


# --- linear layers ---


def by_our_own_backward(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Plant it where layers take the hand-written backward, as they do under autocast and in compiled graphs."""

    @wraps(plant)
    def planted(patch: Patch) -> None:
        patch.setattr(forwards, "hooks_of_linear", lambda x, weight: None)
        plant(patch)

    return planted


def saved(patch: Patch, change: Callable[[Tensor, bool], Tensor]) -> None:
    """Change what torch's own backward gets: `change(tensor, whether it was rebuilt)`."""
    for kind in (saving._Rebuilt, saving._AsItIs):
        is_rebuilt = kind is saving._Rebuilt
        after(patch, kind, "__call__", lambda x, *_, is_rebuilt=is_rebuilt: change(x, is_rebuilt))


@fault("a value of another layer", LLAMA)
def the_input_of_a_linear_layer_is_rebuilt_one_token_further(patch: Patch) -> None:
    saved(patch, lambda x, is_rebuilt: x.roll(1, 0) if is_rebuilt and x.dim() == 2 else x)


@fault("a factor", LLAMA)
def backward_reads_half_a_weight(patch: Patch) -> None:
    saved(patch, lambda x, is_rebuilt: x if is_rebuilt or x.dim() != 2 else x / 2)


@fault("a gradient is transposed", LLAMA)
def a_square_weight_is_transposed_in_backward(patch: Patch) -> None:
    saved(patch, lambda x, is_rebuilt: x.t() if not is_rebuilt and x.dim() == 2 and len(x) == x.shape[1] else x)


@fault("a gradient is transposed", LLAMA)
@by_our_own_backward
def the_gradient_of_a_square_weight_is_transposed(patch: Patch) -> None:
    after(patch, functions, "_product", lambda y, *_: y.t() if y.shape[0] == y.shape[1] else y)


@fault("a parameter without gradient", GPT2)
@by_our_own_backward
def biases_get_no_gradient(patch: Patch) -> None:
    nth(patch, functions._Linear, 2, lambda grad: None)


@fault("rows are left out", GPT2)
@by_our_own_backward
def the_gradient_of_a_bias_leaves_the_first_token_out(patch: Patch) -> None:
    before = functions._Linear.backward

    def shorter(ctx: Any, grad: Tensor) -> Any:
        dx, dweight, dbias, *rest = before(ctx, grad)
        last = grad.flatten(0, -2)[0]
        return (dx, dweight, None if dbias is None else dbias - last, *rest)

    patch.setattr(functions._Linear, "backward", staticmethod(shorter))


@fault("a path of the graph is cut", LLAMA)
@by_our_own_backward
def linear_layers_pass_no_gradient_on(patch: Patch) -> None:
    nth(patch, functions._Linear, 0, torch.zeros_like)


@fault("a factor", LLAMA)
@by_our_own_backward
def the_gradient_of_linear_inputs_is_doubled(patch: Patch) -> None:
    nth(patch, functions._Linear, 0, lambda grad: grad * 2)


@fault("a factor", LLAMA)
@by_our_own_backward
def weights_get_the_mean_over_tokens_in_place_of_the_sum(patch: Patch) -> None:
    before = functions._product
    patch.setattr(functions, "_product", lambda a, b: before(a, b) / len(a))


@fault("rows are left out", LLAMA)
@by_our_own_backward
def weights_leave_the_first_token_out(patch: Patch) -> None:
    before = functions._product
    patch.setattr(functions, "_product", lambda a, b: before(a[1:], b[1:]))


@fault("a row is rerouted", LLAMA)
@by_our_own_backward
def inputs_are_rebuilt_one_token_further(patch: Patch) -> None:
    before = functions._product
    patch.setattr(functions, "_product", lambda a, b: before(a, b.roll(1, 0)))


@fault("tied parameters", partial(language, model={"tie_word_embeddings": True}))
@by_our_own_backward
def a_tied_weight_gets_the_gradient_of_one_use(patch: Patch) -> None:
    nth(patch, functions._Linear, 1, lambda grad: torch.zeros_like(grad) if grad.shape[0] == 97 else grad)


# --- what is kept ---


@fault("a stale note", LLAMA)
def a_note_of_an_earlier_tensor_of_the_same_shape_is_read(patch: Patch) -> None:
    before, first = kept.pack, {}

    def stale(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = before(x, *args, **kwargs)
        return first.setdefault(tuple(x.shape), made)

    patch.setattr(kept, "pack", stale)


@fault("a stale note", partial(plain, model=Moving, shape=(6, 16, 64)))
def a_change_in_place_does_not_end_a_note(patch: Patch) -> None:
    def anyway(x: Tensor) -> Any:
        note = getattr(x, kept._attribute(x), None)
        return None if note is None else note.unended()

    patch.setattr(kept, "found", anyway)


@fault("a value of another layer", LLAMA)
def a_memo_gives_what_the_one_before_it_rebuilt(patch: Patch) -> None:
    before, last = kept.Memo.take, {}

    def take(self: Any, tensors: Any, after: Any = None) -> Any:
        value = before(self, tensors, after)
        if not isinstance(value, Tensor):
            return value
        earlier = last.get(value.shape, value)
        last[value.shape] = value
        return earlier

    patch.setattr(kept.Memo, "take", take)


@fault("a residual is dropped", LLAMA)
def norms_pass_no_gradient_to_their_input(patch: Patch) -> None:
    nth(patch, functions._Norm, 0, torch.zeros_like)


@fault("a path of the graph is cut", LLAMA)
def a_norm_reads_a_detached_input(patch: Patch) -> None:
    before = functions.norm
    patch.setattr(functions, "norm", lambda x, *args, **kwargs: before(x.detach().requires_grad_(), *args, **kwargs))


# --- codes ---


def rolled_scales(self: BlockTensor, *args: Any, **kwargs: Any) -> Tensor:
    return DEQUANTIZE(replace(self, scales=self.scales.roll(1, -1)), *args, **kwargs)


DEQUANTIZE, QUANTIZE = BlockTensor.dequantize, BlockFormat.quantize


@fault("a scale of the neighbouring block", partial(language, block_size=16))
def codes_are_read_with_the_scale_of_the_neighbouring_block(patch: Patch) -> None:
    patch.setattr(BlockTensor, "dequantize", rolled_scales)


@fault("a scale of the neighbouring block", partial(language, block_size=16))
def a_scale_is_written_one_block_further(patch: Patch) -> None:
    def quantize(self: BlockFormat, *args: Any, **kwargs: Any) -> BlockTensor:
        made = QUANTIZE(self, *args, **kwargs)
        return replace(made, scales=made.scales.roll(1, -1))

    patch.setattr(BlockFormat, "quantize", quantize)


@fault("a scale of the neighbouring block", LLAMA)
def a_scale_of_the_neighbouring_row_is_read_in_backward_only(patch: Patch) -> None:
    class Wrong(BlockTensor):
        def dequantize(self, *args: Any, **kwargs: Any) -> Tensor:
            return DEQUANTIZE(replace(self, scales=self.scales.roll(1, 0)), *args, **kwargs)

    patch.setattr(kept, "BlockTensor", Wrong)


def rebuilt(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    class Wrong(BlockTensor):
        def dequantize(self, *args: Any, **kwargs: Any) -> Tensor:
            return change(DEQUANTIZE(self, *args, **kwargs))

    patch.setattr(kept, "BlockTensor", Wrong)


@fault("a factor", LLAMA)
def what_is_rebuilt_is_twice_as_large(patch: Patch) -> None:
    rebuilt(patch, lambda x: x * 2)


@fault("signs are lost", LLAMA)
def what_is_rebuilt_has_no_sign(patch: Patch) -> None:
    rebuilt(patch, torch.abs)


@fault("a part is not written", LLAMA)
def the_last_row_is_not_rebuilt(patch: Patch) -> None:
    rebuilt(patch, lambda x: torch.cat([x[:-1], torch.zeros_like(x[-1:])]))


@fault("codes out of order", LLAMA)
def the_two_codes_of_a_byte_are_swapped(patch: Patch) -> None:
    rebuilt(patch, lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@fault("two parts are swapped", LLAMA)
def two_sequences_are_swapped(patch: Patch) -> None:
    rebuilt(patch, lambda x: x.flip(0))


@fault("a buffer is written again before backward", LLAMA)
def codes_are_overwritten_by_those_of_the_next_tensor(patch: Patch) -> None:
    buffers: dict[Any, Tensor] = {}

    def quantize(self: BlockFormat, x: Tensor, *args: Any, **kwargs: Any) -> BlockTensor:
        made = QUANTIZE(self, x, *args, **kwargs)
        buffer = buffers.setdefault((made.codes.shape, made.codes.dtype), made.codes)
        buffer.data.copy_(made.codes)
        return replace(made, codes=buffer)

    patch.setattr(BlockFormat, "quantize", quantize)


@fault("rounding beyond the format", LLAMA)
def values_are_rounded_down_in_place_of_to_nearest(patch: Patch) -> None:
    def down(self: BlockFormat, x: Tensor, *args: Any, **kwargs: Any) -> BlockTensor:
        return QUANTIZE(self, x - 0.1 * x.abs().amax(-1, keepdim=True), *args, **kwargs)

    patch.setattr(BlockFormat, "quantize", down)


@fault("rounding beyond the format", LLAMA)
def large_values_are_clipped(patch: Patch) -> None:
    def clipped(self: BlockFormat, x: Tensor, *args: Any, **kwargs: Any) -> BlockTensor:
        return QUANTIZE(self, x.clamp(max=0.5 * x.abs().max()), *args, **kwargs)

    patch.setattr(BlockFormat, "quantize", clipped)


@fault("another format than the one asked for", partial(language, bits=8))
def four_bits_are_kept_where_eight_were_asked_for(patch: Patch) -> None:
    def coarse(self: BlockFormat, x: Tensor, *args: Any, **kwargs: Any) -> BlockTensor:
        return QUANTIZE(self, QUANTIZE(BlockFormat("nf4"), x).dequantize(), *args, **kwargs)

    patch.setattr(BlockFormat, "quantize", coarse)


# --- gated products and activations ---


@fault("gate and up are swapped", LLAMA)
def the_gradients_of_gate_and_up_are_swapped(patch: Patch) -> None:
    after(patch, gated, "gated_backward_blockwise", lambda grads, *_: grads[::-1])


@fault("a derivative of another function", LLAMA)
def the_kernel_differentiates_another_activation(patch: Patch) -> None:
    before = gated.gated_backward_blockwise
    patch.setattr(gated, "gated_backward_blockwise", lambda *a, **k: before(*a, **{**k, "activation": "gelu_tanh"}))


@fault("a value of another function", LLAMA)
def the_product_is_rebuilt_with_another_activation(patch: Patch) -> None:
    before = gated.gated_product_blockwise
    patch.setattr(gated, "gated_product_blockwise", lambda *a, **k: before(*a, **{**k, "activation": "gelu_tanh"}))


@fault("a derivative of another function", partial(language, family="gpt2"))
def the_tanh_gelu_is_differentiated_as_a_silu(patch: Patch) -> None:
    wrong = replace(functions.ACTIVATIONS["gelu_tanh"], backward=torch.ops.aten.silu_backward)
    patch.setitem(functions.ACTIVATIONS, "gelu_tanh", wrong)


@fault("gate and up are swapped", partial(language, family="qwen3", attention="exact", bits=2))
def a_product_gives_each_factor_the_others_gradient(patch: Patch) -> None:
    after(patch, functions._Multiply, "backward", lambda grads, *_: (grads[1], grads[0], *grads[2:]))


@fault("bits out of order", DROPPED)
def the_bits_of_a_relu_are_those_of_the_next_values(patch: Patch) -> None:
    before = elementwise.unpack_mask
    patch.setattr(elementwise, "unpack_mask", lambda bits, shape: before(bits.roll(1), shape))


@fault("bits out of order", IMAGES)
def the_bits_of_a_relu_on_pictures_are_inverted(patch: Patch) -> None:
    nth(patch, masked_relu._Relu, 0, torch.zeros_like)


# --- attention ---


def again(patch: Patch, change: Callable[..., Any]) -> None:
    """Change the arguments of attention's second run: query, key, value, keywords."""
    in_second_run, before = [], saving.SecondRun._run

    def run(self: Any) -> None:
        in_second_run.append(self)
        try:
            before(self)
        finally:
            in_second_run.pop()

    def call(self: Any, attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> Any:
        def changed(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> Any:
            if in_second_run:
                q, k, v, kwargs = change(q, k, v, kwargs)
            return attend(module, q, k, v, *rest, **kwargs)

        return core(self, changed, module, q, k, v, *rest, **kwargs)

    core = attention.AttentionCore.__call__
    patch.setattr(saving.SecondRun, "_run", run)
    patch.setattr(attention.AttentionCore, "__call__", call)


@fault("run again with another argument", LLAMA)
def attention_runs_again_with_another_scale(patch: Patch) -> None:
    again(patch, lambda q, k, v, kwargs: (q, k, v, {**kwargs, "scaling": 2 * kwargs["scaling"]}))


@fault("run again with another argument", LLAMA)
def attention_runs_again_without_its_mask(patch: Patch) -> None:
    again(patch, lambda q, k, v, kwargs: (q, k, v, {**kwargs, "is_causal": False}))


@fault("two parts are swapped", LLAMA)
def key_and_value_are_swapped_in_the_second_run(patch: Patch) -> None:
    again(patch, lambda q, k, v, kwargs: (q, v, k, kwargs))


@fault("two parts are swapped", LLAMA)
def heads_are_swapped_in_the_second_run(patch: Patch) -> None:
    again(patch, lambda q, k, v, kwargs: (q.roll(1, 1), k, v, kwargs))


@fault("a part is not written", LLAMA)
def the_second_run_of_attention_has_no_query(patch: Patch) -> None:
    again(patch, lambda q, k, v, kwargs: (0 * q, k, v, kwargs))


@fault("a dropout mask is drawn again", partial(language, model={"attention_dropout": 0.3}))
def attention_draws_its_dropout_again(patch: Patch) -> None:
    before = replay.Replay.again

    def again(self: Any, state: Any, *others: Any) -> Any:
        moved = state[0].clone()
        moved[100:400] ^= 1
        return before(self, (moved, *state[1:]), *others)

    patch.setattr(replay.Replay, "again", again)


@fault("a value is rebuilt from another one", LLAMA)
def the_output_of_attention_is_rebuilt_one_token_further(patch: Patch) -> None:
    after(patch, saving.SecondRun, "_take_output", lambda y, *_: y.roll(1, 1))


# --- dropout ---


@fault("a dropout mask is drawn again", DROPPED)
def the_mask_of_dropout_is_drawn_again(patch: Patch) -> None:
    after(patch, dropout, "unpack_mask", lambda mask, *_: torch.rand(mask.shape) > 0.25)


@fault("a factor", DROPPED)
def the_factor_of_dropout_is_left_out(patch: Patch) -> None:
    nth(patch, dropout._Dropout, 0, lambda grad: grad * 0.75)


# --- regions that run again ---


@fault("a value of another layer", partial(language, attention="recompute"))
def a_recomputed_module_gets_the_input_of_another(patch: Patch) -> None:
    before, first = checkpoint.pack, {}

    def pack(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = before(x, *args, **kwargs)
        return first.setdefault(x.shape, made)

    patch.setattr(checkpoint, "pack", pack)


@fault("a decision of another region", partial(plain, model=hosts.Choosing, shape=(6, 16, 64)))
def a_region_decides_as_another_one_did(patch: Patch) -> None:
    before, first = decisions.Decisions.again, []

    def again(self: Any, tensors: Any = None) -> Any:
        first.append(list(self.tensors if tensors is None else tensors))
        return before(self, first[0])

    patch.setattr(decisions.Decisions, "again", again)


@fault("a stale note", partial(plain, model=hosts.WrittenUnseen, shape=(6, 16, 64)))
def a_note_is_read_though_values_differ(patch: Patch) -> None:
    patch.setattr(kept, "same", lambda before, x: True)


@fault("run again with another argument", partial(language, attention="recompute", model={"attention_dropout": 0.3}))
def a_recomputed_module_draws_again(patch: Patch) -> None:
    before = torch.utils.checkpoint.checkpoint
    patch.setattr(
        torch.utils.checkpoint, "checkpoint", lambda *a, **k: before(*a, **{**k, "preserve_rng_state": False})
    )


@fault("statistics are updated twice", IMAGES)
def a_batch_norm_updates_its_statistics_twice(patch: Patch) -> None:
    known = leaves._KNOWN[nn.BatchNorm2d]

    def twice(forward: Any, x: Tensor, format: Any) -> Any:
        with torch.no_grad():
            forward.original(x)
        return known.run(forward, x, format)

    patch.setitem(leaves._KNOWN, nn.BatchNorm2d, known._replace(run=twice))


# --- forwards and losses ---


@fault("forward gives other bits", LLAMA)
def a_forward_adds_a_small_number(patch: Patch) -> None:
    after(patch, forwards.SiteForward, "value", lambda y, *_: y + 1e-3)


@fault("forward runs in another mode", DROPPED)
def a_compressed_dropout_is_in_evaluation(patch: Patch) -> None:
    patch.setattr(dropout.DropoutForward, "run", lambda self, x, is_traced: x * 1.0)


@fault("a loss divided by the wrong count", partial(language, loss="chunked"))
def the_chunked_loss_is_divided_by_all_labels(patch: Patch) -> None:
    patch.setattr(head, "divisor_of", lambda labels, *_: labels.numel())


@fault("labels of another token", partial(language, loss="chunked"))
def the_chunked_loss_does_not_shift_labels(patch: Patch) -> None:
    patch.setattr(head, "_shift", lambda labels: labels)


@fault("rows are left out", LLAMA)
def the_loss_of_causal_models_leaves_its_last_tile_out(patch: Patch) -> None:
    nth(patch, causal_loss._CrossEntropy, 0, lambda grad: torch.cat([grad[:-24], torch.zeros_like(grad[-24:])]))


@fault("a factor", LLAMA)
def the_loss_of_causal_models_is_averaged_twice_in_backward(patch: Patch) -> None:
    nth(patch, causal_loss._CrossEntropy, 0, lambda grad: grad / len(grad))


# --- mixtures of experts ---

MIXTURE = partial(language, family="qwen3_moe")


@fault("an expert is skipped", MIXTURE)
def an_expert_gets_no_rows_in_the_second_run(patch: Patch) -> None:
    before = saving.SecondRun._rebuilt

    def rebuilt(self: Any, *args: Any) -> Any:
        x, *others = before(self, *args)
        for index in (other for other in others if other.dtype == torch.int64):
            x = x.detach().masked_fill((index == 1).any(-1, keepdim=True), 0).requires_grad_(x.requires_grad)
        return [x, *others]

    patch.setattr(saving.SecondRun, "_rebuilt", rebuilt)


@fault("a row is rerouted", MIXTURE)
def tokens_reach_other_experts_in_the_second_run(patch: Patch) -> None:
    before = saving.SecondRun._rebuilt

    def rebuilt(self: Any, *args: Any) -> Any:
        return [x.flip(-1) if x.dtype == torch.int64 else x for x in before(self, *args)]

    patch.setattr(saving.SecondRun, "_rebuilt", rebuilt)


@fault("an expert is skipped", hosts.experts)
def a_layer_skips_an_expert(patch: Patch) -> None:
    before = SortedOrder.combine

    def combine(self: Any, rows: Tensor, routing: Any) -> Tensor:
        return before(self, rows, replace(routing, weights=routing.weights * (routing.experts != 1)))

    patch.setattr(SortedOrder, "combine", combine)


@fault("a row is rerouted", hosts.experts)
def a_layer_sends_rows_to_other_tokens_experts(patch: Patch) -> None:
    after(patch, SortedOrder, "permute", lambda made, *_: (made[0].roll(1, 0), made[1]))


@fault("weights of another assignment", hosts.experts)
def a_layer_weighs_rows_with_the_weights_of_others(patch: Patch) -> None:
    before = SortedOrder.combine

    def combine(self: Any, rows: Tensor, routing: Any) -> Tensor:
        return before(self, rows, replace(routing, weights=routing.weights.roll(1, 0)))

    patch.setattr(SortedOrder, "combine", combine)


# --- the optimizer ---


def stepping(patch: Patch, change: Callable[..., Any]) -> None:
    """Change the arguments of the update's kernel: positional ones and keywords."""
    before = adamw.adamw8bit_multi_

    def changed(*args: Any, **kwargs: Any) -> None:
        args, kwargs = change(args, kwargs)
        before(*args, **kwargs)

    patch.setattr(adamw, "adamw8bit_multi_", changed)


@fault("a step's number is repeated", LLAMA)
def the_number_of_the_step_is_repeated(patch: Patch) -> None:
    stepping(patch, lambda args, kwargs: (args, {**kwargs, "step": 1}))


@fault("weight decay twice", LLAMA)
def weight_decay_is_applied_twice(patch: Patch) -> None:
    stepping(patch, lambda args, kwargs: (args, {**kwargs, "weight_decay": 2 * kwargs["weight_decay"]}))


@fault("a hyperparameter is ignored", LLAMA)
def the_learning_rate_is_ignored(patch: Patch) -> None:
    stepping(patch, lambda args, kwargs: (args, {**kwargs, "lr": 1e-3}))


@fault("a hyperparameter is ignored", LLAMA)
def the_betas_are_swapped(patch: Patch) -> None:
    stepping(patch, lambda args, kwargs: (args, {**kwargs, "beta1": kwargs["beta2"], "beta2": kwargs["beta1"]}))


@fault("a hyperparameter is ignored", LLAMA)
def the_update_ascends(patch: Patch) -> None:
    stepping(patch, lambda args, kwargs: (args, {**kwargs, "maximize": True}))


@fault("moments of another block", LLAMA)
def moments_are_those_of_another_block(patch: Patch) -> None:
    def moved(args: Any, kwargs: Any) -> Any:
        if kwargs["step"] > 1:
            for codes in args[1]:
                codes.copy_(codes.roll(1, 0))
        return args, kwargs

    stepping(patch, moved)


@fault("moments of another block", LLAMA)
def moments_are_forgotten_after_a_step(patch: Patch) -> None:
    def zeroed(args: Any, kwargs: Any) -> Any:
        for scales in (*args[2], *args[4]):
            scales.zero_()
        return args, kwargs

    stepping(patch, zeroed)


@fault("a part is not written", LLAMA)
def a_parameter_is_not_updated(patch: Patch) -> None:
    before = adamw.AdamW8bit._step_batch
    patch.setattr(
        adamw.AdamW8bit,
        "_step_batch",
        lambda self, group, updates, factor: before(self, group, updates[1:], factor) if len(updates) > 1 else None,
    )


@fault("a part is not written", LLAMA)
def small_parameters_are_not_updated(patch: Patch) -> None:
    patch.setattr(adamw.AdamW8bit, "_step_fp32", lambda self, *args: None)


# --- gradients in codes ---

STORED = partial(language, gradients=8)
FINER = partial(language, gradients=12)


@fault("a hook is lost", STORED)
def the_hooks_of_the_store_are_lost(patch: Patch) -> None:
    patch.setattr(store.CompressedGradients, "_fold", lambda self, name, parameter: None)


@fault("a micro-batch is dropped", STORED)
def a_second_micro_batch_replaces_the_first(patch: Patch) -> None:
    before = QuantizedGradient.accumulate_

    def assign(self: QuantizedGradient, gradient: Tensor, alpha: float = 1.0) -> None:
        self.zero_()
        before(self, gradient, alpha)

    patch.setattr(QuantizedGradient, "accumulate_", assign)


@fault("a factor", STORED)
def gradients_are_stored_twice_as_large(patch: Patch) -> None:
    before = QuantizedGradient.dequantize
    patch.setattr(QuantizedGradient, "dequantize", lambda self: 2 * before(self))


@fault("a residual is dropped", FINER)
def the_residual_of_twelve_bits_is_dropped(patch: Patch) -> None:
    before = QuantizedGradient.dequantize
    patch.setattr(QuantizedGradient, "dequantize", lambda self: before(replace(self, residual_codes=None)))


@fault("a scale of the neighbouring block", STORED)
def a_stored_gradient_has_the_scales_of_the_next_block(patch: Patch) -> None:
    before = QuantizedGradient.dequantize
    patch.setattr(QuantizedGradient, "dequantize", lambda self: before(replace(self, scales=self.scales.roll(1))))


@fault("a parameter without gradient", STORED)
def a_stored_gradient_is_missing(patch: Patch) -> None:
    before = store.CompressedGradients.gradients

    def fewer(self: Any) -> Any:
        found = before(self)
        return {name: found[name] for name in list(found)[1:]}

    patch.setattr(store.CompressedGradients, "gradients", fewer)
