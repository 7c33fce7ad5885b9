import functools
import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")  # before mujoco is imported

import gymnasium
import mujoco
import numpy as np
import pytest

from common.distractors import DistractorConfig
from common.envs import make_env, physics_random_state, physics_seed
from common.errors import UserError
from common.experts import load_expert
from common.tasks import TASKS, get_task

DCS = [name for name, task in TASKS.items() if task.suite == "dcs"]
DMW = [name for name, task in TASKS.items() if task.suite == "dmw"]
SYNTHETIC = DistractorConfig(backgrounds="synthetic", num_videos=2)
ROOT = Path(__file__).parents[1]


def fast(env: str = "cheetah-run", **options) -> gymnasium.Env:
    return make_env(env, **{"quality": "fast", "distractors": SYNTHETIC, **options})


def rollout(env: gymnasium.Env, seed: int, steps: int = 6) -> list[dict]:
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


# --- tasks ---


def test_task_table_matches_the_environments():
    assert len(DCS) == 4 and len(DMW) == 10
    for name in TASKS:
        task = get_task(name)
        env = make_env(name, renders=())
        observation, _ = env.reset(seed=0)
        assert observation["state"].shape == (task.state_dim,) and env.action_space.shape == (task.action_dim,)
        assert observation in env.observation_space


def test_unknown_names_are_errors_with_advice():
    with pytest.raises(UserError, match=r"did you mean 'cheetah-run'.*humanoid-walk"):
        make_env("cheetah-rn")
    with pytest.raises(UserError, match="unknown render 'dirty'"):
        fast(renders=("dirty",))
    with pytest.raises(UserError, match="unknown quality 'good'"):
        fast(quality="good")


# --- physics ---


@pytest.mark.parametrize("name", DCS)
def test_physics_is_that_of_the_suite(name):
    from dm_control import suite

    rng = np.random.default_rng(0)
    reference = suite.load(*name.split("-"), task_kwargs={"random": physics_random_state(7)})
    time_step = reference.reset()
    env = fast(name)
    observation, _ = env.reset(seed=7)
    for _ in range(20):
        ordered = [np.ravel(time_step.observation[key]) for key in sorted(time_step.observation)]
        assert np.array_equal(observation["state"], np.concatenate(ordered).astype(np.float32))
        action = rng.uniform(-1, 1, env.action_space.shape)
        time_step = reference.step(action)
        observation, reward, *_ = env.step(action)
        assert reward == time_step.reward
    env.close()


def test_rendering_does_not_touch_the_physics():
    env, blind = fast("hopper-hop"), fast("hopper-hop", renders=())
    assert_same(rollout(env, 1, 30), rollout(blind, 1, 30), {"state", "reward"})
    env.close()


def test_actions_are_clipped():
    env = make_env("walker-run", renders=())
    states = []
    for scale in (1, 5):
        env.reset(seed=0)
        states.append([env.step(scale * np.array([1, -1, 1, -1, 1, -1]))[0]["state"] for _ in range(5)])
    assert np.array_equal(*states)


@pytest.mark.parametrize(("limit", "max_steps"), [(1000, None), (3, 3)])
def test_episodes_end_by_truncation_only(limit, max_steps):
    env = make_env("cheetah-run", renders=(), max_steps=max_steps)
    for _ in range(2):
        env.reset(seed=0)
        ends = [env.step(np.zeros(6))[2:4] for _ in range(limit)]
        assert ends == [(False, False)] * (limit - 1) + [(False, True)]


# --- determinism and independence ---


@pytest.mark.parametrize("name", TASKS)
def test_same_seed_same_pixels(name):
    first = fast(name)
    expected = rollout(first, 5)
    second = fast(name)
    rollout(second, 6)
    assert_same(rollout(second, 5), expected)  # after another episode, in another object
    assert_same(rollout(first, 5), expected)  # the other object's context in between
    different = rollout(first, 6)
    for key in ("state", "clean/observation", "distractor/observation"):
        assert not np.array_equal(different[-1][key], expected[-1][key])
    first.close()
    second.close()


def test_unseeded_resets_follow_from_the_last_seed():
    env = fast(renders=("distractor",))
    runs = []
    for _ in range(2):
        env.reset(seed=1)
        runs.append([env.reset()[0]["distractor/observation"] for _ in range(2)])
    assert np.array_equal(runs[0], runs[1]) and not np.array_equal(*runs[0])
    env.close()


