"""Forwards that are put in the place of others look like them, take what they take, and come out again."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import laconic
from laconic.activations import ActivationPlan, Recompute, SavedTensorTracker, find_sites
from laconic.activations.forwards.base import SiteForward
from laconic.activations.forwards.mixer import MixerForward
from laconic.activations.forwards.replacement import ModelReplacement, Replacement, replacements_of
from laconic.activations.whole_model.apply import _forwards
from laconic.errors import ModelError
from laconic.formats import BlockFormat
from tests.activations.models import (
    FAMILIES,
    MIXTURES,
    are_equal,
    gradients_of,
    loss_of,
    make_ids,
    make_model,
    relative_error,
)
from tests.activations.test_host_checkpoint import Host, non_reentrant
from tests.activations.test_inner_attention import Attention
from tests.grid import few, grid


def _compressed(family: str, **options: Any) -> nn.Module:
    model = make_model(family)
    laconic.compress_activations(model, **options)
    return model


def _planned() -> nn.Module:
    """A model whose first layer is computed again, and whose feed-forward blocks are."""
    model = make_model("llama")
    sites = find_sites(model)
    choices = {site.name: Recompute() if site.kind == "mlp" else BlockFormat("int8") for site in sites}
    laconic.compress_activations(model, plan=ActivationPlan(choices, {"model.layers.0": BlockFormat("int8")}))
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    **{family: lambda family=family: _compressed(family) for family in (*FAMILIES, *MIXTURES, "opt", "bloom")},  # type: ignore[misc]
    "plan": _planned,
    "chunked": lambda: _compressed("llama", loss="chunked"),
    "hooks": lambda: _compressed("llama", mode="hooks"),
    "combined": lambda: _compressed("gpt2", mode="combined", attention="exact"),
}


def _titan() -> nn.Module:
    model = nn.Sequential(Attention())
    laconic.compress_activations(model)
    return model


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _looks(model: nn.Module) -> set[type]:
    """Compares every replaced forward with the one of the module's class; the classes that were seen."""
    seen: set[type] = set()
    for name, module in model.named_modules():
        for replacement in replacements_of(module):
            seen.add(type(replacement))
        if "forward" not in vars(module):
            continue
        original = type(module).forward
        assert inspect.signature(module.forward) == inspect.signature(original.__get__(module)), name
        assert module.forward.__name__ == original.__name__ == "forward", name
        assert module.forward.__doc__ == original.__doc__, name
        assert inspect.unwrap(module.forward) is inspect.unwrap(original), name
    return seen


