# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From out of memory to training
#
# **The question.** A training step of a GPT-2 takes three times the memory that the device has.
# What makes it fit, what does that cost, and does it still learn the same?
#
# The model here is small and its weights are random, so that the notebook runs anywhere in
# seconds. Nothing is downloaded. A large model has other figures, but the same calls.

# %%
import copy
import statistics
import time
from functools import partial

import torch
import transformers
from IPython.display import SVG
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import remat
from remat.frontend.memory.meter import cuda_peak, measure_step, unique_bytes
from remat.limits.units import format_bytes
from remat.strategies import PerBlock

transformers.logging.set_verbosity_error()
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## The memory of a step
#
# Six layers of GPT-2 with dropout, as in training, on many short rows of tokens. Almost all of the
# memory is activations, which the forward pass produces and the backward pass needs.

# %%
torch.manual_seed(0)
config = GPT2Config(
    n_layer=6,
    n_embd=128,
    n_head=2,
    n_positions=128,
    vocab_size=1024,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)
model = GPT2LMHeadModel(config).to(device).train()
rows = 6 if device == "cpu" else 96  # on a GPU, libraries alone take tens of MiB
ids = torch.randint(0, config.vocab_size, (rows, 128), device=device)
batch = {"input_ids": ids, "labels": ids}


def step(module, seed=1):
    """Run forward and backward. The seed decides what dropout drops."""
    torch.manual_seed(seed)
    output = module(**batch)  # the logits are live as long as this variable references them
    output.loss.backward()
    return output.loss.detach()


def peak_of(module, run):
    """Return the peak of allocated bytes during a step, parameters and batch included."""
    module.zero_grad(set_to_none=True)
    constants = [*module.parameters(), *module.buffers(), ids]
    if device == "cpu":
        return measure_step(run, constants).peak_bytes
    other_bytes = torch.cuda.memory_allocated() - unique_bytes(constants)
    return cuda_peak(run) - other_bytes


expected = remat.estimate(model, example_kwargs=batch)
print(expected)

# %% [markdown]
# This estimate comes from a trace of the model; nothing has run yet. Now run a step and measure it:

# %%
step(model)  # the first step initializes libraries
peaks = {"eager": peak_of(model, lambda: step(model))}
print(f"one step at its peak: {format_bytes(peaks['eager'])}")
if device == "cpu":
    assert abs(peaks["eager"] / expected.peak_bytes - 1) < 0.03

# %% [markdown]
# Now suppose that the device has a third of that. In eager mode this is
# `torch.OutOfMemoryError`.

# %%
budget = peaks["eager"] // 3
print(f"the device has {format_bytes(budget)}")

# %% [markdown]
# ## By hand: `torch.utils.checkpoint`
#
# The usual answer is to checkpoint every block. Its activations are freed after the forward pass,
# and the whole block is recomputed before its backward pass.

# %%


def checkpoint_blocks(module):
    for block in module.transformer.h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


by_hand = copy.deepcopy(model)
checkpoint_blocks(by_hand)
peaks["checkpoint per block"] = peak_of(by_hand, lambda: step(by_hand))
unused = budget - peaks["checkpoint per block"]
print(f"at its peak: {format_bytes(peaks['checkpoint per block'])}")
print(f"of the device unused: {format_bytes(unused)}")
assert peaks["checkpoint per block"] <= budget

# %% [markdown]
# It fits. But every block runs twice, with its expensive operations as well as its cheap ones,
# whether that is needed or not.
#
# ## One line
#
# `remat.optimize` takes the available memory as its budget. It traces the whole step as a graph,
# measures the cost of each operation, and searches for the cheapest schedule that fits.
#
# Clear the gradients first: a step that accumulates into existing gradients needs memory for both,
# and would be planned that way.

# %%
model.zero_grad(set_to_none=True)
fast = remat.optimize(
    model,
    budget,  # or "33%", or "8GiB"
    example_kwargs=batch,
    strategy=remat.Auto(gap=0.02, time_limit=5.0, stall=2.0),
)
print(fast.plan)

# %% [markdown]
# The plan shows what is recomputed, what that costs, and a proved *bound*: no schedule can be
# faster. The picture shows the step from left to right. Memory rises during the forward pass and
# stays below the line of the budget.

# %%
SVG(fast.plan.to_svg())

# %% [markdown]
# That was a prediction. Now the measurement:

# %%
peaks["remat"] = peak_of(fast, lambda: step(fast))
for method, peak in peaks.items():
    print(f"{method:<22}{format_bytes(peak):>9}   {peak / peaks['eager']:.0%} of eager")
