#!/usr/bin/env bash
# install_system.sh: the programs that the tests start and that pip cannot bring.
#
# Does nothing where all are there. As root on a Debian system it installs the missing ones; elsewhere it names
# them and fails.
set -euo pipefail

# What proves that the package is there: a command, or a Python module after "py:".
needs=(
    "cc              gcc"
    "py:ensurepip    python3-venv"
    "prometheus      prometheus"
    "promtool        prometheus"
    "chromium        chromium"
    "amtool          prometheus-alertmanager"
    "systemd-analyze systemd"
    "zsh             zsh"
)
python=${PYTHON:-python3}

present() {
    case $1 in
        py:*) "$python" -c "import ${1#py:}" 2>/dev/null ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

missing=()
for need in "${needs[@]}"; do
    read -r proof package <<<"$need"
    present "$proof" || missing+=("$package")
done
# gcc without the C library's headers compiles nothing.
echo '#include <stdio.h>' | cc -E - >/dev/null 2>&1 || missing+=(gcc libc6-dev)
((${#missing[@]})) || exit 0

mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    echo "the tests need these packages: ${missing[*]}" >&2
    echo "on Debian: sudo apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
fi

# The tests start their own servers; the packages' services must not take the ports first.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --no-install-recommends "${missing[@]}" >/dev/null