def _calls(model: nn.Module) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """With what the modules whose forward is replaced are called in a training step."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls.setdefault(name, (args, kwargs)) and None, with_kwargs=True
        )
        for name, module in model.named_modules()
        if "forward" in vars(module)
    ]
    loss_of(model, make_ids(length=24))
    for handle in handles:
        handle.remove()
    return calls


def _result(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, int]:
    """What a call returns, and how many bytes it saves."""

    def fresh(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    torch.manual_seed(0)
    with SavedTensorTracker(module) as tracker:
        result = module(*map(fresh, args), **{name: fresh(value) for name, value in kwargs.items()})
    return result, tracker.nbytes


def _takes_names(model: nn.Module) -> None:
    """Calls every module whose forward is replaced with all its arguments by name."""
    for name, (args, kwargs) in _calls(model).items():
        module = model.get_submodule(name)
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        own = next(iter(bound.signature.parameters))
        by_name = dict(bound.arguments)
        del by_name[own]
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                by_name |= by_name.pop(parameter.name, {})
        try:
            with torch.no_grad():
                type(module).forward(module, **by_name)
        except TypeError:  # transformers' experts of GPT-OSS have other names behind their signature
            with pytest.raises(TypeError):
                module(**by_name)
            continue
        _result(module, args, kwargs)  # the first call may prove what the later ones rely on, and keep more for it
        expected, saved = _result(module, args, kwargs)
        got, saved_by_name = _result(module, (), by_name)
        torch.testing.assert_close(_tensors(got), _tensors(expected), rtol=0, atol=0)
        # A mixer packs further inputs that come by position, as from the model's own code; by name they stay exact.
        by_position = any(isinstance(replacement, MixerForward) for replacement in replacements_of(module))
        assert saved_by_name == saved or (by_position and saved_by_name < saved), name


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if hasattr(result, "values") else result if isinstance(result, tuple | list) else ()
    return [tensor for value in values for tensor in _tensors(value)]


@pytest.mark.parametrize("case", few(["combined", "llama", "gpt2", "mixtral", "plan", "hooks", "chunked"], 3))
def test_every_replaced_forward_looks_like_the_original_and_takes_names(case: str) -> None:
    model = CASES[case]()
    assert _looks(model)
    _takes_names(model)
    _looks(pickle.loads(pickle.dumps(model)))
    _looks(copy.deepcopy(model))
    laconic.decompress_activations(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_family_takes_names(case: str) -> None:
    model = CASES[case]()
    _looks(model)
    _takes_names(model)


def _torchs_own() -> nn.Module:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2, batch_first=True), "lstm": nn.LSTM(32, 32)})
    laconic.compress_activations(model)
    return model


def _checkpointing() -> nn.Module:
    model = Host(depth=2)
    laconic.compress_activations(model)
    return model


@pytest.mark.parametrize("enabled", [False, True])
def test_copies_and_pickles_of_torchs_own_layers_and_of_hosts_work(enabled: bool) -> None:
    host = _checkpointing()
    assert isinstance(host, Host)
    host.enable(non_reentrant if enabled else None)
    for model, calls in (
        (host, [lambda model: model(torch.ones(2, 8, 64, requires_grad=True))]),
        (
            _torchs_own(),
            [
                lambda model: model["attention"](*[torch.ones(2, 8, 32, requires_grad=True)] * 3)[0],
                lambda model: model["lstm"](torch.ones(2, 8, 32, requires_grad=True))[0],
            ],
        ),
    ):
        for call in calls:
            expected = call(model)
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                value = call(twin)
                assert torch.equal(value, expected)
                value.sum().backward()
                assert all(p.grad is None for p in model.parameters())
                assert any(p.grad is not None for p in twin.parameters())


def test_no_kind_of_replaced_forward_is_left_out() -> None:
    cases = ("llama", "mixtral", "opt", "bloom", "gpt2", "plan", "chunked", "hooks", "combined")
    picture = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    laconic.compress_activations(picture)
    others = (_torchs_own(), _checkpointing())
    seen = set().union(
        _looks(picture), _looks(_titan()), *map(_looks, others), *(_looks(CASES[case]()) for case in cases)
    )
    bases = {SiteForward, ModelReplacement}
    assert {cls for cls in _subclasses(Replacement) if cls.__module__.startswith("laconic")} - bases <= seen


def test_a_forward_of_ones_own_is_resembled_too() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def mine(x: Tensor, scale: float = 2.0) -> Tensor:
        """Scales."""
        return x * scale

    model.forward = mine
    laconic.compress_activations(model, mode="hooks")
    assert inspect.signature(model.forward) == inspect.signature(mine)
    assert model.forward.__doc__ == "Scales."
    x = torch.randn(2, 64)
    assert torch.equal(model(x=x, scale=3.0), x * 3)
    assert torch.equal(model(x=x), x * 2)
    laconic.decompress_activations(model)
    assert model.forward is mine


def test_attention_takes_query_key_and_value_by_name() -> None:
    model = _compressed("llama")
    module = model.model.layers[0].self_attn
    query, key, value = (torch.randn(1, 4, 8, 16, requires_grad=True) for _ in range(3))
    from laconic.activations.forwards.attention import attention_core_of
    from laconic.activations.keep.kept import found

    core = attention_core_of(module)
    assert core is not None

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, None]:
        return (query @ key.mT).softmax(-1) @ value, None

    for kwargs in (
        {"query": query, "key": key, "value": value, "mask": None},
        {"value": value, "mask": None, "key": key, "query": query},
    ):
        output, _ = core(attend, module, **kwargs)
        known = found(output)
        assert known is not None
        assert known.origin == "attention"
        assert torch.equal(output, attend(module, query, key, value, None)[0])


# Derivatives of other kinds


def blocks(options: dict[str, Any]) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, **options)
    return model, twin, torch.randn(64, 64)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, for jvp
@pytest.mark.parametrize("options", [{}, {"mode": "hooks"}])
def test_functional_transforms_are_exact(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    from laconic.activations.backward.derivatives import _warn_it_is_exact

    model, twin, x = blocks(options)
    _warn_it_is_exact.cache_clear()

    def of(module: nn.Module) -> list[Tensor]:
        parameters = {name: p.detach() for name, p in module.named_parameters()}

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(module, parameters, (x,)).square().sum()

        results = [*grad(loss)(parameters, x).values(), jvp(module, (x,), (x,))[1]]
        results += vmap(grad(loss), in_dims=(None, 0))(parameters, x[:3]).values()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            results.append(torch.autograd.forward_ad.unpack_dual(module(dual)).tangent)
        return results

    with caplog.at_level("WARNING", logger="laconic"):
        got = of(twin)
    assert all(torch.equal(a, b) for a, b in zip(got, of(model), strict=True))
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "run the original forwards" in caplog.records[0].message


def test_a_functional_call_without_a_transform_is_compressed() -> None:
    model, twin, x = blocks({"bits": 8})
    results = []
    for module in (model, twin):
        parameters = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        functional_call(module, parameters, (x,)).square().sum().backward()
        results.append(torch.cat([p.grad.flatten() for p in parameters.values()]))  # type: ignore[union-attr]
    assert 0 < relative_error(results[1], results[0]) < 0.02


def test_hooks_know_second_derivatives() -> None:
    model, twin, x = blocks({"bits": 8, "mode": "hooks"})
    x.requires_grad_()
    for module in (model, twin):
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
    expected, got = gradients_of(model), gradients_of(twin)
    assert all(relative_error(got[name], expected[name]) < 0.05 for name in got)


def test_the_chunked_loss_is_refused_under_a_transform() -> None:
    weight, labels = torch.randn(32, 16), torch.arange(4)
    with pytest.raises(ModelError, match=r"linear_cross_entropy runs under a torch\.func transform"):
        grad(lambda x: laconic.linear_cross_entropy(x, weight, labels))(torch.randn(4, 16))


@pytest.mark.parametrize("call", [laconic.compress_activations, laconic.decompress_activations])
def test_what_is_no_module_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelError, match=r"model is 'gpt2', but it must be a torch\.nn\.Module; load it first"):
        call("gpt2")
    with pytest.raises(ModelError, match=r"model is of type list, but"):
        call([nn.Linear(4, 4)])


# Converted twice, and wrapped by hosts


@pytest.mark.parametrize("first", ["sites", "hooks"])
@pytest.mark.parametrize("second", ["sites", "hooks"])
def test_a_model_is_converted_once(first: Any, second: Any) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)))
    laconic.compress_activations(model[0], mode=first)
    for outer in (model[0], model):
        with pytest.raises(ModelError, match="has compressed activations already"):
            laconic.compress_activations(outer, mode=second)


def test_hooks_inside_of_hooks_are_refused() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(64, 64))), torch.randn(64, 64)
    laconic.compress_activations(model, mode="hooks")
    laconic.compress_activations(model[0], mode="hooks")
    with pytest.raises(ModelError, match="Sequential is compressed with mode='hooks' inside of Sequential"):
        model(x)
    laconic.decompress_activations(model[0])  # also takes nothing from the outer one
    model(x).sum().backward()


@pytest.mark.parametrize("options", [{}, {"loss": "chunked"}, {"mode": "hooks"}])
def test_a_model_that_accelerate_has_wrapped_trains_and_comes_out_again(options: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_model("llama"), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8, **options)
    losses = []
    for each in (model, twin):
        prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(each)
        losses.append(loss_of(prepared, ids))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    with pytest.raises(ModelError, match="has compressed activations already"):
        laconic.compress_activations(twin)
    got, expected = gradients_of(twin), gradients_of(model)
    assert all(relative_error(got[name], expected[name]) < 0.05 for name in got)
    laconic.decompress_activations(twin)
    with SavedTensorTracker(twin) as tracker:
        loss_of(twin, ids)
    with SavedTensorTracker(model) as exact:
        loss_of(model, ids)
    assert tracker.nbytes == exact.nbytes


# Layers that come later


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers the old way
@pytest.mark.parametrize("loss", ["exact", "chunked"])
def test_adapters_added_later_are_compressed_like_those_added_before(
    loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False)
    before = get_peft_model(make_model("llama"), config)
    laconic.compress_activations(before, loss=loss)
    after = make_model("llama")
    laconic.compress_activations(after, loss=loss)
    after = get_peft_model(after, config)
    after.load_state_dict(before.state_dict())
    ids, found = make_ids(), []
    with caplog.at_level(logging.INFO, logger="laconic"):
        for model in (before, after, copy.deepcopy(after), pickle.loads(pickle.dumps(after))):
            with SavedTensorTracker(model) as tracker:
                value = loss_of(model, ids)
            value.backward()
            found.append((value, tracker.nbytes, gradients_of(model)))
    assert (
        "layers that came in the place of compressed ones: model.layers.0.self_attn.q_proj.lora_A.default"
        in caplog.text
    )
    for value, nbytes, grads in found[1:]:
        assert torch.equal(value, found[0][0])
        assert nbytes == found[0][1]
        assert are_equal(grads, found[0][2])
    laconic.decompress_activations(after)
    assert not any("forward" in vars(module) for module in after.modules())


def test_a_layer_in_the_place_of_another_inherits_its_choice() -> None:
    model, ids = _compressed("llama", bits=8), make_ids()
    with SavedTensorTracker(model) as expected:
        loss_of(model, ids)
    model.model.layers[1] = make_model("llama").model.layers[1]
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 160, bias=False)
    with SavedTensorTracker(model) as tracker:
        loss_of(model, ids)
    assert tracker.nbytes == expected.nbytes


def test_a_layer_in_the_place_of_nothing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = _compressed("llama"), make_ids()
    model.model.extra = nn.Linear(64, 64)
    for _ in range(2):
        loss_of(model, ids)
    (record,) = caplog.records
    assert "1 layers came after compress_activations and stay exact" in record.message
    assert "model.extra" in record.message


def small_model() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(16, 64)


@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
def test_replicas_of_data_parallel_are_refused_until_the_model_is_itself_again(mode: Any) -> None:
    model, x = small_model()
    before = [set(vars(module)) for module in model.modules()]
    laconic.compress_activations(model, mode=mode, example_inputs={"input": x})
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (model, copied):
        with pytest.raises(ModelError, match=r"torch\.nn\.DataParallel.*DistributedDataParallel"):
            [module._replicate_for_data_parallel() for module in each.modules()]
        laconic.decompress_activations(each)
        assert len([module._replicate_for_data_parallel() for module in each.modules()]) == 5
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "layer", "functional_call", "parametrized", "tied"])
def test_every_other_way_to_other_weights_computes_with_those(way: str) -> None:
    model, x = small_model()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8, example_inputs={"input": x})
    other = {name: (0.5 * value).detach() for name, value in model.named_parameters()}
    plain = copy.deepcopy(model)
    plain.load_state_dict(other)
    if way == "deepcopy":
        got = copy.deepcopy(twin)
        got.load_state_dict(other)
    elif way == "pickle":
        got = pickle.loads(pickle.dumps(twin))
        got.load_state_dict(other)
    elif way == "layer":
        got = copy.deepcopy(twin)
        for place in (0, 1, 3):
            got[place] = copy.deepcopy(twin[place])
        got.load_state_dict(other)
    elif way == "parametrized":
        for each in (plain, twin):
            each.load_state_dict(other)
            nn.utils.parametrizations.weight_norm(each[1])
        got = twin
    elif way == "tied":
        for each in (plain, twin):
            each.load_state_dict(other)
            each[3].weight = nn.Parameter(torch.ones(8, 64))
            each[1].weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)))
            each[1].bias = each[0].bias
        got = twin
    if way == "functional_call":
        leaves = {name: value.requires_grad_() for name, value in other.items()}
        y, wanted = torch.func.functional_call(twin, leaves, (x,)), list(leaves.values())
    else:
        y, wanted = got(x), list(got.parameters())
    expected = plain(x)
    assert torch.equal(y, expected)
    pairs = zip(
        torch.autograd.grad(y.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), list(plain.parameters())),
        strict=True,
    )
    assert all(relative_error(got, exact) < 0.05 for got, exact in pairs)


class Noisy(nn.Module):
    """A norm, linear layers, an activation and dropout, with a scale that may be set."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU()
        self.drop, self.down = nn.Dropout(0.5), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(self.act(self.up(self.norm(x)))))
        return y


