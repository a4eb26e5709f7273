"""Reads and writes of code that torch.compile generates, against eager runs and against the generated source."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrace
from memtrace.analysis.block_accesses import seen_access_share
from memtrace.analysis.blocks import blocks
from memtrace.analysis.findings import find_wasted_memory
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace
from tests.recording.compiled_programs import (
    accessed_bytes,
    accessed_bytes_by_operator,
    batch,
    fresh_network,
    generated_modules,
    train,
)
from tests.recording.helpers import is_named

# Inductor compiles every kernel with the C++ compiler.
pytestmark = pytest.mark.slow
NUM_STEPS = 3


@dataclass(frozen=True)
class Runs:
    """One training run of a network, eager and compiled."""

    eager: Trace
    compiled: Trace
    losses: list[float]
    losses_without_recording: list[float]
    declared_bytes: Counter[str]
    """Bytes that the kernels access in one step, as the generated source declares them."""
    kernels: dict[str, Any]
    """The kernels of the generated code, as they are after the recording."""


@pytest.fixture(scope="module", autouse=True)
def without_caches() -> Iterator[None]:
    """Compile everything here: graphs from torch's caches have the lines of the program that filled these."""
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    # Compiled code keeps tensors and modules, which would be live in the recordings of later tests.
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("compiled")
    eager, recorded, plain = fresh_network(), fresh_network(), fresh_network()
    train(eager, eager, folder / "eager.memtrace")
    losses = train(recorded, torch.compile(recorded), folder / "compiled.memtrace")
    compiled_network = torch.compile(plain)
    losses_without_recording = train(plain, compiled_network, None)
    # Here and not in a test: between the two the number of threads can change, after which torch.compile compiles again.
    declared_bytes = count_declared_bytes(lambda: compiled_network(*batch()).backward())
    kernels = {
        name: value
        for module in generated_modules()
        for name, value in vars(module).items()
        if name.startswith("cpp_fused")
    }
    traces = (memtrace.load(folder / f"{name}.memtrace") for name in ("eager", "compiled"))
    return Runs(*traces, losses, losses_without_recording, declared_bytes, kernels)


def category_bytes(trace: Trace, category: str, owner: str = "") -> int:
    table = blocks(trace)
    chosen = (table.category == CATEGORIES.index(category)) & is_named(trace, table.name, owner)
    return int(table.size[chosen].sum())


def test_losses_are_the_same_bits_with_and_without_a_recording(runs: Runs) -> None:
    assert runs.losses == runs.losses_without_recording


def test_nothing_remains_after_the_recording(runs: Runs) -> None:
    from torch._inductor.codecache import PyCodeCache

    assert runs.kernels
    assert {type(kernel).__name__ for kernel in runs.kernels.values()} == {"builtin_function_or_method"}
    assert PyCodeCache.__dict__["load_by_key_path"].__func__.__module__ == "torch._inductor.codecache"
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("memtrace")]


def test_all_bytes_accessed_are_seen(runs: Runs) -> None:
    assert seen_access_share(runs.compiled) == 1.0
    assert runs.compiled.manifest.coverage.unseen_accesses == ()
    assert runs.compiled.manifest.coverage.notes == ()


def test_every_kernel_of_the_generated_code_is_an_operator(runs: Runs) -> None:
    operators = accessed_bytes_by_operator(runs.compiled)
    assert {f"inductor::{name}" for name in runs.kernels} <= operators.keys()


@pytest.mark.parametrize("category", ["parameter", "gradient", "optimizer_state"])
def test_categories_have_the_bytes_of_the_eager_run(runs: Runs, category: str) -> None:
    # The parameters of other models are labelled, too, but no gradients and no state that nothing accesses.
    owner = "Network" if category == "parameter" else ""
    compiled, eager = (category_bytes(trace, category, owner) for trace in (runs.compiled, runs.eager))
    assert compiled == eager > 0


def test_saved_activations_are_activations(runs: Runs) -> None:
    # Inductor saves less than autograd, but never more than the results of all operators of the forward pass.
    assert 0 < category_bytes(runs.compiled, "activation") <= 1.2 * category_bytes(runs.eager, "activation")


def test_most_bytes_have_a_line_and_module_of_the_eager_run(runs: Runs) -> None:
    eager, compiled = accessed_bytes(runs.eager), accessed_bytes(runs.compiled)
    of_model = {key: num_bytes for key, num_bytes in compiled.items() if key[1] in ("forward", "backward")}
    shared = sum(num_bytes for key, num_bytes in of_model.items() if key in eager)
    assert shared >= 0.9 * sum(of_model.values())


