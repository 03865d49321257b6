"""Table of the acceptance run: the parts of each step, each run in a process of its own.

Steps that measure time come first: nothing else than a GPU can show it. What the software GPU shows
as well is marked; what it cannot, cuDNN and the arithmetic of CUDA, follows the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from benchmarks.gpu import (
    compiled,
    correctness,
    data_sheet,
    link,
    marked_tests,
    memory,
    models,
    offloading,
    speed,
    splitting,
)
from benchmarks.gpu.setting import PartFunction, WorkloadBuilder, without_turns

TITLES = {
    0: "the tests marked gpu; without --all, those of times",
    1: "every operation can be measured",
    2: "library workspaces",
    3: "bytes predicted, requested, allocated, reserved",
    4: "at 60%, on a device of 1.05 times that",
    5: "results equal eager's",
    6: "keeping everything, and CUDA graphs, against eager",
    7: "seconds predicted and measured",
    8: "extra time at the peak of per-block checkpointing",
    9: "steps with recomputation as CUDA graphs",
    10: "the first step of a second process",
    11: "splitting the largest operation",
    12: "seconds by data sheet and measured",
    13: "the link between device and host",
    14: "torch.compile at the peak of torch's own budget",
    15: "offloading to the host",
}


@dataclass(frozen=True)
class Part:
    """A part of a step, run in a process of its own for up to `limit_s`, with `env` added.

    `is_proved_without_gpu` is True if the software GPU shows the same. A GPU's minutes are better
    spent on others: only `--all` runs it.
    """

    step: int
    name: str
    run: PartFunction
    limit_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)
    is_proved_without_gpu: bool = False

    @property
    def is_timed(self) -> bool:
        """True if this part measures time: such parts run first, and use the GPU in turns."""
        return self.step in TIMED_STEPS or self.name.endswith("-times")

    @property
    def follows(self) -> bool:
        """True if this part needs what the part before it left."""
        return self.step == 10 and self.name.startswith("b-")

    @property
    def key(self) -> str:
        """The part's name in file names and on the command line."""
        return f"{self.step:02d}-{self.name}"


def _segments(is_expandable: bool) -> dict[str, str]:
    """Return the environment that sets expandable segments, under torch's old and new name."""
    value = f"expandable_segments:{is_expandable}"
    return {"PYTORCH_CUDA_ALLOC_CONF": value, "PYTORCH_ALLOC_CONF": value}


_MEASURED: dict[str, WorkloadBuilder] = {
    "gpt2-fp32": partial(models.gpt2, layers=2),
    "gpt2-bf16": partial(models.gpt2, layers=2, half=True),
    "gpt2-bf16-mask": partial(models.gpt2, layers=2, half=True, mask=True),
    "bert-fp32": models.bert,
}
_PLANNED: dict[str, WorkloadBuilder] = {
    "gpt2": partial(models.gpt2, layers=6, width=512, rows=8),
    "resnet50": partial(models.resnet50, rows=64),
    "vit-bf16": models.vit,
}
_SMALL: WorkloadBuilder = partial(models.gpt2, half=True, rows=1, tokens=64)
_COMPILED: WorkloadBuilder = partial(models.gpt2, layers=6, half=True, rows=16, tokens=1024)
_LARGE: WorkloadBuilder = partial(models.gpt2, half=True, rows=16, tokens=1024)
_RESNET: WorkloadBuilder = partial(models.resnet50, rows=128, half=True)


TIMED_STEPS = (6, 7, 8, 12, 15, 11, 13, 14)
RUN_ORDER = (*TIMED_STEPS, 0, 1, 5, 3, 4, 10, 9, 2)
"""Steps in the order in which they run: times first."""


def _parts() -> list[Part]:
    """Return the parts of all steps, in the order in which they run."""
    parts = [*_test_parts(), *_memory_parts(), *_number_parts(), *_time_parts()]
    return sorted(parts, key=lambda part: (part.is_proved_without_gpu, RUN_ORDER.index(part.step)))


