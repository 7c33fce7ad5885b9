"""Training speed of a method: samples/s, MFU and peak memory of each stage, with and without loading the data.

    python -m benchmarks.throughput --script masklam --env cheetah-run --quick --data-dir data/quickstart
    python -m benchmarks.throughput --script lapo --sweep --trainings lam --out benchmarks/results/throughput.json

The script's own `main` runs on the dataset below --data-dir, up to the last of --trainings; only its `train` is
replaced, by one that times the loop and leaves it. So everything between two updates is measured, for a script of your
own too, with all of its flags. "included" reads batches with the script's sampler, "excluded" repeats one batch. Before
stages 2 and 3 `main` computes what they need of the whole set, so a small one is quicker: 2,000 transitions,
--num-labels 2000.

MFU is the rate of the loss's and its gradients' floating-point operations over a peak: the card's dense bf16 peak, and
a product of large matrices that is measured here (bf16 on a GPU, float32 on a CPU). What a sampler computes, such as
LAPO-Slots' features while it learns slots, takes time but is not counted as operations.

--loading measures instead how fast stage 1's batches come from the disk ("cold": the system has forgotten the files)
and from memory ("hot"), with and without reading ahead; it reads an eighth of the set. --sharing measures how stage 1
fares beside another process that keeps a core busy, with OMP_WAIT_POLICY=passive and without.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import benchmark
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import about, clock
from common import runs
from common.cli import Count, NotNegative, UserError, cli
from common.dataset import READ_AHEAD, Dataset, Sampler
from common.store import write_json

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
    script: str = "lapo"
    """the method script to measure, without .py; its flags follow the choice"""
    trainings: tuple[str, ...] = ("lam", "policy", "decoder")
    """what to measure, by the names in the script's calls of `train`; others are not trained"""
    sweep: bool = False
    """measure --compile and --channels-last on and off, and what the flags ask for a second time at the end"""
    loading: bool = False
    """measure how fast batches are read, cold and hot, and nothing else"""
    sharing: bool = False
    """measure how stage 1 shares the machine with another process, for both settings of OMP_WAIT_POLICY"""
    channels_last: bool = True
    """memory format of the networks' weights; the scripts use channels_last"""
    windows: Count = 5
    """timed windows of each measurement; their median is reported"""
    window_seconds: NotNegative = 2.0
    """shortest time of a window, which holds at least one update"""
    warmup: Count = 5
    """updates before the first window"""
    out: Path | None = None
    """also write the measurements to this file, as JSON"""


def defaults(argv: list[str]) -> Any:
    """The options and the arguments of the chosen script in one dataclass, with the script's defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--script", default=Options.script)
    script = parser.parse_known_args(argv)[0].script
    if script not in runs.method_scripts():
        names = ", ".join(runs.method_scripts())
        raise UserError(f"--script {script}: no method script of this name; there are {names}")
    module = importlib.import_module(script)
    both = dataclass(type("Args", (Options, module.Args), {"__module__": __name__}))
    return both(**vars(module.defaults(argv)) | {"script": script})


# ---------------------------------------------------------------------------------------------------------------------
# Peaks and operations


def card_peak(name: str) -> float | None:
    """The dense bf16 peak in FLOP/s of a card, from its name; None if it is not in the table."""
    names = [key for key in BF16_PEAK if re.search(rf"\b{key}\b", name)]
    return BF16_PEAK[max(names, key=len)] * 1e12 if names else None


def measure_peaks(device: torch.device, seconds: float) -> dict[str, dict[str, Any]]:
    """What MFU is taken against: name -> ``what`` and ``flops_per_s``."""
    dtype, size = (torch.bfloat16, 8192) if device.type == "cuda" else (torch.float32, 2048)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timer = benchmark.Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    # The fastest one, since other work on the machine only slows it down.
    rate = 2 * size**3 / min(timer.blocked_autorange(min_run_time=seconds).times)
    peaks = {"matmul": {"what": f"product of {dtype} matrices, {size} x {size}, measured", "flops_per_s": rate}}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = card_peak(name)
        if peak is not None:
            peaks["card"] = {"what": f"{name}, dense bf16, data sheet", "flops_per_s": peak}
    return peaks


def count_flops(function: Callable[[], Tensor], backward: bool) -> int:
    """Floating-point operations of `function`, and of its gradients with `backward`; a multiply-add counts as two."""
    with FlopCounterMode(display=False) as counter:
        if backward:
            function().backward()
        else:
            with torch.no_grad():
                function()
    return counter.get_total_flops()


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def forget(folder: Path) -> None:
    """Makes the system drop the files of a folder from memory; what a process has mapped and touched stays."""
    gc.collect()  # the last reader's maps
    for path in folder.glob("*.h5"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def bytes_from_disk() -> int:
    """What this process has made the system read from the disk so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(lines["read_bytes"])


