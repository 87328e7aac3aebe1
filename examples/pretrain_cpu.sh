#!/usr/bin/env bash
# Twenty iterations of a two-layer MoE GPT on random tokens: a check that all is in place, without
# a GPU and without data, in about ten seconds. Further arguments are passed on to Megatron:
#
#   examples/pretrain_cpu.sh --moe-token-dispatcher-type alltoall
set -euo pipefail

CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 exec torchrun --standalone --nproc-per-node 1 \
    -m moeblaze_megatron --moe-token-dispatcher-type moeblaze \
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --swiglu --disable-bias-linear --normalization RMSNorm \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 \
    --train-iters 20 --lr 3e-3 --lr-decay-style constant --clip-grad 1.0 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0 \
    --log-interval 1 --eval-interval 20 --eval-iters 1 \
    "$@"
