"""What shipped code must not do, whatever it is given: run bytes from outside, and tell secrets."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from laconic.errors import LaconicError
from laconic.infer import Engine
from laconic.infer.server import load_text_tokenizer
from laconic.moe.huggingface import from_pretrained
from laconic.train.config.schema import ModelConfig
from laconic.train.config.toml import save_config
from laconic.train.memory.directory import build_meta
from laconic.train.model import path_config
from tests.distributed.processes import ForkedCommand, environment
from tests.train.runs import tiny_config

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "laconic"

ALLOWED = {
    "formats/dcp.py": {"pickle.Unpickler", "pickle.UnpicklingError"},  # its find_class knows a dozen passive records
    "run/script.py": {"compile", "exec"},  # runs the user's own script, as python does
}
"""Files -> what they may do, and why."""

_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "marshal.loads",
    "marshal.load",
    "yaml.load",
}
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}

_LOADERS = {"from_pretrained", "from_config"}
_WITHOUT_CODE = {"GenerationConfig", "InferenceShape", "cls"}
"""Read JSON, whose `auto_map` they do not know; all others ask whether to run the code that it names."""


def findings(code: str) -> Iterator[str]:
    """Calls and names by which bytes from outside could become code."""
    tree = ast.parse(code)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [call.func for call in calls]
    by_name = [argument for call in calls if ast.unparse(call.func) == "getattr" for argument in call.args]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in _MODULES:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in _MODULES:
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr in _LOADERS and node not in called:
            yield f"{ast.unparse(node)} passed on"
        if isinstance(node, ast.Constant) and node.value in _LOADERS and node in by_name:
            yield f"{node.value} passed on"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in _CALLS:
            yield name
        if name == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if name.endswith(("np.load", "numpy.load")) and given.get("allow_pickle", "False") != "False":
            yield "numpy.load with pickles"
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else None
        loads = owner and owner not in _WITHOUT_CODE and name.removeprefix(f"{owner}.") in _LOADERS
        if loads and given.get("trust_remote_code") != "False":
            yield f"{name} without trust_remote_code=False"
        if given.get("shell", "False") != "False":
            yield f"{name} with a shell"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle; pickle.loads(x)", "pickle.loads"),
        ("from pickle import load", "pickle.load"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("np.load(path, allow_pickle=True)", "numpy.load with pickles"),
        ("subprocess.run(text, shell=True)", "subprocess.run with a shell"),
        ("os.system(text)", "os.system"),
        ("eval(text)", "eval"),
        ("AutoModel.from_pretrained(p)", "AutoModel.from_pretrained without trust_remote_code=False"),
        ("a.AutoModel.from_config(c, trust_remote_code=x)", "a.AutoModel.from_config without trust_remote_code=False"),
        ("f(AutoModel.from_pretrained)", "AutoModel.from_pretrained passed on"),
        ("getattr(kind, 'from_config')", "from_config passed on"),
        ("def f():\n    return exec(text)", "exec"),
        ("yaml.load(text)", "yaml.load"),
    ],
)
def test_the_gate_finds_what_it_is_for(code: str, found: str) -> None:
    assert list(findings(textwrap.dedent(code))) == [found]


def test_the_gate_lets_the_harmless_pass() -> None:
    assert (
        list(findings("A.from_config(c, trust_remote_code=False); cls.from_config(c); hasattr(a, 'from_config')")) == []
    )
    harmless = "model.eval(); torch.load(p, weights_only=True); np.load(p); subprocess.run([a], check=True)"
    assert list(findings(harmless)) == []


def test_bytes_from_outside_never_become_code() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 300
    done = {path.relative_to(SOURCE).as_posix(): set(findings(path.read_text())) for path in files}
    assert {name: found for name, found in done.items() if found} == ALLOWED


def test_no_program_of_ours_runs_the_code_of_a_models_folder() -> None:
    """Examples, benchmarks and the Python of pages, which people copy."""
    code = {
        path: path.read_text()
        for room in ("examples", "benchmarks", "netlab", "tools")
        for path in (ROOT / room).rglob("*.py")
    }
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        code |= {Path(f"{page}:{number}"): block for number, block in enumerate(blocks)}
    assert len(code) > 150
    done = {path: [each for each in findings(text) if "trust_remote_code" in each] for path, text in code.items()}
    assert {path: found for path, found in done.items() if found} == {}


AUTO_MAP = {
    "config.json": {
        "model_type": "not_known",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    },
    "tokenizer_config.json": {
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
        "tokenizer_class": "OwnTokenizer",
    },
}
LOADERS: dict[str, Callable[[Path], object]] = {
    "serving": lambda path: Engine(path, experts=0),
    "its tokenizer": load_text_tokenizer,
    "experts over ranks": from_pretrained,
    "memory": lambda path: build_meta(str(path)),
    "training": lambda path: path_config(ModelConfig(path=str(path))),
}


@pytest.mark.parametrize("load", LOADERS)
def test_code_in_a_models_folder_is_not_run_whatever_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    for name, content in AUTO_MAP.items():
        known = name == "config.json" and load == "its tokenizer"
        (tmp_path / name).write_text(json.dumps({"model_type": "llama"} if known else content))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda question="": "y")
    with pytest.raises((LaconicError, ValueError), match=r"trust_remote_code|custom code"):
        LOADERS[load](tmp_path)
    assert not (tmp_path / "ran").exists()


SECRETS = {
    "LACONIC_SECRET": "s3cret-of-the-run-0123456789",
    "LACONIC_API_KEY": "s3cret-of-the-server-0123456789",
    "HF_TOKEN": "s3cret-of-the-hub-0123456789",
    "WANDB_API_KEY": "s3cret-of-the-tracker-0123456789",
}


@pytest.mark.parametrize("refused", [pytest.param(False, marks=pytest.mark.slow), True])
def test_secrets_of_the_environment_are_neither_logged_nor_written(tmp_path: Path, refused: bool) -> None:
    """Of a run over two processes that trains, saves and reports, and of one that fails by name."""
    config = tiny_config(
        tmp_path, "run", {"nproc": 2, "checkpoint.every": 3, "tensorboard": True, "gradients.bits": 8, "steps": 3}
    )
    save_config(config, tmp_path / "config.toml")
    flags = ["--batch-size", "3"] if refused else []
    command = ["train", "--config", str(tmp_path / "config.toml"), *flags]
    ending = ForkedCommand(command, tmp_path / "out", environment(**SECRETS)).finish()
    assert ending.code == (2 if refused else 0), ending.err
    told = [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert not told
    assert refused or (tmp_path / "run" / "metrics.jsonl").exists()
