"""Run every command on mutated traces, mutated files of other tools and mutated plans.

    python -m tests.campaigns.mutate --traces 10000 --files 10000 --plans 1000 --seed 0

Each command must answer (exit code 0; 1 for a failed check) or refuse with one sentence (exit code 2): no traceback, no
last-resort message, no unprintable character, no markup in the page, no hang, bounded memory. Prints a table of the
outcomes by command and the faults; the exit code is 1 if there is a fault. --keep names a folder for inputs with faults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.campaigns.commands import (
    COMMANDS,
    FILE_COMMANDS,
    PLAN_COMMANDS,
    SECONDS_PER_COMMAND,
    SLOW_COMMANDS,
    Outcome,
    command_name,
    run_command,
    shared_loads,
    silence_c_libraries,
)
from tests.campaigns.seeds import make_plan_seed, make_seeds
from tests.campaigns.trace_mutations import mutate_trace
from tests.readers import fuzz

BATCH_SIZE = 50
GIB = 1 << 30
MEMORY_BYTES = 3 * GIB
"""Address space of a worker beyond what it has when it starts: a small input that needs more is a fault."""
Command = tuple[str, ...]


@dataclass
class Tally:
    """What all commands did."""

    inputs: int = 0
    peak_rss_bytes: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each command had each kind of outcome."""
    faults: list[str] = field(default_factory=list)
    answered_inputs: int = 0
    """Inputs that at least one command answered."""

    def table(self) -> str:
        """Return the outcomes by command as text."""
        kinds = sorted({kind for _, kind in self.outcomes})
        names = list(dict.fromkeys(name for name, _ in self.outcomes))
        lines = ["  ".join([f"{'command':<42}", *(f"{kind:>12}" for kind in kinds)])]
        for name in [*names, "total"]:
            counts = [
                sum(n for (c, k), n in self.outcomes.items() if k == kind and name in (c, "total")) for kind in kinds
            ]
            lines.append(
                "  ".join(
                    [f"{name:<42}", *(f"{count:>{max(12, len(k))},}" for count, k in zip(counts, kinds, strict=True))]
                )
            )
        return "\n".join(lines)


def run_campaign(num_traces: int, num_files: int, num_plans: int, seed: int, *,
                 commands: Sequence[Command] = COMMANDS, workers: int = 1, keep: Path | None = None, slow_every: int = 1, share: bool = False,
                 minutes: float = 1e9) -> Tally:  # fmt: skip
    """Run commands on mutated inputs and return what they did.

    Args:
        num_traces: mutated traces.
        num_files: mutated files of other tools.
        num_plans: mutated plans.
        seed: the same seed gives the same mutations.
        commands: what is run on each input.
        workers: processes that run at the same time.
        keep: folder for inputs with faults.
        slow_every: run the slow commands on one input in so many.
        minutes: begin no batch after this time.
        share: let the commands of an input share what they compute, see ``shared_loads``.
    """
    tally = Tally()
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="memtrace-campaign-") as name:
        folder = Path(name)
        in_child(lambda: make_seeds(folder / "seeds"))
        plan = make_plan_seed(folder / "plan.json")
        seeds = sorted((folder / "seeds").glob("*.memtrace"))
        files = fuzz.seeds() if num_files else []
        for command in commands:  # so that the children need not import anything
            run_command(command, seeds[0], seeds[0], folder)
        makers: list[tuple[str, int, Callable[[Path, random.Random], tuple[Path, str]]]] = [
            ("trace", num_traces, lambda to, dice: _mutated_trace(seeds, to, dice)),
            ("file", num_files, lambda to, dice: _mutated_file(files, to, dice)),
            ("plan", num_plans, lambda to, dice: _mutated_file([(plan.name, plan.read_bytes())], to, dice)),
        ]
        jobs = [
            (kind, start, min(BATCH_SIZE, count - start), make) for kind, count, make in makers
            for start in range(0, count, BATCH_SIZE)
        ]  # fmt: skip

        def run(job: tuple[str, int, int, Callable[[Path, random.Random], tuple[Path, str]]]) -> list[str]:
            kind, start, count, make = job
            if time.monotonic() > deadline:
                return []
            other = plan if kind == "plan" else seeds[0]
            batch = _Batch(folder / f"{kind}-{start}", f"{seed}-{kind}", start, count, make, other, keep)
            batch.commands = _commands_of_kind(kind, commands)
            batch.slow_every, batch.share = slow_every, share
            return batch.run()

        def work(worker: int) -> None:
            with (folder / f"lines-{worker}").open("w", encoding="utf-8") as out:
                for job in jobs[worker::workers]:
                    out.writelines(f"{line}\n" for line in run(job))
                    out.flush()

        children = [fork(partial(work, worker)) for worker in range(workers)]
        for worker, child in enumerate(children):
            os.waitpid(child, 0)
            _count(tally, (folder / f"lines-{worker}").read_text(encoding="utf-8").splitlines())
    return tally


def _commands_of_kind(kind: str, commands: Sequence[Command]) -> tuple[Command, ...]:
    if kind == "plan":
        return PLAN_COMMANDS
    return (*commands, *FILE_COMMANDS) if kind == "file" else tuple(commands)


def _count(tally: Tally, lines: list[str]) -> None:
    for line in lines:
        row = json.loads(line)
        tally.peak_rss_bytes = max(tally.peak_rss_bytes, row.get("rss", 0))
        if "input" in row:
            tally.inputs += 1
            tally.answered_inputs += row["answered"]
            continue
        outcome = Outcome(row["kind"], row["detail"])
        tally.outcomes[row["command"], outcome.kind] += 1
        if outcome.is_fault:
            tally.faults.append(f"{row['command']}: {outcome.kind} [{row['where']}] {outcome.detail}")


