"""Environments with a clean and a distractor render of every state, and the agent's mask in each.

The physics is that of dm_control and Meta-World, untouched. On the Control Suite the distractor render uses a second
model of the same scene, so that its textures, colours and floor cannot leak into the physics or the clean render. On
Meta-World it is the clean picture with a clip in place of all that is not scene.
"""

import ctypes
import importlib
from typing import Any, Literal

import gymnasium
import numpy as np

from common.cli import UserError
from common.distractors import FACE_SCALE, BackgroundPlayer, CameraWalk, ColorWalk, DistractorConfig, load_clips
from common.rendering import Renderer, RenderOptions, import_simulator, mujoco, segment_tables
from common.tasks import Task, get_task

RENDERS = ("clean", "distractor")
MIN_CAMERA_HEIGHT = 0.05  # m above the floor
ROBOT = "base"  # Meta-World's body at the root of the robot


def make_env(
    env: str,
    *,
    split: Literal["train", "test"] = "train",
    renders: tuple[str, ...] = RENDERS,
    masks: bool = True,
    quality: Literal["full", "fast"] = "full",
    distractors: DistractorConfig = DistractorConfig(),  # noqa: B008, it is frozen
    image_size: int | None = None,
    max_steps: int | None = None,
) -> "DistractingEnv":
    """An environment whose observation is a dict; `renders=()` is physics only and needs no OpenGL.

    Observation: `state` float32 (S,); for each render r `r/observation` uint8 (H, W, 3) and, with `masks`, `r/mask`
    bool (H, W), true on the agent. Actions are clipped to [-1, 1]. `truncated` is true after `max_steps` steps. On
    Meta-World `terminated` is true on success, and `info["success"]` tells it after every step.

    `reset(seed=...)` fixes the physics and every distractor, whatever ran before in the same object. Its `info` has
    `background` (the clip's name), `background_start` and `background_direction` if there is a distractor render.

    `quality="fast"` renders without shadows, reflections and multisampling and with coarser capsules and floors.
    OpenGL starts at the first reset, so that a parent process can make the environment only to ask for its spaces.
    """
    task = get_task(env)
    if unknown := set(renders) - set(RENDERS):
        raise UserError(f"unknown render {sorted(unknown)[0]!r}: choose among {', '.join(RENDERS)}")
    if quality not in ("full", "fast"):
        raise UserError(f"unknown quality {quality!r}: choose 'full' or 'fast'")
    max_steps = max_steps or task.max_steps
    if task.suite == "dmw" and max_steps > task.max_steps:
        raise UserError(f"{task.name} ends after {task.max_steps} steps, {max_steps} are too many")
    options = RenderOptions(
        renders=tuple(render for render in RENDERS if render in renders),
        masks=masks,
        size=image_size or task.image_size,
        fast=quality == "fast",
        distractors=distractors,
    )
    return (DCSEnv if task.suite == "dcs" else DMWEnv)(task, max_steps, options, split)