def read_batches(args: Any, dataset: Dataset, fields: tuple[str, ...], read_ahead: int) -> dict[str, float]:
    """Reads the first eighth of an epoch's batches of stage 1: samples/s, and gigabytes that came from the disk."""
    start, before = time.perf_counter(), bytes_from_disk()
    options = {
        "max_offset": dataset.max_offset(args) if hasattr(args, "max_offset") else 1,
        "fields": fields,
        "device": torch.device("cpu"),
    }
    sampler = Sampler(dataset, args.batch_size, seed=args.seed, read_ahead=read_ahead, **options)
    batches = sampler.batches_per_epoch // 8
    if not batches:
        raise UserError("--loading reads an eighth of the set, which here is no batch; lower --batch-size")
    for _ in range(batches):
        sampler.next()
    sampler.close()
    seconds = time.perf_counter() - start
    return {
        "samples_per_s": batches * args.batch_size / seconds,
        "from_disk_gb": (bytes_from_disk() - before) / 1e9,
    }


def measure_loading(args: Any, module: Any) -> list[dict[str, Any]]:
    """Reads the same batches cold and then hot, in turn without and with reading ahead; an entry for each way."""
    if not {"frames", "masks"}.issuperset(module.input_fields(args)):
        raise UserError(
            f"--loading: {args.script} sees {', '.join(module.input_fields(args))}, not only frames and masks"
        )
    entries = [{"read_ahead": depth, "state": state} for depth in (0, READ_AHEAD) for state in ("cold", "hot")]
    for _ in range(args.windows):
        for depth in (0, READ_AHEAD):
            forget(args.data_dir / args.env / "train")
            dataset = module.open_split(args, "train")
            for entry in (entry for entry in entries if entry["read_ahead"] == depth):
                for name, value in read_batches(args, dataset, module.input_fields(args), depth).items():
                    entry.setdefault(f"{name}_windows", []).append(value)
            del dataset
    for entry in entries:
        rates, from_disk = entry["samples_per_s_windows"], statistics.median(entry["from_disk_gb_windows"])
        entry["samples_per_s"] = statistics.median(rates)
        print(
            f"{entry['state']}, {entry['read_ahead']} batches read ahead: {entry['samples_per_s']:,.0f} samples/s "
            f"({min(rates):,.0f} to {max(rates):,.0f}), {from_disk:.2f} GB from disk",
            flush=True,
        )
    return entries


