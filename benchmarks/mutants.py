"""Mutation tests: put small bugs into the code, one at a time, and see if the tests detect them.

    python -m benchmarks.mutants                      # a sample, in twenty minutes
    python -m benchmarks.mutants --modules auth --minutes 5 --seed 1

cosmic-ray makes the mutants: it changes an operator, a comparison, a number, a keyword or a
decorator. Each mutant runs in a copy of the checkout, with the tests of its module only. A test
that fails or far exceeds its usual time has detected it. The modules are those whose bugs raise no
error: a wrong peak, a gradient of the wrong value, a false proof, an access check that lets all
pass.

A survivor means that a test is missing, unless no test could detect the mutant. Such mutants are
listed with the reason in `mutants_explained.toml`, next to this file.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.harness import machine, report

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = Path(__file__).with_name("mutants_explained.toml")

_RUNTIME_TESTS = (
    "torch/runtime/test_outputs",
    "torch/runtime/test_module",
    "torch/runtime/test_eager_semantics",
    "torch/runtime/test_writes_in_place",
    "torch/laws/test_random_modules",
)

MODULES: dict[str, tuple[str, ...]] = {
    "solver/remat/simulate.py": (
        "solver/test_simulate",
        "solver/test_graph",
        "solver/test_plan",
        "solver/strategies/test_baselines",
    ),
    "solver/remat/rewrite.py": (
        "torch/documents/test_rewrite",
        "torch/documents/test_documents",
        "torch/split/test_split_views",
        "torch/runtime/test_writes_in_place",
    ),
    "solver/remat/plan.py": (
        "solver/test_plan",
        "solver/test_wrong_objects",
        "solver/report/test_solving",
        "solver/report/test_explain",
        "solver/view/test_view",
    ),
    "solver/remat/plan_data.py": (
        "solver/test_plan",
        "solver/report/test_solving",
        "solver/report/test_explain",
        "solver/view/test_figures",
        "torch/split/test_candidates",
    ),
    "solver/remat/documents/plan.py": ("solver/test_plan", "torch/cli/test_documents"),
    "solver/remat/strategies/search/state.py": (
        "solver/strategies/search/test_search",
        "solver/strategies/search/test_steps",
        "solver/strategies/search/test_bound_scope",
        "solver/strategies/search/test_failing_steps",
        "solver/strategies/search/test_baseline_starts",
        "solver/milp/test_support",
    ),
    "solver/remat/frontend/runtime/lower.py": (
        "torch/runtime/test_lower",
        "torch/runtime/test_memory_reuse",
        "torch/runtime/test_rng_state",
        *_RUNTIME_TESTS,
        "torch/offload/test_late_copies",
    ),
    "solver/remat/frontend/runtime/autograd_function.py": (
        "torch/runtime/test_autograd_function",
        "torch/laws/test_several_calls",
        *_RUNTIME_TESTS,
        "torch/memory/test_released_tensors",
    ),
    "solver/remat/frontend/runtime/guards.py": (
        "torch/runtime/test_guards",
        "torch/runtime/test_launch",
        "torch/laws/test_changed_modules",
        "torch/laws/test_changed_values",
        "torch/planning/test_changed_values",
    ),
    "solver/remat/frontend/costs/cost_key.py": ("torch/costs/test_key",),
    "server/remat_server/http/auth.py": ("server/test_auth",),
    "server/remat_server/store/leases.py": ("server/test_leases",),
}
"""The tested modules with their test files, the fastest first: pytest stops at a failure."""

TIMEOUT_FACTOR = 4.0
TIMEOUT_SLACK_S = 30.0
"""A mutant's tests are killed after `TIMEOUT_FACTOR` times their usual seconds plus this slack."""

Outcome = Literal["caught", "too long", "survived", "explained"]


@dataclass(frozen=True)
class Mutant:
    """One bug: the `occurrence`-th site of an operator in a module, and the changed line."""

    module: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """The key of a survivor in `mutants_explained.toml`, without line numbers, which move."""
        return f"{self.module}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Trial:
    """The outcome of a mutant, with the seconds of its tests."""

    mutant: Mutant
    outcome: Outcome
    seconds: float


