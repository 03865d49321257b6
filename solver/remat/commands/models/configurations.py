"""Training steps from configurations of transformers and diffusers: a model with random weights,
and a random batch for which it returns a loss."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from remat.commands.models.batches import (
    SEQ_TO_SEQ,
    SPEECH,
    SPEECH_TYPES,
    TASKS,
    BatchSizes,
    make_batch,
    special_token_ids,
)
from remat.errors import TraceError, one_line, similar_names_hint
from remat.frontend.memory.device_memory import free_bytes
from remat.limits.units import format_bytes

NamedStep = tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]
ConfigData = dict[str, Any]

_FACTORY_REMEDY = "write a function that returns (model, kwargs): path/to/script.py:factory"


def step_from_name(name: str, sizes: BatchSizes, overrides: Sequence[str]) -> NamedStep:
    """Build the training step for `gpt2`, a model type in its default configuration, or `org/name`,
    a configuration from the hub. Raises `TraceError`.
    """
    transformers = _import_package("transformers")
    if "/" not in name:
        model_type = _find_model_type(transformers, name)
        return name, *_step_of_configuration({"model_type": model_type}, name, sizes, overrides)
    with _without_warnings(transformers):
        try:
            data, _ = transformers.PretrainedConfig.get_config_dict(name)
        except Exception as error:
            raise TraceError(
                f"cannot load the configuration of {name!r} from the hub: {one_line(error)}"
            ) from error
    return name.rpartition("/")[2], *_step_of_configuration(data, name, sizes, overrides)


def step_from_configuration(file: str, sizes: BatchSizes, overrides: Sequence[str]) -> NamedStep:
    """Build the training step for a configuration file, which has "model_type" for transformers or
    "_class_name" for diffusers. Raises `TraceError`.
    """
    path = Path(file).expanduser()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot read the configuration {file}: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise TraceError(f"{file} has a JSON {type(data).__name__}, but a configuration is a dict")
    return path.stem, *_step_of_configuration(data, file, sizes, overrides)


def _step_of_configuration(
    data: ConfigData, source: str, sizes: BatchSizes, overrides: Sequence[str]
) -> ModelCall:
    """Build the model and its call from the data of a configuration; `source` names it in errors.
    Raises `TraceError`."""
    changes = dict(_parse_override(text) for text in overrides)
    if "model_type" not in data and "_class_name" in data:
        return denoising_step(_import_package("diffusers"), data, source, sizes, changes)
    if not isinstance(data.get("model_type"), str):
        raise TraceError(
            f'{source} has no "model_type" (transformers) and no "_class_name" (diffusers), so '
            f"remat cannot build a model from it; {_FACTORY_REMEDY}"
        )
    transformers = _import_package("transformers")
    from remat.frontend.capture.eager_kernels.flash_attention import flash_attention_assumed

    with _without_warnings(transformers):
        config = _build_configuration(transformers, data, source, sizes, changes)
        task, model_class = _task_and_model_class(transformers, config, source)
        try:
            # The batch needs real elements even if the default device is "meta".
            with torch.device("cpu"):
                kwargs = make_batch(task, config, sizes)
            if torch.get_default_device().type != "meta":
                _check_weights_fit_memory(model_class, config, source)
            with flash_attention_assumed():
                model = model_class(config)
            if "input_ids" in kwargs:
                _check_positions(model, config, sizes, source)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"cannot build {model_class.__name__} from {source}: {one_line(error)}"
            ) from error
    return model.train(), (), dict(kwargs)


def _import_package(name: str) -> ModuleType:
    """Import transformers or diffusers without their warnings. Raises `TraceError` if that
    fails."""
    silence_warnings_of(name)
    try:
        return import_module(name)
    except ImportError as error:
        raise TraceError(
            f"this source needs {name}: pip install 'remat[hf]' ({one_line(error)})"
        ) from error


@contextmanager
def _without_warnings(transformers: ModuleType) -> Iterator[None]:
    """Silence transformers' warnings about the configuration."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