def measure_sharing(args: Any) -> list[dict[str, Any]]:
    """Speed of stage 1 alone and beside a process that keeps a core busy, for both ways in which threads can wait."""
    entries = []
    for busy, policy in itertools.product((False, True), ("active", "passive")):
        with contextlib.ExitStack() as stack:
            if busy:
                other = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                stack.callback(other.kill)
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "out.json"
            command = [sys.executable, "-m", "benchmarks.throughput", *sys.argv[1:]]
            command += ["--no-sharing", "--trainings", "lam", "--stages", "lam", "--out", str(out)]
            # "active" is what OpenMP does if nothing is said.
            environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
            environment |= {"OMP_WAIT_POLICY": policy} if policy == "passive" else {}
            if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode:
                raise UserError("--sharing: the measurement failed as the lines above say")
            measured = json.loads(out.read_text(encoding="utf-8"))["measurements"][0]
        entries.append({"busy_process": busy, "waiting": policy, "updates_per_s": 1 / measured["seconds_per_update"]})
        print(
            f"{'beside a busy process' if busy else 'alone'}, threads wait {policy}: "
            f"{entries[-1]['updates_per_s']:.2f} updates/s",
            flush=True,
        )
    return entries


# ---------------------------------------------------------------------------------------------------------------------
# Timing


class LoopTimed(Exception):
    """All windows of a training loop are timed; raised from the sampler's `next` to leave the loop."""


class StagesMeasured(Exception):
    """All stages are measured; leaves the script's `main`."""


class TimedSampler:
    """A sampler that times the loop it feeds: windows of fresh batches, then windows of one repeated batch.

    An update ends when the loop asks for the next batch. The device is waited for at both ends of a window only, so the
    loop keeps its own pace. `results` has an entry per kind of loading when `next` raises `LoopTimed`.
    """

    def __init__(self, sampler: Any, options: Options, device: torch.device) -> None:
        self._sampler, self._options, self._device = sampler, options, device
        self._batches = self._timed_batches()
        self.results: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:  # batch_size, seek, episodes, ...
        return getattr(self._sampler, name)

    def next(self) -> Any:
        return next(self._batches)

    def _timed_batches(self) -> Iterator[Any]:
        options, device = self._options, self._device
        for loading in ("included", "excluded"):
            repeated = self._sampler.next() if loading == "excluded" else None
            start = clock(device)
            for _ in range(options.warmup):
                yield self._sampler.next() if repeated is None else repeated
            begin = clock(device)
            warmup_seconds = begin - start
            runs.reset_peak_memory(device)
            rates = []
            for _ in range(options.windows):
                start, updates = begin, 0
                while not updates or time.perf_counter() - start < options.window_seconds:
                    yield self._sampler.next() if repeated is None else repeated
                    updates += 1
                begin = clock(device)
                rates.append(updates * self._sampler.batch_size / (begin - start))
            self.results[loading] = {
                "samples_per_s": statistics.median(rates),
                "samples_per_s_windows": rates,
                "seconds_per_update": self._sampler.batch_size / statistics.median(rates),
                "peak_memory_gib": runs.peak_memory_gib(device),
                "warmup_seconds": warmup_seconds,  # with torch.compile's work
            }
        raise LoopTimed


