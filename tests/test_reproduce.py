"""The paper's experiments: what each consists of, a real grid with a failing run and an interrupt, and a real Slurm."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import planted
import pytest
import tyro
from methods import ROOT, finish, python, wait_until

import reproduce
from common import cli, runs
from common.cli import Stopped, UserError
from common.store import lock_file
from common.tasks import TASKS
from reproduce import Args, Job, RunJob

TINY = (
    "idm-scale=1 fdm-scale=1 policy-scale=1 latent-dim=16 batch-size=16 num-labels=40 device=cpu lam-updates=6 "
    "log-every=1 policy-updates=6 decoder-updates=10 checkpoint-every=2 eval-episodes=1 eval-envs=1 eval-steps=5"
).split()


def planned(experiment: str, **options) -> list[RunJob]:
    return reproduce.plan(Args(experiment, **options))


def beside(function: Callable[[], None]) -> Future:
    """Runs a function in a thread. If it fails, Slurm's jobs end, for which the test would wait; `result` says why."""

    def run() -> None:
        try:
            function()
        except BaseException:
            subprocess.run(["scancel", "--me"])
            raise

    return ThreadPoolExecutor(1).submit(run)


def test_the_experiments_of_the_paper() -> None:
    """Counts by hand; every command is one that its script takes, and no folder stands for two commands."""
    table = planned("main-table")
    assert len(table) == len({run.run_dir for run in table}) == 6 * 14 * 2 * 3
    others = dict.fromkeys(("lapo.py", "laof.py", "laom_labels.py", "lapo_slots.py"), 84)
    assert Counter(run.argv[0] for run in table) == others | {"masklam.py": 168}
    assert {run.args.policy_scale for run in table if run.argv[0] == "laom_labels.py"} == {32}  # the paper's table
    assert {run.cell.env for run in table} == set(TASKS)
    assert {run.run_dir.name for run in table} == {"seed1", "seed2", "seed3"}
    only = planned("main-table", env=["push"], seeds=1, values=["distractor"])
    assert len(only) == 6 and all(run.args.distractors for run in only)
    latent = planned("latent-dim", env=["cheetah-run"], seeds=1)
    assert {(run.args.latent_dim, run.args.loss_mask) for run in latent} == {
        (dim, mask) for dim in (32, 64, 128, 256, 512, 1024) for mask in (False, True)
    }
    suite = {name for name, task in TASKS.items() if task.suite == "dcs"}
    assert len(suite) == 4 and {run.cell.env for run in planned("latent-dim")} == suite
    hidden = planned("occlusion", env=["cheetah-run"], seeds=1)
    assert {(run.args.occlusion, run.args.loss_mask) for run in hidden} == {
        (share, mask) for share in (0.0, 0.25, 0.5, 0.75) for mask in (False, True)
    }
    grown = planned("mask-dilation", seeds=1)
    assert len(grown) == 7 * 10 and {run.args.mask_dilation for run in grown} == set(range(-3, 4))
    parts = [run.args for run in planned("ablations", env=["push"], seeds=1)]
    assert [(args.loss_mask, args.mask_channel, args.max_offset, args.input_mask) for args in parts] == [
        (True, True, 10, False), (False, True, 10, False), (True, False, 10, False), (False, False, 10, False),
        (True, True, 1, False), (False, False, 1, False), (False, False, 10, True),
    ]  # fmt: skip


def test_label_budgets_are_decoders_of_the_main_table_s_runs() -> None:
    only = {"env": ["reach"], "seeds": 1}
    budget = planned("label-budget", **only)
    assert len(budget) == 6
    assert {run.args.num_labels for run in budget} == {(2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)}
    distractor = {run.run_dir for run in planned("main-table", **only) if run.args.distractors}
    assert {run.run_dir for run in budget} == distractor
    together, separate = planned("all", **only), [planned(name, **only) for name in reproduce.EXPERIMENTS]
    assert sorted(run.run_dir for run in together) == sorted({run.run_dir for runs in separate for run in runs})
    assert Counter(len(run.args.num_labels) for run in together)[7] == 6
    quick = planned("label-budget", quick=True, methods=["LAPO"], set=["num-labels=60"], values=["30"], **only)
    assert [run.args.num_labels for run in quick] == [(30, 60)]  # --set changes the usual number, not the sweep
    assert max(run.args.num_labels[-1] for run in planned("label-budget", quick=True, **only)) == 5000


