"""Benchmark of fifty training steps with the Trainer of Transformers: tokens/s, peak, loss.

    python -m benchmarks.training
    python -m benchmarks.training --models gpt2 --steps 20

Each method has a model and a Trainer of its own, with the same weights, data and seed. They take
turns step by step, in threads that pass a baton, so that other load of the machine affects all
alike. remat's budgets are the peak that Transformers' `gradient_checkpointing` reaches, and 60%.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import remat
from benchmarks.harness import machine, report
from benchmarks.harness.measurement import keep_freed_memory
from benchmarks.models import families
from benchmarks.models.workloads import Workload
from remat.frontend.memory.meter import allocated_peak, measure_step, unique_bytes
from remat.integrations import transformers as in_transformers
from remat.limits.units import format_bytes

CPU = torch.device("cpu")
METERED_STEP = 2
"""The step whose peak is measured, and not its time. Earlier steps plan, compile and allocate."""

WorkloadBuilder = Callable[[Workload], Any]
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Train each model by each method, print its table, and write the result file."""
    options = _options(argv)
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    result: Row = {
        "benchmark": "training",
        "units": "bytes, seconds; a ratio is the median over steps of the same turn",
        "peak": "forward and backward of one step, with parameters, gradients and batch, without "
        "the optimizer's state",
        "steps": options.steps,
        "machine": machine.describe(CPU),
        "models": {},
    }
    for name in options.models:
        result["models"][name] = _compare_methods(name, options)
        print(
            "written:", report.write_result(Path(options.out), "training-cpu", result), flush=True
        )
    return 0


# -- methods --------------------------------------------------------------------------------------


@dataclass
class MethodRun:
    """The training run of one method: how it prepares the model, and what it measured."""

    name: str
    prepare: Callable[[Any], Any]
    arguments: Row = field(default_factory=dict)
    is_compiled: bool = False
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str = ""


def _methods(
    checkpointed_bytes: int | None, options: argparse.Namespace, workload: Workload
) -> list[MethodRun]:
    """Return the runs to compare; without `checkpointed_bytes`, only the one that measures it."""
    checkpointing = {"gradient_checkpointing": True}
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    runs = [
        MethodRun("eager", lambda model: model),
        MethodRun("checkpointing, all", lambda model: model, {**checkpointing, **kwargs}),
        MethodRun("checkpointing, every second", _every_second),
    ]
    if checkpointed_bytes is None:
        return runs[1:2]
    for budget in (checkpointed_bytes, "60%"):
        at = "60%" if budget == "60%" else "its peak"
        for scope in ("model", "blocks"):
            runs.append(MethodRun(f"remat, {scope}, {at}", _enabled(budget, scope)))
    runs.append(MethodRun("checkpointing by remat.emit, 60%", _by_policies("60%", workload)))
    if options.compile:
        runs.append(MethodRun("torch.compile", _compiled("inductor"), is_compiled=True))
        backend_options = {"budget": "60%", "outputs": "dropped"}
        runs.append(
            MethodRun(
                "torch.compile, remat, 60%", _compiled("remat", backend_options), is_compiled=True
            )
        )
    return runs


def _enabled(budget: int | str, scope: str) -> Callable[[Any], Any]:
    """Return a function that calls `remat.enable` on a model."""
    return lambda model: remat.enable(model, budget, scope=scope, outputs="dropped")


def _by_policies(budget: str, workload: Workload) -> Callable[[Any], Any]:
    """Return a function that applies the policies of `remat.emit` to a model."""

    def prepare(model: Any) -> Any:
        policies = remat.emit(
            model, budget, example_kwargs=workload.batch, outputs="dropped", compare=False
        )
        return in_transformers.apply(model, policies)

    return prepare


def _every_second(model: Any) -> Any:
    """Enable Transformers' checkpointing for every second block of the model."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", None) is True]
    blocks = [m for m in layers if "Layer" in type(m).__name__ or "Block" in type(m).__name__]
    for block in blocks[::2]:
        block.gradient_checkpointing = False
    return model


def _compiled(backend: str, backend_options: Row | None = None) -> Callable[[Any], Any]:
    def prepare(model: Any) -> Any:
        model.compile(backend=backend, **({"options": backend_options} if backend_options else {}))
        return model

    return prepare


# -- one model ------------------------------------------------------------------------------------


def _compare_methods(name: str, options: argparse.Namespace) -> Row:
    """Train one model by all methods, print their lines, and return their rows."""
    workload = _workload(name)
    (probe,) = _methods(None, options, workload)
    _train([probe], name, METERED_STEP + 1)
    if probe.failure:
        raise RuntimeError(f"{name} does not train with checkpoints: {probe.failure}")
    runs = _methods(probe.peak_bytes, options, workload)
    _train(runs, name, options.steps)
    eager = runs[0]
    rows = [_row(run, eager, workload) for run in runs]
    print(f"\n{name}: {workload.size}; losses of {options.steps} steps")
    for row in rows:
        print(f"  {row['method']:<30} {row['failure'] or _line(row)}", flush=True)
    return {"size": workload.size, "methods": rows}


def _row(run: MethodRun, eager: MethodRun, workload: Workload) -> Row:
    """Return the result row of one run, with ratios to eager's."""
    if run.failure:
        return {"method": run.name, "failure": run.failure}
    warm_s, eager_s = run.step_s[METERED_STEP + 1 :], eager.step_s[METERED_STEP + 1 :]
    ratios = [a / b for a, b in zip(warm_s, eager_s, strict=True)]
    step_s = statistics.median(warm_s)
    pairs = zip(run.losses, eager.losses, strict=True)
    items = next(iter(workload.batch.values()))
    per_step = items.numel() if items.dtype == torch.long else items.shape[0]
    return {
        "method": run.name,
        "failure": "",
        "peak_bytes": run.peak_bytes,
        "peak_to_eager": run.peak_bytes / eager.peak_bytes,
        "step_s_median": step_s,
        "per_s": per_step / step_s,
        "unit": "tokens" if items.dtype == torch.long else "images",
        "time_to_eager": statistics.median(ratios),
        "loss_error": max(abs(a - b) / abs(b) for a, b in pairs),
        "losses": run.losses,
        "step_s": run.step_s,
    }


