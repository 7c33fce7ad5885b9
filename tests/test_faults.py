"""Faults of the system and of the user, by their kind: each ends in one line, and no healthy file is lost."""

import contextlib
import dataclasses
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import faults
import methods
import numpy as np
import planted
import pytest
import torch
from methods import ScriptProcess, finish, python, wait_until

import lapo
import make_dataset
import make_figures
import make_masks
import masklam
import reproduce
from common import report, runs, store
from common.cli import PathComponent, UserError, checked, declared_range
from common.dataset import Dataset
from common.shards import read_derived, read_shard, write_derived
from common.weights import read_weights

PAGE = b"<!DOCTYPE html>\n<html><body>404: Not Found</body></html>\n"
LAM = methods.TINY | {"idm_scale": 1, "fdm_scale": 1, "stages": "lam", "lam_updates": 2, "device": "cpu"}
WHOLE = LAM | {"stages": "all", "policy_updates": 1, "decoder_updates": 1, "eval_steps": 3, "eval_episodes": 1}
DATASET = "--quick --backgrounds synthetic --num-videos 1 --image-size 32 --episode-length 10 --train-transitions 20"
DATASET += " --test-transitions 20 --workers 1 --data-dir"


def one_line(done: subprocess.CompletedProcess, *parts: object) -> str:
    """The last line of what a script said, which has all `parts`; it ended with code 1 and without a traceback."""
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    line = done.stderr.rstrip().splitlines()[-1]
    assert ": error: " in line and all(str(part) in line for part in parts), line
    return line


def run(script: str, output: Path, prepare: Callable[[], object] | None = None, **values: Any):
    """Runs a script, not make_dataset.py, with these arguments."""
    return ScriptProcess(script, methods.words(values), output, prepare=prepare).wait()


