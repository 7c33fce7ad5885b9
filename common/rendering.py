"""OpenGL contexts for MuJoCo, and the parts of rendering that both suites share."""

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
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError

if TYPE_CHECKING:
    import mujoco

# Mesa's software renderer would start a thread per core for every environment. There are about as many environments as
# cores, so rendering in the calling thread is faster.
os.environ.setdefault("LP_NUM_THREADS", "0")

FLOOR_CELL = 4.0  # m; size of the floor's polygons in masks and in the fast quality
COARSE_SHAPES = (16, 8)  # slices and stacks of spheres, capsules and cylinders in the fast quality
MAX_GEOMS = 1000  # geometric objects that a scene holds

GL_PACKAGES = {"egl": "libegl1 libgl1 libgl1-mesa-dri", "osmesa": "libosmesa6", "glfw": "libglfw3 libgl1"}
GL_LIBRARIES = {
    "egl": ("libEGL.so.1", "EGL"),
    "osmesa": ("libOSMesa.so.8", "OSMesa"),
    "glfw": ("libglfw.so.3", "glfw"),
}


class Renderer:
    """An OpenGL context with MuJoCo's rendering contexts in it.

    Full quality is what the model asks for; `fast` is without shadows, reflections and multisampling and with coarser
    round shapes and floors.
    """

    def __init__(self, size: int, fast: bool):
        import mujoco

        self._mujoco, self._size, self._fast = mujoco, size, fast
        self._gl = _start_gl(size)
        self._rect = mujoco.MjrRect(0, 0, size, size)
        self._pixels = np.empty((size, size, 3), np.uint8)
        self._option = mujoco.MjvOption()
        self._contexts: dict[str, mujoco.MjrContext] = {}
        _open_renderers.add(self)

    def close(self) -> None:
        """Free the OpenGL context and all in it."""
        _open_renderers.discard(self)
        self._gl.make_current()
        for context in self._contexts.values():
            context.free()
        self._gl.free()

    def _camera(self, index: int) -> "mujoco.MjvCamera":
        camera = self._mujoco.MjvCamera()
        camera.type, camera.fixedcamid = self._mujoco.mjtCamera.mjCAMERA_FIXED, index
        return camera

    def _make_scene(self, model: "mujoco.MjModel") -> "mujoco.MjvScene":
        scene = self._mujoco.MjvScene(model, MAX_GEOMS)
        if self._fast:
            scene.flags[self._mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            scene.flags[self._mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        return scene

    def _make_context(self, model: "mujoco.MjModel", *, masks: bool = False) -> "mujoco.MjrContext":
        """A rendering context; the model's settings are as before when it is made."""
        mujoco = self._mujoco
        quality, offscreen = model.vis.quality, model.vis.global_
        plain = {name: getattr(quality, name) for name in ("offsamples", "shadowsize", "numslices", "numstacks")}
        plain_size, spacing = (offscreen.offwidth, offscreen.offheight), model.geom_size[:, 2].copy()
        try:
            offscreen.offwidth = offscreen.offheight = self._size  # clearing the buffer costs more than drawing
            if self._fast or masks:
                quality.offsamples = quality.shadowsize = 0
                # A plane is drawn as a grid, up to 200 x 200 cells, for smooth light.
                planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
                model.geom_size[planes, 2] = FLOOR_CELL
            if self._fast:
                quality.numslices, quality.numstacks = COARSE_SHAPES
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

    def _update_scene(
        self, scene: "mujoco.MjvScene", model: "mujoco.MjModel", data: "mujoco.MjData", camera: "mujoco.MjvCamera"
    ) -> None:
        category = self._mujoco.mjtCatBit.mjCAT_ALL.value
        self._mujoco.mjv_updateScene(model, data, self._option, None, camera, category, scene)

    def _draw(self, scene: "mujoco.MjvScene", context: "mujoco.MjrContext") -> np.ndarray:
        """Draw a scene: uint8 (H, W, 3) with the lowest row first, overwritten by the next call."""
        mujoco = self._mujoco
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        mujoco.mjr_render(self._rect, scene, context)
        mujoco.mjr_readPixels(self._pixels, None, self._rect, context)
        return self._pixels

    def _draw_segments(self, scene: "mujoco.MjvScene", context: "mujoco.MjrContext") -> np.ndarray:
        """int32 (H, W), the lowest row first: 0 where nothing is drawn, else 1 + the `segid` of the scene's geom."""
        flags = [int(self._mujoco.mjtRndFlag.mjRND_SEGMENT), int(self._mujoco.mjtRndFlag.mjRND_IDCOLOR)]
        scene.flags[flags] = 1
        color = self._draw(scene, context).astype(np.int32)
        scene.flags[flags] = 0
        return color[..., 0] + (color[..., 1] << 8) + (color[..., 2] << 16)


def segment_tables(scene: "mujoco.MjvScene", *tests: Callable[[int, int], bool]) -> np.ndarray:
    """bool (tests, segments + 1): `test(objtype, objid)` of every segment, indexed by pixels; False for nothing."""
    tables = np.zeros((len(tests), scene.ngeom + 1), np.bool_)
    for geom in scene.geoms[: scene.ngeom]:
        if geom.segid >= 0:
            tables[:, geom.segid + 1] = [test(geom.objtype, geom.objid) for test in tests]
    return tables


# --- OpenGL ---

_open_renderers: "weakref.WeakSet[Renderer]" = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    """Close what is left open before the OpenGL bindings shut down; call it when they have started."""
    atexit.register(lambda: [renderer.close() for renderer in list(_open_renderers)])


def import_simulator(name: str) -> ModuleType:
    """A simulator's package, imported so that neither it nor mujoco starts OpenGL.

    dm_control initializes EGL when it is imported, which fails without EGL even for physics only and makes a later
    fork unsafe on a GPU.
    """
    backend = _select_gl()
    if "mujoco" not in sys.modules:
        with _environment("MUJOCO_GL", backend if _loads(backend) else "disable"):
            importlib.import_module("mujoco")
    with _environment("MUJOCO_GL", "disable"):
        return importlib.import_module(name)


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
