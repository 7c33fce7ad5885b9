"""Environments with a clean and a distractor render of every state, and the agent's mask in each.

The physics is that of dm_control and Meta-World, untouched. On the Control Suite the distractor render uses a second
model of the same scene, so that its textures, colours and floor cannot leak into the physics or the clean render. On
Meta-World it is the clean picture with a clip in place of all that is not scene.
"""

import ctypes
import importlib
from typing import TYPE_CHECKING, Any, Literal

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
from common.errors import UserError
from common.rendering import Renderer, import_simulator, segment_tables
from common.tasks import Task, get_task

if TYPE_CHECKING:
    import mujoco

Render = Literal["clean", "distractor"]
RENDERS: tuple[Render, ...] = ("clean", "distractor")

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
) -> gymnasium.Env:
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
    return (DCSEnv if task.suite == "dcs" else DMWEnv)(
        task,
        split=split,
        renders=tuple(r for r in RENDERS if r in renders),
        masks=masks,
        quality=quality,
        distractors=distractors,
        image_size=image_size or task.image_size,
        max_steps=max_steps,
    )


def seed_streams(seed: int) -> dict[str, np.random.SeedSequence]:
    """Independent seeds for each purpose, so that switching one distractor off leaves everything else as it was."""
    purposes = ("physics", "background", "camera", "color")
    return dict(zip(purposes, np.random.SeedSequence(seed).spawn(len(purposes))))


def physics_seed(seed: int) -> int:
    """The seed that Meta-World's environment gets at `reset(seed=seed)`."""
    return int(seed_streams(seed)["physics"].generate_state(1)[0])


def physics_random_state(seed: int) -> np.random.RandomState:
    """The random state that dm_control's task gets at `reset(seed=seed)`."""
    return np.random.RandomState(np.random.MT19937(seed_streams(seed)["physics"]))


def _background_info(player: BackgroundPlayer) -> dict[str, Any]:
    return {
        "background": player.clip.name,
        "background_start": player.index,
        "background_direction": player.direction,
    }


class DistractingEnv(gymnasium.Env):
    """What both suites share: spaces, clips, and the renderer that the first reset makes."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012, gymnasium's interface

    def __init__(
        self,
        task: Task,
        *,
        split: str,
        renders: tuple[Render, ...],
        masks: bool,
        quality: str,
        distractors: DistractorConfig,
        image_size: int,
        max_steps: int,
    ):
        self.task, self.renders, self.masks, self.max_steps = task, renders, masks, max_steps
        self._fast, self._size, self._distractors = quality == "fast", image_size, distractors
        self._clips: list[Clip] = []
        if "distractor" in renders:
            self._clips = load_clips(distractors, task, split, image_size)
        self._renderer: Any = None
        self._steps = 0

        spaces: dict[str, gymnasium.Space] = {
            "state": gymnasium.spaces.Box(-np.inf, np.inf, (task.state_dim,), np.float32)
        }
        for render in renders:
            spaces[f"{render}/observation"] = gymnasium.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
            if masks:
                spaces[f"{render}/mask"] = gymnasium.spaces.Box(0, 1, (image_size, image_size), np.bool_)
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self.action_space = gymnasium.spaces.Box(-1, 1, (task.action_dim,), np.float32)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class DCSEnv(DistractingEnv):
    """A task of the Distracting Control Suite. Use `make_env`."""

    def __init__(self, task: Task, **options: Any):
        super().__init__(task, **options)
        suite = import_simulator("dm_control.suite")
        self._dm_env = suite.load(*task.name.split("-"), task_kwargs={"time_limit": float("inf")})

    @property
    def physics(self):
        """dm_control's physics. Read it only."""
        return self._dm_env.physics

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict[str, np.ndarray], dict]:
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        streams = seed_streams(seed)
        self._dm_env.task._random = physics_random_state(seed)
        time_step = self._dm_env.reset()
        self._steps = 0

        info: dict[str, Any] = {}
        if self.renders and self._renderer is None:
            self._renderer = _DCSRenderer(self.task, self.physics, self.renders, self.masks, self._size, self._fast)
        if "distractor" in self.renders:
            player = BackgroundPlayer(self._clips, np.random.default_rng(streams["background"]))
            self._renderer.start(player, self._distractors, streams)
            info = _background_info(player)
        return self._observe(time_step.observation), info

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        time_step = self._dm_env.step(np.clip(action, -1, 1))
        self._steps += 1
        if "distractor" in self.renders:
            self._renderer.step()
        return self._observe(time_step.observation), float(time_step.reward), False, self._steps >= self.max_steps, {}

    def _observe(self, observation: dict[str, Any]) -> dict[str, np.ndarray]:
        state = np.concatenate([np.ravel(observation[key]) for key in sorted(observation)]).astype(np.float32)
        return {"state": state, **(self._renderer.render() if self._renderer else {})}


