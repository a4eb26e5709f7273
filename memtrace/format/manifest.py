"""The manifest of a rank (``manifest.json``): where its trace comes from, what it covers, and which parts it has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from memtrace.errors import TraceError
from memtrace.format.files import replace_file
from memtrace.format.schema import FORMAT_VERSION, MANIFEST_NAME, TABLES
from memtrace.format.storage import AnyPath, Entry, StorageError
from memtrace.format.typed_json import InvalidMember, parse_value, read_json_file

_MAX_RANK: Final = 1 << 24
_MAX_PART: Final = 10**9
_FORMAT: Final = {"format": "memtrace", "format_version": FORMAT_VERSION}
_SIGNED: Final = ("clock.offset_ns", "clock.drift_ns", "options.device_time_min_bytes")
"""Members that can be negative."""

PartRanges = tuple[tuple[int, int], ...]
"""Numbers of the parts of a table as ranges: first and last number of each, both included."""


@dataclass(frozen=True)
class TraceSource:
    """What the trace was made from."""

    kind: str = "recording"
    """``recording``, or the kind of file: ``cuda_snapshot``, ``chrome_trace``, ``memory_timeline``, ..."""
    observer: str | None = None
    """Observer of a recording: ``native`` or ``dispatch``."""
    file: str | None = None
    """Name of the file that was read."""


@dataclass(frozen=True)
class DeviceInfo:
    """A device of the process."""

    name: str | None = None
    num_threads: int | None = None
    """CPU: threads that torch uses within an operator."""
    total_bytes: int | None = None
    """Memory of the device."""
    uuid: str | None = None
    """Unique id of the device, which stays the same whatever number a process knows the device by."""
    pci_address: str | None = None
    """Domain, bus and device number, as nvidia-smi writes them."""
    allowed_bytes: int | None = None
    """Most that torch's CUDA allocator may reserve (``set_per_process_memory_fraction``); None: no limit or unknown."""


@dataclass(frozen=True)
class RecordingOptions:
    """The options of ``memtrace.record``; see there."""

    stacks: bool = True
    accesses: bool = True
    last_steps: int | None = None
    max_steps: int | None = None
    observer: str = "auto"
    stack_min_bytes: int = 512
    flush_seconds: float = 5.0
    schedule: str | None = None
    """Description of the schedule that chooses the recorded steps; None: all steps are recorded."""
    on_oom: bool = False
    """Whether the trace was kept in memory until memory ran out, or a snapshot was asked for."""
    device_time_min_bytes: int = -1
    """Operators that touch a block on a GPU of at least this size are timed there; -1: none."""


@dataclass(frozen=True)
class CodeLocations:
    """Where the files of the recorded process lie. Folders end in a slash; the longest that fits a file counts."""

    package_folders: tuple[str, ...] = ()
    """Folders of installed packages."""
    internal_folders: tuple[str, ...] = ()
    """PyTorch, Python's library, memtrace, and caches of generated code."""
    user_paths: tuple[str, ...] = ()
    """The running program: its file, and the folder of its package, even where that is among installed packages."""


@dataclass(frozen=True)
class RankCoordinate:
    """Place of a rank in one dimension of a job's parallelism."""

    dimension: str
    """Name of the dimension as the program names it, such as ``pp``, ``dp_shard`` or ``tp``."""
    index: int
    size: int
    """Number of ranks along the dimension."""


@dataclass(frozen=True)
class ClockOffset:
    """How this rank's clock relates to that of the reference rank. None: unknown."""

    reference_rank: int = 0
    offset_ns: int | None = None
    """Added to a time of this rank, gives the time of the reference rank."""
    error_ns: int | None = None
    """Bound on the error of the offset."""
    drift_ns: int | None = None
    """Change of the offset until the end of the recording."""
    note: str | None = None
    """What prevented the measurement."""


