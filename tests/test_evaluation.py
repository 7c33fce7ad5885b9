"""Rollouts against a plain loop, normalised scores, refused clips, and what is computed of frozen networks."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import methods
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
from common.tasks import get_task

MADE_WITH = {"split": "test", "renders": ("clean",), "masks": False, "quality": "fast"}
MADE_WITH |= {"distractors": DistractorConfig(), "image_size": 8, "max_steps": 6}


class FakeEnv(gymnasium.Env):
    """Frames of noise; the reward is the action, some episodes end early, some succeed on the way."""

    observation_space = gymnasium.spaces.Dict({"clean/observation": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, name: str, **made_with: Any) -> None:
        assert name == "drawer-close" and made_with == MADE_WITH

    def observation(self) -> dict[str, np.ndarray]:
        return {"clean/observation": self.np_random.integers(0, 256, (8, 8, 3), np.uint8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self.steps += 1
        success, terminated = self.np_random.random(2) < 0.2
        return self.observation(), float(action[0]), terminated, self.steps == 6, {"success": success}


def act(frames: torch.Tensor) -> torch.Tensor:
    """A policy that depends on every frame of the stack, uint8 (N, 3, 8, 8, 3), and leaves the range of actions."""
    return 2 * torch.sin(frames.double().mean((2, 3, 4)) @ torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64))


@pytest.mark.parametrize("num_envs", [1, 2])
def test_rollout_equals_a_plain_loop(num_envs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same episodes one after the other, with the stack and its actions written out."""
    monkeypatch.setattr("common.envs.make_env", FakeEnv)
    episodes = []
    env = FakeEnv("drawer-close", **MADE_WITH)
    for episode in range(5):
        seed = np.random.SeedSequence([evaluation.EVALUATION_SEED, episode]).generate_state(1)[0]
        frames = [env.reset(seed=int(seed))[0]["clean/observation"]] * 3
        rewards, success, ended = [], False, ()
        while not any(ended):
            action = act(torch.from_numpy(np.stack(frames[-3:])[None]))[0].float().numpy().clip(-1, 1)
            observation, reward, *ended, info = env.step(action)
            frames.append(observation["clean/observation"])
            rewards.append(reward)
            success |= info["success"]
        episodes.append((sum(rewards), len(rewards), success))
    returns, lengths, successes = zip(*episodes)
    test_set = SimpleNamespace(env="drawer-close", render="clean", plan={"quality": "fast"}, image_size=8)
    args = lapo.Args(eval_episodes=5, eval_envs=num_envs, eval_steps=6)
    rolled = evaluation.rollout(act, test_set, DistractorConfig(), args, CPU)
    assert rolled["returns"] == pytest.approx(returns, rel=1e-6) and len(set(returns)) == 5
    assert (rolled["return_mean"], rolled["return_std"]) == pytest.approx((np.mean(returns), np.std(returns)))
    assert rolled["lengths"] == list(lengths) and len(set(lengths)) > 1 and rolled["max_steps"] == 6
    assert rolled["success_rate"] == pytest.approx(np.mean(successes)) and len(set(successes)) == 2


def test_scores_are_compared_over_as_many_steps(train_set: Dataset, tmp_path: Path) -> None:
    """The planted expert earns 20 in 20 steps, the paper's 837.67 in 1000; three of door-open's four succeed."""
    planted.write(tmp_path, env="door-open", action_dim=4, success=(True, False, True, True))
    door = Dataset(tmp_path, "door-open", "train")
    for dataset, rolled, paper, own in (
        (train_set, {"return_mean": 418.835, "lengths": [1000, 1000]}, 0.5, None),
        (train_set, {"return_mean": 418.835, "lengths": [20, 20]}, None, 418.835 / 20),
        (train_set, {"return_mean": 418.835, "lengths": [30, 30]}, None, None),
        (door, {"success_rate": 0.6, "max_steps": 500}, 0.6 / 0.917, None),
        (door, {"success_rate": 0.6, "max_steps": 20}, None, 0.8),
    ):
        score = evaluation.normalised_score(rolled, get_task(dataset.env), dataset)
        assert score == {"normalised_paper": pytest.approx(paper), "normalised_dataset": pytest.approx(own)}


