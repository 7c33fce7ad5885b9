"""What the experts do, beside the paper's numbers: return or success rate, lengths and action variance of every task.

    python -m benchmarks.experts --episodes 100 --out benchmarks/results/experts.json

Physics only, no rendering. Actions are clipped to [-1, 1] before their variance is taken per dimension over all steps
of all episodes, and averaged over dimensions, as in NMSE. Episode i of a task has the same seed for all experts.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common import runs
from common.envs import make_env
from common.errors import UserError
from common.experts import load_expert
from common.tasks import TASKS, get_task


@dataclass
class Args:
    envs: tuple[str, ...] = tuple(TASKS)
    """tasks to measure"""
    expert: Literal["student", "laom"] = "student"
    """expert of the Control Suite's tasks; those of Meta-World have their scripted one"""
    expert_dir: Path | None = None
    """where the Control Suite's expert is, if not in the usual place"""
    episodes: int = 100
    """episodes of each task"""
    seed: int = 0
    """seed of the first episode"""
    out: Path | None = None
    """also write the measurements to this file, as JSON"""


def measure(name: str, args: Args, progress: runs.Progress) -> dict[str, Any]:
    """Plays the expert of one task."""
    task = get_task(name)
    dmw = task.suite == "dmw"
    expert = load_expert(name, "scripted" if dmw else args.expert, None if dmw else args.expert_dir)
    env = make_env(name, renders=())
    actions, returns, lengths, successes = [], [], [], []
    for episode in range(args.episodes):
        observation, _ = env.reset(seed=args.seed + episode)
        total, steps, done, info = 0.0, 0, False, {}
        while not done:
            if runs.stop_requested():
                raise runs.Stopped("nothing is written")
            actions.append(np.clip(expert.act(observation["state"]), -1, 1))
            observation, reward, terminated, truncated, info = env.step(actions[-1])
            total, steps, done = total + reward, steps + 1, terminated or truncated
        returns.append(total)
        lengths.append(steps)
        successes.append(bool(info.get("success", False)))
        progress.update(1, name)
    env.close()
    played = np.array(actions, np.float64)
    result = {
        "env": name,
        "expert": expert.name,
        "expert_sha256": expert.sha256,
        "episodes": args.episodes,
        "return_mean": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "returns": np.round(returns, 1).tolist(),
        "length_mean": float(np.mean(lengths)),
        "length_min": min(lengths),
        "length_max": max(lengths),
        "action_variance": float(played.var(0).mean()),
        "action_variance_per_dimension": played.var(0).tolist(),
        "paper_action_variance": task.action_variance,
        "paper_score": task.expert_score,
    }
    if dmw:
        result["success_rate"] = float(np.mean(successes))
        succeeded = np.repeat(successes, lengths)
        for kind, chosen in (("succeeded", succeeded), ("failed", ~succeeded)):
            result[f"action_variance_{kind}"] = float(played[chosen].var(0).mean()) if chosen.any() else None
    return result


def table(measurements: list[dict[str, Any]]) -> str:
    """The measurements as a Markdown table."""
    rows = [
        "| env | expert | return or success rate | paper | steps per episode | action variance | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in measurements:
        score = f"{entry['return_mean']:.1f} ± {entry['return_std']:.1f}"
        if "success_rate" in entry:
            score = f"{entry['success_rate']:.2f}"
        rows.append(
            f"| {entry['env']} | {entry['expert']} | {score} | {entry['paper_score']} | {entry['length_mean']:.0f} "
            f"({entry['length_min']} to {entry['length_max']}) | {entry['action_variance']:.4f} "
            f"| {entry['paper_action_variance']} |"
        )
    return "\n".join(rows)


def main(args: Args) -> None:
    if args.episodes < 1 or not args.envs:
        raise UserError("--episodes must be at least 1, and --envs needs one task")
    for name in args.envs:
        get_task(name)
    progress = runs.Progress("experts", args.episodes * len(args.envs), "episodes")
    measurements = [measure(name, args, progress) for name in args.envs]
    progress.close()
    print(table(measurements))
    if args.out is not None:
        words = ["EXPERT_DIR" if word == str(args.expert_dir) else word for word in sys.argv[1:]]
        result = {
            "command": shlex.join(["python", "-m", "benchmarks.experts", *words]),
            "commit": runs.git_commit(),
            "machine": runs.machine(),
            "versions": runs.versions(),
            "measurements": measurements,
        }
        runs.write_json(args.out, result)
        print(f"written: {args.out}")


if __name__ == "__main__":
    runs.cli(main, Args())