def test_clean_render_does_not_depend_on_distractors():
    plain = fast("humanoid-walk", renders=("clean",))
    expected = rollout(plain, 2)
    strong = fast("humanoid-walk", distractors=DistractorConfig("synthetic", camera_scale=0.5, color_scale=0.5))
    assert_same(rollout(strong, 2), expected, {"clean/observation", "clean/mask", "state"})
    plain.close()
    strong.close()


def test_switching_one_distractor_off_leaves_the_others():
    env = fast()
    fixed_camera = fast(distractors=DistractorConfig("synthetic", num_videos=2, camera_scale=0))
    both, fixed = rollout(env, 3), rollout(fixed_camera, 3)
    assert_same(both, fixed, {"state", "background", "background_start", "background_direction", "clean/mask"})
    for a, b in zip(both, fixed):
        assert not np.array_equal(a["distractor/mask"], a["clean/mask"])
        assert np.array_equal(b["distractor/mask"], b["clean/mask"])
        agent = [x["distractor/observation"][x["distractor/mask"]].mean(0) for x in (a, b)]
        assert np.allclose(*agent, atol=25)  # the same colours
    env.close()
    fixed_camera.close()


def test_distractors_change_the_picture_in_every_step():
    env = fast(distractors=DistractorConfig("synthetic", camera_scale=0, color_scale=0))
    frames = [x["distractor/observation"].astype(int) for x in rollout(env, 0)]
    masks = [x["distractor/mask"] for x in rollout(env, 0)]
    for one, other in itertools.pairwise(frames):
        assert abs(one - other)[~masks[0]].mean() > 3  # the background moves
    env.close()
    env = fast(distractors=DistractorConfig("synthetic", camera_scale=0, color_scale=0.3))
    color = np.array([x["distractor/observation"][x["distractor/mask"]].mean(0) for x in rollout(env, 0, 60)])
    clean = np.array([x["clean/observation"][x["clean/mask"]].mean(0) for x in rollout(env, 0, 60)])
    assert abs(color - clean).max() > 10  # the agent's colour starts elsewhere
    assert np.std(color - clean, axis=0).max() > 0.5  # and wanders
    env.close()


# --- pictures and masks ---


@pytest.mark.parametrize("name", DCS)
def test_full_clean_render_is_mujocos_own(name):
    env = make_env(name, renders=("clean",))
    observation = rollout(env, 0, 8)[-1]
    physics = env.unwrapped.physics
    with mujoco.Renderer(physics.model.ptr, 64, 64) as renderer:
        renderer.update_scene(physics.data.ptr, 0)
        assert np.array_equal(renderer.render(), observation["clean/observation"])
        renderer.enable_segmentation_rendering()
        geoms, kinds = np.moveaxis(renderer.render(), 2, 0)
    is_geom = kinds == mujoco.mjtObj.mjOBJ_GEOM
    assert np.array_equal(is_geom & (physics.model.geom_bodyid[geoms] != 0), observation["clean/mask"])
    env.close()


@pytest.mark.parametrize("name", DCS)
def test_mask_is_what_changes_when_the_agent_is_made_invisible(name):
    env = fast(name, distractors=DistractorConfig("synthetic", num_videos=1))
    observation = rollout(env, 4)[-1]
    renderer = env.unwrapped._renderer
    for model in renderer._models.values():
        agent = np.unique(model.geom_matid[model.geom_bodyid != 0])
        model.mat_rgba[agent, 3] = 0
    empty = renderer.render()
    for render in ("clean", "distractor"):
        changed = np.any(observation[f"{render}/observation"] != empty[f"{render}/observation"], axis=2)
        mask = observation[f"{render}/mask"]
        assert np.all(mask[changed])
        assert changed[mask].mean() > 0.97  # a pixel of the agent may have the background's colour
        assert not empty[f"{render}/mask"].any()
    env.close()


@pytest.mark.parametrize("name", DCS)
def test_agent_stays_in_view(name):
    env = fast(name, renders=("distractor",), distractors=DistractorConfig("synthetic", num_videos=1))
    for seed in range(2):
        for observation in rollout(env, seed, 80):
            rows, columns = np.nonzero(observation["distractor/mask"])
            assert len(rows) > 30
            assert 12 < rows.mean() < 52 and 12 < columns.mean() < 52
    env.close()


def test_a_vanishing_camera_walk_shows_the_clean_view():
    env = fast("walker-run", distractors=DistractorConfig("synthetic", num_videos=1, camera_scale=1e-6))
    for observation in rollout(env, 0):
        assert (observation["clean/mask"] != observation["distractor/mask"]).sum() <= 1
    env.close()


