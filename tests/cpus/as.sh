#!/usr/bin/env bash
# Runs a command as on another CPU of the same kind: with instructions taken away, or with a given library for products
# of float32 matrices.
#
#   bash tests/cpus/as.sh avx2 make test
#
#   avx2     no AVX-512, as on most laptops
#   avx512   no instructions for bfloat16, as on an Intel Xeon of 2017 to 2019
#   mkl      MKL multiplies, as the product chooses on an Intel CPU
#   onednn   oneDNN multiplies, as the product chooses on an AMD CPU with AVX-512
set -euo pipefail

case $1 in
  avx2)
    export ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
    hidden='avx512 avx512_bf16 amx_tile amx_fp16 vnni'
    ;;
  avx512)
    export ATEN_CPU_CAPABILITY=avx512 MKL_ENABLE_INSTRUCTIONS=AVX512 ONEDNN_MAX_CPU_ISA=AVX512_CORE
    hidden='avx512_bf16 amx_tile amx_fp16'
    ;;
  mkl | onednn)
    export GRPO_FLOAT32_PRODUCTS=$1
    hidden=''
    ;;
  *)
    sed -n '2,11s/^# \?//p' "$0" >&2
    exit 2
    ;;
esac
shift
# vLLM asks torch: sitecustomize.py hides them there.
HIDDEN_INSTRUCTIONS=$hidden PYTHONPATH=$(dirname "$(realpath "$0")")${PYTHONPATH:+:$PYTHONPATH} exec "$@"
