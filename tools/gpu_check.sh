#!/usr/bin/env bash
# Checks, on a machine with one GPU and in under four minutes, everything that only a GPU can show.
#
#     tools/gpu_check.sh                        all checks
#     tools/gpu_check.sh --only training        one of them
#     tools/gpu_check.sh --device cpu           on the CPU, to try the checks themselves
#
# Both extensions are built into a temporary folder, which is removed; nothing is installed and the
# network is not used. PYTHON is the Python that has PyTorch (python3). WHEELS is a folder of wheels
# for what that Python lacks, such as pydantic. Exit status: 0 if nothing failed, 1 if something did,
# 2 if there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
total=230  # seconds

say() { echo "gpu_check: $*" >&2; }

version=$("$python" -c 'import torch; print(torch.__version__)' 2>&1) || {
  say "$python has no PyTorch; set PYTHON to one that has: ${version##*$'\n'}"
  exit 1
}
case " $* " in
  *" --device cpu "*) ;;
  *)
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || {
      say "no CUDA GPU: torch $version finds none, nothing was checked"
      exit 2
    }
    ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/build" "$work/lib" "$work/site"

if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" \
    "$WHEELS"/*.whl
fi
export PYTHONPATH=$work/lib:$root:$work/site
missing=$("$python" -c '
import importlib.util as util
names = ("networkx", "numpy", "pydantic", "pytest", "rich", "setuptools", "sympy", "typer")
print(*(name for name in names if util.find_spec(name) is None))')
if [ -n "$missing" ]; then
  say "$python lacks $missing; put their wheels into a folder and set WHEELS to it"
  exit 1
fi

# Away from pyproject.toml, which only a recent setuptools understands, and from extensions that were
# built for another Python.
cp -r setup.py csrc "$work/build"
cp -r runtime/zero_runtime "$work/lib"
rm -f "$work"/lib/zero_runtime/*.so
say "building the extensions with torch $version"
(cd "$work/build" && "$python" setup.py build_ext --build-lib "$work/lib" --build-temp "$work/tmp") \
  >"$work/log" 2>&1 || true
grep -E '^zero_runtime: |[Ee]rror' "$work/log" >&2 || true
say "built $(cd "$work/lib/zero_runtime" && echo *.so) in $SECONDS s"

export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton
"$python" -m tools.gpu_check --seconds $((total - SECONDS > 1 ? total - SECONDS : 1)) "$@"