# -- the configuration ----------------------------------------------------------------------------


def _parse_override(text: str) -> tuple[str, object]:
    """Return name and value of an override, "n_layer=4"; a value that is not JSON is text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TraceError(f"{text!r} is not of the form NAME=VALUE, as in n_layer=4")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value


def _find_model_type(transformers: ModuleType, name: str) -> str:
    """Return transformers' model type of this name, with dashes or underscores. Raises `TraceError`
    if there is none."""
    types = list(transformers.CONFIG_MAPPING)
    # Model types are spelled with dashes or with underscores.
    by_letters = {_letters_and_digits(model_type): model_type for model_type in types}
    if _letters_and_digits(name) not in by_letters:
        raise TraceError(
            f"{name!r} is not a model type of transformers {transformers.__version__}"
            f"{similar_names_hint(name, types)}; write hf:org/name for a configuration from the hub"
        )
    return name if name in types else by_letters[_letters_and_digits(name)]


def _letters_and_digits(name: str) -> str:
    """Return the letters and digits of a name in lower case."""
    return "".join(c for c in name.lower() if c.isalnum())


_PRIVATE_FIELDS = {"attn_implementation": "_attn_implementation"}
"""Names of fields as transformers takes them, and as it stores them."""


def _build_configuration(
    transformers: ModuleType, data: ConfigData, source: str, sizes: BatchSizes, changes: ConfigData
) -> Any:
    """Return transformers' configuration with the changes, without a key-value cache, and with
    special tokens within its vocabulary. Raises `TraceError` for an invalid one."""
    model_type = data["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        code = "auto_map" in data
        remote = " (it needs code from the hub, which remat does not run)" if code else ""
        raise TraceError(
            f"{source} has the model type {model_type!r}, which transformers "
            f"{transformers.__version__} does not have{remote}; {_FACTORY_REMEDY}"
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    unchanged = None
    try:
        unchanged = config_class.from_dict(data)
        for key in changes:
            if not hasattr(unchanged, _PRIVATE_FIELDS.get(key, key)):
                raise unknown_field_error(
                    key, [*unchanged.to_dict(), *unchanged.attribute_map], source
                )
        aliases = config_class.attribute_map
        layers = LAYERS | {aliases.get(name, name) for name in LAYERS}
        check_configuration_sizes(
            data | changes, source, layers, SIZES | {aliases.get(name, name) for name in SIZES}
        )
        if sizes.image is not None and hasattr(unchanged, "image_size"):
            changes = {"image_size": sizes.image, **changes}
        fields = {config_class.attribute_map.get(k, k): value for k, value in changes.items()}
        config = config_class.from_dict(_with_matching_layer_types(data | fields))
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            if hasattr(part, "use_cache"):
                part.use_cache = False
            _move_tokens_into_vocabulary(part)
        return config
    except TraceError:
        raise
    except Exception as error:
        values = ", ".join(
            f"{key}={getattr(unchanged, key)!r}" for key in changes if hasattr(unchanged, key)
        )
        remedy = f"; without --set it has {values}: pass values of these types" if values else ""
        raise TraceError(
            f"{source} is not a valid configuration: {one_line(error)}{remedy}"
        ) from error


def _with_matching_layer_types(data: ConfigData) -> ConfigData:
    """Truncate the list of layer types to the number of layers."""
    layers, types = data.get("num_hidden_layers"), data.get("layer_types")
    if isinstance(layers, int) and isinstance(types, list) and len(types) > layers:
        return data | {"layer_types": types[:layers]}
    return data


def _move_tokens_into_vocabulary(config: Any) -> None:
    """Move special tokens beyond the vocabulary to its last token."""
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        return
    for name, value in special_token_ids(config).items():
        if isinstance(value, int) and value >= vocabulary:
            setattr(config, name, vocabulary - 1)
        elif isinstance(value, list):
            setattr(config, name, [min(token, vocabulary - 1) for token in value])


# -- the model ------------------------------------------------------------------------------------


def _task_and_model_class(
    transformers: ModuleType, config: Any, source: str
) -> tuple[str, type[nn.Module]]:
    """Return the task and the model class of a configuration.

    It is the first of the configuration's `architectures` that has a task of `TASKS`, else the
    first class that transformers has for the configuration.
    """
    tables = {task: getattr(transformers, f"MODEL_FOR_{task}_MAPPING") for task in TASKS}
    classes_by_task = {
        task: entry if isinstance(entry, tuple) else (entry,)
        for task, table in tables.items()
        if (entry := table.get(type(config), None)) is not None
        and (task != SPEECH or config.model_type in SPEECH_TYPES)
    }
    for name in config.architectures or ():
        for task, classes in classes_by_task.items():
            for model_class in classes:
                if model_class.__name__ == name:
                    return task, model_class
    for task, classes in classes_by_task.items():
        # A causal model would leave out the encoder; a sequence-to-sequence model needs one.
        if (task == "CAUSAL_LM" and config.is_encoder_decoder) or (
            task == SEQ_TO_SEQ and not config.is_encoder_decoder
        ):
            continue
        return task, classes[0]
    raise TraceError(
        f"remat has no training step for the model type {config.model_type!r} of {source}: it is "
        "not a language model, image classifier, segmenter or speech-to-text model of "
        f"transformers; {_FACTORY_REMEDY}"
    )


def _check_weights_fit_memory(model_class: type[nn.Module], config: Any, source: str) -> None:
    """Raise `TraceError` for weights that exceed the free memory; the system would kill the
    process. Nothing if either is unknown."""
    try:
        with torch.device("meta"):
            size_bytes = sum(p.nbytes for p in model_class(config).parameters())
    except Exception:
        # Some constructors read elements of tensors, which fails on "meta": the size is unknown.
        return
    free = free_bytes("cpu")
    if free is not None and size_bytes > free:
        raise TraceError(
            f"the weights of {source} take {format_bytes(size_bytes)}, and this machine has "
            f"{format_bytes(free)} free; make it smaller, as with --set num_hidden_layers=2"
        )


def _check_positions(model: nn.Module, config: Any, sizes: BatchSizes, source: str) -> None:
    """Raise `TraceError` if there are more tokens than the model has positions."""
    max_tokens = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            # RoBERTa and similar models start positions after the padding index.
            max_tokens -= 0 if module.padding_idx is None else module.padding_idx + 1
            break
    if sizes.tokens > max_tokens:
        raise TraceError(
            f"{source} has positions for {max_tokens:,} tokens, but {sizes.tokens_option} is "
            f"{sizes.tokens:,}; use at most {max_tokens} tokens, or more positions: --set "
            f"max_position_embeddings={2 * sizes.tokens}"
        )


LAYERS = frozenset(
    {
        "decoder_layers",
        "encoder_layers",
        "layers_per_block",
        "num_decoder_layers",
        "num_hidden_layers",
    }
)
"""Fields with a number of layers."""

SIZES = LAYERS | {
    "cross_attention_dim",
    "hidden_size",
    "image_size",
    "in_channels",
    "num_attention_heads",
    "num_channels",
    "num_key_value_heads",
    "out_channels",
    "patch_size",
    "sample_size",
    "vocab_size",
}
"""Fields of transformers and diffusers that no model has with 0."""

_MAX_LAYERS = 10_000
_MAX_SIZE = 100_000_000


def check_configuration_sizes(
    fields: Mapping[str, object], source: str, layers: Set[str] = LAYERS, sizes: Set[str] = SIZES
) -> None:
    """Raise `TraceError` if a size is below 1, or so large that building the model takes hours.
    `layers` and `sizes` are the names of such fields."""
    for name, value in fields.items():
        if name not in sizes or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        limit = _MAX_LAYERS if name in layers else _MAX_SIZE
        if not 1 <= value <= limit:
            raise TraceError(
                f"the configuration of {source} has {name}={value}, and no model of that size can "
                f"be built; set it to a number from 1 to {limit:,}"
            )


_IMPORTED_BY_TRANSFORMERS = ("bitsandbytes",)


def silence_warnings_of(package: str) -> None:
    """Let transformers or diffusers log errors only, for as long as the process runs, unless their
    environment variable says otherwise: `TRANSFORMERS_VERBOSITY=warning`."""
    variable = f"{package.upper()}_VERBOSITY"
    if variable in os.environ:
        return
    os.environ[variable] = "error"  # their import sets the level
    if package in sys.modules:
        logging.getLogger(package).setLevel(logging.ERROR)
    for name in _IMPORTED_BY_TRANSFORMERS:
        logging.getLogger(name).setLevel(logging.ERROR)


ModelCall = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_MODEL_CLASSES = ("UNet2DModel", "UNet2DConditionModel")
_CONDITIONS = (
    "class_embed_type",
    "num_class_embeds",
    "addition_embed_type",
    "encoder_hid_dim_type",
    "time_cond_proj_dim",
)
"""Configuration fields of conditions other than text, which this training step does not provide."""


class Denoiser(nn.Module):
    """A U-Net that returns its training loss: the mean squared error of the predicted noise."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self,
        noisy: torch.Tensor,
        times: torch.Tensor,
        noise: torch.Tensor,
        text: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the loss. `noisy` and `noise` are (batch, channels, height, width), `times` is
        (batch,), and `text` is (batch, tokens, width)."""
        condition = () if text is None else (text,)
        predicted = self.unet(noisy, times, *condition).sample
        return {"loss": F.mse_loss(predicted, noise)}


def denoising_step(
    diffusers: ModuleType,
    data: dict[str, Any],
    source: str,
    sizes: BatchSizes,
    changes: dict[str, Any],
) -> ModelCall:
    """Return the model of a configuration with "_class_name", and the arguments of one call. Raises
    `TraceError`."""
    name = data["_class_name"]
    if name not in _MODEL_CLASSES:
        raise TraceError(
            f"{source} is a configuration of diffusers' {name}; remat builds only "
            f"{', '.join(_MODEL_CLASSES)} from a file: for others, write a function that returns "
            "(model, args)"
        )
    model_class = getattr(diffusers, name)
    check_configuration_sizes(data | changes, source)
    try:
        unet = model_class.from_config(data | changes)
    except Exception as error:
        raise TraceError(f"cannot build {name} from {source}: {one_line(error)}") from error
    config = unet.config
    for key in changes:
        if key not in config:
            raise unknown_field_error(key, config, source)
    for key in _CONDITIONS:
        if config.get(key) is not None:
            raise TraceError(
                f"{source} needs a condition that remat does not provide ({key} is "
                f"{config[key]!r}); write a function that returns (model, args)"
            )
    noisy = torch.randn(
        sizes.batch, config["in_channels"], *_denoiser_image_size(config, source, sizes)
    )
    noise = torch.randn(sizes.batch, config["out_channels"], *noisy.shape[2:])
    args = [noisy, torch.randint(0, 1000, (sizes.batch,)), noise]
    if name == "UNet2DConditionModel":
        width = config["cross_attention_dim"]
        widths = width if isinstance(width, (list, tuple)) else [width]
        args.append(torch.randn(sizes.batch, sizes.tokens, widths[0]))
    return Denoiser(unet).train(), tuple(args), {}


def unknown_field_error(key: str, fields: Iterable[str], source: str) -> TraceError:
    """Return the error for a changed field that the configuration does not have."""
    return TraceError(
        f"the configuration of {source} has no {key!r}{similar_names_hint(key, fields)}"
    )


def _denoiser_image_size(config: Any, source: str, sizes: BatchSizes) -> tuple[int, int]:
    """Return height and width of a U-Net's images: of `sizes`, or its own. Raises `TraceError` if
    both are missing."""
    size = sizes.image or config["sample_size"]
    if size is None:
        raise TraceError(f"{source} has no sample_size; pass the image size, as in --image 64")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return height, width
