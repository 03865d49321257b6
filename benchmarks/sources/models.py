"""The models of the published figures, with random weights, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.splitting import Loss

Step = tuple[nn.Module, dict[str, Any]]
"""A model, and the keyword arguments of its call."""

VOCABULARY = 151_936
"""The vocabulary of Qwen3."""


class Head(nn.Module):
    """A language model's head with its loss, in float32 for weights in bfloat16."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width, dtype=torch.bfloat16))

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of the hidden states."""
        return F.cross_entropy(hidden.float() @ self.weight.float().t(), labels)


def head_step(tokens: int, width: int) -> Step:
    """Return the head for a number of tokens, whose hidden states need a gradient."""
    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    return Head(width, VOCABULARY), {"hidden": hidden, "labels": _ids(tokens)}


def llama_lora_step(rows: int, tokens: int) -> Step:
    """Return LLaMA-7B with LoRA adapters."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
    )
    model = get_peft_model(_llama_7b(), config)
    return Loss(model), {"ids": _ids(rows, tokens)}


def llama_7b_step(tokens: int, rows: int) -> Step:
    """Return LLaMA-7B."""
    return Loss(_llama_7b()), {"ids": _ids(rows, tokens)}


def gpt2_step(rows: int, tokens: int) -> Step:
    """Return GPT-2 with 124 million parameters, in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return Loss(GPT2LMHeadModel(GPT2Config(use_cache=False))), {"ids": _ids(rows, tokens)}


def gpt2_xl_step(rows: int, tokens: int) -> Step:
    """Return GPT-2 XL with 1.56 billion parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=48, n_embd=1600, n_head=25, use_cache=False)
    return Loss(GPT2LMHeadModel(config).bfloat16()), {"ids": _ids(rows, tokens)}


def gptj_step(rows: int, tokens: int) -> Step:
    """Return GPT-J with 6.05 billion parameters."""
    from transformers import GPTJConfig, GPTJForCausalLM

    model = GPTJForCausalLM(GPTJConfig(use_cache=False)).bfloat16()
    return Loss(model), {"ids": _ids(rows, tokens)}


def qwen3_8b_step(tokens: int) -> Step:
    """Return the layers of Qwen3-8B, with a small vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=36, vocab_size=1024, hidden_size=4096, intermediate_size=12288,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, use_cache=False,
        max_position_embeddings=131072,
    )  # fmt: skip
    return Loss(Qwen3ForCausalLM(config).bfloat16()), {"ids": _ids(1, tokens)}


def _llama_7b() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=32, vocab_size=32000, hidden_size=4096, intermediate_size=11008,
        num_attention_heads=32, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long)
