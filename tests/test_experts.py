"""Expert policies: shipped students, LAOM teachers, and the distillation that turns one into the other."""

import hashlib
import json
import signal
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import web
from methods import ROOT, python
from safetensors import safe_open
from safetensors.numpy import load_file

import common.experts as experts
from common.cli import UserError
from common.envs import make_env
from common.experts import LAOM_FILES, LAOM_SHA256, STUDENT_DIR, load_expert
from common.tasks import TASKS
from make_experts import Args, distillation_loss, episode_seed, evaluate, main

LAOM_DIR = ROOT.parent / "shared" / "experts" / "laom"
needs_laom = pytest.mark.skipif(not LAOM_DIR.is_dir(), reason=f"no LAOM checkpoints in {LAOM_DIR}")


def read_metadata(path: Path) -> dict:
    """What `make_experts.py` wrote beside the weights."""
    with safe_open(path, "numpy") as file:
        text = file.metadata()
    names = ("env", "teacher", "teacher_sha256", "weights_sha256")
    return {name: value if name in names else json.loads(value) for name, value in text.items()}


@pytest.mark.parametrize("env", LAOM_FILES)
def test_shipped_student_is_complete_and_as_good_as_its_teacher(env):
    path, task, expert = STUDENT_DIR / f"{env}.safetensors", TASKS[env], load_expert(env)
    metadata, tensors = read_metadata(path), load_file(path)
    assert expert.act(np.zeros(task.state_dim, np.float32)).shape == (task.action_dim,)
    assert expert.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    assert 20_000 <= sum(tensor.size for tensor in tensors.values()) <= 90_000
    assert metadata["teacher_sha256"] == LAOM_SHA256[env] and metadata["episodes"] >= 20
    assert metadata["return_mean"] >= 0.95 * max(metadata["teacher_return_mean"], task.expert_score)
    assert metadata["action_variance"] == pytest.approx(task.action_variance, rel=0.1)
    # cheetah-run's whole episode; 200 steps of others, where an untrained or wrongly fed policy earns next to nothing.
    world = make_env(env, renders=(), max_steps=1000 if env == "cheetah-run" else 200)
    scores = evaluate(world, expert, [episode_seed(0, 0, evaluation=True)])
    assert scores["return_mean"] > 0.05 * metadata["return_mean"]
    if env == "cheetah-run":
        assert abs(scores["return_mean"] - metadata["return_mean"]) < 5 * metadata["return_std"]
        assert scores["action_variance"] == pytest.approx(metadata["action_variance"], rel=0.1)


def test_one_state_and_a_batch_give_the_same_bits():
    expert = load_expert("humanoid-walk")
    states = np.random.default_rng(0).normal(size=(33, 67)).astype(np.float32) * 3
    batch = expert.act(states)
    assert batch.shape == (33, 21) and batch.dtype == np.float32
    single = np.stack([expert.act(state) for state in states])
    assert np.array_equal(single, batch)
    assert np.abs(batch).max() > 1  # as commanded, not clipped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:], "weights do not match"),
        (lambda content: content[: len(content) // 2], ""),
        (lambda content: b"", ""),
        (lambda content: b"<!DOCTYPE html>", ""),
        (lambda content: content.replace(b'"env":"cheetah-run"', b'"env":"cheetah-fun"'), "for cheetah-fun"),
        (lambda content: content.replace(b"format_version", b"format_Version"), "of format None"),
    ],
)
def test_damaged_student_is_refused(tmp_path, change, message):
    content = (STUDENT_DIR / "cheetah-run.safetensors").read_bytes()
    (tmp_path / "cheetah-run.safetensors").write_bytes(change(content))
    with pytest.raises(UserError, match=rf"cheetah-run\.safetensors.*{message}.*make_experts\.py --env cheetah-run"):
        load_expert("cheetah-run", "student", tmp_path)


