"""Table of the acceptance run: the parts of each step, each run in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from benchmarks.gpu import correctness, marked_tests, memory, models, speed
from benchmarks.gpu.setting import PartFunction, WorkloadBuilder

TITLES = {
    0: "the tests marked gpu",
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
}


@dataclass(frozen=True)
class Part:
    """A part of a step, run in a process of its own for up to `limit_s`, with `env` added."""

    step: int
    name: str
    run: PartFunction
    limit_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)

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
_LARGE: WorkloadBuilder = partial(models.gpt2, half=True, rows=16, tokens=1024)
_RESNET: WorkloadBuilder = partial(models.resnet50, rows=128, half=True)


def _parts() -> list[Part]:
    """Return the parts of all steps, ordered by step."""
    parts = [
        Part(0, file.stem.removeprefix("test_"), marked_tests.run_marked_tests(file), 240.0)
        for file in marked_tests.marked_files()
    ]
    parts += [
        Part(1, name, correctness.check_all_measured(build)) for name, build in _MEASURED.items()
    ]
    parts += [Part(2, "products", memory.check_library_workspaces, 60.0)]
    for is_expandable in (False, True):
        kind = "expandable" if is_expandable else "default"
        for name, build in _PLANNED.items():
            parts += [
                Part(
                    3, f"{name}-{kind}", memory.check_predicted_bytes(build, is_expandable),
                    env=_segments(is_expandable),
                ),
                Part(
                    4, f"{name}-{kind}", memory.check_hard_limit(build),
                    env=_segments(is_expandable),
                ),
            ]  # fmt: skip
    parts += [
        Part(
            5,
            "gpt2-dropout",
            correctness.check_equals_eager(partial(models.gpt2, rows=4), "min", replays=10),
        ),
        Part(
            5, "resnet50", correctness.check_equals_eager(partial(models.resnet50, rows=16), "60%")
        ),
        Part(6, "gpt2-1x64", speed.check_keep_all(_SMALL, 1.05)),
        Part(6, "gpt2-16x1024", speed.check_keep_all(_LARGE, 1.02)),
        Part(
            7,
            "gpt2-bf16",
            speed.check_predicted_times(partial(models.gpt2, half=True, tokens=1024)),
            150.0,
        ),
        Part(7, "resnet50-bf16", speed.check_predicted_times(_RESNET), 150.0),
        Part(8, "gpt2-16x1024", speed.compare_methods(_LARGE), 240.0),
        Part(8, "resnet50-b128", speed.compare_methods(_RESNET), 240.0),
        Part(8, "llama-1b-2x2048", speed.compare_methods(models.llama), 300.0),
    ]
    for dropout in (0.0, 0.1):
        build = partial(models.gpt2, layers=4, rows=4, tokens=256, dropout=dropout)
        parts.append(Part(9, f"gpt2-dropout-{dropout:g}", correctness.check_cuda_graphs(build)))
    warm: WorkloadBuilder = partial(models.resnet50, rows=64)
    parts += [
        Part(10, "a-first-process", memory.fill_cost_cache(warm), env=_segments(True)),
        Part(10, "b-second-process", memory.check_warm_process(warm), env=_segments(True)),
    ]
    return sorted(parts, key=lambda part: part.step)


PARTS = _parts()
