"""The step of plain torch.compile, marked so that its peak is verified like that of a plan."""

from __future__ import annotations

from torch import fx

from remat.frontend.compile.inductor.fusion_control import PLAIN_KEY
from remat.frontend.compile.kernels.to_fx import record_retained
from remat.frontend.compile.kernels.to_solver import CompileProblem, unmeasured_workspace_bytes
from remat.frontend.compile.registry import CompiledPlan


def plain_modules(
    problem: CompileProblem, compiled: CompiledPlan
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward module of torch's own partitioner, marked with the number
    of the plan. Sets what `compiled` needs to verify them."""
    joint = problem.joint
    assert joint.plain_halves is not None
    assert joint.backward_inputs is not None
    for half in joint.plain_halves:
        for node in half.graph.nodes:
            node.meta[PLAIN_KEY] = compiled.number
    compiled.storages = joint.backward_inputs.storages
    compiled.workspace_bytes = unmeasured_workspace_bytes(problem)
    record_retained(compiled, joint, joint.saved_tensors, problem.retained_outputs)
    compiled.retained_names = frozenset(joint.backward_inputs.retained)
    return joint.plain_halves