def _mutated_trace(seeds: list[Path], to: Path, dice: random.Random) -> tuple[Path, str]:
    # Only the recording has what every command needs.
    seed = dice.choices(seeds, [3 if seed.stem == "recording" else 1 for seed in seeds])[0]
    path = to / "run.memtrace"
    shutil.copytree(seed, path)
    return path, f"{seed.name} {mutate_trace(path, dice)}"


def _mutated_file(seeds: list[tuple[str, bytes]], to: Path, dice: random.Random) -> tuple[Path, str]:
    name, data = dice.choice(seeds)
    path = to / name
    action = dice.random()
    if action < 0.01:
        path.mkdir()
    elif action < 0.02:
        path.symlink_to(dice.choice((name, "/dev/zero", "/etc", "/proc/self/mem")))
    elif action < 0.03:
        os.mkfifo(path)
    else:
        path.write_bytes(b"" if action < 0.04 else fuzz.mutation(name, data, dice))
    return path, name


@dataclass
class _Batch:
    """Some inputs that one child process runs all commands on; after a crash another child continues."""

    folder: Path
    seed: str
    start: int
    count: int
    make: Callable[[Path, random.Random], tuple[Path, str]]
    other: Path
    keep: Path | None
    commands: tuple[Command, ...] = COMMANDS
    slow_every: int = 1
    share: bool = False

    def run(self) -> list[str]:
        """Return the lines that the children wrote, and a line for each crash."""
        self.folder.mkdir()
        results = self.folder / "results"
        results.touch()
        lines: list[str] = []
        begun = 0
        while begun < self.count:
            status = in_child(lambda begun=begun: self._run_inputs(begun, results))  # type: ignore[misc]
            lines = results.read_text(encoding="utf-8").splitlines()
            begun = sum('"input"' in line for line in lines)
            if begun < self.count:
                crash = {
                    "command": "?",
                    "kind": "crash",
                    "where": f"{self.seed}-{self.start + begun}",
                    "detail": f"status {status}",
                }
                skip = {"input": 0, "answered": 0}
                with results.open("a", encoding="utf-8") as out:
                    print(json.dumps(crash), json.dumps(skip), sep="\n", file=out)
                begun += 1
                lines = results.read_text(encoding="utf-8").splitlines()
        shutil.rmtree(self.folder, ignore_errors=True)
        return lines

    def _run_inputs(self, begun: int, results: Path) -> None:
        impose_limits()
        sharing = shared_loads() if self.share else nullcontext()
        with sharing, results.open("a", encoding="utf-8") as out:
            for index in range(begun, self.count):
                number = self.start + index
                dice = random.Random(f"{self.seed}-{number}")
                here = self.folder / str(number)
                here.mkdir()
                path, what = self.make(here, dice)
                kept = False
                answered = 0
                for command in self._commands_for(number):
                    outcome = run_command(command, path, self.other, here)
                    answered |= outcome.kind == "answered"
                    where = f"{self.seed}-{number} {what}"
                    print(
                        json.dumps({"command": command_name(command), "where": where, **asdict(outcome)}),
                        file=out,
                        flush=True,
                    )
                    shutil.rmtree(here / "output", ignore_errors=True)
                    (here / "output").unlink(missing_ok=True)
                    if outcome.is_fault and self.keep and not kept:
                        kept = True
                        _copy_input(path, self.keep / f"{self.seed}-{number}")
                rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                print(json.dumps({"input": 1, "answered": int(answered), "rss": rss}), file=out, flush=True)
                shutil.rmtree(here, ignore_errors=True)

    def _commands_for(self, number: int) -> Iterator[Command]:
        for command in self.commands:
            if command not in SLOW_COMMANDS or number % self.slow_every == 0:
                yield command


def _copy_input(path: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, to / path.name, symlinks=True, dirs_exist_ok=True, copy_function=_copy_regular)
    elif path.is_file() and not path.is_symlink():
        shutil.copy(path, to / path.name)


def _copy_regular(source: str, to: str) -> None:
    if Path(source).is_file():
        shutil.copy(source, to, follow_symlinks=False)


def impose_limits() -> None:
    """Limit the memory and the processor time of this process, and silence C libraries."""
    silence_c_libraries()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    seconds = BATCH_SIZE * len(COMMANDS) * SECONDS_PER_COMMAND
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def fork(work: Callable[[], object]) -> int:
    """Run ``work`` in a fork of this process and return its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a fork of this process and return its exit status, negative for a signal."""
    child = fork(work)
    try:
        _, status = os.waitpid(child, 0)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    return os.waitstatus_to_exitcode(status)


def main() -> int:
    """Run the campaign from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=200)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--plans", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--slow-every", type=int, default=1, help="Run slow commands on one input in so many.")
    parser.add_argument("--minutes", type=float, default=1e9, help="Begin no batch after this time.")
    parser.add_argument("--share", action="store_true", help="Commands of an input share what they compute.")
    parser.add_argument("--max-faults", type=int, default=40, help="Most faults to print.")
    options = parser.parse_args()
    begin = time.monotonic()
    tally = run_campaign(options.traces, options.files, options.plans, options.seed, workers=options.workers,
                         keep=options.keep, slow_every=options.slow_every,
                         share=options.share, minutes=options.minutes)  # fmt: skip
    print(tally.table())
    print(f"{tally.inputs:,} inputs ({tally.answered_inputs:,} answered by at least one command), "
          f"{sum(tally.outcomes.values()):,} commands in {time.monotonic() - begin:.0f} s, "
          f"at most {tally.peak_rss_bytes / 2**20:.0f} MiB resident, {len(tally.faults):,} faults")  # fmt: skip
    for fault in tally.faults[: options.max_faults]:
        print(fault)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
