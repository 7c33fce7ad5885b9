"""Distils small expert policies from the experts that collected the paper's data (DAgger, Ross et al. 2011).

A student drives the simulator, its teacher labels every state that the student visits, and the student is fitted to
all labels so far; so the student learns the corrections that it needs itself. The teachers are those published with
LAOM (dunnolab/laom, Apache-2.0); the students in `experts/` make every script run without downloading them.

    python make_experts.py --env cheetah-run

takes 2 to 3 minutes of one CPU core (humanoid-walk: 5) and prints the returns of teacher and student.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.numpy import save
from torch import nn
from tqdm import tqdm

from common.envs import make_env
from common.errors import UserError
from common.experts import (
    EXPERT_ENVS,
    EXPERT_FORMAT_VERSION,
    STUDENT_DIR,
    Expert,
    load_expert,
    student_from_tensors,
    weights_sha256,
)
from common.runs import Progress, Stopped, atomic_path, cli, jsonable, stop_requested, versions
from common.tasks import get_task


@dataclass
class Args:
    env: Literal["cheetah-run", "walker-run", "hopper-hop", "humanoid-walk", "all"] = "cheetah-run"
    """Task whose teacher is distilled; "all" makes the four experts one after the other."""
    expert_dir: Path | None = None
    """Folder with the LAOM checkpoints; by default they are downloaded once (about 2 to 4 MB each)."""
    output_dir: Path = STUDENT_DIR
    """Where <env>.safetensors is written."""
    seed: int = 0
    """Fixes the rollouts, the noise, the initial weights and the batches."""
    hidden_size: int | None = None
    """Width of the two hidden layers; by default 160 (humanoid-walk: 256)."""
    rounds: int = 8
    """DAgger rounds: the teacher drives in the first, the student in the others."""
    episodes_per_round: int = 6
    """Episodes per round, simulated side by side."""
    max_steps: int | None = None
    """Steps per episode; by default the task's (1000)."""
    action_noise: float = 0.2
    """Standard deviation of the noise on the executed actions, in every second round."""
    updates_per_round: int = 2000
    """Optimizer updates after each round but the last."""
    final_updates: int = 16000
    """Optimizer updates after the last round; the learning rate falls to zero."""
    batch_size: int = 512
    """States per update."""
    learning_rate: float = 1e-3
    """Of Adam."""
    eval_episodes: int = 20
    """Episodes of the evaluation; teacher and student start from the same seeds."""


class Student(nn.Module):
    """ReLU MLP on normalised states, clipped to +-10."""

    def __init__(self, mean: np.ndarray, std: np.ndarray, hidden_size: int, action_dim: int):
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(mean))
        self.register_buffer("std", torch.as_tensor(std))
        sizes = [len(mean), hidden_size, hidden_size, action_dim]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))

    def forward(self, state: torch.Tensor) -> torch.Tensor:  # (B, S) -> (B, A), not clipped
        x = ((state - self.mean) / self.std).clamp(-10, 10)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)

    def tensors(self) -> dict[str, np.ndarray]:
        return {key.removeprefix("layers."): value.numpy().copy() for key, value in self.state_dict().items()}


def distillation_loss(prediction: torch.Tensor, teacher_action: torch.Tensor) -> torch.Tensor:
    """Mean squared error to the clipped teacher action, (B, A) each.

    The simulator clips actions to +-1, so where the teacher saturates, a prediction beyond the bound is right too.
    """
    target = teacher_action.clamp(-1, 1)
    error = prediction - target
    overshoot = (target.abs() == 1) & (error * target > 0)
    return error.masked_fill(overshoot, 0).square().mean()


@dataclass
class Rollout:
    states: np.ndarray  # (T, S) float32
    actions: np.ndarray  # (T, A) float32, of the driver, without noise, clipped
    returns: np.ndarray  # (episodes,) float64


