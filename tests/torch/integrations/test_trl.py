"""TRL's SFT with remat's callback: the same losses. Runs where TRL is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import remat

trl: Any = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 20


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{number}" for number in range(40))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model),
        pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>",
    )  # fmt: skip


def trained(folder: Path, callbacks: list[Any], adapters: bool, **options: Any) -> list[Any]:
    import pyarrow  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=44, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(10, 40, (80,), generator=generator).tolist()
    rows = [
        {"input_ids": torch.randint(4, 44, (n,), generator=generator).tolist()} for n in lengths
    ]
    seen: list[Any] = []

    class Logged(trl.SFTTrainer):
        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                seen.append((logs["loss"], logs["grad_norm"]))
            super().log(logs, *args, **kwargs)

    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    Logged(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            max_length=64,
            save_strategy="no",
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            **options,
        ),
        train_dataset=Dataset(pyarrow.Table.from_pylist(rows), fingerprint="rows"),
        processing_class=tokenizer(),
        callbacks=callbacks,
        peft_config=lora if adapters else None,
    ).train()
    return seen


@pytest.mark.parametrize(
    ("options", "adapters"),
    [({}, False), ({}, True), ({"gradient_accumulation_steps": 2}, False)],
)
def test_a_run_of_sft_is_that_of_the_eager_model(
    options: dict[str, Any], adapters: bool, tmp_path: Path
) -> None:
    from remat.integrations.transformers import RematCallback

    plans: list[Any] = []

    class Looking(RematCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            assert self._enabled is not None
            plans.extend(remat.plans(self._enabled))
            super().on_train_end(*args, **kwargs)

    eager = trained(tmp_path / "eager", [], adapters, **options)
    callback = Looking("min", scope="blocks", differentiate="log_probs")
    with_remat = trained(tmp_path / "ours", [callback], adapters, **options)
    assert len(with_remat) == STEPS
    assert with_remat == eager
    assert any(plan.time_s > plan.baseline_time_s for plan in plans)
