"""generation_config.json: each field is honoured as by transformers' generate, changes no token, or is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from laconic.errors import ConfigError, LaconicError, ModelError
from laconic.infer import Engine, generation_config
from laconic.infer.generation_config import (
    DEFAULTS,
    NO_MEANING,
    PROCESSORS,
    REFUSED,
    WARPERS,
    AnswerDefaults,
    check_generation_config,
    read_generation_config,
)
from laconic.infer.logits_rules import make_rules
from laconic.infer.sampling import Sampling, sample
from laconic.infer.transformers_seam import CacheLimits, Requests, load_attention_model, read_config
from tests.grid import few
from tests.infer.alone import Asked
from tests.infer.models import PROMPTS, VOCABULARY, make
from tests.patience import patient

EOS = 7
NEW_TOKENS = 10
NOTHING = {"pad_token_id": 0, "eos_token_id": EOS}
PROCESSED: dict[str, Callable[[random.Random], Any]] = {
    "bad_words_ids": lambda at: [[at.randrange(8, VOCABULARY)], [at.randrange(VOCABULARY), at.randrange(VOCABULARY)]],
    "begin_suppress_tokens": lambda at: at.sample(range(VOCABULARY), 60),
    "exponential_decay_length_penalty": lambda at: [at.randrange(4), at.uniform(1.1, 2)],
    "forced_bos_token_id": lambda at: 0,
    "forced_eos_token_id": lambda at: at.choice([0, EOS, [3, 5]]),
    "min_length": lambda at: at.randrange(12),
    "min_new_tokens": lambda at: at.randrange(1, 9),
    "no_repeat_ngram_size": lambda at: at.randrange(1, 3),
    "remove_invalid_values": lambda at: True,
    "renormalize_logits": lambda at: True,
    "repetition_penalty": lambda at: at.choice([0.7, 1.05, 1.3, 3.0]),
    "sequence_bias": lambda at: [[[at.randrange(VOCABULARY)], 4.0], [[at.randrange(VOCABULARY), 9], -5.0]],
    "suppress_tokens": lambda at: at.sample(range(8, VOCABULARY), 50),
    "watermarking_config": lambda at: {"greenlist_ratio": 0.5, "bias": 3.0, "seeding_scheme": "lefthash"},
}
WARPED: dict[str, Callable[[random.Random], Any]] = {
    "epsilon_cutoff": lambda at: at.uniform(0.001, 0.02),
    "eta_cutoff": lambda at: at.uniform(0.001, 0.05),
    "min_p": lambda at: at.uniform(0.01, 0.4),
    "top_h": lambda at: at.uniform(0.2, 0.9),
    "typical_p": lambda at: at.uniform(0.3, 0.95),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen2_moe", tmp_path_factory.mktemp("models"), eos_token_id=EOS)


@pytest.fixture(scope="module")
def original(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False).eval()


@pytest.fixture(scope="module")
def served(path: Path) -> Callable[[dict[str, Any], Sampling], list[list[int]]]:
    """The tokens of all prompts, by a model with a generation config."""
    model = load_attention_model(path, torch.float32, None)

    def serve(config: dict[str, Any], sampling: Sampling) -> list[list[int]]:
        model.generation_config = GenerationConfig(**NOTHING | config)
        asked = Asked(model)
        for number, prompt in enumerate(PROMPTS):
            asked.add(str(number), prompt, **vars(sampling))
        found = asked.ends(len(PROMPTS))
        asked.requests.stop()
        assert [each.error for each in found.values()] == [None] * len(PROMPTS)
        return [found[str(number)].tokens for number in range(len(PROMPTS))]

    return serve


@torch.no_grad()
def generate(model: Any, config: dict[str, Any], prompt: list[int], **options: Any) -> Any:
    ids = torch.tensor([prompt])
    model.generation_config = GenerationConfig(**NOTHING | config)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **options)


def generated(model: Any, config: dict[str, Any]) -> list[list[int]]:
    return [generate(model, config, prompt, do_sample=False)[0, len(prompt) :].tolist() for prompt in PROMPTS]


def some(fields: dict[str, Callable[[random.Random], Any]], seed: int) -> dict[str, Any]:
    at = random.Random(seed)
    return {name: fields[name](at) for name in sorted(at.sample(sorted(fields), at.randrange(1, 4)))}


def test_every_field_of_transformers_has_one_meaning() -> None:
    tables = [PROCESSORS, WARPERS, DEFAULTS, NO_MEANING, set(REFUSED)]
    for name in vars(GenerationConfig()):
        assert name.startswith("_") or sum(name in table for table in tables) == 1, name
    assert set(PROCESSED) == PROCESSORS
    assert set(WARPED) == WARPERS


@pytest.fixture(scope="module")
def without(original: Any) -> Callable[[bool], tuple[dict[str, Any], list[list[int]]]]:
    """A config without the rule under test, which ends soon if asked, and its tokens."""

    @cache
    def tokens(ends_soon: bool) -> tuple[dict[str, Any], list[list[int]]]:
        config: dict[str, Any] = {"sequence_bias": [[[EOS], 9.0]]} if ends_soon else {}
        return config, generated(original, config)

    return tokens


@pytest.mark.parametrize("name", few(sorted(PROCESSED), 2, pytest.mark.ci))
def test_each_rule_is_honoured(original: Any, served: Any, without: Any, name: str) -> None:
    others, plain = without(name.startswith("min_"))
    may_change_nothing = name in ("remove_invalid_values", "renormalize_logits")
    for seed in range(1 if may_change_nothing else 20):
        config = others | {name: PROCESSED[name](random.Random(seed))}
        expected = generated(original, config)
        if expected != plain:
            break
    assert expected != plain or may_change_nothing
    assert served(config, Sampling(max_new_tokens=NEW_TOKENS)) == expected


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.ci if n < 4 else pytest.mark.slow) for n in range(1, 60))]
)
def test_rules_together_give_the_tokens_of_generate(original: Any, served: Any, seed: int) -> None:
    config = some(PROCESSED, seed)
    assert served(config, Sampling(max_new_tokens=NEW_TOKENS)) == generated(original, config), config


@pytest.mark.ci
def test_a_requests_own_rules_go_before_the_models(original: Any, served: Any) -> None:
    config = {"repetition_penalty": 3.0, "suppress_tokens": [*range(40)], "sequence_bias": [[[50], 3.0]]}
    own = Sampling(max_new_tokens=NEW_TOKENS, rules={"repetition_penalty": 1.0, "suppress_tokens": None})
    assert served(config, own) == generated(original, {"sequence_bias": [[[50], 3.0]]}) != generated(original, config)
    added = Sampling(max_new_tokens=NEW_TOKENS, rules={"sequence_bias": [[[60], 4.0], [[50], -9.0]]})
    assert served(config, added) == generated(original, config | {"sequence_bias": [[[50], -6.0], [[60], 4.0]]})


@pytest.mark.parametrize("seed", range(12))
def test_draws_are_from_the_distribution_of_generate(original: Any, seed: int) -> None:
    """The scores that generate draws from, step by step, are those that a request's rules make of the same logits."""
    at = random.Random(seed)
    config = (some(WARPED, seed) if seed % 4 else {}) | some(PROCESSED, seed)
    config.pop("forced_eos_token_id", None)  # leaves one token
    config["repetition_penalty"] = 1.2
    cuts = {"temperature": at.uniform(0.5, 2), "top_k": at.choice([0, 20]), "top_p": at.choice([1.0, 0.8])}
    prompt = PROMPTS[seed % len(PROMPTS)]
    out = generate(
        *(original, config, prompt),
        **{"do_sample": True, "output_scores": True, "output_logits": True, "return_dict_in_generate": True} | cuts,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    sampling = Sampling(max_new_tokens=NEW_TOKENS, seed=seed, **cuts)
    rules = make_rules(original, GenerationConfig(**NOTHING | config), sampling, prompt, [EOS])
    assert rules is not None
    for position, (logits, expected, token) in enumerate(zip(out.logits, out.scores, tokens, strict=True)):
        scores = rules.scores(logits[0], position)
        if rules.sampling.temperature == rules.sampling.top_p == 1:  # nothing but the draw is left
            torch.testing.assert_close(scores.softmax(-1), expected[0].softmax(-1))
        drawn = {sample(logits[0], rules.sampling, 100 * n + position, scores).token for n in range(40)}
        assert drawn <= set(expected[0].isfinite().nonzero().flatten().tolist())
        rules.take(token, position)


@pytest.mark.parametrize("name", sorted(WARPED))
def test_the_least_temperatures_take_the_greatest(original: Any, name: str) -> None:
    """transformers' own division by them makes infinities of float32."""
    logits = torch.linspace(-9, 9, original.config.vocab_size).roll(40)
    for temperature in (1e-3, 1e-38, 5e-324):
        sampling = Sampling(temperature=temperature, rules={name: WARPED[name](random.Random(1))})
        rules = make_rules(original, GenerationConfig(**NOTHING), sampling, [5], [EOS])
        assert rules is not None
        found = sample(logits, rules.sampling, 0, rules.scores(logits, 0)).token
        assert found == int(logits.argmax()), temperature


def test_a_top_k_of_one_leaves_a_watermark_no_choice(original: Any) -> None:
    config = GenerationConfig(**NOTHING, watermarking_config=PROCESSED["watermarking_config"](random.Random(0)))
    logits = torch.linspace(-0.1, 0.1, VOCABULARY).roll(40)
    for prompt in PROMPTS:
        rules = make_rules(original, config, Sampling(temperature=1.0, top_k=1), prompt, [EOS])
        assert rules is not None
        assert sample(logits, rules.sampling, 0, rules.scores(logits, 0)).token == int(logits.argmax())


@pytest.mark.ci
def test_what_ends_a_request(original: Any, served: Any) -> None:
    ends = {"sequence_bias": [[[EOS], 9.0]]}
    expected = generated(original, ends)
    assert any(tokens[-1] == EOS and len(tokens) < NEW_TOKENS for tokens in expected)
    assert served({}, Sampling(max_new_tokens=NEW_TOKENS, rules=ends)) == expected
    further = served(ends, Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert further == generated(original, ends | {"eos_token_id": None})
    assert {len(tokens) for tokens in further} == {NEW_TOKENS}
    stop = further[0][-2]
    stopped = served(ends, Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=(stop,)))
    assert stopped == generated(original, ends | {"eos_token_id": stop})


def test_min_new_tokens_goes_before_min_length(original: Any, served: Any) -> None:
    config = {"sequence_bias": [[[EOS], 9.0]], "min_length": 45, "min_new_tokens": 3}
    assert served(config, Sampling(max_new_tokens=NEW_TOKENS)) == generated(original, config)


def test_penalties_count_the_tokens_of_the_answer(original: Any) -> None:
    sampling = Sampling(max_new_tokens=5, frequency_penalty=0.5, presence_penalty=0.25)
    rules = make_rules(original, GenerationConfig(), sampling, [1, 2, 2], [])
    assert rules is not None
    for position, token in enumerate((4, 2, 4)):
        rules.take(9, position)  # the same position again, as after a batch that failed
        rules.take(token, position)
    expected = torch.zeros(VOCABULARY)
    expected[4], expected[2] = -1.25, -0.75
    torch.testing.assert_close(rules.scores(torch.zeros(VOCABULARY), 3), expected)


def test_without_rules_there_is_nothing_to_run(original: Any) -> None:
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "bad_words_ids": []}
    for config, sampling in (
        (GenerationConfig(**NOTHING), Sampling()),
        (GenerationConfig(**NOTHING | neutral), Sampling(temperature=1.0)),
        (GenerationConfig(**NOTHING, do_sample=True, min_p=0.2), Sampling()),
    ):
        assert make_rules(original, config, sampling, [1], [EOS]) is None