@pytest.fixture
def data(planted_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(planted_dir, tmp_path / "data")


@pytest.fixture
def given(data: Path, tmp_path: Path) -> Path:
    return planted.write_given_masks(data, tmp_path / "given")


def importing(data: Path, given: Path) -> dict[str, Any]:
    return {"data_dir": data, "import": given, "name": "mine", "split": "test", "render": "distractor"}


# --- errors of the system end in one line


def writers(tmp_path: Path, data: Path, given: Path, closed: Path) -> dict[str, dict[str, Any]]:
    """Scripts, and arguments with which they would write into the folder `closed`, which may be `data`."""
    runs_dir = tmp_path / "runs"
    tiny = {name: value for name, value in LAM.items() if name not in ("fdm_scale", "idm_scale")}
    flow = tiny | methods.OWN["laof"] | methods.FROZEN["laof"] | {"raft_checkpoint": methods.raft_checkpoint(tmp_path)}
    return {
        "masklam": LAM | {"data_dir": data, "runs_dir": closed},
        "laof": flow | {"data_dir": data, "runs_dir": runs_dir},
        "make_masks": importing(data, given),
        "make_figures": {"runs_dir": runs_dir, "out": closed},
        "make_experts": {"output_dir": closed},
        "reproduce": {"env": "cheetah-run", "seeds": 1, "methods": "LAPO", "data_dir": data, "runs_dir": closed},
    }


@pytest.mark.parametrize("script", ["masklam", "laof", "make_masks", "make_figures", "make_experts", "reproduce"])
def test_a_folder_that_may_not_be_written(script: str, data: Path, given: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    if script == "make_figures":
        written_run(tmp_path / "runs")
    arguments = writers(tmp_path, data, given, closed)[script]
    folders = [closed, *(folder for folder in (data / "cheetah-run").iterdir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        before = methods.contents(data)
        done = run(script, tmp_path / "output", faults.unprivileged, **arguments)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    where = data / "cheetah-run" if script in ("laof", "make_masks") else closed
    assert ".part" not in one_line(done, where, "Permission denied", "choose another folder")
    assert methods.contents(data) == before and not list(closed.iterdir())


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (faults.unprivileged, ("Permission denied", "choose another folder")),
        (faults.no_locks, ("No locks available", "its file system knows no locks")),
        (functools.partial(faults.few_files, 12, 12), ("Too many open files", "ulimit -n")),
    ],
)
def test_make_dataset_where_it_cannot_write(fault: Callable[[], None], advice: tuple[str, ...], tmp_path: Path) -> None:
    tmp_path.chmod(0o555 if fault is faults.unprivileged else 0o755)
    done = finish(python("make_dataset.py", *DATASET.split(), tmp_path / "made", preexec_fn=fault))
    tmp_path.chmod(0o755)
    one_line(done, *advice)
    assert not list(tmp_path.rglob("*.h5"))


def test_a_file_system_without_locks(data: Path, given: Path, tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    done = run("masklam", tmp_path / "a", faults.no_locks, **LAM, data_dir=data, runs_dir=runs_dir)
    one_line(done, runs_dir, "No locks available", "its file system knows no locks")
    one_line(run("make_masks", tmp_path / "b", faults.no_locks, **importing(data, given)), data, "knows no locks")


def test_many_shards_under_a_low_limit_of_open_files(tmp_path: Path) -> None:
    """The soft limit is raised; a hard one that is too low is told."""
    data = planted.write(tmp_path / "data", train=220, test=220, shards=220, length=2, size=16)
    shutil.rmtree(data / "cheetah-run/test")
    shutil.copytree(planted.write(tmp_path / "few", length=2, size=16) / "cheetah-run/test", data / "cheetah-run/test")
    arguments = LAM | {"data_dir": data, "runs_dir": tmp_path / "runs"}
    done = run("masklam", tmp_path / "a", functools.partial(faults.few_files, 128, 1000), **arguments)
    assert done.returncode == 0, done.stderr
    done = run("masklam", tmp_path / "b", functools.partial(faults.few_files, 128, 128), **arguments, variant="other")
    one_line(done, data, ".h5: Too many open files", "raise the limit of open files with ulimit -n")


def test_cleaning_up_does_not_hide_the_first_error(tmp_path: Path) -> None:
    """The folder is closed while a file is made: neither its claim nor its temporary file can be removed."""
    path = tmp_path / "00000.h5"
    with (
        faults.like_other_users(),
        pytest.raises(OSError) as caught,
        store.claim(path),
        store.atomic_path(path) as part,
    ):
        part.touch()
        tmp_path.chmod(0o555)
        raise OSError(errno.EIO, "the first error")
    tmp_path.chmod(0o755)
    assert caught.value.errno == errno.EIO and caught.value.filename == str(path)
    store.remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


# --- what cannot be read is not damaged


def written_run(runs_dir: Path, seed: int = 1) -> Path:
    """The directory of a finished run without networks."""
    return methods.write_run(runs_dir, "lapo", "cheetah-run", seed, decoders={128_000: 0.5})


def readers(data: Path, tmp_path: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Kinds of files, each with one of the kind and what reads it and would make it again if it were damaged."""
    shard = read_shard(data / "cheetah-run/test/00000.h5")
    mask, flow = (write_derived(shard, name, {"x": np.zeros(3)}, {"method": "import"}) for name in ("mine", "raft"))
    plan = make_dataset.Split(data / "cheetah-run/test", shard.plan)
    job = make_masks.Job(Dataset(data, "cheetah-run", "test"), ("distractor",), None, "mine", {"method": "import"})
    first = methods.open_run(tmp_path / "runs")
    checkpoint = first.save("lam", 3, {"x": torch.zeros(9)})
    first.finish("policy", 1, {"cost": {}})
    first.once("latents", lambda: torch.zeros(2))
    first.close()
    finished = written_run(tmp_path / "others")
    return {
        "shard": (shard.path, lambda: plan.is_missing(shard.path)),
        "masks": (mask, lambda: make_masks.finished(job, shard)),
        "flow": (flow, lambda: read_derived(shard, "raft")),
        "checkpoint": (checkpoint, lambda: runs.read_checkpoint(checkpoint)),
        "newest checkpoint": (checkpoint, lambda: first.restore("lam")),
        "stage": (first.dir / "policy.pt", lambda: first.finished("policy")),
        "table": (first.dir / "tables/latents.pt", lambda: first.once("latents", lambda: pytest.fail("made again"))),
        "arguments": (first.dir / "args.json", lambda: methods.open_run(tmp_path / "runs")),
        "result": (finished / "result.json", lambda: runs.is_finished(finished, lapo.Args())),
    }


KINDS = ["shard", "masks", "flow", "checkpoint", "newest checkpoint", "stage", "table", "arguments", "result"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "number"), [(faults.no_permission, errno.EACCES), (faults.no_more_files, errno.EMFILE)]
)
def test_what_cannot_be_opened_is_not_damaged(kind: str, fault: Any, number: int, data: Path, tmp_path: Path) -> None:
    path, read = readers(data, tmp_path)[kind]
    for stage in ("policy", "latents"):  # so that only the checkpoint is in question
        if kind == "newest checkpoint":
            next((tmp_path / "runs/lapo/cheetah-run/test/seed1").rglob(f"{stage}.pt")).unlink()
    before = methods.contents(data) | methods.contents(tmp_path)
    with pytest.raises(OSError) as caught, fault(path):
        read()
    assert caught.value.errno == number and (number == errno.EMFILE or caught.value.filename == str(path))
    assert methods.contents(data) | methods.contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["shard", "masks", "flow", "checkpoint"])
def test_a_failing_disk_is_no_damage(kind: str, data: Path, tmp_path: Path) -> None:
    path, read = readers(data, tmp_path)[kind]
    content = path.read_bytes()
    with faults.failing_disk(path), pytest.raises(OSError) as caught:
        read()
    assert caught.value.errno == errno.EIO and caught.value.filename == str(path) and path.read_bytes() == content


# --- bad content of files that were read whole

CONTENTS: dict[str, bytes | None] = {
    "empty": b"",
    "no JSON": b'{"metrics": ',
    "a list": b"[]",
    "an object": b"{}",
    "null": b"null",
    "other types": b'{"metrics": [], "decoders": [1], "stages": 3, "num_labels": 5, "data_dir": 1, "seconds": null}',
    "no UTF-8": b'{"a": "\xff"}',
    "a folder": None,
    "no permission": b"{}",
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["args.json", "result.json"])
def test_a_bad_file_of_a_run_is_named_and_loses_no_other_run(name: str, content: str, tmp_path: Path) -> None:
    written_run(tmp_path, seed=1)
    path = written_run(tmp_path, seed=2) / name
    path.unlink()
    if CONTENTS[content] is None:
        path.mkdir()
    else:
        path.write_bytes(CONTENTS[content])
        path.chmod(0 if content == "no permission" else 0o644)
    args = lapo.Args(runs_dir=tmp_path, seed=2)
    with faults.like_other_users():
        found, problems = report.find_runs(tmp_path)
        with pytest.raises((UserError, OSError), match=str(path.parent)):
            if name == "result.json":
                assert not reproduce.is_finished(path.parent, args)
                runs.is_finished(path.parent, args)
            else:
                runs.Run(args, "lapo", "default", {})
    assert [one.seed for one in found] == [1] and len(problems) == 1 and str(path) in problems[0]
    assert "\n" not in problems[0]
    assert ("remove the run" in problems[0]) == (content not in ("no permission", "a folder"))
    (table, *_) = make_figures.score_tables(make_figures.Context(make_figures.Args(tmp_path, tmp_path / "out"), found))
    assert any("0.5000" in entry.text for row in table.rows for entry in row)


def test_a_changed_byte_of_a_result_is_found(tmp_path: Path) -> None:
    """Wherever it lies: the file is damaged, or holds the same values."""
    path = written_run(tmp_path) / "result.json"
    good, values, args = path.read_bytes(), store.read_json(path), lapo.Args()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with contextlib.suppress(store.Damaged):
            assert store.read_json(path).items() >= values.items(), position
    path.write_bytes(good.replace(b"0.625", b"0.125", 1))
    with pytest.raises(UserError, match=r"result\.json is damaged; remove it and rerun"):
        runs.is_finished(path.parent, args)
    assert "was it edited?" in report.find_runs(tmp_path)[1][0]
    for content in (b"", b"[]", b"null", b'"x"', b"\xff"):  # a control's number, which is then computed again
        path.write_bytes(content)
        with pytest.raises(store.Damaged, match=f"{path} is damaged"):
            store.read_json(path, float)


@pytest.mark.parametrize("content", [PAGE, b"", None])
def test_bad_latents_and_weights_of_a_run_are_named(content: bytes | None, tmp_path: Path) -> None:
    """One line each, which make_figures.py shows in place of the picture."""
    folder = written_run(tmp_path)
    run = report.read_run(folder)
    for name, read in (("latents.npz", report.load_latents), ("lam.pt", report.load_model)):
        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=str(folder / name)) as caught:
            read(run)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.safetensors"])
@pytest.mark.parametrize(
    ("content", "message"), [(PAGE, "is a web page"), (b"", "is something else"), (b"PK\3\4", "is something else")]
)
def test_something_else_as_a_file_of_weights(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    """The reader of RAFT's, DINOv2's and SAM's."""
    (tmp_path / name).write_bytes(content)
    for inside in (None, "model"):
        with pytest.raises(UserError) as caught:
            read_weights(tmp_path / name, "--checkpoint", inside)
        text = str(caught.value)
        assert text.startswith(f"--checkpoint {tmp_path / name}: {message}") and "weights_only" not in text
        assert "expected is a file of weights (.pt, .pth or .safetensors)" in text and "\n" not in text


def test_a_file_that_holds_no_weights_or_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    with pytest.raises(UserError, match=rf"--checkpoint {path}: no such file"):
        read_weights(path, "--checkpoint")
    for content in ([1, 2], {"a": 1}):
        torch.save(content, path)
        with pytest.raises(UserError, match=rf"--checkpoint {path}: holds no plain dictionary of weights"):
            read_weights(path, "--checkpoint")
    torch.save({"model": {"a": torch.zeros(100_000)}}, path)
    whole = path.read_bytes()
    for length in (1_000, 60_000, 200_000):  # below 128 KiB libraries ask for places before its beginning
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="expected is a file of weights"):
            read_weights(path, "--checkpoint", "model")


# --- what a user types


def test_a_home_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["script.py"])
    (tmp_path / "file").touch()
    seen = set()
    for default in methods.command_lines().values():
        fields = {field.name: str(field.type).replace("PathComponent", "") for field in dataclasses.fields(default)}
        for name in (name for name, kind in fields.items() if "Path" in kind or name == "backgrounds"):
            kind, several = str if name == "backgrounds" else Path, isinstance(getattr(default, name), (list, tuple))
            typed = {word: [kind(word)] if several else kind(word) for word in ("~/x", "~nobody-here/x", "~/file/x")}
            expanded = getattr(checked(dataclasses.replace(default, **{name: typed["~/x"]})), name)
            assert str(expanded[0] if several else expanded) == f"{tmp_path}/x"
            for word, refused in (("~nobody-here/x", kind is Path), ("~/file/x", name.endswith("_dir"))):
                if refused:
                    with pytest.raises(UserError, match=r"no such home|file is a file where a folder should be"):
                        checked(dataclasses.replace(default, **{name: typed[word]}))
            seen.add(name)
    assert seen >= {"backgrounds", "compare", "checkpoint", "out", "data_dir", "runs_dir"}


BAD_NAMES = ["a/b", "../x", "..", ".", "a" * 201, "ä" * 101, "a\tb", "a\nb", "a\x7fb", "\udcff"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_cannot_be_a_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])
    found = []
    for script, default in methods.command_lines().items():
        for field, annotation in get_type_hints(type(default), include_extras=True).items():
            if isinstance(declared_range(annotation), PathComponent):
                with pytest.raises(UserError, match=f"--{field.replace('_', '-')} "):
                    checked(dataclasses.replace(default, **{field: name}))
                found.append((script, field))
    assert set(found) >= {(script, field) for script in methods.SCRIPTS for field in ("env", "variant")}
    assert {*found} >= {("masklam", "mask_source"), ("make_masks", "name"), ("export_latents", "data")}


def test_the_longest_names_fit(data: Path) -> None:
    """With what is put around them: of a shard's masks, of a claim, of a temporary file."""
    shard = read_shard(data / "cheetah-run/test/00000.h5")
    name = "ä" * 100
    with store.claim(write_derived(shard, name, {"x": np.zeros(3)}, {})):
        assert read_derived(shard, name).arrays["x"].size == 3
    args = masklam.Args(mask_source="ä" * 100, lam_lr=1 / 3, policy_lr=1 / 7)
    assert len(runs.variant_name(args, masklam.Args()).encode()) <= 180


def test_names_that_are_not_utf8_and_a_poor_locale(tmp_path: Path) -> None:
    """The locale C, without Python's own remedies: ± on the output is no reason to stop, bad names are refused."""
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for script, flag in (("make_dataset", "--backgrounds"), ("make_figures", "--out")):
        done = finish(python(f"{script}.py", flag, f"{tmp_path}/\udcff", env=environment))
        one_line(done, "\\udcff", "is not in UTF-8")
        assert not list(tmp_path.iterdir())
    seeds = [written_run(tmp_path / "ü", seed) for seed in (1, 2)]
    link = tmp_path / "plain"
    link.symlink_to(tmp_path / "ü")
    folders = [link / seed.relative_to(tmp_path / "ü") for seed in seeds]
    done = finish(python("make_figures.py", "--compare", *folders, env=environment))
    assert done.returncode == 0 and r"0.5000 \xb1 0.0000" in done.stdout, done.stderr


# --- what a run needs at its end is tried before its start


def test_opengl_is_tried_before_the_first_stage(planted_dir: Path, tmp_path: Path) -> None:
    prepare = functools.partial(faults.environment, MUJOCO_EGL_DEVICE_ID="50")
    done = run("masklam", tmp_path / "output", prepare, **WHOLE, data_dir=planted_dir, runs_dir=tmp_path / "runs")
    one_line(done, "MUJOCO_EGL_DEVICE_ID=50")
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("environment", [{}, {"WANDB_API_KEY": "short"}, {"WANDB_MODE": "nonsense"}])
def test_track_without_a_login_is_one_line(environment: dict[str, str], planted_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    login = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    prepare = functools.partial(faults.environment, **login | environment)
    words = methods.words(LAM | {"data_dir": planted_dir, "runs_dir": tmp_path / "runs"})
    done = ScriptProcess("lapo", [*words, "--track"], tmp_path / "output", prepare=prepare).wait()
    one_line(done, "--track: wandb cannot start", "`wandb login`", "WANDB_MODE=offline")


def test_masks_that_are_empty(data: Path, capsys: pytest.CaptureFixture) -> None:
    """Refused if all of them are, and told if most are; before there is a run."""
    for share, name in ((0, "none"), (0.25, "few")):
        for split in ("train", "test"):
            shard = read_shard(data / f"cheetah-run/{split}/00000.h5")
            masks = shard.arrays["distractor/mask"].copy()
            masks[np.arange(len(masks)) % 4 >= 4 * share] = 0
            write_derived(shard, name, {"distractor/mask": masks}, {})
    args = masklam.Args(data_dir=data, mask_source="few")
    assert masklam.open_split(args, "train").mask_source == "few"
    assert "masks 'few' of the distractor render: 75% are empty" in capsys.readouterr().err
    with pytest.raises(UserError, match="masks 'none' of the distractor render are all empty"):
        masklam.open_split(dataclasses.replace(args, mask_source="none"), "train")


# --- signals


def test_a_signal_ends_the_wait_for_another_process(data: Path, given: Path, tmp_path: Path) -> None:
    output = tmp_path / "output/stdout"
    with store.claim(data / "cheetah-run/test/00000.mine.h5"):
        process = ScriptProcess("make_masks", methods.words(importing(data, given)), tmp_path / "output")
        process.until(lambda: output.exists() and "waiting" in output.read_text())
        process.signal(signal.SIGUSR2)
        done = process.wait()
    assert done.returncode == 128 + signal.SIGUSR2 and "rerun the same command to resume" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_to_all_processes_of_make_dataset(number: int, tmp_path: Path) -> None:
    """While its workers import: they say nothing, and it ends as after any stop."""
    words = ("make_dataset.py", *DATASET.split(), tmp_path / "made", "--workers", "2")
    default = functools.partial(signal.signal, number, signal.SIG_DFL)
    process = python(*words, start_new_session=True, preexec_fn=default)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def workers_import() -> bool:
        pids = children.read_text().split()
        return any(b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)

    wait_until(workers_import, process)
    os.killpg(process.pid, number)
    done = finish(process)
    assert done.returncode == 128 + number and "Traceback" not in done.stderr, done.stderr
    assert "rerun the same command to resume" in done.stderr
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
