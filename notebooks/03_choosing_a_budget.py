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
# # Choosing a budget
#
# **The question.** Less memory costs more time. How much? Where is it cheap, where does it become
# expensive, and what would a smaller GPU cost?
#
# To answer this, you need neither a GPU nor memory for the model. It is traced on torch's "meta"
# device, where tensors have shapes and no contents, and its costs come from the data sheet of a
# device, by a roofline.

# %%
import textwrap

import torch
import torch.nn.functional as F
from IPython.display import SVG
from torch import nn

import remat
from remat.limits.units import format_bytes, format_seconds
from remat.strategies import ChenSqrt, EveryK, KeepAll, Knapsack, PerBlock, Revolve, Rotor
from remat.view import frontier_svg

# %% [markdown]
# ## The model
#
# Six of GPT-2's layers with a smaller vocabulary, for 96 rows of 1,024 tokens. The model is written
# out, to show what is traced.

# %%


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(a.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, layers=6, width=768, heads=12, vocabulary=8192, tokens=1024):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, labels):
        x = self.dropout(self.words(ids) + self.places.weight)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


with torch.device("meta"):
    model = GPT().train()
    ids = torch.zeros(96, 1024, dtype=torch.long)
trace = remat.trace(model, (ids, ids), device="h200")
on_h200 = remat.measure(trace, remat.Roofline("h200", allow_tf32=True))
keep_all = remat.solve(on_h200, "100%", KeepAll())
parameters = sum(parameter.numel() for parameter in model.parameters())
print(
    f"{parameters / 1e6:.0f} M parameters, {len(keep_all.graph)} operations a step; on an H200, "
    f"without recomputation:\n{format_bytes(keep_all.peak_bytes)} at its peak, "
    f"about {format_seconds(keep_all.time_s)} a step"
)

# %% [markdown]
# ## The frontier
#
# `remat.sweep` solves for several budgets. Each plan comes with a proved bound: no schedule of
# this graph's order takes less time within that budget.

# %%
auto = remat.Auto(time_limit=4.0, stall=1.5)
budgets = ["100%", "85%", "70%", "60%", "50%", "40%", "35%", "32%"]
plans = remat.sweep(on_h200, budgets, auto)
print(f"{'budget':>10}{'peak':>10}{'extra time':>12}{'at least':>10}")
for plan in plans:
    print(
        f"{format_bytes(plan.budget_bytes):>10}{format_bytes(plan.peak_bytes):>10}"
        f"{plan.overhead:>12.1%}{plan.lower_bound:>10.1%}"
    )
assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
overheads = [plan.overhead for plan in plans]
assert overheads == sorted(overheads, reverse=True), "more memory never costs more time"

# %% [markdown]
# ## And the recipes?
#
# Published methods solve the same problem by a rule: checkpoint every block; every *k* blocks; √n
# segments (Chen 2016); binomial checkpointing (Revolve, Griewank and Walther 2000); dynamic
# programming over a chain of stages (Rotor, Beaumont 2019); a knapsack of saved tensors, as in
# `torch.compile`. Here they are compared on the same graph with the same costs. A dash means that a
# recipe cannot meet the budget.

# %%
recipes = [
    PerBlock(),
    EveryK(),
    ChenSqrt(),
    Revolve(),
    Rotor(),
    Knapsack(),
]
comparison = remat.compare(on_h200, ["70%", "50%", "35%"], [auto, *recipes])
print(comparison)

# %%
baselines = [row for row in comparison.rows if row.strategy != auto.name]
SVG(frontier_svg(plans, baselines))

# %% [markdown]
# The line is remat's, the marks are the recipes'. A recipe has one point or a few: it fits or it
# does not, and unused memory is wasted time. No recipe is faster than remat's plan by more than the
# plan's proved gap.

# %%
for budget in dict.fromkeys(row.budget for row in comparison.rows):
    rows = [row for row in comparison.rows if row.budget == budget and row.plan]
    by_name = {row.strategy: row.plan for row in rows}
    remat_plan = by_name.pop(auto.name)
    best = min(by_name, key=lambda name: by_name[name].time_s)
    assert remat_plan.time_s * (1 - remat_plan.gap) <= by_name[best].time_s
    print(
        f"{budget}: {remat_plan.overhead:+.1%}, "
        f"the best recipe is {best} with {by_name[best].overhead:+.1%}"
    )

# %% [markdown]
# ## Where is the knee?
#
# From right to left on the line, each GiB less costs time: little at first, then more. A knee has
# no exact definition; here it is the point that lies furthest below the straight line between both
# ends.

