"""Training speed of a method: samples/s, MFU and peak memory of each stage, with and without loading the data.

    python -m benchmarks.throughput --script masklam --env cheetah-run --quick
    python -m benchmarks.throughput --script lapo --sweep --stages lam --out benchmarks/results/throughput.json

The script's own training loop runs, with all it does between two updates. "included" reads batches with the script's
sampler, from the dataset below --data-dir or else from random frames; "excluded" repeats one batch. MFU is the rate of
floating-point operations over a peak: the card's bf16 peak and a measured product of large matrices on a GPU, measured
3x3 convolutions on a CPU. The script's own flags all exist; those of schedules and evaluation change nothing here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import math
import re
import resource
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from common import runs
from common.dataset import Batch, Dataset, Sampler, TensorSampler, normalise, sequential
from common.errors import UserError
from common.shards import ShardWriter, shard_paths
from common.tasks import get_task
from make_dataset import default_args

SCRIPTS = ("lapo", "laom_labels", "laof", "masklam")
# Dense bf16 peaks in TFLOP/s from NVIDIA's data sheets, without sparsity; the longest name that fits a card wins.
BF16_PEAK = {
    "A10": 125.0,
    "A10G": 70.0,
    "A100": 312.0,
    "A30": 165.0,
    "A40": 149.7,
    "A6000": 154.8,
    "B200": 2250.0,
    "GH200": 989.4,
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H200": 989.4,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
}


@dataclass
class Options:
    script: Literal["lapo", "laom_labels", "laof", "masklam"] = "lapo"
    """the method to measure; its flags follow the choice"""
    stages: tuple[Literal["lam", "labels", "bc", "decoder"], ...] = ("lam", "labels", "bc", "decoder")
    """what to measure: stage 1, the labelling of all transitions, stage 2, stage 3"""
    sweep: bool = False
    """measure compile and channels_last on and off, and what the flags ask for a second time at the end"""
    compile: bool = False
    """torch.compile the update; the default is the script's: on a GPU only"""
    channels_last: bool = True
    """memory format of the networks' weights"""
    windows: int = 5
    """timed windows of each measurement; their median is reported"""
    window_seconds: float = 2.0
    """shortest time of a window, which holds at least one update"""
    warmup: int = 5
    """updates before the first window"""
    threads: int | None = None
    """torch's threads on the CPU; None: as torch chooses"""
    out: Path | None = None
    """also write the measurements to this file, as JSON"""


def defaults(argv: list[str]) -> Any:
    """The options and the arguments of the chosen script in one dataclass, with the script's defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--script", default=SCRIPTS[0])
    parser.add_argument("--device", default="auto")
    known, _ = parser.parse_known_args(argv)
    script = known.script if known.script in SCRIPTS else SCRIPTS[0]  # the full parser reports a wrong one
    module = importlib.import_module(script)
    arguments = dataclass(type("Args", (Options, module.Args), {"__module__": __name__}))
    on_gpu = known.device == "cuda" or (known.device == "auto" and torch.cuda.is_available())
    return arguments(**vars(module.defaults(argv)) | {"script": script, "compile": on_gpu})


# ---------------------------------------------------------------------------------------------------------------------
# Peaks


def card_peak(name: str) -> float | None:
    """The dense bf16 peak in FLOP/s of a card, from its name; None if it is not in the table."""
    fits = [key for key in BF16_PEAK if re.search(rf"\b{key}\b", name)]
    return BF16_PEAK[max(fits, key=len)] * 1e12 if fits else None


def seconds_per_call(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Median over five windows of the time of one call, after a warm-up."""
    for _ in range(2):
        call()
    times = []
    for _ in range(5):
        synchronize(device)
        start, count = time.perf_counter(), 0
        while not count or time.perf_counter() - start < seconds / 5:
            call()
            count += 1
        synchronize(device)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