@pytest.mark.parametrize(
    ("env", "kind", "message"),
    [
        ("cheetah-run", "student", r"cheetah-run\.safetensors is no format 1 expert.*make_experts"),
        ("cheetah-run", "laom", r"No such file.*checkpoint\.pt.*dunnolab/laom"),
        ("cheetah-run", "scripted", "no scripted expert for cheetah-run: choose student or laom"),
        ("reach", "student", "no student expert for reach: choose scripted"),
        ("push", "scripted", "--expert-dir has no meaning for push"),
    ],
)
def test_missing_files_and_unknown_tasks_are_user_errors(tmp_path, env, kind, message):
    with pytest.raises(UserError, match=message):
        load_expert(env, kind, tmp_path)


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html>"])
def test_teacher_with_a_wrong_hash_is_refused_before_it_is_read(tmp_path, content):
    name, expected = LAOM_FILES["cheetah-run"], LAOM_SHA256["cheetah-run"]
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*{expected}.*download"):
        load_expert("cheetah-run", "laom", tmp_path)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder that a local web server serves as LAOM's; the user's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "web"
    folder.mkdir()
    with web.serve(folder) as url:
        monkeypatch.setattr(experts, "LAOM_URL", url)
        yield folder


@needs_laom
def test_teacher_is_downloaded_once_and_a_damaged_copy_again(server, tmp_path):
    name = LAOM_FILES["humanoid-walk"]
    (server / name).write_bytes((LAOM_DIR / name).read_bytes())
    cached = tmp_path / "cache" / "laom" / name
    action = load_expert("humanoid-walk", "laom").act(np.ones(67, np.float32))
    cached.write_bytes(b"damaged")
    assert np.array_equal(load_expert("humanoid-walk", "laom").act(np.ones(67, np.float32)), action)
    (server / name).unlink()
    assert np.array_equal(load_expert("humanoid-walk", "laom").act(np.ones(67, np.float32)), action)  # from the cache
    assert list(cached.parent.iterdir()) == [cached]


