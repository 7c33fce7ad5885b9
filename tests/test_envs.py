"""Environments: physics untouched, every random number from the seed, pictures and masks as they should be."""

import contextlib
import ctypes.util
import importlib
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")  # before mujoco is imported

import gymnasium
import imageio.v3 as iio
import mujoco
import numpy as np
import pytest
from methods import ROOT, finish, python

from common.distractors import DistractorConfig
from common.envs import make_env
from common.experts import load_expert
from common.tasks import TASKS

DCS = [name for name, task in TASKS.items() if task.suite == "dcs"]
DMW = [name for name, task in TASKS.items() if task.suite == "dmw"]
SYNTHETIC = DistractorConfig(backgrounds="synthetic", num_videos=1)


@pytest.fixture
def fast() -> Iterator[Callable[..., gymnasium.Env]]:
    """`make_env` in the fast quality; the environments are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(env: str = "cheetah-run", **options) -> gymnasium.Env:
            env = make_env(env, **{"quality": "fast", "distractors": SYNTHETIC, **options})
            return stack.enter_context(contextlib.closing(env))

        yield make


def rollout(env: gymnasium.Env, seed: int, steps: int = 4) -> list[dict]:
    """Observations, info and rewards of an episode under random actions that depend on the seed alone."""
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    result = [{**observation, **info}]
    for _ in range(steps):
        observation, reward, *_ = env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
        result.append({**observation, "reward": reward})
    return result


def assert_same(one: list[dict], other: list[dict], keys: set[str] | None = None) -> None:
    for a, b in zip(one, other, strict=True):
        for key in keys or a.keys() | b.keys():
            if key in a or key in b:
                assert np.array_equal(a[key], b[key]), key


def physics_seed(seed: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed).spawn(4)[0]


@pytest.mark.parametrize("name", TASKS)
def test_same_seed_same_pixels_and_the_mask_is_the_agent(name, fast):
    task, env = TASKS[name], fast(name)
    expected = rollout(env, 5)
    assert expected[0]["state"].shape == (task.state_dim,) and env.action_space.shape == (task.action_dim,)
    assert {key: expected[0][key] for key in env.observation_space} in env.observation_space
    different = rollout(env, 6)
    for key in ("state", "clean/observation", "distractor/observation"):
        assert not np.array_equal(different[-1][key], expected[-1][key])
    unseeded = env.reset()[0]
    assert_same(rollout(env, 5), expected)  # after other episodes in the same object
    rollout(env, 6)
    assert_same([env.reset()[0]], [unseeded])  # follows from the last seed
    rollout(env, 5)

    if task.suite == "dcs":
        for model in env._offscreen.models.values():
            model.mat_rgba[np.unique(model.geom_matid[model.geom_bodyid != 0]), 3] = 0
    else:
        model, robot = env.model, {env.model.body("base").id}
        for body in range(model.nbody):
            if model.body_parentid[body] in robot:
                robot.add(body)
        assert {"hand", "rightclaw", "leftpad"} <= {model.body(body).name for body in robot}
        model.geom_rgba[np.isin(model.geom_bodyid, list(robot)), 3] = 0
        model.site_rgba[np.isin(model.site_bodyid, list(robot)), 3] = 0
        mask = expected[-1]["clean/mask"]
        around = np.stack([mask[:-2, 1:-1], mask[2:, 1:-1], mask[1:-1, :-2], mask[1:-1, 2:]]).all(0)
        assert 0.05 < mask.mean() < 0.5 and (around & ~mask[1:-1, 1:-1]).sum() <= 2  # in view, without holes of a pixel
    invisible = env._render()
    for render in ("clean", "distractor"):
        changed = np.any(expected[-1][f"{render}/observation"] != invisible[f"{render}/observation"], axis=2)
        mask = expected[-1][f"{render}/mask"]
        assert mask[changed].all() and not invisible[f"{render}/mask"].any()
        assert changed[mask].mean() > 0.97  # behind a pixel of the agent, or in a crack of its mesh, may be its colour


@pytest.mark.parametrize("name", DCS)
def test_physics_is_that_of_the_suite(name):
    from dm_control import suite

    rng = np.random.default_rng(0)
    random = np.random.RandomState(np.random.MT19937(physics_seed(7)))
    reference = suite.load(*name.split("-"), task_kwargs={"random": random})
    time_step = reference.reset()
    env = make_env(name, renders=())
    observation, _ = env.reset(seed=7)
    for _ in range(20):
        ordered = [np.ravel(time_step.observation[key]) for key in sorted(time_step.observation)]
        assert np.array_equal(observation["state"], np.concatenate(ordered).astype(np.float32))
        action = rng.uniform(-2, 2, env.action_space.shape)
        time_step = reference.step(np.clip(action, -1, 1))
        observation, reward, *_ = env.step(action)
        assert reward == time_step.reward


def official(env: gymnasium.Env) -> gymnasium.Env:
    """Meta-World's own environment with the objects and the goal where the present episode of `env` has them."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.types import Task

    name, size = f"{env.task.name}-v3", 128
    kind = ALL_V3_ENVIRONMENTS[name]
    result = kind(render_mode="rgb_array", camera_name="corner", width=size, height=size)
    positions = {"env_cls": kind, "rand_vec": env._env._last_rand_vec, "partially_observable": False}
    result.set_task(Task(env_name=name, data=pickle.dumps(positions)))
    return result