def matmul_rate(size: int = 8192) -> dict[str, Any]:
    """FLOP/s of a product of two square bf16 matrices of random numbers on the GPU."""
    device = torch.device("cuda")
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / seconds_per_call(lambda: a @ b, device, 1.0)
    return {"what": f"bf16 matrix product {size}x{size}x{size}", "flops_per_s": rate}


def convolution_rates(scales: list[int], batch: int, size: int, seconds: float) -> list[dict[str, Any]]:
    """FLOP/s of plain 3x3 convolutions on the CPU in float32, for the shapes that fill the networks.

    Each shape (for a scale m: 16 m channels at the whole image and at half its size, 32 m at a quarter) is measured
    with contiguous and channels_last memory, forward only and forward with both gradients.
    """
    rates = []
    for scale in sorted(set(scales)):
        for channels, width in ((16 * scale, size), (16 * scale, size // 2), (32 * scale, size // 4)):
            for layout, memory in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
                conv = nn.Conv2d(channels, channels, 3, padding=1).to(memory_format=memory)
                x = torch.randn(batch, channels, width, width).to(memory_format=memory).requires_grad_()
                gradient = torch.randn_like(x, memory_format=torch.preserve_format)
                flops = 2 * 9 * channels**2 * width**2 * batch

                def forward(conv: nn.Module = conv, x: Tensor = x) -> None:
                    with torch.no_grad():
                        conv(x)

                def both(conv: nn.Module = conv, x: Tensor = x, gradient: Tensor = gradient) -> None:
                    torch.autograd.grad(conv(x), [x, *conv.parameters()], gradient)

                for passes, call, factor in (("forward", forward, 1), ("forward+backward", both, 3)):
                    rate = factor * flops / seconds_per_call(call, torch.device("cpu"), seconds)
                    shape = f"{batch}x{channels}x{width}x{width}"
                    what = f"convolution 3x3, {shape}, {layout}, {passes}"
                    rates.append({"what": what, "passes": passes, "flops_per_s": rate})
    return rates


def measure_peaks(args: Any, size: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """What MFU is taken against: name -> ``what`` and ``flops_per_s``."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peaks = {"matmul": matmul_rate()}
        if (peak := card_peak(name)) is not None:
            peaks = {"card": {"what": f"{name}, dense bf16, data sheet", "flops_per_s": peak}} | peaks
        return peaks
    seconds = min(0.25, args.window_seconds)
    scales = [args.idm_scale, getattr(args, "fdm_scale", args.idm_scale)]
    rates = convolution_rates(scales, min(args.batch_size, 64), size, seconds)
    training = [rate for rate in rates if rate["passes"] == "forward+backward"]
    return {
        "convolution": max(rates, key=lambda rate: rate["flops_per_s"]),
        "convolution, with gradients": max(training, key=lambda rate: rate["flops_per_s"]),
    }


def best_peaks(*measured: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The highest of several measurements of each peak: other work on the machine only lowers it."""
    return {name: max((m[name] for m in measured), key=lambda peak: peak["flops_per_s"]) for name in measured[0]}


# ---------------------------------------------------------------------------------------------------------------------
# Timing


def synchronize(device: torch.device) -> None:
    """Waits for everything queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new count of peak memory, on Linux also of this process's resident memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB since `reset_peak_memory`: allocated on the GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Measured(Exception):
    """Enough windows are timed; leaves the training loop."""


class TimedSampler:
    """A sampler that times the loop it feeds: windows of fresh batches, then windows of one repeated batch.

    A window lies between two requests for a batch, with the device waited for at both, so everything a loop does is
    inside. `results` gets one entry per kind of loading; then `Measured` is raised from `next`.
    """

    def __init__(self, sampler: Any, args: Any, device: torch.device) -> None:
        self.sampler, self.args, self.device = sampler, args, device
        self.batch_size, self.batches_per_epoch = sampler.batch_size, getattr(sampler, "batches_per_epoch", 1)
        self.loading, self.repeated = "included", None
        self.results: dict[str, dict[str, Any]] = {}
        self.created = time.perf_counter()
        self._restart(args.warmup)

    def _restart(self, warmup: int) -> None:
        self.warmup, self.times, self.updates = warmup, [], []
        self.count, self.start = 0, time.perf_counter()

    def seek(self, position: int) -> None:
        self.sampler.seek(position)

    def close(self) -> None:
        """Stops the sampler's thread."""
        self.sampler.close()

    def episodes(self, position: int) -> list[int]:
        return self.sampler.episodes(position)

    def next(self) -> Any:
        if self.warmup > 0:
            self.warmup -= 1
            if self.warmup == 0:
                self.count = -1  # the last batch of the warm-up is still to be worked on
        else:
            self._tick()
        return self.sampler.next() if self.repeated is None else self.repeated

    def _tick(self) -> None:
        """Counts the update that has just ended, and closes the window or the measurement if it is long enough."""
        self.count += 1
        if self.count == 0:
            synchronize(self.device)
            reset_peak_memory(self.device)
            self.warmup_seconds = time.perf_counter() - self.created
            self.start = time.perf_counter()
            return
        if time.perf_counter() - self.start < self.args.window_seconds:
            return
        synchronize(self.device)
        now = time.perf_counter()
        self.times.append(now - self.start)
        self.updates.append(self.count)
        self.count, self.start = 0, now
        if len(self.times) < self.args.windows:
            return
        rates = [self.batch_size * count / seconds for count, seconds in zip(self.updates, self.times)]
        self.results[self.loading] = {
            "samples_per_s": statistics.median(rates),
            "samples_per_s_windows": rates,
            "seconds_per_update": self.batch_size / statistics.median(rates),
            "peak_memory_gib": peak_memory_gib(self.device),
            "warmup_seconds": self.warmup_seconds,  # with torch.compile's work
        }
        if self.repeated is not None:
            raise Measured
        self.repeated, self.loading, self.created = self.sampler.next(), "excluded", now
        self.close()
        self._restart(1)


class Unsaved:
    """What the scripts' training loop needs of a run directory, without one: nothing is resumed, logged or saved."""

    dir = Path()

    def __init__(self, script: str) -> None:
        self.script = script

    def finished(self, stage: str) -> None:
        return None

    def restore(self, stage: str) -> None:
        return None

    def log(self, stage: str, step: int, values: dict[str, float]) -> None:
        pass

    def save(self, stage: str, step: int, state: dict[str, Any]) -> Path:
        return self.dir

    def finish(self, stage: str, step: int, state: dict[str, Any]) -> None:
        raise AssertionError("the sampler ends the loop")


class Sequential:
    """`common.dataset.sequential` over and over, as a sampler: what labels the transitions."""

    def __init__(self, dataset: Dataset, batch_size: int, device: torch.device) -> None:
        self.batch_size = batch_size
        whole = dataset.transitions[: len(dataset.transitions) // batch_size * batch_size]
        self._batches = self._endless(dataset, whole, device)

    def _endless(self, dataset: Dataset, indices: np.ndarray, device: torch.device) -> Iterator[Batch]:
        while True:
            yield from sequential(dataset, self.batch_size, max_offset=1, device=device, masks=True, indices=indices)

    def next(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()


# ---------------------------------------------------------------------------------------------------------------------
# FLOPs


def count_flops(function: Callable[[], Tensor], backward: bool) -> int:
    """Floating-point operations of `function`, and of its gradients with `backward`; a multiply-add counts as two."""
    with FlopCounterMode(display=False) as counter:
        if backward:
            function().backward()
        else:
            with torch.no_grad():
                function()
    return counter.get_total_flops()


def head(batch: Any, rows: int) -> Any:
    """The first rows of a batch: operations grow linearly with it, so counting needs no whole one."""
    if isinstance(batch, dict):
        return {name: value[:rows] for name, value in batch.items()}
    if isinstance(batch, tuple):
        return type(batch)(*(head(value, rows) for value in batch))
    return batch if batch is None else batch[:rows]


# ---------------------------------------------------------------------------------------------------------------------
# Data


def write_random_dataset(data_dir: Path, args: Any) -> None:
    """A train split of random frames, masks and actions: as many transitions as four batches, at least 2000."""
    task = get_task(args.env)
    length = min(250, task.max_steps)
    episodes = math.ceil(max(4 * args.batch_size, 2000) / length)
    render = "distractor" if args.distractors else "clean"
    size = default_args(["--env", args.env] + ["--quick"] * args.quick).image_size
    plan = {
        "env": args.env,
        "split": "train",
        "image_size": size,
        "action_dim": task.action_dim,
        "state_dim": task.state_dim,
        "renders": [render],
        "success": task.suite == "dmw",
        "num_transitions": episodes * length,
        "num_shards": 1,
        "expert": "random",
        "expert_sha256": "",
    }
    folder = data_dir / args.env / "train"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(args.seed)
    with ShardWriter(folder / "00000.h5", plan, 0, episodes * (length + 1), episodes) as writer:
        for number in range(episodes):
            frames = length + 1
            action = rng.uniform(-1, 1, (frames, task.action_dim)).astype(np.float32)
            action[-1] = np.nan
            episode = {
                "action": action,
                "state": np.zeros((frames, task.state_dim), np.float32),
                "reward": np.zeros(frames, np.float32),
                "success": np.zeros(frames, bool),
                f"{render}/observation": rng.integers(0, 256, (frames, size, size, 3), np.uint8),
                f"{render}/mask": rng.integers(0, 256, (frames, size * size // 8), np.uint8),
            }
            writer.append(episode, seed=number)
        writer.commit()


@contextlib.contextmanager
def train_split(args: Any) -> Iterator[tuple[Dataset, str]]:
    """The train split below --data-dir and its hash, or random frames in a temporary folder."""
    render = "distractor" if args.distractors else "clean"
    if shard_paths(args.data_dir / args.env / "train"):
        dataset = Dataset(args.data_dir, args.env, "train", render, getattr(args, "mask_source", "gt"))
        yield dataset, f"{dataset.folder}, {dataset.hash}"
        return
    with tempfile.TemporaryDirectory() as folder:
        write_random_dataset(Path(folder), args)
        yield Dataset(Path(folder), args.env, "train", render, "gt"), "random frames"


def attach_random_flow(dataset: Dataset, seed: int) -> None:
    """Flow as LAOF reads it, of random numbers: what RAFT computes is as large, and nothing here depends on it."""
    if "raft" not in dataset.extra_hash:
        rng, size = np.random.default_rng(seed), dataset.image_size
        shapes = [(shard.frames, size, size, 2) for shard in dataset.shards]
        dataset.attach(
            "raft", [rng.standard_normal(shape, np.float32).astype(np.float16) for shape in shapes], "random"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Stages


def measure_stage(
    stage: str, module: ModuleType, args: Any, dataset: Dataset, device: torch.device
) -> tuple[dict[str, dict[str, Any]], int]:
    """Times one stage. Returns the entries of `TimedSampler.results` and the FLOPs of one sample."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    memory = torch.channels_last if args.channels_last else torch.contiguous_format

    def to_device(network: nn.Module) -> nn.Module:
        return network.apply(module.orthogonal_init).to(device, memory_format=memory)

    size, rows = dataset.image_size, min(2, args.batch_size)
    windows: dict[str, Any] = {"seed": args.seed, "device": device}
    probe: nn.Module | None = to_device(nn.Linear(args.latent_dim, dataset.action_dim))
    sampler: Any
    clip = None
    after_update = {}
    if stage in ("lam", "labels"):
        with torch.device(device):  # LAOM-Labels has hundreds of millions of weights
            actions = (dataset.action_dim,) if args.script == "laom_labels" else ()
            model = to_device(module.LatentActionModel(args, size, *actions))
    if stage == "lam":
        windows |= {"masks": hasattr(args, "mask_source"), "max_offset": getattr(args, "max_offset", 1)}
        loss_fn, rate, clip = module.lam_loss, args.lam_lr, getattr(args, "lam_clip", None)
        if args.script == "laof":
            attach_random_flow(dataset, args.seed)
            windows["extra"] = "raft"
        if args.script == "laom_labels":
            model.reset_target()
            after_update["after_update"] = lambda model: model.move_target(args.target_rate)
            labels = min(args.num_labels, len(dataset.transitions))
            sampler = module.labelled_sampler(dataset, replace(args, num_labels=labels), device=device)
        else:
            sampler = Sampler(dataset, args.batch_size, **windows)
    elif stage == "labels":
        sampler = Sequential(dataset, args.batch_size, device)
    elif stage == "bc":
        model, rate = to_device(module.Encoder(3 * 3, args.policy_scale, size, args.latent_dim)), args.policy_lr
        labels = torch.zeros(len(dataset.transitions), args.latent_dim, device=device)
        transitions = torch.from_numpy(dataset.transitions).to(device)

        def loss_fn(policy: nn.Module, batch: Batch, args: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            z = policy(normalise(batch.frames).flatten(1, 2))
            return F.mse_loss(z.float(), labels[torch.searchsorted(transitions, batch.index)]), z, {}

        indices = dataset.transitions
        sampler = Sampler(dataset, args.batch_size, max_offset=0, indices=indices, **windows)
    else:
        model = to_device(module.ActionDecoder(args.latent_dim, args.decoder_dim, dataset.action_dim))
        rate, clip, probe = args.decoder_lr, args.decoder_clip, None
        count = max(args.batch_size, min(args.num_labels, 128_000))
        columns = {"z": args.latent_dim, "action": dataset.action_dim}
        tensors = {name: torch.rand(count, width, device=device) for name, width in columns.items()}

        def loss_fn(decoder: nn.Module, batch: dict[str, Tensor], args: Any) -> tuple[Tensor, None, dict[str, Tensor]]:
            return F.mse_loss(decoder(batch["z"]).float(), batch["action"]), None, {}

        sampler = TensorSampler(tensors, args.batch_size, seed=args.seed, episode=np.zeros(count))

    timed: TimedSampler | None = None
    try:
        few = head(sampler.next(), rows)
        if stage == "labels":
            flops = count_flops(lambda: module.encode(model, few, args), backward=False)
        else:
            flops = count_flops(lambda: loss_fn(model, few, args)[0], backward=True)
        model.zero_grad(set_to_none=True)
        timed = TimedSampler(sampler, args, device)
        if stage == "labels":
            model.eval()
            while True:  # as common.cache.cached does it
                with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    module.encode(model, timed.next(), args).float().cpu().numpy()
        updates = 10**9  # never reached: the sampler ends the loop
        quiet = replace(args, checkpoint_every=updates)
        with contextlib.redirect_stdout(io.StringIO()):
            what = (Unsaved(args.script), quiet, stage, model, loss_fn, timed, updates, rate)
            module.train(*what, clip=clip, probe=probe, **after_update)
    except Measured:
        pass
    finally:
        sampler.close()
    assert timed is not None
    return timed.results, flops // rows


def variants(args: Any) -> list[tuple[str, Any]]:
    """What to measure: the arguments as they are and, in a sweep, the other combinations and the first once more."""
    layouts = (args.channels_last, not args.channels_last)
    combinations = [(mode, layout) for mode in (args.compile, not args.compile) for layout in layouts]
    chosen = [("baseline", combinations[0])]
    if args.sweep:
        chosen += [("variant", combination) for combination in combinations[1:]]
        chosen += [("baseline again", combinations[0])]
    return [(name, replace(args, compile=mode, channels_last=layout)) for name, (mode, layout) in chosen]


def measure(args: Any, device: torch.device, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All measurements as JSON values; `save` gets what there is after every stage."""
    module = importlib.import_module(args.script)
    result: dict[str, Any] = {"complete": False, "measurements": []}

    def set_peaks(peaks: dict[str, dict[str, Any]]) -> None:
        result["peaks"] = peaks
        for entry in result["measurements"]:
            if "flops_per_s" in entry:
                entry["mfu"] = {name: entry["flops_per_s"] / peak["flops_per_s"] for name, peak in peaks.items()}

    with train_split(args) as (dataset, result["data"]):
        peaks = measure_peaks(args, dataset.image_size, device)
        for name, changed in variants(args):
            for stage in args.stages:
                entry: dict[str, Any] = {
                    "variant": name,
                    "compile": changed.compile and stage != "labels",  # the scripts label without it
                    "channels_last": changed.channels_last,
                    "stage": stage,
                    "batch_size": args.batch_size,
                }
                print(f"{name}: {stage}, compile={entry['compile']}, channels_last={changed.channels_last}", flush=True)
                try:
                    results, flops = measure_stage(stage, module, changed, dataset, device)
                except RuntimeError as error:  # also the compiler's errors, and a GPU without free memory
                    if not args.sweep:
                        raise
                    result["measurements"].append(entry | {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
                    results, flops = {}, 0
                for loading, rates in results.items():
                    counted = {"flops_per_sample": flops, "flops_per_s": flops * rates["samples_per_s"]}
                    result["measurements"].append(entry | {"loading": loading} | rates | counted)
                set_peaks(peaks)
                save(result)
                gc.collect()
                torch._dynamo.reset()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        result["data_on_device"] = ("frames", device) in dataset._resident
        set_peaks(best_peaks(peaks, measure_peaks(args, dataset.image_size, device)))
    result["complete"] = True
    save(result)
    return result


def table(result: dict[str, Any]) -> str:
    """The measurements as a Markdown table, and below it what MFU was taken against."""
    names = list(result["peaks"])
    lines = [["variant", "compile", "channels_last", "stage", "loading", "samples/s", "lowest-highest", "GFLOP/s"]]
    lines[0] += [f"MFU: {name}" for name in names] + ["peak GiB"]
    for entry in result["measurements"]:
        line = [entry["variant"], *("on" if entry[key] else "off" for key in ("compile", "channels_last"))]
        line.append(entry["stage"])
        if "error" in entry:
            lines.append([*line, "-", entry["error"][:60], *["-"] * (3 + len(names))])
            continue
        windows = entry["samples_per_s_windows"]
        line += [entry["loading"], f"{entry['samples_per_s']:,.1f}", f"{min(windows):,.1f}-{max(windows):,.1f}"]
        line += [f"{entry['flops_per_s'] / 1e9:,.1f}", *(f"{100 * entry['mfu'][name]:.1f}%" for name in names)]
        lines.append([*line, f"{entry['peak_memory_gib']:.2f}"])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    rows.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for name, peak in result["peaks"].items():
        rows.append(f"MFU: {name} = {peak['flops_per_s'] / 1e9:,.1f} GFLOP/s ({peak['what']})")
    return "\n".join(rows)


def main(args: Any) -> None:
    if args.windows < 1 or args.warmup < 1 or not args.stages:
        raise UserError("--windows and --warmup must be at least 1, and --stages needs one stage")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    about = {
        "command": shlex.join(["python", "-m", "benchmarks.throughput", *sys.argv[1:]]),
        "commit": runs.git_commit(),
        "machine": runs.machine(),
        "versions": runs.versions(),
        "args": runs.jsonable(args),
    }

    def save(result: dict[str, Any]) -> None:
        if args.out is not None:
            runs.write_json(args.out, about | result)

    print(table(measure(args, device, save)))
    if args.out is not None:
        print(f"written: {args.out}")


if __name__ == "__main__":
    runs.cli(main, defaults)