def test_background_is_the_clip_upright_and_not_mirrored(tmp_path):
    import imageio.v3 as iio

    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:32, :32], picture[:32, 32:] = (250, 0, 0), (0, 250, 0)
    picture[32:, :32], picture[32:, 32:] = (0, 0, 250), (250, 250, 0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        iio.imwrite(tmp_path / name / "0.png", picture)
    config = DistractorConfig(str(tmp_path), camera_scale=0, color_scale=0)
    for name, row in (("cheetah-run", 61), ("humanoid-walk", 44)):  # the cameras look along y, and along x and down
        env = fast(name, renders=("distractor",), distractors=config, masks=False)
        frame = env.reset(seed=0)[0]["distractor/observation"].astype(int)
        if name == "cheetah-run":
            assert frame[2, 2].argmax() == 0 and frame[2, 61].argmax() == 1
        left, right = frame[row, 2], frame[row, 61]  # a see-through floor may lie over them
        assert left[2] > left[0] + 30 and right[0] > left[0] + 30 and right[1] > left[1] + 30
        env.close()


def test_image_size_and_render_selection():
    env = fast(renders=("distractor",), image_size=32, masks=False)
    observation, _ = env.reset(seed=0)
    assert set(observation) == {"state", "distractor/observation"}
    assert observation["distractor/observation"].shape == (32, 32, 3)
    assert observation in env.observation_space
    env.close()


# --- Meta-World ---


def official(env: gymnasium.Env) -> gymnasium.Env:
    """Meta-World's own environment with the objects and the goal where the present episode of `env` has them."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.types import Task

    name, size = f"{env.unwrapped.task.name}-v3", 128
    kind = ALL_V3_ENVIRONMENTS[name]
    result = kind(render_mode="rgb_array", camera_name="corner", width=size, height=size)
    drawn = {"env_cls": kind, "rand_vec": env.unwrapped._env._last_rand_vec, "partially_observable": False}
    result.set_task(Task(env_name=name, data=pickle.dumps(drawn)))
    return result


@pytest.mark.parametrize("name", DMW)
def test_physics_is_meta_worlds(name):
    """The same states and rewards with rendering on, after another episode."""
    rng = np.random.default_rng(0)
    env = fast(name, renders=("clean",), masks=False, image_size=16)
    env.reset(seed=1)
    env.step(np.ones(4))
    observation, _ = env.reset(seed=2)
    reference = official(env)
    expected, _ = reference.reset()
    goal = env.unwrapped.data.site("hole" if name == "button-press-topdown" else "goal").xpos  # as it is rendered
    assert np.allclose(goal, reference._target_pos)
    for _ in range(12):
        assert np.array_equal(observation["state"], expected.astype(np.float32))
        action = rng.uniform(-2, 2, 4)
        expected, expected_reward, _, _, info = reference.step(np.clip(action, -1, 1))
        observation, reward, terminated, _, ours = env.step(action)
        assert reward == expected_reward and terminated == ours["success"] == bool(info["success"])
    assert np.array_equal(observation["state"], expected.astype(np.float32))
    assert np.allclose(observation["state"][36:], reference._target_pos, atol=1e-6)
    assert np.allclose(goal, reference._target_pos, atol=1e-2 if name == "button-press-topdown" else 1e-6)
    env.close()
    reference.close()


def test_positions_are_drawn_anew_and_from_the_seed():
    env = make_env("pick-place", renders=())
    goals = [tuple(env.reset(seed=seed)[0]["state"][36:]) for seed in (0, 1, 2, 0)]
    assert len(set(goals)) == 3 and goals[0] == goals[3]
    env = make_env("window-open", renders=())
    for seed in (1, 2):
        env.reset(seed=seed)
        space = env.unwrapped._env._random_reset_space
        drawn = np.random.default_rng(physics_seed(seed)).uniform(space.low, space.high)
        assert np.array_equal(env.unwrapped._env._last_rand_vec, drawn)
        assert np.array_equal(env.unwrapped.model.body("window").pos, drawn)


@pytest.mark.parametrize("name", DMW)
def test_full_clean_render_is_meta_worlds_turned_the_right_way_up(name):
    env = make_env(name, distractors=SYNTHETIC)
    env.reset(seed=3)
    reference = official(env)
    reference.reset()
    for _ in range(2):
        observation, *_ = env.step(np.array([0.5, 1, -0.5, 1]))
        reference.step(np.array([0.5, 1, -0.5, 1]))
    assert np.array_equal(observation["clean/observation"], reference.render()[::-1, ::-1])
    reference.close()
    env.close()


def test_the_picture_of_meta_world_is_upright_and_not_mirrored():
    """Lifting the hand moves its fingers up in the picture, moving it along +x moves them to the right."""
    env = fast("reach", renders=("clean",))

    def finger(action):  # row and column of the white finger
        env.reset(seed=0)
        for _ in range(15):
            observation, *_ = env.step(np.array(action, np.float32))
        white = (observation["clean/observation"] > 200).all(2) & observation["clean/mask"]
        return np.argwhere(white).mean(0)

    middle, up, x = finger([0, 0, 0, 0]), finger([0, 0, 1, 0]), finger([1, 0, 0, 0])
    assert up[0] < middle[0] - 5
    # The camera stands at (-1.1, -0.4, 0.6) and looks along (1, 1, -0.4): +x is to the right of what it looks at.
    assert x[1] > middle[1] + 5
    env.close()


@pytest.mark.parametrize(("name", "quality"), [*((name, "fast") for name in DMW), ("door-open", "full")])
def test_clip_replaces_exactly_what_is_neither_geom_nor_marker(name, quality, tmp_path):
    import imageio.v3 as iio

    rng = np.random.default_rng(0)
    for clip in ("a", "b"):
        (tmp_path / clip).mkdir()
        iio.imwrite(tmp_path / clip / "0.png", rng.integers(0, 256, (128, 128, 3), np.uint8))
    env = make_env(name, quality=quality, distractors=DistractorConfig(str(tmp_path)))
    env.reset(seed=0)
    observation, *_ = env.step(np.zeros(4))
    clean, distracting = observation["clean/observation"], observation["distractor/observation"]
    assert np.array_equal(observation["clean/mask"], observation["distractor/mask"])
    clip = env.unwrapped._player.frame
    shown = (distracting == clip).all(2)
    assert np.array_equal(distracting[~shown], clean[~shown])
    # The clip fills what has the sky's colour in a render without the floor.
    renderer, model = env.unwrapped._renderer, env.unwrapped.model
    floor = model.geom("floor").id
    model.geom_rgba[floor, 3] = 0
    model.geom_matid[floor] = -1
    sky = (renderer.render(clip)["clean/observation"] == clean[0, 0]).all(2)
    assert (sky & ~shown).sum() < 60  # fine cracks in meshes, which show the sky
    # Multisampling mixes sky and scene at edges: there the clip ends at a pixel that is part scene.
    assert (shown & ~sky).sum() <= {"fast": 2, "full": 600}[quality]
    assert not shown[observation["clean/mask"]].any()
    env.close()


@pytest.mark.parametrize("name", DMW)
def test_robot_mask_is_what_changes_when_the_robot_is_made_invisible(name):
    env = fast(name)
    env.reset(seed=0)
    observation, *_ = env.step(np.array([0, 1, 0, 1]))
    renderer, model = env.unwrapped._renderer, env.unwrapped.model
    mask = observation["clean/mask"]
    robot = {model.body("base").id}
    for body in range(model.nbody):
        if model.body_parentid[body] in robot:
            robot.add(body)
    assert {"hand", "rightclaw", "leftpad"} <= {model.body(body).name for body in robot}
    model.geom_rgba[np.isin(model.geom_bodyid, list(robot)), 3] = 0
    model.site_rgba[np.isin(model.site_bodyid, list(robot)), 3] = 0
    empty = renderer.render(env.unwrapped._player.frame)
    changed = (observation["clean/observation"] != empty["clean/observation"]).any(2)
    assert mask[changed].all() and not empty["clean/mask"].any()
    assert changed[mask].mean() > 0.97  # where the meshes have cracks, the picture shows what is behind
    env.close()


@pytest.mark.parametrize("name", DMW)
def test_robot_is_in_view_and_its_mask_has_no_holes_of_a_pixel(name):
    env = fast(name, renders=("clean",))
    expert = load_expert(name, "scripted")
    observation, _ = env.reset(seed=5)
    holes = []
    for _ in range(40):
        mask = observation["clean/mask"]
        assert 0.05 < mask.mean() < 0.5
        around = np.stack([mask[:-2, 1:-1], mask[2:, 1:-1], mask[1:-1, :-2], mask[1:-1, 2:]]).all(0)
        holes.append((around & ~mask[1:-1, 1:-1]).sum())
        observation, _, terminated, *_ = env.step(expert.act(observation["state"]))
        if terminated:
            break
    assert np.mean(holes) < 2
    env.close()


def test_episodes_of_meta_world_end_on_success_or_after_500_steps():
    expert = load_expert("reach", "scripted")
    env = make_env("reach", renders=())
    for seed in range(2):
        observation, _ = env.reset(seed=seed)
        for step in range(1, 501):
            observation, _, terminated, truncated, info = env.step(expert.act(observation["state"]))
            assert terminated == info["success"] and truncated == (step == 500)
            if terminated:
                break
        assert terminated and step < 100
    env.reset(seed=0)
    assert [env.step(np.zeros(4))[2:4] for _ in range(500)] == [(False, False)] * 499 + [(False, True)]
    with pytest.raises(UserError, match="ends after 500 steps"):
        make_env("reach", max_steps=501)


def test_first_frame_shows_the_objects_where_they_are(monkeypatch):
    """Meta-World opens the window at the end of its reset without telling MuJoCo, so frame 0 needs a refresh."""
    env = fast("window-close", renders=("clean",), masks=False)
    first = [env.reset(seed=seed)[0]["clean/observation"] for seed in (0, 1)]
    for seed in (0, 1):
        env.reset(seed=seed)
        mujoco.mj_forward(env.unwrapped.model, env.unwrapped.data)
        assert np.array_equal(env.unwrapped._renderer.render(None)["clean/observation"], first[seed])
    assert (first[0] != first[1]).any(2).sum() > 50  # the window stands elsewhere
    monkeypatch.setattr(type(env.unwrapped._renderer), "refresh", lambda self: None)
    assert (env.reset(seed=0)[0]["clean/observation"] != first[0]).any(2).sum() > 20
    env.close()


# --- processes and OpenGL ---


def test_vector_environment_in_processes_of_their_own():
    make = functools.partial(make_env, "cheetah-run", quality="fast", distractors=SYNTHETIC, max_steps=3)
    alone = make()
    expected = [rollout(alone, seed, 1)[0] for seed in (0, 1)]
    alone.close()
    vector = gymnasium.vector.AsyncVectorEnv([make, make], context="spawn")
    observation, _ = vector.reset(seed=[0, 1])
    for index in range(2):
        assert_same([expected[index]], [{key: value[index] for key, value in observation.items()}], set(observation))
    vector.close()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)


BROKEN_GL = """
from common.envs import make_env
from common.errors import UserError
env = make_env("cheetah-run", renders=())
env.reset(seed=0)
assert env.step([0.0] * 6)[0]["state"].shape == (17,)
try:
    make_env("cheetah-run", renders=("clean",)).reset(seed=0)
except UserError as error:
    print(error)
"""


def test_without_a_working_egl_physics_runs_and_rendering_names_the_package():
    result = run_python(BROKEN_GL, MUJOCO_GL="egl", __EGL_VENDOR_LIBRARY_DIRS="/nonexistent")
    assert result.returncode == 0, result.stderr
    assert "apt-get install libegl1" in result.stdout and len(result.stdout.splitlines()) == 1
    result = run_python(BROKEN_GL, MUJOCO_GL="disable")
    assert result.returncode == 0, result.stderr
    assert "MUJOCO_GL is 'disable'" in result.stdout


def test_egl_is_probed_before_osmesa_is_chosen():
    probe = "from common.rendering import _egl_starts; print(_egl_starts())"
    assert run_python(probe, __EGL_VENDOR_LIBRARY_DIRS="/nonexistent").stdout == "False\n"
    if os.environ["MUJOCO_GL"] == "egl":
        assert run_python(probe).stdout == "True\n"


def test_without_osmesa_rendering_names_the_package():
    import ctypes.util

    if ctypes.util.find_library("OSMesa"):
        pytest.skip("OSMesa is installed")
    result = run_python(BROKEN_GL, MUJOCO_GL="osmesa")
    assert result.returncode == 0, result.stderr
    assert "apt-get install libosmesa6" in result.stdout


def test_an_environment_left_open_does_not_disturb_the_exit():
    code = (
        "from common.envs import make_env\n"
        "env = make_env('cheetah-run', renders=('clean',), quality='fast')\n"
        "env.reset(seed=0)\n"
    )
    result = run_python(code)
    assert result.returncode == 0 and result.stderr == ""


def test_closed_environments_can_be_used_again():
    env = fast(renders=("clean",))
    first = rollout(env, 0)
    env.close()
    env.close()
    assert_same(rollout(env, 0), first)
    env.close()
