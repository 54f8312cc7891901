"""Training scripts that build and call their models in many orders, and what `laconic run` owes each of them."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laconic.activations.host.tracker import SavedTensorTracker

STEPS = 5


@dataclass
class Run:
    """What a script shows of itself: losses, and bytes that autograd keeps per step and model."""

    losses: list[Tensor] = field(default_factory=list)
    kept: list[dict[str, int]] = field(default_factory=list)

    def begin_step(self) -> None:
        self.kept.append({})

    @contextmanager
    def counts(self, *modules: nn.Module, name: str, step: int = -1) -> Iterator[None]:
        """Count what modules that are called inside keep for the model `name`; what the script itself does is not."""
        with SavedTensorTracker(nn.ModuleList(modules)) as tracker:
            yield
        self.kept[step][name] = self.kept[step].get(name, 0) + tracker.nbytes - tracker.by_module[""]


@dataclass(frozen=True)
class Script:
    """A script and what is true of it.

    Attributes:
        run: trains for `STEPS` steps.
        converted: models -> the step from which on they are compressed.
        exact: models that are left exact.
        is_refused: whether a flag about activations ends it with exit code 2.
        parts: how many modules in the one model are called by themselves; 0 where the model is.
        outside: values of parameters in no module.
        trains: whether an optimizer of torch makes steps.
        is_checkpointed: whether all calls are inside of a checkpoint of the script's.
    """

    run: Callable[[Run], None]
    converted: dict[str, int]
    exact: tuple[str, ...] = ()
    is_refused: bool = False
    parts: int = 0
    outside: int = 0
    trains: bool = True
    is_checkpointed: bool = False


SCRIPTS: dict[str, Script] = {}


def script(
    converted: dict[str, int],
    exact: tuple[str, ...] = (),
    *,
    is_refused: bool = False,
    parts: int = 0,
    outside: int = 0,
    trains: bool = True,
    is_checkpointed: bool = False,
) -> Callable[[Callable[[Run], None]], None]:
    """Register a script; see `Script`."""

    def register(run: Callable[[Run], None]) -> None:
        SCRIPTS[run.__name__] = Script(run, converted, exact, is_refused, parts, outside, trains, is_checkpointed)

    return register


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Scale(nn.Module):
    """Has no site."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(16, 32), Net(), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))

    def encode(self, ids: Tensor) -> Tensor:
        """Not forward."""
        return self.body(self.embedding(ids))


def batch() -> Tensor:
    return torch.randn(4, 8, 32)


def ids() -> Tensor:
    return torch.randint(0, 16, (4, 8))


def loop(
    run: Run,
    forward: Callable[[], Tensor],
    *optimizers: torch.optim.Optimizer,
    of: tuple[tuple[str, tuple[nn.Module, ...]], ...],
    steps: int = STEPS,
) -> None:
    """Train, with what is kept by `forward` booked on the one model in `of`."""
    [(name, modules)] = of
    for _ in range(steps):
        run.begin_step()
        with run.counts(*modules, name=name):
            loss = forward()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.detach())


def adamw(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-3)


@script({"Net": 1})
def whole(run: Run) -> None:
    net = Net()
    loop(run, lambda: net(batch()).square().mean(), adamw(net), of=(("Net", (net,)),))


@script({"LanguageModel": 1}, parts=3)
def parts_only(run: Run) -> None:
    model = LanguageModel()
    loop(
        run,
        lambda: model.head(model.body(model.embedding(ids()))).square().mean(),
        adamw(model),
        of=(("LanguageModel", (model,)),),
    )


@script({"LanguageModel": 1}, parts=2)
def a_method_that_is_not_forward(run: Run) -> None:
    model = LanguageModel()
    loop(run, lambda: model.encode(ids()).square().mean(), adamw(model), of=(("LanguageModel", (model,)),))


@script({"LanguageModel": 1})
def embedding_first(run: Run) -> None:
    model = LanguageModel()
    optimizer = adamw(model)
    assert model.embedding(ids()).requires_grad
    loop(run, lambda: model(ids()).square().mean(), optimizer, of=(("LanguageModel", (model,)),))


