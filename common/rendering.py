"""OpenGL contexts for MuJoCo, and the parts of rendering that both suites share."""

import atexit
import copy
import ctypes.util
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from common.cli import UserError
from common.distractors import BackgroundPlayer, DistractorConfig
from common.tasks import Task

# Mesa's software renderer would start a thread per core for every environment. There are about as many environments as
# cores, so rendering in the calling thread is faster.
os.environ.setdefault("LP_NUM_THREADS", "0")

FLOOR_CELL = 4.0  # m; size of the floor's polygons in masks and in the fast quality
COARSE_SHAPES = (16, 8)  # slices and stacks of spheres, capsules and cylinders in the fast quality
MAX_GEOMS = 1000  # geometric objects that a scene holds

GL_PACKAGES = {"egl": "libegl1 libgl1 libgl1-mesa-dri", "osmesa": "libosmesa6", "glfw": "libglfw3 libgl1"}


def import_simulator(name: str) -> ModuleType:
    """A package of the simulators, imported so that it does not start OpenGL.

    mujoco and dm_control start it when they are imported, which fails without EGL even for physics only and makes a
    later fork unsafe on a GPU.
    """
    backend = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "disable"
    try:
        return importlib.import_module(name)
    finally:
        if backend is None:
            del os.environ["MUJOCO_GL"]
        else:
            os.environ["MUJOCO_GL"] = backend


mujoco = import_simulator("mujoco")


@dataclass(frozen=True)
class RenderOptions:
    """What to render of every state, and how."""

    renders: tuple[str, ...]  # "clean", "distractor", both, or none
    masks: bool  # also the agent's mask in each of them
    size: int  # height and width of a frame in pixels
    fast: bool  # no shadows, reflections and multisampling, coarser round shapes and floors; else as the model asks for
    distractors: DistractorConfig  # of the distractor render


class Renderer:
    """An OpenGL context with MuJoCo's rendering contexts in it, and what distracts in the present episode.

    A suite adds `render() -> observation`: uint8 (H, W, 3) and bool (H, W) of the current state.
    """

    def __init__(self, options: RenderOptions, task: Task, model: mujoco.MjModel, data: mujoco.MjData):
        """`model` and `data`: of the physics, which are only read."""
        self._options, self._model, self._data = options, model, data
        self._camera = model.camera(task.camera).id
        self._gl = _start_gl(options.size)
        self._rect = mujoco.MjrRect(0, 0, options.size, options.size)
        self._pixels = np.empty((options.size, options.size, 3), np.uint8)
        self._view = mujoco.MjvCamera()
        self._view.type, self._view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, self._camera
        self._visual_option = mujoco.MjvOption()
        self._contexts: dict[str, mujoco.MjrContext] = {}
        self.moving: list[Any] = []  # what has to `step` with the physics
        atexit.register(self.close)  # before the OpenGL bindings shut down, which have just registered that

    def start(self, player: BackgroundPlayer, camera: np.random.SeedSequence, color: np.random.SeedSequence) -> None:
        """Begin an episode of the distractor render; the physics must have been reset.

        `player`: of the background; `camera` and `color`: seeds of their walks, on the Control Suite.
        """
        self._player = player
        self.moving = [player]

    def close(self) -> None:
        """Free the OpenGL context and all in it."""
        atexit.unregister(self.close)
        self._gl.make_current()
        for context in self._contexts.values():
            context.free()
        self._gl.free()

    def _make_scene(self, model: mujoco.MjModel) -> mujoco.MjvScene:
        scene = mujoco.MjvScene(model, MAX_GEOMS)
        if self._options.fast:
            scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        return scene

    def _make_context(self, model: mujoco.MjModel, *, masks: bool = False) -> mujoco.MjrContext:
        """A rendering context of a model, for pictures or for masks."""
        model = copy.copy(model)  # the settings are those of the context alone
        quality, offscreen = model.vis.quality, model.vis.global_
        offscreen.offwidth = offscreen.offheight = (
            self._options.size
        )  # clearing a larger buffer costs more than drawing
        if self._options.fast or masks:
            quality.offsamples = quality.shadowsize = 0
            # A plane is drawn as a grid, up to 200 x 200 cells, for smooth light.
            model.geom_size[model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE, 2] = FLOOR_CELL
        if self._options.fast:
            quality.numslices, quality.numstacks = COARSE_SHAPES
        try:
            context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        except mujoco.FatalError as error:
            raise _gl_error(error) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        return context

    def _update_scene(self, scene: mujoco.MjvScene, model: mujoco.MjModel) -> None:
        category = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, self._data, self._visual_option, None, self._view, category, scene)

    def _draw(self, scene: mujoco.MjvScene, context: mujoco.MjrContext) -> np.ndarray:
        """Draw a scene: uint8 (H, W, 3) with the lowest row first, overwritten by the next call."""
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        mujoco.mjr_render(self._rect, scene, context)
        mujoco.mjr_readPixels(self._pixels, None, self._rect, context)
        return self._pixels

    def _draw_segments(self, scene: mujoco.MjvScene, context: mujoco.MjrContext) -> np.ndarray:
        """int32 (H, W), the lowest row first: 0 where nothing is drawn, else 1 + the `segid` of the scene's geom."""
        flags = [int(mujoco.mjtRndFlag.mjRND_SEGMENT), int(mujoco.mjtRndFlag.mjRND_IDCOLOR)]
        scene.flags[flags] = 1
        color = self._draw(scene, context).astype(np.int32)
        scene.flags[flags] = 0
        return color[..., 0] + (color[..., 1] << 8) + (color[..., 2] << 16)


