"""Speed of the environments on one core: states per second, by quality and by what is rendered.

    python -m benchmarks.rendering --envs cheetah-run window-open --out benchmarks/results/rendering.json

One process steps one environment with random actions. "both" renders the clean and the distractor view of every state,
"masks" renders both with their masks, as make_dataset.py does, and "physics" renders nothing. Rates are per second and
per second of CPU time: where a software renderer makes the frames, the second one is what a core gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks import about
from common.cli import Count, NotNegative, Seed, Stopped, cli, stop_requested
from common.distractors import DistractorConfig
from common.envs import make_env
from common.store import write_json
from common.tasks import TASKS

Kind = Literal["physics", "clean", "distractor", "both", "masks"]
Quality = Literal["full", "fast"]
RENDERS: dict[Kind, tuple[str, ...]] = {
    "physics": (),
    "clean": ("clean",),
    "distractor": ("distractor",),
    "both": ("clean", "distractor"),
    "masks": ("clean", "distractor"),
}


@dataclass
class Args:
    envs: tuple[str, ...] = tuple(TASKS)
    """tasks to measure"""
    kinds: tuple[Kind, ...] = ("physics", "clean", "distractor", "both", "masks")
    """what to render"""
    qualities: tuple[Quality, ...] = ("full", "fast")
    """full: as the paper; fast: without shadows, reflections, multisampling, fine shapes and floors"""
    windows: Count = 3
    """timed windows of each measurement; their median is reported"""
    window_seconds: NotNegative = 2.0
    """shortest time of a window, which holds at least one step"""
    image_size: Count | None = None
    """height and width of a frame in pixels; None: the task's"""
    backgrounds: str = "synthetic"
    """davis, synthetic, or a folder of clips"""
    davis_dir: Path = Path("data/DAVIS")
    """folder of the DAVIS clips"""
    seed: Seed = 1
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


def measure(env_name: str, kind: Kind, quality: Quality, args: Args) -> dict[str, Any]:
    """Times one environment."""
    env = make_env(
        env_name,
        renders=RENDERS[kind],
        masks=kind == "masks",
        quality=quality,
        distractors=DistractorConfig(backgrounds=args.backgrounds, davis_dir=args.davis_dir),
        image_size=args.image_size,
    )
    rng, seed = np.random.default_rng(args.seed), args.seed
    rates, cpu_rates = [], []
    with contextlib.closing(env):
        env.reset(seed=seed)  # starts OpenGL and reads the clips
        start = time.perf_counter()
        env.reset(seed=seed)
        reset_seconds = time.perf_counter() - start
        for window in range(args.windows + 1):
            states, seconds = 0, 0.0
            start, cpu_start = time.perf_counter(), time.process_time()
            while not states or seconds < args.window_seconds:
                if stop_requested():
                    raise Stopped("nothing is written")
                _, _, terminated, truncated, _ = env.step(rng.uniform(-1, 1, env.task.action_dim).astype(np.float32))
                states += 1
                seconds = time.perf_counter() - start
                if terminated or truncated:
                    seed += 1
                    env.reset(seed=seed)
            if window:  # the first one warms up
                rates.append(states / seconds)
                cpu_rates.append(states / (time.process_time() - cpu_start))
        opengl = None if kind == "physics" else renderer()
    return {
        "env": env_name,
        "kind": kind,
        "quality": quality,
        "image_size": args.image_size or env.task.image_size,
        "states_per_s": statistics.median(rates),
        "states_per_s_windows": rates,
        "states_per_cpu_s": statistics.median(cpu_rates),
        "frames_per_s": len(RENDERS[kind]) * statistics.median(rates),
        "reset_seconds": reset_seconds,
        "renderer": opengl,
    }


def main(args: Args) -> None:
    measurements = []
    for env_name in args.envs:
        for quality in args.qualities:
            for kind in args.kinds:
                if kind == "physics" and quality != args.qualities[0]:
                    continue  # the quality changes only what is rendered
                entry = measure(env_name, kind, quality, args)
                measurements.append(entry)
                rates = f"{entry['states_per_s']:,.1f} states/s, {entry['states_per_cpu_s']:,.1f} per second of a core"
                print(f"{env_name}, {quality}, {kind}: {rates}, {entry['renderer'] or 'no OpenGL'}", flush=True)
    if args.out is not None:
        facts = {"mujoco_gl": os.environ.get("MUJOCO_GL"), "measurements": measurements}
        write_json(args.out, about("benchmarks.rendering", args) | facts)
        print(f"written: {args.out}")


if __name__ == "__main__":
    cli(main, Args())