def rollout(
    envs: list, driver: Expert, seeds: list[int], tick: Callable[[], None], noise: float = 0.0, seed: int = 0
) -> Rollout:
    """One episode per seed, `len(envs)` side by side. `tick` is called after each simulated step of all of them."""
    states, actions, returns = [], [], []
    for start in range(0, len(seeds), len(envs)):
        group = list(zip(envs, seeds[start : start + len(envs)]))
        generators = [np.random.default_rng([seed, episode_seed]) for _, episode_seed in group]
        state = np.stack([env.reset(seed=episode_seed)[0]["state"] for env, episode_seed in group])
        total = np.zeros(len(group))
        done = False
        while not done:  # all episodes have the same length
            action = driver.act(state).clip(-1, 1)
            states.append(state)
            actions.append(action)
            if noise:
                action = action + noise * np.stack([g.standard_normal(action.shape[1], np.float32) for g in generators])
            steps = [env.step(a) for (env, _), a in zip(group, action.clip(-1, 1))]
            state = np.stack([step[0]["state"] for step in steps])
            total += [step[1] for step in steps]
            done = any(step[2] or step[3] for step in steps)
            tick()
        returns.extend(total)
    return Rollout(np.concatenate(states), np.concatenate(actions), np.array(returns))


def distil(args: Args, env_name: str, teacher: Expert, envs: list, tick: Callable[[], None]) -> Student:
    """DAgger: returns the fitted student."""
    generator = torch.Generator().manual_seed(args.seed)
    states = np.empty((0, teacher.state_dim), np.float32)
    labels = np.empty((0, teacher.action_dim), np.float32)
    student = optimizer = None
    for index in range(args.rounds):
        driver = teacher if student is None else student_from_tensors(env_name, student.tensors())
        first = index * args.episodes_per_round
        seeds = [episode_seed(args.seed, first + i) for i in range(args.episodes_per_round)]
        noise = args.action_noise if index % 2 else 0.0
        data = rollout(envs, driver, seeds, tick, noise=noise, seed=args.seed)
        states = np.concatenate([states, data.states])
        labels = np.concatenate([labels, teacher.act(data.states)])

        if student is None:
            hidden_size = args.hidden_size or (256 if env_name == "humanoid-walk" else 160)
            torch.manual_seed(args.seed)
            std = np.maximum(data.states.std(0), 1e-2)  # a constant entry must not blow up
            student = Student(data.states.mean(0), std, hidden_size, teacher.action_dim)
            optimizer = torch.optim.Adam(student.parameters())
        last = index == args.rounds - 1
        updates = args.final_updates if last else args.updates_per_round
        x, y = torch.from_numpy(states), torch.from_numpy(labels)
        running = 0.0
        for update in range(updates):
            scale = 0.5 * (1 + np.cos(np.pi * update / updates)) if last else 1.0
            optimizer.param_groups[0]["lr"] = args.learning_rate * scale
            batch = torch.randint(len(x), (args.batch_size,), generator=generator)
            loss = distillation_loss(student(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += (loss.item() - running) * max(0.01, 1 / (update + 1))
            tick()
        who = "teacher" if index == 0 else "student"
        noisy = f", action noise {noise}" if noise else ""
        tqdm.write(
            f"  round {index + 1}/{args.rounds}: {who} returns {data.returns.mean():.0f}{noisy}; loss {running:.4f}"
        )
    return student


def episode_seed(seed: int, index: int, evaluation: bool = False) -> int:
    """Seed of an episode. Evaluation has odd ones, the same for every `seed`; training has even ones."""
    return 2 * index + 1 if evaluation else 2 * (10_000 * seed + index)


def action_variance(actions: np.ndarray) -> float:
    """Mean per-dimension variance of clipped actions (T, A), as the paper's table has it."""
    return float(actions.clip(-1, 1).var(axis=0, dtype=np.float64).mean())


def save_student(path: Path, tensors: dict[str, np.ndarray], metadata: dict) -> None:
    """Writes a safetensors file, whole or not at all. The header is sorted, so equal content gives equal bytes."""
    text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    content = save(tensors, text)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with atomic_path(path) as temporary:
        Path(temporary).write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + size :])