# %%
print("from      to        price of a GiB less")
for smaller, larger in zip(reversed(plans[:-1]), reversed(plans[1:]), strict=True):
    gib = (larger.peak_bytes - smaller.peak_bytes) / 2**30
    price = (smaller.time_s - larger.time_s) / gib
    print(
        f"{format_bytes(larger.peak_bytes):<10}{format_bytes(smaller.peak_bytes):<10}"
        f"{format_seconds(price)} ({price / keep_all.time_s:.2%} of the step)"
    )


def below_the_chord(plan):
    """Return how far a plan lies below the line between the ends, in shares of both axes."""
    first, last = plans[0], plans[-1]
    along = (plan.peak_bytes - first.peak_bytes) / (last.peak_bytes - first.peak_bytes)
    return 1 - along - (plan.overhead - last.overhead) / (first.overhead - last.overhead)


knee = max(plans, key=below_the_chord)
print(
    f"\nthe knee: {format_bytes(knee.peak_bytes)}, "
    f"{knee.peak_bytes / knee.baseline_peak_bytes:.0%} of the memory for {knee.overhead:.1%}"
)
assert plans[0].peak_bytes < knee.peak_bytes < plans[-1].peak_bytes

# %% [markdown]
# ## What would a smaller GPU cost?
#
# The same step on other devices. Each has other kernels and other costs, so each gets its own trace
# and plan: with scarce bandwidth, other operations are cheap to recompute than with scarce
# arithmetic. AdamW's two values for each parameter and a margin of a tenth are subtracted from the
# device's memory first. (Costs here are for float32 with TF32 allowed.)

# %%
optimizer_bytes = 2 * 4 * parameters
print(
    f"{'device':<8}{'memory':>9}{'budget':>10}{'peak':>10}{'extra time':>12}{'step':>9}{'extra':>9}"
)
on_device = {}
for name in ("h200", "a100", "l40s", "l4"):
    roofline = remat.Roofline(name, allow_tf32=True)
    budget = int(0.9 * roofline.device.memory_bytes) - optimizer_bytes
    device_trace = remat.measure(remat.trace(model, (ids, ids), device=name), roofline)
    plan = remat.solve(device_trace, budget, auto)
    assert plan.peak_bytes <= budget
    on_device[name] = plan
    recomputation_s = plan.time_s - plan.baseline_time_s
    print(
        f"{name:<8}{format_bytes(roofline.device.memory_bytes):>9}{format_bytes(budget):>10}"
        f"{format_bytes(plan.peak_bytes):>10}{plan.overhead:>12.1%}"
        f"{format_seconds(plan.time_s):>9}{format_seconds(recomputation_s):>9}"
    )

# %% [markdown]
# The smallest of them, with its frontier:

# %%
on_l4, smallest = device_trace, roofline
SVG(
    frontier_svg(
        [on_device["l4"], *remat.sweep(on_l4, ["100%", "80%", "40%"], auto)],
        capacity_bytes=smallest.device.memory_bytes,
    )
)

# %% [markdown]
# ## Will it fit?
#
# `remat.fit` asks for the training loop instead of a budget: with the memory of the optimizer, and
# with what torch's allocator reserves. If the loop does not fit, a plan is compared with the
# alternatives, the fastest that fits first.

# %%
answer = remat.fit(
    model,
    (ids, ids),
    device="l4",
    optimizer="adamw",
    batch=len(ids),
    with_batch=lambda rows: (model, (ids[:rows], ids[:rows])),
)
print(answer)
assert not answer.fits
assert answer.options[0].fits

# %% [markdown]
# ## And if it does not fit at all?
#
# Then the error reports a budget that is feasible.

# %%
try:
    remat.solve(on_l4, "2GiB", auto)
except remat.InfeasibleBudget as error:
    print(textwrap.fill(str(error), 96))
    assert error.min_feasible_bytes > 2 * 2**30

# %% [markdown]
# ## The answer

# %%
half = next(plan for plan in plans if plan.budget_bytes >= keep_all.peak_bytes // 2)
l4 = on_device["l4"]
print(
    f"Half of the memory costs {half.overhead:.1%} more time. The knee is at "
    f"{knee.peak_bytes / knee.baseline_peak_bytes:.0%} of the memory and {knee.overhead:.1%}.\n"
    f"On an L4 the step needs {format_bytes(l4.peak_bytes)} where it would take "
    f"{format_bytes(l4.baseline_peak_bytes)}, and recomputation adds {l4.overhead:.1%}\n"
    f"to the time of the slower device "
    f"({l4.baseline_time_s / on_device['h200'].baseline_time_s:.1f} times as long)."
)

# %% [markdown]
# These times are estimates from data sheets. They rank schedules, but are no exact predictions. On
# the device itself, `remat.optimize(model, budget)` measures the costs.
