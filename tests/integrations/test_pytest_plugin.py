"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import memtrace
from memtrace.analysis import find_peak
from memtrace.integrations.pytest_recorder import read_marker

pytest_plugins = ["pytester"]

# pytester changes HOME; the native observer that was built stays where it is.
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
TESTS = """
    import pytest
    import torch

    LOSSES = []

    def test_small():
        torch.ones(1 << 16)

    @pytest.mark.memtrace_limit("100 MiB")
    def test_within():
        torch.ones(1 << 20)

    @pytest.mark.limit_memory("1 MiB")
    def test_large():
        allocate()

    def allocate():
        return torch.ones(1 << 20)

    @pytest.mark.memtrace_limit(max_growth="1 KiB")
    def test_growing():
        train(LOSSES)

    @pytest.mark.memtrace_limit("100 MiB", max_growth=0)
    def test_steady():
        train([])

    def train(losses):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if losses is LOSSES:
                losses.append(torch.ones(4096))

    @pytest.mark.memtrace_limit(max_growth="1 MiB")
    def test_without_steps():
        torch.ones(10)

    @pytest.mark.memtrace_limit("1 apple")
    def test_wrong_marker():
        pass

    def test_out_of_memory():
        torch.ones(1 << 18)
        raise torch.OutOfMemoryError("CUDA out of memory")
"""


@pytest.fixture(autouse=True)
def built_observer(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of pytest use the native observer that this one uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)


def run_pytest(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run pytest; load the plugin where this checkout was installed before it had one."""
    is_installed = any(point.name == "memtrace" for point in entry_points(group="pytest11"))
    plugin = [] if is_installed else ["-p", "memtrace.integrations.pytest_plugin"]
    return pytester.runpytest_subprocess("--strict-markers", *plugin, *options, timeout=300)


def test_limits_are_checked_and_the_messages_show_what_held_the_peak(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_memory=TESTS)
    result = run_pytest(pytester, "-p", "no:memray", "-p", "no:xdist", "--memtrace", "--memtrace-top=3")
    result.assert_outcomes(passed=3, failed=5)
    result.stdout.fnmatch_lines(
        [
            "memory limit exceeded: the test needs 4.00 MiB on cpu, the limit is 1.00 MiB",
            "cpu: Peak * hold*%*",
            "*by category:*",
            "*by allocation site:*",
            "*4.00 MiB*test_memory.py:* allocate*",
            "memory growth exceeded: 16.0 KiB per training step stay live, the limit is 1.00 KiB",
            "*16.0 KiB per step at *test_memory.py:* train*",
            "memory growth unknown: the test has 0 training steps*",
            "memtrace_limit: invalid size '1 apple'*",
            "*memtrace call*",
            "cpu: Peak *",
            "*memtrace: tests with the highest peak memory*",
            "*4.00 MiB*cpu*test_memory.py::test_large*",
            "*4.00 MiB*cpu*test_memory.py::test_within*",
            "*1.00 MiB*cpu*test_memory.py::test_out_of_memory*",
        ]
    )
    result.stdout.no_fnmatch_line("*test_memory.py::test_small  (*")


@pytest.mark.slow
def test_workers_of_xdist_report_together_and_the_marker_of_memray_is_left_to_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_memory=TESTS)
    pytester.makeini("[pytest]\nmemtrace = true\n")
    pytester.makepyfile(
        fake_memray="""
        def pytest_configure(config):
            config.addinivalue_line("markers", "limit_memory(memory_limit): of pytest-memray")
        """
    )
    pytester.makeconftest(
        "import fake_memray\n"
        "def pytest_addoption(parser, pluginmanager):\n"
        "    if not pluginmanager.hasplugin('memray'):\n"
        "        pluginmanager.register(fake_memray, 'memray')\n"
    )
    # memtrace would reject this argument, which pytest-memray takes.
    pytester.makepyfile(
        test_memray="""
        import pytest

        @pytest.mark.limit_memory("1 GB", current_thread_only=True)
        def test_of_memray():
            pass
        """
    )
    result = run_pytest(pytester, "-n", "1", "-k", "small or within or memray", "--memtrace-dir", "traces")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*4.00 MiB*test_within*", "*256 KiB*test_small*"])
    (path,) = (pytester.path / "traces").glob("*test_within.memtrace")
    peak = find_peak(memtrace.load(path), "cpu")
    assert peak.requested.bytes - peak.baseline_bytes == 4 << 20


def test_nothing_is_imported_or_recorded_unless_enabled(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        import pytest

        @pytest.mark.memtrace_limit("1 B")
        def test_first():
            assert "torch" not in sys.modules
            assert not [name for name in sys.modules if name.startswith(("memtrace.recording", "memtrace.analysis"))]
        """
    )
    result = run_pytest(pytester, "-p", "no:xdist")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*memtrace:*")


COMPUTING_TESTS = """
    import pytest
    import torch

    RESULTS = []

    @pytest.fixture(scope="module")
    def model():
        torch.manual_seed(3)
        yield torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
        torch.save([RESULTS, torch.get_rng_state()], "results.pt")

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    def test_training(model, optimizer):
        optimizer = optimizer(model.parameters(), lr=0.1)
        for _ in range(5):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            RESULTS.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        RESULTS.extend(parameter.detach().clone() for parameter in model.parameters())

    def test_that_fails(model):
        RESULTS.append(torch.rand(3))
        assert RESULTS[-1].sum() > 100

    @pytest.mark.xfail(raises=RuntimeError)
    def test_with_an_expected_error(model):
        model(torch.randn(8, 15))

    def test_that_skips_itself(model):
        RESULTS.append(torch.rand(3))
        pytest.skip("no more")
"""


def test_recorded_tests_compute_bitwise_the_same_and_have_the_same_outcomes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(COMPUTING_TESTS)
    results = []
    for options in ([], ["--memtrace"]):
        run = run_pytest(pytester, "-p", "no:xdist", *options)
        run.assert_outcomes(passed=2, failed=1, xfailed=1, skipped=1)
        results.append(torch.load(pytester.path / "results.pt"))
        (pytester.path / "results.pt").unlink()
    (plain, plain_state), (recorded, recorded_state) = results
    assert torch.equal(plain_state, recorded_state)
    assert len(plain) == len(recorded) == 2 * (5 + 4) + 2
    for one, other in zip(plain, recorded, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (pytest.mark.memtrace_limit("100 apples"), "invalid size '100 apples'"),
        (pytest.mark.memtrace_limit(True), "invalid size 'True'"),
        (pytest.mark.memtrace_limit("1 MiB", current_thread_only=True), "remove the other arguments"),
        (pytest.mark.memtrace_limit("1 MiB", peak="2 MiB"), "remove the other arguments"),
        (pytest.mark.memtrace_limit(), "has no limit"),
    ],
)
def test_a_wrong_marker_has_a_reason(mark: pytest.MarkDecorator, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_marker(mark.mark)


def test_a_marker_takes_texts_and_numbers_of_bytes() -> None:
    limits = read_marker(pytest.mark.memtrace_limit("1.5 GiB", max_growth=20).mark)
    assert (limits.peak_bytes, limits.growth_bytes_per_step) == (3 << 29, 20)
