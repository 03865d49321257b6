# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The service
#
# **The question.** A team has many models and one machine with free cores. How does the planning
# move there, while the models stay where their GPUs are?
#
# That machine runs `remat serve`. This notebook starts a real service, on a free port, with its
# data in a folder that is deleted at the end.

# %%
import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import httpx2
import torch
import torch.nn.functional as F
from IPython.display import SVG
from torch import nn

import remat
from remat.limits.units import format_bytes
from remat.service.wire import Options, SolveRequest

# %% [markdown]
# ## Start it
#
# In a shell this is `remat serve`. Settings come from the environment or from options. `stop` is
# called at the end of the notebook or, if a cell fails, when this Python process exits.

# %%
folder = tempfile.TemporaryDirectory(prefix="remat-service-")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
environment = {name: text for name, text in os.environ.items() if not name.startswith("REMAT_")}
environment |= {"REMAT_DATA_DIR": folder.name, "REMAT_PORT": str(port)}
log = Path(folder.name, "service.log").open("wb")
service = subprocess.Popen(
    [sys.executable, "-m", "remat.cli", "serve"],
    env=environment,
    stdout=log,
    stderr=log,
    start_new_session=True,  # interrupting a cell does not interrupt the service
)


def stop():
    """Stop the service and delete its data. A second call does nothing."""
    if service.poll() is None:
        service.terminate()
        try:
            service.wait(timeout=20)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()
    log.close()
    folder.cleanup()


atexit.register(stop)
url = f"http://127.0.0.1:{port}"
http = httpx2.Client(base_url=url, timeout=30)
until = time.monotonic() + 60
while True:
    try:
        ready = http.get("/readyz")
        if ready.status_code == 200:
            break
    except httpx2.TransportError:
        pass
    assert service.poll() is None, "the service has ended"
    assert time.monotonic() < until, "the service is not ready after a minute"
    time.sleep(0.1)
print("ready:", ready.json())

# %% [markdown]
# ## Use it like the library
#
# `remat.Client` has the library's functions. The model is traced here. Only its graph is sent:
# no weights, no pickle, no code. The service returns the plan and the rewritten graph, which runs
# here, with the model's own parameters.
#
# `costs` names a device, whose costs the service estimates. Without it, they are measured here.

# %%


class Residual(nn.Module):
    """A residual network."""

    def __init__(self, width=64, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                          nn.Linear(4 * width, width), nn.Dropout(0.1))
            for _ in range(depth)
        )  # fmt: skip

    def forward(self, x, target):
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, target)


torch.manual_seed(0)
model = Residual().train()
x, target = torch.randn(512, 64), torch.randn(512, 64)

client = remat.Client(url)
fast = client.optimize(model, "50%", (x, target), costs="roofline:cpu")
print(fast.plan)

# %%


def gradients(module):
    module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    module(x, target).backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


pairs = list(zip(gradients(model), gradients(fast), strict=True))
assert all(torch.equal(a, b) for a, b in pairs)
assert fast.plan.peak_bytes <= fast.plan.budget_bytes
print(f"{len(pairs)} gradients are equal to eager's bit for bit")

# %% [markdown]
# ## Jobs
#
# Behind each call is a job. `submit` returns it at once; another client may wait for it. Jobs
# survive a restart of the service.

# %%
trace = remat.measure(remat.trace(model, (x, target)), remat.Roofline("cpu"))
hard = Options(strategy=remat.Exact(gap=0.0, time_limit=2.0, threads=1))
job = client.submit(SolveRequest(trace=trace, budget="45%", options=hard))
print(job.kind, job.status)

# %% [markdown]
# ## Live events
#
# A job reports its progress as server-sent events: `incumbent` is a better schedule, `progress` a
# better proved bound, `done` the end. In a shell:
#
# ```
# curl -N http://localhost:8000/jobs/$ID/events
# ```
#
# This job requests a gap of zero within two seconds.

# %%
seen = []
with http.sse(f"/jobs/{job.id}/events") as events:
    for event in events:
        seen.append(event.event)
        data = json.loads(event.data)
        if event.event == "incumbent":
            print(f"incumbent  {data['incumbent']:+.2%} time, after {data['elapsed_s']:.1f} s")
        else:
            print(f"{event.event:<10} {event.data}")
assert seen[-1] == "done"

# %% [markdown]
# ## The same with curl
#
# Everything is plain HTTP and JSON, so any language will do. A request is a trace (or a bare
# graph) and a budget:
#
# ```
# curl localhost:8000/solve -H "Content-Type: application/json" -d @request.json
# curl localhost:8000/jobs/$ID
# curl localhost:8000/jobs/$ID/result -H "Accept: image/svg+xml"
# ```

# %%
request = SolveRequest(trace=trace, budget="60%").model_dump_json()
print(f"{request[:90]}... ({len(request) / 1e3:.0f} kB)")
headers = {"Content-Type": "application/json", "Prefer": "wait=30"}
answer = http.post("/solve", content=request, headers=headers)
answer.raise_for_status()
where = answer.headers["Location"]
job = http.get(where).json()
print(f"GET {where}: {job['status']}, {job['summary'][0]['overhead']:+.2%}")
assert job["status"] == "succeeded"

# %%
picture = http.get(f"{where}/result", headers={"Accept": "image/svg+xml"})
SVG(picture.text)

# %% [markdown]
# A repeated request, from any client, is answered from the store:

# %%
repeated = client.submit(SolveRequest(trace=trace, budget="60%"))
print(repeated.status, "at once")
assert repeated.status == "succeeded"

# %% [markdown]
# The list of jobs, newest first, as the service's page at `/` shows it:

# %%
listed = http.get("/jobs").json()["jobs"]
for entry in listed:
    summary = entry["summary"][0]
    print(
        f"{entry['kind']:<7}{entry['status']:<11}{format_bytes(summary['budget_bytes']):>9}"
        f"{summary['overhead']:>+9.2%}"
    )
assert len(listed) == 4

# %% [markdown]
# ## Errors are the library's
#
# An infeasible request raises the same error as the library, with the smallest feasible budget.

# %%
try:
    client.solve(trace, "5%", remat.Auto(time_limit=2.0))
except remat.InfeasibleBudget as error:
    print(textwrap.fill(f"{type(error).__name__}: {error}", 96))
    assert error.min_feasible_bytes > trace.graph().constant_bytes

# %% [markdown]
# ## Stop it

# %%
client.close()
http.close()
stop()
print("the service has ended, and its data are gone")
assert service.returncode is not None
assert not Path(folder.name).exists()

# %% [markdown]
# ## The answer
#
# Start `remat serve` on the machine with the cores, and replace `remat.optimize(...)` by
# `remat.Client(url).optimize(...)`: same arguments, same results, same errors. For machines
# other than this one make keys first (`remat keys add NAME`); `docker/` has images.