class DistractingEnv(gymnasium.Env):
    """What both suites share: spaces, clips, and the renderer that the first reset starts. Use `make_env`.

    A suite adds MuJoCo's `model` and `data`, to be read only, `_reset_physics(seed) -> state` and
    `_step_physics(action) -> (state, reward, terminated, info)`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012, gymnasium's interface
    renderer_class: type[Renderer]

    def __init__(self, task: Task, max_steps: int, options: RenderOptions, split: str):
        self.task, self.max_steps, self._options = task, max_steps, options
        self._distracting = "distractor" in options.renders
        self._clips = load_clips(options.distractors, task, split, options.size) if self._distracting else []
        self._renderer: Renderer | None = None
        self._steps = 0

        shape = (options.size, options.size)
        spaces: dict[str, gymnasium.Space] = {
            "state": gymnasium.spaces.Box(-np.inf, np.inf, (task.state_dim,), np.float32)
        }
        for render in options.renders:
            spaces[f"{render}/observation"] = gymnasium.spaces.Box(0, 255, (*shape, 3), np.uint8)
            if options.masks:
                spaces[f"{render}/mask"] = gymnasium.spaces.Box(0, 1, shape, np.bool_)
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self.action_space = gymnasium.spaces.Box(-1, 1, (task.action_dim,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict[str, np.ndarray], dict]:
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        # Independent seeds for each purpose, so that switching one distractor off leaves everything else as it was.
        physics, background, camera, color = np.random.SeedSequence(seed).spawn(4)
        state = self._reset_physics(physics)
        self._steps = 0
        if self._options.renders and self._renderer is None:
            self._renderer = self.renderer_class(self._options, self.task, self.model, self.data)
        info: dict[str, Any] = {}
        if self._distracting:
            player = BackgroundPlayer(self._clips, np.random.default_rng(background))
            self._renderer.start(player, camera, color)
            info = {
                "background": player.clip.name,
                "background_start": player.index,
                "background_direction": player.direction,
            }
        return self._observe(state), info

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        state, reward, terminated, info = self._step_physics(np.clip(action, -1, 1))
        self._steps += 1
        if self._renderer:
            for distractor in self._renderer.moving:
                distractor.step()
        return self._observe(state), float(reward), terminated, self._steps >= self.max_steps, info

    def _observe(self, state: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": state.astype(np.float32), **(self._renderer.render() if self._renderer else {})}

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


# --- Distracting Control Suite ---


class _DCSRenderer(Renderer):
    def __init__(self, options: RenderOptions, task: Task, model: mujoco.MjModel, data: mujoco.MjData):
        super().__init__(options, task, model, data)
        self._models: dict[str, mujoco.MjModel] = {}
        self._scenes: dict[str, mujoco.MjvScene] = {}
        self._camera_walk: CameraWalk | None = None
        bodies = model.geom_bodyid  # the model with distractors has the same
        self._is_agent = lambda kind, index: kind == mujoco.mjtObj.mjOBJ_GEOM and bodies[index] != 0
        for render in options.renders:
            if render == "distractor":
                model = _distractor_model(task, round(FACE_SCALE * options.size))
            self._models[render], self._scenes[render] = model, self._make_scene(model)
            self._contexts[render] = self._make_context(model)
        if options.masks:
            self._contexts["mask"] = self._make_context(model, masks=True)

        if "distractor" in options.renders:
            self._original_rgb = model.mat_rgba[:, :3].copy()
            floor = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_MATERIAL, "grid")
            model.mat_rgba[floor, 3] = task.floor_alpha
            view = self._data.cam_xmat[self._camera].reshape(3, 3)[:, 2]
            self._texture = _SkyboxTexture(
                self._contexts["distractor"], model.cam_fovy[self._camera], along_x=abs(view[0]) > abs(view[1])
            )

    def start(self, player: BackgroundPlayer, camera: np.random.SeedSequence, color: np.random.SeedSequence) -> None:
        super().start(player, camera, color)
        scales = self._options.distractors
        self._color_walk = ColorWalk(np.random.default_rng(color), scales.color_scale, self._original_rgb)
        self.moving.append(self._color_walk)
        if scales.camera_scale > 0:  # else the task's own camera, to the last bit
            # The task's camera and the point it looks at, as far away as the agent; relative to its centre of mass.
            offset = self._data.cam_xpos[self._camera] - self._data.subtree_com[1]
            backward = self._data.cam_xmat[self._camera].reshape(3, 3)[:, 2]
            target = offset - np.linalg.norm(offset) * backward
            self._camera_walk = CameraWalk(np.random.default_rng(camera), scales.camera_scale, offset, target)
            self.moving.append(self._camera_walk)

    def render(self) -> dict[str, np.ndarray]:
        self._gl.make_current()
        result, mask = {}, None
        for render in self._options.renders:
            scene, model = self._scenes[render], self._models[render]
            if render == "distractor":
                self._update_distractors(scene, model)
            else:
                self._update_scene(scene, model)
            result[f"{render}/observation"] = self._draw(scene, self._contexts[render])[::-1].copy()
            if self._options.masks:
                if mask is None or self._camera_walk:  # from one place, both renders see the same of the agent
                    segments = self._draw_segments(scene, self._contexts["mask"])[::-1]
                    (is_agent,) = segment_tables(scene, self._is_agent)
                    mask = is_agent[segments]
                result[f"{render}/mask"] = mask.copy()
        return result

    def _update_distractors(self, scene: mujoco.MjvScene, model: mujoco.MjModel) -> None:
        """Bring a scene up to date, with the walking colours, seen from the walking camera, before the clip."""
        data, index = self._data, self._camera
        model.mat_rgba[:, :3] = self._color_walk.rgb
        plain_position, plain_rotation = data.cam_xpos[index].copy(), data.cam_xmat[index].copy()
        if self._camera_walk:
            offset, rotation = self._camera_walk.pose()
            data.cam_xpos[index] = data.subtree_com[1] + offset
            data.cam_xpos[index, 2] = max(data.cam_xpos[index, 2], MIN_CAMERA_HEIGHT)
            data.cam_xmat[index] = rotation.ravel()
        self._update_scene(scene, model)
        data.cam_xpos[index], data.cam_xmat[index] = plain_position, plain_rotation
        self._texture.upload(self._player.frame, scene)


class _SkyboxTexture:
    """Writes a clip's frame to the faces of a context's skybox that the camera sees.

    The faces are seen from the inside, so a mirrored frame appears as it is, and it is upright on the four sides. The
    face below shows the reflection of the face in front of the task's camera, so that no edge lies in the picture.
    """

    # The world's direction of each cube map face, in OpenGL's order.
    _DIRECTIONS = np.array([(1, 0, 0), (-1, 0, 0), (0, 0, 1), (0, 0, -1), (0, -1, 0), (0, 1, 0)])

    def __init__(self, context: mujoco.MjrContext, fovy: float, along_x: bool):
        """`fovy`: the camera's field of view in degrees; `along_x`: its image plane is normal to x and not to y."""
        from OpenGL import GL
        from OpenGL.raw.GL.VERSION.GL_1_1 import glTexSubImage2D

        self._gl, self._write, self._texture = GL, glTexSubImage2D, int(context.texture[0])
        GL.glBindTexture(GL.GL_TEXTURE_CUBE_MAP, self._texture)
        GL.glTexParameteri(GL.GL_TEXTURE_CUBE_MAP, GL.GL_TEXTURE_MIN_FILTER, GL.GL_LINEAR)  # there are no mipmaps
        # Largest angle between the camera's axis and that of a face of which it sees a corner.
        self._along_x = along_x
        self._min_cosine = np.cos(np.arctan(np.sqrt(2)) + np.arctan(np.sqrt(2) * np.tan(np.deg2rad(fovy) / 2)))

    def upload(self, frame: np.ndarray, scene: mujoco.MjvScene) -> None:
        """`frame`: uint8 (face, face, 3), contiguous."""
        GL = self._gl
        GL.glBindTexture(GL.GL_TEXTURE_CUBE_MAP, self._texture)
        GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 1)
        cosines = self._DIRECTIONS @ scene.camera[0].forward
        cosines[2:4] = abs(cosines[2:4])  # the floor's reflection shows what is above
        for face in np.flatnonzero(cosines > self._min_cosine):
            texels = frame
            if face == 3:  # below
                whole = frame.view("V3")[..., 0]  # three bytes at once: twice as fast
                texels = np.ascontiguousarray(whole.T if self._along_x else whole[:, ::-1])
            target = GL.GL_TEXTURE_CUBE_MAP_POSITIVE_X + int(face)
            pointer = ctypes.c_void_p(texels.ctypes.data)
            self._write(target, 0, 0, 0, *frame.shape[1::-1], GL.GL_RGB, GL.GL_UNSIGNED_BYTE, pointer)


