#!/bin/bash
# The runs of a comparison as tasks of a Slurm array; each is resumed where its time, or its machine, ended.
#
#   scalelong compare cifar10-tiny-uvit --seeds 5 --jobs > jobs.txt
#   sbatch --array=1-$(wc -l < jobs.txt)%8 slurm_array.sh jobs.txt
#   scalelong compare cifar10-tiny-uvit --seeds 5 --collect
#
#SBATCH --job-name=scalelong
#SBATCH --gpus=1
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A-%a.log
# Two minutes before its time ends, or when the task is preempted, this script is told, and saves the run.
#SBATCH --signal=B:TERM@120

task=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
command=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$1")
export SCALELONG_SUPERVISED=1  # The same signal twice is no reason to end without saving.

told=0
trap 'told=1; kill -TERM "$run"' TERM
eval "$command" &
run=$!
wait "$run"
code=$?
while [ "$told" = 1 ]; do  # A signal ends the wait, not the run.
    told=0
    wait "$run"
    code=$?
done

if [ "$code" = 143 ]; then
    scontrol requeue "$task"
fi
exit "$code"
