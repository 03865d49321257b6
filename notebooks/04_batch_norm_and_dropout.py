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
# # Batch norm and dropout
#
# **The question.** Some operations have side effects: batch norm updates its running statistics,
# dropout advances the random generator. What happens if they run twice?

# %%
import copy

import torch
import torch.nn.functional as F
from IPython.display import SVG
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.limits.units import format_bytes

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.deterministic = True

# %% [markdown]
# A small ResNet with both. `wrap` decides how a block runs: directly or under a checkpoint.

# %%


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        h = self.dropout(F.relu(self.norm1(self.conv1(x))))
        return F.relu(x + self.norm2(self.conv2(h)))


class ResNet(nn.Module):
    def __init__(self, width=16, depth=5, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images, labels, wrap=lambda block, x: block(x)):
        x = self.stem(images)
        for block in self.blocks:
            x = wrap(block, x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


torch.manual_seed(0)
start = ResNet().to(device).train()
rows = 8 if device == "cpu" else 512  # on a GPU, libraries alone take tens of MiB
images = torch.randn(rows, 3, 24, 24, device=device)
labels = torch.randint(0, 10, (rows,), device=device)


def step(module, **options):
    """Run a step from a fixed seed; return its results, and the next random number."""
    torch.manual_seed(7)
    loss = module(images, labels, **options)
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradients": {name: p.grad.clone() for name, p in module.named_parameters()},
        "statistics": {name: b.clone() for name, b in module.named_buffers()},
        "next random number": torch.rand((), device=device),
    }


eager = step(copy.deepcopy(start))
counter = "blocks.0.norm1.num_batches_tracked"
mean = "blocks.0.norm1.running_mean"
print(f"eager: batches seen after one step: {eager['statistics'][counter].item()}")
assert eager["statistics"][counter] == 1

# %% [markdown]
# ## By hand, first trap: statistics are updated twice
#
# A checkpoint recomputes the block's forward during the backward pass. Batch norm cannot know that
# this is the same batch: it counts the batch a second time, and updates its running mean a second
# time. The gradients do not show it. Later, evaluation does.

# %%


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


by_hand = step(copy.deepcopy(start), wrap=checkpointed)
print(f"batches seen after one step: {by_hand['statistics'][counter].item()}")
moved = by_hand["statistics"][mean].norm() / eager["statistics"][mean].norm()
print(f"the running mean has moved {moved:.2f} times as far as it should")
assert by_hand["statistics"][counter] == 2
assert not torch.allclose(by_hand["statistics"][mean], eager["statistics"][mean])

# %% [markdown]
# ## By hand, second trap: another dropout mask
#
# By default `checkpoint` restores the random generator before it recomputes a block. That costs
# time, so an option turns it off: `preserve_rng_state=False`. With dropout inside, the
# recomputation then samples another mask, and the backward pass belongs to a forward pass that
# never ran. There is no error. The loss is right, and the gradients are wrong.

# %%


def without_rng(block, x):
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def equal(one, other, what="gradients"):
    """Return how many tensors are equal bit for bit."""
    return sum(torch.equal(one[what][name], other[what][name]) for name in one[what])


wrong = step(copy.deepcopy(start), wrap=without_rng)
count = len(eager["gradients"])
name = "stem.weight"
error = (wrong["gradients"][name] - eager["gradients"][name]).norm()
relative = (error / eager["gradients"][name].norm()).item()
print(f"loss as in eager mode: {torch.equal(wrong['loss'], eager['loss'])}")
print(f"gradients as in eager mode: {equal(wrong, eager)} of {count}")
print(f"{name} is wrong by {relative:.0%} of its length")
assert torch.equal(wrong["loss"], eager["loss"])
assert relative > 0.01

# %% [markdown]
# ## With remat
#
# The costs are nominal ones of a CPU, so that this plan is the same on every machine.
# At a third of the memory, batch norms and dropouts are among the recomputed operations.

# %%
model = copy.deepcopy(start)
fast = remat.optimize(
    model,
    "35%",
    (images, labels),
    costs=remat.Roofline("cpu"),
    strategy=remat.Auto(gap=0.01, time_limit=5.0, stall=2.0),
)
plan = fast.plan
recomputed = {
    plan.graph.operations[op].name: n for op, n in plan.schedule.recomputed(plan.graph).items()
}
norms = sum("batch_norm" in name for name in recomputed)
dropouts = sum("dropout" in name for name in recomputed)
print(plan)
print(f"\namong them are {norms} batch norms and {dropouts} dropouts")
assert norms > 0
assert dropouts > 0

# %%
SVG(plan.to_svg())

# %%
planned = step(fast)
statistics = len(eager["statistics"])
print(f"batches seen after one step: {planned['statistics'][counter].item()}")
print(f"gradients as in eager mode:  {equal(planned, eager)} of {count}")
print(f"statistics as in eager mode: {equal(planned, eager, 'statistics')} of {statistics}")
assert planned["statistics"][counter] == 1
assert torch.equal(planned["loss"], eager["loss"])
assert equal(planned, eager) == count
assert equal(planned, eager, "statistics") == statistics
assert torch.equal(planned["next random number"], eager["next random number"])

# %% [markdown]
# ## Why remat avoids both
#
# remat does not rerun Python code. It recomputes single operations of a traced graph, and knows
# their side effects:
#
# * The update of the running statistics is a separate operation, which runs once. A recomputed
#   batch norm does not update statistics: it has the same result and no side effect.
# * A recomputed random operation starts from the generator's state at its first run, and the
#   generator is restored after it. The mask is the same, and so is every random number after the
#   step.
#
# The code of the backward pass shows it. Here is one recomputation of each kind:

# %%
code = fast.backward_graph.code.splitlines()
for word in ("no_stats", "run_with_generator_state("):
    print(next(line for line in code if word in line).split(";")[0].strip())

# %% [markdown]
# ## The answer

# %%
print(
    f"Run twice by hand, batch norm has seen {by_hand['statistics'][counter].item()} batches for "
    f"1, and careless dropout bends a gradient by {relative:.0%}.\n"
    f"remat's step recomputes {sum(recomputed.values())} operations and peaks at "
    f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.baseline_peak_bytes)}: "
    "loss, gradients, statistics\nand the random numbers after it are those of eager mode, bit "
    "for bit."
)
