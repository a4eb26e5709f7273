"""Building the native observer: once for all processes, in hostile environments, without a compiler, and its CUDA part."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.native_build import build_cache, compilation, compilers
from memtrace.native_build.build_id import read_build_id
from memtrace.recording.observers import build, toolchain, typed_operators
from memtrace.recording.observers.build import BuildError
from memtrace.recording.observers.columns_header import HEADER_NAME, columns_header
from memtrace.recording.observers.cuda_headers import CudaHeaders

EMPTY_MODULE = """#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "memtrace_native", nullptr, 0};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_memtrace_native() {
  return PyModuleDef_Init(&definition);
}
"""
LoadFresh = Callable[..., build.NativeBuild]
needs_compiler = pytest.mark.skipif(not compilers.find_compilers(), reason="no C++ compiler")


class Loads(list[bytes]):
    """The modules that were loaded, which are not run: they are empty."""


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_loaded: None) -> Loads:
    """An empty cache, and an empty module in the place of the native observer, which takes seconds to build."""
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "module.cpp").write_text(EMPTY_MODULE)
    monkeypatch.setattr(toolchain, "SOURCES", tmp_path / "native")
    monkeypatch.setattr(typed_operators, "OPERATORS", {})
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("MEMTRACE_CACHE", str(tmp_path / "cache"))
    loaded = Loads()

    def load(name: str, content: bytes) -> ModuleType:
        loaded.append(content)
        return ModuleType(name)

    monkeypatch.setattr(build, "load_extension", load)
    return loaded


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setitem(sys.modules, build.MODULE, None)


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> LoadFresh:
    """Loads the observer as the next process would."""

    def load(rebuild: bool = False) -> build.NativeBuild:
        monkeypatch.setattr(build, "_loaded", None)
        return build.load_native(rebuild=rebuild)

    return load


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def compiler_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of times that the compiler was called, if the test uses ``$CXX``."""
    log = tmp_path / "calls"
    real = compilers.find_compilers()[0]
    program = write_program(tmp_path / "counting", f'#!/bin/sh\necho call >> {log}\nexec {real} "$@"\n')
    monkeypatch.setenv("CXX", str(program))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


@needs_compiler
def test_a_module_is_built_once_and_then_taken_from_the_cache(
    loads: Loads, fresh_process: LoadFresh, compiler_calls: Callable[[], int], capfd: pytest.CaptureFixture[str]
) -> None:
    built = fresh_process()
    assert "building the native observer" in capfd.readouterr().err
    num_calls = compiler_calls()
    cached = fresh_process()
    assert (cached.compiler, cached.cache_folder) == (built.compiler, built.cache_folder)
    assert compiler_calls() == num_calls == 3  # probe, source, link
    assert capfd.readouterr().err == ""
    assert loads[0] == loads[1] and loads[0].startswith(b"\x7fELF")
    assert Path(str(built.module.__file__)).read_bytes() == loads[0]
    fresh_process(rebuild=True)
    assert compiler_calls() == 2 * num_calls


@needs_compiler
def test_a_built_module_needs_no_compiler(
    loads: Loads, fresh_process: LoadFresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_process()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    fresh_process()
    assert len(loads) == 2


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"no module"),
        lambda path: path.write_bytes(path.read_bytes()[:1000]),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").unlink(),
    ],
)
def test_a_module_that_is_not_what_was_built_is_built_anew(
    loads: Loads, fresh_process: LoadFresh, damage: Callable[[Path], None]
) -> None:
    path = Path(str(fresh_process().module.__file__))
    content = path.read_bytes()
    damage(path)
    fresh_process()
    assert path.read_bytes() == loads[1] and len(loads) == 2
    assert loads[1].startswith(b"\x7fELF") and len(loads[1]) == len(content)