predicted = fast.plan.peak_bytes
print(
    f"\npredicted by the plan: {format_bytes(predicted)}; "
    f"the measured peak differs by {peaks['remat'] / predicted - 1:+.2%}"
)
assert peaks["remat"] <= budget

# %% [markdown]
# ## What it costs
#
# First by the plan's own costs: checkpointing every block, on the same graph with the same costs.
# remat's plan is never slower, because per-block checkpointing is among its candidates.

# %%
per_block = remat.solve(fast.plan.graph, budget, PerBlock())
for method, plan in (("checkpoint per block", per_block), ("remat", fast.plan)):
    print(f"{method:<22}{plan.overhead:+.1%} time at {format_bytes(plan.peak_bytes)}")
assert fast.plan.time_s <= per_block.time_s

# %% [markdown]
# Then in measured time. The three methods take turns, and the median counts. Expect some noise on a
# machine with other load, and with a model as small as this.

# %%
methods = {"eager": model, "checkpoint per block": by_hand, "remat": fast}
times = {method: [] for method in methods}
for _ in range(3):
    for method, module in methods.items():
        module.zero_grad(set_to_none=True)
        start = time.perf_counter()
        step(module).item()
        times[method].append(time.perf_counter() - start)
medians = {method: statistics.median(step_s) for method, step_s in times.items()}
for method, seconds in medians.items():
    change = seconds / medians["eager"] - 1
    print(f"{method:<22}{seconds * 1e3:>6.0f} ms   {change:+.0%}")

# %% [markdown]
# ## Does it still learn the same?
#
# Train both from the same weights with AdamW: three steps, with dropout, measuring the peak of each
# step. `fast` has the model's own parameters, so the optimizer and `state_dict` work as usual. (The
# optimizer's two values for each parameter need memory in addition to the step, and are not counted
# here.)

# %%
start_weights = copy.deepcopy(model.state_dict())


def train(module, steps=3):
    """Return the losses, and the highest peak of a forward and backward."""
    module.load_state_dict(start_weights)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, highest_peak = [], 0
    for step_index in range(steps):
        seed = 100 + step_index
        peak = peak_of(module, lambda seed=seed: losses.append(step(module, seed)))
        highest_peak = max(highest_peak, peak)
        optimizer.step()
    return torch.stack(losses), highest_peak


eager_losses, eager_peak = train(model)
fast_losses, fast_peak = train(fast)
print("  step     eager     remat")
for number, (a, b) in enumerate(zip(eager_losses.tolist(), fast_losses.tolist(), strict=True), 1):
    print(f"{number:>6}{a:>10.6f}{b:>10.6f}")
print(f"  peak {format_bytes(eager_peak):>9} {format_bytes(fast_peak):>9}")

assert fast_peak <= budget
assert fast_losses[-1] < fast_losses[0]
tolerance = 0.0 if device == "cpu" else 1e-3  # some GPU kernels add in a varying order
torch.testing.assert_close(fast_losses, eager_losses, rtol=tolerance, atol=0.0)

# %% [markdown]
# ## Under `torch.compile`
#
# If you use torch.compile, let it do the planning: `backend="remat"` plans on torch.compile's
# graph. A percentage then refers to the peak of the same step under plain torch.compile. Here it
# compiles the first two blocks only, and without Inductor's kernels (`"inductor": False`), because
# those need a C++ compiler; omit this option if you have one.

# %%
blocks = torch.nn.Sequential(*model.transformer.h[:2])
options = {"budget": "60%", "inductor": False, "time_limit": 3.0}
compiled = torch.compile(blocks, backend="remat", options=options)
compiled(model.transformer.wte(ids)).square().mean().backward()
(compiled_plan,) = remat.compiled_plans()
print(compiled_plan)
assert compiled_plan.plan.peak_bytes <= compiled_plan.budget_bytes < compiled_plan.baseline_bytes

# %% [markdown]
# Each graph of torch.compile has a plan like the one above, with the same pictures.
#
# ## The answer

# %%
print(
    f"A step of {format_bytes(peaks['eager'])} trains within {format_bytes(budget)} "
    f"(measured: {format_bytes(fast_peak)}),\n"
    f"for {fast.plan.overhead:.0%} more time by the plan where checkpointing every block takes "
    f"{per_block.overhead:.0%} more;\n"
    f"{int((fast_losses == eager_losses).sum())} of {len(fast_losses)} losses are equal to "
    "eager's bit for bit."
)

# %% [markdown]
# Next: a network that is no chain of layers,
# [02_unet_segmentation](02_unet_segmentation.ipynb); and how to choose the budget where there is
# a choice, [03_choosing_a_budget](03_choosing_a_budget.ipynb).