def shallow(module: nn.Module) -> nn.Module:
    """A copy by `copy.copy` of a module and of all its children, with parameters of its own."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None if p is None else nn.Parameter(p.detach() * 0.5) for name, p in module._parameters.items()
    }
    twin._modules = {name: None if child is None else shallow(child) for name, child in module._modules.items()}
    return twin


@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
@pytest.mark.parametrize("way", ["once", "twice", "pickled", "deep"])
def test_a_shallow_copy_runs_in_its_own_mode_with_its_own_parameters(mode: Any, way: str) -> None:
    torch.manual_seed(0)
    plain, x = Noisy(), torch.randn(16, 64)
    model = copy.deepcopy(plain)
    laconic.compress_activations(model, bits=8, mode=mode, example_inputs={"x": x})
    twins = []
    for each in (plain, model):
        twin = shallow(each)
        if way == "twice":
            twin = shallow(twin)
        elif way == "pickled":
            twin = pickle.loads(pickle.dumps(twin))
        elif way == "deep":
            twin = copy.deepcopy(twin)
        twins.append(twin)
    for training in (True, False):
        found = []
        for twin, original in zip(twins, (plain, model), strict=True):
            twin.train(training)
            original.train(not training)
            torch.manual_seed(1)
            y = twin(x)
            found.append((y, torch.autograd.grad(y.square().sum(), list(twin.parameters()))))
        assert torch.equal(found[1][0], found[0][0])
        assert all(relative_error(a, b) < 0.05 for a, b in zip(found[1][1], found[0][1], strict=True))
    laconic.decompress_activations(twins[1])
    assert not any(replacement for module in twins[1].modules() for replacement in replacements_of(module))
    assert any(replacement for module in model.modules() for replacement in replacements_of(module))


def by_dictionary(module: nn.Module) -> nn.Module:
    """A copy whose dictionary has what the module's has, as learn2learn's `clone_module` makes it."""
    twin = module.__new__(type(module))
    twin.__dict__ = module.__dict__.copy()
    return of_ones_own(twin, module, by_dictionary)


def by_attributes(module: nn.Module) -> nn.Module:
    """A copy of a class of the host's own that is given the module's attributes one by one, as higher makes it."""
    twin = type("Patched", (type(module),), {}).__new__(type("Patched", (type(module),), {}))
    nn.Module.__init__(twin)
    for name, value in vars(module).items():
        if not (name.startswith("_") and name in vars(nn.Module())):
            setattr(twin, name, value)
    return of_ones_own(twin, module, by_attributes)


def of_ones_own(twin: nn.Module, module: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The copy with halves of the module's parameters and with copies of its children."""
    twin.train(module.training)
    twin._parameters = {name: None if p is None else p.clone() * 0.5 for name, p in module._parameters.items()}
    twin._modules = {name: None if child is None else copied(child) for name, child in module._modules.items()}
    return twin


