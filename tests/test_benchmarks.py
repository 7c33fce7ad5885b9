"""The benchmarks run at tiny size and their numbers are complete; operations are counted right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import rendering, throughput
from lapo import Encoder, ForwardModel

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
TINY = ["--windows", "2", "--window-seconds", "0.01"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=900)


def python(*arguments: str) -> subprocess.CompletedProcess:
    return run(sys.executable, "-m", *arguments)


def check_about(result: dict, module: str) -> None:
    assert result["command"].startswith(f"python -m {module}")
    assert result["versions"]["torch"] == torch.__version__.split("+")[0]
    assert result["machine"]["cores"] == os.cpu_count()
    assert "commit" in result


@pytest.mark.parametrize("script", throughput.SCRIPTS)
def test_throughput(script, tmp_path):
    out = tmp_path / "throughput.json"
    options = ["--quick", "--batch-size", "4", "--warmup", "1", "--device", "cpu", "--latent-dim", "16", *TINY]
    done = python("benchmarks.throughput", "--script", script, *options, "--data-dir", str(tmp_path), "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    check_about(result, "benchmarks.throughput")
    assert result["complete"] and result["data"] == "random frames"
    measured = {(entry["stage"], entry["loading"]): entry for entry in result["measurements"]}
    assert set(measured) == {(s, kind) for s in ("lam", "labels", "bc", "decoder") for kind in ("included", "excluded")}
    assert set(result["peaks"]) == {"convolution", "convolution, with gradients"}
    for entry in measured.values():
        assert len(entry["samples_per_s_windows"]) == 2
        low, high = min(entry["samples_per_s_windows"]), max(entry["samples_per_s_windows"])
        assert 0 < low <= entry["samples_per_s"] <= high
        assert entry["peak_memory_gib"] > 0.05
        assert entry["flops_per_s"] == pytest.approx(entry["flops_per_sample"] * entry["samples_per_s"])
        for name, peak in result["peaks"].items():
            assert entry["mfu"][name] == pytest.approx(entry["flops_per_s"] / peak["flops_per_s"])
    # Labelling is the IDM's forward pass, of which stage 1 does about three and the FDM's more.
    assert measured["lam", "included"]["flops_per_sample"] > 3 * measured["labels", "included"]["flops_per_sample"]
    for entry in measured.values():
        assert f"{entry['samples_per_s']:,.1f}" in done.stdout


def test_throughput_sweep_repeats_the_baseline():
    args = throughput.defaults(["--script", "lapo", "--device", "cpu", "--quick"])
    args.sweep = True
    chosen = [(name, changed.compile, changed.channels_last) for name, changed in throughput.variants(args)]
    assert chosen[0] == ("baseline", False, True)
    assert chosen[-1] == ("baseline again", False, True)
    assert {(mode, layout) for _, mode, layout in chosen[1:-1]} == {(False, False), (True, True), (True, False)}


def test_throughput_takes_the_scripts_defaults():
    args = throughput.defaults(["--script", "masklam", "--env", "reach", "--device", "cpu"])
    assert (args.batch_size, args.max_offset, args.compile) == (128, 10, False)
    assert throughput.defaults(["--quick", "--device", "cuda"]).compile


def test_throughput_errors_are_one_line():
    done = python("benchmarks.throughput", "--windows", "0")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "throughput.py: error: --windows and --warmup must be at least 1, and --stages needs one stage"
    ]


def encoder_macs(in_channels: int, scale: int, size: int, out_dim: int) -> tuple[int, int]:
    """Multiply-adds of an encoder's forward pass, and those of its first convolution, by hand."""
    first = size**2 * 9 * in_channels * 16 * scale
    total, channels, width = 0, in_channels, size
    for out in (16 * scale, 32 * scale, 32 * scale):
        total += width**2 * 9 * channels * out
        width //= 2
        total += 4 * width**2 * 9 * out * out  # two residual blocks of two convolutions
        channels = out
    return total + 32 * scale * width**2 * out_dim, first


def test_flops_of_an_encoder_match_a_count_by_hand():
    macs, first = encoder_macs(9, 2, 32, 24)
    network, x = Encoder(9, 2, 32, 24), torch.randn(3, 9, 32, 32)
    assert throughput.count_flops(lambda: network(x).sum(), backward=False) == 3 * 2 * macs
    # Backward computes the gradients of weights and inputs, but none of the first convolution's input.
    assert throughput.count_flops(lambda: network(x).sum(), backward=True) == 3 * 2 * (3 * macs - first)


