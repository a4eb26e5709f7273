"""The cache of compiled modules: what is loaded from it, who can write to it, and its lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtrace.native_build import build_cache, build_lock
from memtrace.native_build.build_cache import BuildCache, CachedModule, CacheError, cache_folders

KEY = "0123456789abcdef"
MODULE = CachedModule(b"\x7fELF" + bytes(range(256)) * 16, "c++ -m64", "/cuda/include")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path) -> Iterator[BuildCache]:
    opened = BuildCache(folder)
    yield opened
    opened.close()


def give_to_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a path look as if it belonged to another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def test_a_stored_module_is_read_back(cache: BuildCache) -> None:
    assert cache.read_module(KEY) is None
    cache.store_module(KEY, MODULE)
    assert cache.read_module(KEY) == MODULE
    assert cache.read_module(KEY[::-1]) is None
    cache.store_module(KEY, CachedModule(b"another build", "g++", None))
    assert cache.read_module(KEY) == CachedModule(b"another build", "g++", None)


def test_only_the_user_can_write_to_a_new_cache_and_others_can_load_from_it(folder: Path) -> None:
    before = os.umask(0)
    try:
        cache = BuildCache(folder)
        cache.store_module(KEY, MODULE)
        with cache.locked(lambda: None):
            pass
        cache.close()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {".so": 0o644, ".json": 0o644, "": 0o600}  # the last one is the lock


def _flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / f"{KEY}.so").read_bytes())
    content[100] ^= 1
    (folder / f"{KEY}.so").write_bytes(content)


def _replace(name: str, content: bytes) -> object:
    return lambda folder: (folder / name).write_bytes(content)


def _link(name: str) -> object:
    def link(folder: Path) -> None:
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return link


def _pipe(name: str) -> object:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


def _record_of_another_key(folder: Path) -> None:
    for suffix in ("so", "json"):
        (folder / f"other.{suffix}").rename(folder / f"{KEY}.{suffix}")


@pytest.mark.parametrize(
    "damage",
    [
        _flip_a_bit,
        _replace(f"{KEY}.so", b""),
        _replace(f"{KEY}.so", MODULE.content[:-1]),
        _replace(f"{KEY}.so", MODULE.content + b"\0"),
        _replace(f"{KEY}.so", b"no module"),
        _replace(f"{KEY}.json", b""),
        _replace(f"{KEY}.json", b"{"),
        _replace(f"{KEY}.json", b"[]"),
        _replace(f"{KEY}.json", b"\xff"),
        _replace(f"{KEY}.json", b"[" * 50_000),
        _replace(f"{KEY}.json", b"{}" + b" " * 100_000),
        _replace(f"{KEY}.json", json.dumps({"key": KEY, "sha256": None, "compiler": 1, "cuda_headers": 2}).encode()),
        _link(f"{KEY}.so"),
        _link(f"{KEY}.json"),
        _pipe(f"{KEY}.so"),
        _pipe(f"{KEY}.json"),
        _record_of_another_key,
    ],
)
def test_a_damaged_module_is_not_read_and_can_be_stored_again(cache: BuildCache, folder: Path, damage: object) -> None:
    cache.store_module("other", CachedModule(b"other", "c++", None))
    cache.store_module(KEY, MODULE)
    assert callable(damage)
    damage(folder)
    assert cache.read_module(KEY) is None
    cache.store_module(KEY, MODULE)
    assert cache.read_module(KEY) == MODULE


@pytest.mark.parametrize("suffix", ["so", "json"])
def test_files_that_others_can_write_are_not_read(
    cache: BuildCache, folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store_module(KEY, MODULE)
    (folder / f"{KEY}.{suffix}").chmod(0o666)
    assert cache.read_module(KEY) is None
    (folder / f"{KEY}.{suffix}").chmod(0o600)
    assert cache.read_module(KEY) == MODULE
    give_to_another_user(folder / f"{KEY}.{suffix}", monkeypatch)
    assert cache.read_module(KEY) is None


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CacheError, match=r"can be written by other users \(mode \d+\); make it 700"):
        BuildCache(folder)
    folder.chmod(0o755)  # others may read it
    BuildCache(folder).close()


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    give_to_another_user(folder, monkeypatch)
    with pytest.raises(CacheError, match="belongs to another user"):
        BuildCache(folder)


def test_a_folder_exchanged_after_it_was_opened_is_not_read(cache: BuildCache, folder: Path) -> None:
    cache.store_module(KEY, MODULE)
    folder.rename(folder.with_name("moved"))
    folder.mkdir(mode=0o777)
    (folder / f"{KEY}.so").write_bytes(b"of an attacker")
    assert cache.read_module(KEY) == MODULE


def test_a_link_in_the_place_of_the_folder_is_refused(folder: Path) -> None:
    (folder.parent / "documents").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "documents")
    with pytest.raises(CacheError, match="cannot be used"):
        BuildCache(folder)


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/memtrace", "/dev/null"])
def test_a_folder_that_cannot_be_created_is_one_clear_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"cannot be used \(.+\); set MEMTRACE_CACHE"):
        BuildCache(tmp_path / path)


def test_a_write_that_fails_leaves_nothing(cache: BuildCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(CacheError, match="No space left"):
        cache.store_module(KEY, MODULE)
    monkeypatch.undo()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", ["precious", None])
def test_a_link_called_lock_is_not_followed(cache: BuildCache, folder: Path, content: str | None) -> None:
    target = folder.parent / "target"
    if content is not None:
        target.write_text(content)
    (folder / "lock").symlink_to(target)
    with pytest.raises(CacheError, match="symbolic link"), cache.locked(lambda: None):
        pass
    assert (target.read_text() if target.exists() else None) == content


@pytest.mark.parametrize("kind", ["folder", "pipe", "foreign", "writable"])
def test_only_a_file_of_the_users_can_be_the_lock(
    cache: BuildCache, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = folder / "lock"
    if kind == "folder":
        lock.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock, 0o600)
    else:
        lock.touch(0o600)
        if kind == "foreign":
            give_to_another_user(lock, monkeypatch)
        else:
            lock.chmod(0o666)
    with pytest.raises(CacheError), cache.locked(lambda: None):
        pass


def test_a_lock_keeps_others_out_until_it_is_released(cache: BuildCache, folder: Path) -> None:
    entered, order = threading.Event(), []

    def wait_for_lock() -> None:
        other = BuildCache(folder)
        with other.locked(entered.set):
            order.append("second")
        other.close()

    thread = threading.Thread(target=wait_for_lock)
    with cache.locked(lambda: None) as touch:
        thread.start()
        assert entered.wait(60)
        touch()
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_the_lock_of_a_process_that_does_nothing_is_ignored_after_a_while(
    cache: BuildCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_lock, "STALE_SECONDS", 0.3)
    waits: list[None] = []
    with (folder / "lock").open("w") as file:
        os.fchmod(file.fileno(), 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        with cache.locked(lambda: waits.append(None)) as touch:
            touch()  # does nothing: the lock is another's
    assert len(waits) == 1


def test_a_lock_that_is_touched_is_waited_for(cache: BuildCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a lock that nobody touches would be."""
    monkeypatch.setattr(build_lock, "STALE_SECONDS", 5)
    monkeypatch.setattr(build_lock, "_TOUCH_SECONDS", 0)
    seen: list[float] = []
    monkeypatch.setattr(time, "monotonic", _clock := FakeClock())
    monkeypatch.setattr(time, "sleep", lambda seconds: _clock.pass_time(1))
    path = folder / "lock"
    with path.open("w") as file:
        os.fchmod(file.fileno(), 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)

        def touch_twelve_times() -> None:
            if len(seen) < 12:
                seen.append(_clock.now)
                os.utime(file.fileno(), ns=(len(seen), len(seen)))

        _clock.on_pass = touch_twelve_times
        with cache.locked(lambda: None):
            pass
    assert seen == list(range(1, 13))
    assert 12 + 5 < _clock.now < 12 + 5 + 4


