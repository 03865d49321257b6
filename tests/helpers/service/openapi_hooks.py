"""Hooks for schemathesis, which loads this file, with what the schema cannot express.

`OPENAPI_GIVEN` may name a JSON file: ids of ended jobs by their end, ids of jobs to delete, the
forms of a result, and whether the service has keys.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis import Case
from schemathesis.openapi.checks import UseAfterFree
from tests.helpers.service.consistent_documents import consistent_graph, consistent_trace

DOCUMENTS: dict[str, Any] = {"jobs": {}, "spare": [], "forms": [], "has_key": False}
if path := os.environ.get("OPENAPI_GIVEN"):
    DOCUMENTS |= json.loads(Path(path).read_text())

_cancelled: set[str] = set()


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Require a key where the service has keys."""
    if DOCUMENTS["has_key"]:
        raw_schema["security"].remove({})


@schemathesis.hook
def before_add_examples(context: Any, examples: list[Case]) -> None:
    """Add every kind of job at every route that takes one, and its result in every form."""
    operation = context.operation
    if "{id}" not in operation.path:
        return
    for id in DOCUMENTS["spare"] if operation.method == "delete" else DOCUMENTS["jobs"].values():
        place = {"path_parameters": {"id": id}}
        examples.append(operation.Case(**place))
        if operation.path.endswith("/result"):
            examples.extend(
                operation.Case(**place, query={"format": form}) for form in DOCUMENTS["forms"]
            )


@schemathesis.hook
def before_call(context: Any, case: Case, kwargs: dict[str, Any]) -> None:
    """Make the parts of a graph and of a trace agree."""
    if case.meta is None or case.meta.generation.mode.is_negative:
        return
    if isinstance(case.body, dict):
        case.body = dict(case.body)
        if isinstance(case.body.get("graph"), dict):
            case.body["graph"] = consistent_graph(case.body["graph"])
        if isinstance(case.body.get("trace"), dict):
            case.body["trace"] = consistent_trace(case.body["trace"])


@schemathesis.hook
def after_call(context: Any, case: Case, response: Any) -> None:
    """Note the jobs that were deleted before their end: that only cancels them, and they still
    exist."""
    request_line = f"{case.method} {response.request.path_url}"
    if response.status_code == 202:
        _cancelled.add(request_line)
    else:
        _cancelled.discard(request_line)


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Case, response: Any) -> bool:
    """See `after_call`."""
    return not (isinstance(failure, UseAfterFree) and failure.free in _cancelled)