def test_flops_of_a_forward_model_match_a_count_by_hand():
    size, z_dim, scale = 32, 5, 1
    trunk, first = encoder_macs(9, scale, size, 0)
    shape = 32 * scale * (size // 8) ** 2
    action, decoder, width, channels = z_dim * shape, 0, size // 8, 64 * scale
    for out in (32 * scale, 32 * scale, 16 * scale):
        decoder += width**2 * 4 * channels * out
        width *= 2
        decoder += 4 * width**2 * 9 * out * out
        channels = out
    decoder += width**2 * channels * 3
    network = ForwardModel(9, scale, size, z_dim)
    x, z = torch.randn(2, 9, size, size), torch.randn(2, z_dim, requires_grad=True)
    macs = trunk + action + decoder
    assert throughput.count_flops(lambda: network(x, z).sum(), backward=False) == 2 * 2 * macs
    assert throughput.count_flops(lambda: network(x, z).sum(), backward=True) == 2 * 2 * (3 * macs - first)


def test_paper_size_costs_what_is_known():
    # With masks as fourth channels: 0.51 and 4.25 GMAC per sample at 64 pixels, scale 4 and 6.
    idm, fdm = Encoder(24, 4, 64, 128), ForwardModel(12, 6, 64, 128)
    x, z = torch.randn(1, 24, 64, 64), torch.randn(1, 128)
    assert throughput.count_flops(lambda: idm(x), backward=False) / 2e9 == pytest.approx(0.51, abs=0.01)
    assert throughput.count_flops(lambda: fdm(x[:, :12], z), backward=False) / 2e9 == pytest.approx(4.25, abs=0.01)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA T4", None),
    ],
)
def test_peak_of_a_card(name, tera):
    peak = throughput.card_peak(name)
    assert peak == (None if tera is None else pytest.approx(tera * 1e12))


def test_rendering(tmp_path):
    out = tmp_path / "rendering.json"
    flags = ["--envs", "cheetah-run", "reach", "--settings", "--image-size", "32", "--out", str(out)]
    done = python("benchmarks.rendering", *flags, *TINY)
    if "OpenGL" in done.stderr and done.returncode == 1:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    check_about(result, "benchmarks.rendering")
    measured = {(entry["env"], entry["kind"], entry["quality"]): entry for entry in result["measurements"]}
    kinds = {(kind, quality) for kind in ("clean", "distractor", "both", "masks") for quality in ("full", "fast")}
    kinds |= {("clean", f"full without {setting}") for setting in rendering.SETTINGS}
    kinds |= {("physics", "full"), ("mujoco", "as shipped")}
    assert set(measured) == {(env, *kind) for env in ("cheetah-run", "reach") for kind in kinds}
    for (_, kind, _), entry in measured.items():
        views = {"physics": 0, "mujoco": 1, "clean": 1, "distractor": 1, "both": 2, "masks": 2}[kind]
        assert min(entry[key] for key in ("states_per_s", "states_per_cpu_s", "reset_seconds")) > 0
        assert entry["frames_per_s"] == pytest.approx(views * entry["states_per_s"])
        assert (entry["renderer"] is None) == (kind == "physics")


def test_rendering_refuses_an_unknown_task():
    done = python("benchmarks.rendering", "--envs", "cheetah")
    assert done.returncode == 1
    assert done.stderr.startswith("rendering.py: error: unknown task 'cheetah'")
    assert len(done.stderr.strip().splitlines()) == 1


def test_gpu_script_runs_at_tiny_size(tmp_path):
    settings = {"PYTHON": sys.executable, "GPU_SH_TINY": "1", "GPU_SH_SECONDS": "850"}
    done = run("bash", "benchmarks/gpu.sh", "run", str(tmp_path), **settings)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    steps = {name: step["status"] for name, step in result["steps"].items()}
    names = ["machine", "rendering", "dataset", "lapo", "masklam", "sam", "throughput_masklam"]
    names += [*(f"throughput_{script}" for script in ("lapo", "laom_labels", "laof")), "slots_cost"]
    assert steps == dict.fromkeys(names, "ok"), (tmp_path / "gpu.log").read_text()[-3000:]
    for script in ("lapo", "masklam"):
        assert result[script]["complete"]
        assert result[script]["metrics"]["eval/nmse"] > 0
        assert result[script]["stages"]["lam"]["samples_per_s"] > 0
        assert (tmp_path / f"{script}.png").stat().st_size > 1000
    for script in throughput.SCRIPTS:
        assert result[f"throughput_{script}"]["measurements"][0]["mfu"]["convolution"] > 0
    assert result["rendering"]["measurements"][0]["states_per_s"] > 0
    assert all(piece["per_second"] > 0 for piece in result["slots_cost"]["pieces"].values())
    assert [row["frames_per_s"] > 0 for row in result["sam"]["rows"]] == [True, True]
    assert [point["frame"] for point in result["sam"]["memory"]["points"]] == [1, 3]
    assert result["machine"]["cores"] == os.cpu_count()


def test_gpu_script_notes_what_had_no_time(tmp_path):
    done = run(
        "bash", "benchmarks/gpu.sh", "run", str(tmp_path), PYTHON=sys.executable, GPU_SH_TINY="1", GPU_SH_SECONDS="11"
    )
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert steps["masklam"]["status"] == "skipped, no time left"


@pytest.mark.parametrize("arguments", [[], ["pack"], ["unknown"], ["pack", "a", "b", "/nonexistent"]])
def test_gpu_script_explains_its_use(arguments):
    done = run("bash", "benchmarks/gpu.sh", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu.sh: error: ")
    assert len(done.stderr.strip().splitlines()) == 1
