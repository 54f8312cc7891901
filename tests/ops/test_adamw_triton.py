"""AdamW in Triton: programs that find their parameter, and tables of addresses that are never out of date."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from laconic.formats import QuantizedGradient, set_quantized_gradient
from laconic.ops import reference
from laconic.ops.reference.adamw import level_numbers
from laconic.optim import AdamW8bit
from tests.ops.adamw_cases import (
    OPTIONS,
    as_lists,
    assert_as_one_by_one,
    new_case,
    of_one,
)
from tests.ops.cases import same_bits
from tests.ops.interpreter import (
    DEVICE,
    numpy_may_warn,
    on_device,
    slow_where_interpreted,
)

triton = pytest.importorskip("triton")

pytestmark = numpy_may_warn


@pytest.mark.parametrize(("signed", "bits"), [(True, 8), (False, 8), (True, 4), (False, 4)])
def test_a_table_numbers_the_levels_of_all_magnitudes_around_its_places_and_borders(signed: bool, bits: int) -> None:
    from laconic.ops.triton import adamw

    def numbers(magnitude: torch.Tensor) -> torch.Tensor:
        return level_numbers(magnitude.int().view(torch.float32), signed=signed, bits=bits)

    # Where the number of each level begins, by bisection of all magnitudes; it ascends.
    end = torch.full((int(numbers(torch.tensor([0x3F800000])).item()),), 0x3F810000)
    below = torch.zeros_like(end)
    for _ in range(30):
        middle = (below + end) // 2
        is_there = numbers(middle) > torch.arange(len(end))
        below, end = torch.where(is_there, below, middle), torch.where(is_there, middle, end)
    places = torch.arange(0x34000000, 0x3F810000, 1 << 16)
    around = torch.cat([places, end, torch.tensor([1, 2, 300, 0x00800000])])
    magnitude = (around[:, None] + torch.arange(-3, 4)).flatten()
    magnitude = magnitude[(magnitude > 0) & (magnitude < 0x3F810000)]

    shift = (adamw._SHIFT_OF_4_BITS if bits == 4 else adamw._SIGNED_SHIFT if signed else adamw._UNSIGNED_SHIFT).value
    table = adamw._table_of_codes(signed, torch.device("cpu"), bits)[256:]
    bounded = magnitude.clamp(min=adamw._LOWEST.value)
    found = bounded + table[(bounded - adamw._LOWEST.value) >> shift] >> shift
    assert torch.equal(found, numbers(magnitude).long())


@on_device
def test_each_program_finds_its_parameter_among_many() -> None:
    from laconic.ops.triton import adamw

    sizes = [(1 + i % 3, 1 + 5 * i % 70) for i in range(40)]
    cases = [new_case(size, torch.float32, torch.randn(size)) for size in sizes]
    assert_as_one_by_one(of_one(reference.adamw8bit_multi_), adamw.adamw8bit_multi_, cases, DEVICE, num_steps=1)


@on_device
def test_parts_that_begin_anywhere_give_the_same_bits() -> None:
    from laconic.ops.triton import adamw

    cases = [new_case((2, 512), torch.bfloat16, torch.randn(2, 512).bfloat16()) for _ in range(3)]
    here = [case.to(DEVICE) for case in cases]
    for number, name in ((0, "parameter"), (1, "gradient")):
        tensor = getattr(here[number], name)
        moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)[1:].view(tensor.shape)
        setattr(here[number], name, moved.copy_(tensor))
    assert [tensor.data_ptr() % 16 for tensor in (here[0].parameter, here[1].gradient)] == [2, 2]
    reference.adamw8bit_multi_(*as_lists(cases), *OPTIONS.values())
    adamw.adamw8bit_multi_(*as_lists(here), *OPTIONS.values())
    for one, two in zip(here, cases, strict=True):
        assert all(same_bits(one.results()[name], value) for name, value in two.results().items())


@on_device
def test_a_table_is_made_once_for_the_same_addresses_and_never_used_for_others() -> None:
    from laconic.ops.triton import adamw

    cases = [new_case((2, 300), torch.float32, torch.randn(2, 300)) for _ in range(3)]
    here = [case.to(DEVICE) for case in cases]
    kept = [here[1].parameter]  # the memory of what was replaced is still there, and must not be written to
    adamw._tables.cache_clear()
    for step in range(1, 7):
        if step == 3:
            here[1].parameter = here[1].parameter.clone()
        if step == 4:
            here[0].gradient = here[0].gradient.clone()
        if step == 5:  # the same memory as other rows
            for case in (here[2], cases[2]):
                case.exp_avg_scales, case.exp_avg_sq_scales = (
                    torch.full((1, 3), 1e-3, device=case.gradient.device) for _ in range(2)
                )
        if step == 6:
            here, cases = here[:2], cases[:2]
        before = kept[0].clone()
        reference.adamw8bit_multi_(*as_lists(cases), *(OPTIONS | {"step": step}).values())
        adamw.adamw8bit_multi_(*as_lists(here), *(OPTIONS | {"step": step}).values())
        assert step < 3 or torch.equal(kept[0], before)
        for one, two in zip(here, cases, strict=True):
            assert all(same_bits(one.results()[name], value) for name, value in two.results().items())
        assert adamw._tables.cache_info().misses == max(step - 1, 1)


@on_device
@slow_where_interpreted
def test_an_optimizer_that_changes_between_steps_leaves_what_it_leaves_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every way to give parameters, gradients and states other memory, with the multi-tensor kernel and without."""
    ends = []
    for op in ("reference", "triton"):
        monkeypatch.setattr("laconic.optim.adamw.adamw8bit_multi_", partial(multi, op))
        ends.append(changing_run("cpu" if op == "reference" else DEVICE))
    for number, (one, two) in enumerate(zip(*ends, strict=True)):
        assert same_bits(one, two), number


def multi(op: str, *lists: Any, gradient_factor: Any, **numbers: Any) -> None:
    """laconic.ops.adamw8bit_multi_ by one implementation."""
    from laconic.ops.triton import adamw

    module: Any = reference if op == "reference" else adamw
    module.adamw8bit_multi_(*lists, gradient_factor, *(numbers[name] for name in OPTIONS))


def changing_run(device: str) -> list[torch.Tensor]:
    """Weights and moments, on the CPU, after steps between which all that a host may change is changed."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    ps = [nn.Parameter(values(*shape)) for shape in ((4, 64), (3, 100), (2, 256), (5, 16))]
    ps[2].data = ps[2].data.bfloat16()
    optimizer = AdamW8bit(ps[:3], min_8bit_numel=0, weight_decay=0.1)
    old: list[torch.Tensor] = []

    def step() -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = values(*p.shape).to(p.dtype)
        optimizer.step()

    step()
    step()
    old.append(ps[0].data)
    ps[0].data = values(4, 64)
    step()
    for p in ps[:3]:
        p.grad = None
    ps[1].grad = values(3, 100)
    optimizer.step()  # one parameter is a step ahead of the others from here on
    optimizer.add_param_group({"params": [ps[3]], "betas": (0.8, 0.99), "lr": 1e-2})
    step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step()
    twin = copy.deepcopy(optimizer)
    step()
    optimizer, old = twin, [*old, *(p.detach() for p in ps)]
    step()
    ps = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        ps[3].set_(values(5, 16))
    set_quantized_gradient(ps[0], QuantizedGradient.zeros(ps[0].shape, 12, device))
    optimizer.step(gradient_factor=torch.tensor(0.5, device=device))
    states = [value for p in ps for value in optimizer.state[p].values()]
    return [tensor.detach().cpu().contiguous() for tensor in (*old, *ps, *states)]