def test_the_evaluation_is_tried_before_training(planted_dir: Path, tmp_path: Path) -> None:
    """It has the distractors of the test split; other clips are refused, of which a finished run needs none."""
    dataset, args = Dataset(planted_dir, "cheetah-run", "test"), lapo.Args
    config = evaluation.held_out_distractors(dataset, args(), Path())
    assert (config.backgrounds, config.num_videos, config.camera_scale) == ("synthetic", 1, 0.1)
    with pytest.raises(UserError, match="typo is no folder"):
        evaluation.held_out_distractors(dataset, args(clips_dir=tmp_path / "typo"), Path())
    distractors = dataset.plan["distractors"]
    distractors["clips"] = dict.fromkeys(distractors["clips"], "0" * 64)
    with pytest.raises(UserError, match=r"the clips in \S+ are not those that made .* --clips-dir"):
        evaluation.held_out_distractors(dataset, args(), Path())
    distractors["backgrounds"] = "folder"
    with pytest.raises(UserError, match=r"needs the clips that made .* --clips-dir"):
        evaluation.held_out_distractors(dataset, args(), Path())
    assert evaluation.held_out_distractors(dataset, args(stages="lam"), Path()) == DistractorConfig()  # no rollouts
    finished = methods.write_run(tmp_path, "lapo", "cheetah-run", 1, decoders={128_000: 0.5})
    assert evaluation.held_out_distractors(dataset, args(), finished).num_videos is None


def test_tables_control_and_result_of_stage_1(train_set: Dataset, tmp_path: Path, monkeypatch: Any) -> None:
    """Tables are computed once a run; the control's NMSE once for runs that begin with the same latent actions."""
    test_set = Dataset(train_set.data_dir, "cheetah-run", "test")
    monkeypatch.setattr(evaluation, "LATENTS_KEPT", 15)  # of 40
    windows = {"batch_size": 16, "device": CPU, "max_offset": 1}
    calls: list[torch.nn.Module] = []

    def encode(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(model)
        return model(batch.frames[:, 2:4, ::8, ::8, 0].flatten(1) / 255)

    untrained, other, model = (torch.nn.Linear(32, 4) for _ in range(3))
    order = train_set.transitions[::-1].copy()
    controls = []
    for variant, control, passes in (("a", untrained, 8), ("b", untrained, 0), ("c", other, 8)):
        calls.clear()
        run = runs.Run(lapo.Args(runs_dir=tmp_path), "lapo", variant, {})
        run.train_set, run.test_set = train_set, test_set
        for _ in range(2):
            table = evaluation.table(run, "latents", partial(encode, model), train_set, order, **windows)
        assert len(calls) == 5
        latents = torch.cat([z for z, _ in evaluation.outputs(partial(encode, model), train_set, **windows)])
        torch.testing.assert_close(table.flip(0), latents)
        probed = evaluation.probe(run, encode, model, control, latents, **windows)
        assert calls.count(control) == passes
        sets = (evaluation.outputs(partial(encode, control), each, **windows) for each in (train_set, test_set))
        assert probed["untrained"] == evaluation.nmse(*sets, train_set.action_variance)["nmse"]
        controls.append(probed["untrained"])
        with np.load(run.dir / "latents.npz") as file:  # every third pair, whatever the batches
            assert file["step"] == 3 and len(file["z"]) == 14
            assert np.array_equal(file["action"], test_set.action[test_set.transitions[::3]])
        evaluation.write_result(run, probed, [], {"lam": model}, train_set.labelled(30, 1), [])
        result = json.loads((run.dir / "result.json").read_text())
        assert result["metrics"] == {"eval/nmse": probed["nmse"], "eval/nmse_untrained": probed["untrained"]}
        assert result["decoders"] == [] and result["parameters"] == {"lam": 32 * 4 + 4}
    assert controls[0] == controls[1] != controls[2] and len(list((tmp_path / "controls").iterdir())) == 2
