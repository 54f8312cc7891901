"""Instructions: which tokens count, what is refused by line, and that rows and processes do not change the loss."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from laconic.errors import ConfigError, DataError
from laconic.train.config.schema import DataConfig
from laconic.train.config.toml import load_config
from laconic.train.data.instructions import Examples, load_examples
from laconic.train.data.tokenizer import BytesTokenizer, load_tokenizer
from laconic.train.distributed.parallel_state import make_parallel_state
from laconic.train.tasks.instruction_tuning import InstructionTuning
from tests.train.runs import ALONE, tiny_config
from tests.train.tuning import LINES, TEMPLATE, write_lines, write_tokenizer

USER = {"role": "user", "content": "Name a colour."}
ANSWER = {"role": "assistant", "content": "Blüe"}


def examples(tmp_path: Path, lines: list[Any], length: int = 200, template: str | None = TEMPLATE) -> Examples:
    write_tokenizer(tmp_path, template)
    data = write_lines(tmp_path / "data.jsonl", lines)
    return load_examples(DataConfig(paths=(str(data),), tokenizer=str(tmp_path), validation_fraction=0.0), length)


def answers(found: Examples, tmp_path: Path) -> list[str]:
    """The text of the tokens of answers, special ones included, of each example."""
    tokenizer = load_tokenizer(str(tmp_path))._tokenizer  # type: ignore[union-attr]
    parts = [slice(*pair) for pair in zip(found.offsets, found.offsets[1:], strict=False)]
    return [tokenizer.decode(found.tokens[p][found.answers[p]].tolist(), skip_special_tokens=False) for p in parts]


def test_tokens_of_answers_count_and_no_others(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER, {**ANSWER, "content": "Red"}]},
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": "", "completion": "free"},
    ]
    found = examples(tmp_path, lines)
    # The first token of the last one is predicted by nothing.
    assert answers(found, tmp_path) == ["Blüe<|end|>Red<|end|>", " 4<|end|>", "ree<|end|>"]
    assert found.num_answers.tolist() == [5 + 1 + 3 + 1, 2 + 1, 3 + 1]
    assert found.lengths.tolist()[1:] == [9, 4]


def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path: Path) -> None:
    """As in files for OpenAI's fine-tuning."""
    found = examples(tmp_path, [{"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]}])
    assert answers(found, tmp_path) == ["Blüe<|end|>"]


def test_tools_are_written_by_the_template_or_refused(tmp_path: Path) -> None:
    line = {"messages": [USER, ANSWER], "tools": [{"type": "function", "function": {"name": "paint"}}]}
    with pytest.raises(DataError, match=r"jsonl:1 has tools, for which the chat template has no place"):
        examples(tmp_path, [line])
    found = examples(
        tmp_path, [line], template="{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + TEMPLATE
    )
    assert answers(found, tmp_path) == ["Blüe<|end|>"]
    assert load_tokenizer(str(tmp_path)).decode(found.tokens).startswith("paint")


def test_arguments_of_calls_are_objects_for_the_template(tmp_path: Path) -> None:
    """OpenAI's files have them as JSON texts, which `tojson` would write with quotes around and within."""
    calls = "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|end|>"
    template = TEMPLATE.replace("{{ message['content'] }}<|end|>", "{{ message['content'] or '' }}" + calls)
    for arguments in ('{"a": 1}', {"a": 1}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        line = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
        assert answers(examples(tmp_path, [line], template=template), tmp_path) == ['{"a": 1}<|end|>']


def test_bytes_have_places_in_the_text() -> None:
    ((ids, starts),) = BytesTokenizer().encode_with_starts(["aüb"], special=True)
    assert (ids.tolist(), starts.tolist()) == ([97, 0xC3, 0xBC, 98], [0, 1, 1, 2])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, "no message of the role assistant"),
        ({"messages": "hello"}, "no list of"),
        ({"messages": [USER, {**ANSWER, "content": " "}]}, "empty answer, message 2"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, "message 1 without content"),
        ({"messages": [{"role": "user"}, ANSWER]}, "message 1 without content"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"message 2 of weight 0\.5, but it must be 0 or 1"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no message of the role assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER]},
            "message 1, of the role",
        ),
        (
            {"messages": [USER, ANSWER | {"tool_calls": [{"function": {"arguments": "a"}}]}]},
            "message 2 with tool_calls",
        ),
        ({"messages": [USER, ANSWER], "system": "Be brief."}, "has 'system', which is not made text of"),
        ({"prompt": "a", "completion": "b", "tools": [{}]}, "has 'tools', which is not made text of"),
        ({"prompt": "a", "completion": ""}, "empty completion"),
        ({"prompt": "a", "completion": 4}, "no string"),
        ({"prompt": "a", "completion": "b", "messages": []}, r"has the keys \['completion', 'messages', 'prompt'\]"),
        ({"text": "a"}, r"has the keys \['text'\]; an example is"),
        ([1], "is no object"),
    ],
)
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:2.* {message}"):
        examples(tmp_path, [{"prompt": "a", "completion": "b"}, line])


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "a"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.jsonl:3 is not valid JSON"):
        load_examples(DataConfig(paths=(str(path),)), 16)
    path.rename(tmp_path / "data.txt")
    with pytest.raises(DataError, match=r"data\.txt, but it must be a \.jsonl file"):
        load_examples(DataConfig(paths=(str(tmp_path / "data.txt"),)), 16)
    with pytest.raises(DataError, match=r"data\.paths is empty"):
        load_examples(DataConfig(), 16)