def measure_variant(args: Any, module: Any, device: torch.device, add: Callable[[dict[str, Any]], None]) -> None:
    """Runs the script's `main` in a temporary run directory and gives `add` an entry per stage and kind of loading."""
    train = module.train
    remaining, seen = set(args.trainings), []

    def timed_train(
        run: Any,
        run_args: Any,
        stage: str,
        model: nn.Module,
        loss_fn: Callable,
        sampler: Any,
        updates: int,
        *rest: Any,
        **named: Any,
    ) -> None:
        """As the script's `train`; the model is left nearly untrained."""
        seen.append(stage)
        if stage in remaining:
            remaining.remove(stage)
            entry = {"stage": stage, "batch_size": sampler.batch_size}
            entry["data_on_device"] = getattr(sampler, "on_device", None)
            model.to(memory_format=torch.channels_last if args.channels_last else torch.contiguous_format)
            timed = TimedSampler(sampler, args, device)
            try:
                rows = min(2, sampler.batch_size)  # enough, since operations grow linearly with the batch
                few = tree_map_only(Tensor, lambda values: values[:rows], sampler.next())
                flops = count_flops(lambda: loss_fn(model, few, run_args)[0], backward=True) // rows
                model.zero_grad(set_to_none=True)
                # Its progress bar would count to a number of updates that is never reached.
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    train(run, run_args, stage, model, loss_fn, timed, 10**9, *rest, **named)
            except LoopTimed:
                for loading, rates in timed.results.items():
                    counted = {"flops_per_sample": flops, "flops_per_s": flops * rates["samples_per_s"]}
                    add(entry | {"loading": loading} | rates | counted)
            except RuntimeError as error:  # also the compiler's errors, and a GPU without free memory
                if not args.sweep:
                    raise
                add(entry | {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
            sampler.close()
        if not remaining or stage == "decoder":  # the last one that a script trains
            raise StagesMeasured

    own_args = module.Args(**{field.name: getattr(args, field.name) for field in fields(module.Args)})
    module.train = timed_train
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(StagesMeasured):
            module.main(replace(own_args, runs_dir=Path(folder), checkpoint_every=10**9, track=False))
    finally:
        module.train = train
    if remaining:
        raise UserError(f"--trainings {' '.join(sorted(remaining))}: {args.script}.py trains {', '.join(seen)}")


def variants(args: Any) -> list[tuple[str, Any]]:
    """What to measure: the arguments as they are and, in a sweep, the other combinations and the first once more."""
    layouts = (args.channels_last, not args.channels_last)
    combinations = [(mode, layout) for mode in (args.compile, not args.compile) for layout in layouts]
    chosen = [("baseline", combinations[0])]
    if args.sweep:
        chosen += [("variant", combination) for combination in combinations[1:]]
        chosen += [("baseline again", combinations[0])]
    return [(name, replace(args, compile=mode, channels_last=layout)) for name, (mode, layout) in chosen]


def line(entry: dict[str, Any]) -> str:
    """A measurement as a line."""
    switches = [f"{name} {'on' if entry[name] else 'off'}" for name in ("compile", "channels_last")]
    start = ", ".join([entry["variant"], *switches, entry["stage"]])
    if "error" in entry:
        return f"{start}: {entry['error']}"
    low, high = min(entry["samples_per_s_windows"]), max(entry["samples_per_s_windows"])
    mfu = ", ".join(f"{100 * share:.1f}% of {name}" for name, share in entry["mfu"].items())
    return (
        f"{start}, loading {entry['loading']}: {entry['samples_per_s']:,.1f} samples/s ({low:,.1f} to {high:,.1f}), "
        f"{entry['flops_per_s'] / 1e9:,.1f} GFLOP/s, MFU {mfu}, peak {entry['peak_memory_gib']:.2f} GiB"
    )


def main(args: Any) -> None:
    module, device = importlib.import_module(args.script), runs.choose_device(args.device)
    result: dict[str, Any] = about("benchmarks.throughput", args) | {"complete": False}
    if args.loading or args.sharing:
        result["measurements"] = measure_loading(args, module) if args.loading else measure_sharing(args)
        if args.out is not None:
            write_json(args.out, result | {"complete": True})
        return
    result |= {"peaks": measure_peaks(device, args.window_seconds), "measurements": []}
    for name, peak in result["peaks"].items():
        print(f"{name}: {peak['flops_per_s'] / 1e9:,.1f} GFLOP/s ({peak['what']})")

    def save() -> None:
        if args.out is not None:
            write_json(args.out, result)

    def add(variant: str, changed: Any, entry: dict[str, Any]) -> None:
        entry = {"variant": variant, "compile": changed.compile, "channels_last": changed.channels_last} | entry
        if "flops_per_s" in entry:
            peaks = result["peaks"].items()
            entry["mfu"] = {name: entry["flops_per_s"] / peak["flops_per_s"] for name, peak in peaks}
        result["measurements"].append(entry)
        print(line(entry), flush=True)
        save()

    for variant, changed in variants(args):
        measure_variant(changed, module, device, partial(add, variant, changed))
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    result["complete"] = True
    save()


if __name__ == "__main__":
    cli(main, defaults)