Site = tuple[str, tuple[int, int], str]
"""A module, a position in it, and the family of the operators that apply there."""


def mutation_sites(module: str) -> dict[Site, list[tuple[str, int]]]:
    """Return the sites of a module that can be mutated.

    Each has the names of its operators, with the number of the occurrence.
    """
    from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator, operator_names  # pyright: ignore[reportMissingImports]

    nodes = list(ast_nodes(get_ast((ROOT / module).read_text())))
    operators_by_site: dict[Site, list[tuple[str, int]]] = {}
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments():
            continue  # needs names that a configuration would have to list
        positions = (start for node in nodes for start, _ in kind().mutation_positions(node))
        family = "_".join(name.split("_")[:2])
        for occurrence, start in enumerate(positions):
            operators_by_site.setdefault((module, start, family), []).append((name, occurrence))
    return operators_by_site


def make_mutant(module: str, operator: str, occurrence: int) -> tuple[Mutant, str] | None:
    """Return a mutant with its code; None if the code is equivalent or no valid Python."""
    from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]

    source = (ROOT / module).read_text()
    code = mutate_code(source, get_operator(operator)(), occurrence)
    if code is None or _normalized_code(code) in (None, _normalized_code(source)):
        return None
    return Mutant(module, operator, occurrence, *_first_difference(source, code)), code


def _normalized_code(source: str) -> str | None:
    """Return the syntax tree of the code without annotations, as text. None for invalid Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def _first_difference(source: str, code: str) -> tuple[int, str, str]:
    """Return number, old text and new text of the first line that differs, without blank lines.

    The new text is "" if the line was removed.
    """
    before, after = (
        [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        for text in (source, code)
    )
    count = min(len(before), len(after))
    at = next((i for i in range(count) if before[i][1] != after[i][1]), count)
    is_gone = len(after) < len(before) or at >= len(after)
    line, was = before[at] if at < len(before) else (before[-1][0], "")
    return line, was, "" if is_gone else after[at][1]


class Checkout:
    """A copy of the repository's files, to put mutants into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run_tests(self, module: str, limit_s: float) -> tuple[bool | None, float]:
        """Run a module's tests; return True if they pass, None after a timeout, and the seconds."""
        began = time.monotonic()
        # No bytecode: a mutant may have the time stamp and size of the code that it replaces.
        paths = os.pathsep.join(str(self.folder / name) for name in ("solver", "server"))
        environment = os.environ | {
            "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu and not slow"]
        command += ["-p", "no:cacheprovider", *(f"tests/{name}.py" for name in MODULES[module])]
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            passes = process.wait(limit_s) == 0
        except subprocess.TimeoutExpired:
            passes = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return passes, time.monotonic() - began

    def run_mutant(self, mutant: Mutant, code: str, usual_s: float) -> Trial:
        """Run the tests with the mutant's code in place, then restore the file."""
        path = self.folder / mutant.module
        source = path.read_text()
        try:
            path.write_text(code)
            passes, seconds = self.run_tests(
                mutant.module, TIMEOUT_FACTOR * usual_s + TIMEOUT_SLACK_S
            )
        finally:
            path.write_text(source)
        if not passes:
            return Trial(mutant, "too long" if passes is None else "caught", seconds)
        is_explained = mutant.name in explained_survivors()
        return Trial(mutant, "explained" if is_explained else "survived", seconds)


def explained_survivors() -> dict[str, str]:
    """Return the survivors that no test can detect, by name, with the reason."""
    return tomllib.loads(EXPLAINED.read_text())["explained"] if EXPLAINED.exists() else {}