@pytest.mark.parametrize(
    ("kind", "copied", "mode"),
    grid(["noisy", "attention"], [by_dictionary, by_attributes], ["sites", "hooks", "combined"]),
)
def test_a_copy_of_attributes_computes_with_its_own_weights(
    mode: Any, copied: Callable[[nn.Module], nn.Module], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64)
    plain = Noisy() if kind == "noisy" else nn.Sequential(nn.LayerNorm(64), Attention(), nn.Linear(64, 8))
    model = copy.deepcopy(plain)
    laconic.compress_activations(model, bits=8, mode=mode, example_inputs={"x" if kind == "noisy" else "input": x})
    converted = [len(list(replacements_of(module))) for module in model.modules()]
    for training in (False, True):
        plain.train(training), model.train(training)
        found = []
        for each in (plain, model):
            twin = copied(each)
            torch.manual_seed(1)
            y = twin(x)
            parameters = list(each.parameters())
            found.append((y, torch.autograd.grad(y.square().sum(), parameters)))
        assert torch.equal(found[1][0], found[0][0])
        assert are_equal(dict(enumerate(found[1][1])), dict(enumerate(found[0][1])))
        assert "made by copying its attributes" in caplog.text
    assert [len(list(replacements_of(module))) for module in model.modules()] == converted
    tracked = []
    for each in (plain, model):
        with SavedTensorTracker(each) as tracker:
            each(x)
        tracked.append(tracker.nbytes)
    assert tracked[1] < tracked[0]  # the model itself still saves little


