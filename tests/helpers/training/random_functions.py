"""Functions and modules of torch's public interface that sample random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

Function = Callable[[Tensor], Tensor]
"""A function of an activation of shape (16, 12) with values between -1 and 1."""


def _heads(h: Tensor) -> Tensor:
    """Queries, keys or values: 2 sequences, 2 heads, 8 tokens, 6 features."""
    return h.view(2, 8, 2, 6).transpose(1, 2)


def _attention(h: Tensor) -> Tensor:
    heads = _heads(h)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).reshape(16, 12)


def _causal_attention(h: Tensor) -> Tensor:
    heads = _heads(h)
    attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2, is_causal=True)
    return attended.reshape(16, 12)


FUNCTIONS: dict[str, Function] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout in place": lambda h: F.dropout(h * 2, 0.3, inplace=True),
    "dropout1d": lambda h: F.dropout1d(h.view(2, 8, 12), 0.3).view(16, 12),
    "dropout2d": lambda h: F.dropout2d(h.view(4, 4, 3, 4), 0.3).view(16, 12),
    "dropout3d": lambda h: F.dropout3d(h.view(2, 4, 2, 3, 4), 0.3).view(16, 12),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(
        h.view(4, 4, 3, 4), 0.3, training=True
    ).view(16, 12),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu of a transposed tensor": lambda h: F.rrelu((h * 2).t(), training=True).t(),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, tau=0.5),
    "gumbel_softmax, hard": lambda h: F.gumbel_softmax(h, hard=True),
    "scaled_dot_product_attention": _attention,
    "scaled_dot_product_attention, causal": _causal_attention,
    "fractional_max_pool2d": lambda h: (
        F.fractional_max_pool2d(h.view(1, 1, 16, 12), 2, output_size=(8, 6)).view(8, 6).repeat(2, 2)
    ),
    "rand": lambda h: torch.rand(16, 12),
    "randn": lambda h: torch.randn(16, 12),
    "randint": lambda h: torch.randint(-3, 9, (16, 12)),
    "randperm": lambda h: torch.randperm(12),
    "normal": lambda h: torch.normal(h, 2.0),
    "bernoulli": lambda h: torch.bernoulli(h.sigmoid()),
    "multinomial": lambda h: torch.multinomial(h.sigmoid(), 12, replacement=True),
    "poisson": lambda h: torch.poisson(h.exp()),
    "binomial": lambda h: torch.binomial(torch.full_like(h, 9).detach(), h.detach().sigmoid()),
    "unused samples": lambda h: (torch.rand(3), h)[1],
}


def _positive(h: Tensor) -> Tensor:
    return h.exp() + 0.2


def _probabilities(h: Tensor) -> Tensor:
    return h.sigmoid()


def _rows(square: Tensor) -> Tensor:
    """Return a matrix of 12 rows with 16 rows."""
    return torch.cat([square, square[:4]])


def _covariance(h: Tensor) -> Tensor:
    return h[:12] @ h[:12].t() + 12 * torch.eye(12)


DISTRIBUTIONS: dict[str, Function] = {
    "Bernoulli": lambda h: distributions.Bernoulli(_probabilities(h)).sample(),
    "Beta": lambda h: distributions.Beta(_positive(h), _positive(-h)).rsample(),
    "Binomial": lambda h: distributions.Binomial(9, _probabilities(h)).sample(),
    "Categorical": lambda h: distributions.Categorical(_probabilities(h)).sample((12,)).t(),
    "Cauchy": lambda h: distributions.Cauchy(h, _positive(h)).rsample(),
    "Chi2": lambda h: distributions.Chi2(_positive(h)).rsample(),
    "ContinuousBernoulli": lambda h: distributions.ContinuousBernoulli(_probabilities(h)).rsample(),
    "Dirichlet": lambda h: distributions.Dirichlet(_positive(h)).rsample(),
    "Exponential": lambda h: distributions.Exponential(_positive(h)).rsample(),
    "FisherSnedecor": lambda h: distributions.FisherSnedecor(
        _positive(h) + 2, _positive(-h) + 2
    ).rsample(),
    "Gamma": lambda h: distributions.Gamma(_positive(h), _positive(-h)).rsample(),
    "GeneralizedPareto": lambda h: distributions.GeneralizedPareto(
        h, _positive(h), _positive(-h)
    ).rsample(),
    "Geometric": lambda h: distributions.Geometric(_probabilities(h)).sample(),
    "Gumbel": lambda h: distributions.Gumbel(h, _positive(h)).rsample(),
    "HalfCauchy": lambda h: distributions.HalfCauchy(_positive(h)).rsample(),
    "HalfNormal": lambda h: distributions.HalfNormal(_positive(h)).rsample(),
    "Independent": lambda h: distributions.Independent(
        distributions.Normal(h, _positive(h)), 1
    ).rsample(),
    "InverseGamma": lambda h: distributions.InverseGamma(_positive(h) + 1, _positive(-h)).rsample(),
    "Kumaraswamy": lambda h: distributions.Kumaraswamy(_positive(h), _positive(-h)).rsample(),
    "LKJCholesky": lambda h: _rows(distributions.LKJCholesky(12, _positive(h[0, 0])).sample()),
    "Laplace": lambda h: distributions.Laplace(h, _positive(h)).rsample(),
    "LogNormal": lambda h: distributions.LogNormal(h, _positive(h)).rsample(),
    "LogisticNormal": lambda h: distributions.LogisticNormal(
        h[:, :11], _positive(h[:, :11])
    ).rsample(),
    "LowRankMultivariateNormal": lambda h: distributions.LowRankMultivariateNormal(
        h, h[:, :, None], _positive(h)
    ).rsample(),
    "MixtureSameFamily": lambda h: (
        distributions.MixtureSameFamily(
            distributions.Categorical(_probabilities(h)), distributions.Normal(h, _positive(h))
        )
        .sample((12,))
        .t()
    ),
    "Multinomial": lambda h: distributions.Multinomial(9, _probabilities(h)).sample(),
    "MultivariateNormal": lambda h: distributions.MultivariateNormal(h, _covariance(h)).rsample(),
    "NegativeBinomial": lambda h: distributions.NegativeBinomial(
        _positive(h), _probabilities(h)
    ).sample(),
    "Normal": lambda h: distributions.Normal(h, _positive(h)).rsample(),
    "OneHotCategorical": lambda h: distributions.OneHotCategorical(_probabilities(h)).sample(),
    "OneHotCategoricalStraightThrough": lambda h: distributions.OneHotCategoricalStraightThrough(
        _probabilities(h)
    ).rsample(),
    "Pareto": lambda h: distributions.Pareto(_positive(h), _positive(-h)).rsample(),
    "Poisson": lambda h: distributions.Poisson(_positive(h)).sample(),
    "RelaxedBernoulli": lambda h: distributions.RelaxedBernoulli(
        torch.tensor(0.7), _probabilities(h)
    ).rsample(),
    "RelaxedOneHotCategorical": lambda h: distributions.RelaxedOneHotCategorical(
        torch.tensor(0.7), _probabilities(h)
    ).rsample(),
    "StudentT": lambda h: distributions.StudentT(_positive(h) + 2, h).rsample(),
    "TransformedDistribution": lambda h: distributions.TransformedDistribution(
        distributions.Normal(h, _positive(h)), [distributions.SigmoidTransform()]
    ).rsample(),
    "Uniform": lambda h: distributions.Uniform(h, h + _positive(h)).rsample(),
    "VonMises": lambda h: distributions.VonMises(h, _positive(h)).sample(),
    "Weibull": lambda h: distributions.Weibull(_positive(h), _positive(-h)).rsample(),
    "Wishart": lambda h: _rows(distributions.Wishart(torch.tensor(14.0), _covariance(h)).rsample()),
}
"""A sample of each distribution, reparametrized where that is possible."""

READ_VALUES = {"LowRankMultivariateNormal", "MultivariateNormal", "VonMises", "Wishart"}
"""Distributions that branch on values of tensors, or check them for errors."""


@contextmanager
def parameters_not_validated() -> Iterator[None]:
    """Within the context, distributions do not validate their parameters, which reads values."""
    is_validated = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distributions.Distribution.set_default_validate_args(is_validated)


class _WithoutWeights(nn.Module):
    """Attention that returns no weights: it calls the fused operator."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attention(*inputs, need_weights=False)


