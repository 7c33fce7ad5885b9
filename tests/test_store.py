"""common/store.py: files appear complete or not at all, damage is refused, and processes fill a folder together."""

import resource
import signal
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from methods import python, wait_until

from common import store
from common.cli import FULL_DISK, UserError

RNG = np.random.default_rng(0)
ARRAYS = {
    "episode_start": np.array([0, 3, 9], np.int64),
    "clean/frames": RNG.integers(0, 256, (9, 64, 64, 3), np.uint8),  # large: only `verify` reads it
    "reward": RNG.random(9, np.float32),
    "empty": np.empty((0, 4), np.float64),
}
ATTRIBUTES = {"name": "Träger", "nested": {"list": [1, 2.5, None]}}
ABOUT = {"command": "python make_it.py"}


def write(folder: Path, **changes) -> Path:
    arguments = {"arrays": ARRAYS, "attributes": ATTRIBUTES, "about": ABOUT}
    store.write(folder / "00000.h5", **arguments | changes)
    return folder / "00000.h5"


def start(code: str, *words: object) -> subprocess.Popen:
    """A process that runs `code` on the store, in which `path(i)` is the i-th file of a folder, the first word."""
    head = "import os, signal, sys, time\nfrom pathlib import Path\nimport numpy as np\nfrom common import store\n"
    head += "folder = Path(sys.argv[1])\npath = lambda i: folder / f'{i:05d}.h5'\n"
    return python("-c", head + code, *words)


def test_round_trip(tmp_path):
    attributes = ATTRIBUTES | {"many": list(range(30_000))}  # more than an HDF5 header can hold
    path = write(tmp_path, attributes=attributes)
    stored = store.read(path)
    assert stored.attributes == attributes and stored.about == ABOUT and stored.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(stored.arrays[name], array)
        assert stored.arrays[name].dtype == array.dtype and not (array.size and stored.arrays[name].flags.writeable)
    assert [len(stored.hashes[name]) for name in ("clean/frames", "reward", "episode_start")] == [2, 2, 1]
    store.verify(stored)
    assert [file.name for file in tmp_path.iterdir()] == ["00000.h5"]
    with h5py.File(path, "r") as file:  # other programs can read it
        np.testing.assert_array_equal(file["reward"], ARRAYS["reward"])


def test_hash_is_of_content_alone(tmp_path):
    good = write(tmp_path / "a")
    assert write(tmp_path / "b").read_bytes() == good.read_bytes()
    expected = store.read(good).content_hash
    assert store.read(write(tmp_path / "c", about={"command": "another"})).content_hash == expected
    for changes in (
        {"attributes": ATTRIBUTES | {"name": "x"}},
        {"arrays": {name.replace("reward", "return"): array for name, array in ARRAYS.items()}},
        {"arrays": ARRAYS | {"reward": ARRAYS["reward"].view(np.int32)}},
        {"arrays": ARRAYS | {"clean/frames": ARRAYS["clean/frames"][::-1]}},
    ):
        assert store.read(write(tmp_path / "d", **changes)).content_hash != expected


