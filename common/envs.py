"""Environments with a clean and a distractor render of every state, and the agent's mask in each.

The physics is dm_control's own, untouched. The distractor render uses a second model of the same scene, so that its
textures, colours and floor cannot leak into the physics or the clean render.
"""

import atexit
import contextlib
import ctypes
import ctypes.util
import functools
import importlib
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
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
from common.tasks import Task, get_task

if TYPE_CHECKING:
    import mujoco

# Mesa's software renderer would start a thread per core for every environment. There are about as many environments as
# cores, so rendering in the calling thread is faster.
os.environ.setdefault("LP_NUM_THREADS", "0")

Render = Literal["clean", "distractor"]
RENDERS: tuple[Render, ...] = ("clean", "distractor")

MIN_CAMERA_HEIGHT = 0.05  # m above the floor
FLOOR_CELL = 4.0  # m; size of the floor's polygons in masks and in the fast quality

GL_PACKAGES = {"egl": "libegl1 libgl1 libgl1-mesa-dri", "osmesa": "libosmesa6", "glfw": "libglfw3 libgl1"}
GL_LIBRARIES = {
    "egl": ("libEGL.so.1", "EGL"),
    "osmesa": ("libOSMesa.so.8", "OSMesa"),
    "glfw": ("libglfw.so.3", "glfw"),
}


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
    bool (H, W), true on the agent. Actions are clipped to [-1, 1]. `truncated` is true after `max_steps` steps.

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
    if task.suite == "dmw":
        raise UserError("Meta-World tasks are not built yet")
    return DCSEnv(
        task,
        split=split,
        renders=tuple(r for r in RENDERS if r in renders),
        masks=masks,
        quality=quality,
        distractors=distractors,
        image_size=image_size or task.image_size,
        max_steps=max_steps or task.max_steps,
    )


def seed_streams(seed: int) -> dict[str, np.random.SeedSequence]:
    """Independent seeds for each purpose, so that switching one distractor off leaves everything else as it was."""
    purposes = ("physics", "background", "camera", "color")
    return dict(zip(purposes, np.random.SeedSequence(seed).spawn(len(purposes))))


def physics_random_state(seed: int) -> np.random.RandomState:
    """The random state that dm_control's task gets at `reset(seed=seed)`."""
    return np.random.RandomState(np.random.MT19937(seed_streams(seed)["physics"]))


class DCSEnv(gymnasium.Env):
    """A task of the Distracting Control Suite. Use `make_env`."""

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
        self._quality, self._size, self._distractors = quality, image_size, distractors
        self._domain, self._task_name = task.name.split("-")
        self._dm_env = _import_suite().load(self._domain, self._task_name, task_kwargs={"time_limit": float("inf")})
        self._clips: list[Clip] = []
        if "distractor" in renders:
            self._clips = load_clips(distractors, task, split, image_size)
        self._renderer: _Renderer | None = None
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
            self._renderer = _Renderer(self.task, self.physics, self.renders, self.masks, self._quality, self._size)
        if "distractor" in self.renders:
            player = BackgroundPlayer(self._clips, np.random.default_rng(streams["background"]))
            self._renderer.start(player, self._distractors, streams)
            info = {
                "background": player.clip.name,
                "background_start": player.index,
                "background_direction": player.direction,
            }
        return self._observe(time_step.observation), info

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        time_step = self._dm_env.step(np.clip(action, -1, 1))
        self._steps += 1
        if "distractor" in self.renders:
            self._renderer.step()
        return self._observe(time_step.observation), float(time_step.reward), False, self._steps >= self.max_steps, {}

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _observe(self, observation: dict[str, Any]) -> dict[str, np.ndarray]:
        state = np.concatenate([np.ravel(observation[key]) for key in sorted(observation)]).astype(np.float32)
        return {"state": state, **(self._renderer.render() if self._renderer else {})}