@needs_compiler
def test_a_module_that_others_could_have_written_is_not_loaded(
    loads: Loads, fresh_process: LoadFresh, tmp_path: Path
) -> None:
    fresh_process()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(BuildError, match=r"can be written by other users \(mode 777\)"):
        fresh_process()
    assert len(loads) == 1


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "/nowhere/c++",
        "no-such-compiler",
        "{folder}/fails",
        "{folder}/writes_nothing",
        "{folder}/not_a_program",
        "{folder}",
        "cat",
        "'unbalanced",
        "{real} -Wall",
        "env {real}",
        "{real} --no-such-flag",
    ],
)
def test_an_odd_compiler_variable_does_not_prevent_the_build(
    loads: Loads, fresh_process: LoadFresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    write_program(tmp_path / "fails", "#!/bin/sh\nexit 1\n")
    write_program(tmp_path / "writes_nothing", "#!/bin/sh\nexit 0\n")
    write_program(tmp_path / "not_a_program", "neither a script nor a program\n")
    monkeypatch.setenv("CXX", text.format(folder=tmp_path, real=compilers.find_compilers()[0]))
    for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.setenv(name, "-no-such-flag")
    compiler = fresh_process().compiler
    works = text.startswith(("{real} -W", "env"))
    assert compiler.endswith(("-Wall", str(compilers.find_compilers()[-1])) if works else ("c++", "g++"))
    assert loads[0].startswith(b"\x7fELF")


@needs_compiler
def test_missing_headers_of_python_are_named_and_not_remembered(
    loads: Loads, fresh_process: LoadFresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build, "python_headers", lambda: tmp_path)
        with pytest.raises(BuildError, match=f"{tmp_path} lacks Python.h; install it .*python3-dev"):
            fresh_process()
    fresh_process()
    assert len(loads) == 1


@pytest.mark.parametrize(("rank", "is_reported"), [(None, True), ("0", True), ("7", False)])
def test_one_rank_reports_that_it_waits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rank: str | None, is_reported: bool
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    build._report_wait()
    assert ("another process is building" in capfd.readouterr().err) == is_reported


@needs_compiler
def test_a_compiler_that_hangs_is_given_up(
    loads: Loads, fresh_process: LoadFresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "PROBE_SECONDS", 0.5)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    write_program(tmp_path / "c++", f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    for name in ("g++", "clang++"):
        write_program(tmp_path / name, "#!/bin/sh\nexit 1\n")
    with pytest.raises(BuildError, match=r"no working C\+\+20 compiler found: c\+\+ took longer"):
        fresh_process()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@needs_compiler
def test_a_failed_build_is_not_repeated(
    loads: Loads, fresh_process: LoadFresh, tmp_path: Path, compiler_calls: Callable[[], int]
) -> None:
    source = tmp_path / "native" / "module.cpp"
    source.write_text(f"#error this cannot work\n{EMPTY_MODULE}")
    with pytest.raises(BuildError, match=r"this cannot work \(to try again: memtrace doctor --rebuild\)"):
        fresh_process()
    num_calls = compiler_calls()
    with pytest.raises(BuildError, match=r"this cannot work \(remembered from an earlier run; to try again: memtrace"):
        fresh_process()
    assert compiler_calls() == num_calls
    with pytest.raises(BuildError):
        fresh_process(rebuild=True)
    assert compiler_calls() == 2 * num_calls
    (tmp_path / "counting").write_text((tmp_path / "counting").read_text() + "# another compiler\n")
    with pytest.raises(BuildError):
        fresh_process()
    assert compiler_calls() == 3 * num_calls
    source.write_text(EMPTY_MODULE)
    fresh_process()
    assert loads


@needs_compiler
def test_a_build_that_lacked_memory_is_repeated_later(
    loads: Loads, fresh_process: LoadFresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compilers.find_compilers()[0]
    killed = f"#!/bin/sh\ncase \"$*\" in *probe*) exec {real} \"$@\";; esac\n[ -e {tmp_path}/works ] && exec {real} \"$@\"\nkill -9 $$\n"  # fmt: skip
    monkeypatch.setenv("CXX", str(write_program(tmp_path / "killed", killed)))
    with pytest.raises(BuildError, match="exit status -9"):
        fresh_process()
    (tmp_path / "works").touch()
    with pytest.raises(BuildError, match="remembered"):
        fresh_process()
    monkeypatch.setattr(build_cache, "RETRY_SECONDS", 0)
    assert fresh_process().compiler.endswith("killed")


@needs_compiler
def test_a_module_that_cannot_be_stored_is_used(
    loads: Loads, fresh_process: LoadFresh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    fresh_process()
    assert len(loads) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"memtrace: the native observer was built for this run only: cannot write to the cache folder "
        f"{os.environ['MEMTRACE_CACHE']} (No space left on device)"
    ]


@needs_compiler
def test_without_a_home_the_module_is_kept_in_the_temporary_folder(
    loads: Loads, fresh_process: LoadFresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MEMTRACE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/nonexistent"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for _ in range(2):
        assert fresh_process().cache_folder == tmp_path / f"memtrace-{os.geteuid()}"
    assert not Path("/nonexistent").exists()


NUM_BUILDERS = int(os.environ.get("MEMTRACE_TEST_BUILDERS", "2"))
SLOW_COMPILER = "#!/bin/sh\ntouch {folder}/started\nexec sleep 600\n"
LOAD = (
    "import sys\nfrom pathlib import Path\nfrom memtrace.recording.observers import build, toolchain, typed_operators\n"
    "import torch\ntorch.version.cuda = None\ntoolchain.SOURCES = Path(sys.argv[1])\n"
    "typed_operators.OPERATORS.clear()\nprint(build.load_native().module.__file__)"
)


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that loads the empty module."""
    running: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOAD, str(tmp_path / "native")]
        variables = os.environ | environment
        running.append(subprocess.Popen(command, env=variables, stdout=-1, stderr=-1, text=True))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@needs_compiler
def test_concurrent_processes_build_the_module_once(
    loads: Loads, start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    processes = [start_process() for _ in range(NUM_BUILDERS)]
    outputs, errors = zip(*(process.communicate(timeout=300) for process in processes), strict=True)
    assert not any(process.returncode for process in processes), errors
    assert sum("memtrace: building" in text for text in errors) == 1
    (built,) = (tmp_path / "cache").glob("*.so")
    assert set(outputs) == {f"{built}\n"}


@needs_compiler
def test_a_build_killed_half_way_does_not_delay_the_next(
    loads: Loads, start_process: Callable[..., subprocess.Popen[str]], fresh_process: LoadFresh, tmp_path: Path
) -> None:
    slow = write_program(tmp_path / "slow", SLOW_COMPILER.format(folder=tmp_path))
    process = start_process(CXX=str(slow))
    assert process.stderr is not None and process.stderr.read(20)  # it reports that it builds
    process.send_signal(signal.SIGKILL)
    process.wait()
    fresh_process()
    assert len(loads) == 1


def test_the_native_observer_is_the_default(tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "run.memtrace"):
        torch.ones(1000).mul(2)
    assert memtrace.load(tmp_path / "run.memtrace").manifest.source.observer == "native"


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"PATH": "/nowhere", "CXX": ""}, "no C++ compiler found"),
        ({"MEMTRACE_CACHE": "/proc/memtrace"}, "the cache folder /proc/memtrace cannot be used"),
        ({"MEMTRACE_CACHE": "/dev/null"}, "the cache folder /dev/null cannot be used"),
        ({"MEMTRACE_CACHE": "{tmp}/open"}, "can be written by other users"),
        ({"MEMTRACE_CACHE": "{tmp}/linked"}, "is a symbolic link; delete it"),
    ],
)
def test_what_prevents_the_build_is_one_warning_and_the_recording_is_pure_python(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environment: dict[str, str],
    reason: str,
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "linked").mkdir(mode=0o700)
    (tmp_path / "linked" / "lock").symlink_to(write_program(tmp_path / "precious", "precious"))
    monkeypatch.setenv("MEMTRACE_CACHE", str(tmp_path / "cache"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        torch.ones(1000).mul(2)
        assert recording.is_recording
    assert (tmp_path / "precious").read_text() == "precious"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("memtrace: recording in pure Python, which is several times slower: ")
    assert reason in warning and "\n" not in warning
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert trace.manifest.source.observer == "dispatch"
    assert any(reason in note for note in compute_coverage(trace).notes)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_the_native_observer_on_request_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(memtrace.MemtraceError, match="no C"), memtrace.record(tmp_path / "run", observer="native"):
        pass
    with memtrace.record(tmp_path / "run.memtrace", observer="dispatch") as recording:
        assert recording.is_recording


def test_a_change_of_the_source_needs_a_new_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {toolchain.module_key(with_cuda=False), toolchain.module_key(with_cuda=True)}
    monkeypatch.setattr(toolchain, "SOURCES", tmp_path)
    keys.add(toolchain.module_key(with_cuda=False))
    (tmp_path / "folder").mkdir()
    for name in ("state.cpp", "folder/state.h"):
        (tmp_path / name).write_text("// another source")
        keys.add(toolchain.module_key(with_cuda=False))
    monkeypatch.setattr(torch, "__version__", "2.13.1")
    keys.add(toolchain.module_key(with_cuda=False))
    assert len(keys) == 6


def test_the_key_survives_a_container_image_which_keeps_no_fractions_of_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    keys = []
    for modified_ns in (7_900_000_000, 7_000_000_000, 8_000_000_000):
        os.utime(library, ns=(modified_ns, modified_ns))
        keys.append(toolchain.module_key(with_cuda=False))
    assert keys[0] == keys[1] != keys[2]


def test_environments_with_the_same_torch_share_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path(torch.__file__).parent
    begins = {}
    for name in ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"):
        with (installed / "lib" / name).open("rb") as file:
            begins[name] = file.read(4096)  # has the build id
        if read_build_id(installed / "lib" / name) is None:
            pytest.skip("this torch was linked without build ids")
    keys = [toolchain.module_key(with_cuda=False)]
    copy = tmp_path / "torch"
    (copy / "lib").mkdir(parents=True)
    (copy / "include").symlink_to(installed / "include")
    for name, begin in begins.items():
        (copy / "lib" / name).write_bytes(begin)
    monkeypatch.setattr(torch, "__file__", str(copy / "__init__.py"))
    keys.append(toolchain.module_key(with_cuda=False))
    (copy / "lib" / "libc10.so").write_bytes(begins["libtorch_python.so"])
    keys.append(toolchain.module_key(with_cuda=False))
    assert keys[0] == keys[1] != keys[2]


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch, loads: Loads, tmp_path: Path) -> Path:
    """torch looks like a CUDA build, and the module refuses to be built with CUDA; returns a folder for headers."""
    source = tmp_path / "native" / "module.cpp"
    source.write_text(f"#ifdef MEMTRACE_CUDA\n#error no CUDA here\n#endif\n{EMPTY_MODULE}")
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    include = tmp_path / "toolkit" / "include"
    include.mkdir(parents=True)
    return include


@needs_compiler
def test_without_cuda_headers_the_observer_is_built_without_cuda(cuda_build: Path, fresh_process: LoadFresh) -> None:
    loaded = fresh_process()
    assert loaded.cuda_headers is None
    assert loaded.cuda_obstacle == "no headers of CUDA 99.1 found; set CUDA_HOME to a toolkit of that version"


@needs_compiler
def test_a_failing_build_with_cuda_falls_back_to_one_without_and_is_remembered(
    cuda_build: Path, fresh_process: LoadFresh, compiler_calls: Callable[[], int], capfd: pytest.CaptureFixture[str]
) -> None:
    (cuda_build / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 99010\n")
    obstacle = fresh_process().cuda_obstacle
    assert obstacle is not None and "no CUDA here" in obstacle and "memtrace doctor --rebuild" in obstacle
    assert "building the native observer without CUDA" in capfd.readouterr().err
    num_calls = compiler_calls()
    obstacle = fresh_process().cuda_obstacle
    assert obstacle is not None and "no CUDA here" in obstacle and "remembered" in obstacle
    assert compiler_calls() == num_calls


@needs_compiler
def test_a_build_with_cuda_is_used_without_its_headers(
    cuda_build: Path, fresh_process: LoadFresh, tmp_path: Path
) -> None:
    (tmp_path / "native" / "module.cpp").write_text(EMPTY_MODULE)
    flags = toolchain.link_flags
    (cuda_build / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 99010\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "link_flags", lambda with_cuda: [f for f in flags(with_cuda) if f != "-lc10_cuda"])
        first = fresh_process()
        assert first.cuda_headers == f"{cuda_build} (without crt/, which memtrace replaces)"
        (cuda_build / "cuda_runtime_api.h").unlink()
        assert fresh_process().cuda_headers == first.cuda_headers
    assert first.cuda_obstacle is None


CUDA_SOURCES = sorted(
    path.name for path in toolchain.SOURCES.glob("*.cpp") if "MEMTRACE_CUDA" in path.read_text(encoding="utf-8")
)


@pytest.fixture
def incomplete_headers(tmp_path: Path) -> CudaHeaders:
    """The headers of the package ``nvidia-cuda-runtime``, or else of a toolkit, less what the package lacks."""
    for path in sys.path:
        folder = Path(path) / "nvidia" / "cu13" / "include"
        if (folder / "cuda_runtime_api.h").is_file() and not (folder / "crt").exists():
            return CudaHeaders(folder, is_complete=False)
    toolkit = Path("/usr/local/cuda/include")
    if not (toolkit / "cuda_runtime_api.h").is_file():
        pytest.skip("neither the package nvidia-cuda-runtime nor a CUDA toolkit in /usr/local/cuda is installed")
    (tmp_path / "toolkit").mkdir()
    for entry in toolkit.iterdir():
        if entry.name != "crt":
            (tmp_path / "toolkit" / entry.name).symlink_to(entry)
    return CudaHeaders(tmp_path / "toolkit", is_complete=False)


@needs_compiler
@pytest.mark.parametrize("source", CUDA_SOURCES)
def test_the_cuda_part_compiles_with_the_headers_of_a_wheel(
    source: str, incomplete_headers: CudaHeaders, tmp_path: Path
) -> None:
    # CUDA wheels of torch contain this header and CPU wheels do not. Its content does not matter for the syntax.
    (tmp_path / "c10" / "cuda" / "impl").mkdir(parents=True)
    (tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h").touch()
    (tmp_path / HEADER_NAME).write_text(columns_header())
    (compiler, *_) = compilers.find_compilers()
    flags = [*toolchain.compile_flags(incomplete_headers), f"-I{tmp_path}", "-fsyntax-only"]
    command = [*compiler.command, *flags, str(toolchain.SOURCES / source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
