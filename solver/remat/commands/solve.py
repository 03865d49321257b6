"""`remat solve`: the plan with the least extra time within a budget."""

from __future__ import annotations

from remat.commands.common import command_options, files
from remat.commands.common.plan_flags import PlanFlags, with_plan_options
from remat.commands.common.running import (
    describe_incumbent,
    exit_if_interrupted,
    hint_how_to_save,
    plan_interruptibly,
)
from remat.plan_options import COMMAND_SOLVE
from remat.rewrite import rewrite


@with_plan_options(COMMAND_SOLVE)
def solve(
    trace: command_options.TraceFile,
    flags: PlanFlags,
    output: command_options.Output = None,
    program: command_options.ProgramOutput = None,
    as_json: command_options.Json = False,
) -> None:
    """Find the schedule with the least extra time within a budget.

    With --split, operations may run in pieces, and with --offload, tensors may be offloaded:
    --program has them then, too. The costs of pieces and copies have the same source as the
    trace's costs: a data sheet, or this machine.
    """
    options = flags.read()
    files.check_outputs(output, program)
    traced = files.read_measured_trace(trace)
    (traced, plan), signum = plan_interruptibly(traced, options, is_here=False)
    if output is not None:
        files.write_output(output, plan.to_json())
    if program is not None:
        files.write_output(program, rewrite(traced, plan.schedule).to_json())
    if as_json:
        files.print_json(plan.to_json())
    else:
        files.print_text(plan.describe())
    if program is None:
        hint_how_to_save(output, as_json, "plan", "plan.json.gz")
    exit_if_interrupted(signum, describe_incumbent(plan))