def test_the_engine_honours_the_file(path: Path, original: Any) -> None:
    file = path / "generation_config.json"
    before = file.read_text()
    try:
        config = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "eos_token_id": EOS, "chat_format": "chatml"}
        file.write_text(json.dumps(config | {"do_sample": True, "temperature": 0.6, "max_new_tokens": 33}))
        with Engine(path, experts=0, threads=1) as engine:
            assert engine.generate(PROMPTS, NEW_TOKENS) == generated(original, config)
            assert engine.answer_defaults == AnswerDefaults(temperature=0.6, max_new_tokens=33)
            rules = {"repetition_penalty": 1.0, "no_repeat_ngram_size": None, "sequence_bias": {(50,): 3.0}}
            deaf: Any = SimpleNamespace(on_token=lambda token: None, on_end=lambda error: None)
            own = engine.stream(PROMPTS[0], Sampling(max_new_tokens=NEW_TOKENS, rules=rules), deaf)
            biased = {"sequence_bias": [[[50], 3.0]]}
            assert own.result(patient(20)) == generated(original, biased)[0] != generated(original, config)[0]
            wrong = engine.stream(PROMPTS[0], Sampling(rules={"repetition_penalty": -1.0}), deaf)
            with pytest.raises(LaconicError, match=r"rules for logits are refused: .*strictly positive"):
                wrong.result(patient(20))
            assert any("chat_format" in note and "ignores" in note for note in engine.notes)
    finally:
        file.write_text(before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_beams": 4}, "copied/generation_config.json has num_beams = 4.*set it to 1 or None"),
        ({"do_sample": True, "temperature": -1.0}, "generation_config.json is wrong: temperature is -1.0, but it must"),
        ({"do_sample": True, "top_p": 0.0}, "generation_config.json is wrong: top_p is 0.0, but it must"),
        ({"do_sample": True, "top_k": -1}, "generation_config.json is wrong: top_k is -1, but it must"),
        ({"max_length": 2.5}, "generation_config.json is wrong: max_new_tokens is 2.5, but it must"),
        ("{", "generation_config.json.*cannot be read"),
        ({"do_sample": "false"}, "has do_sample = 'false', but it must be true or false"),
        ({"eos_token_id": "2"}, "has eos_token_id = '2', but it must be the id of a token"),
        ({"eos_token_id": [5, 2.0]}, "has eos_token_id = .*, but it must be the id of a token"),
        ({"eos_token_id": True}, "has eos_token_id = True, but it must be the id of a token"),
        ({"stop_strings": 3}, "has stop_strings = 3, but it must be a string"),
        ({"stop_strings": [""]}, "has stop_strings = .*, but it must be a string, or a list of them, none empty"),
    ],
)
def test_what_is_wrong_is_refused_before_a_process_starts(
    tmp_path: Path, path: Path, content: dict[str, Any] | str, message: str
) -> None:
    copied = Path(shutil.copytree(path, tmp_path / "copied"))
    text = content if isinstance(content, str) else json.dumps(content)
    (copied / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        Engine(copied, experts=0, threads=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, r"are torch\.int8, but they must be float32, bfloat16, float16"),
        ({"head_dim": 0}, r"transformers makes no .* model of the config\.json"),
    ],
)
def test_a_config_of_which_there_is_no_model_is_refused(
    tmp_path: Path, path: Path, fields: dict[str, Any], message: str
) -> None:
    copied = Path(shutil.copytree(path, tmp_path / "copied"))
    settings = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(settings | fields))
    with pytest.raises(ModelError, match=message):
        Engine(copied, experts=0, threads=1)


