#!/usr/bin/env bash
# One region as a job of Hugging Face Jobs: BUCKET=NAME/BUCKET region.sh REGION [more options of hf-cocodc train]
# Start it once for each region, with the same options. The bucket holds recipe.yaml and a wheel of hf_cocodc; the regions meet in its
# folder `meeting`, and each copies its model into `models` at the end. The environment has HF_TOKEN and HF_COCODC_SECRET.
set -euo pipefail
: "${BUCKET:?names a bucket: BUCKET=NAME/BUCKET}" "${HF_COCODC_SECRET:?is the secret of the run: \$(cat secret)}"

# --resume and --attempts: a job that has failed is started again on an empty disk, and joins the run if others train it.
# The bucket is mounted for reading only: regions meet through its URL, because mounts see each other's files late.
hf jobs run --detach --name "region-$1" \
    --flavor "${FLAVOR:-l4x1}" --timeout "${TIMEOUT:-12h}" --attempts "${ATTEMPTS:-5}" \
    --secrets HF_TOKEN --secrets HF_COCODC_SECRET \
    --env BUCKET="$BUCKET" --env HF_COCODC_REGION="$1" --env HF_COCODC_COORDINATOR="hf://buckets/$BUCKET/meeting" \
    --volume "hf://buckets/$BUCKET:/bucket:ro" \
    "${IMAGE:-python:3.12}" bash -c '
        set -e
        pip install -q /bucket/*.whl
        hf-cocodc train /bucket/recipe.yaml --resume --set training.output_dir=runs/job "$@"
        folder=region-$HF_COCODC_REGION
        [ ! -d "runs/job/$folder" ] ||  # a job that comes back after the end finds nothing to do
            hf buckets sync --exclude "checkpoint-*" "runs/job/$folder" "hf://buckets/$BUCKET/models/$folder"
    ' bash "${@:2}"
