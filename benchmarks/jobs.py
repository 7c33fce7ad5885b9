"""Runs commands of this repository as jobs through submitit: on this machine, a few at a time, or on a Slurm cluster.

A job may need others first. What is finished is not run again; what was stopped goes on where it was, since the
commands themselves resume.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common import runs
from common.errors import UserError

ROOT = Path(__file__).parents[1]
STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}  # exit codes: it can go on
SLURM_SIGNAL_SECONDS = 120  # between the warning of a time limit or preemption and the end: time to save
LOG_LINES = 12  # of a failed job that are shown
ARRAY = 500  # jobs per submission to Slurm, whose arrays are limited (1001 by default)
MOST_PREEMPTIONS = 100
RESTART_SECONDS = 300.0  # after which a job that ended, but still runs for Slurm, was started again by it
LOOK_SECONDS = 15.0  # between two looks at whether something is there that a running job makes
GRACE = {"local": 5.0, "slurm": 120.0}  # seconds until a file that a job wrote must be seen, on a network file system
State = Literal["waiting", "elsewhere", "running", "finished", "failed", "stopped", "blocked"]


class Command:
    """One command as submitit runs it: its output goes to a log, its exit code is the result.

    Args:
        argv: words after ``python``.
        log: file that the output is appended to.
        environment: further environment variables.

    While it runs, `pid_file` beside the log names the process, for whoever made this object.
    """

    def __init__(self, argv: list[str], log: Path, environment: dict[str, str]) -> None:
        self.argv, self.log, self.environment = argv, log, environment
        self.pid_file = log.with_suffix(f".{os.getpid()}.pid")
        self.child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        self.log.parent.mkdir(parents=True, exist_ok=True)

        def ignore_warning() -> None:  # Slurm warns all processes of a step; the script gets SIGTERM from `checkpoint`
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)

        with open(self.log, "ab") as log:
            log.write(f"\n$ python {shlex.join(self.argv)}\n".encode())
            log.flush()
            self.child = subprocess.Popen(
                [sys.executable, "-u", *self.argv],
                cwd=ROOT,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is for whoever runs the jobs
                preexec_fn=ignore_warning,
            )
            self.pid_file.write_text(str(self.child.pid))
            try:
                return self._wait()
            finally:
                self.pid_file.unlink(missing_ok=True)

    def _wait(self) -> int:
        assert self.child is not None
        while (code := self.child.poll()) is None:  # no blocking wait, which a signal handler could not enter again
            time.sleep(0.2)
        return code

    def checkpoint(self) -> Any:
        """Called by submitit before a time limit or preemption: the script saves and the job is queued again."""
        import submitit

        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            self._wait()
        again = Command(self.argv, self.log, self.environment)
        again.pid_file = self.pid_file
        return submitit.helpers.DelayedSubmission(again)


@dataclass
class Job:
    """A command that must have been done.

    Args:
        name: unique; names the log.
        argv: words after ``python``.
        done: whether there is nothing left to do.
        needs: jobs that must be finished before.
        lock: file that the command holds locked while it runs, wherever that is.
    """

    name: str
    argv: list[str]
    done: Callable[[], bool]
    needs: list[Job] = field(default_factory=list)
    lock: Path | None = None
    state: State = "waiting"
    code: int | str | None = None
    seconds: float = 0.0
    looked: float = -LOOK_SECONDS
    beaten: int = 0  # times that it failed while another process ran the same thing
    preempted: int = 0

    @property
    def command(self) -> str:
        return f"python {shlex.join(self.argv)}"

    def there(self) -> bool:
        """Whether what this job makes is there, whoever made it; looks at it every few seconds only."""
        if self.state == "finished":
            return True
        if time.monotonic() - self.looked < LOOK_SECONDS:
            return False
        self.looked = time.monotonic()
        return self.done()

    def locked(self) -> bool:
        """True while some process holds the lock."""
        if self.lock is None or not self.lock.exists():
            return False
        with open(self.lock, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


@dataclass
class Cluster:
    """Where jobs run.

    Args:
        kind: local (this machine) or slurm.
        folder: for logs and submitit's files.
        at_once: jobs at a time; None: locally one per GPU, or per core without one, and on Slurm as many as it starts.
        hours, partition, gpus, cpus, memory_gb: of each Slurm job.
        slurm: further options of sbatch, NAME=VALUE.
    """

    kind: Literal["local", "slurm"]
    folder: Path
    at_once: int | None = None
    hours: float = 24.0
    partition: str | None = None
    gpus: int = 1
    cpus: int = 16
    memory_gb: int = 64
    slurm: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        import submitit

        self.devices: list[str] = []
        self.executor: Any
        (self.folder / "submitit").mkdir(parents=True, exist_ok=True)
        if self.kind == "local":
            import torch

            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            count = torch.cuda.device_count()
            self.devices = visible.split(",")[:count] if visible and count else [str(i) for i in range(count)]
            self.at_once = self.at_once or len(self.devices) or len(os.sched_getaffinity(0))
            self.executor = submitit.LocalExecutor(self.folder / "submitit")
            self.executor.update_parameters(timeout_min=60 * 24 * 365)
            return
        further = {}
        for item in self.slurm:
            name, _, value = item.partition("=")
            further[name.lstrip("-")] = value or True
        try:
            self.executor = submitit.SlurmExecutor(self.folder / "submitit", max_num_timeout=1000)
        except RuntimeError as error:
            raise UserError(
                f"--executor slurm: {error}; use --executor local, or a login node of the cluster"
            ) from None
        self.executor.update_parameters(
            job_name="masklam",
            time=round(60 * self.hours),
            partition=self.partition,
            gpus_per_node=self.gpus or None,
            cpus_per_task=self.cpus,
            mem=f"{self.memory_gb}GB",
            signal_delay_s=SLURM_SIGNAL_SECONDS,
            stderr_to_stdout=True,
            array_parallelism=self.at_once or 256,
            additional_parameters={"requeue": True} | further,
        )

    def log(self, job: Job) -> Path:
        return self.folder / "logs" / f"{job.name}.log"

    def command(self, job: Job, slot: int) -> Command:
        environment = {}
        if self.kind == "local":
            threads = max(1, len(os.sched_getaffinity(0)) // (self.at_once or 1))
            environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[slot % len(self.devices)] if self.devices else ""
        return Command(job.argv, self.log(job), environment)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started meanwhile ignore SIGINT: a Ctrl-C in the terminal reaches them too, but this one decides."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Runner:
    """Runs jobs to their end; see `run`."""

    def __init__(self, cluster: Cluster, poll: float | None = None) -> None:
        self.cluster = cluster
        self.poll = poll or (0.5 if cluster.kind == "local" else 20.0)
        self.handles: dict[str, Any] = {}  # submitit's jobs by the names of ours
        self.slots: dict[str, int] = {}
        self.started: dict[str, float] = {}
        self.ended: dict[str, float] = {}  # jobs that ended well, but whose result is not seen yet
        self.submitted_path = cluster.folder / "slurm_jobs.json"  # so that the same command finds what is in the queue

    def run(self, jobs: list[Job]) -> None:
        """Runs all jobs, each after those that it needs.

        Raises:
            UserError: jobs failed; names them with the last lines of their logs. The others ran to their end.
            Stopped: a signal arrived. Local jobs were stopped and saved; those on Slurm stay in the queue.
        """
        start = said = time.monotonic()
        for job in jobs:
            if job.done():
                job.state = "finished"
        before = sum(job.state == "finished" for job in jobs)
        print(f"{len(jobs)} jobs, {before} finished before", flush=True)
        if self.cluster.kind == "slurm":
            self._find_submitted(jobs)
        while any(job.state in ("waiting", "elsewhere", "running") for job in jobs):
            if runs.stop_requested():
                self._stop(jobs)
            self._collect(jobs)
            self._submit(jobs)
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(self._line(jobs, start), flush=True)
            time.sleep(self.poll)
        print(self._line(jobs, start), flush=True)
        self._report(jobs)

    def _line(self, jobs: list[Job], start: float) -> str:
        counts = collections.Counter(job.state for job in jobs)
        parts = ", ".join(f"{counts[state]} {state}" for state in State.__args__ if counts[state])
        return f"after {time.monotonic() - start:.0f} s: {parts}"

    # --- starting

    def _submit(self, jobs: list[Job]) -> None:
        ready = []
        for job in jobs:
            if job.state not in ("waiting", "elsewhere"):
                continue
            lacking = [needed for needed in job.needs if not needed.there()]
            if lacking and all(needed.state in ("failed", "blocked", "stopped") for needed in lacking):
                if not all(needed.done() for needed in lacking):
                    job.state = "blocked"  # else another one may still make it
            elif not lacking:
                if job.locked():
                    if job.state == "waiting":
                        print(f"elsewhere: {job.name} is run by another process; waiting for it", flush=True)
                    job.state = "elsewhere"
                elif job.done():
                    job.state = "finished"
                else:
                    ready.append(job)
        if self.cluster.kind == "slurm":
            self._submit_array(ready)
            return
        free = [slot for slot in range(self.cluster.at_once or 1) if slot not in self.slots.values()]
        for job, slot in zip(ready, free):
            command = self.cluster.command(job, slot)
            command.pid_file.unlink(missing_ok=True)  # of a process that was killed: the number may be another's now
            with _without_interrupts():
                self.handles[job.name] = self.cluster.executor.submit(command)
            self.slots[job.name] = slot
            self._mark_started(job)

    def _mark_started(self, job: Job) -> None:
        job.state, self.started[job.name] = "running", time.monotonic()
        print(f"start: {job.name}", flush=True)

    def _submit_array(self, ready: list[Job]) -> None:
        limit = ARRAY if self.cluster.at_once is None else self.cluster.at_once - len(self.handles)
        ready = ready[: max(0, min(limit, ARRAY))]
        if not ready:
            return
        try:
            with self.cluster.executor.batch():
                for job in ready:
                    self.handles[job.name] = self.cluster.executor.submit(self.cluster.command(job, 0))
        except Exception as error:  # whatever sbatch says, which submitit wraps
            raise UserError(f"sbatch refused {len(ready)} jobs: {error}") from error
        for job in ready:
            self._mark_started(job)
        self._remember({job.name: self.handles[job.name].job_id for job in ready})

    def _change_known(self, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Changes the file with the names and Slurm's numbers of jobs, which other commands use too."""
        with open(self.cluster.folder / ".slurm_jobs.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = json.loads(self.submitted_path.read_text()) if self.submitted_path.exists() else {}
            runs.write_json(self.submitted_path, change(known))

    def _remember(self, submitted: dict[str, str]) -> None:
        """Notes Slurm's numbers of jobs by their names."""
        self._change_known(lambda known: known | submitted)

    def _forget(self, name: str, number: str) -> None:
        """Removes a job that ended, unless another command has submitted it again."""
        self._change_known(lambda known: {key: job for key, job in known.items() if (key, job) != (name, number)})

    def _find_submitted(self, jobs: list[Job]) -> None:
        """Jobs that an earlier command left in Slurm's queue."""
        import submitit

        known = json.loads(self.submitted_path.read_text()) if self.submitted_path.exists() else {}
        for job in jobs:
            if job.state != "waiting" or job.name not in known:
                continue
            handle = submitit.SlurmJob(self.cluster.folder / "submitit", known[job.name])
            if not handle.done(force_check=True):
                self.handles[job.name] = handle
                job.state, self.started[job.name] = "running", time.monotonic()
                print(f"in the queue: {job.name}, Slurm job {handle.job_id}", flush=True)

    # --- ending

    def _collect(self, jobs: list[Job]) -> None:
        """Takes note of jobs that ended."""
        for job in jobs:
            if job.state != "running" or not (job.name in self.ended or self.handles[job.name].done()):
                continue
            if job.name not in self.ended:
                self.ended[job.name] = time.monotonic()
                job.seconds = time.monotonic() - self.started[job.name]
                try:
                    job.code = self.handles[job.name].result()
                except Exception as error:  # whatever submitit raises: the job never came to its end
                    job.code = f"{type(error).__name__}: {error}".splitlines()[0]
            if job.done():
                job.state = "finished"
            elif job.code == 0:
                if time.monotonic() - self.ended[job.name] < GRACE[self.cluster.kind]:
                    continue
                job.state = "failed"
            elif not job.beaten and job.locked():  # another command started the same run
                job.state, job.beaten = "elsewhere", 1
            elif job.code in STOPPED and self.cluster.kind == "slurm":
                state = self._after_signal(job)
                if state is None:
                    continue
                job.state = state
            else:
                job.state = "stopped" if job.code in STOPPED else "failed"
            handle = self.handles.pop(job.name)
            del self.ended[job.name]
            self.slots.pop(job.name, None)
            if self.cluster.kind == "slurm":
                self._forget(job.name, handle.job_id)
            note = "" if job.state == "finished" else f", exit code {job.code}"
            word = "preempted, queued again" if job.state == "waiting" else job.state
            print(f"{word}: {job.name}, {job.seconds:.0f} s{note}", flush=True)

    def _after_signal(self, job: Job) -> State | None:
        """What becomes of a Slurm job whose script saved and ended at a signal: preemption sends it before submitit's.

        waiting: to be submitted again; stopped: it was cancelled; None: Slurm has not decided, or has it queued again.
        """
        handle = self.handles[job.name]
        state = handle.get_info().get("State", "").split()[:1]
        if state == ["CANCELLED"] or job.preempted >= MOST_PREEMPTIONS:
            return "stopped"
        restarted = state == ["RUNNING"] and time.monotonic() - self.ended[job.name] > RESTART_SECONDS
        if state in (["PENDING"], ["REQUEUED"]) or restarted:  # the same job goes on: forget how it ended
            handle.paths.result_pickle.unlink(missing_ok=True)
            del self.ended[job.name]
            return None
        if state in ([], ["RUNNING"], ["COMPLETING"]):
            return None
        job.preempted += 1
        return "waiting"

    def _stop(self, jobs: list[Job]) -> None:
        """Lets local jobs save and end. Raises Stopped."""
        running = [job for job in jobs if job.state == "running"]
        if self.cluster.kind == "slurm":
            ids = " ".join(sorted({self.handles[job.name].job_id for job in running}))
            raise runs.Stopped(
                f"{len(running)} jobs stay in Slurm's queue (scancel {ids}); the same command finds them and goes on"
            )
        print(f"stopping {len(running)} jobs, which save what they have", flush=True)
        told: set[int] = set()
        while any(job.state == "running" for job in running):
            for job in running:
                pid_file = self.cluster.command(job, 0).pid_file
                with contextlib.suppress(OSError, ValueError):
                    pid = int(pid_file.read_text())
                    if pid not in told:
                        os.kill(pid, signal.SIGTERM)
                        told.add(pid)
            self._collect(running)
            time.sleep(0.1)
        left = sum(job.state != "finished" for job in jobs)
        raise runs.Stopped(f"{left} jobs are left; the same command goes on with them")

    def _report(self, jobs: list[Job]) -> None:
        """Raises UserError if not all jobs are finished."""
        for job in jobs:
            if job.state in ("failed", "stopped") and job.done():  # another one that shared the work ended it
                job.state = "finished"
        bad = [job for job in jobs if job.state in ("failed", "stopped")]
        blocked = [job for job in jobs if job.state == "blocked"]
        if not bad and not blocked:
            return
        lines = [f"{len(bad)} of {len(jobs)} jobs did not finish:"]
        for job in bad:
            path = self.cluster.log(job)
            lines += ["", f"{job.name} ({job.state}, exit code {job.code}), log {path}", f"  {job.command}"]
            lines += [f"  | {line}" for line in log_tail(path)]
        if blocked:
            lines += ["", f"{len(blocked)} jobs were not started, since others that they need did not finish:"]
            lines += [f"  {job.name}" for job in blocked]
        lines += ["", "The same command tries them again and skips what is finished."]
        raise UserError("\n".join(lines))


def log_tail(path: Path) -> list[str]:
    """The last lines of a log, without the parts of progress bars that were drawn over."""
    if not path.exists():
        return ["no log: the job did not start"]
    text = path.read_text(errors="replace").rstrip()
    return [line.rsplit("\r", 1)[-1] for line in text.splitlines()[-LOG_LINES:]]