def _line(row: Row) -> str:
    equal = "losses equal" if row["loss_error"] == 0 else f"losses within {row['loss_error']:.0e}"
    return (
        f"{format_bytes(row['peak_bytes']):>9} ({row['peak_to_eager']:.3f}), "
        f"{row['per_s']:7.0f} {row['unit']}/s, time {row['time_to_eager']:.3f} of eager, {equal}"
    )


def _workload(name: str) -> Workload:
    """Return a model family's workload on the CPU, from seed 0; for `llama_lora` with adapters."""
    torch.manual_seed(0)
    if name == "llama_lora":
        from peft import LoraConfig, get_peft_model

        base = families.llama(CPU, False)
        model: Any = base.model
        adapters = LoraConfig(
            r=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapters)
        return Workload(f"{base.size}, LoRA", model, base.batch, base.blocks, base.autocast)
    return getattr(families, {"gpt2": "small_gpt"}.get(name, name))(CPU, False)


# -- training -------------------------------------------------------------------------------------


class Baton:
    """Lets one thread run at a time, for one step each, with its own state of the generators."""

    def __init__(self, count: int) -> None:
        self._turn = 0
        self._left = list(range(count))
        self._changed = threading.Condition()

    def wait(self, number: int) -> None:
        """Wait until it is the turn of thread `number`."""
        with self._changed:
            self._changed.wait_for(lambda: self._left[self._turn] == number)

    def pass_on(self, number: int) -> None:
        """Let the next thread run, and wait for the next turn of thread `number`."""
        states = torch.get_rng_state(), random.getstate()
        with self._changed:
            self._turn = (self._turn + 1) % len(self._left)
            self._changed.notify_all()
        self.wait(number)
        torch.set_rng_state(states[0])
        random.setstate(states[1])

    def leave(self) -> None:
        """Remove the running thread from the turns."""
        with self._changed:
            del self._left[self._turn]
            if self._left:
                self._turn %= len(self._left)
            self._changed.notify_all()


def _train(runs: list[MethodRun], name: str, steps: int) -> None:
    """Train all runs step by step in turns, each in a thread."""
    baton = Baton(len(runs))
    threads = [
        threading.Thread(target=_run_thread, args=(run, number, baton, name, steps))
        for number, run in enumerate(runs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run_thread(run: MethodRun, number: int, baton: Baton, name: str, steps: int) -> None:
    """Prepare the model of one run and train it; an exception becomes the run's failure."""
    baton.wait(number)
    try:
        with tempfile.TemporaryDirectory() as folder:
            workload = _workload(name)
            model = run.prepare(workload.model)
            _trainer(model, workload, run, number, baton, Path(folder), steps).train()
    except Exception as error:  # becomes a row of the result
        run.failure = f"{type(error).__name__}: {error}"[:500]
    finally:
        baton.leave()


def _trainer(
    model: Any,
    workload: Workload,
    run: MethodRun,
    number: int,
    baton: Baton,
    folder: Path,
    steps: int,
) -> Any:
    """Return a Trainer that measures its run, and passes the baton after each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            run.step_s.append(time.perf_counter() - self.began)
            baton.pass_on(number)

    class Metered(Trainer):
        def training_step(
            self, model: Any, inputs: Any, num_items_in_batch: Any = None
        ) -> torch.Tensor:
            losses: list[torch.Tensor] = []

            def step() -> None:
                losses.append(Trainer.training_step(self, model, inputs, num_items_in_batch))

            if self.state.global_step == METERED_STEP:
                constants = [*model.parameters(), *model.buffers(), *inputs.values()]
                if run.is_compiled:  # the meter cannot see into compiled code
                    run.peak_bytes = allocated_peak(step) + unique_bytes(constants)
                else:
                    run.peak_bytes = measure_step(step, constants).peak_bytes
            else:
                step()
            run.losses.append(losses[0].item())
            return losses[0]

    batch = workload.batch
    rows = next(iter(batch.values())).shape[0]
    generator = torch.Generator().manual_seed(5)
    examples = []
    for _ in range(8 * rows):  # eight batches of randomly chosen rows of the workload's batch
        row = int(torch.randint(0, rows, (), generator=generator))
        examples.append({key: value[row] for key, value in batch.items()})
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=rows,
        learning_rate=1e-4,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=7,
        **run.arguments,
    )
    return Metered(model, arguments, train_dataset=examples, callbacks=[Turns()])  # type: ignore[arg-type]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["gpt2", "llama_lora", "vit", "qwen3_moe"])
    add("--steps", type=int, default=50)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--no-compile", dest="compile", action="store_false", help="omit torch.compile")
    add("--out", default=str(report.RESULTS), help="a folder for the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