class _DCSRenderer(Renderer):
    """Renders one dm_control physics; owns an OpenGL context and the state of the distractors."""

    def __init__(self, task: Task, physics: Any, renders: tuple[Render, ...], masks: bool, size: int, fast: bool):
        super().__init__(size, fast)
        self._renders, self._masks = renders, masks
        self._camera_id, self._view = task.camera, self._camera(task.camera)
        self._data = physics.data.ptr
        self._models: dict[str, mujoco.MjModel] = {}
        self._scenes: dict[str, mujoco.MjvScene] = {}
        for render in renders:
            model = physics.model.ptr
            if render == "distractor":
                model = _distractor_model(task, round(FACE_SCALE * size))
            self._models[render], self._scenes[render] = model, self._make_scene(model)
            self._contexts[render] = self._make_context(model)
        if masks and renders:
            self._contexts["mask"] = self._make_context(model, masks=True)

        if "distractor" in renders:
            model = self._models["distractor"]
            self._original_rgb = model.mat_rgba[:, :3].copy()
            floor = self._mujoco.mj_name2id(model, self._mujoco.mjtObj.mjOBJ_MATERIAL, "grid")
            model.mat_rgba[floor, 3] = task.floor_alpha
            view = self._data.cam_xmat[task.camera].reshape(3, 3)[:, 2]
            self._texture = _SkyboxTexture(
                self._contexts["distractor"], model.cam_fovy[task.camera], along_x=abs(view[0]) > abs(view[1])
            )
        self._player: BackgroundPlayer | None = None
        self._camera_walk: CameraWalk | None = None
        self._color_walk: ColorWalk | None = None

    def start(self, player: BackgroundPlayer, config: DistractorConfig, streams: dict) -> None:
        """Begin an episode; the physics must have been reset."""
        self._player = player
        self._camera_walk = self._color_walk = None
        if config.camera_scale > 0:
            offset, target = self._camera_relative_to_agent()
            self._camera_walk = CameraWalk(
                np.random.default_rng(streams["camera"]), config.camera_scale, offset, target
            )
        rgb = self._original_rgb
        if config.color_scale > 0:
            self._color_walk = ColorWalk(np.random.default_rng(streams["color"]), config.color_scale, rgb)
            rgb = self._color_walk.rgb
        self._models["distractor"].mat_rgba[:, :3] = rgb

    def step(self) -> None:
        """Move everything that distracts."""
        self._player.step()
        if self._camera_walk:
            self._camera_walk.step()
        if self._color_walk:
            self._color_walk.step()
            self._models["distractor"].mat_rgba[:, :3] = self._color_walk.rgb

    def render(self) -> dict[str, np.ndarray]:
        """Observations uint8 (H, W, 3) and masks bool (H, W) of the current state."""
        self._gl.make_current()
        result, plain_mask = {}, None
        for render in self._renders:
            moved = render == "distractor" and self._camera_walk is not None
            self._place(render, moved)
            if render == "distractor":
                self._texture.upload(self._player.frame, self._scenes[render])
            result[f"{render}/observation"] = self._draw(self._scenes[render], self._contexts[render])[::-1].copy()
            if self._masks:
                if moved:
                    mask = self._mask(render)
                else:  # both renders see the agent from the same place
                    plain_mask = mask = self._mask(render) if plain_mask is None else plain_mask
                result[f"{render}/mask"] = mask.copy()
        return result

    def _camera_relative_to_agent(self) -> tuple[np.ndarray, np.ndarray]:
        """The task's camera and the point it looks at, as far away as the agent; relative to its centre of mass."""
        offset = self._data.cam_xpos[self._camera_id] - self._data.subtree_com[1]
        backward = self._data.cam_xmat[self._camera_id].reshape(3, 3)[:, 2]
        return offset, offset - np.linalg.norm(offset) * backward

    def _place(self, render: Render, moved: bool) -> None:
        """Bring a scene up to date, seen from the walking camera if `moved`."""
        data, index = self._data, self._camera_id
        if moved:
            plain = data.cam_xpos[index].copy(), data.cam_xmat[index].copy()
            offset, rotation = self._camera_walk.pose()
            data.cam_xpos[index] = data.subtree_com[1] + offset
            data.cam_xpos[index, 2] = max(data.cam_xpos[index, 2], MIN_CAMERA_HEIGHT)
            data.cam_xmat[index] = rotation.ravel()
        self._update_scene(self._scenes[render], self._models[render], data, self._view)
        if moved:
            data.cam_xpos[index], data.cam_xmat[index] = plain

    def _mask(self, render: Render) -> np.ndarray:
        scene, bodies = self._scenes[render], self._models[render].geom_bodyid
        segments = self._draw_segments(scene, self._contexts["mask"])[::-1]
        geom = self._mujoco.mjtObj.mjOBJ_GEOM
        (is_agent,) = segment_tables(scene, lambda kind, index: kind == geom and bodies[index] != 0)
        return is_agent[segments]


