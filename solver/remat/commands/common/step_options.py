"""`StepOptions`: the options of the commands that load a model and its training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.commands.common import command_options
from remat.commands.common.exits import UsageError, print_message
from remat.commands.common.plan_flags import check_plan_flag, plan_option_flag
from remat.documents.base import parse_strict_json
from remat.errors import DocumentError, RematError
from remat.fitting.lengths import LengthDistribution
from remat.limits.options import OUTPUTS_HELD, QUANTIZATIONS, LoraOptions, check_quantization

if TYPE_CHECKING:
    from remat.commands.models.batches import BatchSizes
    from remat.commands.models.sources import TrainingStep


_MAX_DIGITS = 15

Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="LENGTHS",
        help="Lengths of batches, in tokens, instead of --tokens: 512,1024,2048, or with shares or "
        "counts 512:70,2048:30, or a .json file with a list or an object.",
        show_default=False,
    ),
]


def parse_lengths(text: str) -> LengthDistribution:
    """Return the distribution that `--lengths` describes. Raises `UsageError`."""
    try:
        if not text.endswith(".json"):
            return LengthDistribution.of(_parse_length_list(text))
        data = parse_strict_json(Path(text).expanduser().read_bytes(), "lengths")
        if isinstance(data, dict):
            pairs = [(_parse_length(length), weight) for length, weight in data.items()]
            if len(dict(pairs)) < len(pairs):
                raise RematError("a length occurs twice in the file, such as 512 and 0512")
            data = dict(pairs)
        return LengthDistribution.of(data)  # type: ignore[arg-type]  # it checks the type
    except OSError as error:
        raise UsageError(f"cannot read {text}, the file of --lengths: {error.strerror}") from None
    except (DocumentError, RematError) as error:
        raise UsageError(f"in --lengths, {error}") from None


def _parse_length_list(text: str) -> list[int] | dict[int, float]:
    """Return the lengths of a list such as 512,1024, or a mapping to their shares if one has a
    share (512:70)."""
    pairs = [part.partition(":") for part in text.split(",")]
    lengths = [_parse_length(length.strip()) for length, _, _ in pairs]
    if not any(colon for _, colon, _ in pairs):
        return lengths
    weights: dict[int, float] = {}
    for length, (part, colon, weight) in zip(lengths, pairs, strict=True):
        try:
            weights[length] = weights.get(length, 0.0) + float(weight)
        except ValueError:
            raise RematError(
                f"{(part + colon + weight)[:40]!r} has no number as its share; give each length "
                "one, as in 512:70,2048:30"
            ) from None
    return weights


def _parse_length(text: str) -> int:
    """Return a number of tokens. Raises `RematError` for other text."""
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise RematError(f"{text[:40]!r} is not a number of tokens, such as 2048")
    return int(text)


_BATCH, _TOKENS = 2, 128

Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="ROWS",
        min=1,
        help=f"Batch size, for hf: and config.json. Default: {_BATCH}.",
        show_default=False,
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        min=1,
        help=f"Length of a sequence, in tokens. Default: {_TOKENS}.",
        show_default=False,
    ),
]
Lora = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="OPTIONS",
        help="Train LoRA adapters of PEFT only: r=16,targets=all-linear, with "
        "targets=q_proj+v_proj for some layers, and alpha=32, dropout=0.05 or dora.",
        show_default=False,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        metavar="TYPE",
        help=f"Quantize linear layers by bitsandbytes: {', '.join(QUANTIZATIONS)}.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """A model, the size of its batch, its precision, and the lifetime of its outputs."""

    source: command_options.Source
    as_json: command_options.Json = False
    batch: Batch = None
    tokens: Tokens = None
    image: command_options.Image = None
    overrides: command_options.Overrides = None
    seed: command_options.Seed = 0
    dtype: command_options.Dtype = None
    autocast: command_options.Autocast = None
    outputs: Annotated[str, plan_option_flag("outputs")] = OUTPUTS_HELD
    lora: Lora = None
    quantize: Quantize = None

    @property
    def is_configuration(self) -> bool:
        """True if the source is a configuration, whose batch has a size that can be chosen."""
        return self.source.startswith("hf:") or self.source.endswith(".json")

    @property
    def batch_size(self) -> int:
        """The rows of a configuration's batch: `--batch`, by default 2."""
        return _BATCH if self.batch is None else self.batch

    @property
    def length(self) -> int:
        """The number of tokens of a sequence."""
        return _TOKENS if self.tokens is None else self.tokens

    @property
    def sizes(self) -> BatchSizes:
        """The sizes of a batch."""
        from remat.commands.models.batches import BatchSizes

        return BatchSizes(self.batch_size, self.length, self.image)

    def check(self) -> None:
        """Raise `UsageError` for wrong values, and for sizes of a batch that a function creates."""
        command_options.check_autocast(self.autocast)
        check_plan_flag("outputs", self.outputs)
        try:
            if self.lora is not None:
                LoraOptions.parse(self.lora)
            if self.quantize is not None:
                check_quantization(self.quantize)
        except RematError as error:
            raise UsageError(str(error)) from error
        if not self.is_configuration:
            for name in ("batch", "tokens", "image"):
                self.check_has_sizes(f"--{name}", getattr(self, name))

    def check_has_sizes(self, option: str, value: object) -> None:
        """Raise `UsageError` if an option has a value, and the source is a function."""
        if value is not None and not self.is_configuration:
            raise UsageError(
                f"{option} {value} has no effect: {self.source} is a function, which creates its "
                "own batch. Change the batch there, or name hf:TYPE or a config.json"
            )

    def load(self, device: str, sizes: BatchSizes | None = None) -> TrainingStep:
        """Load the step on a device, by default with the sizes of the options."""
        from remat.commands.models.sources import load_training_step

        return load_training_step(
            self.source,
            sizes or self.sizes,
            overrides=self.overrides or (),
            device=device,
            dtype=self.dtype,
            seed=self.seed,
            lora=self.lora,
            quantize=self.quantize,
        )


def check_step_device(device: str | None) -> None:
    """Raise `UsageError` for an unknown `--device`. Print the GPU that "cuda" stands for on a
    machine without one."""
    command_options.check_target_device(device)
    from remat.frontend.common.target_gpu import DEFAULT_GPU, is_default_gpu

    if is_default_gpu(device):
        print_message(
            f"this machine has no GPU: --device {device} is taken as {DEFAULT_GPU}; name another "
            f"one: {', '.join(command_options.GPUS)}"
        )


def with_step_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `StepOptions` in place of its parameter `step`."""
    return command_options.replace_command_parameter(
        command, "step", command_options.dataclass_parameters(StepOptions), StepOptions
    )


def capture_device_type(device: str | None) -> str:
    """Return the type of the device on which a step for `device` is captured: "cpu" or "cuda".
    Raises `TraceError` for a device that does not exist."""
    from remat.frontend.capture.model.preserved_state import default_capture_device
    from remat.frontend.common.target_gpu import find_target_gpu, local_device

    if find_target_gpu(device) is not None:
        return "cpu"  # a capture for an absent GPU has its tensors on the CPU
    return default_capture_device().type if device is None else local_device(device).type
