"""Losses of language models in chunks, as torch, TRL and Liger have them installed.

Each is a function of the hidden states of a model, the weight of its head, and the batch of
`tests.helpers.training.losses`, and computes the loss that has its name there or in
`FURTHER_LOSSES`. Only options are set: no code of these libraries is copied or changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.helpers.training.losses import (
    Batch,
    Loss,
    masked_mean,
    sequence_logps,
    teacher_logits,
)
from torch import Tensor, nn

Head = Callable[[Tensor, Tensor, Batch], Any]
"""A function of hidden states (batch x tokens x width), the head's weight and the batch."""

CHUNKS = 8
IGNORED = -100


@dataclass(frozen=True)
class Peer:
    """A loss in chunks that a library has. `logits_once`: it computes gradients where it computes
    the logits of a chunk, and so does not compute these once more."""

    library: str
    function: str
    head: Head
    logits_once: bool

    @property
    def name(self) -> str:
        """The library and its function."""
        return f"{self.library} {self.function}"


PEERS: dict[str, list[Peer]] = {}
"""The losses in chunks by the name of the loss that they compute."""

FURTHER_LOSSES: dict[str, Loss] = {}
"""Losses that a library has in chunks in another definition than `LOSSES`, in eager mode."""


def is_installed(library: str) -> bool:
    """Return whether a library of a `Peer` can be imported."""
    module = {"torch": "torch", "TRL": "trl", "Liger": "liger_kernel"}[library]
    return importlib.util.find_spec(module) is not None


def _peer(
    library: str, function: str, *losses: str, logits_once: bool = False
) -> Callable[[Head], Head]:
    def add(head: Head) -> Head:
        for name in losses or (head.__name__.partition("_of_")[0],):
            PEERS.setdefault(name, []).append(Peer(library, function, head, logits_once))
        return head

    return add


def _further(function: Loss) -> Loss:
    FURTHER_LOSSES[function.__name__] = function
    return function


def _labels_of_mask(b: Batch) -> Tensor:
    return torch.where(b["mask"] > 0, b["labels"], IGNORED)


# -- further losses --------------------------------------------------------------------------------


@_further
def label_smoothing(logits: Tensor, b: Batch) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), b["ignored"].flatten(), label_smoothing=0.1)


@_further
def dpo_with_reference(logits: Tensor, b: Batch) -> Any:
    chosen, rejected = sequence_logps(logits, b).chunk(2)
    with torch.no_grad():
        ref_chosen, ref_rejected = sequence_logps(teacher_logits(b), b).chunk(2)
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -F.logsigmoid(0.1 * margin).mean()


@_further
def kto_with_reference(logits: Tensor, b: Batch) -> Any:
    with torch.no_grad():
        reference = sequence_logps(teacher_logits(b), b)
    rewards = 0.1 * (sequence_logps(logits, b) - reference)
    half = len(rewards) // 2
    return (1 - torch.sigmoid(torch.cat((rewards[:half], -rewards[half:])))).mean()


@_further
def top_k_distillation_with_tail(logits: Tensor, b: Batch) -> Any:
    """The words that are not among the teacher's best are one more, with the rest."""
    best, indices = teacher_logits(b).log_softmax(-1).topk(5, dim=-1)
    student = logits.log_softmax(-1).gather(-1, indices)

    def with_rest(logps: Tensor) -> Tensor:
        rest = torch.log(-torch.expm1(logps.logsumexp(-1, keepdim=True).clamp(max=-1e-7)))
        return torch.cat((logps, rest), -1)

    teacher = with_rest(best)
    return masked_mean((teacher.exp() * (teacher - with_rest(student))).sum(-1), b["mask"])


# -- torch: F.linear_cross_entropy -----------------------------------------------------------------


