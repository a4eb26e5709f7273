"""A plan: the actions that change a training program, and the memory and time that a step is predicted to take."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal

from memtrace.display import Displayed
from memtrace.errors import MemtraceError
from memtrace.format.files import replace_file
from memtrace.format.storage import AnyPath, to_path
from memtrace.format.storage_writer import local_output
from memtrace.format.typed_json import InvalidMember, parse_value, read_json_file
from memtrace.planning.actions import Offload, Recompute, Spill

PLAN_VERSION: Final = 1
PlanAction = Recompute | Offload | Spill


@dataclass(frozen=True)
class StepCost:
    """What a training step costs."""

    peak_bytes: int
    """Peak of the requested bytes of the plan's device during the step."""
    step_ns: int | None
    """Duration of the step, ns; None: unknown."""


@dataclass(frozen=True)
class Plan(Displayed):
    """What to change in a training program, and what that is predicted to give."""

    device: str
    """Device whose peak is planned, such as ``cpu`` or ``cuda:0``."""
    actions: tuple[PlanAction, ...]
    """Empty: nothing has to be changed."""
    recorded: StepCost
    """The recorded step that the prediction starts from (`choose_step`)."""
    predicted: StepCost
    """The same step with all actions."""
    assumptions: tuple[str, ...] = ()
    """What the prediction rests on, one sentence each."""
    trace: str | None = None
    """Path of the trace; None: the trace is in memory."""
    format: Literal["memtrace-plan"] = "memtrace-plan"
    plan_version: int = PLAN_VERSION

    def module_names(self) -> frozenset[str]:
        """Return the names of the modules that the actions change."""
        return frozenset(name for action in self.actions for name in action.module_names() if name)


def write_plan(plan: Plan, path: str | AnyPath) -> None:
    """Write a plan as JSON; MemtraceError where the file cannot be written."""
    try:
        with local_output(path) as target:
            replace_file(target, (json.dumps(asdict(plan), indent=1) + "\n").encode())
    except OSError as error:
        raise MemtraceError(f"{path} cannot be written ({error}). Pass another path.") from error


def read_plan(path: str | AnyPath) -> Plan:
    """Read a plan that `write_plan` wrote.

    Raises:
        MemtraceError: The file is missing, is not a plan, or is damaged.
    """
    try:
        content = read_json_file(to_path(path))
    except FileNotFoundError:
        raise MemtraceError(f"{path}: no such file. Pass a plan written by: memtrace plan ... -o PLAN.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise MemtraceError(f"{path} cannot be read as JSON ({error}). Write the plan again.") from error
    if not isinstance(content, dict) or content.get("format") != "memtrace-plan":
        raise MemtraceError(f"{path} is not a plan. Pass a file written by: memtrace plan ... -o PLAN.json")
    if content.get("plan_version") != PLAN_VERSION:
        raise MemtraceError(
            f"{path} has plan version {ascii(content.get('plan_version'))[:40]}; this memtrace reads version "
            f"{PLAN_VERSION}. Make the plan again from its trace."
        )
    try:
        plan: Plan = parse_value(Plan, content)
    except InvalidMember as error:
        raise MemtraceError(f"{path}: {error}. Make the plan again from its trace.") from None
    return plan
