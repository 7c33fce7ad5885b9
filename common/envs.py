"""Environments with a clean and a distractor render of every state, and the agent's mask in each.

The physics is that of dm_control and Meta-World, untouched. On the Control Suite the distractor render uses a second
model of the same scene, so that its textures, colours and floor cannot leak into the physics or the clean render. On
Meta-World it is the clean picture with a clip in place of all that is not scene.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np

from common.distractors import (
    FACE_SCALE,
    BackgroundPlayer,
    CameraWalk,
    Clip,
    ColorWalk,
    DistractorConfig,
    load_clips,
)
from common.rendering import MASK, Offscreen, import_simulator, mujoco
from common.tasks import Task, get_task

MIN_CAMERA_HEIGHT = 0.05  # m above the floor
ROBOT = "base"  # Meta-World's body at the root of the robot


def make_env(
    env: str,
    *,
    split: Literal["train", "test"] = "train",
    renders: tuple[Literal["clean", "distractor"], ...] = ("clean", "distractor"),
    masks: bool = True,
    quality: Literal["full", "fast"] = "full",
    distractors: DistractorConfig = DistractorConfig(),  # noqa: B008, it is frozen
    image_size: int | None = None,
    max_steps: int | None = None,
) -> "DistractingEnv":
    """An environment whose observation is a dict; `renders=()` is physics only and needs no OpenGL.

    Observation: `state` float32 (S,); for each render r `r/observation` uint8 (H, W, 3) and, with `masks`, `r/mask`
    bool (H, W), true on the agent. Actions are clipped to [-1, 1]. `truncated` is true after `max_steps` steps, at most
    the task's. On Meta-World `terminated` is true on success, and `info["success"]` tells it after every step.

    `reset(seed=...)` fixes the physics and every distractor, whatever ran before in the same object. Its `info` has
    `background` (the clip's name), `background_start` and `background_direction` if there is a distractor render.

    `quality="fast"` renders without shadows, reflections and multisampling and with coarser capsules and floors.
    OpenGL starts at the first reset, so that a parent process can make the environment only to ask for its spaces.
    """
    task = get_task(env)
    size = image_size or task.image_size
    return (DCSEnv if task.suite == "dcs" else DMWEnv)(
        task=task,
        max_steps=max_steps or task.max_steps,
        renders=renders,
        masks=masks,
        size=size,
        fast=quality == "fast",
        distractors=distractors,
        clips=load_clips(distractors, task, split, size) if "distractor" in renders else [],
    )


@dataclass(eq=False, repr=False)
class DistractingEnv(gymnasium.Env):
    """What both suites share: spaces, seeds, and the OpenGL context that the first reset starts. Use `make_env`.

    A suite adds MuJoCo's `model` and `data`, to be read only; `_agent_bodies`, bool (bodies,); `_reset_physics(seed) ->
    state`; `_step_physics(action) -> (state, reward, terminated, info)`; `_models()` that `Offscreen` draws; and
    `_render() -> observation` without the state.
    """

    task: Task
    max_steps: int
    renders: tuple[str, ...]
    masks: bool
    size: int  # height and width of a frame in pixels
    fast: bool
    distractors: DistractorConfig
    clips: list[Clip]

    def __post_init__(self):
        self._distracting = "distractor" in self.renders
        self._offscreen: Offscreen | None = None
        self._moving: list[Any] = []  # what has to `step` with the physics
        self._steps = 0
        shape = (self.size, self.size)
        spaces: dict[str, gymnasium.Space] = {
            "state": gymnasium.spaces.Box(-np.inf, np.inf, (self.task.state_dim,), np.float32)
        }
        for render in self.renders:
            spaces[f"{render}/observation"] = gymnasium.spaces.Box(0, 255, (*shape, 3), np.uint8)
            if self.masks:
                spaces[f"{render}/mask"] = gymnasium.spaces.Box(0, 1, shape, np.bool_)
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self.action_space = gymnasium.spaces.Box(-1, 1, (self.task.action_dim,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict[str, np.ndarray], dict]:
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        # Independent seeds for each purpose, so that switching one distractor off leaves everything else as it was.
        physics, background, camera, color = np.random.SeedSequence(seed).spawn(4)
        state = self._reset_physics(physics)
        self._steps = 0
        if self.renders and self._offscreen is None:
            camera_id = self.model.camera(self.task.camera).id
            self._offscreen = Offscreen(self._models(), self.data, camera_id, size=self.size, fast=self.fast)
        info: dict[str, Any] = {}
        if self._distracting:
            self._player = BackgroundPlayer(self.clips, np.random.default_rng(background))
            self._moving = [self._player]
            self._start_walks(camera, color)
            info = {
                "background": self._player.clip.name,
                "background_start": self._player.index,
                "background_direction": self._player.direction,
            }
        return self._observe(state), info

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        state, reward, terminated, info = self._step_physics(np.clip(action, -1, 1))
        self._steps += 1
        for distractor in self._moving:
            distractor.step()
        return self._observe(state), float(reward), terminated, self._steps >= self.max_steps, info

    def _observe(self, state: np.ndarray) -> dict[str, np.ndarray]:
        observation = {"state": state.astype(np.float32)}
        if self._offscreen:
            self._offscreen.gl.make_current()
            observation |= self._render()
        return observation

    def _is_agent(self, objects: list[tuple[int, int]]) -> np.ndarray:
        """Which segments are the agent, bool (segments,), from `Offscreen.draw_segments`.

        Sites on the agent (coloured balls in the robot's fingers) hide pixels of its geoms, so they count. Goal markers
        are sites too, of another body.
        """
        bodies = {
            int(mujoco.mjtObj.mjOBJ_GEOM): self.model.geom_bodyid,
            int(mujoco.mjtObj.mjOBJ_SITE): self.model.site_bodyid,
        }
        return np.array([kind in bodies and self._agent_bodies[bodies[kind][number]] for kind, number in objects])

    def _start_walks(self, camera: np.random.SeedSequence, color: np.random.SeedSequence) -> None:
        """Add to `_moving` what distracts besides the clip, on the Control Suite; the seeds are those of the walks."""

    def close(self) -> None:
        if self._offscreen:
            self._offscreen.close()
            self._offscreen = None


# --- Distracting Control Suite ---


class DCSEnv(DistractingEnv):
    """A task of the Distracting Control Suite. Use `make_env`."""

    # The world's direction of each face of the skybox, in OpenGL's order.
    _FACES = np.array([(1, 0, 0), (-1, 0, 0), (0, 0, 1), (0, 0, -1), (0, -1, 0), (0, 1, 0)])
    _BELOW = 3

    def __post_init__(self):
        super().__post_init__()
        suite = import_simulator("dm_control.suite")
        self._env = suite.load(*self.task.name.split("-"), task_kwargs={"time_limit": float("inf")})
        self.model, self.data = self._env.physics.model.ptr, self._env.physics.data.ptr
        self._agent_bodies = np.arange(self.model.nbody) != 0
        self._camera_walk: CameraWalk | None = None

    def _reset_physics(self, seed: np.random.SeedSequence) -> np.ndarray:
        self._env.task._random = np.random.RandomState(np.random.MT19937(seed))
        return _flatten(self._env.reset().observation)

    def _step_physics(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, dict]:
        time_step = self._env.step(action)
        return _flatten(time_step.observation), time_step.reward, False, {}

    def _models(self) -> dict[str, mujoco.MjModel]:
        models = dict.fromkeys(self.renders, self.model)
        if self.masks:
            models[MASK] = self.model
        if self._distracting:
            # The task's model with a small, empty skybox; everything else is as in the physics.
            domain = importlib.import_module(f"dm_control.suite.{self.task.name.split('-')[0]}")
            xml, assets = domain.get_model_and_assets()
            face = round(FACE_SCALE * self.size)
            skybox = f'<texture name="skybox" type="skybox" builtin="flat" width="{face}" height="{face}"/>'
            assets = {**assets, "./common/skybox.xml": f"<mujoco><asset>{skybox}</asset></mujoco>".encode()}
            models["distractor"] = mujoco.MjModel.from_xml_string(xml, assets)
            models["distractor"].material("grid").rgba[3] = self.task.floor_alpha
        return models

    def _start_walks(self, camera: np.random.SeedSequence, color: np.random.SeedSequence) -> None:
        scales, data, index = self.distractors, self.data, self.task.camera
        self._color_walk = ColorWalk(np.random.default_rng(color), scales.color_scale, self.model.mat_rgba[:, :3])
        self._moving.append(self._color_walk)
        if scales.camera_scale > 0:  # else the task's own camera, to the last bit
            # The task's camera and the point it looks at, as far away as the agent; relative to its centre of mass.
            offset = data.cam_xpos[index] - data.subtree_com[1]
            backward = data.cam_xmat[index].reshape(3, 3)[:, 2]
            target = offset - np.linalg.norm(offset) * backward
            self._camera_walk = CameraWalk(np.random.default_rng(camera), scales.camera_scale, offset, target)
            self._moving.append(self._camera_walk)

    def _render(self) -> dict[str, np.ndarray]:
        data, index = self.data, self.task.camera
        plain_position, plain_rotation = data.cam_xpos[index].copy(), data.cam_xmat[index].copy()
        result, mask = {}, None
        for render in self.renders:
            if render == "distractor":
                self._distract(along_x=abs(plain_rotation[2]) > abs(plain_rotation[5]))
            result[f"{render}/observation"] = self._offscreen.draw(render)[::-1].copy()
            if self.masks:
                if mask is None or self._camera_walk:  # from one place, both renders see the same of the agent
                    segments, objects = self._offscreen.draw_segments()
                    mask = self._is_agent(objects)[segments[::-1]]
                result[f"{render}/mask"] = mask.copy()
            data.cam_xpos[index], data.cam_xmat[index] = plain_position, plain_rotation
        return result

    def _distract(self, along_x: bool) -> None:
        """Set colours, camera and skybox of the distractor render. `along_x`: the task's camera looks along x, not y.

        The skybox is seen from the inside, so a mirrored frame appears as it is, and it is upright on the four sides.
        The face below shows the reflection of the one in front of the task's camera: no edge lies in the picture.
        """
        from OpenGL import GL

        data, index = self.data, self.task.camera
        self._offscreen.models["distractor"].mat_rgba[:, :3] = self._color_walk.rgb
        if self._camera_walk:
            offset, rotation = self._camera_walk.pose()
            data.cam_xpos[index] = data.subtree_com[1] + offset
            data.cam_xpos[index, 2] = max(data.cam_xpos[index, 2], MIN_CAMERA_HEIGHT)
            data.cam_xmat[index] = rotation.ravel()

        GL.glBindTexture(GL.GL_TEXTURE_CUBE_MAP, int(self._offscreen.contexts["distractor"].texture[0]))
        GL.glTexParameteri(GL.GL_TEXTURE_CUBE_MAP, GL.GL_TEXTURE_MIN_FILTER, GL.GL_LINEAR)  # there are no mipmaps
        GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 1)
        cosines = -self._FACES @ data.cam_xmat[index].reshape(3, 3)[:, 2]
        cosines[2:4] = abs(cosines[2:4])  # the floor's reflection shows what is above
        frame = self._player.frame
        # Writing a face takes time. At 45 degrees of view, the picture shows no face more than 85.1 degrees aside.
        for face in np.flatnonzero(cosines > 0.085):
            texels = frame
            if face == self._BELOW:
                pixels = frame.view("V3")[..., 0]  # three bytes at once: twice as fast
                texels = np.ascontiguousarray(pixels.T if along_x else pixels[:, ::-1]).view(np.uint8)
            target = GL.GL_TEXTURE_CUBE_MAP_POSITIVE_X + int(face)
            GL.glTexSubImage2D(target, 0, 0, 0, *frame.shape[1::-1], GL.GL_RGB, GL.GL_UNSIGNED_BYTE, texels)


def _flatten(observation: dict[str, Any]) -> np.ndarray:
    """The entries in alphabetical order of their keys, as the experts expect them."""
    return np.concatenate([np.ravel(observation[key]) for key in sorted(observation)])


# --- Distracting Meta-World ---


class DMWEnv(DistractingEnv):
    """A task of Distracting Meta-World; a drawing in colour and one of segments serve both renders. Use `make_env`."""

    def __post_init__(self):
        super().__post_init__()
        self._env = import_simulator("metaworld.env_dict").ALL_V3_ENVIRONMENTS[f"{self.task.name}-v3"]()
        # As for the tasks of MT10, the state tells the goal.
        self._env._partially_observable = False
        del self._env.sawyer_observation_space  # a cached property: it would still clip the goal to zero
        self._env._set_task_called = True
        self._env.seeded_rand_vec = True
        self.model, self.data = self._env.model, self._env.data
        self._agent_bodies = self.model.body_rootid == self.model.body(ROBOT).id

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

    def _models(self) -> dict[str, mujoco.MjModel]:
        models = {"color": self.model}
        if self.masks or self._distracting:
            models[MASK] = self.model
        return models

    def _render(self) -> dict[str, np.ndarray]:
        # Meta-World's camera hangs upside down. Its picture is turned by 180 degrees: the rows are already the other
        # way round as OpenGL gives them.
        color = self._offscreen.draw("color")[:, ::-1].copy()
        if MASK in self._offscreen.models:
            # Meta-World's meshes have fine cracks. With their back faces drawn too, no background shows through them.
            self._offscreen.scenes[MASK].flags[mujoco.mjtRndFlag.mjRND_CULL_FACE] = 0
            segments, objects = self._offscreen.draw_segments()
            segments = segments[:, ::-1]
            is_agent = self._is_agent(objects)
            nothing, floor = (-1, -1), (int(mujoco.mjtObj.mjOBJ_GEOM), self.model.geom("floor").id)
            is_scene = np.array([place not in (nothing, floor) for place in objects])
        result: dict[str, np.ndarray] = {}
        for render in self.renders:
            picture = color
            if render == "distractor":
                picture = np.where(is_scene[segments][..., None], color, self._player.frame)
            result[f"{render}/observation"] = picture
            if self.masks:
                result[f"{render}/mask"] = is_agent[segments]
        return result
