"""Tables of the atlas as plain text: all models, a few for README.md, and the leaderboard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

from benchmarks.atlas.leaderboard import cells_of, load_all, standings
from benchmarks.atlas.results import (
    AT_BLOCKS,
    GPUS,
    OFFLOAD,
    RECOMPUTE,
    RESULTS,
    SPLIT,
    ModelResult,
    Row,
    SolverResult,
)

from remat.limits.units import format_bytes

OPTIMA = (RECOMPUTE, SPLIT, OFFLOAD)
SHARES = ("50%", "30%", "20%")
HEADER = (
    "model", "GPU", "peak", "per block", *OPTIMA, *(f"at {share}" for share in SHARES),
)  # fmt: skip

README_MODELS = (
    "gpt2", "llama-3-1b", "llama-3-8b", "qwen3-0.6b", "bert-large", "vit-l", "swin-b", "unet-sd",
)  # fmt: skip
README_HEADER = (
    "model",
    "peak / eager",
    "per block",
    "recompute",
    "+ split",
    "+ offload",
)


@dataclass(frozen=True)
class ModelLine:
    """A line of the table of all models: its model, and the cells after the title."""

    model: str
    title: str
    cells: tuple[str, ...]


@cache
def results() -> tuple[list[ModelResult], list[SolverResult]]:
    """Return the stored results."""
    return load_all(RESULTS)


def gpus_of(result: ModelResult) -> list[str]:
    """Return the GPUs of a result, in the order of the atlas."""
    present = {row.gpu for row in result.rows}
    return [gpu for gpu in GPUS if gpu in present]


def model_lines() -> list[ModelLine]:
    """Return a line for each model and GPU."""
    lines: list[ModelLine] = []
    for result in results()[0]:
        rows = {row.key: row for row in result.rows}
        for gpu in gpus_of(result):
            share, *at_blocks = _at_blocks(result, gpu)
            if share:
                at_blocks[0] += f" at {share}"
            others = [percent(rows.get((gpu, share, OFFLOAD))) for share in SHARES]
            peak = format_bytes(result.baseline_peak_bytes)
            cells = (gpu.upper(), peak, *at_blocks, *others)
            lines.append(ModelLine(result.model, result.title, cells))
    return lines


def readme_rows() -> list[tuple[str, ...]]:
    """Return the rows of README.md's table: some models on an H100, at the peak of per-block
    checkpointing."""
    by_model = {result.model: result for result in results()[0]}
    models = [by_model[name] for name in README_MODELS if name in by_model]
    return [(result.title, *_at_blocks(result, "h100")) for result in models]


def medians(gpu: str) -> tuple[int, list[float]]:
    """Return the number of models with repeated blocks, and the median extra time at the peak
    of per-block checkpointing: of that, and of the optima."""
    times: list[list[float]] = []
    for result in results()[0]:
        rows = {row.key: row for row in result.rows}
        cells = [
            rows.get((gpu, AT_BLOCKS, method)) for method in (AT_BLOCKS, *OPTIMA)
        ]
        overheads = [
            row.overhead
            for row in cells
            if row is not None and row.overhead is not None
        ]
        if len(overheads) == len(cells):
            times.append(overheads)
    return len(times), [median(column) for column in zip(*times, strict=True)]


def leaderboard_rows() -> list[tuple[str, ...]]:
    """Return the rows of the leaderboard, under `leaderboard.HEADER`."""
    return [*map(cells_of, standings(*results()))]


def percent(row: Row | None) -> str:
    """Return the extra time of a row as text."""
    if row is None:
        return ""
    return "none" if row.overhead is None else f"{100 * row.overhead:+.1f}%"


def _at_blocks(result: ModelResult, gpu: str) -> list[str]:
    """Return the cells at the peak of per-block checkpointing: its share of the peak without
    recomputation, and the extra time of it and of the optima; "" without repeated blocks."""
    rows = {row.key: row for row in result.rows}
    blocks = rows.get((gpu, AT_BLOCKS, AT_BLOCKS))
    if blocks is None or blocks.peak_bytes is None:
        return [""] * (len(OPTIMA) + 2)
    share = f"{100 * blocks.peak_bytes / result.baseline_peak_bytes:.0f}%"
    return [
        share,
        *(percent(rows.get((gpu, AT_BLOCKS, m))) for m in (AT_BLOCKS, *OPTIMA)),
    ]
