"""Jobs through submitit: order, failures, preemption, Slurm's queue (with stand-ins for its commands)."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.jobs import Cluster, Command, Job, Runner, log_tail
from common import runs
from common.errors import UserError

SAVES = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
if (folder / "saved").exists():
    print("going on")
    (folder / "done").touch()
    sys.exit(0)
def save(number, frame):
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / "started").touch()
time.sleep(120)
"""


def touch(path: Path) -> list[str]:
    return ["-c", f"from pathlib import Path; assert {str(path.parent)!r}; Path({str(path)!r}).touch()"]


def job(name: str, path: Path, *needs: Job, argv: list[str] | None = None, lock: Path | None = None) -> Job:
    return Job(name, argv or touch(path), path.exists, list(needs), lock)


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def no_signal(monkeypatch):
    monkeypatch.setattr(runs, "_stop_signal", None)


def test_order_failures_and_repetition(tmp_path: Path, no_signal) -> None:
    """Jobs that need a failed one are not started, all others run, and a repetition does what is left."""
    checks = "import sys; from pathlib import Path; sys.exit('first is missing') if not Path({!r}).exists() else "
    first = job("first", tmp_path / "1")
    after = job("after", tmp_path / "2", first)
    after.argv = ["-c", checks.format(str(tmp_path / "1")) + f"Path({str(tmp_path / '2')!r}).touch()"]
    bad = job("bad", tmp_path / "3", argv=["-c", "print('a line'); raise SystemExit('no such thing')"])
    liar = job("liar", tmp_path / "4", argv=["-c", "print('all good')"])
    blocked = job("blocked", tmp_path / "5", bad)
    jobs = [blocked, after, first, bad, liar]
    with pytest.raises(UserError) as error:
        Runner(Cluster("local", tmp_path / "jobs", at_once=2), poll=0.05).run(jobs)
    text = str(error.value)
    assert (first.state, after.state, bad.state, liar.state) == ("finished", "finished", "failed", "failed")
    assert blocked.state == "blocked" and "1 jobs were not started" in text and "  blocked" in text
    assert "2 of 5 jobs did not finish" in text and "| a line" in text and "| no such thing" in text
    assert str(tmp_path / "jobs/logs/bad.log") in text and bad.command in text

    (tmp_path / "3").touch(), (tmp_path / "4").touch()  # mended by hand
    again = [job(one.name, tmp_path / str(i), argv=one.argv) for i, one in enumerate([first, after, bad, liar], 1)]
    again.append(job("blocked", tmp_path / "5", again[2]))
    Runner(Cluster("local", tmp_path / "jobs"), poll=0.05).run(again)
    assert all(one.state == "finished" for one in again)
    assert not (tmp_path / "jobs/logs/first.log").read_text().count("$ python") > 1  # it was not run again


def test_jobs_that_share_work(tmp_path: Path, no_signal) -> None:
    """Whoever makes it: a failed one of two that make the same thing neither blocks what needs it nor is a failure."""
    made = tmp_path / "made"
    slow = job(
        "slow", made, argv=["-c", f"import time; time.sleep(1); from pathlib import Path; Path({str(made)!r}).touch()"]
    )
    dead = job("dead", made, argv=["-c", "raise SystemExit(3)"])
    after = job("after", tmp_path / "after", slow, dead)
    Runner(Cluster("local", tmp_path / "jobs", at_once=2), poll=0.05).run([dead, slow, after])
    assert [one.state for one in (dead, slow, after)] == ["finished"] * 3
    assert "$ python" in (tmp_path / "jobs/logs/dead.log").read_text()