@script({"Net": 1})
def without_gradients_first(run: Run) -> None:
    net = Net()
    optimizer = adamw(net)
    with torch.no_grad():
        net(batch())
    loop(run, lambda: net(batch()).square().mean(), optimizer, of=(("Net", (net,)),))


@script({"Net": 1})
def evaluation_first(run: Run) -> None:
    net = Net()
    optimizer = adamw(net)
    net.eval()
    net(batch())  # without no_grad
    net.train()
    loop(run, lambda: net(batch()).square().mean(), optimizer, of=(("Net", (net,)),))


@script({"Net": 2})
def trained_in_evaluation_mode(run: Run) -> None:
    net = Net().eval()
    loop(run, lambda: net(batch()).square().mean(), adamw(net), of=(("Net", (net,)),))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.textual = Net(), LanguageModel()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))


@script({"Towers": 1}, parts=2)
def two_towers(run: Run) -> None:
    clip = Towers()

    def forward() -> Tensor:
        image, text = clip.visual(batch()), clip.textual(ids())
        return (image.mean((1, 2)) @ text.mean((1, 2)) * clip.logit_scale.exp()).square()

    loop(run, forward, adamw(clip), of=(("Towers", (clip,)),))


@script({"Net": 1, "LanguageModel": 1})
def two_models_of_one_optimizer(run: Run) -> None:
    encoder, decoder = LanguageModel(), Net()
    optimizer = adamw(encoder, decoder)
    for _ in range(STEPS):
        run.begin_step()
        x = ids()
        with run.counts(encoder, name="LanguageModel"):
            y = encoder(x)
        with run.counts(decoder, name="Net"):
            z = decoder(y.repeat(1, 1, 2))
        z.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(z.detach().square().mean())


@script({"Net": 1})
def one_model_of_two_optimizers(run: Run) -> None:
    net = Net()
    weights = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() == 1]
    optimizers = torch.optim.AdamW(weights, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)
    loop(run, lambda: net(batch()).square().mean(), *optimizers, of=(("Net", (net,)),))


class Critic(nn.Sequential):
    pass


class Generator(nn.Sequential):
    pass


@script({"Critic": 1, "Generator": 1})
def critic_and_generator(run: Run) -> None:
    critic, generator = Critic(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)), Generator(Net(), Net())
    of_critic, of_generator = adamw(critic), adamw(generator)
    for _ in range(STEPS):
        run.begin_step()
        with run.counts(critic, name="Critic"):
            real = critic(batch())
        with run.counts(generator, name="Generator"):
            fake = generator(batch())
        (critic(fake.detach()).mean() - real.mean()).backward()
        of_critic.step()
        (-critic(fake).mean()).backward()
        of_generator.step()
        of_critic.zero_grad()
        of_generator.zero_grad()
        run.losses.append(real.mean().detach())


@script({"Critic": 1, "Generator": 1})
def networks_that_are_frozen_in_turn(run: Run) -> None:
    critic, generator = Critic(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)), Generator(Net(), Net())
    of_critic, of_generator = adamw(critic), adamw(generator)
    for _ in range(STEPS):
        run.begin_step()
        generator.requires_grad_(False)
        fake = generator(batch())
        with run.counts(critic, name="Critic"):
            real = critic(batch())
        (critic(fake).mean() - real.mean()).backward()
        of_critic.step()
        generator.requires_grad_(True)
        critic.requires_grad_(False)
        with run.counts(generator, name="Generator"):
            fake = generator(batch())
        (-critic(fake).mean()).backward()
        of_generator.step()
        critic.requires_grad_(True)
        of_critic.zero_grad()
        of_generator.zero_grad()
        run.losses.append(real.mean().detach())


@script({"Net": 1})
def frozen_first(run: Run) -> None:
    net = Net()
    optimizer = adamw(net)
    net.requires_grad_(False)
    net(batch().requires_grad_()).sum().backward()  # as in a test of an equation's residual
    net.requires_grad_(True)
    loop(run, lambda: net(batch()).square().mean(), optimizer, of=(("Net", (net,)),))


