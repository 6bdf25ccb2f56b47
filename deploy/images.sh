#!/usr/bin/env bash
# images.sh [cpu|cuda|npu] [IMAGE ...]: builds the images of a device, or some of them, with OCI labels, and writes an SBOM of each into
# dist/images. With REGISTRY, as in REGISTRY=registry.example.org/polyreme, pushes them and writes their digests into
# dist/images/values.yaml, for the Helm chart.
#
# docs/deploy.md lists the build arguments; a variable of such a name is passed on. Base images of a registry are pinned by the digest that
# they have now, which a label records.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cpu}
wanted=" ${*:2} "
[ "$wanted" != "  " ] || wanted=" reward rollout trainer "
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD)
git diff --quiet HEAD || revision+=-dirty
out=dist/images
mkdir -p "$out"

# An image's reference by digest, if a registry has it; else the name of a local image.
pinned() {
    docker image inspect "$1" >/dev/null 2>&1 || docker pull -q "$1" >/dev/null
    docker image inspect -f "{{with .RepoDigests}}{{index . 0}}{{else}}$1{{end}}" "$1"
}

PYTHON_IMAGE=$(pinned "${PYTHON_IMAGE:-python:3.11-slim-bookworm}") base=$PYTHON_IMAGE
case $device in
cpu) ;;
cuda) CUDA_IMAGE=$(pinned "${CUDA_IMAGE:-python:3.11-bookworm}") base=$CUDA_IMAGE ;;
npu) NPU_IMAGE=$(pinned "${NPU_IMAGE:-quay.io/ascend/vllm-ascend:v0.23.0}") base=$NPU_IMAGE ;;
*) echo "expected cpu, cuda or npu; found $device" >&2; exit 2 ;;
esac
arguments=()
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_NO_INDEX; do arguments+=(--build-arg "$name=${!name:-}"); done # as compose: one cache
for name in PYTHON_IMAGE CUDA_IMAGE NPU_IMAGE TORCH_INDEX CUDA_TORCH_INDEX WHEELS CERTIFICATES; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done

build() { # IMAGE TARGET TAG BASE
    local label=org.opencontainers.image labels=() digest=''
    [ "${4/@/}" = "$4" ] || digest=${4#*@}
    for pair in "title=polyreme/$1" "version=$version" "revision=$revision" "created=$(git show -s --format=%cI HEAD)" \
        licenses=Apache-2.0 "base.name=${4%@*}" ${digest:+"base.digest=$digest"}; do
        labels+=(--label "$label.$pair")
    done
    docker build ${NETWORK:+--network "$NETWORK"} -f "deploy/docker/$1.Dockerfile" --target "$2" -t "polyreme/$1:$3" \
        "${labels[@]}" "${arguments[@]}" .
    docker run --rm -i --network none --entrypoint python3 "polyreme/$1:$3" - "polyreme/$1" "$version" \
        <deploy/docker/sbom.py >"$out/$1-$3.cdx.json"
    [ -z "${REGISTRY:-}" ] || publish "$1" "$3"
}

publish() { # IMAGE TAG
    local there=$REGISTRY/$1:$version-$2
    there=${there%-latest}
    docker tag "polyreme/$1:$2" "$there"
    docker push -q "$there"
    docker image inspect -f '{{range .RepoDigests}}{{println .}}{{end}}' "$there" | sed -n "s#^\($REGISTRY/$1\)@\(.*\)#  $1: {repository: \1, digest: \"\2\"}#p" >>"$out/values.yaml"
}

[ -z "${REGISTRY:-}" ] || printf '%s\n' "device: $device" images: >"$out/values.yaml"
[[ $wanted != *" reward "* ]] || build reward reward latest "$PYTHON_IMAGE"
for image in rollout trainer; do
    [[ $wanted != *" $image "* ]] || build "$image" "$device" "$device" "$base"
done
ls "$out"
