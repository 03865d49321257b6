"""Models with random weights from configurations of transformers and diffusers, and a training step
for each: a batch of random data that a loss comes out of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from remat.commands.models import diffusion
from remat.commands.models.batches import SEQ_TO_SEQ, TASKS, Sizes, batch, special_tokens
from remat.errors import TraceError, nearest, one_line
from remat.frontend.memory.device_memory import free_bytes
from remat.limits.units import format_bytes

Named = tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]
Data = dict[str, Any]

_FACTORY = "write a function that returns (model, kwargs): path/to/script.py:factory"


def from_name(name: str, sizes: Sizes, overrides: Sequence[str]) -> Named:
    """`gpt2`, a model type in its default configuration, or `org/name`, a configuration of the hub.

    Raises `TraceError`.
    """
    transformers = _package("transformers")
    if "/" not in name:
        model_type = _known_type(transformers, name)
        return name, *_step({"model_type": model_type}, name, sizes, overrides)
    with _quiet(transformers):
        try:
            data, _ = transformers.PretrainedConfig.get_config_dict(name)
        except Exception as error:
            raise TraceError(
                f"the configuration of {name!r} did not come from the hub: {one_line(error)}"
            ) from error
    return name.rpartition("/")[2], *_step(data, name, sizes, overrides)


def from_file(file: str, sizes: Sizes, overrides: Sequence[str]) -> Named:
    """A configuration in a file: with "model_type" for transformers, "_class_name" for diffusers.

    Raises `TraceError`.
    """
    path = Path(file).expanduser()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot read the configuration {file}: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise TraceError(
            f"{file} holds a JSON {type(data).__name__}, and a configuration is a dict"
        )
    return path.stem, *_step(data, file, sizes, overrides)


def _step(data: Data, source: str, sizes: Sizes, overrides: Sequence[str]) -> diffusion.Call:
    changes = dict(_override(text) for text in overrides)
    if "model_type" not in data and "_class_name" in data:
        return diffusion.denoising_step(_package("diffusers"), data, source, sizes, changes)
    if not isinstance(data.get("model_type"), str):
        raise TraceError(
            f'{source} has no "model_type" (transformers) and no "_class_name" (diffusers), so it '
            f"is no configuration of a model that remat can make; {_FACTORY}"
        )
    transformers = _package("transformers")
    with _quiet(transformers):
        config = _configuration(transformers, data, source, sizes, changes)
        task, model_class = _model_class(transformers, config, source)
        try:
            with torch.device("cpu"):  # where the default is "meta", its numbers are needed still
                kwargs = batch(task, config, sizes)
            if torch.get_default_device().type != "meta":
                _check_memory(model_class, config, source)
            model = model_class(config)
            _check_positions(model, config, sizes.tokens if "input_ids" in kwargs else 0, source)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"{model_class.__name__} cannot be made from {source}: {one_line(error)}"
            ) from error
    return model.train(), (), dict(kwargs)


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise TraceError(
            f"this source needs {name}: pip install 'remat[hf]' ({one_line(error)})"
        ) from error


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Without its remarks on configurations that are about to be changed."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


# -- the configuration ----------------------------------------------------------------------------


def _override(text: str) -> tuple[str, object]:
    """ "n_layer=4": the name and its value, JSON where it can be read as such, else text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TraceError(f"{text!r} sets nothing; write NAME=VALUE, as in n_layer=4")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value


