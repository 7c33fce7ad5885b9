#!/usr/bin/env bash
# Everything that needs a GPU in at most ten minutes, on a machine without a network.
#
#   benchmarks/gpu.sh pack BUNDLE_SCRIPT DAVIS_DIR EXPERT_DIR     here: fills .gpu_bundle/
#   benchmarks/gpu.sh run [OUT_DIR]                               there, from the repository's root
#
# pack: BUNDLE_SCRIPT OUT.tgz writes the simulators as a tar file of Python 3.12 packages; DAVIS_DIR is DAVIS 2017 in its
# official layout, EXPERT_DIR holds the LAOM experts. pip and apt-get need a network; SAM 2 is copied from the Python that
# PYTHON names (python3).
# run: makes cheetah-run data, trains LAPO and MaskLAM at the paper's network size on a short schedule and measures
# throughput, SAM 2.1's frames/s and what LAPO-Slots' pieces cost (random weights); every step has a time limit, and a
# failure is noted. OUT_DIR (default runs/gpu) gets gpu.json, which is written anew after every step, gpu.log and pictures.
#
# Environment of run: PYTHON (python3), GPU_SH_SECONDS (560: all steps together), GPU_SH_LAM_UPDATES (2000),
# GPU_SH_TINY=1 (a test of this script: tiny sizes, on a CPU, synthetic backgrounds, no bundle needed).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BUNDLE=.gpu_bundle
MAX_MIB=60
# Only for machines that lack one of them; there all are used.
EXTRA=(h5py tqdm imageio safetensors matplotlib contourpy cycler kiwisolver pillow pyparsing python-dateutil six packaging timm==1.0.31)
SAM_PACKAGES=(sam2 hydra omegaconf antlr4 iopath portalocker) # pure Python, mostly without wheels
GL_PACKAGES=(libegl1 libglvnd0 libopengl0 libgl1 libglx0 libgles2)

fail() {
    echo "gpu.sh: error: $*" >&2
    exit 1
}

