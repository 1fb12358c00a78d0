#!/usr/bin/env bash
# The peers and the models of `make bench-gpu` on a machine where nothing can be installed.
#
#   benchmarks/gpu_wheels.sh fetch      here: download wheels (about 21 MiB) to .gpu/wheels
#   . benchmarks/gpu_wheels.sh unpack   there: unzip them to .gpu/site, put that behind everything on PYTHONPATH
#
# For Python 3.12 on Linux x86-64. torch and what flatscope itself needs must be there already; they are not replaced,
# and torchvision is not needed.
PACKAGES=(
    transformers tokenizers huggingface-hub safetensors
    curvlinops-for-pytorch pyhessian backpack-for-pytorch loss-landscapes
    linear_operator jaxtyping wadler_lindig opt-einsum einops einconv unfoldNd
    latex2mathml tqdm packaging pyyaml regex httpx2 httpcore2 h11 anyio sniffio certifi idna click typing-extensions filelock truststore
)

wheels_fetch() {
    ${PYTHON:-python3} -m pip download --quiet --no-deps --python-version 3.12 --only-binary=:all: \
        --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 \
        -d .gpu/wheels "${PACKAGES[@]}"
}

# Only what is missing is unpacked: a second copy of a package that torch stands on would hide the first.
wheels_unpack() {
    python3 - <<'PYTHON_END'
import importlib.util, pathlib, zipfile

site = pathlib.Path(".gpu/site")
for wheel in sorted(pathlib.Path(".gpu/wheels").glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        names = {n.split("/")[0] for n in archive.namelist()}
        modules = {n.removesuffix(".py") for n in names if "." not in n.removesuffix(".py")}
        if modules and all(importlib.util.find_spec(m) for m in modules):
            print("already here:", wheel.name.split("-")[0])
            continue
        archive.extractall(site)
PYTHON_END
    export PYTHONPATH="$PWD/src:$PWD:${PYTHONPATH:+$PYTHONPATH:}$PWD/.gpu/site"
}

case "${1:-}" in
    fetch) wheels_fetch ;;
    unpack) wheels_unpack ;;
    *) echo "usage: benchmarks/gpu_wheels.sh fetch | . benchmarks/gpu_wheels.sh unpack" ;;
esac
