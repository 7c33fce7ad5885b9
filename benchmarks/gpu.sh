#!/usr/bin/env bash
# Everything that needs a GPU in at most ten minutes, on a machine that may lack a network: benchmarks/gpu.sh run [OUT_DIR]
#
# Makes cheetah-run data, trains LAPO and MaskLAM at the paper's network size on a short schedule, and measures rendering,
# throughput of all methods and SAM 2.1 (random weights). Every step has a time limit; a failure is noted, the rest goes on.
# OUT_DIR (default runs/gpu) gets steps.tsv, gpu.log, a JSON file per measurement and the runs' results and pictures;
# OUT_DIR.tgz holds all of it. What is worth most comes first.
#
# .gpu_bundle/, if there is one, has what the machine lacks: simulators.tgz, extra.tgz, sam.tgz (Python packages), gl/
# (OpenGL's dispatch libraries), DAVIS/, experts/ (LAOM's), commit (of the code). Without it requirements.txt must be
# installed, and the data has synthetic backgrounds and this project's own expert.
#
# Environment: PYTHON (python3), GPU_SH_SECONDS (560: all steps together), GPU_SH_LAM_UPDATES (500), GPU_SH_TINY=1 (a test
# of this script: tiny sizes, on a CPU, without the bundle).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" != run ] || [ $# -gt 2 ]; then
    echo "gpu.sh: error: usage: benchmarks/gpu.sh run [OUT_DIR]" >&2
    exit 1
fi
BUNDLE=.gpu_bundle
PYTHON=${PYTHON:-python3}
TINY=${GPU_SH_TINY:-0}
DEADLINE=$((SECONDS + ${GPU_SH_SECONDS:-560}))
mkdir -p "${2:-runs/gpu}"
OUT_DIR=$(realpath "${2:-runs/gpu}")
: >"$OUT_DIR/steps.tsv"
: >"$OUT_DIR/gpu.log"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"; tar czf "$OUT_DIR.tgz" -C "$OUT_DIR" .' EXIT
export PYTHONUNBUFFERED=1 MUJOCO_GL=${MUJOCO_GL:-egl} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# Unpacks what this machine lacks. Argument: a folder for it.
use_bundle() {
    local folder=$1 path
    mkdir "$folder"
    tar xzf "$BUNDLE/simulators.tgz" -C "$folder"
    "$PYTHON" -c 'import h5py, imageio, matplotlib, safetensors, timm, tqdm' 2>>"$OUT_DIR/gpu.log" ||
        tar xzf "$BUNDLE/extra.tgz" -C "$folder"
    "$PYTHON" -c 'import sam2' 2>>"$OUT_DIR/gpu.log" || tar xzf "$BUNDLE/sam.tgz" -C "$folder"
    export PYTHONPATH=$PYTHONPATH:$folder
    cp "$BUNDLE/commit" "$OUT_DIR/commit" # records have none where the code lies without its repository
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
}

# step NAME SECONDS COMMAND...: runs a command within its own limit and what is left of all steps' time. Fails with it.
step() {
    local name=$1 limit=$2 left=$((DEADLINE - SECONDS)) start=$SECONDS status=0
    shift 2
    # A busy CPU may take long for a test.
    [ "$limit" -le "$left" ] && [ "$TINY" != 1 ] || limit=$left
    echo "== $name, at most $limit s: $*" | tee -a "$OUT_DIR/gpu.log"
    if [ "$limit" -lt 10 ]; then
        status="skipped, no time left"
    else
        timeout --signal=TERM --kill-after=10 "$limit" "$@" >"$WORK/log" 2>&1 || status=$?
        case $status in
            0) status=ok ;;
            124 | 137 | 143) status="stopped at its limit" ;;
            *) status="failed with exit code $status" ;;
        esac
        cat "$WORK/log" >>"$OUT_DIR/gpu.log"
        tail -n 12 "$WORK/log"
    fi
    printf '%s\t%s\t%s s\n' "$name" "$status" $((SECONDS - start)) | tee -a "$OUT_DIR/steps.tsv"
    [ "$status" = ok ]
}

