"""``memtrace live`` and ``memtrace serve``: what they print, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from memtrace.cli import cli, main
from memtrace.cli.live_view import sparkline

from memtrace.format.live_status import LiveSample, LiveStatus, LiveStep, write_live_status
from memtrace.format.manifest import read_manifest, write_manifest
from memtrace.recording import serving
from tests.format.random_traces import RandomTrace, on_disk

MIB = 1 << 20


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """The folder of a recording that seems to run: its status is fresh."""
    trace = tmp_path / "run.memtrace"
    on_disk(RandomTrace(3).rows, trace, [0])
    folder = trace / "rank=0"
    write_manifest(folder, replace(read_manifest(folder / "manifest.json"), finished=False))
    steps = tuple(
        LiveStep(number, number * 10**9, 10**9, {"cuda:0": (60 + number) * MIB}, {"cuda:0": (50 + number) * MIB})
        for number in range(10)
    )
    status = LiveStatus(
        time_ns=10 * 10**9,
        written_epoch_ns=time.time_ns(),
        num_events=1234,
        live_bytes={"cpu": 0, "cuda:0": 59 * MIB},
        peak_bytes={"cpu": 0, "cuda:0": 69 * MIB},
        category_bytes={"cuda:0": {"parameter": 40 * MIB, "unknown": 19 * MIB}},
        reserved_bytes={"cuda:0": 80 * MIB},
        steps=steps,
        open_step=LiveStep(10, 10 * 10**9, 10**8, {"cuda:0": 62 * MIB}, {"cuda:0": 59 * MIB}),
        samples=(LiveSample(0, {"cuda:0": MIB}), LiveSample(1, {"cuda:0": 69 * MIB})),
    )
    write_live_status(folder, status)
    return trace


def end_recording(trace: Path) -> None:
    folder = trace / "rank=0"
    write_manifest(folder, replace(read_manifest(folder / "manifest.json"), finished=True))


def test_a_pipe_gets_a_line_for_each_device_until_the_recording_ends(running: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "memtrace.cli", "live", str(running), "--capacity", "100MiB", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    end_recording(running)
    rest = process.stdout.read()
    assert process.wait(60) == 0
    assert "cpu, step 10: 0 B now" in lines[0]
    assert lines[1] == (
        "10.0 s: rank 0, cuda:0, step 10: 59.0 MiB now, peak 69.0 MiB, growth per step: 1.00 MiB, "
        "out of memory: 31.0 s\n"
    )
    assert "the recording has ended" in rest
    assert "Traceback" not in rest


def test_an_interrupt_ends_the_command_without_a_traceback(running: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "memtrace.cli", "live", str(running)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""


def test_a_finished_trace_says_so(running: Path) -> None:
    end_recording(running)
    result = CliRunner().invoke(cli, ["live", str(running)])
    assert result.exit_code == 0
    assert "the recording has ended" in result.output
    assert "memtrace summary" in result.output


@pytest.mark.parametrize(("arguments", "message"), [
    (["live", "absent.memtrace"], "does not exist"),
    (["serve", "absent.memtrace"], "does not exist"),
    (["live", ".", "--rank", "3"], "is not a memtrace trace"),
])  # fmt: skip
def test_bad_arguments_are_one_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_a_missing_server_package_is_named_with_the_command_that_installs_it(
    running: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["serve", str(running)])
    assert (
        'needs starlette and uvicorn. Install the server with: pip install "memtrace[serve]"' in capsys.readouterr().err
    )


def test_a_sparkline_goes_from_zero_to_the_highest_sample() -> None:
    samples = [LiveSample(time, {"cpu": size}) for time, size in enumerate((0, 50, 100))]
    assert sparkline(samples, "cpu", 60) == "▁▄█"
    assert sparkline(samples, "cpu", 1) == "█"
    assert sparkline(samples, "cuda:0", 60) == ""
