"""Distils small expert policies from the experts that collected the paper's data (DAgger, Ross et al. 2011).

A student drives the simulator, its teacher labels every state that the student visits, and the student is fitted to
all labels so far; so the student learns the corrections that it needs itself. The teachers are those published with
LAOM (dunnolab/laom, Apache-2.0); the students in `experts/` make every script run without downloading them.

    python make_experts.py --env cheetah-run

takes 2 to 3 minutes of one CPU core (humanoid-walk: 5) and prints the returns of teacher and student.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium
import numpy as np
import torch
from safetensors.numpy import save
from torch import nn

from common.cli import Count, NotNegative, Positive, Seed, Stopped, UserError, cli, stop_requested
from common.envs import make_env
from common.experts import (
    EXPERT_FORMAT_VERSION,
    LAOM_FILES,
    STUDENT_DIR,
    Expert,
    load_expert,
    student_from_tensors,
    weights_sha256,
)
from common.runs import jsonable, versions
from common.store import Taken, atomic_path, claim
from common.tasks import get_task


@dataclass
class Args:
    env: Literal["cheetah-run", "walker-run", "hopper-hop", "humanoid-walk", "all"] = "cheetah-run"
    """Task whose teacher is distilled; "all" makes the four experts one after the other."""
    expert_dir: Path | None = None
    """Folder with the LAOM checkpoints; by default they are downloaded once (about 2 to 4 MB each)."""
    output_dir: Path = STUDENT_DIR
    """Where <env>.safetensors is written."""
    seed: Seed = 0
    """Fixes the rollouts, the noise, the initial weights and the batches."""
    hidden_size: Count | None = None
    """Width of the two hidden layers; by default 160 (humanoid-walk: 256)."""
    rounds: Count = 8
    """DAgger rounds: the teacher drives in the first, the student in the others."""
    episodes_per_round: Count = 6
    """Episodes per round."""
    max_steps: Count | None = None
    """Steps per episode; by default the task's (1000)."""
    action_noise: NotNegative = 0.2
    """Standard deviation of the noise on the executed actions, in every second round."""
    updates_per_round: Count = 2000
    """Optimizer updates after each round but the last."""
    final_updates: Count = 16000
    """Optimizer updates after the last round; the learning rate falls to zero."""
    batch_size: Count = 512
    """States per update."""
    learning_rate: Positive = 1e-3
    """Of Adam."""
    eval_episodes: Count = 20
    """Episodes of the evaluation; teacher and student start from the same seeds."""


def distillation_loss(prediction: torch.Tensor, teacher_action: torch.Tensor) -> torch.Tensor:
    """Mean squared error to the clipped teacher action, (B, A) each.

    The simulator clips actions to +-1, so where the teacher saturates, a prediction beyond the bound is right too.
    """
    target = teacher_action.clamp(-1, 1)
    error = prediction - target
    overshoot = (target.abs() == 1) & (error * target > 0)
    return error.masked_fill(overshoot, 0).square().mean()


def check_signal() -> None:
    """Raises Stopped if a signal has asked for the end."""
    if stop_requested():
        raise Stopped("the expert was not written and starts over")


