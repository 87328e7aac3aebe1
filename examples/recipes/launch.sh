# Sourced by the recipes, which set FLAGS, and GPUS and NODES as defaults. In the environment:
#
#   DATA=PREFIX       Megatron's indexed dataset, PREFIX.bin and PREFIX.idx; else random tokens
#   DISPATCHER=NAME   moeblaze (default), alltoall, ...
#   GPUS, NODES       GPUs of a node, nodes
#   SCRIPT=PATH       pretrain_gpt.py of a Megatron-LM checkout; else the package's own script
#   MASTER_ADDR, NODE_RANK   with several nodes and without Slurm, where torchrun runs on each
#
# `--dry-run` first prints the memory of each GPU with both dispatchers, and starts nothing.
# `--compare` first trains on one node with both dispatchers and reports; options of
# moeblaze_megatron.compare may follow, up to a `--`. Other arguments are added to Megatron's.

for NAME in GPUS NODES; do
    if [[ ! ${!NAME} =~ ^[1-9][0-9]*$ ]]; then
        echo "$0: $NAME=${!NAME} is not a number of 1 or more" >&2
        exit 2
    fi
done

if [[ ${1:-} == --dry-run ]]; then
    shift
    if [[ ${1:-} == --compare ]]; then
        echo "$0: --dry-run starts nothing, so leave --compare out, or --dry-run" >&2
        exit 2
    fi
    exec python -m moeblaze_megatron.estimate --processes $((GPUS * NODES)) "${FLAGS[@]}" "$@"
fi

if [[ -n ${DATA:-} ]]; then
    FLAGS+=(--data-path "$DATA" --split 98,2,0)
else
    FLAGS+=(--mock-data)
fi

if [[ ${1:-} == --compare ]]; then
    shift
    if [[ -n ${DISPATCHER:-} ]]; then
        echo "$0: leave DISPATCHER=$DISPATCHER out: --compare trains with alltoall and moeblaze, or" \
            "with the two that --dispatchers names" >&2
        exit 2
    fi
    if ((NODES > 1)); then
        echo "$0: --compare trains on one node, not on NODES=$NODES: set NODES=1, and after --" \
            "flags of a layout that fits it" >&2
        exit 2
    fi
    OPTIONS=()
    while (($#)) && [[ $1 != -- ]]; do
        OPTIONS+=("$1")
        shift
    done
    exec python -m moeblaze_megatron.compare --processes "$GPUS" "${OPTIONS[@]}" "${SCRIPT:---}" \
        "${FLAGS[@]}" "${@:2}"
fi

TORCHRUN=(torchrun --nproc-per-node "$GPUS")
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    TORCHRUN+=(--nnodes "$SLURM_NNODES" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"
        --rdzv-endpoint "${HEAD%%$'\n'*}:29500")
elif ((NODES > 1)); then
    TORCHRUN+=(--nnodes "$NODES" --node-rank "${NODE_RANK:?the number of this node, from 0}"
        --master-addr "${MASTER_ADDR:?the address of node 0}" --master-port 29500)
else
    TORCHRUN+=(--standalone)
fi

exec "${TORCHRUN[@]}" -m moeblaze_megatron ${SCRIPT:+"$SCRIPT"} \
    --moe-token-dispatcher-type "${DISPATCHER:-moeblaze}" "${FLAGS[@]}" "$@"