class _Renderer:
    """Renders one dm_control physics; owns an OpenGL context and the state of the distractors."""

    def __init__(self, task: Task, physics: Any, renders: tuple[Render, ...], masks: bool, quality: str, size: int):
        import mujoco

        self._mujoco, self._renders, self._masks, self._size = mujoco, renders, masks, size
        self._camera_id = task.camera
        self._data = physics.data.ptr
        fast = quality == "fast"
        self._gl = _start_gl(size)
        self._rect = mujoco.MjrRect(0, 0, size, size)
        self._option = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, task.camera
        self._pixels = np.empty((size, size, 3), np.uint8)

        self._models: dict[str, mujoco.MjModel] = {}
        self._scenes: dict[str, mujoco.MjvScene] = {}
        self._contexts: dict[str, mujoco.MjrContext] = {}
        for render in renders:
            model = physics.model.ptr
            if render == "distractor":
                model = _distractor_model(task, round(FACE_SCALE * size))
            scene = mujoco.MjvScene(model, 1000)
            if fast:
                scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
                scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            self._models[render], self._scenes[render] = model, scene
            self._contexts[render] = self._make_context(model, fast=fast)
        if masks and renders:
            self._contexts["mask"] = self._make_context(model, fast=fast, masks=True)

        if "distractor" in renders:
            model = self._models["distractor"]
            self._original_rgb = model.mat_rgba[:, :3].copy()
            floor = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_MATERIAL, "grid")
            model.mat_rgba[floor, 3] = task.floor_alpha
            view = self._data.cam_xmat[task.camera].reshape(3, 3)[:, 2]
            self._texture = _SkyboxTexture(
                self._contexts["distractor"], model.cam_fovy[task.camera], along_x=abs(view[0]) > abs(view[1])
            )
        _open_renderers.add(self)
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
            self._update_scene(render, moved)
            if render == "distractor":
                self._texture.upload(self._player.frame, self._scenes[render])
            result[f"{render}/observation"] = self._read(render, render).copy()
            if self._masks:
                if moved:
                    mask = self._mask(render)
                else:  # both renders see the agent from the same place
                    plain_mask = mask = self._mask(render) if plain_mask is None else plain_mask
                result[f"{render}/mask"] = mask.copy()
        return result

    def close(self) -> None:
        """Free the OpenGL context and all in it."""
        _open_renderers.discard(self)
        self._gl.make_current()
        for context in self._contexts.values():
            context.free()
        self._gl.free()

    def _make_context(self, model: "mujoco.MjModel", *, fast: bool, masks: bool = False) -> "mujoco.MjrContext":
        """A rendering context; the model's settings are as before when it is made."""
        mujoco = self._mujoco
        quality, offscreen = model.vis.quality, model.vis.global_
        plain = {name: getattr(quality, name) for name in ("offsamples", "shadowsize", "numslices", "numstacks")}
        plain_size, spacing = (offscreen.offwidth, offscreen.offheight), model.geom_size[:, 2].copy()
        try:
            offscreen.offwidth = offscreen.offheight = self._size  # clearing the buffer costs more than drawing
            if fast or masks:
                quality.offsamples = quality.shadowsize = 0
                # A plane is drawn as a grid, up to 200 x 200 cells, for smooth light.
                planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
                model.geom_size[planes, 2] = FLOOR_CELL
            if fast:
                quality.numslices, quality.numstacks = 16, 8
            context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        except mujoco.FatalError as error:
            raise _gl_error(os.environ["MUJOCO_GL"], error) from error
        finally:
            offscreen.offwidth, offscreen.offheight = plain_size
            model.geom_size[:, 2] = spacing
            for name, value in plain.items():
                setattr(quality, name, value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        return context

    def _camera_relative_to_agent(self) -> tuple[np.ndarray, np.ndarray]:
        """The task's camera and the point it looks at, as far away as the agent; relative to its centre of mass."""
        offset = self._data.cam_xpos[self._camera_id] - self._data.subtree_com[1]
        backward = self._data.cam_xmat[self._camera_id].reshape(3, 3)[:, 2]
        return offset, offset - np.linalg.norm(offset) * backward

    def _update_scene(self, render: Render, moved: bool) -> None:
        data, index = self._data, self._camera_id
        if moved:
            plain = data.cam_xpos[index].copy(), data.cam_xmat[index].copy()
            offset, rotation = self._camera_walk.pose()
            data.cam_xpos[index] = data.subtree_com[1] + offset
            data.cam_xpos[index, 2] = max(data.cam_xpos[index, 2], MIN_CAMERA_HEIGHT)
            data.cam_xmat[index] = rotation.ravel()
        self._mujoco.mjv_updateScene(
            self._models[render],
            data,
            self._option,
            None,
            self._camera,
            self._mujoco.mjtCatBit.mjCAT_ALL.value,
            self._scenes[render],
        )
        if moved:
            data.cam_xpos[index], data.cam_xmat[index] = plain

    def _read(self, scene: str, context: str) -> np.ndarray:
        """Draw a scene: uint8 (H, W, 3), a view that the next call overwrites."""
        mujoco, target = self._mujoco, self._contexts[context]
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, target)
        mujoco.mjr_render(self._rect, self._scenes[scene], target)
        mujoco.mjr_readPixels(self._pixels, None, self._rect, target)
        return self._pixels[::-1]

    def _mask(self, render: Render) -> np.ndarray:
        mujoco, scene = self._mujoco, self._scenes[render]
        flags = [int(mujoco.mjtRndFlag.mjRND_SEGMENT), int(mujoco.mjtRndFlag.mjRND_IDCOLOR)]
        scene.flags[flags] = 1
        color = self._read(render, "mask").astype(np.int32)
        scene.flags[flags] = 0
        segments = color[..., 0] + (color[..., 1] << 8) + (color[..., 2] << 16)
        is_agent = np.zeros(scene.ngeom + 1, np.bool_)  # index 0 is the sky
        bodies = self._models[render].geom_bodyid
        for geom in scene.geoms[: scene.ngeom]:
            if geom.objtype == mujoco.mjtObj.mjOBJ_GEOM and geom.segid >= 0:
                is_agent[geom.segid + 1] = bodies[geom.objid] != 0
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


