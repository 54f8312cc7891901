"""How many of transformers' causal language models are served: what docs/inference.md says of them."""

from __future__ import annotations

import dataclasses
import queue
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.family_models import Family, NotBuiltError, families, model_of
from laconic.errors import ModelError
from laconic.infer.sampling import Sampling
from laconic.infer.transformers_seam import Finished
from tests.infer.alone import worker_of
from tests.infer.models import generated
from tests.patience import patient

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"
PROMPTS = [[5, 9, 2], [17], list(range(6, 30)), [3, 3, 3, 8, 1, 90]]


@pytest.mark.slow
def test_as_many_families_are_served_as_the_page_says(tmp_path: Path) -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    version = transformers.__version__.rpartition(".")[0]
    row = re.search(rf"\| {version} \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text)
    if row is None:
        pytest.skip(f"the page has no row of transformers {version}")
    causal = [family for family in families() if family.kind == "decoder"]
    causal = [family for family in causal if family.name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    outcomes = [_outcome(family, tmp_path / family.name) for family in causal]
    found = [len(causal), len(causal) - outcomes.count("not built"), *map(outcomes.count, ("served", "refused"))]
    assert found == list(map(int, row.groups()))
    assert sum(found[2:]) == found[1]


def _outcome(family: Family, path: Path) -> str:
    """Whether a family can be built and is refused or served, then with the tokens of `generate`."""
    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.name]
    try:
        model: Any = model_of(dataclasses.replace(family, class_names=(names,) if isinstance(names, str) else names))
    except NotBuiltError:
        return "not built"
    for config in (model.config, model.config.get_text_config()):
        config.eos_token_id = None
    model.config.is_decoder = True  # of encoders that can be one
    model.generation_config = transformers.GenerationConfig()
    model.eval().save_pretrained(path)
    ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()
    try:
        worker = worker_of(path, on_finished=ended.put)
    except ModelError:
        return "refused"
    try:
        for number, prompt in enumerate(PROMPTS):
            worker.add(str(number), prompt, Sampling(max_new_tokens=10))
        answers = {each.name: each for each in (ended.get(timeout=patient(60)) for _ in PROMPTS)}
    finally:
        worker.close()
    tokens = [answers[str(number)].tokens for number in range(len(PROMPTS))]
    assert tokens == generated(path, PROMPTS, 10), f"{family.name}: {answers}"
    return "served"
