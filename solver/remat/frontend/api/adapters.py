"""`with_adapters`: a model with quantized weights and LoRA adapters, also on the "meta" device.

The model is what the usual calls create: `BitsAndBytesConfig` of transformers, then
`prepare_model_for_kbit_training` and `get_peft_model` of PEFT. bitsandbytes itself quantizes
nothing on the "meta" device.
"""

from __future__ import annotations

import copy
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from remat.errors import RematError, one_line
from remat.limits.options import LoraOptions, check_quantization

_BLOCK_ELEMENTS = 64
_SCALES_PER_BLOCK = 256
_OUTLIER_THRESHOLD = 6.0
"""The defaults of `BitsAndBytesConfig`."""


def with_adapters(model: nn.Module, lora: str | None, quantize: str | None) -> nn.Module:
    """Return the model with adapters, and with quantized linear layers; `model` itself is changed.

    `lora` is as `LoraOptions.parse` takes it, and `quantize` is "nf4", "nf4-double" (scales in 8
    bits, too), "fp4" or "int8". The model's output layer stays as it is, as in transformers.
    Raises `RematError` for a package that is not installed, and for layers that PEFT does not find.
    """
    options = LoraOptions.parse(lora) if lora else None
    if quantize:
        check_quantization(quantize)
        _quantize_layers(model, quantize)
        # As transformers marks it: PEFT selects the classes of its layers by this.
        setattr(model, f"is_loaded_in_{8 if quantize == 'int8' else 4}bit", True)
        _prepare_for_training(model)
    return _with_lora(model, options) if options else model


def meta_copy_with_adapters(model: nn.Module, lora: str, quantize: str) -> nn.Module:
    """Return a copy of a model on the "meta" device with adapters; see `with_adapters`. Raises
    `RematError` for a model that cannot be copied, too."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    memo: dict[int, Any] = {}
    for key, tensor in tensors.items():
        copied = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[key] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    try:
        copied_model = copy.deepcopy(model, memo)
    except Exception as error:
        raise RematError(f"{type(model).__name__} cannot be copied: {one_line(error)}") from error
    return with_adapters(copied_model, lora, quantize or None).train(model.training)


def _import_package(name: str, option: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise RematError(
            f"{option} needs {name}: pip install {name} ({one_line(error)})"
        ) from error


# -- quantized layers -----------------------------------------------------------------------------


def _quantize_layers(model: nn.Module, quantize: str) -> None:
    """Replace linear layers by quantized ones of bitsandbytes, on the "meta" device."""
    library = _import_package("bitsandbytes", f"quantize={quantize!r}")
    outputs = _output_layers(model)
    for path, module in list(model.named_modules()):
        if not _is_linear(module) or id(module) in outputs:
            continue
        weight: torch.Tensor = module.weight.detach()  # type: ignore[operator, assignment]
        weight = weight if isinstance(module, nn.Linear) else weight.t()
        layer = _quantized_layer(library, quantize, weight, module._parameters.get("bias"))
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.train(module.training))


def _is_linear(module: nn.Module) -> bool:
    """True for a linear layer, and for transformers' `Conv1D`, whose weight is transposed."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _output_layers(model: nn.Module) -> set[int]:
    """Return the `id` of the layers that no library quantizes: the output layer, and layers with a
    tied weight."""
    counts: dict[int, int] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            counts[id(weight)] = counts.get(id(weight), 0) + 1
    get = getattr(model, "get_output_embeddings", None)
    output = get() if callable(get) else None
    tied = {id(m) for m in model.modules() if counts.get(id(m._parameters.get("weight")), 0) > 1}
    return tied | {id(output)}


def _quantized_layer(
    library: ModuleType, quantize: str, weight: torch.Tensor, bias: torch.Tensor | None
) -> nn.Module:
    """Return a quantized layer with a weight (out, in). It computes in the weight's dtype."""
    sizes = weight.shape[::-1]
    kind, _, double = quantize.partition("-")
    with torch.device("meta"):
        if quantize == "int8":
            options = {"has_fp16_weights": False, "threshold": _OUTLIER_THRESHOLD}
            layer = library.nn.Linear8bitLt(*sizes, bias is not None, **options)
        else:
            options = {"compress_statistics": bool(double), "quant_type": kind}
            layer = library.nn.Linear4bit(*sizes, bias is not None, weight.dtype, **options)
    if bias is not None:
        layer.bias = bias
    if not weight.is_meta:  # bitsandbytes quantizes a weight that is moved to a device
        attributes = vars(layer.weight)
        layer.weight = type(layer.weight)(weight.contiguous(), requires_grad=False, **attributes)
        return layer.to(weight.device)
    with torch.device("meta"):
        if quantize == "int8":
            integers = torch.empty(weight.shape, dtype=torch.int8)
            layer.weight = library.nn.Int8Params(
                integers, requires_grad=False, CB=integers, SCB=torch.empty(sizes[1])
            )
        else:
            state = _quantization_state(library, weight, kind, has_small_scales=bool(double))
            layer.weight.data = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8)
            layer.weight.quant_state = layer.quant_state = state
            layer.weight.bnb_quantized = True
    return layer


def _quantization_state(
    library: ModuleType, weight: torch.Tensor, kind: str, *, has_small_scales: bool
) -> Any:
    """Return the scales of a weight (out, in) in 4 bits, on the default device."""
    state_class = library.functional.QuantState
    blocks = -(-weight.numel() // _BLOCK_ELEMENTS)
    options: dict[str, Any] = {}
    scales = torch.empty(blocks)
    if has_small_scales:
        scales = torch.empty(blocks, dtype=torch.uint8)
        options["offset"] = torch.empty(())
        options["state2"] = state_class(
            torch.empty(-(-blocks // _SCALES_PER_BLOCK)),
            code=torch.empty(256),
            blocksize=_SCALES_PER_BLOCK,
            dtype=torch.float32,
        )
    return state_class(
        scales,
        shape=weight.shape,
        code=torch.empty(16),
        blocksize=_BLOCK_ELEMENTS,
        quant_type=kind,
        dtype=weight.dtype,
        **options,
    )


def _prepare_for_training(model: nn.Module) -> None:
    """Freeze the model and convert what is not quantized to float32, as PEFT's
    `prepare_model_for_kbit_training` does."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if type(parameter) is nn.Parameter and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


# -- adapters -------------------------------------------------------------------------------------


def _with_lora(model: nn.Module, options: LoraOptions) -> nn.Module:
    peft = _import_package("peft", "lora=")
    targets = options.targets
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        use_dora=options.is_dora,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of names that transformers deprecates
            return peft.get_peft_model(model, config)
    except Exception as error:
        raise RematError(
            f"PEFT cannot add adapters to {type(model).__name__}: {one_line(error)}"
        ) from error
