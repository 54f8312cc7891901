"""What hosts log of activations is what a tracker counts in the very step that they train."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, set_seed

from laconic.activations.host.tracker import SavedTensorTracker
from laconic.integrations.config import LaconicConfig, compress, report_of
from laconic.integrations.figures import logged, measure_first_call
from laconic.integrations.huggingface import LaconicCallback, LaconicTrainer
from tests.grid import grid, slow_but

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTH = 24


def bert(head: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"BertFor{head}")(
        transformers.BertConfig(vocab_size=64, max_position_embeddings=LENGTH, **SHAPE, **config)
    )


def llama(head: str = "CausalLM") -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"LlamaFor{head}")(
        transformers.LlamaConfig(vocab_size=64, pad_token_id=0, **SHAPE)
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, **SHAPE))


class Sentences(nn.Sequential):
    """As of sentence-transformers: takes features as one dict, and returns them with an embedding."""

    def __init__(self) -> None:
        inner = transformers.BertModel(transformers.BertConfig(vocab_size=64, **SHAPE), add_pooling_layer=False)
        super().__init__(inner)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self[0](input_ids=features["input_ids"]).last_hidden_state
        return {**features, "sentence_embedding": hidden.mean(1)}

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self[0].gradient_checkpointing_enable(**kwargs)

    @property
    def config(self) -> Any:
        return self[0].config


class SentencesTrainer(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
        pairs = [model({"input_ids": inputs[name]})["sentence_embedding"] for name in ("input_ids", "labels")]
        return (pairs[0] @ pairs[1].T).square().mean()


def ids(*shape: int) -> Tensor:
    return torch.randint(1, 64, (*shape, LENGTH))


Row = Callable[[], dict[str, Any]]
HEADS: dict[str, tuple[Callable[[], nn.Module], Row]] = {
    "causal": (llama(), lambda: {"input_ids": (x := ids()), "labels": x}),
    "tokens": (bert("TokenClassification"), lambda: {"input_ids": ids(), "labels": torch.zeros(LENGTH).long()}),
    "choice": (bert("MultipleChoice"), lambda: {"input_ids": ids(3), "labels": 1}),
    "answer": (bert("QuestionAnswering"), lambda: {"input_ids": ids(), "start_positions": 1, "end_positions": 2}),
    "answer-llama": (
        llama("QuestionAnswering"),
        lambda: {"input_ids": ids(), "start_positions": 1, "end_positions": 2},
    ),
    "labels": (
        bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        lambda: {"input_ids": ids(), "labels": torch.ones(3)},
    ),
    "number": (bert("SequenceClassification", num_labels=1), lambda: {"input_ids": ids(), "labels": 0.5}),
    "masked": (bert("MaskedLM"), lambda: {"input_ids": (x := ids()), "labels": x}),
    "images": (vit, lambda: {"pixel_values": torch.randn(3, 16, 16), "labels": 1}),
    "sentences": (Sentences, lambda: {"input_ids": ids(), "labels": ids()}),
}


def trained(
    folder: Path, head: str, host: Any, callbacks: list[Any], own: dict[str, Any], **changes: Any
) -> tuple[Any, int]:
    """A trainer that has trained, and what its model kept in the last step, its calls alone."""
    make, row = HEADS[head]
    set_seed(0)
    model, kept = make().eval(), []

    class Counting(host):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step < 2:
                return super().compute_loss(*args, **kwargs)
            with SavedTensorTracker(self.model) as tracker:
                loss = super().compute_loss(*args, **kwargs)
            kept.append(tracker.nbytes)
            return loss

    arguments = TrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, save_strategy="no", report_to=[], max_steps=3, logging_steps=1,
        per_device_train_batch_size=4, remove_unused_columns=False, **changes,
    )  # fmt: skip
    data = [row() for _ in range(12)]
    trainer = Counting(model, arguments, train_dataset=data, callbacks=callbacks, **own)
    trainer.train()
    return trainer, kept[-1]


PLAIN, CHECKPOINTED = pytest.param({}, id="plain"), pytest.param({"gradient_checkpointing": True}, id="checkpointed")
QUICK = ("causal", "choice", "answer-llama", "number")
"""A head of every shape of batch: a token's labels, three texts a row, labels of another name, no whole number."""


