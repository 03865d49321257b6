"""The `Trainer` of Transformers with an enabled model: the same losses, weights and files.

Nothing is split where results are compared bit for bit: the gradient of a split weight is rounded
after each piece, and with measured costs a step may or may not be split.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.cpp_compiler import needs_compiler
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import remat
from remat.blockwise.blocks_plan import BlocksPlan
from remat.frontend.memory.meter import allocated_peak

pytest.importorskip("accelerate")

from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from remat.integrations.transformers import RematCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

STEPS, EPOCH = 20, 10
"""The steps of the run, and of its first half, which is saved."""

ROWS = 4
NEAR = remat.Auto(gap=0.05)
"""A strategy with a larger gap, which takes less time."""
_SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=128, n_positions=64)
    )


def bert() -> PreTrainedModel:
    return BertForMaskedLM(BertConfig(**_SIZE, intermediate_size=256, vocab_size=128))


def vit() -> PreTrainedModel:
    config = ViTConfig(**_SIZE, intermediate_size=256, image_size=32, patch_size=8, num_labels=10)
    return ViTForImageClassification(config)


def llama() -> PreTrainedModel:
    config = LlamaConfig(**_SIZE, intermediate_size=128, vocab_size=128, use_cache=False)
    return LlamaForCausalLM(config)


def mixtral() -> PreTrainedModel:
    """Return a Mixtral with its default experts, which no capture can trace."""
    config = MixtralConfig(
        **_SIZE, intermediate_size=128, vocab_size=128, num_key_value_heads=2,
        num_local_experts=4, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def with_adapters(model: PreTrainedModel) -> Any:
    """Return the model with LoRA adapters as PEFT adds them: the model's own weights are frozen."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(model, adapters)


def examples(model: PreTrainedModel, count: int = EPOCH * ROWS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, ViTForImageClassification):
        pixels = torch.randn(count, 3, 32, 32, generator=generator)
        labels = torch.randint(0, 10, (count,), generator=generator)
        return [{"pixel_values": p, "labels": n} for p, n in zip(pixels, labels, strict=True)]
    ids = torch.randint(0, 128, (count, 48), generator=generator)
    return [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in ids]


class Logged(Trainer):
    """A trainer that records the loss and the gradients' norm of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[float, float]] = []

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self.seen.append((logs["loss"], logs["grad_norm"]))


def trainer(model: PreTrainedModel, folder: Path, steps: int = STEPS, **options: Any) -> Logged:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        logging_steps=1,
        save_steps=EPOCH,
        report_to=[],
        seed=7,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    dataset = examples(model)
    return Logged(model, arguments, train_dataset=dataset, eval_dataset=dataset[:8])


def fresh_model(make: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return make()


def assert_same_weights(one: PreTrainedModel, other: PreTrainedModel) -> None:
    actual, expected = one.state_dict(), other.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


def recomputes(plan: remat.Plan) -> bool:
    return len(plan.schedule) > len(plan.graph)


slow = pytest.mark.slow


@slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_a_callback_enables_the_model_for_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With memory for the optimizer, whose state exists after the first step."""
    eager = trainer(fresh_model(gpt2), tmp_path / "eager", 2, gradient_checkpointing=True)
    eager.train()
    model = fresh_model(gpt2)
    callback = RematCallback("4MB", strategy=NEAR, costs=remat.Roofline("cpu"), split="off")
    with_callback = trainer(model, tmp_path / "ours", 2, gradient_checkpointing=True)
    with_callback.add_callback(callback)
    plans: list[remat.Plan] = []
    with_callback.add_callback(_Looking(plans))
    with caplog.at_level("WARNING", "remat"):
        with_callback.train()
    assert with_callback.seen == eager.seen
    assert "gradient checkpointing is on in this GPT2LMHeadModel and has no effect" in caplog.text
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    left_bytes = 4_000_000 - plans[0].budget_bytes
    assert state_bytes <= left_bytes <= 1.1 * state_bytes  # blocks of the allocator, and counts
    with pytest.raises(remat.TraceError, match="not enabled"):
        remat.plans(model)
    enabled = remat.enable(fresh_model(gpt2), "70%", split="off")
    second_trainer = trainer(enabled, tmp_path / "again", 1)
    second_trainer.add_callback(RematCallback("1KB"))
    second_trainer.train()
    assert len(remat.plans(enabled)) == 1