def test_a_run_is_named_by_its_experiment(tmp_path: Path) -> None:
    """Whatever --set adds, figures find the run; a finished one lacks no decoder."""
    cell = reproduce.EXPERIMENTS["occlusion"].cells(["cheetah-run"], values=[0.5])[1]
    assert cell.run_dir(Path("runs"), 2) == Path("runs/masklam/cheetah-run/no-loss-mask_occlusion=0.5/seed2")
    options = {"env": ["cheetah-run"], "seeds": 2, "values": ["0.5"], "set": ["lam_updates=7"], "runs_dir": tmp_path}
    run = planned("occlusion", **options)[3]
    assert run.run_dir == cell.run_dir(tmp_path, 2) and run.args.lam_updates == 7
    assert run.argv[-2:] == ("--variant", "no-loss-mask_occlusion=0.5")
    whole = planned("main-table", env=["cheetah-run"], seeds=1, runs_dir=tmp_path)[0]
    for budgets, done in ((None, False), ([500], False), ([500, 128_000], True)):
        for job in (run, whole) if budgets else ():
            job.run_dir.mkdir(parents=True, exist_ok=True)
            decoders = [{"num_labels": budget} for budget in budgets]
            (job.run_dir / "result.json").write_text(json.dumps({"decoders": decoders, "stages": {"policy": {}}}))
        assert whole.done() == done and run.done() == bool(budgets)  # a sweep of NMSE needs no decoder


def test_what_cannot_be_planned_is_refused(tmp_path: Path, monkeypatch) -> None:
    for experiment, options, message in (
        ("main-table", {"env": ["cheetah"]}, "did you mean 'cheetah-run'"),
        ("main-table", {"methods": ["Lapo"]}, "no such row or method script; there are LAPO"),
        ("occlusion", {"methods": ["LAPO"]}, "--methods is for main-table"),
        ("main-table", {"set": ["lam-updates=many"]}, "refuses"),
        ("main-table", {"set": ["lam updates=3"]}, "NAME=VALUE"),
        ("main-table", {"set": ["variant=try"]}, "the experiments decide this"),
        ("occlusion", {"set": ["slot-dim=8"]}, "no method script has this flag"),
        ("ablations", {"values": ["3"]}, "for one of main-table, label-budget"),
        ("main-table", {"values": ["3"]}, "main-table has distractor, vanilla"),
        ("label-budget", {"values": ["few"]}, "refuses"),
        ("main-table", {"set": ["lam-lr=nan"]}, "--lam-lr is nan"),
        ("main-table", {"set": ["batch-size=0"]}, "--batch-size is 0"),
        ("main-table", {"methods": ["MaskLAM@GT"], "set": ["mask-source=../x"]}, "--mask-source is '../x'"),
        ("main-table", {"env": ["../x"]}, r"\.\./x"),
    ):
        with pytest.raises(UserError, match=message):
            planned(experiment, **{"env": ["cheetah-run"], "seeds": 1} | options)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="use a login node, or --executor local"):
        patch.setenv("PATH", str(tmp_path))
        reproduce.run_slurm([], Args(executor="slurm"), tmp_path)


def test_scripts_of_one_s_own_and_clips(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "my_masklam", sys.modules["masklam"])
    monkeypatch.setattr(runs, "method_scripts", lambda: ["masklam", "my_masklam"])
    own = planned("main-table", env=["reach"], methods=["my_masklam"], seeds=1)
    assert [run.run_dir.parts[1] for run in own] == ["my_masklam", "my_masklam"]
    for data_set, set_, expected in (
        (["davis-dir=elsewhere"], [], "elsewhere"), (["davis_dir=elsewhere", "backgrounds=synthetic"], [], "None"),
        (["backgrounds=own"], [], "own"), (["davis-dir=elsewhere"], ["clips_dir=mine"], "mine"),
    ):  # fmt: skip
        run = planned("main-table", env=["reach"], methods=["LAPO"], seeds=1, data_set=data_set, set=set_)[0]
        assert str(run.args.clips_dir) == expected  # the clips of the evaluation are the data's


