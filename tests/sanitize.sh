#!/usr/bin/env bash
# Runs the package's kernels under NVIDIA's compute-sanitizer, at small sizes; needs a GPU.
# usage: tests/sanitize.sh [TOOL...]    memcheck and racecheck by default; synccheck, initcheck
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Of the CUDA toolkit, or of `pip install nvidia-cuda-sanitizer-api`.
PATH="$PATH:$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13/bin"
if ! command -v compute-sanitizer; then
    echo "compute-sanitizer is missing: install the CUDA toolkit, or pip install" \
        "nvidia-cuda-sanitizer-api" >&2
    exit 1
fi

# Each tensor an allocation of its own, or memcheck sees no access between two of them.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
options=(
    --error-exitcode 1
    --target-processes all
    --kernel-name 'regex=^_[a-z]' # ours; names of torch's and cuBLAS's kernels begin otherwise
    --num-cuda-barriers 64 # those of Triton and Gluon are not in the compiler's information
    --report-api-errors no
)
if [[ $(compute-sanitizer --help) == *--check-tensor-ops* ]]; then # not all releases know it
    options+=(--check-tensor-ops yes)
fi
# Of the Hopper kernels and the plain ones: tiles that end inside, rows not in use, no rows at all.
cases="no-tokens or dropped-slots or past-the-end or one-token-more or not-multiples or several-tiles"
tests=(
    tests/test_index_lists.py tests/test_experts.py tests/test_fp8_store.py
    -k "example or unchecked or gradient_accumulation_fusion or bfloat16 and ($cases)"
)
# A fault that the tool has to find, or it sees nothing.
must_find() { # TOOL SCRIPT PATTERN
    local found
    found=$(compute-sanitizer --tool "$1" "${options[@]}" python3 "$2" 2>&1 || true)
    if [[ ! $found =~ $3 ]]; then
        echo "$found"
        echo "$1 does not find what $2 does wrong: it sees nothing" >&2
        exit 1
    fi
}
(($#)) || set -- memcheck racecheck
for tool in "$@"; do
    echo "== $tool"
    plugin=()
    case $tool in
        memcheck) must_find memcheck tests/out_of_bounds.py 'Invalid __global__ write.*_out_of_bounds' ;;
        racecheck)
            must_find racecheck tests/race.py 'Race reported.*_race_kernel'
            plugin=(-p racecheck)
            ;;
    esac
    PYTHONPATH="tests:${PYTHONPATH:-}" compute-sanitizer --tool "$tool" "${options[@]}" \
        python3 -m pytest -q "${plugin[@]}" "${tests[@]}"
done