@pytest.mark.parametrize("name", DMW)
def test_physics_is_meta_worlds(name):
    """The same states and rewards after another episode, from positions that are drawn from the seed."""
    rng = np.random.default_rng(0)
    env = make_env(name, renders=())
    env.reset(seed=1)
    env.step(np.ones(4))
    observation, _ = env.reset(seed=2)
    space = env._env._random_reset_space
    positions = np.random.default_rng(int(physics_seed(2).generate_state(1)[0])).uniform(space.low, space.high)
    if name in ("window-open", "window-close"):  # others draw again until object and goal are apart
        assert np.array_equal(env._env._last_rand_vec, positions)
    reference = official(env)
    expected, _ = reference.reset()
    goal = env.data.site("hole" if name == "button-press-topdown" else "goal").xpos  # as it is rendered
    assert np.allclose(goal, reference._target_pos)
    for _ in range(12):
        assert np.array_equal(observation["state"], expected.astype(np.float32))
        action = rng.uniform(-2, 2, 4)
        expected, expected_reward, _, _, info = reference.step(np.clip(action, -1, 1))
        observation, reward, terminated, _, ours = env.step(action)
        assert reward == expected_reward and terminated == ours["success"] == bool(info["success"])
    assert np.allclose(observation["state"][36:], reference._target_pos, atol=1e-6)


@pytest.mark.parametrize("name", ["hopper-hop", "pick-place"])
def test_rendering_does_not_touch_the_physics(name, fast):
    env, blind = fast(name, image_size=16), fast(name, renders=())
    assert_same(rollout(env, 1, 30), rollout(blind, 1, 30), {"state", "reward"})


@pytest.mark.parametrize(("name", "limit"), [("cheetah-run", 3), ("reach", None)])
def test_episodes_end_by_truncation(name, limit):
    env = make_env(name, renders=(), max_steps=limit)
    for _ in range(2):
        env.reset(seed=0)
        ends = [env.step(np.zeros(env.action_space.shape))[2:4] for _ in range(limit or 500)]
        assert ends == [(False, False)] * (len(ends) - 1) + [(False, True)]


def test_episodes_of_meta_world_end_on_success():
    expert, env = load_expert("reach", "scripted"), make_env("reach", renders=())
    observation, _ = env.reset(seed=1)
    terminated, steps = False, 0
    while not terminated:
        observation, _, terminated, truncated, info = env.step(expert.act(observation["state"]))
        steps += 1
        assert terminated == info["success"] and not truncated and steps < 100


def test_switching_one_distractor_off_leaves_the_others(fast):
    both = rollout(fast(), 3)
    fixed = rollout(fast(distractors=DistractorConfig("synthetic", num_videos=1, camera_scale=0)), 3)
    none = rollout(fast(renders=("clean",)), 3)
    assert_same(both, fixed, {"background", "background_start", "background_direction"})
    for other in (fixed, none):
        assert_same(both, other, {"state", "clean/observation", "clean/mask"})
    for a, b in zip(both, fixed):
        assert not np.array_equal(a["distractor/mask"], a["clean/mask"])
        assert np.array_equal(b["distractor/mask"], b["clean/mask"])
        agent = [x["distractor/observation"][x["distractor/mask"]].mean(0) for x in (a, b)]
        assert np.allclose(*agent, atol=25)  # the same colours