def test_an_end_that_the_model_never_makes_is_named(tmp_path: Path, path: Path) -> None:
    copied = Path(shutil.copytree(path, tmp_path / "copied"))
    (copied / "generation_config.json").write_text('{"eos_token_id": [5, 5000]}')
    with Engine(copied, experts=0, threads=1) as engine:
        assert any(note.startswith("eos_token_id names 5000, at which no answer ends") for note in engine.notes)


def test_rules_that_transformers_refuses_are_refused_at_load(path: Path) -> None:
    model = load_attention_model(path, torch.float32, None)
    model.generation_config = GenerationConfig(bad_words_ids=[[5000]], **NOTHING)
    with pytest.raises(ModelError, match=r"refuses the rules in the model's generation_config.json: .*5000"):
        Requests(model, CacheLimits(512, 64), lambda finished: None)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_served_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, [[1]] if name == "force_words_ids" else 5)
    with pytest.raises(ModelError, match=rf"folder/config.json has {name} = .*, which is not served; .* None"):
        check_generation_config(config, Path("folder"))
    for neutral in (*REFUSED[name], None):
        setattr(config, name, neutral)
        assert check_generation_config(config, Path("folder")) == ()


def test_a_field_that_a_later_transformers_brings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_config, "NO_MEANING", NO_MEANING - {"use_cache"})
    with pytest.raises(ModelError, match=r"use_cache = True, which transformers .* knows and laconic.infer does not"):
        check_generation_config(GenerationConfig(use_cache=True), Path("folder"))


