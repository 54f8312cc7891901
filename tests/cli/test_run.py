"""`laconic run`: scripts that know nothing of laconic, in processes of their own."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from laconic.cli.main import main
from tests.distributed.forked import ForkedPython
from tests.patience import patient

NET = """
import os, sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))

def train(call, optimizer, steps=3):
    for step in range(steps):
        call(torch.randn(4, 16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def laconic_run(directory: Path, script: str, *flags: str, arguments: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `laconic run FLAGS SCRIPT ARGUMENTS`."""
    (directory / "net.py").write_text(NET)
    (directory / "script.py").write_text("from net import *\n" + textwrap.dedent(script))
    command = [sys.executable, "-m", "laconic", "run", *flags, "script.py", *arguments]
    process = ForkedPython(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=patient(120))
    return process.wait(), out, err


def summary_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


OWN_LOOP = """
    if __name__ == "__main__":
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        assert isinstance(optimizer, torch.optim.AdamW)
        train(net, optimizer)
        print(sys.argv, nn.Module.__call__ is nn.Module._wrapped_call_impl, os.path.isabs(__file__))
"""


def test_own_loop_keeps_fewer_bytes_and_nothing_of_torch_stays_watched(tmp_path: Path) -> None:
    code, out, err = laconic_run(
        tmp_path, OWN_LOOP, "--optimizer", "adamw8bit", "--json", "summary.json", arguments=("--epochs", "3", "--json")
    )
    assert (code, out) == (0, "['script.py', '--epochs', '3', '--json'] True True\n"), err
    summary = summary_of(tmp_path)
    [model] = summary["models"]
    assert model["model"] == "Net"
    assert model["exact_nbytes"] > 8 * model["nbytes"] > 0
    assert summary["optimizers"] == {"AdamW8bit": 3}
    assert summary["step_seconds"] > 0


def test_two_models_each_have_their_line_and_forked_children_none(tmp_path: Path) -> None:
    script = """
        first, second = Net(), Net()
        optimizers = [torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)]
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        train(lambda x: second(first(x)), optimizers[0])
        optimizers[1].step()
    """
    code, _, err = laconic_run(tmp_path, script)
    assert code == 0, err
    assert err.count("Net keeps") == 2
    assert err.count("steps: 3 of AdamW, 1 of SGD") == 1


def test_what_the_script_compresses_is_left_to_it(tmp_path: Path) -> None:
    script = """
        import laconic
        net = Net()
        laconic.compress_activations(net, 8)
        train(net, torch.optim.AdamW(net.parameters()))
    """
    code, _, _ = laconic_run(tmp_path, script, "--json", "summary.json")
    assert code == 0
    [model] = summary_of(tmp_path)["models"]
    assert model["by_script"]
    assert model["left_exact"] is None


def test_the_whole_is_compressed_though_a_part_is_called_before_it(tmp_path: Path) -> None:
    script = """
        class Two(nn.Sequential):
            pass
        two = Two(Net(), Net())
        optimizer = torch.optim.AdamW(two.parameters())
        train(two[0], optimizer)
        train(two, optimizer)
    """
    code, _, err = laconic_run(tmp_path, script, "--activations", "4")
    assert code == 0, err
    assert "Two keeps" in err
    assert "left exact" not in err


@pytest.mark.parametrize(
    ("flags", "optimizer", "said"),
    [
        (("--loss", "chunked"), "AdamW", "loss is 'chunked'"),
        (("--optimizer", "adamw8bit"), "SGD", "--optimizer is adamw8bit, but the script's first step is of SGD"),
    ],
)
def test_what_was_asked_for_and_cannot_be_done_ends_before_the_first_step(
    tmp_path: Path, flags: tuple[str, ...], optimizer: str, said: str
) -> None:
    script = f"net = Net(); train(net, torch.optim.{optimizer}(net.parameters(), lr=0.1)); print('trained')"
    code, out, err = laconic_run(tmp_path, script, *flags)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


PARTS = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.body = nn.Embedding(16, 64), Net()
        def forward(self, ids):
            return self.body(self.embedding(ids))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
"""


@pytest.mark.parametrize("flags", [(), ("--activations", "4"), ("--activations", "16")])
def test_a_script_that_calls_its_embedding_first(tmp_path: Path, flags: tuple[str, ...]) -> None:
    script = f"""{PARTS}
    print(model.embedding(torch.zeros(1, dtype=torch.int64)).shape)
    for step in range(3):
        model(torch.randint(16, (4, 16))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    code, _, err = laconic_run(tmp_path, script, *flags)
    assert code == 0, err
    if "16" in flags:
        assert "activations are exact, as --activations 16 asks for" in err
        assert "no module" not in err
    else:
        assert "Model keeps" in err
        assert "left exact" not in err


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("torch.func.functional_call(model, {n: p * 1 for n, p in model.named_parameters()}, ids)", "no module with"),
        ("model.embedding.weight[ids]", "no module with its parameters was called with gradients"),
    ],
)
def test_what_no_call_of_a_module_shows_is_refused_and_said(tmp_path: Path, call: str, why: str) -> None:
    script = f"""{PARTS}
    for step in range(3):
        ids = torch.randint(16, (4, 16))
        {call}.square().mean().backward()
        optimizer.step()
    print("trained")
    """
    code, out, err = laconic_run(tmp_path, script, "--activations", "4")
    assert (code, out) == (2, "")
    assert why in err
    code, out, err = laconic_run(tmp_path, script)
    assert (code, out) == (0, "trained\n")
    assert "Model left exact: no module with its parameters was called" in err


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise ValueError"])
def test_a_refusal_that_the_script_catches_is_one_all_the_same(tmp_path: Path, ending: str) -> None:
    script = f"""
        net = Net()
        for step in range(3):
            try:
                train(net, torch.optim.AdamW(net.parameters()))
            except Exception as error:
                print("caught")
        {ending}
    """
    code, out, err = laconic_run(tmp_path, script, "--loss", "chunked")
    assert (code, out) == (2, "caught\n" * 3)
    assert "--loss chunked" in err


def test_a_model_without_sites_is_left_exact_unless_asked_for(tmp_path: Path) -> None:
    script = """
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = nn.Parameter(torch.ones(64))
            def forward(self, x):
                return x * self.factor
        scale = Scale()
        train(scale, torch.optim.AdamW(scale.parameters()))
    """
    code, _, err = laconic_run(tmp_path, script)
    assert code == 0
    assert "Scale left exact: no site recognized" in err
    code, _, err = laconic_run(tmp_path, script, "--activations", "4")
    assert code == 2
    assert "no site recognized" in err


def test_endings_are_those_of_the_script(tmp_path: Path) -> None:
    code, _, err = laconic_run(tmp_path, "raise ValueError('at step 3')")
    assert code == 1
    assert err.count("  File ") == 1
    assert "ValueError: at step 3" in err
    assert laconic_run(tmp_path, "sys.exit(7)")[0] == 7
    code, _, err = laconic_run(tmp_path, "sys.exit('no data')")
    assert code == 1
    assert err.startswith("no data\n")
    code, _, err = laconic_run(tmp_path, "with torch.no_grad(): Net().eval()(torch.ones(1, 64))")
    assert code == 0
    assert "no optimizer of torch made a step" in err


def test_a_path_through_a_link_is_the_scripts_own(tmp_path: Path) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    (tmp_path / "far" / "a.py").write_text("print(__file__)")
    (tmp_path / "a.py").write_text("print('another')")
    command = [sys.executable, "-m", "laconic", "run", "link/../a.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(120)).stdout
    assert out == f"{tmp_path}/link/../a.py\n"


def test_flags_behind_the_script_are_said_to_be_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    arguments = ["--activations", "8", "--loss=chunked", "--optimizer", "sgd", "--no-audit", "--loss", "mse"]
    assert main(["run", str(script), *arguments]) == 0
    out, err = capsys.readouterr()
    assert out == f"{arguments}\n"
    said = re.findall(r"the script gets (.*?), which stands behind it", err)
    assert said == ["--activations 8", "--loss chunked", "--no-audit"]


def test_a_missing_script_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "missing.py"]) == 2
    assert "script is missing.py, but there is no such file" in capsys.readouterr().err


PACKAGE = """
    import multiprocessing
    from .parts import Net, train, torch
    def double(x):
        return x + x
    if __name__ == "__main__":
        net = Net()
        train(net, torch.optim.AdamW(net.parameters()))
        import sys
        print(__package__, __spec__.name, sys.argv[1:], sys.path[0] == sys.argv[0].rsplit("/", 2)[0])
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double if __file__.endswith("work.py") else abs, [42]), flush=True)
        sys.exit(5)
