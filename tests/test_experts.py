"""Expert policies: shipped students, LAOM teachers, and the distillation that turns one into the other."""

import hashlib
import http.server
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from safetensors.numpy import load_file, save_file

import common.experts as experts
from common.envs import make_env
from common.errors import UserError
from common.experts import EXPERT_ENVS, LAOM_FILES, STUDENT_DIR, STUDENT_METADATA, default_expert, load_expert
from common.tasks import TASKS
from make_experts import Args, action_variance, distillation_loss, episode_seed, main, rollout

ROOT = Path(__file__).parents[1]
LAOM_DIR = ROOT.parent / "shared" / "experts" / "laom"
needs_laom = pytest.mark.skipif(not LAOM_DIR.is_dir(), reason=f"no LAOM checkpoints in {LAOM_DIR}")
TINY = "--rounds 2 --episodes-per-round 2 --max-steps 30 --updates-per-round 20 --final-updates 40 --eval-episodes 3"


def command(env: str, *arguments: str) -> list[str]:
    return [sys.executable, "make_experts.py", "--env", env, "--expert-dir", str(LAOM_DIR), *arguments]


# --- shipped students ---


@pytest.mark.parametrize("env", EXPERT_ENVS)
def test_shipped_student_is_complete_and_as_good_as_its_teacher(env):
    expert = load_expert(env)
    task, metadata = TASKS[env], expert.metadata
    assert (expert.state_dim, expert.action_dim) == (task.state_dim, task.action_dim)
    assert expert.sha256 == hashlib.sha256((STUDENT_DIR / f"{env}.safetensors").read_bytes()).hexdigest()
    tensors = load_file(STUDENT_DIR / f"{env}.safetensors")
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    assert 20_000 <= sum(tensor.size for tensor in tensors.values()) <= 90_000

    assert set(STUDENT_METADATA) <= set(metadata)
    assert metadata["teacher_sha256"] == LAOM_FILES[env][1]
    assert metadata["episodes"] >= 20
    assert (expert.return_mean, expert.return_std) == (metadata["return_mean"], metadata["return_std"])
    assert expert.return_mean >= 0.95 * metadata["teacher_return_mean"]
    assert expert.return_mean >= 0.95 * task.expert_score
    assert metadata["action_variance"] == pytest.approx(task.action_variance, rel=0.1)


def test_shipped_students_are_attributed():
    notice = (STUDENT_DIR / "NOTICE").read_text()
    assert "dunnolab/laom" in notice and "Apache License" in notice
    assert "Apache License" in (STUDENT_DIR / "LICENSE.laom").read_text()


def test_cheetah_student_runs_as_its_metadata_says():
    expert = load_expert("cheetah-run")
    env = make_env("cheetah-run", renders=())
    result = rollout([env], expert, [episode_seed(0, 0, evaluation=True)], tick=lambda: None)
    env.close()
    assert len(result.states) == 1000
    assert result.returns[0] > 750
    assert abs(result.returns[0] - expert.return_mean) < 5 * expert.return_std
    assert action_variance(result.actions) == pytest.approx(expert.metadata["action_variance"], rel=0.1)


@pytest.mark.parametrize("env", ["walker-run", "hopper-hop", "humanoid-walk"])
def test_other_students_move_from_the_start(env):
    """250 steps; an untrained or wrongly fed policy earns next to nothing in them."""
    expert = load_expert(env)
    environment = make_env(env, renders=(), max_steps=250)
    result = rollout([environment], expert, [episode_seed(0, 1, evaluation=True)], tick=lambda: None)
    environment.close()
    assert result.returns[0] > 0.1 * expert.return_mean


def test_one_state_and_a_batch_give_the_same_bits():
    expert = load_expert("humanoid-walk")
    states = np.random.default_rng(0).normal(size=(33, expert.state_dim)).astype(np.float32) * 3
    batch = expert.act(states)
    assert batch.shape == (33, 21) and batch.dtype == np.float32
    single = np.stack([expert.act(state) for state in states])
    assert single.shape == batch.shape
    assert np.array_equal(single, batch)
    assert np.abs(batch).max() > 1  # as commanded, not clipped


def test_wrong_state_size_is_refused():
    with pytest.raises(ValueError, match="17"):
        load_expert("cheetah-run").act(np.zeros(18, np.float32))


# --- damaged, wrong and missing files ---


def damaged_student(tmp_path: Path, change) -> None:
    content = bytearray((STUDENT_DIR / "cheetah-run.safetensors").read_bytes())
    (tmp_path / "cheetah-run.safetensors").write_bytes(change(content))


def flip_weight(content: bytearray) -> bytearray:
    content[-1000] ^= 1
    return content


