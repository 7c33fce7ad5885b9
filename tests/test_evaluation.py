"""Rollouts against a plain loop, normalised scores, refused clips, and what is computed of frozen networks."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from methods import CPU

import lapo
from common import evaluation, runs
from common.cli import UserError
from common.dataset import Batch, Dataset
from common.distractors import DistractorConfig
from common.envs import make_env
from common.experts import load_expert
from common.tasks import get_task

TASK = get_task("cheetah-run")
DISTRACTORS = DistractorConfig(backgrounds="synthetic", num_videos=1)
STEPS, EPISODES = 6, 5


def seed_of(episode: int) -> int:
    return int(np.random.SeedSequence([evaluation.EVALUATION_SEED, episode]).generate_state(1)[0])


def act(frames: torch.Tensor) -> torch.Tensor:
    """A policy that depends on every frame of the stack: uint8 (N, 3, H, W, 3) to (N, 6)."""
    mean = frames.double().mean((2, 3, 4)) - frames[:, :, 20:40].double().mean((2, 3, 4))  # (N, 3)
    return torch.cat([torch.sin(mean), torch.cos(3 * mean)], dim=1)


@pytest.fixture(scope="module")
def plain_loop() -> list[float]:
    """The returns of the same episodes, one after the other in one environment, with the stack written out."""
    env = make_env(
        "cheetah-run", split="test", renders=("distractor",), masks=False, quality="fast",
        distractors=DISTRACTORS, max_steps=STEPS,
    )  # fmt: skip
    returns = []
    for episode in range(EPISODES):
        frames, total = [env.reset(seed=seed_of(episode))[0]["distractor/observation"]] * 3, 0.0
        for _ in range(STEPS):
            action = act(torch.from_numpy(np.stack(frames[-3:])[None]))[0].float().numpy()
            observation, reward, *_ = env.step(action)
            frames.append(observation["distractor/observation"])
            total += reward
        returns.append(total)
    env.close()
    return returns


@pytest.mark.parametrize("num_envs", [1, 2])
def test_rollout_equals_a_plain_loop(num_envs: int, plain_loop: list[float]) -> None:
    """Also for a number of environments that does not divide the episodes."""
    rolled = evaluation.rollout(
        act, TASK, "distractor", DISTRACTORS, "fast",
        episodes=EPISODES, num_envs=num_envs, device=CPU, max_steps=STEPS,
    )  # fmt: skip
    assert rolled["returns"] == pytest.approx(plain_loop, rel=1e-9) and len(set(plain_loop)) == EPISODES
    assert rolled["lengths"] == [STEPS] * EPISODES
    scores = rolled["return_mean"], rolled["return_std"]
    assert scores == pytest.approx((np.mean(plain_loop), np.std(plain_loop)))


def test_success_ends_an_episode_and_is_counted() -> None:
    """Meta-World: the expert's own actions replayed; episodes have other lengths, and the last one never succeeds."""
    expert, script, lengths, returns = load_expert("drawer-close", "scripted"), [], [], []
    env = make_env("drawer-close", renders=(), max_steps=80)
    for episode in range(3):
        state, done = env.reset(seed=seed_of(episode))[0]["state"], False
        returns.append(0.0)
        lengths.append(0)
        while not done:
            script.append(expert.act(state) if episode < 2 else np.zeros(4, np.float32))
            observation, reward, terminated, truncated, _ = env.step(script[-1])
            state, done = observation["state"], terminated or truncated
            returns[-1] += reward
            lengths[-1] += 1
        script.append(np.ones(4, np.float32))  # the step that resets takes an action too, and ignores it
    actions = iter(script)
    rolled = evaluation.rollout(
        lambda frames: torch.from_numpy(next(actions))[None], get_task("drawer-close"), "clean", DISTRACTORS, "fast",
        episodes=3, num_envs=1, device=CPU, image_size=16, max_steps=80,
    )  # fmt: skip
    assert rolled["lengths"] == lengths and max(lengths[:2]) < lengths[2] == rolled["max_steps"] == 80
    assert rolled["returns"] == pytest.approx(returns) and rolled["success_rate"] == pytest.approx(2 / 3)


# --- scores and clips


@pytest.fixture(scope="module")
def test_set(planted_dir: Path) -> Dataset:
    return Dataset(planted_dir, "cheetah-run", "test")


@pytest.mark.parametrize(("steps", "paper", "dataset"), [(1000, 0.5, None), (20, None, 418.835 / 20), (30, None, None)])
def test_returns_are_compared_over_as_many_steps(test_set: Dataset, steps: int, paper: Any, dataset: Any) -> None:
    """The planted expert earns 20 in its 20 steps; the paper's 837.67 in 1000."""
    score = evaluation.normalised_score({"return_mean": 418.835, "lengths": [steps] * 2}, TASK, test_set)
    assert score == {"normalised_paper": pytest.approx(paper), "normalised_dataset": pytest.approx(dataset)}


def test_success_rate_is_compared_with_both_experts(tmp_path: Path) -> None:
    planted.write(tmp_path, env="door-open", action_dim=4, success=(True, False, True, True))
    rolled, task = {"success_rate": 0.6, "lengths": [3, 20]}, get_task("door-open")
    for steps, paper, dataset in ((500, 0.6 / 0.917, None), (20, None, 0.8)):
        score = evaluation.normalised_score(
            rolled | {"max_steps": steps}, task, Dataset(tmp_path, "door-open", "train")
        )
        assert score == {"normalised_paper": pytest.approx(paper), "normalised_dataset": pytest.approx(dataset)}