"""


@pytest.mark.parametrize("file", ["work.py", "__main__.py"])
@pytest.mark.ci
def test_a_module_of_a_package_runs_as_by_python_m(tmp_path: Path, file: str) -> None:
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(NET)
    (package / file).write_text(textwrap.dedent(PACKAGE))
    name = "training" if file == "__main__.py" else "training.work"
    process = ForkedPython(
        [sys.executable, "-m", "laconic", "run", "--activations", "4", "-m", name, "-m", "4"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(timeout=patient(120))
    assert process.wait() == 5, err
    # As with Python itself, spawned processes do not have what a package's __main__ defines.
    assert out.splitlines() == [
        f"training training.{file[:-3]} ['-m', '4'] True",
        f"[{84 if file == 'work.py' else 42}]",
    ]
    assert "Net keeps" in err


@pytest.mark.parametrize("name", ["missing_module", "missing.below", "email", "json.missing", ".relative", "sys"])
def test_what_is_no_module_is_an_error(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["run", "-m", name]) == 2
    assert f"module is {name}, but there is no such module" in capsys.readouterr().err


def test_what_a_package_fails_to_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import not_installed_here")
    (tmp_path / "broken" / "train.py").write_text("")
    command = [sys.executable, "-m", "laconic", "run", "-m", "broken.train"]
    process = ForkedPython(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=patient(120))
    assert process.wait() == 1
    assert "No module named 'not_installed_here'" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiled", ["net.compile(backend='aot_eager')", "call = torch.compile(net, backend='aot_eager')"]
)
def test_models_that_torch_compiles(tmp_path: Path, compiled: str) -> None:
    script = f"net = call = Net(); {compiled}; train(call, torch.optim.AdamW(net.parameters()))"
    code, _, err = laconic_run(tmp_path, script, "--activations", "4")
    assert code == 0, err
    assert "Net keeps" in err
    assert "steps: 3 of AdamW" in err


@pytest.mark.slow
def test_two_ranks_of_ddp_under_torchrun_and_spawned_workers_of_a_loader(tmp_path: Path) -> None:
    script = """
        import torch.distributed as dist
        from torch.utils.data import DataLoader
        if __name__ == "__main__":
            dist.init_process_group("gloo")
            net = nn.parallel.DistributedDataParallel(Net())
            optimizer = torch.optim.AdamW(net.parameters())
            for x in DataLoader(torch.randn(20, 64), batch_size=4, num_workers=1, multiprocessing_context="spawn"):
                net(x).square().mean().backward()
                optimizer.step()
            dist.destroy_process_group()
    """
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "script.py").write_text("from net import *\n" + textwrap.dedent(script))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "laconic"]
    command = [*launcher, "run", "--activations", "4", "--json", "summary.json", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(200), check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("Net keeps") == 1
    nbytes = 4 * (2 * 64 + 2 * 64 * 256 + 256 + 64)  # of gradients, which a ring of two sends once
    assert nbytes <= summary_of(tmp_path)["step_nbytes"] <= 1.2 * nbytes
    assert "bytes over TCP per step (median); --zip auto codes them" in ended.stderr


@pytest.mark.slow
def test_processes_that_the_script_spawns_are_converted_and_have_one_summary(tmp_path: Path) -> None:
    script = """
        import torch.multiprocessing as mp
        def work(rank, steps):
            net = Net()
            train(net, torch.optim.AdamW(net.parameters()), steps)
        if __name__ == "__main__":
            mp.spawn(work, args=(3,), nprocs=2)
    """
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "script.py").write_text("from net import *\n" + textwrap.dedent(script))
    # Not forked: multiprocessing notes the directory in which Python began, and looks for the script there.
    command = [sys.executable, "-m", "laconic", "run", "--activations", "4", "--json", "summary.json", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(200), check=False)
    assert ended.returncode == 0, ended.stderr
    summary = summary_of(tmp_path)
    assert (summary["spawned"], summary["own"]) == (2, False)
    (model,) = summary["models"]
    assert model["model"] == "Net"
    assert model["nbytes"] < model["exact_nbytes"] / 4
    assert summary["optimizers"] == {"AdamW": 3}
    assert summary["step_seconds"] > 0


# Scripts that differentiate a gradient, and print a number that shows whether that came through.

EQUATION = """
    torch.manual_seed(0)  # u'' = -sin(x) on [0, 3] with u(0) = u(3) = 0
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.Softplus())
    net.append(nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(150):
        x = (torch.rand(64, 1) * 3).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        loss = (bend + x.sin()).square().mean() + net(torch.tensor([[0.0], [3.0]])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    points = torch.linspace(0, 3, 31)[:, None]
    truth = points.sin() - points / 3 * torch.tensor(3.0).sin()
    print((net(points) - truth).abs().max().item())
"""

PENALTY = """
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(32, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2))
    critic.append(nn.Linear(128, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    penalties = []
    for step in range(100):
        real, fake, mix = torch.randn(64, 32) + 1, torch.randn(64, 32) * 0.5, torch.rand(64, 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalties.append((slope.norm(dim=1) - 1).square().mean())
        optimizer.zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * penalties[-1]).backward()
        optimizer.step()
    print(sum(penalty.item() for penalty in penalties[-20:]) / 20)
"""

META = """
    from torch.func import functional_call

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    grads = {}
    for second in (True, False):
        x = torch.linspace(-3, 3, 64)[:, None]
        inner = (functional_call(net, parameters, (x,)) - x.sin()).square().mean()
        steps = torch.autograd.grad(inner, list(parameters.values()), create_graph=second)
        stepped = {name: p - 0.5 * step for (name, p), step in zip(parameters.items(), steps)}
        outer = (functional_call(net, stepped, (x,)) - (x + 1).sin()).square().mean()
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()
        grads[second] = torch.cat([p.grad.flatten() for p in net.parameters()])
    print(((grads[True] - grads[False]) @ grads[False] / grads[False].square().sum()).item())
"""


@pytest.mark.parametrize(
    ("script", "tolerance"),
    [
        pytest.param(EQUATION, 0.1, id="equation", marks=pytest.mark.slow),
        pytest.param(PENALTY, 0.02, id="penalty"),
        pytest.param(META, 0.05, id="meta", marks=pytest.mark.slow),
    ],
)
@pytest.mark.ci
def test_scripts_that_differentiate_twice_train_as_without(tmp_path: Path, script: str, tolerance: float) -> None:
    code, out, err = laconic_run(tmp_path, script)
    assert code == 0, err
    exact = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=patient(120)
    )
    expected = exact.stdout
    assert "less)" in err
    assert abs(float(out) - float(expected)) < tolerance, (out, expected)
