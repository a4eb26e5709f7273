"""Profiles for pprof (https://github.com/google/pprof): ``go tool pprof -http=: FILE``.

The values of a sample are blocks and bytes at the peak, of all allocations and of churn; category, module, operator and
device are labels. The numbers of the fields are those of ``proto/profile.proto`` in pprof's repository.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import IO, Final

from memtrace.exporters.options import MEASURES
from memtrace.exporters.process_names import rank_title
from memtrace.exporters.protobuf import bytes_field, int_field, packed_field, text_field
from memtrace.exporters.slices import window_start_ns
from memtrace.exporters.stack_samples import StackSamples, stack_samples
from memtrace.frames import Frame
from memtrace.trace import Trace

# Profile
_SAMPLE_TYPE: Final = 1
_SAMPLE: Final = 2
_MAPPING: Final = 3
_LOCATION: Final = 4
_FUNCTION: Final = 5
_STRING_TABLE: Final = 6
_TIME_NS: Final = 9
_DURATION_NS: Final = 10
_COMMENT: Final = 13
_DEFAULT_SAMPLE_TYPE: Final = 14
# ValueType
_TYPE: Final = 1
_UNIT: Final = 2
# Sample
_SAMPLE_LOCATIONS: Final = 1
_SAMPLE_VALUES: Final = 2
_SAMPLE_LABEL: Final = 3
_LABEL_KEY: Final = 1
_LABEL_TEXT: Final = 2
# Location, its message Line, and Function
_ID: Final = 1
_LOCATION_MAPPING: Final = 2
_LOCATION_LINE: Final = 4
_LINE_FUNCTION: Final = 1
_LINE_NUMBER: Final = 2
_FUNCTION_NAME: Final = 2
_FUNCTION_SYSTEM_NAME: Final = 3
_FUNCTION_FILE: Final = 4
# Mapping: without one that has functions, files and lines, pprof looks for a binary to get them from.
_MAPPING_FILE: Final = 5
_MAPPING_HAS: Final = (7, 8, 9)

_VALUE_NAMES: Final = {"peak": "peak", "allocations": "alloc", "churn": "churn"}


def write_pprof(trace: Trace, file: IO[bytes], measures: Sequence[str] = MEASURES) -> None:
    """Write a single-rank trace as a pprof profile.

    Args:
        trace: the trace.
        file: receives the profile, compressed.
        measures: those of MEASURES to write; pprof shows the first one by default.
    """
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as compressed:
        compressed.write(_Profile(trace, stack_samples(trace), measures).to_bytes())


class _Profile:
    """A profile message: texts, functions and locations get numbers when they are first used."""

    def __init__(self, trace: Trace, samples: StackSamples, measures: Sequence[str]) -> None:
        self._trace = trace
        self._samples = samples
        self._measures = measures
        self._texts: dict[str, int] = {"": 0}
        self._functions: dict[tuple[str, str], int] = {}
        self._locations: dict[tuple[int, int], int] = {}
        self._labels: dict[tuple[str, str], bytes] = {}

    def to_bytes(self) -> bytes:
        names = [_VALUE_NAMES[measure] for measure in self._measures]
        types = [
            (f"{name}_{what}", unit) for name in names for what, unit in (("objects", "count"), ("space", "bytes"))
        ]
        content = [
            bytes_field(_SAMPLE_TYPE, int_field(_TYPE, self._text(name)) + int_field(_UNIT, self._text(unit)))
            for name, unit in types
        ]
        content += self._sample_fields()
        content += self._description()
        content.append(int_field(_DEFAULT_SAMPLE_TYPE, self._text(f"{names[0]}_space")))
        content += [self._location(identity, *key) for key, identity in self._locations.items()]
        content += [self._function(identity, *key) for key, identity in self._functions.items()]
        return b"".join([*content, *(text_field(_STRING_TABLE, text) for text in self._texts)])

    def _sample_fields(self) -> list[bytes]:
        samples = self._samples
        columns = [column[measure] for measure in self._measures for column in (samples.num_blocks, samples.num_bytes)]
        stacks = [
            packed_field(_SAMPLE_LOCATIONS, [self._location_of(frame) for frame in frames]) for frames in samples.stacks
        ]
        stack = samples.stack.tolist()
        fields = []
        for index, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if not any(values):
                continue
            labels = {
                "device": samples.device[index],
                "category": samples.category[index],
                "module": samples.module[index],
                "operator": samples.operator[index],
            }
            content = stacks[stack[index]] + packed_field(_SAMPLE_VALUES, list(values))
            content += b"".join(self._label(key, text) for key, text in labels.items() if text)
            fields.append(bytes_field(_SAMPLE, content))
        return fields

    def _description(self) -> list[bytes]:
        """Return the fields on where the profile comes from."""
        trace = self._trace
        title = rank_title(trace)
        mapping = int_field(_ID, 1) + int_field(_MAPPING_FILE, self._text(title))
        mapping += b"".join(int_field(number, 1) for number in _MAPPING_HAS)
        comment = f"memtrace {trace.manifest.memtrace_version}: {title}"
        fields = [bytes_field(_MAPPING, mapping), int_field(_COMMENT, self._text(comment))]
        start_ns, epoch_ns = window_start_ns(trace), trace.manifest.t0_epoch_ns
        if epoch_ns is not None:
            fields.append(int_field(_TIME_NS, epoch_ns + start_ns))
        times = trace.columns("events", "time_ns")["time_ns"]
        if trace.has_times and len(times):
            fields.append(int_field(_DURATION_NS, max(0, int(times.max()) - start_ns)))
        return fields

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _label(self, key: str, text: str) -> bytes:
        if (key, text) not in self._labels:
            self._labels[key, text] = self._new_label(key, text)
        return self._labels[key, text]

    def _new_label(self, key: str, text: str) -> bytes:
        return bytes_field(
            _SAMPLE_LABEL, int_field(_LABEL_KEY, self._text(key)) + int_field(_LABEL_TEXT, self._text(text))
        )

    def _location_of(self, frame: Frame) -> int:
        function = self._functions.setdefault((frame.function, frame.file), len(self._functions) + 1)
        return self._locations.setdefault((function, frame.line), len(self._locations) + 1)

    def _location(self, identity: int, function: int, line: int) -> bytes:
        content = int_field(_LINE_FUNCTION, function) + int_field(_LINE_NUMBER, line)
        content = bytes_field(_LOCATION_LINE, content)
        return bytes_field(_LOCATION, int_field(_ID, identity) + int_field(_LOCATION_MAPPING, 1) + content)

    def _function(self, identity: int, name: str, file: str) -> bytes:
        number = self._text(name)
        content = (
            int_field(_ID, identity) + int_field(_FUNCTION_NAME, number) + int_field(_FUNCTION_SYSTEM_NAME, number)
        )
        return bytes_field(_FUNCTION, content + int_field(_FUNCTION_FILE, self._text(file)))
