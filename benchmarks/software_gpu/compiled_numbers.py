"""Numbers of compiled plans: loss and gradients against plain Inductor, bit for bit.

Needs the software GPU with right numbers, and Triton's interpreter (TRITON_INTERPRET=1), which runs
the kernels that Inductor generates for a GPU. It is slow, so the models are as small as they can
be. There is no dropout: which random numbers Inductor generates in a kernel depends on its fusion.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config

import remat
from benchmarks.software_gpu.numbers import judged, step_results, unequal

BUDGETS = ("100%", "95%", "min")
"""The smallest peak of models this small is 93% of the peak without recomputation."""

DTYPES = ("float32", "bfloat16")
ROWS, TOKENS, WIDTH, VOCABULARY = 2, 16, 32, 64
EAGER_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""How far Inductor may be from eager mode, relative to a tensor's largest element."""
ADDMM = (
    "plain Inductor multiplies and adds the two gradients of the tied weight in one addmm, which "
    "rounds once; a plan runs two operations, and each rounds its result"
)
OTHER_ROUNDING = {("gpt2", "bfloat16"): ({"transformer.wte.weight.grad"}, ADDMM, 2**-7)}
"""By family and dtype: the tensors that are rounded differently than in plain Inductor, the reason,
and the largest difference that it explains, relative to a tensor's largest element."""

Row = dict[str, Any]


def _gpt2() -> nn.Module:
    import transformers

    sizes = transformers.GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=2, vocab_size=VOCABULARY, n_positions=TOKENS,
        use_cache=False, bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(sizes)


def _llama() -> nn.Module:
    import transformers

    sizes = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=TOKENS, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(sizes)


BUILDERS = {"gpt2": _gpt2, "llama": _llama}


def cases() -> list[str]:
    """Return the names of the cases, "FAMILY-DTYPE"."""
    return [f"{family}-{dtype}" for family in BUILDERS for dtype in DTYPES]


def run_case(case: str) -> list[Row]:
    """Return the rows of one case: plain Inductor against eager mode, and each budget against plain
    Inductor."""
    # Else bfloat16 values within a kernel are not rounded, and other kernels round others.
    config.emulate_precision_casts = True
    family, _, dtype = case.partition("-")
    model, batch = _model(family, dtype)
    row: Row = {"family": family, "dtype": dtype}
    eager = step_results(model, model, batch, dtype, seed=0)
    plain = step_results(torch.compile(model), model, batch, dtype, seed=0)
    reason = "Inductor fuses operations"
    rows = [
        row | {"budget": "inductor"} | judged(unequal(eager, plain), reason, EAGER_TOLERANCE[dtype])
    ]
    for budget in BUDGETS:
        torch._dynamo.reset()
        planned = copy.deepcopy(model)
        compiled = remat.compile(planned, budget, time_limit=5.0)
        try:
            actual = step_results(compiled, planned, batch, dtype, seed=0)
        except BackendCompilerFailed as error:
            refused = str(error.inner_exception).splitlines()[0][:300]
            is_met = isinstance(error.inner_exception, remat.InfeasibleBudget)
            rows.append(row | {"budget": budget, "refused": refused, "is_met": is_met})
            continue
        differences = unequal(plain, actual)
        names, reason, tolerance = OTHER_ROUNDING.get((family, dtype), (set[str](), "", 0.0))
        is_explained = differences.keys() <= names
        rows.append(
            row
            | {"budget": budget}
            | judged(differences, reason if is_explained else None, tolerance)
        )
    return rows


def _model(family: str, dtype: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model with two layers and its batch, on the GPU."""
    torch.manual_seed(0)
    model = BUILDERS[family]().train().to("cuda", getattr(torch, dtype))
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    return model, {name: tensor.cuda() for name, tensor in batch.items()}