class _SkyboxTexture:
    """Writes a clip's frame to the faces of a context's skybox that the camera sees.

    The faces are seen from the inside, so a mirrored frame appears as it is, and it is upright on the four sides. The
    face below shows the reflection of the face in front of the task's camera, so that no edge lies in the picture.
    """

    # The world's direction of each cube map face, in OpenGL's order.
    _DIRECTIONS = np.array([(1, 0, 0), (-1, 0, 0), (0, 0, 1), (0, 0, -1), (0, -1, 0), (0, 1, 0)])

    def __init__(self, context: "mujoco.MjrContext", fovy: float, along_x: bool):
        """`fovy`: the camera's field of view in degrees; `along_x`: its image plane is normal to x and not to y."""
        from OpenGL import GL
        from OpenGL.raw.GL.VERSION.GL_1_1 import glTexSubImage2D

        self._gl, self._write, self._texture = GL, glTexSubImage2D, int(context.texture[0])
        GL.glBindTexture(GL.GL_TEXTURE_CUBE_MAP, self._texture)
        GL.glTexParameteri(GL.GL_TEXTURE_CUBE_MAP, GL.GL_TEXTURE_MIN_FILTER, GL.GL_LINEAR)  # there are no mipmaps
        # Largest angle between the camera's axis and that of a face of which it sees a corner.
        self._along_x = along_x
        self._min_cosine = np.cos(np.arctan(np.sqrt(2)) + np.arctan(np.sqrt(2) * np.tan(np.deg2rad(fovy) / 2)))

    def upload(self, frame: np.ndarray, scene: "mujoco.MjvScene") -> None:
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


def _distractor_model(task: Task, face: int) -> "mujoco.MjModel":
    """The task's model with a small, empty skybox; everything else is as in the physics."""
    import mujoco

    domain = importlib.import_module(f"dm_control.suite.{task.name.split('-')[0]}")
    xml, assets = domain.get_model_and_assets()
    skybox = f'<texture name="skybox" type="skybox" builtin="flat" width="{face}" height="{face}"/>'
    assets = {**assets, "./common/skybox.xml": f"<mujoco><asset>{skybox}</asset></mujoco>".encode()}
    return mujoco.MjModel.from_xml_string(xml, assets)


class DMWEnv(DistractingEnv):
    """A task of Distracting Meta-World. Use `make_env`."""

    def __init__(self, task: Task, **options: Any):
        super().__init__(task, **options)
        self._env = import_simulator("metaworld.env_dict").ALL_V3_ENVIRONMENTS[f"{task.name}-v3"]()
        # As for the tasks of MT10, the state tells the goal.
        self._env._partially_observable = False
        del self._env.sawyer_observation_space  # a cached property: it would still clip the goal to zero
        self._env._set_task_called = True
        self._env.seeded_rand_vec = True
        self._player: BackgroundPlayer | None = None

    @property
    def model(self) -> "mujoco.MjModel":
        """MuJoCo's model. Read it only."""
        return self._env.model

    @property
    def data(self) -> "mujoco.MjData":
        """MuJoCo's state. Read it only."""
        return self._env.data

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict[str, np.ndarray], dict]:
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        streams = seed_streams(seed)
        # As Meta-World makes its own tasks: draw the positions of object and goal, then reset with these. Its reset
        # places the objects twice, and the first state is right only if both times they stand in the same place. (That
        # of window-close reports the handle of the closed window even so, as Meta-World's own tasks do.)
        self._env.seed(physics_seed(seed))
        self._env._freeze_rand_vec = False
        self._env.reset_model()
        self._env._freeze_rand_vec = True
        state, _ = self._env.reset()
        self._steps = 0

        info: dict[str, Any] = {}
        if self.renders and self._renderer is None:
            self._renderer = _DMWRenderer(
                self.model, self.data, self.task.camera, self.renders, self.masks, self._size, self._fast
            )
        if self._renderer is not None:
            self._renderer.refresh()
        if "distractor" in self.renders:
            self._player = BackgroundPlayer(self._clips, np.random.default_rng(streams["background"]))
            info = _background_info(self._player)
        return self._observe(state), info

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        state, reward, _, _, info = self._env.step(np.clip(action, -1, 1))
        self._steps += 1
        if self._player is not None:
            self._player.step()
        success = bool(info["success"])
        truncated = self._steps >= self.max_steps
        return self._observe(state), float(reward), success, truncated, {"success": success}

    def _observe(self, state: np.ndarray) -> dict[str, np.ndarray]:
        background = self._player.frame if self._player is not None else None
        rendered = self._renderer.render(background) if self._renderer else {}
        return {"state": state.astype(np.float32), **rendered}