def _known_type(transformers: ModuleType, name: str) -> str:
    types = list(transformers.CONFIG_MAPPING)
    # Spelt with dashes as often as with underscores.
    spelt = {_letters(known): known for known in types}
    if _letters(name) not in spelt:
        raise TraceError(
            f"{name!r} is no model type of transformers {transformers.__version__}"
            f"{nearest(name, types)}; a configuration of the hub is hf:org/name"
        )
    return name if name in types else spelt[_letters(name)]


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _configuration(
    transformers: ModuleType, data: Data, source: str, sizes: Sizes, changes: Data
) -> Any:
    """The configuration with the changes, without a cache, its special tokens in the vocabulary."""
    model_type = data["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        code = "auto_map" in data
        remote = " (it needs code from the hub, which remat does not run)" if code else ""
        raise TraceError(
            f"{source} is of the model type {model_type!r}, which transformers "
            f"{transformers.__version__} does not have{remote}; {_FACTORY}"
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    try:
        plain = config_class.from_dict(data)
        for key in changes:
            if not hasattr(plain, key):
                raise diffusion.no_field(key, [*plain.to_dict(), *plain.attribute_map], source)
        if sizes.image is not None and hasattr(plain, "image_size"):
            changes = {"image_size": sizes.image, **changes}
        known = {config_class.attribute_map.get(k, k): value for k, value in changes.items()}
        config = config_class.from_dict(_consistent(data | known))
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            if hasattr(part, "use_cache"):
                part.use_cache = False
            _keep_in_vocabulary(part)
        return config
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"{source} is no valid configuration: {one_line(error)}") from error


def _consistent(data: Data) -> Data:
    """Fewer layers than a file's list of layer types: the first of them."""
    layers, types = data.get("num_hidden_layers"), data.get("layer_types")
    if isinstance(layers, int) and isinstance(types, list) and len(types) > layers:
        return data | {"layer_types": types[:layers]}
    return data


def _keep_in_vocabulary(config: Any) -> None:
    """A smaller vocabulary moves the special tokens to its end."""
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        return
    for name, value in special_tokens(config).items():
        if isinstance(value, int) and value >= vocabulary:
            setattr(config, name, vocabulary - 1)
        elif isinstance(value, list):
            setattr(config, name, [min(token, vocabulary - 1) for token in value])


# -- the model ------------------------------------------------------------------------------------


def _model_class(transformers: ModuleType, config: Any, source: str) -> tuple[str, type[nn.Module]]:
    """Its task and class: the first of its `architectures` that is trained by a task known here,
    else what transformers has for the configuration."""
    tables = {task: getattr(transformers, f"MODEL_FOR_{task}_MAPPING") for task in TASKS}
    offered = {
        task: found if isinstance(found, tuple) else (found,)
        for task, table in tables.items()
        if (found := table.get(type(config), None)) is not None
    }
    for name in config.architectures or ():
        for task, classes in offered.items():
            for model_class in classes:
                if model_class.__name__ == name:
                    return task, model_class
    for task, classes in offered.items():
        # Of an encoder and a decoder, half would be left out, or is not there.
        if (task == "CAUSAL_LM" and config.is_encoder_decoder) or (
            task == SEQ_TO_SEQ and not config.is_encoder_decoder
        ):
            continue
        return task, classes[0]
    raise TraceError(
        f"remat knows no training step for the model type {config.model_type!r} of {source}: it is "
        f"no language model, image classifier or segmenter of transformers; {_FACTORY}"
    )


def _check_memory(model_class: type[nn.Module], config: Any, source: str) -> None:
    """Better an error now than the end of the process by the system."""
    try:
        with torch.device("meta"):
            size_bytes = sum(p.nbytes for p in model_class(config).parameters())
    except Exception:
        # Some constructors compute with real numbers; then the size is not known beforehand.
        return
    free = free_bytes("cpu")
    if free is not None and size_bytes > free:
        raise TraceError(
            f"the weights of {source} take {format_bytes(size_bytes)}, and this machine has "
            f"{format_bytes(free)} free; make it smaller, as with --set num_hidden_layers=2"
        )


def _check_positions(model: nn.Module, config: Any, tokens: int, source: str) -> None:
    """That the tokens are no more than the model has positions for."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            # RoBERTa and its kin count positions from behind the padding's.
            most -= 0 if module.padding_idx is None else module.padding_idx + 1
            break
    if tokens > most:
        raise TraceError(
            f"{source} has positions for {most:,} tokens, and --tokens is {tokens:,}; use at most "
            f"--tokens {most}, or more positions: --set max_position_embeddings={2 * tokens}"
        )