@pytest.mark.parametrize("holds", ["as a part", "out of sight", "and has a forward"])
@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
def test_a_wrapper_may_take_the_forward_of_the_model_that_it_holds(
    mode: Any, holds: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.held = [model] if holds == "out of sight" else model
            self.forward = model.forward

    class Other(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("an attribute goes before it")

    torch.manual_seed(0)
    x, plain = torch.randn(16, 64), Noisy()
    model = copy.deepcopy(plain)
    laconic.compress_activations(model, bits=8, mode=mode, example_inputs={"x": x})
    found = []
    for each in (plain, model):
        wrapper = (Other if holds == "and has a forward" else Wrapper)(each)
        wrapper(x), torch.manual_seed(1)
        with SavedTensorTracker(wrapper) as tracker:
            y = wrapper(x)
        found.append((y, tracker.nbytes, torch.autograd.grad(y.square().sum(), list(each.parameters()))))
    assert torch.equal(found[1][0], found[0][0])
    assert found[1][1] < found[0][1]
    assert all(relative_error(a, b) < 0.05 for a, b in zip(found[1][2], found[0][2], strict=True))
    assert "copying its attributes" not in caplog.text


def test_a_shallow_copy_of_a_language_model_shares_its_layers() -> None:
    model, ids = _compressed("llama"), make_ids()
    twin = copy.copy(model)
    assert [forward.module for forward in replacements_of(twin)] == [twin] * len(list(replacements_of(model)))
    assert torch.equal(loss_of(twin, ids), loss_of(model, ids))
    loss_of(twin, ids).backward()
    assert gradients_of(model).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_taking_forwards_out_of_a_copy_leaves_the_original_converted(family: str) -> None:
    model, plain, ids = _compressed(family, bits=8), make_model(family), make_ids()
    before = [(type(f), f.module) for f in _forwards(model)]
    twin = shallow(model)
    assert [type(f) for f in _forwards(twin)] == [kind for kind, _ in before]
    laconic.decompress_activations(twin)
    assert [(type(f), f.module) for f in _forwards(model)] == before
    assert [set(vars(a)) for a in twin.modules()] == [set(vars(b)) for b in plain.modules()]
    loss_of(model, ids).backward()
    laconic.decompress_activations(model)
    assert [set(vars(a)) for a in model.modules()] == [set(vars(b)) for b in plain.modules()]
