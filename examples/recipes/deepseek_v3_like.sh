#!/usr/bin/env bash
# Like DeepSeek-V3: 671 B parameters, 37 B active, latent attention, a shared expert, 256 experts in
# groups whose load a bias balances, three dense layers; in bf16, without multi-token prediction.
# Needs Transformer Engine.
#
# Layout: 16 pipeline stages of four layers, the last of one layer and the loss; in each stage eight of
# the 256 experts on each of 32 GPUs (EP 32, four nodes), attention data-parallel over the same GPUs.
# 64 nodes are the least; a further 64 halve what the optimizer takes.
set -euo pipefail

GPUS=${GPUS:-8}
NODES=${NODES:-64}
FLAGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
    --moe-layer-freq "([0]*3+[1]*58)" --moe-shared-expert-intermediate-size 2048
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-dtype fp32
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rope-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --moe-grouped-gemm

    --pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1
    --expert-model-parallel-size 32 --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1

    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 4096
    --train-iters 100000 --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.1 --bf16
    --tokenizer-type NullTokenizer --vocab-size 129280
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