pack() {
    [ $# -eq 3 ] || fail "usage: benchmarks/gpu.sh pack BUNDLE_SCRIPT DAVIS_DIR EXPERT_DIR"
    local bundle_script davis expert new temporary split name
    bundle_script=$(realpath "$1") davis=$(realpath "$2") expert=$(realpath "$3")
    [ -f "$expert/cheetah-run-expert/checkpoint.pt" ] || fail "$expert/cheetah-run-expert/checkpoint.pt is missing"
    temporary=$(mktemp -d)
    new=$temporary/bundle
    # shellcheck disable=SC2064  # the folder of now is meant
    trap "rm -rf '$temporary'" EXIT
    mkdir -p "$new" "$temporary/extra" "$temporary/wheels" "$temporary/gl"

    echo "simulators"
    bash "$bundle_script" "$new/simulators.tgz"

    echo "packages"
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        -d "$temporary/wheels" "${EXTRA[@]}"
    # Without its compiled parts it is a quarter of the size.
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --platform any -d "$temporary/wheels" fonttools
    for name in "$temporary/wheels"/*.whl; do python3 -m zipfile -e "$name" "$temporary/extra"; done
    (
        cd "$temporary/extra"
        rm -rf h5py/tests matplotlib/tests matplotlib/mpl-data/{sample_data,images,fonts/afm,fonts/pdfcorefonts}
        rm -rf matplotlib/backends/web_backend matplotlib/mpl-data/fonts/ttf/{STIX,cm}* timm/data/_info
    )
    tar cf - -C "$temporary/extra" . | gzip -9 >"$new/extra.tgz"

    echo "SAM 2"
    mkdir "$temporary/sam"
    "${PYTHON:-python3}" - "$temporary/sam" "${SAM_PACKAGES[@]}" <<'PYTHON_END' || fail "SAM 2 is not installed, see requirements-sam.txt"
import importlib.util
import shutil
import sys

for name in sys.argv[2:]:
    spec = importlib.util.find_spec(name)
    if spec is None:
        sys.exit(f"no package {name}")
    source = spec.submodule_search_locations[0]
    shutil.copytree(source, f"{sys.argv[1]}/{name}", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.cu"))
PYTHON_END
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d "$temporary/sam" pyyaml typing_extensions
    for name in "$temporary/sam"/*.whl; do python3 -m zipfile -e "$name" "$temporary/sam"; done
    rm "$temporary/sam"/*.whl
    tar cf - -C "$temporary/sam" . | gzip -9 >"$new/sam.tgz"

    echo "OpenGL's dispatch libraries"
    if (cd "$temporary/gl" && apt-get download -qq "${GL_PACKAGES[@]}"); then
        for name in "$temporary/gl"/*.deb; do dpkg -x "$name" "$temporary/gl"; done
        mkdir "$new/gl"
        cp -L "$temporary"/gl/usr/lib/x86_64-linux-gnu/*.so.* "$new/gl/"
    else
        echo "gpu.sh: warning: no packages of OpenGL; the machine must have libEGL" >&2
    fi

    echo "DAVIS clips and the expert"
    mkdir -p "$new/DAVIS/ImageSets/2017" "$new/DAVIS/JPEGImages/480p" "$new/experts/cheetah-run-expert"
    for split in train val; do # the Control Suite uses the first four clips of each split that are there
        sort "$davis/ImageSets/2017/$split.txt" | while read -r name; do
            if [ -d "$davis/JPEGImages/480p/$name" ]; then echo "$name"; fi
        done | sed -n 1,4p >"$new/DAVIS/ImageSets/2017/$split.txt"
        [ "$(wc -l <"$new/DAVIS/ImageSets/2017/$split.txt")" -eq 4 ] || fail "$davis has fewer than 4 $split clips"
        while read -r name; do
            cp -r "$davis/JPEGImages/480p/$name" "$new/DAVIS/JPEGImages/480p/"
        done <"$new/DAVIS/ImageSets/2017/$split.txt"
    done
    cp "$expert/cheetah-run-expert/checkpoint.pt" "$new/experts/cheetah-run-expert/"
    git rev-parse HEAD >"$new/commit"
    chmod -R u+w "$new"

    local mib
    mib=$(du -sm --apparent-size "$new" | cut -f1)
    du -sh --apparent-size "$new"/*
    [ "$mib" -le "$MAX_MIB" ] || fail "the bundle has $mib MiB, more than $MAX_MIB"
    rm -rf "$BUNDLE"
    mv "$new" "$BUNDLE"
    echo "$BUNDLE: $mib MiB"
}

# Writes OUT_DIR/gpu.json from what the steps have left in the working folder. Arguments: OUT_DIR, working folder.
collect() {
    "$PYTHON" - "$1" "$2" <<'PYTHON_END' || echo "gpu.sh: warning: gpu.json is not written" >&2
import json
import shutil
import sys
from pathlib import Path

from common import runs

out, work = Path(sys.argv[1]), Path(sys.argv[2])


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


result = {"command": "benchmarks/gpu.sh run", "commit": runs.git_commit(), "machine": read(work / "machine.json")}
if (bundled := Path(".gpu_bundle/commit")).exists() and result["commit"] is None:
    result["commit"] = f"{bundled.read_text().strip()} (when the bundle was packed)"
result |= {"versions": runs.versions(), "steps": {}}
for line in (work / "steps.tsv").read_text().splitlines():
    name, status, seconds, limit = line.split("\t")
    step = {"status": status, "seconds": float(seconds), "limit_seconds": float(limit)}
    log = work / "logs" / f"{name}.log"
    if status != "ok" and log.exists():
        step["log_tail"] = log.read_text(errors="replace").splitlines()[-15:]
    result["steps"][name] = step
for script in ("lapo", "masklam"):
    run = work / "runs" / script / "cheetah-run" / "gpu" / "seed1"
    if (found := read(run / "result.json")) is not None:
        keys = ("metrics", "seconds", "stages", "parameters", "peak_memory_gib", "labelled_transitions", "args")
        result[script] = {"complete": True} | {key: found.get(key) for key in keys}
        result[script]["dataset"] = found.get("dataset")
        result["gpu"] = found["machine"]["gpu"]
        if (run / "world_model.png").exists():
            shutil.copyfile(run / "world_model.png", out / f"{script}.png")
    elif (run / "metrics.jsonl").exists():
        newest = {}
        for line in (run / "metrics.jsonl").read_text().splitlines():
            entry = json.loads(line)
            newest[entry["stage"]] = entry
        result[script] = {"complete": False, "newest_metrics": newest}
for name in ("rendering", "sam", "slots_cost", *(f"throughput_{name}" for name in ("lapo", "laom_labels", "laof", "masklam"))):
    if (found := read(work / f"{name}.json")) is not None:
        result[name] = {key: value for key, value in found.items() if key not in ("versions", "machine", "commit")}
runs.write_json(out / "gpu.json", result)
PYTHON_END
}

# step NAME SECONDS COMMAND...: runs a command within its own limit and what is left of all steps' time; never fails.
step() {
    local name=$1 limit=$2 left start status seconds
    shift 2
    left=$((DEADLINE - SECONDS))
    # A busy CPU may take long for a test.
    [ "$limit" -le "$left" ] && [ "$TINY" != 1 ] || limit=$left
    if [ "$limit" -lt 10 ]; then
        printf '%s\tskipped, no time left\t0\t0\n' "$name" >>"$WORK/steps.tsv"
        STEP_OK=0
    else
        echo "== $name, at most $limit s: $*"
        start=$(date +%s.%N) status=0
        timeout --signal=TERM --kill-after=10 "$limit" "$@" >"$WORK/logs/$name.log" 2>&1 || status=$?
        seconds=$(echo "$start $(date +%s.%N)" | awk '{printf "%.1f", $2 - $1}')
        STEP_OK=0
        case $status in
            0) status=ok STEP_OK=1 ;;
            124 | 137 | 143) status="stopped at its limit" ;;
            *) status="failed with exit code $status" ;;
        esac
        printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$seconds" "$limit" >>"$WORK/steps.tsv"
        tail -n 12 "$WORK/logs/$name.log"
        echo "== $name: $status, $seconds s"
        { echo "== $name"; cat "$WORK/logs/$name.log"; } >>"$OUT_DIR/gpu.log"
    fi
    collect "$OUT_DIR" "$WORK"
}

run() {
    local site path cores name
    TINY=${GPU_SH_TINY:-0}
    OUT_DIR=${1:-runs/gpu}
    mkdir -p "$OUT_DIR"
    OUT_DIR=$(realpath "$OUT_DIR")
    PYTHON=${PYTHON:-python3}
    DEADLINE=$((SECONDS + ${GPU_SH_SECONDS:-560}))
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    mkdir "$WORK/logs"
    : >"$WORK/steps.tsv"
    : >"$OUT_DIR/gpu.log"
    cores=$(nproc)
    export PYTHONUNBUFFERED=1 MUJOCO_GL=${MUJOCO_GL:-egl} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

    if [ "$TINY" != 1 ]; then
        [ -d "$BUNDLE" ] || fail "$BUNDLE is missing: make it with benchmarks/gpu.sh pack"
        site=$WORK/site
        mkdir "$site"
        tar xzf "$BUNDLE/simulators.tgz" -C "$site"
        "$PYTHON" -c 'import h5py, imageio, matplotlib, safetensors, timm, tqdm' 2>>"$OUT_DIR/gpu.log" ||
            tar xzf "$BUNDLE/extra.tgz" -C "$site"
        "$PYTHON" -c 'import sam2' 2>>"$OUT_DIR/gpu.log" || tar xzf "$BUNDLE/sam.tgz" -C "$site"
        export PYTHONPATH=$PYTHONPATH:$site
        if [ -d "$BUNDLE/gl" ] && ! ldconfig -p | grep -q 'libEGL\.so\.1'; then
            cp -r "$BUNDLE/gl" "$WORK/gl"
            # find_library asks the linker's cache, which only root can extend.
            [ "$(id -u)" -ne 0 ] || ldconfig "$WORK/gl"
            export LD_LIBRARY_PATH=$WORK/gl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        fi
        if [ -z "${__EGL_VENDOR_LIBRARY_FILENAMES:-}" ] &&
            ! ls /usr/share/glvnd/egl_vendor.d/*nvidia* /etc/glvnd/egl_vendor.d/*nvidia* >/dev/null 2>&1; then
            path=$(find /usr /opt -name '*nvidia.json' -path '*egl_vendor.d*' 2>/dev/null | head -n 1 || true)
            [ -z "$path" ] || export __EGL_VENDOR_LIBRARY_FILENAMES=$path
        fi
    fi

    local data=$WORK/data lam=${GPU_SH_LAM_UPDATES:-2000}
    local make=(--train-transitions 100000 --test-transitions 10000 --episode-length 500 --quality full --render distractor
        --expert laom --expert-dir "$BUNDLE/experts" --backgrounds davis --davis-dir "$BUNDLE/DAVIS")
    local spare=(--train-transitions 100000 --test-transitions 10000 --episode-length 500 --quality fast --render distractor
        --backgrounds synthetic)
    local train=(--batch-size 512 --lam-updates "$lam" --policy-updates 1000 --decoder-updates 2000 --num-labels 10000
        --eval-episodes 16 --eval-envs 16 --clips-dir "$BUNDLE/DAVIS")
    local sweep=(--sweep --stages lam bc --windows 3 --window-seconds 1.5)
    local stages=(--windows 3 --window-seconds 1.5)
    local segment=(--sizes 1024 512 --rows package 1 8 16 8c --memory-frames 1000)
    local slots=(--clips 64 --frames 256 --seconds 5)
    local render=(--qualities full --kinds physics distractor both masks --windows 2 --window-seconds 1.5)
    if [ "$TINY" = 1 ]; then
        make=(--train-transitions 60 --test-transitions 20 --episode-length 20 --quality fast --render distractor
            --backgrounds synthetic)
        spare=("${make[@]}")
        train=(--quick --batch-size 8 --lam-updates 2 --policy-updates 2 --decoder-updates 2 --num-labels 20
            --eval-episodes 1 --eval-envs 1 --eval-steps 3 --device cpu)
        sweep=(--quick --batch-size 4 --stages lam --windows 1 --window-seconds 0.01 --warmup 1 --device cpu)
        stages=("${sweep[@]}" --stages decoder)
        slots=(--quick --device cpu --dino-image-size 28 --clips 1 --frames 1 --seconds 0.01)
        segment=(--sizes 128 --rows 1 2 --warmup 2 --frames 2 --memory-frames 3 --memory-size 128 --device cpu)
        render=(--qualities fast --kinds clean --windows 1 --window-seconds 0.01)
    fi

    step machine 60 "$PYTHON" -c \
        'import sys, pathlib; from common import runs; runs.write_json(pathlib.Path(sys.argv[1]), runs.machine())' \
        "$WORK/machine.json"
    step rendering 45 "$PYTHON" -m benchmarks.rendering --envs cheetah-run "${render[@]}" --out "$WORK/rendering.json"
    step dataset 150 "$PYTHON" make_dataset.py --env cheetah-run --data-dir "$data" --workers "$cores" "${make[@]}"
    if [ "$STEP_OK" = 0 ]; then # training still tells about speed
        data=$WORK/spare
        step dataset_spare 60 "$PYTHON" make_dataset.py --env cheetah-run --data-dir "$data" --workers "$cores" \
            "${spare[@]}"
    fi
    for name in lapo masklam; do
        step "$name" 240 "$PYTHON" "$name.py" --env cheetah-run --data-dir "$data" --runs-dir "$WORK/runs" \
            --variant gpu "${train[@]}"
    done
    step sam 130 "$PYTHON" -m benchmarks.sam "${segment[@]}" --out "$WORK/sam.json"
    # Networks and shapes are those of the training, so that its compiled code is found again.
    step throughput_masklam 100 "$PYTHON" -m benchmarks.throughput --script masklam --env cheetah-run \
        --data-dir "$data" "${sweep[@]}" --out "$WORK/throughput_masklam.json"
    for name in lapo laom_labels laof; do # LAOF with random flow, which is as large as RAFT's
        step "throughput_$name" 60 "$PYTHON" -m benchmarks.throughput --script "$name" --env cheetah-run \
            --data-dir "$data" "${stages[@]}" --out "$WORK/throughput_$name.json"
    done
    step slots_cost 150 "$PYTHON" -m benchmarks.slots_cost --env cheetah-run "${slots[@]}" --out "$WORK/slots_cost.json"
    echo "$OUT_DIR/gpu.json: $SECONDS s"
    cut -f1,2,3 "$WORK/steps.tsv"
}

case ${1:-} in
    pack | run) "$@" ;;
    *) fail "usage: benchmarks/gpu.sh pack BUNDLE_SCRIPT DAVIS_DIR EXPERT_DIR | benchmarks/gpu.sh run [OUT_DIR]" ;;
esac