@pytest.mark.parametrize(
    "change",
    [flip_weight, lambda c: c[: len(c) // 2], lambda c: c[:5], lambda c: b"", lambda c: b"no tensors here" * 100],
    ids=["one bit", "half", "five bytes", "empty", "text"],
)
def test_damaged_student_is_refused(tmp_path, change):
    damaged_student(tmp_path, change)
    with pytest.raises(UserError, match=r"cheetah-run\.safetensors.*make_experts\.py --env cheetah-run"):
        load_expert("cheetah-run", "student", tmp_path)


def test_student_of_another_task_or_without_metadata_is_refused(tmp_path):
    (tmp_path / "walker-run.safetensors").write_bytes((STUDENT_DIR / "cheetah-run.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"cheetah-run.* not .*walker-run"):
        load_expert("walker-run", "student", tmp_path)
    save_file(load_file(STUDENT_DIR / "cheetah-run.safetensors"), tmp_path / "cheetah-run.safetensors")
    with pytest.raises(UserError, match="lacks the metadata"):
        load_expert("cheetah-run", "student", tmp_path)


def test_missing_files_and_unknown_tasks_are_user_errors(tmp_path):
    with pytest.raises(UserError, match=r"is missing.*make_experts"):
        load_expert("cheetah-run", "student", tmp_path)
    with pytest.raises(UserError, match=r"checkpoint\.pt is missing.*dunnolab/laom"):
        load_expert("cheetah-run", "laom", tmp_path)
    with pytest.raises(UserError, match="no student expert for reach: choose scripted"):
        load_expert("reach")


@needs_laom
def test_teacher_with_a_wrong_hash_is_refused_before_it_is_read(tmp_path):
    name, expected = LAOM_FILES["cheetah-run"]
    path = tmp_path / name
    path.parent.mkdir()
    content = bytearray((LAOM_DIR / name).read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (content, content[:1000]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name}.*{expected}.*again"):
            load_expert("cheetah-run", "laom", tmp_path)


# --- download ---


@pytest.fixture
def server(tmp_path):
    """A local web server on `tmp_path/web`; yields (URL, folder)."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, *args):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/", folder
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for proxy in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    return tmp_path / "cache" / "laom"


@needs_laom
def test_teacher_is_downloaded_once_and_a_damaged_copy_again(server, cache, monkeypatch):
    url, folder = server
    monkeypatch.setattr(experts, "LAOM_URL", url)
    name = LAOM_FILES["humanoid-walk"][0]
    (folder / name).write_bytes((LAOM_DIR / name).read_bytes())
    first = load_expert("humanoid-walk", "laom")
    (cache / name).write_bytes(b"damaged")
    second = load_expert("humanoid-walk", "laom")
    (folder / name).unlink()
    third = load_expert("humanoid-walk", "laom")  # from the cache
    state = np.ones(67, np.float32)
    assert np.array_equal(first.act(state), second.act(state)) and np.array_equal(first.act(state), third.act(state))
    assert [path.name for path in cache.iterdir()] == [name]


def test_failed_and_changed_downloads_leave_nothing(server, cache, monkeypatch):
    url, folder = server
    monkeypatch.setattr(experts, "LAOM_URL", url)
    with pytest.raises(UserError, match=r"cannot be downloaded.*--expert-dir"):
        load_expert("humanoid-walk", "laom")
    (folder / LAOM_FILES["humanoid-walk"][0]).write_bytes(b"something else")
    with pytest.raises(UserError, match=r"not the file.*--expert-dir"):
        load_expert("humanoid-walk", "laom")
    monkeypatch.setattr(experts, "LAOM_URL", "http://127.0.0.1:1/")
    with pytest.raises(UserError, match="cannot be downloaded"):
        load_expert("humanoid-walk", "laom")
    assert not cache.exists()


# --- teachers ---


def torch_teacher(env: str, states: np.ndarray) -> np.ndarray:
    """The published policies as plain torch, straight from their definition."""
    path = LAOM_DIR / LAOM_FILES[env][0]
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
@pytest.mark.parametrize("env", EXPERT_ENVS)
def test_teacher_equals_a_torch_reference(env):
    teacher = load_expert(env, "laom", LAOM_DIR)
    large = 3.0 if env == "humanoid-walk" else 30.0  # reaches the clip of those that have one
    scale = np.random.default_rng(1).choice([0.3, large], size=(64, 1))
    states = (np.random.default_rng(0).normal(size=(64, teacher.state_dim)) * scale).astype(np.float32)
    np.testing.assert_allclose(teacher.act(states), torch_teacher(env, states), rtol=1e-4, atol=5e-5)


@needs_laom
def test_state_is_in_alphabetical_order_and_the_order_matters():
    """In dm_control's own order the humanoid's teacher falls."""
    teacher = load_expert("humanoid-walk", "laom", LAOM_DIR)
    sizes = {  # dm_control's order
        "joint_angles": 21,
        "head_height": 1,
        "extremities": 12,
        "torso_vertical": 3,
        "com_velocity": 3,
        "velocity": 27,
    }
    offsets = dict(zip(sorted(sizes), np.cumsum([0] + [sizes[key] for key in sorted(sizes)])))
    native = np.concatenate([offsets[key] + np.arange(size) for key, size in sizes.items()])

    class Native:
        def act(self, state):
            return teacher.act(state[..., native])

    seeds = [episode_seed(0, 0)]
    env = make_env("humanoid-walk", renders=(), max_steps=300)
    right = rollout([env], teacher, seeds, tick=lambda: None).returns[0]
    wrong = rollout([env], Native(), seeds, tick=lambda: None).returns[0]
    env.close()
    assert right > 100
    assert wrong < 0.2 * right


# --- distillation ---


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


def test_batched_rollout_equals_single_ones():
    expert = load_expert("cheetah-run")
    envs = [make_env("cheetah-run", renders=(), max_steps=40) for _ in range(2)]
    seeds = [3, 5, 7]
    together = rollout(envs, expert, seeds, tick=lambda: None, noise=0.2)
    alone = [rollout(envs[:1], expert, [seed], tick=lambda: None, noise=0.2) for seed in seeds]
    for env in envs:
        env.close()
    assert np.array_equal(together.returns, np.concatenate([one.returns for one in alone]))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UserError, match="--rounds must be at least 1"):
        main(Args(rounds=0))


@needs_laom
def test_tiny_distillation_writes_a_loadable_student_the_same_each_time(tmp_path):
    process = subprocess.run(
        command("cheetah-run", *TINY.split(), "--output-dir", str(tmp_path / "process"), "--seed", "3"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    path = tmp_path / "process" / "cheetah-run.safetensors"
    assert list(path.parent.iterdir()) == [path]

    expert = load_expert("cheetah-run", "student", path.parent)
    assert set(STUDENT_METADATA) <= set(expert.metadata)
    assert expert.metadata["seed"] == 3 and expert.metadata["episodes"] == 3
    assert expert.metadata["settings"]["rounds"] == 2
    row = re.search(r"^cheetah-run +([\d.]+) \+- +[\d.]+ +([\d.]+) \+- +[\d.]+ +([\d.]+)", process.stdout, re.M)
    teacher, student, ratio = map(float, row.groups())
    assert student == pytest.approx(expert.return_mean, abs=0.06)
    assert teacher == pytest.approx(expert.metadata["teacher_return_mean"], abs=0.06)
    assert ratio == pytest.approx(expert.return_mean / expert.metadata["teacher_return_mean"], abs=1e-3)

    arguments = [*TINY.split(), "--env", "cheetah-run", "--expert-dir", str(LAOM_DIR)]
    for seed in (3, 4):
        main(tyro.cli(Args, args=[*arguments, "--output-dir", str(tmp_path / str(seed)), "--seed", str(seed)]))
        same = (tmp_path / str(seed) / path.name).read_bytes() == path.read_bytes()
        assert same == (seed == 3)


@needs_laom
def test_signal_stops_cleanly_and_keeps_the_old_file(tmp_path):
    target = tmp_path / "cheetah-run.safetensors"
    target.write_bytes(b"old")
    arguments = command("cheetah-run", "--output-dir", str(tmp_path))
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "cheetah-run" in process.stdout.readline()  # the work has begun
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "was not written" in errors and "make_experts.py --env cheetah-run" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == [target.name] and target.read_bytes() == b"old"


def test_missing_teacher_is_one_line_and_exit_code_1(tmp_path):
    result = subprocess.run(
        [sys.executable, "make_experts.py", "--env", "cheetah-run", "--expert-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1 and "checkpoint.pt is missing" in result.stderr


# --- Meta-World's scripted policies ---


@pytest.mark.parametrize("env", [name for name, task in TASKS.items() if task.suite == "dmw"])
def test_scripted_expert_succeeds_with_clipped_actions(env):
    expert = load_expert(env, "scripted")
    world, states, actions, successes = make_env(env, renders=()), [], [], 0
    for seed in range(3):
        observation, _ = world.reset(seed=seed)
        done = False
        while not done:
            states.append(observation["state"])
            actions.append(expert.act(observation["state"]))
            observation, _, terminated, truncated, _ = world.step(actions[-1])
            done = terminated or truncated
        successes += terminated
    assert successes >= 2
    assert np.array(actions).dtype == np.float32 and abs(np.array(actions)).max() == 1
    np.testing.assert_array_equal(expert.act(np.array(states)), actions)
    assert len(expert.sha256) == 64 and expert.sha256 != load_expert("cheetah-run").sha256


def test_scripted_experts_are_for_meta_world_only(tmp_path):
    with pytest.raises(UserError, match="no scripted expert for cheetah-run: choose student or laom"):
        load_expert("cheetah-run", "scripted")
    with pytest.raises(UserError, match="--expert-dir has no meaning for push"):
        load_expert("push", "scripted", tmp_path)
    with pytest.raises(UserError, match="Unknown expert 'teacher'"):
        load_expert("push", "teacher")
    with pytest.raises(ValueError, match=r"push: state has shape \(38,\)"):
        load_expert("push", "scripted").act(np.zeros(38))
    assert [default_expert(env) for env in ("push", "walker-run")] == ["scripted", "student"]