def _distractor_model(task: Task, face: int) -> mujoco.MjModel:
    """The task's model with a small, empty skybox; everything else is as in the physics."""
    domain = importlib.import_module(f"dm_control.suite.{task.name.split('-')[0]}")
    xml, assets = domain.get_model_and_assets()
    skybox = f'<texture name="skybox" type="skybox" builtin="flat" width="{face}" height="{face}"/>'
    assets = {**assets, "./common/skybox.xml": f"<mujoco><asset>{skybox}</asset></mujoco>".encode()}
    return mujoco.MjModel.from_xml_string(xml, assets)


class DCSEnv(DistractingEnv):
    """A task of the Distracting Control Suite. Use `make_env`."""

    renderer_class = _DCSRenderer

    def __init__(self, task: Task, max_steps: int, options: RenderOptions, split: str):
        super().__init__(task, max_steps, options, split)
        suite = import_simulator("dm_control.suite")
        self._env = suite.load(*task.name.split("-"), task_kwargs={"time_limit": float("inf")})
        self.model, self.data = self._env.physics.model.ptr, self._env.physics.data.ptr

    def _reset_physics(self, seed: np.random.SeedSequence) -> np.ndarray:
        self._env.task._random = np.random.RandomState(np.random.MT19937(seed))
        return _flatten(self._env.reset().observation)

    def _step_physics(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, dict]:
        time_step = self._env.step(action)
        return _flatten(time_step.observation), time_step.reward, False, {}


