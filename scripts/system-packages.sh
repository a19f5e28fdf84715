#!/usr/bin/env bash
# Installs the Debian packages that pdq needs beside Python, as root; without root it says which to install.
#   scripts/system-packages.sh         for the demo
#   scripts/system-packages.sh test    for the tests, too
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"
python="${PYTHON:-python3}"

libraries="$(ldconfig -p 2>/dev/null)" # no pipe into grep -q: it ends first, and pipefail takes that for a failure
has_library() { [[ "$libraries" == *"$1"* ]]; }
has_command() { command -v "$1" >/dev/null 2>&1; }

needed=()
has_library libibverbs.so.1 || needed+=(libibverbs1) # Mooncake's shared library
has_library libnuma.so.1 || needed+=(libnuma1)
has_library libcurl.so.4 || needed+=(libcurl4)
has_command "$python" || needed+=(python3)
"$python" -c "import ensurepip, venv" 2>/dev/null || needed+=(python3-venv)
if [ "${1:-}" = test ]; then
  has_command redis-server || needed+=(redis-server)
fi
wanted=()
has_command redis-cli || wanted+=(redis-tools) # for looking into the queue; nothing breaks without it

all=("${needed[@]}" "${wanted[@]}")
[ ${#all[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! has_command apt-get; then
  echo "System packages are missing. With Debian or Ubuntu:" >&2
  echo "  sudo apt-get install -y ${all[*]}" >&2
  echo "(elsewhere: the packages with libibverbs.so.1, libnuma.so.1, libcurl.so.4, Python >= 3.11, redis-cli)" >&2
  [ ${#needed[@]} -eq 0 ] && exit 0
  exit 1
fi

echo "installing system packages: ${all[*]}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
apt() { apt-get -qq -o Dpkg::Use-Pty=0 "$@" >"$log" 2>&1; }
export DEBIAN_FRONTEND=noninteractive
apt update || { sleep 5 && apt update; } || { cat "$log" >&2 && exit 1; }
# RUNLEVEL=1: Debian must not start a Redis server of its own
RUNLEVEL=1 apt install -y --no-install-recommends "${all[@]}" || { cat "$log" >&2 && exit 1; }