def sample(modules: Sequence[str], seed: int) -> list[tuple[str, str, int]]:
    """Return one random mutant for each site, with the modules in turns.

    So any prefix of the list is a sample of each module.
    """
    rng = random.Random(seed)
    shuffled: list[list[tuple[str, str, int]]] = []
    for module in modules:
        shuffled.append(
            [
                (module, *rng.choice(operators_at_site))
                for operators_at_site in mutation_sites(module).values()
            ]
        )
        rng.shuffle(shuffled[-1])
    longest = max(map(len, shuffled), default=0)
    return [sites[turn] for turn in range(longest) for sites in shuffled if turn < len(sites)]


def run(
    modules: Sequence[str], minutes: float, seed: int, jobs: int, on_trial: Callable[[Trial], None]
) -> tuple[list[Trial], int]:
    """Try mutants until the time is up; return the trials, and the number of sites."""
    until = time.monotonic() + 60 * minutes
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="remat-mutants-") as folder:
        checkouts = [Checkout(Path(folder, str(number), "remat")) for number in range(jobs)]
        usual_s: dict[str, float] = {}

        def in_parallel(waiting: Sequence[Any], work: Callable[[Checkout, Any], None]) -> None:
            remaining: queue.SimpleQueue[Any] = queue.SimpleQueue()
            for item in waiting:
                remaining.put(item)

            def worker(checkout: Checkout) -> None:
                while time.monotonic() < until:
                    try:
                        work(checkout, remaining.get_nowait())
                    except queue.Empty:
                        return

            threads = [threading.Thread(target=worker, args=(checkout,)) for checkout in checkouts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def check(checkout: Checkout, module: str) -> None:
            passes, seconds = checkout.run_tests(module, 600.0)
            if passes:
                usual_s[module] = seconds
            else:
                print(f"skipped: the tests of {module} fail without a mutant", flush=True)

        def try_item(checkout: Checkout, item: tuple[str, str, int]) -> None:
            mutant_and_code = make_mutant(*item)
            if mutant_and_code is not None:
                mutant, code = mutant_and_code
                trials.append(checkout.run_mutant(mutant, code, usual_s[mutant.module]))
                on_trial(trials[-1])

        in_parallel(modules, check)
        ready = [module for module in modules if module in usual_s]
        waiting = sample(ready, seed)
        in_parallel(waiting, try_item)
    return trials, len(waiting)


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return counts of outcomes, the detected share of detectable mutants, and the survivors."""
    counts = dict.fromkeys(("caught", "too long", "survived", "explained"), 0)
    for trial in trials:
        counts[trial.outcome] += 1
    detected = counts["caught"] + counts["too long"]
    detectable = detected + counts["survived"]
    return {
        "tried": len(trials),
        **counts,
        "noticed": round(detected / detectable, 4) if detectable else None,
        "survivors": [asdict(trial.mutant) for trial in trials if trial.outcome == "survived"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Try a sample of mutants, print each outcome, and write a dated result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--modules", nargs="+", default=[""], help="parts of paths; default: all")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(argv)
    modules = [name for name in MODULES if any(part in name for part in options.modules)]
    if not modules:
        parser.error(f"no module matches --modules; there are {', '.join(MODULES)}")

    def on_trial(trial: Trial) -> None:
        print(f"{trial.outcome:<9} {trial.seconds:6.1f} s  {trial.mutant.name}", flush=True)

    began = time.monotonic()
    trials, count = run(modules, options.minutes, options.seed, options.jobs, on_trial)
    result = summary(trials)
    by_module = {name: summary([t for t in trials if t.mutant.module == name]) for name in modules}
    for name, row in by_module.items():
        print(f"{name:<40} {row['caught'] + row['too long']:>4} of {row['tried']:>4}")
    print(f"detected {result['noticed']} of {result['tried']} tried mutants; {count} sites")
    path = report.write_result(
        options.out,
        "mutants",
        {
            "benchmark": "mutants",
            "machine": machine.describe(torch.device("cpu")),
            "options": {"minutes": options.minutes, "seed": options.seed, "jobs": options.jobs},
            "seconds": round(time.monotonic() - began, 1),
            "places": count,
            "summary": result,
            "modules": by_module,
        },
    )
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