def test_a_penalty_of_an_end_that_there_is_not_is_refused() -> None:
    with pytest.raises(ModelError, match="exponential_decay_length_penalty and no eos_token_id"):
        check_generation_config(GenerationConfig(exponential_decay_length_penalty=[1, 2.0]), Path("folder"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, AnswerDefaults()),
        ({"do_sample": False, "temperature": 0.7}, AnswerDefaults(temperature=0.0)),
        ({"do_sample": True, "top_k": 20, "top_p": 0.8}, AnswerDefaults(top_k=20, top_p=0.8)),
        ({"max_length": 4096, "stop_strings": "END"}, AnswerDefaults(max_length=4096, stop=("END",))),
    ],
)
def test_defaults_of_an_answer(tmp_path: Path, path: Path, fields: dict[str, Any], expected: AnswerDefaults) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert AnswerDefaults.of(read_generation_config(tmp_path, read_config(path))) == expected


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        (AnswerDefaults(), 90),
        (AnswerDefaults(max_new_tokens=30), 30),
        (AnswerDefaults(max_new_tokens=300, max_length=20), 90),
        (AnswerDefaults(max_length=40), 30),
        (AnswerDefaults(max_length=5), 1),
    ],
)
def test_the_longest_answer_is_the_models_or_all_that_fits(defaults: AnswerDefaults, expected: int) -> None:
    assert defaults.longest_answer(10, 100) == expected


def test_rules_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="rules holds num_beams, but rules for logits are bad_words_ids, "):
        Sampling(rules={"num_beams": 2})
