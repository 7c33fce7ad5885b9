"""Bookkeeping of a training loop: metrics without waiting for the device, and all that resuming exactly takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common import evaluation
from common.cli import Progress
from common.dataset import Batch
from common.runs import Run, peak_memory_gib, reset_peak_memory


class Meter:
    """Adds up a stage's metrics on the device and reads them now and then: means, rate, and whether all is finite.

    Args:
        sampler: has batch_size and episodes(position).
        updates: of the whole stage.
        step, seconds: updates that were made before, and how long they took.
    """

    def __init__(
        self, run: Run, stage: str, model: nn.Module, sampler: Any, updates: int, step: int, seconds: float
    ) -> None:
        self.run, self.stage, self.model, self.sampler = run, stage, model, sampler
        late = [update for update in run.args.probe_at or () if stage == "lam" and update > updates]
        if late:
            print(f"warning: --probe-at {' '.join(map(str, late))}: stage 1 has {updates:,} updates", file=sys.stderr)
        self.progress = Progress(f"{run.script} {stage}", updates, "updates", done=step)
        self.saved = self.last_step = self.step = step
        self.last_time = time.monotonic()
        self._start = self.last_time - seconds
        reset_peak_memory(next(model.parameters()).device)
        self._sums: dict[str, Tensor] = {}
        # The first update since the last look whose loss was not finite; -1: none.
        self._first_bad = torch.full((), -1, device=next(model.parameters()).device)

    def add(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Counts an update."""
        self._first_bad = torch.where((self._first_bad < 0) & ~loss.isfinite(), self.step, self._first_bad)
        for name, value in metrics.items():
            self._sums[name] = (
                self._sums[name] + value if name in self._sums else value.clone()
            )  # a CUDA graph reuses it
        self.step += 1

    def report(self, rate: float) -> None:
        """Logs the means since the last call; the only wait for the device.

        Raises UserError, which names the update and its episodes, if a loss or a weight is not finite.
        """
        finite = torch.stack([parameter.isfinite().all() for parameter in self.model.parameters()]).all()
        first_bad = torch.where((self._first_bad < 0) & ~finite, self.step - 1, self._first_bad)
        *sums, bad = torch.stack([*self._sums.values(), first_bad.float()]).tolist()
        if bad >= 0:
            raise self.run.not_finite(self.stage, int(bad), self.sampler.episodes(int(bad)), self.saved)
        count, now = self.step - self.last_step, time.monotonic()
        values = {f"{self.stage}/{name}": total / count for name, total in zip(self._sums, sums)}
        values["lr"] = rate
        values["perf/samples_per_s"] = count * self.sampler.batch_size / (now - self.last_time)
        self.run.log(self.stage, self.step, values)
        self.progress.update(count, f"loss {values[f'{self.stage}/loss']:.4f}")
        self._sums, self.last_step, self.last_time = {}, self.step, now

    def probe(self, encode: Callable[[nn.Module, Batch], Tensor], fields: tuple[str, ...]) -> None:
        """Logs the NMSE of the model as it is now, if there are actions; the time that it takes is not the stage's.

        encode: the model and a batch, which has `fields`, to latent actions (B, d_z).
        """
        if not self.run.train_set.action_dim:
            return
        start = time.monotonic()
        windows = {"batch_size": self.run.args.batch_size, "device": self._first_bad.device, "fields": fields}
        self.model.eval()
        nmse = evaluation.probe_now(self.run, partial(encode, self.model), max_offset=1, **windows)
        self.model.train()
        self.run.log(self.stage, self.step, {f"{self.stage}/nmse": nmse})
        print(f"NMSE {nmse:.4f} after update {self.step:,}", flush=True)
        elapsed = time.monotonic() - start
        self._start, self.last_time = self._start + elapsed, self.last_time + elapsed

    def seconds(self) -> float:
        """How long the stage has been trained, also before it was resumed."""
        return time.monotonic() - self._start

    def cost(self) -> dict[str, float]:
        """What the whole stage took: seconds, updates, samples/s, peak memory, and the data's part of that."""
        seconds = self.seconds()
        return {
            "seconds": seconds,
            "updates": self.step,
            "samples_per_s": self.step * self.sampler.batch_size / seconds,
            "peak_memory_gib": peak_memory_gib(self._first_bad.device),
            "data_memory_gib": self.sampler.data_bytes / 2**30,
        }


def training_state(model: nn.Module, probe: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that decides how training goes on from here: weights, the optimizer's state and random numbers."""
    device = next(model.parameters()).device
    return {
        "model": model.state_dict(),
        "probe": probe.state_dict() if probe else None,
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def load_training_state(
    state: dict[str, Any], model: nn.Module, probe: nn.Module | None, optimizer: torch.optim.Optimizer
) -> None:
    """Puts back what `training_state` gave."""
    device = next(model.parameters()).device
    model.load_state_dict(state["model"])
    if probe:
        probe.load_state_dict(state["probe"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["random_cuda"], device)