def segment_tables(scene: mujoco.MjvScene, *tests: Callable[[int, int], bool]) -> np.ndarray:
    """bool (tests, segments + 1): `test(objtype, objid)` of every segment, indexed by pixels; False for nothing."""
    tables = np.zeros((len(tests), scene.ngeom + 1), np.bool_)
    for geom in scene.geoms[: scene.ngeom]:
        if geom.segid >= 0:
            tables[:, geom.segid + 1] = [test(geom.objtype, geom.objid) for test in tests]
    return tables


def _start_gl(size: int):
    """An OpenGL context, made current. Raises `UserError` with the package to install if it cannot start.

    The backend is `MUJOCO_GL` if it is set, else EGL, else OSMesa where EGL cannot start.
    """
    if not os.environ.get("MUJOCO_GL", "").strip():
        os.environ["MUJOCO_GL"] = "osmesa" if ctypes.util.find_library("OSMesa") and not _egl_starts() else "egl"
    backend = os.environ["MUJOCO_GL"].lower().strip()
    if backend not in GL_PACKAGES:
        raise UserError(f"rendering needs OpenGL, but MUJOCO_GL is {backend!r}: set it to egl, osmesa or glfw")
    try:
        context = importlib.import_module(f"mujoco.{backend}").GLContext(size, size)
        context.make_current()
    except Exception as error:  # the bindings raise anything from AttributeError to their own GLError
        raise _gl_error(error) from error
    return context


def _egl_starts() -> bool:
    """Try EGL in a process of its own: PyOpenGL cannot change its mind once it is imported."""
    probe = "from mujoco.egl import GLContext; GLContext(8, 8)"
    variables = {**os.environ, "MUJOCO_GL": "egl"}
    return subprocess.run([sys.executable, "-c", probe], capture_output=True, env=variables).returncode == 0


def _gl_error(error: Exception) -> UserError:
    backend = os.environ["MUJOCO_GL"].lower().strip()
    return UserError(
        f"OpenGL cannot start for rendering with MUJOCO_GL={backend} ({error}). On Debian or Ubuntu run "
        f"`apt-get install {GL_PACKAGES[backend]}`, or use MUJOCO_GL=osmesa after `apt-get install libosmesa6`"
    )