def test_failed_and_changed_downloads_leave_nothing(server, tmp_path, monkeypatch):
    name = LAOM_FILES["cheetah-run"]
    advice = r"no expert for cheetah-run.*--expert-dir DIR.*--expert student"
    with pytest.raises(UserError, match=advice):
        load_expert("cheetah-run", "laom")
    (server / name).parent.mkdir()
    (server / name).write_bytes(b"something else")
    with pytest.raises(UserError, match=advice):
        load_expert("cheetah-run", "laom")
    monkeypatch.setattr(experts, "LAOM_URL", "http://127.0.0.1:1/")
    with pytest.raises(UserError, match=advice):
        load_expert("cheetah-run", "laom")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def torch_teacher(env: str, states: np.ndarray) -> np.ndarray:
    """The published policies as plain torch, straight from their definition."""
    path = LAOM_DIR / LAOM_FILES[env]
    if env == "humanoid-walk":
        with zipfile.ZipFile(path) as archive, archive.open("policy.pth") as file:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        names, activation, x = ("actor.latent_pi.0", "actor.latent_pi.2", "actor.mu"), torch.relu, torch.tensor(states)
    else:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        names, activation = ("actor_mean.0", "actor_mean.2", "actor_mean.4"), torch.tanh
        mean, variance = weights["obs_rms.mean"], weights["obs_rms.var"]
        x = ((torch.tensor(states) - mean) / torch.sqrt(variance + 1e-8)).clamp(-10, 10)
    for name in names[:-1]:
        x = activation(torch.nn.functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
    x = torch.nn.functional.linear(x, weights[f"{names[-1]}.weight"], weights[f"{names[-1]}.bias"])
    return (torch.tanh(x) if env == "humanoid-walk" else x).numpy()


@needs_laom
@pytest.mark.parametrize("env", LAOM_FILES)
def test_teacher_equals_a_torch_reference(env):
    teacher = load_expert(env, "laom", LAOM_DIR)
    large = 3.0 if env == "humanoid-walk" else 30.0  # reaches the clip of those that have one
    scale = np.random.default_rng(1).choice([0.3, large], size=(64, 1))
    states = (np.random.default_rng(0).normal(size=(64, TASKS[env].state_dim)) * scale).astype(np.float32)
    np.testing.assert_allclose(teacher.act(states), torch_teacher(env, states), rtol=1e-4, atol=5e-5)


def test_loss_ignores_overshoot_where_the_teacher_saturates():
    teacher = torch.tensor([[1.5, -3.0, 1.5, -3.0, 0.5, 0.5, 1.0]])
    prediction = torch.tensor([[4.0, -1.2, 0.6, -0.5, 0.7, 1.5, 1.1]], requires_grad=True)
    error = torch.tensor([0.0, 0.0, -0.4, 0.5, 0.2, 1.0, 0.0])  # to the clipped action, overshoot left out
    loss = distillation_loss(prediction, teacher)
    assert loss.item() == pytest.approx((error**2).mean().item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, prediction)
    torch.testing.assert_close(gradient[0], 2 * error / 7)


def test_evaluation_seeds_are_never_trained_on():
    training = {episode_seed(seed, index) for seed in range(3) for index in range(100)}
    assert len(training) == 300
    assert not training & {episode_seed(0, index, evaluation=True) for index in range(1000)}


def tiny(folder: Path, seed: int) -> bytes:
    """The file of a tiny distillation."""
    few = {"rounds": 2, "episodes_per_round": 2, "max_steps": 30, "updates_per_round": 20, "final_updates": 40}
    main(Args(expert_dir=LAOM_DIR, output_dir=folder, eval_episodes=3, seed=seed, **few))
    (path,) = folder.iterdir()
    return path.read_bytes()


@needs_laom
def test_tiny_distillation_writes_a_loadable_student_the_same_each_time(tmp_path, capsys):
    content = tiny(tmp_path / "one", seed=3)
    metadata = read_metadata(tmp_path / "one" / "cheetah-run.safetensors")
    load_expert("cheetah-run", "student", tmp_path / "one")
    assert (metadata["seed"], metadata["episodes"], metadata["settings"]["rounds"]) == (3, 3, 2)
    output = capsys.readouterr().out
    for prefix, who in (("", "student"), ("teacher_", "laom")):
        mean, std = metadata[f"{prefix}return_mean"], metadata[f"{prefix}return_std"]
        assert f"{who} returns {mean:.1f} +- {std:.1f}" in output
    assert tiny(tmp_path / "same", seed=3) == content != tiny(tmp_path / "other", seed=4)


@needs_laom
def test_signal_stops_cleanly_and_keeps_the_old_file(tmp_path):
    target = tmp_path / "cheetah-run.safetensors"
    target.write_bytes(b"old")
    process = python("make_experts.py", "--expert-dir", LAOM_DIR, "--output-dir", tmp_path)
    assert "cheetah-run" in process.stdout.readline()  # the work has begun
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "was not written" in errors and "rerun the same command" in errors and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == [target.name] and target.read_bytes() == b"old"


@pytest.mark.parametrize("env", [name for name, task in TASKS.items() if task.suite == "dmw"])
def test_scripted_expert_succeeds_with_clipped_actions(env):
    expert = load_expert(env, "scripted")
    world, states, actions, successes = make_env(env, renders=()), [], [], 0
    for seed in range(2):
        observation, _ = world.reset(seed=seed)
        done = False
        while not done:
            states.append(observation["state"])
            actions.append(expert.act(states[-1]))
            observation, _, terminated, truncated, _ = world.step(actions[-1])
            done = terminated or truncated
        successes += terminated
    assert successes >= 1
    np.testing.assert_array_equal(expert.act(np.array(states)), actions)
    assert np.array(actions).dtype == np.float32 and abs(np.array(actions)).max() == 1
    assert len(expert.sha256) == 64 and expert.sha256 != load_expert("cheetah-run").sha256
