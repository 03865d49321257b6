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
# seconds. Nothing is downloaded. A large model differs in the numbers, not in the calls.

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
from remat.frontend.memory.allocator_peak import cuda_peak
from remat.frontend.memory.meter import measure_step, unique_bytes
from remat.limits.units import format_bytes
from remat.strategies import PerBlock

transformers.logging.set_verbosity_error()
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## The step, and what it takes
#
# Six layers of GPT-2 with dropout, as in training. Short rows of tokens, but many of them: almost
# all of the memory is activations, which the forward pass makes and the backward pass needs.

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
    """Forward and backward. The seed decides what dropout drops."""
    torch.manual_seed(seed)
    output = module(**batch)  # the logits stay in memory for as long as this name has them
    output.loss.backward()
    return output.loss.detach()


def peak_of(module, run):
    """The most bytes that are allocated while a step runs: parameters and batch included."""
    module.zero_grad(set_to_none=True)
    own = [*module.parameters(), *module.buffers(), ids]
    if device == "cpu":
        return measure_step(run, own).peak_bytes
    others = torch.cuda.memory_allocated() - unique_bytes(own)
    return cuda_peak(run) - others


expected = remat.estimate(model, example_kwargs=batch)
print(expected)

# %% [markdown]
# That was read off the model, and nothing has run yet. Now a step is run, and watched:

# %%
step(model)  # the first step starts libraries
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
# The usual answer is to checkpoint every block. Its activations are thrown away after the forward
# pass, and the whole block runs again before its backward pass.

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
# It fits. But every block runs twice, its dear operations and its cheap ones, whether that was
# needed or not.
#
# ## One line
#
# `remat.optimize` is told how much memory there is. It records the whole step as a graph, measures
# what each operation takes, and looks for the cheapest schedule that fits.
#
# The gradients are cleared first: a step that adds to gradients which are there already needs
# memory for both, and would be planned for that.

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
# The plan says what is recomputed, what that costs, and how far from the best possible it can be
# at most: the *bound* is proved. The picture is the step from left to right. Memory rises through
# the forward pass and stays under the line.

# %%
SVG(fast.plan.to_svg())

# %% [markdown]
# That was a prediction. Now the measurement:

# %%
peaks["remat"] = peak_of(fast, lambda: step(fast))
for way, peak in peaks.items():
    print(f"{way:<22}{format_bytes(peak):>9}   {peak / peaks['eager']:.0%} of eager")
predicted = fast.plan.peak_bytes
print(
    f"\nthe plan said {format_bytes(predicted)}, {peaks['remat'] / predicted - 1:+.2%} was measured"
)
assert peaks["remat"] <= budget

# %% [markdown]
# ## What it costs
#
# First by the plan's own costs: checkpointing every block, for the same graph and the same prices.
# What remat finds is never dearer, because it looks at what checkpointing per block would do, too.

# %%
per_block = remat.solve(fast.plan.graph, budget, PerBlock())
for way, plan in (("checkpoint per block", per_block), ("remat", fast.plan)):
    print(f"{way:<22}{plan.overhead:+.1%} time at {format_bytes(plan.peak_bytes)}")
assert fast.plan.time_s <= per_block.time_s

# %% [markdown]
# Then by the clock. The three ways take turns, and the median counts. On a machine that does
# other work as well, or with a model this small, expect some noise.

# %%
ways = {"eager": model, "checkpoint per block": by_hand, "remat": fast}
times = {way: [] for way in ways}
for _ in range(3):
    for way, module in ways.items():
        module.zero_grad(set_to_none=True)
        start = time.perf_counter()
        step(module).item()
        times[way].append(time.perf_counter() - start)
medians = {way: statistics.median(found) for way, found in times.items()}
for way, seconds in medians.items():
    change = seconds / medians["eager"] - 1
    print(f"{way:<22}{seconds * 1e3:>6.0f} ms   {change:+.0%}")

# %% [markdown]
# ## Does it still learn the same?
#
# Train both from the same weights with AdamW: three steps, with dropout, and with the peak of every
# step measured. `fast` has the model's own parameters, so the optimizer and `state_dict` work as
# always. (The optimizer's two numbers for each parameter come on top of the step in any case, and
# are not counted here.)

# %%
start_weights = copy.deepcopy(model.state_dict())


def train(module, steps=3):
    """The losses, and the highest peak of a forward and backward."""
    module.load_state_dict(start_weights)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, highest = [], 0
    for number in range(steps):
        seed = 100 + number
        peak = peak_of(module, lambda seed=seed: losses.append(step(module, seed)))
        highest = max(highest, peak)
        optimizer.step()
    return torch.stack(losses), highest


eager_losses, eager_peak = train(model)
fast_losses, fast_peak = train(fast)
print("  step     eager     remat")
for number, (a, b) in enumerate(zip(eager_losses.tolist(), fast_losses.tolist(), strict=True), 1):
    print(f"{number:>6}{a:>10.6f}{b:>10.6f}")
print(f"  peak {format_bytes(eager_peak):>9} {format_bytes(fast_peak):>9}")

assert fast_peak <= budget
assert fast_losses[-1] < fast_losses[0]
tolerance = 0.0 if device == "cpu" else 1e-3  # some kernels of a GPU add in any order
torch.testing.assert_close(fast_losses, eager_losses, rtol=tolerance, atol=0.0)

# %% [markdown]
# ## Under `torch.compile`
#
# Who compiles anyway leaves the planning to the compiler: `backend="remat"` plans on the graph that
# torch.compile has made. A percentage is then of what the same step takes under plain
# torch.compile. Here for the first two blocks alone, and without Inductor's kernels (`"inductor":
# False`), since making them takes a C++ compiler; leave that out where there is one.

# %%
blocks = torch.nn.Sequential(*model.transformer.h[:2])
options = {"budget": "60%", "inductor": False, "time_limit": 3.0}
compiled = torch.compile(blocks, backend="remat", options=options)
compiled(model.transformer.wte(ids)).square().mean().backward()
(found,) = remat.compiled_plans()
print(found)
assert found.plan.peak_bytes <= found.budget_bytes < found.baseline_bytes

# %% [markdown]
# Each graph that torch makes of the model has a plan like the one above, with the same pictures.
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
# Next: a network whose parts do not come one after the other,
# [02_unet_segmentation](02_unet_segmentation.ipynb); and how to choose the budget where there is
# a choice, [03_choosing_a_budget](03_choosing_a_budget.ipynb).
