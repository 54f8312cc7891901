"""The command itself: dispatch, exit codes, messages."""

import os
import socket
import subprocess
import sys

import pytest

import laconic
from laconic.cli import main as cli
from laconic.errors import DataError
from tests.patience import patient


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"laconic {laconic.__version__}\n"


@pytest.mark.parametrize(
    ("argument", "message"),
    [("trian", "unknown command trian; did you mean train?"), ("xyz", "unknown command xyz; see laconic --help")],
)
def test_unknown_command_names_the_nearest(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([argument]) == 2
    assert capsys.readouterr().err == f"laconic: error: {message}\n"


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (DataError("no text"), 2, "laconic: error: no text\n"),
        (KeyboardInterrupt(), 130, "laconic: interrupted\n"),
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
    ],
)
def test_exceptions_become_exit_codes(
    raised: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: list[str]) -> int:
        raise raised

    monkeypatch.setattr("laconic.cli.doctor.run", fail)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == message


def test_help_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys; from laconic.cli.main import main; "
        "codes = [main(['--help']), main(['train', '--help']), main(['train', '--print-config'])]; "
        "assert codes == [0, 0, 0], codes; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr


def test_a_line_is_one_write_although_python_is_unbuffered() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # one datagram per write
    with ours, theirs:
        variables = os.environ | {"PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "laconic", "trian"]
        done = subprocess.run(command, env=variables, stderr=theirs, check=False)
        assert done.returncode == 2
        ours.setblocking(False)
        assert ours.recv(65536) == b"laconic: error: unknown command trian; did you mean train?\n"
        with pytest.raises(BlockingIOError):
            ours.recv(65536)