def refused(path: Path, error: type[Exception] = store.Damaged) -> str:
    with pytest.raises(error) as caught:
        store.verify(store.read(path))
    message = str(caught.value)
    assert caught.type is error
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def test_flipped_bits_anywhere(tmp_path):
    """Of the header, every bit that matters is noticed; the others are padding, or belong to `about`."""
    path = write(tmp_path, arrays={"reward": ARRAYS["reward"]})
    good, before = path.read_bytes(), store.read(path)
    noticed = 0
    for position in range(0, len(good), 23):
        data = bytearray(good)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        try:
            after = store.read(path)
        except UserError as error:
            assert str(path) in str(error)
            noticed += 1
            continue
        assert after.content_hash == before.content_hash and after.attributes == before.attributes
        np.testing.assert_array_equal(after.arrays["reward"], ARRAYS["reward"])
    assert noticed > 20


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "not a readable file"),
        (lambda data: data[:5000], "truncated"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:40_000] + bytes(len(data) - 40_000), ""),  # a partial copy
        (lambda data: b"hello", "not a readable file"),
    ],
)
def test_whatever_else_is_in_the_file(tmp_path, damage, reason):
    path = write(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert reason in refused(path)
    path.unlink()
    assert "no such file" in refused(path)


def test_edited_header_and_former_format(tmp_path):
    path = write(tmp_path)
    with h5py.File(path, "r+") as file:
        file.attrs["attributes"] = "{}"
    assert "header" in refused(path)
    with h5py.File(path, "w") as file:
        file.attrs.update({"format_version": 1, "command": "python make_dataset.py --env push"})
    message = refused(path, UserError)
    assert "format version 1" in message
    assert f"remove {tmp_path} and make its files again with: python make_dataset.py --env push" in message


@pytest.mark.parametrize("kind", ["a limit of file size", "a small disk"])
def test_full_disk(tmp_path, kind):
    small_disk = kind == "a small disk"
    if small_disk and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not small_disk:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, limits[1]))
        with pytest.raises(OSError) as caught:
            write(tmp_path)
        assert caught.value.filename == str(tmp_path / "00000.h5") and caught.value.errno in FULL_DISK
        assert not list(tmp_path.iterdir())
        store.read(write(tmp_path, arrays={"reward": ARRAYS["reward"]}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if small_disk:
            subprocess.run(["umount", tmp_path], check=True)


def test_killed_between_writing_and_renaming(tmp_path):
    """What it leaves is removed by the next one that makes the file, or by `remove_leftovers`."""
    code = """
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
with store.claim(path(0)):
    store.write(path(0), {"x": np.zeros(3)}, {})
"""
    for clean in (lambda: write(tmp_path).unlink(), lambda: store.remove_leftovers(tmp_path)):
        assert start(code, tmp_path).wait() == -signal.SIGKILL
        assert sorted(file.suffix for file in tmp_path.iterdir()) == [".claim", ".h5"]
        clean()
        assert not [file for file in tmp_path.iterdir() if file.suffix == ".h5"]


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path):
    """Of any file that is written, also without a claim; the temporary file of a live process stays."""
    code = """
with store.atomic_path(folder / "picture.png") as temporary:
    temporary.write_text("x")
    (folder / "there").touch()
    time.sleep(600)
"""
    live = start(code, tmp_path)
    wait_until((tmp_path / "there").exists, live)
    with store.atomic_path(tmp_path / "picture.png") as temporary:
        temporary.write_text("y")
    assert len(list(tmp_path.glob(".picture.png.*.part.png"))) == 1
    live.kill()
    live.wait()
    with store.atomic_path(tmp_path / "picture.png") as temporary:
        temporary.write_text("z")
    assert not list(tmp_path.glob(".picture.png.*")) and (tmp_path / "picture.png").read_text() == "z"


FILL = """
def make(file):
    if not list(folder.glob(f"*.{sys.argv[2]}")):  # the first one waits until both are at work
        while len(list(folder.glob(".*.claim"))) < 2 and len(list(folder.glob("*.h5"))) < 11:
            time.sleep(0.01)
    file.with_suffix("." + sys.argv[2]).touch(exist_ok=False)
    store.write(file, {"x": np.zeros(3)}, {})
store.fill(lambda: map(path, range(12)), lambda file: not file.exists(), make)
"""


def test_two_processes_make_every_file_once(tmp_path):
    processes = [start(FILL, tmp_path, name) for name in ("first", "second")]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    makers = sorted(file.name for file in tmp_path.iterdir() if file.suffix != ".h5")
    assert [name[:5] for name in makers] == [f"{number:05d}" for number in range(12)]
    assert {name[6:] for name in makers} == {"first", "second"}
    assert len(list(tmp_path.glob("*.h5"))) == 12


def test_fill_looks_again_after_every_file(tmp_path):
    """What others made meanwhile may decide how many more are needed, as on Meta-World."""
    looks, makes = [], []

    def paths() -> list[Path]:
        looks.append(len(makes))
        return [tmp_path / f"{number:05d}.h5" for number in range(3)]

    def make(path: Path) -> None:
        store.write(path, {"x": np.zeros(3)}, {})
        makes.append(path)

    store.fill(paths, lambda path: not path.exists(), make)
    assert looks == [0, 1, 2, 3] and makes == paths()


def test_file_of_a_killed_process_is_made_by_another(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "POLL_SECONDS", 0.01)
    process = start("with store.claim(path(0)):\n    time.sleep(600)", tmp_path)
    wait_until(lambda: list(tmp_path.glob(".*.claim")), process)
    store.remove_leftovers(tmp_path)
    assert list(tmp_path.glob(".*.claim"))  # of a live process
    path, looks, makes = tmp_path / "00000.h5", [], []

    def paths() -> list[Path]:
        looks.append(path)
        if len(looks) == 3:
            process.kill()
            process.wait()
        return [path]

    def make(path: Path) -> None:
        makes.append(len(looks))
        store.write(path, {"x": np.zeros(3)}, {})

    store.fill(paths, lambda path: not path.exists(), make)
    assert makes == [3] and list(tmp_path.iterdir()) == [path]
    assert capsys.readouterr().out.count("waiting for another process") == 1