def rollout(
    env: gymnasium.Env, driver: Expert, seeds: list[int], noise: float = 0.0, noise_seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One episode per seed; all have the same length T.

    Returns states float32 (T, N, S), the driver's clipped actions float32 (T, N, A), to which the noise is added only
    for the simulator, and returns float64 (N,).
    """
    states, actions, returns = [], [], []
    for seed in seeds:
        check_signal()
        generator = np.random.default_rng([noise_seed, seed])
        state, done, total = env.reset(seed=seed)[0]["state"], False, 0.0
        states.append([])
        actions.append([])
        while not done:
            action = driver.act(state).clip(-1, 1)
            states[-1].append(state)
            actions[-1].append(action)
            if noise:
                action = action + noise * generator.standard_normal(len(action), np.float32)
            observation, reward, terminated, truncated, _ = env.step(action)
            state, done, total = observation["state"], terminated or truncated, total + reward
        returns.append(total)
    return np.stack(states, axis=1), np.stack(actions, axis=1), np.array(returns)


def distil(args: Args, env: gymnasium.Env, teacher: Expert) -> dict[str, np.ndarray]:
    """DAgger: returns the fitted student's tensors, as `student_from_tensors` takes them."""
    task, generator = get_task(teacher.env), torch.Generator().manual_seed(args.seed)
    hidden_size = args.hidden_size or (256 if teacher.env == "humanoid-walk" else 160)
    torch.manual_seed(args.seed)
    student = nn.Sequential(  # of normalised states
        nn.Linear(task.state_dim, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, task.action_dim),
    )
    optimizer = torch.optim.Adam(student.parameters())
    states = np.empty((0, task.state_dim), np.float32)
    labels = np.empty((0, task.action_dim), np.float32)
    tensors: dict[str, np.ndarray] = {}
    for index in range(args.rounds):
        driver = student_from_tensors(teacher.env, tensors) if tensors else teacher
        first = index * args.episodes_per_round
        seeds = [episode_seed(args.seed, first + i) for i in range(args.episodes_per_round)]
        noise = args.action_noise if index % 2 else 0.0
        visited, _, returns = rollout(env, driver, seeds, noise, args.seed)
        visited = visited.reshape(-1, task.state_dim)
        states = np.concatenate([states, visited])
        labels = np.concatenate([labels, teacher.act(visited)])

        if index == 0:
            mean, std = states.mean(0), np.maximum(states.std(0), 1e-2)  # a constant entry must not blow up
        x, y = torch.from_numpy(np.clip((states - mean) / std, -10, 10)), torch.from_numpy(labels)
        last = index == args.rounds - 1
        updates = args.final_updates if last else args.updates_per_round
        running = 0.0
        for update in range(updates):
            check_signal()
            scale = 0.5 * (1 + np.cos(np.pi * update / updates)) if last else 1.0
            optimizer.param_groups[0]["lr"] = args.learning_rate * scale
            batch = torch.randint(len(x), (args.batch_size,), generator=generator)
            loss = distillation_loss(student(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += (loss.item() - running) * max(0.01, 1 / (update + 1))
        tensors = {"mean": mean, "std": std}
        for number, layer in enumerate(student[::2]):
            tensors[f"{number}.weight"] = layer.weight.detach().numpy().copy()
            tensors[f"{number}.bias"] = layer.bias.detach().numpy().copy()
        print(
            f"  round {index + 1}/{args.rounds}: {'student' if index else 'teacher'} returns {returns.mean():.0f}"
            f" with action noise {noise}; loss {running:.4f}",
            flush=True,
        )
    return tensors


def episode_seed(seed: int, index: int, evaluation: bool = False) -> int:
    """Seed of an episode. Evaluation has odd ones, the same for every `seed`; training has even ones."""
    return 2 * index + 1 if evaluation else 2 * (10_000 * seed + index)


def evaluate(env: gymnasium.Env, policy: Expert, seeds: list[int]) -> dict[str, float]:
    """Mean and deviation of the return, and the mean per-dimension variance of the actions, as the paper's table."""
    _, actions, returns = rollout(env, policy, seeds)
    variance = float(actions.var(axis=(0, 1), dtype=np.float64).mean())
    print(f"  {policy.name} returns {returns.mean():.1f} +- {returns.std():.1f}, action variance {variance:.3f}")
    return {
        "return_mean": round(returns.mean(), 3),
        "return_std": round(returns.std(), 3),
        "action_variance": round(variance, 4),
    }


def save_student(path: Path, tensors: dict[str, np.ndarray], metadata: dict) -> None:
    """Writes a safetensors file, whole or not at all. The header is sorted, so equal content gives equal bytes."""
    text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    content = save(tensors)
    size = int.from_bytes(content[:8], "little")
    header = {"__metadata__": dict(sorted(text.items()))} | json.loads(content[8 : 8 + size])
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with atomic_path(path) as temporary:
        Path(temporary).write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + size :])


def make_expert(args: Args, env_name: str, path: Path) -> None:
    """Distils, evaluates and writes one expert."""
    teacher = load_expert(env_name, "laom", args.expert_dir)
    env = make_env(env_name, renders=(), max_steps=args.max_steps)
    tensors = distil(args, env, teacher)
    seeds = [episode_seed(args.seed, i, evaluation=True) for i in range(args.eval_episodes)]
    teacher_scores = evaluate(env, teacher, seeds)
    student_scores = evaluate(env, student_from_tensors(env_name, tensors), seeds)
    metadata = {
        "format_version": EXPERT_FORMAT_VERSION,
        "env": env_name,
        "teacher": "dunnolab/laom (Apache-2.0), distilled",
        "teacher_sha256": teacher.sha256,
        "weights_sha256": weights_sha256(tensors),
        "hidden_sizes": [len(tensors[f"{layer}.bias"]) for layer in (0, 1)],
        **student_scores,
        **{f"teacher_{name}": value for name, value in teacher_scores.items()},
        "episodes": args.eval_episodes,
        "seed": args.seed,
        "settings": {k: v for k, v in jsonable(args).items() if k not in ("env", "expert_dir", "output_dir", "seed")},
        "versions": versions(),
    }
    save_student(path, tensors, metadata)
    ratio = student_scores["return_mean"] / teacher_scores["return_mean"]
    print(f"  wrote {path}, {ratio:.3f} of the teacher's return")


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small matrices gain nothing from more, and the sums keep their order
    for name in LAOM_FILES if args.env == "all" else (args.env,):
        print(f"{name}: {args.rounds} rounds of {args.episodes_per_round} episodes", flush=True)
        path = args.output_dir / f"{name}.safetensors"
        try:
            with claim(path):  # where it cannot be written shows before minutes of training
                make_expert(args, name, path)
        except Taken:
            raise UserError(f"another process makes {path}") from None


if __name__ == "__main__":
    cli(main, Args())
