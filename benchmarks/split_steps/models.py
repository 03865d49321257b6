"""The models: small, in float32, with random weights, dropout and ignored labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]
Example = tuple[nn.Module, Batch]

ROWS, TOKENS, WORDS = 4, 128, 6000
IGNORED = -100


def words() -> Batch:
    """Return a batch of tokens; every fifth label is ignored."""
    ids = torch.randint(2, WORDS, (ROWS, TOKENS))
    labels = ids.clone()
    labels[:, ::5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, n_positions=TOKENS, vocab_size=WORDS, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), words()


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
        use_cache=False, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config), words()


def qwen3() -> Example:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=128, intermediate_size=352, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
        use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), words()


def t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4,
        use_cache=False, pad_token_id=0,
    )  # fmt: skip
    config.decoder_start_token_id = 0  # type: ignore[attr-defined]
    return T5ForConditionalGeneration(config), words()


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return BertForMaskedLM(config), {**words(), "attention_mask": torch.ones(ROWS, TOKENS)}


def vit() -> Example:
    """A vision transformer with attention weights as tensors, larger than all else."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=8, intermediate_size=128,
        image_size=128, patch_size=8, hidden_dropout_prob=0.1,
    )  # fmt: skip
    config.num_labels = 10
    model = ViTForImageClassification(config)
    model.set_attn_implementation("eager")
    return model, {"pixel_values": torch.randn(4, 3, 128, 128), "labels": torch.randint(10, (4,))}


class WideLayers(nn.Module):
    """Two gated layers whose hidden width is 24 times that of the model."""

    def __init__(self, width: int = 64, hidden: int = 1536) -> None:
        super().__init__()
        self.dropout = 0.1
        self.gates = nn.ModuleList(nn.Linear(width, hidden) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(hidden, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=True):
            h = norm(x)
            x = x + F.dropout(down(F.silu(gate(h)) * up(h)), self.dropout, self.training)
        return F.mse_loss(x, target)


def wide_layers() -> Example:
    return WideLayers(), {"x": torch.randn(16, 128, 64), "target": torch.randn(16, 128, 64)}


class Logits(nn.Module):
    """Returns the logits of a GPT-2: the training loop has the criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt2 = gpt2()[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.gpt2(input_ids=ids).logits


def smoothed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the labels that are not ignored."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=0.1
    )


def logits() -> Example:
    return Logits(), words()


MODELS: dict[str, Callable[[], Example]] = {
    "gpt2": gpt2, "llama": llama, "qwen3": qwen3, "t5": t5, "bert": bert, "vit": vit,
    "wide layers": wide_layers, "criterion outside": logits,
}  # fmt: skip


class Criterion(nn.Module):
    """The model and the criterion of a training loop, in eager mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return smoothed_cross_entropy(self.model(input_ids), labels)


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model, whose dropout layers and attention drop nothing."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name == "p"):
                setattr(module, name, 0.0)
    return model
