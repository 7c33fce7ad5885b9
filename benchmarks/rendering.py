"""Speed of the environments on one core: states and frames per second, by quality and by what is rendered.

    python -m benchmarks.rendering --envs cheetah-run window-open --out benchmarks/results/rendering.json

One process steps one environment with random actions. "both" renders the clean and the distractor view of every state,
"masks" renders both with their masks, as make_dataset.py does, and "physics" renders nothing. Rates are per second and
per second of CPU time: where a software renderer draws the frames, the second one is what a core gives. "mujoco" is
mujoco.Renderer with the model as the simulator ships it, one frame for each state. With --settings the clean render is
also measured in full quality with one at a time of the settings that the fast quality changes.
"""

import contextlib
import ctypes
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common import runs
from common.distractors import DistractorConfig
from common.envs import make_env
from common.errors import UserError
from common.rendering import COARSE_SHAPES, FLOOR_CELL
from common.tasks import TASKS

Kind = Literal["physics", "mujoco", "clean", "distractor", "both", "masks"]
Quality = Literal["full", "fast"]
RENDERS: dict[str, tuple[str, ...]] = {
    "physics": (),
    "mujoco": (),
    "clean": ("clean",),
    "distractor": ("distractor",),
    "both": ("clean", "distractor"),
    "masks": ("clean", "distractor"),
}
SETTINGS = ("shadows", "reflections", "multisampling", "fine shapes", "fine floors")  # the fast quality has none


@dataclass
class Args:
    envs: tuple[str, ...] = tuple(TASKS)
    """tasks to measure"""
    kinds: tuple[Kind, ...] = ("physics", "mujoco", "clean", "distractor", "both", "masks")
    """what to render"""
    qualities: tuple[Quality, ...] = ("full", "fast")
    """full: as the paper; fast: without shadows, reflections, multisampling, fine shapes and floors"""
    settings: bool = False
    """also measure the clean render in full quality, with everything and without each costly setting"""
    windows: int = 3
    """timed windows of each measurement; their median is reported"""
    window_seconds: float = 2.0
    """shortest time of a window, which holds at least one step"""
    image_size: int | None = None
    """height and width of a frame in pixels; None: the task's"""
    backgrounds: str = "synthetic"
    """davis, synthetic, or a folder of clips"""
    davis_dir: Path = Path("data/DAVIS")
    """folder of the DAVIS clips"""
    seed: int = 1
    """seed of the episodes and the actions"""
    out: Path | None = None
    """also write the measurements to this file, as JSON"""


def renderer() -> str | None:
    """The OpenGL renderer's own name (a card, or llvmpipe for software), from the context that is current."""
    with contextlib.suppress(Exception):  # the bindings raise anything where there is none
        from OpenGL import GL

        name = GL.glGetString(GL.GL_RENDERER)
        return name.decode() if isinstance(name, bytes) else ctypes.string_at(name).decode()
    return None


def physics_of(env: Any) -> tuple[Any, Any]:
    """MuJoCo's model and state of an environment."""
    if env.task.suite == "dmw":
        return env.model, env.data
    return env.physics.model.ptr, env.physics.data.ptr


def switch_off(env: Any, setting: str) -> Callable[[], None]:
    """Takes one of SETTINGS out of the model, before OpenGL starts. Returns what to do after the first reset."""
    import mujoco

    model, flags = physics_of(env)[0], mujoco.mjtRndFlag
    quality = model.vis.quality
    if setting == "multisampling":
        quality.offsamples = 0
    elif setting == "fine shapes":
        quality.numslices, quality.numstacks = COARSE_SHAPES
    elif setting == "fine floors":
        model.geom_size[model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE, 2] = FLOOR_CELL
    elif setting == "shadows":
        quality.shadowsize = 0
    off = {"shadows": flags.mjRND_SHADOW, "reflections": flags.mjRND_REFLECTION}.get(setting)

    def finish() -> None:
        renderer = env._renderer
        for scene in [renderer._scene] if env.task.suite == "dmw" else renderer._scenes.values():
            if off is not None:
                scene.flags[off] = 0

    return finish