def test_templates_that_are_missing_or_rewrite_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.jsonl:1 has messages, but the tokenizer in .* has no chat template; put"
    ):
        examples(tmp_path, LINES, template=None)
    thinks = "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
    forgets = f"{{% for m in messages %}}{thinks}{{{{ m['content'] }}}}{{% endfor %}}"
    examples(tmp_path, [{"messages": [USER, ANSWER]}], template=forgets)
    with pytest.raises(DataError, match=r"data\.jsonl:1: the chat template writes message 2 otherwise"):
        examples(tmp_path, [{"messages": [USER, ANSWER, USER, ANSWER]}], template=forgets)
    knows_two = TEMPLATE.replace("<|{{", "{% if message.role in ('user', 'assistant') %}<|{{").replace(
        "<|end|>{% endfor", "<|end|>{% endif %}{% endfor"
    )
    examples(tmp_path, LINES, template=knows_two)
    with pytest.raises(DataError, match=r"data\.jsonl:1 has message 1, of the role system, whose content the chat"):
        examples(tmp_path, [{"messages": [{"role": "system", "content": "a"}, USER, ANSWER]}], template=knows_two)
    raises = "{{ raise_exception('only users may speak') }}"
    with pytest.raises(DataError, match=r"data\.jsonl:1: .* not take these messages: only users may speak"):
        examples(tmp_path, LINES, template=raises)
    data = write_lines(tmp_path / "chat.jsonl")
    with pytest.raises(DataError, match=r"chat\.jsonl:1 has messages, but the bytes tokenizer has no chat template"):
        load_examples(DataConfig(paths=(str(data),)), 16)


def test_what_is_cut_or_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"prompt": "abc", "completion": "defghi"}, {"prompt": "a" * 20, "completion": "b"}, LINES[0]]
    with caplog.at_level(logging.INFO):
        found = examples(tmp_path, lines, length=5)
    assert answers(found, tmp_path) == ["def"]
    assert "sequence_length is 5: 1 examples are longer and end there" in caplog.text
    assert f"2 examples are left out, as their answers begin beyond it: {tmp_path / 'data.jsonl'}:2" in caplog.text
    with pytest.raises(DataError, match=r"sequence_length is 5, but the answers of all 2 examples begin beyond it"):
        examples(tmp_path, lines[1:], length=5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pipeline.stages": 2}, r"pipeline\.stages is 2, but it must be 1 with task = instruction-tuning"),
        ({"moe.expert_parallel": 1}, r"moe\.expert_parallel is 1"),
        ({"plan": "p"}, r"plan is 'p'"),
        ({"data.text_key": "t"}, r"data\.text_key is 't'"),
        ({"images.size": 3}, r"images\.size is 3"),
    ],
)
def test_what_needs_samples_of_one_length_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"task": "instruction-tuning", **values})


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> InstructionTuning:
    folder = tmp_path_factory.mktemp("task")
    lines = [{"prompt": "p" * (1 + n % 5), "completion": "c" * (1 + n % 7)} for n in range(40)]
    data = write_lines(folder / "data.jsonl", lines)
    changes = {"task": "instruction-tuning", "data.paths": (str(data),), "batch_size": 8, "accumulation": 4}
    config = tiny_config(folder, "run", {**changes, "data.validation_fraction": 0.3})
    return InstructionTuning(config, ALONE, make_parallel_state(config, ALONE))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=257, num_key_value_heads=2, **sizes))


def summed_loss(task: InstructionTuning, model: LlamaForCausalLM, number: int) -> torch.Tensor:
    """Of one example alone, by hand."""
    found = task._examples
    part = slice(found.offsets[number], found.offsets[number + 1])
    ids = torch.from_numpy(found.tokens[part].astype(np.int64))
    logits = model(ids[None, :-1]).logits[0]
    each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    return each[torch.from_numpy(found.answers[part])[1:]].sum()


def test_the_loss_of_a_step_is_the_mean_over_its_answers(task: InstructionTuning, model: LlamaForCausalLM) -> None:
    numbers = task._chosen(range(8, 16))
    assert len(set(task._lengths[numbers])) > 2  # so rows are filled up
    wanted = sum(summed_loss(task, model, number) for number in numbers) / task._num_answers[numbers].sum()
    parts = [task.loss(model, task.training_batch(range(start, start + 2))) for start in range(8, 16, 2)]
    torch.testing.assert_close(sum(parts) / 4, wanted, rtol=1e-5, atol=1e-6)
    assert task.num_units(range(8, 16)) == int(task._lengths[numbers].sum())


def test_the_validation_loss_is_the_mean_over_its_answers(task: InstructionTuning, model: LlamaForCausalLM) -> None:
    count = task.num_validation
    chosen = [index * count // 6 for index in range(6)]  # eval_sequences
    numbers = task._examples.validation[chosen]
    wanted = sum(summed_loss(task, model, number) for number in numbers) / task._num_answers[numbers].sum()
    parts = [4 * task.evaluate(model, task.validation_batch(chosen[:4]))[0]]
    parts += [2 * task.evaluate(model, task.validation_batch(chosen[4:]))[0]]
    torch.testing.assert_close(sum(parts) / 6, wanted, rtol=1e-5, atol=1e-6)
