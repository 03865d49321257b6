"""Builds the model and the batch of a published training loop, on "meta"."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.fit_world.configurations import FLUX_2_KLEIN, TRANSFORMERS
from benchmarks.fit_world.measurement import Loop

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_IMAGE_SIZE = 224


def build(loop: Loop) -> Call:
    """Return the model of a loop with the arguments of a call. Raises `ImportError` if its library
    is not installed."""
    with torch.device("meta"):
        return _BUILDERS[loop.library](loop)


def is_installed(library: str) -> bool:
    """True if the package of a library is installed."""
    return importlib.util.find_spec(library) is not None


def _library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _tokens(loop: Loop) -> torch.Tensor:
    return torch.zeros(loop.batch, loop.tokens, dtype=torch.long)


def _dtype(loop: Loop) -> torch.dtype:
    return getattr(torch, loop.dtype)


# -- transformers and diffusers ------------------------------------------------------------------


def _transformers(loop: Loop) -> Call:
    transformers = _library("transformers")
    class_name, arguments = TRANSFORMERS[loop.model]
    options = {"use_cache": False, "attn_implementation": "sdpa"} | arguments | dict(loop.options)
    head = options.pop("head", "CausalLM")
    config = getattr(transformers, class_name)(**options)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config).to(_dtype(loop))
    if loop.loss == "shifted":
        model.loss_function = _loss_of_shifted_copy
    if loop.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if loop.adapter is not None:
            model.enable_input_require_grads()
    ids = _tokens(loop)
    labels = ids if head == "CausalLM" else torch.zeros(loop.batch, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": labels}
    if loop.padded:
        inputs["attention_mask"] = torch.ones_like(ids)
    if loop.quantize:
        adapters = _library("remat.frontend.api.adapters")
        model = adapters.with_adapters(model, None, loop.quantize)
        for parameter in model.parameters():  # the published loops do not widen the others
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(_dtype(loop))
    model = _with_adapter(model, loop).train()
    if loop.loss.startswith("shifted, "):
        model = _LossInForward(model, is_wide=loop.loss == "shifted, logits replaced")
    return model, (), inputs


def _loss_of_shifted_copy(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any
) -> torch.Tensor:
    """Return the loss as transformers computed it before 4.50: the logits in float32, and a copy of
    all but the last."""
    wide = logits.float()
    shifted = wide[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return functional.cross_entropy(shifted.view(-1, vocab_size), targets.view(-1))


class _LossInForward(nn.Module):
    """A language model whose forward computes the loss of a shifted copy of its logits."""

    def __init__(self, model: nn.Module, *, is_wide: bool) -> None:
        super().__init__()
        self.model, self.is_wide = model, is_wide

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        model: Any = self.model
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        logits = model.lm_head(model.base_model(input_ids)[0])
        if hasattr(model.config, "logits_scaling"):
            logits = logits / model.config.logits_scaling
        if self.is_wide:
            logits = logits.float()
        shifted = logits[..., :-1, :].contiguous()
        targets = labels[..., 1:].contiguous()
        loss = functional.cross_entropy(shifted.view(-1, shifted.size(-1)), targets.view(-1))
        return loss, logits


def _with_adapter(model: nn.Module, loop: Loop) -> nn.Module:
    if loop.adapter is None:
        return model
    peft = _library("peft")
    name, arguments = loop.adapter
    config = getattr(peft, name)(**dict(arguments))
    return peft.get_peft_model(model, config)


class _VelocityLoss(nn.Module):
    """The loss of a flow matching model: the squared error of its velocity, in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: torch.Tensor, **inputs: Any) -> torch.Tensor:
        prediction = self.model(**inputs, return_dict=False)[0]
        return ((prediction.float() - target.float()) ** 2).reshape(len(target), -1).mean(1).mean()


def _flux_2_klein(loop: Loop) -> Call:
    """FLUX.2 klein on images of `tokens` latent tokens, with prompts of 512 tokens."""
    diffusers = _library("diffusers")
    model = diffusers.Flux2Transformer2DModel(**FLUX_2_KLEIN).to(_dtype(loop))
    if loop.checkpoint:
        model.enable_gradient_checkpointing()
    model = _with_adapter(model, loop).train()
    latents = torch.zeros(loop.batch, loop.tokens, 128, dtype=_dtype(loop))
    inputs = {
        "hidden_states": latents,
        "encoder_hidden_states": torch.zeros(loop.batch, 512, 7680, dtype=_dtype(loop)),
        "timestep": torch.zeros(loop.batch, dtype=_dtype(loop)),
        "img_ids": torch.zeros(loop.batch, loop.tokens, 4, dtype=torch.long),
        "txt_ids": torch.zeros(loop.batch, 512, 4, dtype=torch.long),
        "guidance": None,
    }
    return _VelocityLoss(model), (), {"target": latents} | inputs


