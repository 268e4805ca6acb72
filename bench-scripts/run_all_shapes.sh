#!/usr/bin/env bash
# run_all_shapes.sh -- ours and every installed peer on every shape of the speed table, in turns.
#
# Usage   bench-scripts/run_all_shapes.sh OUT_FOLDER [flags of bench-sweep]
# Takes   XTASK ("cargo xtask"; a prebuilt program needs no toolchain), OURS (target/release/bench), SHAPES, REPEATS (3),
#         STEPS (20); each program and shape in a process of its own
# Gives   OUT_FOLDER/table.md, results.json and speeds.svg
# Exit    0 good, 1 a program failed or was refused, 2 bad usage
set -euo pipefail
out=${1:?usage: run_all_shapes.sh OUT_FOLDER}
shift
here=$(dirname "$0")
# shellcheck disable=SC2086 -- the program may have words
exec ${XTASK:-cargo xtask} bench-sweep --bench "${OURS:-target/release/bench}" --scripts "$here" --out "$out" \
    --shapes "${SHAPES:-1x512,1x1024,4x512,8x512,4x1024,16x1024,64x1024}" --repeats "${REPEATS:-3}" \
    --steps "${STEPS:-20}" "$@"
