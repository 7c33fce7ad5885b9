"""Fixtures of several test files."""

from pathlib import Path

import planted
import pytest

from common.dataset import Dataset


@pytest.fixture(scope="module")
def planted_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small planted set, both splits."""
    return planted.write(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def train_set(planted_dir: Path) -> Dataset:
    """The train split of `planted_dir`."""
    return Dataset(planted_dir, "cheetah-run", "train")
