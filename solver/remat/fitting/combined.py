"""Options that need another trace: smaller batches and adapters. Each is combined with checkpoints
of blocks, and with a smaller optimizer, where it does not fit otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from remat.documents.trace import Trace, trained_parameters
from remat.errors import RematError, TraceError, one_line
from remat.fitting.eager import EagerStep
from remat.fitting.options import CHECKPOINTS_IN_WORDS
from remat.fitting.question import FitQuestion
from remat.limits.units import format_bytes
from remat.report.fit import ExcludedOption, FitOption

_MAX_BATCHES = 3
_SMALLER_BATCH = "smaller batch"


def combined_option(
    question: FitQuestion, step: EagerStep, name: str, code: str, *, runs: int = 1, note: str = ""
) -> FitOption:
    """Return the option of another step, as it is, or with the first of these that makes it fit: a
    smaller optimizer, a checkpoint for each block, both. If nothing does, the one that reserves
    least. `runs` is how often the step runs for the whole batch."""
    options: list[FitOption] = []
    for variant in (step, None if step.checkpoint_count else step.with_blocks_checkpointed()):
        if variant is None:
            continue
        of_variant = replace(question, step=variant)
        for optimizer in of_variant.optimizers_to_combine():
            parts, code_parts = [name], [code]
            if variant is not step:
                parts.append("checkpoint each block")
                code_parts.append(question.script.checkpoints or CHECKPOINTS_IN_WORDS)
            if optimizer.name != question.optimizer_name:
                code_parts.append(f"optimizer = {optimizer.code}")
            option = of_variant.option(
                question.name_with_optimizer(", ".join(parts), optimizer),
                variant.memory(optimizer),
                runs * variant.time_s,
                "; ".join(code_parts),
                note,
            )
            if option.fits:
                return option
            options.append(option)
    if not options:  # not even the optimizer's step fits
        memory = step.memory(question.optimizer)
        return question.option(name, memory, runs * step.time_s, code, note)
    return min(options, key=lambda option: option.reserved_bytes)


# -- smaller batches ------------------------------------------------------------------------------


def smaller_batch_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield the largest of some smaller batches that fits, as it is or combined with checkpoints
    and a smaller optimizer, else the smallest of these; an excluded option if none can fit or be
    traced. Nothing if the question has no batch size, or no traces of others."""
    if question.trace_of_batch is None or question.batch is None:
        return
    if question.batch < 2:
        yield ExcludedOption(_SMALLER_BATCH, "the batch is 1")
        return
    option: FitOption | ExcludedOption | None = None
    for batch in _promising_batches(question, question.batch):
        if option is not None and question.clock.is_set():
            break
        try:
            option = _smaller_batch_option(question, batch, question.trace_of_batch(batch))
        except TraceError as error:  # such as batch norm of one sample
            reason = f"a batch of {batch} cannot be traced: {one_line(error)}"
            option = ExcludedOption(_SMALLER_BATCH, reason)
            break
        if option.fits:
            break
    if isinstance(option, FitOption) and not option.fits:
        constant_bytes = _batch_independent_bytes(question)
        if constant_bytes > question.usable_bytes:
            constant = format_bytes(constant_bytes)
            reason = f"parameters, gradients, optimizer state and libraries take {constant}"
            option = ExcludedOption(_SMALLER_BATCH, f"{reason} with any batch")
    if option is not None:
        yield option


def _smaller_batch_option(question: FitQuestion, batch: int, trace: Trace) -> FitOption:
    """Return the option to accumulate the gradients of smaller batches; `trace` is for one of
    them."""
    count = (question.batch or 1) // batch
    total = count * question.loop.accumulate
    return combined_option(
        question,
        question.step.with_trace(trace),
        f"{total} batches of {batch}",
        f"(loss / {total}).backward() for {total} batches, then optimizer.step()",
        runs=count,
    )


def _batch_independent_bytes(question: FitQuestion) -> int:
    """Return the bytes that do not depend on the batch: parameters, gradients, optimizer state,
    buffers, libraries."""
    step = question.step
    parameters = {p.storage for p in trained_parameters(step.trace)}
    gradient_bytes = sum(map(step.trace.allocated_bytes, parameters))
    inputs = {p.storage for p in step.trace.placeholders if p.kind == "input"}
    input_bytes = sum(map(step.trace.allocated_bytes, inputs))
    constant_bytes = step.graph.constant_bytes - input_bytes
    return constant_bytes + gradient_bytes + question.optimizer.state_bytes


def _promising_batches(question: FitQuestion, batch: int) -> list[int]:
    """Return divisors of a batch, the largest first: those that may fit as they are, if activations
    are proportional to the batch; without any, the smallest and one in between."""
    constant_bytes = _batch_independent_bytes(question)
    memory = question.step.memory(question.optimizer)
    activation_bytes = max(0, memory.reserved_bytes - constant_bytes)
    room_bytes = question.usable_bytes - constant_bytes
    smaller = [b for b in range(batch - 1, 0, -1) if batch % b == 0]
    promising = [b for b in smaller if activation_bytes * b <= room_bytes * batch]
    middle = [b for b in smaller if b * b <= batch][:1]
    return promising[:_MAX_BATCHES] or list(dict.fromkeys([*middle, 1]))


# -- adapters -------------------------------------------------------------------------------------

_LORA = "r=16,targets=all-linear"
_VARIANTS = (("LoRA r=16", ""), ("QLoRA r=16, nf4", "nf4"))
_MIN_TRAINED_FRACTION = 0.5
"""The share of parameters that train from which on a loop is a full fine-tuning."""


def adapter_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield LoRA adapters of all linear layers, and with weights in 4 bits if they do not fit
    otherwise; an excluded option if the model cannot have them. Nothing for a loop that trains a
    smaller part of its parameters, and without traces of other models."""
    if question.trace_with_adapters is None or not _trains_most(question.step.trace):
        return
    for name, quantize in _VARIANTS:
        if question.clock.is_set():
            return
        try:
            trace = question.trace_with_adapters(_LORA, quantize)
        except RematError as error:
            yield ExcludedOption(name, one_line(error))
            return
        step = question.step.with_trace(trace)
        option = combined_option(
            question, step, name, _adapter_code(quantize), note="trains the adapters only"
        )
        yield option
        if option.fits:
            return


def _trains_most(trace: Trace) -> bool:
    """True if a step trains most of its parameters, by their bytes."""
    storages = {p.storage for p in trace.placeholders if p.kind == "parameter"}
    trained = {p.storage for p in trained_parameters(trace)}
    total, part = (sum(map(trace.allocated_bytes, s)) for s in (storages, trained))
    return part >= _MIN_TRAINED_FRACTION * total


def _adapter_code(quantize: str) -> str:
    """Return the code that adds adapters, to a model that is loaded in 4 bits with `quantize`."""
    load = prepare = ""
    if quantize:
        load = (
            "model = AutoModelForCausalLM.from_pretrained(..., quantization_config="
            f'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{quantize}", '
            "bnb_4bit_compute_dtype=torch.bfloat16)); "
        )
        prepare = "model = prepare_model_for_kbit_training(model, False); "
    lora = 'LoraConfig(r=16, target_modules="all-linear")'
    return f"{load}{prepare}model = get_peft_model(model, {lora})"