def _test_parts() -> list[Part]:
    """Return the parts of step 0: a file each, but tests of times apart from others."""
    return [
        Part(
            0, file.stem.removeprefix("test_") + ("-times" if has_times else ""),
            marked_tests.run_marked_tests(file, has_times), 240.0,
            is_proved_without_gpu=not has_times,
        )
        for has_times in (True, False)
        for file in marked_tests.marked_files(has_times=has_times)
    ]  # fmt: skip


def _memory_parts() -> list[Part]:
    """Return the parts of steps 2, 3, 4 and 10."""
    parts = [Part(2, "products", memory.check_library_workspaces, 60.0, is_proved_without_gpu=True)]
    for is_expandable in (False, True):
        kind = "expandable" if is_expandable else "default"
        for name, build in _PLANNED.items():
            has_cudnn = name == "resnet50"
            parts += [
                Part(
                    step, f"{name}-{kind}", run, env=_segments(is_expandable),
                    is_proved_without_gpu=is_expandable and not has_cudnn,
                )
                for step, run in (
                    (3, memory.check_predicted_bytes(build, is_expandable)),
                    (4, memory.check_hard_limit(build)),
                )
            ]  # fmt: skip
    warm: WorkloadBuilder = partial(models.resnet50, rows=64)
    return [
        *parts,
        Part(10, "a-first-process", memory.fill_cost_cache(warm), env=_segments(True)),
        Part(10, "b-second-process", memory.check_warm_process(warm), env=_segments(True)),
    ]


def _number_parts() -> list[Part]:
    """Return the parts of steps 1, 5 and 9."""
    parts = [
        Part(1, name, correctness.check_all_measured(build)) for name, build in _MEASURED.items()
    ]
    gpt2: WorkloadBuilder = partial(models.gpt2, rows=4)
    resnet: WorkloadBuilder = partial(models.resnet50, rows=16)
    parts += [
        Part(5, "gpt2-dropout", correctness.check_equals_eager(gpt2, "min", replays=10)),
        Part(5, "resnet50", correctness.check_equals_eager(resnet, "60%")),
    ]
    for dropout in (0.0, 0.1):
        build = partial(models.gpt2, layers=4, rows=4, tokens=256, dropout=dropout)
        parts.append(Part(9, f"gpt2-dropout-{dropout:g}", correctness.check_cuda_graphs(build)))
    return parts


def _time_parts() -> list[Part]:
    """Return the parts of steps 6, 7, 8 and 11 to 15."""
    gpt2: WorkloadBuilder = partial(models.gpt2, half=True, tokens=1024)
    return [
        Part(6, "gpt2-1x64", speed.check_keep_all(_SMALL, 1.05)),
        Part(6, "gpt2-16x1024", speed.check_keep_all(_LARGE, 1.02)),
        Part(7, "gpt2-bf16", speed.check_predicted_times(gpt2), 150.0),
        Part(7, "resnet50-bf16", speed.check_predicted_times(_RESNET), 150.0),
        Part(8, "gpt2-16x1024", speed.compare_methods(_LARGE), 240.0),
        Part(8, "resnet50-b128", speed.compare_methods(_RESNET), 240.0),
        Part(8, "llama-1b-2x2048", speed.compare_methods(models.llama), 300.0),
        Part(11, "llama-1b-2x2048", without_turns(splitting.check_split(models.llama)), 150.0),
        Part(12, "gpt2-bf16", data_sheet.compare_costs(gpt2)),
        Part(12, "llama-1b-bf16", data_sheet.compare_costs(models.llama)),
        Part(12, "resnet50-bf16", data_sheet.compare_costs(_RESNET)),
        Part(13, "pinned-memory", without_turns(link.measure_link), 60.0),
        Part(14, "gpt2-16x1024", without_turns(compiled.compare_compiled(_COMPILED)), 300.0),
        Part(15, "gpt2-16x1024", offloading.check_offload(_LARGE, ("70%", "50%"), "off"), 200.0),
        Part(
            15, "llama-1b-2x2048", offloading.check_offload(models.llama, ("60%",), "auto"), 200.0
        ),
    ]


PARTS = _parts()
