"""TRL's trainers with remat's callback: the same losses and weights."""

from __future__ import annotations

import copy
import gc
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes

trl: Any = pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = 600


@dataclass
class Run:
    """Losses with gradient norms, measured peaks and final weights of a training."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    peaks_bytes: list[int] = field(default_factory=list)
    reference_bytes: int = 0
    """The parameters of DPO's reference model, which is outside of the plan."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{number}" for number in range(WORDS))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    whole = Tokenizer(model)
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole,
        chat_template="{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}",
        pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>",
    )  # fmt: skip


def texts(count: int, lengths: list[int], seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, WORDS, (count, max(lengths)), generator=generator).tolist()
    return [
        " ".join(f"word{i}" for i in row[: lengths[index // 8 % len(lengths)]])
        for index, row in enumerate(numbers)
    ]


def rows_of(kind: str) -> list[dict[str, Any]]:
    prompts = texts(40, [4], 1)
    if kind == "SFT":
        return [{"text": text} for text in texts(80, [40, 20], 2)]
    if kind in ("GRPO", "RLOO", "Distillation"):
        return [{"prompt": prompt} for prompt in prompts]
    chosen, rejected = texts(40, [30], 3), texts(40, [30, 24], 4)
    triples = list(zip(prompts, chosen, rejected, strict=True))
    if kind == "KTO":
        return [
            {"prompt": prompt, "completion": completion, "label": label}
            for prompt, good, bad in triples
            for completion, label in ((good, True), (bad, False))
        ]
    if kind == "GKD":
        return [
            {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]}
            for p, c, _ in triples
        ]
    return [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in triples]


OPTIONS: dict[str, dict[str, Any]] = {
    "SFT": {"max_length": 64},
    "DPO": {"max_length": 64},
    "KTO": {"max_length": 64},
    "ORPO": {"max_length": 64},
    "CPO": {"max_length": 64},
    "Reward": {"max_length": 64},
    "GRPO": {"max_completion_length": 12, "num_generations": 2},
    "RLOO": {"max_completion_length": 12, "num_generations": 2, "beta": 0.0},
    "GKD": {"max_length": 64, "lmbda": 0.0},
    "Distillation": {"max_completion_length": 12},
}
"""The trainers, with options that make them small."""

_EXPERIMENTAL = ("ORPO", "CPO", "GKD")
"""These trainers compute their loss from the logits, outside of the model: a plan of the model does
not count what the loss allocates."""


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(re.findall(r"[02468]", text)))) for text in completions]


def trained(
    kind: str, folder: Path, callbacks: list[Any], steps: int, adapters: bool, **options: Any
) -> Run:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        set_seed,
    )

    set_seed(0)
    is_scoring = kind == "Reward"
    model = (LlamaForSequenceClassification if is_scoring else LlamaForCausalLM)(
        LlamaConfig(
            vocab_size=WORDS + 4, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            **({"num_labels": 1} if is_scoring else {}),
        )
    )  # fmt: skip
    run = Run()
    package = "trl.experimental." + kind.lower() if kind in _EXPERIMENTAL else "trl"
    library = importlib.import_module(package)
    base: Callable[..., Any] = getattr(library, f"{kind}Trainer")

    class Observed(base):  # type: ignore[misc,valid-type]
        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                run.losses.append((logs["loss"], logs["grad_norm"]))
            super().log(logs, *args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            gc.collect()
            tensors = [v for v in inputs.values() if isinstance(v, torch.Tensor)]
            reference = getattr(self, "ref_model", None) or getattr(self, "teacher_model", None)
            resident = [] if reference is None else list(reference.parameters())
            run.reference_bytes = unique_bytes(resident)
            resident += [p.grad for p in model.parameters() if p.grad is not None]
            self.meter = LiveStorageMeter(unique_bytes([*model.parameters(), *tensors, *resident]))
            self.meter.__enter__()
            return super().compute_loss(model, inputs, *args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.meter.__exit__(None, None, None)
            run.peaks_bytes.append(self.meter.peak_bytes)
            return loss

    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    arguments = getattr(library, f"{kind}Config")(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, logging_steps=1,
        report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no",
        **OPTIONS[kind],
        **options,
    )  # fmt: skip
    others: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO"):
        others["reward_funcs"] = reward
    elif kind in ("DPO", "KTO"):
        others["ref_model"] = copy.deepcopy(model).requires_grad_(False)
    elif kind in ("GKD", "Distillation"):
        others["teacher_model"] = copy.deepcopy(model).requires_grad_(False)
    Observed(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows_of(kind)),
        processing_class=tokenizer(),
        callbacks=callbacks,
        peft_config=lora if adapters else None,
        **others,
    ).train()
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


CASES: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any]]] = {
    # trainer, its options, adapters, the callback's options
    "SFT": ("SFT", {}, False, {}),
    "SFT in blocks": ("SFT", {}, False, {"scope": "blocks"}),
    "SFT with adapters": ("SFT", {}, True, {}),
    "SFT in blocks with adapters": ("SFT", {}, True, {"scope": "blocks"}),
    "SFT with accumulation": ("SFT", {"gradient_accumulation_steps": 2}, False, {}),
    "DPO": ("DPO", {}, False, {}),
    "DPO in blocks": ("DPO", {}, False, {"scope": "blocks"}),
    "GRPO": ("GRPO", {}, False, {}),
    "GRPO in blocks": ("GRPO", {}, False, {"scope": "blocks"}),
    **{kind: (kind, {}, False, {}) for kind in OPTIONS},
}


_FAST = ("GRPO",)


@pytest.mark.parametrize(
    "case", [c if c in _FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_a_training_is_that_of_the_eager_model(case: str, tmp_path: Path) -> None:
    from remat.integrations.transformers import RematCallback

    kind, options, adapters, callback_options = CASES[case]
    plans: list[Any] = []

    class Observing(RematCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            assert self._enabled is not None
            plans.extend(remat.plans(self._enabled))
            super().on_train_end(*args, **kwargs)

    steps = 3 if case in _FAST else 10
    eager_options = {**options, "gradient_checkpointing": False}
    eager = trained(kind, tmp_path / "eager", [], steps, adapters, **eager_options)
    callback = Observing(
        "min", costs=remat.Roofline("cpu"), strategy=remat.Auto(time_limit=1), **callback_options
    )
    planned = trained(kind, tmp_path / "planned", [callback], steps, adapters, **options)
    assert len(planned.losses) == steps
    assert planned.losses == eager.losses
    for name, weight in eager.weights.items():
        assert torch.equal(planned.weights[name], weight)
    assert plans
    assert max(planned.peaks_bytes[1:]) <= max(eager.peaks_bytes[1:])
    if kind == "Distillation":
        return  # the loss is outside of the planned part
    planned_bytes = max(plan.peak_bytes for plan in plans)
    assert (
        kind in _EXPERIMENTAL
        or max(planned.peaks_bytes[1:]) - planned.reference_bytes <= planned_bytes
    )