@dataclass(frozen=True)
class FileCoverage:
    """What the events of the trace cover, as far as its writer knows."""

    lost_events: int | None = None
    """Events that the recorder could not write; None: unknown."""
    dropped_events: int | None = None
    """Events older than the steps that a ring recording keeps; None: unknown."""
    program_steps: int | None = None
    """Training steps of the program, where a schedule chose which are recorded; None: no schedule, or unknown."""
    has_times: bool = True
    """Whether ``time_ns`` is a time. Where a file has no times it numbers the entries, and durations are unknown."""
    has_blocks: bool = True
    """Whether the blocks are the program's. A file of totals has one block per category, replaced at every change."""
    has_accesses: bool | None = None
    """Whether reads and writes were recorded; None: they were if there are any."""
    unseen_accesses: tuple[str, ...] = ()
    """Code that ran without its reads and writes being recorded, so that a block without accesses may have been used:
    ``compiled`` (code that torch.compile generated and whose kernels could not be observed), ``python_handlers``
    (operators that dispatch modes and tensor subclasses call: they are recorded with the versions of torch that are
    known), ``threads`` (threads that the program started, of which the pure-Python observer records module calls and
    backward passes only)."""
    opaque_bytes: int | None = None
    """Bytes of the arguments and results of the ``compiled`` code in ``unseen_accesses``, summed over its calls. What
    it accesses besides them is not known. None: unknown."""
    notes: tuple[str, ...] = ()
    """Sentences about what the trace cannot show, and why."""


@dataclass(frozen=True)
class Manifest:
    """What is known of the trace of one rank besides its tables."""

    memtrace_version: str = ""
    source: TraceSource = TraceSource()
    rank: int = 0
    rank_is_known: bool = False
    """Whether the process or the file itself named the rank; otherwise it is 0 by default."""
    world_size: int = 1
    coordinates: tuple[RankCoordinate, ...] = ()
    """Place of the rank in each dimension of the job's parallelism, from torch's device mesh or Megatron; empty: none
    is known."""
    finished: bool = True
    """False: the process died while recording; the trace ends at the last flush."""
    stop_reason: str | None = None
    """Why the recording ended before the program did."""
    t0_epoch_ns: int | None = None
    """Unix time at which ``time_ns`` is 0, ns."""
    num_events: int | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Versions of python, torch and cuda in the recorded process; hip where torch is built for ROCm, whose devices
    torch calls cuda too."""
    devices: Mapping[str, DeviceInfo] = field(default_factory=dict)
    host: str | None = None
    process: int | None = None
    command: tuple[str, ...] = ()
    options: RecordingOptions | None = None
    """None: not a recording."""
    code: CodeLocations | None = None
    """None: not known; the paths of the files decide whose code a stack frame is."""
    clock: ClockOffset | None = None
    """None: the recording was of a single rank, or the file has no clock."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the recorded process that choose devices or configure torch's CUDA allocator."""
    cuda_allocator: str | None = None
    """``native`` (torch's caching allocator), ``cudaMallocAsync``, ``pluggable`` (the program's own) or ``uncached``
    (caching was disabled); None: the program did not initialise CUDA, or the file does not name the allocator."""
    allocator_settings: Mapping[str, Any] | None = None
    """Settings of torch's CUDA allocator, as a snapshot names them."""
    coverage: FileCoverage = FileCoverage()
    parts: Mapping[str, PartRanges] | None = None
    """Numbers of the parts of each table, so that a lost part is noticed; None: the tables are in memory."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``manifest.json``."""
        return {**_FORMAT, **asdict(self)}

    def with_notes(self, *notes: str) -> Manifest:
        """Return the manifest with more notes in its coverage."""
        return replace(self, coverage=replace(self.coverage, notes=(*self.coverage.notes, *notes)))


def read_manifest(path: AnyPath, entry: Entry | None = None) -> Manifest:
    """Read ``manifest.json``; TraceError where it is missing, damaged, foreign or of another format version.

    Args:
        path: the file.
        entry: the file in the listing of a storage.
    """
    try:
        content = read_json_file(path, entry)
    except FileNotFoundError:
        raise TraceError(f"{path} is missing: {path.parent} is not the folder of a memtrace rank.") from None
    except StorageError as error:
        raise TraceError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(
            f"{path} cannot be read ({error}). Copy the trace again from where it was recorded."
        ) from error
    return parse_manifest(content, str(path))


