"""`laconic.advise`: rows are what they say, and the model is as before."""

import copy
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker, find_sites
from laconic.activations.keep.choice import Offload
from laconic.advice import Advice, Row
from laconic.advice.link import measure_link
from laconic.advice.measure import timed
from laconic.advice.methods import offload_all
from laconic.auditing.training_call import find_loss
from laconic.errors import ConfigError, ModelError
from tests.activations.models import make_ids, make_model
from tests.distributed.processes import run_ranks
from tests.inductor import needs_inductor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Counted(nn.Module):
    """Blocks, a batch norm and a buffer that forward changes, and an attribute that it counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("seen", torch.zeros(1))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls.append(1)
        x.mul_(1.0)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.flatten(0, -2))


def by_name(advice: Advice) -> dict[str, Row]:
    return {row.name: row for row in advice.rows}


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, dict[str, Tensor], Advice]:
    model = make_model("llama")
    ids = make_ids()
    batch = {"input_ids": ids, "labels": ids}
    return model, batch, laconic.advise(model, batch, rounds=2)


@pytest.mark.ci
def test_bytes_and_gradients_of_rows_are_those_of_the_lines(
    llama: tuple[nn.Module, dict[str, Tensor], Advice],
) -> None:
    model, batch, advice = llama
    rows = by_name(advice)
    assert {"exact", "4 bits", "8 bits", "4 bits, chunked loss", "checkpointing"} <= rows.keys()
    reference: dict[str, Tensor] = {}
    for row in advice.rows:
        mine = copy.deepcopy(model).train()
        exec("\n".join(row.lines), {"model": mine})
        with SavedTensorTracker(mine) as tracker:
            loss = mine(**batch).loss
        assert tracker.nbytes == row.nbytes, row.name
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in mine.named_parameters() if p.grad is not None}
        reference = reference or gradients
        off = sum(float((gradients[n] - g).norm()) ** 2 for n, g in reference.items()) ** 0.5
        norm = sum(float(g.norm()) ** 2 for g in reference.values()) ** 0.5
        assert row.gradient_error == pytest.approx(off / norm, rel=1e-3, abs=1e-6), row.name
        assert row.fastest_seconds <= row.seconds <= row.slowest_seconds
        assert row.least_slowdown <= row.slowdown <= row.most_slowdown
    assert rows["exact"].slowdown == rows["exact"].most_slowdown == 1
    assert rows["exact"].gradient_error == rows["checkpointing"].gradient_error == 0
    assert rows["4 bits"].gradient_error > rows["8 bits"].gradient_error > 0
    assert rows["4 bits"].nbytes < rows["8 bits"].nbytes < rows["exact"].nbytes
    assert rows["4 bits"].worst_error >= rows["4 bits"].gradient_error
    assert rows["4 bits"].worst_parameter in dict(model.named_parameters())
    assert all(row.peak_nbytes is not None and row.peak_nbytes > 0.5 * row.nbytes for row in advice.rows)


class Odd(nn.Module):
    """Keeps what only hooks can pack."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x @ self.weight).exp().square().mean()


@pytest.fixture(scope="module")
def advice() -> Advice:
    return laconic.advise(Odd(), torch.randn(512, 64), rounds=1)