class _First(nn.Module):
    """A module on 2 sequences of 8 tokens, and the first of its results."""

    def __init__(self, module: nn.Module, num_inputs: int = 1) -> None:
        super().__init__()
        self.module, self.num_inputs = module, num_inputs

    def forward(self, h: Tensor) -> Tensor:
        output = self.module(*[h.view(2, 8, 12)] * self.num_inputs)
        return (output[0] if isinstance(output, tuple) else output).reshape(16, 12)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": lambda: _First(nn.MultiheadAttention(12, 2, dropout=0.2), 3),
    "MultiheadAttention without weights": lambda: _First(
        _WithoutWeights(nn.MultiheadAttention(12, 2, dropout=0.2, batch_first=True)), 3
    ),
    "TransformerEncoderLayer": lambda: _First(
        nn.TransformerEncoderLayer(12, 2, 12, dropout=0.2, batch_first=True)
    ),
}

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: _First(nn.GRU(12, 12, 2, dropout=0.3)),
    "GRU, bidirectional": lambda: _First(nn.GRU(12, 6, 2, dropout=0.3, bidirectional=True)),
    "LSTM": lambda: _First(nn.LSTM(12, 12, 3, dropout=0.3)),
    "LSTM with a projection": lambda: _First(nn.LSTM(12, 14, 2, dropout=0.3, proj_size=12)),
    "RNN, batch first": lambda: _First(nn.RNN(12, 12, 2, dropout=0.3, batch_first=True)),
}
"""Recurrent networks with dropout between their layers."""