def test_data_and_masks_are_made_first(tmp_path: Path) -> None:
    """What is missing becomes jobs that the runs need, by shards; nothing is made for what is there."""
    args = Args("main-table", ["cheetah-run"], ["LAPO", "MaskLAM@SAM"], 1, quick=True, data_dir=tmp_path / "data",
                runs_dir=tmp_path / "runs", data_jobs=2, data_set=["backgrounds=synthetic"])  # fmt: skip

    def jobs_by_name() -> dict[str, Job]:
        return {job.name: job for job in reproduce.all_jobs(args, reproduce.plan(args))}

    jobs = jobs_by_name()
    data, masks = {"data-cheetah-run-1", "data-cheetah-run-2"}, {"masks-sam-cheetah-run-1", "masks-sam-cheetah-run-2"}
    words = "python make_dataset.py --env cheetah-run --quick --backgrounds=synthetic --data-dir"
    assert jobs["data-cheetah-run-2"].command.startswith(words)
    assert {job.name for job in jobs["masks-sam-cheetah-run-1"].needs} == data
    assert {job.name for job in jobs["lapo-cheetah-run-quick-seed1"].needs} == data
    assert {job.name for job in jobs["masklam-cheetah-run-quick_mask-source=sam-seed1"].needs} == data | masks
    planted.write(args.data_dir, train=3, test=2, length=20, size=64)
    assert jobs["data-cheetah-run-2"].done() and not jobs["masks-sam-cheetah-run-1"].done()
    jobs = jobs_by_name()
    assert not data & set(jobs) and masks < set(jobs) and jobs["lapo-cheetah-run-quick-seed1"].needs == ()
    args.methods, args.set = ["MaskLAM@GT"], ["mask-source=mine"]
    with pytest.raises(UserError, match="--import DIR --name mine"):
        jobs_by_name()


def shell_job(name: str, folder: Path, code: str = "pass", needs: tuple[Job, ...] = (), result: str = "") -> Job:
    """A job that runs Python code and then writes a file of its name."""
    path = folder / (result or name)
    return Job(name, ["-c", f"{code}\nopen({str(path)!r}, 'w').close()"], path.exists, needs)


def test_local_jobs_in_order_with_failures(tmp_path: Path, monkeypatch) -> None:
    """Jobs that need a failed one are not started, all others run, and work that jobs share counts, whoever did it."""
    monkeypatch.setattr(cli, "_stop_signal", None)
    dead = shell_job("dead", tmp_path, "raise SystemExit(3)", result="data")
    slow = shell_job("slow", tmp_path, "import time; time.sleep(1)", result="data")
    after = shell_job("after", tmp_path, f"open({str(tmp_path / 'data')!r})", needs=(dead, slow))
    bad = shell_job("bad", tmp_path, r"print('10%\r99%'); raise SystemExit('no such thing')")
    needy = shell_job("needy", tmp_path, needs=(bad,))
    later = shell_job("later", tmp_path, needs=(needy,))
    jobs = [later, needy, after, dead, slow, bad]
    reproduce.run_local(jobs, tmp_path, at_once=2)
    assert [job.state for job in (dead, slow, after, bad)] == ["failed", "finished", "finished", "failed"]
    assert needy.state == later.state == "not started"
    with pytest.raises(UserError) as error:
        reproduce.report(jobs, tmp_path)
    text = str(error.value)
    assert "1 of 6 jobs failed" in text and "2 jobs were not started" in text
    assert "bad (exit code 1)" in text and bad.command in text and f"log {tmp_path / 'bad.log'}" in text
    assert "  | 99%\n  | no such thing" in text
    (tmp_path / "bad").touch(), (tmp_path / "needy").touch(), (tmp_path / "later").touch()
    reproduce.report(jobs, tmp_path)  # finished by others meanwhile


