"""Losses of language models as their users write them, each with a model and a batch.

Every loss takes the logits of `Policy` (batch x tokens x vocabulary) and the batch, and is written
out in plain PyTorch: none of them splits anything. Losses read all sizes from the logits and the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 8, 320
SEQUENCES, TOKENS = 8, 16
Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], Any]

LOSSES: dict[str, Loss] = {}


def loss(function: Loss) -> Loss:
    """Add a loss to `LOSSES`, by its name."""
    LOSSES[function.__name__] = function
    return function


class Policy(nn.Module):
    """Embedding, a layer with dropout, and a head over the vocabulary; its loss is part of it."""

    def __init__(
        self,
        criterion: Loss,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        *,
        words: int = WORDS,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.criterion = criterion
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(words, width, dtype=dtype)
        self.layer = nn.Linear(width, width, dtype=dtype)
        self.head = nn.Linear(width, words, bias=False, dtype=dtype)

    def forward(self, ids: Tensor, **batch: Tensor) -> Any:
        hidden = self.dropout(torch.tanh(self.layer(self.embedding(ids))))
        return self.criterion(self.head(hidden), {"ids": ids, **batch})


def batch_of(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    shape: tuple[int, int] = (SEQUENCES, TOKENS),
    words: int = WORDS,
    width: int = WIDTH,
) -> Batch:
    """Return a batch with all that the losses read: labels, masks, scores of another model."""
    generator = torch.Generator().manual_seed(seed)
    sequences, tokens = shape

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=generator, dtype=dtype)

    ids = torch.randint(words, shape, generator=generator)
    labels = torch.randint(words, shape, generator=generator)
    ignored = torch.where(uniform(*shape) < 0.2, -100, labels)
    return {
        "ids": ids,
        "labels": labels,
        "ignored": ignored,
        "mask": (uniform(*shape) < 0.8).to(dtype),
        "advantages": uniform(sequences) - 0.5,
        "token_advantages": uniform(*shape) - 0.5,
        "old_logps": -5 - uniform(*shape),
        "ref_logps": -5 - uniform(*shape),
        "ref_sums": -50 * uniform(sequences),
        "teacher_hidden": uniform(*shape, width) - 0.5,
        "teacher_head": uniform(words, width) - 0.5,
        "teacher_values": uniform(*shape, 5),
        "teacher_indices": torch.randint(words, (*shape, 5), generator=generator),
        "class_weights": 0.5 + uniform(words),
        "documents": torch.arange(tokens)
        .mul(3)
        .div(tokens, rounding_mode="floor")
        .expand(shape)
        .contiguous(),
        "returns": uniform(*shape),
    }


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum().clamp(min=1.0)


def logps_of(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# -- cross entropy and its relatives ---------------------------------------------------------------


@loss
def cross_entropy(logits: Tensor, b: Batch) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), b["ignored"].flatten())


@loss
def shifted(logits: Tensor, b: Batch) -> Any:
    shift_logits = logits[..., :-1, :].contiguous()
    labels = b["ignored"][..., 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), labels.view(-1))


@loss
def masked_tokens(logits: Tensor, b: Batch) -> Any:
    tokens = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="none")
    return masked_mean(tokens.view_as(b["mask"]), b["mask"])


@loss
def transposed(logits: Tensor, b: Batch) -> Any:
    return masked_mean(
        F.cross_entropy(logits.transpose(1, 2), b["labels"], reduction="none"), b["mask"]
    )


@loss
def with_accuracy(logits: Tensor, b: Batch) -> Any:
    value = F.cross_entropy(logits.flatten(0, 1), b["ignored"].flatten())
    hits = (logits.argmax(-1) == b["labels"]).float()
    return value, masked_mean(hits, b["mask"].float()).detach()


@loss
def smoothed_with_z_loss(logits: Tensor, b: Batch) -> Any:
    rows = logits.flatten(0, 1)
    z = torch.logsumexp(rows, -1).square().mean()
    return F.cross_entropy(rows, b["ignored"].flatten(), label_smoothing=0.1) + 1e-4 * z


@loss
def soft_cap(logits: Tensor, b: Batch) -> Any:
    capped = 30.0 * torch.tanh(logits / 30.0)
    return F.cross_entropy(capped.flatten(0, 1), b["ignored"].flatten())


@loss
def class_weighted(logits: Tensor, b: Batch) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), b["ignored"].flatten(), b["class_weights"])


@loss
def focal(logits: Tensor, b: Batch) -> Any:
    logps = logps_of(logits, b["labels"])
    return masked_mean(-((1 - logps.exp()) ** 2) * logps, b["mask"])


@loss
def poly_one_hot(logits: Tensor, b: Batch) -> Any:
    probabilities = (F.one_hot(b["labels"], logits.size(-1)) * logits.softmax(-1)).sum(-1)
    tokens = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="none")
    return (tokens.view_as(probabilities) + 1.0 - probabilities).mean()


@loss
def dynamic_fine_tuning(logits: Tensor, b: Batch) -> Any:
    tokens = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="none")
    return masked_mean((tokens * torch.exp(-tokens.detach())).view_as(b["mask"]), b["mask"])


@loss
def unlikelihood(logits: Tensor, b: Batch) -> Any:
    logps = logits.log_softmax(-1)
    good = logps.gather(-1, b["labels"].unsqueeze(-1)).squeeze(-1)
    bad = logps.gather(-1, b["ids"].unsqueeze(-1)).squeeze(-1)
    return masked_mean(-good - torch.log((1 - bad.exp()).clamp(min=1e-5)), b["mask"])


@loss
def packed_documents(logits: Tensor, b: Batch) -> Any:
    tokens = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="none")
    tokens = tokens.view_as(b["documents"])
    sums = tokens.new_zeros(len(tokens), 3).scatter_add(1, b["documents"], tokens)
    counts = torch.zeros_like(sums).scatter_add(1, b["documents"], torch.ones_like(tokens))
    return (sums / counts.clamp(min=1)).mean()


# -- reinforcement learning ------------------------------------------------------------------------


@loss
def grpo(logits: Tensor, b: Batch) -> Any:
    logps = logps_of(logits, b["labels"])
    ratio = torch.exp(logps - b["old_logps"])
    advantages = b["advantages"].unsqueeze(1)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    policy = -torch.min(ratio * advantages, clipped * advantages)
    kl = torch.exp(b["ref_logps"] - logps) - (b["ref_logps"] - logps) - 1
    tokens = policy + 0.04 * kl
    return ((tokens * b["mask"]).sum(-1) / b["mask"].sum(-1).clamp(min=1.0)).mean()


@loss
def grpo_with_temperature_and_entropy(logits: Tensor, b: Batch) -> Any:
    scaled = logits / 0.7
    logps = logps_of(scaled, b["labels"])
    with torch.no_grad():
        probabilities = scaled.softmax(-1)
        entropy = torch.logsumexp(scaled, -1) - (probabilities * scaled).sum(-1)
    ratio = torch.exp(logps - logps.detach())
    policy = -ratio * b["advantages"].unsqueeze(1)
    return masked_mean(policy, b["mask"]), masked_mean(entropy, b["mask"])


@loss
def grpo_by_rows(logits: Tensor, b: Batch) -> Any:
    selected = torch.gather(logits, -1, b["labels"].unsqueeze(-1)).squeeze(-1)
    sums = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    ratio = torch.exp(selected - sums - b["old_logps"])
    return masked_mean(-ratio * b["advantages"].unsqueeze(1), b["mask"])


@loss
def grpo_by_rows_of_log_softmax(logits: Tensor, b: Batch) -> Any:
    rows = []
    for row, labels in zip(logits, b["labels"], strict=True):
        logps = F.log_softmax(row, dim=-1)
        rows.append(logps.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    ratio = torch.exp(torch.stack(rows) - b["old_logps"])
    return masked_mean(-ratio * b["advantages"].unsqueeze(1), b["mask"])


@loss
def gspo(logits: Tensor, b: Batch) -> Any:
    difference = logps_of(logits, b["labels"]) - b["old_logps"]
    weights = (difference * b["mask"]).sum(-1) / b["mask"].sum(-1).clamp(min=1.0)
    ratio = weights.exp()
    advantages = b["advantages"]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


@loss
def ppo_with_entropy_bonus(logits: Tensor, b: Batch) -> Any:
    logps = logits.log_softmax(-1)
    chosen = logps.gather(-1, b["labels"].unsqueeze(-1)).squeeze(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    ratio = (chosen - b["old_logps"]).exp()
    losses = -ratio * b["token_advantages"], -ratio.clamp(0.8, 1.2) * b["token_advantages"]
    return masked_mean(torch.maximum(*losses), b["mask"]) - 0.01 * masked_mean(entropy, b["mask"])


@loss
def categorical(logits: Tensor, b: Batch) -> Any:
    policy = torch.distributions.Categorical(logits=logits, validate_args=False)
    chosen = policy.log_prob(b["labels"])
    return -(chosen * b["token_advantages"]).mean() - 0.01 * policy.entropy().mean()


@loss
def top_two_margin(logits: Tensor, b: Batch) -> Any:
    best = logits.topk(2, dim=-1).values
    tokens = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten())
    return tokens + F.relu(0.1 - (best[..., 0] - best[..., 1])).mean()


@loss
def nucleus(logits: Tensor, b: Batch) -> Any:
    with torch.no_grad():
        ordered, indices = logits.softmax(-1).sort(dim=-1, descending=True)
        excluded = ordered.cumsum(-1) - ordered > 0.9
        excluded = torch.zeros_like(excluded).scatter(-1, indices, excluded)
    return masked_mean(-logps_of(logits.masked_fill(excluded, -1e4), b["labels"]), b["mask"])


# -- preferences -----------------------------------------------------------------------------------


def sequence_logps(logits: Tensor, b: Batch, average: bool = False) -> Tensor:
    labels, mask = b["labels"][:, 1:], b["mask"][:, 1:]
    logps = logps_of(logits[:, :-1], labels) * mask
    return logps.sum(-1) / mask.sum(-1).clamp(min=1.0) if average else logps.sum(-1)


@loss
def dpo(logits: Tensor, b: Batch) -> Any:
    chosen, rejected = sequence_logps(logits, b).chunk(2)
    ref_chosen, ref_rejected = b["ref_sums"].chunk(2)
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    rewards = (0.1 * (chosen - ref_chosen)).detach().mean()
    return -F.logsigmoid(0.1 * margin).mean(), rewards


@loss
def ipo(logits: Tensor, b: Batch) -> Any:
    chosen, rejected = sequence_logps(logits, b, average=True).chunk(2)
    return ((chosen - rejected - 1 / 0.2) ** 2).mean()


@loss
def kto(logits: Tensor, b: Batch) -> Any:
    rewards = sequence_logps(logits, b) - b["ref_sums"]
    half = len(rewards) // 2
    good, bad = rewards[:half], rewards[half:]
    kl = rewards.mean().clamp(min=0).detach()
    losses = 1 - torch.sigmoid(0.1 * (good - kl)), 1 - torch.sigmoid(0.1 * (kl - bad))
    return torch.cat(losses).mean()


@loss
def orpo(logits: Tensor, b: Batch) -> Any:
    chosen, rejected = sequence_logps(logits, b, average=True).chunk(2)
    half = len(logits) // 2
    nll = F.cross_entropy(
        logits[:half, :-1].reshape(-1, logits.size(-1)), b["ignored"][:half, 1:].reshape(-1)
    )
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return nll - 0.1 * F.logsigmoid(odds).mean()


@loss
def simpo(logits: Tensor, b: Batch) -> Any:
    chosen, rejected = sequence_logps(logits, b, average=True).chunk(2)
    return -F.logsigmoid(2.0 * (chosen - rejected) - 1.0).mean()


@loss
def dpo_of_chunks(logits: Tensor, b: Batch) -> Any:
    sums = [
        (logps_of(part[:, :-1], labels[:, 1:]) * mask[:, 1:]).sum(-1)
        for part, labels, mask in zip(
            logits.chunk(2), b["labels"].chunk(2), b["mask"].chunk(2), strict=True
        )
    ]
    return -F.logsigmoid(0.1 * (sums[0] - sums[1])).mean()


@loss
def rpo_of_halves(logits: Tensor, b: Batch) -> Any:
    half = len(logits) // 2
    chosen, rejected = logits[:half], logits[half:]
    nll = F.cross_entropy(chosen.flatten(0, 1), b["ignored"][:half].flatten())
    margin = logps_of(chosen, b["labels"][:half]).sum(-1)
    margin = margin - logps_of(rejected, b["labels"][half:]).sum(-1)
    return nll - F.logsigmoid(0.1 * margin).mean()


# -- distillation ----------------------------------------------------------------------------------


def teacher_logits(b: Batch) -> Tensor:
    with torch.no_grad():
        return F.linear(b["teacher_hidden"], b["teacher_head"])


@loss
def distillation(logits: Tensor, b: Batch) -> Any:
    teacher = F.log_softmax(teacher_logits(b) / 2.0, -1)
    student = F.log_softmax(logits / 2.0, -1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * 4.0


@loss
def masked_distillation(logits: Tensor, b: Batch) -> Any:
    teacher = teacher_logits(b).softmax(-1)
    kl = F.kl_div(logits.log_softmax(-1), teacher, reduction="none").sum(-1)
    return masked_mean(kl, b["mask"])


@loss
def reverse_kl(logits: Tensor, b: Batch) -> Any:
    student, teacher = logits.log_softmax(-1), teacher_logits(b).log_softmax(-1)
    return masked_mean((student.exp() * (student - teacher)).sum(-1), b["mask"])


@loss
def generalized_jsd(logits: Tensor, b: Batch) -> Any:
    student, teacher = logits.log_softmax(-1), teacher_logits(b).log_softmax(-1)
    beta = torch.tensor(0.5, dtype=student.dtype)
    mixture = torch.logsumexp(
        torch.stack([student + torch.log(1 - beta), teacher + torch.log(beta)]), dim=0
    )
    to_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    to_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return masked_mean((0.5 * to_teacher + 0.5 * to_student).sum(-1), b["mask"])


@loss
def jsd_by_logaddexp(logits: Tensor, b: Batch) -> Any:
    student, teacher = logits.log_softmax(-1), teacher_logits(b).log_softmax(-1)
    mixture = torch.logaddexp(student, teacher) - 0.6931471805599453
    one = (teacher.exp() * (teacher - mixture)).sum(-1)
    other = (student.exp() * (student - mixture)).sum(-1)
    return masked_mean(0.5 * (one + other), b["mask"])


@loss
def top_k_distillation(logits: Tensor, b: Batch) -> Any:
    values, indices = teacher_logits(b).topk(5, dim=-1)
    student = logits.log_softmax(-1).gather(-1, indices)
    return masked_mean((values.softmax(-1) * (values.log_softmax(-1) - student)).sum(-1), b["mask"])


@loss
def stored_top_k_distillation(logits: Tensor, b: Batch) -> Any:
    student = logits.gather(-1, b["teacher_indices"]) - logits.logsumexp(-1, keepdim=True)
    teacher = b["teacher_values"].softmax(-1)
    return masked_mean(F.kl_div(student, teacher, reduction="none").sum(-1), b["mask"])