def test_a_run_that_another_command_started_is_not_a_failure(tmp_path: Path, no_signal) -> None:
    """Both saw it free; the one that lost says so by its exit code, and the other one's result counts."""
    holder = (
        "import fcntl, sys, time; from pathlib import Path; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    )
    holder += "; Path(sys.argv[2]).touch(); time.sleep(3); Path(sys.argv[3]).touch()"
    lock, held, done = tmp_path / "lock", tmp_path / "held", tmp_path / "done"
    start = (
        f"import subprocess, sys, time; from pathlib import Path; subprocess.Popen([sys.executable, '-c', {holder!r}"
    )
    start += (
        f", {str(lock)!r}, {str(held)!r}, {str(done)!r}])\nwhile not Path({str(held)!r}).exists(): time.sleep(0.05)"
    )
    mine = job("mine", done, argv=["-c", start + "\nraise SystemExit('another process is writing')"], lock=lock)
    Runner(Cluster("local", tmp_path / "jobs"), poll=0.05).run([mine])
    assert mine.state == "finished"


def test_a_stop_lets_jobs_save_and_the_same_command_goes_on(tmp_path: Path, no_signal) -> None:
    def jobs() -> list[Job]:
        one = job("long", tmp_path / "done", argv=["-c", SAVES, str(tmp_path)])
        return [one, job("later", tmp_path / "later", one)]

    def stop() -> None:
        wait_for((tmp_path / "started").exists)
        runs._stop_signal = signal.SIGINT

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(runs.Stopped, match="2 jobs are left"):
        Runner(Cluster("local", tmp_path / "jobs"), poll=0.05).run(jobs())
    thread.join()
    assert (tmp_path / "saved").exists() and not (tmp_path / "done").exists()
    runs._stop_signal = None
    Runner(Cluster("local", tmp_path / "jobs"), poll=0.05).run(jobs())
    assert "going on" in (tmp_path / "jobs/logs/long.log").read_text() and (tmp_path / "later").exists()


def test_a_run_of_another_process_is_waited_for(tmp_path: Path, no_signal, capsys) -> None:
    holder = (
        "import fcntl, sys, time; from pathlib import Path; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    )
    holder += "; Path(sys.argv[2]).touch(); time.sleep(6); Path(sys.argv[3]).touch()"
    lock, held, done = tmp_path / "lock", tmp_path / "held", tmp_path / "done"
    process = subprocess.Popen([sys.executable, "-c", holder, str(lock), str(held), str(done)])
    wait_for(held.exists)
    mine = job("mine", done, argv=["-c", "raise SystemExit(9)"], lock=lock)
    Runner(Cluster("local", tmp_path / "jobs"), poll=0.05).run([mine])
    assert mine.state == "finished" and "run by another process" in capsys.readouterr().out
    assert process.wait() == 0


def test_preemption_saves_and_queues_again(tmp_path: Path) -> None:
    """submitit's warning: the script gets SIGTERM and saves, and the job starts again by itself."""
    cluster = Cluster("local", tmp_path / "jobs")
    command = Command(["-c", SAVES, str(tmp_path)], tmp_path / "jobs/logs/long.log", {})
    handle = cluster.executor.submit(command)
    wait_for((tmp_path / "started").exists)
    child = int(command.pid_file.read_text())
    assert command.pid_file.parent == command.log.parent
    task = int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])  # its parent runs `Command`
    os.kill(child, signal.SIGUSR2)  # Slurm warns every process of a step, and this one must not die from it
    os.kill(task, signal.SIGUSR2)
    assert handle.result() == 0
    text = (tmp_path / "jobs/logs/long.log").read_text()
    assert text.count("$ python") == 2 and "going on" in text and (tmp_path / "done").exists()


def test_log_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % i for i in range(30)) + b"10%\r20%\r30%\n\xff\n\n")
    assert log_tail(path)[-2:] == ["30%", "\ufffd"] and len(log_tail(path)) == 12
    assert "did not start" in log_tail(tmp_path / "none")[0]


