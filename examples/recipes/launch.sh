# Sourced by the recipes, which set FLAGS, and GPUS and NODES as defaults. In the environment:
#
#   DATA=PREFIX       Megatron's indexed dataset, PREFIX.bin and PREFIX.idx; else random tokens
#   DISPATCHER=NAME   moeblaze (default), alltoall, ...
#   GPUS, NODES       GPUs of a node, nodes
#   SCRIPT=PATH       pretrain_gpt.py of a Megatron-LM checkout; else the package's own script
#   MASTER_ADDR, NODE_RANK   with several nodes and without Slurm, where torchrun runs on each
#
# `--help` prints this, and a recipe's own head before it.
# `--dry-run` first prints the memory of each GPU with both dispatchers, and starts nothing.
# `--compare` first trains on one node with both dispatchers and reports; options of
# moeblaze_megatron.compare may follow, up to a `--`. Other arguments are added to Megatron's.

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    for FILE in "$0" "${BASH_SOURCE[0]}"; do
        sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$FILE"
        echo
    done
    exit
fi

WRONG=()
for NAME in GPUS NODES; do
    if [[ ! ${!NAME} =~ ^[1-9][0-9]*$ ]]; then
        WRONG+=("$NAME=${!NAME} is not a number of 1 or more")
    fi
done
case ${DISPATCHER:=} in
'' | moeblaze | alltoall | allgather | flex) ;;
*) WRONG+=("DISPATCHER=$DISPATCHER is not one of moeblaze, alltoall, allgather, flex") ;;
esac
if [[ -n ${SCRIPT:-} && ! -f $SCRIPT ]]; then
    WRONG+=("SCRIPT=$SCRIPT is not a file")
fi
if [[ -n ${DATA:-} && ${1:-} != --dry-run && ! (-f $DATA.bin && -f $DATA.idx) ]]; then
    WRONG+=("DATA=$DATA: there are no $DATA.bin and $DATA.idx; \`python -m moeblaze_megatron.quickstart \
--data-only --text FILES\` makes runs/quickstart/data/train of text")
fi
for WORD in "${@:2}"; do
    if [[ $WORD == --dry-run || $WORD == --compare ]]; then
        WRONG+=("$WORD has to be the first argument, and the only one of --dry-run and --compare")
    fi
done
if [[ ${1:-} == --compare ]]; then
    if [[ -n $DISPATCHER ]]; then
        WRONG+=("leave DISPATCHER=$DISPATCHER out: --compare trains with alltoall and moeblaze, or with \
the two that --dispatchers names")
    fi
    if [[ $NODES =~ ^[1-9][0-9]*$ ]] && ((NODES > 1)); then
        WRONG+=("--compare trains on one node, not on NODES=$NODES: set NODES=1, and after -- flags of \
a layout that fits it")
    fi
fi
if ((${#WRONG[@]})); then
    printf '%s\n' "${WRONG[@]/#/$0: }" >&2
    exit 2
fi

if [[ ${1:-} == --dry-run ]]; then
    shift
    exec python -m moeblaze_megatron.estimate --processes $((GPUS * NODES)) "${FLAGS[@]}" "$@"
fi

if [[ -n ${DATA:-} ]]; then
    FLAGS+=(--data-path "$DATA" --split 98,2,0)
else
    FLAGS+=(--mock-data)
fi

if [[ ${1:-} == --compare ]]; then
    shift
    OPTIONS=()
    while (($#)) && [[ $1 != -- ]]; do
        OPTIONS+=("$1")
        shift
    done
    exec python -m moeblaze_megatron.compare --processes "$GPUS" "${OPTIONS[@]}" "${SCRIPT:---}" \
        "${FLAGS[@]}" "${@:2}"
fi

if [[ ${1:-} == -- ]]; then # as behind --compare
    shift
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
