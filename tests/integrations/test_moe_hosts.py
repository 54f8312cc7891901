"""Experts over processes in other packages' loops: final weights are those of one process, or the host is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.moe_hosts import BY_VALUE, CASES, FAMILIES, HOSTS, Cell, cases_of, measure

pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("lightning.pytorch")

COVERING: list[Cell] = [
    ("Trainer", "qwen3_moe", "plain"),
    ("Trainer", "gpt_oss", "lora"),
    ("LaconicTrainer", "deepseek_v3", "resume"),
    ("LaconicTrainer", "gpt_oss", "clipping"),
    ("TRL SFT", "mixtral", "lora first"),
    ("TRL DPO", "gpt_oss", "evaluation"),
    ("Accelerate", "qwen3_moe", "resume"),
    ("Accelerate", "mixtral", "clipping"),
    ("Lightning", "mixtral", "resume"),
    ("Lightning", "deepseek_v3", "clipping"),
    ("DDP", "qwen3_moe", "to"),
    ("FSDP2", "deepseek_v3", "accumulation"),
    ("FSDP2", "gpt_oss", "lora"),
]
"""Every host, family and case."""


def assert_like_one_process(cells: list[Cell], folder: Path) -> None:
    for (host, family, case), number in zip(cells, measure(cells, folder), strict=True):
        if host == "Trainer" and "lora" not in case:
            assert isinstance(number, str)
            assert "take LaconicTrainer" in number
            assert len(number) < 400
        else:
            assert isinstance(number, float), number
            assert number < 1e-9, (host, family, case)


@pytest.mark.ci
def test_hosts_train_experts_over_processes_as_one_process_does(tmp_path: Path) -> None:
    for number, axis in enumerate((HOSTS, FAMILIES, CASES)):
        assert {cell[number] for cell in COVERING} == {*axis} - {"torchtitan"}
    by_value = [(host, "qwen3_moe", BY_VALUE) for host in ("Accelerate", "Lightning")]
    assert_like_one_process([*COVERING, *by_value], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("host", HOSTS)
def test_the_page_is_what_is_measured(host: str, family: str, tmp_path: Path) -> None:
    assert_like_one_process([(host, family, case) for case in cases_of(host)], tmp_path)