# speed NAME SCRIPT SECONDS FLAGS...: a step that measures the throughput of a method script.
speed() {
    local name=throughput_$1 script=$2 limit=$3
    shift 3
    step "$name" "$limit" "$PYTHON" -m benchmarks.throughput --script "$script" --data-dir "$WORK/small" "${windows[@]}" \
        --out "$OUT_DIR/$name.json" "$@" || true
}

data=$WORK/large labels=10000
make=(--render distractor --workers "$(nproc)")
large=(--train-transitions 50000 --test-transitions 5000 --episode-length 500)
small=(--train-transitions 2000 --test-transitions 500 --episode-length 100 --quality fast --backgrounds synthetic)
train=(--batch-size 512 --lam-updates "${GPU_SH_LAM_UPDATES:-500}" --policy-updates 300 --decoder-updates 1000
    --eval-episodes 16 --eval-envs 16 --eval-steps 300)
windows=(--windows 3 --window-seconds 1.5 --num-labels 2000)
render=(--qualities full --kinds physics distractor both masks --windows 2 --window-seconds 1.5)
segment=(--sizes 1024 512) sweep=(--sweep --trainings lam policy)
if [ "$TINY" = 1 ]; then
    data=$WORK/small labels=20 # one set will do
    large=(--train-transitions 60 --test-transitions 20 --episode-length 10 --quality fast --backgrounds synthetic)
    small=("${large[@]}")
    train=(--quick --batch-size 8 --lam-updates 2 --policy-updates 2 --decoder-updates 2 --eval-episodes 1 --eval-envs 1
        --eval-steps 3 --device cpu)
    windows=(--quick --batch-size 4 --windows 1 --window-seconds 0.01 --warmup 1 --num-labels 60 --device cpu)
    render=(--qualities fast --kinds clean --windows 1 --window-seconds 0.01)
    segment=(--sizes 64 --batches 1 2 --compiled-batches None --warmup 2 --frames 2 --device cpu)
    sweep=(--trainings lam)
elif [ -d "$BUNDLE" ]; then
    use_bundle "$WORK/packages"
    large+=(--expert laom --expert-dir "$BUNDLE/experts" --davis-dir "$BUNDLE/DAVIS")
    train+=(--clips-dir "$BUNDLE/DAVIS")
    windows+=(--clips-dir "$BUNDLE/DAVIS")
else
    large+=(--backgrounds synthetic)
fi

step dataset_small 60 "$PYTHON" make_dataset.py --data-dir "$WORK/small" "${make[@]}" "${small[@]}" || true
speed lapo lapo 60
speed masklam masklam 60
if ! step dataset 120 "$PYTHON" make_dataset.py --data-dir "$data" "${make[@]}" "${large[@]}"; then
    data=$WORK/small labels=2000 # training still tells about speed
fi
for method in masklam lapo; do
    step "$method" 120 "$PYTHON" "$method.py" --data-dir "$data" --runs-dir "$WORK/runs" --variant gpu \
        --num-labels "$labels" "${train[@]}" || true
    mkdir -p "$OUT_DIR/$method"
    cp "$WORK/runs/$method/cheetah-run/gpu/seed1"/*.{json,jsonl,png} "$OUT_DIR/$method/" || true
done
# As at paper scale, where a GPU does not hold the data; of two --data-dir the last one counts.
speed from_disk lapo 45 --trainings lam --data-on-gpu never --data-dir "$data"
step sam 120 "$PYTHON" -m benchmarks.sam "${segment[@]}" --out "$OUT_DIR/sam.json" || true
step rendering 45 "$PYTHON" -m benchmarks.rendering --envs cheetah-run "${render[@]}" \
    --out "$OUT_DIR/rendering.json" || true
# On the small set: what LAOF and LAPO-Slots compute once for every frame takes seconds there.
speed laom_labels laom_labels 90 --trainings lam
step raft_weights 30 "$PYTHON" -c 'import sys, torch; from torchvision.models.optical_flow import raft_small
torch.save(raft_small().state_dict(), sys.argv[1])' "$WORK/raft.pth" || true
speed laof laof 90 --trainings lam --raft small --raft-checkpoint "$WORK/raft.pth"
speed lapo_slots lapo_slots 90 --trainings slots --dino-weights random
speed compile_modes masklam 90 "${sweep[@]}"
echo "$OUT_DIR after $SECONDS s:"
cat "$OUT_DIR/steps.tsv"