def test_a_run_that_another_process_makes_is_waited_for(tmp_path: Path) -> None:
    """One that has outlived a reproduce.py that was killed."""
    (run,) = planned("mask-dilation", env=["cheetah-run"], seeds=1, values=["0"], runs_dir=tmp_path)
    run.run_dir.mkdir(parents=True)
    lock, made = lock_file(run.run_dir / ".lock"), tmp_path / "made"
    run.argv, run.done = ("-c", f"open({str(made)!r}, 'x')"), made.exists

    def end() -> None:
        wait_until(lambda: run.reason)
        time.sleep(0.5)
        assert run.state == "waiting" and not made.exists()
        os.close(lock)

    ended = ThreadPoolExecutor(1).submit(end)
    reproduce.run_local([run], tmp_path, 1)
    ended.result()
    assert run.state == "finished"


def test_a_real_grid_with_an_interrupt_and_a_failing_run(tmp_path: Path, capsys) -> None:
    """Its data is made first; Ctrl-C lets the run save; the others survive one that fails; nothing runs twice."""
    words = "mask-dilation --env cheetah-run --seeds 1 --values 0 1 --quick --data-dir".split()
    words += [str(tmp_path / "data"), "--runs-dir", str(tmp_path / "runs"), "--set", *TINY, "--data-set"]
    words += "backgrounds=synthetic train-transitions=60 test-transitions=40 episode-length=20 workers=1".split()
    reproduce.main(tyro.cli(Args, args=[*words, "--dry-run"]))
    out = capsys.readouterr().out
    assert "2 runs: 0 finished, 0 to resume, 2 to start" in out and "data to make first: cheetah-run" in out
    assert out.count("python masklam.py") == 2 and not list(tmp_path.iterdir())

    command = python("reproduce.py", *words, "--jobs", "1")
    wait_until(lambda: list(tmp_path.glob("runs/masklam/*/*/*/*.pt")) or command.poll() is not None)
    command.send_signal(signal.SIGINT)
    done = finish(command)
    assert done.returncode == 130 and "2 jobs are left; rerun" in done.stderr, done
    assert "finished: data-cheetah-run-1" in done.stdout

    good, broken = (tmp_path / f"runs/masklam/cheetah-run/{name}/seed1" for name in ("quick", "quick_mask-dilation=1"))
    shutil.copytree(good, broken)  # which was made with another --mask-dilation
    done = finish(python("reproduce.py", *words, "--jobs", "2"))
    assert done.returncode == 1 and "1 of 2 jobs failed" in done.stderr and "mask_dilation: " in done.stderr, done
    assert "2 to resume" in done.stdout and (good / "result.json").exists() and not (broken / "result.json").exists()
    before = (good / "result.json").stat().st_mtime_ns

    shutil.rmtree(broken)
    done = finish(python("reproduce.py", *words))
    assert done.returncode == 0 and "2 runs: 1 finished, 0 to resume, 1 to start" in done.stdout, done
    assert "all finished; tables and figures: python make_figures.py --quick --seeds 1" in done.stdout
    assert json.loads((broken / "result.json").read_text())["args"]["mask_dilation"] == 1
    assert (good / "result.json").stat().st_mtime_ns == before


