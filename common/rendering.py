"""Off-screen rendering with MuJoCo: an OpenGL context, and in it a scene and a rendering context for each model."""

import atexit
import copy
import importlib
import os
from types import ModuleType
from unittest import mock

import numpy as np

from common.cli import UserError

# Mesa's software renderer would start a thread per core for every environment. There are about as many environments as
# cores, so rendering in the calling thread is faster.
os.environ.setdefault("LP_NUM_THREADS", "0")

GL_VARIABLES = ("MUJOCO_EGL_DEVICE_ID", "PYOPENGL_PLATFORM")  # that keep OpenGL from starting if they are wrong
FLOOR_CELL = 4.0  # m; size of the floor's polygons in masks and in the fast quality
COARSE_SHAPES = (16, 8)  # slices and stacks of spheres, capsules and cylinders in the fast quality
MAX_GEOMS = 1000  # geometric objects that a scene holds
MASK = "mask"  # the name of the model whose segments are drawn, not its colours


def import_simulator(name: str) -> ModuleType:
    """A package of the simulators, imported so that it does not start OpenGL.

    mujoco and dm_control start it when they are imported, which fails without EGL even for physics only and makes a
    later fork unsafe on a GPU.
    """
    with mock.patch.dict(os.environ, MUJOCO_GL="disable"):
        return importlib.import_module(name)


mujoco = import_simulator("mujoco")


class Offscreen:
    """Draws models of one physics, as one camera sees them; the model called "mask" as segments.

    A process may have several: call `gl.make_current()` before drawing.
    The backend is `MUJOCO_GL` if it is set, else EGL. Raises `UserError` with the packages to install if OpenGL cannot
    start.
    """

    def __init__(
        self, models: dict[str, mujoco.MjModel], data: mujoco.MjData, camera: int, *, size: int, fast: bool
    ) -> None:
        """`data`: of the physics; `size`: height and width in pixels; `fast`: see `common.envs.make_env`."""
        self.models, self._data, self._fast = models, data, fast
        self._rect = mujoco.MjrRect(0, 0, size, size)
        self._pixels = np.empty((size, size, 3), np.uint8)
        self._view = mujoco.MjvCamera()
        self._view.type, self._view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera
        self._visual_option = mujoco.MjvOption()
        backend = os.environ.get("MUJOCO_GL", "").lower().strip() or "egl"
        try:
            opengl, gpu = importlib.import_module(f"mujoco.{backend}"), os.environ.get("CUDA_VISIBLE_DEVICES", "")
            opengl.GLContext._context = None  # of one that cannot start, so that its end complains of nothing
            # The GPU that trains, if EGL knows one of that number; MuJoCo would take the first for all processes.
            chosen = backend == "egl" and gpu.isdigit() and "MUJOCO_EGL_DEVICE_ID" not in os.environ
            try:
                with mock.patch.dict(os.environ, {"MUJOCO_EGL_DEVICE_ID": gpu} if chosen else {}):
                    self.gl = opengl.GLContext(size, size)
            except Exception:
                if not chosen:
                    raise
                opengl.EGL_DISPLAY = None  # which did not start
                self.gl = opengl.GLContext(size, size)
            self.gl.make_current()
            self.contexts = {name: self._make_context(model, size, name == MASK) for name, model in models.items()}
        except Exception as error:  # the bindings raise anything from AttributeError to their own GLError
            there = [f"{name}={os.environ[name]}" for name in GL_VARIABLES if os.environ.get(name, backend) != backend]
            raise UserError(
                f"OpenGL cannot start for rendering with MUJOCO_GL={backend} ({' '.join(str(error).split())}). "
                + (f"Unset {' and '.join(there)}, or correct it. " if there else "")
                + "On Debian or Ubuntu use MUJOCO_GL=egl after `apt-get install libegl1 libgl1 libgl1-mesa-dri`, or "
                "MUJOCO_GL=osmesa after `apt-get install libosmesa6`"
            ) from error
        self.scenes = {name: self._make_scene(model, name == MASK) for name, model in models.items()}
        atexit.register(self.close)  # before the OpenGL bindings shut down, which have just registered that

    def _make_context(self, model: mujoco.MjModel, size: int, masks: bool) -> mujoco.MjrContext:
        model = copy.copy(model)  # the settings are those of the context alone
        quality, offscreen = model.vis.quality, model.vis.global_
        # Clearing a larger buffer costs more than drawing.
        offscreen.offwidth = offscreen.offheight = size
        if self._fast or masks:
            quality.offsamples = quality.shadowsize = 0
            # A plane is drawn as a grid, up to 200 x 200 cells, for smooth light.
            model.geom_size[model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE, 2] = FLOOR_CELL
        if self._fast:
            quality.numslices, quality.numstacks = COARSE_SHAPES
        return mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)

    def _make_scene(self, model: mujoco.MjModel, masks: bool) -> mujoco.MjvScene:
        scene = mujoco.MjvScene(model, MAX_GEOMS)
        if self._fast:
            scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        if masks:
            scene.flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = 1
            scene.flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = 1
        return scene

    def draw(self, name: str) -> np.ndarray:
        """A model in the present state: uint8 (H, W, 3) with the lowest row first, overwritten by the next call."""
        scene, context = self.scenes[name], self.contexts[name]
        category = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self.models[name], self._data, self._visual_option, None, self._view, category, scene)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        mujoco.mjr_render(self._rect, scene, context)
        mujoco.mjr_readPixels(self._pixels, None, self._rect, context)
        return self._pixels

    def draw_segments(self) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The segment of each pixel, int (H, W) with the lowest row first; and of each segment the object's (mjtObj,
        id), (-1, -1) for nothing."""
        segments = self.draw(MASK).astype(int) @ (1, 2**8, 2**16)
        scene = self.scenes[MASK]
        objects = [(-1, -1)] * (scene.ngeom + 1)
        for geom in scene.geoms[: scene.ngeom]:
            if geom.segid >= 0:
                objects[geom.segid + 1] = (geom.objtype, geom.objid)
        return segments, objects

    def close(self) -> None:
        """Free the OpenGL context and all in it."""
        atexit.unregister(self.close)
        self.gl.make_current()
        for context in self.contexts.values():
            context.free()
        self.gl.free()