# -- litgpt ----------------------------------------------------------------------------------------


class _LitGPTLoss(nn.Module):
    """The loss of litgpt's scripts, whose wrapper of Lightning Fabric returns logits in float32."""

    def __init__(self, model: nn.Module, *, is_chunked: bool) -> None:
        super().__init__()
        self.model, self.is_chunked = model, is_chunked

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss_of = _library("litgpt.utils").chunked_cross_entropy
        if not self.is_chunked:
            return loss_of(self.model(ids).float()[..., :-1, :], targets[..., 1:])
        logits = [chunk.float() for chunk in self.model(ids, lm_head_chunk_size=128)]
        logits[-1] = logits[-1][..., :-1, :]
        return loss_of(logits, targets[..., 1:])


def _litgpt(loop: Loop) -> Call:
    is_lora = any(name.startswith("lora") for name in loop.options)
    module = _library("litgpt.lora" if is_lora else "litgpt.model")
    config = module.Config.from_name(loop.model, **loop.options)
    torch.set_default_dtype(_dtype(loop))
    try:
        model = module.GPT(config)
    finally:
        torch.set_default_dtype(torch.float32)
    ids = _tokens(loop)
    model.max_seq_length = loop.tokens
    if is_lora:
        module.mark_only_lora_as_trainable(model)
        with torch.no_grad():
            model(ids)  # registers buffers
    return _LitGPTLoss(model, is_chunked=is_lora).train(), (ids, ids), {}


# -- torchtune -------------------------------------------------------------------------------------


class _TorchtuneLoss(nn.Module):
    """The loss of torchtune's recipes, of all logits or, chunk by chunk, in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids)
        labels = torch.hstack((labels[..., 1:], torch.full_like(labels[..., :1], -100)))
        if not isinstance(logits, list):
            return functional.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
        parts = [
            functional.cross_entropy(
                chunk.reshape(-1, chunk.size(-1)).float(), targets.reshape(-1), reduction="sum"
            )
            for chunk, targets in zip(logits, labels.chunk(len(logits), dim=1), strict=True)
        ]
        return torch.stack(parts).sum() / labels.numel()


def _torchtune(loop: Loop) -> Call:
    options = dict(loop.options)
    chunks = options.pop("output_chunks", 0)
    package, _, name = loop.model.partition(".")
    torch.set_default_dtype(_dtype(loop))
    try:
        model = getattr(_library(f"torchtune.models.{package}"), name)(**options)
        for module in model.modules():
            if hasattr(module, "rope_init"):
                with torch.device("cpu"):  # on "meta" it does nothing
                    module.rope_init()
        model.to("meta")
    finally:
        torch.set_default_dtype(torch.float32)
    if any(key.startswith("lora") for key in options):
        peft = _library("torchtune.modules.peft")
        peft.set_trainable_params(model, peft.get_adapter_params(model))
    if chunks:
        model.set_num_output_chunks(chunks)
    ids = _tokens(loop)
    return _TorchtuneLoss(model).train(), (ids, ids), {}


# -- torchvision -----------------------------------------------------------------------------------


class _Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.model(images)
        return functional.cross_entropy(logits, labels), logits


def _torchvision(loop: Loop) -> Call:
    model = getattr(_library("torchvision.models"), loop.model)()
    model.heads.head = nn.Linear(model.hidden_dim, 10)
    images = torch.zeros(loop.batch, 3, _IMAGE_SIZE, _IMAGE_SIZE, dtype=_dtype(loop))
    labels = torch.zeros(loop.batch, dtype=torch.long)
    return _Classifier(model.to(_dtype(loop))).train(), (images, labels), {}


_BUILDERS = {
    "transformers": _transformers,
    "diffusers": _flux_2_klein,
    "litgpt": _litgpt,
    "torchtune": _torchtune,
    "torchvision": _torchvision,
}
