"""Tables of litgpt: LoRA, QLoRA and full fine-tuning in bfloat16.

Memory is `torch.cuda.max_memory_allocated` in units of 1e9 bytes, with the longest sequence of the
data set. The tables of October 2023 are of litgpt before 0.1; all rows are predicted with the
installed version.
"""

from __future__ import annotations

from benchmarks.fit_world.measurement import Extras, Loop, Measurement, Source

_URL = "https://github.com/Lightning-AI/litgpt/blob/main/"
_TABLES = Source(
    "litgpt tables", f"{_URL}tutorials/resource-tables.md", "2023-10-20", "torch 2.1.0"
)
_RECIPES = Source("litgpt recipes", f"{_URL}config_hub/finetune/README.md", "2024-08-02")

_LONGEST_TOKENS = {
    "phi-1_5": 1044,
    "stablelm-base-alpha-3b": 1034,
    "Llama-2-7b-hf": 1304,
    "Llama-2-13b-hf": 1304,
}
_LORA = {"lora_alpha": 16, "lora_dropout": 0.05, "lora_query": True, "lora_value": True}
_LORA_OF_ALL = _LORA | {f"lora_{name}": True for name in ("key", "projection", "mlp", "head")}


def _row(
    source: Source,
    model: str,
    method: str,
    batch: int,
    tokens: int,
    published_gb: float,
    *,
    rank: int = 8,
    gpu: str = "a10g",
    accumulate: int = 1,
    lora: Extras = _LORA,
    reason: str = "",
) -> Measurement:
    loop = Loop(
        model,
        batch,
        tokens,
        library="litgpt",
        options={} if method == "full" else {**lora, "lora_r": rank},
        quantize={"QLoRA": "nf4", "QLoRA-dq": "nf4-dq"}.get(method, ""),
        fit={"accumulate": accumulate, "outputs": "held"},
    )
    name = f"{model}, {method}, batch {batch} of {tokens}"
    published_bytes = round(published_gb * 1e9)
    return Measurement(
        source, name, gpu, loop, published_bytes, "allocated", 5_000_000, reason=reason
    )


def _table(model: str, batch: int, published_gb: float, method: str = "LoRA") -> Measurement:
    tokens = _LONGEST_TOKENS[model]
    return _row(
        _TABLES,
        model,
        method,
        batch,
        tokens,
        published_gb,
        gpu="a100-40gb",
        accumulate=128 // batch,
    )


def _recipe(
    model: str, batch: int, published_gb: float, accumulate: int, rank: int = 32
) -> Measurement:
    return _row(_RECIPES, model, "LoRA", batch, 512, published_gb, rank=rank, accumulate=accumulate)


def _full(model: str, batch: int, published_gb: float, accumulate: int) -> Measurement:
    return _row(_RECIPES, model, "full", batch, 512, published_gb, accumulate=accumulate)


ROWS = (
    _table("phi-1_5", 1, 4.82),
    _table("phi-1_5", 2, 6.76),
    _table("phi-1_5", 4, 10.68),
    _table("stablelm-base-alpha-3b", 1, 9.69),
    _table("stablelm-base-alpha-3b", 2, 12.10),
    _table("stablelm-base-alpha-3b", 4, 16.92),
    _table("Llama-2-7b-hf", 1, 21.30),
    _table("Llama-2-7b-hf", 2, 29.07),
    _table("Llama-2-13b-hf", 1, 38.12),
    _recipe("falcon-7b", 1, 16.69, 8),
    _row(_RECIPES, "Gemma-2b", "LoRA", 2, 512, 12.62, accumulate=3, lora=_LORA_OF_ALL),
    _row(_RECIPES, "Gemma-2-2b", "LoRA", 2, 512, 14.31, accumulate=3, lora=_LORA_OF_ALL),
    _recipe("Llama-2-7b-hf", 2, 19.77, 4),
    _recipe("Llama-3-8B", 1, 19.73, 8),
    _recipe("Llama-3.2-1B", 1, 4.49, 8),
    _recipe("Llama-3.2-3B", 1, 9.67, 8),
    _recipe("Mistral-7B-v0.1", 2, 20.66, 4),
    _recipe("stablelm-base-alpha-3b", 1, 8.58, 8),
    _row(_RECIPES, "phi-2", "LoRA", 4, 512, 13.98, accumulate=2, lora=_LORA_OF_ALL),
    _row(
        _RECIPES, "Phi-3-mini-4k-instruct", "LoRA", 4, 512, 19.75, accumulate=2, lora=_LORA_OF_ALL
    ),
    _row(
        _RECIPES, "tiny-llama-1.1b", "LoRA", 8, 512, 13.50, rank=32, accumulate=1, lora=_LORA_OF_ALL
    ),
    _full("Llama-3.2-1B", 4, 8.70, 16),
    _full("Llama-3.2-3B", 4, 16.51, 16),
    _full("tiny-llama-1.1b", 4, 14.10, 8),
)
