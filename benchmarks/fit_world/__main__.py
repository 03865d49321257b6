"""Compare predictions with published measurements: `python -m benchmarks.fit_world`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.fit_world.measurement import Measurement
from benchmarks.fit_world.prediction import Prediction, missing
from benchmarks.fit_world.sources import MEASUREMENTS
from benchmarks.harness import machine

_LIMIT_S = 900
_WITHIN = 0.05


def main(arguments: list[str] | None = None) -> int:
    """Predict the selected rows, print a table, and save it with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_world", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose source or name contains this")
    parser.add_argument("--cache", type=Path, help="directory for predictions, to be reused")
    parser.add_argument("--cached", action="store_true", help="run nothing that is not cached")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for measurement in MEASUREMENTS:
        if options.only.lower() not in measurement.key.lower():
            continue
        row = _row(measurement, options.cache, runs=not options.cached)
        rows.append(row)
        print(_line(row), flush=True)
    summary = summarize(rows)
    print(json.dumps(summary, indent=2))
    if options.out:
        result = {
            "machine": machine.describe(torch.device("cpu")),
            "summary": summary,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _row(measurement: Measurement, cache: Path | None, *, runs: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "source": measurement.source.name,
        "url": measurement.source.url,
        "date": measurement.source.date,
        "name": measurement.name,
        "gpu": measurement.gpu,
        "measured": measurement.measured,
        "published_bytes": measurement.published_bytes,
        "loop": asdict(measurement.loop),
    }
    if measurement.other_bytes:
        row["other_bytes"] = measurement.other_bytes
    prediction = _cached(_path(measurement, cache))
    if prediction is None and (needed := missing(measurement)):
        return row | {"skipped": f"needs {', '.join(needed)}"}
    if prediction is None and not runs:
        return row | {"skipped": "not run"}
    prediction = prediction or _prediction(measurement, _path(measurement, cache))
    if "error" in prediction:
        return row | {"skipped": prediction["error"]}
    ratio = prediction["predicted_bytes"] / measurement.compared_bytes
    rounding = measurement.rounding_bytes / measurement.compared_bytes
    row |= {"predicted_bytes": prediction["predicted_bytes"], "ratio": round(ratio, 4)}
    row["parts"] = prediction["parts"]
    row["error"] = round(max(0.0, abs(ratio - 1) - rounding), 4)
    return row | ({"reason": measurement.reason} if measurement.reason else {})


def _path(measurement: Measurement, cache: Path | None) -> Path | None:
    """Return the file of a prediction in the cache; None without one."""
    if cache is None:
        return None
    key = hashlib.sha256(repr(measurement.loop).encode() + measurement.key.encode())
    return cache / f"{key.hexdigest()[:24]}.json"


def _cached(path: Path | None) -> Prediction | None:
    return json.loads(path.read_text()) if path is not None and path.exists() else None


def _prediction(measurement: Measurement, path: Path | None) -> Prediction:
    command = [sys.executable, "-m", "benchmarks.fit_world.prediction", measurement.key]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, env=os.environ, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {_LIMIT_S} s"}
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        return {"error": f"failed: {lines[-1] if lines else process.returncode}"}
    prediction = json.loads(process.stdout.splitlines()[-1])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(prediction))
    return prediction


def _line(row: dict[str, Any]) -> str:
    title = f"{row['source']}: {row['name']}"
    if "skipped" in row:
        return f"{title:<86} {row['skipped']}"
    published = row["published_bytes"] - row.get("other_bytes", 0)
    sizes = f"{row['predicted_bytes'] / 1e9:8.3f} {published / 1e9:8.3f} {row['ratio']:7.4f}"
    return f"{title:<86} {sizes}  {row.get('reason', '')}"


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the count of rows and the distribution of their errors."""
    errors = sorted(row["error"] for row in rows if "error" in row)
    if not errors:
        return {"rows": len(rows), "compared": 0}
    return {
        "rows": len(rows),
        "compared": len(errors),
        "sources": len({row["source"] for row in rows if "error" in row}),
        "median_error": statistics.median(errors),
        "p90_error": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "largest_error": errors[-1],
        "within_5_percent": round(sum(e <= _WITHIN for e in errors) / len(errors), 4),
        "above_10_percent_without_reason": sum(
            row.get("error", 0) > 2 * _WITHIN and not row.get("reason") for row in rows
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