def test_both_layers_and_both_phases_have_kernels_of_their_own(runs: Runs) -> None:
    modules = {(module, phase) for module, phase, _ in accessed_bytes(runs.compiled)}
    for layer in range(2):
        for phase in ("forward", "backward"):
            assert {(f"Network.layers.{layer}.{name}", phase) for name in ("up", "down")} <= modules


def test_findings_judge_the_accesses(runs: Runs) -> None:
    skipped = [
        entry.reason for device in find_wasted_memory(runs.compiled).devices for entry in device.skipped_patterns
    ]
    assert not [reason for reason in skipped if "unseen" in reason]


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def declared_accesses(source: str, name: str) -> list[tuple[bool, bool]]:
    """Whether each argument of a kernel in C++ is read and written: what is const is only read."""
    definition = source[source.index(f"\n{name} = async_compile.cpp_pybinding(") :]
    types = definition[definition.index("[") + 1 : definition.index("]")].split(", ")
    parameters = definition[definition.index("kernel(") :].split(")")[0].split(",")
    return [
        ("const" in kind or "in_out_ptr" in parameter, "const" not in kind)
        for kind, parameter in zip(types, parameters, strict=True)
    ]


class CountingKernel:
    """Adds what the source of a kernel declares about its arguments to a counter."""

    def __init__(self, name: str, kernel: Callable[..., Any], accesses: list[tuple[bool, bool]], total: Counter[str]):
        self.name, self.kernel, self.accesses, self.total = name, kernel, accesses, total

    def __call__(self, *tensors: torch.Tensor) -> Any:
        for direction in range(2):
            chosen = [tensor for tensor, access in zip(tensors, self.accesses, strict=True) if access[direction]]
            self.total[f"inductor::{self.name}"] += storage_bytes(chosen)
        return self.kernel(*tensors)


def count_declared_bytes(step: Callable[[], object]) -> Counter[str]:
    """The bytes that the kernels access in a step, by operator, as the generated source declares them."""
    declared: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for module in generated_modules():
            source = Path(module.__file__).read_text()
            for name in re.findall(r"^(cpp_fused\w+) = ", source, re.MULTILINE):
                counting = CountingKernel(name, vars(module)[name], declared_accesses(source, name), declared)
                patch.setitem(vars(module), name, counting)
        step()
    return declared


def test_kernels_access_the_bytes_that_the_generated_source_declares(runs: Runs) -> None:
    operators = accessed_bytes_by_operator(runs.compiled)
    recorded = {name: num_bytes for name, num_bytes in operators.items() if name.startswith("inductor::cpp")}
    assert recorded == {name: NUM_STEPS * num_bytes for name, num_bytes in runs.declared_bytes.items()}


def test_the_python_observer_records_the_same_kernels(runs: Runs, tmp_path: Path) -> None:
    torch._dynamo.reset()  # code that was compiled before a recording has no modules in it
    network = fresh_network()
    losses = train(network, torch.compile(network), tmp_path / "run.memtrace", observer="dispatch")
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert losses == runs.losses
    for accessed in (accessed_bytes_by_operator(trace), accessed_bytes_by_operator(runs.compiled)):
        accessed_by_kernel = {name: number for name, number in accessed.items() if name.startswith("inductor::")}
        assert accessed_by_kernel == {name: NUM_STEPS * number for name, number in runs.declared_bytes.items()}
    assert network_sites(trace) == network_sites(runs.compiled)


def network_sites(trace: Trace) -> set[tuple[str, str, str]]:
    """Modules, phases and lines of the accesses of the network, without those of the compiler itself."""
    lines, first = inspect.getsourcelines(train)
    calls = {str(line) for line in range(first, first + len(lines))}
    return {
        site for site in accessed_bytes(trace) if site[1] in ("forward", "backward") and site[2] not in calls | {""}
    }


def test_code_that_makes_its_calls_in_cpp_counts_with_its_arguments_and_results(tmp_path: Path) -> None:
    from torch._inductor import config

    x = torch.randn(1000)
    with config.patch(cpp_wrapper=True):
        # Without a gradient, so that one piece of code is compiled.
        compiled = torch.compile(lambda tensor: tensor.sin() + 1)
        with torch.no_grad(), memtrace.record(tmp_path / "run.memtrace"):
            result = compiled(x)
    assert torch.allclose(result, x.sin() + 1, atol=1e-5)
    trace = memtrace.load(tmp_path / "run.memtrace")
    coverage = trace.manifest.coverage
    assert coverage.unseen_accesses == ("compiled",)
    assert coverage.opaque_bytes == 2 * 4000
    share = seen_access_share(trace)
    assert share is not None
    assert share < 1
    skipped = [entry.reason for device in find_wasted_memory(trace).devices for entry in device.skipped_patterns]
    assert "kernels of torch.compile read and write memory unseen" in skipped