def test_distractors_change_the_picture_in_every_step(fast):
    still = DistractorConfig("synthetic", num_videos=1, camera_scale=0, color_scale=0)
    observations = rollout(fast(distractors=still), 0)
    for one, other in itertools.pairwise(observations):
        change = abs(one["distractor/observation"].astype(int) - other["distractor/observation"])
        assert change[~observations[0]["distractor/mask"]].mean() > 3  # the background moves
    colors = DistractorConfig("synthetic", num_videos=1, camera_scale=0, color_scale=0.3)
    observations = rollout(fast(distractors=colors), 0, 60)
    color, clean = (
        np.array([x[f"{render}/observation"][x["clean/mask"]].mean(0) for x in observations])
        for render in ("distractor", "clean")
    )
    assert abs(color - clean).max() > 10  # the agent's colour starts elsewhere
    assert np.std(color - clean, axis=0).max() > 0.5  # and wanders


@pytest.mark.parametrize("name", DCS)
def test_agent_stays_in_view(name, fast):
    for observation in rollout(fast(name, renders=("distractor",)), 0, 80):
        rows, columns = np.nonzero(observation["distractor/mask"])
        assert len(rows) > 30
        assert 12 < rows.mean() < 52 and 12 < columns.mean() < 52


def test_background_is_the_clip_upright_and_not_mirrored(tmp_path, fast):
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:32, :32], picture[:32, 32:] = (250, 0, 0), (0, 250, 0)
    picture[32:, :32], picture[32:, 32:] = (0, 0, 250), (250, 250, 0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        iio.imwrite(tmp_path / name / "0.png", picture)
    config = DistractorConfig(str(tmp_path), camera_scale=0, color_scale=0)
    for name, row in (("cheetah-run", 61), ("humanoid-walk", 44)):  # the cameras look along y, and along x and down
        env = fast(name, renders=("distractor",), distractors=config, masks=False)
        observation, _ = env.reset(seed=0)
        assert set(observation) == {"state", "distractor/observation"}
        frame = observation["distractor/observation"].astype(int)
        if name == "cheetah-run":
            assert frame[2, 2].argmax() == 0 and frame[2, 61].argmax() == 1
        left, right = frame[row, 2], frame[row, 61]  # a see-through floor may lie over them
        assert left[2] > left[0] + 30 and right[0] > left[0] + 30 and right[1] > left[1] + 30


@pytest.mark.parametrize("name", DCS)
def test_full_clean_render_is_mujocos_own(name, fast, monkeypatch):
    # Where the program imported mujoco first, it did so without OpenGL.
    monkeypatch.setattr(mujoco.gl_context, "GLContext", importlib.import_module("mujoco.egl").GLContext, raising=False)
    env = fast(name, renders=("clean",), quality="full")
    observation = rollout(env, 0)[-1]
    with mujoco.Renderer(env.model, 64, 64) as renderer:
        renderer.update_scene(env.data, 0)
        assert np.array_equal(renderer.render(), observation["clean/observation"])
        renderer.enable_segmentation_rendering()
        geoms, kinds = np.moveaxis(renderer.render(), 2, 0)
    is_geom = kinds == mujoco.mjtObj.mjOBJ_GEOM
    assert np.array_equal(is_geom & (env.model.geom_bodyid[geoms] != 0), observation["clean/mask"])


@pytest.mark.parametrize("name", ["door-open", "button-press-topdown"])
def test_full_clean_render_is_meta_worlds_turned_the_right_way_up(name, fast):
    env = fast(name, quality="full")
    env.reset(seed=3)
    reference = official(env)
    reference.reset()
    action = np.array([0.5, 1, -0.5, 1])
    observation, *_ = env.step(action)
    reference.step(action)
    assert np.array_equal(observation["clean/observation"], reference.render()[::-1, ::-1])
    reference.close()


@pytest.mark.parametrize(("name", "quality"), [("reach", "fast"), ("peg-insert-side", "fast"), ("door-open", "full")])
def test_clip_replaces_exactly_what_is_neither_geom_nor_marker(name, quality, tmp_path, fast):
    rng = np.random.default_rng(0)
    for clip in ("a", "b"):
        (tmp_path / clip).mkdir()
        iio.imwrite(tmp_path / clip / "0.png", rng.integers(0, 256, (128, 128, 3), np.uint8))
    env = fast(name, quality=quality, distractors=DistractorConfig(str(tmp_path)))
    env.reset(seed=0)
    observation, *_ = env.step(np.zeros(4))
    clean, distracting = observation["clean/observation"], observation["distractor/observation"]
    assert np.array_equal(observation["clean/mask"], observation["distractor/mask"])
    shown, model = (distracting == env._player.frame).all(2), env.model
    assert np.array_equal(distracting[~shown], clean[~shown])
    # The clip fills what has the sky's colour in a render without the floor.
    floor = model.geom("floor").id
    model.geom_rgba[floor, 3] = 0
    model.geom_matid[floor] = -1
    sky = (env._render()["clean/observation"] == clean[0, 0]).all(2)
    assert (sky & ~shown).sum() < 60  # fine cracks in meshes, which show the sky
    # Multisampling mixes sky and scene at edges: there the clip ends at a pixel that is part scene.
    assert (shown & ~sky).sum() <= {"fast": 2, "full": 600}[quality]
    assert not shown[observation["clean/mask"]].any()


def test_first_frame_shows_the_objects_where_they_are(fast):
    """Meta-World opens the window at the end of its reset without telling MuJoCo."""
    env = fast("window-close", renders=("clean",), masks=False)
    first = [env.reset(seed=seed)[0]["clean/observation"] for seed in (0, 1)]
    for seed in (0, 1):
        env.reset(seed=seed)
        mujoco.mj_forward(env.model, env.data)
        assert np.array_equal(env._render()["clean/observation"], first[seed])
    assert (first[0] != first[1]).any(2).sum() > 50  # the window stands elsewhere


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return finish(python("-c", code, env={**os.environ, "MUJOCO_GL": "egl", "PYTHONPATH": ".", **environment}))


CHOICE = """
import os
from common.envs import make_env
import mujoco.egl
def create(create=mujoco.egl.create_initialized_egl_device_display):
    print(os.environ.get("MUJOCO_EGL_DEVICE_ID"))
    return create()
mujoco.egl.create_initialized_egl_device_display = create
for _ in range(2):
    make_env("cheetah-run", renders=("clean",)).reset(seed=0)
"""


@pytest.mark.parametrize("gpu", ["0", "7", "GPU-5a"])
def test_a_gpu_without_opengl_renders_on_another_device(gpu):
    """With a number of CUDA's that EGL knows, one that it does not, and a UUID; twice in one process."""
    result = run_python(CHOICE, CUDA_VISIBLE_DEVICES=gpu)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == {"0": ["0"], "7": ["7", "None"]}.get(gpu, ["None"])


BROKEN_GL = """
from common.cli import UserError
from common.envs import make_env
env = make_env("cheetah-run", renders=())
env.reset(seed=0)
assert env.step([0.0] * 6)[0]["state"].shape == (17,)
try:
    make_env("cheetah-run", renders=("clean",)).reset(seed=0)
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variable", "value", "advice"),
    [
        ("__EGL_VENDOR_LIBRARY_DIRS", "/nonexistent", "apt-get install libegl1"),
        ("MUJOCO_GL", "disable", "No module named 'mujoco.disable'"),
        ("MUJOCO_EGL_DEVICE_ID", "50", "Unset MUJOCO_EGL_DEVICE_ID=50, or correct it"),
        ("MUJOCO_EGL_DEVICE_ID", "first", "Unset MUJOCO_EGL_DEVICE_ID=first"),
        ("PYOPENGL_PLATFORM", "nonsense", "Unset PYOPENGL_PLATFORM=nonsense"),
    ],
)
def test_without_opengl_physics_runs_and_rendering_says_what_helps(variable, value, advice):
    result = run_python(BROKEN_GL, **{variable: value})
    assert result.returncode == 0 and not result.stderr
    (line,) = result.stdout.splitlines()
    assert advice in line


def test_a_broken_library_of_opengl_is_one_line(tmp_path):
    library = ctypes.util.find_library("EGL")
    places = [path for path in Path("/usr/lib").rglob(str(library)) if path.is_file()]
    (tmp_path / "empty").touch()
    mount = f"mount --bind {tmp_path}/empty {places[0] if places else '/nowhere'}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("needs libEGL and the right to mount over it")
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" "$@"', sys.executable, "-c", BROKEN_GL]
    variables = {**os.environ, "PYTHONPATH": ".", "MUJOCO_GL": "egl"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    (line,) = result.stdout.splitlines()
    assert "OpenGL cannot start" in line and "apt-get install libegl1" in line and not result.stderr


def test_environments_can_be_used_after_closing_and_left_open_at_exit(fast):
    env = fast(renders=("clean",))
    first = rollout(env, 0)
    env.close()
    env.close()
    assert_same(rollout(env, 0), first)
    code = "from common.envs import make_env; make_env('cheetah-run', renders=('clean',), quality='fast').reset(seed=0)"
    result = run_python(code, MUJOCO_GL="")
    assert result.returncode == 0 and result.stderr == ""
