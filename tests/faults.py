"""Real conditions under which files cannot be used: no permission, no locks, few open files, a failing disk."""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBC = ctypes.CDLL(None, use_errno=True)
OVERRIDE = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER: with these, root may do what modes forbid


def _capabilities(effective: int | None = None) -> int:
    """The effective capabilities of this thread among the first 32, after setting them."""
    head, sets = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    LIBC.capget(head, sets)
    values = list(struct.unpack("6I", sets.raw))
    if effective is not None:
        values[0] = effective
        assert LIBC.capset(head, struct.pack("6I", *values)) == 0
    return values[0]


@contextlib.contextmanager
def like_other_users() -> Iterator[None]:
    """Modes of files count for root too, in this thread."""
    before = _capabilities()
    _capabilities(before & ~sum(1 << number for number in OVERRIDE))
    try:
        yield
    finally:
        _capabilities(before)


def unprivileged() -> None:
    """Modes of files count from now on, also for root and in programs that this process starts."""
    for number in OVERRIDE:
        LIBC.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP
    _capabilities(_capabilities() & ~sum(1 << number for number in OVERRIDE))


def no_locks() -> None:
    """flock fails with ENOLCK from now on, as on a network file system without a lock server."""
    flock = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    code = [
        (0x20, 0, 0, 0),  # load the system call's number
        (0x15, 0, 1, flock),
        (0x06, 0, 0, 0x00050000 | errno.ENOLCK),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    assert LIBC.prctl(22, 2, filters) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def few_files(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_permission(path: Path) -> Iterator[None]:
    mode = path.stat().st_mode
    path.chmod(0)
    with like_other_users():
        yield
    path.chmod(mode)


@contextlib.contextmanager
def no_more_files(_path: Path) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/", os.O_RDONLY)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def failing_disk(path: Path) -> Iterator[None]:
    """Reading `path` meanwhile fails with EIO: it lies on a disk image that has lost its end."""
    image, folder = path.parent / "disk.img", path.parent
    content = path.read_bytes()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    disk = image.with_name("disk")
    disk.mkdir()

    def command(*words: object) -> bool:
        return subprocess.run([*map(str, words)], capture_output=True).returncode == 0

    if not (command("mkfs.ext4", "-q", "-O", "^has_journal", image) and command("mount", "-o", "loop", image, disk)):
        pytest.skip("needs mkfs.ext4 and the right to mount an image")
    (disk / path.name).write_bytes(content)
    command("umount", disk)
    first = subprocess.run(["debugfs", "-R", f"blocks /{path.name}", image], capture_output=True, text=True).stdout
    size = subprocess.run(["dumpe2fs", "-h", image], capture_output=True, text=True).stdout
    block = int(size.split("Block size:")[1].split()[0])
    assert command("mount", "-o", "loop,ro", image, disk)
    os.truncate(image, int(first.split()[0]) * block)
    subprocess.run(["sync"])
    Path("/proc/sys/vm/drop_caches").write_text("3")
    assert command("mount", "--bind", disk / path.name, path), folder
    try:
        yield
    finally:
        command("umount", path)
        command("umount", disk)


def environment(**variables: str) -> None:
    os.environ.update(variables)
