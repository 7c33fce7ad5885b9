"""Kills make_dataset.py, lapo.py and masklam.py at random moments, repeats the command and compares the files.

python -m benchmarks.kills --kills 5 --out benchmarks/results/kills.json
"""

import hashlib
import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import runs
from common.errors import UserError

DATA = "--env cheetah-run --quick --backgrounds synthetic --train-transitions 400 --test-transitions 100"
DATA += " --episode-length 50"
TRAIN = (
    "--env cheetah-run --quick --lam-updates 40 --policy-updates 40 --decoder-updates 200 --num-labels 200 --device cpu"
)
TRAIN += " --batch-size 16 --checkpoint-every 7 --eval-episodes 1 --eval-envs 1 --eval-steps 50"


@dataclass
class Args:
    kills: int = 5
    """kills of each script"""
    seed: int = 0
    """seed of the moments"""
    out: Path | None = None
    """JSON file for the outcome"""


def repeat(command: list[str], seconds: float | None) -> bool:
    """Runs a command, killed with SIGKILL (its process alone) after `seconds`; True if it ended before."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        message = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    if process.returncode:
        raise UserError(f"{shlex.join(command)} ended with {process.returncode}: {message}")
    return True


def digest(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 for shards and pictures, and of the weights for finished stages; names of all files.

    What holds times (result.json, metrics.jsonl, curves.png's file size) is listed by name only.
    """
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        found[name] = "present"
        if path.suffix in (".h5", ".npy") or path.name == "world_model.png":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.suffix == ".pt":
            state = torch.load(path, weights_only=True)
            weights = [*(state["model"] or {}).items(), *(state["probe"] or {}).items()]
            content = b"".join(key.encode() + value.numpy().tobytes() for key, value in weights)
            found[name] = hashlib.sha256(content).hexdigest()
    return found


def trial(script: str, flags: str, folder: Path, data: Path, kills: int, rng: random.Random) -> dict[str, Any]:
    """One undisturbed run against one that is killed `kills` times; raises UserError if the files differ."""

    def command(out: Path) -> list[str]:
        where = (
            ["--data-dir", str(out)] if script == "make_dataset" else ["--data-dir", str(data), "--runs-dir", str(out)]
        )
        return [sys.executable, f"{script}.py", *flags.split(), *where]

    start = time.monotonic()
    repeat(command(folder / "reference"), None)
    whole = time.monotonic() - start
    moments = []
    while len(moments) < kills:
        moment = rng.uniform(0.3, 1.0) * whole
        if repeat(command(folder / "killed"), moment):  # it got to its end first: kill another one
            break
        moments.append(round(moment, 2))
    repeat(command(folder / "killed"), None)
    expected, found = digest(folder / "reference"), digest(folder / "killed")
    if expected != found:
        names = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        raise UserError(f"{script}: after {len(moments)} kills these files differ: {', '.join(sorted(names))}")
    return {"seconds_undisturbed": whole, "kills_after_s": moments, "files": len(found), "identical": True}


def main(args: Args) -> None:
    rng = random.Random(args.seed)
    outcome: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = folder / "make_dataset" / "reference"
        for script, flags in (("make_dataset", DATA), ("lapo", TRAIN), ("masklam", TRAIN)):
            outcome[script] = []
            done = 0
            while done < args.kills:  # a run that is killed late may need fewer repetitions than kills
                place = folder / script if not outcome[script] else folder / f"{script}-{len(outcome[script])}"
                result = trial(script, flags, place, data, args.kills - done, rng)
                done += len(result["kills_after_s"])
                outcome[script].append(result)
            print(f"{script}: {done} kills, the same files", flush=True)
    if args.out:
        about = {
            "command": shlex.join(["python", "-m", "benchmarks.kills", *sys.argv[1:]]),
            "commit": runs.git_commit(),
        }
        runs.write_json(args.out, about | {"machine": runs.machine(), "versions": runs.versions(), "scripts": outcome})


if __name__ == "__main__":
    runs.cli(main, Args())