TOOL = ROOT.parent / "shared" / "tools" / "one_node_slurm.sh"
DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Args]:
    """A real Slurm of one node, and options that fit it."""
    if not TOOL.exists() or os.geteuid() != 0 or any(shutil.which(name) is None for name in DAEMONS):
        pytest.skip("needs root, ../shared/tools/one_node_slurm.sh and the Debian packages that .ci/run installs")
    if subprocess.run(["sinfo"], capture_output=True).returncode == 0:
        pytest.skip("a Slurm cluster runs on this machine already")
    folder = Path(tempfile.mkdtemp())  # pytest's own are closed to the user that the cluster's database runs as
    started = subprocess.run([TOOL, "start", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert started.returncode == 0, started.stdout
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            patch.setattr(reproduce, "QUEUE_SECONDS", 1)
            patch.setattr(reproduce, "FILE_SECONDS", 3.0)
            yield Args(executor="slurm", slurm="partition=low gpus-per-node=0 cpus-per-task=1 mem=1G time=60".split())
    finally:
        subprocess.run([TOOL, "stop", folder], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


SAVES = """
import signal, sys, time
from pathlib import Path
folder = Path({folder!r})
def save(number, frame):
    (folder / f"saved{{starts}}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
starts = len(list(folder.glob("start*"))) + 1
(folder / f"start{{starts}}").touch()
print("start", starts, flush=True)
if starts < 3:
    time.sleep(600)
"""


def test_slurm_order_failures_and_preemption(slurm: Args, tmp_path: Path, monkeypatch) -> None:
    """Arrays whose tasks wait for others; what gets a time limit's warning or is preempted is queued again."""
    monkeypatch.setattr(cli, "_stop_signal", None)
    data = tuple(shell_job(f"data{number}", tmp_path, "import time; time.sleep(1)", result="data") for number in (1, 2))
    after = shell_job("after", tmp_path, f"open({str(tmp_path / 'data')!r})", needs=data)
    bad = shell_job("bad", tmp_path, "raise SystemExit('no such thing')")
    needy = shell_job("needy", tmp_path, needs=(bad,))
    long = shell_job("long", tmp_path, SAVES.format(folder=str(tmp_path)))
    jobs = [*data, bad, long, after, needy]

    def slurm_command(*words: str) -> str:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def disturb() -> None:
        wait_until((tmp_path / "start1").exists)
        slurm_command("scancel", "--batch", "--signal=TERM", long.slurm_id)  # as before a time limit
        wait_until((tmp_path / "saved1").exists)
        restart(2)
        slurm_command("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true")
        wait_until((tmp_path / "saved2").exists)
        restart(3)

    def restart(number: int) -> None:
        """Slurm would start it in two minutes, so that the node has forgotten the one that it ended."""
        wait_until(
            lambda: slurm_command("squeue", "--noheader", "--format=%T", f"--job={long.slurm_id}") == "PENDING\n"
        )
        time.sleep(3)
        slurm_command("scontrol", "update", f"job={long.slurm_id}", "StartTime=now")
        wait_until((tmp_path / f"start{number}").exists)

    disturbed = beside(disturb)
    reproduce.run_slurm(jobs, slurm, tmp_path)
    disturbed.result()
    assert {job.state for job in (*data, after, long)} == {"finished"}
    assert (bad.state, needy.state) == ("failed", "not started")
    assert all(f"\nstart {number}\n" in (tmp_path / "long.log").read_text() for number in (1, 2, 3))
    with pytest.raises(UserError, match=r"1 of 6 jobs failed[\s\S]*bad.log[\s\S]*no such thing[\s\S]*  needy"):
        reproduce.report(jobs, tmp_path)


def test_slurm_jobs_stay_in_the_queue_and_can_be_cancelled(slurm: Args, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "_stop_signal", signal.SIGINT)
    with pytest.raises(Stopped, match=r"1 jobs stay in Slurm's queue \(scancel \d+ ends them\)"):
        reproduce.run_slurm([shell_job("long", tmp_path, SAVES.format(folder=str(tmp_path)))], slurm, tmp_path)
    wait_until((tmp_path / "start1").exists)
    monkeypatch.setattr(cli, "_stop_signal", None)
    again = shell_job("long", tmp_path, "raise SystemExit('a second time')")

    def cancel() -> None:
        wait_until(lambda: again.slurm_id)
        subprocess.run(["scancel", again.slurm_id], check=True)

    cancelled = beside(cancel)
    reproduce.run_slurm([again], slurm, tmp_path)
    cancelled.result()
    assert again.state == "failed" and f"in the queue: long, Slurm job {again.slurm_id}" in capsys.readouterr().out
    assert "CANCELLED" in (tmp_path / "long.log").read_text() and (tmp_path / "saved1").exists()
    slurm.slurm.append("partition=none")
    with pytest.raises(UserError, match=r"sbatch refused 1 jobs[\s\S]*invalid partition"):
        reproduce.run_slurm([shell_job("other", tmp_path)], slurm, tmp_path)