# --- OpenGL ---

_open_renderers: "weakref.WeakSet[_Renderer]" = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    """Close what is left open before the OpenGL bindings shut down; call it when they have started."""
    atexit.register(lambda: [renderer.close() for renderer in list(_open_renderers)])


def _import_suite():
    """dm_control.suite, imported so that neither it nor mujoco starts OpenGL.

    dm_control initializes EGL when it is imported, which fails without EGL even for physics only and makes a later
    fork unsafe on a GPU.
    """
    backend = _select_gl()
    if "mujoco" not in sys.modules:
        with _environment("MUJOCO_GL", backend if _loads(backend) else "disable"):
            importlib.import_module("mujoco")
    with _environment("MUJOCO_GL", "disable"):
        return importlib.import_module("dm_control.suite")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """An environment variable that has another value inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _select_gl() -> str:
    """The OpenGL backend: `MUJOCO_GL` if it is set, else EGL, else OSMesa where EGL cannot start. Sets `MUJOCO_GL`."""
    backend = os.environ.get("MUJOCO_GL", "").lower().strip()
    if not backend:
        backend = "egl"
        if _loads("osmesa") and not _egl_starts():
            backend = "osmesa"
        os.environ["MUJOCO_GL"] = backend
    return backend


@functools.cache
def _loads(backend: str) -> bool:
    soname, name = GL_LIBRARIES.get(backend, ("", ""))
    for library in (soname, ctypes.util.find_library(name) if name else None):
        try:
            if library and ctypes.CDLL(library):
                return True
        except OSError:
            continue
    return False


def _egl_starts() -> bool:
    """Try EGL in a process of its own: PyOpenGL cannot change its mind once it is imported."""
    probe = "from mujoco.egl import GLContext; GLContext(8, 8)"
    variables = {**os.environ, "MUJOCO_GL": "egl"}
    return subprocess.run([sys.executable, "-c", probe], capture_output=True, env=variables).returncode == 0


def _start_gl(size: int):
    """An OpenGL context, made current. Raises `UserError` with the package to install if it cannot start."""
    backend = _select_gl()
    if backend not in GL_PACKAGES:
        raise UserError(f"rendering needs OpenGL, but MUJOCO_GL is {backend!r}: set it to egl, osmesa or glfw")
    try:
        context = importlib.import_module(f"mujoco.{backend}").GLContext(size, size)
        context.make_current()
    except Exception as error:  # the bindings raise anything from AttributeError to their own GLError
        raise _gl_error(backend, error) from error
    _close_at_exit()
    return context


def _gl_error(backend: str, error: Exception) -> UserError:
    return UserError(
        f"OpenGL cannot start for rendering with MUJOCO_GL={backend} ({error}). On Debian or Ubuntu run "
        f"`apt-get install {GL_PACKAGES[backend]}`, or use MUJOCO_GL=osmesa after `apt-get install libosmesa6`"
    )