def test_text_and_data_say_the_same(advice: Advice, tmp_path: Path) -> None:
    data = json.loads(json.dumps(advice.to_dict()))
    text = str(advice)
    for row in data["rows"]:
        line = next(line for line in text.splitlines() if line[1:].startswith(f"  {row['name']}  "))
        assert line.startswith("*") == row["on_front"]
        assert (f"# {row['name']}\n" in text) == (row["on_front"] and row["name"] != "exact")
    assert "offload, 8 bits" in data["left_out"]
    assert "host memory already" in text
    advice.plot(tmp_path / "advice.png")
    assert (tmp_path / "advice.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"nonsense"):
        advice.plot(tmp_path / "advice.nonsense")


@pytest.mark.ci
def test_the_model_batch_and_random_states_are_as_before() -> None:
    model = Counted()
    model.blocks[0].eval()
    calls: list[str] = []
    model.norm.register_forward_hook(lambda *_: None)
    model.blocks[1].weight_hook = model.blocks[1].up.weight.register_hook(lambda g: calls.append("hook"))
    kept = model.blocks[0].up.weight.grad = torch.randn(256, 64)
    model.calls.append(7)
    kept_values = kept.clone()
    x = torch.randn(4, 16, 64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [sorted(vars(module)) for module in model.modules()]
    hooks = dict(model.norm._forward_hooks)
    given = x.clone()
    modes = [module.training for module in model.modules()]
    random_states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    advice = laconic.advise(model, x, rounds=1)
    assert random.getstate() == random_states[0]
    assert torch.equal(torch.get_rng_state(), random_states[1])
    assert numpy.random.get_state()[1].tolist() == random_states[2]
    assert torch.equal(x, given)
    assert x.grad is None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert [module.training for module in model.modules()] == modes
    assert model.norm._forward_hooks == hooks
    assert model.calls == [7]
    assert calls == []
    assert model.blocks[0].up.weight.grad is kept
    assert torch.equal(kept, kept_values)
    assert all(p.grad is None for p in model.parameters() if p is not model.blocks[0].up.weight)
    rows = by_name(advice)
    assert rows["checkpointing"].nbytes < rows["exact"].nbytes
    assert rows["checkpointing"].gradient_error < 1e-6  # dropout draws the same numbers again
    assert "outputs times" in advice.loss
    assert "only models of transformers" in advice.left_out["checkpointing, packed inputs"]


def test_what_only_hooks_can_pack_is_tried_with_hooks(advice: Advice) -> None:
    rows = by_name(advice)
    assert "4 bits" in advice.left_out
    assert rows["4 bits, combined"].nbytes < rows["exact"].nbytes / 2
    assert advice.loss == "the number that the model returns"


@pytest.mark.parametrize(
    ("make", "batch", "said"),
    [
        (lambda: nn.Linear(4, 4).requires_grad_(False), torch.ones(1, 4), "requires a gradient"),
        (lambda: nn.Linear(4, 4), torch.ones(1, 5), "does not train on the batch as it is"),
        (lambda: nn.Linear(4, 4), {"text": "none"}, "without a tensor"),
        (lambda: nn.LazyLinear(4), torch.ones(1, 4), "run it once before"),
        (lambda: nn.Linear(4, 4, device="meta"), torch.ones(1, 4), "meta device"),
        (lambda: nn.DataParallel(nn.Linear(4, 4)), torch.ones(1, 4), "around another module"),
        (lambda: "model", torch.ones(1, 4), "must be a torch.nn.Module"),
        (lambda: nn.Linear(4, 4, bias=False), torch.zeros(1, 4), "norm of the exact gradient is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(make: Callable[[], Any], batch: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        laconic.advise(make(), batch)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.ci
def test_weights_that_are_computed_in_forward_are_copied() -> None:
    model = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    weight = model.weight
    advice = laconic.advise(nn.Sequential(model, nn.Linear(8, 1)), (torch.ones(2, 8),), rounds=1)
    assert advice.rows[0].gradient_error == 0
    assert model.weight is weight


def test_models_that_are_not_alone_in_their_copies_are_refused() -> None:
    class Captured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.call = lambda x: self.linear(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.call(x)

    model = Captured()
    with pytest.raises(ModelError, match="compute with the parameters of the model itself"):
        laconic.advise(model, torch.ones(1, 4))
    assert model.linear.weight.grad is None
    compressed = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    laconic.compress_activations(compressed)
    with pytest.raises(ModelError, match="decompress_activations"):
        laconic.advise(compressed, torch.ones(1, 64))
    with pytest.raises(ModelError, match="rounds is 0"):
        laconic.advise(nn.Linear(4, 4), torch.ones(1, 4), rounds=0)


def test_a_row_is_on_the_front_if_no_other_beats_it() -> None:
    def row(name: str, nbytes: int, seconds: float, error: float) -> Row:
        return Row(name, nbytes, 0, *[seconds] * 6, None, error, error, "", ())

    rows = (
        row("exact", 100, 1.0, 0),
        row("slow", 100, 2.0, 0),
        row("small", 10, 2.0, 0.1),
        row("noise", 50, 1.5, 1e-8),
    )
    beaten = row("beaten", 20, 3.0, 0.2)
    advice = Advice("M", "cpu", "", 1, (*rows, beaten), {})
    assert [found.name for found in advice.front] == ["small", "noise", "exact"]


def test_the_host_s_part_of_a_step_ends_before_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed_with(host: float, device: float) -> tuple[float, float | None]:
        ends = [0.0]

        def step() -> None:
            ends[0] = time.perf_counter() + device
            time.sleep(host)

        monkeypatch.setattr(
            torch.accelerator, "synchronize", lambda _: time.sleep(max(0.0, ends[0] - time.perf_counter()))
        )
        return timed(step, torch.device("cuda"))

    slow_device, slow_host = timed_with(0.01, 0.1), timed_with(0.1, 0.01)
    assert slow_device[1] is not None
    assert slow_host[1] is not None
    assert slow_device[0] >= 0.1 > slow_device[1] >= 0.01
    assert slow_host[0] >= slow_host[1] >= 0.1
    assert timed(lambda: None, torch.device("cpu"))[1] is None
    rows = [
        Row(name, 1, 0, seconds, seconds, seconds, 1.0, 1.0, 1.0, None, 0.0, 0.0, "", (), host)
        for name, (seconds, host) in (("exact", slow_device), ("4 bits", slow_host))
    ]
    assert [row.is_bound_by_host for row in rows] == [False, True]
    text = str(Advice("m", "d", "l", 1, tuple(rows), {}))
    assert "bound by the host: 4 bits (" in text
    assert "bound by" not in str(Advice("m", "d", "l", 1, tuple(rows[:1]), {}))


def test_the_offload_policy_moves_all_but_what_runs_again() -> None:
    model = make_model("llama")
    choices = {site.kind: offload_all(site) for site in find_sites(model)}
    assert isinstance(choices["norm"], Offload)
    assert not isinstance(choices["attention"], Offload)
    report = laconic.compress_activations(model, policy=offload_all)
    assert any("on host" in found.format for found in report.rows)


def test_losses_are_found_where_models_put_them() -> None:
    x = torch.ones(2, requires_grad=True)
    assert find_loss({"loss": x.sum(), "logits": x})[1] == "output.loss"
    assert find_loss((x.sum(), x))[1] == "the number that the model returns"
    loss, where = find_loss({"a": x, "b": [2 * x]})
    (gradient,) = torch.autograd.grad(loss, x)
    assert where.startswith("outputs times")
    assert gradient.unique().numel() == 2
    norm = nn.LayerNorm(8)
    inputs = torch.rand(2, 8, requires_grad=True)
    assert torch.autograd.grad(find_loss(norm(inputs))[0], inputs)[0].norm() > 0.01
    with pytest.raises(ModelError, match="without a loss"):
        find_loss("nothing")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor imports what torch itself deprecates
@needs_inductor
def test_compiled_models_keep_less_under_a_memory_budget() -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    advice = laconic.advise(model, torch.randn(8, 32, 64), rounds=1, compile=True)
    rows = by_name(advice)
    assert "compiled" not in advice.left_out, advice.left_out["compiled"]
    assert rows["compiled, memory budget 0.5"].nbytes < rows["compiled"].nbytes
    assert rows["compiled"].gradient_error < 1e-3  # dropout included


def advised_on_two_ranks(rank: int, num_ranks: int, folder: str, whole: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    if whole:
        torch.manual_seed(0)
        model, batch = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), torch.randn(8, 64)
        advice = laconic.advise(model, batch, rounds=1, loss_of=lambda y: y.square().mean())
        found = advice.to_dict()["link"], str(advice)
        advice.plot(f"{folder}/rank{rank}.svg")
    else:
        generator = torch.Generator().manual_seed(rank)
        gradients = [torch.randn(shape, generator=generator) for shape in ((256, 512), (512,), (512, 256))]
        assert dist.group.WORLD is not None
        link = measure_link(gradients, dist.group.WORLD, rounds=2)
        found = link.to_dict(), link.text(step_seconds=0.5)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def links_of(folder: Path, *, whole: bool) -> list[tuple[dict[str, Any], str]]:
    run_ranks(advised_on_two_ranks, (2, str(folder), whole), 2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_the_link_between_ranks_is_measured_with_gradients(tmp_path: Path) -> None:
    tables = links_of(tmp_path, whole=False)
    num_values = 2 * 256 * 512 + 512
    for link, text in tables:
        exact, coded, bits = link["rows"]
        assert (link["num_ranks"], link["nbytes"]) == (2, 4 * num_values)
        assert exact["sent_nbytes"] == 4 * num_values  # 2 (W - 1) / W of the gradients
        assert exact["error"] == coded["error"] == 0
        assert 0 < bits["error"] < 0.02
        assert coded["sent_nbytes"] < exact["sent_nbytes"]
        # A byte and 1/128 of a scale, in both directions of half the values; and headers.
        assert num_values < bits["sent_nbytes"] < 1.1 * num_values
        assert link["nbytes_per_second"] == exact["sent_nbytes"] / exact["seconds"]
        assert "averaged over 2 ranks" in text
        for row in link["rows"]:
            assert row["pays"] == (row["slowdown"] < 0.95)
            assert (f"# gradients: {row['name']}" in text) == row["pays"]
    # The slowest rank's time counts on all of them.
    times = [[row["seconds"] for row in link["rows"]] for link, _ in tables]
    assert times[0] == times[1]


@pytest.mark.slow
def test_ranks_that_ask_for_advice_have_the_link_under_the_table(tmp_path: Path) -> None:
    for link, text in links_of(tmp_path, whole=True):
        assert link["nbytes"] == 4 * (2 * 64 + 64 * 64 + 64)
        assert text.index("left out") < text.index("averaged over 2 ranks")
    picture = (tmp_path / "rank0.svg").read_text()
    for word in ("2 ranks at", "coded losslessly", "8 bits", "in steps of the exact model"):
        assert word in picture  # in the comment beside a text's outlines


def test_without_other_ranks_no_link_is_measured(advice: Advice) -> None:
    assert advice.link is None
    assert advice.to_dict()["link"] is None
    assert "ranks" not in str(advice)
