"""DeepSpeed's own release on two processes: what composes trains as DeepSpeed alone, what does not is refused."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, set_seed

import laconic
from laconic.collectives import Lossless, ProcessGroupOptions, audit
from laconic.errors import ConfigError, ModelError
from laconic.integrations import LaconicConfig
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.integrations.test_huggingface import arguments, llama, rows

pytestmark = [
    pytest.mark.slow,  # importing DeepSpeed takes as long as the tests
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.skipif(" " in torch.__file__, reason="DeepSpeed links nothing below a path with a space"),
]

ADAMW8BIT = LaconicConfig(activations=16, optimizer="adamw8bit")
# Held under 2**20 elements a process, ZeRO's flat vectors keep fp32 moments; these have more.
LARGE = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512}


def join(rank: int, port: int, backend: str = "gloo", **options: Any) -> Any:
    """DeepSpeed on this rank of two, its chatter left out."""
    os.environ.update(rank_environment(rank, 2, port, DS_ACCELERATOR="cpu", PYTHONWARNINGS="ignore"))
    dist.init_process_group(backend, **options)
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        # Without the threshold ZeRO 3 would keep every parameter of a tiny model whole.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
    } | changes


def model_of(**shape: int) -> nn.Module:
    set_seed(0)
    usual = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **(usual | shape)))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(0, 256, (4, 32), generator=generator) for _ in range(count)]


class Saved:
    """Bytes of different storages that autograd holds, but those that the model's parameters have in the end anyway."""

    def __init__(self, model: nn.Module) -> None:
        self.sizes: dict[int, int] = {}
        self._model = model

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._see, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exit: Any) -> None:
        self._hooks.__exit__(*exit)
        for parameter in self._model.parameters():  # none in ZeRO 3, which has let go of what it gathered
            self.sizes.pop(parameter.untyped_storage().data_ptr(), None)

    def _see(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def trained(engine: Any, ids: list[Tensor]) -> tuple[list[float], int]:
    """Losses, and the bytes that the last forward kept for backward."""
    losses, saved = [], Saved(engine.module)
    for batch in ids:
        with (saved := Saved(engine.module)):
            loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, saved.nbytes


def alone(deepspeed: Any, stage: int, ids: list[Tensor], **shape: int) -> tuple[list[float], int]:
    return trained(deepspeed.initialize(model=model_of(**shape), config=settings(stage))[0], ids)


def test_activations_and_adamw8bit_train_as_deepspeed_alone_under_every_stage_of_zero() -> None:
    run_ranks(_compose, (free_port(),), 2)


def _compose(rank: int, port: int) -> None:
    deepspeed = join(rank, port)
    from laconic.integrations.deepspeed import initialize

    ids, kept = batches(8), {}
    for stage in (0, 1, 2, 3):
        expected, before = alone(deepspeed, stage, ids)
        config = settings(stage)
        engine, optimizer, _, _ = initialize(model_of(), config, LaconicConfig(optimizer="adamw8bit"))
        assert config == settings(stage)
        assert isinstance(getattr(optimizer, "optimizer", optimizer), laconic.AdamW8bit)
        losses, kept[stage] = trained(engine, ids)
        assert losses == pytest.approx(expected, rel=1e-3)
        assert losses != expected
        assert before > 4 * kept[stage], (stage, before, kept[stage])
    # The layers are leaf modules: what ZeRO 3 keeps is what the others keep, but for what its hooks hold.
    assert kept[3] < 1.1 * kept[2]


def test_flat_vectors_of_a_million_elements_have_moments_in_8_bits_and_resume_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(_resume, (free_port(), tmp_path), 2)


def _resume(rank: int, port: int, folder: Path) -> None:
    deepspeed = join(rank, port)
    from laconic.integrations.deepspeed import initialize

    ids = batches(8)
    for stage in (1, 2, 3):
        expected, _ = alone(deepspeed, stage, ids, **LARGE)
        engine, optimizer, _, _ = initialize(model_of(**LARGE), settings(stage), ADAMW8BIT)
        first, _ = trained(engine, ids[:4])
        moments = optimizer.optimizer.state
        assert any("exp_avg_codes" in state for state in moments.values())
        elements = sum(parameter.numel() for parameter in moments)
        assert optimizer.optimizer.state_nbytes < 2.2 * elements, (stage, elements)  # 8 bytes in fp32
        engine.save_checkpoint(str(folder / f"{stage}"))
        losses = first + trained(engine, ids[4:])[0]
        assert losses == pytest.approx(expected, rel=2e-3)
        again, _, _, _ = initialize(model_of(**LARGE), settings(stage), ADAMW8BIT)
        assert again.load_checkpoint(str(folder / f"{stage}"))[0] is not None
        assert trained(again, ids[4:])[0] == losses[4:]
        del engine, again, optimizer, moments
        gc.collect()


def test_a_process_group_of_laconic_has_the_losses_of_gloo_in_fewer_bytes(tmp_path: Path) -> None:
    port = free_port()
    run_ranks(_over_gloo, (port, tmp_path), 2)
    run_ranks(_over_laconic, (free_port(), tmp_path), 2)


def _over_gloo(rank: int, port: int, folder: Path) -> None:
    deepspeed = join(rank, port)
    found = {stage: alone(deepspeed, stage, batches(6))[0] for stage in (1, 2, 3)}
    torch.save(found, folder / f"{rank}.pt")


def _over_laconic(rank: int, port: int, folder: Path) -> None:
    deepspeed = join(rank, port, "laconic", pg_options=ProcessGroupOptions(codec=Lossless(), min_nbytes=1024))
    deepspeed.init_distributed()
    expected = torch.load(folder / f"{rank}.pt")
    for stage in (1, 2, 3):
        before = audit.snapshot()
        assert alone(deepspeed, stage, batches(6))[0] == expected[stage]
        sent = audit.snapshot() - before
        coded = [entry for entry in sent.entries if entry.codec != "raw"]
        assert sum(entry.sent_nbytes for entry in coded) < 0.9 * sum(entry.raw_nbytes for entry in coded)


def test_models_made_in_parts_are_converted_and_what_does_nothing_is_refused(tmp_path: Path) -> None:
    run_ranks(_refuse, (free_port(), tmp_path), 2)


def _refuse(rank: int, port: int, folder: Path) -> None:
    deepspeed = join(rank, port)
    from laconic.integrations.deepspeed import attach, initialize

    ids = batches(6)
    with deepspeed.zero.Init(config_dict_or_path=settings(3)):
        parts = model_of()
    with pytest.raises(ModelError, match="is partitioned by DeepSpeed's ZeRO 3"):
        laconic.compress_activations(parts)
    engine = initialize(parts, settings(3))[0]
    assert all(parameter.numel() == 0 for parameter in engine.module.parameters())
    with deepspeed.zero.Init(config_dict_or_path=settings(3)):
        parts = model_of()
    expected, before = trained(deepspeed.initialize(model=parts, config=settings(3))[0], ids)
    losses, after = trained(engine, ids)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert after < before / 4

    refused = "is a parameter of a DeepSpeed engine, which holds and reduces gradients"
    for stage in (0, 1, 2, 3):
        taken = model_of()
        kept = laconic.compress_gradients(taken, dist.group.WORLD)
        engine = deepspeed.initialize(model=taken, config=settings(stage))[0]
        loss = engine(input_ids=ids[0], labels=ids[0]).loss
        with pytest.raises(ModelError, match=refused):
            engine.backward(loss)
        kept.remove()
        engine = deepspeed.initialize(model=model_of(), config=settings(stage))[0]
        for model in (engine, engine.module):
            with pytest.raises(ModelError, match=refused):
                laconic.compress_gradients(model, dist.group.WORLD)
        if stage == 0:
            continue
        for model in (engine, engine.module):
            with pytest.raises(ConfigError, match="an engine of the model already"):
                attach(model, settings(stage))
    with pytest.raises(ConfigError, match=r"gradients is 8, but DeepSpeed holds.*init_process_group\('laconic'\)"):
        initialize(model_of(), settings(1), LaconicConfig(gradients=8))
    held = model_of()
    kept = laconic.compress_gradients(held)
    with pytest.raises(ConfigError, match="the model's gradients are in codes, but DeepSpeed holds"):
        initialize(held, settings(1))
    kept.remove()

    for section, words in (
        ({"type": "Lamb", "params": {}}, "is Lamb"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "is Adam with adam_w_mode false"),
        ({"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}}, "has amsgrad"),
    ):
        with pytest.raises(ConfigError, match=f"the optimizer of DeepSpeed's configuration {words}"):
            initialize(model_of(), settings(1, optimizer=section), ADAMW8BIT)
    without = settings(1)
    del without["optimizer"]
    with pytest.raises(ConfigError, match="has no optimizer section"):
        initialize(model_of(), without, ADAMW8BIT)
    model = model_of()
    with pytest.raises(ConfigError, match="initialize was given an optimizer"):
        initialize(model, settings(1), ADAMW8BIT, torch.optim.SGD(model.parameters()))
    (folder / f"{rank}.json").write_text("[]")
    with pytest.raises(ConfigError, match="must have an object"):
        attach(model_of(), folder / f"{rank}.json")
    with pytest.raises(ConfigError, match="must be a JSON file"):
        attach(model_of(), folder / "missing.json")
    with pytest.raises(ConfigError, match="config is a int"):
        attach(model_of(), 3)


def test_a_trainer_with_a_configuration_of_deepspeed(tmp_path: Path) -> None:
    for stage in (2, 3):
        run_ranks(_trainer, (free_port(), stage, tmp_path / f"{stage}"), 2)


def _trainer(rank: int, port: int, stage: int, folder: Path) -> None:
    join(rank, port)
    from laconic.integrations.huggingface import LaconicTrainer

    config = {name: "auto" for name in settings(stage) if name != "optimizer"}
    config["zero_optimization"] = settings(stage)["zero_optimization"]

    def run(own: LaconicConfig | None, resume: str | None = None, **changes: Any) -> Trainer:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state()
        GradientState._reset_state()
        plain = arguments(folder, deepspeed=dict(config), **changes)
        kind, given = (Trainer, {}) if own is None else (LaconicTrainer, {"laconic": own})
        trainer = kind(llama(), plain, train_dataset=rows(), **given)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(resume_from_checkpoint=resume)
        return trainer

    def of(trainer: Trainer, name: str) -> list[float]:
        return [float(entry[name]) for entry in trainer.state.log_history if "loss" in entry]

    host = run(None)
    ours = run(LaconicConfig(optimizer="adamw8bit"), save_strategy="steps", save_steps=2)
    assert of(ours, "loss") == pytest.approx(of(host, "loss"), rel=1e-3)
    assert of(ours, "grad_norm") == pytest.approx(of(host, "grad_norm"), rel=0.02)
    assert min(of(ours, "laconic/activation_factor")) > 3
    again = run(LaconicConfig(optimizer="adamw8bit"), str(folder / "checkpoint-2"))
    assert of(again, "loss") == of(ours, "loss")
    with pytest.raises(ConfigError, match="gradients is 8, but DeepSpeed holds and reduces"):
        run(LaconicConfig(gradients=8))
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    with pytest.raises(ConfigError, match="configuration has an optimizer section; leave it out"):
        run(LaconicConfig(optimizer="adamw8bit"))
