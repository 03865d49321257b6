"""QLoRA: adapters of PEFT on a model whose weights bitsandbytes has quantized, under the
Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat.frontend.memory.meter import measure_step

pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, ROWS = 10, 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantized(folder: Path, bits: int, checkpoints: bool) -> Any:
    """Return a quantized model with adapters, as in PEFT's documentation; `checkpoints` is its
    default."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(**(quantization if bits == 4 else {"load_in_8bit": True}))
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu"
    )
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpoints)
    torch.manual_seed(1)
    adapters = LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(model, adapters).train()


def ids(count: int) -> torch.Tensor:
    return torch.randint(0, 128, (count, 48), generator=torch.Generator().manual_seed(2))


def losses(model: Any, folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=ROWS,
        logging_steps=1, save_strategy="no", report_to=[], seed=7, use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, learning_rate=1e-2,
    )  # fmt: skip
    examples = [{"input_ids": x, "labels": x} for x in ids(STEPS * ROWS)]
    trainer = Trainer(model, arguments, train_dataset=examples)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def peak_of(model: Any) -> int:
    batch = ids(ROWS)

    def one() -> None:
        model(input_ids=batch, labels=batch).loss.backward()

    one()  # planned for such calls
    model.zero_grad(set_to_none=True)
    peak_bytes = measure_step(one, [*model.parameters(), *model.buffers(), batch]).peak_bytes
    model.zero_grad(set_to_none=True)
    return peak_bytes


@pytest.mark.parametrize(
    ("bits", "checkpoints"),
    [
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
        pytest.param(8, False, marks=pytest.mark.slow),
        pytest.param(8, True, marks=pytest.mark.slow),
    ],
)
def test_a_qlora_run_is_that_of_the_eager_model(
    saved: Path, tmp_path: Path, bits: int, checkpoints: bool
) -> None:
    eager = quantized(saved, bits, checkpoints=False)
    expected = losses(eager, tmp_path / "eager")
    model = quantized(saved, bits, checkpoints)
    remat.enable(model, "70%", scope="auto", outputs="dropped")
    assert losses(model, tmp_path / "ours") == expected
    adapters = {n: p for n, p in model.named_parameters() if "lora" in n}
    assert len(adapters) == 16
    for name, parameter in eager.named_parameters():
        if "lora" in name:
            assert torch.equal(adapters[name], parameter), name
    assert len(set(expected)) == STEPS
    measured_bytes = peak_of(model)
    assert all(isinstance(plan, remat.Plan) for plan in remat.plans(model))
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in remat.plans(model))
    plan = remat.plans(model)[-1]
    assert 0.8 * plan.peak_bytes <= measured_bytes <= plan.peak_bytes
    assert measured_bytes < 0.75 * peak_of(eager)
