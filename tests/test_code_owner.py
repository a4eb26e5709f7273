"""Whose code a frame is, with and without knowing where the files of the recorded process lie."""

from __future__ import annotations

import json as standard_library_module
from collections.abc import Sequence

import pytest

import memtrace.trace
from memtrace.code_owner import CodeOwner, Owner
from memtrace.format.manifest import CodeLocations
from memtrace.frames import Frame

SITE_PACKAGES = "/venv/lib/python3.11/site-packages"
USER = Frame("/home/me/project/train.py", 12, "train")
TORCH = Frame(f"{SITE_PACKAGES}/torch/nn/modules/module.py", 1773, "_call_impl")
TIMM = Frame(f"{SITE_PACKAGES}/timm/models/resnet.py", 540, "forward")
LOCATIONS = CodeLocations(
    package_folders=(f"{SITE_PACKAGES}/",),
    internal_folders=(f"{SITE_PACKAGES}/torch/", "/usr/lib/python3.11/", "/cache/inductor/"),
    user_paths=(f"{SITE_PACKAGES}/mytrain/", "/home/me/.venv/bin/train"),
)


def owner_of(file: str, locations: CodeLocations | None = None, files: Sequence[str] = ()) -> Owner:
    """Return whose code a frame of a file is."""
    return CodeOwner(locations, files).owner(Frame(file, 1, "f"))


@pytest.mark.parametrize(
    "file",
    [
        TORCH.file, "torch/nn/functional.py", r"C:\Users\me\torch\nn\functional.py", r"C:\Python311\Lib\threading.py",
        "/opt/conda/lib/python3.12/threading.py", standard_library_module.__file__, memtrace.trace.__file__,
        "<frozen importlib._bootstrap>", "<string>", "<eval_with_key>.5", "<__array_function__ internals>", "??", "",
        "/build/aten/src/ATen/native/Linear.cpp", "libtorch_cpu.so", "/tmp/torchinductor_me/ab/cabc.py",
        "/tmp/me_pyg/tmp4rj/conv.py", "/tmp/torch_geometric.nn.conv.gcn_conv_GCNConv_propagate_abc.py",
    ],
)  # fmt: skip
def test_pytorch_python_and_generated_code_are_internal(file: str) -> None:
    assert owner_of(file) is Owner.INTERNAL
    if "torch/nn" not in file.replace("\\", "/") and "Python311" not in file and "conda" not in file:
        assert owner_of(file, LOCATIONS) is Owner.INTERNAL


@pytest.mark.parametrize(
    "file",
    [
        "train.py", USER.file, r"C:\me\train.py", "/home/me/cli/main.py", "<ipython-input-3-abc>", "<stdin>",
        "/tmp/ipykernel_12/345.py", "/home/me/torch/train.py", "/home/me/torch/models/net.py", "torch/train.py",
    ],
)  # fmt: skip
def test_the_program_belongs_to_the_user_also_in_a_folder_called_torch(file: str) -> None:
    assert owner_of(file) is Owner.USER
    assert owner_of(file, LOCATIONS) is Owner.USER


def test_pytorch_is_recognised_by_its_files_so_that_a_project_can_be_laid_out_like_it() -> None:
    project = "/home/me/torch/utils/data.py"
    assert owner_of(project) is Owner.INTERNAL  # nothing else is known of the trace
    assert owner_of(project, files=[TORCH.file]) is Owner.USER
    assert owner_of(TORCH.file, files=[TORCH.file]) is Owner.INTERNAL
    assert owner_of(project, LOCATIONS) is Owner.USER


def test_the_longest_known_folder_decides() -> None:
    assert owner_of(f"{SITE_PACKAGES}/mytrain/run.py", LOCATIONS) is Owner.USER
    assert owner_of(f"{SITE_PACKAGES}/mytrain_extra/run.py", LOCATIONS) is Owner.PACKAGE
    assert owner_of(TIMM.file, LOCATIONS) is owner_of(TIMM.file) is Owner.PACKAGE
    assert owner_of("/home/me/.venv/bin/train", LOCATIONS) is Owner.USER
    assert owner_of("/cache/inductor/ab/cabc.py", LOCATIONS) is Owner.INTERNAL
    assert owner_of("/later/site-packages/x.py", LOCATIONS) is Owner.PACKAGE


def test_code_given_on_the_command_line_belongs_to_the_user_where_that_is_known() -> None:
    assert owner_of("<string>") is Owner.INTERNAL
    assert owner_of("<string>", CodeLocations(user_paths=("<string>",))) is Owner.USER


def test_the_innermost_user_frame_is_below_library_frames() -> None:
    owner = CodeOwner()
    assert owner.innermost_user_frame([TORCH, USER, Frame("/home/me/main.py", 1, "<module>")]) == USER
    assert owner.innermost_user_frame([TORCH]) == TORCH
    assert owner.innermost_user_frame([]) is None


@pytest.mark.parametrize(
    ("stack", "site"),
    [
        ([Frame("x.cpp", 0, "at::_ops::mm::call(int)"), USER], "project/train.py:12 train"),
        ([Frame(r"C:\me\train.py", 3, "f")], "me/train.py:3 f"),
        ([TORCH, TIMM, TORCH, USER], "project/train.py:12 train → timm/models/resnet.py:540 forward"),
        ([TORCH, USER, TIMM], "project/train.py:12 train"),
        ([TORCH, TIMM, TORCH], "timm/models/resnet.py:540 forward"),
        ([TORCH], "modules/module.py:1773 _call_impl"),
        ([Frame("x.cpp", 0, "at::_ops::sum::redispatch(int)"), Frame("x.cpp", 0, "at::_ops::sum_to::call(int)")], "aten::sum_to (torch)"),
        (
            [Frame("x.cpp", 0, "at::_ops::mm::call(int)"), Frame("x.cpp", 0, "torch::autograd::generated::MmBackward0::apply(int)")],
            "MmBackward0 (autograd)",
        ),
        ([Frame("alloc.cpp", 0, "c10::malloc")], "alloc.cpp:0 c10::malloc"),
        ([], None),
    ],
)  # fmt: skip
def test_an_allocation_site_names_user_code_the_package_below_it_or_what_torch_ran(
    stack: list[Frame], site: str | None
) -> None:
    assert CodeOwner().format_site(stack) == CodeOwner(LOCATIONS).format_site(stack) == site
