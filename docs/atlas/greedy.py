"""A greedy solver for graphs of the atlas, with the local heuristic of DTR (Kirisame et al. 2021).

    python greedy.py GRAPH.json.gz GPU BUDGET_BYTES

Operations run in order. Where one does not fit, the live value with the least cost for its bytes
and the time since its last use is evicted; what is read later is recomputed. Needs no package.
"""

import gzip
import json
import sys

path, gpu, budget_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
with gzip.open(path) as file:
    document = json.load(file)
graph, costs_s = document["graph"], document["costs_s"][gpu]
operations, results = graph["operations"], set(graph["results"])
sizes = [value["size_bytes"] for value in graph["values"]]
producer = {v: op for op, o in enumerate(operations) for v in o["outputs"]}
last_reader = {v: op for op, o in enumerate(operations) for v in o["inputs"]}
used_bytes, runs, last_use = graph["constant_bytes"], [], {}  # by live value


def free(value):
    global used_bytes
    used_bytes -= sizes[value]
    del last_use[value]


def can_return(value):
    return operations[producer[value]]["recomputable"]


def score(value):
    age = len(runs) - last_use[value] + 1
    return costs_s[producer[value]] / (sizes[value] + 1) / age


def run(op, pinned):
    """Run an operation, after the inputs that are not live."""
    global used_bytes
    inputs, outputs = operations[op]["inputs"], operations[op]["outputs"]
    pinned = pinned | {*inputs, *outputs}
    for value in inputs:
        if value not in last_use:
            run(producer[value], pinned)
    new = [v for v in outputs if v not in last_use]
    needed_bytes = sum(sizes[v] for v in new) + operations[op]["workspace_bytes"]
    while used_bytes + needed_bytes > budget_bytes:
        movable = [v for v in last_use.keys() - pinned - results if can_return(v)]
        if not movable or len(runs) > 5 * len(operations):
            sys.exit("no schedule fits")
        free(min(movable, key=score))
    runs.append(op)
    used_bytes += sum(sizes[v] for v in new)
    last_use.update(dict.fromkeys((*inputs, *outputs), len(runs)))


sys.setrecursionlimit(100_000)
for op in range(len(operations)):
    run(op, set())
    dead = [
        v for v in last_use if last_reader.get(v, -1) <= op and v not in results
    ]
    for value in filter(can_return, dead):  # a recomputation may read the others
        free(value)
print(json.dumps(runs))