class FakeClock:
    """A monotonic clock in seconds that passes only when ``pass_time`` is called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_pass = lambda: None

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.on_pass()


def test_the_lock_ends_with_a_killed_process(cache: BuildCache, folder: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from memtrace.native_build.build_cache import BuildCache\n"
        "with BuildCache(Path(sys.argv[1])).locked(lambda: None):\n"
        "    print('locked', flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        waits: list[None] = []

        def kill_the_holder() -> None:
            waits.append(None)
            holder.send_signal(signal.SIGKILL)

        with cache.locked(kill_the_holder):
            assert waits == [None]


@pytest.fixture
def no_file_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot lock files."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)


@pytest.mark.usefixtures("no_file_locks")
def test_without_file_locks_a_file_keeps_others_out(cache: BuildCache, folder: Path) -> None:
    with cache.locked(lambda: pytest.fail("nobody to wait for")):
        pass
    assert not (folder / build_lock.EXCLUSIVE_NAME).exists()
    test_a_lock_keeps_others_out_until_it_is_released(cache, folder)


@pytest.mark.usefixtures("no_file_locks")
def test_without_file_locks_a_killed_holder_is_waited_for_once(
    cache: BuildCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / build_lock.EXCLUSIVE_NAME).touch()
    monkeypatch.setattr(time, "monotonic", clock := FakeClock())
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.pass_time(1))
    waits: list[None] = []
    for _ in range(2):
        with cache.locked(lambda: waits.append(None)):
            pass
    assert len(waits) == 1
    assert build_lock.STALE_SECONDS < clock.now < build_lock.STALE_SECONDS + 4


@pytest.mark.usefixtures("no_file_locks")
def test_without_any_lock_the_cache_is_used_without(cache: BuildCache, folder: Path) -> None:
    (folder / build_lock.EXCLUSIVE_NAME).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_lock, "STALE_SECONDS", -1)
        with cache.locked(lambda: None):
            pass
    assert (folder / build_lock.EXCLUSIVE_NAME).is_dir()


def test_failures_are_remembered(cache: BuildCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store_failure(KEY, "no such header", is_transient=False)
    cache.store_failure("full", "disk full", is_transient=True)
    assert (cache.read_failure(KEY), cache.read_failure("full"), cache.read_failure("other")) == (
        "no such header",
        "disk full",
        None,
    )
    now = time.time()
    for later, remembered in ((-10, None), (build_cache.RETRY_SECONDS + 10, None), (10, "disk full")):
        monkeypatch.setattr(time, "time", lambda later=later: now + later)
        assert (cache.read_failure(KEY), cache.read_failure("full")) == ("no such header", remembered)
    (folder / f"{KEY}.failed.json").write_text('{"key": 1, "message": 2, "retry_after_epoch_s": "soon"}')
    assert cache.read_failure(KEY) is None


def account_home() -> Path:
    return Path(pwd.getpwuid(os.geteuid()).pw_dir)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MEMTRACE_CACHE": "{tmp}/mine"}, ["{tmp}/mine"]),
        ({"MEMTRACE_CACHE": "{tmp}/link"}, ["{tmp}/real"]),
        ({"MEMTRACE_CACHE": "", "HOME": "{tmp}"}, ["{tmp}/.cache/memtrace"]),
        ({"XDG_CACHE_HOME": "{tmp}/xdg", "HOME": "{tmp}"}, ["{tmp}/xdg/memtrace"]),
        ({"XDG_CACHE_HOME": "relative", "HOME": "{tmp}"}, ["{tmp}/.cache/memtrace"]),
        ({"XDG_CACHE_HOME": "", "HOME": "{tmp}"}, ["{tmp}/.cache/memtrace"]),
        ({"HOME": "/nonexistent"}, []),
        ({"HOME": ""}, ["{account}/.cache/memtrace"]),
        ({"HOME": "relative"}, ["{account}/.cache/memtrace"]),
        ({}, ["{account}/.cache/memtrace"]),
    ],
)
def test_the_folder_follows_the_environment(
    environment: dict[str, str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("MEMTRACE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folders = [Path(text.format(tmp=tmp_path, account=account_home())) for text in expected]
    if not environment.get("MEMTRACE_CACHE"):
        folders.append(tmp_path / f"memtrace-{os.geteuid()}")
    assert list(cache_folders()) == [Path(os.path.realpath(folder)) for folder in folders]


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_read_only_cache_comes_before_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writable: bool
) -> None:
    (tmp_path / "image").mkdir()
    for name, value in {"MEMTRACE_CACHE": "image", "XDG_CACHE_HOME": "xdg", "TMPDIR": ""}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setattr(os, "access", lambda path, mode: is_writable)
    own = (tmp_path / "xdg" / "memtrace", tmp_path / f"memtrace-{os.geteuid()}")
    assert cache_folders() == (tmp_path / "image", *(() if is_writable else own))


def test_a_user_without_an_account_and_home_has_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MEMTRACE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    assert cache_folders() == (tmp_path / "memtrace-4000000000",)