# Stand-ins for Slurm: sbatch starts every task of an array at once, sacct knows what is running.
SBATCH = """#!{python}
import os, re, subprocess, sys
from pathlib import Path
state = Path({state!r})
number = len(list(state.glob("*.sh"))) + 7
text = Path(sys.argv[-1]).read_text()
(state / f"{{number}}.sh").write_text(text)
array = re.search(r"--array=0-(\\d+)", text)
for task in range(int(array[1]) + 1) if array else [None]:
    job = f"{{number}}" if task is None else f"{{number}}_{{task}}"
    new = dict(os.environ, SLURM_JOB_ID=str(number), SLURM_NTASKS="1", SLURM_JOB_NUM_NODES="1", SLURM_NODEID="0")
    new |= dict(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_JOB_NODELIST="n1")
    if task is not None:
        new |= dict(SLURM_ARRAY_JOB_ID=str(number), SLURM_ARRAY_TASK_ID=str(task))
    running = state / f"{{job}}.running"
    running.touch()
    line = f"bash {{sys.argv[-1]}}; rm {{running}}; touch {{state}}/{{job}}.over"
    quiet = subprocess.DEVNULL
    subprocess.Popen(["bash", "-c", line], env=new, stdout=quiet, stderr=quiet, stdin=quiet, start_new_session=True)
print(f"Submitted batch job {{number}}")
"""
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do
    case "$1" in --output|--error) shift 2 ;; *) shift ;; esac
done
exec "$@"
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
cd {state}
for f in *.running; do [ -e "$f" ] && echo "${{f%.running}}|RUNNING|n1"; done
for f in *.over; do [ -e "$f" ] && echo "${{f%.over}}|COMPLETED|n1"; done
exit 0
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch) -> Path:
    tools, state = tmp_path / "tools", tmp_path / "state"
    tools.mkdir(), state.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        filled = text.format(python=sys.executable, state=str(state)) if name != "srun" else text
        (tools / name).write_text(filled)
        (tools / name).chmod(0o755)
        assert (tools / name).stat().st_mode & stat.S_IXUSR
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return state


def test_slurm_gets_arrays_and_finds_its_queue_again(tmp_path: Path, slurm: Path, no_signal, capsys) -> None:
    options = {"at_once": 2, "hours": 1.5, "partition": "fast", "gpus": 1, "cpus": 3, "memory_gb": 5}

    def cluster() -> Cluster:
        return Cluster("slurm", tmp_path / "jobs", slurm=("account=lab", "exclusive"), **options)

    hold = (
        f"import time; from pathlib import Path\nwhile not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.05)\n"
    )

    def jobs() -> list[Job]:
        found = [
            job(name, tmp_path / name, argv=["-c", hold + f"Path({str(tmp_path / name)!r}).touch()"])
            for name in ("a", "b")
        ]
        return [*found, job("c", tmp_path / "c", *found)]

    def stop() -> None:
        wait_for(lambda: len(list((tmp_path / "jobs/logs").glob("*.pid"))) == 2)
        runs._stop_signal = signal.SIGINT

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(runs.Stopped, match=r"2 jobs stay in Slurm's queue \(scancel 7_0 7_1\)"):
        Runner(cluster(), poll=0.1).run(jobs())
    thread.join()
    text = (slurm / "7.sh").read_text()
    for line in (
        "partition=fast",
        "time=90",
        "gpus-per-node=1",
        "cpus-per-task=3",
        "mem=5GB",
        "array=0-1%2",
        "requeue",
    ):
        assert f"#SBATCH --{line}" in text, text
    assert "#SBATCH --account=lab" in text and "#SBATCH --exclusive" in text and "#SBATCH --signal=USR2@120" in text

    runs._stop_signal = None
    again = jobs()
    runner = Runner(cluster(), poll=0.1)
    find = runner._find_submitted
    runner._find_submitted = lambda found: (find(found), (tmp_path / "go").touch())  # released once they are found
    runner.run(again)
    assert all(one.state == "finished" for one in again)
    out = capsys.readouterr().out
    assert "in the queue: a, Slurm job 7_0" in out and "in the queue: b" in out
    assert len(list(slurm.glob("*.sh"))) == 2  # a and b were not submitted again, c was
    assert (tmp_path / "jobs/logs/a.log").read_text().count("$ python") == 1


