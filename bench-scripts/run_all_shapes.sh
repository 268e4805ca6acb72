#!/usr/bin/env bash
# run_all_shapes.sh -- ours and PyTorch's fastest modes on every shape of the speed table, shape by shape.
#
# Usage   bench-scripts/run_all_shapes.sh OUT_FOLDER
# Takes   OURS (target/release/bench), MODES ("graph reduce-overhead"), ATTENTION (cudnn), SHAPES, REPEATS (3),
#         STEPS (20); each shape in processes of its own
# Gives   OUT_FOLDER/BxT.json for each shape, and their tables in OUT_FOLDER/table.md
# Exit    that of the first shape that failed or was refused, after all shapes had their turn
set -u
out=${1:?usage: run_all_shapes.sh OUT_FOLDER}
here=$(dirname "$0")
mkdir -p "$out" || exit 2
: >"$out/table.md"
worst=0
for shape in ${SHAPES:-1x512 1x1024 4x512 8x512 4x1024 16x1024 64x1024}; do
    # shellcheck disable=SC2086 -- the modes are words
    python3 "$here/gpu_speed.py" --ours "${OURS:-target/release/bench}" --ours-arg=--tune --shapes "$shape" \
        --modes ${MODES:-graph reduce-overhead} --attention "${ATTENTION:-cudnn}" --repeats "${REPEATS:-3}" \
        --steps "${STEPS:-20}" --out "$out/$shape.json" | tee -a "$out/table.md"
    code=${PIPESTATUS[0]}
    if [ "$code" != 0 ]; then
        echo "$shape: exit code $code" | tee -a "$out/table.md"
        [ "$worst" != 0 ] || worst=$code
    fi
done
exit "$worst"
