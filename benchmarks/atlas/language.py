"""Language models of the atlas, as configurations of transformers with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.atlas.catalogue import Entry, LossOnly

_LLAMA_3: dict[str, Any] = {"use_cache": False, "max_position_embeddings": 131072}


def _decoder(
    architecture: str, rows: int, tokens: int, config: dict[str, Any], suffix: str = "ForCausalLM"
) -> Any:
    """Return what builds a model that predicts tokens, and its batch."""

    def build() -> tuple[torch.nn.Module, dict[str, Any]]:
        kind = getattr(transformers, f"{architecture}{suffix}")
        model = kind(kind.config_class(**config))
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        return LossOnly(model), {"input_ids": ids, "labels": ids}

    return build


def _entry(
    name: str,
    title: str,
    size: tuple[int, int],
    architecture: str,
    config: dict[str, Any],
    suffix: str = "ForCausalLM",
) -> Entry:
    rows, tokens = size
    build = _decoder(architecture, rows, tokens, config, suffix)
    return Entry(name, f"{title}, {rows} x {tokens:,} tokens", build)


def _whisper() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.WhisperConfig(
        vocab_size=51865, d_model=1024, encoder_layers=12, decoder_layers=12, use_cache=False,
        encoder_attention_heads=16, decoder_attention_heads=16, encoder_ffn_dim=4096,
        decoder_ffn_dim=4096,
    )  # fmt: skip
    ids = torch.zeros(16, 448, dtype=torch.long)
    batch = {"input_features": torch.zeros(16, 80, 3000), "decoder_input_ids": ids, "labels": ids}
    return LossOnly(transformers.WhisperForConditionalGeneration(config)), batch


def _t5() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        d_model=1024, d_kv=128, d_ff=16384, num_heads=32, num_layers=8, num_decoder_layers=8,
        use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(8, 512, dtype=torch.long)
    batch = {"input_ids": ids, "decoder_input_ids": ids, "labels": ids}
    return LossOnly(transformers.T5ForConditionalGeneration(config)), batch


LANGUAGE_MODELS = (
    _entry("llama-3-1b", "Llama 3.2 1B", (4, 2048), "Llama", _LLAMA_3 | {
        "num_hidden_layers": 16, "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "tie_word_embeddings": True,
    }),
    _entry("llama-3-8b", "Llama 3 8B, 8 of 32 layers, no head", (2, 8192), "Llama", _LLAMA_3 | {
        "num_hidden_layers": 8, "vocab_size": 1024, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    _entry("llama-3-70b", "Llama 3 70B, 4 of 80 layers, no head", (1, 8192), "Llama", _LLAMA_3 | {
        "num_hidden_layers": 4, "vocab_size": 1024, "hidden_size": 8192,
        "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    }),
    _entry("qwen3-0.6b", "Qwen3 0.6B", (4, 4096), "Qwen3", {
        "num_hidden_layers": 28, "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "use_cache": False, "tie_word_embeddings": True,
    }),
    _entry("qwen3-4b", "Qwen3 4B, 12 of 36 layers", (2, 4096), "Qwen3", {
        "num_hidden_layers": 12, "vocab_size": 151936, "hidden_size": 2560,
        "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "use_cache": False, "tie_word_embeddings": True,
    }),
    _entry("qwen3-14b", "Qwen3 14B, 8 of 40 layers, no head", (4, 3328), "Qwen3", {
        "num_hidden_layers": 8, "vocab_size": 1024, "hidden_size": 5120,
        "intermediate_size": 17408, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "use_cache": False,
    }),
    _entry("mistral-7b", "Mistral 7B, 8 of 32 layers", (2, 8192), "Mistral", {
        "num_hidden_layers": 8, "vocab_size": 32768, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "use_cache": False, "sliding_window": None, "max_position_embeddings": 32768,
    }),
    _entry("gemma-2-2b", "Gemma 2 2B, 13 of 26 layers", (2, 4096), "Gemma2", {
        "num_hidden_layers": 13, "vocab_size": 256000, "hidden_size": 2304,
        "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "use_cache": False,
    }),
    _entry("gemma-3-1b", "Gemma 3 1B", (2, 4096), "Gemma3", {
        "num_hidden_layers": 26, "vocab_size": 262144, "hidden_size": 1152,
        "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "use_cache": False,
    }),
    _entry("phi-4", "Phi-4, 8 of 40 layers", (2, 4096), "Phi3", {
        "num_hidden_layers": 8, "vocab_size": 100352, "hidden_size": 5120,
        "intermediate_size": 17920, "num_attention_heads": 40, "num_key_value_heads": 10,
        "use_cache": False, "pad_token_id": 0, "max_position_embeddings": 16384,
    }),
    _entry("gpt2", "GPT-2 (124M)", (16, 1024), "GPT2", {"use_cache": False}, "LMHeadModel"),
    _entry("gpt2-medium", "GPT-2 medium (355M)", (8, 1024), "GPT2", {
        "n_layer": 24, "n_embd": 1024, "n_head": 16, "use_cache": False,
    }, "LMHeadModel"),
    _entry("gpt2-xl", "GPT-2 XL (1.5B)", (4, 1024), "GPT2", {
        "n_layer": 48, "n_embd": 1600, "n_head": 25, "use_cache": False,
    }, "LMHeadModel"),
    _entry("neox-1b", "GPT-NeoX as Pythia 1B", (8, 2048), "GPTNeoX", {
        "num_hidden_layers": 16, "vocab_size": 50304, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 8, "use_cache": False,
    }),
    _entry("opt-6.7b", "OPT 6.7B, 8 of 32 layers", (4, 2048), "OPT", {
        "num_hidden_layers": 8, "hidden_size": 4096, "ffn_dim": 16384,
        "num_attention_heads": 32, "word_embed_proj_dim": 4096, "use_cache": False,
    }),
    Entry("t5-3b", "T5 3B, 8 + 8 of 24 + 24 layers, 8 x 512 tokens", _t5),
    _entry("bert-large", "BERT large", (32, 512), "Bert", {
        "num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096,
        "num_attention_heads": 16,
    }, "ForMaskedLM"),
    _entry("deberta-v3", "DeBERTa v3 base", (16, 512), "DebertaV2", {
        "vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "relative_attention": True,
        "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
        "max_relative_positions": -1,
    }, "ForMaskedLM"),
    Entry("whisper-medium", "Whisper medium, 12 + 12 of 24 + 24 layers, 16 x 30 s", _whisper),
    _entry("mamba-2", "Mamba-2 (130M)", (8, 1024), "Mamba2", {
        "num_hidden_layers": 24, "hidden_size": 768, "state_size": 128, "num_heads": 24,
        "vocab_size": 50288, "use_cache": False,
    }),
    _entry("mixtral", "Mixtral 8x7B, 4 of 32 layers", (2, 4096), "Mixtral", {
        "num_hidden_layers": 4, "use_cache": False, "sliding_window": None,
    }),
)  # fmt: skip
"""The language models, at the sizes of their publications."""
