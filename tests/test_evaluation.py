"""Rollouts against a plain loop, refused clips, and the denominators of normalised returns."""

from pathlib import Path

import numpy as np
import planted
import pytest
import torch

from common import evaluation
from common.dataset import Dataset
from common.distractors import DistractorConfig
from common.envs import make_env
from common.errors import UserError
from common.experts import load_expert
from common.tasks import get_task

TASK = get_task("cheetah-run")
DISTRACTORS = DistractorConfig(backgrounds="synthetic", num_videos=1)
STEPS, EPISODES = 6, 5


def act(frames: torch.Tensor) -> torch.Tensor:
    """A policy that depends on every frame of the stack: uint8 (N, 3, H, W, 3) to (N, 6)."""
    mean = frames.double().mean((2, 3, 4)) - frames[:, :, 20:40].double().mean((2, 3, 4))  # (N, 3)
    return torch.cat([torch.sin(mean), torch.cos(3 * mean)], dim=1)


def plain_loop() -> list[float]:
    """The same episodes, one after the other in one environment, with the stack written out."""
    env = make_env(
        "cheetah-run", split="test", renders=("distractor",), masks=False, quality="fast",
        distractors=DISTRACTORS, max_steps=STEPS,
    )  # fmt: skip
    returns = []
    for episode in range(EPISODES):
        seed = np.random.SeedSequence([evaluation.EVALUATION_SEED, episode]).generate_state(1)[0]
        frame = env.reset(seed=int(seed))[0]["distractor/observation"]
        frames, total = [frame, frame, frame], 0.0
        for _ in range(STEPS):
            action = act(torch.from_numpy(np.stack(frames[-3:])[None]))[0].float().numpy()
            observation, reward, *_ = env.step(action)
            frames.append(observation["distractor/observation"])
            total += reward
        returns.append(total)
    env.close()
    return returns


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_rollout_equals_a_plain_loop(num_envs: int) -> None:
    """For numbers of environments that divide the episodes and that do not."""
    rolled = evaluation.rollout(
        act, TASK, "distractor", DISTRACTORS, "fast",
        episodes=EPISODES, num_envs=num_envs, device=torch.device("cpu"), max_steps=STEPS,
    )  # fmt: skip
    expected = plain_loop()
    assert rolled["returns"] == pytest.approx(expected, rel=1e-9) and len(set(expected)) == EPISODES
    assert rolled["lengths"] == [STEPS] * EPISODES
    assert rolled["return_mean"] == pytest.approx(np.mean(expected))
    assert rolled["return_std"] == pytest.approx(np.std(expected))