def test_slurm_preempts_with_sigterm(tmp_path: Path, slurm: Path, no_signal, capsys) -> None:
    """By default every process of a step gets SIGTERM: the script saves and ends, and its job is queued again."""
    one = job("long", tmp_path / "done", argv=["-c", SAVES, str(tmp_path)])

    def preempt() -> None:
        wait_for((tmp_path / "started").exists)
        child = int(next((tmp_path / "jobs/logs").glob("long.*.pid")).read_text())
        task = int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(task, signal.SIGTERM)
        os.kill(child, signal.SIGTERM)

    thread = threading.Thread(target=preempt)
    thread.start()
    Runner(Cluster("slurm", tmp_path / "jobs"), poll=0.1).run([one, job("later", tmp_path / "later", one)])
    thread.join()
    assert one.state == "finished" and "preempted, queued again: long" in capsys.readouterr().out
    assert len(list(slurm.glob("*.sh"))) == 3 and json.loads((tmp_path / "jobs/slurm_jobs.json").read_text()) == {}


def test_slurm_jobs_of_other_commands_stay_known(tmp_path: Path, slurm: Path) -> None:
    path = tmp_path / "jobs/slurm_jobs.json"
    first, second = (Runner(Cluster("slurm", tmp_path / "jobs")) for _ in range(2))
    first._remember({"a": "1_0", "b": "1_1"})
    second._remember({"c": "2_0"})
    second._forget("c", "2_0")
    first._forget("a", "1_0")
    assert json.loads(path.read_text()) == {"b": "1_1"}
    second._remember({"b": "3_0"})  # submitted again by another command
    first._forget("b", "1_1")
    assert json.loads(path.read_text()) == {"b": "3_0"}


@pytest.mark.parametrize(
    ("state", "becomes"),
    [("CANCELLED by 7", "stopped"), ("PREEMPTED", "waiting"), ("COMPLETED", "waiting"), ("RUNNING", None), ("", None),
     ("COMPLETING", None), ("PENDING", None)],
)  # fmt: skip
def test_what_slurm_says_after_a_signal(state: str, becomes: str | None, tmp_path: Path, slurm: Path) -> None:
    """A job that Slurm has queued again by itself, or has not decided about, is not submitted a second time."""
    runner, one = Runner(Cluster("slurm", tmp_path / "jobs")), job("a", tmp_path / "a")
    pickle = tmp_path / "result.pkl"
    pickle.touch()
    paths = SimpleNamespace(result_pickle=pickle)
    runner.handles["a"] = SimpleNamespace(get_info=lambda: {"State": state} if state else {}, paths=paths)
    runner.ended["a"] = time.monotonic()
    assert runner._after_signal(one) == becomes
    assert pickle.exists() == (state != "PENDING") and ("a" in runner.ended) == (state != "PENDING")
    one.preempted = 100
    assert runner._after_signal(one) == "stopped" if becomes == "waiting" else True


def test_a_job_that_fails_beside_its_own_lock_ends(tmp_path: Path, no_signal) -> None:
    """A child that holds the lock looks like another command: once the job is tried again, then it has failed."""
    lock = tmp_path / "lock"
    code = f"import fcntl, subprocess, sys; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    code += "subprocess.Popen(['sleep', '1'], pass_fds=[f.fileno()]); sys.exit(3)"
    one = job("a", tmp_path / "a", argv=["-c", code], lock=lock)
    with pytest.raises(UserError, match="1 of 1 jobs did not finish"):
        Runner(Cluster("local", tmp_path / "jobs"), poll=0.05).run([one])
    assert (tmp_path / "jobs/logs/a.log").read_text().count("$ python") == 2


def test_slurm_that_refuses_is_an_error(tmp_path: Path, slurm: Path, no_signal) -> None:
    sbatch = next(path for path in (tmp_path / "tools").iterdir() if path.name == "sbatch")
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"sbatch refused 1 jobs[\s\S]*invalid partition"):
        Runner(Cluster("slurm", tmp_path / "jobs"), poll=0.1).run([job("a", tmp_path / "a")])


def test_no_slurm_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="--executor local"):
        Cluster("slurm", tmp_path / "jobs")