@pytest.mark.parametrize(
    ("head", "changes"),
    grid(
        slow_but([head for head in HEADS if head != "sentences"], *QUICK, "images"), [PLAIN, CHECKPOINTED], strength=1
    ),
)
def test_figures_are_those_of_the_step_that_trains(head: str, changes: dict[str, Any], tmp_path: Path) -> None:
    _, exact = trained(tmp_path, head, Trainer, [], {}, **changes)
    trainer, kept = trained(tmp_path, head, LaconicTrainer, [], {"laconic": LaconicConfig()}, **changes)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3
    assert {entry["laconic/activation_factor"] for entry in logs} == {exact / kept}
    per_token = {entry.get("laconic/activation_nbytes_per_token") for entry in logs}
    assert per_token == {None if head == "images" else kept / (4 * LENGTH * (3 if head == "choice" else 1))}
    report = trainer.laconic_report
    assert (report.before.nbytes, report.after.nbytes) == (exact, kept)
    assert sum(row.after_nbytes_per_token for row in report.rows) == pytest.approx(report.after_nbytes_per_token)
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("changes", [PLAIN, pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow)])
def test_figures_of_a_callback_and_in_bf16(changes: dict[str, Any], tmp_path: Path) -> None:
    callback = LaconicCallback()
    _, exact = trained(tmp_path, "tokens", Trainer, [], {}, bf16=True, **changes)
    _, kept = trained(tmp_path, "tokens", Trainer, [callback], {}, bf16=True, **changes)
    assert callback.report is not None
    assert callback.report.before is not None
    assert callback.report.after is not None
    assert (callback.report.before.nbytes, callback.report.after.nbytes) == (exact, kept)
    assert logged(callback.report)["laconic/activation_factor"] == exact / kept


def test_sentence_embeddings_have_a_figure(tmp_path: Path) -> None:
    trainer, kept = trained(tmp_path, "sentences", type("Mine", (LaconicTrainer, SentencesTrainer), {}), [], {})
    report = trainer.laconic_report
    assert report.after.nbytes < kept < 2.2 * report.after.nbytes  # of one of the two sentences; and the trainer's loss
    assert trainer.state.log_history[0]["laconic/activation_factor"] > 3


@pytest.mark.parametrize(
    ("head", "checkpointed"),
    grid(slow_but([head for head in HEADS if head not in ("images", "sentences")], *QUICK), [False, True], strength=1),
)
def test_a_figure_before_the_first_step_is_of_training_mode(head: str, checkpointed: bool) -> None:
    model: Any = HEADS[head][0]().eval()
    if checkpointed:
        model.gradient_checkpointing_enable()
    report = compress(model, LaconicConfig())
    assert report is not None
    assert not model.training
    model.train()
    row = HEADS[head][1]()
    batch = {name: torch.as_tensor(value).unsqueeze(0) for name, value in row.items()}
    found: list[Any] = []
    measure_first_call(model, lambda before, after: found.append((before, after)))
    model(**batch)
    [(before, after)] = found
    assert report.before_nbytes_per_token == pytest.approx(before.nbytes / before.tokens, rel=0.25)
    assert report.after_nbytes_per_token == pytest.approx(after.nbytes / after.tokens, rel=0.25)


def test_a_call_of_frozen_parameters_has_no_figure() -> None:
    model: Any = HEADS["causal"][0]().train()
    compress(model, LaconicConfig())
    batch = {"input_ids": ids(4), "labels": ids(4)}
    found: list[Any] = []
    measure_first_call(model, lambda before, after: found.append((before, after)))
    model.requires_grad_(False)
    model(**batch)
    assert not found
    model.requires_grad_(True)
    model(**batch)
    [(before, after)] = found
    assert 0 < after.nbytes < before.nbytes


def test_short_memory_measures_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.activations.whole_model import suspended

    model: Any = HEADS["causal"][0]()
    model.train()
    compress(model, LaconicConfig())
    batch = {"input_ids": ids(16), "labels": ids(16)}
    monkeypatch.setattr(suspended, "_free_nbytes", lambda device: 5 * 2 * 10_000 * LENGTH)
    model(**batch)
    report = report_of(model)
    assert report is not None
    assert report.before is not None
    assert report.before.tokens in [rows * LENGTH for rows in range(3, 16)]
    assert report.before.nbytes <= 5 * 10_000 * LENGTH


@pytest.mark.ci
def test_copies_do_not_measure_and_nothing_changes_by_measuring() -> None:
    models: list[Any] = []
    for is_converted in (False, True):
        set_seed(0)
        models.append(HEADS["tokens"][0]().train())
        if is_converted:
            compress(models[-1], LaconicConfig())
    plain, model = models
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    batch = {"input_ids": ids(4), "labels": torch.zeros(4, LENGTH).long()}
    first = report_of(model)
    for found in (plain, *copies, model):
        set_seed(1)
        losses = [found(**batch).loss for _ in range(2)]
        models.append(torch.stack(losses))
        assert (report_of(model) is first) == (found is not model)
    assert all(torch.equal(models[2], other) for other in models[3:])
