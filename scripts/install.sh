#!/usr/bin/env bash
# Makes .venv and installs pdq into it, once per content of pyproject.toml.
#   scripts/install.sh sim | local | dev     sim: no torch; local: the torch runner; dev: local and the tools for tests
set -euo pipefail
cd "$(dirname "$0")/.."
kind="$1"
python="${PYTHON:-python3}"
pip=(.venv/bin/python -m pip --disable-pip-version-check)
hash="$(sha256sum pyproject.toml scripts/install.sh | sha256sum | cut -c1-16)"

is_done() { [ "$(cat ".venv/.installed-$1" 2>/dev/null)" = "$hash" ]; }

case "$kind" in
  sim) extras=sim; is_done sim || is_done local || is_done dev && exit 0 ;;
  local) extras=local; is_done local || is_done dev && exit 0 ;;
  dev) extras=local,dev; is_done dev && exit 0 ;;
  *) echo "usage: $0 sim|local|dev" >&2; exit 2 ;;
esac

if ! "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))"; then
  echo "pdq needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Name another: make PYTHON=python3.12 ..." >&2
  exit 1
fi
[ -x .venv/bin/python ] || { echo "making the virtual environment .venv" && "$python" -m venv .venv; }

if [ "$kind" != sim ] && ! .venv/bin/python scripts/torch_is_cpu.py; then
  exit 1
fi

echo "installing pdq [$extras] into .venv (the first time takes a few minutes)"
if [ -t 1 ]; then
  "${pip[@]}" install -e ".[$extras]" # with pip's own progress bars
else
  "${pip[@]}" install -qq -e ".[$extras]"
fi
echo "$hash" >".venv/.installed-$kind"