@pytest.fixture(scope="module")
def test_set(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    data = planted.write(tmp_path_factory.mktemp("planted"), train=1, test=2, length=20, size=64)
    return Dataset(data, "cheetah-run", "test")


def test_held_out_distractors_are_those_of_the_test_split(test_set: Dataset) -> None:
    config = evaluation.held_out_distractors(test_set, TASK, None)
    assert (config.backgrounds, config.num_videos, config.camera_scale) == ("synthetic", 1, 0.1)


def test_other_clips_are_refused(test_set: Dataset, tmp_path: Path) -> None:
    test_set.plan["distractors"]["clips"] = dict.fromkeys(test_set.plan["distractors"]["clips"], "0" * 64)
    with pytest.raises(UserError, match="--clips-dir"):
        evaluation.held_out_distractors(test_set, TASK, None)
    with pytest.raises(UserError, match="no folder"):
        evaluation.held_out_distractors(test_set, TASK, tmp_path / "typo")
    assert not (tmp_path / "typo").exists()
    test_set.plan["distractors"]["backgrounds"] = "folder"
    with pytest.raises(UserError, match="folder of clips"):
        evaluation.held_out_distractors(test_set, TASK, None)


@pytest.mark.parametrize(
    ("lengths", "paper", "dataset"), [([1000, 1000], 0.5, None), ([20, 20], None, 418.835 / 20), ([30, 30], None, None)]
)
def test_returns_are_compared_over_as_many_steps(test_set: Dataset, lengths, paper, dataset) -> None:
    """The planted expert earns 20 in its 20 steps; the paper's 837.67 in 1000."""
    score = evaluation.normalised_score({"return_mean": 418.835, "lengths": lengths}, TASK, test_set)
    assert score == {"normalised_paper": pytest.approx(paper), "normalised_dataset": pytest.approx(dataset)}


# --- Meta-World ---


def test_success_ends_an_episode_and_is_counted() -> None:
    """The expert's own actions replayed: the episodes have other lengths, and the last one is cut before success."""
    task, expert, lengths, returns, script = (
        get_task("drawer-close"),
        load_expert("drawer-close", "scripted"),
        [],
        [],
        [],
    )
    env = make_env("drawer-close", renders=(), max_steps=80)
    for episode in range(3):
        seed = np.random.SeedSequence([evaluation.EVALUATION_SEED, episode]).generate_state(1)[0]
        state, total, done = env.reset(seed=int(seed))[0]["state"], 0.0, False
        before = len(script)
        while not done:
            script.append(expert.act(state) if episode < 2 else np.zeros(4, np.float32))
            observation, reward, terminated, truncated, _ = env.step(script[-1])
            state, total, done = observation["state"], total + reward, terminated or truncated
        lengths.append(len(script) - before)
        returns.append(total)
        script.append(np.ones(4, np.float32))  # the step that resets takes an action too, and ignores it
    actions = iter(script)

    def replay(frames: torch.Tensor) -> torch.Tensor:
        assert frames.shape == (1, 3, 16, 16, 3)
        return torch.from_numpy(next(actions))[None]

    rolled = evaluation.rollout(
        replay, task, "clean", DISTRACTORS, "fast",
        episodes=3, num_envs=1, device=torch.device("cpu"), image_size=16, max_steps=80,
    )  # fmt: skip
    assert rolled["lengths"] == lengths and lengths[:2] != [80, 80] and lengths[2] == 80
    assert rolled["returns"] == pytest.approx(returns) and rolled["max_steps"] == 80
    assert rolled["success_rate"] == pytest.approx(2 / 3)


def test_success_rate_is_compared_with_both_experts(tmp_path: Path) -> None:
    planted.write(tmp_path, env="door-open", action_dim=4, success=(True, False, True, True))
    train_set = Dataset(tmp_path, "door-open", "train")
    assert train_set.episode_success.tolist() == [True, False, True, True]
    rolled, task = {"success_rate": 0.6, "lengths": [3, 20]}, get_task("door-open")
    score = evaluation.normalised_score(rolled | {"max_steps": 500}, task, train_set)
    assert score == {"normalised_paper": pytest.approx(0.6 / 0.917), "normalised_dataset": None}
    score = evaluation.normalised_score(rolled | {"max_steps": 20}, task, train_set)
    assert score == {"normalised_paper": None, "normalised_dataset": pytest.approx(0.8)}


@pytest.mark.parametrize("count", [50, 8000, 20_001])
def test_latents_are_kept_evenly(count: int, tmp_path: Path) -> None:
    """Whatever the batches, every s-th pair from the first one, all of a small set and at most 8,000."""
    z = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    action = torch.arange(count)[:, None].float() / count
    kept = []
    for size in (7, 512):
        path = tmp_path / f"{size}.npz"
        pairs = list(zip(z.split(size), action.split(size)))
        evaluation.nmse(pairs, pairs, 1.0, path)
        with np.load(path) as file:
            kept.append({name: file[name] for name in ("z", "action", "step")})
    step = int(kept[0]["step"])
    assert step == {50: 1, 8000: 2, 20_001: 4}[count]
    for one in kept:
        np.testing.assert_array_equal(one["z"], z[::step].numpy())
        np.testing.assert_array_equal(one["action"], action[::step].numpy())