def _flatten(observation: dict[str, Any]) -> np.ndarray:
    """The entries in alphabetical order of their keys, as the experts expect them."""
    return np.concatenate([np.ravel(observation[key]) for key in sorted(observation)])


# --- Distracting Meta-World ---


class _DMWRenderer(Renderer):
    """Two drawings at most, one in colour and one of segments, serve both renders."""

    def __init__(self, options: RenderOptions, task: Task, model: mujoco.MjModel, data: mujoco.MjData):
        super().__init__(options, task, model, data)
        self._scene = self._make_scene(model)
        self._contexts["color"] = self._make_context(model)
        if options.masks or "distractor" in options.renders:
            self._contexts["mask"] = self._make_context(model, masks=True)

        geom, site = int(mujoco.mjtObj.mjOBJ_GEOM), int(mujoco.mjtObj.mjOBJ_SITE)
        robot = model.body_rootid == model.body(ROBOT).id
        bodies = {geom: model.geom_bodyid, site: model.site_bodyid}
        floor = (geom, model.geom("floor").id)
        # The robot's sites (coloured balls in the fingers) hide pixels of its geoms, so they count as robot. Goal
        # markers are sites too: they are part of the scene.
        self._is_robot = lambda kind, index: kind in bodies and bool(robot[bodies[kind][index]])
        self._is_scene = lambda kind, index: (kind, index) != floor

    def render(self) -> dict[str, np.ndarray]:
        self._gl.make_current()
        # Meta-World's camera hangs upside down. Its picture is turned by 180 degrees: the rows are already the other
        # way round as OpenGL gives them.
        self._update_scene(self._scene, self._model)
        color = self._draw(self._scene, self._contexts["color"])[:, ::-1].copy()
        result: dict[str, np.ndarray] = {}
        if "mask" in self._contexts:
            # Meta-World's meshes have fine cracks. With their back faces drawn too, no background shows through them.
            self._scene.flags[mujoco.mjtRndFlag.mjRND_CULL_FACE] = 0
            segments = self._draw_segments(self._scene, self._contexts["mask"])[:, ::-1]
            self._scene.flags[mujoco.mjtRndFlag.mjRND_CULL_FACE] = 1
            is_robot, is_scene = segment_tables(self._scene, self._is_robot, self._is_scene)
        for render in self._options.renders:
            picture = color
            if render == "distractor":
                picture = np.where(is_scene[segments][..., None], color, self._player.frame)
            result[f"{render}/observation"] = picture
            if self._options.masks:
                result[f"{render}/mask"] = is_robot[segments]
        return result


class DMWEnv(DistractingEnv):
    """A task of Distracting Meta-World. Use `make_env`."""

    renderer_class = _DMWRenderer

    def __init__(self, task: Task, max_steps: int, options: RenderOptions, split: str):
        super().__init__(task, max_steps, options, split)
        self._env = import_simulator("metaworld.env_dict").ALL_V3_ENVIRONMENTS[f"{task.name}-v3"]()
        # As for the tasks of MT10, the state tells the goal.
        self._env._partially_observable = False
        del self._env.sawyer_observation_space  # a cached property: it would still clip the goal to zero
        self._env._set_task_called = True
        self._env.seeded_rand_vec = True
        self.model, self.data = self._env.model, self._env.data

    def _reset_physics(self, seed: np.random.SeedSequence) -> np.ndarray:
        # As Meta-World makes its own tasks: draw the positions of object and goal, then reset with these. Its reset
        # places the objects twice, and the first state is right only if both times they stand in the same place. (That
        # of window-close reports the handle of the closed window even so, as Meta-World's own tasks do.)
        self._env.seed(int(seed.generate_state(1)[0]))
        self._env._freeze_rand_vec = False
        self._env.reset_model()
        self._env._freeze_rand_vec = True
        state, _ = self._env.reset()
        # It moves objects without telling MuJoCo, so bring their positions up to date for the first frame. That leaves
        # the physics as it is: the next step begins by computing the same.
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)
        return state

    def _step_physics(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, dict]:
        state, reward, _, _, info = self._env.step(action)
        success = bool(info["success"])
        return state, reward, success, {"success": success}
