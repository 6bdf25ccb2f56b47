#!/bin/sh
# dist.sh PYTHON FOLDER: builds wheel and source archive of every distribution into FOLDER, from the files that git tracks.
#
# The sources are staged, so that nothing is built in the checkout: each distribution gets the licence, and the trainer the example.
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2"
folder=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT
trap 'exit 130' INT TERM

git ls-files -z -- polyreme services examples/running_total pyproject.toml README.md LICENSE | tar --null -T - -c | tar -x -C "$staged"
mkdir "$staged/services/trainer/polyreme_trainer/example"
cp "$staged/examples/running_total/prepare.py" "$staged/examples/running_total/run.yaml" "$staged/services/trainer/polyreme_trainer/example/"
rm -f "$folder"/polyreme*.whl "$folder"/polyreme*.tar.gz
for part in services/environment services/reward services/rollout services/trainer .; do
    [ "$part" = . ] || cp "$staged/LICENSE" "$staged/$part/"
    [ "$part" != . ] || rm -rf "$staged/services" "$staged/examples"
    "$python" -m uv build -q --no-build-isolation --python "$python" --out-dir "$folder" "$staged/$part"
done
rm -f "$folder/.gitignore"
ls -lh "$folder"