class _OfLayers(Logged):
    """A trainer that calls the layers, and computes logits and loss itself."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        hidden = model.model(inputs["input_ids"]).last_hidden_state
        labels = inputs["labels"].flatten()
        return nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels)


def test_a_trainer_that_calls_a_part_of_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen, planned_parts = [], []
    for part in (None, "", "model"):
        model = fresh_model(llama)
        plain = trainer(model, tmp_path, 2, save_strategy="no")
        training = _OfLayers(model, plain.args, train_dataset=examples(model))
        if part is not None:
            callback = RematCallback(
                "80%", module=part, strategy=NEAR, costs=remat.Roofline("cpu"), split="off"
            )
            training.add_callback(callback)
            plans: list[remat.Plan] = []
            training.add_callback(_Looking(plans, part))
            caplog.clear()
            with caplog.at_level("WARNING", "remat"):
                training.train()
            is_warned = "did not call the forward of LlamaForCausalLM with gradients" in caplog.text
            planned_parts.append((len(plans), is_warned))
        else:
            training.train()
        seen.append(training.seen)
    assert planned_parts == [(0, True), (1, False)]
    assert seen[0] == seen[1] == seen[2]


class _Looking(TrainerCallback):
    def __init__(self, plans: list[Any], part: str = "") -> None:
        self.found = plans
        self.part = part

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.found[:] = remat.plans(model.get_submodule(self.part))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "budget", "scope"),
    [
        (gpt2, "70%", "model"),
        pytest.param(bert, "70%", "model", marks=slow),
        pytest.param(vit, "90%", "model", marks=slow),
        pytest.param(gpt2, "70%", "blocks", marks=slow),
        pytest.param(mixtral, "85%", "auto", marks=slow),
    ],
)
def test_a_run_is_that_of_the_eager_model(
    make: Any, budget: str, scope: str, tmp_path: Path
) -> None:
    eager = trainer(fresh_model(make), tmp_path / "eager")
    eager.train()
    model = remat.enable(fresh_model(make), budget, strategy=NEAR, scope=scope, split="off")
    with_remat = trainer(model, tmp_path / "ours")
    with_remat.train()
    assert with_remat.seen == eager.seen
    assert len(with_remat.seen) == STEPS
    assert with_remat.evaluate()["eval_loss"] == eager.evaluate()["eval_loss"]
    assert_same_weights(model, eager.model)
    (plan,) = remat.plans(model)
    assert plan.peak_bytes <= plan.budget_bytes
    assert recomputes(plan)
    assert type(plan) is (remat.Plan if scope == "model" else BlocksPlan)
    saved = type(model).from_pretrained(tmp_path / "ours" / f"checkpoint-{STEPS}")
    assert type(saved) is type(model)
    assert_same_weights(saved, model)
    # Resumed at the end of an epoch, the Trainer itself does not continue identically.
    resumed = [
        fresh_model(make),
        remat.enable(fresh_model(make), budget, strategy=NEAR, scope=scope, split="off"),
    ]
    resumed_trainers = [
        trainer(m, tmp_path / n) for m, n in zip(resumed, ("eager", "ours"), strict=True)
    ]
    for resumed_trainer, name in zip(resumed_trainers, ("eager", "ours"), strict=True):
        resumed_trainer.train(resume_from_checkpoint=str(tmp_path / name / f"checkpoint-{EPOCH}"))
    assert resumed_trainers[1].seen == resumed_trainers[0].seen
    assert len(resumed_trainers[1].seen) == STEPS - EPOCH
    assert_same_weights(resumed[1], resumed[0])


@slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_adapters_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    """PEFT's LoRA on a Llama, with its own dropout. Frozen weights get no gradient."""
    PeftModel = pytest.importorskip("peft").PeftModel

    def fresh() -> Any:
        return with_adapters(fresh_model(llama))

    torch.manual_seed(1)
    eager = trainer(fresh(), tmp_path / "eager")
    eager.train()
    torch.manual_seed(1)
    model = remat.enable(fresh(), "80%", strategy=NEAR, split="off")
    assert isinstance(model, PeftModel)
    with_remat = trainer(model, tmp_path / "ours")
    with_remat.train()
    assert with_remat.seen == eager.seen
    assert len(with_remat.seen) == STEPS
    assert_same_weights(model, eager.model)
    (plan,) = remat.plans(model)
    assert plan.peak_bytes <= plan.budget_bytes
    assert recomputes(plan)
    saved = PeftModel.from_pretrained(fresh_model(llama), tmp_path / "ours" / f"checkpoint-{STEPS}")
    assert_same_weights(saved, model)
    resumed = [fresh(), remat.enable(fresh(), "80%", strategy=NEAR, split="off")]
    resumed_trainers = [
        trainer(m, tmp_path / n) for m, n in zip(resumed, ("eager", "ours"), strict=True)
    ]
    for resumed_trainer, name in zip(resumed_trainers, ("eager", "ours"), strict=True):
        resumed_trainer.train(resume_from_checkpoint=str(tmp_path / name / f"checkpoint-{EPOCH}"))
    assert resumed_trainers[1].seen == resumed_trainers[0].seen
    assert_same_weights(resumed[1], resumed[0])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_accumulation_steps": 2}, marks=slow),
        pytest.param({"bf16": True}, marks=slow),
        pytest.param({"gradient_checkpointing": True}, marks=slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_trainer_options_that_change_the_step_are_followed(
    options: dict[str, Any], tmp_path: Path
) -> None:
    eager = trainer(fresh_model(gpt2), tmp_path / "eager", 5, **options)
    eager.train()
    model = remat.enable(fresh_model(gpt2), "70%", split="off")
    with_remat = trainer(model, tmp_path / "ours", 5, **options)
    with_remat.train()
    assert with_remat.seen == eager.seen
    assert len(remat.plans(model)) == (2 if "gradient_accumulation_steps" in options else 1)


@slow
def test_texts_of_any_length_need_two_captures(tmp_path: Path) -> None:
    """A batch is as long as its longest text: twenty batches."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(8, 60, (EPOCH * ROWS,), generator=generator).tolist()
    texts = [torch.randint(1, 128, (n,), generator=generator) for n in lengths]

    def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = [row["input_ids"] for row in rows]
        input_ids = pad_sequence(ids, batch_first=True)
        labels = pad_sequence(ids, batch_first=True, padding_value=-100)
        mask = (labels != -100).long()
        return {"input_ids": input_ids, "labels": labels, "attention_mask": mask}

    enabled = remat.enable(fresh_model(gpt2), "70%", strategy=NEAR, costs=remat.Roofline("cpu"))
    runs = []
    for number, model in enumerate((fresh_model(gpt2), enabled)):
        one = trainer(model, tmp_path / str(number))
        one.data_collator = padded
        one.train_dataset = [{"input_ids": text} for text in texts]
        one.train()
        runs.append(one)
    assert runs[1].seen == runs[0].seen
    assert_same_weights(runs[1].model, runs[0].model)
    assert len({plan.baseline_peak_bytes for plan in remat.plans(enabled)}) > 5
    assert enabled.__dict__["_remat_forward"].planner.trace_cache.capture_count == 2


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        pytest.param({"gradient_accumulation_steps": 2}, "model", marks=slow),
        pytest.param({"mixed_precision": "bf16"}, "model", marks=slow),
        pytest.param({"gradient_accumulation_steps": 2}, "blocks", marks=slow),
    ],
)
def test_a_loop_of_accelerate_trains_as_in_eager_mode(options: dict[str, Any], scope: str) -> None:
    """Prepared, accumulated, clipped; the unwrapped model saves itself."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def losses(model: PreTrainedModel) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, **options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        loader = torch.utils.data.DataLoader(examples(model), batch_size=ROWS)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses_per_step = []
        torch.manual_seed(3)
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(prepared):
                    loss = prepared(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses_per_step.append(loss.item())
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
        return losses_per_step

    eager = fresh_model(gpt2)
    eager.config.use_cache = False
    model = fresh_model(gpt2)
    model.config.use_cache = False
    remat.enable(model, "70%", strategy=NEAR, scope=scope, split="off")
    assert losses(model) == losses(eager)
    assert_same_weights(model, eager)
    assert all(recomputes(plan) for plan in remat.plans(model))


class InTwoGraphs(nn.Module):
    """A model like GPT-2 of Transformers: there is nothing to recompute in the graph of the
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(x)
        torch._dynamo.graph_break()
        return y.square().mean()


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("empty_compile_caches")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_compiled_by_accelerate_is_within_the_budget() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from remat.integrations.accelerate import dynamo_plugin

    torch.manual_seed(0)
    model, x = InTwoGraphs(), torch.randn(256, 32)
    eager = copy.deepcopy(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = dynamo_plugin("60%", time_limit=2)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    prepared = accelerator.prepare(model)
    before = {id(compiled_plan) for compiled_plan in remat.compiled_plans()}
    for module in (eager, prepared):
        accelerator.backward(module(x))
    plans = [
        compiled_plan for compiled_plan in remat.compiled_plans() if id(compiled_plan) not in before
    ]
    assert len(plans) == 2
    for made_plan in plans:
        assert made_plan.verified_bytes is not None
        assert made_plan.budget_bytes is not None
        assert made_plan.verified_bytes <= made_plan.budget_bytes
    for actual, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, other.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_a_step_of_the_trainer_has_the_planned_peak(tmp_path: Path) -> None:
    model = remat.enable(fresh_model(gpt2), "70%", split="off")
    with_remat = trainer(model, tmp_path, 1)
    with_remat.train()
    (plan,) = remat.plans(model)
    model.zero_grad(set_to_none=True)
    batch = next(iter(with_remat.get_train_dataloader()))
    peak = allocated_peak(lambda: with_remat.training_step(model, batch))
    resident = (*model.parameters(), *model.buffers(), *batch.values())
    assert peak + sum(t.nbytes for t in resident) <= plan.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"bf16": True}, marks=slow),
        pytest.param({"gradient_accumulation_steps": 2}, marks=slow),
        pytest.param({"gradient_checkpointing": True}, marks=slow),
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, marks=slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_the_result_of_optimize_trains_and_the_model_saves(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The Trainer itself saves weights and configuration of a `PreTrainedModel` only."""
    steps = 2
    as_eager = {k: v for k, v in options.items() if "compile" not in k}
    eager = trainer(fresh_model(gpt2), tmp_path / "eager", steps, save_strategy="no", **as_eager)
    eager.train()
    fast = remat.optimize(fresh_model(gpt2), "70%", costs=remat.Roofline("cpu"), split="off")
    with_remat = trainer(fast, tmp_path / "ours", steps, save_strategy="no", **options)  # type: ignore[arg-type]
    with_remat.train()
    assert with_remat.seen == eager.seen
    assert len(with_remat.seen) == steps
    assert with_remat.evaluate()["eval_loss"] == eager.evaluate()["eval_loss"]
    assert fast.plan is not None
    assert len(fast.plan.schedule) > len(fast.plan.graph)
    fast.save_pretrained(tmp_path / "saved")  # the model's own
    assert_same_weights(GPT2LMHeadModel.from_pretrained(tmp_path / "saved"), eager.model)