def measure(env_name: str, kind: Kind, quality: Quality, args: Args, without: str | None = None) -> dict[str, Any]:
    """Times one environment; `without` is one of SETTINGS."""
    env = make_env(
        env_name,
        renders=RENDERS[kind],
        masks=kind == "masks",
        quality=quality,
        distractors=DistractorConfig(backgrounds=args.backgrounds, davis_dir=args.davis_dir),
        image_size=args.image_size,
    )
    own, size = None, args.image_size or env.task.image_size
    finish = switch_off(env, without) if without else None
    try:
        rng = np.random.default_rng(args.seed)
        start = time.perf_counter()
        env.reset(seed=args.seed)  # starts OpenGL and reads the clips
        if finish:
            finish()
        if kind == "mujoco":
            import mujoco

            model, data = physics_of(env)
            try:
                own = mujoco.Renderer(model, size, size)
            except ValueError as error:  # larger than the buffer that the model asks for
                raise UserError(f"--image-size {size} is too large for mujoco.Renderer: {error}") from error
        first_reset = time.perf_counter() - start
        start = time.perf_counter()
        env.reset(seed=args.seed + 1)
        reset = time.perf_counter() - start
        low, high = env.action_space.low, env.action_space.high
        seed, rates, cpu_rates = args.seed + 1, [], []
        for window in range(args.windows + 1):
            count, spent = 0, 0.0
            start, cpu_start = time.perf_counter(), time.process_time()
            while not count or spent < args.window_seconds:
                if runs.stop_requested():
                    raise runs.Stopped("nothing is written")
                _, _, terminated, truncated, _ = env.step(rng.uniform(low, high).astype(np.float32))
                if own:
                    own.update_scene(data, env.task.camera)
                    own.render()
                count += 1
                spent = time.perf_counter() - start
                if terminated or truncated:
                    seed += 1
                    env.reset(seed=seed)
            if window:  # the first one warms up
                rates.append(count / spent)
                cpu_rates.append(count / (time.process_time() - cpu_start))
        gl = renderer() if kind != "physics" else None
    finally:
        if own:
            own.close()
        env.close()
    frames = 1 if own else len(RENDERS[kind])
    return {
        "env": env_name,
        "kind": kind,
        "quality": "as shipped" if own else quality + (f" without {without}" if without else ""),
        "image_size": size,
        "states_per_s": statistics.median(rates),
        "states_per_s_windows": rates,
        "states_per_cpu_s": statistics.median(cpu_rates),
        "frames_per_s": frames * statistics.median(rates),
        "frames_per_cpu_s": frames * statistics.median(cpu_rates),
        "reset_seconds": reset,
        "first_reset_seconds": first_reset,
        "renderer": gl,
    }


def table(measurements: list[dict[str, Any]]) -> str:
    """The measurements as a Markdown table."""
    names = ["states_per_s", "frames_per_s", "states_per_cpu_s", "frames_per_cpu_s"]
    lines = [["env", "quality", "rendered", "states/s", "frames/s", "states/CPU s", "frames/CPU s", "reset s"]]
    for entry in measurements:
        line = [entry["env"], entry["quality"], entry["kind"], *(f"{entry[name]:,.1f}" for name in names)]
        lines.append([*line, f"{entry['reset_seconds']:.3f}"])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    rows.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(rows)


def main(args: Args) -> None:
    if args.windows < 1 or not (args.envs and args.kinds and args.qualities):
        raise UserError("--windows must be at least 1, and --envs, --kinds and --qualities need one value each")
    measurements = []
    for env_name in args.envs:
        for quality in args.qualities:
            for kind in args.kinds:
                if kind in ("physics", "mujoco") and quality != args.qualities[0]:
                    continue  # the quality changes only what this project renders
                measurements.append(measure(env_name, kind, quality, args))
                print(f"{env_name}, {quality}, {kind}: {measurements[-1]['states_per_s']:,.1f} states/s", flush=True)
        if args.settings and not ("clean" in args.kinds and "full" in args.qualities):
            measurements.append(measure(env_name, "clean", "full", args))
        for setting in SETTINGS if args.settings else ():
            measurements.append(measure(env_name, "clean", "full", args, without=setting))
            print(f"{env_name}, full without {setting}: {measurements[-1]['states_per_s']:,.1f} states/s", flush=True)
    print(table(measurements))
    names = {entry["renderer"] for entry in measurements} - {None}
    print(f"renderer: {', '.join(sorted(names)) or '-'}, MUJOCO_GL={os.environ.get('MUJOCO_GL', '')}")
    if args.out is not None:
        result = {
            "command": shlex.join(["python", "-m", "benchmarks.rendering", *sys.argv[1:]]),
            "commit": runs.git_commit(),
            "machine": runs.machine(),
            "versions": runs.versions(),
            "args": runs.jsonable(args),
            "mujoco_gl": os.environ.get("MUJOCO_GL"),
            "measurements": measurements,
        }
        runs.write_json(args.out, result)
        print(f"written: {args.out}")


if __name__ == "__main__":
    runs.cli(main, Args())
