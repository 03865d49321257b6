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
# # A U-Net for segmentation
#
# **The question.** A U-Net is no chain of equal blocks: the encoder passes its activations to the
# decoder. Which of them should be retained, and which recomputed?

# %%
from collections import Counter

import torch
import torch.nn.functional as F
from IPython.display import SVG
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.frontend.memory.meter import cuda_peak, measure_step, unique_bytes
from remat.limits.units import format_bytes
from remat.view import modules_svg

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## The network
#
# The U-Net of Ronneberger et al. (2015), narrow, with batch norm. The encoder halves the image
# four times, and the decoder doubles it as often. At each size the decoder reads the encoder's
# activation: the skip connections. The loss has a label for every pixel.
#
# `by_hand=True` checkpoints every block, for comparison.

# %%


def pair(before, after):
    """Return two convolutions, each followed by batch norm and ReLU."""
    layers = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width=12, levels=4, classes=21):
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(pair(a, b) for a, b in zip([3, *widths], widths, strict=False))
        deep_first = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in deep_first)
        self.up = nn.ModuleList(pair(2 * b, b) for _, b in deep_first)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images, labels, by_hand=False):
        def run(block, x):
            return checkpoint(block, x, use_reentrant=False) if by_hand else block(x)

        x, skipped = run(self.down[0], images), []
        for block in self.down[1:]:
            skipped.append(x)
            x = run(block, F.max_pool2d(x, 2))
        for grow, block in zip(self.grow, self.up, strict=True):
            x = run(block, torch.cat([skipped.pop(), grow(x)], 1))
        return F.cross_entropy(self.head(x), labels)


torch.manual_seed(0)
model = UNet().to(device).train()
rows = 4 if device == "cpu" else 64  # on a GPU, libraries alone take tens of MiB
images = torch.randn(rows, 3, 96, 96, device=device)
labels = torch.randint(0, 21, (rows, 96, 96), device=device)


def peak_of(module, **options):
    """Return the peak of allocated bytes during a step, with parameters, batch and gradients."""

    def step():
        module(images, labels, **options).backward()

    module.zero_grad(set_to_none=True)
    constants = [*module.parameters(), *module.buffers(), images, labels]
    if device == "cpu":
        peak = measure_step(step, constants).peak_bytes
    else:
        other_bytes = torch.cuda.memory_allocated() - unique_bytes(constants)
        peak = cuda_peak(step) - other_bytes
    module.zero_grad(set_to_none=True)
    return peak


model(images, labels).backward()  # the first step initializes libraries
eager = peak_of(model)
by_hand = peak_of(model, by_hand=True)
print(f"eager                 {format_bytes(eager):>9}")
print(f"checkpoint per block  {format_bytes(by_hand):>9}   {by_hand / eager:.0%}")

# %% [markdown]
# ## Why checkpoints by hand are awkward here
#
# `checkpoint` retains the *inputs* of a block. The decoder's blocks read a concatenation, which
# copies the encoder's activation although that one is retained anyway; and the largest of these, at
# full size, come last. The inputs of a block stay in memory, however large they are, and its
# operations run twice, however expensive they are. The user has to find out which blocks are worth
# checkpointing, and repeat that when the image size changes.
#
# ## With a budget instead
#
# Use the peak of the checkpoints as the budget: the same memory, with another selection.

# %%
budget = by_hand
fast = remat.optimize(
    model,
    budget,
    (images, labels),
    strategy=remat.Auto(gap=0.02, time_limit=4.0, stall=1.5),
)
plan = fast.plan
print(plan)

# %%
measured = peak_of(fast)
print(f"measured: {format_bytes(measured)}, {measured / eager:.0%} of eager's")
assert measured <= budget

# %% [markdown]
# The timeline shows the step from left to right, below the line of the budget.

# %%
SVG(plan.to_svg())

# %% [markdown]
# ## Which parts are recomputed?
#
# The plan decides about operations, not blocks. Count them by module and by kind.

# %%
recomputed = plan.schedule.recomputed(plan.graph)
runs, saved, kinds = Counter(), Counter(), Counter()
for op, times in recomputed.items():
    operation = plan.graph.operations[op]
    part = ".".join(operation.module.split(".")[:2]) or "(between modules)"
    runs[part] += times
    saved[part] += sum(plan.graph.values[value].size_bytes for value in operation.outputs)
    kinds[operation.name.rstrip("0123456789_")] += times
print(f"{'part':<20}{'recomputed':>11}{'output':>11}")
for part, size in saved.most_common():
    print(f"{part:<20}{runs[part]:>11}{format_bytes(size):>11}")
print("\nkinds:", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))

# %%
SVG(modules_svg(plan))

# %% [markdown]
# By bytes, most is recomputed at the two ends of the U, where images are large. And the plan does
# not recompute whole blocks, but operations that are cheap for their size: batch norm and ReLU
# rather than convolutions. A checkpoint cannot select within a block.

# %%
operations = plan.graph.operations
blocks = [o for o in operations if not o.backward and o.module.startswith(("down", "up"))]
twice = sum(operation.cost_s for operation in blocks) / plan.baseline_time_s
convolutions = sum(operation.name.startswith("convolution") for operation in blocks)
print(f"every block twice: {twice:+.1%} time, {convolutions} convolutions recomputed")
print(f"this plan: {plan.overhead:+.1%} time, {kinds['convolution']} convolutions recomputed")
assert plan.overhead < twice

# %% [markdown]
# The plan explains each decision. Here is the largest value that is recomputed:

# %%


def output_bytes(op):
    return sum(plan.graph.values[value].size_bytes for value in operations[op].outputs)


print(plan.explain(operations[max(recomputed, key=output_bytes)].name))

# %% [markdown]
# ## Is it the same step?
#
# Batch norm updates statistics of its inputs. A recomputation must not update them a second time
# ([04_batch_norm_and_dropout](04_batch_norm_and_dropout.ipynb) shows how that goes wrong).

# %%
torch.backends.cudnn.deterministic = True
state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
results = []
for module in (model, fast):
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    loss = module(images, labels)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    results.append((loss.detach(), gradients, statistics))
(loss, gradients, statistics), (fast_loss, fast_gradients, fast_statistics) = results

before = {"loss": loss} | gradients | statistics
after = {"loss": fast_loss} | fast_gradients | fast_statistics
equal = sum(torch.equal(before[name], after[name]) for name in before)
print(
    f"{equal} of {len(before)} tensors are equal bit for bit: "
    f"the loss, {len(gradients)} gradients and {len(statistics)} buffers"
)
tolerance = 0.0 if device == "cpu" else 1e-3  # some GPU kernels add in a varying order
torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)

# %% [markdown]
# ## The answer

# %%
print(
    f"The step's peak falls from {format_bytes(eager)} to {format_bytes(measured)} when "
    f"{sum(recomputed.values())} operations are recomputed,\nmost of them batch norms and ReLUs. "
    f"That takes {plan.overhead:.0%} more time by the measured costs;\n"
    f"checkpoints around every block reach the same peak for {twice:.0%}."
)
