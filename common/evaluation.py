"""NMSE of a linear probe, rollouts of decoded policies, returns relative to the expert's, and the result of a run."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import FrameStackObservation
from torch import Tensor

from common import pictures, recorded, runs
from common.cli import Progress, Stopped, UserError, signals_blocked, stop_requested
from common.dataset import Batch, Dataset, sequential
from common.distractors import DistractorConfig, clips_digest
from common.store import Damaged, atomic_path, read_json, write_json
from common.tasks import Task, get_task

Pairs = Iterable[tuple[Tensor, Tensor]]  # latent actions (B, d_z) and actions (B, A) clipped to [-1, 1]

# Evaluation episodes are the same for every method and training seed, and no dataset uses their seeds.
EVALUATION_SEED = 0xE7A1
LATENTS_KEPT = 8000  # of the test split at most, evenly spaced, for pictures


# ---------------------------------------------------------------------------------------------------------------------
# What frozen networks give


def outputs(function: Callable[[Batch], Tensor], dataset: Dataset, *, device: torch.device, **windows: Any) -> Pairs:
    """`function` of batches in order, on `device` and never in bfloat16, and their actions. Stopped at a signal.

    windows: as for `common.dataset.sequential`.
    """
    for batch in sequential(dataset, device=device, **windows):
        if stop_requested():
            raise Stopped("this pass over the data starts over")
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            values = function(batch)
        yield values.float() if values.dtype == torch.bfloat16 else values, batch.action


def table(
    run: runs.Run, name: str, function: Callable[[Batch], Tensor], dataset: Dataset, indices: np.ndarray, **windows: Any
) -> Tensor:
    """`function` (to (B, ...)) at the frames `indices` (N,), in their order, once per run: (N, ...) on the host."""

    def compute() -> Tensor:
        if not len(indices):
            return torch.empty(0)
        progress, rows, done = Progress(f"{run.script} {name}", len(indices), "transitions"), torch.empty(0), 0
        for values, _ in outputs(function, dataset, indices=indices, **windows):
            if not done:
                rows = torch.empty(len(indices), *values.shape[1:], dtype=values.dtype)
            rows[done : done + len(values)] = values.cpu()
            done += len(values)
            progress.update(len(values))
        progress.close()
        return rows

    return run.once(name, compute)


def held_out_batch(test_set: Dataset, device: torch.device, fields: tuple[str, ...], count: int = 8) -> Batch:
    """Some transitions of the test split, evenly spaced, for pictures; without masks if the set has none."""
    fields = tuple(name for name in fields if name != "masks" or test_set.has_masks)
    shown = test_set.transitions[:: max(1, test_set.num_transitions // count)][:count]
    return next(sequential(test_set, count, max_offset=1, device=device, fields=fields, indices=shown))


# ---------------------------------------------------------------------------------------------------------------------
# Linear probe


def linear_probe(pairs: Pairs) -> Tensor:
    """Least squares with bias from z to actions, from streamed float64 normal equations.

    Returns the weights, float64 (d_z + 1, A), bias last; the shortest of all solutions if z does not span its space.
    """
    count, xx, xy = 0, torch.zeros(()), torch.zeros(())
    for z, action in pairs:
        x = torch.cat([z.double(), z.new_ones(len(z), 1, dtype=torch.float64)], dim=1)
        count, xx, xy = count + len(z), xx + x.T @ x, xy + x.T @ action.double()
    xx, xy = (value.cpu().numpy() / count for value in (xx, xy))
    # Columns are brought to one scale first, so that the cut-off for null directions means the same for each.
    scale = np.sqrt(np.maximum(np.diag(xx), 1e-300))
    values, vectors = np.linalg.eigh(xx / scale[:, None] / scale[None])
    kept = values > values[-1] * len(values) * np.finfo(np.float64).eps
    solution = (vectors[:, kept] / values[kept]) @ (vectors[:, kept].T @ (xy / scale[:, None]))
    return torch.from_numpy(solution / scale[:, None])


def nmse(train: Pairs, test: Pairs, variance: float) -> dict[str, Any]:
    """NMSE of the linear probe, fitted on `train` and evaluated on `test`.

    The mean squared error over samples and dimensions, divided by `variance`, the mean per-dimension variance of the
    clipped train actions (`Dataset.action_variance`). The paper's equation sums over dimensions; its text and its
    numbers mean the average. 1 is the error of the mean action.

    Returns ``nmse`` and ``per_dimension``: each dimension's mean squared error over the same denominator.
    """
    weights = linear_probe(train)
    total, count = torch.zeros(weights.shape[1], dtype=torch.float64), 0
    for z, action in test:
        prediction = z.double() @ weights[:-1].to(z.device) + weights[-1].to(z.device)
        total += (prediction - action.double()).square().sum(0).cpu()
        count += len(z)
    error = total / count / variance
    return {"nmse": error.mean().item(), "per_dimension": error.tolist()}


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts


class _Episodes(gymnasium.Wrapper):
    """Runs the episodes first, first + stride, ... of the evaluation, one after the other, and idles after the last.

    Observations are stacks of three, the newest last; before an episode's first one they repeat it. The info of an
    episode's last step has its `number`, `return`, `length` and `success`.
    """

    def __init__(self, make: Callable[[], gymnasium.Env], first: int, stride: int, episodes: int) -> None:
        super().__init__(FrameStackObservation(make(), 3))
        self.number, self.stride, self.episodes = first - stride, stride, episodes
        self.last: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.number += self.stride
        self.total, self.length, self.success = 0.0, 0, False
        if self.number < self.episodes:
            seed = np.random.SeedSequence([EVALUATION_SEED, self.number]).generate_state(1)[0]
            self.last, _ = self.env.reset(seed=int(seed))
        return self.last, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.number >= self.episodes:
            return self.last, 0.0, False, False, {}
        self.last, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        self.length += 1
        self.success |= bool(info.get("success", False))
        ended = {"number": self.number, "return": self.total, "length": self.length, "success": self.success}
        return self.last, reward, terminated, truncated, ended if terminated or truncated else {}


def _maker(test_set: Dataset, distractors: DistractorConfig, args: Any) -> Callable[[], gymnasium.Env]:
    """What makes an environment of the evaluation: as the test split was rendered, with held-out backgrounds."""
    from common.envs import make_env  # only here: it imports the simulators

    return partial(
        make_env, test_set.env, split="test", renders=(test_set.render,), masks=False, quality=test_set.plan["quality"],
        distractors=distractors, image_size=test_set.image_size, max_steps=args.eval_steps,
    )  # fmt: skip


def held_out_distractors(test_set: Dataset, args: Any, run_dir: Path) -> DistractorConfig:
    """The distractors of evaluation episodes: those that made the test split, with the same clips.

    Call it before training: what the last stage needs is tried here, OpenGL too, if that stage is going to run.

    Args:
        args: a script's; clips_dir is the folder of the clips (DAVIS in its official layout, or the user's own; None:
            data/DAVIS), eval_steps the length of an episode (None: the task's).
        run_dir: of the run; a finished one needs nothing any more.

    Raises:
        UserError: the clips are missing or not the ones that made the test split, or nothing can be rendered.
    """
    if args.stages == "lam" or test_set.is_recorded or runs.is_finished(run_dir, args):
        return DistractorConfig()
    config = _distractors(test_set, args.clips_dir)
    env = _maker(test_set, config, args)()
    env.reset(seed=0)
    env.close()
    return config


def _distractors(test_set: Dataset, clips_dir: Path | None) -> DistractorConfig:
    settings = test_set.plan["distractors"]
    if test_set.render == "clean" or settings is None:
        return DistractorConfig()
    kind, folder = settings["backgrounds"], Path("data/DAVIS") if clips_dir is None else clips_dir
    clips = settings["clips"]
    config = DistractorConfig(
        backgrounds=str(folder) if kind == "folder" else kind,
        davis_dir=folder,
        num_videos=None if clips is None else len(clips),
        camera_scale=settings["camera_scale"],
        color_scale=settings["color_scale"],
    )
    if clips is None:  # imported from the paper's authors, whose clips are not known
        return config
    if clips_dir is not None and not clips_dir.is_dir():
        raise UserError(f"--clips-dir {clips_dir} is no folder")
    try:
        digest = clips_digest(config, get_task(test_set.env), "test", test_set.image_size)
    except UserError as error:
        raise UserError(
            f"the evaluation needs the clips that made {test_set.folder}; name their folder with --clips-dir ({error})"
        ) from error
    if digest != clips:
        raise UserError(
            f"the clips in {folder} are not those that made {test_set.folder} ({', '.join(clips)}); "
            "name the folder that make_dataset.py used: --clips-dir DIR"
        )
    return config


def _start(makers: list[Callable[[], gymnasium.Env]]) -> gymnasium.vector.VectorEnv:
    """Environments side by side, in a process each if there are several."""
    autoreset = gymnasium.vector.AutoresetMode.NEXT_STEP
    if len(makers) == 1:
        return gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=autoreset)
    with signals_blocked():
        return gymnasium.vector.AsyncVectorEnv(makers, context="spawn", autoreset_mode=autoreset)


def rollout(
    act: Callable[[Tensor], Tensor], test_set: Dataset, distractors: DistractorConfig, args: Any, device: torch.device
) -> dict[str, Any]:
    """Runs the deterministic policy `act` in the environments of a test split, on held-out backgrounds.

    Args:
        act: uint8 frames (N, 3, H, W, 3), the newest last, to actions (N, A).
        distractors: see `held_out_distractors`.
        args: a script's; its eval_envs environments, one process each, do not change the eval_episodes episodes.

    Returns ``return_mean``, ``return_std``, ``returns``, ``lengths``, ``max_steps`` and, on Meta-World,
    ``success_rate``.

    Raises:
        Stopped: a signal arrived.
    """
    episodes, task = args.eval_episodes, get_task(test_set.env)
    num_envs = min(args.eval_envs, episodes)
    make = _maker(test_set, distractors, args)
    makers = [partial(_Episodes, make, first, num_envs, episodes) for first in range(num_envs)]
    returns, lengths, successes = np.full(episodes, np.nan), np.zeros(episodes, int), np.zeros(episodes, bool)
    progress, envs = Progress("evaluation", episodes, "episodes"), None
    try:
        envs = _start(makers)
        observation, _ = envs.reset()
        while not lengths.all():  # an episode that has not ended has no length yet
            if stop_requested():
                raise Stopped("these episodes start over")
            with torch.inference_mode():
                frames = torch.from_numpy(observation[f"{test_set.render}/observation"])
                action = act(frames.to(device)).float().cpu().numpy()
            observation, *_, info = envs.step(np.clip(action, -1, 1))
            for env in np.flatnonzero(info.get("_number", ())):
                number = info["number"][env]
                returns[number], lengths[number] = info["return"][env], info["length"][env]
                successes[number] = info["success"][env]
                progress.update(1, f"return {np.nanmean(returns):.1f}")
    except (EOFError, ConnectionError) as error:
        if stop_requested():  # the signal ended the environments' processes too
            raise Stopped("these episodes start over") from error
        raise UserError(
            "an environment's process was killed, as a machine that runs out of memory does; try fewer --eval-envs "
            "and rerun the same command to resume"
        ) from error
    finally:
        if envs is not None:
            with contextlib.suppress(EOFError, ConnectionError):
                envs.close()
        progress.close()
    result = {
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "returns": returns.tolist(),
        "lengths": lengths.tolist(),
        "max_steps": args.eval_steps or task.max_steps,
    }
    if task.suite == "dmw":
        result["success_rate"] = float(successes.mean())
    return result


def normalised_score(rolled: dict[str, Any], task: Task, dataset: Dataset) -> dict[str, float | None]:
    """NR (DCS) or NSR (Meta-World) against both denominators: the paper's expert, and the one that made `dataset`.

    A score can only be compared with one over as many steps: the first is None if the episodes had fewer steps than the
    task's (on Meta-World: had to end after fewer), the second if they had not as many as the episodes in `dataset`.
    """
    if task.suite == "dmw":
        assert dataset.episode_success is not None
        score, expert = rolled["success_rate"], float(dataset.episode_success.mean())
        full = rolled["max_steps"] == task.max_steps
        same = rolled["max_steps"] == dataset.plan["episode_length"]
    else:
        score, expert = rolled["return_mean"], dataset.mean_return
        steps, made = set(rolled["lengths"]), set((np.diff(dataset.episode_start) - 1).tolist())
        full, same = steps == {task.max_steps}, steps == made
    return {
        "normalised_paper": score / task.expert_score if full else None,
        "normalised_dataset": score / expert if same and expert > 0 else None,
    }


# ---------------------------------------------------------------------------------------------------------------------
# The result of a run


def _log(run: runs.Run, metrics: dict[str, float | None]) -> None:
    """Logs the metrics of the evaluation, in place of earlier ones: with fewer label budgets, or from before a kill."""
    run.rewind_metrics("eval", -1)
    run.log("eval", 0, {name: value for name, value in metrics.items() if value is not None})


def probe_now(run: runs.Run, encode: Callable[[Batch], Tensor], **windows: Any) -> float:
    """NMSE of latent actions `encode` (B, d_z) of a batch, from the run's train split to its test split."""
    pairs = (outputs(encode, split, **windows) for split in (run.train_set, run.test_set))
    return nmse(*pairs, run.train_set.action_variance)["nmse"]


def probe(
    run: runs.Run,
    encode: Callable[[torch.nn.Module, Batch], Tensor],
    model: torch.nn.Module,
    untrained: torch.nn.Module,
    latents: Tensor,
    **windows: Any,
) -> dict[str, Any]:
    """`nmse` of a trained model, and as `untrained` that of its control: the same model with its initial weights.

    Saves latent actions of the test split, and for a set of recorded videos those of all its transitions. Empty for a
    set without actions.

    Args:
        encode: a model and a batch to latent actions (B, d_z).
        latents: of the trained model for all transitions of the train split, (N, d_z).
        windows: batch_size, device, max_offset and fields of the batches.
    """
    train_set, test_set = run.train_set, run.test_set

    def control() -> float:
        """Computed once for all runs that begin with the same latent actions, since training does not change it."""
        on_cpu = windows | {"device": torch.device("cpu")}  # where the same weights give the same bits
        first, _ = next(iter(outputs(partial(encode, copy.deepcopy(untrained).cpu()), test_set, **on_cpu)))
        data = [[split.hash, split.render, split.mask_hash, split.attached] for split in (train_set, test_set)]
        begin = json.dumps(data, sort_keys=True).encode() + first.cpu().numpy().tobytes()
        path = Path(run.args.runs_dir) / "controls" / f"{run.args.env}-{hashlib.sha256(begin).hexdigest()[:16]}.json"
        with contextlib.suppress(FileNotFoundError, Damaged):
            return read_json(path, float)
        value = probe_now(run, partial(encode, untrained), **windows)
        write_json(path, value)
        return value

    def compute() -> dict[str, Any]:
        held_out = [(z.cpu(), action.cpu()) for z, action in outputs(partial(encode, model), test_set, **windows)]
        z, action = (torch.cat(column) for column in zip(*held_out))
        held_out = list(zip(z.split(65536), action.split(65536)))  # so that they are in memory once
        if test_set.is_recorded:
            for split, of_split in ((train_set, latents), (test_set, z)):
                recorded.save_latents(run.dir / "latents", split, of_split)
        if not train_set.action_dim:
            return {}
        step = -(-len(z) // LATENTS_KEPT)
        with atomic_path(run.dir / "latents.npz") as temporary:
            np.savez(temporary, z=z[::step], action=action[::step], step=step)
        actions = torch.from_numpy(train_set.action[train_set.transitions].clip(-1, 1))
        trained = nmse(zip(latents.split(65536), actions.split(65536)), held_out, train_set.action_variance)
        probed = trained | {"untrained": control()}
        _log(run, {"eval/nmse": probed["nmse"], "eval/nmse_untrained": probed["untrained"]})
        print(f"NMSE {probed['nmse']:.4f}, untrained {probed['untrained']:.4f}", flush=True)
        return probed

    return run.once("probe", compute)


def evaluate(
    run: runs.Run,
    act: Callable[[Tensor, torch.nn.Module], Tensor],
    decoders: dict[int, torch.nn.Module],
    distractors: DistractorConfig,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Rolls out the policy with each decoder in turn; on recorded videos, compares its actions with those recorded.

    What was evaluated before is not repeated.

    Args:
        act: uint8 frames (N, 3, H, W, 3), the newest last, and a decoder to actions (N, A).
        decoders: label budget -> the decoder that was trained with it.
        distractors: of the evaluation, see `held_out_distractors`.

    Returns for each decoder ``num_labels`` and what `rollout` and `normalised_score` give, or `recorded.open_loop`.
    """
    args, train_set, test_set = run.args, run.train_set, run.test_set

    def evaluate_decoder(decoder: torch.nn.Module, num_labels: int) -> dict[str, Any]:
        policy = partial(act, decoder=decoder)
        if test_set.is_recorded:
            labelled = train_set.labelled(num_labels, args.seed)
            errors = recorded.open_loop(
                policy, labelled, train_set, test_set, batch_size=args.batch_size, device=device
            )
            print(", ".join(f"{name} {error:.4f}" for name, error in errors["errors"].items()), flush=True)
            return errors
        rolled = rollout(policy, test_set, distractors, args, device)
        return normalised_score(rolled, get_task(args.env), train_set) | rolled

    decoded = {entry["num_labels"]: entry for entry in run.earlier.get("decoders", [])}
    for num_labels in sorted(decoders.keys() - decoded.keys()):
        stage = runs.of_budget("open_loop" if test_set.is_recorded else "rollout", num_labels, args)
        evaluated = run.once(stage, partial(evaluate_decoder, decoders[num_labels], num_labels))
        decoded[num_labels] = {"num_labels": num_labels} | evaluated
    return [decoded[num_labels] for num_labels in sorted(decoded)]


def write_result(
    run: runs.Run,
    probed: dict[str, Any],
    decoded: list[dict[str, Any]],
    networks: dict[str, torch.nn.Module],
    labelled: np.ndarray,
    drawn: list[Path],
) -> None:
    """Draws the curves and writes the result of a run; its metrics are those of the largest label budget.

    Args:
        probed, decoded: from `probe` and `evaluate`; the latter is empty after stage 1 alone.
        networks: name -> network, whose parameters are counted.
        labelled: global indices of the labelled transitions.
        drawn: the pictures of the run.
    """
    metrics = {"eval/nmse": probed["nmse"], "eval/nmse_untrained": probed["untrained"]} if probed else {}
    best = decoded[-1] if decoded else {}
    metrics |= {f"eval/open_loop_{name}": error for name, error in best.get("errors", {}).items()}
    scores = ("return_mean", "return_std", "normalised_paper", "normalised_dataset", "success_rate")
    metrics |= {f"eval/{name.removesuffix('_mean')}": best[name] for name in scores if name in best}
    _log(run, metrics)
    drawn = [
        *drawn,
        *sorted(run.dir.glob("latents/*.png")),
        pictures.curves(run.dir / "curves.png", runs.read_metrics(run.dir)),
    ]
    episodes, counts = np.unique(run.train_set.episode_of_frame[labelled], return_counts=True)
    run.write_result(
        metrics,
        parameters={
            name: sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
            for name, network in networks.items()
        },
        nmse_per_dimension=probed.get("per_dimension"),
        decoders=decoded,
        labelled_transitions=len(labelled),
        labelled_episodes=dict(zip(episodes.tolist(), counts.tolist())),  # episode: how many of its first transitions
        dataset={split.split: split.summary() for split in (run.train_set, run.test_set)},
        pictures=[str(path) for path in drawn],
    )