def test_the_evaluation_is_tried_before_training(planted_dir: Path, tmp_path: Path) -> None:
    """It has the distractors of the test split; other clips and too long episodes are refused."""
    dataset, args = Dataset(planted_dir, "cheetah-run", "test"), lapo.Args
    config = evaluation.held_out_distractors(dataset, args())
    assert (config.backgrounds, config.num_videos, config.camera_scale) == ("synthetic", 1, 0.1)
    with pytest.raises(UserError, match="--eval-steps is 1001, but cheetah-run ends after 1000 steps"):
        evaluation.held_out_distractors(dataset, args(eval_steps=1001))
    with pytest.raises(UserError, match="typo is no folder"):
        evaluation.held_out_distractors(dataset, args(clips_dir=tmp_path / "typo"))
    distractors = dataset.plan["distractors"]
    distractors["clips"] = dict.fromkeys(distractors["clips"], "0" * 64)
    with pytest.raises(UserError, match=r"the clips in \S+ are not those that made .* --clips-dir"):
        evaluation.held_out_distractors(dataset, args())
    distractors["backgrounds"] = "folder"
    with pytest.raises(UserError, match="folder of clips"):
        evaluation.held_out_distractors(dataset, args())
    assert evaluation.held_out_distractors(dataset, args(stages="lam")) == DistractorConfig()  # nothing is rolled out


# --- what frozen networks give


@pytest.mark.parametrize(("count", "step"), [(50, 1), (50, 3), (2001, 4)])
def test_latents_are_kept_evenly(count: int, step: int, tmp_path: Path) -> None:
    """Whatever the batches, every `step`-th pair from the first one; the pairs pass unchanged."""
    z, action = torch.randn(count, 3), torch.arange(count)[:, None].float()
    for size in (7, 512):
        path = tmp_path / f"{size}.npz"
        passed = list(evaluation.saved_on_the_way(zip(z.split(size), action.split(size)), path, step))
        assert torch.equal(torch.cat([pair[0] for pair in passed]), z)
        with np.load(path) as file:
            assert np.array_equal(file["z"], z[::step].numpy()) and file["step"] == step
            assert np.array_equal(file["action"], action[::step].numpy())


WINDOWS = {"batch_size": 16, "device": CPU, "max_offset": 1}


def test_a_table_is_computed_once_in_the_order_of_its_indices(test_set: Dataset, tmp_path: Path) -> None:
    run, calls = runs.Run(lapo.Args(runs_dir=tmp_path), "lapo", "test", {}), []

    def function(batch: Batch) -> torch.Tensor:
        calls.append(len(batch.index))
        return torch.stack([batch.index, batch.frames[:, 2, 5, 5, 0]], dim=1)

    indices = np.random.default_rng(0).permutation(test_set.transitions)
    for _ in range(2):
        rows = evaluation.table(run, "rows", function, test_set, indices, **WINDOWS)
        assert np.array_equal(rows.numpy(), np.stack([indices, test_set.frames(indices)[:, 5, 5, 0]], axis=1))
    assert calls == [16, 16, 8]
    run.close()


def test_a_control_is_shared_and_stage_1_has_no_scores(
    train_set: Dataset, test_set: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs whose untrained models agree on the first batch compute its NMSE once; another model gets its own."""
    monkeypatch.setattr(evaluation, "LATENTS_KEPT", 15)  # of 40

    def encode(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(model)
        return model(batch.frames[:, 2:4, ::8, ::8, 0].flatten(1) / 255)

    untrained, other, model = (torch.nn.Linear(32, 4) for _ in range(3))
    controls = []
    for variant, control, passes in (("a", untrained, 9), ("b", untrained, 1), ("c", other, 9)):
        calls: list[torch.nn.Module] = []
        run = runs.Run(lapo.Args(runs_dir=tmp_path), "lapo", variant, {})
        windows = WINDOWS | {"fields": ("frames",)}
        latents = evaluation.table(
            run, "latents", lambda batch: encode(model, batch), train_set, train_set.transitions, **windows
        )
        probed = evaluation.probe(run, encode, model, control, latents, train_set, test_set, **windows)
        assert calls.count(control) == passes
        sets = [evaluation.outputs(partial(encode, control), each, **windows) for each in (train_set, test_set)]
        assert probed["untrained"] == evaluation.nmse(*sets, train_set.action_variance)["nmse"]
        controls.append(probed["untrained"])
        with np.load(run.dir / "latents.npz") as file:
            assert file["step"] == 3 and len(file["z"]) == 14
        about = {"train_set": train_set, "test_set": test_set, "labelled": train_set.labelled(30, 1), "drawn": []}
        evaluation.write_result(run, probed, [], {"lam": model}, **about)
        result = json.loads((run.dir / "result.json").read_text())
        assert result["metrics"] == {"eval/nmse": probed["nmse"], "eval/nmse_untrained": probed["untrained"]}
        assert result["decoders"] == [] and result["parameters"] == {"lam": 32 * 4 + 4}
    assert controls[0] == controls[1] != controls[2] and len(list((tmp_path / "controls").iterdir())) == 2