@script({"Critic": 1, "Generator": 1})
def one_model_after_the_other(run: Run) -> None:
    for model in (Critic(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)), Generator(Net(), Net())):
        optimizer = adamw(model)
        for step in range(STEPS):
            if isinstance(model, Critic):
                run.begin_step()
            with run.counts(model, name=type(model).__name__, step=step):
                loss = model(batch()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(model, Critic):
                run.losses.append(loss.detach())


@script({"Net": 1})
def teacher_and_student(run: Run) -> None:
    class Distiller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = Net(), Net()

    both = Distiller()

    def forward() -> Tensor:
        x = batch()
        with torch.no_grad():
            wanted = both.teacher(x)
        return (both.student(x) - wanted).square().mean()

    loop(run, forward, adamw(both.student), of=(("Net", (both.student,)),))


@script({"Net": 1})
def moving_average(run: Run) -> None:
    net = Net()
    average = torch.optim.swa_utils.AveragedModel(net)

    def forward() -> Tensor:
        average.update_parameters(net)
        return (net(batch()) - average(batch()).detach()).square().mean()

    loop(run, forward, adamw(net), of=(("Net", (net,)),))


@script({"Outer": 3})
def an_outer_module_that_is_made_later(run: Run) -> None:
    net = Net()
    optimizer = adamw(net)
    loop(run, lambda: net(batch()).square().mean(), optimizer, of=(("Outer", (net,)),), steps=1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = net, Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.net(x))

    outer = Outer()
    optimizer.add_param_group({"params": list(outer.head.parameters())})
    loop(run, lambda: outer(batch()).square().mean(), optimizer, of=(("Outer", (outer,)),), steps=STEPS - 1)


@script({"Growing": 3})
def a_layer_that_is_made_later(run: Run) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Net()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    model = Growing()
    optimizer = adamw(model)
    loop(run, lambda: model(batch()).square().mean(), optimizer, of=(("Growing", (model,)),), steps=1)
    model.second = Net()
    optimizer.add_param_group({"params": list(model.second.parameters())})
    loop(run, lambda: model(batch()).square().mean(), optimizer, of=(("Growing", (model,)),), steps=STEPS - 1)


@script({"Net": 1})
def a_wrapper_without_parameters(run: Run) -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    net = Net()
    optimizer = adamw(net)
    net(batch()).sum().backward()
    optimizer.zero_grad()
    wrapped = Doubled(net)
    loop(run, lambda: wrapped(batch()).square().mean(), optimizer, of=(("Net", (net,)),))


@script({}, ("Net",), is_refused=True)
def a_functional_call_of_other_tensors(run: Run) -> None:
    net = Net()
    optimizer = adamw(net)

    def forward() -> Tensor:
        others = {name: parameter * 1 for name, parameter in net.named_parameters()}
        return torch.func.functional_call(net, others, (batch(),)).square().mean()

    loop(run, forward, optimizer, of=(("Net", (net,)),))


@script({}, ("Net",), is_refused=True)
def gradients_by_a_transform(run: Run) -> None:
    net = Net()
    optimizer, parameters = adamw(net), dict(net.named_parameters())
    for _ in range(STEPS):
        run.begin_step()
        x = batch()

        def loss(parameters: dict[str, Tensor], x: Tensor = x) -> Tensor:
            return torch.func.functional_call(net, parameters, (x,)).square().mean()

        gradients, value = torch.func.grad_and_value(loss)(parameters)
        run.kept[-1]["Net"] = 0  # nothing that a tracker could see
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()
        run.losses.append(value.detach())


@script({}, ("RecursiveScriptModule",), is_refused=True)
def compiled_by_torch_jit(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        net = torch.jit.script(Net())
    loop(run, lambda: net(batch()).square().mean(), adamw(net), of=(("RecursiveScriptModule", (net,)),))


@script({"Net": 1})
def a_functional_call_of_its_own_parameters(run: Run) -> None:
    net = Net()

    def forward() -> Tensor:
        return torch.func.functional_call(net, dict(net.named_parameters()), (batch(),)).square().mean()

    loop(run, forward, adamw(net), of=(("Net", (net,)),))


@script({"ModuleList": 1}, parts=2)
def layers_in_a_list_of_modules(run: Run) -> None:
    layers = nn.ModuleList([Net(), Net()])

    def forward() -> Tensor:
        x = batch()
        for layer in layers:
            x = layer(x)
        return x.square().mean()

    loop(run, forward, adamw(layers), of=(("ModuleList", (layers,)),))


@script({"Net": 1})
def in_a_thread(run: Run) -> None:
    def train() -> None:
        net = Net()
        loop(run, lambda: net(batch()).square().mean(), adamw(net), of=(("Net", (net,)),))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


@script({"Net": 1})
def closures(run: Run) -> None:
    net = Net()
    optimizer = adamw(net)
    for _ in range(STEPS):
        run.begin_step()

        def closure() -> Tensor:
            optimizer.zero_grad()
            with run.counts(net, name="Net"):
                loss = net(batch()).square().mean()
            loss.backward()
            run.losses.append(loss.detach())
            return loss

        optimizer.step(closure)


@script({"Net": 1}, outside=1)
def a_parameter_in_no_module(run: Run) -> None:
    net, scale = Net(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*net.parameters(), scale], lr=1e-3)
    loop(run, lambda: (net(batch()) * scale).square().mean(), optimizer, of=(("Net", (net,)),))


@script({}, outside=32, is_refused=True)
def parameters_only(run: Run) -> None:
    factor = nn.Parameter(torch.ones(32))
    optimizer = torch.optim.AdamW([factor], lr=1e-3)
    loop(run, lambda: (batch() * factor).square().mean(), optimizer, of=(("none", ()),))


@script({}, ("Scale",), is_refused=True)
def without_a_site(run: Run) -> None:
    scale = Scale()
    loop(run, lambda: scale(batch()).square().mean(), adamw(scale), of=(("Scale", (scale,)),))


@script({"Linear": 1}, ("Scale",), is_refused=True)
def most_of_it_without_a_site(run: Run) -> None:
    scale, head = Scale(), nn.Linear(32, 1)
    optimizer = adamw(scale, head)
    for _ in range(STEPS):
        run.begin_step()
        x = torch.randn(16, 8, 32)
        with run.counts(scale, name="Scale"):
            y = scale(x)
        with run.counts(head, name="Linear"):
            loss = head(y[:1].clone()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach())


@script({"LanguageModel": 1}, ("Embedding",))
def an_embedding_of_its_own(run: Run) -> None:
    embedding, model = nn.Embedding(2000, 16), LanguageModel()
    optimizer = adamw(embedding, model)
    for _ in range(STEPS):
        run.begin_step()
        with run.counts(embedding, name="Embedding"):
            x = embedding(ids())
        with run.counts(model, name="LanguageModel"):
            y = model(ids())
        loss = (y * x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach())


@script({"Adapted": 1})
def frozen_but_for_an_adapter(run: Run) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = Net().requires_grad_(False), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.adapter(self.base(x))

    model = Adapted()
    loop(run, lambda: model(batch()).square().mean(), adamw(model.adapter), of=(("Adapted", (model,)),))


@script({"Net": 1})
def an_optimizer_that_is_made_again(run: Run) -> None:
    net = Net()
    for steps in (2, STEPS - 2):
        loop(run, lambda: net(batch()).square().mean(), adamw(net), of=(("Net", (net,)),), steps=steps)


@script({"Net": 1}, is_checkpointed=True)
def a_checkpointed_model(run: Run) -> None:
    net = Net()

    def forward() -> Tensor:
        x = batch().requires_grad_()
        return checkpoint(net, x, use_reentrant=False).square().mean()

    loop(run, forward, adamw(net), of=(("Net", (net,)),))


@script({}, trains=False)
def by_hand(run: Run) -> None:
    net = Net()
    for _ in range(STEPS):
        run.begin_step()
        with run.counts(net, name="Net"):
            loss = net(batch()).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        run.losses.append(loss.detach())


@script({"Net": 1})
def a_copy_that_is_trained(run: Run) -> None:
    net = copy.deepcopy(Net())
    optimizer = adamw(net)
    for _ in range(2):  # micro-batches before the first step
        net(batch()).square().mean().backward()
    loop(run, lambda: net(batch()).square().mean(), optimizer, of=(("Net", (net,)),))
