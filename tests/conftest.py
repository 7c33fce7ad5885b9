"""Fixtures of several test files."""

import signal
from collections.abc import Iterator
from pathlib import Path

import methods
import planted
import pytest
import torch

from common import cli
from common.dataset import Dataset

# A shell makes what it starts in the background ignore a Ctrl-C, nohup the end of a terminal; tests send both.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    signal.signal(number, default)

torch.set_num_threads(1)  # sums are rounded alike whatever the number of cores, and workers do not wait for each other


@pytest.fixture(scope="module")
def planted_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small planted set, both splits."""
    return planted.write(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def train_set(planted_dir: Path) -> Dataset:
    """The train split of `planted_dir`."""
    return Dataset(planted_dir, "cheetah-run", "train")


@pytest.fixture
def signals() -> Iterator[None]:
    """This process takes signals as a script does, for the time of a test."""
    before = {number: signal.getsignal(number) for number in methods.STOPS}
    cli.install_signal_handlers()
    yield
    cli._stop_signal = None
    for number, handler in before.items():
        signal.signal(number, handler)