class _DMWRenderer(Renderer):
    """Renders one Meta-World state with two drawings at most: one in colour and one of segments serve both renders."""

    def __init__(
        self,
        model: "mujoco.MjModel",
        data: "mujoco.MjData",
        camera: str,
        renders: tuple[Render, ...],
        masks: bool,
        size: int,
        fast: bool,
    ):
        super().__init__(size, fast)
        self._model, self._data, self._renders, self._masks = model, data, renders, masks
        self._view = self._camera(model.camera(camera).id)
        self._scene = self._make_scene(model)
        self._contexts["color"] = self._make_context(model)
        if masks or "distractor" in renders:
            self._contexts["mask"] = self._make_context(model, masks=True)

        geom, site = int(self._mujoco.mjtObj.mjOBJ_GEOM), int(self._mujoco.mjtObj.mjOBJ_SITE)
        robot = _subtree(model, model.body(ROBOT).id)
        bodies = {geom: model.geom_bodyid, site: model.site_bodyid}
        floor = (geom, model.geom("floor").id)
        # The robot's sites (coloured balls in the fingers) hide pixels of its geoms, so they count as robot. Goal
        # markers are sites too: they are part of the scene.
        self._is_robot = lambda kind, index: kind in bodies and bool(robot[bodies[kind][index]])
        self._is_scene = lambda kind, index: (kind, index) != floor

    def refresh(self) -> None:
        """Bring positions up to date after a reset, which moves objects without telling MuJoCo.

        Leaves the physics as it is: the next step begins by computing the same.
        """
        self._mujoco.mj_kinematics(self._model, self._data)
        self._mujoco.mj_camlight(self._model, self._data)

    def render(self, background: np.ndarray | None) -> dict[str, np.ndarray]:
        """Observations uint8 (H, W, 3) and masks bool (H, W) of the current state.

        `background`: the clip's frame, uint8 (H, W, 3), for the distractor render. Meta-World's camera hangs upside
        down. Its picture is turned by 180 degrees: the rows are already the other way round as OpenGL gives them.
        """
        self._gl.make_current()
        self._update_scene(self._scene, self._model, self._data, self._view)
        color = self._draw(self._scene, self._contexts["color"])[:, ::-1].copy()
        result: dict[str, np.ndarray] = {}
        if "mask" in self._contexts:
            # Meta-World's meshes have fine cracks. With their back faces drawn too, no background shows through them.
            cull = self._mujoco.mjtRndFlag.mjRND_CULL_FACE
            self._scene.flags[cull] = 0
            segments = self._draw_segments(self._scene, self._contexts["mask"])[:, ::-1]
            self._scene.flags[cull] = 1
            is_robot, is_scene = segment_tables(self._scene, self._is_robot, self._is_scene)
            robot, scene = is_robot[segments], is_scene[segments]
        for render in self._renders:
            clean = render == "clean"
            result[f"{render}/observation"] = color if clean else np.where(scene[..., None], color, background)
            if self._masks:
                result[f"{render}/mask"] = robot.copy()
        return result


def _subtree(model: "mujoco.MjModel", root: int) -> np.ndarray:
    """bool (nbody,): the bodies of the tree below and with `root`. A parent's number is below its children's."""
    inside = np.zeros(model.nbody, np.bool_)
    inside[root] = True
    for body in range(root + 1, model.nbody):
        inside[body] = inside[model.body_parentid[body]]
    return inside
