"""Published configurations of models, as arguments of configuration classes."""

from __future__ import annotations

from typing import Any

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv: int, **others: Any) -> Any:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    return "LlamaConfig", {"vocab_size": 32000, "max_position_embeddings": 4096} | sizes | others


_MISTRAL: dict[str, Any] = {
    **_llama(4096, 14336, 32, 32, 8)[1],
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, **_LLAMA_3 | {"max_position_embeddings": 8192}),
    "llama-3.2-3b": _llama(
        3072, 8192, 28, 24, 8, head_dim=128, tie_word_embeddings=True, **_LLAMA_3
    ),
    "mistral-7b": ("MistralConfig", _MISTRAL),
    "mixtral-8x7b": (
        "MixtralConfig",
        {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "santacoder": (
        "GPTBigCodeConfig",
        {
            "vocab_size": 49280,
            "n_positions": 2048,
            "n_embd": 2048,
            "n_layer": 24,
            "n_head": 16,
            "n_inner": 8192,
            "activation_function": "gelu_pytorch_tanh",
            "multi_query": True,
        },
    ),
    "powerlm-3b": (
        "GraniteConfig",
        {
            "vocab_size": 49152,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 40,
            "num_attention_heads": 36,
            "num_key_value_heads": 36,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
    "bert-large": (
        "BertConfig",
        {
            "vocab_size": 30522,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
    ),
}
"""The class and arguments of each configuration, by the name of its model."""

FLUX_2_KLEIN: dict[str, Any] = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
"""Arguments of `Flux2Transformer2DModel` of diffusers for FLUX.2 klein (4B)."""