def make_expert(args: Args, env_name: str) -> str:
    """Distils, evaluates and writes one expert; returns a row of the table of returns."""
    path = args.output_dir / f"{env_name}.safetensors"
    teacher = load_expert(env_name, "laom", args.expert_dir)
    envs = [make_env(env_name, renders=(), max_steps=args.max_steps) for _ in range(args.episodes_per_round)]
    steps = args.max_steps or get_task(env_name).max_steps
    eval_groups = -(-args.eval_episodes // args.episodes_per_round)
    updates = (args.rounds - 1) * args.updates_per_round + args.final_updates
    total = (args.rounds + 2 * eval_groups) * steps + updates
    # A step of all environments and an update take about the same time, so both count as one.
    progress = Progress(env_name, total, "steps and updates")

    def tick() -> None:
        progress.update(1)
        if stop_requested():
            raise Stopped(f"{path} was not written; `python make_experts.py --env {env_name}` starts it again")

    try:
        student = distil(args, env_name, teacher, envs, tick)
        tensors = student.tensors()
        policy = student_from_tensors(env_name, tensors)
        seeds = [episode_seed(args.seed, i, evaluation=True) for i in range(args.eval_episodes)]
        teacher_eval = rollout(envs, teacher, seeds, tick)
        student_eval = rollout(envs, policy, seeds, tick)
    finally:
        progress.close()
        for env in envs:
            env.close()

    ratio = student_eval.returns.mean() / teacher_eval.returns.mean()
    parameters = sum(p.numel() for p in student.parameters())
    metadata = {
        "format_version": EXPERT_FORMAT_VERSION,
        "env": env_name,
        "teacher": "dunnolab/laom (Apache-2.0), distilled",
        "teacher_sha256": teacher.sha256,
        "weights_sha256": weights_sha256(tensors),
        "hidden_sizes": [weight.shape[1] for weight, _ in policy.layers[:-1]],
        "return_mean": round(student_eval.returns.mean(), 3),
        "return_std": round(student_eval.returns.std(), 3),
        "teacher_return_mean": round(teacher_eval.returns.mean(), 3),
        "teacher_return_std": round(teacher_eval.returns.std(), 3),
        "action_variance": round(action_variance(student_eval.actions), 4),
        "teacher_action_variance": round(action_variance(teacher_eval.actions), 4),
        "episodes": args.eval_episodes,
        "seed": args.seed,
        "settings": {k: v for k, v in jsonable(args).items() if k not in ("env", "expert_dir", "output_dir", "seed")},
        "versions": versions(),
    }
    save_student(path, tensors, metadata)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    print(f"  wrote {path} ({parameters} parameters, sha256 {digest[:12]})")
    return (
        f"{env_name:<14} {metadata['teacher_return_mean']:7.1f} +- {metadata['teacher_return_std']:5.1f}"
        f" {metadata['return_mean']:9.1f} +- {metadata['return_std']:5.1f} {ratio:8.3f}"
        f" {metadata['teacher_action_variance']:11.3f} {metadata['action_variance']:8.3f}"
    )


def main(args: Args) -> None:
    for name in ("rounds", "episodes_per_round", "final_updates", "batch_size", "eval_episodes"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1.")
    torch.set_num_threads(1)  # small matrices gain nothing from more, and the sums keep their order
    names = EXPERT_ENVS if args.env == "all" else (args.env,)
    rows = [f"{'':<14} {'teacher':>16} {'student':>18} {'ratio':>8} {'action var.':>11} {'student':>8}"]
    for name in names:
        print(f"{name}: {args.rounds} rounds of {args.episodes_per_round} episodes", flush=True)
        rows.append(make_expert(args, name))
    print("\n".join(rows))


if __name__ == "__main__":
    cli(main, Args())