def _linear_cross_entropy(x: Tensor, head: Tensor, labels: Tensor, **options: Any) -> Tensor:
    chunking = nn.LinearCrossEntropyOptions(batch_chunk_size=-(-labels.numel() // CHUNKS))
    rows = x.flatten(0, 1), head, labels.flatten()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # options that are ignored: the logits would be whole
        return F.linear_cross_entropy(*rows, options=chunking, **options)


_of_torch = "torch", "F.linear_cross_entropy"


@_peer(*_of_torch, logits_once=True)
def cross_entropy_of_torch(x: Tensor, weight: Tensor, b: Batch) -> Any:
    return _linear_cross_entropy(x, weight, b["ignored"])


@_peer(*_of_torch, logits_once=True)
def shifted_of_torch(x: Tensor, weight: Tensor, b: Batch) -> Any:
    return _linear_cross_entropy(x[:, :-1], weight, b["ignored"][:, 1:])


@_peer(*_of_torch, "masked_tokens", "transposed", logits_once=True)
def masked_tokens_of_torch(x: Tensor, weight: Tensor, b: Batch) -> Any:
    return _linear_cross_entropy(x, weight, _labels_of_mask(b))


@_peer(*_of_torch, logits_once=True)
def class_weighted_of_torch(x: Tensor, weight: Tensor, b: Batch) -> Any:
    return _linear_cross_entropy(x, weight, b["ignored"], weight=b["class_weights"])


@_peer(*_of_torch, logits_once=True)
def label_smoothing_of_torch(x: Tensor, weight: Tensor, b: Batch) -> Any:
    return _linear_cross_entropy(x, weight, b["ignored"], label_smoothing=0.1)


# -- TRL: log-probabilities in chunks of the vocabulary --------------------------------------------


def _scored(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    outputs: tuple[str, ...] = (),
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the labels' log-probabilities and the outputs, each with the labels' shape."""
    kernels: Any = importlib.import_module("trl.kernels")
    words = -(-len(weight) // CHUNKS)
    logps, *further = kernels.ChunkedLogProbFunction.apply(
        x.flatten(0, 1), weight, None, labels.clamp(min=0).flatten(), temperature, words, softcap,
        1.0, outputs,
    )  # fmt: skip
    names = "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"
    values = {
        name: v.view(labels.shape) for name, v in zip(names, further, strict=True) if v is not None
    }
    return logps.view(labels.shape), values


def _sequence_scores(x: Tensor, weight: Tensor, b: Batch, average: bool = False) -> Tensor:
    mask = b["mask"][:, 1:]
    logps = _scored(x[:, :-1], weight, b["labels"][:, 1:])[0] * mask
    return logps.sum(-1) / mask.sum(-1).clamp(min=1.0) if average else logps.sum(-1)


_of_trl = "TRL", "ChunkedLogProbFunction"


@_peer(*_of_trl)
def cross_entropy_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, _ = _scored(x, weight, b["ignored"])
    return -masked_mean(logps, b["ignored"] != IGNORED)


@_peer(*_of_trl)
def with_accuracy_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, outputs = _scored(x, weight, b["labels"], ("is_top1",))
    hits = masked_mean(outputs["is_top1"].float(), b["mask"])
    return -masked_mean(logps, b["ignored"] != IGNORED), hits


@_peer(*_of_trl)
def soft_cap_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, _ = _scored(x, weight, b["ignored"], softcap=30.0)
    return -masked_mean(logps, b["ignored"] != IGNORED)


@_peer(*_of_trl)
def focal_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, _ = _scored(x, weight, b["labels"])
    return masked_mean(-((1 - logps.exp()) ** 2) * logps, b["mask"])


@_peer(*_of_trl)
def poly_one_hot_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, _ = _scored(x, weight, b["labels"])
    return (1.0 - logps - logps.exp()).mean()


@_peer(*_of_trl)
def dynamic_fine_tuning_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, _ = _scored(x, weight, b["labels"])
    return masked_mean(-logps * logps.detach().exp(), b["mask"])


@_peer(*_of_trl)
def packed_documents_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, _ = _scored(x, weight, b["labels"])
    sums = logps.new_zeros(len(logps), 3).scatter_add(1, b["documents"], -logps)
    counts = torch.zeros_like(sums).scatter_add(1, b["documents"], torch.ones_like(logps))
    return (sums / counts.clamp(min=1)).mean()


@_peer(*_of_trl)
def grpo_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, _ = _scored(x, weight, b["labels"])
    ratio = torch.exp(logps - b["old_logps"])
    advantages = b["advantages"].unsqueeze(1)
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    difference = b["ref_logps"] - logps
    tokens = (policy + 0.04 * (difference.exp() - difference - 1)) * b["mask"]
    return (tokens.sum(-1) / b["mask"].sum(-1).clamp(min=1.0)).mean()


@_peer(*_of_trl)
def grpo_with_temperature_and_entropy_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, outputs = _scored(x, weight, b["labels"], ("entropy",), temperature=0.7)
    policy = -torch.exp(logps - logps.detach()) * b["advantages"].unsqueeze(1)
    return masked_mean(policy, b["mask"]), masked_mean(outputs["entropy"].detach(), b["mask"])


@_peer(*_of_trl)
def ppo_with_entropy_bonus_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, outputs = _scored(x, weight, b["labels"], ("entropy",))
    ratio, advantages = (logps - b["old_logps"]).exp(), b["token_advantages"]
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    return masked_mean(losses, b["mask"]) - 0.01 * masked_mean(outputs["entropy"], b["mask"])


@_peer(*_of_trl)
def categorical_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, outputs = _scored(x, weight, b["labels"], ("entropy",))
    return -(logps * b["token_advantages"]).mean() - 0.01 * outputs["entropy"].mean()


@_peer(*_of_trl)
def dpo_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    differences = _sequence_scores(x, weight, b) - b["ref_sums"]
    chosen, rejected = differences.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean(), (0.1 * chosen).detach().mean()


@_peer(*_of_trl)
def ipo_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    chosen, rejected = _sequence_scores(x, weight, b, average=True).chunk(2)
    return ((chosen - rejected - 1 / 0.2) ** 2).mean()


@_peer(*_of_trl)
def kto_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    rewards = _sequence_scores(x, weight, b) - b["ref_sums"]
    kl = rewards.mean().clamp(min=0).detach()
    good, bad = rewards.chunk(2)
    return (1 - torch.sigmoid(0.1 * torch.cat((good - kl, kl - bad)))).mean()


@_peer(*_of_trl, "rpo_of_halves")
def rpo_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    logps, _ = _scored(x, weight, b["labels"])
    chosen, rejected = logps.chunk(2)
    nll = -masked_mean(chosen, b["ignored"][: len(chosen)] != IGNORED)
    return nll - F.logsigmoid(0.1 * (chosen.sum(-1) - rejected.sum(-1))).mean()


# -- TRL: divergences from a teacher ---------------------------------------------------------------


def _divergence_module(words: int) -> Any:
    """Return TRL's module of divergences, with `CHUNKS` chunks of the vocabulary.

    The module's constant is 32,768 words, with which 16,000 are one chunk.
    """
    module: Any = importlib.import_module("trl.kernels.chunked_divergence")
    module.VOCAB_CHUNK_SIZE = -(-words // CHUNKS)
    return module


_of_divergence = "TRL", "ChunkedDivergenceFunction"


@_peer(*_of_divergence)
def distillation_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    divergence, _ = _divergence_module(len(weight)).ChunkedDivergenceFunction.apply(
        x.flatten(0, 1), weight, None, b["teacher_hidden"].flatten(0, 1), b["teacher_head"], None,
        0.0, 2.0,
    )  # fmt: skip
    return divergence.sum() / len(x) * 4.0


def _masked_divergence(x: Tensor, weight: Tensor, b: Batch, beta: float) -> Any:
    _divergence_module(len(weight))
    trainer: Any = importlib.import_module("trl.trainer.distillation_trainer")
    heads = x, b["teacher_hidden"], weight, b["teacher_head"]
    return trainer._chunked_divergence_loss(*heads, b["mask"], beta)[0]


_of_distillation = "TRL", "_chunked_divergence_loss"


@_peer(*_of_distillation)
def masked_distillation_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    return _masked_divergence(x, weight, b, 0.0)


@_peer(*_of_distillation)
def reverse_kl_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    return _masked_divergence(x, weight, b, 1.0)


@_peer(*_of_distillation, "generalized_jsd", "jsd_by_logaddexp")
def jsd_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    return _masked_divergence(x, weight, b, 0.5)


@_peer("TRL", "_chunked_jsd_loss")
def top_k_distillation_with_tail_of_trl(x: Tensor, weight: Tensor, b: Batch) -> Any:
    """As of asynchronous distillation: of valid tokens only, with checkpoints by chunks."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer: Any = importlib.import_module(
        "trl.experimental.async_distillation.async_distillation_trainer"
    )
    with torch.no_grad():
        best, indices = teacher_logits(b).log_softmax(-1).topk(5, dim=-1)
    valid = b["mask"] > 0
    scores = indices[valid], best[valid], torch.ones_like(indices[valid], dtype=torch.bool)
    rows = -(-valid.numel() // CHUNKS)
    sums = trainer._chunked_jsd_loss(
        x[valid], weight, None, 1.0, None, *scores, 0.0, 1.0, True, None, 0, rows
    )
    return sums[0] / valid.sum()


# -- Liger -----------------------------------------------------------------------------------------
# Its GRPO computes the gradients of a sequence in the forward, but its logits twice.


def _liger(name: str, **options: Any) -> Any:
    module: Any = importlib.import_module("liger_kernel.chunked_loss")
    return getattr(module, f"LigerFusedLinear{name}Loss")(compiled=False, **options)


@_peer("Liger", "GRPOLoss", "grpo")
def grpo_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    loss = _liger("GRPO", beta=0.04, loss_type="grpo")
    return loss(
        x, weight, b["labels"], b["mask"], b["advantages"],
        ref_per_token_logps=b["ref_logps"], old_per_token_logps=b["old_logps"],
    )[0]  # fmt: skip


@_peer("Liger", "GRPOLoss", "grpo_by_rows", "grpo_by_rows_of_log_softmax")
def unclipped_grpo_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    """Without clipping: the limits are out of reach."""
    limits = {"epsilon_low": 1e6, "epsilon_high": 1e6}
    loss = _liger("GRPO", beta=0.0, loss_type="bnpo", use_ref_model=False, **limits)
    scores = b["labels"], b["mask"], b["advantages"]
    return loss(x, weight, *scores, old_per_token_logps=b["old_logps"])[0]


@_peer("Liger", "GRPOLoss (sequence)")
def gspo_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    level = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    loss = _liger("GRPO", beta=0.0, use_ref_model=False, **level)
    scores = b["labels"], b["mask"], b["advantages"]
    return loss(x, weight, *scores, old_per_token_logps=b["old_logps"])[0]


@_peer("Liger", "DPOLoss", "dpo_of_chunks", logits_once=True)
def dpo_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    loss = _liger("DPO", beta=0.1, use_ref_model=False)
    return loss(weight, x[:, :-1], _labels_of_mask(b)[:, 1:])[0]


@_peer("Liger", "DPOLoss", logits_once=True)
def dpo_with_reference_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    reference = {"ref_input": b["teacher_hidden"][:, :-1], "ref_weight": b["teacher_head"]}
    return _liger("DPO", beta=0.1)(weight, x[:, :-1], _labels_of_mask(b)[:, 1:], **reference)[0]


@_peer("Liger", "KTOLoss", logits_once=True)
def kto_with_reference_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    reference = {"ref_input": b["teacher_hidden"][:, :-1], "ref_weight": b["teacher_head"]}
    good = torch.arange(len(x)) < len(x) // 2
    loss = _liger("KTO", beta=0.1, use_ref_model=True)
    labels = _labels_of_mask(b)[:, 1:]
    return loss(x[:, :-1], weight, labels, preference_labels=good, **reference)[0]


@_peer("Liger", "ORPOLoss", logits_once=True)
def orpo_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    labels = _labels_of_mask(b)[:, 1:]
    loss = _liger("ORPO", beta=0.1)
    return loss(weight, x[:, :-1], labels, nll_target=b["ignored"][:, 1:])[0]


@_peer("Liger", "SimPOLoss", logits_once=True)
def simpo_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    loss = _liger("SimPO", beta=2.0, gamma=1.0, compute_nll_loss=False)
    return loss(weight, x[:, :-1], _labels_of_mask(b)[:, 1:])[0]


@_peer("Liger", "JSDLoss", logits_once=True)
def generalized_jsd_of_liger(x: Tensor, weight: Tensor, b: Batch) -> Any:
    labels = torch.where(b["mask"] > 0, 0, IGNORED).flatten()
    rows = -(-labels.numel() // CHUNKS)
    loss = _liger("JSD", weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, chunk_size=rows)
    teacher = b["teacher_hidden"].flatten(0, 1), b["teacher_head"]
    return loss(x.flatten(0, 1), weight, *teacher, labels)