def parse_manifest(content: Any, where: str) -> Manifest:
    """Return the manifest in the JSON value ``content``.

    Args:
        content: what ``Manifest.to_json`` returned, after a round trip through JSON.
        where: the file, for errors.

    Raises:
        TraceError: it is not a manifest, has another format version, or a member has the wrong type.
    """
    if not isinstance(content, dict) or content.get("format") != "memtrace":
        raise TraceError(f'{where} is not the manifest of a memtrace trace (no "format": "memtrace").')
    version = content.get("format_version")
    if not isinstance(version, int):
        raise TraceError(f"{where} has no format_version. Copy the trace again from where it was recorded.")
    if version > FORMAT_VERSION:
        writer = str(content.get("memtrace_version"))[:40]
        raise TraceError(
            f"{where} has format version {version}, written by memtrace {writer}; this memtrace reads version "
            f"{FORMAT_VERSION}. Install a newer memtrace."
        )
    if version < FORMAT_VERSION:
        raise TraceError(
            f"{where} has format version {version}, which this memtrace no longer reads (it reads version "
            f"{FORMAT_VERSION}). Record the program again, or import the original file again."
        )
    try:
        manifest: Manifest = parse_value(Manifest, content, signed=_SIGNED)
        _check(manifest)
    except InvalidMember as error:
        raise TraceError(f"{where}: {error}. Copy the trace again from where it was recorded.") from None
    return manifest


def _check(manifest: Manifest) -> None:
    """Check what the types of the members do not say."""
    if manifest.rank > _MAX_RANK:
        raise InvalidMember("rank", manifest.rank)
    if not 1 <= manifest.world_size <= _MAX_RANK:
        raise InvalidMember("world_size", manifest.world_size)
    for table, ranges in (manifest.parts or {}).items():
        if table not in TABLES:
            raise InvalidMember("parts", table)
        if any(low > high or high > _MAX_PART for low, high in ranges):
            raise InvalidMember(f"parts.{table}", list(ranges))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` in one step, so that it is whole at every moment."""
    # One member a line: readable, and several times quicker than json's own indentation. `vars` of the dataclasses in
    # it: `asdict` would copy everything first, while training threads wait for the interpreter lock.
    members = [
        f" {json.dumps(name)}: {json.dumps(value, sort_keys=True, default=vars)}"
        for name, value in sorted((_FORMAT | vars(manifest)).items())
    ]
    replace_file(folder / MANIFEST_NAME, "\n".join(["{", ",\n".join(members), "}"]).encode())


def part_ranges(numbers: Iterable[int]) -> PartRanges:
    """Return part numbers as ranges."""
    ordered = sorted(numbers)
    runs = [list(run) for _, run in groupby(enumerate(ordered), key=lambda item: item[1] - item[0])]
    return tuple((run[0][1], run[-1][1]) for run in runs)


def missing_parts(ranges: PartRanges, present: Sequence[int], first: int) -> tuple[int, int | None]:
    """Compare the parts of a table that the manifest lists with those that are there.

    Args:
        ranges: what the manifest lists; damaged manifests can list more than any folder holds.
        present: the numbers that are there, sorted.
        first: parts with smaller numbers were dropped by a ring.

    Returns:
        How many parts are missing, and the first of their numbers.
    """
    num_missing, first_missing = 0, None
    for low, high in ranges:
        low = max(low, first)
        inside = [number for number in present if low <= number <= high]
        absent = max(0, high - low + 1) - len(inside)
        num_missing += absent
        if absent and first_missing is None:
            first_missing = next((low + i for i, number in enumerate(inside) if number != low + i), low + len(inside))
    return num_missing, first_missing
